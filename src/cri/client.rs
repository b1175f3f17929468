//! The CRI client: one method a call, each with a deadline.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Request, Response, Status};

use super::api::runtime::v1 as api;
use super::api::runtime::v1::image_service_client::ImageServiceClient;
use super::api::runtime::v1::runtime_service_client::RuntimeServiceClient;
use super::config::{Recovered, as_asked_for, recover};
use super::containerd::Containerd;
use super::crio::{self, Told};
use super::error::CriError;
use super::handlers::{self, Handlers};
use super::model::{ContainerStatus, ContainerSummary, RuntimeVersion, SandboxSummary};
use super::poststop;
use crate::ids::{Attempt, ContainerId, ExitCode, SandboxId};

/// The kubelet's limit for CRI messages (`pkg/kubelet/cri/remote`, `maxMsgSize`): lists of a busy node exceed gRPC's 4 MiB.
const MAX_MESSAGE: usize = 16 * 1024 * 1024;
/// What a runtime tells of one container or sandbox has its author's words in it, twice. To read them takes up to fifty
/// times as much memory.
const MAX_VERBOSE: usize = 1024 * 1024;
/// What a command writes is its author's, and it is nobody's business.
const MAX_OUTPUT: usize = 256 * 1024;
/// How many such answers are read at the same time.
const VERBOSE_AT_ONCE: usize = 4;

/// The first pause of [`Client::remove_when_exited`]; an exit is processed some 10 ms after its release.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// The longest pause of [`Client::remove_when_exited`], and that of [`Client::create_container`].
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// How long to wait for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadlines {
    /// For calls that only ask.
    pub read: Duration,
    /// For calls that make, start or remove a container. A node that starts many pods at once takes seconds for one.
    pub write: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            read: Duration::from_secs(5),
            write: Duration::from_secs(10),
        }
    }
}

/// A client of the runtime on this node. Cheap to clone; all clones share one connection.
///
/// The connection is made at the first call, and made anew by the first call after it broke: that call fails with
/// [`CriError::Away`] if the runtime is still away. Dropping a call's future cancels it; whether it took effect is then
/// unknown.
#[derive(Debug, Clone)]
pub struct Client {
    rpc: RuntimeServiceClient<Channel>,
    channel: Channel,
    socket: Arc<Path>,
    deadlines: Deadlines,
    verbose: Arc<Semaphore>,
}

impl Client {
    /// A client for `endpoint`, such as `unix:///run/containerd/containerd.sock`. Connects later, so only an endpoint
    /// that cannot be one fails here. Must be called within a tokio runtime.
    pub fn connect(endpoint: &str) -> Result<Self, CriError> {
        let socket: Arc<Path> = socket_of(endpoint)?.into();
        let path = Arc::clone(&socket);
        // The URI only becomes the `:authority` header, which gRPC servers want to be well-formed.
        let channel = Endpoint::from_static("http://localhost").connect_with_connector_lazy(
            tower::service_fn(move |_: Uri| {
                let path = Arc::clone(&path);
                async move { UnixStream::connect(&*path).await.map(TokioIo::new) }
            }),
        );
        Ok(Self {
            rpc: RuntimeServiceClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE),
            channel,
            socket,
            deadlines: Deadlines::default(),
            verbose: Arc::new(Semaphore::new(VERBOSE_AT_ONCE)),
        })
    }

    /// The same client with other deadlines.
    #[must_use]
    pub fn with_deadlines(mut self, deadlines: Deadlines) -> Self {
        self.deadlines = deadlines;
        self
    }

    /// containerd's own API on the same socket. Asks who answers; [`CriError::NotContainerd`] if it is not containerd.
    pub async fn containerd(&self) -> Result<Containerd, CriError> {
        let version = self.version().await?;
        if version.is_containerd() {
            Ok(Containerd::new(self.clone()))
        } else {
            Err(CriError::NotContainerd {
                runtime: version.name,
            })
        }
    }

    /// Who answers.
    pub async fn version(&self) -> Result<RuntimeVersion, CriError> {
        let message = api::VersionRequest {
            version: "v1".into(),
        };
        let call = self.read("Version");
        let answer = call
            .finish(self.rpc().version(call.request(message)))
            .await?;
        Ok(answer.into())
    }

    /// The runtime handlers of whose containers no exit can be held: they run no OCI hooks on the host, and on CRI-O they have no
    /// conmon. None where the runtime does not tell.
    pub async fn handlers_without_hold(&self) -> Result<HashSet<String>, CriError> {
        Ok(self.handlers().await?.without_hold)
    }

    /// Where CRI-O is told of exits; `None`: it does not say, or the runtime is another one.
    pub async fn exits(&self) -> Result<Option<PathBuf>, CriError> {
        Ok(self.handlers().await?.exits)
    }

    async fn handlers(&self) -> Result<Handlers, CriError> {
        let message = api::StatusRequest { verbose: true };
        let call = self.read("Status");
        let answer = call
            .finish(self.rpc().status(call.request(message)))
            .await?;
        match answer.info.get(RUNTIME_CONFIG) {
            Some(config) => handlers::read(config),
            None => Ok(Handlers::default()),
        }
    }

    /// The containers of one sandbox, or of the node, exited ones as well.
    pub async fn list_containers(
        &self,
        sandbox: Option<&SandboxId>,
    ) -> Result<Vec<ContainerSummary>, CriError> {
        let message = api::ListContainersRequest {
            filter: sandbox.map(|id| api::ContainerFilter {
                pod_sandbox_id: id.to_string(),
                ..Default::default()
            }),
        };
        let call = self.read("ListContainers");
        let answer = call
            .finish(self.rpc().list_containers(call.request(message)))
            .await?;
        answer
            .containers
            .into_iter()
            .map(TryInto::try_into)
            .collect()
    }

    /// What the runtime says of one container.
    pub async fn container_status(&self, id: &ContainerId) -> Result<ContainerStatus, CriError> {
        let answer = self.status_of(self.rpc(), id, false).await?;
        known(answer.status, id)
    }

    /// The arguments of each hook that the runtime runs when the container has ended, the executable's name first.
    /// `None` where it does not tell, as CRI-O.
    pub async fn poststop_hooks(
        &self,
        id: &ContainerId,
    ) -> Result<Option<Vec<Vec<String>>>, CriError> {
        let (rpc, _turn) = self.verbose_rpc().await;
        let mut answer = self.status_of(rpc, id, true).await?;
        match answer.info.remove(INFO) {
            Some(info) => poststop::hooks(&info),
            None => Ok(None),
        }
    }

    /// What the runtime says of one container, and the configuration that it was made from. `None` where the runtime does not tell that, as
    /// CRI-O.
    pub async fn container_config(
        &self,
        id: &ContainerId,
    ) -> Result<(ContainerStatus, Option<Recovered<api::ContainerConfig>>), CriError> {
        let (rpc, _turn) = self.verbose_rpc().await;
        let mut answer = self.status_of(rpc, id, true).await?;
        let recovered = match answer.info.remove(INFO) {
            Some(info) => recover("ContainerStatus", &info)?.map(as_asked_for),
            None => None,
        };
        Ok((known(answer.status, id)?, recovered))
    }

    /// What CRI-O tells at length of one container; `None`: it is another runtime, or tells nothing.
    pub async fn told(&self, id: &ContainerId) -> Result<Option<Told>, CriError> {
        let (rpc, _turn) = self.verbose_rpc().await;
        let mut answer = self.status_of(rpc, id, true).await?;
        let info = answer.info.remove(INFO);
        info.map(|info| crio::read(&info)).transpose()
    }

    /// The sandboxes of the node.
    pub async fn list_sandboxes(&self) -> Result<Vec<SandboxSummary>, CriError> {
        let message = api::ListPodSandboxRequest { filter: None };
        let call = self.read("ListPodSandbox");
        let answer = call
            .finish(self.rpc().list_pod_sandbox(call.request(message)))
            .await?;
        answer.items.into_iter().map(TryInto::try_into).collect()
    }

    /// The configuration that a sandbox was made from. `None` where the runtime does not tell, as CRI-O.
    pub async fn sandbox_config(
        &self,
        id: &SandboxId,
    ) -> Result<Option<Recovered<api::PodSandboxConfig>>, CriError> {
        let (rpc, _turn) = self.verbose_rpc().await;
        let mut answer = self.status_of_sandbox(rpc, id, true).await?;
        match answer.info.remove(INFO) {
            Some(info) => recover("PodSandboxStatus", &info),
            None => Ok(None),
        }
    }

    /// As much of the configuration that a sandbox was made from as every runtime tells.
    pub async fn sandbox_outline(&self, id: &SandboxId) -> Result<api::PodSandboxConfig, CriError> {
        let answer = self.status_of_sandbox(self.rpc(), id, false).await?;
        let status = answer.status.unwrap_or_default();
        let namespaces = status.linux.and_then(|linux| linux.namespaces);
        Ok(api::PodSandboxConfig {
            metadata: status.metadata,
            labels: status.labels,
            annotations: status.annotations,
            linux: Some(api::LinuxPodSandboxConfig {
                security_context: Some(api::LinuxSandboxSecurityContext {
                    namespace_options: namespaces.and_then(|it| it.options),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        })
    }

    /// The image that is found by this name now, as containers are made from it; `None`: there is none.
    pub async fn image_id(&self, image: api::ImageSpec) -> Result<Option<String>, CriError> {
        let message = api::ImageStatusRequest { image: Some(image) };
        let call = self.read("ImageStatus");
        let mut images = ImageServiceClient::new(self.channel());
        let answer = call
            .finish(images.image_status(call.request(message)))
            .await?;
        Ok(answer.image.map(|image| image.id))
    }

    /// The smallest of the images that have a name, by that; [`CriError::Gone`] if there is none.
    pub async fn smallest_image(&self) -> Result<api::ImageSpec, CriError> {
        let call = self.read("ListImages");
        let mut images = ImageServiceClient::new(self.channel());
        let request = call.request(api::ListImagesRequest {});
        let answer = call.finish(images.list_images(request)).await?;
        let smallest = answer.images.into_iter().filter_map(|it| {
            let name = it.repo_tags.into_iter().chain(it.repo_digests).next()?;
            Some((it.size, it.id, name))
        });
        let (_, id, name) = smallest.min().ok_or(CriError::Gone {
            call: "ListImages",
            text: "no image has a name".into(),
        })?;
        Ok(api::ImageSpec {
            image: id,
            user_specified_image: name,
            ..Default::default()
        })
    }

    /// Makes a container without starting it. `sandbox_config` must be the one that the sandbox was made with: containerd
    /// refuses a container whose user namespace differs from it. Must not be called while an NRI handler is at work: the
    /// runtime would wait for itself. A runtime that did not answer may have made it: it is asked, while that is `wanted` until
    /// it tells.
    pub async fn create_container(
        &self,
        sandbox: &SandboxId,
        config: &api::ContainerConfig,
        sandbox_config: &api::PodSandboxConfig,
        wanted: impl Fn() -> bool,
    ) -> Result<ContainerId, CriError> {
        let created = self.create_once(sandbox, config, sandbox_config).await;
        if !created.as_ref().is_err_and(CriError::is_transient) {
            return created;
        }
        loop {
            tokio::time::sleep(LONGEST_PAUSE).await;
            match self.find_container(sandbox, config).await {
                Ok(Some(id)) => return Ok(id),
                Err(_) if wanted() => {}
                Ok(None) | Err(_) => return created,
            }
        }
    }

    /// One that was made from this configuration: no other one has its number, labels and annotations.
    async fn find_container(
        &self,
        sandbox: &SandboxId,
        config: &api::ContainerConfig,
    ) -> Result<Option<ContainerId>, CriError> {
        let attempt = config.metadata.as_ref().map(|it| Attempt(it.attempt));
        let mut found = self.list_containers(Some(sandbox)).await?.into_iter();
        let found = found.find(|it| {
            let same = it.labels == config.labels && it.annotations == config.annotations;
            same && Some(it.attempt) == attempt
        });
        Ok(found.map(|it| it.id))
    }

    async fn create_once(
        &self,
        sandbox: &SandboxId,
        config: &api::ContainerConfig,
        sandbox_config: &api::PodSandboxConfig,
    ) -> Result<ContainerId, CriError> {
        let message = api::CreateContainerRequest {
            pod_sandbox_id: sandbox.to_string(),
            config: Some(config.clone()),
            sandbox_config: Some(sandbox_config.clone()),
        };
        let call = self.write("CreateContainer");
        // On the heap: the message is by far the largest, and every future that waits for this one would be as large.
        let mut rpc = self.rpc();
        let answer = Box::pin(rpc.create_container(call.request(message)));
        let answer = call.finish(answer).await?;
        Ok(answer.container_id.into())
    }

    /// Starts a container that was made.
    pub async fn start_container(&self, id: &ContainerId) -> Result<(), CriError> {
        let message = api::StartContainerRequest {
            container_id: id.to_string(),
        };
        let call = self.write("StartContainer");
        call.finish(self.rpc().start_container(call.request(message)))
            .await?;
        Ok(())
    }

    /// Stops a container: SIGKILL follows its stop signal after `grace` (rounded up to seconds; at once with zero).
    /// Returns once the runtime has published the exit, so not before a held exit is released, or after `deadline`;
    /// the signals have been sent then.
    pub async fn stop_container(
        &self,
        id: &ContainerId,
        grace: Duration,
        deadline: Duration,
    ) -> Result<(), CriError> {
        let seconds = grace.as_secs() + u64::from(grace.subsec_nanos() > 0);
        let message = api::StopContainerRequest {
            container_id: id.to_string(),
            timeout: i64::try_from(seconds).unwrap_or(i64::MAX),
        };
        let call = self.call("StopContainer", deadline);
        call.finish(self.rpc().stop_container(call.request(message)))
            .await?;
        Ok(())
    }

    /// Runs a command in a container, no longer than `limit`, and tells what it exited with. What it writes is dropped; of one
    /// that writes more than [`MAX_OUTPUT`] that is not known, and it counts as a success.
    pub async fn exec(
        &self,
        id: &ContainerId,
        command: &[String],
        limit: Duration,
    ) -> Result<ExitCode, CriError> {
        let message = api::ExecSyncRequest {
            container_id: id.to_string(),
            cmd: command.to_vec(),
            timeout: 0,
        };
        let call = self.call("ExecSync", limit);
        let mut rpc = self.rpc().max_decoding_message_size(MAX_OUTPUT);
        let answer = rpc
            .exec_sync(call.request(message))
            .map(|answer| match answer {
                Err(status) if status.code() == Code::OutOfRange => {
                    Ok(Response::new(api::ExecSyncResponse::default()))
                }
                answer => answer,
            });
        Ok(ExitCode(call.finish(answer).await?.exit_code))
    }

    /// Removes a container, in one try. containerd counts one that is gone as removed, and so may other runtimes.
    pub async fn remove_container(&self, id: &ContainerId) -> Result<(), CriError> {
        self.remove_within(id, self.deadlines.write).await
    }

    /// Removes a container as soon as the runtime lets it go, trying again until `until`. A container that is gone is
    /// removed. Fails with the last try's error; with any error that waiting does not mend, at once.
    pub async fn remove_when_exited(
        &self,
        id: &ContainerId,
        until: Instant,
    ) -> Result<(), CriError> {
        let mut pause = FIRST_PAUSE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.remove_within(id, left.min(self.deadlines.write)).await {
                Ok(()) | Err(CriError::Gone { .. }) => return Ok(()),
                Err(error) if error.is_transient() && Instant::now() + pause < until => {
                    tokio::time::sleep(pause).await;
                    pause = LONGEST_PAUSE.min(pause * 2);
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn remove_within(&self, id: &ContainerId, limit: Duration) -> Result<(), CriError> {
        let message = api::RemoveContainerRequest {
            container_id: id.to_string(),
        };
        let call = self.call("RemoveContainer", limit);
        call.finish(self.rpc().remove_container(call.request(message)))
            .await?;
        Ok(())
    }

    async fn status_of(
        &self,
        mut rpc: RuntimeServiceClient<Channel>,
        id: &ContainerId,
        verbose: bool,
    ) -> Result<api::ContainerStatusResponse, CriError> {
        let message = api::ContainerStatusRequest {
            container_id: id.to_string(),
            verbose,
        };
        let call = self.read("ContainerStatus");
        call.finish(rpc.container_status(call.request(message)))
            .await
    }

    async fn status_of_sandbox(
        &self,
        mut rpc: RuntimeServiceClient<Channel>,
        id: &SandboxId,
        verbose: bool,
    ) -> Result<api::PodSandboxStatusResponse, CriError> {
        let message = api::PodSandboxStatusRequest {
            pod_sandbox_id: id.to_string(),
            verbose,
        };
        let call = self.read("PodSandboxStatus");
        call.finish(rpc.pod_sandbox_status(call.request(message)))
            .await
    }

    /// The connection, for other services on the same socket.
    pub(super) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// A call with a deadline of its own.
    pub(super) fn call(&self, name: &'static str, limit: Duration) -> Call<'_> {
        Call {
            name,
            limit,
            socket: &self.socket,
        }
    }

    fn read(&self, name: &'static str) -> Call<'_> {
        self.call(name, self.deadlines.read)
    }

    fn write(&self, name: &'static str) -> Call<'_> {
        self.call(name, self.deadlines.write)
    }

    /// tonic's clients want `&mut self`, and are made to be cloned.
    fn rpc(&self) -> RuntimeServiceClient<Channel> {
        self.rpc.clone()
    }

    /// For what a runtime tells at length of one container or sandbox, until the turn ends.
    async fn verbose_rpc(&self) -> (RuntimeServiceClient<Channel>, Option<SemaphorePermit<'_>>) {
        // It is never closed.
        let turn = self.verbose.acquire().await.ok();
        (self.rpc().max_decoding_message_size(MAX_VERBOSE), turn)
    }
}

fn known(
    status: Option<api::ContainerStatus>,
    id: &ContainerId,
) -> Result<ContainerStatus, CriError> {
    let status = status.ok_or_else(|| CriError::Malformed {
        call: "ContainerStatus",
        problem: format!("no status for container {id}"),
    })?;
    status.try_into()
}

/// The key of the runtime's configuration in its verbose status.
const RUNTIME_CONFIG: &str = "config";
/// The key of the JSON in a verbose answer.
const INFO: &str = "info";

/// One call: its name and deadline, and what is needed to tell its failure.
pub(super) struct Call<'a> {
    name: &'static str,
    limit: Duration,
    socket: &'a Path,
}

impl Call<'_> {
    /// The request, with the deadline for the runtime to keep to.
    pub(super) fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(self.limit);
        request
    }

    /// Waits for the answer, no longer than the deadline whatever the runtime does.
    pub(super) async fn finish<T>(
        &self,
        answer: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, CriError> {
        match tokio::time::timeout(self.limit, answer).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => Err(self.failed(&status)),
            Err(_) => Err(CriError::Deadline {
                call: self.name,
                limit: self.limit,
            }),
        }
    }

    /// The error that a status stands for.
    pub(super) fn failed(&self, status: &Status) -> CriError {
        CriError::from_status(self.name, self.limit, self.socket, status)
    }
}

/// The socket's path: `unix:///path`, `unix:/path`, or a bare absolute path.
fn socket_of(endpoint: &str) -> Result<PathBuf, CriError> {
    let wrong = |problem| CriError::Endpoint {
        endpoint: endpoint.to_owned(),
        problem,
    };
    let path = match endpoint.split_once(':') {
        Some(("unix", rest)) => rest.strip_prefix("//").unwrap_or(rest),
        Some((scheme, _)) if !scheme.starts_with('/') => {
            return Err(wrong("has a scheme other than unix"));
        }
        _ => endpoint,
    };
    if path.starts_with('/') {
        Ok(PathBuf::from(path))
    } else {
        Err(wrong("is not an absolute path"))
    }
}

#[cfg(test)]
mod tests;
