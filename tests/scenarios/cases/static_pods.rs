//! Static pods: from manifests on the node, with and without an API server.

use std::time::Duration;

use anyhow::{Result, anyhow, ensure};
use kube::ResourceExt;
use kube::api::DeleteParams;
use serde_json::json;

use crate::restarted::Before;
use crate::scenario::{Scenario, scenarios};
use crate::shape::{Shape, rule};
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

/// A kubelet that has an API server again hears from it in its own time.
const RECONNECTED: Duration = Duration::from_mins(3);

/// The kubelet looks at each pod after 90 s at the latest (`workerResyncIntervalJitterFactor`, `pkg/kubelet/pod_workers.go`).
const RESYNC: Duration = Duration::from_mins(2);

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = scenarios![Shared:
        static_pod_restarts_in_place,
        static_pod_whose_manifest_is_taken_away_is_let_go,
        static_pod_whose_mirror_was_deleted_restarts_in_place,
    ];
    scenarios.extend(scenarios![Alone: static_pod_restarts_on_a_kubelet_without_an_api_server]);
    scenarios
}

fn three_kinds() -> Shape {
    Shape::never()
        .init("fetch")
        .sidecar("proxy")
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42)
}

async fn static_pod_restarts_in_place(stage: Stage) -> Result<()> {
    let (pod, _) = stage.static_pod(three_kinds()).await?;
    pod.restarts_all("trainer", 42).await
}

/// Its containers are told to stop and exit with a code that its rule names.
async fn static_pod_whose_manifest_is_taken_away_is_let_go(stage: Stage) -> Result<()> {
    let rules = json!([rule("RestartAllContainers", "NotIn", &[0])]);
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .rules("trainer", &rules);
    let (pod, manifest) = stage.static_pod(shape).await?;
    std::fs::remove_file(manifest)?;
    pod.recorder.until_gone(PATIENCE).await?;
    let lines = stage.plugin.log_lines(&pod.name)?;
    let restarted = lines.iter().find(|line| line.contains("in place"));
    ensure!(restarted.is_none(), "{restarted:?}");
    Ok(())
}

/// The kubelet makes another mirror, but not before it has something to do for the pod.
async fn static_pod_whose_mirror_was_deleted_restarts_in_place(stage: Stage) -> Result<()> {
    let (pod, _) = stage.static_pod(three_kinds()).await?;
    let before = Before::of(&pod).await?;
    let pods = stage.node.pods();
    let first = pods.get(&pod.name).await?.uid();
    let at_once = DeleteParams::default().grace_period(0);
    pods.delete(&pod.name, &at_once).await?;
    pod.exit("trainer", 42).await?;
    pod.until_begun_again(&before).await?;
    wait::until("the kubelet makes another mirror", RESYNC, async || {
        let uid = pods.get_opt(&pod.name).await?.and_then(|pod| pod.uid());
        let renewed = uid.is_some() && uid != first;
        Ok(renewed.then_some(()).ok_or_else(|| format!("{uid:?}")))
    })
    .await?;
    pod.until_running().await?;
    pod.until_restart_ended("all containers run again").await
}

/// Nobody tells the plugin whether such a kubelet acts on rules in a spec: it leaves them alone.
async fn static_pod_restarts_on_a_kubelet_without_an_api_server(stage: Stage) -> Result<()> {
    let (pod, _) = stage.static_pod(three_kinds()).await?;
    // Older kubelets refuse such manifests.
    let ruled = if stage.node.has_container_rules() {
        let shape = Shape::never().regular("logger").regular("trainer");
        Some(stage.static_pod(shape.restarts_all_by_itself(42)).await?.0)
    } else {
        None
    };
    let before = Before::of(&pod).await?;
    let node = &stage.node;
    node.script("stop", "kubelet").await?;
    node.script("start", "kubelet-standalone").await?;
    stage
        .plugin
        .detour(|sockets| sockets.kubeconfig = None)
        .await?;
    let restarted = async {
        if let Some(ruled) = &ruled {
            ruled.exit("trainer", 42).await?;
        }
        pod.exit("trainer", 42).await?;
        pod.has_restarted_unseen(&before).await
    };
    let restarted = restarted.await;
    let lines = ruled.map(|ruled| stage.plugin.log_lines(&ruled.name));
    let lines = lines.transpose()?.unwrap_or_default();
    let spoke = lines.into_iter().find(|line| line.contains("in place"));
    let silent = spoke.map_or(Ok(()), |line| Err(anyhow!("the plugin acted: {line}")));
    node.script("stop", "kubelet-standalone").await?;
    node.script("start", "kubelet").await?;
    stage.plugin.go_straight().await?;
    restarted?;
    silent?;
    pod.recorder
        .until("the kubelet tells of it", RECONNECTED, |now| {
            before.untold(&pod, now)
        })
        .await?;
    pod.has_restarted(&before).await
}
