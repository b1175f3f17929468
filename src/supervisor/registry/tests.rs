//! What the runtime tells of its containers, and does not.

use tonic::Status;

use super::*;
use crate::cri::fake::{Fake, api};
use crate::driver::testing::tools;

const RULES: &str =
    r#"[{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]"#;
const HOOKED: &str =
    r#"{"runtimeSpec":{"hooks":{"poststop":[{"path":"/r","args":["reprise","hook","s","m"]}]}}}"#;

/// A runtime with one pod with rules, whose containers run.
fn with_containers(ids: &[&str]) -> Fake {
    let fake = Fake::start();
    let rules = ("restart-rules.reprise.dev".to_owned(), RULES.to_owned());
    let sandbox = api::PodSandbox {
        id: "s".into(),
        metadata: Some(api::PodSandboxMetadata {
            name: "p".into(),
            uid: "u".into(),
            namespace: "n".into(),
            attempt: 0,
        }),
        annotations: [rules].into(),
        ..Default::default()
    };
    fake.answers().sandboxes = vec![sandbox];
    list(&fake, ids);
    fake
}

fn list(fake: &Fake, ids: &[&str]) {
    let containers = ids.iter().map(|id| api::Container {
        id: (*id).to_owned(),
        pod_sandbox_id: "s".into(),
        metadata: Some(api::ContainerMetadata {
            name: (*id).to_owned(),
            attempt: 0,
        }),
        state: api::ContainerState::ContainerRunning.into(),
        ..Default::default()
    });
    fake.answers().containers = containers.collect();
}

fn tells(fake: &Fake, id: &str, told: Result<&str, Status>) {
    let told = told.map(str::to_owned);
    fake.answers().told.insert(id.to_owned(), told);
}

fn registry(fake: &Fake, dir: &tempfile::TempDir) -> Registry {
    let tools = tools(fake.client(), dir.path());
    let past = [("gone".into(), Past::default())];
    Registry::new(Arc::new(tools), Pods::default(), past.into())
}

fn is_hooked(registry: &Registry, id: &str) -> Option<bool> {
    let id = id.into();
    let driver = registry.driver_of(&id).unwrap();
    driver.instance(&id)?.hooked
}

#[tokio::test]
async fn a_container_that_the_runtime_does_not_tell_of_is_taken_for_one_whose_exit_is_not_held() {
    let fake = with_containers(&["a", "b", "c"]);
    let too_large = "trying to send message larger than max (17825792 vs. 16777216)";
    tells(&fake, "a", Err(Status::resource_exhausted(too_large)));
    tells(&fake, "b", Ok(HOOKED));
    tells(&fake, "c", Ok("not JSON"));
    let dir = tempfile::tempdir().unwrap();
    let registry = registry(&fake, &dir);
    registry.relist(Vec::new()).await.unwrap();
    let known = ["a", "b", "c"].map(|id| is_hooked(&registry, id));
    assert_eq!(known, [Some(false), Some(true), Some(false)]);
    // Nobody asks, or speaks of it, again.
    let calls = || {
        fake.answers()
            .calls
            .iter()
            .filter(|it| *it == "ContainerStatus")
            .count()
    };
    let before = calls();
    registry.relist(Vec::new()).await.unwrap();
    assert_eq!(calls(), before);
}

#[tokio::test]
async fn a_runtime_that_stalls_over_one_container_is_not_away() {
    let fake = with_containers(&["a", "b"]);
    tells(
        &fake,
        "a",
        Err(Status::deadline_exceeded("context deadline exceeded")),
    );
    tells(&fake, "b", Ok(HOOKED));
    let dir = tempfile::tempdir().unwrap();
    let registry = registry(&fake, &dir);
    registry.relist(Vec::new()).await.unwrap();
    assert_eq!(is_hooked(&registry, "b"), Some(true));
}

#[tokio::test]
async fn a_runtime_that_is_away_is_asked_again_and_nothing_is_changed_by_it() {
    let fake = with_containers(&["a"]);
    tells(&fake, "a", Err(Status::unavailable("shutting down")));
    let dir = tempfile::tempdir().unwrap();
    let registry = registry(&fake, &dir);
    let error = registry.relist(Vec::new()).await.unwrap_err();
    assert!(matches!(error, cri::CriError::Away { .. }), "{error}");
    assert!(registry.driver_of(&"a".into()).is_none());
    assert!(!registry.read(|entries| entries.taken_over));
    tells(&fake, "a", Ok(HOOKED));
    registry.relist(Vec::new()).await.unwrap();
    assert_eq!(is_hooked(&registry, "a"), Some(true));
}

#[tokio::test]
async fn nothing_is_kept_of_containers_that_went_while_nobody_told_of_it() {
    let fake = with_containers(&["a", "b"]);
    tells(&fake, "a", Ok("not JSON"));
    tells(&fake, "b", Ok(HOOKED));
    let dir = tempfile::tempdir().unwrap();
    let registry = registry(&fake, &dir);
    registry.relist(Vec::new()).await.unwrap();
    let sizes = || {
        registry.read(|entries| {
            let Entries {
                of_container,
                untold,
                pasts,
                ..
            } = entries;
            [of_container.len(), untold.len(), pasts.len()]
        })
    };
    assert_eq!(sizes(), [2, 1, 0]);
    list(&fake, &["b"]);
    registry.relist(Vec::new()).await.unwrap();
    assert_eq!(sizes(), [1, 0, 0]);
}
