//! What the plugin brings to a node, and what it leaves there.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use tokio::task::spawn_blocking;

use super::three_kinds::NEVER_WITH_INITS;
use crate::plugin::Phase;
use crate::pod::LivePod;
use crate::runtime::Container;
use crate::scenario::{Scenario, of_containerd, scenarios};
use crate::shape::Shape;
use crate::stage::Stage;
use crate::under_way::UnderWay;
use crate::wait::{self, PATIENCE};

/// A phase may be over before it is seen.
const TRIES: usize = 4;
/// Of a version that no container names, and of somebody else.
const OLD_HOOK: &str = "reprise-0.0.1-0123456789abcdef";
const OTHER_FILE: &str = "other";

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = scenarios![Alone: what_a_killed_plugin_has_left_is_cleaned_up];
    scenarios.extend(of_containerd(
        "CRI-O runs no hooks of ours",
        scenarios![Alone: hook_is_brought_along_and_old_ones_go],
    ));
    scenarios
}

async fn what_a_killed_plugin_has_left_is_cleaned_up(stage: Stage) -> Result<()> {
    let (done, said) = clean_up(&stage).await?;
    ensure!(
        !done && said.contains("another plugin is at work"),
        "cleaned up under a plugin: {said}"
    );
    for _ in 0..TRIES {
        let restart = UnderWay::begin(&stage, (NEVER_WITH_INITS.shape)()).await?;
        restart.reaches(Phase::Down).await?;
        restart.until_shielded(&stage).await?;
        stage.plugin.kill().await?;
        let left = left(&stage, &restart.pod).await?;
        let (done, said) = clean_up(&stage).await?;
        ensure!(done, "not cleaned up: {said}");
        let still = self::left(&stage, &restart.pod).await?;
        ensure!(still.is_empty(), "left by the cleaning: {still:?}\n{said}");
        stage.plugin.start().await?;
        stage.plugin.until_ready(1).await?;
        let all = ["placeholder", "condition", "record", "marker"];
        if all.iter().all(|it| left.contains(it)) {
            return Ok(());
        }
    }
    bail!("no restart could be caught with all that it leaves in {TRIES} tries")
}

impl UnderWay {
    /// Waits until a placeholder stands; nothing more is made before the exits are shown.
    async fn until_shielded(&self, stage: &Stage) -> Result<()> {
        wait::until("a placeholder stands", PATIENCE, async || {
            let there = left(stage, &self.pod).await?.contains(&"placeholder");
            let over = self.phase().is_none();
            Ok((there || over)
                .then_some(())
                .ok_or_else(|| "not yet".to_owned()))
        })
        .await
    }
}

/// What there is of ours on the node, by kinds.
async fn left(stage: &Stage, pod: &LivePod) -> Result<Vec<&'static str>> {
    let mut left = Vec::new();
    let containers = pod.containers().await?;
    if containers.iter().any(Container::is_placeholder) {
        left.push("placeholder");
    }
    let status = stage.node.pods().get(&pod.name).await?.status;
    let conditions = status.and_then(|it| it.conditions).unwrap_or_default();
    let ours = |kind: &str| kind.contains("AllContainersRestarting") || kind == "PodRestarting";
    if conditions.iter().any(|it| ours(&it.type_)) {
        left.push("condition");
    }
    let has_files = |dir: &Path| fs::read_dir(dir).is_ok_and(|mut it| it.next().is_some());
    if has_files(&stage.plugin.state_dir().join("restarts")) {
        left.push("record");
    }
    if has_files(&stage.plugin.run_dir().join("held")) {
        left.push("marker");
    }
    if has_files(&stage.plugin.state_dir()) || has_files(&stage.plugin.run_dir()) {
        left.push("file");
    }
    Ok(left)
}

async fn clean_up(stage: &Stage) -> Result<(bool, String)> {
    let mut command = stage.plugin.cleaning();
    let output = spawn_blocking(move || command.output()).await??;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Ok((output.status.success(), said))
}

async fn hook_is_brought_along_and_old_ones_go(stage: Stage) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let hooks = dir.path().join("hooks");
    fs::create_dir(&hooks)?;
    for file in [OLD_HOOK, OTHER_FILE] {
        fs::write(hooks.join(file), "")?;
    }
    let brought = hooks.clone();
    stage
        .plugin
        .detour(|sockets| sockets.hook_dir = Some(brought))
        .await?;
    let shape = Shape::never().regular("trainer").regular("logger");
    let pod = stage.running(shape.restarts_all("trainer", 42)).await?;
    let named = pod.hooks().await?;
    for (container, paths) in named {
        let path = paths
            .first()
            .with_context(|| format!("{container} has no hook"))?;
        let ours = Path::new(path).parent() == Some(&hooks);
        ensure!(
            ours && fs::metadata(path)?.len() > 0,
            "the hook of {container} is {path}"
        );
    }
    wait::until("old hooks are gone", PATIENCE, async || {
        let there = hooks.join(OLD_HOOK).exists();
        Ok((!there).then_some(()).ok_or_else(|| "not yet".to_owned()))
    })
    .await?;
    ensure!(
        hooks.join(OTHER_FILE).exists(),
        "somebody else's file is gone"
    );
    pod.restarts_all("trainer", 42).await?;
    stage.delete_pods().await?;
    stage.plugin.go_straight().await
}
