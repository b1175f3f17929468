//! `action: Restart`: one container only.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use serde_json::json;

use super::under;
use crate::evidence::{self, Deed};
use crate::restarted::Before;
use crate::scenario::{Scenario, scenarios};
use crate::shape::RestartPolicy::{Never, OnFailure};
use crate::shape::{Kind, Shape, rule};
use crate::stage::Stage;
use crate::under_way::UnderWay;
use crate::wait::{self, PATIENCE};

/// A replay of one container takes some fifty milliseconds.
const LOOK: Duration = Duration::from_millis(2);

/// It may be over before it is seen, or the other exit be read.
const TRIES: usize = 4;

pub(crate) fn scenarios() -> Vec<Scenario> {
    [
        scenarios![Shared:
            never_pod_restarts_one_container_and_leaves_the_others_alone,
            never_pod_restarts_its_only_container_alone,
            never_pod_restarts_an_init_container_alone,
            never_pod_restarts_a_sidecar_alone,
            never_pod_restarts_two_containers_alone_at_once,
            never_pod_restarts_as_a_whole_while_one_container_restarts_alone,
        ],
        under(
            &[Never, OnFailure],
            "restarts_containers_alone_whatever_they_exit_with",
            whatever_they_exit_with,
        ),
    ]
    .concat()
}

fn alone_on(shape: Shape, container: &str, codes: &[i32]) -> Shape {
    shape.rules(container, &json!([rule("Restart", "In", codes)]))
}

async fn never_pod_restarts_one_container_and_leaves_the_others_alone(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .init("fetch")
        .sidecar("proxy")
        .regular("trainer")
        .regular("logger");
    let pod = stage.running(alone_on(shape, "trainer", &[42])).await?;
    pod.restarts_alone("trainer", 42).await
}

async fn never_pod_restarts_its_only_container_alone(stage: Stage) -> Result<()> {
    let shape = Shape::never().init("fetch").regular("trainer");
    let pod = stage.running(alone_on(shape, "trainer", &[42])).await?;
    pod.restarts_alone("trainer", 42).await
}

/// Without the rule the pod would fail.
async fn never_pod_restarts_an_init_container_alone(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .init("fetch")
        .sidecar("proxy")
        .waiting_init("prepare")
        .regular("trainer");
    let pod = stage.pod(alone_on(shape, "prepare", &[42])).await?;
    pod.until_container_runs("prepare").await?;
    pod.restarts_alone("prepare", 42).await
}

/// The kubelet would do so without the rule.
async fn never_pod_restarts_a_sidecar_alone(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .init("fetch")
        .sidecar("proxy")
        .regular("trainer");
    let pod = stage.running(alone_on(shape, "proxy", &[42])).await?;
    pod.restarts_alone("proxy", 42).await
}

/// One with 0, which `OnFailure` would leave as it is, and another with a failure.
async fn whatever_they_exit_with(stage: Stage, shape: Shape) -> Result<()> {
    let shape = shape.init("fetch").regular("trainer").regular("logger");
    let shape = alone_on(alone_on(shape, "trainer", &[0]), "logger", &[42]);
    let pod = stage.running(shape).await?;
    pod.restarts_alone("trainer", 0).await?;
    pod.restarts_alone("logger", 42).await
}

/// The second while the kubelet has yet to start the first, which nothing else would start then.
async fn never_pod_restarts_two_containers_alone_at_once(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .regular("server");
    let shape = alone_on(alone_on(shape, "trainer", &[42]), "logger", &[42]);
    let pod = stage.running(shape.started_by("Kubelet")).await?;
    let before = Before::of(&pod).await?;
    pod.exit("trainer", 42).await?;
    pod.exit("logger", 42).await?;
    pod.have_restarted_alone(&before, &["trainer", "logger"])
        .await
}

async fn never_pod_restarts_as_a_whole_while_one_container_restarts_alone(
    stage: Stage,
) -> Result<()> {
    let shape = Shape::never()
        .init("fetch")
        .sidecar("proxy")
        .regular("trainer")
        .regular("logger")
        .restarts_all("logger", 43);
    let shape = alone_on(shape, "trainer", &[42]);
    for _ in 0..TRIES {
        let restart = UnderWay::begin(&stage, shape.clone()).await?;
        let UnderWay { pod, before } = &restart;
        let what = "trainer restarts, or has";
        let while_alone = wait::until_every(LOOK, what, PATIENCE, async || {
            let under_way = restart.phase().is_some();
            let over = evidence::have_begun(&pod.evidence_since(before)?, ["trainer"].into_iter());
            Ok(if under_way {
                Ok(true)
            } else {
                over.map(|()| false)
            })
        })
        .await?;
        pod.exit("logger", 43).await?;
        pod.has_recovered(before).await?;
        let after = pod.evidence_since(before)?;
        let times = |container: &str, deed: &Deed| {
            let entries = after.iter();
            let found = entries.filter(|it| it.container == container && it.deed == *deed);
            found.count()
        };
        for container in &pod.shape.containers {
            let runs = times(container.name, &Deed::Began);
            // The first of them may have run when the others were told to end.
            let most = if container.name == "trainer" { 2 } else { 1 };
            ensure!(
                (1..=most).contains(&runs),
                "{} began {runs} times: {after:?}",
                container.name
            );
        }
        for init in pod.shape.of_kind(Kind::Init) {
            let ends = times(init.name, &Deed::Ended);
            ensure!(ends == 1, "{} ended {ends} times: {after:?}", init.name);
        }
        pod.restart_ended("all containers run again")?;
        if while_alone {
            return Ok(());
        }
    }
    bail!("no restart of one container could be caught in {TRIES} tries")
}
