//! What else may happen around a restart.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use futures::future::try_join_all;
use serde_json::json;
use tokio::task::spawn_blocking;

use super::three_kinds;
use crate::evidence::Deed;
use crate::pod::LivePod;
use crate::restarted::Before;
use crate::runtime::{State, describe};
use crate::scenario::{Scenario, scenarios, taking_long};
use crate::shape::{Shape, rule};
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

/// The kubelet tries an API server that went away again and again, at growing intervals.
const RECONNECTED: Duration = Duration::from_mins(3);

/// The restart that one exit asks for may kill the container before it has read its own.
const TRIES: usize = 4;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = scenarios![Shared: two_triggers_at_once_make_one_restart];
    scenarios.extend(scenarios![Alone:
        without_the_plugin_a_never_pod_with_rules_fails,
        pod_restarts_after_the_runtime_was_killed,
        run_directory_that_was_cleared_is_made_again,
    ]);
    scenarios.extend(taking_long(
        scenarios![Alone: pods_restart_while_the_api_server_is_away],
    ));
    scenarios
}

fn never() -> Shape {
    Shape::never()
        .regular("trainer")
        .regular("logger")
        .regular("server")
        .restarts_all("trainer", 42)
}

async fn two_triggers_at_once_make_one_restart(stage: Stage) -> Result<()> {
    for _ in 0..TRIES {
        let pod = stage.running(never().restarts_all("logger", 42)).await?;
        let before = Before::of(&pod).await?;
        tokio::try_join!(pod.exit("trainer", 42), pod.exit("logger", 42))?;
        pod.has_restarted(&before).await?;
        let after = pod.evidence_since(&before)?;
        let exits = after.iter().filter(|it| it.deed == Deed::Exited(42));
        let asked: BTreeSet<&str> = exits.map(|it| it.container.as_str()).collect();
        if asked.len() == 2 {
            return Ok(());
        }
    }
    bail!("one of the two was killed before it could exit, {TRIES} times")
}

/// It fails as any Never pod does, and at once: its hooks find nobody and hold nothing up.
async fn without_the_plugin_a_never_pod_with_rules_fails(stage: Stage) -> Result<()> {
    let pod = stage.running(never()).await?;
    stage.plugin.stop().await?;
    for container in ["trainer", "logger", "server"] {
        pod.exit(container, 42).await?;
    }
    let now = pod.until_phase("Failed").await?;
    let exits = now.containers.values();
    ensure!(exits.clone().all(|c| c.state == "exit 42 (Error)"), "{now}");
    Ok(())
}

async fn pods_restart_while_the_api_server_is_away(stage: Stage) -> Result<()> {
    let by_kubelet = three_kinds::ALL.map(|kind| (kind.shape)());
    let replayed = three_kinds::ALL.map(|kind| (kind.shape)().started_by("Auto"));
    let alone = json!([rule("Restart", "In", &[42])]);
    let alone = ["Kubelet", "Auto"].map(|who| never().rules("trainer", &alone).started_by(who));
    let shapes = by_kubelet.iter().chain(&replayed).chain(&alone);
    let pods = try_join_all(shapes.map(|shape| stage.running(shape.clone()))).await?;
    let before = try_join_all(pods.iter().map(|pod| Before::of(pod))).await?;
    stage.node.script("kill", "apiserver").await?;
    let whole = by_kubelet.len() + replayed.len();
    // One after another: a replay that falls back because all come at once has run its init containers once more.
    let restarted = async {
        for (index, pod) in pods.iter().enumerate() {
            let all = pod.shape.lasting().count();
            let fresh = if index < whole { all } else { 1 };
            restarts_unseen(pod, fresh).await?;
        }
        anyhow::Ok(())
    }
    .await;
    stage.node.script("start", "apiserver").await?;
    restarted?;
    for (index, (pod, before)) in pods.iter().zip(&before).enumerate() {
        pod.recorder
            .until("the kubelet reports again", RECONNECTED, |now| {
                let mut containers = now.containers.values();
                containers
                    .all(|container| container.restarts == 0)
                    .then(|| "the restart".to_owned())
            })
            .await?;
        if index < whole {
            pod.has_restarted(before).await?;
        } else {
            pod.have_restarted_alone(before, &["trainer"]).await?;
        }
    }
    Ok(())
}

/// As far as the runtime can tell: so many have been started, and run.
async fn restarts_unseen(pod: &LivePod, wanted: usize) -> Result<()> {
    let old: Vec<String> = pod.containers().await?.into_iter().map(|c| c.id).collect();
    pod.exit("trainer", 42).await?;
    wait::until("they run again in the runtime", PATIENCE, async || {
        let containers = pod.containers().await?;
        let fresh = containers
            .iter()
            .filter(|c| c.state() == State::Running && !old.contains(&c.id));
        Ok(if fresh.count() == wanted {
            Ok(())
        } else {
            Err(format!("\n{}", describe(&containers)))
        })
    })
    .await
}

async fn pod_restarts_after_the_runtime_was_killed(stage: Stage) -> Result<()> {
    let pod = stage.running(never()).await?;
    let connections = stage.plugin.times_ready()?;
    stage.node.start_again(&stage.node.runtime_name).await?;
    stage.plugin.until_ready(connections + 1).await?;
    pod.restarts_all("trainer", 42).await?;
    let new = stage.running(never()).await?;
    new.restarts_all("trainer", 42).await
}

async fn run_directory_that_was_cleared_is_made_again(stage: Stage) -> Result<()> {
    let pod = stage.running(never()).await?;
    let dir = stage.plugin.run_dir();
    std::fs::remove_dir_all(&dir)?;
    wait::until("hooks find a socket again", PATIENCE, async || {
        let there = dir.join("hook.sock").exists();
        Ok(there.then_some(()).ok_or_else(|| "they do not".to_owned()))
    })
    .await?;
    pod.restarts_all("trainer", 42).await?;
    // It still keeps others away.
    let mut second = stage.plugin.another();
    let ended = spawn_blocking(move || second.output()).await??.status;
    ensure!(
        ended.code() == Some(1),
        "a second plugin ended with {ended}"
    );
    Ok(())
}
