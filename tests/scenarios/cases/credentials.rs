//! Who the plugin is to the API server, and who else could be that.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use anyhow::{Result, ensure};

use super::conditions::{all_containers, true_then_false};
use crate::scenario::{Scenario, scenarios};
use crate::shape::Shape;
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = scenarios![Shared: what_speaks_for_others_on_the_node_is_roots_alone];
    scenarios.extend(scenarios![Alone: kubelets_own_credentials_serve_the_plugin]);
    scenarios
}

/// The node's API server runs with `NodeRestriction`.
async fn kubelets_own_credentials_serve_the_plugin(stage: Stage) -> Result<()> {
    let kubelets = stage.node.kubelet_kubeconfig();
    stage
        .plugin
        .detour(|sockets| sockets.kubeconfig = Some(kubelets))
        .await?;
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42);
    let pod = stage.running(shape).await?;
    let before = pod.restarted("trainer", 42).await?;
    true_then_false(&pod.told_since(&before, all_containers(&stage).await?))?;
    wait::until("an event that the pod restarted", PATIENCE, async || {
        let events = pod.events("RestartedAllContainers").await?;
        let ours = |it: &str| it == "reprise";
        let ours = events
            .iter()
            .any(|it| it.reporting_component.as_deref().is_some_and(ours));
        Ok(ours.then_some(()).ok_or_else(|| format!("{events:?}")))
    })
    .await?;
    // The one right that they have not.
    let lacks = stage
        .plugin
        .new_log_lines("grant the verb list on events")?;
    ensure!(lacks.len() == 1, "{lacks:?}");
    Ok(())
}

async fn what_speaks_for_others_on_the_node_is_roots_alone(stage: Stage) -> Result<()> {
    let secrets = stage.node.secrets()?;
    // Three kubeconfigs, a plugin's, the tokens, and two keys.
    ensure!(secrets.len() >= 7, "only these were found: {secrets:?}");
    for secret in secrets {
        let mode = fs::metadata(&secret)?.permissions().mode();
        ensure!(mode & 0o777 == 0o600, "{}: {mode:o}", secret.display());
    }
    Ok(())
}
