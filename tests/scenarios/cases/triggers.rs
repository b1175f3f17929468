//! Which exits set off a restart, and which do not.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::json;

use super::{restarted_by_both, under};
use crate::evidence::{Deed, Entry};
use crate::restarted::Before;
use crate::scenario::{Scenario, scenarios};
use crate::shape::RestartPolicy::{Always, Never};
use crate::shape::{Shape, restart_all_on, rule};
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

/// Without being woken, the kubelet looks at a pod once a minute.
const WOKEN: Duration = Duration::from_secs(45);

/// A start takes some fifty milliseconds.
const LOOK: Duration = Duration::from_millis(2);

pub(crate) fn scenarios() -> Vec<Scenario> {
    [
        scenarios![Shared:
            always_pod_restarts_after_an_exit_with_0,
            on_failure_pod_with_inits_restarts_after_an_exit_with_0,
            always_pod_restarts_when_a_container_says_so_at_its_second_exit,
            never_pod_restarts_when_a_sidecar_says_so_at_its_second_exit,
        ],
        under(
            &[Never, Always],
            "restarts_once_when_the_killed_match_a_rule_too",
            restarts_once_when_the_killed_match,
        ),
        under(
            &[Never, Always],
            "restarts_once_when_the_stopped_exit_with_the_code_too",
            restarts_once_when_the_stopped_match,
        ),
        under(
            &[Never, Always],
            "restarts_when_a_container_exits_as_soon_as_it_runs",
            restarts_as_soon_as_it_runs,
        ),
        under(
            &[Never, Always],
            "restarts_again_when_a_container_exits_after_the_new_start",
            restarts_again_after_the_new_start,
        ),
        scenarios![Shared: a_container_that_is_just_being_started_starts_afresh_too],
    ]
    .concat()
}

/// Of another container than the first time.
async fn restarts_again_after_the_new_start(stage: Stage, shape: Shape) -> Result<()> {
    restarted_by_both(&stage, shape).await?;
    Ok(())
}

async fn always_pod_restarts_after_an_exit_with_0(stage: Stage) -> Result<()> {
    let shape = Shape::always()
        .init("fetch")
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 0);
    stage.running(shape).await?.restarts_all("trainer", 0).await
}

async fn on_failure_pod_with_inits_restarts_after_an_exit_with_0(stage: Stage) -> Result<()> {
    let shape = Shape::on_failure()
        .init("fetch")
        .sidecar("proxy")
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 0);
    stage.running(shape).await?.restarts_all("trainer", 0).await
}

/// Its first exit is the policy's.
async fn always_pod_restarts_when_a_container_says_so_at_its_second_exit(
    stage: Stage,
) -> Result<()> {
    let shape = Shape::always()
        .init("fetch")
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42);
    let pod = stage.running(shape).await?;
    pod.restarts_alone("trainer", 7).await?;
    pod.restarts_all("trainer", 42).await
}

async fn never_pod_restarts_when_a_sidecar_says_so_at_its_second_exit(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .init("fetch")
        .sidecar("proxy")
        .regular("trainer")
        .restarts_all("proxy", 42);
    let pod = stage.running(shape).await?;
    pod.restarts_alone("proxy", 7).await?;
    pod.restarts_all("proxy", 42).await
}

async fn restarts_once_when_the_killed_match(stage: Stage, shape: Shape) -> Result<()> {
    let rules = json!([restart_all_on(&[42, 137, 143])]);
    let shape = shape
        .init("fetch")
        .sidecar("proxy")
        .regular("trainer")
        .regular("logger")
        .annotation("restart-rules.reprise.dev", rules.to_string());
    let pod = stage.running(shape).await?;
    pod.restarts_all("trainer", 42).await
}

async fn restarts_once_when_the_stopped_match(stage: Stage, shape: Shape) -> Result<()> {
    let rules = json!([rule("RestartPod", "In", &[42])]);
    let shape = shape
        .init("fetch")
        .sidecar("proxy")
        .on_term("exit 42")
        .regular("trainer")
        .regular("logger")
        .on_term("exit 42")
        .annotation("restart-rules.reprise.dev", rules.to_string());
    let pod = stage.running(shape).await?;
    pod.restarts_all("trainer", 42).await
}

/// Before the kubelet has looked.
async fn restarts_as_soon_as_it_runs(stage: Stage, shape: Shape) -> Result<()> {
    let shape = shape
        .init("fetch")
        .regular("trainer")
        .restarts_all("trainer", 42);
    let pod = stage.pod(shape).await?;
    pod.exit("trainer", 42).await?;
    wait::until("trainer begins again", WOKEN, async || {
        let times = count(&pod.evidence()?, "trainer", &Deed::Began);
        Ok(if times == 2 {
            Ok(())
        } else {
            Err(format!("it began {times} times"))
        })
    })
    .await?;
    pod.until_running().await?;
    let fetched = count(&pod.evidence()?, "fetch", &Deed::Ended);
    ensure!(fetched == 2, "the init container ran {fetched} times");
    Ok(())
}

fn count(entries: &[Entry], container: &str, deed: &Deed) -> usize {
    let entries = entries.iter();
    let found = entries.filter(|entry| entry.container == container && entry.deed == *deed);
    found.count()
}

async fn a_container_that_is_just_being_started_starts_afresh_too(stage: Stage) -> Result<()> {
    let shape = Shape::always()
        .init("fetch")
        .regular("trainer")
        .regular("loader")
        .restarts_all("trainer", 42);
    let pod = stage.running(shape).await?;
    let before = Before::of(&pod).await?;
    pod.exit("loader", 7).await?;
    wait::until_every(LOOK, "loader is created again", PATIENCE, async || {
        let containers = pod.containers().await?;
        let loaders = containers.iter().filter(|it| it.name() == "loader");
        Ok(if loaders.count() > 1 {
            Ok(())
        } else {
            Err("it is not".to_owned())
        })
    })
    .await?;
    pod.exit("trainer", 42).await?;
    pod.has_recovered(&before).await?;
    let fetched = count(&pod.evidence_since(&before)?, "fetch", &Deed::Ended);
    ensure!(fetched == 1, "the init container ran {fetched} times");
    Ok(())
}
