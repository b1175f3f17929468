//! A plugin for tests: tells of every call, and does what it is asked to.

use std::future::pending;

use protobuf::MessageField;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::runtime::{Connection, Runtime, in_two_seconds, soon};
use crate::api::{Container, ContainerAdjustment, FailurePolicy, Hook, PodSandbox};
use crate::wire::nri::{CreateContainerRequest, CreateContainerResponse, StopContainerRequest};
use crate::{EventMask, NriError, NriVersion, Plugin, Refusal, RuntimeInfo, Stub};

/// Tells of every call. What it does with a container is in the container's name.
pub(crate) struct Recorder {
    events: EventMask,
    calls: UnboundedSender<String>,
}

impl Recorder {
    pub(crate) fn new(events: EventMask) -> (Self, UnboundedReceiver<String>) {
        let (calls, told) = unbounded_channel();
        (Self { events, calls }, told)
    }

    fn say(&self, call: impl Into<String>) {
        let _ = self.calls.send(call.into());
    }

    fn pod(&self, call: &str, pod: &PodSandbox) {
        self.say(format!("{call} {}", pod.name));
    }

    async fn container(&self, call: &str, pod: &PodSandbox, container: &Container) {
        let image = container.image.as_ref();
        let image = image.map(|image| format!(" of {}", image.config_digest));
        let image = image.unwrap_or_default();
        self.say(format!("{call} {}/{}{image}", pod.name, container.name));
        match container.name.as_str() {
            "panics" => panic!("as told"),
            "hangs" => pending().await,
            _ => {}
        }
    }
}

impl Plugin for Recorder {
    fn events(&self) -> EventMask {
        self.events
    }

    fn failure_policy(&self) -> FailurePolicy {
        let mut policy = FailurePolicy::new();
        policy.keep_connected = true;
        policy
    }

    async fn configure(&self, runtime: RuntimeInfo, config: String) -> Result<(), Refusal> {
        let nri = runtime.nri_version.unwrap_or(NriVersion::new(0, 0));
        self.say(format!(
            "configure {} {} {nri} {config:?}",
            runtime.name, runtime.version
        ));
        if config == "unacceptable" {
            Err(Refusal::new("cannot read it"))
        } else {
            Ok(())
        }
    }

    async fn synchronize(&self, pods: Vec<PodSandbox>, containers: Vec<Container>) {
        self.say(format!("synchronize {} {}", pods.len(), containers.len()));
    }

    async fn disconnected(&self) {
        self.say("disconnected");
    }

    async fn run_pod_sandbox(&self, pod: PodSandbox) {
        self.pod("run_pod_sandbox", &pod);
    }

    async fn update_pod_sandbox(&self, pod: PodSandbox) {
        self.pod("update_pod_sandbox", &pod);
    }

    async fn post_update_pod_sandbox(&self, pod: PodSandbox) {
        self.pod("post_update_pod_sandbox", &pod);
    }

    async fn stop_pod_sandbox(&self, pod: PodSandbox) {
        self.pod("stop_pod_sandbox", &pod);
    }

    async fn remove_pod_sandbox(&self, pod: PodSandbox) {
        self.pod("remove_pod_sandbox", &pod);
    }

    async fn create_container(
        &self,
        pod: PodSandbox,
        container: Container,
    ) -> Result<ContainerAdjustment, Refusal> {
        self.container("create_container", &pod, &container).await;
        let mut adjustment = ContainerAdjustment::new();
        match container.name.as_str() {
            "refused" => return Err(Refusal::new("not its turn")),
            "hooked" => {
                let mut hook = Hook::new();
                hook.path = "/opt/hold".into();
                hook.args = vec!["hold".into(), pod.uid];
                adjustment.hooks.mut_or_insert_default().poststop.push(hook);
            }
            name => {
                let size = name.parse().unwrap_or(0);
                adjustment
                    .annotations
                    .insert("large".into(), "x".repeat(size));
            }
        }
        Ok(adjustment)
    }

    async fn post_create_container(&self, pod: PodSandbox, container: Container) {
        self.container("post_create_container", &pod, &container)
            .await;
    }

    async fn start_container(&self, pod: PodSandbox, container: Container) {
        self.container("start_container", &pod, &container).await;
    }

    async fn post_start_container(&self, pod: PodSandbox, container: Container) {
        self.container("post_start_container", &pod, &container)
            .await;
    }

    async fn update_container(&self, pod: PodSandbox, container: Container) {
        self.container("update_container", &pod, &container).await;
    }

    async fn post_update_container(&self, pod: PodSandbox, container: Container) {
        self.container("post_update_container", &pod, &container)
            .await;
    }

    async fn stop_container(&self, pod: PodSandbox, container: Container) {
        self.container("stop_container", &pod, &container).await;
    }

    async fn remove_container(&self, pod: PodSandbox, container: Container) {
        self.container("remove_container", &pod, &container).await;
    }

    async fn validate_container_adjustment(
        &self,
        pod: PodSandbox,
        container: Container,
        _: ContainerAdjustment,
    ) -> Result<(), Refusal> {
        self.container("validate_container_adjustment", &pod, &container)
            .await;
        if container.name == "refused" {
            Err(Refusal::new("not valid"))
        } else {
            Ok(())
        }
    }
}

/// A running plugin.
pub(crate) struct Running {
    calls: UnboundedReceiver<String>,
    pub(crate) stop: oneshot::Sender<()>,
    pub(crate) run: JoinHandle<Result<(), NriError>>,
}

impl Running {
    pub(crate) fn start(runtime: &Runtime) -> Self {
        Self::subscribed_to(
            EventMask::CREATE_CONTAINER | EventMask::STOP_CONTAINER,
            runtime,
        )
    }

    pub(crate) fn subscribed_to(events: EventMask, runtime: &Runtime) -> Self {
        let (plugin, calls) = Recorder::new(events);
        let stub = Stub::builder(plugin)
            .name("test")
            .index("42")
            .socket(runtime.socket());
        let stub = stub.build().unwrap();
        let (stop, stopped) = oneshot::channel();
        let run = tokio::spawn(stub.run(async move { stopped.await.unwrap_or(()) }));
        Self { calls, stop, run }
    }

    pub(crate) async fn called(&mut self) -> String {
        soon(self.calls.recv()).await.expect("the plugin is gone")
    }

    pub(crate) async fn called_with(&mut self, call: &str) {
        assert_eq!(self.called().await, call);
    }

    /// Past what every connection begins with.
    pub(crate) async fn settled(&mut self) {
        assert!(self.called().await.starts_with("configure"));
        assert!(self.called().await.starts_with("synchronize"));
    }

    pub(crate) async fn result(self) -> Result<(), NriError> {
        soon(self.run).await.unwrap()
    }
}

pub(crate) async fn connected() -> (Runtime, Connection, Running) {
    let runtime = Runtime::start();
    let mut plugin = Running::start(&runtime);
    let mut connection = runtime.accept().await;
    connection.welcome().await;
    plugin.settled().await;
    (runtime, connection, plugin)
}

pub(crate) fn pod(name: &str) -> MessageField<PodSandbox> {
    let mut pod = PodSandbox::new();
    pod.name = name.into();
    pod.uid = format!("uid of {name}");
    MessageField::some(pod)
}

pub(crate) fn container(name: &str) -> MessageField<Container> {
    let mut container = Container::new();
    container.name = name.into();
    MessageField::some(container)
}

pub(crate) async fn create(
    connection: &Connection,
    name: &str,
) -> ttrpc::Result<CreateContainerResponse> {
    let mut request = CreateContainerRequest::new();
    request.pod = pod("web");
    request.container = container(name);
    soon(
        connection
            .plugin
            .create_container(in_two_seconds(), &request),
    )
    .await
}

pub(crate) async fn stop(connection: &Connection, name: &str) {
    let mut request = StopContainerRequest::new();
    request.pod = pod("web");
    request.container = container(name);
    soon(connection.plugin.stop_container(in_two_seconds(), &request))
        .await
        .unwrap();
}
