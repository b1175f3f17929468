//! A real plugin, over a real socket, driven by a runtime for tests.

use std::future::pending;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use protobuf::MessageField;
use tokio::net::UnixStream;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::api::{Container, ContainerAdjustment, Hook, PodSandbox};
use super::testing::{Connection, Registration, Runtime, containerd, frame, in_two_seconds, soon};
use super::wire::nri::{
    CreateContainerRequest, CreateContainerResponse, Empty, Event, StateChangeEvent,
    StopContainerRequest, ValidateContainerAdjustmentRequest,
};
use super::{EventMask, Launched, NriError, NriVersion, Plugin, Refusal, RuntimeInfo, Stub};

/// Tells of every call. What it does with a container is in the container's name.
struct Recorder {
    events: EventMask,
    calls: UnboundedSender<String>,
}

impl Recorder {
    fn new(events: EventMask) -> (Self, UnboundedReceiver<String>) {
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
        self.say(format!("{call} {}/{}", pod.name, container.name));
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
struct Running {
    calls: UnboundedReceiver<String>,
    stop: oneshot::Sender<()>,
    run: JoinHandle<Result<(), NriError>>,
}

impl Running {
    fn start(runtime: &Runtime) -> Self {
        Self::subscribed_to(
            EventMask::CREATE_CONTAINER | EventMask::STOP_CONTAINER,
            runtime,
        )
    }

    fn subscribed_to(events: EventMask, runtime: &Runtime) -> Self {
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

    async fn called(&mut self) -> String {
        soon(self.calls.recv()).await.expect("the plugin is gone")
    }

    async fn called_with(&mut self, call: &str) {
        assert_eq!(self.called().await, call);
    }

    /// Past what every connection begins with.
    async fn settled(&mut self) {
        assert!(self.called().await.starts_with("configure"));
        assert!(self.called().await.starts_with("synchronize"));
    }

    async fn result(self) -> Result<(), NriError> {
        soon(self.run).await.unwrap()
    }
}

async fn connected() -> (Runtime, Connection, Running) {
    let runtime = Runtime::start();
    let mut plugin = Running::start(&runtime);
    let mut connection = runtime.accept().await;
    connection.welcome().await;
    plugin.settled().await;
    (runtime, connection, plugin)
}

fn pod(name: &str) -> MessageField<PodSandbox> {
    let mut pod = PodSandbox::new();
    pod.name = name.into();
    pod.uid = format!("uid of {name}");
    MessageField::some(pod)
}

fn container(name: &str) -> MessageField<Container> {
    let mut container = Container::new();
    container.name = name.into();
    MessageField::some(container)
}

async fn create(connection: &Connection, name: &str) -> ttrpc::Result<CreateContainerResponse> {
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

async fn stop(connection: &Connection, name: &str) {
    let mut request = StopContainerRequest::new();
    request.pod = pod("web");
    request.container = container(name);
    soon(connection.plugin.stop_container(in_two_seconds(), &request))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_plugin_registers_and_is_configured_and_synchronised() {
    let runtime = Runtime::start();
    let mut plugin = Running::start(&runtime);
    let mut connection = runtime.accept().await;

    let registration = connection.registration().await;
    assert_eq!(registration.plugin_name, "test");
    assert_eq!(registration.plugin_idx, "42");
    let mut request = containerd("v2.3.7");
    request.config = "key: value".into();
    let events = connection.configure(request).await.unwrap().events;
    assert_eq!(events, 1 << 3 | 1 << 9);
    plugin
        .called_with(r#"configure containerd v2.3.7 0.12 "key: value""#)
        .await;
    connection
        .synchronize(&[PodSandbox::new()], &[], false)
        .await;
    plugin.called_with("synchronize 1 0").await;
}

#[tokio::test]
async fn a_configure_that_comes_before_the_reply_to_registration_is_served() {
    let runtime = Runtime::start();
    let mut plugin = Running::start(&runtime);
    let mut connection = runtime.accept_and(Registration::ConfigureFirst).await;

    connection.registration().await;
    plugin
        .called_with(r#"configure containerd v2.3.7 0.12 """#)
        .await;
}

#[tokio::test]
async fn a_synchronisation_in_three_parts_reaches_the_plugin_as_one() {
    let runtime = Runtime::start();
    let mut plugin = Running::start(&runtime);
    let mut connection = runtime.accept().await;
    connection.registration().await;
    connection.configure(containerd("v2.3.7")).await.unwrap();
    plugin.called().await;

    let (pods, containers) = (vec![PodSandbox::new(); 2], vec![Container::new(); 3]);
    for more in [true, true, false] {
        let reply = connection.synchronize(&pods, &containers, more).await;
        assert_eq!(reply.more, more);
        assert!(reply.update.is_empty());
    }
    plugin.called_with("synchronize 6 9").await;
}

#[tokio::test]
async fn each_event_reaches_its_method_by_a_request_of_its_own() {
    let (_runtime, connection, mut plugin) = connected().await;

    macro_rules! pod_events {
        ($($method:ident($request:ident)),*) => {$(
            let mut request = super::wire::nri::$request::new();
            request.pod = pod("web");
            soon(connection.plugin.$method(in_two_seconds(), &request)).await.unwrap();
            plugin.called_with(concat!(stringify!($method), " web")).await;
        )*};
    }
    macro_rules! container_events {
        ($($method:ident($request:ident)),*) => {$(
            let mut request = super::wire::nri::$request::new();
            request.pod = pod("web");
            request.container = container("app");
            soon(connection.plugin.$method(in_two_seconds(), &request)).await.unwrap();
            plugin.called_with(concat!(stringify!($method), " web/app")).await;
        )*};
    }
    pod_events!(
        run_pod_sandbox(RunPodSandboxRequest),
        update_pod_sandbox(UpdatePodSandboxRequest),
        post_update_pod_sandbox(PostUpdatePodSandboxRequest),
        stop_pod_sandbox(StopPodSandboxRequest),
        remove_pod_sandbox(RemovePodSandboxRequest)
    );
    container_events!(
        create_container(CreateContainerRequest),
        post_create_container(PostCreateContainerRequest),
        start_container(StartContainerRequest),
        post_start_container(PostStartContainerRequest),
        update_container(UpdateContainerRequest),
        post_update_container(PostUpdateContainerRequest),
        stop_container(StopContainerRequest),
        remove_container(RemoveContainerRequest),
        validate_container_adjustment(ValidateContainerAdjustmentRequest)
    );
    soon(connection.plugin.shutdown(in_two_seconds(), &Empty::new()))
        .await
        .unwrap();
}

#[tokio::test]
async fn each_event_reaches_its_method_by_a_state_change() {
    let (_runtime, connection, mut plugin) = connected().await;

    for (event, call) in [
        (Event::RUN_POD_SANDBOX, "run_pod_sandbox web"),
        (Event::UPDATE_POD_SANDBOX, "update_pod_sandbox web"),
        (
            Event::POST_UPDATE_POD_SANDBOX,
            "post_update_pod_sandbox web",
        ),
        (Event::STOP_POD_SANDBOX, "stop_pod_sandbox web"),
        (Event::REMOVE_POD_SANDBOX, "remove_pod_sandbox web"),
        (
            Event::POST_CREATE_CONTAINER,
            "post_create_container web/app",
        ),
        (Event::START_CONTAINER, "start_container web/app"),
        (Event::POST_START_CONTAINER, "post_start_container web/app"),
        (Event::UPDATE_CONTAINER, "update_container web/app"),
        (
            Event::POST_UPDATE_CONTAINER,
            "post_update_container web/app",
        ),
        (Event::STOP_CONTAINER, "stop_container web/app"),
        (Event::REMOVE_CONTAINER, "remove_container web/app"),
    ] {
        let mut change = StateChangeEvent::new();
        change.event = event.into();
        change.pod = pod("web");
        change.container = container("app");
        soon(connection.plugin.state_change(in_two_seconds(), &change))
            .await
            .unwrap();
        plugin.called_with(call).await;
    }
}

#[tokio::test]
async fn a_state_change_that_is_not_known_is_ignored() {
    let (_runtime, connection, mut plugin) = connected().await;

    let mut change = StateChangeEvent::new();
    change.event = protobuf::EnumOrUnknown::from_i32(99);
    soon(connection.plugin.state_change(in_two_seconds(), &change))
        .await
        .unwrap();
    stop(&connection, "app").await;
    plugin.called_with("stop_container web/app").await;
}

#[tokio::test]
async fn a_refusal_reaches_the_runtime_with_its_reason() {
    let (_runtime, connection, _plugin) = connected().await;

    let error = create(&connection, "refused").await.unwrap_err();
    let ttrpc::Error::RpcStatus(status) = error else {
        panic!("{error}")
    };
    assert_eq!(status.message, "not its turn");
}

#[tokio::test]
async fn a_validator_rejects_with_its_reason() {
    let (_runtime, connection, _plugin) = connected().await;

    for (name, reject, reason) in [("refused", true, "not valid"), ("app", false, "")] {
        let mut request = ValidateContainerAdjustmentRequest::new();
        request.container = container(name);
        let verdict = connection
            .plugin
            .validate_container_adjustment(in_two_seconds(), &request);
        let verdict = soon(verdict).await.unwrap();
        assert_eq!((verdict.reject, verdict.reason.as_str()), (reject, reason));
    }
}

#[tokio::test]
async fn an_adjustment_with_hooks_reaches_the_runtime() {
    let (_runtime, connection, _plugin) = connected().await;

    let response = create(&connection, "hooked").await.unwrap();
    let [hook] = response.adjust.hooks.poststop.as_slice() else {
        panic!("{response:?}")
    };
    assert_eq!(hook.path, "/opt/hold");
    assert_eq!(hook.args, ["hold", "uid of web"]);
}

#[tokio::test]
async fn a_reply_of_any_size_is_framed_so_that_go_can_read_it() {
    let (_runtime, connection, _plugin) = connected().await;

    for size in (4000..4100).chain([8000, 65_536, 1 << 20, (4 << 20) - 100]) {
        connection.take_frames();
        let response = create(&connection, &size.to_string()).await.unwrap();
        assert_eq!(response.adjust.annotations["large"].len(), size);
        let frames = connection.take_frames();
        assert!(frames[0] <= 4096, "{size}: {frames:?}");
        assert!(frames.len() <= 2, "{size}: {frames:?}");
    }
}

#[tokio::test]
async fn frames_of_unknown_connections_are_dropped() {
    let (_runtime, connection, mut plugin) = connected().await;

    connection.send_raw(frame(0, b"reserved"));
    connection.send_raw(frame(7, &vec![0xff; 70_000]));
    connection.send_raw(frame(3, b""));
    stop(&connection, "app").await;
    plugin.called_with("stop_container web/app").await;
}

#[tokio::test]
async fn a_frame_larger_than_any_message_ends_the_connection() {
    let (runtime, connection, mut plugin) = connected().await;

    connection.send_raw([1u32.to_be_bytes(), u32::MAX.to_be_bytes()].concat());
    assert_eq!(connection.ended().await, "the plugin closed the connection");
    plugin.called_with("disconnected").await;
    runtime.accept().await.welcome().await;
    plugin.settled().await;
}

#[tokio::test]
async fn a_plugin_reconnects_when_the_runtime_is_back() {
    let (mut runtime, connection, mut plugin) = connected().await;

    runtime.go_away();
    connection.close().await;
    plugin.called_with("disconnected").await;
    runtime.come_back();
    let mut connection = runtime.accept().await;
    connection.welcome().await;
    plugin.settled().await;
    stop(&connection, "app").await;
    plugin.called_with("stop_container web/app").await;
}

#[tokio::test]
async fn a_runtime_that_hangs_up_before_it_registered_the_plugin_is_tried_again() {
    let runtime = Runtime::start();
    let mut plugin = Running::start(&runtime);

    for _ in 0..3 {
        let mut connection = runtime.accept().await;
        connection.registration().await;
        connection.close().await;
    }
    runtime.accept().await.welcome().await;
    // Nothing was lost that the plugin knew of.
    plugin.settled().await;
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_takes_an_hour_to_answer_is_waited_for() {
    let runtime = Runtime::start();
    let mut plugin = Running::start(&runtime);
    let (go, wait) = oneshot::channel();
    let (trunk, registration) = (runtime.accept_trunk().await, Registration::Wait(wait));

    tokio::time::sleep(Duration::from_hours(1)).await;
    let mut connection = Connection::over(trunk, registration).await;
    tokio::time::sleep(Duration::from_hours(1)).await;
    go.send(()).unwrap();
    connection.welcome().await;
    plugin.settled().await;
}

#[tokio::test]
async fn a_silent_runtime_does_not_keep_the_plugin_from_shutting_down() {
    let runtime = Runtime::start();
    let plugin = Running::start(&runtime);
    let _trunk = runtime.accept_trunk().await;

    plugin.stop.send(()).unwrap();
    soon(plugin.run).await.unwrap().unwrap();
}

#[tokio::test]
async fn shutting_down_closes_the_connection() {
    let (_runtime, connection, plugin) = connected().await;

    plugin.stop.send(()).unwrap();
    soon(plugin.run).await.unwrap().unwrap();
    assert_eq!(connection.ended().await, "the plugin closed the connection");
}

#[tokio::test]
async fn a_registration_that_the_runtime_refuses_at_first_is_final() {
    let runtime = Runtime::start();
    let plugin = Running::start(&runtime);
    let _connection = runtime
        .accept_and(Registration::Refuse("no plugins today"))
        .await;

    let error = plugin.result().await.unwrap_err();
    assert!(
        matches!(&error, NriError::RegistrationRefused(_)),
        "{error}"
    );
    assert!(error.to_string().contains("no plugins today"), "{error}");
}

#[tokio::test]
async fn a_registration_that_the_runtime_refuses_later_is_tried_again() {
    let (runtime, connection, mut plugin) = connected().await;
    connection.close().await;
    plugin.called_with("disconnected").await;

    let refusing = runtime.accept_and(Registration::Refuse("not yet")).await;
    refusing.ended().await;
    runtime.accept().await.welcome().await;
    plugin.settled().await;
}

#[tokio::test]
async fn a_configuration_that_the_plugin_refuses_is_final_and_told_to_the_runtime() {
    let runtime = Runtime::start();
    let plugin = Running::start(&runtime);
    let mut connection = runtime.accept().await;
    connection.registration().await;

    let mut request = containerd("v2.3.7");
    request.config = "unacceptable".into();
    assert!(connection.configure(request).await.is_err());
    let error = plugin.result().await.unwrap_err();
    assert!(
        matches!(&error, NriError::ConfigurationRefused(_)),
        "{error}"
    );
    assert!(error.to_string().contains("cannot read it"), "{error}");
}

#[tokio::test]
async fn an_old_runtime_is_not_asked_for_events_that_it_does_not_know() {
    let wanted = EventMask::STOP_CONTAINER | EventMask::UPDATE_POD_SANDBOX;
    for (version, mask) in [
        ("v1.7.28", 1 << 9),
        ("v2.2.0", 1 << 9 | 1 << 11),
        ("?", 1 << 9),
    ] {
        let runtime = Runtime::start();
        let _plugin = Running::subscribed_to(wanted, &runtime);
        let mut connection = runtime.accept().await;
        connection.registration().await;
        assert_eq!(
            connection
                .configure(containerd(version))
                .await
                .unwrap()
                .events,
            mask
        );
    }
}

#[tokio::test]
async fn a_runtime_that_knows_none_of_the_events_is_not_asked_for_all() {
    let runtime = Runtime::start();
    let plugin = Running::subscribed_to(EventMask::UPDATE_POD_SANDBOX, &runtime);
    let mut connection = runtime.accept().await;
    connection.registration().await;

    assert!(connection.configure(containerd("v1.7.28")).await.is_err());
    let error = plugin.result().await.unwrap_err();
    assert!(
        matches!(error, NriError::ConfigurationRefused(_)),
        "{error}"
    );
}

// The clock stands still but for what is waited for: no call of a handler that fails may wait.
#[tokio::test(start_paused = true)]
async fn a_handler_that_panics_is_answered_for_at_once() {
    let (_runtime, connection, mut plugin) = connected().await;

    let begin = Instant::now();
    let response = create(&connection, "panics").await.unwrap();
    assert_eq!(
        response.adjust.unwrap_or_default(),
        ContainerAdjustment::new()
    );
    stop(&connection, "panics").await;
    assert_eq!(begin.elapsed(), Duration::ZERO);
    plugin.called_with("create_container web/panics").await;
    plugin.called_with("stop_container web/panics").await;
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_hangs_is_answered_for_before_the_runtime_gives_up() {
    let (_runtime, connection, _plugin) = connected().await;

    let begin = Instant::now();
    let response = create(&connection, "hangs").await.unwrap();
    assert_eq!(
        response.adjust.unwrap_or_default(),
        ContainerAdjustment::new()
    );
    assert!(
        begin.elapsed() < Duration::from_secs(2),
        "{:?}",
        begin.elapsed()
    );
}

#[tokio::test]
async fn a_handler_is_not_cut_off_by_the_end_of_the_connection() {
    struct Slow(Arc<Notify>, UnboundedSender<()>);

    impl Plugin for Slow {
        fn events(&self) -> EventMask {
            EventMask::STOP_CONTAINER
        }

        async fn stop_container(&self, _: PodSandbox, _: Container) {
            let _ = self.1.send(());
            self.0.notified().await;
            let _ = self.1.send(());
        }
    }

    let (goes_on, (steps, mut taken)) = (Arc::new(Notify::new()), unbounded_channel());
    let runtime = Runtime::start();
    let plugin = Slow(Arc::clone(&goes_on), steps);
    let stub = Stub::builder(plugin)
        .name("slow")
        .socket(runtime.socket())
        .build()
        .unwrap();
    let _run = tokio::spawn(stub.run(pending()));
    let mut connection = runtime.accept().await;
    connection.welcome().await;

    let client = connection.plugin.clone();
    let _event = tokio::spawn(async move {
        client
            .stop_container(in_two_seconds(), &StopContainerRequest::new())
            .await
    });
    soon(taken.recv()).await.unwrap();
    connection.close().await;
    // The plugin has noticed the end once it connects again.
    let _again = runtime.accept().await;
    goes_on.notify_one();
    soon(taken.recv()).await.expect("the handler was cut off");
}

#[tokio::test(flavor = "multi_thread")]
async fn many_events_at_once_are_all_answered() {
    let (_runtime, connection, mut plugin) = connected().await;

    let names: Vec<String> = (0..200).map(|number| (number * 100).to_string()).collect();
    let responses = join_all(names.iter().map(|name| create(&connection, name))).await;
    for (name, response) in names.iter().zip(responses) {
        let size = response.unwrap().adjust.annotations["large"].len();
        assert_eq!(size.to_string(), *name);
        assert!(plugin.called().await.starts_with("create_container"));
    }
}

#[tokio::test]
async fn a_launched_plugin_uses_what_it_was_given_and_ends_with_its_connection() {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let descriptor = theirs.as_raw_fd().to_string();
    let launched = Launched::from_variables(|variable| {
        Some(match variable {
            "NRI_PLUGIN_NAME" => "given".into(),
            "NRI_PLUGIN_IDX" => "07".into(),
            _ => descriptor.clone(),
        })
    });
    let (plugin, _calls) = Recorder::new(EventMask::STOP_CONTAINER);
    let stub = Stub::builder(plugin)
        .launched(launched.unwrap().unwrap())
        .build()
        .unwrap();
    let run = tokio::spawn(stub.run(pending()));
    ours.set_nonblocking(true).unwrap();
    let trunk = UnixStream::from_std(ours).unwrap();
    let mut connection = Connection::over(trunk, Registration::Accept).await;

    let registration = connection.registration().await;
    assert_eq!(
        (&*registration.plugin_name, &*registration.plugin_idx),
        ("given", "07")
    );
    connection.configure(containerd("v2.3.7")).await.unwrap();
    connection.synchronize(&[], &[], false).await;
    connection.close().await;
    soon(run).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_launched_plugin_that_shuts_down_closes_the_connection_that_it_was_given() {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let descriptor = theirs.as_raw_fd().to_string();
    let launched = Launched::from_variables(|variable| {
        Some(if variable == "NRI_PLUGIN_SOCKET" {
            descriptor.clone()
        } else {
            "07".into()
        })
    });
    let (plugin, _calls) = Recorder::new(EventMask::STOP_CONTAINER);
    let stub = Stub::builder(plugin)
        .launched(launched.unwrap().unwrap())
        .build()
        .unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let run = tokio::spawn(stub.run(async move { stopped.await.unwrap_or(()) }));
    ours.set_nonblocking(true).unwrap();
    let trunk = UnixStream::from_std(ours).unwrap();
    let mut connection = Connection::over(trunk, Registration::Accept).await;
    connection.registration().await;

    // The process still holds the descriptor itself.
    stop.send(()).unwrap();
    soon(run).await.unwrap().unwrap();
    assert_eq!(connection.ended().await, "the plugin closed the connection");
    drop(theirs);
}

#[tokio::test]
async fn a_socket_that_is_not_there_at_first_is_named_with_what_to_do() {
    let (plugin, _calls) = Recorder::new(EventMask::STOP_CONTAINER);
    let stub = Stub::builder(plugin)
        .name("test")
        .socket("/nowhere/nri.sock")
        .build()
        .unwrap();

    let error = stub.run(pending()).await.unwrap_err().to_string();
    assert!(error.contains("/nowhere/nri.sock"), "{error}");
    assert!(error.contains("enable_nri = true"), "{error}");
}

#[test]
fn what_a_runtime_would_refuse_is_not_built() {
    let build = |name: &str, index: &str, events| {
        let (plugin, _calls) = Recorder::new(events);
        Stub::builder(plugin)
            .name(name)
            .index(index)
            .build()
            .map(drop)
    };
    let some = EventMask::STOP_CONTAINER;

    for name in ["", "a b", "a/b", "é"] {
        assert!(
            matches!(build(name, "10", some), Err(NriError::InvalidName(_))),
            "{name}"
        );
    }
    for index in ["", "1", "100", "a0", "-1"] {
        assert!(
            matches!(build("test", index, some), Err(NriError::InvalidIndex(_))),
            "{index}"
        );
    }
    assert!(matches!(
        build("test", "10", EventMask::NONE),
        Err(NriError::NoEvents)
    ));
    assert!(build("a-B_c.d+9", "00", some).is_ok());
}
