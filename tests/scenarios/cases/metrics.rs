//! What the plugin counts, and says of how it is.

use std::fs;

use anyhow::{Result, ensure};
use serde_json::json;

use super::requests::ask;
use crate::restarted::Before;
use crate::scenario::{Scenario, scenarios};
use crate::scrape::{Answer, Metrics};
use crate::shape::Shape;
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

const RESTARTS: &str = "reprise_restarts_total";

pub(crate) fn scenarios() -> Vec<Scenario> {
    scenarios![Alone:
        metrics_count_each_restart_once_and_what_belongs_to_it,
        metrics_tell_what_has_set_restarts_off_and_which_have_waited,
        readyz_says_what_lacks_while_the_runtime_is_away,
        healthz_fails_while_hooks_find_no_socket,
        plugin_that_waits_is_ready_for_whoever_replaces_the_other,
    ]
}

/// Counts from now on, whatever the plugin has done before.
async fn begin_at_zero(stage: &Stage) -> Result<()> {
    stage.plugin.stop().await?;
    stage.plugin.start().await?;
    stage.plugin.until_ready(1).await
}

/// When so many restarts have been counted: they are over a moment after all runs again.
async fn after_restarts(stage: &Stage, wanted: u64) -> Result<Metrics> {
    wait::until("all restarts are counted", PATIENCE, async || {
        let metrics = stage.plugin.metrics().await?;
        let found = metrics.count(RESTARTS, &[])?;
        let over = metrics.count("reprise_restarts_under_way", &[])? == 0;
        Ok(if found == wanted && over {
            Ok(metrics)
        } else {
            Err(format!("{found} of {wanted}"))
        })
    })
    .await
}

async fn metrics_count_each_restart_once_and_what_belongs_to_it(stage: Stage) -> Result<()> {
    begin_at_zero(&stage).await?;
    let never = || {
        Shape::never()
            .regular("trainer")
            .regular("logger")
            .restarts_all("trainer", 42)
    };
    let replayed = stage.running(never().started_by("Replay")).await?;
    let started = stage.running(never().started_by("Kubelet")).await?;
    let cleared = never().init("setup").started_by("Kubelet");
    let cleared = stage.running(cleared).await?;
    replayed.restarts_all("trainer", 42).await?;
    started.restarts_all("trainer", 42).await?;
    cleared.restarts_all("trainer", 42).await?;
    // Nothing is asked for, and the pod is the kubelet's to fail.
    let unmatched = stage.running(never()).await?;
    unmatched.exit("trainer", 7).await?;
    unmatched.until_state("trainer", "exit 7 (Error)").await?;

    let metrics = after_restarts(&stage, 3).await?;
    let all = "action=\"RestartAllContainers\",trigger=\"exit\"";
    let of = |way| {
        let way = format!("way=\"{way}\"");
        metrics.count(RESTARTS, &[all, &way, "outcome=\"Restarted\""])
    };
    let ways = [of("replay")?, of("placeholders")?, of("cleared")?];
    ensure!(ways == [1, 1, 1], "{metrics:?}");
    for phase in ["killed", "first_running", "all_running"] {
        let measured = |way| {
            let series = format!("reprise_exit_to_{phase}_seconds_count");
            metrics.count(&series, &[&format!("way=\"{way}\"")])
        };
        let measured = [measured("replay")?, measured("placeholders")?];
        ensure!(measured == [1, 1], "{phase}: {metrics:?}");
    }
    let counts = [
        ("reprise_replays_declined_total", 2),
        ("reprise_restarts_begun_anew_total", 0),
        ("reprise_unmatched_exits_total", 1),
        ("reprise_back_off_seconds_count", 0),
        ("reprise_pods_backing_off", 0),
        ("reprise_nri_connected", 1),
        ("reprise_nri_reconnects_total", 0),
        ("reprise_build_info", 1),
    ];
    for (series, wanted) in counts {
        let found = metrics.count(series, &[])?;
        ensure!(
            found == wanted,
            "{series} is {found}, not {wanted}: {metrics:?}"
        );
    }
    let declined = metrics.count("reprise_replays_declined_total", &["reason=\"asked\""])?;
    ensure!(declined == 2, "{metrics:?}");
    // The kubelet shows by what it wants that it has recorded the placeholders.
    let refused = metrics.count("reprise_gate_refusals_total", &["reason=\"not_yet\""])?;
    ensure!(refused > 0, "{metrics:?}");
    // Both of each restart. What no rule matches need not be held, if its code is known when its hook asks.
    let held = metrics.count("reprise_exit_hold_seconds_count", &[])?;
    ensure!(held == 6 || held == 7, "{held} exits were held");
    let created = "event=\"CreateContainer\"";
    let created = metrics.count("reprise_nri_handler_seconds_count", &[created])?;
    ensure!(created >= 10, "only {created} containers were created");
    Ok(())
}

async fn metrics_tell_what_has_set_restarts_off_and_which_have_waited(stage: Stage) -> Result<()> {
    begin_at_zero(&stage).await?;
    let rule = json!({"action": "RestartAllContainers", "onSignal": ["SIGSEGV"]});
    let shape = Shape::never()
        .regular("trainer")
        .rules("trainer", &json!([rule]));
    let pod = stage.running(shape).await?;
    let before = Before::of(&pod).await?;
    ask(&pod, "a").await?;
    pod.has_restarted(&before).await?;
    // A request is no crash: the third waits, right after the second.
    after_restarts(&stage, 1).await?;
    for count in [2, 3] {
        pod.exit("trainer", 139).await?;
        after_restarts(&stage, count).await?;
        pod.until_listening("trainer").await?;
    }
    let metrics = stage.plugin.metrics().await?;
    let by = |trigger| {
        let trigger = format!("trigger=\"{trigger}\"");
        metrics.count(RESTARTS, &[&trigger, "outcome=\"Restarted\""])
    };
    let by = [by("signal")?, by("request")?, by("exit")?];
    let waited = metrics.count("reprise_back_off_seconds_count", &[])?;
    ensure!((by, waited) == ([2, 1, 0], 1), "{metrics:?}");
    Ok(())
}

async fn until_answer(stage: &Stage, path: &str, wanted: Answer) -> Result<()> {
    wait::until(&format!("{path} says so"), PATIENCE, async || {
        let answer = stage.plugin.get(path).await?;
        Ok(if answer == wanted {
            Ok(())
        } else {
            Err(format!("{answer:?}"))
        })
    })
    .await
}

fn answer(status: u16, text: &str) -> Answer {
    let text = format!("{text}\n");
    Answer { status, text }
}

async fn readyz_says_what_lacks_while_the_runtime_is_away(stage: Stage) -> Result<()> {
    begin_at_zero(&stage).await?;
    until_answer(&stage, "/readyz", answer(200, "ok")).await?;
    stage.node.script("kill", &stage.node.runtime_name).await?;
    let lacks = "not registered with NRI\nthe runtime does not answer on its CRI socket";
    let told = until_answer(&stage, "/readyz", answer(503, lacks)).await;
    // A new process could not do better.
    let well = stage.plugin.get("/healthz").await;
    stage.node.script("start", &stage.node.runtime_name).await?;
    told?;
    ensure!(well? == answer(200, "ok"), "the plugin calls itself ill");
    until_answer(&stage, "/readyz", answer(200, "ok")).await?;
    let reconnects = wait::until("the connection is counted", PATIENCE, async || {
        let metrics = stage.plugin.metrics().await?;
        let connected = metrics.count("reprise_nri_connected", &[])? == 1;
        let reconnects = metrics.count("reprise_nri_reconnects_total", &[])?;
        Ok(connected
            .then_some(reconnects)
            .ok_or_else(|| "not yet".to_owned()))
    });
    ensure!(reconnects.await? == 1);
    Ok(())
}

/// What the plugin would make again, but cannot.
async fn healthz_fails_while_hooks_find_no_socket(stage: Stage) -> Result<()> {
    let socket = stage.plugin.run_dir().join("hook.sock");
    until_answer(&stage, "/healthz", answer(200, "ok")).await?;
    fs::remove_file(&socket)?;
    fs::create_dir(&socket)?;
    let gone = until_answer(&stage, "/healthz", answer(503, "the hooks' socket is gone"));
    let gone = gone.await;
    fs::remove_dir(&socket)?;
    gone?;
    until_answer(&stage, "/healthz", answer(200, "ok")).await?;
    let shape = Shape::never().regular("trainer");
    let pod = stage.running(shape.restarts_all("trainer", 42)).await?;
    pod.restarts_all("trainer", 42).await
}

/// A `DaemonSet` that replaces one with the other waits for that (`maxSurge`).
async fn plugin_that_waits_is_ready_for_whoever_replaces_the_other(stage: Stage) -> Result<()> {
    stage.plugin.have_successor().await?;
    let waits = "ok: waiting for the end of another plugin, which is at work";
    until_answer(&stage, "/readyz", answer(200, waits)).await?;
    stage.plugin.stop().await?;
    stage.plugin.succeed().await?;
    until_answer(&stage, "/readyz", answer(200, "ok")).await
}
