//! A pod that restarts in a row waits between restarts.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::past::until_told;
use super::under;
use crate::evidence::Deed;
use crate::pod::LivePod;
use crate::recorder::Seen;
use crate::restarted::Before;
use crate::runtime::{Container, State, describe};
use crate::scenario::{Scenario, scenarios, taking_long, undisturbed};
use crate::shape::{RestartPolicy, Shape, rule};
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

/// The kubelet may be in a back-off of its own, as long as ours and counted from the exit, and tries again within 15 s
/// after a refusal.
const KUBELETS_SLACK: Duration = Duration::from_secs(25);
/// A container's first line comes a moment after its start, from which the plugin counts.
const MOMENT: Duration = Duration::from_secs(1);
/// In the event, which is to the second.
const SAID: &str = "Back-off: the pod restarts too often, nothing starts before ";
const NAMED_TO: Duration = Duration::from_secs(1);
/// Half a minute until it is known that the pod does not end, and a minute and a half until the kubelet looks at it.
const ANOTHER_SANDBOX: Duration = Duration::from_mins(3);
/// A back-off that lasts for as long as a slow machine takes to look at it, in seconds.
const LONG: u64 = 30;
/// Between an exit and what is decided about it, and between a restart's end and the note of it, in milliseconds.
const DECIDED: i64 = 1500;
/// Between the last start and the restart's end: until the kubelet has told of it, if to make it took long.
const TOLD: i64 = 4000;
/// How much later what the plugin starts may be than without a back-off.
const LATE: Duration = Duration::from_secs(1);

pub(crate) fn scenarios() -> Vec<Scenario> {
    use RestartPolicy::{Always, Never, OnFailure};
    let mut scenarios = taking_long(under(
        &[Never, OnFailure, Always],
        "that_restarts_in_a_row_waits_ten_seconds_then_twenty",
        waits_ten_seconds_then_twenty,
    ));
    scenarios.extend(undisturbed(under(
        &[Never, OnFailure, Always],
        "that_restarts_in_a_row_is_replayed_at_the_time_that_was_named",
        is_replayed_when_named,
    )));
    scenarios.extend(scenarios![Shared:
        never_pod_with_inits_that_restarts_in_a_row_waits,
        a_container_that_restarts_alone_in_a_row_waits,
        pod_that_is_changed_in_its_back_off_starts_as_it_is_then,
        pod_may_wait_for_longer_than_its_node_has_others_wait_and_not_less_long,
    ]);
    scenarios.extend(taking_long(scenarios![Shared:
        never_pod_whose_sandbox_ends_in_its_back_off_begins_in_another,
    ]));
    scenarios.extend(scenarios![Alone:
        a_back_off_survives_the_plugin_and_the_kubelet,
        pods_may_wait_less_long_down_to_the_floor_of_their_node,
    ]);
    scenarios
}

/// When the last container began, and when the first one after `before`.
fn last_begun(pod: &LivePod) -> Result<Duration> {
    let evidence = pod.evidence()?;
    let mut began = evidence.iter().filter(|entry| entry.deed == Deed::Began);
    Ok(began.next_back().context("nothing ever began")?.at)
}

fn first_begun(pod: &LivePod, before: &Before) -> Result<Duration> {
    let evidence = pod.evidence_since(before)?;
    let mut began = evidence.iter().filter(|entry| entry.deed == Deed::Began);
    Ok(began.next().context("nothing began again")?.at)
}

/// A restart that follows another one.
struct Again {
    over: Duration,
    before: Before,
}

impl Again {
    async fn begin(pod: &LivePod) -> Result<Self> {
        let (over, before) = (last_begun(pod)?, Before::of(pod).await?);
        pod.exit("trainer", 42).await?;
        Ok(Self { over, before })
    }

    /// Nothing was started before `gap` (seconds) was over, nor much later.
    fn has_waited(&self, pod: &LivePod, gap: u64) -> Result<()> {
        let gap = Duration::from_secs(gap);
        let waited = first_begun(pod, &self.before)?.saturating_sub(self.over);
        ensure!(waited + MOMENT >= gap, "waited {waited:?}, not {gap:?}");
        ensure!(
            waited <= gap + KUBELETS_SLACK,
            "waited {waited:?}, not {gap:?}"
        );
        Ok(())
    }
}

/// Why is in the pod's status, in our words or, where the kubelet is in a back-off of its own, in its; until when is in
/// an event.
async fn says_why(pod: &LivePod) -> Result<()> {
    pod.recorder
        .until_alive("the pod says why it waits", PATIENCE, |now| {
            let mut messages = now.containers.values().map(|seen| &seen.message);
            let said = messages.any(|message| {
                message.contains("back-off: the pod restarts too often")
                    || message.starts_with("back-off")
            });
            (!said).then(|| "back-off".to_owned())
        })
        .await?;
    until_named(pod).await
}

async fn until_named(pod: &LivePod) -> Result<()> {
    wait::until("an event says until when", PATIENCE, async || {
        let said = named(pod).await?;
        Ok(said.map(|_| ()).ok_or_else(|| "no event".to_owned()))
    })
    .await
}

/// Until when nothing starts, as an event said last.
async fn named(pod: &LivePod) -> Result<Option<Timestamp>> {
    let events = pod.events("BackOff").await?;
    let messages = events.iter().filter_map(|event| event.message.as_deref());
    let times = messages.filter_map(|it| it.strip_prefix(SAID)?.parse().ok());
    Ok(times.max())
}

/// A pod of that shape and two containers.
async fn running(stage: &Stage, shape: Shape) -> Result<Arc<LivePod>> {
    let shape = shape
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42);
    stage.running(shape).await
}

/// The same once it has restarted.
/// By the kubelet: a replay may come before it says that it was refused, for it has a back-off of its own.
async fn restarted_once(stage: &Stage, shape: Shape) -> Result<Arc<LivePod>> {
    let pod = running(stage, shape.started_by("Kubelet")).await?;
    pod.restarts_all("trainer", 42).await?;
    Ok(pod)
}

async fn waits_ten_seconds_then_twenty(stage: Stage, shape: Shape) -> Result<()> {
    let pod = restarted_once(&stage, shape).await?;
    for gap in [10, 20] {
        let again = Again::begin(&pod).await?;
        says_why(&pod).await?;
        pod.has_restarted(&again.before).await?;
        again.has_waited(&pod, gap)?;
    }
    Ok(())
}

async fn is_replayed_when_named(stage: Stage, shape: Shape) -> Result<()> {
    let pod = running(&stage, shape.started_by("Auto")).await?;
    let before = pod.restarted("trainer", 42).await?;
    let evidence = pod.evidence_since(&before)?;
    let exit = evidence.iter().find(|it| it.deed == Deed::Exited(42));
    let exited = exit.context("no exit was noted")?.at;
    let at_once = first_begun(&pod, &before)?.saturating_sub(exited);
    println!("note: began {at_once:?} after the exit, without a back-off");
    for gap in [10, 20] {
        let again = Again::begin(&pod).await?;
        pod.has_restarted(&again.before).await?;
        pod.was_started_again_by("Auto")?;
        again.has_waited(&pod, gap)?;
        let named = named(&pod).await?.context("no time was named")?;
        let named = Duration::try_from(named.duration_since(Timestamp::UNIX_EPOCH))?;
        let began = first_begun(&pod, &again.before)?;
        println!(
            "note: began {:?} after the second named",
            began.saturating_sub(named)
        );
        ensure!(
            began >= named && began <= named + NAMED_TO + at_once + LATE,
            "began at {began:?}, not at {named:?}"
        );
    }
    Ok(())
}

async fn never_pod_with_inits_that_restarts_in_a_row_waits(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .init("fetch")
        .sidecar("proxy")
        .regular("trainer")
        .restarts_all("trainer", 42)
        .backs_off(LONG);
    let pod = stage.running(shape).await?;
    pod.restarts_all("trainer", 42).await?;
    let again = Again::begin(&pod).await?;
    says_why(&pod).await?;
    pod.has_restarted(&again.before).await?;
    again.has_waited(&pod, LONG)
}

/// By then nothing is left of its regular containers but placeholders: to the kubelet it waits.
async fn never_pod_whose_sandbox_ends_in_its_back_off_begins_in_another(
    stage: Stage,
) -> Result<()> {
    let shape = Shape::never()
        .init("fetch")
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42)
        .backs_off(LONG);
    let pod = stage.running(shape).await?;
    pod.restarts_all("trainer", 42).await?;
    let again = Again::begin(&pod).await?;
    pod.recorder
        .until_alive("the kubelet sees both wait", PATIENCE, |now| {
            let seen = ["trainer", "logger"].map(|name| now.containers.get(name));
            let waits = |it: &Seen| it.state.starts_with("waiting");
            let wait = seen.iter().all(|it| it.is_some_and(waits));
            (!wait).then(|| now.to_string())
        })
        .await?;
    let waits = |it: &Container| it.name() == "fetch" || it.is_placeholder();
    wait::until("only placeholders are left", PATIENCE, async || {
        let containers = pod.containers().await?;
        let rest = !containers.iter().all(waits);
        Ok(if rest {
            Err(describe(&containers))
        } else {
            Ok(())
        })
    })
    .await?;
    let sandbox = &again.before.sandbox;
    stage.node.runtime.stop_sandbox(sandbox).await?;
    wait::until("it runs in another sandbox", ANOTHER_SANDBOX, async || {
        let containers = pod.containers().await?;
        let runs = |name| {
            let mut running = containers.iter();
            running.any(|it| it.name() == name && it.state() == State::Running)
        };
        let all = runs("trainer") && runs("logger");
        Ok(if all {
            Ok(())
        } else {
            Err(describe(&containers))
        })
    })
    .await?;
    pod.until_told(
        "RestartIncomplete",
        "Gave up: the kubelet ended the pod's sandbox",
    )
    .await
}

/// What it is replayed from was read before.
async fn pod_that_is_changed_in_its_back_off_starts_as_it_is_then(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .regular("trainer")
        .at_first("[ -e /other ] && say 'note other'")
        .regular("logger")
        .restarts_all("trainer", 42);
    let shape = shape.started_by("Auto").backs_off(LONG);
    let pod = stage.running(shape).await?;
    pod.restarts_all("trainer", 42).await?;
    let again = Again::begin(&pod).await?;
    until_named(&pod).await?;
    let container = json!({"name": "trainer", "image": stage.node.other_image});
    pod.patch(&json!({"spec": {"containers": [container]}}))
        .await?;
    pod.has_restarted(&again.before).await?;
    again.has_waited(&pod, LONG)?;
    pod.restart_ended("no replay: trainer: the pod was changed during its back-off")?;
    let notes = pod.notes_since(&again.before)?;
    ensure!(notes == ["other"], "{notes:?}");
    Ok(())
}

async fn a_container_that_restarts_alone_in_a_row_waits(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .rules("trainer", &json!([rule("Restart", "In", &[42])]))
        .started_by("Kubelet")
        .backs_off(LONG);
    let pod = stage.running(shape).await?;
    pod.restarts_alone("trainer", 42).await?;
    let again = Again::begin(&pod).await?;
    says_why(&pod).await?;
    pod.have_restarted_alone(&again.before, &["trainer"])
        .await?;
    again.has_waited(&pod, LONG)
}

/// A pod that asks for a back-off of its own waits so long, in seconds, one restart after the other.
async fn waits_by_its_own(stage: &Stage, back_off: Value, gaps: &[i64]) -> Result<()> {
    let options = json!({"start": "Auto", "backOff": back_off});
    let pod = running(stage, Shape::never().options(&options)).await?;
    let before = Before::of(&pod).await?;
    pod.exit("trainer", 42).await?;
    pod.has_restarted(&before).await?;
    for (index, gap) in gaps.iter().enumerate() {
        let again = Again::begin(&pod).await?;
        pod.has_restarted(&again.before).await?;
        // By the plugin's own word: that this is kept to others see, and how late containers say something depends on the node.
        let entries = until_told(stage, &pod, index + 2).await?;
        let [at, before] =
            [0, 1].map(|index| entries[index]["at"].as_str()?.parse::<Timestamp>().ok());
        let since = at
            .context("no time")?
            .duration_since(before.context("no time")?);
        let took = entries[1]["allRunningMs"].as_i64().context("no end")?;
        let back_off = entries[0]["backOffMs"].as_i64().context("no back-off")?;
        let after = i64::try_from(since.as_millis())? - took;
        let (waited, gap) = (after + back_off, gap * 1000);
        ensure!(waited + DECIDED >= gap, "{waited} ms, not {gap}");
        ensure!(
            back_off == 0 || waited <= gap + DECIDED + TOLD,
            "{waited} ms, not {gap}"
        );
    }
    Ok(())
}

async fn pod_may_wait_for_longer_than_its_node_has_others_wait_and_not_less_long(
    stage: Stage,
) -> Result<()> {
    let longer = json!({"firstSeconds": 16, "maxSeconds": 86400});
    let shorter = json!({"firstSeconds": 0, "maxSeconds": 0, "resetSeconds": 0});
    tokio::try_join!(
        waits_by_its_own(&stage, longer, &[16]),
        waits_by_its_own(&stage, shorter, &[10]),
    )?;
    Ok(())
}

async fn pods_may_wait_less_long_down_to_the_floor_of_their_node(stage: Stage) -> Result<()> {
    stage.plugin.configure("back-off-floor: 2\n").await?;
    // The kubelet, which has a back-off of its own, starts nothing here.
    let short = json!({"firstSeconds": 4, "maxSeconds": 4});
    let none = json!({"firstSeconds": 0, "maxSeconds": 0, "resetSeconds": 0});
    let others = json!({"resetSeconds": 700});
    tokio::try_join!(
        waits_by_its_own(&stage, short, &[4, 4]),
        waits_by_its_own(&stage, none, &[2, 2]),
        waits_by_its_own(&stage, others, &[10]),
    )?;
    Ok(())
}

async fn a_back_off_survives_the_plugin_and_the_kubelet(stage: Stage) -> Result<()> {
    let pod = restarted_once(&stage, Shape::never().backs_off(LONG)).await?;
    let again = Again::begin(&pod).await?;
    says_why(&pod).await?;
    // Without a gate it would start what it misses.
    stage.node.script("kill", "kubelet").await?;
    stage.plugin.kill().await?;
    stage.plugin.start().await?;
    stage.plugin.until_ready(1).await?;
    stage.node.script("start", "kubelet").await?;
    pod.has_restarted(&again.before).await?;
    again.has_waited(&pod, LONG)
}
