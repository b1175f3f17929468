//! What a pod of these scenarios is made of. Every container runs a shell script that leaves
//! evidence in the pod's emptyDir and ends with the code that the scenario gives it, when it gives it.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{EphemeralContainer, Pod};
use serde_json::{Map, Value, json};

use crate::recorder::Snapshot;

/// The emptyDir for evidence. Like every volume it is mounted at `/NAME` in each container.
const EVIDENCE: &str = "ev";

/// Opening the fifo for reading and writing blocks nobody, `read` wakes up when the scenario writes a
/// code, and a second run waits for a second code.
const WAIT_FOR_CODE: &str = r#"
[ -p "/ev/$name" ] || mkfifo "/ev/$name"
exec 3<>"/ev/$name"
read -r code <&3
"#;

const EXIT_WITH_CODE: &str = r#"
say "exit $code"
echo "$name exits with $code"
exit "$code"
"#;

/// What is in a fifo is gone when the last process that has it open is, however that one dies: whoever finds
/// something there is not the only instance of the container.
const PREAMBLE: &str = r#"
say() { echo "$EPOCHREALTIME $name $1" >>/ev/log; }
[ -p "/ev/$name.alive" ] || mkfifo "/ev/$name.alive"
exec 4<>"/ev/$name.alive"
read -r -t 0 _ <&4 && say double
echo alive >&4
say begin
echo "$name begins"
"#;

/// `mkdir` tells the first run from the others.
const FIRST_RUN_ONLY: &str = r#"mkdir "/ev/$name.first" 2>/dev/null || { say end; exit 0; }"#;

const END_WITH_0: &str = r#"[ "$code" != 0 ] || { say end; exit 0; }"#;

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

/// How a container comes to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// With 0, at once.
    AtOnce,
    /// The first run waits for its code, later ones end with 0 at once.
    FirstWaits,
    /// Every run waits for its code.
    Waits,
}

#[derive(Clone, Debug)]
pub(crate) struct ContainerShape {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    end: End,
    /// What it does first.
    at_first: &'static str,
    /// What it does on SIGTERM.
    on_term: &'static str,
    /// What else there is in its spec.
    fields: Map<String, Value>,
}

impl ContainerShape {
    fn script(&self) -> String {
        let rest = match (self.kind, self.end) {
            (_, End::AtOnce) => "say end".to_owned(),
            (_, End::FirstWaits) => format!("{FIRST_RUN_ONLY}{WAIT_FOR_CODE}{EXIT_WITH_CODE}"),
            (Kind::Init, End::Waits) => format!("{WAIT_FOR_CODE}{END_WITH_0}{EXIT_WITH_CODE}"),
            (_, End::Waits) => format!("{WAIT_FOR_CODE}{EXIT_WITH_CODE}"),
        };
        format!(
            "trap '{}' TERM\nname={}{PREAMBLE}{}\n{rest}",
            self.on_term, self.name, self.at_first
        )
    }

    /// Says why, if it is not as it is in a healthy pod.
    pub(crate) fn unhealthy(&self, now: &Snapshot) -> Option<String> {
        let Some(seen) = now.containers.get(self.name) else {
            return Some(format!("{} has no status", self.name));
        };
        let healthy = match self.kind {
            Kind::Init => seen.state.starts_with("exit 0"),
            Kind::Sidecar | Kind::Regular => seen.is_running && seen.ready,
        };
        (!healthy).then(|| format!("{} is {}", self.name, seen.state))
    }

    fn manifest(&self, image: &str, mounts: &[Value]) -> Value {
        let mut container = json!({
            "name": self.name,
            "image": image,
            "imagePullPolicy": "Never",
            "command": ["/bin/sh", "-c", self.script()],
            "volumeMounts": mounts,
        });
        if self.kind == Kind::Sidecar {
            container["restartPolicy"] = json!("Always");
        }
        for (field, value) in &self.fields {
            container[field] = value.clone();
        }
        container
    }
}

const OPTIONS: &str = "restart-options.reprise.dev";

/// A pod to be: containers in spec order, annotations, `restartPolicy`.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) policy: RestartPolicy,
    pub(crate) containers: Vec<ContainerShape>,
    /// What else there is in the pod's spec.
    spec: Map<String, Value>,
    annotations: BTreeMap<String, String>,
    grace_period_seconds: i64,
    /// Names and sources.
    volumes: Vec<(&'static str, Value)>,
}

impl Shape {
    pub(crate) fn new(policy: RestartPolicy) -> Self {
        Self {
            policy,
            containers: Vec::new(),
            spec: Map::new(),
            annotations: BTreeMap::new(),
            grace_period_seconds: 1,
            volumes: vec![(EVIDENCE, json!({"emptyDir": {}}))],
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
        self.with(name, Kind::Init, End::AtOnce)
    }

    /// An init container whose first run waits for its exit code; later runs end with 0.
    pub(crate) fn waiting_init(self, name: &'static str) -> Self {
        self.with(name, Kind::Init, End::FirstWaits)
    }

    /// An init container each run of which waits for its exit code.
    pub(crate) fn asking_init(self, name: &'static str) -> Self {
        self.with(name, Kind::Init, End::Waits)
    }

    pub(crate) fn sidecar(self, name: &'static str) -> Self {
        self.with(name, Kind::Sidecar, End::Waits)
    }

    pub(crate) fn regular(self, name: &'static str) -> Self {
        self.with(name, Kind::Regular, End::Waits)
    }

    /// All containers so far ignore SIGTERM.
    pub(crate) fn ignoring_term(mut self) -> Self {
        for container in &mut self.containers {
            container.on_term = "";
        }
        self
    }

    /// What the newest container so far does on SIGTERM instead of ending with 143.
    pub(crate) fn on_term(mut self, script: &'static str) -> Self {
        self.newest().on_term = script;
        self
    }

    /// What the newest container so far does before anything else.
    pub(crate) fn at_first(mut self, script: &'static str) -> Self {
        self.newest().at_first = script;
        self
    }

    /// Fields that the newest container so far has in its spec: probes, `lifecycle`.
    pub(crate) fn field(mut self, name: &str, value: Value) -> Self {
        self.newest().fields.insert(name.to_owned(), value);
        self
    }

    /// A volume of that source, at `/NAME` in each container.
    pub(crate) fn volume(mut self, name: &'static str, source: Value) -> Self {
        self.volumes.push((name, source));
        self
    }

    /// All containers so far that may have one have a preStop hook, which takes a second.
    pub(crate) fn with_pre_stop(mut self) -> Self {
        let containers = self.containers.iter_mut();
        for container in containers.filter(|it| it.kind != Kind::Init) {
            let name = container.name;
            let script = format!("sleep 1; echo \"$EPOCHREALTIME {name} prestop\" >>/ev/log");
            let hook = json!({"preStop": {"exec": {"command": ["/bin/sh", "-c", script]}}});
            container.fields.insert("lifecycle".to_owned(), hook);
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

    /// The same with time to stop.
    pub(crate) fn restarts_pod(self, container: &str, code: i32) -> Self {
        self.rules(container, &json!([rule("RestartPod", "In", &[code])]))
    }

    /// The kubelet's own way to say the former, for the newest container so far.
    pub(crate) fn restarts_all_by_itself(self, code: i32) -> Self {
        self.field("restartPolicy", json!("Never"))
            .field("restartPolicyRules", json!([restart_all_on(&[code])]))
    }

    /// Whether one of its annotations has that word.
    pub(crate) fn asks_for(&self, word: &str) -> bool {
        self.annotations.values().any(|it| it.contains(word))
    }

    /// The same pod without any annotation.
    pub(crate) fn without_annotations(&self) -> Self {
        Self {
            annotations: BTreeMap::new(),
            ..self.clone()
        }
    }

    /// The same pod with `restartPolicy: Always`.
    pub(crate) fn restarted_by_the_kubelet(mut self) -> Self {
        self.policy = RestartPolicy::Always;
        self
    }

    fn with(mut self, name: &'static str, kind: Kind, end: End) -> Self {
        self.containers.push(ContainerShape {
            name,
            kind,
            end,
            at_first: "",
            on_term: "exit 143",
            fields: Map::new(),
        });
        self
    }

    fn newest(&mut self) -> &mut ContainerShape {
        let newest = self.containers.last_mut();
        newest.expect("the scenario says something of a container before it has one")
    }

    pub(crate) fn of_kind(&self, kind: Kind) -> impl Iterator<Item = &ContainerShape> {
        self.containers
            .iter()
            .filter(move |container| container.kind == kind)
    }

    /// Sidecars and regular containers.
    pub(crate) fn lasting(&self) -> impl Iterator<Item = &ContainerShape> {
        self.containers
            .iter()
            .filter(|container| container.kind != Kind::Init)
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

    /// The manifest, bound to the node because there is no scheduler.
    pub(crate) fn manifest(&self, name: &str, node: &str, image: &str) -> Result<Pod> {
        let mounts: Vec<Value> = self
            .volumes
            .iter()
            .map(|(name, _)| json!({"name": name, "mountPath": format!("/{name}")}))
            .collect();
        let volumes = self.volumes.iter().map(|(name, source)| {
            let mut volume = source.clone();
            volume["name"] = json!(name);
            volume
        });
        let containers = |wanted: fn(Kind) -> bool| -> Vec<Value> {
            self.containers
                .iter()
                .filter(|container| wanted(container.kind))
                .map(|container| container.manifest(image, &mounts))
                .collect()
        };
        let mut pod = json!({
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
                "volumes": volumes.collect::<Vec<_>>(),
            },
        });
        for (field, value) in &self.spec {
            pod["spec"][field] = value.clone();
        }
        serde_json::from_value(pod).context("the scenario's manifest is not a pod")
    }

    /// The pod's options, as `restart-options.reprise.dev`.
    pub(crate) fn options(self, options: &Value) -> Self {
        self.annotation(OPTIONS, options.to_string())
    }

    /// Who starts its containers again.
    pub(crate) fn started_by(self, who: &str) -> Self {
        self.option("start", json!(who))
    }

    /// Between the end of its first restart and the second, in seconds.
    pub(crate) fn backs_off(self, seconds: u64) -> Self {
        self.option("backOff", json!({"firstSeconds": seconds}))
    }

    fn option(self, key: &str, value: Value) -> Self {
        let options = self.annotations.get(OPTIONS).map_or("{}", String::as_str);
        let Ok(mut options) = serde_json::from_str::<Value>(options) else {
            return self;
        };
        options[key] = value;
        self.options(&options)
    }

    /// Whether it is not for the kubelet to start its containers again.
    pub(crate) fn asks_for_replay(&self) -> bool {
        let options = self.annotations.get(OPTIONS);
        options.is_some_and(|it| it.contains("Auto") || it.contains("Replay"))
    }

    /// The same pod, which asks for that start if it has rules and does not say otherwise: a plugin that were told to
    /// leave the start to the kubelet would heed no pod.
    pub(crate) fn started_by_default(self, who: &str) -> Self {
        let ruled = self
            .annotations
            .keys()
            .any(|key| key.starts_with("restart-rules."));
        let spec = |it: &ContainerShape| it.fields.contains_key("restartPolicyRules");
        if !ruled && !self.containers.iter().any(spec) {
            return self;
        }
        let options = self.annotations.get(OPTIONS);
        let options = options.and_then(|it| serde_json::from_str::<Value>(it).ok());
        if options.is_some_and(|it| !it["start"].is_null()) {
            return self;
        }
        self.started_by(who)
    }

    pub(crate) fn host_network(self) -> Self {
        self.spec("hostNetwork", json!(true))
    }

    pub(crate) fn share_process_namespace(self) -> Self {
        self.spec("shareProcessNamespace", json!(true))
    }

    /// Users of its own: root in it is nobody outside.
    pub(crate) fn user_namespace(self) -> Self {
        self.spec("hostUsers", json!(false))
    }

    /// The `RuntimeClass` is made with the pod.
    pub(crate) fn runtime_class(self, name: &str) -> Self {
        self.spec("runtimeClassName", json!(name))
    }

    /// What else there is in the pod's spec.
    pub(crate) fn spec(mut self, field: &str, value: Value) -> Self {
        self.spec.insert(field.to_owned(), value);
        self
    }

    /// A container for the running pod, which does there what a regular one does.
    pub(crate) fn ephemeral(
        &self,
        name: &'static str,
        node: &str,
        image: &str,
    ) -> Result<EphemeralContainer> {
        let pod = self.clone().regular(name).manifest(name, node, image)?;
        let container = pod.spec.and_then(|mut spec| spec.containers.pop());
        serde_json::from_value(json!(container)).context("the container cannot be an ephemeral one")
    }
}

/// `{action: RestartAllContainers, exitCodes: {operator: In, values: [...]}}`
pub(crate) fn restart_all_on(codes: &[i32]) -> Value {
    rule("RestartAllContainers", "In", codes)
}

pub(crate) fn rule(action: &str, operator: &str, codes: &[i32]) -> Value {
    json!({"action": action, "exitCodes": {"operator": operator, "values": codes}})
}
