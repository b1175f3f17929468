//! Probes and hooks that the kubelet runs, around a restart (KEP-5532, "Probes" and "Restart Phases").

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::under;
use crate::evidence::{Deed, Entry};
use crate::pod::LivePod;
use crate::recorder::Snapshot;
use crate::restarted::Before;
use crate::scenario::{Scenario, scenarios};
use crate::shape::RestartPolicy::{Always, Never, OnFailure};
use crate::shape::{Shape, rule};
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

/// A sign of life in the container's own file system, which a new instance begins without.
const UP_AFTER_1S: &str = r#"(sleep 1; say "note up"; touch /up) &"#;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let policies = &[Never, Always];
    [
        under(
            policies,
            "with_probes_restarts_once",
            with_probes_restarts_once,
        ),
        under(
            policies,
            "starts_after_the_startup_probe_of_its_sidecar",
            starts_after_the_startup_probe,
        ),
        under(
            &[Always, OnFailure],
            "is_replayed_as_far_as_a_sidecar_with_a_startup_probe",
            is_replayed_as_far_as_a_sidecar,
        ),
        under(
            &[Always, OnFailure],
            "is_replayed_as_far_as_a_container_with_a_liveness_probe",
            is_replayed_as_far_as_a_regular_one,
        ),
        under(
            policies,
            "is_not_ready_before_its_readiness_probe_says_so",
            is_not_ready_before_its_probe_says_so,
        ),
        under(policies, "runs_post_start_hooks_again", runs_hooks_again),
        under(
            policies,
            "with_post_start_hooks_is_replayed",
            is_replayed_with_hooks,
        ),
        under(
            policies,
            "with_init_containers_and_post_start_hooks_is_replayed_in_order",
            is_replayed_in_order_with_hooks,
        ),
        scenarios![Shared: a_post_start_hook_that_fails_ends_its_container_as_the_kubelet_does],
    ]
    .concat()
}

/// Once a second, with `fields`. On a busy node a probe may take longer than its default of a second.
pub(super) fn probe(command: &str, fields: Value) -> Value {
    let mut probe = fields;
    probe["exec"] = json!({"command": ["/bin/sh", "-c", command]});
    probe["periodSeconds"] = json!(1);
    probe["timeoutSeconds"] = json!(30);
    probe
}

fn up() -> Value {
    probe("test -e /up", json!({"failureThreshold": 30}))
}

/// A `lifecycle` whose postStart hook notes that it has run, after what it does `first`.
fn noting_hook(first: &str, name: &str) -> Value {
    let command = format!("{first}echo $EPOCHREALTIME {name} note started >>/ev/log");
    json!({"postStart": {"exec": {"command": ["/bin/sh", "-c", command]}}})
}

fn noted(entries: &[Entry], container: &str, word: &str) -> Option<usize> {
    let deed = Deed::Noted(word.to_owned());
    entries
        .iter()
        .position(|entry| entry.container == container && entry.deed == deed)
}

/// Waits until a probe has written that `container` is alive.
async fn until_alive(pod: &LivePod, before: &Before, container: &str) -> Result<()> {
    let what = format!("a liveness probe of {container}");
    wait::until(&what, PATIENCE, async || {
        let seen = noted(&pod.evidence_since(before)?, container, "alive");
        Ok(seen.map(|_| ()).ok_or_else(|| "no evidence".to_owned()))
    })
    .await
}

/// One failure of the liveness probe would be enough for the kubelet to kill, and any kill for another restart.
async fn with_probes_restarts_once(stage: Stage, shape: Shape) -> Result<()> {
    let liveness = |name| {
        let command = format!("test -e /up && echo $EPOCHREALTIME {name} note alive >>/ev/log");
        probe(&command, json!({"failureThreshold": 1}))
    };
    let rules = json!([rule("RestartAllContainers", "NotIn", &[0])]);
    let shape = shape
        .init("fetch")
        .regular("trainer")
        .at_first(UP_AFTER_1S)
        .field("startupProbe", up())
        .field("livenessProbe", liveness("trainer"))
        .field("readinessProbe", up())
        .regular("logger")
        .at_first(UP_AFTER_1S)
        .field("startupProbe", up())
        .field("livenessProbe", liveness("logger"))
        .field("readinessProbe", up())
        .annotation("restart-rules.reprise.dev", rules.to_string());
    let pod = stage.running(shape).await?;
    for container in ["trainer", "logger"] {
        until_alive(&pod, &Before::of(&pod).await?, container).await?;
    }
    let before = pod.restarted("trainer", 42).await?;
    for container in ["trainer", "logger"] {
        until_alive(&pod, &Before::of(&pod).await?, container).await?;
    }
    // Still the one restart.
    pod.has_restarted(&before).await
}

async fn starts_after_the_startup_probe(stage: Stage, shape: Shape) -> Result<()> {
    let shape = shape
        .sidecar("proxy")
        .at_first(UP_AFTER_1S)
        .field("startupProbe", up())
        .regular("trainer")
        .restarts_all("trainer", 42);
    let pod = stage.running(shape).await?;
    let before = pod.restarted("trainer", 42).await?;
    waited_for_sidecar(&pod, &before)
}

fn waited_for_sidecar(pod: &LivePod, before: &Before) -> Result<()> {
    let after = pod.evidence_since(before)?;
    let up = noted(&after, "proxy", "up").context("the sidecar never said that it is up")?;
    let began = after
        .iter()
        .position(|entry| entry.container == "trainer" && entry.deed == Deed::Began);
    ensure!(
        began > Some(up),
        "the regular container did not wait for the sidecar: {after:?}"
    );
    Ok(())
}

/// The kubelet goes on where it would probe what has not started yet.
async fn is_replayed_as_far_as_a_sidecar(stage: Stage, shape: Shape) -> Result<()> {
    let shape = shape.init("fetch").init("check").sidecar("proxy");
    let shape = shape.at_first(UP_AFTER_1S).field("startupProbe", up());
    let pod = replayed_in_part(&stage, shape).await?;
    let before = Before::of(&pod).await?;
    pod.restarts_all("trainer", 42).await?;
    was_replayed_in_part(&pod, "proxy has a startup probe")?;
    waited_for_sidecar(&pod, &before)
}

async fn is_replayed_as_far_as_a_regular_one(stage: Stage, shape: Shape) -> Result<()> {
    let shape = shape.init("fetch").sidecar("proxy").regular("server");
    let alive = probe("true", json!({"failureThreshold": 1}));
    let pod = replayed_in_part(&stage, shape.field("livenessProbe", alive)).await?;
    pod.restarts_all("trainer", 42).await?;
    was_replayed_in_part(&pod, "server has a liveness probe")
}

async fn replayed_in_part(stage: &Stage, shape: Shape) -> Result<Arc<LivePod>> {
    let shape = shape.regular("trainer").regular("logger");
    let shape = shape.restarts_all("trainer", 42).started_by("Auto");
    stage.running(shape).await
}

fn was_replayed_in_part(pod: &LivePod, why: &str) -> Result<()> {
    // There it must find nothing of the pod.
    let how = if pod.node.is_initialised_by_exited() {
        "again, from the first init container"
    } else {
        "again, first by replay, then by the pod's restart policy"
    };
    pod.restart_ended(&format!("{how} (no replay: {why})"))
}

async fn is_not_ready_before_its_probe_says_so(stage: Stage, shape: Shape) -> Result<()> {
    let shape = shape
        .regular("trainer")
        .at_first(UP_AFTER_1S)
        .field("readinessProbe", up())
        .regular("logger")
        .restarts_all("trainer", 42);
    let pod = stage.running(shape).await?;
    let before = pod.restarted("trainer", 42).await?;
    let seen = pod.seen_since(&before);
    let seen = std::iter::once(&before.snapshot).chain(&seen);
    let mut ready: Vec<bool> = seen.map(|seen| seen.ready).collect();
    ready.dedup();
    ensure!(
        ready == [true, false, true],
        "the pod was Ready in turns: {ready:?}"
    );
    Ok(())
}

/// The next container starts when the hook of the one before has run.
async fn is_replayed_with_hooks(stage: Stage, shape: Shape) -> Result<()> {
    // Longer than exits are held, once.
    let command =
        "mkdir /ev/first && exit; sleep 10; echo $EPOCHREALTIME trainer note started >>/ev/log";
    let hook = json!({"postStart": {"exec": {"command": ["/bin/sh", "-c", command]}}});
    let shape = shape
        .regular("trainer")
        .field("lifecycle", hook)
        .regular("logger")
        .restarts_all("trainer", 42)
        .started_by("Auto");
    let pod = stage.running(shape).await?;
    let before = pod.restarted("trainer", 42).await?;
    pod.was_started_again_by("Auto")?;
    let after = pod.evidence_since(&before)?;
    let ran = noted(&after, "trainer", "started").context("no hook was run")?;
    let mut entries = after.iter();
    let began = entries.position(|it| it.container == "logger" && it.deed == Deed::Began);
    let began = began.context("the other has not begun")?;
    ensure!(ran < began, "the other did not wait: {after:?}");
    Ok(())
}

async fn is_replayed_in_order_with_hooks(stage: Stage, shape: Shape) -> Result<()> {
    let hook = |name| noting_hook("sleep 0.4; ", name);
    let shape = shape
        .init("fetch")
        .sidecar("proxy")
        .field("lifecycle", hook("proxy"))
        .init("prepare")
        .regular("trainer")
        .field("lifecycle", hook("trainer"))
        .regular("logger")
        .restarts_all("logger", 42)
        .started_by("Auto");
    let pod = stage.running(shape).await?;
    let before = pod.restarted("logger", 42).await?;
    pod.was_started_again_by("Auto")?;
    let after = pod.evidence_since(&before)?;
    let began = |name| {
        let mut entries = after.iter();
        let began = entries.position(|it| it.container == name && it.deed == Deed::Began);
        began.with_context(|| format!("{name} has not begun"))
    };
    let ran = |name| noted(&after, name, "started").with_context(|| format!("no hook of {name}"));
    let order = [
        began("fetch")?,
        began("proxy")?,
        ran("proxy")?,
        began("prepare")?,
        began("trainer")?,
        ran("trainer")?,
        began("logger")?,
    ];
    ensure!(order.is_sorted(), "one did not wait: {after:?}");
    Ok(())
}

async fn a_post_start_hook_that_fails_ends_its_container_as_the_kubelet_does(
    stage: Stage,
) -> Result<()> {
    // Once, after the restart.
    let command = "[ -e /ev/again ] || exec touch /ev/again; ! mkdir /ev/failed";
    let hook = json!({"postStart": {"exec": {"command": ["/bin/sh", "-c", command]}}});
    let shape = Shape::always()
        .regular("trainer")
        .regular("logger")
        .field("lifecycle", hook)
        .restarts_all("trainer", 42)
        .started_by("Auto");
    let pod = stage.running(shape).await?;
    pod.exit("trainer", 42).await?;
    pod.until_told("FailedPostStartHook", "PostStartHook of logger failed")
        .await?;
    let twice = |now: &Snapshot| {
        let seen = now.containers.get("logger")?;
        let again = seen.is_running && seen.restarts == 2;
        (!again).then(|| format!("logger was restarted {} times", seen.restarts))
    };
    let recorder = &pod.recorder;
    recorder
        .until("the kubelet starts it once more", PATIENCE, twice)
        .await?;
    Ok(())
}

async fn runs_hooks_again(stage: Stage, shape: Shape) -> Result<()> {
    let hook = |name| noting_hook("", name);
    let shape = shape
        .sidecar("proxy")
        .field("lifecycle", hook("proxy"))
        .regular("trainer")
        .field("lifecycle", hook("trainer"))
        .restarts_all("trainer", 42);
    let pod = stage.running(shape).await?;
    let before = pod.restarted("trainer", 42).await?;
    let after = pod.evidence_since(&before)?;
    for container in ["proxy", "trainer"] {
        let deed = Deed::Noted("started".to_owned());
        let entries = after.iter();
        let times = entries.filter(|entry| entry.container == container && entry.deed == deed);
        let times = times.count();
        ensure!(times == 1, "the hook of {container} ran {times} times");
    }
    Ok(())
}
