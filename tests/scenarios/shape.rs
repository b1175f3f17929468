//! What a pod of these scenarios is made of. Every container runs a shell script that leaves
//! evidence in the pod's emptyDir and ends with the code that the scenario gives it, when it gives it.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

/// Where the emptyDir `ev` is mounted in each container.
const EVIDENCE_DIR: &str = "/ev";

/// Regular containers and sidecars. Opening the fifo for reading and writing blocks nobody, `read`
/// wakes up when the scenario writes a code, and a second run waits for a second code.
const WAIT_FOR_CODE: &str = r#"
[ -p "/ev/$name" ] || mkfifo "/ev/$name"
exec 3<>"/ev/$name"
read -r code <&3
say "exit $code"
echo "$name exits with $code"
exit "$code"
"#;

const PREAMBLE: &str = r#"
say() { echo "$EPOCHREALTIME $name $1" >>/ev/log; }
say begin
echo "$name begins"
"#;

/// `mkdir` tells the first run from the others.
const FIRST_RUN_ONLY: &str = r#"mkdir "/ev/$name.first" 2>/dev/null || { say end; exit 0; }"#;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RestartPolicy {
    Always,
    OnFailure,
    Never,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Init,
    Sidecar,
    Regular,
}

#[derive(Clone, Debug)]
pub(crate) struct ContainerShape {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    waits_for_code: bool,
    ignores_term: bool,
    /// `restartPolicyRules` in the spec: the kubelet's own feature.
    spec_rules: Option<Value>,
}

impl ContainerShape {
    fn script(&self) -> String {
        let trap = if self.ignores_term {
            "trap '' TERM"
        } else {
            "trap 'exit 143' TERM"
        };
        let rest = match (self.kind, self.waits_for_code) {
            (Kind::Init, false) => "say end".to_owned(),
            (Kind::Init, true) => format!("{FIRST_RUN_ONLY}{WAIT_FOR_CODE}"),
            (Kind::Sidecar | Kind::Regular, _) => WAIT_FOR_CODE.to_owned(),
        };
        format!("{trap}\nname={}{PREAMBLE}{rest}", self.name)
    }

    fn manifest(&self, image: &str) -> Value {
        let mut container = json!({
            "name": self.name,
            "image": image,
            "imagePullPolicy": "Never",
            "command": ["/bin/sh", "-c", self.script()],
            "volumeMounts": [{"name": "ev", "mountPath": EVIDENCE_DIR}],
        });
        if self.kind == Kind::Sidecar {
            container["restartPolicy"] = json!("Always");
        }
        if let Some(rules) = &self.spec_rules {
            container["restartPolicy"] = json!("Never");
            container["restartPolicyRules"] = rules.clone();
        }
        container
    }
}

/// A pod to be: containers in spec order, annotations, `restartPolicy`.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) policy: RestartPolicy,
    pub(crate) containers: Vec<ContainerShape>,
    annotations: BTreeMap<String, String>,
    grace_period_seconds: i64,
}

impl Shape {
    pub(crate) fn new(policy: RestartPolicy) -> Self {
        Self {
            policy,
            containers: Vec::new(),
            annotations: BTreeMap::new(),
            grace_period_seconds: 1,
        }
    }

    pub(crate) fn never() -> Self {
        Self::new(RestartPolicy::Never)
    }

    pub(crate) fn always() -> Self {
        Self::new(RestartPolicy::Always)
    }

    pub(crate) fn on_failure() -> Self {
        Self::new(RestartPolicy::OnFailure)
    }

    /// An init container that ends with 0 at once.
    pub(crate) fn init(self, name: &'static str) -> Self {
        self.with(name, Kind::Init, false)
    }

    /// An init container whose first run waits for its exit code; later runs end with 0.
    pub(crate) fn waiting_init(self, name: &'static str) -> Self {
        self.with(name, Kind::Init, true)
    }

    pub(crate) fn sidecar(self, name: &'static str) -> Self {
        self.with(name, Kind::Sidecar, true)
    }

    pub(crate) fn regular(self, name: &'static str) -> Self {
        self.with(name, Kind::Regular, true)
    }

    /// All containers so far ignore SIGTERM.
    pub(crate) fn ignoring_term(mut self) -> Self {
        for container in &mut self.containers {
            container.ignores_term = true;
        }
        self
    }

    pub(crate) fn grace_period_seconds(mut self, seconds: i64) -> Self {
        self.grace_period_seconds = seconds;
        self
    }

    pub(crate) fn annotation(mut self, key: &str, value: impl Into<String>) -> Self {
        self.annotations.insert(key.to_owned(), value.into());
        self
    }

    /// Rules for one container, as `restart-rules.reprise.dev/container.<name>`.
    pub(crate) fn rules(self, container: &str, rules: &Value) -> Self {
        self.annotation(
            &format!("restart-rules.reprise.dev/container.{container}"),
            rules.to_string(),
        )
    }

    /// The rule of most scenarios: this container's exit with `code` restarts the pod.
    pub(crate) fn restarts_all(self, container: &str, code: i32) -> Self {
        self.rules(container, &json!([restart_all_on(&[code])]))
    }

    /// The kubelet's own way to say the same, for the newest container so far.
    pub(crate) fn restarts_all_by_itself(mut self, code: i32) -> Self {
        if let Some(container) = self.containers.last_mut() {
            container.spec_rules = Some(json!([restart_all_on(&[code])]));
        }
        self
    }

    /// The same pod without any annotation.
    pub(crate) fn without_annotations(&self) -> Self {
        Self {
            annotations: BTreeMap::new(),
            ..self.clone()
        }
    }

    fn with(mut self, name: &'static str, kind: Kind, waits_for_code: bool) -> Self {
        self.containers.push(ContainerShape {
            name,
            kind,
            waits_for_code,
            ignores_term: false,
            spec_rules: None,
        });
        self
    }

    pub(crate) fn of_kind(&self, kind: Kind) -> impl Iterator<Item = &ContainerShape> {
        self.containers
            .iter()
            .filter(move |container| container.kind == kind)
    }

    pub(crate) fn container(&self, name: &str) -> Result<&ContainerShape> {
        self.containers
            .iter()
            .find(|container| container.name == name)
            .with_context(|| format!("no container {name} in the scenario's pod"))
    }

    /// Whether `logs --previous` and `lastState` of the trigger must outlive the restart: its old
    /// container stays in the runtime where the kubelet starts it again by itself, and behind a
    /// single placeholder.
    pub(crate) fn keeps_exit_of(&self, trigger: &str, code: i32) -> Result<bool> {
        let kind = self.container(trigger)?.kind;
        let all_regular = self.of_kind(Kind::Regular).count() == self.containers.len();
        Ok(match self.policy {
            RestartPolicy::OnFailure if code != 0 => kind == Kind::Regular,
            RestartPolicy::Always => kind == Kind::Regular,
            RestartPolicy::OnFailure | RestartPolicy::Never => all_regular,
        })
    }

    /// Whether exits may be behind placeholders, which the plugin makes where the pod's policy restarts nothing.
    pub(crate) fn is_shielded(&self) -> bool {
        self.policy != RestartPolicy::Always
    }

    /// The manifest, bound to the node because there is no scheduler.
    pub(crate) fn manifest(&self, name: &str, node: &str, image: &str) -> Result<Pod> {
        let containers = |wanted: fn(Kind) -> bool| -> Vec<Value> {
            self.containers
                .iter()
                .filter(|container| wanted(container.kind))
                .map(|container| container.manifest(image))
                .collect()
        };
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "annotations": self.annotations},
            "spec": {
                "nodeName": node,
                "restartPolicy": format!("{:?}", self.policy),
                "terminationGracePeriodSeconds": self.grace_period_seconds,
                "automountServiceAccountToken": false,
                "enableServiceLinks": false,
                "initContainers": containers(|kind| kind != Kind::Regular),
                "containers": containers(|kind| kind == Kind::Regular),
                "volumes": [{"name": "ev", "emptyDir": {}}],
            },
        });
        serde_json::from_value(pod).context("the scenario's manifest is not a pod")
    }
}

/// `{action: RestartAllContainers, exitCodes: {operator: In, values: [...]}}`
pub(crate) fn restart_all_on(codes: &[i32]) -> Value {
    rule("RestartAllContainers", "In", codes)
}

pub(crate) fn rule(action: &str, operator: &str, codes: &[i32]) -> Value {
    json!({"action": action, "exitCodes": {"operator": operator, "values": codes}})
}
