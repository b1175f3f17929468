//! In the middle of a restart the plugin, the runtime, the kubelet or their connection ends and comes
//! back: the pod runs at the end, and nothing is left behind.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use nri::api::{Container, PodSandbox};
use nri::{EventMask, Plugin, Stub};
use tokio::sync::{Notify, oneshot};
use tokio::time::sleep;

use super::HOOKS_GIVE_UP;
use super::three_kinds::{ALWAYS_WITH_INITS, NEVER, NEVER_WITH_GRACE, NEVER_WITH_INITS, PodKind};
use crate::plugin::Phase;
use crate::pod::LivePod;
use crate::relay::Relay;
use crate::restarted::Before;
use crate::runtime::State;
use crate::scenario::{Company, Scenario, scenarios, taking_long};
use crate::stage::Stage;
use crate::under_way::UnderWay;

/// A phase may be over before it is seen, or between the look and the blow.
const TRIES: usize = 4;
/// Less than a runtime gives a plugin.
const SLOW_START: Duration = Duration::from_millis(500);

#[derive(Clone, Copy)]
enum Blow {
    /// SIGKILL for the plugin, and no plugin for so long.
    PluginDies(Duration),
    /// SIGKILL for containerd.
    RuntimeDies,
    /// SIGKILL for the kubelet.
    KubeletDies,
    /// Between the plugin and NRI.
    ConnectionIsCut,
}

impl fmt::Display for Blow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PluginDies(away) => write!(f, "a_plugin_away_for_{}ms", away.as_millis()),
            Self::RuntimeDies => f.write_str("a_killed_runtime"),
            Self::KubeletDies => f.write_str("a_killed_kubelet"),
            Self::ConnectionIsCut => f.write_str("a_cut_connection"),
        }
    }
}

pub(crate) fn scenarios() -> Vec<Scenario> {
    use Phase::{Clear, Down, Shielded};
    let moment = Blow::PluginDies(Duration::from_millis(100));
    let second = Blow::PluginDies(Duration::from_secs(1));
    let long = Blow::PluginDies(Duration::from_secs(20));
    let mut table: Vec<(PodKind, Phase, Blow)> = Vec::new();
    for kind in [NEVER, NEVER_WITH_INITS, ALWAYS_WITH_INITS] {
        table.extend(kind.phases.iter().map(|&phase| (kind, phase, moment)));
    }
    table.extend([
        (NEVER_WITH_INITS, Down, long),
        (NEVER_WITH_INITS, Shielded, long),
        (ALWAYS_WITH_INITS, Clear, long),
    ]);
    for blow in [
        second,
        Blow::RuntimeDies,
        Blow::KubeletDies,
        Blow::ConnectionIsCut,
    ] {
        let kind = NEVER_WITH_INITS;
        table.extend(kind.phases.iter().map(|&phase| (kind, phase, blow)));
        table.push((NEVER_WITH_GRACE, Down, blow));
        table.push((ALWAYS_WITH_INITS, Clear, blow));
    }
    let scenario = |(kind, phase, blow): (PodKind, Phase, Blow)| {
        let phase_name = format!("{phase:?}").to_lowercase();
        let name = format!("{}_survives_{blow}_while_{phase_name}", kind.name);
        Scenario::new(name, Company::Alone, move |stage| {
            survives(stage, kind, phase, blow)
        })
    };
    let is_short = |&(_, phase, blow): &(PodKind, Phase, Blow)| match blow {
        Blow::PluginDies(away) => away < Duration::from_secs(1),
        Blow::RuntimeDies | Blow::KubeletDies | Blow::ConnectionIsCut => phase == Down,
    };
    let (short, long): (Vec<_>, Vec<_>) = table.into_iter().partition(is_short);
    let mut scenarios: Vec<Scenario> = short.into_iter().map(scenario).collect();
    scenarios.extend(taking_long(long.into_iter().map(scenario).collect()));
    scenarios.extend(scenarios![Alone:
        never_pod_survives_a_plugin_that_is_told_to_end_while_the_runtime_starts_its_containers,
    ]);
    scenarios
}

/// A plugin on NRI that takes its time over every start.
struct SlowStarts {
    begun: Notify,
}

impl Plugin for SlowStarts {
    fn events(&self) -> EventMask {
        EventMask::START_CONTAINER
    }

    async fn start_container(&self, _pod: PodSandbox, _container: Container) {
        self.begun.notify_one();
        sleep(SLOW_START).await;
    }
}

/// The runtime cancels a start whose caller goes away, and the container has then failed.
async fn never_pod_survives_a_plugin_that_is_told_to_end_while_the_runtime_starts_its_containers(
    stage: Stage,
) -> Result<()> {
    let pod = stage.running((NEVER.shape)().started_by("Replay")).await?;
    let slow = Arc::new(SlowStarts {
        begun: Notify::new(),
    });
    let stub = Stub::<SlowStarts>::builder(Arc::clone(&slow)).name("slow-starts");
    let stub = stub.socket(stage.node.nri_socket.clone()).build()?;
    let (end, ended) = oneshot::channel::<()>();
    let slows = tokio::spawn(stub.run(async { drop(ended.await) }));
    let restart = UnderWay::of(pod).await?;
    slow.begun.notified().await;
    stage.plugin.stop().await?;
    drop(end);
    slows.await??;
    stage.plugin.start().await?;
    stage.plugin.until_ready(1).await?;
    restart.until_over().await?;
    restart.pod.has_restarted(&restart.before).await
}

/// A runtime that was killed shows the exits that were held as soon as it is back. If the kubelet looks before they are
/// shielded, it has a container of a Never pod down as exited, and drops every status in which it runs again.
fn exit_was_seen(pod: &LivePod, before: &Before) -> bool {
    let mut seen = pod.seen_since(before).into_iter();
    seen.any(|now| now.containers["trainer"].state.starts_with("exit 42"))
}

/// What a kubelet that dies then makes once more, and counts.
async fn made_and_not_started(pod: &LivePod) -> Result<Vec<String>> {
    let containers = pod.containers().await?;
    let created = containers.iter();
    let created = created.filter(|it| it.state() == State::Created && it.is_the_kubelets());
    Ok(created.map(|it| it.name().to_owned()).collect())
}

async fn survives(stage: Stage, kind: PodKind, phase: Phase, blow: Blow) -> Result<()> {
    let relay = match blow {
        Blow::ConnectionIsCut => {
            let relay = Relay::start(stage.node.nri_socket.clone())?;
            let socket = relay.socket.clone();
            stage.plugin.detour(|sockets| sockets.nri = socket).await?;
            Some(relay)
        }
        _ => None,
    };
    for _ in 0..TRIES {
        let restart = UnderWay::begin(&stage, (kind.shape)()).await?;
        if !restart.reaches(phase).await? {
            continue;
        }
        let connections = stage.plugin.times_ready()?;
        match blow {
            Blow::PluginDies(_) => stage.plugin.kill().await?,
            Blow::RuntimeDies => stage.node.kill(&stage.node.runtime_name)?,
            Blow::KubeletDies => stage.node.kill("kubelet")?,
            Blow::ConnectionIsCut => relay.iter().for_each(Relay::cut),
        }
        let struck_in = restart.phase();
        let mut half_made = Vec::new();
        match blow {
            Blow::PluginDies(away) => {
                sleep(away).await;
                stage.plugin.start().await?;
                stage.plugin.until_ready(1).await?;
            }
            Blow::RuntimeDies => {
                stage.node.start_again(&stage.node.runtime_name).await?;
                stage.plugin.until_ready(connections + 1).await?;
            }
            Blow::KubeletDies => {
                // Waits for its end.
                stage.node.script("kill", "kubelet").await?;
                half_made = made_and_not_started(&restart.pod).await?;
                stage.node.script("start", "kubelet").await?;
            }
            Blow::ConnectionIsCut => stage.plugin.until_ready(connections + 1).await?,
        }
        // What the kubelet started meanwhile may run, and yet not last: the plugin finishes what it began.
        restart.until_over().await?;
        let UnderWay { pod, before } = &restart;
        match blow {
            Blow::PluginDies(away) if away > HOOKS_GIVE_UP => {
                pod.has_recovered_or_failed(before).await?;
            }
            Blow::RuntimeDies if exit_was_seen(pod, before) => {
                let end = if pod.recorder.current().is_over() {
                    pod.has_recovered_or_failed(before).await?;
                    "failed"
                } else {
                    pod.has_recovered_unseen(before).await?;
                    "restarted"
                };
                println!("note: the kubelet saw the exits, and the pod {end}");
            }
            // The plugin and its gate were there all the time.
            Blow::KubeletDies if half_made.is_empty() => pod.has_restarted(before).await?,
            Blow::KubeletDies => {
                println!("note: the kubelet had made {half_made:?}, and makes them anew");
                pod.has_recovered(before).await?;
                pod.inits_ran_once_in_order(before)?;
            }
            _ => pod.has_recovered(before).await?,
        }
        if struck_in == Some(phase) {
            return Ok(());
        }
    }
    bail!("no restart could be caught {phase:?} in {TRIES} tries")
}
