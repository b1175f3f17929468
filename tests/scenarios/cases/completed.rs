//! Regular containers that had ended before the restart: they run again with the others (KEP-5532, "Regular
//! Containers"), or stay as they are where the pod asks for that.

use std::sync::Arc;

use anyhow::{Result, ensure};
use serde_json::json;

use crate::pod::LivePod;
use crate::restarted::{Before, TRIES};
use crate::scenario::{Scenario, scenarios};
use crate::shape::{Kind, Shape};
use crate::stage::Stage;
use crate::wait::PATIENCE;

pub(crate) fn scenarios() -> Vec<Scenario> {
    scenarios![Shared:
        never_pod_runs_completed_containers_again,
        never_pod_runs_completed_containers_again_when_replayed,
        never_pod_with_inits_runs_completed_containers_again,
        never_pod_with_inits_restarts_again_while_its_status_is_stale,
        on_failure_pod_runs_a_succeeded_container_again,
        on_failure_pod_runs_a_succeeded_container_again_after_an_exit_with_0,
        never_pod_keeps_completed_containers_where_asked,
        never_pod_with_inits_keeps_completed_containers_where_asked,
        on_failure_pod_keeps_a_succeeded_container_where_asked,
        always_pod_keeps_nothing_that_its_policy_starts_again,
    ]
}

/// `loader` and `checker` end, then `trainer` asks for a restart.
async fn run_again(stage: Stage, shape: Shape, ended: &[(&str, i32)], trigger: i32) -> Result<()> {
    ran_again(&stage, shape, ended, trigger).await.map(drop)
}

async fn ran_again(
    stage: &Stage,
    shape: Shape,
    ended: &[(&str, i32)],
    trigger: i32,
) -> Result<Arc<LivePod>> {
    let pod = stage
        .running(shape.restarts_all("trainer", trigger))
        .await?;
    for (container, code) in ended {
        pod.stays_down(container, *code).await?;
    }
    let before = Before::of(&pod).await?;
    pod.exit("trainer", trigger).await?;
    // The kubelet drops the pod's status while what it has reported as ended for good runs (status_manager.go
    // `checkContainerStateTransition`).
    pod.has_restarted_unseen(&before).await?;
    let now = pod.recorder.current();
    for (container, code) in ended {
        let seen = &now.containers[*container];
        ensure!(!seen.ready, "{container} is told to be ready: {now}");
        pod.exit(container, *code).await?;
    }
    pod.recorder
        .until_alive("the status tells of it", PATIENCE, |now| {
            before.untold(&pod, now)
        })
        .await?;
    Ok(pod)
}

fn three() -> Shape {
    Shape::never()
        .regular("trainer")
        .regular("loader")
        .regular("checker")
}

async fn never_pod_runs_completed_containers_again(stage: Stage) -> Result<()> {
    run_again(stage, three(), &[("loader", 0), ("checker", 7)], 42).await
}

async fn never_pod_runs_completed_containers_again_when_replayed(stage: Stage) -> Result<()> {
    let ended = [("loader", 0), ("checker", 7)];
    let mut tries = 0;
    loop {
        let pod = ran_again(&stage, three().started_by("Auto"), &ended, 42).await?;
        tries += 1;
        if tries == TRIES || !pod.took_too_long() {
            return pod.was_started_again_by("Auto");
        }
    }
}

async fn never_pod_with_inits_runs_completed_containers_again(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .init("fetch")
        .sidecar("proxy")
        .regular("trainer")
        .regular("loader")
        .regular("checker");
    run_again(stage, shape, &[("loader", 0), ("checker", 7)], 42).await
}

async fn never_pod_with_inits_restarts_again_while_its_status_is_stale(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .init("fetch")
        .regular("trainer")
        .regular("loader")
        .restarts_all("trainer", 42);
    let pod = stage.running(shape).await?;
    pod.stays_down("loader", 0).await?;
    for _ in 0..2 {
        let before = Before::of(&pod).await?;
        pod.exit("trainer", 42).await?;
        pod.has_restarted_unseen(&before).await?;
    }
    pod.exit("loader", 0).await?;
    pod.recorder
        .until_alive("the status tells of both", PATIENCE, |now| {
            let seen = &now.containers["trainer"];
            let told = seen.is_running && seen.restarts == 2;
            (!told).then(|| "trainer runs for the third time".to_owned())
        })
        .await?;
    Ok(())
}

async fn on_failure_pod_runs_a_succeeded_container_again(stage: Stage) -> Result<()> {
    let shape = Shape::on_failure()
        .init("fetch")
        .regular("trainer")
        .regular("loader");
    run_again(stage, shape, &[("loader", 0)], 42).await
}

async fn on_failure_pod_runs_a_succeeded_container_again_after_an_exit_with_0(
    stage: Stage,
) -> Result<()> {
    let shape = Shape::on_failure().regular("trainer").regular("loader");
    run_again(stage, shape, &[("loader", 0)], 0).await
}

/// All others start afresh. Where a completed container would keep the kubelet from running init containers, it runs again.
async fn are_kept(
    stage: Stage,
    shape: Shape,
    ended: &[(&str, i32)],
    names: &'static [&'static str],
) -> Result<()> {
    let shape = shape.options(&json!({"completedContainers": "Keep"}));
    let has_inits = shape.of_kind(Kind::Init).next().is_some();
    if has_inits && stage.node.is_initialised_by_exited() {
        return run_again(stage, shape, ended, 42).await;
    }
    let pod = stage.running(shape.restarts_all("trainer", 42)).await?;
    for (container, code) in ended {
        pod.stays_down(container, *code).await?;
    }
    let before = Before::of(&pod).await?.keeping(names);
    pod.exit("trainer", 42).await?;
    pod.has_restarted(&before).await
}

async fn never_pod_keeps_completed_containers_where_asked(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .regular("trainer")
        .regular("loader")
        .regular("checker");
    let ended = [("loader", 0), ("checker", 7)];
    are_kept(stage, shape, &ended, &["loader", "checker"]).await
}

async fn never_pod_with_inits_keeps_completed_containers_where_asked(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .init("fetch")
        .sidecar("proxy")
        .regular("trainer")
        .regular("loader")
        .regular("checker");
    let ended = [("loader", 0), ("checker", 7)];
    are_kept(stage, shape, &ended, &["loader", "checker"]).await
}

async fn on_failure_pod_keeps_a_succeeded_container_where_asked(stage: Stage) -> Result<()> {
    let shape = Shape::on_failure()
        .init("fetch")
        .regular("trainer")
        .regular("loader");
    are_kept(stage, shape, &[("loader", 0)], &["loader"]).await
}

/// After its second exit it waits in back-off for ten seconds.
async fn always_pod_keeps_nothing_that_its_policy_starts_again(stage: Stage) -> Result<()> {
    let shape = Shape::always()
        .init("fetch")
        .regular("trainer")
        .regular("loader")
        .restarts_all("trainer", 42)
        .options(&json!({"completedContainers": "Keep"}));
    let pod = stage.running(shape).await?;
    pod.restarts_alone("loader", 7).await?;
    pod.exit("loader", 7).await?;
    pod.recorder
        .until("the second exit is seen", PATIENCE, |now| {
            let seen = &now.containers["loader"];
            let waits = seen.restarts == 1 && seen.state.starts_with("exit 7 ");
            (!waits).then(|| format!("loader is {}", seen.state))
        })
        .await?;
    pod.restarts_all("trainer", 42).await
}
