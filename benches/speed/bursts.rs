//! Many pods that restart in the same second.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use futures::future::{join_all, try_join_all};
use serde::Serialize;
use serde_json::json;

use crate::machine::{Ticks, at_rest};
use crate::node::Node;
use crate::options::Options;
use crate::plugin::Plugin;
use crate::pod::LivePod;
use crate::restarted::Before;
use crate::restarts::{CODE, PodKind, TRIGGER, Way, running_since, until_exited};
use crate::say;
use crate::shape::Shape;
use crate::stage::Stage;

#[derive(Serialize)]
pub(crate) struct Burst {
    pub(crate) pod: PodKind,
    pub(crate) way: Way,
    /// Of each pod that restarted, from its own exit.
    pub(crate) seconds: Vec<f64>,
    /// Pods that did not, or whose status never said so.
    pub(crate) failed: usize,
}

/// Pods that are asked to restart together.
#[derive(Serialize)]
pub(crate) struct Group {
    pub(crate) pods: usize,
    /// Of each pod of each round, from the moment when all are asked.
    pub(crate) seconds: Vec<f64>,
    /// Per cent of the cores' time that was used from then until all ran, of each round.
    pub(crate) busy: Vec<f64>,
}

/// Beside a group of one.
const GROUP: usize = 20;
const GROUP_ROUNDS: usize = 3;

pub(crate) const POD_KINDS: [PodKind; 2] = [PodKind::Three, PodKind::ThreeIgnoringTerm];

/// Three containers a pod, by all ways that need no new pod.
pub(crate) async fn measure(
    node: &Arc<Node>,
    plugin: &Arc<Plugin>,
    options: &Options,
) -> Result<Vec<Burst>> {
    let mut bursts = Vec::new();
    let ways = [Way::Native, Way::Kubelet, Way::Replay];
    for (pod, way) in POD_KINDS
        .into_iter()
        .flat_map(|pod| ways.map(|way| (pod, way)))
    {
        let stage = Stage::new(Arc::clone(node), Arc::clone(plugin), "burst");
        let shape = pod.to_be_restarted(way, options);
        let pods = running(&stage, &shape, options.burst).await?;
        try_join_all(pods.iter().map(|(pod, _)| pod.exit(TRIGGER, CODE))).await?;
        let restarts = pods.iter().map(|(pod, before)| pod.has_restarted(before));
        let (mut seconds, mut failed) = (Vec::new(), 0);
        for ((pod, _), restarted) in pods.iter().zip(join_all(restarts).await) {
            if let Err(error) = restarted {
                say(&format!("{} failed: {error:#}", pod.name));
                failed += 1;
            } else {
                seconds.push(took(pod, until_exited(pod).await?)?);
            }
        }
        stage.delete_pods().await?;
        plugin.must_be_well().await?;
        say(&format!(
            "{} pods at once, {pod}, {way}: worst {:.3} s",
            options.burst,
            worst(&seconds)
        ));
        bursts.push(Burst {
            pod,
            way,
            seconds,
            failed,
        });
    }
    Ok(bursts)
}

/// Pods of one container each, by replay: as many as a job may have, and one for comparison.
pub(crate) async fn measure_groups(
    node: &Arc<Node>,
    plugin: &Arc<Plugin>,
    options: &Options,
) -> Result<Vec<Group>> {
    let mut groups = Vec::new();
    let request = json!({"metadata": {"annotations": {"restart-request.reprise.dev/pod": "1"}}});
    for count in [1, GROUP] {
        let (mut seconds, mut busy) = (Vec::new(), Vec::new());
        for _ in 0..GROUP_ROUNDS {
            let stage = Stage::new(Arc::clone(node), Arc::clone(plugin), "group");
            let shape = PodKind::One.to_be_restarted(Way::Replay, options);
            let pods = running(&stage, &shape, count).await?;
            at_rest().await?;
            let asked = SystemTime::now().duration_since(UNIX_EPOCH)?;
            let ticks = Ticks::now()?;
            try_join_all(pods.iter().map(|(pod, _)| pod.patch(&request))).await?;
            let begun = pods
                .iter()
                .map(|(pod, before)| pod.until_begun_again(before));
            try_join_all(begun).await?;
            busy.push(ticks.busy_since()?);
            let restarts = pods.iter().map(|(pod, before)| pod.has_restarted(before));
            try_join_all(restarts).await?;
            for (pod, _) in &pods {
                seconds.push(took(pod, asked)?);
            }
            stage.delete_pods().await?;
            plugin.must_be_well().await?;
        }
        say(&format!(
            "{count} pods asked together: worst {:.3} s",
            worst(&seconds)
        ));
        groups.push(Group {
            pods: count,
            seconds,
            busy,
        });
    }
    Ok(groups)
}

/// So many pods that run, each as it is before it restarts.
async fn running(
    stage: &Stage,
    shape: &Shape,
    count: usize,
) -> Result<Vec<(Arc<LivePod>, Before)>> {
    let pods = (0..count).map(|_| stage.running(shape.clone()));
    let pods = try_join_all(pods).await?;
    let before = try_join_all(pods.iter().map(|pod| Before::of(pod))).await?;
    Ok(pods.into_iter().zip(before).collect())
}

/// From then until the pod ran again, in seconds.
fn took(pod: &LivePod, since: Duration) -> Result<f64> {
    let running = running_since(pod, since)?;
    Ok(running.saturating_sub(since).as_secs_f64())
}

fn worst(seconds: &[f64]) -> f64 {
    seconds.iter().copied().fold(0.0, f64::max)
}
