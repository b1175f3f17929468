//! What a scenario is given: a node, a plugin, and pods that are cleared away behind it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;

use crate::node::Node;
use crate::plugin::Plugin;
use crate::pod::LivePod;
use crate::shape::Shape;

/// A host name has no more, and the pod's is its own.
const LONGEST_NAME: usize = 63;

static PODS_MADE: AtomicU32 = AtomicU32::new(0);

#[derive(Clone)]
pub(crate) struct Stage {
    pub(crate) node: Arc<Node>,
    pub(crate) plugin: Arc<Plugin>,
    scenario: String,
    pods: Arc<Mutex<Vec<Arc<LivePod>>>>,
}

impl Stage {
    pub(crate) fn new(node: Arc<Node>, plugin: Arc<Plugin>, scenario: &str) -> Self {
        Self {
            node,
            plugin,
            scenario: scenario.to_owned(),
            pods: Arc::default(),
        }
    }

    /// A pod of that shape, created and no more.
    pub(crate) async fn pod(&self, shape: Shape) -> Result<Arc<LivePod>> {
        let suffix = format!(
            "-{}-{:04}",
            std::process::id(),
            PODS_MADE.fetch_add(1, Ordering::Relaxed)
        );
        let mut name = self.scenario.replace('_', "-");
        name.truncate(LONGEST_NAME - suffix.len());
        let name = name.trim_end_matches('-').to_owned() + &suffix;
        let node = Arc::clone(&self.node);
        let plugin = Arc::clone(&self.plugin);
        let pod = Arc::new(LivePod::create(node, plugin, shape, name).await?);
        self.lock().push(Arc::clone(&pod));
        Ok(pod)
    }

    /// A pod of that shape, all of it running.
    pub(crate) async fn running(&self, shape: Shape) -> Result<Arc<LivePod>> {
        let pod = self.pod(shape).await?;
        pod.until_running().await?;
        Ok(pod)
    }

    /// All pods of the scenario, as they are now.
    pub(crate) async fn report(&self) -> String {
        let mut reports = Vec::new();
        for pod in self.all() {
            reports.push(pod.report().await);
        }
        reports.join("\n")
    }

    pub(crate) async fn delete_pods(&self) -> Result<()> {
        for pod in self.all() {
            pod.begin_delete().await?;
        }
        for pod in self.all() {
            pod.delete().await?;
        }
        Ok(())
    }

    pub(crate) async fn until_nothing_is_left(&self) -> Result<()> {
        for pod in self.all() {
            pod.until_nothing_is_left().await?;
        }
        Ok(())
    }

    fn all(&self) -> Vec<Arc<LivePod>> {
        self.lock().clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Arc<LivePod>>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
