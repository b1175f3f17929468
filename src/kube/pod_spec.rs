//! What the plugin must know of a pod's spec, and nothing else: the CRI tells neither policies nor kinds.

use k8s_openapi::api::core::v1::{Container, Pod};
use serde::{Deserialize, Serialize};

use crate::ids::{ContainerName, PodKey, PodUid};

/// On mirror pods: the UID under which the kubelet runs the static pod (`pkg/kubelet/types/pod_update.go`).
const CONFIG_HASH: &str = "kubernetes.io/config.hash";

/// `spec.restartPolicy`.
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerSpec {
    /// Its name.
    pub name: ContainerName,
    /// What it is.
    pub kind: ContainerKind,
}

/// A pod as the API server last told of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodSpec {
    /// The UID that the CRI has, too: for a static pod not that of its mirror.
    pub uid: PodUid,
    /// Its place in the API.
    pub key: PodKey,
    /// Its restart policy.
    pub restart_policy: RestartPolicy,
    /// Init containers and sidecars in spec order, regular ones after them. Ephemeral ones are left out.
    pub containers: Vec<ContainerSpec>,
    /// Whether it is being deleted.
    pub deleting: bool,
}

impl PodSpec {
    /// `None`: an object without metadata or spec, which no API server sends.
    #[must_use]
    pub fn from_pod(pod: &Pod) -> Option<Self> {
        let meta = &pod.metadata;
        let spec = pod.spec.as_ref()?;
        let annotations = meta.annotations.as_ref();
        let hash = annotations.and_then(|annotations| annotations.get(CONFIG_HASH));
        let uid = hash.or(meta.uid.as_ref())?;
        let inits = spec.init_containers.iter().flatten();
        let inits = inits.map(|container| of_kind(container, init_kind(container)));
        let regulars = spec.containers.iter();
        let regulars = regulars.map(|container| of_kind(container, ContainerKind::Regular));
        Some(Self {
            uid: uid.as_str().into(),
            key: PodKey {
                namespace: meta.namespace.clone()?,
                name: meta.name.clone()?,
            },
            restart_policy: match spec.restart_policy.as_deref() {
                Some("Never") => RestartPolicy::Never,
                Some("OnFailure") => RestartPolicy::OnFailure,
                _ => RestartPolicy::Always,
            },
            containers: inits.chain(regulars).collect(),
            deleting: meta.deletion_timestamp.is_some(),
        })
    }

    /// The names of all containers, in start order.
    pub fn container_names(&self) -> impl Iterator<Item = &str> {
        self.containers
            .iter()
            .map(|container| container.name.as_str())
    }
}

fn of_kind(container: &Container, kind: ContainerKind) -> ContainerSpec {
    ContainerSpec {
        name: container.name.as_str().into(),
        kind,
    }
}

fn init_kind(container: &Container) -> ContainerKind {
    match container.restart_policy.as_deref() {
        Some("Always") => ContainerKind::Sidecar,
        _ => ContainerKind::Init,
    }
}

#[cfg(test)]
mod tests {
    use super::ContainerKind::{Init, Regular, Sidecar};
    use super::*;
    use serde_json::json;

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
        assert!(!spec.deleting);
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
        assert_eq!(spec.restart_policy, RestartPolicy::Always);
        assert!(spec.deleting);
    }

    #[test]
    fn an_object_without_a_spec_is_none() {
        assert_eq!(spec(json!({"metadata": {"name": "p"}})), None);
    }
}
