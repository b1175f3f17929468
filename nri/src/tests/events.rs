//! Events on their way to the plugin, and its answers on their way back.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use protobuf::MessageField;
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::time::Instant;

use crate::api::{Container, ContainerAdjustment, Image, PodSandbox};
use crate::testing::{
    Running, Runtime, connected, container, containerd, create, in_two_seconds, pod, soon, stop,
};
use crate::wire::nri as wire;
use crate::wire::nri::{
    CreateContainerRequest, Empty, Event, StateChangeEvent, StopContainerRequest,
    ValidateContainerAdjustmentRequest,
};
use crate::{EventMask, NriError, Plugin, Stub};

#[tokio::test]
async fn each_event_reaches_its_method_by_a_request_of_its_own() {
    let (_runtime, connection, mut plugin) = connected().await;

    macro_rules! pod_events {
        ($($method:ident($request:ident)),*) => {$(
            let mut request = wire::$request::new();
            request.pod = pod("web");
            soon(connection.plugin.$method(in_two_seconds(), &request)).await.unwrap();
            plugin.called_with(concat!(stringify!($method), " web")).await;
        )*};
    }
    macro_rules! container_events {
        ($($method:ident($request:ident)),*) => {$(
            let mut request = wire::$request::new();
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
async fn what_the_runtime_says_of_an_image_reaches_the_plugin() {
    let (_runtime, connection, mut plugin) = connected().await;
    let mut request = CreateContainerRequest::new();
    request.pod = pod("web");
    request.container = container("app");
    request.container.mut_or_insert_default().image = MessageField::some(Image {
        config_digest: "sha256:1".into(),
        ..Default::default()
    });
    let reply = connection
        .plugin
        .create_container(in_two_seconds(), &request);
    soon(reply).await.unwrap();
    plugin
        .called_with("create_container web/app of sha256:1")
        .await;
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
