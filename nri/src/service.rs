//! Answers the runtime: from ttrpc requests to calls of the plugin, and back.

use std::fmt;
use std::future::Future;
use std::mem;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use protobuf::MessageField;
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::timeout;
use tracing::{error, warn};
use ttrpc::r#async::TtrpcContext;
use ttrpc::{Code, get_status};

use crate::api::{Container, ContainerAdjustment, PodSandbox};
use crate::plugin::{Plugin, Refusal};
use crate::runtime::{REQUEST_TIMEOUT, RuntimeInfo};
use crate::wire::nri::{
    ConfigureRequest, ConfigureResponse, CreateContainerRequest, CreateContainerResponse, Empty,
    Event, PostCreateContainerRequest, PostCreateContainerResponse, PostStartContainerRequest,
    PostStartContainerResponse, PostUpdateContainerRequest, PostUpdateContainerResponse,
    PostUpdatePodSandboxRequest, PostUpdatePodSandboxResponse, RemoveContainerRequest,
    RemoveContainerResponse, RemovePodSandboxRequest, RemovePodSandboxResponse,
    RunPodSandboxRequest, RunPodSandboxResponse, StartContainerRequest, StartContainerResponse,
    StateChangeEvent, StopContainerRequest, StopContainerResponse, StopPodSandboxRequest,
    StopPodSandboxResponse, SynchronizeRequest, SynchronizeResponse, UpdateContainerRequest,
    UpdateContainerResponse, UpdatePodSandboxRequest, UpdatePodSandboxResponse,
    ValidateContainerAdjustmentRequest, ValidateContainerAdjustmentResponse,
};
use crate::wire::nri_ttrpc;

/// From here on, a call of the plugin is worth a warning: the whole node waits for it.
const SLOW: Duration = Duration::from_millis(100);

/// What the service tells the session that it serves.
#[derive(Debug)]
pub(crate) enum Progress {
    Configured(RuntimeInfo),
    Refused(Refusal),
    Synchronized,
}

/// The plugin as the runtime sees it, for one connection.
pub(crate) struct Service<P> {
    plugin: Arc<P>,
    progress: UnboundedSender<Progress>,
    runtime: OnceLock<RuntimeInfo>,
    /// The parts of a synchronisation that came so far.
    parts: Mutex<(Vec<PodSandbox>, Vec<Container>)>,
}

impl<P: Plugin> Service<P> {
    pub(crate) fn new(plugin: Arc<P>, progress: UnboundedSender<Progress>) -> Self {
        Self {
            plugin,
            progress,
            runtime: OnceLock::new(),
            parts: Mutex::default(),
        }
    }

    fn report(&self, progress: Progress) {
        // Nobody listens any more once the session is over, when there is nothing to report either.
        let _ = self.progress.send(progress);
    }

    /// What the plugin answers, or nothing if it panics or is about to be too late: the runtime
    /// would wait for its whole timeout and then drop the plugin, which only makes matters worse.
    ///
    /// The call has a task of its own, so that neither that nor the end of the connection cuts it
    /// off halfway.
    async fn call<T: Send + 'static>(
        &self,
        what: impl fmt::Debug + Send,
        call: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let limit = self
            .runtime
            .get()
            .map_or(REQUEST_TIMEOUT, |runtime| runtime.request_timeout);
        let begin = Instant::now();
        let answer = timeout(limit / 4 * 3, tokio::spawn(call)).await;
        let elapsed = begin.elapsed();
        match answer {
            Ok(Ok(answer)) => {
                if elapsed > SLOW {
                    warn!(
                        ?what,
                        ?elapsed,
                        "slow NRI handler: the whole node waits for it"
                    );
                }
                Some(answer)
            }
            Ok(Err(panic)) => {
                error!(?what, %panic, "NRI handler failed, answered without it");
                None
            }
            Err(_) => {
                error!(?what, ?elapsed, "NRI handler is late, answered without it");
                None
            }
        }
    }

    async fn notify(
        &self,
        event: Event,
        pod: MessageField<PodSandbox>,
        container: MessageField<Container>,
    ) {
        let plugin = Arc::clone(&self.plugin);
        let (pod, container) = (owned(pod), owned(container));
        self.call(event, async move {
            notify(plugin.as_ref(), event, pod, container).await;
        })
        .await;
    }
}

async fn notify(plugin: &impl Plugin, event: Event, pod: PodSandbox, container: Container) {
    match event {
        Event::RUN_POD_SANDBOX => plugin.run_pod_sandbox(pod).await,
        Event::UPDATE_POD_SANDBOX => plugin.update_pod_sandbox(pod).await,
        Event::POST_UPDATE_POD_SANDBOX => plugin.post_update_pod_sandbox(pod).await,
        Event::STOP_POD_SANDBOX => plugin.stop_pod_sandbox(pod).await,
        Event::REMOVE_POD_SANDBOX => plugin.remove_pod_sandbox(pod).await,
        Event::POST_CREATE_CONTAINER => plugin.post_create_container(pod, container).await,
        Event::START_CONTAINER => plugin.start_container(pod, container).await,
        Event::POST_START_CONTAINER => plugin.post_start_container(pod, container).await,
        Event::UPDATE_CONTAINER => plugin.update_container(pod, container).await,
        Event::POST_UPDATE_CONTAINER => plugin.post_update_container(pod, container).await,
        Event::STOP_CONTAINER => plugin.stop_container(pod, container).await,
        Event::REMOVE_CONTAINER => plugin.remove_container(pod, container).await,
        // The first two want an answer and never come as mere notifications, the others are none.
        Event::CREATE_CONTAINER
        | Event::VALIDATE_CONTAINER_ADJUSTMENT
        | Event::UNKNOWN
        | Event::LAST => {}
    }
}

/// Runtimes always set these fields; if one does not, the plugin sees an empty message.
fn owned<M: Default>(field: MessageField<M>) -> M {
    field.into_option().unwrap_or_default()
}

fn refuse(refusal: &Refusal) -> ttrpc::Error {
    // The code that Go gives to any error of a plugin.
    ttrpc::Error::RpcStatus(get_status(Code::UNKNOWN, refusal))
}

// Every method is here: those that the generated code supplies answer NOT_FOUND, where a runtime
// falls back to StateChange on UNIMPLEMENTED only.
#[async_trait]
impl<P: Plugin> nri_ttrpc::Plugin for Service<P> {
    async fn configure(
        &self,
        _: &TtrpcContext,
        request: ConfigureRequest,
    ) -> ttrpc::Result<ConfigureResponse> {
        let runtime = RuntimeInfo::from_wire(&request);
        let runtime = self.runtime.get_or_init(|| runtime).clone();
        let plugin = Arc::clone(&self.plugin);
        let events = plugin.events().known_to(runtime.nri_version);
        let info = runtime.clone();
        let configured = if events.is_empty() {
            Err(Refusal::new(format!(
                "{} {} knows none of its events",
                info.name, info.version
            )))
        } else {
            self.call("Configure", async move {
                plugin.configure(info, request.config).await
            })
            .await
            .unwrap_or_else(|| Err(Refusal::new("it failed to answer, see its log")))
        };
        match configured {
            Ok(()) => {
                self.report(Progress::Configured(runtime));
                let mut response = ConfigureResponse::new();
                response.events = events.bits();
                response.failure_policy = Some(self.plugin.failure_policy()).into();
                Ok(response)
            }
            Err(refusal) => {
                let error = refuse(&refusal);
                self.report(Progress::Refused(refusal));
                Err(error)
            }
        }
    }

    async fn synchronize(
        &self,
        _: &TtrpcContext,
        request: SynchronizeRequest,
    ) -> ttrpc::Result<SynchronizeResponse> {
        let mut response = SynchronizeResponse::new();
        response.more = request.more;
        let all = {
            // A poisoned lock would mean that appending to a list panicked: what is there is whole.
            let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
            parts.0.extend(request.pods);
            parts.1.extend(request.containers);
            (!request.more).then(|| mem::take(&mut *parts))
        };
        if let Some((pods, containers)) = all {
            let plugin = Arc::clone(&self.plugin);
            self.call("Synchronize", async move {
                plugin.synchronize(pods, containers).await;
            })
            .await;
            self.report(Progress::Synchronized);
        }
        Ok(response)
    }

    async fn shutdown(&self, _: &TtrpcContext, _: Empty) -> ttrpc::Result<Empty> {
        // The end of the connection, which follows, says the same.
        Ok(Empty::new())
    }

    async fn create_container(
        &self,
        _: &TtrpcContext,
        request: CreateContainerRequest,
    ) -> ttrpc::Result<CreateContainerResponse> {
        let plugin = Arc::clone(&self.plugin);
        let (pod, container) = (owned(request.pod), owned(request.container));
        let adjust = self
            .call(Event::CREATE_CONTAINER, async move {
                plugin.create_container(pod, container).await
            })
            .await
            .unwrap_or_else(|| Ok(ContainerAdjustment::new()))
            .map_err(|refusal| refuse(&refusal))?;
        let mut response = CreateContainerResponse::new();
        response.adjust = MessageField::some(adjust);
        Ok(response)
    }

    async fn validate_container_adjustment(
        &self,
        _: &TtrpcContext,
        request: ValidateContainerAdjustmentRequest,
    ) -> ttrpc::Result<ValidateContainerAdjustmentResponse> {
        let plugin = Arc::clone(&self.plugin);
        let (pod, container) = (owned(request.pod), owned(request.container));
        let adjust = owned(request.adjust);
        let verdict = self
            .call(Event::VALIDATE_CONTAINER_ADJUSTMENT, async move {
                plugin
                    .validate_container_adjustment(pod, container, adjust)
                    .await
            })
            .await;
        let mut response = ValidateContainerAdjustmentResponse::new();
        if let Some(Err(refusal)) = verdict {
            response.reject = true;
            response.reason = refusal.to_string();
        }
        Ok(response)
    }

    /// Everything without a method of its own, from runtimes with NRI before 0.12.
    async fn state_change(
        &self,
        _: &TtrpcContext,
        request: StateChangeEvent,
    ) -> ttrpc::Result<Empty> {
        self.notify(
            request.event.enum_value_or_default(),
            request.pod,
            request.container,
        )
        .await;
        Ok(Empty::new())
    }

    // What follows are notifications. None ever answers with an error: for StopContainer, a runtime
    // would only log it, and not tell the plugins that come after this one.

    async fn run_pod_sandbox(
        &self,
        _: &TtrpcContext,
        request: RunPodSandboxRequest,
    ) -> ttrpc::Result<RunPodSandboxResponse> {
        self.notify(Event::RUN_POD_SANDBOX, request.pod, MessageField::none())
            .await;
        Ok(RunPodSandboxResponse::new())
    }

    async fn update_pod_sandbox(
        &self,
        _: &TtrpcContext,
        request: UpdatePodSandboxRequest,
    ) -> ttrpc::Result<UpdatePodSandboxResponse> {
        self.notify(Event::UPDATE_POD_SANDBOX, request.pod, MessageField::none())
            .await;
        Ok(UpdatePodSandboxResponse::new())
    }

    async fn post_update_pod_sandbox(
        &self,
        _: &TtrpcContext,
        request: PostUpdatePodSandboxRequest,
    ) -> ttrpc::Result<PostUpdatePodSandboxResponse> {
        self.notify(
            Event::POST_UPDATE_POD_SANDBOX,
            request.pod,
            MessageField::none(),
        )
        .await;
        Ok(PostUpdatePodSandboxResponse::new())
    }

    async fn stop_pod_sandbox(
        &self,
        _: &TtrpcContext,
        request: StopPodSandboxRequest,
    ) -> ttrpc::Result<StopPodSandboxResponse> {
        self.notify(Event::STOP_POD_SANDBOX, request.pod, MessageField::none())
            .await;
        Ok(StopPodSandboxResponse::new())
    }

    async fn remove_pod_sandbox(
        &self,
        _: &TtrpcContext,
        request: RemovePodSandboxRequest,
    ) -> ttrpc::Result<RemovePodSandboxResponse> {
        self.notify(Event::REMOVE_POD_SANDBOX, request.pod, MessageField::none())
            .await;
        Ok(RemovePodSandboxResponse::new())
    }

    async fn post_create_container(
        &self,
        _: &TtrpcContext,
        request: PostCreateContainerRequest,
    ) -> ttrpc::Result<PostCreateContainerResponse> {
        self.notify(Event::POST_CREATE_CONTAINER, request.pod, request.container)
            .await;
        Ok(PostCreateContainerResponse::new())
    }

    async fn start_container(
        &self,
        _: &TtrpcContext,
        request: StartContainerRequest,
    ) -> ttrpc::Result<StartContainerResponse> {
        self.notify(Event::START_CONTAINER, request.pod, request.container)
            .await;
        Ok(StartContainerResponse::new())
    }

    async fn post_start_container(
        &self,
        _: &TtrpcContext,
        request: PostStartContainerRequest,
    ) -> ttrpc::Result<PostStartContainerResponse> {
        self.notify(Event::POST_START_CONTAINER, request.pod, request.container)
            .await;
        Ok(PostStartContainerResponse::new())
    }

    async fn update_container(
        &self,
        _: &TtrpcContext,
        request: UpdateContainerRequest,
    ) -> ttrpc::Result<UpdateContainerResponse> {
        self.notify(Event::UPDATE_CONTAINER, request.pod, request.container)
            .await;
        Ok(UpdateContainerResponse::new())
    }

    async fn post_update_container(
        &self,
        _: &TtrpcContext,
        request: PostUpdateContainerRequest,
    ) -> ttrpc::Result<PostUpdateContainerResponse> {
        self.notify(Event::POST_UPDATE_CONTAINER, request.pod, request.container)
            .await;
        Ok(PostUpdateContainerResponse::new())
    }

    async fn stop_container(
        &self,
        _: &TtrpcContext,
        request: StopContainerRequest,
    ) -> ttrpc::Result<StopContainerResponse> {
        self.notify(Event::STOP_CONTAINER, request.pod, request.container)
            .await;
        Ok(StopContainerResponse::new())
    }

    async fn remove_container(
        &self,
        _: &TtrpcContext,
        request: RemoveContainerRequest,
    ) -> ttrpc::Result<RemoveContainerResponse> {
        self.notify(Event::REMOVE_CONTAINER, request.pod, request.container)
            .await;
        Ok(RemoveContainerResponse::new())
    }
}
