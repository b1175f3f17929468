//! Pods that are none of our business.

use anyhow::{Result, ensure};

use crate::scenario::{Scenario, of_containerd, scenarios};
use crate::shape::Shape;
use crate::stage::Stage;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = scenarios![Shared: pod_without_our_annotations_gets_no_hook];
    scenarios.extend(of_containerd(
        "CRI-O runs no hooks of ours",
        scenarios![Shared: pod_with_rules_gets_one_hook_a_container],
    ));
    scenarios
}

fn three_kinds() -> Shape {
    Shape::never()
        .init("fetch")
        .sidecar("proxy")
        .regular("trainer")
}

async fn pod_without_our_annotations_gets_no_hook(stage: Stage) -> Result<()> {
    let shape = three_kinds().annotation("example.com/restart-rules", "[]");
    let pod = stage.running(shape).await?;
    for (container, hooks) in pod.hooks().await? {
        ensure!(hooks.is_empty(), "{container} has hooks: {hooks:?}");
    }
    pod.exit("trainer", 42).await?;
    pod.until_phase("Failed").await?;
    let lines = stage.plugin.log_lines(&pod.name)?;
    ensure!(lines.is_empty(), "the plugin speaks of it: {lines:?}");
    Ok(())
}

async fn pod_with_rules_gets_one_hook_a_container(stage: Stage) -> Result<()> {
    let pod = stage
        .running(three_kinds().restarts_all("trainer", 42))
        .await?;
    let binary = stage.plugin.binary.to_string_lossy();
    for (container, hooks) in pod.hooks().await? {
        ensure!(
            hooks == [binary.as_ref()],
            "{container} has hooks: {hooks:?}"
        );
    }
    Ok(())
}
