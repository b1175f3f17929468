//! A runtime for the tests: both services on a real unix socket, with answers that the test writes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures::StreamExt;
use tokio::net::UnixListener;
use tokio::sync::broadcast;
use tokio_stream::wrappers::BroadcastStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::api::containerd::services::events::v1 as events;
use super::api::containerd::services::tasks::v1 as tasks;
use super::api::containerd::types::Envelope;
use super::api::containerd::v1::types::Process;
pub(crate) use super::api::runtime::v1 as api;
use super::client::{Client, Deadlines};

/// What the runtime answers.
#[derive(Default)]
pub(crate) struct Answers {
    /// The first of these fails the next call; then they are used up.
    pub(crate) failures: Vec<Status>,
    /// Whether calls are never answered.
    pub(crate) hangs: bool,
    pub(crate) runtime_name: String,
    pub(crate) containers: Vec<api::Container>,
    pub(crate) sandboxes: Vec<api::PodSandbox>,
    pub(crate) status: Option<api::ContainerStatus>,
    pub(crate) info: BTreeMap<String, String>,
    /// What is said instead of a container's verbose status: JSON, or why not.
    pub(crate) told: BTreeMap<String, Result<String, Status>>,
    pub(crate) process: Option<Process>,
    /// What comes of a command.
    pub(crate) exec: api::ExecSyncResponse,
    /// Images by name, with their identifiers.
    pub(crate) images: BTreeMap<String, String>,
    /// The calls that came, by name, with what matters of them.
    pub(crate) calls: Vec<String>,
}

/// The runtime. Its socket lives as long as it does; it can be stopped and started in between.
pub(crate) struct Fake {
    dir: tempfile::TempDir,
    service: Service,
    server: Option<tokio::runtime::Runtime>,
}

#[derive(Clone)]
struct Service {
    answers: Arc<Mutex<Answers>>,
    events: broadcast::Sender<Envelope>,
}

impl Fake {
    /// A runtime that calls itself containerd and knows of nothing.
    pub(crate) fn start() -> Self {
        let answers = Answers {
            runtime_name: "containerd".into(),
            ..Answers::default()
        };
        let mut fake = Self {
            dir: tempfile::tempdir().unwrap(),
            service: Service {
                answers: Arc::new(Mutex::new(answers)),
                events: broadcast::channel(16).0,
            },
            server: None,
        };
        fake.serve();
        fake
    }

    /// Serves on a runtime of its own, so that stopping it cuts connections as the death of a process does.
    pub(crate) fn serve(&mut self) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let _in_it = runtime.enter();
        let listener = UnixListener::bind(self.socket()).unwrap();
        let incoming = futures::stream::unfold(listener, |listener| async {
            Some((listener.accept().await.map(|(stream, _)| stream), listener))
        });
        runtime.spawn(
            Server::builder()
                .add_service(api::runtime_service_server::RuntimeServiceServer::new(
                    self.service.clone(),
                ))
                .add_service(api::image_service_server::ImageServiceServer::new(
                    self.service.clone(),
                ))
                .add_service(events::events_server::EventsServer::new(
                    self.service.clone(),
                ))
                .add_service(tasks::tasks_server::TasksServer::new(self.service.clone()))
                .serve_with_incoming(incoming),
        );
        self.server = Some(runtime);
    }

    pub(crate) fn stop(&mut self) {
        if let Some(server) = self.server.take() {
            // Its connections are cut when this returns, which a test's own runtime may not wait for.
            let end = std::thread::spawn(|| server.shutdown_timeout(Duration::from_secs(5)));
            end.join().unwrap();
        }
        std::fs::remove_file(self.socket()).unwrap();
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("runtime.sock")
    }

    pub(crate) fn client(&self) -> Client {
        client_of(&self.socket())
    }

    pub(crate) fn answers(&self) -> MutexGuard<'_, Answers> {
        self.service.answers.lock().unwrap()
    }

    /// Sends an event to all who subscribed.
    pub(crate) fn send(&self, event: Envelope) {
        self.service.events.send(event).unwrap();
    }

    /// How many listen to the events.
    pub(crate) fn subscribers(&self) -> usize {
        self.service.events.receiver_count()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            server.shutdown_background();
        }
    }
}

/// A client with deadlines that a test can wait for.
pub(crate) fn client_of(socket: &Path) -> Client {
    Client::connect(&format!("unix://{}", socket.display()))
        .unwrap()
        .with_deadlines(Deadlines {
            read: Duration::from_millis(500),
            write: Duration::from_millis(500),
        })
}

impl Service {
    async fn called(&self, call: impl Into<String>) -> Result<MutexGuard<'_, Answers>, Status> {
        let hangs = {
            let mut answers = self.answers.lock().unwrap();
            answers.calls.push(call.into());
            if !answers.failures.is_empty() {
                return Err(answers.failures.remove(0));
            }
            answers.hangs
        };
        if hangs {
            std::future::pending::<()>().await;
        }
        Ok(self.answers.lock().unwrap())
    }
}

#[tonic::async_trait]
impl api::runtime_service_server::RuntimeService for Service {
    async fn version(
        &self,
        _: Request<api::VersionRequest>,
    ) -> Result<Response<api::VersionResponse>, Status> {
        let answers = self.called("Version").await?;
        Ok(Response::new(api::VersionResponse {
            version: "0.1.0".into(),
            runtime_name: answers.runtime_name.clone(),
            runtime_version: "v2.3.7".into(),
            runtime_api_version: "v1".into(),
        }))
    }

    async fn list_pod_sandbox(
        &self,
        _: Request<api::ListPodSandboxRequest>,
    ) -> Result<Response<api::ListPodSandboxResponse>, Status> {
        let items = self.called("ListPodSandbox").await?.sandboxes.clone();
        Ok(Response::new(api::ListPodSandboxResponse { items }))
    }

    async fn pod_sandbox_status(
        &self,
        _: Request<api::PodSandboxStatusRequest>,
    ) -> Result<Response<api::PodSandboxStatusResponse>, Status> {
        let info = self.called("PodSandboxStatus").await?.info.clone();
        Ok(Response::new(api::PodSandboxStatusResponse {
            info,
            ..Default::default()
        }))
    }

    async fn list_containers(
        &self,
        request: Request<api::ListContainersRequest>,
    ) -> Result<Response<api::ListContainersResponse>, Status> {
        let sandbox = request.into_inner().filter.map(|f| f.pod_sandbox_id);
        let answers = self.called("ListContainers").await?;
        let containers = answers
            .containers
            .iter()
            .filter(|c| sandbox.as_ref().is_none_or(|id| *id == c.pod_sandbox_id));
        Ok(Response::new(api::ListContainersResponse {
            containers: containers.cloned().collect(),
        }))
    }

    async fn container_status(
        &self,
        request: Request<api::ContainerStatusRequest>,
    ) -> Result<Response<api::ContainerStatusResponse>, Status> {
        let api::ContainerStatusRequest {
            container_id,
            verbose,
        } = request.into_inner();
        let answers = self.called("ContainerStatus").await?;
        let told = answers.told.get(&container_id).filter(|_| verbose);
        let info = if let Some(told) = told {
            [("info".to_owned(), told.clone()?)].into()
        } else if verbose {
            answers.info.clone()
        } else {
            BTreeMap::new()
        };
        Ok(Response::new(api::ContainerStatusResponse {
            status: answers.status.clone(),
            info,
        }))
    }

    async fn status(
        &self,
        _: Request<api::StatusRequest>,
    ) -> Result<Response<api::StatusResponse>, Status> {
        let info = self.called("Status").await?.info.clone();
        Ok(Response::new(api::StatusResponse { info }))
    }

    async fn create_container(
        &self,
        request: Request<api::CreateContainerRequest>,
    ) -> Result<Response<api::CreateContainerResponse>, Status> {
        let request = request.into_inner();
        let name = request.config.unwrap().metadata.unwrap().name;
        let container_id = format!("{name}-in-{}", request.pod_sandbox_id);
        drop(self.called("CreateContainer").await?);
        Ok(Response::new(api::CreateContainerResponse { container_id }))
    }

    async fn start_container(
        &self,
        _: Request<api::StartContainerRequest>,
    ) -> Result<Response<api::StartContainerResponse>, Status> {
        drop(self.called("StartContainer").await?);
        Ok(Response::new(api::StartContainerResponse {}))
    }

    async fn stop_container(
        &self,
        request: Request<api::StopContainerRequest>,
    ) -> Result<Response<api::StopContainerResponse>, Status> {
        let call = format!("StopContainer {}", request.into_inner().timeout);
        drop(self.called(call).await?);
        Ok(Response::new(api::StopContainerResponse {}))
    }

    async fn exec_sync(
        &self,
        request: Request<api::ExecSyncRequest>,
    ) -> Result<Response<api::ExecSyncResponse>, Status> {
        let call = format!("ExecSync {}", request.into_inner().cmd.join(" "));
        Ok(Response::new(self.called(call).await?.exec.clone()))
    }

    async fn remove_container(
        &self,
        _: Request<api::RemoveContainerRequest>,
    ) -> Result<Response<api::RemoveContainerResponse>, Status> {
        drop(self.called("RemoveContainer").await?);
        Ok(Response::new(api::RemoveContainerResponse {}))
    }
}

#[tonic::async_trait]
impl api::image_service_server::ImageService for Service {
    async fn image_status(
        &self,
        request: Request<api::ImageStatusRequest>,
    ) -> Result<Response<api::ImageStatusResponse>, Status> {
        let name = request.into_inner().image.unwrap_or_default().image;
        let id = self.called("ImageStatus").await?.images.get(&name).cloned();
        let image = id.map(image);
        Ok(Response::new(api::ImageStatusResponse { image }))
    }

    async fn list_images(
        &self,
        _: Request<api::ListImagesRequest>,
    ) -> Result<Response<api::ListImagesResponse>, Status> {
        let images = self.called("ListImages").await?.images.clone();
        let images = images.into_iter().map(|(name, id)| api::Image {
            repo_tags: vec![name],
            ..image(id)
        });
        let images = images.collect();
        Ok(Response::new(api::ListImagesResponse { images }))
    }
}

#[tonic::async_trait]
impl events::events_server::Events for Service {
    type SubscribeStream = futures::stream::BoxStream<'static, Result<Envelope, Status>>;

    async fn subscribe(
        &self,
        request: Request<events::SubscribeRequest>,
    ) -> Result<Response<Self::SubscribeStream>, Status> {
        let filters = request.into_inner().filters.join(" or ");
        let mut events = BroadcastStream::new(self.events.subscribe());
        drop(self.called(format!("Subscribe {filters}")).await?);
        // As Go's gRPC does: no headers before the first event.
        let first = events.next().await;
        let events = futures::stream::iter(first)
            .chain(events)
            .map(|event| event.map_err(|lagged| Status::data_loss(lagged.to_string())));
        Ok(Response::new(events.boxed()))
    }
}

#[tonic::async_trait]
impl tasks::tasks_server::Tasks for Service {
    async fn get(
        &self,
        request: Request<tasks::GetRequest>,
    ) -> Result<Response<tasks::GetResponse>, Status> {
        let namespace = request.metadata().get("containerd-namespace");
        let call = format!("Get in {:?}", namespace.unwrap().to_str().unwrap());
        let process = self.called(call).await?.process.clone();
        Ok(Response::new(tasks::GetResponse { process }))
    }
}

fn image(id: String) -> api::Image {
    api::Image {
        id,
        ..Default::default()
    }
}
