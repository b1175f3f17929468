//! What the kubelet does by itself, with no plugin at all: the ground that the others stand on, and
//! the proof that they can fail.

use anyhow::{Result, bail, ensure};

use crate::node::NATIVE;
use crate::scenario::{Scenario, Skipped, scenarios, taking_long, telling_nodes_apart};
use crate::shape::Shape;
use crate::stage::Stage;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = scenarios![Shared:
        kubelet_alone_fails_a_never_pod,
        kubelet_alone_restarts_one_container_of_an_always_pod,
        kubelet_alone_restarts_all_where_it_can,
    ];
    scenarios.extend(taking_long(
        scenarios![Shared: a_pod_that_does_not_restart_is_noticed],
    ));
    telling_nodes_apart(scenarios)
}

async fn kubelet_alone_fails_a_never_pod(stage: Stage) -> Result<()> {
    let pod = stage
        .running(Shape::never().init("fetch").regular("trainer"))
        .await?;
    pod.exit("trainer", 42).await?;
    let now = pod.until_phase("Failed").await?;
    ensure!(
        now.containers["trainer"].state == "exit 42 (Error)",
        "{now}"
    );
    Ok(())
}

async fn kubelet_alone_restarts_one_container_of_an_always_pod(stage: Stage) -> Result<()> {
    let shape = Shape::always()
        .init("fetch")
        .sidecar("proxy")
        .regular("trainer")
        .regular("logger");
    stage
        .running(shape)
        .await?
        .restarts_alone("trainer", 42)
        .await
}

async fn a_pod_that_does_not_restart_is_noticed(stage: Stage) -> Result<()> {
    let shape = Shape::always().regular("trainer").regular("logger");
    let pod = stage.running(shape).await?;
    let Err(error) = pod.restarts_all("trainer", 42).await else {
        bail!("a pod without rules is said to have restarted as a whole");
    };
    let text = format!("{error:#}");
    ensure!(
        text.contains("logger is still the old instance"),
        "noticed for the wrong reason: {text}"
    );
    Ok(())
}

/// The checks that the plugin must pass are passed by the kubelet's own feature, but for the exit
/// code, which it loses. A plugin beside it must stand aside.
async fn kubelet_alone_restarts_all_where_it_can(stage: Stage) -> Result<()> {
    if !stage.node.declares(NATIVE).await? {
        bail!(Skipped("this kubelet cannot restart all containers"));
    }
    let shape = Shape::never()
        .init("fetch")
        .init("prepare")
        .sidecar("proxy")
        .regular("logger")
        .regular("trainer")
        .restarts_all_by_itself(42);
    let pod = stage.running(shape).await?;
    for (container, hooks) in pod.hooks().await? {
        ensure!(hooks.is_empty(), "{container} has hooks {hooks:?}");
    }
    pod.restarted("trainer", 42).await?;
    let lines = stage.plugin.log_lines(&pod.name)?;
    ensure!(lines.is_empty(), "the plugin speaks of it: {lines:?}");
    Ok(())
}
