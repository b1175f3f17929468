//! `restartPolicy: OnFailure`: as Always after a failure, as Never after an exit with 0.

use anyhow::Result;

use crate::scenario::{Scenario, scenarios};
use crate::shape::Shape;
use crate::stage::Stage;

pub(crate) fn scenarios() -> Vec<Scenario> {
    scenarios![Shared:
        on_failure_pod_restarts_after_a_failure,
        on_failure_pod_restarts_after_an_exit_with_0,
    ]
}

async fn on_failure_pod_restarts_after_a_failure(stage: Stage) -> Result<()> {
    let shape = Shape::on_failure()
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42);
    stage
        .running(shape)
        .await?
        .restarts_all("trainer", 42)
        .await
}

async fn on_failure_pod_restarts_after_an_exit_with_0(stage: Stage) -> Result<()> {
    let shape = Shape::on_failure()
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 0);
    stage.running(shape).await?.restarts_all("trainer", 0).await
}
