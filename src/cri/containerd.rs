//! containerd's own API beside the CRI: exits as they happen, before the CRI shows them.
//!
//! While an exit is held the CRI still says "running", and before containerd 2.3 NRI tells no exit code either. The event
//! stream and the task service know the code in every version (`services/events/v1`, `services/tasks/v1`).

use std::time::Duration;

use futures::{Stream, StreamExt};
use prost::Message;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;

use super::api::containerd::events::{TaskExit as WireExit, TaskOom as WireOom};
use super::api::containerd::services::events::v1::SubscribeRequest;
use super::api::containerd::services::events::v1::events_client::EventsClient;
use super::api::containerd::services::tasks::v1::GetRequest;
use super::api::containerd::services::tasks::v1::tasks_client::TasksClient;
use super::api::containerd::types::Envelope;
use super::api::containerd::v1::types::Status as TaskStatus;
use super::client::Client;
use super::error::CriError;
use crate::ids::{ContainerId, ExitCode};

/// containerd's namespace for everything that the CRI makes (`constants.K8sContainerdNamespace`).
const NAMESPACE: &str = "k8s.io";
/// The topic of exits (`core/runtime/events.go`, `TaskExitEventTopic`).
const EXITS: &str = "/tasks/exit";
/// The topic of processes that the kernel has killed because a container was out of memory (`TaskOOMEventTopic`).
const OOMS: &str = "/tasks/oom";
/// The shim may hold its lock while a hook runs: a task that does not answer soon will not for seconds.
const TASK_DEADLINE: Duration = Duration::from_secs(1);
/// The first pause before a new subscription.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause before a new subscription. A restart of containerd takes about a second.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// How many exits wait for a consumer before the stream is no longer read.
const BACKLOG: usize = 256;

/// The exit of a container's first process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskExit {
    /// The container.
    pub container: ContainerId,
    /// What it exited with.
    pub code: ExitCode,
}

/// What the stream of exits tells.
#[derive(Debug)]
pub enum ExitFeed {
    /// Exits will be told again. Those until now may have been missed: look at the lists, and ask the tasks for codes.
    Connected,
    /// A container has exited.
    Exit(TaskExit),
    /// The kernel has killed a process of a container because it was out of memory. The exit of its first process may come
    /// before that: with cgroup v1, and before containerd 2.3, the shim tells of both without an order (`processExits` and
    /// `oomEvent`, `cmd/containerd-shim-runc-v2/task/service.go`).
    OomKilled(ContainerId),
    /// The stream broke or could not be had. It is tried again; [`ExitFeed::Connected`] says when that worked.
    Lost(CriError),
}

/// containerd's own API. Made by [`Client::containerd`].
#[derive(Debug, Clone)]
pub struct Containerd {
    client: Client,
}

impl Containerd {
    pub(super) fn new(client: Client) -> Self {
        Self { client }
    }

    /// The exits of containers, for ever: first processes only, execs are left out. Reconnects by itself with a pause
    /// of 0.1 to 2 s. Ends its work when it is dropped. Must be called within a tokio runtime.
    pub fn exits(&self) -> impl Stream<Item = ExitFeed> + Send + Unpin + use<> {
        let (to, from) = mpsc::channel(BACKLOG);
        tokio::spawn(feed(self.client.clone(), to));
        ReceiverStream::new(from)
    }

    /// What a container's first process exited with, from the task. `None` if it has not exited, or if containerd has no
    /// task of it (any more). Answers within a second or fails with [`CriError::Deadline`].
    pub async fn task_exit_code(&self, id: &ContainerId) -> Result<Option<ExitCode>, CriError> {
        let call = self.client.call("Tasks.Get", TASK_DEADLINE);
        let mut request = call.request(GetRequest {
            container_id: id.to_string(),
            exec_id: String::new(),
        });
        request.metadata_mut().insert(
            "containerd-namespace",
            MetadataValue::from_static(NAMESPACE),
        );
        let mut rpc = TasksClient::new(self.client.channel());
        let process = match call.finish(rpc.get(request)).await {
            Ok(answer) => answer.process,
            Err(CriError::Gone { .. }) => None,
            Err(error) => return Err(error),
        };
        Ok(process
            .filter(|process| process.status == TaskStatus::Stopped as i32)
            .map(|process| exit_code(process.exit_status)))
    }
}

/// Keeps a subscription going until nobody listens to it.
async fn feed(client: Client, to: mpsc::Sender<ExitFeed>) {
    let mut pause = FIRST_PAUSE;
    loop {
        let subscription = async {
            let (connected, error) = follow(&client, &to).await;
            if connected {
                pause = FIRST_PAUSE;
            }
            if to.send(ExitFeed::Lost(error)).await.is_ok() {
                tokio::time::sleep(pause).await;
            }
        };
        tokio::select! {
            () = subscription => pause = LONGEST_PAUSE.min(pause * 2),
            () = to.closed() => return,
        }
    }
}

/// Follows one subscription to its end; says whether it ever stood.
async fn follow(client: &Client, to: &mpsc::Sender<ExitFeed>) -> (bool, CriError) {
    let call = client.call("Events.Subscribe", Duration::MAX);
    let filter = |topic| format!("namespace==\"{NAMESPACE}\",topic==\"{topic}\"");
    let filters = [EXITS, OOMS].map(filter).to_vec();
    let mut rpc: EventsClient<Channel> = EventsClient::new(client.channel());
    let subscribe = rpc.subscribe(SubscribeRequest { filters });
    tokio::pin!(subscribe);

    // Go's gRPC sends no headers before the first event, so the answer to Subscribe may be hours away. The requests of
    // one connection arrive in order: an answer to a later one means that this one is in the runtime's hands. Its handler
    // may still be microseconds from listening, well within the time that a consumer needs to look at the lists.
    let answer = tokio::select! {
        biased;
        answer = &mut subscribe => Some(answer),
        alive = client.version() => match alive {
            Ok(_) => None,
            Err(error) => return (false, error),
        },
    };
    if let Some(Err(status)) = answer {
        return (false, call.failed(&status));
    }
    if to.send(ExitFeed::Connected).await.is_err() {
        return (true, ended());
    }
    let answer = match answer {
        Some(answer) => answer,
        None => subscribe.await,
    };
    let mut events = match answer {
        Ok(answer) => answer.into_inner(),
        Err(status) => return (true, call.failed(&status)),
    };
    while let Some(event) = events.next().await {
        let envelope = match event {
            Ok(envelope) => envelope,
            Err(status) => return (true, call.failed(&status)),
        };
        if let Some(news) = news_of(&envelope)
            && to.send(news).await.is_err()
        {
            break;
        }
    }
    (true, ended())
}

fn ended() -> CriError {
    CriError::Malformed {
        call: "Events.Subscribe",
        problem: "the stream of events ended".into(),
    }
}

/// What an event tells of, if it is of a container as a whole.
fn news_of(envelope: &Envelope) -> Option<ExitFeed> {
    if envelope.namespace != NAMESPACE {
        return None;
    }
    match envelope.topic.as_str() {
        EXITS => {
            let exit: WireExit = read(envelope)?;
            // The others are execs.
            let first = exit.id == exit.container_id;
            first.then(|| {
                ExitFeed::Exit(TaskExit {
                    container: exit.container_id.into(),
                    code: exit_code(exit.exit_status),
                })
            })
        }
        OOMS => {
            let oom: WireOom = read(envelope)?;
            Some(ExitFeed::OomKilled(oom.container_id.into()))
        }
        _ => None,
    }
}

fn read<M: Message + Default>(envelope: &Envelope) -> Option<M> {
    M::decode(envelope.event.as_ref()?.value.as_slice())
        .inspect_err(|error| {
            tracing::warn!(topic = envelope.topic, %error, "what containerd told of cannot be read");
        })
        .ok()
}

/// containerd counts in `u32`; what does not fit is no code that a kernel gives, and must not look like success.
fn exit_code(status: u32) -> ExitCode {
    ExitCode(i32::try_from(status).unwrap_or(i32::MAX))
}

#[cfg(test)]
mod tests;
