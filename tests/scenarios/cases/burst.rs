//! Many pods restart in the same second, as when a trainer's peers all lose it.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;

use crate::evidence::Deed;
use crate::pod::LivePod;
use crate::restarted::Before;
use crate::scenario::{Scenario, Skipped, scenarios, taking_long, telling_nodes_apart};
use crate::shape::Shape;
use crate::slow::SlowRuntime;
use crate::stage::Stage;
use crate::wait::PATIENCE;

/// Three containers each.
const MANY: usize = 30;
const HALF: usize = MANY / 2;
/// So many are made at once.
const AT_ONCE: usize = 10;
/// In which time all exit, while those that were first restart.
const TOGETHER: Duration = Duration::from_secs(5);

/// Of two cores, in hundredths of one.
const TENTH: u64 = 20;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = scenarios![Undisturbed:
        thirty_never_pods_restart_at_once,
        thirty_never_pods_are_replayed_at_once,
    ];
    scenarios.extend(taking_long(scenarios![Undisturbed:
        thirty_never_pods_with_an_init_container_restart_at_once,
        thirty_on_failure_pods_restart_at_once,
        thirty_always_pods_restart_at_once,
    ]));
    scenarios.extend(taking_long(telling_nodes_apart(scenarios![Undisturbed:
        fifteen_never_pods_are_replayed_at_once_on_a_runtime_that_is_ten_times_slower,
    ])));
    scenarios
}

async fn thirty_never_pods_restart_at_once(stage: Stage) -> Result<()> {
    restart_at_once(stage, of_three(Shape::never())).await?;
    Ok(())
}

async fn thirty_never_pods_with_an_init_container_restart_at_once(stage: Stage) -> Result<()> {
    restart_at_once(stage, of_three(Shape::never().init("fetch"))).await?;
    Ok(())
}

async fn thirty_on_failure_pods_restart_at_once(stage: Stage) -> Result<()> {
    restart_at_once(stage, of_three(Shape::on_failure())).await?;
    Ok(())
}

async fn thirty_always_pods_restart_at_once(stage: Stage) -> Result<()> {
    restart_at_once(stage, of_three(Shape::always())).await?;
    Ok(())
}

async fn thirty_never_pods_are_replayed_at_once(stage: Stage) -> Result<()> {
    let shape = of_three(Shape::never()).started_by("Auto");
    let pods = restart_at_once(stage, shape).await?;
    let replayed = pods
        .iter()
        .filter(|pod| pod.was_started_again_by("Auto").is_ok());
    let replayed = replayed.count();
    println!("note: {replayed} of {MANY} by replay");
    ensure!(2 * replayed > MANY, "most were left to the kubelet");
    Ok(())
}

async fn fifteen_never_pods_are_replayed_at_once_on_a_runtime_that_is_ten_times_slower(
    stage: Stage,
) -> Result<()> {
    // Their exits cannot be held for as long as all of it takes: they are killed one after another. Who starts them, and
    // how often the kubelet has tried to, is left open.
    let shape = of_three(Shape::never()).started_by("Auto");
    let pods = try_join_all((0..HALF).map(|_| stage.running(shape.clone()))).await?;
    let before = try_join_all(pods.iter().map(|pod| Before::of(pod))).await?;
    let slow = SlowRuntime::new(&stage.node, TENTH)?;
    let Some(slow) = slow else {
        return Err(Skipped("no cgroup v1 to slow the runtime down by").into());
    };
    try_join_all(pods.iter().map(|pod| pod.exit("trainer", 42))).await?;
    let restarts = pods.iter().zip(&before);
    let begun = restarts.clone();
    try_join_all(begun.map(|(pod, before)| pod.until_runs_afresh(before, 2 * PATIENCE))).await?;
    drop(slow);
    try_join_all(restarts.map(|(pod, before)| pod.has_recovered(before))).await?;
    Ok(())
}

fn of_three(shape: Shape) -> Shape {
    shape
        .regular("trainer")
        .regular("logger")
        .regular("server")
        .restarts_all("trainer", 42)
}

async fn restart_at_once(stage: Stage, shape: Shape) -> Result<Vec<Arc<LivePod>>> {
    let mut pods = Vec::new();
    while pods.len() < MANY {
        let some = (0..AT_ONCE).map(|_| stage.running(shape.clone()));
        pods.extend(try_join_all(some).await?);
    }
    let before = try_join_all(pods.iter().map(|pod| Before::of(pod))).await?;
    let began = SystemTime::now();
    try_join_all(pods.iter().map(|pod| pod.exit("trainer", 42))).await?;
    let restarts = pods.iter().zip(&before);
    let again = restarts.clone();
    try_join_all(again.map(|(pod, before)| pod.until_begun_within(before, 2 * PATIENCE))).await?;
    try_join_all(restarts.map(|(pod, before)| pod.has_restarted_or_begun_anew(before))).await?;
    let began = began.duration_since(SystemTime::UNIX_EPOCH)?;
    let mut took = Vec::new();
    for pod in &pods {
        let exit = time_of_exit(pod)?;
        let late = exit.saturating_sub(began);
        ensure!(
            late < TOGETHER,
            "the trainer of {} exited {late:?} late",
            pod.name
        );
        took.push(last_begin(pod)?.saturating_sub(exit));
    }
    took.sort_unstable();
    println!(
        "note: {MANY} pods, exit to all running: median {:.1} s, worst {:.1} s",
        took[MANY / 2].as_secs_f64(),
        took[MANY - 1].as_secs_f64()
    );
    Ok(pods)
}

fn time_of_exit(pod: &LivePod) -> Result<Duration> {
    let evidence = pod.evidence()?;
    let mut exits = evidence
        .iter()
        .filter(|entry| matches!(entry.deed, Deed::Exited(_)));
    Ok(exits.next().context("the trainer did not exit")?.at)
}

fn last_begin(pod: &LivePod) -> Result<Duration> {
    let evidence = pod.evidence()?;
    let begins = evidence.iter().filter(|entry| entry.deed == Deed::Began);
    begins
        .map(|entry| entry.at)
        .max()
        .context("no container began")
}
