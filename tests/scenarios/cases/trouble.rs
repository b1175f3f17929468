//! What else may happen around a restart.

use std::time::Duration;

use anyhow::{Result, ensure};
use futures::future::try_join_all;

use crate::restarted::Before;
use crate::runtime::{State, describe};
use crate::scenario::{Scenario, scenarios};
use crate::shape::Shape;
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

/// Triggers in the same moment, each in a pod of three containers.
const BURST: usize = 10;

/// The kubelet tries an API server that went away again and again, at growing intervals.
const RECONNECTED: Duration = Duration::from_mins(3);

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = scenarios![Shared:
        two_triggers_at_once_make_one_restart,
        pod_deleted_in_the_middle_of_a_restart_is_let_go,
    ];
    scenarios.extend(scenarios![Alone:
        ten_pods_restart_at_once,
        without_the_plugin_a_never_pod_with_rules_fails,
        pod_restarts_while_the_api_server_is_away,
        pod_restarts_after_the_runtime_was_killed,
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

/// The deletion of the pods at the end, and what is looked for after it, are the better half.
async fn pod_deleted_in_the_middle_of_a_restart_is_let_go(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .init("fetch")
        .sidecar("proxy")
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42);
    let pod = stage.running(shape).await?;
    let sandbox = pod.sandbox().await?;
    pod.exit("trainer", 42).await?;
    let record = stage.plugin.record_file(&sandbox);
    wait::until("the restart has begun", PATIENCE, async || {
        Ok(if record.exists() {
            Ok(())
        } else {
            Err("no record of it".to_owned())
        })
    })
    .await?;
    pod.delete().await?;
    wait::until("the record of the restart is gone", PATIENCE, async || {
        Ok(if record.exists() {
            Err(std::fs::read_to_string(&record).unwrap_or_default())
        } else {
            Ok(())
        })
    })
    .await
}

async fn ten_pods_restart_at_once(stage: Stage) -> Result<()> {
    let pods = try_join_all((0..BURST).map(|_| stage.running(never()))).await?;
    try_join_all(pods.iter().map(|pod| pod.restarts_all("trainer", 42))).await?;
    Ok(())
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

async fn pod_restarts_while_the_api_server_is_away(stage: Stage) -> Result<()> {
    let pod = stage.running(never()).await?;
    let before = Before::of(&pod).await?;
    let old: Vec<String> = pod.containers().await?.into_iter().map(|c| c.id).collect();
    stage.node.script("stop", "apiserver").await?;
    let restarted = async {
        pod.exit("trainer", 42).await?;
        wait::until("all run again in the runtime", PATIENCE, async || {
            let containers = pod.containers().await?;
            let fresh = containers
                .iter()
                .filter(|c| c.state() == State::Running && !old.contains(&c.id));
            Ok(if fresh.count() == pod.shape.containers.len() {
                Ok(())
            } else {
                Err(format!("\n{}", describe(&containers)))
            })
        })
        .await
    };
    let restarted = restarted.await;
    stage.node.script("start", "apiserver").await?;
    restarted?;
    pod.recorder
        .until("the kubelet reports again", RECONNECTED, |now| {
            now.containers
                .values()
                .all(|container| container.restarts == 0)
                .then(|| "the restart".to_owned())
        })
        .await?;
    pod.has_restarted(&before).await
}

async fn pod_restarts_after_the_runtime_was_killed(stage: Stage) -> Result<()> {
    let pod = stage.running(never()).await?;
    stage.node.script("kill", "containerd").await?;
    stage.node.script("start", "containerd").await?;
    stage.plugin.until_ready(2).await?;
    pod.restarts_all("trainer", 42).await?;
    let new = stage.running(never()).await?;
    new.restarts_all("trainer", 42).await
}
