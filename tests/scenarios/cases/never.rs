//! `restartPolicy: Never`: the kubelet would declare the pod Failed, for ever.

use anyhow::Result;

use super::restarted_by_both;
use crate::scenario::{Scenario, scenarios, taking_long};
use crate::shape::Shape;
use crate::stage::Stage;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = scenarios![Shared:
        never_pod_of_one_container_restarts,
        never_pod_of_three_containers_restarts,
        never_pod_with_inits_runs_them_again_in_order,
        never_pod_with_a_sidecar_restarts_it_too,
        never_pod_with_init_and_sidecars_starts_in_spec_order,
        never_pod_restarts_when_an_init_container_says_so,
        never_pod_restarts_when_its_second_init_container_says_so,
        never_pod_restarts_when_a_sidecar_says_so,
        containers_that_ignore_sigterm_hold_up_nothing,
    ];
    scenarios.extend(taking_long(
        scenarios![Shared: never_pod_restarts_again_and_again],
    ));
    scenarios
}

async fn never_pod_of_one_container_restarts(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .regular("trainer")
        .restarts_all("trainer", 42);
    stage
        .running(shape)
        .await?
        .restarts_all("trainer", 42)
        .await
}

async fn never_pod_of_three_containers_restarts(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .regular("server")
        .restarts_all("trainer", 42);
    stage
        .running(shape)
        .await?
        .restarts_all("trainer", 42)
        .await
}

async fn never_pod_with_inits_runs_them_again_in_order(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .init("fetch")
        .init("prepare")
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42);
    stage
        .running(shape)
        .await?
        .restarts_all("trainer", 42)
        .await
}

async fn never_pod_with_a_sidecar_restarts_it_too(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .sidecar("proxy")
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42);
    stage
        .running(shape)
        .await?
        .restarts_all("trainer", 42)
        .await
}

async fn never_pod_with_init_and_sidecars_starts_in_spec_order(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .init("fetch")
        .sidecar("proxy")
        .sidecar("mesh")
        .regular("trainer")
        .restarts_all("trainer", 42);
    stage
        .running(shape)
        .await?
        .restarts_all("trainer", 42)
        .await
}

async fn never_pod_restarts_when_an_init_container_says_so(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .waiting_init("fetch")
        .init("prepare")
        .regular("trainer")
        .regular("logger")
        .restarts_all("fetch", 42);
    let pod = stage.pod(shape).await?;
    pod.until_container_runs("fetch").await?;
    pod.restarts_all("fetch", 42).await
}

async fn never_pod_restarts_when_its_second_init_container_says_so(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .init("fetch")
        .waiting_init("prepare")
        .regular("trainer")
        .restarts_all("prepare", 42);
    let pod = stage.pod(shape).await?;
    pod.until_container_runs("prepare").await?;
    pod.restarts_all("prepare", 42).await
}

async fn never_pod_restarts_when_a_sidecar_says_so(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .sidecar("proxy")
        .regular("trainer")
        .regular("logger")
        .restarts_all("proxy", 42);
    stage.running(shape).await?.restarts_all("proxy", 42).await
}

async fn never_pod_restarts_again_and_again(stage: Stage) -> Result<()> {
    let pod = restarted_by_both(&stage, Shape::never().init("fetch")).await?;
    pod.restarts_all("trainer", 42).await
}

/// Whoever waits for their end would wait for an hour. Nor are their preStop hooks run.
async fn containers_that_ignore_sigterm_hold_up_nothing(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .regular("server")
        .regular("exporter")
        .regular("watcher")
        .ignoring_term()
        .with_pre_stop()
        .grace_period_seconds(3600)
        .restarts_all("trainer", 42);
    stage
        .running(shape)
        .await?
        .restarts_all("trainer", 42)
        .await
}
