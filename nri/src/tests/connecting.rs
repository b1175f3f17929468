//! From connecting and registering to losing the connection and making it again.

use std::future::pending;
use std::os::fd::AsRawFd;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::sync::oneshot;

use crate::api::{Container, PodSandbox};
use crate::testing::{
    Connection, Recorder, Registration, Running, Runtime, connected, containerd, soon, stop,
};
use crate::{EventMask, Launched, NriError, Stub};

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
    let configured = connection.configure(request).await.unwrap();
    assert_eq!(configured.events, 1 << 3 | 1 << 9);
    let policy = configured.failure_policy;
    assert!(policy.keep_connected && !policy.fail_request);
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
