//! Something keeps the hook from being made or from being run: the pod runs as well as it can without, and is told.

use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::{Result, ensure};
use serde_json::json;

use super::HOOKS_GIVE_UP;
use crate::evidence::Deed;
use crate::pod::LivePod;
use crate::restarted::Before;
use crate::runtime::{State, describe};
use crate::scenario::{Scenario, Skipped, of_containerd, scenarios, telling_nodes_apart};
use crate::shape::Shape;
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

const REFUSE_HOOKS: &str = "enable = true\nreject_oci_hook_adjustment = true\n";

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = scenarios![Alone: exit_is_seen_soon_when_the_hook_is_gone];
    scenarios.extend(telling_nodes_apart(scenarios![Alone:
        pods_run_and_restart_where_the_runtime_refuses_hooks,
        pod_that_requires_the_plugin_waits_for_it,
    ]));
    of_containerd("CRI-O runs no hooks of ours", scenarios)
}

fn three(shape: Shape) -> Shape {
    let shape = shape.init("fetch").regular("trainer").regular("logger");
    shape.restarts_all("trainer", 42)
}

async fn pods_run_and_restart_where_the_runtime_refuses_hooks(stage: Stage) -> Result<()> {
    let validator = Validator::set(&stage, REFUSE_HOOKS).await?;
    let played = async {
        let pod = stage.running(three(Shape::always())).await?;
        is_without_hooks(&pod).await?;
        pod.restarts_all("trainer", 42).await?;
        is_without_hooks(&pod).await?;
        // It may fail instead, as one from before the plugin.
        let pod = stage.running(three(Shape::never())).await?;
        let before = Before::of(&pod).await?;
        pod.exit("trainer", 42).await?;
        pod.has_recovered_or_failed(&before).await
    }
    .await;
    validator.unset(&stage).await?;
    played?;
    let pod = stage.running(three(Shape::always())).await?;
    for (container, hooks) in pod.hooks().await? {
        ensure!(hooks.len() == 1, "{container} has hooks {hooks:?}");
    }
    pod.restarts_all("trainer", 42).await
}

async fn is_without_hooks(pod: &LivePod) -> Result<()> {
    for (container, hooks) in pod.hooks().await? {
        ensure!(hooks.is_empty(), "{container} has hooks {hooks:?}");
    }
    wait::until("the pod is told so", PATIENCE, async || {
        let events = pod.events("NotProtected").await?;
        let mut messages = events.iter().filter_map(|event| event.message.as_deref());
        let told = messages.any(|message| message.contains("reject_oci_hook_adjustment"));
        Ok(told.then_some(()).ok_or_else(|| format!("{events:?}")))
    })
    .await
}

/// By the annotation of NRI's validator: it knows the plugin by its name.
async fn pod_that_requires_the_plugin_waits_for_it(stage: Stage) -> Result<()> {
    let validator = Validator::set(&stage, "enable = true\n").await?;
    let played = async {
        stage.plugin.stop().await?;
        let requires = json!(["reprise"]).to_string();
        let shape = three(Shape::never());
        let pod = stage
            .pod(shape.annotation("required-plugins.noderesource.dev", requires))
            .await?;
        wait::until("its first container is refused", PATIENCE, async || {
            let events = pod.events("Failed").await?;
            let mut messages = events.iter().filter_map(|event| event.message.as_deref());
            let refused = messages.any(|message| message.contains("required plugin"));
            Ok(refused.then_some(()).ok_or_else(|| format!("{events:?}")))
        })
        .await?;
        stage.plugin.start().await?;
        stage.plugin.until_ready(1).await?;
        pod.until_running().await?;
        pod.restarts_all("trainer", 42).await
    }
    .await;
    validator.unset(&stage).await?;
    played
}

/// What containerd's `default_validator` is told, for as long as a scenario lasts.
struct Validator {
    file: PathBuf,
    before: String,
}

impl Validator {
    async fn set(stage: &Stage, settings: &str) -> Result<Self> {
        let info = stage.node.status().await?.node_info.unwrap_or_default();
        if info
            .container_runtime_version
            .starts_with("containerd://1.")
        {
            return Err(Skipped("containerd has no such validator before 2.2").into());
        }
        let file = stage.node.containerd_config();
        let before = std::fs::read_to_string(&file)?;
        let table = "[plugins.\"io.containerd.nri.v1.nri\".default_validator]";
        std::fs::write(&file, format!("{before}\n{table}\n{settings}"))?;
        let validator = Self { file, before };
        restart_runtime(stage).await?;
        Ok(validator)
    }

    async fn unset(self, stage: &Stage) -> Result<()> {
        drop(self);
        restart_runtime(stage).await
    }
}

impl Drop for Validator {
    fn drop(&mut self) {
        // The scenario has failed then, and the node with it.
        let _ = std::fs::write(&self.file, &self.before);
    }
}

/// Returns when it has taken the plugin in again, if there is one.
async fn restart_runtime(stage: &Stage) -> Result<()> {
    let connections = stage.plugin.times_ready()?;
    stage.node.restart_runtime().await?;
    stage.plugin.start().await?;
    stage.plugin.until_ready(connections + 1).await
}

/// For as long as nothing else is wrong: containerd takes the hook for a failure of runc, and tries again after a second
/// (`handleEvent`, `internal/cri/server/events/events.go`), when runc has nothing left to do.
async fn exit_is_seen_soon_when_the_hook_is_gone(stage: Stage) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let hook = dir.path().join("reprise");
    std::fs::copy(&stage.plugin.binary, &hook)?;
    let path = hook.clone();
    stage
        .plugin
        .detour(|sockets| sockets.hook = Some(path))
        .await?;
    let pod = stage.running(three(Shape::always())).await?;
    std::fs::remove_file(&hook)?;
    let containers = pod.containers().await?;
    let mut loggers = containers.iter().filter(|it| it.name() == "logger");
    let id = loggers
        .next_back()
        .map(|it| it.id.clone())
        .unwrap_or_default();
    pod.exit("logger", 3).await?;
    wait::until("the exit can be seen", PATIENCE, async || {
        let containers = pod.containers().await?;
        let mut exited = containers.iter().filter(|it| it.id == id);
        Ok(if exited.any(|it| it.state() == State::Running) {
            Err(describe(&containers))
        } else {
            Ok(())
        })
    })
    .await?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    let evidence = pod.evidence()?;
    let exit = evidence.iter().rfind(|it| it.deed == Deed::Exited(3));
    let took = exit.map(|exit| now.saturating_sub(exit.at));
    ensure!(
        took.is_some_and(|took| took < HOOKS_GIVE_UP),
        "the exit was seen after {took:?}"
    );
    Ok(())
}
