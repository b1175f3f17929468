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
use tokio::sync::{mpsc, watch};

use super::pod_spec::PodSpec;
use crate::ids::{PodKey, PodUid};

/// Between two tries of an API server that is away, the first and the longest: a pod that is made before it is heard
/// again is unknown.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// How many pods the API server tells of at once: each may have a mebibyte and a half (etcd's limit), most of it annotations
/// that nobody here reads.
const PAGE: u32 = 16;

/// What the API server told of a pod.
#[derive(Debug, Clone, PartialEq)]
pub enum PodChange {
    /// It is there, new or changed.
    Applied(Arc<PodSpec>),
    /// It is gone. Never of a static pod, of which only the mirror is.
    Deleted(Arc<PodSpec>),
}

/// The last known specs. While the API server is away they stay as they are.
///
/// They are known by namespace and name, which the API server gives to one pod at a time: whatever a pod says of itself,
/// it can take nobody else's place.
#[derive(Debug, Clone, Default)]
pub struct Pods {
    known: Arc<RwLock<HashMap<PodKey, Arc<PodSpec>>>>,
    /// Nobody tells where there is no API server.
    told: Arc<watch::Sender<bool>>,
}

impl Pods {
    /// Watches the pods of node `node` for as long as the receiver is kept, and sends what changes. `beside` is told of
    /// everything that the API server tells, for those who want to know more of some pods.
    #[must_use]
    pub fn watch(
        client: Client,
        node: &str,
        mut beside: impl FnMut(&Event<Pod>) + Send + 'static,
    ) -> (Self, mpsc::UnboundedReceiver<PodChange>) {
        let pods = Self::default();
        let (changes, receiver) = mpsc::unbounded_channel();
        let config = watcher::Config::default().fields(&format!("spec.nodeName={node}"));
        let config = config.page_size(PAGE);
        // Jitter keeps a cluster's nodes from coming back together.
        let pauses = ExponentialBuilder::new()
            .with_min_delay(FIRST_PAUSE)
            .with_max_delay(LONGEST_PAUSE)
            .with_jitter()
            .without_max_times();
        let stream = watcher(Api::<Pod>::all(client), config);
        let stream = stream.backoff(ExponentialBackoff::from(pauses));
        let stream = stream.inspect(move |event| {
            if let Ok(event) = event {
                beside(event);
            }
        });
        tokio::spawn(pods.clone().follow(node.to_owned(), stream, changes));
        (pods, receiver)
    }

    /// The pod of that name and that UID, if the API server ever told of it.
    #[must_use]
    pub fn get(&self, key: &PodKey, uid: &PodUid) -> Option<Arc<PodSpec>> {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        known.get(key).filter(|spec| spec.uid == *uid).cloned()
    }

    /// All pods of the node.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<PodSpec>> {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        known.values().cloned().collect()
    }

    /// Waits until the API server has told of all pods once.
    pub async fn told(&self) {
        // The sender is in our hands.
        let _ = self.told.subscribe().wait_for(|told| *told).await;
    }

    async fn follow(
        self,
        node: String,
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
                    for change in self.note(&node, event, &mut listed) {
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

    fn note(&self, node: &str, event: Event<Pod>, listed: &mut HashSet<PodKey>) -> Vec<PodChange> {
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        let lists = matches!(event, Event::InitApply(_));
        match event {
            Event::Init => {
                listed.clear();
                Vec::new()
            }
            Event::InitApply(pod) | Event::Apply(pod) => {
                let Some(spec) = PodSpec::from_pod(&pod, node) else {
                    return Vec::new();
                };
                let spec = Arc::new(spec);
                if lists {
                    listed.insert(spec.key.clone());
                }
                let before = known.insert(spec.key.clone(), Arc::clone(&spec));
                // Most updates are of parts that are of no interest here.
                if before.as_ref() == Some(&spec) {
                    return Vec::new();
                }
                // Deleted, and its name given to another one, while the API server could not say so.
                let before = before.filter(|before| before.api_uid != spec.api_uid);
                let gone = before.and_then(deleted).into_iter();
                gone.chain([PodChange::Applied(spec)]).collect()
            }
            Event::Delete(pod) => {
                let Some(spec) = PodSpec::from_pod(&pod, node) else {
                    return Vec::new();
                };
                let gone = known
                    .get(&spec.key)
                    .is_some_and(|it| it.api_uid == spec.api_uid);
                let gone = gone.then(|| known.remove(&spec.key)).flatten();
                gone.and_then(deleted).into_iter().collect()
            }
            Event::InitDone => {
                // Deleted while the API server could not say so.
                let gone = known.extract_if(|key, _| !listed.contains(key));
                let gone = gone.filter_map(|(_, spec)| deleted(spec)).collect();
                listed.clear();
                self.told.send_replace(true);
                gone
            }
        }
    }
}

/// A static pod is not deleted with its mirror: the kubelet makes another one.
fn deleted(spec: Arc<PodSpec>) -> Option<PodChange> {
    (!spec.is_mirrored()).then_some(PodChange::Deleted(spec))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;

    fn pod(uid: &str) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": uid, "namespace": "n", "uid": uid},
            "spec": {"containers": [{"name": "a"}]},
        }))
        .unwrap()
    }

    fn get(pods: &Pods, name: &str, uid: &str) -> Option<Arc<PodSpec>> {
        let key = PodKey {
            namespace: "n".to_owned(),
            name: name.to_owned(),
        };
        pods.get(&key, &uid.into())
    }

    /// A pod that says all that a mirror of a static pod with that hash says.
    fn mirror(name: &str, uid: &str, hash: &str) -> Pod {
        serde_json::from_value(json!({
            "metadata": {
                "name": name, "namespace": "n", "uid": uid,
                "annotations": {"kubernetes.io/config.hash": hash, "kubernetes.io/config.mirror": hash},
                "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "x", "controller": true}],
            },
            "spec": {"restartPolicy": "Never", "containers": [{"name": "a"}]},
        }))
        .unwrap()
    }

    async fn told(events: Vec<watcher::Result<Event<Pod>>>) -> (Pods, Vec<String>) {
        let (changes, mut receiver) = mpsc::unbounded_channel();
        let pods = Pods::default();
        pods.clone()
            .follow("node-1".to_owned(), futures::stream::iter(events), changes)
            .await;
        let mut told = Vec::new();
        while let Some(change) = receiver.recv().await {
            told.push(match change {
                PodChange::Applied(spec) => format!("+{}", spec.uid),
                PodChange::Deleted(spec) => format!("-{}", spec.uid),
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
        assert!(get(&pods, "u2", "u2").is_some() && get(&pods, "u1", "u1").is_none());
    }

    #[test]
    fn nothing_is_kept_of_pods_that_are_gone() {
        let pods = Pods::default();
        let mut listed = HashSet::new();
        pods.note("n", Event::Init, &mut listed);
        pods.note("n", Event::InitApply(pod("u0")), &mut listed);
        assert!(!*pods.told.borrow());
        pods.note("n", Event::InitDone, &mut listed);
        assert!(*pods.told.borrow());
        for number in 1..100 {
            let pod = pod(&format!("u{number}"));
            pods.note("n", Event::Apply(pod.clone()), &mut listed);
            pods.note("n", Event::Delete(pod), &mut listed);
        }
        assert!(listed.is_empty());
        assert_eq!(pods.all().len(), 1);
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
        let spec = get(&pods, "u1", "u1").unwrap();
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
        assert!(get(&pods, "u1", "u1").is_some());
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

    #[tokio::test]
    async fn a_stranger_that_takes_another_pods_uid_for_its_hash_neither_hides_nor_deletes_that_pod()
     {
        let stranger = || mirror("stranger", "u9", "u1");
        let (pods, told) = told(vec![
            Ok(Event::Apply(pod("u1"))),
            Ok(Event::Apply(stranger())),
            Ok(Event::Delete(stranger())),
        ])
        .await;
        assert_eq!(told, ["+u1", "+u1"]);
        let spec = get(&pods, "u1", "u1").unwrap();
        assert_eq!(spec.api_uid, "u1".into());
        assert_eq!(get(&pods, "stranger", "u1"), None);
        assert_eq!(get(&pods, "stranger", "u9"), None);
    }

    #[tokio::test]
    async fn a_static_pod_outlives_its_mirrors() {
        let (pods, told) = told(vec![
            Ok(Event::Apply(mirror("web-node-1", "m1", "hash"))),
            Ok(Event::Delete(mirror("web-node-1", "m1", "hash"))),
            Ok(Event::Apply(mirror("web-node-1", "m2", "hash"))),
            Ok(Event::Init),
            Ok(Event::InitApply(mirror("web-node-1", "m3", "hash"))),
            Ok(Event::InitDone),
        ])
        .await;
        assert_eq!(told, ["+hash"; 3]);
        assert_eq!(
            get(&pods, "web-node-1", "hash").unwrap().api_uid,
            "m3".into()
        );
    }

    #[tokio::test]
    async fn a_pod_whose_name_went_to_another_unseen_is_told_to_be_gone() {
        let renewed = |uid: &str| {
            let mut pod = pod("p");
            pod.metadata.uid = Some(uid.to_owned());
            pod
        };
        let (_, told) = told(vec![
            Ok(Event::Apply(renewed("u1"))),
            Ok(Event::Init),
            Ok(Event::InitApply(renewed("u2"))),
            Ok(Event::InitDone),
            // News that come late are about the one that is gone.
            Ok(Event::Delete(renewed("u1"))),
        ])
        .await;
        assert_eq!(told, ["+u1", "-u1", "+u2"]);
    }

    #[tokio::test]
    async fn pods_are_listed_a_few_at_a_time() {
        let (service, mut server) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        let _watched = Pods::watch(Client::new(service, "default"), "node-1", |_| {});
        let (request, _) = server.next_request().await.unwrap();
        let uri = request.uri().to_string();
        assert!(
            uri.contains("fieldSelector=spec.nodeName%3Dnode-1"),
            "{uri}"
        );
        assert!(uri.contains(&format!("limit={PAGE}")), "{uri}");
    }
}
