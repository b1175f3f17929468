//! A scheduler sends pods with rules in their spec to nodes that declare them, where the plugin honours them.

use anyhow::{Result, bail};
use k8s_openapi::api::core::v1::NodeStatus;
use serde_json::{Value, json};

use crate::node::NATIVE;
use crate::pod::LivePod;
use crate::scenario::{Scenario, Skipped, scenarios, telling_nodes_apart};
use crate::shape::Shape;
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

/// The plugin's word that the declaration is its own.
const CONDITION: &str = "reprise.dev/DeclaresFeatures";
const RIGHTS: &str = "deploy/kustomize/components/declare/rbac.yaml";

pub(crate) fn scenarios() -> Vec<Scenario> {
    telling_nodes_apart(scenarios![Alone:
        pod_with_nothing_but_rules_in_its_spec_is_scheduled_where_the_plugin_declares_them,
    ])
}

async fn pod_with_nothing_but_rules_in_its_spec_is_scheduled_where_the_plugin_declares_them(
    stage: Stage,
) -> Result<()> {
    let node = &stage.node;
    if node.has_container_rules() {
        bail!(Skipped("this kubelet declares its features itself"));
    }
    node.kubectl(&["apply"], RIGHTS).await?;
    node.script("start", "scheduler").await?;
    let played = play(&stage).await;
    stage.plugin.go_straight().await?;
    let taken_back = until_declared(&stage, false).await;
    node.script("stop", "scheduler").await?;
    node.kubectl(&["delete"], RIGHTS).await?;
    played?;
    taken_back
}

async fn play(stage: &Stage) -> Result<()> {
    let shape = Shape::never()
        .init("fetch")
        .regular("logger")
        .regular("trainer")
        .restarts_all_by_itself(42)
        .spec("nodeName", Value::Null)
        // No controller here takes away the taint with which nodes begin.
        .spec("tolerations", json!([{"operator": "Exists"}]));
    let pod = match stage.pod(shape).await {
        Err(error) if error.to_string().contains("restartPolicy") => {
            bail!(Skipped("this API server does not know such rules"))
        }
        pod => pod?,
    };
    until_kept_away(stage, &pod).await?;
    stage
        .plugin
        .detour(|sockets| sockets.declares_features = true)
        .await?;
    until_declared(stage, true).await?;
    pod.until_running().await?;
    pod.restarts_all("trainer", 42).await?;
    pod.restart_ended("all containers run again")?;
    // It writes the node's status at its start, and ever after.
    stage.node.script("stop", "kubelet").await?;
    stage.node.script("start", "kubelet").await?;
    pod.restarts_all("trainer", 42).await?;
    until_declared(stage, true).await
}

async fn until_kept_away(stage: &Stage, pod: &LivePod) -> Result<()> {
    wait::until("the scheduler keeps the pod away", PATIENCE, async || {
        let pod = stage.node.pods().get_status(&pod.name).await?;
        let conditions = pod.status.and_then(|it| it.conditions).unwrap_or_default();
        let mut scheduled = conditions.iter().filter(|it| it.type_ == "PodScheduled");
        let kept = scheduled.any(|it| {
            let message = it.message.as_deref().unwrap_or_default();
            message.contains("required features")
        });
        Ok(kept.then_some(()).ok_or_else(|| format!("{conditions:?}")))
    })
    .await
}

async fn until_declared(stage: &Stage, wanted: bool) -> Result<()> {
    wait::until("the node's declaration", PATIENCE, async || {
        let status = stage.node.status().await?;
        let (declared, marked) = (declares(&status), is_marked(&status));
        Ok((declared == wanted && marked == wanted)
            .then_some(())
            .ok_or_else(|| format!("declared: {declared}, as the plugin's: {marked}")))
    })
    .await
}

fn declares(status: &NodeStatus) -> bool {
    let mut declared = status.declared_features.iter().flatten();
    declared.any(|it| it == NATIVE)
}

fn is_marked(status: &NodeStatus) -> bool {
    let mut conditions = status.conditions.iter().flatten();
    conditions.any(|it| it.type_ == CONDITION && it.status == "True")
}
