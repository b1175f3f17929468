//! `action: Restart`: one container only.

use anyhow::Result;
use serde_json::json;

use crate::scenario::{Scenario, scenarios};
use crate::shape::{Shape, rule};
use crate::stage::Stage;

pub(crate) fn scenarios() -> Vec<Scenario> {
    scenarios![Shared:
        never_pod_restarts_one_container_and_leaves_the_others_alone,
        never_pod_restarts_its_only_container_alone,
    ]
}

async fn never_pod_restarts_one_container_and_leaves_the_others_alone(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .init("fetch")
        .sidecar("proxy")
        .regular("trainer")
        .regular("logger")
        .rules("trainer", &json!([rule("Restart", "In", &[42])]));
    stage
        .running(shape)
        .await?
        .restarts_alone("trainer", 42)
        .await
}

async fn never_pod_restarts_its_only_container_alone(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .init("fetch")
        .regular("trainer")
        .rules("trainer", &json!([rule("Restart", "In", &[42])]));
    stage
        .running(shape)
        .await?
        .restarts_alone("trainer", 42)
        .await
}
