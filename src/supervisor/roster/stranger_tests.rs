//! What other pods and their mirrors can do to a pod.

use serde_json::json;

use super::*;
use crate::restart::driver::stranger_tests::{RULE, knock, tools};

const CODE: Option<ExitCode> = Some(ExitCode(42));

/// The pod default/NAME with UID u1, in a sandbox of its own with one container that runs, called as the sandbox.
async fn adopt(roster: &Roster, name: &str) -> Arc<Driver> {
    let annotations = [("restart-rules.reprise.dev".to_owned(), RULE.to_owned())];
    let driver = roster.adopt(&Sighting {
        sandbox: &name.into(),
        uid: "u1",
        namespace: "default",
        name,
        handler: "",
        annotations: annotations.iter().map(|(key, value)| (key, value)),
    });
    let driver = driver.unwrap();
    driver.until_read().await;
    roster.created(&driver, name.into(), Instance::running("a"));
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

fn roster(dir: &tempfile::TempDir) -> Roster {
    Roster::new(tools(dir.path()), Pods::default(), HashMap::new())
}

#[tokio::test]
async fn nothing_that_becomes_of_a_stranger_with_its_uid_reaches_a_pod() {
    let dir = tempfile::tempdir().unwrap();
    let roster = roster(&dir);
    let victim = adopt(&roster, "victim").await;
    let stranger = |deleted| spec("stranger", "u9", deleted, true);
    assert_eq!(stranger(false).uid, victim.pod().uid);
    roster.pod_changed(PodChange::Applied(stranger(false)));
    roster.pod_changed(PodChange::Deleted(stranger(true)));
    roster.ended(&"victim".into(), CODE);
    assert!(matches!(roster.knock(&knock("victim")), Answer::Wait(_)));
    assert!(victim.is_busy());
}

#[tokio::test]
async fn its_own_deletion_reaches_a_pod() {
    let dir = tempfile::tempdir().unwrap();
    let roster = roster(&dir);
    let pod = adopt(&roster, "pod").await;
    roster.pod_changed(PodChange::Applied(spec("pod", "u1", true, false)));
    roster.ended(&"pod".into(), CODE);
    assert!(matches!(roster.knock(&knock("pod")), Answer::Go));
    assert!(!pod.is_busy());
}

#[tokio::test]
async fn a_static_pod_restarts_while_its_mirror_is_being_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let roster = roster(&dir);
    let pod = adopt(&roster, "web-node-1").await;
    roster.pod_changed(PodChange::Applied(spec("web-node-1", "m1", true, true)));
    roster.ended(&"web-node-1".into(), CODE);
    assert!(matches!(
        roster.knock(&knock("web-node-1")),
        Answer::Wait(_)
    ));
    assert!(pod.is_busy());
}
