//! `restartPolicyRules` in the spec: acted on where the kubelet does not act on them itself.

use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use serde_json::{Value, json};

use crate::node::NATIVE;
use crate::pod::LivePod;
use crate::restarted::Before;
use crate::scenario::{Scenario, Skipped, scenarios, telling_nodes_apart};
use crate::shape::{Shape, restart_all_on, rule};
use crate::stage::Stage;
use crate::wait::PATIENCE;

pub(crate) fn scenarios() -> Vec<Scenario> {
    telling_nodes_apart(scenarios![Shared:
        rules_in_the_spec_restart_all_containers,
        rules_in_the_spec_restart_one_container,
        annotations_go_before_rules_in_the_spec,
        container_restarts_by_its_own_policy_where_no_rule_matches,
        container_that_ended_by_its_own_policy_stays_so_until_all_restart,
        annotations_are_not_used_beside_rules_that_the_kubelet_acts_on,
    ])
}

fn with_rules(shape: Shape, rules: &Value) -> Shape {
    with_own(shape, "Never", rules)
}

fn with_own(shape: Shape, policy: &str, rules: &Value) -> Shape {
    shape
        .field("restartPolicy", json!(policy))
        .field("restartPolicyRules", rules.clone())
}

/// A running pod whose rules the API server has kept: older ones do not know them.
async fn running(stage: &Stage, shape: Shape) -> Result<Arc<LivePod>> {
    let pod = match stage.pod(shape).await {
        Ok(pod) => pod,
        Err(error) => match error.downcast_ref::<kube::Error>() {
            Some(kube::Error::Api(status)) if status.code == 422 => {
                bail!(Skipped("this API server does not know such rules"))
            }
            _ => return Err(error),
        },
    };
    let kept = stage.node.pods().get(&pod.name).await?;
    let containers = kept.spec.map(|spec| spec.containers).unwrap_or_default();
    if containers
        .iter()
        .all(|it| it.restart_policy_rules.is_none())
    {
        bail!(Skipped("this API server does not know such rules"));
    }
    pod.until_running().await?;
    Ok(pod)
}

/// Either the plugin has done it, or it was silent because the kubelet has.
fn was_done_by(stage: &Stage, pod: &LivePod, kubelet: bool) -> Result<()> {
    let lines = stage.plugin.log_lines(&pod.name)?;
    let spoke = lines.iter().any(|line| line.contains("in place"));
    ensure!(spoke != kubelet, "the plugin's log: {lines:?}");
    Ok(())
}

async fn rules_in_the_spec_restart_all_containers(stage: Stage) -> Result<()> {
    if stage.node.declares(NATIVE).await? {
        bail!(Skipped(
            "this kubelet does it itself, which another scenario shows"
        ));
    }
    let shape = Shape::never()
        .init("fetch")
        .sidecar("proxy")
        .regular("logger")
        .regular("trainer");
    let shape = with_rules(shape, &json!([restart_all_on(&[42])]));
    let pod = running(&stage, shape).await?;
    pod.restarts_all("trainer", 42).await?;
    was_done_by(&stage, &pod, false)
}

async fn rules_in_the_spec_restart_one_container(stage: Stage) -> Result<()> {
    let shape = Shape::never().regular("logger").regular("trainer");
    let shape = with_rules(shape, &json!([rule("Restart", "In", &[42])]));
    let pod = running(&stage, shape).await?;
    pod.restarts_alone("trainer", 42).await?;
    was_done_by(&stage, &pod, stage.node.has_container_rules())
}

async fn annotations_go_before_rules_in_the_spec(stage: Stage) -> Result<()> {
    if stage.node.has_container_rules() {
        bail!(Skipped(
            "this kubelet acts on the rules in the spec as well"
        ));
    }
    let shape = Shape::never().regular("logger").regular("trainer");
    let shape = with_rules(shape, &json!([rule("Restart", "In", &[42])]));
    let pod = running(&stage, shape.restarts_all("trainer", 42)).await?;
    pod.restarts_all("trainer", 42).await
}

async fn container_restarts_by_its_own_policy_where_no_rule_matches(stage: Stage) -> Result<()> {
    let shape = Shape::never().regular("logger").regular("trainer");
    let shape = with_own(shape, "OnFailure", &json!([rule("Restart", "In", &[42])]));
    let pod = running(&stage, shape).await?;
    pod.restarts_alone("trainer", 1).await?;
    was_done_by(&stage, &pod, stage.node.has_container_rules())
}

/// A kubelet that goes by the pod's policy wants to create it again.
async fn container_that_ended_by_its_own_policy_stays_so_until_all_restart(
    stage: Stage,
) -> Result<()> {
    if stage.node.has_container_rules() {
        bail!(Skipped("this kubelet goes by it"));
    }
    let all = json!([restart_all_on(&[42])]);
    let shape = Shape::always().regular("logger").regular("trainer");
    let shape = with_own(shape, "Never", &all).regular("server");
    let shape = with_own(shape, "Always", &all);
    let pod = running(&stage, shape).await?;
    pod.exit("trainer", 1).await?;
    pod.recorder
        .until("the kubelet is refused", PATIENCE, |now| {
            let message = &now.containers.get("trainer")?.message;
            let refused = message.contains("its own restartPolicy is Never");
            (!refused).then(|| message.clone())
        })
        .await?;
    let before = Before::of(&pod).await?;
    pod.exit("server", 42).await?;
    pod.has_restarted(&before).await
}

async fn annotations_are_not_used_beside_rules_that_the_kubelet_acts_on(
    stage: Stage,
) -> Result<()> {
    if !stage.node.has_container_rules() {
        bail!(Skipped("this kubelet acts on no rules in the spec"));
    }
    let shape = Shape::never().regular("logger").regular("trainer");
    let shape = with_rules(shape, &json!([rule("Restart", "In", &[42])]));
    let pod = running(&stage, shape.restarts_all("trainer", 42)).await?;
    pod.restarts_alone("trainer", 42).await?;
    was_done_by(&stage, &pod, true)?;
    pod.until_told("InvalidRestartRules", "").await?;
    let events = pod.events("InvalidRestartRules").await?;
    ensure!(events.len() == 1, "it was told {} times why", events.len());
    Ok(())
}
