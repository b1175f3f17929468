//! What a pod's author, or whoever may write manifests, can do to a driver.

use std::fs;
use std::path::Path;
use std::time::Duration;

use super::*;
use crate::back_off::BackOff;
use crate::ids::PodKey;
use crate::plan::Starter;
use crate::policy::Start;

const RULES: &str = "restart-rules.reprise.dev";
const OPTIONS: (&str, &str) = ("restart-options.reprise.dev", "start: Replay");
/// Asks for a restart at 42.
pub(crate) const RULE: &str =
    "[{action: RestartAllContainers, exitCodes: {operator: In, values: [42]}}]";

/// On a node with nothing but a plugin on it, all of whose files are in `dir`, and no back-off.
pub(crate) fn tools(dir: &Path) -> Arc<Tools> {
    let endpoint = format!("unix://{}", dir.join("cri.sock").display());
    let cri = cri::Client::connect(&endpoint).unwrap();
    Arc::new(Tools {
        static_pods: StaticPods::new(dir, "node-1"),
        shared: shared(Start::Auto),
        ..testing::tools(cri, dir)
    })
}

fn shared(start: Start) -> Arc<Shared> {
    Arc::new(Shared {
        gate: Arc::default(),
        start,
        tells_all: true,
        removals_show: false,
        replay_devices: Vec::new(),
        back_off: BackOff::try_new(Duration::ZERO, Duration::ZERO, Duration::ZERO).unwrap(),
    })
}

pub(crate) fn hold_request(container: &str) -> HoldRequest {
    HoldRequest {
        container: container.into(),
        waited: Duration::ZERO,
        exit: None,
    }
}

/// The driver of the pod default/web-node-1, which wants to be replayed, and of which the container c1 runs.
fn driver(tools: &Arc<Tools>, rules: &str, is_static: bool) -> Arc<Driver> {
    spawn(tools, &[OPTIONS, (RULES, rules)], is_static)
}

fn spawn(tools: &Arc<Tools>, annotations: &[(&str, &str)], is_static: bool) -> Arc<Driver> {
    let pod = PodIdentity {
        sandbox: "s1".into(),
        uid: "u1".into(),
        key: PodKey {
            namespace: "default".to_owned(),
            name: "web-node-1".to_owned(),
        },
    };
    let charge = Charge {
        annotations: Unread::of(annotations.iter().copied()),
        is_static,
        holdable: true,
        native: None,
        spec: None,
        past: Past::default(),
    };
    let driver = Driver::spawn(Arc::clone(tools), pod, charge);
    driver.created("c1".into(), Instance::running("a"));
    driver
}

async fn until(driver: &Driver, is_so: impl Fn(&Pod) -> bool) {
    let so = async {
        while !is_so(&driver.lock().pod) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), so)
        .await
        .expect("the driver comes to that");
}

#[tokio::test]
async fn exits_are_held_until_the_annotations_have_been_read() {
    for (rules, restarts) in [(RULE, true), ("[]", false), ("what?", false)] {
        let dir = tempfile::tempdir().unwrap();
        let tools = tools(dir.path());
        let turn = tools.readers.turn().await;
        let long = format!("{rules}{}", " ".repeat(Readers::USUAL));
        let driver = driver(&tools, &long, false);
        assert!(driver.is_to_have_hook(&"a".into()), "{rules}");
        driver.ended(&"c1".into(), Some(ExitCode(42)));
        let HoldDecision::Wait(released) = driver.decide_hold(&hold_request("c1")) else {
            panic!("{rules}: the exit is released before anybody knows what it means");
        };
        drop(turn);
        driver.until_read().await;
        assert_eq!(driver.is_busy(), restarts, "{rules}");
        assert_eq!(driver.is_to_have_hook(&"b".into()), restarts, "{rules}");
        if !restarts {
            assert!(released.await.is_err(), "it is dropped");
        }
    }
}

#[tokio::test]
async fn options_without_rules_ask_for_no_hook() {
    let dir = tempfile::tempdir().unwrap();
    let tools = tools(dir.path());
    let _turn = tools.readers.turn().await;
    let long = format!("start: Replay{}", " ".repeat(Readers::USUAL));
    let driver = spawn(&tools, &[(OPTIONS.0, &long)], false);
    assert!(!driver.is_to_have_hook(&"a".into()));
    assert!(matches!(
        driver.decide_hold(&hold_request("c1")),
        HoldDecision::Go
    ));
}

#[tokio::test]
async fn annotations_of_usual_length_wait_for_no_others() {
    let dir = tempfile::tempdir().unwrap();
    let tools = tools(dir.path());
    let _turn = tools.readers.turn().await;
    let driver = driver(&tools, RULE, false);
    driver.until_read().await;
    assert!(driver.is_to_have_hook(&"a".into()));
}

#[tokio::test]
async fn a_static_pod_restarts_again_when_its_manifest_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let (path, away) = (dir.path().join("web.yaml"), dir.path().join(".web.yaml"));
    let manifest =
        "{apiVersion: v1, kind: Pod, metadata: {name: web}, spec: {containers: [{name: a}]}}";
    fs::write(&path, manifest).unwrap();
    let tools = tools(dir.path());
    let driver = driver(&tools, RULE, true);
    driver.until_read().await;
    until(&driver, Pod::has_manifest).await;

    fs::rename(&path, &away).unwrap();
    let HoldDecision::Wait(released) = driver.decide_hold(&hold_request("c1")) else {
        panic!("nobody knows yet that the pod is over");
    };
    driver.ended(&"c1".into(), Some(ExitCode(42)));
    assert!(released.await.is_err(), "it is dropped");
    assert!(!driver.is_busy());

    fs::rename(&away, &path).unwrap();
    driver.created("c2".into(), Instance::running("a"));
    driver.ended(&"c2".into(), Some(ExitCode(42)));
    assert!(matches!(
        driver.decide_hold(&hold_request("c2")),
        HoldDecision::Wait(_)
    ));
    until(&driver, |pod| pod.machine().is_some()).await;
}

#[tokio::test]
async fn a_pod_is_not_replayed_where_the_node_leaves_the_start_to_the_kubelet() {
    let starter = async |start: Start| {
        let dir = tempfile::tempdir().unwrap();
        let mut tools = tools(dir.path());
        Arc::get_mut(&mut tools).unwrap().shared = shared(start);
        tools.shared.gate.set(true);
        let pod = serde_json::json!({
            "metadata": {"name": "web-node-1", "namespace": "default", "uid": "u1"},
            "spec": {"restartPolicy": "Always", "containers": [{"name": "a"}]},
        });
        let spec = PodSpec::from_pod(&serde_json::from_value(pod).unwrap(), "node-1");
        let driver = driver(&tools, RULE, false);
        driver.until_read().await;
        driver.spec_changed(Arc::new(spec.unwrap()));
        let waits = driver.decide_hold(&hold_request("c1"));
        driver.ended(&"c1".into(), Some(ExitCode(42)));
        assert!(matches!(waits, HoldDecision::Wait(_)));
        let state = driver.lock();
        state.pod.plan().unwrap().starter.clone()
    };
    assert_eq!(starter(Start::Auto).await, Starter::Plugin);
    assert_eq!(
        starter(Start::Kubelet).await,
        Starter::Kubelet("start: Kubelet".to_owned())
    );
}
