//! What of a pod's API object matters to Reprise, taken out of it at once: the rest is ten times as large.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::jiff::Timestamp;

use crate::ids::{ContainerName, ExitCode, PodKey, PodUid};

/// On the API's copy of a static pod (`pkg/kubelet/types/pod_update.go`, `ConfigMirrorAnnotationKey`).
const MIRROR: &str = "kubernetes.io/config.mirror";
/// The static pod's UID on the kubelet and in the CRI (same file, `ConfigHashAnnotationKey`).
const HASH: &str = "kubernetes.io/config.hash";
/// Where the pod comes from: "api", "file" or "http" (same file, `ConfigSourceAnnotationKey`).
const SOURCE: &str = "kubernetes.io/config.source";
/// kubectl's copy of the whole manifest.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// A pod as its spec says it should be, and how far it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodSpec {
    /// The UID on the kubelet and in the CRI: for a static pod the hash of its manifest.
    pub uid: PodUid,
    /// The UID of the API object: for a static pod that of its mirror. Events and patches go by it.
    pub api_uid: PodUid,
    /// Its name and namespace.
    pub key: PodKey,
    /// The pod's restart policy.
    pub restart_policy: RestartPolicy,
    /// All containers but ephemeral ones, in the order in which the kubelet starts them: init containers and sidecars
    /// as in the spec, then the regular ones.
    pub containers: Vec<ContainerSpec>,
    /// The names of the ephemeral containers, which look like regular ones in the CRI.
    pub ephemeral: Vec<ContainerName>,
    /// Its annotations, without kubectl's copy of the manifest.
    pub annotations: BTreeMap<String, String>,
    /// When it is to be gone, once its deletion has been asked for. Never set for a static pod: deleting its mirror does
    /// not end it.
    pub deletion: Option<Timestamp>,
    /// How long its containers may take to stop, in seconds.
    pub termination_grace: u32,
    /// Whether it is a static pod.
    pub is_static: bool,
    /// Its phase.
    pub phase: Phase,
}

/// A pod as an object of the API: what an event or a patch is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodObject {
    /// Its name and namespace.
    pub key: PodKey,
    /// The UID of the API object, see [`PodSpec::api_uid`].
    pub uid: PodUid,
}

/// When the kubelet starts containers again: a pod's policy, or one container's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RestartPolicy {
    /// After every exit.
    Always,
    /// After exits with another code than 0.
    OnFailure,
    /// Never.
    Never,
}

impl RestartPolicy {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "Always" => Some(Self::Always),
            "OnFailure" => Some(Self::OnFailure),
            "Never" => Some(Self::Never),
            _ => None,
        }
    }
}

/// Which part a container plays in the start of its pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ContainerKind {
    /// Runs to its end before the next one starts.
    Init,
    /// An init container with restart policy Always: runs beside all that follow.
    Sidecar,
    /// Started last, all of them together.
    Regular,
}

/// One container of the spec.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerSpec {
    /// Its name.
    pub name: ContainerName,
    /// Its part.
    pub kind: ContainerKind,
    /// A restart policy of its own, instead of the pod's.
    pub restart_policy: Option<RestartPolicy>,
    /// Its restart rules, in order, as the spec has them.
    pub rules: Vec<RestartRule>,
}

/// A restart rule of a container's spec (`ContainerRestartRule`, KEP-5307 and KEP-5532). What it means is for the policy
/// to say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RestartRule {
    /// The action: "Restart" or "`RestartAllContainers`".
    pub action: String,
    /// How the exit code is compared; `None` for a rule without exit codes.
    pub operator: Option<ExitCodeOperator>,
    /// The exit codes.
    pub codes: Vec<ExitCode>,
}

/// How an exit code is compared with those of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitCodeOperator {
    /// One of them.
    In,
    /// None of them.
    NotIn,
}

/// A pod's phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Not all containers have been started.
    Pending,
    /// Bound, and at least one container runs or is about to.
    Running,
    /// Ended well.
    Succeeded,
    /// Ended badly.
    Failed,
    /// Not told, or nothing that this version knows.
    Unknown,
}

impl PodSpec {
    /// Takes out what matters. `None` for an object without name or UID, which no API server sends.
    #[must_use]
    pub fn extract(pod: Pod) -> Option<Self> {
        let metadata = pod.metadata;
        let spec = pod.spec.unwrap_or_default();
        let mut annotations = metadata.annotations.unwrap_or_default();
        annotations.remove(LAST_APPLIED);

        let api_uid = PodUid::from(metadata.uid?);
        let is_mirror = annotations.contains_key(MIRROR);
        let from_node = annotations
            .get(SOURCE)
            .is_some_and(|source| source != "api");
        let is_static = is_mirror || from_node;
        let uid = if is_static {
            let hash = annotations.get(HASH).or_else(|| annotations.get(MIRROR));
            hash.map_or_else(|| api_uid.clone(), |hash| PodUid::from(hash.as_str()))
        } else {
            api_uid.clone()
        };

        let init = spec.init_containers.unwrap_or_default();
        let containers = init
            .into_iter()
            .map(|container| ContainerSpec::extract(container, true))
            .chain(
                spec.containers
                    .into_iter()
                    .map(|container| ContainerSpec::extract(container, false)),
            )
            .collect();
        let ephemeral = spec.ephemeral_containers.unwrap_or_default();
        let grace = metadata
            .deletion_grace_period_seconds
            .or(spec.termination_grace_period_seconds)
            .unwrap_or(30);

        Some(Self {
            uid,
            api_uid,
            key: PodKey {
                namespace: metadata.namespace.unwrap_or_default(),
                name: metadata.name?,
            },
            // The API server fills in Always; a manifest that nobody has filled in means the same.
            restart_policy: spec
                .restart_policy
                .as_deref()
                .and_then(RestartPolicy::parse)
                .unwrap_or(RestartPolicy::Always),
            containers,
            ephemeral: ephemeral.into_iter().map(|c| c.name.into()).collect(),
            annotations,
            deletion: metadata
                .deletion_timestamp
                .map(|time| time.0)
                .filter(|_| !is_static),
            termination_grace: u32::try_from(grace.max(0)).unwrap_or(u32::MAX),
            is_static,
            phase: phase(pod.status.and_then(|status| status.phase).as_deref()),
        })
    }

    /// Whether its deletion has been asked for.
    #[must_use]
    pub fn is_deleting(&self) -> bool {
        self.deletion.is_some()
    }

    /// The container of that name; ephemeral ones are not found.
    #[must_use]
    pub fn container(&self, name: &ContainerName) -> Option<&ContainerSpec> {
        self.containers.iter().find(|spec| spec.name == *name)
    }

    /// The object that events and patches are about.
    #[must_use]
    pub fn object(&self) -> PodObject {
        PodObject {
            key: self.key.clone(),
            uid: self.api_uid.clone(),
        }
    }
}

impl ContainerSpec {
    fn extract(container: Container, is_init: bool) -> Self {
        let restart_policy = container
            .restart_policy
            .as_deref()
            .and_then(RestartPolicy::parse);
        let kind = match (is_init, restart_policy) {
            (true, Some(RestartPolicy::Always)) => ContainerKind::Sidecar,
            (true, _) => ContainerKind::Init,
            (false, _) => ContainerKind::Regular,
        };
        let rules = container.restart_policy_rules.unwrap_or_default();
        Self {
            name: container.name.into(),
            kind,
            restart_policy,
            rules: rules
                .into_iter()
                .map(|rule| RestartRule {
                    action: rule.action,
                    operator: rule
                        .exit_codes
                        .as_ref()
                        .and_then(|codes| operator(&codes.operator)),
                    codes: rule
                        .exit_codes
                        .and_then(|codes| codes.values)
                        .unwrap_or_default()
                        .into_iter()
                        .map(ExitCode)
                        .collect(),
                })
                .collect(),
        }
    }
}

fn operator(text: &str) -> Option<ExitCodeOperator> {
    match text {
        "In" => Some(ExitCodeOperator::In),
        "NotIn" => Some(ExitCodeOperator::NotIn),
        _ => None,
    }
}

fn phase(text: Option<&str>) -> Phase {
    match text {
        Some("Pending") => Phase::Pending,
        Some("Running") => Phase::Running,
        Some("Succeeded") => Phase::Succeeded,
        Some("Failed") => Phase::Failed,
        _ => Phase::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn extract(pod: Value) -> PodSpec {
        PodSpec::extract(serde_json::from_value(pod).unwrap()).unwrap()
    }

    fn pod() -> Value {
        json!({
            "metadata": {"name": "web", "namespace": "prod", "uid": "u1",
                "annotations": {"reprise.dev/x": "y", LAST_APPLIED: "{}"}},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 7,
                "initContainers": [
                    {"name": "first"},
                    {"name": "proxy", "restartPolicy": "Always"},
                    {"name": "last", "restartPolicy": "Never"}
                ],
                "containers": [
                    {"name": "app", "restartPolicy": "Never", "restartPolicyRules": [
                        {"action": "RestartAllContainers",
                            "exitCodes": {"operator": "In", "values": [42, 43]}}
                    ]},
                    {"name": "helper"}
                ],
                "ephemeralContainers": [{"name": "debug"}]
            },
            "status": {"phase": "Running"}
        })
    }

    #[test]
    fn containers_come_in_start_order_and_ephemeral_ones_apart() {
        let spec = extract(pod());
        let order: Vec<_> = spec
            .containers
            .iter()
            .map(|container| (container.name.as_str(), container.kind))
            .collect();
        let expected = [
            ("first", ContainerKind::Init),
            ("proxy", ContainerKind::Sidecar),
            ("last", ContainerKind::Init),
            ("app", ContainerKind::Regular),
            ("helper", ContainerKind::Regular),
        ];
        assert_eq!(order, expected);
        assert_eq!(spec.ephemeral, [ContainerName::from("debug")]);
        assert_eq!(spec.container(&"debug".into()), None);
    }

    #[test]
    fn what_the_spec_says_is_kept_and_the_manifest_is_not() {
        let spec = extract(pod());
        assert_eq!(spec.key.to_string(), "prod/web");
        assert_eq!(spec.restart_policy, RestartPolicy::Never);
        assert_eq!(spec.termination_grace, 7);
        assert_eq!(spec.phase, Phase::Running);
        assert_eq!((spec.is_deleting(), spec.is_static), (false, false));
        assert!(spec.annotations.keys().eq(["reprise.dev/x"]));
        let app = spec.container(&"app".into()).unwrap();
        assert_eq!(app.restart_policy, Some(RestartPolicy::Never));
        assert_eq!(app.rules[0].action, "RestartAllContainers");
        assert_eq!(app.rules[0].operator, Some(ExitCodeOperator::In));
        assert_eq!(app.rules[0].codes, [ExitCode(42), ExitCode(43)]);
    }

    #[test]
    fn a_deletion_shortens_the_grace() {
        let mut pod = pod();
        pod["metadata"]["deletionTimestamp"] = json!("2026-01-02T03:04:05Z");
        pod["metadata"]["deletionGracePeriodSeconds"] = json!(0);
        let spec = extract(pod);
        assert!(spec.is_deleting());
        assert_eq!(spec.deletion.unwrap().to_string(), "2026-01-02T03:04:05Z");
        assert_eq!(spec.termination_grace, 0);
    }

    #[test]
    fn a_mirror_goes_by_the_hash_and_its_deletion_is_not_the_pods() {
        let mut pod = pod();
        pod["metadata"]["annotations"] = json!({MIRROR: "h1", HASH: "h1", SOURCE: "file"});
        pod["metadata"]["deletionTimestamp"] = json!("2026-01-02T03:04:05Z");
        let spec = extract(pod);
        assert!(spec.is_static);
        assert_eq!(spec.uid.as_str(), "h1");
        assert_eq!(spec.object().uid.as_str(), "u1");
        assert!(!spec.is_deleting());
    }

    #[test]
    fn a_bare_pod_has_the_defaults_of_the_api() {
        let spec = extract(json!({"metadata": {"name": "a", "namespace": "b", "uid": "u"}}));
        assert_eq!(spec.restart_policy, RestartPolicy::Always);
        assert_eq!(spec.termination_grace, 30);
        assert_eq!(spec.phase, Phase::Unknown);
        assert_eq!(PodSpec::extract(Pod::default()), None);
    }
}
