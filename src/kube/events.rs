//! Events on pods, for `kubectl describe`.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Duration, timeout};

use crate::ids::{PodKey, PodUid};
use crate::text;

/// Events beyond this many that wait for the API server are dropped: nothing here may grow without bound. A
/// replay has some ten, and hundreds of pods may restart at once.
const QUEUE: usize = 2048;
/// The longest note that the API server takes, in bytes whatever its error says (`NoteLengthLimit`,
/// `pkg/apis/core/validation/events.go`). Reasons, of which it takes 128, are ours and short.
const LONGEST_NOTE: usize = 1024;
/// Likewise of an action (`ActionLengthLimit`).
const LONGEST_ACTION: usize = 128;
/// Likewise of the name of whoever reports; a node's name may have 253 (`ReportingInstanceLengthLimit`).
const LONGEST_INSTANCE: usize = 128;
/// How long the API server may take over one event.
const LIMIT: Duration = Duration::from_secs(10);
/// How long anybody waits for his events.
const PATIENCE: Duration = Duration::from_secs(2);

/// How serious an event is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// For information.
    Normal,
    /// Somebody should look.
    Warning,
}

/// Publishes events; never fails.
#[derive(Debug, Clone)]
pub struct Events {
    queue: mpsc::Sender<Queued>,
}

/// What waits for the API server.
struct Queued {
    on: ObjectReference,
    event: Event,
    /// Dropped when that is over.
    over: oneshot::Sender<()>,
}

impl Events {
    /// Events come from `reprise` on node `node`. Must be called on the async runtime.
    #[must_use]
    pub fn new(client: Client, node: &str) -> Self {
        let reporter = Reporter {
            controller: "reprise".to_owned(),
            instance: Some(text::cut(node, LONGEST_INSTANCE).into_owned()),
        };
        let recorder = Recorder::new(client, reporter);
        let (queue, receiver) = mpsc::channel(QUEUE);
        tokio::spawn(publish_all(recorder, receiver));
        Self { queue }
    }

    /// Publishes an event on a pod, in due time, with as much of the message as an event can have.
    pub fn publish(
        &self,
        pod: &PodKey,
        uid: &PodUid,
        kind: EventKind,
        reason: &str,
        message: &str,
    ) {
        self.publish_on(of_pod(pod, uid), kind, reason, message);
    }

    /// The same on any object.
    pub(crate) fn publish_on(
        &self,
        on: ObjectReference,
        kind: EventKind,
        reason: &str,
        message: &str,
    ) {
        drop(self.enqueue(on, kind, reason, message));
    }

    /// The same on a pod and an owner, and waits until the API server has taken both, but not for long.
    pub(crate) async fn publish_before(
        &self,
        (pod, uid): (&PodKey, &PodUid),
        owner: ObjectReference,
        kind: EventKind,
        reason: &str,
        message: &str,
    ) {
        let on_pod = self.enqueue(of_pod(pod, uid), kind, reason, message);
        let on_owner = self.enqueue(owner, kind, reason, message);
        // It is over when the other end is gone.
        let both = async { (on_pod.await, on_owner.await) };
        if timeout(PATIENCE, both).await.is_err() {
            tracing::debug!(%pod, reason, "does not wait for an event any longer");
        }
    }

    fn enqueue(
        &self,
        on: ObjectReference,
        kind: EventKind,
        reason: &str,
        message: &str,
    ) -> oneshot::Receiver<()> {
        let event = Event {
            type_: match kind {
                EventKind::Normal => EventType::Normal,
                EventKind::Warning => EventType::Warning,
            },
            reason: reason.to_owned(),
            note: Some(words(message, LONGEST_NOTE)),
            // The recorder makes one series of all events that have this and the reason in common, with the note of the
            // first: only what says the same is the same.
            action: words(message, LONGEST_ACTION),
            secondary: None,
        };
        let (over, is_over) = oneshot::channel();
        if self.queue.try_send(Queued { on, event, over }).is_err() {
            tracing::debug!(
                reason,
                message,
                "dropped an event: the API server is too slow"
            );
        }
        is_over
    }
}

fn of_pod(pod: &PodKey, uid: &PodUid) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: Some(pod.name.clone()),
        namespace: Some(pod.namespace.clone()),
        uid: Some(uid.to_string()),
        ..Default::default()
    }
}

/// As much of it as may be written there.
fn words(message: &str, longest: usize) -> String {
    text::cut(&text::printable(message), longest).into_owned()
}

async fn publish_all(recorder: Recorder, mut queue: mpsc::Receiver<Queued>) {
    while let Some(Queued { on, event, over }) = queue.recv().await {
        let reason = &event.reason;
        match timeout(LIMIT, recorder.publish(&event, &on)).await {
            Ok(Ok(())) => {}
            // An event that is lost is not worth a warning each: the log has the same.
            Ok(Err(error)) => tracing::debug!(%error, reason, "could not publish an event"),
            Err(_) => tracing::debug!(reason, "the API server did not take an event in time"),
        }
        drop(over);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::Value;

    /// What the API server is asked to keep.
    async fn published(node: &str, message: &str) -> Value {
        let (service, mut server) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        let events = Events::new(Client::new(service, "default"), node);
        let pod = PodKey {
            namespace: "n".to_owned(),
            name: "p".to_owned(),
        };
        events.publish(&pod, &"u1".into(), EventKind::Warning, "BackOff", message);
        let (request, _) = server.next_request().await.unwrap();
        let body = request.into_body().collect_bytes().await.unwrap();
        serde_json::from_slice(&body).unwrap()
    }

    #[tokio::test]
    async fn an_event_has_as_much_of_its_message_as_the_api_server_takes() {
        let event = published("node-1", "Container a exited").await;
        assert_eq!(event["note"], "Container a exited");
        // Each é has two bytes, and each escape becomes eight.
        let event = published(
            "node-1",
            &format!("{}\u{9b}{}", "é".repeat(400), "x".repeat(400)),
        )
        .await;
        let note = event["note"].as_str().unwrap();
        assert_eq!(note.len(), LONGEST_NOTE);
        assert!(note.starts_with(&format!("{}\\u{{9b}}xx", "é".repeat(400))));
        assert!(note.ends_with("x…"), "{note}");
    }

    #[tokio::test]
    async fn only_events_that_say_the_same_are_a_series() {
        let (service, mut server) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        let events = Events::new(Client::new(service, "default"), "node-1");
        let pod = PodKey {
            namespace: "n".to_owned(),
            name: "p".to_owned(),
        };
        for (message, method) in [("a", "POST"), ("b", "POST"), ("a", "PATCH")] {
            events.publish(&pod, &"u1".into(), EventKind::Normal, "Started", message);
            let (request, answer) = server.next_request().await.unwrap();
            assert_eq!(request.method().as_str(), method, "{message}");
            let body = request.into_body().collect_bytes().await.unwrap();
            assert_eq!(
                serde_json::from_slice::<Value>(&body).unwrap()["note"],
                message
            );
            answer.send_response(Response::new(Body::from(body.to_vec())));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_for_his_events_does_so_until_they_are_taken_but_not_for_long() {
        for is_there in [true, false] {
            let (service, mut server) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
            let events = Events::new(Client::new(service, "default"), "node-1");
            let pod = PodKey {
                namespace: "n".to_owned(),
                name: "p".to_owned(),
            };
            let (uid, owner, kind) = ("u1".into(), of_pod(&pod, &"u2".into()), EventKind::Warning);
            let began = tokio::time::Instant::now();
            let published = events.publish_before((&pod, &uid), owner, kind, "HardReset", "a");
            let serve = async {
                for _ in 0..2 {
                    let (request, answer) = server.next_request().await.unwrap();
                    tokio::time::sleep(PATIENCE / 4).await;
                    if is_there {
                        let body = request.into_body().collect_bytes().await.unwrap();
                        answer.send_response(Response::new(Body::from(body.to_vec())));
                    } else {
                        std::future::pending::<()>().await;
                    }
                }
                std::future::pending::<()>().await;
            };
            tokio::select! {
                () = published => {}
                () = serve => {}
            }
            let waited = if is_there { PATIENCE / 2 } else { PATIENCE };
            assert!(
                began.elapsed().abs_diff(waited) < PATIENCE / 8,
                "{is_there}"
            );
        }
    }

    #[tokio::test]
    async fn an_event_comes_from_a_node_whose_name_is_long_as_well() {
        let event = published(&"n".repeat(253), "a").await;
        assert_eq!(
            event["reportingInstance"].as_str().unwrap().len(),
            LONGEST_INSTANCE
        );
    }
}
