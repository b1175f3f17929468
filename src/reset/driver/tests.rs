use std::collections::VecDeque;
use std::fs;
use std::sync::{Arc, Mutex};

use http::{Method as Verb, Request, Response};
use kube::client::Body;
use serde_json::{Value, json};
use tempfile::TempDir;
use tower_test::mock::pair;

use super::*;
use crate::reset::record::Memory;

const LEDGER: &str = "hard-resets.reprise.dev";
const DATE: &str = "Thu, 26 Nov 2026 10:53:26 GMT";

/// The API server of a cluster of one pod, which is reserved.
#[derive(Default)]
struct Cluster {
    /// How it is found; `None`: it is gone.
    pod: Option<Value>,
    lease: Value,
    /// The codes with which evictions are refused, one after another; none is after that.
    refusals: VecDeque<u16>,
    /// The resource versions of those that came.
    evicted: Vec<Value>,
}

impl Cluster {
    fn of(pod: Option<Value>) -> Self {
        let entries = r#"[{"owner":"d","namespace":"n","pod":"u","granted":[1]}]"#;
        Self {
            pod,
            lease: json!({"metadata": {"name": "l", "annotations": {LEDGER: entries}}}),
            ..Self::default()
        }
    }

    fn refusing(mut self, codes: &[u16]) -> Self {
        self.refusals.extend(codes);
        self
    }

    fn reserved(&self) -> Value {
        let text = self.lease["metadata"]["annotations"][LEDGER].as_str();
        serde_json::from_str(text.unwrap()).unwrap()
    }

    fn answer(&mut self, verb: &Verb, path: &str, body: &[u8]) -> (u16, Value) {
        let sent = || serde_json::from_slice::<Value>(body).unwrap();
        if path.ends_with("leases/reprise-hard-resets") {
            if *verb == Verb::PUT {
                self.lease = sent();
            }
            (200, self.lease.clone())
        } else if path.ends_with("/eviction") {
            let seen = &sent()["deleteOptions"]["preconditions"]["resourceVersion"];
            self.evicted.push(seen.clone());
            match self.refusals.pop_front() {
                Some(code) => (code, failure(code)),
                None => (201, json!({"kind": "Status", "status": "Success"})),
            }
        } else if path.ends_with("/pods/p") {
            let missing = || (404, failure(404));
            self.pod.clone().map_or_else(missing, |pod| (200, pod))
        } else {
            (201, sent())
        }
    }

    fn serve(self) -> (Client, Arc<Mutex<Self>>) {
        let (service, mut handle) = pair::<Request<Body>, Response<Body>>();
        let cluster = Arc::new(Mutex::new(self));
        let served = Arc::clone(&cluster);
        tokio::spawn(async move {
            while let Some((request, send)) = handle.next_request().await {
                let (parts, body) = request.into_parts();
                let body = body.collect_bytes().await.unwrap();
                let (verb, path) = (parts.method, parts.uri.path());
                let (code, body) = served.lock().unwrap().answer(&verb, path, &body);
                let body = Body::from(body.to_string().into_bytes());
                let answer = Response::builder().status(code).header("Date", DATE);
                send.send_response(answer.body(body).unwrap());
            }
        });
        (Client::new(service, "default"), cluster)
    }
}

fn failure(code: u16) -> Value {
    json!({"status": "Failure", "code": code, "message": "no"})
}

/// It wants to be reset, and has not been Ready for long.
fn crashing(resource_version: &str) -> Value {
    json!({
        "metadata": {
            "namespace": "n", "name": "p", "uid": "u", "resourceVersion": resource_version,
            "annotations": {"failure-policy.reprise.dev": "{action: DeletePod}"},
        },
        "status": {"conditions": [{"type": "Ready", "status": "False"}]},
    })
}

fn prepared() -> Prepared {
    let pod: Pod = serde_json::from_value(crashing("7")).unwrap();
    let (terms, mut memory) = (Terms::default(), Memory::default());
    let seen = Sighting::of(&pod, &terms).unwrap();
    memory.note(&seen, &terms, &Clock::default().moment());
    let task = Task {
        record: memory.pods.remove(&seen.uid).unwrap(),
        seen,
        container: "app".into(),
        exits: 8,
    };
    Prepared {
        version: version_of(&task, &pod),
        owner: Owner {
            api_version: "apps/v1".into(),
            kind: "Deployment".into(),
            namespace: "n".into(),
            name: "d".into(),
            uid: "d".into(),
        },
        stamp: 1,
        evidence: Evidence::default(),
        task,
    }
}

/// What comes of a reset there, and how that leaves the cluster and the state directory.
async fn carried_out(cluster: Cluster, spoil: impl FnOnce(&TempDir)) -> (Outcome, Cluster, usize) {
    let state = tempfile::tempdir().unwrap();
    spoil(&state);
    let (client, cluster) = cluster.serve();
    let cri = cri::Client::connect("unix:///nowhere.sock").unwrap();
    let events = Events::new(client.clone(), "node-1");
    let terms = Terms::default();
    let resets = Resets::new(client, cri, events, terms, "node-1", state.path());
    let outcome = resets.carry_out(prepared(), true).await;
    let kept = fs::read_dir(state.path().join("hard-resets"));
    let kept = kept.map_or(0, Iterator::count);
    drop(resets);
    let cluster = std::mem::take(&mut *cluster.lock().unwrap());
    (outcome, cluster, kept)
}

#[tokio::test]
async fn a_pod_that_changes_between_the_look_and_its_end_is_looked_at_again() {
    let cluster = Cluster::of(Some(crashing("8"))).refusing(&[409]);
    let (outcome, cluster, kept) = carried_out(cluster, |_| {}).await;
    assert_eq!(outcome, Outcome::Done);
    assert_eq!(cluster.evicted, ["7", "8"]);
    assert_eq!(cluster.reserved()[0]["pod"], "u");
    assert_eq!(kept, 1);
}

#[tokio::test]
async fn a_pod_that_has_become_ready_stays_and_what_was_reserved_for_it_is_given_back() {
    let mut ready = crashing("8");
    ready["status"]["conditions"][0]["status"] = json!("True");
    let cluster = Cluster::of(Some(ready)).refusing(&[409]);
    let (outcome, cluster, _) = carried_out(cluster, |_| {}).await;
    assert_eq!(outcome, Outcome::Changed);
    assert_eq!(cluster.evicted, ["7"]);
    assert_eq!(cluster.reserved(), json!([]));
}

#[tokio::test]
async fn a_pod_that_changes_for_ever_is_left_for_later() {
    let cluster = Cluster::of(Some(crashing("8"))).refusing(&[409; 100]);
    let (outcome, cluster, _) = carried_out(cluster, |_| {}).await;
    assert_eq!(outcome, Outcome::Changed);
    assert_eq!(cluster.evicted.len(), MOST_LOOKS);
    assert_eq!(cluster.reserved(), json!([]));
}

#[tokio::test]
async fn without_the_right_to_it_nothing_happens_and_people_are_told_which_one_is_missing() {
    let cluster = Cluster::of(Some(crashing("7"))).refusing(&[403]);
    let (outcome, cluster, _) = carried_out(cluster, |_| {}).await;
    let Outcome::Denied(why) = outcome else {
        panic!("{outcome:?}");
    };
    assert!(
        why.contains("create pods/eviction")
            && why.contains("deploy/kustomize/components/hard-reset/rbac.yaml"),
        "{why}"
    );
    assert_eq!(cluster.reserved(), json!([]));
}

#[tokio::test]
async fn what_nobody_answers_may_have_happened_and_stays_reserved() {
    let cluster = Cluster::of(Some(crashing("7"))).refusing(&[500]);
    let (outcome, cluster, _) = carried_out(cluster, |_| {}).await;
    assert_eq!(outcome, Outcome::Unanswered("no".into()));
    assert_eq!(cluster.reserved()[0]["pod"], "u");
}

#[tokio::test]
async fn a_pod_whose_evidence_cannot_be_kept_stays() {
    let full =
        |state: &TempDir| fs::write(state.path().join("hard-resets"), "no directory").unwrap();
    let (outcome, cluster, _) = carried_out(Cluster::of(Some(crashing("7"))), full).await;
    let Outcome::Away(why) = outcome else {
        panic!("{outcome:?}");
    };
    assert!(why.starts_with("its evidence cannot be kept: "), "{why}");
    assert_eq!(cluster.evicted, [] as [Value; 0]);
    assert_eq!(cluster.reserved(), json!([]));
}

/// What is left of what was reserved for pod `u`, if that is how it is found.
async fn left(pod: Option<Value>) -> Value {
    let (client, cluster) = Cluster::of(pod).serve();
    let kube = Kube::new(client, "node-1");
    kube.give_back(&prepared().task.seen, 1).await;
    let cluster = cluster.lock().unwrap();
    cluster.reserved()
}

#[tokio::test]
async fn what_was_reserved_for_a_pod_that_stays_is_given_back() {
    let stays = json!({"metadata": {"name": "p", "uid": "u"}});
    assert_eq!(left(Some(stays)).await, json!([]));
    let ends = json!({"metadata": {"uid": "u", "deletionTimestamp": "2026-01-01T00:00:00Z"}});
    let other = json!({"metadata": {"name": "p", "uid": "v"}});
    for gone in [None, Some(ends), Some(other)] {
        assert_eq!(left(gone).await[0]["pod"], "u");
    }
}
