//! Containers that were there before the plugin have no hook: their exits cannot be held.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Result, bail, ensure};

use crate::pod::LivePod;
use crate::restarted::Before;
use crate::scenario::{Scenario, of_containerd, scenarios};
use crate::shape::Shape;
use crate::stage::Stage;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let scenarios = scenarios![Alone:
        always_pod_from_before_the_plugin_restarts_and_is_protected_from_then_on,
        never_pod_from_before_the_plugin_restarts_or_fails_and_is_told_so,
    ];
    of_containerd("on CRI-O their exits are held, too", scenarios)
}

/// A pod that is made while there is no plugin, and what it is told when there is one.
async fn made_before(stage: &Stage, shape: Shape) -> Result<Arc<LivePod>> {
    stage.plugin.stop().await?;
    let pod = stage.running(shape).await?;
    stage.plugin.start().await?;
    stage.plugin.until_ready(1).await?;
    pod.until_told("NotProtected", "Exits of logger, trainer")
        .await?;
    Ok(pod)
}

async fn always_pod_from_before_the_plugin_restarts_and_is_protected_from_then_on(
    stage: Stage,
) -> Result<()> {
    let shape = Shape::always()
        .init("fetch")
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42);
    let pod = made_before(&stage, shape).await?;
    pod.restarts_all("trainer", 42).await?;
    // Of each name the newest comes last.
    let newest: BTreeMap<_, _> = pod.hooks().await?.into_iter().collect();
    for (container, hooks) in newest {
        ensure!(hooks.len() == 1, "{container} has hooks {hooks:?}");
    }
    Ok(())
}

/// The kubelet may see the exit before it is shielded. Then it fails the pod, or starts all again and keeps the status of
/// the exit that it saw, which nothing takes back but another exit.
async fn never_pod_from_before_the_plugin_restarts_or_fails_and_is_told_so(
    stage: Stage,
) -> Result<()> {
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42);
    let pod = made_before(&stage, shape).await?;
    let before = Before::of(&pod).await?;
    pod.exit("trainer", 42).await?;
    let failed = pod.until_phase("Failed");
    let restarted = pod.until_begun_again(&before);
    tokio::select! {
        Ok(()) = restarted => pod.until_runtime_is_tidy(&[]).await,
        Ok(_) = failed => {
            println!("note: the kubelet was faster, {} failed", pod.name);
            pod.until_record_is_gone(&before).await
        }
        else => bail!("neither restarted nor failed: {}", pod.recorder.current()),
    }
}
