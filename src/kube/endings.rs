//! Whether the kubelet is ending a pod by itself (eviction, preemption, `activeDeadlineSeconds`, the node's shutdown), or one
//! container, to start it again (a liveness probe, a new image, a resize).
//!
//! The pod's phase says nothing of it until all containers are dead (`mergePodStatus`,
//! `pkg/kubelet/status/status_manager.go`). But before the kubelet stops a container, it publishes an event
//! (`killContainer`, `pkg/kubelet/kuberuntime/kuberuntime_container.go`), of all containers of a pod at once if it ends the
//! pod; and with a reason in it if it ends a container only to start it again: because a probe has failed, for one.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use k8s_openapi::api::core::v1::Event;
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use kube::{Api, Client, Error};
use tokio::time::{Duration, Instant, timeout};

use crate::ids::{ContainerName, PodKey, PodUid};

/// How long the API server may take over it. An answer that comes too late to wait for still ends a restart.
const LIMIT: Duration = Duration::from_secs(5);
/// How long it is worth to wait for, and where the last answer was not there in that time: each restart waits.
const PATIENCE: Duration = Duration::from_secs(2);
const SHORT_PATIENCE: Duration = Duration::from_millis(400);
/// So many are looked at. The kubelet publishes no more than some forty of one pod in the hour for which they are kept
/// (`EventSourceObjectSpamFilter`, client-go `tools/record/events_cache.go`); whoever else may write events may write any number.
const MOST: u32 = 500;
/// The reason of the event (`KillingContainer`, `pkg/kubelet/events/event.go`).
const REASON: &str = "Killing";
/// How its message begins if it gives no reason.
const STOPPING: &str = "Stopping container ";
/// How it ends if the container is started again in the same breath, whatever it exits with (`computePodActions`,
/// `computePodResizeAction`, `pkg/kubelet/kuberuntime/kuberuntime_manager.go`).
const STARTS_AGAIN: [&str; 2] = ["will be restarted", "resize requires restart"];

/// What the kubelet ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ending {
    /// That container, which it starts again by itself.
    Container,
    /// The pod.
    Pod,
}

/// An exit of a container, and between which times the kubelet must have begun to end it, if it was the kubelet's doing.
#[derive(Debug, Clone)]
pub struct ExitTimes {
    /// The container.
    pub container: ContainerName,
    /// When it was made.
    pub made: Timestamp,
    /// When its exit was known.
    pub known: Timestamp,
}

/// Asks the API server.
#[derive(Clone)]
pub struct Endings {
    client: Client,
    forbidden: Arc<AtomicBool>,
    /// The last answer was late, or did not come at all.
    late: Arc<AtomicBool>,
}

impl Endings {
    /// Nothing is sent yet.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self {
            client,
            forbidden: Arc::default(),
            late: Arc::default(),
        }
    }

    /// How long the answer to [`Self::begun`] is worth to wait for. An API server that is slow has its time, one that has gone
    /// silent costs it once.
    #[must_use]
    pub fn patience(&self) -> Duration {
        if self.late.load(Ordering::Relaxed) {
            SHORT_PATIENCE
        } else {
            PATIENCE
        }
    }

    /// What the kubelet has begun to end of that pod since the container was made whose exit raises the question: what it
    /// stopped before, it has started again. `uid`: the one that the kubelet knows the pod by. `None`: nothing, or nobody can
    /// tell.
    pub async fn begun(&self, pod: &PodKey, uid: &PodUid, exit: &ExitTimes) -> Option<Ending> {
        let events = self.list(pod, uid).await?;
        let since = events.iter().filter(|event| is_after(event, exit.made));
        since.filter_map(|event| ending(event, exit)).max()
    }

    /// The events of that reason on the pod; `None`: nobody can tell.
    async fn list(&self, pod: &PodKey, uid: &PodUid) -> Option<Vec<Event>> {
        let api = Api::<Event>::namespaced(self.client.clone(), &pod.namespace);
        let of_pod = format!("involvedObject.uid={uid},reason={REASON}");
        let params = ListParams::default().fields(&of_pod).limit(MOST);
        let asked = Instant::now();
        let answer = timeout(LIMIT, api.list(&params)).await;
        let is_late = asked.elapsed() >= PATIENCE;
        self.late.store(is_late, Ordering::Relaxed);
        match answer {
            Ok(Ok(events)) => Some(events.items),
            Ok(Err(error)) => {
                self.tell(pod, &error);
                None
            }
            Err(_) => {
                tracing::debug!(%pod, "the API server does not tell whether the kubelet is ending a pod");
                None
            }
        }
    }

    /// Says once what is the same for every pod.
    fn tell(&self, pod: &PodKey, error: &Error) {
        let denied = matches!(error, Error::Api(status) if status.code == 403);
        if denied && !self.forbidden.swap(true, Ordering::Relaxed) {
            tracing::warn!(%pod, %error, "pods that the kubelet is ending are not told from others: grant the verb list on events");
        } else {
            tracing::debug!(%pod, %error, "it is not known whether the kubelet is ending a pod");
        }
    }
}

impl fmt::Debug for Endings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endings").finish_non_exhaustive()
    }
}

fn ending(event: &Event, exit: &ExitTimes) -> Option<Ending> {
    let message = event.message.as_deref().unwrap_or_default();
    if message.starts_with(STOPPING) {
        Some(Ending::Pod)
    } else {
        let again = starts_again(event).filter(|it| *it == exit.container);
        // What is dead already can be ended for another reason yet: while its exit is held, a new image is one.
        again.and_then(|_| (!is_after(event, exit.known)).then_some(Ending::Container))
    }
}

/// The container that the kubelet ends to start it again, if that is what the event is about.
fn starts_again(event: &Event) -> Option<ContainerName> {
    let message = event.message.as_deref()?;
    let (name, _) = message.strip_prefix("Container ")?.split_once(' ')?;
    let again = STARTS_AGAIN.iter().any(|it| message.ends_with(it));
    again.then(|| name.into())
}

/// Events tell seconds; one that was published once has the nanosecond in its name (`GenerateEventName`,
/// client-go v0.36, `tools/record/util`).
fn is_after(event: &Event, since: Timestamp) -> bool {
    let Some(last) = last(event) else {
        return false;
    };
    let named = named_time(event).filter(|at| at.as_second() == last.as_second());
    named.map_or(last.as_second() > since.as_second(), |at| at > since)
}

fn last(event: &Event) -> Option<Timestamp> {
    let last = event.last_timestamp.as_ref().map(|at| at.0);
    last.or(event.event_time.as_ref().map(|at| at.0))
}

fn named_time(event: &Event) -> Option<Timestamp> {
    let (_, nanoseconds) = event.metadata.name.as_ref()?.rsplit_once('.')?;
    Timestamp::from_nanosecond(i128::from_str_radix(nanoseconds, 16).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use http::{Request, Response, StatusCode};
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;

    fn event(name: &str, message: &str, at: &str) -> Value {
        json!({
            "metadata": {"name": name, "namespace": "n"},
            "involvedObject": {"uid": "u"},
            "reason": "Killing",
            "message": message,
            "lastTimestamp": at,
        })
    }

    fn exit() -> ExitTimes {
        ExitTimes {
            container: "a".into(),
            made: "2026-01-01T10:00:00.5Z".parse().unwrap(),
            known: "2026-01-01T10:00:08.5Z".parse().unwrap(),
        }
    }

    /// What becomes of an API server's answer, and what it was asked.
    async fn answered(status: StatusCode, answer: Value) -> (Option<Ending>, String) {
        let (service, mut server) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        let endings = Endings::new(Client::new(service, "default"));
        let pod = PodKey {
            namespace: "n".to_owned(),
            name: "p".to_owned(),
        };
        let asked = tokio::spawn(async move { endings.begun(&pod, &"u".into(), &exit()).await });
        let (request, send) = server.next_request().await.unwrap();
        let body = Body::from(answer.to_string().into_bytes());
        send.send_response(Response::builder().status(status).body(body).unwrap());
        (asked.await.unwrap(), request.uri().to_string())
    }

    #[tokio::test]
    async fn what_the_kubelet_stops_without_a_reason_ends_its_pod_and_what_it_starts_again_itself()
    {
        let name = |at: &str| format!("p.{:x}", at.parse::<Timestamp>().unwrap().as_nanosecond());
        let (early, late) = (
            name("2026-01-01T10:00:00.4Z"),
            name("2026-01-01T10:00:00.6Z"),
        );
        let (in_time, too_late) = (
            name("2026-01-01T10:00:08.4Z"),
            name("2026-01-01T10:00:08.6Z"),
        );
        let stops = "Stopping container a";
        let again = "Container a failed liveness probe, will be restarted";
        let (pod, container) = (Some(Ending::Pod), Some(Ending::Container));
        let cases = [
            ("p.1", stops, "2026-01-01T10:00:07Z", pod),
            ("p.1", stops, "2026-01-01T10:00:00Z", None),
            ("p", stops, "2026-01-01T10:00:00Z", None),
            (&late, stops, "2026-01-01T10:00:00Z", pod),
            (&early, stops, "2026-01-01T10:00:00Z", None),
            // Published again since.
            (&early, stops, "2026-01-01T10:00:07Z", pod),
            ("p.1", again, "2026-01-01T10:00:07Z", container),
            ("p.1", again, "2026-01-01T10:00:00Z", None),
            (&in_time, again, "2026-01-01T10:00:08Z", container),
            // It had exited before.
            (&too_late, again, "2026-01-01T10:00:08Z", None),
            ("p.1", again, "2026-01-01T10:00:09Z", None),
            (&too_late, stops, "2026-01-01T10:00:08Z", pod),
            (
                "p.1",
                "Container a resize requires restart",
                "2026-01-01T10:00:07Z",
                container,
            ),
            // Under Never it stays as it is: its exit is the rules'.
            (
                "p.1",
                "Container a failed liveness probe",
                "2026-01-01T10:00:07Z",
                None,
            ),
            (
                "p.1",
                "Container ab failed liveness probe, will be restarted",
                "2026-01-01T10:00:07Z",
                None,
            ),
        ];
        for (name, message, at, ends) in cases {
            let list = json!({"metadata": {}, "items": [event(name, message, at)]});
            let (ended, uri) = answered(StatusCode::OK, list).await;
            assert_eq!(ended, ends, "{name} {message} {at}");
            assert!(uri.starts_with("/api/v1/namespaces/n/events?"), "{uri}");
            assert!(
                uri.contains("involvedObject.uid%3Du%2Creason%3DKilling"),
                "{uri}"
            );
            assert!(uri.contains("limit=500"), "{uri}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_api_server_that_has_gone_silent_is_waited_for_once() {
        let (service, mut server) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        let endings = Endings::new(Client::new(service, "default"));
        let pod = PodKey {
            namespace: "n".to_owned(),
            name: "p".to_owned(),
        };
        let (uid, exit) = ("u".into(), exit());
        assert_eq!(endings.patience(), PATIENCE);
        let silence = endings.begun(&pod, &uid, &exit);
        assert_eq!(silence.await, None);
        assert_eq!(endings.patience(), SHORT_PATIENCE);
        drop(server.next_request().await);
        let answer = async {
            let (_, send) = server.next_request().await.unwrap();
            let list = json!({"metadata": {}, "items": []}).to_string();
            send.send_response(Response::new(Body::from(list.into_bytes())));
        };
        let asked = endings.begun(&pod, &uid, &exit);
        let (ends, ()) = tokio::join!(asked, answer);
        assert_eq!((ends, endings.patience()), (None, PATIENCE));
    }

    #[tokio::test]
    async fn what_the_api_server_does_not_tell_is_not_so() {
        let denial =
            json!({"status": "Failure", "code": 403, "message": "no", "reason": "Forbidden"});
        assert_eq!(answered(StatusCode::FORBIDDEN, denial).await.0, None);
    }
}
