//! Checks one pod, or the template of one.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::lines::Place;
use super::manifest::{Container, Pod};
use super::outcome::Rulings;
use super::report::{Cause, Finding};
use crate::back_off::Asked;
use crate::kube::{ContainerSpec, KubeletFeatures, StartDuty};
use crate::policy::{
    self, FAILURE_KEY, FailureAction, FailurePolicy, OPTIONS_KEY, Options, Policy, PolicyError,
    REQUEST_KEY, RULES_KEY, Request, Rules, Start,
};
use crate::replay::{self, ReplayBlocker};

/// Checks the pod there, and says in `finding` what there is to say. `kind`: of the object that it is, or is in.
pub(super) fn check(
    pod: &Pod<'_>,
    kind: &str,
    at: Place<'_>,
    kubelet: Option<KubeletFeatures>,
    finding: &mut Finding,
) {
    for (cause, why) in &pod.refused {
        finding.error(cause.clone(), why);
    }
    let keys = pod.annotations.keys();
    for key in keys.filter(|key| policy::is_unknown_key(key)) {
        let why = format!(
            "{key} is no annotation of Reprise: these are {}",
            policy::known_keys()
        );
        finding.error(Cause::annotation(at, key), why);
    }
    let spec = spec_rules(pod, kubelet, finding);
    check_failure_policy(pod, kind, at, finding);
    check_request(pod, at, finding);
    // Of a kubelet that acts on no rules, unless it is said: so what they lead to can be told.
    let native = Some(kubelet.unwrap_or_default());
    let annotations = || pod.annotations.iter().map(|(key, value)| (*key, *value));
    let policy = match Policy::from_pod(annotations(), spec.clone(), native) {
        Ok(policy) => policy,
        Err(error) => return refuse_annotations(&error, at, finding),
    };
    if policy.is_none() {
        if let Err(error) = Options::from_annotations(annotations()) {
            refuse_annotations(&error, at, finding);
        }
        let of_kubelet = spec.values().any(|rules| !rules.is_empty());
        if !of_kubelet {
            return finding.note("no restart rules: Reprise restarts this pod on request alone");
        }
        finding.note(
            "the kubelet acts on all of its rules: Reprise restarts this pod on request alone",
        );
    }
    let rulings = Rulings {
        policy: policy.unwrap_or_default(),
        spec,
        kubelet,
    };
    check_rules(pod, at, &rulings, finding);
    if rulings.policy.options().back_off != Asked::default() {
        finding.note(
            "backOff: what is shorter than the node's own counts as far as its --back-off-floor lets it, by default not at all",
        );
    }
    warn_of_starts_by_kubelet(pod, at, &rulings, finding);
}

/// The rules of the spec, by container, as a kubelet of that version has them.
fn spec_rules(
    pod: &Pod<'_>,
    kubelet: Option<KubeletFeatures>,
    finding: &mut Finding,
) -> BTreeMap<String, Rules> {
    let mut spec = BTreeMap::new();
    for container in &pod.containers {
        let Some(rules) = container.value.get("restartPolicyRules") else {
            continue;
        };
        let field = format!("restartPolicyRules of container {}", container.name);
        match policy::spec_rules(&field, rules) {
            Ok(rules) => {
                let knows_own = kubelet.is_none_or(|it| it.container_rules);
                let own = container
                    .restart_policy
                    .filter(|_| !knows_own && !rules.is_empty());
                let rules = own.into_iter().fold(rules, Rules::then);
                spec.insert(container.name.to_owned(), rules);
            }
            Err(error) => {
                let cause = Cause::field(&container.path, container.at, "restartPolicyRules");
                refuse(&error, finding, |_| cause.clone());
            }
        }
    }
    spec
}

fn refuse_annotations(error: &PolicyError, pod: Place<'_>, finding: &mut Finding) {
    refuse(error, finding, |key| Cause::annotation(pod, key));
}

fn refuse(error: &PolicyError, finding: &mut Finding, cause: impl Fn(&str) -> Cause) {
    for problem in error.problems() {
        finding.error(cause(&problem.place.key), problem.to_string());
    }
    if error.more() > 0 {
        finding.error(Cause::default(), format!("and {} more", error.more()));
    }
}

/// The annotation of that key which counts: the one for the whole pod replaces the plain one.
fn annotation(pod: &Pod<'_>, at: Place<'_>, key: &str) -> Cause {
    let mut keys = pod.annotations.keys();
    let counts = keys.rfind(|it| it.starts_with(key));
    Cause::annotation(at, counts.unwrap_or(&key))
}

fn check_rules(pod: &Pod<'_>, at: Place<'_>, rulings: &Rulings, finding: &mut Finding) {
    let names: Vec<_> = pod.containers.iter().map(|it| it.name).collect();
    if let Err(error) = rulings.policy.check_names(&names) {
        refuse_annotations(&error, at, finding);
    }
    for container in &pod.containers {
        finding.container(rulings.outcomes(container, pod));
        for warning in rulings.warnings(container) {
            let cause = match rulings.policy.annotation_for(container.name) {
                Some(key) => Cause::annotation(at, &key),
                None => Cause::field(&container.path, container.at, "restartPolicyRules"),
            };
            finding.warning(cause, warning);
        }
    }
    if rulings.policy.has_rules_twice() {
        finding.warning(
            annotation(pod, at, RULES_KEY),
            "there are rules in annotations and in the spec: a node whose kubelet acts on those of the spec uses no others",
        );
    }
}

/// As far as the spec tells: what happens until then, and what the node is like, may keep a pod from being replayed, too.
fn warn_of_starts_by_kubelet(
    pod: &Pod<'_>,
    at: Place<'_>,
    rulings: &Rulings,
    finding: &mut Finding,
) {
    let containers = pod.containers.iter();
    let whole = containers.clone().any(|it| rulings.restarts_pod(it));
    let concerned = containers.filter(|it| whole || rulings.policy.covers(it.name));
    let concerned: Vec<_> = concerned.collect();
    let mut warn = |cause, why: &ReplayBlocker| {
        finding.warning(
            cause,
            format!("started by the kubelet, not by replay: {why}"),
        );
    };
    let start = Start::default().asked(rulings.policy.options().start);
    if start == Start::Kubelet && !concerned.is_empty() {
        return warn(annotation(pod, at, OPTIONS_KEY), &ReplayBlocker::Asked);
    }
    if let Some(many) = replay::many(concerned.len()) {
        return warn(Cause::field("spec", at.field("spec"), "containers"), &many);
    }
    for container in concerned {
        // One that no API server takes says nothing.
        let Ok(spec) = ContainerSpec::deserialize(container.value) else {
            continue;
        };
        for blocker in replay::blockers_of(&spec, start, &[]) {
            warn(field_of(&blocker, container), &blocker);
        }
    }
}

/// The field of the container that is in the way.
fn field_of(blocker: &ReplayBlocker, container: &Container<'_>) -> Cause {
    let fields: &[&str] = match blocker {
        ReplayBlocker::PostStart(_) => &["lifecycle"],
        ReplayBlocker::Device(..) => &["resources"],
        ReplayBlocker::Duty(_, duty) => match duty {
            StartDuty::StartupProbe => &["startupProbe"],
            StartDuty::LivenessProbe => &["livenessProbe"],
            StartDuty::ImagePull => &["imagePullPolicy", "image"],
            StartDuty::Environment => &["env", "envFrom"],
            StartDuty::SubPath => &["volumeMounts"],
        },
        _ => &[],
    };
    let mut written = fields
        .iter()
        .filter(|it| container.at.field(it).is_written());
    let field = written.next().or(fields.first()).unwrap_or(&"");
    Cause::field(&container.path, container.at, field)
}

/// What a pod is made with asks for nothing, but a value that is none is told.
fn check_request(pod: &Pod<'_>, at: Place<'_>, finding: &mut Finding) {
    if let Some(Err(error)) = Request::of(|key| pod.annotations.get(key).copied()) {
        finding.error(annotation(pod, at, REQUEST_KEY), error.to_string());
    }
}

fn check_failure_policy(pod: &Pod<'_>, kind: &str, at: Place<'_>, finding: &mut Finding) {
    let annotations = pod.annotations.iter().map(|(key, value)| (*key, *value));
    let policy = match FailurePolicy::from_annotations(annotations) {
        Ok(Some(policy)) => policy,
        Ok(None) => return,
        Err(error) => return refuse_annotations(&error, at, finding),
    };
    if policy.action == FailureAction::None {
        return finding.note("failure policy: the pod stays, however often it crashes");
    }
    let restarts = match policy.max_restarts {
        Some(restarts) => format!("more than {restarts} restarts of a container"),
        None => {
            "more restarts of a container than the node allows (7, unless configured)".to_owned()
        }
    };
    finding.note(format!(
        "failure policy: after {restarts}, and not Ready for 10 minutes (unless configured), the pod is evicted, so that its \
         controller makes a new one"
    ));
    // A template has the kind of what it is in.
    let never = match kind {
        "Pod" => "a pod without a controller is never deleted, for nobody would make a new one",
        "DaemonSet" => {
            "pods of a DaemonSet are never deleted: the new one would be on the same node"
        }
        "Job" | "CronJob" | "JobSet" => "pods of a Job are never deleted: it may make no new one",
        _ => return,
    };
    finding.warning(annotation(pod, at, FAILURE_KEY), never);
}

#[cfg(test)]
mod tests {
    use crate::check::tests::{RULES_IN_SPEC, check, check_beside, pod};

    #[test]
    fn who_acts_on_a_rule_of_the_spec_goes_by_the_kubelets_version() {
        let again = "restart this container";
        let all = "restart all containers in place";
        let never = "exit 0 → restartPolicy Never: it is done; any other exit → restartPolicy Never: the pod fails once";
        for (version, on_7, on_42) in [
            ("1.34", "Reprise", "Reprise"),
            ("1.35", "the kubelet", "Reprise"),
            ("1.36", "the kubelet", "the kubelet"),
        ] {
            let (text, problems) = check_beside(version, RULES_IN_SPEC);
            let expected = format!(
                "  a (regular): exit 7 → {again}, by {on_7}; exit 42 → {all}, by {on_42}; {never}"
            );
            assert!(text.contains(&expected), "{version}: {text}");
            let alone = "  the kubelet acts on all of its rules: Reprise restarts this pod on request alone\n";
            assert_eq!(text.contains(alone), version == "1.36", "{text}");
            assert_eq!(problems, 0);
        }
    }

    #[test]
    fn a_kubelet_without_rules_knows_no_policy_of_a_containers_own_but_with_rules_reprise_does() {
        let text = RULES_IN_SPEC.replace("restartPolicy: Never", "restartPolicy: OnFailure");
        let (text, _) = check_beside("1.34", &text);
        for expected in [
            "a (regular): exit 42 → restart all containers in place, by Reprise; exit 0 → restartPolicy OnFailure: it is done; any other exit → restart this container, by Reprise\n",
            "b (regular): any exit → restartPolicy Always: the kubelet restarts it\n",
        ] {
            assert!(text.contains(expected), "{text}");
        }
    }

    #[test]
    fn rules_in_two_places_are_an_error_beside_a_kubelet_that_acts_on_those_of_the_spec() {
        let annotation = "metadata:
  name: p
  annotations:
    restart-rules.reprise.dev: '[{action: Restart, exitCodes: {operator: In, values: [9]}}]'";
        let text = RULES_IN_SPEC.replace("metadata: {name: p}", annotation);
        let (said, problems) = check_beside("1.36", &text);
        assert!(
            said.contains("  f:6: error: restart-rules.reprise.dev: the pod's spec has"),
            "{said}"
        );
        assert_eq!(problems, 1);
        let (said, problems) = check_beside("1.34", &text);
        assert!(
            said.contains("  a (regular): exit 9 → restart this container, by Reprise;"),
            "{said}"
        );
        assert!(
            said.contains("  f:6: warning: there are rules in annotations and in the spec"),
            "{said}"
        );
        assert_eq!(problems, 0);
    }

    /// A template whose containers have something that keeps them from being replayed.
    fn not_replayed(rules: &str, options: &str) -> Vec<String> {
        let text = format!(
            "
kind: Deployment
spec:
  template:
    metadata:
      annotations:
        restart-rules.reprise.dev/container.a: '[{rules}]'
        restart-options.reprise.dev: '{options}'
    spec:
      initContainers:
      - {{name: i, image: i}}
      containers:
      - name: a
        image: a:1
        livenessProbe: {{}}
        envFrom: [{{secretRef: {{name: s}}}}]
        lifecycle: {{postStart: {{httpGet: {{port: 80}}}}}}
      - name: b
        image: b:1
        resources: {{limits: {{example.com/gpu: 1, cpu: 1}}}}
"
        );
        let (said, problems) = check(&text);
        assert_eq!(problems, 0, "{said}");
        let warned = said.lines().filter_map(|line| {
            line.split_once(": warning: started by the kubelet, not by replay: ")
        });
        warned
            .map(|(at, why)| format!("{} {why}", at.trim_start()))
            .collect()
    }

    #[test]
    fn what_keeps_a_pod_from_being_replayed_is_said_with_its_line() {
        let codes = "exitCodes: {operator: In, values: [3]}";
        let all = format!("{{action: RestartAllContainers, {codes}}}");
        let of_a = [
            "f:17 a has a postStart hook",
            "f:15 a has a liveness probe",
            "f:16 a has variables from objects that may have changed",
        ];
        let device = "f:20 b has example.com/gpu, whose device plugin may want to be asked (see --replay-devices)";
        let mut every = vec!["f:11 i has imagePullPolicy Always"];
        every.extend(of_a);
        every.push(device);
        assert_eq!(not_replayed(&all, "{}"), every);
        // What may change is the pod's own risk.
        let replay = not_replayed(&all, "{start: Replay}");
        assert_eq!(replay, [of_a[0], of_a[1], device]);
        assert_eq!(
            not_replayed(&all, "{start: Kubelet}"),
            ["f:8 start: Kubelet"]
        );
        // The others have no part in it.
        let alone = not_replayed(&all.replace("RestartAllContainers", "Restart"), "{}");
        assert_eq!(alone, of_a);
        assert!(not_replayed("", "{}").is_empty());
    }

    #[test]
    fn a_pod_of_many_containers_is_said_not_to_be_replayed() {
        let names: Vec<_> = (0..33)
            .map(|it| format!("{{name: c{it}, image: i:1}}"))
            .collect();
        let rules = "[{action: RestartAllContainers, exitCodes: {operator: In, values: [3]}}]";
        let pod = pod(&format!("{{restart-rules.reprise.dev: '{rules}'}}"));
        let pod = pod.replace(
            "  - name: trainer",
            &format!(
                "  {}",
                names.join("\n").replace('{', "- {").replace('\n', "\n  ")
            ),
        );
        let (text, _) = check(&pod);
        let warnings: Vec<_> = text
            .lines()
            .filter(|line| line.contains(": warning: "))
            .collect();
        let expected =
            "  f:14: warning: started by the kubelet, not by replay: 35 containers are too many";
        assert_eq!(warnings, [expected]);
    }

    #[test]
    fn a_warning_is_on_the_line_of_the_annotation_that_applies() {
        let matches = "[{action: RestartAllContainers, exitCodes: {operator: In, values: [137]}}]";
        let text = format!(
            "
kind: Pod
metadata:
  annotations:
    restart-rules.reprise.dev: '{matches}'
    restart-rules.reprise.dev/pod: '{{b: {matches}}}'
    restart-rules.reprise.dev/container.c: '{matches}'
spec: {{containers: [{{name: a, image: i:1}}, {{name: b, image: i:1}}, {{name: c, image: i:1}}]}}
"
        );
        let (text, _) = check(&text);
        for expected in [
            "f:5: warning: a restarts",
            "f:6: warning: b restarts",
            "f:7: warning: c restarts",
        ] {
            assert!(text.contains(expected), "{text}");
        }
    }

    #[test]
    fn fields_that_are_wrong_are_on_their_lines() {
        let text = RULES_IN_SPEC
            .replace("OnFailure", "Sometimes")
            .replace("RestartAllContainers", "All");
        let (text, problems) = check(&text);
        for expected in [
            "f:12: error: container b: restartPolicy is \"Sometimes\", allowed are",
            "f:8: error: restartPolicyRules of container a: rule 2: action is \"All\", allowed are",
        ] {
            assert!(text.contains(expected), "{text}");
        }
        assert_eq!(problems, 2);
    }
}
