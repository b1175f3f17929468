//! What is known of restarts that are over: the node's history, the pod's own count, and events that count.

use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::Event;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;
use tokio::time::timeout;

use super::conditions::until_last_restart;
use crate::plugin::Phase;
use crate::pod::LivePod;
use crate::restarted::Before;
use crate::scenario::{Scenario, scenarios};
use crate::shape::{Shape, restart_all_on, rule};
use crate::stage::Stage;
use crate::under_way::UnderWay;
use crate::wait::{self, PATIENCE, stretched};

/// Until the kubelet has made another sandbox.
const ANOTHER_SANDBOX: Duration = Duration::from_mins(3);
/// In a row, without a back-off.
const MANY: i32 = 8;
/// The second restart in a row waits for so long, in milliseconds, less the time since the first.
const BACK_OFF: u64 = 30_000;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = scenarios![Shared:
        history_has_each_restart_with_its_rule_its_times_and_its_end,
        whoever_watches_the_history_is_told_of_a_restart_when_it_is_over,
        number_of_restarts_goes_on_in_another_sandbox,
    ];
    scenarios.extend(scenarios![Alone:
        history_goes_on_when_the_plugin_is_told_to_end_and_when_it_is_killed,
        many_restarts_are_few_events_that_count,
    ]);
    scenarios
}

/// `reprise history`, on that plugin's node.
fn history(stage: &Stage, arguments: &[&str]) -> Command {
    let mut command = Command::new(&stage.plugin.binary);
    command.arg("history").args(arguments);
    command.arg("--state-dir").arg(stage.plugin.state_dir());
    command.kill_on_drop(true);
    command
}

async fn shown(stage: &Stage, arguments: &[&str]) -> Result<Output> {
    Ok(history(stage, arguments).output().await?)
}

/// What it says of the pod, once that is so many restarts.
pub(super) async fn until_told(stage: &Stage, pod: &LivePod, count: usize) -> Result<Vec<Value>> {
    let what = format!("the history has {count} restarts");
    wait::until(&what, PATIENCE, async || {
        let shown = shown(stage, &[&pod.name, "-o", "json"]).await?;
        let entries: Vec<Value> = serde_json::from_slice(&shown.stdout).unwrap_or_default();
        let enough = entries.len() == count;
        Ok(enough
            .then_some(entries)
            .ok_or_else(|| format!("{shown:?}")))
    })
    .await
}

async fn history_has_each_restart_with_its_rule_its_times_and_its_end(stage: Stage) -> Result<()> {
    let rules = json!([rule("Restart", "In", &[41]), restart_all_on(&[42])]);
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .rules("trainer", &rules);
    let pod = stage.running(shape).await?;
    let none = shown(&stage, &[&pod.name]).await?;
    let said = String::from_utf8_lossy(&none.stderr);
    ensure!(
        none.status.code() == Some(1) && said.contains(&pod.name),
        "{none:?}"
    );
    pod.restarts_all("trainer", 42).await?;
    let entry = until_told(&stage, &pod, 1).await?.remove(0);
    let expected = json!({
        "container": "trainer",
        "exitCode": 42,
        "rule": {"number": 2, "source": "restart-rules.reprise.dev/container.trainer", "by": "exitCodes"},
        "action": "RestartAllContainers",
        "outcome": "Restarted",
        "restarts": 1,
        "uid": pod.uid,
        "backOffMs": 0,
    });
    for (key, value) in expected.as_object().into_iter().flatten() {
        ensure!(entry[key] == *value, "{key}: {entry}");
    }
    let way = entry["way"].as_str().context("no way")?;
    pod.restart_ended(way)?;
    let times = ["killedMs", "firstRunningMs", "allRunningMs"].map(|key| entry[key].as_u64());
    let times: Option<Vec<u64>> = times.into_iter().collect();
    ensure!(times.is_some_and(|it| it.is_sorted()), "{entry}");
    let table = shown(&stage, &[&pod.name, "--output", "table"]).await?;
    let table = String::from_utf8(table.stdout)?;
    ensure!(table.contains("trainer exit 42"), "{table}");
    Ok(())
}

async fn whoever_watches_the_history_is_told_of_a_restart_when_it_is_over(
    stage: Stage,
) -> Result<()> {
    let shape = Shape::never()
        .regular("trainer")
        .restarts_all("trainer", 42);
    let pod = stage.running(shape).await?;
    let mut watching = history(&stage, &[&pod.name, "--watch", "-o", "json"]);
    let mut watching = watching.stdout(Stdio::piped()).spawn()?;
    let lines = watching.stdout.take().context("no output")?;
    let mut lines = BufReader::new(lines).lines();
    pod.restarts_all("trainer", 42).await?;
    let line = timeout(stretched(PATIENCE), lines.next_line()).await??;
    let entry: Value = serde_json::from_str(&line.context("it ended")?)?;
    ensure!(entry["outcome"] == "Restarted", "{entry}");
    watching.kill().await?;
    ensure!(lines.next_line().await?.is_none(), "told twice");
    Ok(())
}

async fn history_goes_on_when_the_plugin_is_told_to_end_and_when_it_is_killed(
    stage: Stage,
) -> Result<()> {
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42)
        .backs_off(BACK_OFF / 1000);
    let pod = stage.running(shape).await?;
    pod.restarted("trainer", 42).await?;
    until_told(&stage, &pod, 1).await?;
    stage.plugin.stop().await?;
    stage.plugin.start().await?;
    stage.plugin.until_ready(1).await?;
    // In its back-off there is time to look.
    let restart = UnderWay::of(pod).await?;
    if !restart.reaches(Phase::Up).await? {
        bail!("it has not waited");
    }
    stage.plugin.kill().await?;
    let UnderWay { pod, before } = &restart;
    let entries = until_told(&stage, pod, 2).await?;
    let outcomes = [0, 1].map(|at| entries[at]["outcome"].as_str().unwrap_or_default());
    ensure!(outcomes == ["UnderWay", "Restarted"], "{entries:?}");
    stage.plugin.start().await?;
    stage.plugin.until_ready(1).await?;
    pod.has_restarted(before).await?;
    restart.until_over().await?;
    wait::until("the history has its end", PATIENCE, async || {
        let entries = until_told(&stage, pod, 2).await?;
        let over = entries.iter().all(|it| it["outcome"] == "Restarted");
        let counts = [0, 1].map(|at| entries[at]["restarts"].as_i64());
        let waited = entries[0]["backOffMs"].as_u64() > Some(BACK_OFF / 6);
        let is_so = over && waited && counts == [Some(2), Some(1)];
        Ok(is_so.then_some(()).ok_or_else(|| format!("{entries:?}")))
    })
    .await
}

/// Nobody else knows of the first: what was kept of the sandbox has gone with it.
async fn number_of_restarts_goes_on_in_another_sandbox(stage: Stage) -> Result<()> {
    let shape = Shape::always()
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42);
    let pod = stage.running(shape).await?;
    pod.restarts_all("trainer", 42).await?;
    until_last_restart(
        &pod,
        "Restart 1: container trainer exited with code 42 (rule 1), ",
    )
    .await?;
    let before = Before::of(&pod).await?;
    stage.node.runtime.stop_sandbox(&before.sandbox).await?;
    for container in ["trainer", "logger"] {
        pod.until_container_is_new(&before, container, ANOTHER_SANDBOX)
            .await?;
    }
    pod.until_running().await?;
    pod.exit("trainer", 42).await?;
    until_last_restart(&pod, "Restart 2: ").await
}

async fn many_restarts_are_few_events_that_count(stage: Stage) -> Result<()> {
    stage.plugin.configure("back-off: 0\n").await?;
    // The kubelet has a back-off of its own.
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42)
        .started_by("Auto");
    let pod = stage.running(shape).await?;
    for _ in 0..MANY {
        pod.restarted("trainer", 42).await?;
    }
    // Where one was not replayed in time, there is one more.
    let decided = stage.plugin.log_lines(&pod.name)?;
    let decided = decided.iter().filter(|it| it.contains(" in place, "));
    let restarts = i32::try_from(decided.count())?;
    ensure!(restarts >= MANY, "{restarts} restarts");
    for reason in ["RestartingAllContainers", "RestartedAllContainers"] {
        let events = until_counted(&pod, reason, restarts).await?;
        // Now and then one falls back on the kubelet.
        let ways = if reason == "RestartedAllContainers" {
            2
        } else {
            1
        };
        ensure!(events.len() <= ways, "{events:?}");
    }
    for reason in ["Created", "Started"] {
        let ours = ours(&pod, reason).await?;
        ensure!(ours.len() <= pod.shape.containers.len(), "{ours:?}");
    }
    Ok(())
}

async fn ours(pod: &LivePod, reason: &str) -> Result<Vec<Event>> {
    let mut events = pod.events(reason).await?;
    events.retain(|it| it.reporting_component.as_deref() == Some("reprise"));
    Ok(events)
}

async fn until_counted(pod: &LivePod, reason: &str, count: i32) -> Result<Vec<Event>> {
    wait::until("events have counted", PATIENCE, async || {
        let events = ours(pod, reason).await?;
        let counted: i32 = events.iter().filter_map(|it| it.count).sum();
        let all = counted == count;
        Ok(all.then_some(events).ok_or_else(|| format!("{counted}")))
    })
    .await
}
