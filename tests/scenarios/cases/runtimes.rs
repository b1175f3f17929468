//! Pods under another runtime than runc: sandboxes of their own run no hooks on the host, so that exits cannot be
//! held. The one here is runc by another name; kata and gVisor are not to be had.

use anyhow::{Result, ensure};

use crate::scenario::{Scenario, of_containerd, scenarios};
use crate::shape::Shape;
use crate::stage::Stage;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let scenarios = scenarios![Shared:
        always_pod_under_a_runtime_that_is_not_runc_restarts,
    ];
    of_containerd("CRI-O has no such handler here", scenarios)
}

async fn always_pod_under_a_runtime_that_is_not_runc_restarts(stage: Stage) -> Result<()> {
    let shape = Shape::always()
        .init("fetch")
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42)
        .runtime_class("nohooks");
    let pod = stage.running(shape).await?;
    for (container, hooks) in pod.hooks().await? {
        ensure!(hooks.is_empty(), "{container} has hooks {hooks:?}");
    }
    pod.until_told("NotProtected", "runtime handler runs no hooks")
        .await?;
    pod.restarts_all("trainer", 42).await
}
