//! What a pod keeps of its containers.

use serde_json::json;

use super::*;
use crate::ids::PodKey;
use crate::policy::{Start, Unread};
use crate::restart::back_off::BackOff;

impl Pod {
    /// Whether its manifest has been found.
    pub(crate) fn has_manifest(&self) -> bool {
        self.manifest.is_some()
    }

    /// Whether nothing is kept of any container.
    pub(crate) fn keeps_nothing(&self) -> bool {
        self.instances.iter().next().is_none() && self.holds.is_empty() && self.decided.is_empty()
    }
}

fn pod(start: Start) -> Pod {
    let shared = Shared {
        gate: Arc::default(),
        start,
        back_off: BackOff::try_new(Duration::ZERO, Duration::ZERO, Duration::ZERO).unwrap(),
    };
    let identity = PodIdentity {
        sandbox: "s".into(),
        uid: "u".into(),
        key: PodKey {
            namespace: "n".into(),
            name: "p".into(),
        },
    };
    shared.gate.set(true);
    let mut pod = Pod::new(identity, Arc::new(shared), true, None, Past::default());
    pod.written(Written::default(), &moment());
    pod
}

fn moment() -> Moment {
    Moment {
        at: Instant::now(),
        up_ms: 3_600_000,
        unix_ms: 1_700_000_000_000,
    }
}

/// With an init container `i` and a regular one `a`, and a rule that restarts one container at 42.
fn with_rules(start: Start) -> Pod {
    with_policy(start, "Never")
}

fn with_policy(start: Start, restart_policy: &str) -> Pod {
    let (mut pod, now) = (pod(start), moment());
    let rule = "[{action: Restart, exitCodes: {operator: In, values: [42]}}]";
    let unread = Unread::of([("restart-rules.reprise.dev", rule)]);
    pod.written(Written::read(&unread), &now);
    let spec = json!({
        "metadata": {"name": "p", "namespace": "n", "uid": "u"},
        "spec": {
            "restartPolicy": restart_policy,
            "initContainers": [{"name": "i"}],
            "containers": [{"name": "a"}],
        },
    });
    let spec = PodSpec::from_pod(&serde_json::from_value(spec).unwrap(), "node");
    pod.spec_changed(Arc::new(spec.unwrap()), &now);
    pod
}

#[test]
fn a_container_that_the_kubelet_restarts_by_itself_is_left_to_it() {
    for (restart_policy, restarts) in [("Always", false), ("Never", true)] {
        let (mut pod, now) = (with_policy(Start::Auto, restart_policy), moment());
        let a = ContainerId::from("a-0");
        pod.created(a.clone(), Instance::running("a"), &now);
        assert!(pod.decide_hold(&a, Duration::ZERO, &now));
        pod.ended(&a, Some(ExitCode(42)), &now);
        assert_eq!(pod.machine().is_some(), restarts, "{restart_policy}");
        assert_eq!(pod.is_held(&a), restarts, "{restart_policy}");
    }
}

#[test]
fn a_replayed_init_container_that_asks_again_is_heard_also_if_its_hook_is_faster_than_its_code() {
    let (mut pod, now) = (with_rules(Start::Auto), moment());
    let (old, new) = (ContainerId::from("i-0"), ContainerId::from("i-1"));
    pod.created(old.clone(), Instance::running("i"), &now);
    assert!(pod.decide_hold(&old, Duration::ZERO, &now));
    pod.ended(&old, Some(ExitCode(42)), &now);
    pod.feed(Event::Called, &now);
    pod.feed(Event::Announced, &now);
    pod.feed(Event::Recovered(Ok(())), &now);
    let restart = pod.plan().unwrap().id.clone();
    assert!(pod.wants(Task::Replay(&restart)));
    pod.attempt_made(&restart, &"i".into(), &new, Duration::ZERO, &now);
    pod.created(new.clone(), Instance::running("i"), &now);
    pod.started(&new, &now);

    assert!(pod.decide_hold(&new, Duration::ZERO, &now));
    pod.ended(&new, Some(ExitCode(42)), &now);
    assert_eq!(pod.plan().unwrap().trigger.container, new);
}

#[test]
fn a_pod_that_the_kubelet_is_ending_is_let_go_and_nothing_of_it_is_restarted() {
    let (mut pod, now) = (with_rules(Start::Auto), moment());
    let (a, i) = (ContainerId::from("a-0"), ContainerId::from("i-0"));
    pod.created(a.clone(), Instance::running("a"), &now);
    assert!(pod.decide_hold(&a, Duration::ZERO, &now));
    pod.ended(&a, Some(ExitCode(42)), &now);
    pod.feed(Event::Called, &now);
    pod.is_ending(&now);
    assert!(!pod.is_held(&a));
    pod.created(i.clone(), Instance::running("i"), &now);
    assert!(!pod.decide_hold(&i, Duration::ZERO, &now));
    let commands = pod.commands();
    let said = commands
        .iter()
        .filter(|it| matches!(it, Command::Say(Saying::Ending)));
    assert_eq!(said.count(), 1);
}

#[test]
fn what_is_gone_is_remembered_for_as_long_as_a_list_may_still_have_it() {
    let (mut pod, began) = (pod(Start::Kubelet), Instant::now());
    for number in 0..2_000 {
        let now = Moment {
            at: began + Duration::from_secs(number),
            up_ms: 1000 * number,
            unix_ms: 0,
        };
        pod.removed(&number.to_string().as_str().into(), &now);
    }
    assert_eq!(pod.removed.len(), 301);
}
