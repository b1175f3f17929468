//! Pods whose containers share a namespace with the host or with each other, or have users of their own.

use anyhow::{Result, bail, ensure};
use serde_json::json;

use super::under;
use crate::scenario::{Scenario, Skipped, scenarios, telling_nodes_apart};
use crate::shape::RestartPolicy::{Always, Never};
use crate::shape::Shape;
use crate::stage::Stage;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = scenarios![Shared:
        never_pod_in_the_hosts_network_restarts,
        always_pod_in_the_hosts_network_restarts,
        never_pod_with_one_process_namespace_restarts,
        always_pod_with_one_process_namespace_restarts,
        pod_with_one_process_namespace_gets_time_to_stop,
    ];
    let policies = [Never, Always];
    let restarts = under(
        &policies,
        "with_users_of_its_own_restarts",
        |stage, shape| has_users_of_its_own(stage, shape, "Kubelet"),
    );
    let is_replayed = under(
        &policies,
        "with_users_of_its_own_is_replayed",
        |stage, shape| has_users_of_its_own(stage, shape, "Auto"),
    );
    scenarios.extend(telling_nodes_apart([restarts, is_replayed].concat()));
    scenarios
}

fn init_and_two(shape: Shape) -> Shape {
    shape
        .init("fetch")
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42)
}

async fn restarts(stage: Stage, shape: Shape) -> Result<()> {
    stage
        .running(shape)
        .await?
        .restarts_all("trainer", 42)
        .await
}

async fn never_pod_in_the_hosts_network_restarts(stage: Stage) -> Result<()> {
    restarts(stage, init_and_two(Shape::never()).host_network()).await
}

async fn always_pod_in_the_hosts_network_restarts(stage: Stage) -> Result<()> {
    restarts(stage, init_and_two(Shape::always()).host_network()).await
}

/// The pod's own process is the first of the namespace there, and outlives them all.
async fn never_pod_with_one_process_namespace_restarts(stage: Stage) -> Result<()> {
    restarts(
        stage,
        init_and_two(Shape::never()).share_process_namespace(),
    )
    .await
}

async fn always_pod_with_one_process_namespace_restarts(stage: Stage) -> Result<()> {
    restarts(
        stage,
        init_and_two(Shape::always()).share_process_namespace(),
    )
    .await
}

/// Each container is told to stop by itself, and the pod's own process is not.
async fn pod_with_one_process_namespace_gets_time_to_stop(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .init("fetch")
        .regular("trainer")
        .regular("logger")
        .share_process_namespace()
        .restarts_pod("trainer", 42)
        .options(&json!({"gracePeriodSeconds": 3}));
    restarts(stage, shape).await
}

async fn has_users_of_its_own(stage: Stage, shape: Shape, start: &str) -> Result<()> {
    if !stage.node.has_user_namespaces().await? {
        bail!(Skipped("this runtime has no user namespaces"));
    }
    let shape = shape
        .user_namespace()
        .init("fetch")
        .sidecar("proxy")
        .regular("trainer")
        .at_first("read -r _ outside _ </proc/self/uid_map; say \"note $outside\"")
        .regular("logger")
        .restarts_all("trainer", 42)
        .started_by(start);
    let pod = stage.running(shape).await?;
    let users = pod.notes().await?;
    ensure!(users.len() == 1 && users != ["0"], "{users:?}");
    let before = pod.restarts_all_since("trainer", 42).await?;
    let again = pod.notes_since(&before)?;
    ensure!(again == users, "they were {users:?} and are {again:?}");
    pod.was_started_again_by(start)
}
