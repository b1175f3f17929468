//! `action: RestartPod`: containers get time to stop (the earlier draft of KEP-5532).

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kube::api::DeleteParams;
use serde_json::{Value, json};

use super::probes::probe;
use super::under;
use crate::evidence::{self, Deed, Entry};
use crate::pod::LivePod;
use crate::recorder::Snapshot;
use crate::restarted::Before;
use crate::scenario::{Company, Scenario, of_containerd, scenarios, taking_long};
use crate::shape::RestartPolicy::{Always, Never, OnFailure};
use crate::shape::{Shape, rule};
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

const CLEAN_END: &str = r#"say "note asked"; sleep 1; say "note stopped"; exit 0"#;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let policies = &[Never, OnFailure, Always];
    let minutes = [
        under(
            policies,
            "may_take_a_minute_to_stop_although_the_kubelet_is_restarted",
            may_take_a_minute,
        ),
        under(
            policies,
            "that_takes_a_minute_to_stop_although_the_kubelet_is_restarted_is_replayed",
            is_replayed_after_a_minute,
        ),
    ];
    let mut minutes = taking_long(minutes.concat());
    for scenario in &mut minutes {
        scenario.company = Company::Alone;
    }
    [
        under(
            policies,
            "gives_its_containers_time_to_stop",
            gives_time_to_stop,
        ),
        under(
            &[Never, Always],
            "kills_what_ignores_sigterm_when_the_time_is_up",
            kills_when_the_time_is_up,
        ),
        under(
            &[Never, Always],
            "gives_its_containers_time_to_stop_when_a_sidecar_says_so",
            sidecar_says_so,
        ),
        under(
            &[Never, Always],
            "gives_its_containers_time_to_stop_when_an_init_container_says_so",
            init_container_says_so,
        ),
        under(
            &[Never, Always],
            "has_as_long_to_stop_as_when_it_ends",
            has_as_long_as_when_it_ends,
        ),
        under(
            &[Never, Always],
            "with_time_to_stop_is_replayed",
            is_replayed_after_its_stop,
        ),
        minutes,
        scenarios![Shared:
            pre_stop_hooks_of_each_kind_run_before_a_restart,
            pre_stop_hooks_that_fail_are_told_of_and_stop_nothing,
            pre_stop_hook_that_hangs_takes_no_more_than_the_time_to_stop,
            sidecars_stop_after_the_others_in_reverse_order,
            completed_containers_run_again_after_the_others_have_stopped,
            restart_all_containers_gives_no_time_to_stop,
        ],
        of_containerd(
            "CRI-O does not know that a container was asked to stop, and asks it once more",
            scenarios![Shared:
                pod_that_is_deleted_while_it_stops_has_the_time_that_it_is_due,
                container_that_stops_is_not_killed_for_its_liveness_probe,
            ],
        ),
    ]
    .concat()
}

/// The pod's own grace period is for its deletion, and nothing here.
fn graceful(shape: Shape, action: &str) -> Shape {
    shape
        .init("fetch")
        .sidecar("proxy")
        .on_term(CLEAN_END)
        .regular("trainer")
        .regular("logger")
        .on_term(CLEAN_END)
        .with_pre_stop()
        .rules("trainer", &json!([rule(action, "In", &[42])]))
        .options(&json!({"gracePeriodSeconds": 3}))
        .grace_period_seconds(3600)
}

/// The lifecycle of a container with that hook.
fn pre_stop(handler: &Value) -> Value {
    json!({"preStop": handler})
}

/// What was written from the trigger's exit to the end of the restart.
async fn restarted(stage: &Stage, shape: Shape) -> Result<Vec<Entry>> {
    let pod = stage.running(shape).await?;
    let before = pod.restarted("trainer", 42).await?;
    pod.evidence_since(&before)
}

fn at(entries: &[Entry], container: &str, deed: &Deed) -> Result<Duration> {
    let entry = entries
        .iter()
        .find(|entry| entry.container == container && entry.deed == *deed)
        .with_context(|| format!("{deed:?} of {container} is not in {entries:?}"))?;
    Ok(entry.at)
}

/// From the exit that asked for the restart.
fn until_began(entries: &[Entry], container: &str) -> Result<Duration> {
    let exit = at(entries, "trainer", &Deed::Exited(42))?;
    let began = at(entries, container, &Deed::Began)?;
    began.checked_sub(exit).context("it began before the exit")
}

fn noted(word: &str) -> Deed {
    Deed::Noted(word.to_owned())
}

/// preStop hooks at once, the sidecar's signal when the others have stopped.
async fn gives_time_to_stop(stage: Stage, shape: Shape) -> Result<()> {
    let entries = restarted(&stage, graceful(shape, "RestartPod")).await?;
    let fetched = at(&entries, "fetch", &Deed::Began)?;
    for container in ["proxy", "logger"] {
        let (warned, asked, end) = (
            at(&entries, container, &Deed::Warned)?,
            at(&entries, container, &noted("asked"))?,
            at(&entries, container, &noted("stopped"))?,
        );
        let in_order = warned < asked && end < fetched;
        ensure!(in_order, "{container} had not stopped: {entries:?}");
    }
    let end = at(&entries, "logger", &noted("stopped"))?;
    let (warned, asked) = (
        at(&entries, "proxy", &Deed::Warned)?,
        at(&entries, "proxy", &noted("asked"))?,
    );
    ensure!(
        warned < end && end < asked,
        "the sidecar did not wait: {entries:?}"
    );
    let trigger = entries.iter().filter(|it| it.container == "trainer");
    let warned = trigger.filter(|it| it.deed == Deed::Warned).count();
    ensure!(warned == 0, "the trigger's hook was run: {entries:?}");
    Ok(())
}

/// Lets `trigger` ask for it with 42. `other`, which ran, has stopped before `first` begins again.
async fn other_stops_before(pod: &LivePod, trigger: &str, other: &str, first: &str) -> Result<()> {
    let before = pod.restarted(trigger, 42).await?;
    let entries = pod.evidence_since(&before)?;
    let end = at(&entries, other, &noted("stopped"))?;
    let began = at(&entries, first, &Deed::Began)?;
    ensure!(end < began, "{other} had not stopped: {entries:?}");
    Ok(())
}

async fn sidecar_says_so(stage: Stage, shape: Shape) -> Result<()> {
    let shape = shape
        .init("fetch")
        .sidecar("proxy")
        .regular("logger")
        .on_term(CLEAN_END)
        .restarts_pod("proxy", 42);
    let pod = stage.running(shape).await?;
    other_stops_before(&pod, "proxy", "logger", "fetch").await
}

/// Nothing but a sidecar runs beside one.
async fn init_container_says_so(stage: Stage, shape: Shape) -> Result<()> {
    let shape = shape
        .sidecar("proxy")
        .on_term(CLEAN_END)
        .waiting_init("prepare")
        .regular("trainer")
        .restarts_pod("prepare", 42);
    let pod = stage.pod(shape).await?;
    pod.until_container_runs("prepare").await?;
    other_stops_before(&pod, "prepare", "proxy", "proxy").await
}

async fn kills_when_the_time_is_up(stage: Stage, shape: Shape) -> Result<()> {
    let shape = graceful(shape, "RestartPod").regular("server").on_term("");
    let entries = restarted(&stage, shape).await?;
    at(&entries, "logger", &noted("stopped"))?;
    let took = until_began(&entries, "fetch")?;
    // Its pod's own is an hour.
    let (shortest, longest) = (Duration::from_secs(3), PATIENCE);
    ensure!(took >= shortest && took < longest, "its time was {took:?}");
    Ok(())
}

/// Its containers have the pod's own grace period, and more than exits can be held.
fn as_long_as_when_it_ends(shape: Shape) -> Shape {
    shape
        .regular("trainer")
        .regular("logger")
        .on_term(r#"say "note asked"; sleep 20; say "note stopped"; exit 0"#)
        .grace_period_seconds(30)
        .restarts_pod("trainer", 42)
}

/// The kubelet sees meanwhile that the trigger waits.
async fn has_as_long_as_when_it_ends(stage: Stage, shape: Shape) -> Result<()> {
    let pod = stage.running(as_long_as_when_it_ends(shape)).await?;
    let before = pod.restarted("trainer", 42).await?;
    let entries = pod.evidence_since(&before)?;
    let end = at(&entries, "logger", &noted("stopped"))?;
    let began = at(&entries, "trainer", &Deed::Began)?;
    ensure!(end < began, "the trigger began before: {entries:?}");
    let took = until_began(&entries, "logger")?;
    ensure!(took < PATIENCE, "it took {took:?}");
    let seen = pod.seen_since(&before);
    let runs = |it: &Snapshot, name: &str| it.containers.get(name).is_some_and(|it| it.is_running);
    let mut stopping = seen.iter().filter(|it| !runs(it, "trainer"));
    let first = stopping
        .next()
        .context("the trigger was never seen to wait")?;
    ensure!(runs(first, "logger"), "seen when all had stopped: {first}");
    let ready = stopping.chain([first]).find(|it| it.ready);
    ensure!(ready.is_none(), "Ready while it stopped: {ready:?}");
    Ok(())
}

async fn is_replayed_after_its_stop(stage: Stage, shape: Shape) -> Result<()> {
    let shape = as_long_as_when_it_ends(shape).started_by("Auto");
    let pod = stage.running(shape).await?;
    let before = pod.restarted("trainer", 42).await?;
    let entries = pod.evidence_since(&before)?;
    at(&entries, "logger", &noted("stopped"))?;
    pod.was_started_again_by("Auto")
}

async fn may_take_a_minute(stage: Stage, shape: Shape) -> Result<()> {
    takes_a_minute(stage, shape.init("fetch"), "Kubelet").await
}

async fn is_replayed_after_a_minute(stage: Stage, shape: Shape) -> Result<()> {
    takes_a_minute(stage, shape, "Auto").await
}

/// Seven times as long as any hold, and the kubelet forgets what it was told.
async fn takes_a_minute(stage: Stage, shape: Shape, start: &str) -> Result<()> {
    let shape = shape
        .regular("trainer")
        .regular("logger")
        .on_term(r#"say "note asked"; sleep 60; say "note stopped"; exit 0"#)
        .started_by(start)
        .grace_period_seconds(90)
        .restarts_pod("trainer", 42);
    let pod = stage.running(shape).await?;
    let before = Before::of(&pod).await?;
    pod.exit("trainer", 42).await?;
    // The kubelet knows that it waits, and forgets it.
    pod.until_state("trainer", "waiting").await?;
    stage.node.script("kill", "kubelet").await?;
    stage.node.script("start", "kubelet").await?;
    let stopped = "the logger has stopped";
    wait::until(stopped, 2 * PATIENCE, async || {
        let notes = pod.notes_since(&before)?;
        let stopped = notes.contains(&"stopped".to_owned());
        Ok(stopped.then_some(()).ok_or_else(|| format!("{notes:?}")))
    })
    .await?;
    pod.has_restarted(&before).await?;
    pod.was_started_again_by(start)?;
    let entries = pod.evidence_since(&before)?;
    let end = at(&entries, "logger", &noted("stopped"))?;
    let began = entries.iter().find(|it| it.deed == Deed::Began);
    let began = began.context("nothing has begun")?.at;
    ensure!(end < began, "it began before: {entries:?}");
    Ok(())
}

/// Answers one request, and notes what was asked for.
const LISTEN: &str = r#"
cat >/answer <<'END'
#!/bin/sh
read -r line
echo "$EPOCHREALTIME server note $(echo "$line" | tr -d '\r' | tr ' ' '_')" >>/ev/log
printf 'HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n'
END
chmod +x /answer
nc -l -p 8080 -e /answer &
"#;

async fn pre_stop_hooks_of_each_kind_run_before_a_restart(stage: Stage) -> Result<()> {
    let command = "echo $EPOCHREALTIME logger prestop >>/ev/log";
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .on_term(CLEAN_END)
        .field(
            "lifecycle",
            pre_stop(&json!({"exec": {"command": ["/bin/sh", "-c", command]}})),
        )
        .regular("server")
        .at_first(LISTEN)
        .on_term(CLEAN_END)
        .field("ports", json!([{"name": "stop", "containerPort": 8080}]))
        .field(
            "lifecycle",
            pre_stop(&json!({"httpGet": {"port": "stop", "path": "/stop?now"}})),
        )
        .regular("sleeper")
        .on_term(CLEAN_END)
        .field("lifecycle", pre_stop(&json!({"sleep": {"seconds": 3}})))
        .grace_period_seconds(20)
        .restarts_pod("trainer", 42);
    let pod = stage.running(shape).await?;
    let before = pod.restarted("trainer", 42).await?;
    let entries = pod.evidence_since(&before)?;
    let exit = at(&entries, "trainer", &Deed::Exited(42))?;
    let warned = at(&entries, "logger", &Deed::Warned)?;
    let asked = at(&entries, "logger", &noted("asked"))?;
    ensure!(warned < asked, "the command came late: {entries:?}");
    let got = at(&entries, "server", &noted("GET_/stop?now_HTTP/1.1"))?;
    let asked = at(&entries, "server", &noted("asked"))?;
    ensure!(got < asked, "the request came late: {entries:?}");
    let slept = at(&entries, "sleeper", &noted("asked"))?;
    let hook = exit + Duration::from_secs(3);
    ensure!(slept >= hook, "it did not sleep: {entries:?}");
    let failed = pod.events("FailedPreStopHook").await?;
    ensure!(failed.is_empty(), "hooks failed: {failed:?}");
    Ok(())
}

/// The API takes hooks that connect, and the kubelet runs none.
async fn pre_stop_hooks_that_fail_are_told_of_and_stop_nothing(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .on_term(CLEAN_END)
        .field(
            "lifecycle",
            pre_stop(&json!({"exec": {"command": ["/bin/false"]}})),
        )
        .regular("server")
        .on_term(CLEAN_END)
        .field("lifecycle", pre_stop(&json!({"tcpSocket": {"port": 8080}})))
        .regular("client")
        .on_term(CLEAN_END)
        .field("lifecycle", pre_stop(&json!({"httpGet": {"port": 8081}})))
        .grace_period_seconds(20)
        .restarts_pod("trainer", 42);
    let pod = stage.running(shape).await?;
    let before = pod.restarted("trainer", 42).await?;
    let entries = pod.evidence_since(&before)?;
    for container in ["logger", "server", "client"] {
        at(&entries, container, &noted("stopped"))?;
        let hook = format!("PreStopHook of {container} failed");
        pod.until_told("FailedPreStopHook", &hook).await?;
    }
    Ok(())
}

async fn pre_stop_hook_that_hangs_takes_no_more_than_the_time_to_stop(stage: Stage) -> Result<()> {
    let hang = pre_stop(&json!({"exec": {"command": ["/bin/sleep", "3600"]}}));
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .on_term(CLEAN_END)
        .field("lifecycle", hang)
        .options(&json!({"gracePeriodSeconds": 4}))
        .restarts_pod("trainer", 42);
    let pod = stage.running(shape).await?;
    let before = pod.restarted("trainer", 42).await?;
    let entries = pod.evidence_since(&before)?;
    // To the kubelet it has not failed either (`executePreStopHook`).
    let failed = pod.events("FailedPreStopHook").await?;
    ensure!(failed.is_empty(), "it is said to have failed: {failed:?}");
    // It has two seconds after that, whatever its hook took.
    at(&entries, "logger", &noted("stopped"))?;
    let took = until_began(&entries, "logger")?;
    let (shortest, longest) = (Duration::from_secs(4), Duration::from_secs(20));
    ensure!(took >= shortest && took < longest, "its time was {took:?}");
    Ok(())
}

async fn sidecars_stop_after_the_others_in_reverse_order(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .sidecar("proxy")
        .on_term(CLEAN_END)
        .sidecar("cache")
        .on_term(CLEAN_END)
        .regular("trainer")
        .regular("logger")
        .on_term(CLEAN_END)
        .grace_period_seconds(20)
        .restarts_pod("trainer", 42);
    let entries = restarted(&stage, shape).await?;
    for (first, then) in [("logger", "cache"), ("cache", "proxy")] {
        let end = at(&entries, first, &noted("stopped"))?;
        let asked = at(&entries, then, &noted("asked"))?;
        ensure!(end < asked, "{then} did not wait for {first}: {entries:?}");
    }
    let end = at(&entries, "proxy", &noted("stopped"))?;
    let began = at(&entries, "proxy", &Deed::Began)?;
    ensure!(end < began, "it began before: {entries:?}");
    Ok(())
}

async fn completed_containers_run_again_after_the_others_have_stopped(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .on_term(CLEAN_END)
        .regular("once")
        .grace_period_seconds(20)
        .restarts_pod("trainer", 42);
    let pod = stage.running(shape).await?;
    pod.exit("once", 0).await?;
    pod.until_state("once", "exit 0").await?;
    let before = Before::of(&pod).await?;
    pod.exit("trainer", 42).await?;
    // The kubelet says nothing of a pod in which one runs again that had completed.
    pod.has_restarted_unseen(&before).await?;
    let entries = pod.evidence_since(&before)?;
    let end = at(&entries, "logger", &noted("stopped"))?;
    let began = at(&entries, "once", &Deed::Began)?;
    ensure!(end < began, "it began before: {entries:?}");
    Ok(())
}

/// The kubelet's own, from the deletion on, with its preStop hook: more than it had before. Nothing starts.
async fn pod_that_is_deleted_while_it_stops_has_the_time_that_it_is_due(
    stage: Stage,
) -> Result<()> {
    let shape = as_long_as_when_it_ends(Shape::never())
        .with_pre_stop()
        .options(&json!({"gracePeriodSeconds": 8}));
    let pod = stage.running(shape).await?;
    let before = Before::of(&pod).await?;
    pod.exit("trainer", 42).await?;
    wait::until("the logger is asked to stop", PATIENCE, async || {
        let asked = pod.notes_since(&before)?.contains(&"asked".to_owned());
        Ok(asked.then_some(()).ok_or_else(|| "it is not".to_owned()))
    })
    .await?;
    let (evidence, so_far) = (pod.evidence_file()?, pod.evidence()?.len());
    pod.time_to_delete(&DeleteParams::default()).await?;
    let ending = evidence::entries(evidence)?.split_off(so_far);
    let expected = [("logger", &Deed::Warned), ("logger", &noted("stopped"))];
    ensure!(
        evidence::deeds(&ending) == expected,
        "its end was {ending:?}"
    );
    Ok(())
}

/// The kubelet runs its preStop hook once more then, if it has one, and gives it all of its time anew.
async fn container_that_stops_is_not_killed_for_its_liveness_probe(stage: Stage) -> Result<()> {
    let probe = probe("test ! -e /stopping", json!({"failureThreshold": 1}));
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .on_term(r#"touch /stopping; sleep 10; say "note stopped"; exit 0"#)
        .field("livenessProbe", probe)
        .grace_period_seconds(20)
        .restarts_pod("trainer", 42);
    let entries = restarted(&stage, shape).await?;
    at(&entries, "logger", &noted("stopped"))?;
    Ok(())
}

async fn restart_all_containers_gives_no_time_to_stop(stage: Stage) -> Result<()> {
    let shape = graceful(Shape::never(), "RestartAllContainers");
    let entries = restarted(&stage, shape).await?;
    let mut entries = entries.iter();
    let noted = entries.find(|entry| matches!(entry.deed, Deed::Noted(_)));
    ensure!(noted.is_none(), "it was asked to stop: {noted:?}");
    Ok(())
}
