//! A pod that is deleted goes as fast as it would without the plugin, restart or not.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use kube::api::DeleteParams;

use super::three_kinds::{ALWAYS_WITH_INITS, NEVER, NEVER_WITH_GRACE, NEVER_WITH_INITS, PodKind};
use crate::evidence::{self, Deed};
use crate::plugin::Phase;
use crate::scenario::{Company, Scenario, scenarios};
use crate::shape::Shape;
use crate::stage::Stage;
use crate::under_way::UnderWay;

/// The kubelet's clock ticks once a second, and a deletion waits for two ticks, each of which one of the two pods may
/// just have missed; the rest is for a busy machine. Beside other scenarios it would take longer still.
const SLACK: Duration = Duration::from_secs(3);

/// A phase may be over before it is seen.
const TRIES: usize = 4;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = scenarios![Shared: pod_with_rules_that_just_runs_is_deleted_as_one_without];
    for kind in [NEVER, NEVER_WITH_GRACE, NEVER_WITH_INITS, ALWAYS_WITH_INITS] {
        for &phase in kind.phases {
            let phase_name = format!("{phase:?}").to_lowercase();
            let name = format!("{}_is_deleted_while_{phase_name}", kind.name);
            scenarios.push(Scenario::new(name, Company::Alone, move |stage| {
                is_deleted_in(stage, kind, phase)
            }));
        }
    }
    scenarios
}

/// With the preStop hooks and the grace period that it is due.
async fn pod_with_rules_that_just_runs_is_deleted_as_one_without(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .with_pre_stop()
        .ignoring_term()
        .grace_period_seconds(4)
        .restarts_all("trainer", 42);
    let (pod, twin) = tokio::try_join!(
        stage.running(shape.clone()),
        stage.running(shape.without_annotations())
    )?;
    let evidence = pod.evidence_file()?;
    let params = DeleteParams::default();
    let (took, usual) =
        tokio::try_join!(pod.time_to_delete(&params), twin.time_to_delete(&params))?;
    ensure!(
        took.abs_diff(usual) <= SLACK,
        "it was gone after {took:?}, a pod without rules after {usual:?}"
    );
    let evidence = evidence::entries(evidence)?;
    for container in ["trainer", "logger"] {
        let warned = evidence
            .iter()
            .any(|entry| entry.container == container && entry.deed == Deed::Warned);
        ensure!(
            warned,
            "{container} had no time for its preStop hook: {evidence:?}"
        );
    }
    Ok(())
}

/// Beside a pod that the kubelet restarts by itself: its trainer has exited too, and after the first phase so
/// have the others.
async fn is_deleted_in(stage: Stage, kind: PodKind, phase: Phase) -> Result<()> {
    let shape = (kind.shape)();
    for _ in 0..TRIES {
        let twin = stage
            .running(shape.without_annotations().restarted_by_the_kubelet())
            .await?;
        let restart = UnderWay::begin(&stage, shape.clone()).await?;
        let exited = |name: &str| name == "trainer" || phase != Phase::Down;
        for container in shape.lasting().filter(|it| exited(it.name)) {
            twin.exit(container.name, 42).await?;
        }
        if !restart.reaches(phase).await? {
            continue;
        }
        let params = DeleteParams::default().grace_period(1);
        let (took, usual) = tokio::try_join!(
            restart.pod.time_to_delete(&params),
            twin.time_to_delete(&params)
        )?;
        ensure!(
            took <= usual + SLACK,
            "it was gone after {took:?}, one that the kubelet restarts after {usual:?}"
        );
        return restart.until_over().await;
    }
    bail!("no restart could be caught {phase:?} in {TRIES} tries")
}
