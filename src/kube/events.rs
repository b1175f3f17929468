//! Events on pods, for `kubectl describe`.
//!
//! What repeats is one event that counts, as the kubelet's are (`EventCorrelator`, client-go
//! `tools/record/events_cache.go`): its message is the last one. That is why they are those of the core group: of the others, of
//! `events.k8s.io`, the message cannot be changed (`ValidateEventUpdate`, `pkg/apis/core/validation/events.go`).

use std::collections::HashMap;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, Error};
use serde_json::json;
use tokio::select;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Duration, Instant, sleep, timeout};

use crate::ids::{PodKey, PodUid};
use crate::text;

/// Events beyond this many that wait for the API server are dropped: nothing here may grow without bound. A
/// replay has some ten, and hundreds of pods may restart at once.
const QUEUE: usize = 2048;
/// The longest message, in bytes, as of events of the other group (`NoteLengthLimit`, the same file). Nobody limits these.
const LONGEST_MESSAGE: usize = 1024;
/// Likewise the name of whoever reports; a node's name may have 253 (`ReportingInstanceLengthLimit`).
const LONGEST_INSTANCE: usize = 128;
/// How long the API server keeps an event that does not repeat, by default (`--event-ttl`).
const KEPT: Duration = Duration::from_hours(1);
/// So many series are known at a time.
const MOST_SERIES: usize = 4096;
/// How long the API server may take over one event.
const LIMIT: Duration = Duration::from_secs(10);
/// While the API server is away an event is tried again, about as long as the kubelet's are: two minutes (`recordToSink`,
/// client-go `tools/record/event.go`). Between two tries, at first and at most, and how many there are.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
const RETRIES: usize = 14;
/// How long anybody waits for his events.
const PATIENCE: Duration = Duration::from_secs(2);
/// Who says it.
const COMPONENT: &str = "reprise";

/// How serious an event is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// For information.
    Normal,
    /// Somebody should look.
    Warning,
}

/// What is said of an object.
#[derive(Debug, Clone, Copy)]
pub struct Said<'a> {
    /// How serious it is.
    pub kind: EventKind,
    /// Why it is said, in one word.
    pub reason: &'a str,
    /// What is said for the same reason, of the same object, and has this in common is one event, which counts.
    pub series: &'a str,
    /// The same for people. As much of it is published as an event can have.
    pub message: &'a str,
}

/// Publishes events; never fails.
#[derive(Debug, Clone)]
pub struct Events {
    queue: mpsc::Sender<Queued>,
}

/// What waits for the API server.
struct Queued {
    on: ObjectReference,
    kind: EventKind,
    series: Series,
    message: String,
    /// Dropped when that is over.
    over: oneshot::Sender<()>,
}

/// What repeats itself: on the object with that UID, for that reason, and what it is about.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Series {
    uid: Option<String>,
    reason: String,
    about: String,
}

impl Events {
    /// Events come from `reprise` on node `node`. Must be called on the async runtime.
    #[must_use]
    pub fn new(client: Client, node: &str) -> Self {
        let publisher = Publisher {
            client,
            node: node.to_owned(),
            published: 0,
            known: HashMap::new(),
        };
        let (queue, receiver) = mpsc::channel(QUEUE);
        tokio::spawn(publisher.run(receiver));
        Self { queue }
    }

    /// Publishes an event on a pod, in due time.
    pub fn publish(&self, pod: &PodKey, uid: &PodUid, said: Said<'_>) {
        self.publish_on(of_pod(pod, uid), said);
    }

    /// The same on any object.
    pub(crate) fn publish_on(&self, on: ObjectReference, said: Said<'_>) {
        drop(self.enqueue(on, said));
    }

    /// The same on a pod and an owner, and waits until the API server has taken both, but not for long.
    pub(crate) async fn publish_before(
        &self,
        (pod, uid): (&PodKey, &PodUid),
        owner: ObjectReference,
        said: Said<'_>,
    ) {
        let on_pod = self.enqueue(of_pod(pod, uid), said);
        let on_owner = self.enqueue(owner, said);
        // It is over when the other end is gone.
        let both = async { (on_pod.await, on_owner.await) };
        if timeout(PATIENCE, both).await.is_err() {
            let reason = said.reason;
            tracing::debug!(%pod, reason, "does not wait for an event any longer");
        }
    }

    fn enqueue(&self, on: ObjectReference, said: Said<'_>) -> oneshot::Receiver<()> {
        let Said {
            kind,
            reason,
            series,
            message,
        } = said;
        let (over, is_over) = oneshot::channel();
        let queued = Queued {
            kind,
            series: Series {
                uid: on.uid.clone(),
                reason: reason.to_owned(),
                about: words(series),
            },
            on,
            message: words(message),
            over,
        };
        if self.queue.try_send(queued).is_err() {
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
fn words(message: &str) -> String {
    text::cut(&text::printable(message), LONGEST_MESSAGE).into_owned()
}

/// Writes one event after another.
struct Publisher {
    client: Client,
    node: String,
    published: u64,
    /// What may be said once more.
    known: HashMap<Series, Known>,
}

/// An event that is in the API.
struct Known {
    name: String,
    count: i32,
    /// Of the event that has its message.
    number: u64,
    last: Instant,
}

/// An event on its way to the API.
struct Delivery {
    /// In the order in which they were said.
    number: u64,
    series: Series,
    event: Event,
    /// Before each further try.
    pauses: ExponentialBackoff,
    _over: oneshot::Sender<()>,
}

impl Publisher {
    /// What is not taken is tried again when its time has come, and holds up nothing else until then.
    async fn run(mut self, mut queue: mpsc::Receiver<Queued>) {
        let mut later = FuturesUnordered::new();
        loop {
            let mut delivery = select! {
                Some(delivery) = later.next() => delivery,
                queued = queue.recv() => match queued {
                    Some(queued) => self.delivery(queued),
                    None => return,
                },
            };
            let pause = self.deliver(&mut delivery).await;
            if let Some(pause) = pause.filter(|_| later.len() < QUEUE) {
                later.push(async move {
                    sleep(pause).await;
                    delivery
                });
            }
        }
    }

    fn delivery(&mut self, queued: Queued) -> Delivery {
        let Queued {
            on,
            kind,
            series,
            message,
            over,
        } = queued;
        let event = self.event(on, kind, series.reason.clone(), message);
        let pauses = ExponentialBuilder::new().with_min_delay(FIRST_PAUSE);
        let pauses = pauses.with_max_delay(LONGEST_PAUSE);
        self.published += 1;
        Delivery {
            number: self.published,
            series,
            event,
            pauses: pauses.with_max_times(RETRIES).build(),
            _over: over,
        }
    }

    /// Returns when to try again, if that may help. An event that is lost is not worth a warning: the log has the same.
    async fn deliver(&mut self, delivery: &mut Delivery) -> Option<Duration> {
        let error = match timeout(LIMIT, self.publish(delivery)).await {
            Ok(Ok(())) => return None,
            Ok(Err(error)) if is_final(&error) => {
                let reason = &delivery.series.reason;
                tracing::debug!(%error, reason, "the API server refuses an event");
                return None;
            }
            Ok(Err(error)) => error.to_string(),
            Err(late) => late.to_string(),
        };
        let pause = delivery.pauses.next();
        if pause.is_none() {
            let reason = &delivery.series.reason;
            tracing::debug!(error, reason, "could not publish an event");
        }
        pause
    }

    async fn publish(&mut self, delivery: &Delivery) -> Result<(), Error> {
        let Delivery {
            number,
            series,
            event,
            ..
        } = delivery;
        let namespace = event.metadata.namespace.as_deref().unwrap_or("default");
        let api = Api::namespaced(self.client.clone(), namespace);
        if let Some(known) = self.known.get_mut(series) {
            match known.repeat(&api, event, *number).await {
                // It has been deleted, or forgotten.
                Err(Error::Api(status)) if status.code == 404 => {}
                repeated => return repeated,
            }
        }
        match api.create(&PostParams::default(), event).await {
            // It was taken when nothing was heard of that.
            Err(Error::Api(status)) if status.code == 409 => {}
            created => {
                created?;
            }
        }
        self.forget_some();
        let known = Known {
            name: event.metadata.name.clone().unwrap_or_default(),
            count: 1,
            number: *number,
            last: Instant::now(),
        };
        self.known.insert(series.clone(), known);
        Ok(())
    }

    /// Makes room for one more.
    fn forget_some(&mut self) {
        self.known.retain(|_, known| known.last.elapsed() < KEPT);
        if self.known.len() >= MOST_SERIES {
            let oldest = self.known.iter().min_by_key(|(_, known)| known.last);
            if let Some(oldest) = oldest.map(|(series, _)| series.clone()) {
                self.known.remove(&oldest);
            }
        }
    }

    /// As the kubelet makes them (`makeEvent`, client-go `tools/record/event.go`).
    fn event(
        &self,
        on: ObjectReference,
        kind: EventKind,
        reason: String,
        message: String,
    ) -> Event {
        let now = Timestamp::now();
        let instance = text::cut(&self.node, LONGEST_INSTANCE).into_owned();
        Event {
            metadata: ObjectMeta {
                name: Some(event_name(on.name.as_deref().unwrap_or(COMPONENT), now)),
                namespace: on.namespace.clone(),
                ..ObjectMeta::default()
            },
            involved_object: on,
            type_: Some(format!("{kind:?}")),
            reason: Some(reason),
            message: Some(message),
            count: Some(1),
            first_timestamp: Some(Time(now)),
            last_timestamp: Some(Time(now)),
            source: Some(EventSource {
                component: Some(COMPONENT.to_owned()),
                host: Some(self.node.clone()),
            }),
            reporting_component: Some(COMPONENT.to_owned()),
            reporting_instance: Some(instance),
            ..Event::default()
        }
    }
}

/// Whether the API server would say the same again: it has understood, and refuses. One that has just been started does not
/// know its users and their rights yet (what an authorizer says, and no admission: `forbiddenMessage`, apiserver
/// `pkg/endpoints/handlers/responsewriters`).
fn is_final(error: &Error) -> bool {
    let Error::Api(status) = error else {
        return false;
    };
    match status.code {
        401 | 429 => false,
        403 => !status.message.contains(" cannot "),
        code => (400..500).contains(&code),
    }
}

impl Known {
    /// Says it once more, unless something newer was said since.
    async fn repeat(&mut self, api: &Api<Event>, event: &Event, number: u64) -> Result<(), Error> {
        let count = self.count.saturating_add(1);
        let mut patch = json!({"count": count});
        if number > self.number {
            patch["message"] = json!(event.message);
            patch["lastTimestamp"] = json!(event.last_timestamp);
        }
        let params = PatchParams::default();
        api.patch(&self.name, &params, &Patch::Merge(patch)).await?;
        self.count = count;
        self.number = self.number.max(number);
        self.last = Instant::now();
        Ok(())
    }
}

/// As client-go has it, of as much of the object's name as an event's has room for.
fn event_name(object: &str, now: Timestamp) -> String {
    const LONGEST: usize = 253;
    let suffix = format!(".{:x}", now.as_nanosecond());
    let most = object.floor_char_boundary(LONGEST - suffix.len());
    let object = object[..most].trim_end_matches(['.', '-']);
    format!("{object}{suffix}")
}

#[cfg(test)]
mod tests {
    use http::{Request, Response, StatusCode};
    use kube::client::Body;
    use serde_json::Value;
    use tower_test::mock::{Handle, pair};

    use super::*;

    type Server = Handle<Request<Body>, Response<Body>>;

    fn events(node: &str) -> (Events, Server) {
        let (service, server) = pair();
        (Events::new(Client::new(service, "default"), node), server)
    }

    fn pod(name: &str) -> PodKey {
        PodKey {
            namespace: "n".to_owned(),
            name: name.to_owned(),
        }
    }

    fn said<'a>(series: &'a str, message: &'a str) -> Said<'a> {
        Said {
            kind: EventKind::Warning,
            reason: "BackOff",
            series,
            message,
        }
    }

    /// What the API server is asked to do next, which it does, or answers with that status.
    async fn asked(server: &mut Server, status: StatusCode) -> (String, Value) {
        let (request, answer) = server.next_request().await.unwrap();
        let method = request.method().to_string();
        let body = request.into_body().collect_bytes().await.unwrap();
        let value: Value = serde_json::from_slice(&body).unwrap();
        let text = match status {
            StatusCode::OK => json!({"metadata": {}, "involvedObject": {}}),
            failure => json!({"status": "Failure", "code": failure.as_u16(), "message": "no"}),
        };
        let mut response = Response::new(Body::from(text.to_string().into_bytes()));
        *response.status_mut() = status;
        answer.send_response(response);
        (method, value)
    }

    async fn published(node: &str, pod_name: &str, message: &str) -> Value {
        let (events, mut server) = events(node);
        events.publish(&pod(pod_name), &"u1".into(), said(message, message));
        asked(&mut server, StatusCode::OK).await.1
    }

    #[tokio::test]
    async fn an_event_looks_like_the_kubelets() {
        let event = published("node-1", "p", "Container a exited").await;
        assert_eq!(event["message"], "Container a exited");
        let about =
            json!({"apiVersion": "v1", "kind": "Pod", "namespace": "n", "name": "p", "uid": "u1"});
        assert_eq!(event["involvedObject"], about);
        assert_eq!(
            (&event["type"], &event["count"]),
            (&json!("Warning"), &json!(1))
        );
        assert_eq!(
            event["source"],
            json!({"component": "reprise", "host": "node-1"})
        );
        assert_eq!(event["firstTimestamp"], event["lastTimestamp"]);
        assert_eq!(event["metadata"]["namespace"], "n");
    }

    #[tokio::test]
    async fn an_event_has_as_much_of_its_message_as_it_may_and_a_name_that_is_one() {
        // Each é has two bytes, and each escape becomes eight.
        let long = format!("{}\u{9b}{}", "é".repeat(400), "x".repeat(400));
        let event = published(&"n".repeat(253), &"a.".repeat(126), &long).await;
        let message = event["message"].as_str().unwrap();
        assert_eq!(message.len(), LONGEST_MESSAGE);
        assert!(message.starts_with(&format!("{}\\u{{9b}}xx", "é".repeat(400))));
        assert!(message.ends_with("x…"), "{message}");
        let instance = event["reportingInstance"].as_str().unwrap();
        assert_eq!(instance.len(), LONGEST_INSTANCE);
        let name = event["metadata"]["name"].as_str().unwrap();
        assert!(name.len() <= 253 && !name.contains(".."), "{name}");
    }

    #[tokio::test]
    async fn what_is_of_one_series_is_counted_and_said_as_it_was_last() {
        let (events, mut server) = events("node-1");
        for (uid, series, message, method) in [
            ("u1", "a", "a in 9 ms", "POST"),
            ("u1", "b", "b", "POST"),
            ("u2", "a", "a in 8 ms", "POST"),
            ("u1", "a", "a in 7 ms", "PATCH"),
            ("u1", "a", "a in 6 ms", "PATCH"),
        ] {
            events.publish(&pod("p"), &uid.into(), said(series, message));
            let (asked, event) = asked(&mut server, StatusCode::OK).await;
            assert_eq!(
                (asked.as_str(), &event["message"]),
                (method, &json!(message))
            );
            if message == "a in 6 ms" {
                assert_eq!(event["count"], 3);
            }
        }
    }

    #[tokio::test]
    async fn what_the_api_server_has_forgotten_is_said_anew() {
        let (events, mut server) = events("node-1");
        let say = |message| events.publish(&pod("p"), &"u1".into(), said("a", message));
        say("first");
        asked(&mut server, StatusCode::OK).await;
        say("second");
        assert_eq!(asked(&mut server, StatusCode::NOT_FOUND).await.0, "PATCH");
        let (method, event) = asked(&mut server, StatusCode::OK).await;
        assert_eq!(
            (method.as_str(), &event["message"]),
            ("POST", &json!("second"))
        );
        say("third");
        let (_, event) = asked(&mut server, StatusCode::OK).await;
        assert_eq!(event["count"], 2);
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_is_tried_again_until_it_is_taken_or_refused() {
        let (events, mut server) = events("node-1");
        let say = |message| events.publish(&pod("p"), &"u1".into(), said("a", message));
        say("first");
        let (_, first) = asked(&mut server, StatusCode::INTERNAL_SERVER_ERROR).await;
        let (_, again) = asked(&mut server, StatusCode::UNAUTHORIZED).await;
        assert_eq!(first, again);
        // The answer to one of them was lost.
        asked(&mut server, StatusCode::CONFLICT).await;
        say("second");
        let (method, _) = asked(&mut server, StatusCode::INTERNAL_SERVER_ERROR).await;
        assert_eq!(method, "PATCH");
        // Another one goes first, and of the two the message is the newer one's.
        say("newer");
        let (_, newer) = asked(&mut server, StatusCode::OK).await;
        assert_eq!(
            (&newer["message"], &newer["count"]),
            (&json!("newer"), &json!(2))
        );
        let (_, older) = asked(&mut server, StatusCode::OK).await;
        assert_eq!(older, json!({"count": 3}));
        say("third");
        asked(&mut server, StatusCode::FORBIDDEN).await;
        say("fourth");
        for _ in 0..=RETRIES {
            let (_, event) = asked(&mut server, StatusCode::BAD_GATEWAY).await;
            assert_eq!(event["message"], "fourth");
        }
        say("fifth");
        let (_, event) = asked(&mut server, StatusCode::OK).await;
        assert_eq!(
            (&event["message"], &event["count"]),
            (&json!("fifth"), &json!(4))
        );
    }

    #[test]
    fn a_right_that_is_missing_may_come_and_what_an_admission_says_stays() {
        for (code, message, stays) in [
            (
                403,
                r#"events is forbidden: User "u" cannot create resource "events""#,
                false,
            ),
            (403, "events is forbidden: exceeded quota: few", true),
            (404, "namespaces not found", true),
            (429, "later", false),
            (500, "etcd", false),
        ] {
            let status = json!({"status": "Failure", "code": code, "message": message});
            let status = serde_json::from_value(status).unwrap();
            assert_eq!(is_final(&Error::Api(status)), stays, "{message}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_is_known_of_events_than_there_may_be() {
        let (service, _server) = pair::<Request<Body>, Response<Body>>();
        let mut publisher = Publisher {
            client: Client::new(service, "default"),
            node: "node-1".to_owned(),
            published: 0,
            known: HashMap::new(),
        };
        for number in 0..=MOST_SERIES {
            publisher.forget_some();
            let series = Series {
                uid: None,
                reason: "BackOff".to_owned(),
                about: number.to_string(),
            };
            let known = Known {
                name: String::new(),
                count: 1,
                number: 1,
                last: Instant::now(),
            };
            publisher.known.insert(series, known);
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        assert_eq!(publisher.known.len(), MOST_SERIES);
        assert!(publisher.known.keys().all(|series| series.about != "0"));
        tokio::time::advance(KEPT).await;
        publisher.forget_some();
        assert!(publisher.known.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_for_his_events_does_so_until_they_are_taken_but_not_for_long() {
        for is_there in [true, false] {
            let (events, mut server) = events("node-1");
            let (pod, uid, owner) = (pod("p"), "u1".into(), of_pod(&pod("q"), &"u2".into()));
            let began = Instant::now();
            let published = events.publish_before((&pod, &uid), owner, said("a", "a"));
            let serve = async {
                for _ in 0..2 {
                    tokio::time::sleep(PATIENCE / 4).await;
                    if is_there {
                        asked(&mut server, StatusCode::OK).await;
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
}
