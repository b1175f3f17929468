//! From the exit of one container to all containers running: by the plugin, by the kubelet itself,
//! and by deleting the pod and creating it again.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use kube::api::DeleteParams;
use serde::Serialize;
use tokio::time::sleep;

use crate::evidence::{Deed, Entry};
use crate::node::Node;
use crate::options::Options;
use crate::plugin::Plugin;
use crate::pod::LivePod;
use crate::restarted::Before;
use crate::say;
use crate::shape::{Kind, Shape};
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

pub(crate) const CODE: i32 = 42;
pub(crate) const TRIGGER: &str = "trainer";

/// Beside the trigger.
const MORE: [&str; 11] = [
    "worker-0", "worker-1", "worker-2", "worker-3", "worker-4", "worker-5", "worker-6", "worker-7",
    "loader", "logger", "server",
];

/// Between two looks of the kubelet at the runtime.
const RELIST: Duration = Duration::from_secs(1);

/// What follows an exit is begun by this process only when the pod is recreated; a late look would be
/// charged to that.
const CLOSE_LOOK: Duration = Duration::from_millis(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Way {
    /// The kubelet restarts all containers itself.
    Native,
    /// The plugin restarts them, and the kubelet starts them.
    Kubelet,
    /// The plugin restarts and starts them.
    Replay,
    Recreate,
}

impl Way {
    pub(crate) const ALL: [Self; 4] = [Self::Native, Self::Kubelet, Self::Replay, Self::Recreate];

    /// That pod with what makes its trigger's exit restart it in this way.
    fn equip(self, shape: Shape) -> Shape {
        match self {
            Self::Native => shape.restarts_all_by_itself(CODE),
            Self::Kubelet => shape.restarts_all(TRIGGER, CODE).started_by("Kubelet"),
            Self::Replay => shape.restarts_all(TRIGGER, CODE).started_by("Auto"),
            Self::Recreate => shape,
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Native => "the kubelet alone",
            Self::Kubelet => "Reprise, start by kubelet",
            Self::Replay => "Reprise, replay",
            Self::Recreate => "delete and create",
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum PodKind {
    One,
    Three,
    ThreeIgnoringTerm,
    FiveIgnoringTerm,
    TwoInitsTwoRegulars,
    Twelve,
}

impl PodKind {
    pub(crate) const ALL: [Self; 6] = [
        Self::One,
        Self::Three,
        Self::ThreeIgnoringTerm,
        Self::FiveIgnoringTerm,
        Self::TwoInitsTwoRegulars,
        Self::Twelve,
    ];

    /// The trigger is the last container.
    fn shape(self) -> Shape {
        let never = Shape::never();
        match self {
            Self::One => never,
            Self::Three | Self::ThreeIgnoringTerm => never.regular("loader").regular("logger"),
            Self::FiveIgnoringTerm => never
                .regular("loader")
                .regular("logger")
                .regular("server")
                .regular("saver"),
            Self::TwoInitsTwoRegulars => never.init("fetch").init("prepare").regular("logger"),
            Self::Twelve => MORE.into_iter().fold(never, Shape::regular),
        }
        .regular(TRIGGER)
    }

    pub(crate) fn to_be_restarted(self, way: Way, options: &Options) -> Shape {
        let shape = way.equip(self.shape()).grace_period_seconds(options.grace);
        match self {
            Self::ThreeIgnoringTerm | Self::FiveIgnoringTerm => shape.ignoring_term(),
            Self::One | Self::Three | Self::TwoInitsTwoRegulars | Self::Twelve => shape,
        }
    }
}

impl fmt::Display for PodKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::One => "one container",
            Self::Three => "three that end at SIGTERM",
            Self::ThreeIgnoringTerm => "three that ignore SIGTERM",
            Self::FiveIgnoringTerm => "five that ignore SIGTERM",
            Self::TwoInitsTwoRegulars => "two init, two regular containers",
            Self::Twelve => "twelve containers",
        })
    }
}

#[derive(Serialize)]
pub(crate) struct Round {
    pub(crate) pod: PodKind,
    pub(crate) way: Way,
    #[serde(rename = "round")]
    number: u32,
    #[serde(flatten)]
    pub(crate) outcome: Outcome,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    Seconds(f64),
    Failed(String),
}

impl Round {
    pub(crate) fn failed(&self) -> bool {
        matches!(self.outcome, Outcome::Failed(_))
    }

    pub(crate) fn seconds(&self) -> Option<f64> {
        match self.outcome {
            Outcome::Seconds(seconds) => Some(seconds),
            Outcome::Failed(_) => None,
        }
    }
}

/// All pods in all ways, each round a fresh pod: the kubelet's back-off is a pod's own. The ways take
/// turns, so that whatever else happens to the machine happens to all of them.
pub(crate) async fn measure(
    node: &Arc<Node>,
    plugin: &Arc<Plugin>,
    options: &Options,
) -> Result<Vec<Round>> {
    let mut rounds = Vec::new();
    for round in 0..options.rounds {
        for pod in PodKind::ALL {
            let mut ways = Way::ALL;
            ways.rotate_left(round as usize % Way::ALL.len());
            for way in ways {
                let stage = Stage::new(Arc::clone(node), Arc::clone(plugin), "bench");
                let shape = pod.to_be_restarted(way, options);
                // Anywhere between two looks of the kubelet, the same place for all ways.
                let moment = RELIST * round / options.rounds;
                let result = restart(&stage, way, shape, moment).await;
                let outcome = match result {
                    Ok(took) => Outcome::Seconds(took.as_secs_f64()),
                    Err(error) => {
                        say(&stage.report().await);
                        Outcome::Failed(format!("{error:#}"))
                    }
                };
                stage.delete_pods().await?;
                say(&format!(
                    "round {} of {}, {pod}, {way}: {}",
                    round + 1,
                    options.rounds,
                    match &outcome {
                        Outcome::Seconds(seconds) => format!("{seconds:.3} s"),
                        Outcome::Failed(why) => format!("FAILED: {why}"),
                    }
                ));
                // Without it, what is left to measure would only fail as well.
                plugin.must_be_well().await?;
                rounds.push(Round {
                    pod,
                    way,
                    number: round + 1,
                    outcome,
                });
            }
        }
    }
    Ok(rounds)
}

async fn restart(stage: &Stage, way: Way, shape: Shape, moment: Duration) -> Result<Duration> {
    let pod = stage.running(shape).await?;
    let before = Before::of(&pod).await?;
    // The pod was seen running just after the kubelet had looked, and would exit so every time.
    sleep(moment).await;
    pod.exit(TRIGGER, CODE).await?;
    let exited = until_exited(&pod).await?;
    let successor = match way {
        Way::Native | Way::Kubelet | Way::Replay => {
            pod.has_restarted(&before).await?;
            None
        }
        Way::Recreate => Some(recreate(stage, &pod).await?),
    };
    let now = successor.as_ref().unwrap_or(&pod);
    let running = running_since(now, exited)?;
    Ok(running.saturating_sub(exited))
}

/// When the trigger says that it exits.
pub(crate) async fn until_exited(pod: &LivePod) -> Result<Duration> {
    wait::until_every(CLOSE_LOOK, "the trigger exits", PATIENCE, async || {
        let evidence = pod.evidence()?;
        let exit = evidence.iter().find(|it| it.deed == Deed::Exited(CODE));
        Ok(exit
            .map(|exit| exit.at)
            .ok_or_else(|| format!("{evidence:?}")))
    })
    .await
}

/// As `kubectl delete` does, with the pod's own grace period, and `kubectl create` as soon as it is gone.
async fn recreate(stage: &Stage, pod: &LivePod) -> Result<LivePod> {
    let pods = stage.node.pods();
    pods.delete(&pod.name, &DeleteParams::default()).await?;
    pod.recorder.until_gone(PATIENCE).await?;
    let node = Arc::clone(&stage.node);
    let plugin = Arc::clone(&stage.plugin);
    let successor = LivePod::create(node, plugin, pod.shape.clone(), pod.name.clone()).await?;
    successor.until_running().await?;
    for container in successor.shape.of_kind(Kind::Regular) {
        successor.until_listening(container.name).await?;
    }
    Ok(successor)
}

/// When the last of the regular containers began after the exit, as they wrote it down themselves.
pub(crate) fn running_since(pod: &LivePod, exited: Duration) -> Result<Duration> {
    let evidence = pod.evidence()?;
    let begin = |name: &str| {
        let mut later = evidence.iter().filter(|it: &&Entry| it.at >= exited);
        later
            .find(|it| it.container == name && it.deed == Deed::Began)
            .map(|it| it.at)
            .with_context(|| format!("{name} did not begin again: {evidence:?}"))
    };
    let mut last = exited;
    for container in pod.shape.of_kind(Kind::Regular) {
        last = last.max(begin(container.name)?);
    }
    Ok(last)
}
