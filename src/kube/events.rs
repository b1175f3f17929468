//! Events on pods, for `kubectl describe`.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::sync::mpsc;
use tokio::time::{Duration, timeout};

use crate::ids::{PodKey, PodUid};

/// Events beyond this many that wait for the API server are dropped: nothing here may grow without bound. A
/// replay has some ten, and hundreds of pods may restart at once.
const QUEUE: usize = 2048;
/// How long the API server may take over one event.
const LIMIT: Duration = Duration::from_secs(10);

/// How serious an event is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// For information.
    Normal,
    /// Somebody should look.
    Warning,
}

/// Publishes events; never waits, never fails.
#[derive(Debug, Clone)]
pub struct Events {
    queue: mpsc::Sender<(ObjectReference, Event)>,
}

impl Events {
    /// Events come from `reprise` on node `node`. Must be called on the async runtime.
    #[must_use]
    pub fn new(client: Client, node: &str) -> Self {
        let reporter = Reporter {
            controller: "reprise".to_owned(),
            instance: Some(node.to_owned()),
        };
        let recorder = Recorder::new(client, reporter);
        let (queue, receiver) = mpsc::channel(QUEUE);
        tokio::spawn(publish_all(recorder, receiver));
        Self { queue }
    }

    /// Publishes an event on a pod, in due time.
    pub fn publish(
        &self,
        pod: &PodKey,
        uid: &PodUid,
        kind: EventKind,
        reason: &str,
        message: String,
    ) {
        let on = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: Some(pod.name.clone()),
            namespace: Some(pod.namespace.clone()),
            uid: Some(uid.to_string()),
            ..Default::default()
        };
        let event = Event {
            type_: match kind {
                EventKind::Normal => EventType::Normal,
                EventKind::Warning => EventType::Warning,
            },
            reason: reason.to_owned(),
            note: Some(message),
            action: reason.to_owned(),
            secondary: None,
        };
        if self.queue.try_send((on, event)).is_err() {
            tracing::debug!(%pod, reason, "dropped an event: the API server is too slow");
        }
    }
}

async fn publish_all(recorder: Recorder, mut queue: mpsc::Receiver<(ObjectReference, Event)>) {
    while let Some((on, event)) = queue.recv().await {
        let reason = &event.reason;
        match timeout(LIMIT, recorder.publish(&event, &on)).await {
            Ok(Ok(())) => {}
            // An event that is lost is not worth a warning each: the log has the same.
            Ok(Err(error)) => tracing::debug!(%error, reason, "could not publish an event"),
            Err(_) => tracing::debug!(reason, "the API server did not take an event in time"),
        }
    }
}
