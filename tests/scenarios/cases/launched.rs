//! The runtime starts the plugin itself, as `10-reprise` in its plugin directory.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::json;
use tempfile::TempDir;

use crate::scenario::{Scenario, scenarios};
use crate::shape::Shape;
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

pub(crate) fn scenarios() -> Vec<Scenario> {
    scenarios![Alone: plugin_launched_by_the_runtime_restarts_pods]
}

async fn plugin_launched_by_the_runtime_restarts_pods(stage: Stage) -> Result<()> {
    stage.plugin.stop().await?;
    let dir = tempfile::Builder::new()
        .prefix("reprise-launched-")
        .tempdir()?;
    let installed = Installed::new(&stage, &dir)?;
    stage.node.restart_runtime().await?;
    let result = async {
        // Containers from before that moment have no hook: it began before it knew anything.
        let socket = dir.path().join("run/hook.sock");
        wait::until("the plugin listens to hooks", PATIENCE, async || {
            let there = socket.exists();
            Ok(there.then_some(()).ok_or_else(|| "not yet".to_owned()))
        })
        .await?;
        let shape = Shape::never()
            .regular("trainer")
            .regular("logger")
            .restarts_all("trainer", 42);
        let pod = stage.running(shape).await?;
        // What it logs, the runtime has.
        pod.restarted("trainer", 42).await?;
        wait::until("an event says that it has", PATIENCE, async || {
            let events = pod.events("RestartedAllContainers").await?;
            Ok((!events.is_empty())
                .then_some(())
                .ok_or_else(|| "none".to_owned()))
        })
        .await
    }
    .await;
    drop(installed);
    // The launched plugin ends with its connection.
    stage.node.restart_runtime().await?;
    result
}

/// The plugin and its configuration where the runtime looks for them; taken away at the end.
struct Installed {
    files: [PathBuf; 2],
}

impl Installed {
    fn new(stage: &Stage, dir: &TempDir) -> Result<Self> {
        let nri = stage.node.nri_socket.parent().unwrap_or(Path::new("/"));
        let files = [
            nri.join("plugins/10-reprise"),
            nri.join("conf.d/10-reprise.conf"),
        ];
        let installed = Self { files };
        let [executable, config] = &installed.files;
        std::fs::copy(&stage.plugin.binary, executable)
            .with_context(|| format!("cannot make {}", executable.display()))?;
        // JSON is YAML.
        let settings = json!({
            "cri-endpoint": stage.node.cri_endpoint,
            "kubeconfig": stage.node.plugin_kubeconfig,
            "node-name": stage.node.name,
            "run-dir": dir.path().join("run"),
            "state-dir": dir.path().join("state"),
        });
        std::fs::write(config, settings.to_string())?;
        Ok(installed)
    }
}

impl Drop for Installed {
    fn drop(&mut self) {
        for file in &self.files {
            // Not there if it could not be made.
            let _ = std::fs::remove_file(file);
        }
    }
}
