//! The kubelet's CPU manager gives whole cores to containers of Guaranteed pods, and takes them from all others.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::pod::LivePod;
use crate::restarted::Before;
use crate::runtime::State;
use crate::scenario::{Scenario, scenarios};
use crate::shape::Shape;
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

/// The cores that the container may use.
const NOTE: &str = "say \"note $(sed -n 's/^Cpus_allowed_list:[^0-9]*//p' /proc/self/status)\"";

pub(crate) fn scenarios() -> Vec<Scenario> {
    scenarios![Alone: exclusive_cpus_stay_exclusive]
}

/// Of two cores the first is everybody's. What had completed before the second was taken runs again on the first alone.
async fn exclusive_cpus_stay_exclusive(stage: Stage) -> Result<()> {
    stage.node.with_exclusive_cpus(true).await?;
    let stay = stay_exclusive(&stage).await;
    stage.node.with_exclusive_cpus(false).await?;
    stay
}

async fn stay_exclusive(stage: &Stage) -> Result<()> {
    for start in ["Kubelet", "Auto"] {
        let others = Shape::on_failure()
            .regular("trainer")
            .at_first(NOTE)
            .regular("loader")
            .at_first(NOTE);
        let others = others.restarts_all("trainer", 42).started_by(start);
        let others = stage.running(others).await?;
        let cores = others.notes().await?;
        others.stays_down("loader", 0).await?;
        let owner = Shape::never()
            .regular("trainer")
            .field("resources", exactly("1"))
            .at_first(NOTE);
        let owner = owner.restarts_all("trainer", 42).started_by(start);
        let owner = stage.running(owner).await?;
        let own = owner.notes().await?;
        ensure!(
            own.len() == 1 && own != cores,
            "it has {own:?} of {cores:?}"
        );

        let before = owner.restarts_all_since("trainer", 42).await?;
        owner.was_started_again_by(start)?;
        let again = owner.notes_since(&before)?;
        ensure!(again == own, "its cores were {own:?} and are {again:?}");

        let left = until_taken_from(&others, &cores).await?;
        let before = Before::of(&others).await?;
        others.exit("trainer", 42).await?;
        others.has_restarted_unseen(&before).await?;
        others.restart_ended(match start {
            "Kubelet" => "(no replay: start: Kubelet)",
            _ => "(no replay: loader may have to run on other CPUs by now)",
        })?;
        let again = others.notes_since(&before)?;
        ensure!(
            again == [left.as_str(), left.as_str()],
            "{left} was left, and they have {again:?}"
        );
        stage.delete_pods().await?;
    }
    Ok(())
}

fn exactly(cpu: &str) -> Value {
    let sizes = json!({"cpu": cpu, "memory": "64Mi"});
    json!({"limits": sizes, "requests": sizes})
}

/// The kubelet does so every 10 s.
async fn until_taken_from(others: &LivePod, cores: &[String]) -> Result<String> {
    let containers = others.containers().await?;
    let running = containers.iter().find(|it| it.state() == State::Running);
    let container = running.context("none of its containers runs")?;
    wait::until("the others have one core less", PATIENCE, async || {
        let now = allowed_cores(&container.id)?;
        Ok(if cores.contains(&now) {
            Err(now)
        } else {
            Ok(now)
        })
    })
    .await
}

/// Of any process in the container's cgroup, as the host sees it.
fn allowed_cores(container: &str) -> Result<String> {
    for process in std::fs::read_dir("/proc")?.flatten() {
        let read = |file: &str| std::fs::read_to_string(process.path().join(file));
        // Not a process, or one that has ended.
        let (Ok(cgroup), Ok(status)) = (read("cgroup"), read("status")) else {
            continue;
        };
        if cgroup.contains(container) {
            let mut lines = status.lines();
            let cores = lines.find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
            return Ok(cores.context("a process without cores")?.trim().to_owned());
        }
    }
    bail!("{container} has no process")
}
