//! Init containers and sidecars: as triggers, and on their way up after a restart (KEP-5532, "e2e tests").

use std::sync::Arc;

use anyhow::{Result, ensure};

use super::{restarted_by_both, under};
use crate::evidence::Deed;
use crate::pod::LivePod;
use crate::restarted::{Before, TRIES};
use crate::scenario::{Scenario, scenarios};
use crate::shape::RestartPolicy::{Always, Never, OnFailure};
use crate::shape::{Kind, Shape};
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

pub(crate) fn scenarios() -> Vec<Scenario> {
    [
        scenarios![Shared:
            never_pod_fails_when_an_init_container_fails_after_the_restart,
            always_pod_restarts_when_its_first_init_container_says_so,
            on_failure_pod_restarts_when_its_first_init_container_says_so,
            on_failure_pod_restarts_when_its_second_init_container_says_so,
        ],
        under(
            &[Always, OnFailure],
            "comes_up_when_an_init_container_fails_once_after_the_restart",
            comes_up_when_an_init_container_fails_once,
        ),
        under(
            &[Never, Always],
            "restarts_again_when_an_init_container_says_so_on_its_way_up",
            restarts_again_when_an_init_says_so,
        ),
        under(
            &[Never, Always],
            "restarts_again_when_a_sidecar_says_so_on_its_way_up",
            restarts_again_when_a_sidecar_says_so,
        ),
        under(
            &[Always, OnFailure],
            "runs_its_init_containers_once_per_restart",
            runs_its_init_containers_once_per_restart,
        ),
        under(
            &[Never, Always],
            "restarts_when_a_sidecar_says_so_before_the_others_began",
            restarts_before_the_others_began,
        ),
        under(
            &[Never, OnFailure, Always],
            "that_is_initialising_is_replayed_as_far_as_it_has_come",
            |stage, shape| replayed_while_initialising(stage, shape, "prepare"),
        ),
        under(
            &[Never, Always],
            "that_is_initialising_is_replayed_when_its_sidecar_says_so",
            |stage, shape| replayed_while_initialising(stage, shape, "proxy"),
        ),
    ]
    .concat()
}

/// A pod that restarts, and one of whose containers exits with `code` while `prepare` waits.
async fn on_its_way_up(
    stage: &Stage,
    shape: Shape,
    container: &str,
    code: i32,
) -> Result<(Arc<LivePod>, Before)> {
    let shape = shape
        .init("fetch")
        .sidecar("proxy")
        .asking_init("prepare")
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42)
        .restarts_all("proxy", 43)
        .restarts_all("prepare", 43);
    let pod = stage.pod(shape).await?;
    pod.exit("prepare", 0).await?;
    pod.until_running().await?;
    let before = Before::of(&pod).await?;
    pod.exit("trainer", 42).await?;
    pod.until_listening("prepare").await?;
    pod.exit(container, code).await?;
    Ok((pod, before))
}

fn of_inits(pod: &LivePod, before: &Before) -> Result<Vec<(String, Deed)>> {
    let is_init = |name: &str| pod.shape.of_kind(Kind::Init).any(|init| init.name == name);
    let entries = pod.evidence_since(before)?.into_iter();
    let entries = entries.filter(|entry| is_init(&entry.container));
    Ok(entries.map(|entry| (entry.container, entry.deed)).collect())
}

async fn never_pod_fails_when_an_init_container_fails_after_the_restart(
    stage: Stage,
) -> Result<()> {
    let (pod, before) = on_its_way_up(&stage, Shape::never(), "prepare", 7).await?;
    let now = pod.until_phase("Failed").await?;
    let prepare = &now.containers["prepare"];
    ensure!(prepare.state == "exit 7 (Error)", "{now}");
    pod.until_record_is_gone(&before).await?;
    pod.until_runtime_is_tidy(&["proxy", "trainer", "logger"])
        .await
}

/// Started by the kubelet, which tries that one again: after a replay it begins with the first
/// (`always_pod_whose_init_container_fails_in_the_replay_comes_up`).
async fn comes_up_when_an_init_container_fails_once(stage: Stage, shape: Shape) -> Result<()> {
    let shape = shape.started_by("Kubelet");
    let (pod, before) = on_its_way_up(&stage, shape, "prepare", 7).await?;
    let wanted = [
        ("fetch", Deed::Began),
        ("fetch", Deed::Ended),
        ("prepare", Deed::Began),
        ("prepare", Deed::Exited(7)),
        ("prepare", Deed::Began),
    ];
    comes_up(&pod, &before, &wanted).await
}

async fn restarts_again_when_an_init_says_so(stage: Stage, shape: Shape) -> Result<()> {
    let (pod, before) = on_its_way_up(&stage, shape, "prepare", 43).await?;
    let wanted = [
        ("fetch", Deed::Began),
        ("fetch", Deed::Ended),
        ("prepare", Deed::Began),
        ("prepare", Deed::Exited(43)),
        ("fetch", Deed::Began),
        ("fetch", Deed::Ended),
        ("prepare", Deed::Began),
    ];
    comes_up(&pod, &before, &wanted).await?;
    let lines = stage.plugin.log_lines(&pod.name)?;
    let failed = lines.iter().find(|line| line.contains("the pod fails"));
    ensure!(failed.is_none(), "it is said to have failed: {failed:?}");
    Ok(())
}

async fn restarts_again_when_a_sidecar_says_so(stage: Stage, shape: Shape) -> Result<()> {
    let (pod, before) = on_its_way_up(&stage, shape, "proxy", 43).await?;
    let wanted = [
        ("fetch", Deed::Began),
        ("fetch", Deed::Ended),
        ("prepare", Deed::Began),
        ("fetch", Deed::Began),
        ("fetch", Deed::Ended),
        ("prepare", Deed::Began),
    ];
    comes_up(&pod, &before, &wanted).await
}

/// Once the init containers have done what is `wanted` of them, and `prepare` succeeds.
async fn comes_up(pod: &LivePod, before: &Before, wanted: &[(&str, Deed)]) -> Result<()> {
    wait::until("the init containers have run", PATIENCE, async || {
        let ran = of_inits(pod, before)?;
        let seen = ran.iter().map(|(name, deed)| (name.as_str(), deed));
        let as_wanted = seen.eq(wanted.iter().map(|(name, deed)| (*name, deed)));
        Ok(as_wanted.then_some(()).ok_or_else(|| format!("{ran:?}")))
    })
    .await?;
    pod.exit("prepare", 0).await?;
    pod.recorder
        .until_alive("all containers run", PATIENCE, |now| {
            let old = now.containers["trainer"].id == before.snapshot.containers["trainer"].id;
            pod.not_running(now)
                .or_else(|| old.then(|| "a new trainer".to_owned()))
        })
        .await?;
    let ran = of_inits(pod, before)?;
    ensure!(
        ran.len() == wanted.len() + 1,
        "the init containers did {ran:?}"
    );
    pod.until_record_is_gone(before).await?;
    pod.until_runtime_is_tidy(&[]).await
}

async fn always_pod_restarts_when_its_first_init_container_says_so(stage: Stage) -> Result<()> {
    first_init_container_says_so(stage, Shape::always()).await
}

async fn on_failure_pod_restarts_when_its_first_init_container_says_so(stage: Stage) -> Result<()> {
    first_init_container_says_so(stage, Shape::on_failure()).await
}

async fn first_init_container_says_so(stage: Stage, shape: Shape) -> Result<()> {
    let shape = shape
        .waiting_init("fetch")
        .init("prepare")
        .regular("trainer")
        .restarts_all("fetch", 42);
    let pod = stage.pod(shape).await?;
    pod.until_container_runs("fetch").await?;
    pod.restarts_all("fetch", 42).await
}

async fn on_failure_pod_restarts_when_its_second_init_container_says_so(
    stage: Stage,
) -> Result<()> {
    let shape = Shape::on_failure()
        .init("fetch")
        .waiting_init("prepare")
        .regular("trainer")
        .restarts_all("prepare", 42);
    let pod = stage.pod(shape).await?;
    pod.until_container_runs("prepare").await?;
    pod.restarts_all("prepare", 42).await
}

async fn runs_its_init_containers_once_per_restart(stage: Stage, shape: Shape) -> Result<()> {
    restarted_by_both(&stage, shape.init("fetch").init("prepare")).await?;
    Ok(())
}

async fn restarts_before_the_others_began(stage: Stage, shape: Shape) -> Result<()> {
    let shape = shape
        .sidecar("proxy")
        .waiting_init("prepare")
        .regular("trainer")
        .restarts_all("proxy", 42);
    let pod = stage.pod(shape).await?;
    pod.until_container_runs("prepare").await?;
    pod.restarts_all("proxy", 42).await
}

/// The kubelet goes on with what it had not come to. Counts and exits are kept, as they are by its own feature.
async fn replayed_while_initialising(
    stage: Stage,
    shape: Shape,
    trigger: &'static str,
) -> Result<()> {
    let shape = shape
        .init("fetch")
        .sidecar("proxy")
        .waiting_init("prepare")
        .init("check")
        .regular("trainer")
        .restarts_all(trigger, 42)
        .started_by("Auto");
    let mut tries = 0;
    let (pod, before) = loop {
        let pod = stage.pod(shape.clone()).await?;
        pod.until_container_runs("prepare").await?;
        let before = Before::of(&pod).await?;
        pod.exit(trigger, 42).await?;
        let restarted = pod.has_restarted(&before).await;
        tries += 1;
        if tries == TRIES || !pod.took_too_long() {
            restarted?;
            break (pod, before);
        }
    };
    // Before the kubelet starts the next init container it removes what has exited of those before it
    // (`pruneInitContainersBeforeStart`, `pkg/kubelet/kuberuntime/kuberuntime_container.go`): one after another.
    let seen = pod.seen_since(&before);
    for name in ["fetch", "proxy", "prepare"] {
        let exit = match name {
            "fetch" => "exit 0",
            _ if name == trigger => "exit 42",
            _ => "exit 137",
        };
        let mut moments = seen.iter().filter_map(|now| now.containers.get(name));
        ensure!(
            moments.any(|it| it.restarts == 1 && it.last_state.starts_with(exit)),
            "{name} was not seen to have restarted once, after {exit}"
        );
    }
    pod.restart_ended("all containers run again, by replay")
}
