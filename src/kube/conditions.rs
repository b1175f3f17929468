//! Conditions of pods, written into their status.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::runtime::watcher::DefaultBackoff;
use kube::{Api, Client, Error};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::time::{Duration, sleep, timeout};

use crate::ids::{PodKey, PodUid};

/// How long the API server may take over one request.
const LIMIT: Duration = Duration::from_secs(2);
/// Between two tries, at most.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// An API server that has just been started lacks the roles that grant rights for a moment, and refuses what it allows
/// (`plugin/pkg/auth/authorizer/rbac` goes by informers). So often, half a minute in all, a refusal for want of rights is no answer.
const MOST_DENIALS: u32 = 5;
/// Who writes, in the object's managed fields.
pub(super) const FIELD_MANAGER: &str = "reprise";

/// The type of the condition that tells how a pod's last restart ended, and how many there were.
pub(crate) const LAST_RESTART: &str = "reprise.dev/LastRestart";

/// A condition of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Condition {
    /// Its type.
    pub kind: String,
    /// Whether it holds.
    pub status: bool,
    /// Why, in one word.
    pub reason: String,
    /// The same for people.
    pub message: String,
}

/// Sets conditions of pods; never waits, never fails.
///
/// Of one condition of one pod, one request is under way at most, and what is set meanwhile waits for its end: a
/// watcher sees what was set in the order in which it was set. Of what waits, only the last is sent.
#[derive(Clone)]
pub struct Conditions {
    client: Client,
    slots: Arc<Mutex<Slots>>,
    forbidden: Arc<AtomicBool>,
}

/// A slot belongs to the task that delivers its condition, and goes with it. What lies in it is next.
type Slots = HashMap<SlotKey, Option<Change>>;
/// The pod by its UID in the API, and the type.
type SlotKey = (PodUid, String);

struct Change {
    pod: PodKey,
    uid: PodUid,
    condition: Condition,
    since: Timestamp,
    done: oneshot::Sender<()>,
}

impl Conditions {
    /// Nothing is sent yet.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self {
            client,
            slots: Arc::default(),
            forbidden: Arc::default(),
        }
    }

    /// Patches the pod's status in due time, unless the pod of that name has another UID in the API by then. Must be
    /// called on the async runtime.
    ///
    /// The receiver fires when the API server has taken the condition, or has refused it for good, or when one that was
    /// set later has been put in its place.
    #[allow(clippy::must_use_candidate, reason = "most callers do not wait for it")]
    pub fn set(
        &self,
        pod: &PodKey,
        api_uid: &PodUid,
        condition: Condition,
    ) -> oneshot::Receiver<()> {
        let (done, receiver) = oneshot::channel();
        let key = (api_uid.clone(), condition.kind.clone());
        let change = Change {
            pod: pod.clone(),
            uid: api_uid.clone(),
            condition,
            since: Timestamp::now(),
            done,
        };
        match self.slots().entry(key) {
            Entry::Occupied(mut slot) => {
                if let Some(replaced) = slot.insert(Some(change)) {
                    replaced.settle();
                }
            }
            Entry::Vacant(slot) => {
                let key = slot.key().clone();
                slot.insert(None);
                tokio::spawn(self.clone().deliver(key, change));
            }
        }
        receiver
    }

    async fn deliver(self, key: SlotKey, first: Change) {
        let mut backoff = DefaultBackoff::default();
        let mut denials = 0;
        let mut next = Some(first);
        while let Some(change) = next {
            match self.send(&change).await {
                Outcome::Settled => change.settle(),
                Outcome::Denied(error) if denials == MOST_DENIALS => {
                    self.tell_denial(&change, &error);
                    change.settle();
                }
                outcome => {
                    denials += u32::from(matches!(outcome, Outcome::Denied(_)));
                    self.put_back(&key, change);
                    let pause = backoff.next().unwrap_or(LONGEST_PAUSE);
                    sleep(pause.min(LONGEST_PAUSE)).await;
                }
            }
            next = self.next(&key);
        }
    }

    /// What is to be sent next; `None`: nothing, and the slot is gone.
    fn next(&self, key: &SlotKey) -> Option<Change> {
        let mut slots = self.slots();
        let next = slots.get_mut(key).and_then(Option::take);
        if next.is_none() {
            slots.remove(key);
        }
        next
    }

    fn put_back(&self, key: &SlotKey, change: Change) {
        match self.slots().entry(key.clone()).or_default() {
            Some(_) => change.settle(),
            empty => *empty = Some(change),
        }
    }

    async fn send(&self, change: &Change) -> Outcome {
        let api = Api::<Pod>::namespaced(self.client.clone(), &change.pod.namespace);
        let params = PatchParams {
            field_manager: Some(FIELD_MANAGER.to_owned()),
            ..PatchParams::default()
        };
        let patch = Patch::Strategic(change.patch());
        let answer = timeout(LIMIT, api.patch_status(&change.pod.name, &params, &patch)).await;
        let (pod, kind) = (&change.pod, &change.condition.kind);
        match answer {
            Ok(Ok(_)) => Outcome::Settled,
            Ok(Err(error)) if is_denial(&error) => Outcome::Denied(error),
            Ok(Err(error)) if is_final(&error) => {
                tell_refusal(pod, kind, &error);
                Outcome::Settled
            }
            Ok(Err(error)) => {
                tracing::debug!(%pod, kind, %error, "could not set a condition, trying until it is set");
                Outcome::Away
            }
            Err(_) => {
                tracing::debug!(%pod, kind, "the API server did not take a condition in time, trying until it does");
                Outcome::Away
            }
        }
    }

    /// Says it once: it is the same for every pod.
    fn tell_denial(&self, change: &Change, error: &Error) {
        let (pod, kind) = (&change.pod, &change.condition.kind);
        if !self.forbidden.swap(true, Ordering::Relaxed) {
            tracing::warn!(%pod, kind, %error, "conditions of pods cannot be set: grant the verb patch on pods/status");
        }
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Conditions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Conditions").finish_non_exhaustive()
    }
}

impl Change {
    /// Conditions merge by their type (`patchMergeKey` of `PodStatus.Conditions`, `k8s.io/api/core/v1/types.go`). With
    /// the UID, the patch fits no other pod of that name, as the kubelet's own (`pkg/util/pod/pod.go`, k8s 1.36).
    fn patch(&self) -> Value {
        let condition = &self.condition;
        json!({
            "metadata": {"uid": self.uid},
            "status": {"conditions": [{
                "type": condition.kind,
                "status": if condition.status { "True" } else { "False" },
                "reason": condition.reason,
                "message": condition.message,
                // The API keeps whole seconds.
                "lastTransitionTime": self.since.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
            }]},
        })
    }

    fn settle(self) {
        // Whoever does not want to know has dropped the receiver.
        let _ = self.done.send(());
    }
}

/// What has become of a request.
enum Outcome {
    /// The API server has taken it, or refused it for good.
    Settled,
    /// The same request may succeed later.
    Away,
    /// Likewise, if rights are granted.
    Denied(Error),
}

fn tell_refusal(pod: &PodKey, kind: &str, error: &Error) {
    if is_gone(error) {
        tracing::debug!(%pod, kind, "the pod of a condition is gone");
    } else {
        tracing::warn!(%pod, kind, %error, "gave up setting a condition: the API server refuses it");
    }
}

/// Whether the same request would fail again. A 401 would not: tokens are renewed.
fn is_final(error: &Error) -> bool {
    match error {
        Error::Api(status) => {
            matches!(status.code, 400..500) && !matches!(status.code, 401 | 408 | 429)
        }
        // The request cannot be written, or the server's answer to one that it took cannot be read.
        Error::BuildRequest(_) | Error::SerdeError(_) => true,
        _ => false,
    }
}

/// There is no pod of that name, or one with another UID: that cannot be changed (`ValidateObjectMetaUpdate`,
/// `apimachinery/pkg/api/validation/objectmeta.go`, k8s 1.36).
pub(crate) fn is_gone(error: &Error) -> bool {
    let Error::Api(status) = error else {
        return false;
    };
    let causes = status.details.iter().flat_map(|details| &details.causes);
    matches!(status.code, 404 | 409)
        || status.code == 422
            && causes
                .into_iter()
                .any(|cause| cause.field == "metadata.uid")
}

fn is_denial(error: &Error) -> bool {
    matches!(error, Error::Api(status) if status.code == 403)
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use http::{Method, Request, Response, StatusCode};
    use kube::client::Body;
    use tokio::time::Instant;
    use tower_test::mock::{Handle, SendResponse, pair};

    use super::*;

    type Server = Handle<Request<Body>, Response<Body>>;

    fn server() -> (Conditions, Server) {
        let (service, server) = pair();
        (Conditions::new(Client::new(service, "default")), server)
    }

    fn set(conditions: &Conditions, uid: &str, message: &str) -> oneshot::Receiver<()> {
        let pod = PodKey {
            namespace: "n".into(),
            name: "web".into(),
        };
        let condition = Condition {
            kind: "PodRestarting".into(),
            status: true,
            reason: "ContainerExited".into(),
            message: message.into(),
        };
        conditions.set(&pod, &uid.into(), condition)
    }

    struct Call {
        request: http::request::Parts,
        patch: Value,
        response: SendResponse<Response<Body>>,
    }

    impl Call {
        async fn next(server: &mut Server) -> Self {
            let (request, response) = server.next_request().await.unwrap();
            let (request, body) = request.into_parts();
            let patch = serde_json::from_slice(&body.collect_bytes().await.unwrap()).unwrap();
            Self {
                request,
                patch,
                response,
            }
        }

        fn condition(&self) -> &Value {
            &self.patch["status"]["conditions"][0]
        }

        fn message(&self) -> &str {
            self.condition()["message"].as_str().unwrap()
        }

        fn answer(self, status: StatusCode) {
            let body = match status {
                StatusCode::OK => json!({"metadata": {}}),
                failure => json!({"status": "Failure", "code": failure.as_u16()}),
            };
            let body = Body::from(body.to_string().into_bytes());
            let mut response = Response::new(body);
            *response.status_mut() = status;
            self.response.send_response(response);
        }
    }

    /// Whether nothing comes for so long that it will not come any more: the time is paused, and jumps.
    async fn is_silent(server: &mut Server) -> bool {
        timeout(Duration::from_hours(1), server.next_request())
            .await
            .is_err()
    }

    #[tokio::test(start_paused = true)]
    async fn one_condition_of_that_very_pod_is_patched() {
        let (conditions, mut server) = server();
        let done = set(&conditions, "u1", "why");
        let call = Call::next(&mut server).await;
        let path = "/api/v1/namespaces/n/pods/web/status";
        assert_eq!(call.request.method, Method::PATCH);
        assert_eq!(call.request.uri.path(), path);
        assert_eq!(
            call.request.headers["content-type"],
            "application/strategic-merge-patch+json"
        );
        assert_eq!(call.patch["metadata"], json!({"uid": "u1"}));
        assert_eq!(call.condition()["type"], "PodRestarting");
        assert_eq!(call.condition()["status"], "True");
        assert_eq!(call.condition()["reason"], "ContainerExited");
        let since = call.condition()["lastTransitionTime"].as_str().unwrap();
        assert_eq!(since.len(), "1970-01-01T00:00:00Z".len(), "{since}");
        assert!(since.parse::<Timestamp>().is_ok(), "{since}");
        call.answer(StatusCode::OK);
        done.await.unwrap();
        assert!(is_silent(&mut server).await);
        assert!(conditions.slots().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn what_follows_at_once_does_not_replace_what_was_first() {
        let (conditions, mut server) = server();
        let _first = set(&conditions, "u1", "first");
        let _last = set(&conditions, "u1", "last");
        for message in ["first", "last"] {
            let call = Call::next(&mut server).await;
            assert_eq!(call.message(), message);
            call.answer(StatusCode::OK);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_overtakes_a_request_that_is_under_way() {
        let (conditions, mut server) = server();
        let mut first = set(&conditions, "u1", "first");
        let call = Call::next(&mut server).await;
        let second = set(&conditions, "u1", "second");
        let third = set(&conditions, "u1", "third");
        second.await.unwrap();
        {
            let mut early = pin!(server.next_request());
            assert!(timeout(LIMIT / 2, early.as_mut()).await.is_err());
        }
        assert!(first.try_recv().is_err());
        call.answer(StatusCode::OK);
        first.await.unwrap();
        let call = Call::next(&mut server).await;
        assert_eq!(call.message(), "third");
        call.answer(StatusCode::OK);
        third.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn after_an_outage_only_the_last_state_is_written() {
        let (conditions, mut server) = server();
        let first = set(&conditions, "u1", "first");
        for _ in 0..3 {
            let call = Call::next(&mut server).await;
            assert_eq!(call.message(), "first");
            call.answer(StatusCode::SERVICE_UNAVAILABLE);
        }
        tokio::task::yield_now().await;
        let last = set(&conditions, "u1", "last");
        first.await.unwrap();
        let call = Call::next(&mut server).await;
        assert_eq!(call.message(), "last");
        call.answer(StatusCode::OK);
        last.await.unwrap();
        assert!(is_silent(&mut server).await);
        assert!(conditions.slots().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_set_during_a_request_that_failed_is_sent_instead() {
        let (conditions, mut server) = server();
        let first = set(&conditions, "u1", "first");
        let call = Call::next(&mut server).await;
        let _last = set(&conditions, "u1", "last");
        call.answer(StatusCode::BAD_GATEWAY);
        assert_eq!(Call::next(&mut server).await.message(), "last");
        first.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_is_away_is_tried_again_for_ever() {
        let (conditions, mut server) = server();
        let mut done = set(&conditions, "u1", "why");
        let mut asked = None::<Instant>;
        for round in 0..100 {
            let call = Call::next(&mut server).await;
            let pause = asked.replace(Instant::now()).map(|asked| asked.elapsed());
            let in_bounds =
                |pause| (Duration::from_millis(500)..=LIMIT + LONGEST_PAUSE).contains(&pause);
            assert!(
                pause.is_none_or(in_bounds),
                "{pause:?} before round {round}"
            );
            assert!(done.try_recv().is_err(), "round {round}");
            match round % 4 {
                0 => call.answer(StatusCode::TOO_MANY_REQUESTS),
                1 => call.answer(StatusCode::INTERNAL_SERVER_ERROR),
                2 => call.response.send_error("connection refused"),
                // No answer at all.
                _ => sleep(LIMIT).await,
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_ends_it() {
        for refusal in [404, 409, 422] {
            let (conditions, mut server) = server();
            let done = set(&conditions, "u1", "why");
            let call = Call::next(&mut server).await;
            call.answer(StatusCode::from_u16(refusal).unwrap());
            done.await.unwrap();
            assert!(is_silent(&mut server).await, "{refusal}");
            assert!(conditions.slots().is_empty(), "{refusal}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn rights_that_an_api_server_does_not_know_of_yet_are_waited_for_but_not_for_ever() {
        let (conditions, mut server) = server();
        let done = set(&conditions, "u1", "why");
        for _ in 0..MOST_DENIALS {
            Call::next(&mut server).await.answer(StatusCode::FORBIDDEN);
        }
        Call::next(&mut server).await.answer(StatusCode::OK);
        done.await.unwrap();
        assert!(!conditions.forbidden.load(Ordering::Relaxed));

        let done = set(&conditions, "u1", "why");
        for _ in 0..=MOST_DENIALS {
            Call::next(&mut server).await.answer(StatusCode::FORBIDDEN);
        }
        done.await.unwrap();
        assert!(is_silent(&mut server).await);
        assert!(conditions.forbidden.load(Ordering::Relaxed));
    }

    #[test]
    fn a_uid_that_cannot_be_changed_means_that_the_pod_is_gone() {
        let refusal = |field: &str| {
            let status = json!({
                "status": "Failure", "code": 422, "reason": "Invalid",
                "details": {"causes": [{"field": field, "reason": "FieldValueInvalid"}]},
            });
            Error::Api(serde_json::from_value(status).unwrap())
        };
        assert!(is_gone(&refusal("metadata.uid")));
        assert!(!is_gone(&refusal("status.conditions[0].Type")));
    }

    #[tokio::test(start_paused = true)]
    async fn pods_do_not_wait_for_each_other() {
        let (conditions, mut server) = server();
        let _first = set(&conditions, "u1", "first");
        let _unanswered = Call::next(&mut server).await;
        let second = set(&conditions, "u2", "second");
        let call = timeout(LIMIT / 2, Call::next(&mut server)).await.unwrap();
        assert_eq!(call.message(), "second");
        call.answer(StatusCode::OK);
        second.await.unwrap();
    }
}
