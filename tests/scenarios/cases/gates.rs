//! A kubelet that is started again with another feature gate, while pods run.

use anyhow::{Result, bail, ensure};
use futures::future::try_join_all;

use super::conditions::true_then_false;
use crate::node::NATIVE;
use crate::scenario::{Scenario, Skipped, scenarios, telling_nodes_apart};
use crate::shape::Shape;
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

const WITHOUT: &str = "kubelet-without-restart-all";

pub(crate) fn scenarios() -> Vec<Scenario> {
    telling_nodes_apart(scenarios![Alone:
        a_gate_that_is_switched_on_while_pods_run_is_noticed,
    ])
}

/// Until then the plugin has the condition's type to itself.
async fn a_gate_that_is_switched_on_while_pods_run_is_noticed(stage: Stage) -> Result<()> {
    if !stage.node.declares(NATIVE).await? {
        bail!(Skipped("this kubelet has no such gate"));
    }
    swap(&stage, "kubelet", WITHOUT).await?;
    let restarted = restart_before_and_after(&stage).await;
    if let Err(error) = restarted {
        // Whichever of them runs.
        stage.node.script("kill", WITHOUT).await?;
        stage.node.start_again("kubelet").await?;
        return Err(error);
    }
    Ok(())
}

/// Returns when the plugin has heard of it.
async fn swap(stage: &Stage, from: &str, to: &str) -> Result<()> {
    let acts = to != WITHOUT;
    let line = format!("restart_all={acts}");
    let heard = stage.plugin.new_log_lines(&line)?.len();
    stage.node.swap_kubelet(from, to).await?;
    wait::until("the plugin knows the gate", PATIENCE, async || {
        let declared = stage.node.declares(NATIVE).await?;
        let lines = stage.plugin.new_log_lines(&line)?.len();
        Ok(if declared == acts && lines > heard {
            Ok(())
        } else {
            Err(format!("declared: {declared}, heard {lines} times"))
        })
    })
    .await
}

async fn restart_before_and_after(stage: &Stage) -> Result<()> {
    let shape = Shape::never().regular("trainer").regular("logger");
    let annotated = shape.restarts_all("trainer", 42);
    let pods = [&annotated; 2].map(|shape| stage.running(shape.clone()));
    let pods = try_join_all(pods).await?;
    let before = pods[0].restarted("trainer", 42).await?;
    true_then_false(&pods[0].told_since(&before, "AllContainersRestarting"))?;

    swap(stage, WITHOUT, "kubelet").await?;
    let before = pods[1].restarted("trainer", 42).await?;
    true_then_false(&pods[1].told_since(&before, "reprise.dev/AllContainersRestarting"))?;
    let told = pods[1].told_since(&before, "AllContainersRestarting");
    ensure!(told.is_empty(), "the kubelet restarts it, too: {told:?}");

    let shape = Shape::never().regular("logger").regular("trainer");
    let native = stage.running(shape.restarts_all_by_itself(42)).await?;
    native.restarted("trainer", 42).await?;
    let lines = stage.plugin.log_lines(&native.name)?;
    ensure!(lines.is_empty(), "the plugin speaks of it: {lines:?}");
    Ok(())
}
