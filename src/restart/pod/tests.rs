//! What a pod keeps of its containers.

use serde_json::json;

use super::*;
use crate::back_off::BackOff;
use crate::ids::PodKey;
use crate::kube::KubeletFeatures;
use crate::node::Maker;
use crate::plan::Trigger;
use crate::policy::{Action, Start, Unread};
use crate::restart::machine::{Effect, Outcome};

impl Pod {
    /// Whether its manifest has been found.
    pub(crate) fn has_manifest(&self) -> bool {
        self.manifest.is_some()
    }

    /// Whether nothing is kept of any container.
    pub(crate) fn keeps_nothing(&self) -> bool {
        self.instances.iter().next().is_none()
            && self.holds.is_empty()
            && self.oom_killed.is_empty()
            && self.unsettled.is_empty()
            && self.decided.is_empty()
    }
}

fn pod(start: Start) -> Pod {
    let shared = Shared {
        gate: Arc::default(),
        start,
        tells_all: true,
        removals_show: false,
        replay_devices: Vec::new(),
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
    let mut pod = Pod::new(identity, Arc::new(shared), None, Past::default());
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

/// A pod with two containers, `a` with a policy and a rule of its own, on a kubelet that knows neither.
fn with_own_policy(pod_policy: &str, own: &str) -> Pod {
    let (mut pod, now) = (pod(Start::Kubelet), moment());
    let rule =
        json!({"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}});
    let spec = json!({
        "metadata": {"name": "p", "namespace": "n", "uid": "u"},
        "spec": {
            "restartPolicy": pod_policy,
            "containers": [
                {"name": "a", "restartPolicy": own, "restartPolicyRules": [rule]},
                {"name": "b"},
            ],
        },
    });
    let spec = PodSpec::from_pod(&serde_json::from_value(spec).unwrap(), "node");
    pod.features_changed(KubeletFeatures::default());
    pod.spec_changed(Arc::new(spec.unwrap()), &now);
    pod
}

#[test]
fn a_container_that_its_own_policy_leaves_ended_is_not_created_again() {
    for (own, code, stays) in [
        ("Never", 0, true),
        ("Never", 1, true),
        ("OnFailure", 0, true),
        ("OnFailure", 1, false),
        ("Always", 0, false),
    ] {
        let (mut pod, now) = (with_own_policy("Always", own), moment());
        let id = ContainerId::from("a-0");
        assert_eq!(pod.admit_create(&"a".into(), &now), Ok(()));
        pod.created(id.clone(), Instance::running("a"));
        pod.ended(&id, Some(ExitCode(code)), &now);
        pod.hook_is_missing(&id, &now);
        let refused = pod.admit_create(&"a".into(), &now).is_err();
        assert_eq!(refused, stays, "{own}, exit {code}");
        assert_eq!(pod.admit_create(&"b".into(), &now), Ok(()));
    }
}

#[test]
fn a_container_that_its_own_policy_starts_again_is_restarted_where_the_pods_does_not() {
    for (own, code, restarts) in [
        ("Never", 1, false),
        ("OnFailure", 0, false),
        ("OnFailure", 1, true),
        ("Always", 0, true),
    ] {
        let (mut pod, now) = (with_own_policy("Never", own), moment());
        let id = ContainerId::from("a-0");
        pod.created(id.clone(), Instance::running("a"));
        assert!(pod.decide_hold(&id, Duration::ZERO, &now));
        pod.ended(&id, Some(ExitCode(code)), &now);
        let action = pod.plan().map(|plan| plan.action);
        let wanted = restarts.then_some(Action::Restart);
        assert_eq!(action, wanted, "{own}, exit {code}");
    }
}

#[test]
fn a_failure_that_no_rule_matches_is_told_once_and_nothing_else_is() {
    let unmatched = |name: &str, code, deleted| {
        let (mut pod, now) = (with_own_policy("Always", "Never"), moment());
        let id = ContainerId::from("a-0");
        pod.created(id.clone(), Instance::running(name));
        if deleted {
            pod.deleted(&now);
        }
        pod.ended(&id, Some(ExitCode(code)), &now);
        pod.hook_is_missing(&id, &now);
        pod.hook_is_missing(&id, &now);
        let told = pod.commands().into_iter();
        let told = told.filter(|it| matches!(it, Command::Say(Saying::Unmatched(..))));
        told.count()
    };
    assert_eq!(unmatched("a", 1, false), 1);
    assert_eq!(unmatched("a", 42, false), 0, "a rule matches");
    assert_eq!(unmatched("a", 0, false), 0, "it has not failed");
    assert_eq!(unmatched("b", 1, false), 0, "it has no rules");
    assert_eq!(unmatched("a", 1, true), 0, "the pod is being deleted");
}

#[test]
fn memory_that_is_requested_is_compared_with_what_each_attempt_was_made_with() {
    let spec = |memory: &str, generation: i64| {
        let resources = json!({"requests": {"memory": memory}});
        let pod = json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u", "generation": generation},
            "spec": {"containers": [{"name": "a", "resources": resources}]},
        });
        let spec = PodSpec::from_pod(&serde_json::from_value(pod).unwrap(), "node");
        Arc::new(spec.unwrap())
    };
    let (mut pod, now) = (pod(Start::Auto), moment());
    let made = |number, maker| Instance {
        maker,
        attempt: crate::ids::Attempt(number),
        ..Instance::running("a")
    };
    let changed = |pod: &Pod| {
        let members = pod.seen().guessed(&"a".into());
        let spec = pod.spec.as_deref();
        pod.requests.changed(&[&members[0]], spec).is_some()
    };
    pod.spec_changed(spec("32Mi", 1), &now);
    pod.created("a-0".into(), made(0, Maker::Kubelet));
    assert!(!changed(&pod));
    pod.spec_changed(spec("40Mi", 2), &now);
    assert!(changed(&pod));
    // It is made of what the one before it was made of.
    pod.created("a-1".into(), made(1, Maker::Replay));
    assert!(changed(&pod));
    pod.created("a-2".into(), made(2, Maker::Kubelet));
    assert!(!changed(&pod));
    // Of one that is older than the plugin nobody knows.
    let older = made(3, Maker::Kubelet);
    pod.relisted(vec![("a-3".into(), older)], now.at, None, false, &now);
    assert!(changed(&pod));
    pod.spec_changed(spec("40Mi", 1), &now);
    assert!(!changed(&pod));
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
    pod.spec_changed(spec(restart_policy, &json!({})), &now);
    pod
}

fn spec(restart_policy: &str, annotations: &serde_json::Value) -> Arc<PodSpec> {
    let spec = json!({
        "metadata": {"name": "p", "namespace": "n", "uid": "u", "annotations": annotations},
        "spec": {
            "restartPolicy": restart_policy,
            "initContainers": [{"name": "i"}],
            "containers": [{"name": "a"}],
        },
    });
    let spec = PodSpec::from_pod(&serde_json::from_value(spec).unwrap(), "node");
    Arc::new(spec.unwrap())
}

/// With a rule that restarts one container at 42, and one that restarts all at 43.
fn with_three() -> (Pod, Moment) {
    with_three_of(Start::Kubelet)
}

fn with_three_of(start: Start) -> (Pod, Moment) {
    let (mut pod, now) = (pod(start), moment());
    let rules = "[{action: Restart, exitCodes: {operator: In, values: [42]}}, \
                  {action: RestartAllContainers, exitCodes: {operator: In, values: [43]}}]";
    let unread = Unread::of([("restart-rules.reprise.dev", rules)]);
    pod.written(Written::read(&unread), &now);
    for name in ["a", "b", "c"] {
        let id = ContainerId::from(format!("{name}-0").as_str());
        pod.created(id, Instance::running(name));
    }
    (pod, now)
}

fn exits(pod: &mut Pod, id: &str, code: i32, now: &Moment) {
    let id = ContainerId::from(id);
    assert!(pod.decide_hold(&id, Duration::ZERO, now));
    pod.ended(&id, Some(ExitCode(code)), now);
}

fn members(pod: &Pod) -> Vec<&str> {
    let members = &pod.plan().unwrap().members;
    members.iter().map(|it| it.name.as_str()).collect()
}

#[test]
fn containers_that_restart_alone_at_once_start_together_and_no_other_does() {
    let (mut pod, now) = with_three();
    exits(&mut pod, "a-0", 42, &now);
    assert_eq!(members(&pod), ["a"]);
    exits(&mut pod, "b-0", 42, &now);
    assert_eq!(members(&pod), ["a", "b"]);
    assert!(!pod.plan().unwrap().is_whole_pod());
    assert!(pod.is_held(&"a-0".into()) && pod.is_held(&"b-0".into()));
}

/// Until the kubelet has listed what runs again, the exit before that is not to be seen, whoever asks meanwhile.
#[test]
fn an_exit_that_is_held_behind_what_runs_again_stays_held_when_another_container_restarts_alone() {
    let (mut pod, now) = with_three_of(Start::Auto);
    let spec = json!({
        "metadata": {"name": "p", "namespace": "n", "uid": "u"},
        "spec": {
            "restartPolicy": "Never",
            "containers": [{"name": "a"}, {"name": "b"}, {"name": "c"}],
        },
    });
    let spec = PodSpec::from_pod(&serde_json::from_value(spec).unwrap(), "node");
    pod.spec_changed(Arc::new(spec.unwrap()), &now);
    let restart = |pod: &mut Pod, name: &str| {
        let id = pod.plan().unwrap().id.clone();
        pod.feed(Event::Announced, &now);
        pod.feed(Event::Recovered(Ok(())), &now);
        let made = ContainerId::from(format!("{name}-1").as_str());
        let attempt = Instance {
            maker: Maker::Replay,
            attempt: crate::ids::Attempt(1),
            state: InstanceState::Created,
            ..Instance::running(name)
        };
        pod.created(made.clone(), attempt.clone());
        pod.attempt_made(&id, &made, attempt, Duration::from_secs(1), &now);
        pod.started(&made, &now);
    };
    exits(&mut pod, "a-0", 42, &now);
    pod.feed(Event::Called, &now);
    restart(&mut pod, "a");
    assert!(pod.is_held(&"a-0".into()));
    exits(&mut pod, "b-0", 42, &now);
    assert_eq!(members(&pod), ["b"]);
    restart(&mut pod, "b");
    assert!(pod.is_held(&"a-0".into()) && pod.is_held(&"b-0".into()));
    // It is asked about once more.
    assert!(pod.decide_hold(&"a-0".into(), Duration::ZERO, &now));
    let later = Moment {
        at: now.at + Duration::from_secs(10),
        ..now
    };
    pod.feed(Event::Tick, &later);
    assert!(!pod.is_held(&"a-0".into()) && !pod.is_held(&"b-0".into()));
    let killed = pod.commands();
    let killed = killed
        .iter()
        .any(|it| matches!(it, Command::Do(order) if matches!(order.effect, Effect::Kill(_))));
    assert!(!killed, "what runs again was ended");
}

#[test]
fn a_container_that_is_to_restart_alone_in_the_middle_of_a_whole_restart_restarts_the_whole() {
    let (mut pod, now) = with_three();
    exits(&mut pod, "a-0", 43, &now);
    pod.feed(Event::Called, &now);
    pod.feed(Event::Announced, &now);
    pod.created(
        "a-1".into(),
        Instance {
            attempt: crate::ids::Attempt(1),
            ..Instance::running("a")
        },
    );
    pod.started(&"a-1".into(), &now);
    pod.ended(&"b-0".into(), Some(ExitCode(137)), &now);
    exits(&mut pod, "a-1", 42, &now);
    assert!(pod.plan().unwrap().is_whole_pod());
    assert_eq!(members(&pod), ["a", "b", "c"]);
}

#[test]
fn two_exits_of_a_static_pod_that_are_asked_about_at_once_are_one_restart() {
    let (mut pod, now) = with_three();
    pod.manifest = Some("p.yaml".into());
    for id in ["a-0", "b-0"] {
        exits(&mut pod, id, 43, &now);
    }
    assert!(pod.plan().is_none());
    let asked = pod.commands().into_iter().filter_map(|it| match it {
        Command::AskManifest(trigger, action, _) => Some((trigger, action)),
        _ => None,
    });
    let asked: Vec<(Trigger, Action)> = asked.collect();
    for (trigger, action) in &asked {
        pod.manifest_asked(trigger, *action, false, &now);
        assert_eq!(pod.plan().unwrap().trigger.container, "a-0".into());
    }
    assert_eq!((asked.len(), pod.restarts), (2, 1));
    assert!(pod.is_held(&"b-0".into()));
}

#[test]
fn a_request_restarts_the_pod_also_while_a_container_restarts_alone() {
    let (mut pod, now) = (with_rules(Start::Kubelet), moment());
    let a = ContainerId::from("a-0");
    pod.created(a.clone(), Instance::running("a"));
    assert!(pod.decide_hold(&a, Duration::ZERO, &now));
    pod.ended(&a, Some(ExitCode(42)), &now);
    assert!(!pod.plan().unwrap().is_whole_pod());
    let asked = json!({"restart-request.reprise.dev": "1"});
    pod.spec_changed(spec("Never", &asked), &now);
    let plan = pod.plan().unwrap().clone();
    assert!(plan.is_whole_pod() && plan.trigger.container == a);
    let request = plan.trigger.request.clone().unwrap();
    assert_eq!(request.as_str(), "1");
    // Whoever asked for the manifest meanwhile hears of it when that has begun.
    let action = Action::RestartAllContainers;
    pod.manifest_asked(&plan.trigger, action, false, &now);
    assert_eq!(pod.plan().unwrap().id, plan.id);
}

#[test]
fn a_pod_without_rules_has_its_restarts_done_as_it_wants_them() {
    for (text, start) in [
        ("start: Kubelet", Start::Kubelet),
        ("{start: Kubelet, completedContainers: Kept}", Start::Auto),
    ] {
        let mut pod = pod(Start::Auto);
        let unread = Unread::of([("restart-options.reprise.dev", text)]);
        pod.written(Written::read(&unread), &moment());
        assert_eq!(pod.start(), start, "{text}");
    }
}

/// Nothing is replayed whose resources are not what they were, whatever comes after it.
#[test]
fn a_container_that_was_resized_is_not_replayed_before_one_that_is_the_kubelets() {
    let (mut pod, now) = (pod(Start::Auto), moment());
    let rule = "[{action: RestartAllContainers, exitCodes: {operator: In, values: [42]}}]";
    let unread = Unread::of([("restart-rules.reprise.dev", rule)]);
    pod.written(Written::read(&unread), &now);
    let spec = |memory: &str| {
        let spec = json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {
                "restartPolicy": "Always",
                "initContainers": [{"name": "s", "restartPolicy": "Always", "resources": {"requests": {"memory": memory}}}],
                "containers": [{"name": "a", "livenessProbe": {"exec": {"command": ["true"]}}}],
            },
        });
        let spec = PodSpec::from_pod(&serde_json::from_value(spec).unwrap(), "node");
        Arc::new(spec.unwrap())
    };
    pod.features_changed(KubeletFeatures::default());
    pod.spec_changed(spec("1Mi"), &now);
    let [s, a] = ["s-0", "a-0"].map(ContainerId::from);
    pod.created(s, Instance::running("s"));
    pod.created(a.clone(), Instance::running("a"));
    pod.spec_changed(spec("2Mi"), &now);
    assert!(pod.decide_hold(&a, Duration::ZERO, &now));
    pod.ended(&a, Some(ExitCode(42)), &now);
    let starter = pod.plan().unwrap().starter.clone();
    assert!(
        matches!(starter, crate::plan::Starter::Kubelet(_)),
        "{starter:?}"
    );
}

/// While nobody kept it from that.
#[test]
fn what_the_kubelet_starts_again_that_had_ended_for_good_it_does_not_record() {
    let (mut pod, now) = (pod(Start::Kubelet), moment());
    let rule = "[{action: RestartAllContainers, exitCodes: {operator: In, values: [42]}}]";
    let unread = Unread::of([("restart-rules.reprise.dev", rule)]);
    pod.written(Written::read(&unread), &now);
    let spec = json!({
        "metadata": {"name": "p", "namespace": "n", "uid": "u"},
        "spec": {
            "restartPolicy": "Never",
            "initContainers": [{"name": "i"}],
            "containers": [{"name": "a"}, {"name": "b"}],
        },
    });
    let spec = PodSpec::from_pod(&serde_json::from_value(spec).unwrap(), "node");
    pod.spec_changed(Arc::new(spec.unwrap()), &now);
    let [a, done, again] = ["a-0", "b-0", "b-1"].map(ContainerId::from);
    pod.created(a.clone(), Instance::running("a"));
    pod.created(done.clone(), Instance::running("b"));
    pod.ended(&done, Some(ExitCode::SUCCESS), &now);
    pod.hook_is_missing(&done, &now);
    assert!(pod.decide_hold(&a, Duration::ZERO, &now));
    pod.ended(&a, Some(ExitCode(42)), &now);
    pod.feed(Event::Called, &now);
    pod.created(
        again.clone(),
        Instance {
            attempt: crate::ids::Attempt(1),
            ..Instance::running("b")
        },
    );
    pod.started(&again, &now);
    let plan = pod.plan().unwrap();
    let unrecorded = plan.members.iter().filter(|it| it.runs_unrecorded);
    let unrecorded: Vec<_> = unrecorded.map(|it| it.name.as_str()).collect();
    assert_eq!((plan.again, &*unrecorded), (1, &["b"][..]));
}

#[test]
fn a_container_that_the_kubelet_restarts_by_itself_is_left_to_it() {
    for (restart_policy, restarts) in [("Always", false), ("Never", true)] {
        let (mut pod, now) = (with_policy(Start::Auto, restart_policy), moment());
        let a = ContainerId::from("a-0");
        pod.created(a.clone(), Instance::running("a"));
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
    pod.created(old.clone(), Instance::running("i"));
    assert!(pod.decide_hold(&old, Duration::ZERO, &now));
    pod.ended(&old, Some(ExitCode(42)), &now);
    pod.feed(Event::Called, &now);
    pod.feed(Event::Announced, &now);
    pod.feed(Event::Recovered(Ok(())), &now);
    let restart = pod.plan().unwrap().id.clone();
    assert!(pod.wants(Task::Replay(&restart)));
    pod.created(new.clone(), Instance::running("i"));
    pod.attempt_made(&restart, &new, Instance::running("i"), Duration::ZERO, &now);
    pod.started(&new, &now);

    assert!(pod.decide_hold(&new, Duration::ZERO, &now));
    pod.ended(&new, Some(ExitCode(42)), &now);
    assert_eq!(pod.plan().unwrap().trigger.container, new);
}

#[test]
fn what_the_kubelet_makes_in_a_restart_is_asked_about_until_it_runs() {
    let (mut pod, now) = (with_rules(Start::Kubelet), moment());
    let [old, new, late] = ["a-0", "a-1", "a-2"].map(ContainerId::from);
    let made = || Instance {
        state: InstanceState::Created,
        ..Instance::running("a")
    };
    let asks = |pod: &mut Pod| {
        let mut commands = pod.commands().into_iter();
        commands.any(|it| matches!(it, Command::Watch(_)))
    };
    pod.created(old.clone(), made());
    assert!(!asks(&mut pod), "no restart is under way");
    pod.started(&old, &now);
    assert!(pod.decide_hold(&old, Duration::ZERO, &now));
    pod.ended(&old, Some(ExitCode(42)), &now);
    pod.created(new.clone(), made());
    assert!(asks(&mut pod) && pod.wants(Task::Watch(&new)));
    pod.started(&new, &now);
    assert!(!pod.wants(Task::Watch(&new)));
    pod.created(late.clone(), made());
    pod.ended(&late, Some(ExitCode(128)), &now);
    assert!(!pod.wants(Task::Watch(&late)), "its start has failed");
}

#[test]
fn a_pod_that_the_kubelet_is_ending_is_let_go_and_nothing_of_it_is_restarted() {
    let (mut pod, now) = (with_rules(Start::Auto), moment());
    let (a, i) = (ContainerId::from("a-0"), ContainerId::from("i-0"));
    pod.created(a.clone(), Instance::running("a"));
    assert!(pod.decide_hold(&a, Duration::ZERO, &now));
    pod.ended(&a, Some(ExitCode(42)), &now);
    pod.feed(Event::Called, &now);
    pod.is_ending(&now);
    assert!(!pod.is_held(&a));
    pod.created(i.clone(), Instance::running("i"));
    assert!(!pod.decide_hold(&i, Duration::ZERO, &now));
    let commands = pod.commands();
    let said = commands
        .iter()
        .filter(|it| matches!(it, Command::Say(Saying::Ending)));
    assert_eq!(said.count(), 1);
}

#[test]
fn a_restart_is_called_off_unless_something_was_killed_for_it_and_then_there_was_none() {
    let (mut pod, now) = (with_rules(Start::Kubelet), moment());
    let a = ContainerId::from("a-0");
    pod.created(a.clone(), Instance::running("a"));
    assert!(pod.decide_hold(&a, Duration::ZERO, &now));
    pod.ended(&a, Some(ExitCode(42)), &now);
    pod.feed(Event::Called, &now);
    let past = pod.past_before.clone();
    assert_ne!(pod.past, past);
    // What is said of another restart comes too late.
    let (other, restart) = (RestartId("other".into()), pod.plan().unwrap().id.clone());
    pod.feed_to(&other, Event::CalledOff, &now);
    assert!(pod.is_held(&a));
    pod.feed_to(&restart, Event::CalledOff, &now);
    assert!(!pod.is_held(&a));
    assert!(pod.finish(&other, Outcome::Completed, &now).is_none());
    pod.finish(&restart, Outcome::CalledOff, &now).unwrap();
    assert_eq!(pod.past, past);
}

#[test]
fn what_a_restart_has_removed_belongs_to_the_pod_also_where_its_spec_is_not_known() {
    let (mut pod, now) = (pod(Start::Kubelet), moment());
    let rule = "[{action: RestartAllContainers, exitCodes: {operator: In, values: [42]}}]";
    let unread = Unread::of([("restart-rules.reprise.dev", rule)]);
    pod.written(Written::read(&unread), &now);
    let [a, b] = ["a-0", "b-0"].map(ContainerId::from);
    pod.created(a.clone(), Instance::running("a"));
    pod.created(b.clone(), Instance::running("b"));
    assert!(pod.decide_hold(&a, Duration::ZERO, &now));
    pod.ended(&a, Some(ExitCode(42)), &now);
    pod.removed(&b, &now);
    let members = pod.guessed(&"a".into());
    let names: Vec<_> = members.iter().map(|it| it.name.as_str()).collect();
    assert_eq!(names, ["a", "b"]);
}

#[test]
fn an_attempt_of_which_the_runtime_never_told_is_removed_when_a_list_has_it() {
    let (mut pod, now) = (with_rules(Start::Kubelet), moment());
    let a = ContainerId::from("a-0");
    pod.created(a.clone(), Instance::running("a"));
    assert!(pod.decide_hold(&a, Duration::ZERO, &now));
    pod.ended(&a, Some(ExitCode(42)), &now);
    pod.feed(Event::Called, &now);
    pod.commands();
    let lost = Instance {
        maker: Maker::Replay,
        state: InstanceState::Created,
        attempt: crate::ids::Attempt(1),
        ..Instance::running("a")
    };
    let old = Instance::running("a");
    let found = vec![(a, old), ("a-1".into(), lost)];
    pod.relisted(found, now.at, None, false, &now);
    let commands = pod.commands();
    let removes = |it: &Command| matches!(it, Command::Remove(id) if *id == "a-1".into());
    assert!(commands.iter().any(removes), "{commands:?}");
}

#[test]
fn what_a_list_shows_as_exited_is_not_held_any_more() {
    let (mut pod, now) = (with_own_policy("Never", "Always"), moment());
    let a = ContainerId::from("a-0");
    pod.created(a.clone(), Instance::running("a"));
    assert!(pod.decide_hold(&a, Duration::ZERO, &now));
    pod.ended(&a, Some(ExitCode(1)), &now);
    assert!(pod.is_held(&a) && pod.plan().is_some());
    let listed = |state| {
        let instance = Instance::running("a");
        vec![(a.clone(), Instance { state, ..instance })]
    };
    pod.relisted(listed(InstanceState::Running), now.at, None, false, &now);
    assert!(pod.is_held(&a));
    let exited = InstanceState::Ended(Some(ExitCode(1)));
    pod.relisted(listed(exited), now.at, None, false, &now);
    assert!(!pod.is_held(&a));
}

/// As [`with_rules`], with a rule for the lack of memory.
fn with_oom_rule() -> Pod {
    let (mut pod, now) = (with_rules(Start::Auto), moment());
    let rules = "[{action: Restart, exitCodes: {operator: In, values: [42]}}, \
                  {action: RestartAllContainers, onOOMKilled: {}}]";
    let unread = Unread::of([("restart-rules.reprise.dev", rules)]);
    pod.written(Written::read(&unread), &now);
    pod.commands();
    pod
}

/// Whether it wants that to be learnt, since it was last asked.
fn asks_whether_it_was_out_of_memory(pod: &mut Pod) -> bool {
    let asked = pod.commands().into_iter();
    let asked = asked.filter(|it| matches!(it, Command::LearnOom(_)));
    match asked.count() {
        0 => false,
        1 => true,
        more => panic!("{more} questions"),
    }
}

#[test]
fn an_exit_that_the_lack_of_memory_makes_a_difference_to_waits_for_the_news_and_is_judged_once() {
    for (killed, action) in [(true, Some(Action::RestartAllContainers)), (false, None)] {
        let (mut pod, now) = (with_oom_rule(), moment());
        let a = ContainerId::from("a-0");
        pod.created(a.clone(), Instance::running("a"));
        assert!(pod.decide_hold(&a, Duration::ZERO, &now));
        pod.ended(&a, Some(ExitCode(137)), &now);
        assert!(asks_whether_it_was_out_of_memory(&mut pod));
        assert!(pod.plan().is_none() && pod.is_held(&a) && pod.wants(Task::Oom(&a)));
        // The hook asks once more, of another plugin for one.
        assert!(pod.decide_hold(&a, Duration::ZERO, &now));
        assert!(!asks_whether_it_was_out_of_memory(&mut pod));
        pod.oom_told(&a, killed, &now);
        assert_eq!(pod.plan().map(|plan| plan.action), action);
        assert_eq!(pod.is_held(&a), killed);
        // Whoever else tells of it comes too late.
        let restart = pod.plan().map(|plan| plan.id.clone());
        pod.oom_told(&a, true, &now);
        assert_eq!(pod.plan().map(|plan| plan.id.clone()), restart);
        assert!(!pod.wants(Task::Oom(&a)) && !asks_whether_it_was_out_of_memory(&mut pod));
    }
}

#[test]
fn the_rule_that_is_told_is_the_one_for_the_lack_of_memory_only_after_an_oom_kill() {
    for (killed, number) in [(true, 1), (false, 2)] {
        let (mut pod, now) = (with_rules(Start::Auto), moment());
        let rules = "[{action: RestartAllContainers, onOOMKilled: {}}, \
                      {action: RestartAllContainers, onSignal: [SIGKILL]}]";
        let unread = Unread::of([("restart-rules.reprise.dev", rules)]);
        pod.written(Written::read(&unread), &now);
        let a = ContainerId::from("a-0");
        pod.created(a.clone(), Instance::running("a"));
        assert!(pod.decide_hold(&a, Duration::ZERO, &now));
        pod.ended(&a, Some(ExitCode(137)), &now);
        pod.oom_told(&a, killed, &now);
        let rule = pod.plan().unwrap().trigger.rule.as_ref();
        assert_eq!(rule.map(|rule| rule.number), Some(number));
    }
}

#[test]
fn news_of_the_lack_of_memory_that_come_before_the_exit_or_its_hook_keep_nobody_waiting() {
    let news: [fn(&mut Pod, &ContainerId, &Moment); 3] = [
        |pod, a, now| {
            pod.oom_told(a, true, now);
            pod.ended(a, Some(ExitCode(3)), now);
        },
        |pod, a, now| {
            pod.ended(a, Some(ExitCode(3)), now);
            pod.oom_told(a, true, now);
        },
        |pod, a, now| pod.oom_told(a, true, now),
    ];
    for news in news {
        let (mut pod, now) = (with_oom_rule(), moment());
        let a = ContainerId::from("a-0");
        pod.created(a.clone(), Instance::running("a"));
        news(&mut pod, &a, &now);
        assert!(pod.plan().is_none());
        assert!(pod.decide_hold(&a, Duration::ZERO, &now));
        pod.ended(&a, Some(ExitCode(3)), &now);
        let action = pod.plan().map(|plan| plan.action);
        assert_eq!(action, Some(Action::RestartAllContainers));
        assert!(!asks_whether_it_was_out_of_memory(&mut pod));
    }
}

#[test]
fn nobody_asks_for_the_lack_of_memory_where_it_makes_no_difference() {
    for (mut pod, code) in [(with_oom_rule(), 42), (with_rules(Start::Auto), 137)] {
        let (a, now) = (ContainerId::from("a-0"), moment());
        pod.created(a.clone(), Instance::running("a"));
        assert!(pod.decide_hold(&a, Duration::ZERO, &now));
        pod.ended(&a, Some(ExitCode(code)), &now);
        assert!(!asks_whether_it_was_out_of_memory(&mut pod), "{code}");
        assert_eq!(pod.plan().is_some(), code == 42);
    }
}

#[test]
fn an_init_container_has_failed_in_a_restart_when_it_was_not_out_of_memory_and_not_before() {
    for killed in [true, false] {
        let (mut pod, now) = (with_oom_rule(), moment());
        let (old, new) = (ContainerId::from("i-0"), ContainerId::from("i-1"));
        pod.created(old.clone(), Instance::running("i"));
        pod.oom_told(&old, true, &now);
        assert!(pod.decide_hold(&old, Duration::ZERO, &now));
        pod.ended(&old, Some(ExitCode(137)), &now);
        pod.feed(Event::Called, &now);
        pod.feed(Event::Announced, &now);
        pod.feed(Event::Recovered(Ok(())), &now);
        let restart = pod.plan().unwrap().id.clone();
        pod.created(new.clone(), Instance::running("i"));
        pod.attempt_made(&restart, &new, Instance::running("i"), Duration::ZERO, &now);
        pod.started(&new, &now);

        assert!(pod.decide_hold(&new, Duration::ZERO, &now));
        pod.ended(&new, Some(ExitCode(137)), &now);
        assert!(pod.wants(Task::Replay(&restart)), "it goes on");
        pod.oom_told(&new, killed, &now);
        assert_eq!(pod.plan().unwrap().trigger.container == new, killed);
        assert!(!pod.wants(Task::Replay(&restart)), "{killed}");
    }
}

#[test]
fn a_pod_that_is_deleted_meanwhile_does_not_wait_for_news_of_its_memory() {
    let (mut pod, now) = (with_oom_rule(), moment());
    let a = ContainerId::from("a-0");
    pod.created(a.clone(), Instance::running("a"));
    assert!(pod.decide_hold(&a, Duration::ZERO, &now));
    pod.ended(&a, Some(ExitCode(137)), &now);
    pod.deleted(&now);
    assert!(!pod.is_held(&a));
    pod.oom_told(&a, true, &now);
    assert!(pod.plan().is_none());
    pod.removed(&a, &now);
    assert!(pod.keeps_nothing());
}
