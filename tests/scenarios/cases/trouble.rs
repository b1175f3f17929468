//! What else may happen around a restart.

use std::time::Duration;

use anyhow::{Result, ensure};
use futures::future::try_join_all;
use tokio::task::spawn_blocking;

use super::three_kinds;
use crate::pod::LivePod;
use crate::restarted::Before;
use crate::runtime::{State, describe};
use crate::scenario::{Scenario, scenarios};
use crate::shape::Shape;
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

/// The kubelet tries an API server that went away again and again, at growing intervals.
const RECONNECTED: Duration = Duration::from_mins(3);

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = scenarios![Shared: two_triggers_at_once_make_one_restart];
    scenarios.extend(scenarios![Alone:
        without_the_plugin_a_never_pod_with_rules_fails,
        pods_restart_while_the_api_server_is_away,
        pod_restarts_after_the_runtime_was_killed,
        run_directory_that_was_cleared_is_made_again,
    ]);
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
    let pod = stage.running(never().restarts_all("logger", 42)).await?;
    let before = Before::of(&pod).await?;
    tokio::try_join!(pod.exit("trainer", 42), pod.exit("logger", 42))?;
    pod.has_restarted(&before).await
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
    let shapes = [by_kubelet, replayed].concat().into_iter();
    let pods = try_join_all(shapes.map(|shape| stage.running(shape))).await?;
    let before = try_join_all(pods.iter().map(|pod| Before::of(pod))).await?;
    stage.node.script("kill", "apiserver").await?;
    // One after another: a replay that falls back because all come at once has run its init containers once more.
    let restarted = async {
        for pod in &pods {
            restarts_unseen(pod).await?;
        }
        anyhow::Ok(())
    }
    .await;
    stage.node.script("start", "apiserver").await?;
    restarted?;
    for (pod, before) in pods.iter().zip(&before) {
        pod.recorder
            .until("the kubelet reports again", RECONNECTED, |now| {
                let mut containers = now.containers.values();
                containers
                    .all(|container| container.restarts == 0)
                    .then(|| "the restart".to_owned())
            })
            .await?;
        pod.has_restarted(before).await?;
    }
    Ok(())
}

/// As far as the runtime can tell.
async fn restarts_unseen(pod: &LivePod) -> Result<()> {
    let old: Vec<String> = pod.containers().await?.into_iter().map(|c| c.id).collect();
    let wanted = pod.shape.lasting().count();
    pod.exit("trainer", 42).await?;
    wait::until("all run again in the runtime", PATIENCE, async || {
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
    stage.node.start_again("containerd").await?;
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
