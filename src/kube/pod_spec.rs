//! What the plugin must know of a pod's spec, and nothing else: the CRI tells neither policies nor kinds.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, ContainerRestartRule, Pod, PodStatus};
use serde::{Deserialize, Serialize};

use super::start_duties::StartDuty;
use crate::ids::{ContainerName, PodKey, PodUid};

/// On mirror pods: the UID under which the kubelet runs the static pod (`pkg/kubelet/types/pod_update.go`).
const CONFIG_HASH: &str = "kubernetes.io/config.hash";
/// The conditions that say that a restart is under way: KEP-5532's, and ours where the kubelet owns those.
const RESTARTING: [&str; 4] = [
    "AllContainersRestarting",
    "PodRestarting",
    "reprise.dev/AllContainersRestarting",
    "reprise.dev/PodRestarting",
];

/// `restartPolicy`, of a pod or of one container (KEP-5307).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RestartPolicy {
    /// Every exit is followed by a start.
    Always,
    /// Every failure is followed by a start.
    OnFailure,
    /// No container is started twice.
    Never,
}

/// What a container is to the kubelet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ContainerKind {
    /// An init container that must complete before the next one starts.
    Init,
    /// An init container with `restartPolicy: Always` (KEP-753).
    Sidecar,
    /// A container of `spec.containers`.
    Regular,
}

/// One container of a pod.
#[derive(Debug, Clone, PartialEq)]
pub struct ContainerSpec {
    /// Its name.
    pub name: ContainerName,
    /// What it is.
    pub kind: ContainerKind,
    /// Its own restart policy, which goes before the pod's (KEP-5307).
    pub restart_policy: Option<RestartPolicy>,
    /// Its `restartPolicyRules` (KEP-5307), in order.
    pub rules: Vec<ContainerRestartRule>,
    /// What the kubelet does at its start beside creating and starting it.
    pub duties: BTreeSet<StartDuty>,
}

/// A pod as the API server last told of it.
#[derive(Debug, Clone, PartialEq)]
pub struct PodSpec {
    /// The UID that the CRI has, too: for a static pod not that of its mirror.
    pub uid: PodUid,
    /// The UID of the object in the API, for events and patches: for a static pod that of its mirror.
    pub api_uid: PodUid,
    /// Its place in the API.
    pub key: PodKey,
    /// Its restart policy.
    pub restart_policy: RestartPolicy,
    /// Init containers and sidecars in spec order, regular ones after them. Ephemeral ones are left out.
    pub containers: Vec<ContainerSpec>,
    /// Whether it is being deleted, or has Failed or Succeeded, which no kubelet takes back.
    pub ending: bool,
    /// The conditions that say that it is being restarted, by type. A plugin that died leaves them behind.
    pub restarting: BTreeSet<String>,
}

impl PodSpec {
    /// `None`: an object without metadata or spec, which no API server sends.
    #[must_use]
    pub fn from_pod(pod: &Pod) -> Option<Self> {
        let meta = &pod.metadata;
        let spec = pod.spec.as_ref()?;
        let api_uid = meta.uid.as_ref()?;
        let annotations = meta.annotations.as_ref();
        let hash = annotations.and_then(|annotations| annotations.get(CONFIG_HASH));
        let inits = spec.init_containers.iter().flatten();
        let inits = inits.map(|container| of_kind(container, init_kind(container)));
        let regulars = spec.containers.iter();
        let regulars = regulars.map(|container| of_kind(container, ContainerKind::Regular));
        Some(Self {
            uid: hash.unwrap_or(api_uid).as_str().into(),
            api_uid: api_uid.as_str().into(),
            key: PodKey {
                namespace: meta.namespace.clone()?,
                name: meta.name.clone()?,
            },
            restart_policy: restart_policy(spec.restart_policy.as_deref())
                .unwrap_or(RestartPolicy::Always),
            containers: inits.chain(regulars).collect(),
            // A mirror may tell of the static pod before this one.
            ending: meta.deletion_timestamp.is_some() || (hash.is_none() && is_over(pod)),
            restarting: pod.status.as_ref().map(restarting).unwrap_or_default(),
        })
    }

    /// The names of all containers, in start order.
    pub fn container_names(&self) -> impl Iterator<Item = &str> {
        self.containers
            .iter()
            .map(|container| container.name.as_str())
    }
}

fn is_over(pod: &Pod) -> bool {
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Failed" | "Succeeded"))
}

fn restart_policy(text: Option<&str>) -> Option<RestartPolicy> {
    match text? {
        "Always" => Some(RestartPolicy::Always),
        "OnFailure" => Some(RestartPolicy::OnFailure),
        "Never" => Some(RestartPolicy::Never),
        _ => None,
    }
}

fn of_kind(container: &Container, kind: ContainerKind) -> ContainerSpec {
    ContainerSpec {
        name: container.name.as_str().into(),
        kind,
        restart_policy: restart_policy(container.restart_policy.as_deref()),
        rules: container.restart_policy_rules.clone().unwrap_or_default(),
        duties: StartDuty::of(container),
    }
}

fn init_kind(container: &Container) -> ContainerKind {
    match restart_policy(container.restart_policy.as_deref()) {
        Some(RestartPolicy::Always) => ContainerKind::Sidecar,
        _ => ContainerKind::Init,
    }
}

fn restarting(status: &PodStatus) -> BTreeSet<String> {
    let conditions = status.conditions.iter().flatten();
    let holding = conditions.filter(|condition| condition.status == "True");
    holding
        .map(|condition| &condition.type_)
        .filter(|kind| RESTARTING.contains(&kind.as_str()))
        .cloned()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::ContainerKind::{Init, Regular, Sidecar};
    use super::*;
    use serde_json::{Value, json};

    fn spec(value: serde_json::Value) -> Option<PodSpec> {
        PodSpec::from_pod(&serde_json::from_value(value).unwrap())
    }

    #[test]
    fn containers_come_in_start_order_with_their_kinds() {
        let spec = spec(json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {
                "restartPolicy": "Never",
                "containers": [{"name": "a"}, {"name": "b"}],
                "ephemeralContainers": [{"name": "debug"}],
                "initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}],
            },
        }))
        .unwrap();
        let kinds: Vec<_> = spec.containers.iter().map(|it| it.kind).collect();
        assert_eq!(
            spec.container_names().collect::<Vec<_>>(),
            ["i", "s", "a", "b"]
        );
        assert_eq!(kinds, [Init, Sidecar, Regular, Regular]);
        assert_eq!(spec.restart_policy, RestartPolicy::Never);
        assert!(!spec.ending);
    }

    #[test]
    fn a_static_pod_goes_by_the_hash_of_its_manifest() {
        let spec = spec(json!({
            "metadata": {
                "name": "p", "namespace": "n", "uid": "mirror",
                "annotations": {"kubernetes.io/config.hash": "abc"},
                "deletionTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": {"containers": [{"name": "a"}]},
        }))
        .unwrap();
        assert_eq!(spec.uid, "abc".into());
        assert_eq!(spec.api_uid, "mirror".into());
        assert_eq!(spec.restart_policy, RestartPolicy::Always);
        assert!(spec.ending);
    }

    #[test]
    fn what_has_failed_or_succeeded_ends_but_for_a_mirror_that_may_be_an_older_one() {
        let ends = |annotations: Value, phase: &str| {
            let pod = json!({
                "metadata": {"name": "p", "namespace": "n", "uid": "u", "annotations": annotations},
                "spec": {"containers": [{"name": "a"}]},
                "status": {"phase": phase},
            });
            spec(pod).unwrap().ending
        };
        for (phase, over) in [("Running", false), ("Failed", true), ("Succeeded", true)] {
            assert_eq!(ends(json!({}), phase), over);
            assert!(!ends(json!({"kubernetes.io/config.hash": "abc"}), phase));
        }
    }

    #[test]
    fn a_container_has_its_own_policy_and_rules() {
        let rule = json!({"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}});
        let spec = spec(json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {
                "initContainers": [{"name": "s", "restartPolicy": "Always"}],
                "containers": [
                    {"name": "a", "restartPolicy": "Never", "restartPolicyRules": [rule]},
                    {"name": "b"},
                ],
            },
        }))
        .unwrap();
        let policies: Vec<_> = spec.containers.iter().map(|it| it.restart_policy).collect();
        assert_eq!(
            policies,
            [
                Some(RestartPolicy::Always),
                Some(RestartPolicy::Never),
                None
            ]
        );
        let rules: Vec<_> = spec.containers.iter().map(|it| it.rules.len()).collect();
        assert_eq!(rules, [0, 1, 0]);
        assert_eq!(spec.containers[1].rules[0].action, "Restart");
    }

    #[test]
    fn conditions_of_a_restart_are_found_while_they_hold() {
        let spec = spec(json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {"containers": [{"name": "a"}]},
            "status": {"conditions": [
                {"type": "Ready", "status": "True"},
                {"type": "PodRestarting", "status": "False"},
                {"type": "AllContainersRestarting", "status": "True"},
                {"type": "reprise.dev/PodRestarting", "status": "True"},
            ]},
        }))
        .unwrap();
        let found: Vec<_> = spec.restarting.iter().collect();
        assert_eq!(
            found,
            ["AllContainersRestarting", "reprise.dev/PodRestarting"]
        );
    }

    #[test]
    fn an_object_without_a_spec_is_none() {
        assert_eq!(spec(json!({"metadata": {"name": "p"}})), None);
    }
}
