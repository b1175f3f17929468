//! Many pods that restart in the same second.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use futures::future::try_join_all;
use kube::api::{Patch, PatchParams};
use serde::Serialize;
use serde_json::json;

use crate::node::Node;
use crate::options::Options;
use crate::plugin::Plugin;
use crate::restarted::Before;
use crate::restarts::{CODE, PodKind, TRIGGER, Way, running_since, until_exited};
use crate::say;
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
        let pods = (0..options.burst).map(|_| stage.running(shape.clone()));
        let pods = try_join_all(pods).await?;
        let before = try_join_all(pods.iter().map(|pod| Before::of(pod))).await?;
        try_join_all(pods.iter().map(|pod| pod.exit(TRIGGER, CODE))).await?;
        let restarts = pods.iter().zip(&before);
        try_join_all(restarts.map(|(pod, before)| pod.has_restarted(before))).await?;
        let mut seconds = Vec::new();
        for pod in &pods {
            let exited = until_exited(pod).await?;
            let took: Duration = running_since(pod, exited)?.saturating_sub(exited);
            seconds.push(took.as_secs_f64());
        }
        stage.delete_pods().await?;
        plugin.must_be_well().await?;
        let worst = seconds.iter().copied().fold(0.0, f64::max);
        say(&format!(
            "{} pods at once, {pod}, {way}: worst {worst:.3} s",
            options.burst
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
    for pods in [1, GROUP] {
        let stage = Stage::new(Arc::clone(node), Arc::clone(plugin), "group");
        let shape = PodKind::One.to_be_restarted(Way::Replay, options);
        let pods = try_join_all((0..pods).map(|_| stage.running(shape.clone()))).await?;
        let before = try_join_all(pods.iter().map(|pod| Before::of(pod))).await?;
        let asked = SystemTime::now().duration_since(UNIX_EPOCH)?;
        let request =
            json!({"metadata": {"annotations": {"restart-request.reprise.dev/pod": "1"}}});
        let (api, params) = (node.pods(), PatchParams::default());
        let request = Patch::Merge(request);
        try_join_all(
            pods.iter()
                .map(|pod| api.patch(&pod.name, &params, &request)),
        )
        .await?;
        let restarts = pods.iter().zip(&before);
        try_join_all(restarts.map(|(pod, before)| pod.has_restarted(before))).await?;
        let seconds = pods.iter().map(|pod| {
            let running = running_since(pod, asked)?;
            Ok(running.saturating_sub(asked).as_secs_f64())
        });
        let seconds = seconds.collect::<Result<Vec<f64>>>()?;
        stage.delete_pods().await?;
        plugin.must_be_well().await?;
        let worst = seconds.iter().copied().fold(0.0, f64::max);
        say(&format!(
            "{} pods asked together: worst {worst:.3} s",
            seconds.len()
        ));
        groups.push(Group { seconds });
    }
    Ok(groups)
}
