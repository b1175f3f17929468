//! `restartPolicy: Always`: the kubelet restarts containers one by one, and inits never again.

use anyhow::Result;

use crate::scenario::{Scenario, scenarios};
use crate::shape::Shape;
use crate::stage::Stage;

pub(crate) fn scenarios() -> Vec<Scenario> {
    scenarios![Shared:
        always_pod_of_two_containers_restarts,
        always_pod_with_inits_and_sidecars_starts_in_spec_order,
        always_pod_restarts_when_a_sidecar_says_so,
        always_pod_restarts_when_an_init_container_says_so,
    ]
}

async fn always_pod_of_two_containers_restarts(stage: Stage) -> Result<()> {
    let shape = Shape::always()
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42);
    stage
        .running(shape)
        .await?
        .restarts_all("trainer", 42)
        .await
}

async fn always_pod_with_inits_and_sidecars_starts_in_spec_order(stage: Stage) -> Result<()> {
    let shape = Shape::always()
        .init("fetch")
        .sidecar("proxy")
        .init("prepare")
        .sidecar("mesh")
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42);
    stage
        .running(shape)
        .await?
        .restarts_all("trainer", 42)
        .await
}

async fn always_pod_restarts_when_a_sidecar_says_so(stage: Stage) -> Result<()> {
    let shape = Shape::always()
        .sidecar("proxy")
        .regular("trainer")
        .regular("logger")
        .restarts_all("proxy", 42);
    stage.running(shape).await?.restarts_all("proxy", 42).await
}

async fn always_pod_restarts_when_an_init_container_says_so(stage: Stage) -> Result<()> {
    let shape = Shape::always()
        .init("fetch")
        .waiting_init("prepare")
        .regular("trainer")
        .restarts_all("prepare", 42);
    let pod = stage.pod(shape).await?;
    pod.until_container_runs("prepare").await?;
    pod.restarts_all("prepare", 42).await
}
