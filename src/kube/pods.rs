//! The pods of this node, as the API server last told of them.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use backon::ExponentialBuilder;
use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, ExponentialBackoff, watcher};
use kube::{Api, Client};
use tokio::sync::mpsc;

use super::pod_spec::PodSpec;
use crate::ids::PodUid;

/// Between two tries of an API server that is away, the first and the longest: a pod that is made before it is heard
/// again is unknown.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// What the API server told of a pod.
#[derive(Debug, Clone, PartialEq)]
pub enum PodChange {
    /// It is there, new or changed.
    Applied(Arc<PodSpec>),
    /// It is gone.
    Deleted(PodUid),
}

/// The last known specs. While the API server is away they stay as they are.
#[derive(Debug, Clone, Default)]
pub struct Pods {
    known: Arc<RwLock<HashMap<PodUid, Arc<PodSpec>>>>,
}

impl Pods {
    /// Watches the pods of node `node` for as long as the receiver is kept, and sends what changes.
    #[must_use]
    pub fn watch(client: Client, node: &str) -> (Self, mpsc::UnboundedReceiver<PodChange>) {
        let pods = Self::default();
        let (changes, receiver) = mpsc::unbounded_channel();
        let config = watcher::Config::default().fields(&format!("spec.nodeName={node}"));
        // Jitter keeps a cluster's nodes from coming back together.
        let pauses = ExponentialBuilder::new()
            .with_min_delay(FIRST_PAUSE)
            .with_max_delay(LONGEST_PAUSE)
            .with_jitter()
            .without_max_times();
        let stream = watcher(Api::<Pod>::all(client), config);
        let stream = stream.backoff(ExponentialBackoff::from(pauses));
        tokio::spawn(pods.clone().follow(stream, changes));
        (pods, receiver)
    }

    /// The pod of that UID, if the API server ever told of it.
    #[must_use]
    pub fn get(&self, uid: &PodUid) -> Option<Arc<PodSpec>> {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        known.get(uid).cloned()
    }

    /// All pods of the node.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<PodSpec>> {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        known.values().cloned().collect()
    }

    async fn follow(
        self,
        stream: impl Stream<Item = watcher::Result<Event<Pod>>>,
        changes: mpsc::UnboundedSender<PodChange>,
    ) {
        let mut stream = std::pin::pin!(stream);
        let mut listed = HashSet::new();
        let mut away = false;
        while let Some(event) = stream.next().await {
            match event {
                Ok(event) => {
                    if std::mem::take(&mut away) {
                        tracing::info!("the API server is back");
                    }
                    for change in self.note(event, &mut listed) {
                        if changes.send(change).is_err() {
                            return;
                        }
                    }
                }
                Err(error) => {
                    if !std::mem::replace(&mut away, true) {
                        tracing::warn!(%error, "the API server is away: going on with what is known");
                    }
                }
            }
        }
    }

    fn note(&self, event: Event<Pod>, listed: &mut HashSet<PodUid>) -> Vec<PodChange> {
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::Init => {
                listed.clear();
                Vec::new()
            }
            Event::InitApply(pod) | Event::Apply(pod) => {
                let Some(spec) = PodSpec::from_pod(&pod) else {
                    return Vec::new();
                };
                let spec = Arc::new(spec);
                listed.insert(spec.uid.clone());
                let before = known.insert(spec.uid.clone(), Arc::clone(&spec));
                // Most updates are of parts that are of no interest here.
                let same = before.is_some_and(|before| before == spec);
                if same {
                    Vec::new()
                } else {
                    vec![PodChange::Applied(spec)]
                }
            }
            Event::Delete(pod) => {
                let spec = PodSpec::from_pod(&pod);
                let gone = spec.and_then(|spec| known.remove(&spec.uid));
                gone.map(|spec| PodChange::Deleted(spec.uid.clone()))
                    .into_iter()
                    .collect()
            }
            Event::InitDone => {
                // Deleted while the API server could not say so.
                let gone: Vec<PodUid> = known
                    .keys()
                    .filter(|uid| !listed.contains(*uid))
                    .cloned()
                    .collect();
                for uid in &gone {
                    known.remove(uid);
                }
                gone.into_iter().map(PodChange::Deleted).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(uid: &str) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": uid, "namespace": "n", "uid": uid},
            "spec": {"containers": [{"name": "a"}]},
        }))
        .unwrap()
    }

    async fn told(events: Vec<watcher::Result<Event<Pod>>>) -> (Pods, Vec<String>) {
        let (changes, mut receiver) = mpsc::unbounded_channel();
        let pods = Pods::default();
        pods.clone()
            .follow(futures::stream::iter(events), changes)
            .await;
        let mut told = Vec::new();
        while let Some(change) = receiver.recv().await {
            told.push(match change {
                PodChange::Applied(spec) => format!("+{}", spec.uid),
                PodChange::Deleted(uid) => format!("-{uid}"),
            });
        }
        (pods, told)
    }

    #[tokio::test]
    async fn pods_come_and_go_and_unchanged_ones_are_not_told_twice() {
        let (pods, told) = told(vec![
            Ok(Event::Init),
            Ok(Event::InitApply(pod("u1"))),
            Ok(Event::InitDone),
            Ok(Event::Apply(pod("u1"))),
            Ok(Event::Apply(pod("u2"))),
            Ok(Event::Delete(pod("u1"))),
        ])
        .await;
        assert_eq!(told, ["+u1", "+u2", "-u1"]);
        assert!(pods.get(&"u2".into()).is_some() && pods.get(&"u1".into()).is_none());
    }

    #[tokio::test]
    async fn of_the_status_only_our_conditions_and_its_end_are_news() {
        let changed = |condition: &str, phase: &str| -> Pod {
            serde_json::from_value(json!({
                "metadata": {"name": "u1", "namespace": "n", "uid": "u1"},
                "spec": {"containers": [{"name": "a"}]},
                "status": {"phase": phase, "conditions": [{"type": condition, "status": "True"}]},
            }))
            .unwrap()
        };
        let (pods, told) = told(vec![
            Ok(Event::Apply(pod("u1"))),
            Ok(Event::Apply(changed("Ready", "Running"))),
            Ok(Event::Apply(changed("PodRestarting", "Running"))),
            Ok(Event::Apply(changed("PodRestarting", "Pending"))),
            Ok(Event::Apply(changed("PodRestarting", "Failed"))),
        ])
        .await;
        assert_eq!(told, ["+u1"; 3]);
        let spec = pods.get(&"u1".into()).unwrap();
        assert!(spec.restarting.contains("PodRestarting") && spec.ending);
    }

    #[tokio::test]
    async fn what_is_known_outlives_an_api_server_that_is_away() {
        let away = || Err(watcher::Error::NoResourceVersion);
        let (pods, told) = told(vec![
            Ok(Event::Apply(pod("u1"))),
            away(),
            away(),
            Ok(Event::Init),
        ])
        .await;
        assert_eq!(told, ["+u1"]);
        assert!(pods.get(&"u1".into()).is_some());
    }

    #[tokio::test]
    async fn pods_deleted_while_the_api_server_was_away_are_told_when_it_is_back() {
        let (_, told) = told(vec![
            Ok(Event::Apply(pod("u1"))),
            Ok(Event::Init),
            Ok(Event::InitApply(pod("u2"))),
            Ok(Event::InitDone),
        ])
        .await;
        assert_eq!(told, ["+u1", "+u2", "-u1"]);
    }
}
