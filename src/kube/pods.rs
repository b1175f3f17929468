//! The pods of this node, as the API server last told of them.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event};
use tokio::sync::broadcast;
use tokio::task::JoinHandle;

use super::pod_spec::PodSpec;
use crate::ids::PodUid;

/// How many changes a subscriber may be behind. 110 pods, each changed twice at once, fit.
const BACKLOG: usize = 256;
/// How many whole pods are in memory at once while they are listed.
const PAGE: u32 = 20;

/// A change of a pod on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodChange {
    /// The pod is new or not what it was.
    Applied(Arc<PodSpec>),
    /// The pod is gone from the API server; its containers may run a little longer. A static pod's containers stay if
    /// only its mirror was deleted: the kubelet makes a new one, which is applied again.
    Deleted(PodUid),
}

/// The pods of this node. Cheap to clone; the watch ends with the last clone.
#[derive(Debug, Clone)]
pub struct Pods {
    known: Arc<Known>,
    _watch: Option<Arc<Watch>>,
}

impl Pods {
    /// Watches the pods that are bound to `node`, for ever: failures are logged and tried again after 0.8 to 30 s. Must
    /// be called within a tokio runtime.
    #[must_use]
    pub fn watch(client: kube::Client, node: &str) -> Self {
        let known = Arc::new(Known::new());
        let config = watcher::Config::default()
            .fields(&format!("spec.nodeName={node}"))
            .page_size(PAGE);
        let watch = tokio::spawn(follow(Api::all(client), config, Arc::clone(&known)));
        Self {
            known,
            _watch: Some(Arc::new(Watch(watch))),
        }
    }

    /// No pods, for a node without an API server. Never synced.
    #[must_use]
    pub fn none() -> Self {
        Self {
            known: Arc::new(Known::new()),
            _watch: None,
        }
    }

    /// The pod with that UID (for static pods: the hash), as it was last heard of. Stays while the API server is away.
    #[must_use]
    pub fn get(&self, uid: &PodUid) -> Option<Arc<PodSpec>> {
        self.known.pods().get(uid).cloned()
    }

    /// All pods, in no order.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<PodSpec>> {
        self.known.pods().values().cloned().collect()
    }

    /// The changes from now on. What a change tells is in [`Pods::get`] before it is told. A subscriber that falls behind
    /// gets `RecvError::Lagged`, and must look at [`Pods::all`].
    #[must_use]
    pub fn subscribe(&self) -> broadcast::Receiver<PodChange> {
        self.known.changes.subscribe()
    }

    /// Whether all pods of the node have been told of once. Stays so while the API server is away.
    #[must_use]
    pub fn synced(&self) -> bool {
        self.known.synced.load(Ordering::Acquire)
    }
}

/// Ends the watch when the last handle is gone.
#[derive(Debug)]
struct Watch(JoinHandle<()>);

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What is known, shared by the watch and its handles.
#[derive(Debug)]
struct Known {
    pods: Mutex<HashMap<PodUid, Arc<PodSpec>>>,
    changes: broadcast::Sender<PodChange>,
    synced: AtomicBool,
}

impl Known {
    fn new() -> Self {
        Self {
            pods: Mutex::default(),
            changes: broadcast::channel(BACKLOG).0,
            synced: AtomicBool::new(false),
        }
    }

    /// No code that can panic runs under this lock, so a poisoned map is as good as any.
    fn pods(&self) -> MutexGuard<'_, HashMap<PodUid, Arc<PodSpec>>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in a pod, and tells of it if anything that matters has changed: most updates are of other parts.
    fn apply(&self, spec: PodSpec) {
        let spec = Arc::new(spec);
        let uid = spec.uid.clone();
        let before = self.pods().insert(uid, Arc::clone(&spec));
        if before.is_none_or(|before| before != spec) {
            self.tell(PodChange::Applied(spec));
        }
    }

    fn delete(&self, uid: &PodUid) {
        if self.pods().remove(uid).is_some() {
            self.tell(PodChange::Deleted(uid.clone()));
        }
    }

    /// Ends a list: what it did not name is gone.
    fn keep_only(&self, listed: &HashSet<PodUid>) {
        let gone: Vec<PodUid> = {
            let pods = self.pods();
            let gone = pods.keys().filter(|uid| !listed.contains(uid));
            gone.cloned().collect()
        };
        for uid in gone {
            self.delete(&uid);
        }
        self.synced.store(true, Ordering::Release);
    }

    /// It is no failure that nobody listens.
    fn tell(&self, change: PodChange) {
        let _ = self.changes.send(change);
    }
}

async fn follow(api: Api<Pod>, config: watcher::Config, known: Arc<Known>) {
    let events = kube::runtime::watcher(api, config).default_backoff();
    futures::pin_mut!(events);
    let mut listed = HashSet::new();
    let mut away = false;
    while let Some(event) = events.next().await {
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                if !away {
                    tracing::warn!(%error, "the API server does not tell of this node's pods; going on with what is known");
                }
                away = true;
                continue;
            }
        };
        match event {
            // Tells that a list begins, before it has been had.
            Event::Init => {
                listed.clear();
                continue;
            }
            Event::InitApply(pod) => {
                if let Some(spec) = PodSpec::extract(pod) {
                    listed.insert(spec.uid.clone());
                    known.apply(spec);
                }
            }
            Event::InitDone => known.keep_only(&std::mem::take(&mut listed)),
            Event::Apply(pod) => {
                if let Some(spec) = PodSpec::extract(pod) {
                    known.apply(spec);
                }
            }
            Event::Delete(pod) => {
                if let Some(spec) = PodSpec::extract(pod) {
                    known.delete(&spec.uid);
                }
            }
        }
        if std::mem::take(&mut away) {
            tracing::info!("the API server tells of this node's pods again");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::super::pod_spec::Phase;
    use super::*;
    use crate::kube::fake::{Answer, client};

    fn pod(uid: &str, phase: &str) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": uid, "namespace": "n", "uid": uid, "resourceVersion": "2"},
            "spec": {"containers": []},
            "status": {"phase": phase}
        })
    }

    fn list(pods: &[Value]) -> Answer {
        Answer::json(&json!({
            "apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": "1"},
            "items": pods
        }))
    }

    async fn next(changes: &mut broadcast::Receiver<PodChange>) -> PodChange {
        tokio::time::timeout(Duration::from_secs(20), changes.recv())
            .await
            .expect("nothing in 20 s")
            .unwrap()
    }

    fn applied(change: &PodChange) -> (&str, Phase) {
        match change {
            PodChange::Applied(spec) => (spec.uid.as_str(), spec.phase),
            PodChange::Deleted(uid) => panic!("{uid} was deleted"),
        }
    }

    #[tokio::test]
    async fn pods_are_known_from_list_to_deletion() {
        let change = |kind: &str, pod| json!({"type": kind, "object": pod}).to_string() + "\n";
        let watch = [
            change("MODIFIED", pod("a", "Running")),
            // Nothing that matters: not told.
            change("MODIFIED", pod("a", "Running")),
            change("DELETED", pod("a", "Running")),
        ];
        let (client, calls) = client(vec![
            list(&[pod("a", "Pending"), pod("b", "Running")]),
            Answer::text(watch.concat()),
        ]);
        let pods = Pods::watch(client, "node-1");
        let mut changes = pods.subscribe();
        assert!(!pods.synced());

        assert_eq!(applied(&next(&mut changes).await), ("a", Phase::Pending));
        assert_eq!(applied(&next(&mut changes).await), ("b", Phase::Running));
        assert_eq!(applied(&next(&mut changes).await), ("a", Phase::Running));
        assert_eq!(next(&mut changes).await, PodChange::Deleted("a".into()));
        assert!(pods.synced());
        assert_eq!(pods.get(&"a".into()), None);
        assert_eq!(pods.all().len(), 1);
        assert!(calls.lock().unwrap()[0].contains("fieldSelector=spec.nodeName%3Dnode-1"));
    }

    #[tokio::test]
    async fn a_server_that_is_away_at_start_is_found_later() {
        let (client, _) = client(vec![Answer::away(), list(&[pod("a", "Running")])]);
        let pods = Pods::watch(client, "node-1");
        let mut changes = pods.subscribe();
        assert_eq!(applied(&next(&mut changes).await), ("a", Phase::Running));
    }

    #[tokio::test]
    async fn what_a_new_list_does_not_name_is_gone() {
        let expired = json!({"type": "ERROR", "object": {"kind": "Status", "status": "Failure",
            "code": 410, "reason": "Expired", "message": "too old resource version"}});
        let (client, _) = client(vec![
            list(&[pod("a", "Running"), pod("b", "Running")]),
            Answer::text(expired.to_string() + "\n"),
            list(&[pod("b", "Running")]),
        ]);
        let pods = Pods::watch(client, "node-1");
        let mut changes = pods.subscribe();
        next(&mut changes).await;
        next(&mut changes).await;
        assert!(pods.get(&"a".into()).is_some());
        assert_eq!(next(&mut changes).await, PodChange::Deleted("a".into()));
        assert!(pods.get(&"b".into()).is_some());
    }

    #[tokio::test]
    async fn without_an_api_server_there_are_no_pods() {
        let pods = Pods::none();
        assert!(pods.all().is_empty());
        assert!(!pods.synced());
    }
}
