//! What other pods and their mirrors can do to a pod.

use serde_json::json;

use super::*;
use crate::driver::stranger_tests::{RULE, hold_request, tools};

const CODE: Option<ExitCode> = Some(ExitCode(42));

/// The pod default/NAME with UID u1, in a sandbox of its own with one container that runs, called as the sandbox.
async fn adopt(registry: &Registry, name: &str) -> Arc<Driver> {
    let annotations = [("restart-rules.reprise.dev".to_owned(), RULE.to_owned())];
    let driver = registry.adopt(&Sighting {
        sandbox: &name.into(),
        uid: "u1",
        namespace: "default",
        name,
        handler: "",
        annotations: annotations.iter().map(|(key, value)| (key, value)),
    });
    let driver = driver.unwrap();
    driver.until_read().await;
    registry.created(&driver, name.into(), Instance::running("a"));
    driver
}

fn spec(name: &str, uid: &str, deleted: bool, mirror: bool) -> Arc<PodSpec> {
    let annotations =
        json!({"kubernetes.io/config.hash": "u1", "kubernetes.io/config.mirror": "u1"});
    let node = json!({"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "x"});
    let pod = json!({
        "metadata": {
            "name": name, "namespace": "default", "uid": uid,
            "annotations": if mirror { annotations } else { json!({}) },
            "ownerReferences": if mirror { json!([node]) } else { json!([]) },
            "deletionTimestamp": deleted.then_some("2026-01-01T00:00:00Z"),
        },
        "spec": {"containers": [{"name": "a"}]},
    });
    let pod = serde_json::from_value(pod).unwrap();
    Arc::new(PodSpec::from_pod(&pod, "node-1").unwrap())
}

fn registry(dir: &tempfile::TempDir) -> Registry {
    Registry::new(tools(dir.path()), Pods::default(), HashMap::new())
}

#[tokio::test]
async fn nothing_that_becomes_of_a_stranger_with_its_uid_reaches_a_pod() {
    let dir = tempfile::tempdir().unwrap();
    let registry = registry(&dir);
    let victim = adopt(&registry, "victim").await;
    let stranger = |deleted| spec("stranger", "u9", deleted, true);
    assert_eq!(stranger(false).uid, victim.pod().uid);
    registry.pod_changed(PodChange::Applied(stranger(false)));
    registry.pod_changed(PodChange::Deleted(stranger(true)));
    registry.ended(&"victim".into(), CODE);
    assert!(matches!(
        registry.decide_hold(&hold_request("victim")),
        HoldDecision::Wait(_)
    ));
    assert!(victim.is_busy());
}

#[tokio::test]
async fn its_own_deletion_reaches_a_pod() {
    let dir = tempfile::tempdir().unwrap();
    let registry = registry(&dir);
    let pod = adopt(&registry, "pod").await;
    registry.pod_changed(PodChange::Applied(spec("pod", "u1", true, false)));
    registry.ended(&"pod".into(), CODE);
    assert!(matches!(
        registry.decide_hold(&hold_request("pod")),
        HoldDecision::Go
    ));
    assert!(!pod.is_busy());
}

#[tokio::test]
async fn a_static_pod_restarts_while_its_mirror_is_being_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let registry = registry(&dir);
    let pod = adopt(&registry, "web-node-1").await;
    registry.pod_changed(PodChange::Applied(spec("web-node-1", "m1", true, true)));
    registry.ended(&"web-node-1".into(), CODE);
    assert!(matches!(
        registry.decide_hold(&hold_request("web-node-1")),
        HoldDecision::Wait(_)
    ));
    assert!(pod.is_busy());
}
