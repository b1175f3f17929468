//! When the kubelet looks at the runtime: at once when the runtime tells of an end (`EventedPLEG`), or seldom.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use futures::future::try_join_all;
use rustix::process::Signal;

use super::three_kinds;
use crate::pod::LivePod;
use crate::proxy::{Fault, Proxy};
use crate::runtime::{Container, describe};
use crate::scenario::{Scenario, Skipped, scenarios, taking_long, telling_nodes_apart};
use crate::shape::Shape;
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

/// A placeholder of no container.
const WAKER: &str = "reprise-waker";

/// What a list of containers takes on a node that is as busy as that: a relist makes one for all pods, and one more for
/// each pod that has changed.
const SLOW_LIST: Duration = Duration::from_secs(1);

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = scenarios![Alone: pods_restart_under_a_kubelet_that_relists_on_events];
    scenarios.extend(taking_long(scenarios![Alone:
        pods_restart_under_a_kubelet_that_relists_seldom,
        kubelet_is_woken_for_a_pod_of_which_nothing_is_left,
    ]));
    telling_nodes_apart(scenarios)
}

async fn pods_restart_under_a_kubelet_that_relists_on_events(stage: Stage) -> Result<()> {
    if !stage.node.relists_on_events() {
        bail!(Skipped("before 1.37 it believes the runtime's events"));
    }
    stage
        .node
        .swap_kubelet("kubelet", "kubelet-evented-pleg")
        .await?;
    let restarted = all_kinds_restart_twice(&stage).await;
    stage
        .node
        .swap_kubelet("kubelet-evented-pleg", "kubelet")
        .await?;
    restarted
}

async fn pods_restart_under_a_kubelet_that_relists_seldom(stage: Stage) -> Result<()> {
    let socket = stage.node.other_runtime_socket();
    let proxy = Proxy::listen(stage.node.runtime.channel(), &socket)?;
    stage
        .node
        .swap_kubelet("kubelet", "kubelet-other-runtime")
        .await?;
    proxy.breaks("ListContainers", Fault::Late(SLOW_LIST));
    let restarted = all_kinds_restart_twice(&stage).await;
    stage
        .node
        .swap_kubelet("kubelet-other-runtime", "kubelet")
        .await?;
    std::fs::remove_file(socket)?;
    restarted
}

/// It is stopped when what ran is gone, before it can have seen that.
async fn kubelet_is_woken_for_a_pod_of_which_nothing_is_left(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .init("fetch")
        .regular("trainer")
        .restarts_all("trainer", 42)
        .started_by("Kubelet");
    let pod = stage.running(shape).await?;
    pod.exit("trainer", 42).await?;
    until_all(&pod, "what ran is gone", Container::is_placeholder).await?;
    stage.node.signal("kubelet", Signal::STOP)?;
    let woken = async {
        until_all(&pod, "nothing is left", |_| false).await?;
        let waker = async || {
            let containers = pod.containers().await?;
            let stands = containers.iter().any(|it| it.name() == WAKER);
            Ok(stands.then_some(()).ok_or_else(|| describe(&containers)))
        };
        wait::until("something that wakes it", PATIENCE, waker).await?;
        until_all(&pod, "nothing is left of that", |_| false).await
    }
    .await;
    stage.node.signal("kubelet", Signal::CONT)?;
    woken?;
    pod.until_running().await?;
    pod.until_restart_ended("all containers run again").await
}

async fn until_all(pod: &LivePod, what: &str, of: fn(&Container) -> bool) -> Result<()> {
    wait::until(what, PATIENCE, async || {
        let containers = pod.containers().await?;
        let all = containers.iter().all(of);
        Ok(all.then_some(()).ok_or_else(|| describe(&containers)))
    })
    .await
}

async fn all_kinds_restart_twice(stage: &Stage) -> Result<()> {
    for start in ["Kubelet", "Auto"] {
        let pods = three_kinds::ALL.map(|kind| stage.pod((kind.shape)().started_by(start)));
        let pods = try_join_all(pods).await?;
        try_join_all(pods.iter().map(restarts_twice)).await?;
        stage.delete_pods().await?;
    }
    Ok(())
}

async fn restarts_twice(pod: &Arc<LivePod>) -> Result<()> {
    pod.until_running().await?;
    for _ in 0..2 {
        pod.restarts_all("trainer", 42).await?;
    }
    Ok(())
}
