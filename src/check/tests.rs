//! What `reprise check` says about manifests.

use super::*;

/// What is said, and how many errors are among it.
pub(super) fn check(text: &str) -> (String, usize) {
    said(text, None)
}

pub(super) fn check_beside(kubelet: &str, text: &str) -> (String, usize) {
    said(text, Some(KubeletFeatures::of_version(kubelet).unwrap()))
}

fn said(text: &str, kubelet: Option<KubeletFeatures>) -> (String, usize) {
    let findings = examine("f", Ok(text.to_owned()), kubelet);
    let mut said = Vec::new();
    report::write_text(&findings, &mut said).unwrap();
    let said = String::from_utf8(said).unwrap();
    let errors = said.matches(": error: ").count();
    let all_well = findings.iter().all(Finding::is_well);
    assert_eq!(all_well, errors == 0, "{said}");
    (said, errors)
}

/// A pod with an init container, a sidecar and a regular container.
pub(super) fn pod(annotations: &str) -> String {
    format!(
        "
apiVersion: v1
kind: Pod
metadata:
  namespace: ml
  name: run
  annotations: {annotations}
spec:
  restartPolicy: Never
  initContainers:
  - name: setup
  - name: proxy
    restartPolicy: Always
  containers:
  - name: trainer
"
    )
}

/// A pod whose spec has rules for one of its containers.
pub(super) const RULES_IN_SPEC: &str = "
kind: Pod
metadata: {name: p}
spec:
  containers:
  - name: a
    restartPolicy: Never
    restartPolicyRules:
    - {action: Restart, exitCodes: {operator: In, values: [7]}}
    - {action: RestartAllContainers, exitCodes: {operator: In, values: [42]}}
  - name: b
    restartPolicy: OnFailure
";

#[test]
fn every_exit_of_every_container_is_explained() {
    let rules =
        "[{action: RestartAllContainers, exitCodes: {operator: In, values: [42, 50, 51, 52]}}]";
    let (text, problems) = check(&pod(&format!("{{restart-rules.reprise.dev: '{rules}'}}")));
    assert_eq!(problems, 0);
    assert_eq!(
        text,
        "\
f:2: Pod ml/run
  setup (init): exit 42, 50-52 → restart all containers in place; exit 0 → the next container starts; any other exit → restartPolicy Never: the pod fails
  proxy (sidecar): exit 42, 50-52 → restart all containers in place; any other exit → restartPolicy Always: the kubelet restarts it
  trainer (regular): exit 42, 50-52 → restart all containers in place; exit 0 → restartPolicy Never: it is done; any other exit → restartPolicy Never: the pod fails once all containers have ended
"
    );
}

#[test]
fn signals_show_as_their_codes_and_oom_kills_where_they_make_a_difference() {
    let line = |rules: &str| {
        let annotations = format!("{{restart-rules.reprise.dev/container.proxy: '{rules}'}}");
        let (text, problems) = check(&pod(&annotations));
        assert_eq!(problems, 0, "{text}");
        let mut lines = text.lines();
        let line = lines.find_map(|it| it.strip_prefix("  proxy (sidecar): "));
        line.unwrap().to_owned()
    };
    let kubelet = "any other exit → restartPolicy Always: the kubelet restarts it";
    assert_eq!(
        line("[{action: RestartAllContainers, onSignal: [SIGSEGV, SIGBUS], onOOMKilled: {}}]"),
        format!(
            "any exit after an OOM kill → restart all containers in place; \
             exit 135, 139 → restart all containers in place; {kubelet}"
        )
    );
    assert_eq!(
        line(
            "[{action: Restart, onSignal: [SIGKILL]}, {action: RestartAllContainers, onOOMKilled: {}}]"
        ),
        format!(
            "exit 0-136, 138-255 after an OOM kill → restart all containers in place; \
             exit 137 → restart this container; {kubelet}"
        )
    );
    assert_eq!(
        line("[{action: RestartAllContainers, onOOMKilled: {}}]"),
        format!("any exit after an OOM kill → restart all containers in place; {kubelet}")
    );
    // The first rule matches anyway.
    assert_eq!(
        line(
            "[{action: RestartAllContainers, exitCodes: {operator: NotIn, values: []}}, {action: Restart, onOOMKilled: {}}]"
        ),
        "any exit → restart all containers in place"
    );
}

#[test]
fn options_show_where_they_matter() {
    let rules = "restart-rules.reprise.dev/container.trainer: '[{action: RestartPod, exitCodes: {operator: NotIn, values: [0, 137, 143]}}]'";
    let options = "restart-options.reprise.dev: 'gracePeriodSeconds: 3'";
    let (text, _) = check(&pod(&format!("{{{rules}, {options}}}")));
    let expected = "  trainer (regular): exit 0 → restartPolicy Never: it is done; exit 137, 143 → restartPolicy Never: the pod fails once all containers have ended; any other exit → restart all containers in place, with 3 s to stop\n";
    assert!(text.ends_with(expected), "{text}");
}

#[test]
fn a_grace_period_is_a_number_of_seconds_and_no_more_than_a_day() {
    for period in ["-1", "86401", "soon", "1.5"] {
        let options = format!("{{restart-options.reprise.dev: 'gracePeriodSeconds: {period}'}}");
        let (text, problems) = check(&pod(&options));
        let expected = "expected a whole number from 0 to 86400";
        assert!(problems == 1 && text.contains(expected), "{text}");
    }
}

#[test]
fn a_back_off_of_a_pods_own_is_the_nodes_to_allow() {
    let rules =
        "restart-rules.reprise.dev: '[{action: Restart, exitCodes: {operator: In, values: [1]}}]'";
    let checked = |back_off: &str| {
        let options = format!("restart-options.reprise.dev: 'backOff: {back_off}'");
        check(&pod(&format!("{{{rules}, {options}}}")))
    };
    let (text, problems) = checked("{firstSeconds: 1}");
    let noted = text.contains("as far as its --back-off-floor lets it");
    assert!(problems == 0 && noted, "{text}");
    for wrong in [
        "10s",
        "{firstSeconds: -1}",
        "{maxSeconds: 86401}",
        "{firstSeconds: 20, maxSeconds: 10}",
    ] {
        let (text, problems) = checked(wrong);
        assert!(problems == 1 && text.contains("backOff"), "{text}");
    }
}

#[test]
fn a_request_that_is_none_is_a_problem() {
    let checked = |value: &str| {
        let request = format!("restart-request.reprise.dev/pod: \"{value}\"");
        check(&pod(&format!("{{{request}}}")))
    };
    assert_eq!(checked("2026-11-26").1, 0);
    let long = "x".repeat(129);
    for value in ["", "a\\nb", &long] {
        let (text, problems) = checked(value);
        let said = text.contains("f:7: error: the value of restart-request.reprise.dev/pod");
        assert!(problems == 1 && said, "{text}");
    }
}

#[test]
fn every_problem_is_said() {
    let annotations =
        "{restart-rules.reprise.dev: '[{action: Restart}]', restart-rule.reprise.dev: x}";
    let (text, problems) = check(&pod(annotations));
    assert_eq!(
        text,
        "\
f:2: Pod ml/run
  f:7: error: restart-rule.reprise.dev is no annotation of Reprise: these are restart-rules.reprise.dev, restart-options.reprise.dev, failure-policy.reprise.dev, restart-request.reprise.dev
  f:7: error: restart-rules.reprise.dev: rule 1: exitCodes, onOOMKilled or onSignal is missing
"
    );
    assert_eq!(problems, 2);
}

#[test]
fn a_failure_policy_is_explained() {
    let policy = "{failure-policy.reprise.dev: '{action: DeletePod, maxRestartsOnNode: 3}'}";
    let (text, problems) = check(&pod(policy));
    let expected = "failure policy: after more than 3 restarts of a container, and not Ready for 10 minutes (unless configured), the pod is evicted, so that its controller makes a new one";
    assert!(text.contains(expected), "{text}");
    // Nobody would make a new one.
    assert!(
        text.contains("f:7: warning: a pod without a controller"),
        "{text}"
    );
    assert_eq!(problems, 0);
    let template = "
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  template:
    metadata: {annotations: {failure-policy.reprise.dev: 'action: DeletePod'}}
    spec: {containers: [{name: a}]}
";
    let (text, problems) = check(template);
    assert!(
        text.contains("than the node allows (7") && !text.contains("warning"),
        "{text}"
    );
    for (kind, expected) in [
        ("DaemonSet", "f:7: warning: pods of a DaemonSet"),
        ("JobSet", "f:7: warning: pods of a Job"),
    ] {
        let text = check(&template.replace("Deployment", kind)).0;
        assert!(text.contains(expected), "{text}");
    }
    assert_eq!(problems, 0);
    let (text, _) = check(&pod("{failure-policy.reprise.dev: 'action: None'}"));
    assert!(text.contains("the pod stays"), "{text}");
    let (text, problems) = check(&pod("{failure-policy.reprise.dev: 'action: Delete'}"));
    assert!(
        text.contains("f:7: error: failure-policy.reprise.dev: action is"),
        "{text}"
    );
    assert_eq!(problems, 1);
}

#[test]
fn a_container_that_is_not_in_the_pod_is_a_problem() {
    let rules = "'[{action: Restart, exitCodes: {operator: In, values: [1]}}]'";
    let annotations = format!("{{restart-rules.reprise.dev/container.trianer: {rules}}}");
    let (text, problems) = check(&pod(&annotations));
    assert!(
        text.contains("the pod has no container \"trianer\""),
        "{text}"
    );
    assert_eq!(problems, 1);
}

#[test]
fn an_annotation_that_is_not_text_is_a_problem() {
    let (text, problems) = check(&pod("{restart-rules.reprise.dev: []}"));
    assert!(
        text.contains("f:7: error: restart-rules.reprise.dev is not a string"),
        "{text}"
    );
    assert_eq!(problems, 1);
}

#[test]
fn an_init_container_whose_success_restarts_the_pod_is_worth_a_warning() {
    let rules =
        "'[{action: RestartAllContainers, exitCodes: {operator: NotIn, values: [1, 137, 143]}}]'";
    let (text, problems) = check(&pod(&format!("{{restart-rules.reprise.dev: {rules}}}")));
    assert!(
        text.contains("  f:7: warning: success (0) of the init container setup"),
        "{text}"
    );
    assert_eq!((text.matches("warning").count(), problems), (1, 0));
}

#[test]
fn a_restart_by_what_somebody_elses_kill_ends_with_is_worth_a_warning() {
    for (values, warned) in [
        ("[0]", Some("137 or 143")),
        ("[0, 143]", Some("137")),
        ("[0, 137, 143]", None),
    ] {
        let rules = format!(
            "'[{{action: RestartAllContainers, exitCodes: {{operator: NotIn, values: {values}}}}}]'"
        );
        let (text, problems) = check(&pod(&format!(
            "{{restart-rules.reprise.dev/container.trainer: {rules}}}"
        )));
        let mut warnings = text.lines().filter(|line| line.contains("warning"));
        let said = warned
            .map(|codes| format!("  f:7: warning: trainer restarts the pod with exit {codes},"));
        assert_eq!(
            (warnings.clone().count(), problems),
            (warned.iter().count(), 0),
            "{text}"
        );
        assert!(
            said.iter()
                .all(|said| warnings.any(|it| it.starts_with(said))),
            "{text}"
        );
    }
}

#[test]
fn rules_in_two_places_are_worth_a_warning() {
    let condition = "exitCodes: {operator: In, values: [3]}";
    let rules = format!("'[{{action: RestartAllContainers, {condition}}}]'");
    let text = format!(
        "{{kind: Pod, metadata: {{name: p, annotations: {{restart-rules.reprise.dev: {rules}}}}}, \
          spec: {{containers: [{{name: a, restartPolicyRules: [{{action: Restart, {condition}}}]}}]}}}}"
    );
    let (text, problems) = check(&text);
    assert!(
        text.contains("warning: there are rules in annotations and in the spec"),
        "{text}"
    );
    assert_eq!(problems, 0);
}

#[test]
fn templates_are_found_wherever_they_are() {
    let text = r#"
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: js}
spec:
  replicatedJobs:
  - name: workers
    template: {spec: {template: {spec: {containers: [{name: a}]}}}}
---
{"apiVersion": "v1", "kind": "List", "items": [
  {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": "cj"},
   "spec": {"jobTemplate": {"spec": {"template": {"spec": {"containers": [{"name": "a"}]}}}}}},
  {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [{"name": "a"}]}}
]}
---
kind: ConfigMap
metadata: {name: cm}
---
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata: {name: lws}
spec:
  leaderWorkerTemplate:
    leaderTemplate: {spec: {containers: [{name: a}]}}
    workerTemplate: {spec: {containers: [{name: a}]}}
---
apiVersion: v1
kind: PodTemplate
metadata: {name: pt}
template: {spec: {containers: [{name: a}]}}
"#;
    let (text, problems) = check(text);
    assert_eq!(
        text,
        "\
f:8: JobSet js, spec.replicatedJobs[0].template.spec.template
  no restart rules: Reprise restarts this pod on request alone
f:12: CronJob cj, spec.jobTemplate.spec.template
  no restart rules: Reprise restarts this pod on request alone
f:13: Pod p
  no restart rules: Reprise restarts this pod on request alone
f:16: ConfigMap cm
  no pod in it
f:24: LeaderWorkerSet lws, spec.leaderWorkerTemplate.leaderTemplate
  no restart rules: Reprise restarts this pod on request alone
f:25: LeaderWorkerSet lws, spec.leaderWorkerTemplate.workerTemplate
  no restart rules: Reprise restarts this pod on request alone
f:30: PodTemplate pt, template
  no restart rules: Reprise restarts this pod on request alone
"
    );
    assert_eq!(problems, 0);
}

#[test]
fn an_annotation_on_the_deployment_itself_is_a_problem() {
    let text = "
apiVersion: apps/v1
kind: Deployment
metadata: {name: d, annotations: {restart-rules.reprise.dev: '[]'}}
spec: {template: {spec: {containers: [{name: a}]}}}
";
    let (text, problems) = check(text);
    let expected =
        "f:2: Deployment d\n  f:4: error: restart-rules.reprise.dev has no effect here: it belongs";
    assert!(text.starts_with(expected), "{text}");
    assert_eq!(problems, 1);
}

#[test]
fn rules_of_the_spec_are_explained_too() {
    let text = "
kind: Pod
metadata: {name: p}
spec:
  containers:
  - name: a
    restartPolicy: Never
    restartPolicyRules: [{action: Restart, exitCodes: {operator: In, values: [7]}}]
";
    let (text, _) = check(text);
    assert!(
        text.contains("a (regular): exit 7 → restart this container; exit 0 →"),
        "{text}"
    );
}

#[test]
fn what_is_no_yaml_is_a_problem() {
    let (text, problems) = check("a: [");
    assert!(text.starts_with("f:1: error: "), "{text}");
    assert_eq!((problems, text.lines().count()), (1, 1));
    assert_eq!(check("").0, "f: nothing in it\n");
}

#[test]
fn nothing_in_a_manifest_reaches_the_terminal_as_it_is() {
    let manifest = pod("{}").replace("name: run", "name: \"run\\e[2J\\nf: all is well\"");
    let (text, _) = check(&manifest);
    assert!(
        text.starts_with("f:2: Pod ml/run\\u{1b}[2J\\nf: all is well\n"),
        "{text}"
    );
}
