use std::time::Duration;

use tokio::time::Instant;
use tonic::Status;

use super::super::fake::{Fake, client_of};
use super::super::model::{ContainerState, SandboxState};
use super::*;
use crate::ids::{Attempt, ExitCode};

fn id() -> ContainerId {
    ContainerId::from("c1")
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

#[tokio::test]
async fn endpoints_that_are_no_unix_sockets_are_refused_at_once() {
    for (endpoint, words) in [
        ("tcp://127.0.0.1:1234", "has a scheme other than unix"),
        ("unix://run/x.sock", "is not an absolute path"),
        ("run/x.sock", "is not an absolute path"),
        ("", "is not an absolute path"),
    ] {
        let error = Client::connect(endpoint).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
    for endpoint in ["unix:///run/x.sock", "unix:/run/x.sock", "/run/x.sock"] {
        let client = Client::connect(endpoint).unwrap();
        assert_eq!(&*client.socket, Path::new("/run/x.sock"));
    }
}

#[tokio::test]
async fn a_missing_socket_and_a_dead_one_say_what_to_look_at() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("runtime.sock");
    let client = client_of(&socket);

    let error = client.version().await.unwrap_err();
    assert!(error.to_string().contains("no such socket"), "{error}");

    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let error = client.version().await.unwrap_err();
    assert!(matches!(error, CriError::Away { .. }));
    assert!(error.to_string().contains("nobody listens"), "{error}");
}

#[tokio::test]
async fn every_class_of_error_comes_over_the_wire() {
    let fake = Fake::start();
    let client = fake.client();
    let fail = |status| fake.answers().failures.push(status);

    fail(Status::not_found("container \"c1\": not found"));
    let error = client.container_status(&id()).await.unwrap_err();
    assert!(matches!(error, CriError::Gone { .. }), "{error}");

    fail(Status::unknown("container is still running, to stop first"));
    let error = client.remove_container(&id()).await.unwrap_err();
    assert!(matches!(error, CriError::StillRunning { .. }), "{error}");

    fail(Status::unknown(
        "failed to reserve container name \"a\": name \"a\" is reserved for \"0\"",
    ));
    let error = create(&client).await.unwrap_err();
    assert!(matches!(error, CriError::NameReserved { .. }), "{error}");

    fail(Status::unavailable("server is shutting down"));
    let error = client.start_container(&id()).await.unwrap_err();
    assert!(matches!(error, CriError::Away { .. }), "{error}");

    fail(Status::unknown("failed to get NRI adjustment"));
    let error = create(&client).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "CreateContainer: Unknown: failed to get NRI adjustment"
    );
}

async fn create(client: &Client) -> Result<ContainerId, CriError> {
    create_while(client, || true).await
}

async fn create_while(client: &Client, wanted: impl Fn() -> bool) -> Result<ContainerId, CriError> {
    let config = api::ContainerConfig {
        metadata: Some(third_of_app()),
        ..Default::default()
    };
    let (sandbox, sandbox_config) = (SandboxId::from("s1"), api::PodSandboxConfig::default());
    client
        .create_container(&sandbox, &config, &sandbox_config, wanted)
        .await
}

fn third_of_app() -> api::ContainerMetadata {
    api::ContainerMetadata {
        name: "app".into(),
        attempt: 3,
    }
}

#[tokio::test]
async fn a_container_that_was_made_without_an_answer_is_found() {
    let fake = Fake::start();
    let client = fake.client();
    let lose_answer = || {
        let lost = [
            Status::unavailable("error reading from server: EOF"),
            Status::unavailable("there is no such socket"),
        ];
        fake.answers().failures.extend(lost);
    };
    lose_answer();
    let error = create(&client).await.unwrap_err();
    assert!(matches!(error, CriError::Away { .. }), "{error}");

    fake.answers().containers.push(api::Container {
        id: "made".into(),
        pod_sandbox_id: "s1".into(),
        metadata: Some(third_of_app()),
        ..Default::default()
    });
    lose_answer();
    let error = create_while(&client, || false).await.unwrap_err();
    assert!(matches!(error, CriError::Away { .. }), "{error}");
    fake.answers().failures.clear();
    lose_answer();
    assert_eq!(create(&client).await.unwrap().as_str(), "made");
}

#[tokio::test]
async fn a_runtime_that_hangs_costs_no_more_than_the_deadline() {
    let fake = Fake::start();
    fake.answers().hangs = true;
    let client = fake.client();

    let began = Instant::now();
    let error = client.list_sandboxes().await.unwrap_err();
    assert!(matches!(error, CriError::Deadline { .. }), "{error}");
    let error = client
        .stop_container(&id(), Duration::ZERO, Duration::from_millis(100))
        .await
        .unwrap_err();
    assert_eq!(error.to_string(), "StopContainer: no answer within 100ms");
    assert!(began.elapsed() < Duration::from_secs(3));
}

#[tokio::test]
async fn a_command_tells_its_code_unless_it_writes_too_much() {
    let fake = Fake::start();
    let client = fake.client();
    let command = ["sh", "-c", "flush"].map(str::to_owned);
    for (written, code) in [(1024, 3), (512 * 1024, 0)] {
        fake.answers().exec = api::ExecSyncResponse {
            stdout: vec![b'x'; written],
            exit_code: 3,
            ..Default::default()
        };
        let exited = client.exec(&id(), &command, Duration::from_secs(10)).await;
        assert_eq!(exited.unwrap(), ExitCode(code));
    }
    assert_eq!(fake.answers().calls, ["ExecSync sh -c flush"; 2]);
}

#[tokio::test]
async fn a_runtime_that_comes_back_is_found_again() {
    let mut fake = Fake::start();
    let client = fake.client();
    client.version().await.unwrap();

    fake.stop();
    let error = client.version().await.unwrap_err();
    assert!(matches!(error, CriError::Away { .. }), "{error}");

    fake.serve();
    assert_eq!(client.version().await.unwrap().version, "v2.3.7");
}

#[tokio::test]
async fn a_runtime_that_dies_in_the_middle_of_a_call_is_away() {
    let mut fake = Fake::start();
    fake.answers().hangs = true;
    let client = fake.client();
    let call = tokio::spawn(async move {
        client
            .stop_container(&id(), Duration::ZERO, Duration::from_secs(10))
            .await
    });
    while fake.answers().calls.is_empty() {
        tokio::task::yield_now().await;
    }
    fake.stop();
    let error = call.await.unwrap().unwrap_err();
    assert!(matches!(error, CriError::Away { .. }), "{error}");
}

#[tokio::test]
async fn removal_waits_for_the_exit_and_takes_gone_for_done() {
    let fake = Fake::start();
    let client = fake.client();
    let still_running = || Status::unknown("container is still running, to stop first");

    fake.answers().failures = vec![still_running(), still_running()];
    client.remove_when_exited(&id(), soon()).await.unwrap();
    assert_eq!(fake.answers().calls.len(), 3);

    fake.answers().failures = vec![still_running(), Status::not_found("not found")];
    client.remove_when_exited(&id(), soon()).await.unwrap();

    fake.answers().failures = vec![Status::unknown("failed to delete snapshot")];
    let error = client.remove_when_exited(&id(), soon()).await.unwrap_err();
    assert!(matches!(error, CriError::Other { .. }), "{error}");

    fake.answers().failures = (0..1_000).map(|_| still_running()).collect();
    let until = Instant::now() + Duration::from_secs(1);
    let error = client.remove_when_exited(&id(), until).await.unwrap_err();
    assert!(matches!(error, CriError::StillRunning { .. }), "{error}");
    assert!(Instant::now() < until + Duration::from_secs(5));
}

#[tokio::test]
async fn lists_and_statuses_arrive_in_our_own_types() {
    let fake = Fake::start();
    let client = fake.client();
    let metadata = api::ContainerMetadata {
        name: "cri-name".into(),
        attempt: 2,
    };
    let labels = [("io.kubernetes.container.name".to_owned(), "app".to_owned())];
    let container = |id: &str, sandbox: &str, state| api::Container {
        id: id.into(),
        pod_sandbox_id: sandbox.into(),
        metadata: Some(metadata.clone()),
        state,
        created_at: 7,
        labels: labels.clone().into(),
        ..Default::default()
    };
    fake.answers().containers = vec![container("c1", "s1", 2), container("c2", "s2", 9)];
    fake.answers().sandboxes = vec![api::PodSandbox {
        id: "s1".into(),
        metadata: Some(api::PodSandboxMetadata {
            name: "web".into(),
            uid: "u1".into(),
            namespace: "prod".into(),
            attempt: 1,
        }),
        state: 1,
        ..Default::default()
    }];
    fake.answers().status = Some(api::ContainerStatus {
        id: "c1".into(),
        metadata: Some(metadata.clone()),
        state: 2,
        exit_code: 42,
        finished_at: 9,
        ..Default::default()
    });

    let all = client.list_containers(None).await.unwrap();
    assert_eq!(all.len(), 2);
    assert_eq!(all[1].state, ContainerState::Unknown);
    let one = client.list_containers(Some(&"s1".into())).await.unwrap();
    assert_eq!(one, all[..1]);
    assert_eq!(one[0].name.as_str(), "app");
    assert_eq!((one[0].attempt, one[0].created_at), (Attempt(2), 7));
    assert_eq!(one[0].state, ContainerState::Exited);

    let sandboxes = client.list_sandboxes().await.unwrap();
    assert_eq!(sandboxes[0].pod.to_string(), "prod/web");
    assert_eq!(sandboxes[0].uid.as_str(), "u1");
    assert_eq!(sandboxes[0].state, SandboxState::NotReady);

    let status = client.container_status(&id()).await.unwrap();
    assert_eq!(status.exit_code, Some(ExitCode(42)));
    assert_eq!(status.name.as_str(), "cri-name");
    assert_eq!(status.log_path, None);
}

#[tokio::test]
async fn calls_carry_what_they_were_given() {
    let fake = Fake::start();
    let client = fake.client();
    assert_eq!(create(&client).await.unwrap().as_str(), "app-in-s1");
    let second = Duration::from_secs(1);
    for grace in [Duration::ZERO, Duration::from_millis(1), second] {
        client.stop_container(&id(), grace, second).await.unwrap();
    }
    let stops = ["StopContainer 0", "StopContainer 1", "StopContainer 1"];
    assert_eq!(fake.answers().calls[1..], stops);
}

#[tokio::test]
async fn configurations_come_from_the_verbose_info_if_there_is_any() {
    let fake = Fake::start();
    let client = fake.client();
    fake.answers().status = Some(api::ContainerStatus {
        metadata: Some(api::ContainerMetadata::default()),
        ..Default::default()
    });
    assert!(client.poststop_hooks(&id()).await.unwrap().is_none());
    let (_, config) = client.container_config(&id()).await.unwrap();
    assert!(config.is_none());
    assert!(client.sandbox_config(&"s1".into()).await.unwrap().is_none());

    let info = r#"{"config":{"hostname":"web","metadata":{"name":"web","attempt":1}}}"#;
    fake.answers().info = [("info".to_owned(), info.to_owned())].into();
    let config = client.sandbox_config(&"s1".into()).await.unwrap().unwrap();
    assert!(config.is_complete());
    assert_eq!(config.config.hostname, "web");
    assert!(client.poststop_hooks(&id()).await.unwrap().is_none());

    let info = r#"{"runtimeSpec":{"process":{"env":["A=b"]},"hooks":{"prestart":[{"path":"/x"}],
        "poststop":[{"path":"/y","args":["y","z"]},{"path":"/z"}]}}}"#;
    fake.answers().info = [("info".to_owned(), info.to_owned())].into();
    let hooks = client.poststop_hooks(&id()).await.unwrap().unwrap();
    assert_eq!(hooks, [vec!["y", "z"], vec![]]);
    let info = r#"{"runtimeSpec":{"hooks":{}}}"#;
    fake.answers().info = [("info".to_owned(), info.to_owned())].into();
    assert!(
        client
            .poststop_hooks(&id())
            .await
            .unwrap()
            .unwrap()
            .is_empty()
    );

    let info = format!(
        r#"{{"config": {{}}, "env": "{}"}}"#,
        "x".repeat(MAX_VERBOSE)
    );
    fake.answers().info = [("info".to_owned(), info)].into();
    let error = client.container_config(&id()).await.unwrap_err();
    assert!(error.to_string().contains("too large"), "{error}");
    let error = client.poststop_hooks(&id()).await.unwrap_err();
    assert!(error.to_string().contains("too large"), "{error}");
    let error = client.sandbox_config(&"s1".into()).await.unwrap_err();
    assert!(error.to_string().contains("too large"), "{error}");
    client.container_status(&id()).await.unwrap();

    fake.answers().info = [("info".to_owned(), "not JSON".to_owned())].into();
    let error = client.container_config(&id()).await.unwrap_err();
    assert!(matches!(error, CriError::Malformed { .. }), "{error}");
    let error = client.poststop_hooks(&id()).await.unwrap_err();
    assert!(matches!(error, CriError::Malformed { .. }), "{error}");
}

#[tokio::test]
async fn an_image_has_the_identifier_that_its_name_has_now_or_none() {
    let fake = Fake::start();
    let client = fake.client();
    let image = || api::ImageSpec {
        image: "busybox:1".into(),
        ..api::ImageSpec::default()
    };
    assert_eq!(client.image_id(image()).await.unwrap(), None);
    let known = ("busybox:1".to_owned(), "sha256:a".to_owned());
    fake.answers().images.extend([known]);
    let id = client.image_id(image()).await.unwrap();
    assert_eq!(id.as_deref(), Some("sha256:a"));
}
