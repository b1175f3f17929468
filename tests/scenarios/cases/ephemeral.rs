//! Ephemeral containers: they came to a running pod, and nobody would start them again.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use serde_json::json;

use crate::evidence::Deed;
use crate::pod::LivePod;
use crate::restarted::{Before, TWO_RELISTS};
use crate::runtime::State;
use crate::scenario::{Scenario, scenarios};
use crate::shape::{Shape, restart_all_on};
use crate::stage::Stage;

pub(crate) fn scenarios() -> Vec<Scenario> {
    scenarios![Shared:
        never_pod_restarts_around_its_ephemeral_containers,
        always_pod_restarts_around_its_ephemeral_containers,
        exit_of_an_ephemeral_container_restarts_nothing,
    ]
}

fn three_kinds(shape: Shape) -> Shape {
    shape
        .init("fetch")
        .sidecar("proxy")
        .regular("trainer")
        .annotation(
            "restart-rules.reprise.dev",
            json!([restart_all_on(&[42])]).to_string(),
        )
}

async fn never_pod_restarts_around_its_ephemeral_containers(stage: Stage) -> Result<()> {
    restarts_around_them(stage, Shape::never()).await
}

async fn always_pod_restarts_around_its_ephemeral_containers(stage: Stage) -> Result<()> {
    restarts_around_them(stage, Shape::always()).await
}

async fn restarts_around_them(stage: Stage, shape: Shape) -> Result<()> {
    let pod = stage.running(three_kinds(shape)).await?;
    pod.add_ephemeral("shell").await?;
    pod.add_ephemeral("probe").await?;
    pod.exit("probe", 7).await?;
    pod.until_ephemeral("probe", "exit 7 ").await?;
    let seen = pod.recorder.current().ephemeral;
    let there = in_the_runtime(&pod).await?;
    pod.restarts_all("trainer", 42).await?;
    let now = pod.recorder.current();
    ensure!(now.ephemeral == seen, "they were {seen:?}; now: {now}");
    let still_there = in_the_runtime(&pod).await?;
    ensure!(
        still_there == there,
        "they were {there:?} and are {still_there:?} in the runtime"
    );
    ensure!(
        times_begun(&pod, "shell")? == 1 && times_begun(&pod, "probe")? == 1,
        "an ephemeral container began again"
    );
    Ok(())
}

/// Not even a rule for the whole pod is for them.
async fn exit_of_an_ephemeral_container_restarts_nothing(stage: Stage) -> Result<()> {
    let pod = stage.running(three_kinds(Shape::never())).await?;
    pod.add_ephemeral("shell").await?;
    let before = Before::of(&pod).await?;
    pod.exit("shell", 42).await?;
    pod.until_ephemeral("shell", "exit 42 ").await?;
    let untouched = &before.snapshot.containers;
    pod.recorder
        .stays_for(TWO_RELISTS, |now| {
            (now.containers != *untouched).then(|| "a container was touched".to_owned())
        })
        .await?;
    let begun = times_begun(&pod, "shell")?;
    ensure!(begun == 1, "shell began {begun} times");
    // The restart is what the pod is still able to do.
    pod.restarts_all("trainer", 42).await
}

/// Ids and states of the two.
async fn in_the_runtime(pod: &LivePod) -> Result<BTreeMap<String, State>> {
    let containers = pod.containers().await?.into_iter();
    Ok(containers
        .filter(|container| matches!(container.name(), "shell" | "probe"))
        .map(|container| (container.id.clone(), container.state()))
        .collect())
}

fn times_begun(pod: &LivePod, container: &str) -> Result<usize> {
    let began = pod.evidence()?.into_iter();
    let began = began.filter(|entry| entry.container == container && entry.deed == Deed::Began);
    Ok(began.count())
}
