//! Static pods: from manifests on the node, with and without an API server.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::json;

use crate::restarted::Before;
use crate::scenario::{Scenario, scenarios};
use crate::shape::{Shape, rule};
use crate::stage::Stage;
use crate::wait::PATIENCE;

/// A kubelet that has an API server again hears from it in its own time.
const RECONNECTED: Duration = Duration::from_mins(3);

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = scenarios![Shared:
        static_pod_restarts_in_place,
        static_pod_whose_manifest_is_taken_away_is_let_go,
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

async fn static_pod_restarts_on_a_kubelet_without_an_api_server(stage: Stage) -> Result<()> {
    let (pod, _) = stage.static_pod(three_kinds()).await?;
    let before = Before::of(&pod).await?;
    let node = &stage.node;
    node.script("stop", "kubelet").await?;
    node.script("start", "kubelet-standalone").await?;
    stage
        .plugin
        .detour(|sockets| sockets.kubeconfig = None)
        .await?;
    let restarted = async {
        pod.exit("trainer", 42).await?;
        pod.has_restarted_unseen(&before).await
    };
    let restarted = restarted.await;
    node.script("stop", "kubelet-standalone").await?;
    node.script("start", "kubelet").await?;
    stage.plugin.go_straight().await?;
    restarted?;
    pod.recorder
        .until("the kubelet tells of it", RECONNECTED, |now| {
            before.untold(&pod, now)
        })
        .await?;
    pod.has_restarted(&before).await
}
