//! Pods that the kubelet ends by itself: whatever their containers exit with, they keep their grace period and nothing is
//! started again.

use std::sync::Arc;

use anyhow::{Result, ensure};
use serde_json::json;

use super::under;
use crate::evidence::{self, Deed, Entry};
use crate::pod::LivePod;
use crate::restarted::TWO_RELISTS;
use crate::scenario::{Scenario, scenarios};
use crate::shape::RestartPolicy::{Always, Never};
use crate::shape::{Shape, rule};
use crate::stage::Stage;

/// Ends as its rules say, and at once.
const ASKING_END: &str = r#"say "note asks"; exit 3"#;
/// Takes its time.
const CLEAN_END: &str = r#"sleep 6; say "note stopped"; exit 0"#;

pub(crate) fn scenarios() -> Vec<Scenario> {
    [
        under(
            &[Never, Always],
            "past_its_deadline_keeps_its_grace_period",
            is_past_its_deadline,
        ),
        scenarios![Alone: pod_that_makes_way_for_a_critical_one_keeps_its_grace_period],
    ]
    .concat()
}

fn asking(shape: Shape) -> Shape {
    shape
        .regular("trainer")
        .on_term(ASKING_END)
        .regular("logger")
        .on_term(CLEAN_END)
        .rules(
            "trainer",
            &json!([rule("RestartAllContainers", "NotIn", &[0])]),
        )
        .grace_period_seconds(20)
}

async fn is_past_its_deadline(stage: Stage, shape: Shape) -> Result<()> {
    let shape = asking(shape).spec("activeDeadlineSeconds", json!(8));
    let pod = stage.running(shape).await?;
    ends_with_grace(&pod).await
}

async fn pod_that_makes_way_for_a_critical_one_keeps_its_grace_period(stage: Stage) -> Result<()> {
    // Each wants more than half of what the node has.
    let cpus = stage.node.allocatable_millicpus().await?;
    let requests = json!({"requests": {"cpu": format!("{}m", cpus * 6 / 10)}});
    let shape = asking(Shape::never()).field("resources", requests.clone());
    let pod = stage.running(shape).await?;
    let critical = Shape::never()
        .regular("server")
        .field("resources", requests)
        .spec("priorityClassName", json!("system-node-critical"));
    let critical = stage.pod(critical).await?;
    ends_with_grace(&pod).await?;
    critical.until_running().await?;
    Ok(())
}

/// The trainer asks for a restart with its end, and the logger is left in peace.
async fn ends_with_grace(pod: &Arc<LivePod>) -> Result<()> {
    // Its volume goes with it.
    let evidence = pod.evidence_file()?;
    pod.until_phase("Failed").await?;
    let lasts = pod.recorder.stays_for(TWO_RELISTS, |now| {
        (now.phase != "Failed").then(|| format!("the pod is {}", now.phase))
    });
    lasts.await?;
    let evidence = evidence::entries(evidence)?;
    for word in ["asks", "stopped"] {
        let noted = Deed::Noted(word.to_owned());
        let found = evidence.iter().any(|it| it.deed == noted);
        ensure!(found, "nobody noted that it {word}: {evidence:?}");
    }
    let begun: Vec<&Entry> = evidence
        .iter()
        .filter(|it| it.deed == Deed::Began)
        .collect();
    ensure!(
        begun.len() == 2,
        "something was started again: {evidence:?}"
    );
    let events = pod.events("NotRestarted").await?;
    ensure!(!events.is_empty(), "nobody was told why");
    Ok(())
}
