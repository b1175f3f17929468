//! Many pods that restart in the same second.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use futures::future::try_join_all;
use serde::Serialize;
use serde_json::json;

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
    /// Of each pod, from its own exit.
    pub(crate) seconds: Vec<f64>,
}

/// Pods of a group that is asked to restart.
#[derive(Serialize)]
pub(crate) struct Group {
    /// Of each pod, from the moment when all are asked.
    pub(crate) seconds: Vec<f64>,
}

/// Beside a group of one.
const GROUP: usize = 20;

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
        let exit = async |pod: &LivePod| pod.exit(TRIGGER, CODE).await;
        let (pods, _) = together(&stage, &shape, options.burst, exit).await?;
        let mut seconds = Vec::new();
        for pod in &pods {
            seconds.push(took(pod, until_exited(pod).await?)?);
        }
        stage.delete_pods().await?;
        plugin.must_be_well().await?;
        say(&format!(
            "{} pods at once, {pod}, {way}: worst {:.3} s",
            options.burst,
            worst(&seconds)
        ));
        bursts.push(Burst { pod, way, seconds });
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
        let stage = Stage::new(Arc::clone(node), Arc::clone(plugin), "group");
        let shape = PodKind::One.to_be_restarted(Way::Replay, options);
        let ask = async |pod: &LivePod| pod.patch(&request).await;
        let (pods, asked) = together(&stage, &shape, count, ask).await?;
        let seconds = pods.iter().map(|pod| took(pod, asked));
        let seconds = seconds.collect::<Result<Vec<f64>>>()?;
        stage.delete_pods().await?;
        plugin.must_be_well().await?;
        say(&format!(
            "{count} pods asked together: worst {:.3} s",
            worst(&seconds)
        ));
        groups.push(Group { seconds });
    }
    Ok(groups)
}

/// So many pods that were told to restart, all at once, and have; and when that was, since the epoch.
async fn together(
    stage: &Stage,
    shape: &Shape,
    count: usize,
    tell: impl AsyncFn(&LivePod) -> Result<()>,
) -> Result<(Vec<Arc<LivePod>>, Duration)> {
    let pods = (0..count).map(|_| stage.running(shape.clone()));
    let pods = try_join_all(pods).await?;
    let before = try_join_all(pods.iter().map(|pod| Before::of(pod))).await?;
    let told = SystemTime::now().duration_since(UNIX_EPOCH)?;
    try_join_all(pods.iter().map(|pod| tell(pod))).await?;
    let restarts = pods.iter().zip(&before);
    try_join_all(restarts.map(|(pod, before)| pod.has_restarted(before))).await?;
    Ok((pods, told))
}

/// From then until the pod ran again, in seconds.
fn took(pod: &LivePod, since: Duration) -> Result<f64> {
    let running = running_since(pod, since)?;
    Ok(running.saturating_sub(since).as_secs_f64())
}

fn worst(seconds: &[f64]) -> f64 {
    seconds.iter().copied().fold(0.0, f64::max)
}
