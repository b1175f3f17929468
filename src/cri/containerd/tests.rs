use prost_types::Any;
use tonic::Status;

use super::super::api::containerd::v1::types::Process;
use super::super::fake::Fake;
use super::*;

fn event(namespace: &str, topic: &str, what: &impl Message) -> Envelope {
    Envelope {
        namespace: namespace.into(),
        topic: topic.into(),
        event: Some(Any {
            type_url: "of no account".into(),
            value: what.encode_to_vec(),
        }),
        ..Default::default()
    }
}

fn exit(namespace: &str, id: &str, container: &str, code: u32) -> Envelope {
    let exit = WireExit {
        container_id: container.into(),
        id: id.into(),
        exit_status: code,
        ..Default::default()
    };
    event(namespace, EXITS, &exit)
}

fn oom(namespace: &str, container: &str) -> Envelope {
    let container_id = container.into();
    event(namespace, OOMS, &WireOom { container_id })
}

/// Waits until the fake has a subscriber, which is a little later than the feed says so.
async fn subscribed(fake: &Fake) {
    while fake.subscribers() == 0 {
        tokio::task::yield_now().await;
    }
}

async fn next(exits: &mut (impl Stream<Item = ExitFeed> + Unpin)) -> ExitFeed {
    tokio::time::timeout(Duration::from_secs(10), exits.next())
        .await
        .expect("nothing in 10 s")
        .expect("the feed never ends")
}

#[tokio::test]
async fn exits_of_first_processes_in_the_cri_namespace_are_told() {
    let fake = Fake::start();
    let containerd = fake.client().containerd().await.unwrap();
    let mut exits = containerd.exits();
    assert!(matches!(next(&mut exits).await, ExitFeed::Connected));
    subscribed(&fake).await;

    fake.send(exit("moby", "c1", "c1", 1));
    fake.send(exit(NAMESPACE, "exec1", "c1", 3));
    fake.send(exit(NAMESPACE, "c1", "c1", 42));
    let exit = TaskExit {
        container: "c1".into(),
        code: ExitCode(42),
    };
    assert!(matches!(next(&mut exits).await, ExitFeed::Exit(told) if told == exit));
    let filter = "Subscribe namespace==\"k8s.io\",topic==\"/tasks/exit\" or \
                  namespace==\"k8s.io\",topic==\"/tasks/oom\"";
    assert!(fake.answers().calls.iter().any(|call| call == filter));
}

#[tokio::test]
async fn containers_in_the_cri_namespace_that_were_out_of_memory_are_told_of() {
    let fake = Fake::start();
    let mut exits = fake.client().containerd().await.unwrap().exits();
    assert!(matches!(next(&mut exits).await, ExitFeed::Connected));
    subscribed(&fake).await;

    fake.send(oom("moby", "c1"));
    let odd = WireExit {
        container_id: "c1".into(),
        id: "c1".into(),
        ..Default::default()
    };
    fake.send(event(NAMESPACE, "/tasks/paused", &odd));
    fake.send(oom(NAMESPACE, "c2"));
    assert!(matches!(next(&mut exits).await, ExitFeed::OomKilled(id) if id.as_str() == "c2"));
}

#[tokio::test]
async fn the_feed_comes_back_with_the_runtime_and_says_so() {
    let mut fake = Fake::start();
    let mut exits = fake.client().containerd().await.unwrap().exits();
    assert!(matches!(next(&mut exits).await, ExitFeed::Connected));

    fake.stop();
    let lost = next(&mut exits).await;
    assert!(
        matches!(lost, ExitFeed::Lost(CriError::Away { .. })),
        "{lost:?}"
    );

    fake.serve();
    while !matches!(next(&mut exits).await, ExitFeed::Connected) {}
    subscribed(&fake).await;
    fake.send(exit(NAMESPACE, "c2", "c2", 0));
    assert!(
        matches!(next(&mut exits).await, ExitFeed::Exit(exit) if exit.container.as_str() == "c2")
    );
}

#[tokio::test]
async fn a_refused_subscription_is_not_taken_for_a_connection() {
    let fake = Fake::start();
    let containerd = fake.client().containerd().await.unwrap();
    fake.answers().failures = vec![Status::unimplemented("unknown service")];
    let mut exits = containerd.exits();
    assert!(matches!(next(&mut exits).await, ExitFeed::Lost(_)));
    assert!(matches!(next(&mut exits).await, ExitFeed::Connected));
}

#[tokio::test]
async fn a_feed_that_is_dropped_unsubscribes() {
    let fake = Fake::start();
    let mut exits = fake.client().containerd().await.unwrap().exits();
    assert!(matches!(next(&mut exits).await, ExitFeed::Connected));
    drop(exits);
    let gone = async {
        while fake.subscribers() > 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), gone)
        .await
        .expect("the subscription ends");
}

#[tokio::test]
async fn a_task_that_has_stopped_tells_its_code() {
    let fake = Fake::start();
    let containerd = fake.client().containerd().await.unwrap();
    let id = ContainerId::from("c1");
    let process = |status: TaskStatus| {
        Some(Process {
            status: status.into(),
            exit_status: 7,
            ..Default::default()
        })
    };
    fake.answers().process = process(TaskStatus::Running);
    assert_eq!(containerd.task_exit_code(&id).await.unwrap(), None);
    fake.answers().process = process(TaskStatus::Stopped);
    let code = containerd.task_exit_code(&id).await.unwrap();
    assert_eq!(code, Some(ExitCode(7)));
    fake.answers().failures = vec![Status::not_found("task c1 not found")];
    assert_eq!(containerd.task_exit_code(&id).await.unwrap(), None);
    let asked = fake.answers().calls.last().cloned();
    assert_eq!(asked.as_deref(), Some("Get in \"k8s.io\""));

    fake.answers().hangs = true;
    let error = containerd.task_exit_code(&id).await.unwrap_err();
    assert!(matches!(error, CriError::Deadline { .. }), "{error}");
}

#[tokio::test]
async fn another_runtime_says_that_it_is_not_containerd() {
    let fake = Fake::start();
    fake.answers().runtime_name = "cri-o".into();
    let error = fake.client().containerd().await.unwrap_err();
    assert!(matches!(error, CriError::NotContainerd { runtime } if runtime == "cri-o"));
}
