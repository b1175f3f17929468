//! Tells a pod's owner what happened, as events of the pod. Nothing waits for them.

use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::sync::mpsc;

use super::pod_spec::PodObject;

/// Who tells, in the events' `reportingController`.
const REPORTER: &str = "reprise";
/// How many events wait for the API server. More are dropped: the log has them all.
const BACKLOG: usize = 64;
/// How long the API server may take for one event.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The longest note that the API server takes, in bytes (`pkg/apis/core/validation/events.go`, `NoteLengthLimit`).
const LONGEST_NOTE: usize = 1024;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// As it should be.
    Normal,
    /// Somebody may want to look.
    Warning,
}

/// What is told in one event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// How bad it is.
    pub severity: Severity,
    /// Why, in one word such as "`RestartedInPlace`".
    pub reason: &'static str,
    /// What Reprise did, in one word such as "Restart".
    pub action: &'static str,
    /// The same for people. Cut at 1024 bytes.
    pub note: String,
}

/// Sends events. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Events {
    queue: Option<mpsc::Sender<(PodObject, Notice)>>,
}

impl Events {
    /// Sends events through `client`, in the name of Reprise on `node`. Must be called within a tokio runtime.
    ///
    /// Events of one pod that are alike in severity, reason and action within six minutes become one with a count; the
    /// note is the first one's (kube-rs `Recorder`).
    #[must_use]
    pub fn new(client: kube::Client, node: &str) -> Self {
        let reporter = Reporter {
            controller: REPORTER.into(),
            instance: Some(node.into()),
        };
        let (queue, waiting) = mpsc::channel(BACKLOG);
        tokio::spawn(publish(Recorder::new(client, reporter), waiting));
        Self { queue: Some(queue) }
    }

    /// Drops all events, for a node without an API server.
    #[must_use]
    pub fn none() -> Self {
        Self { queue: None }
    }

    /// Sends an event about a pod, some time later or never: it is dropped while too many wait.
    pub fn send(&self, pod: PodObject, notice: Notice) {
        let Some(queue) = &self.queue else {
            return;
        };
        if let Err(dropped) = queue.try_send((pod, notice)) {
            let (pod, notice) = dropped.into_inner();
            tracing::debug!(pod = %pod.key, reason = notice.reason, "event dropped: too many wait for the API server");
        }
    }
}

async fn publish(recorder: Recorder, mut waiting: mpsc::Receiver<(PodObject, Notice)>) {
    while let Some((pod, notice)) = waiting.recv().await {
        let reason = notice.reason;
        let reference = reference(&pod);
        let event = event(notice);
        // An event that is lost is lost: it was logged where it happened, and the API server may be away for hours.
        match tokio::time::timeout(TIMEOUT, recorder.publish(&event, &reference)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(pod = %pod.key, reason, %error, "event lost"),
            Err(_) => {
                tracing::debug!(pod = %pod.key, reason, "event lost: no answer in {TIMEOUT:?}");
            }
        }
    }
}

fn reference(pod: &PodObject) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Pod".into()),
        namespace: Some(pod.key.namespace.clone()),
        name: Some(pod.key.name.clone()),
        uid: Some(pod.uid.to_string()),
        ..ObjectReference::default()
    }
}

fn event(notice: Notice) -> Event {
    let mut note = notice.note;
    note.truncate(note.floor_char_boundary(LONGEST_NOTE));
    Event {
        type_: match notice.severity {
            Severity::Normal => EventType::Normal,
            Severity::Warning => EventType::Warning,
        },
        reason: notice.reason.into(),
        note: Some(note),
        action: notice.action.into(),
        secondary: None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::ids::PodKey;
    use crate::kube::fake::{Answer, client};

    fn pod() -> PodObject {
        PodObject {
            key: PodKey {
                namespace: "n".into(),
                name: "web".into(),
            },
            uid: "u1".into(),
        }
    }

    fn notice() -> Notice {
        Notice {
            severity: Severity::Warning,
            reason: "LateJoiner",
            action: "Restart",
            note: "ü".repeat(LONGEST_NOTE),
        }
    }

    #[tokio::test]
    async fn an_event_names_the_pod_and_who_tells() {
        let (client, calls) = client(vec![Answer::json(&json!({"metadata": {}}))]);
        let events = Events::new(client, "node-1");
        events.send(pod(), notice());
        let sent = async {
            while calls.lock().unwrap().is_empty() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), sent)
            .await
            .expect("the event is sent");
        let call = calls.lock().unwrap()[0].clone();
        let start = "POST /apis/events.k8s.io/v1/namespaces/n/events? ";
        let body = call.strip_prefix(start).unwrap();
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["regarding"]["uid"], "u1");
        assert_eq!(body["reportingController"], "reprise");
        assert_eq!(body["reportingInstance"], "node-1");
        assert_eq!(body["type"], "Warning");
        assert_eq!(body["note"].as_str().unwrap().len(), LONGEST_NOTE);
    }

    #[tokio::test]
    async fn a_server_that_does_not_answer_holds_nobody_up() {
        let (client, _) = client(vec![]);
        let events = Events::new(client, "node-1");
        for _ in 0..3 * BACKLOG {
            events.send(pod(), notice());
        }
        Events::none().send(pod(), notice());
    }
}
