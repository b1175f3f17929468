//! A pod that is deleted goes as fast as it would without the plugin, restart or not.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use kube::api::DeleteParams;

use super::three_kinds::{ALWAYS_WITH_INITS, NEVER, NEVER_WITH_GRACE, NEVER_WITH_INITS, PodKind};
use super::under;
use crate::evidence::{self, Deed};
use crate::plugin::Phase;
use crate::scenario::{Company, Scenario, scenarios};
use crate::shape::RestartPolicy::{Always, Never};
use crate::shape::Shape;
use crate::stage::Stage;
use crate::under_way::UnderWay;

/// The kubelet's clock ticks once a second, and a deletion waits for two ticks, each of which one of the two pods may
/// just have missed; the rest is for a busy machine. Beside other scenarios it would take longer still.
const SLACK: Duration = Duration::from_secs(3);

/// More than the kubelet takes anyway.
const CLEAN_END: &str = r#"sleep 2; say "note stopped"; exit 0"#;

/// A phase may be over before it is seen, and the kubelet of a busy machine be late with one of two pods.
const TRIES: usize = 4;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = scenarios![Shared: pod_with_rules_that_just_runs_is_deleted_as_one_without];
    scenarios.extend(under(
        &[Never, Always],
        "that_is_deleted_on_its_way_up_gives_what_runs_time_to_stop",
        gives_what_runs_time_to_stop,
    ));
    // What ignores SIGTERM would take all of a long grace period, restart or not.
    for (kind, grace) in [
        (NEVER, 60),
        (NEVER_WITH_GRACE, 1),
        (NEVER_WITH_INITS, 60),
        (ALWAYS_WITH_INITS, 60),
    ] {
        for &phase in kind.phases {
            let phase_name = format!("{phase:?}").to_lowercase();
            let name = format!("{}_is_deleted_while_{phase_name}", kind.name);
            scenarios.push(Scenario::new(name, Company::Alone, move |stage| {
                is_deleted_in(stage, kind, grace, phase)
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
    let mut tries = 0;
    let evidence = loop {
        let (pod, twin) = tokio::try_join!(
            stage.running(shape.clone()),
            stage.running(shape.without_annotations())
        )?;
        let evidence = pod.evidence_file()?;
        let params = DeleteParams::default();
        let (took, usual) =
            tokio::try_join!(pod.time_to_delete(&params), twin.time_to_delete(&params))?;
        if took.abs_diff(usual) <= SLACK {
            break evidence;
        }
        tries += 1;
        ensure!(
            tries < TRIES,
            "it was gone after {took:?}, a pod without rules after {usual:?}"
        );
    };
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

/// A sidecar runs again by then, and an init container waits.
async fn gives_what_runs_time_to_stop(stage: Stage, shape: Shape) -> Result<()> {
    let shape = shape
        .sidecar("proxy")
        .on_term(CLEAN_END)
        .asking_init("prepare")
        .regular("trainer")
        .with_pre_stop()
        .grace_period_seconds(60)
        .restarts_all("trainer", 42);
    let pod = stage.pod(shape).await?;
    pod.exit("prepare", 0).await?;
    pod.until_running().await?;
    pod.exit("trainer", 42).await?;
    for container in ["prepare", "proxy"] {
        pod.until_listening(container).await?;
    }
    let evidence = pod.evidence_file()?;
    let so_far = pod.evidence()?.len();
    pod.time_to_delete(&DeleteParams::default()).await?;
    let ending = evidence::entries(evidence)?.split_off(so_far);
    let stopped = Deed::Noted("stopped".to_owned());
    ensure!(
        evidence::deeds(&ending) == [("proxy", &Deed::Warned), ("proxy", &stopped)],
        "its end was {ending:?}"
    );
    Ok(())
}

/// Beside a pod that the kubelet restarts by itself: its trainer has exited too, and after the first phase so
/// have the others.
async fn is_deleted_in(stage: Stage, kind: PodKind, grace: u32, phase: Phase) -> Result<()> {
    let shape = (kind.shape)().with_pre_stop();
    let mut last = format!("no restart could be caught {phase:?}");
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
        let params = DeleteParams::default().grace_period(grace);
        let (took, usual) = tokio::try_join!(
            restart.pod.time_to_delete(&params),
            twin.time_to_delete(&params)
        )?;
        restart.until_over().await?;
        if took <= usual + SLACK {
            return Ok(());
        }
        last = format!("it was gone after {took:?}, one that the kubelet restarts after {usual:?}");
    }
    bail!("{last}, in {TRIES} tries")
}
