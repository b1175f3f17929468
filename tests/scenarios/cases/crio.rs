//! What is so on CRI-O alone: a process holds the exits, and of containers from before it, too.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use super::HOOKS_GIVE_UP;
use crate::pod::LivePod;
use crate::runtime::State;
use crate::scenario::{Scenario, Skipped, scenarios, telling_nodes_apart};
use crate::shape::Shape;
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

/// In which an exit is seen that nobody holds, on a busy node.
const SOON: Duration = Duration::from_secs(5);

pub(crate) fn scenarios() -> Vec<Scenario> {
    telling_nodes_apart(scenarios![Alone:
        pods_from_before_the_plugin_are_protected_on_crio,
        plugin_that_is_stopped_keeps_no_exit_from_being_seen_on_crio,
        process_that_holds_exits_is_replaced_when_it_dies,
    ])
}

fn never() -> Shape {
    Shape::never().regular("trainer").regular("logger")
}

fn on_crio(stage: &Stage) -> Result<()> {
    if !stage.node.is_crio() {
        bail!(Skipped("hooks hold exits on this runtime"));
    }
    Ok(())
}

async fn pods_from_before_the_plugin_are_protected_on_crio(stage: Stage) -> Result<()> {
    on_crio(&stage)?;
    stage.plugin.stop().await?;
    let pod = stage.running(never().restarts_all("trainer", 42)).await?;
    stage.plugin.start().await?;
    stage.plugin.until_ready(1).await?;
    pod.restarts_all("trainer", 42).await?;
    let told = pod.events("NotProtected").await?;
    ensure!(told.is_empty(), "{told:?}");
    Ok(())
}

async fn plugin_that_is_stopped_keeps_no_exit_from_being_seen_on_crio(stage: Stage) -> Result<()> {
    on_crio(&stage)?;
    let without_rules = stage.running(never()).await?;
    let with_rules = stage.running(never().restarts_all("trainer", 42)).await?;
    let pid = i32::try_from(stage.plugin.pid().await?)?;
    let pid = Pid::from_raw(pid).context("the plugin has no process")?;
    kill_process(pid, Signal::STOP)?;
    let seen = async {
        without_rules.exit("trainer", 42).await?;
        is_seen(&without_rules, SOON).await?;
        with_rules.exit("trainer", 42).await?;
        is_seen(&with_rules, HOOKS_GIVE_UP).await
    }
    .await;
    kill_process(pid, Signal::CONT)?;
    seen
}

async fn is_seen(pod: &LivePod, limit: Duration) -> Result<()> {
    wait::until("the runtime shows the exit", limit, async || {
        let containers = pod.containers().await?;
        let mut trainers = containers.iter().filter(|it| it.name() == "trainer");
        let seen = trainers.any(|it| it.state() == State::Exited);
        Ok(seen.then_some(()).ok_or_else(|| "not yet".to_owned()))
    })
    .await
}

async fn process_that_holds_exits_is_replaced_when_it_dies(stage: Stage) -> Result<()> {
    on_crio(&stage)?;
    let pod = stage.running(never().restarts_all("trainer", 42)).await?;
    let said = "exits are held";
    let before = stage.plugin.log_lines(said)?.len();
    for holder in holders(&stage)? {
        kill_process(holder, Signal::KILL)?;
    }
    wait::until("exits are held again", PATIENCE, async || {
        let again = stage.plugin.log_lines(said)?.len() > before;
        Ok(again.then_some(()).ok_or_else(|| "not yet".to_owned()))
    })
    .await?;
    pod.restarts_all("trainer", 42).await
}

/// Processes that hold exits for this plugin.
fn holders(stage: &Stage) -> Result<Vec<Pid>> {
    let socket = stage.plugin.run_dir().join("hook.sock");
    let mut holders = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let entry = entry?;
        // Not all are processes, and those that are may end.
        let pid = entry.file_name().to_str().and_then(|it| it.parse().ok());
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line);
        if line.split('\0').nth(1) == Some("hold") && line.contains(&*socket.to_string_lossy()) {
            holders.extend(pid.and_then(Pid::from_raw));
        }
    }
    ensure!(!holders.is_empty(), "nobody holds exits");
    Ok(holders)
}
