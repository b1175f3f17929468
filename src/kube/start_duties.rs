//! What the kubelet does at a container's start beside creating and starting it (`pkg/kubelet/kuberuntime`,
//! `startContainer` and `computePodActions`; `pkg/kubelet/kubelet_pods.go`, `GenerateRunContainerOptions`).

use std::collections::BTreeSet;
use std::fmt;

use k8s_openapi::api::core::v1::Container;

use super::variables::Variables;

/// One thing that is more than the container's configuration, or may differ from one start to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StartDuty {
    /// It probes whether the container has started: those after a sidecar wait for that (KEP-753).
    StartupProbe,
    /// It probes whether the container lives.
    LivenessProbe,
    /// It asks the registry for the image each time.
    ImagePull,
    /// It reads variables anew from what may have changed, and is not told here.
    Environment,
    /// It mounts a part of a volume anew, which may have been replaced.
    SubPath,
}

impl StartDuty {
    /// Those of a container; `variables`: `None` if it reads some that are not told here.
    #[must_use]
    pub fn of(container: &Container, variables: Option<&Variables>) -> BTreeSet<Self> {
        let mut mounts = container.volume_mounts.iter().flatten();
        let duties = [
            (Self::StartupProbe, container.startup_probe.is_some()),
            (Self::LivenessProbe, container.liveness_probe.is_some()),
            (Self::ImagePull, is_pulled_always(container)),
            (Self::Environment, variables.is_none()),
            (
                Self::SubPath,
                mounts.any(|it| it.sub_path.is_some() || it.sub_path_expr.is_some()),
            ),
        ];
        let there = duties.into_iter().filter(|(_, there)| *there);
        there.map(|(duty, _)| duty).collect()
    }
}

impl fmt::Display for StartDuty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::StartupProbe => "a startup probe",
            Self::LivenessProbe => "a liveness probe",
            Self::ImagePull => "imagePullPolicy Always",
            Self::Environment => "variables from objects that may have changed",
            Self::SubPath => "a mount with a subPath",
        })
    }
}

/// Manifests of static pods may leave the policy out (`SetDefaults_Container`, `pkg/apis/core/v1/defaults.go`): a tag is
/// looked for in the name, and one with a digest has none of its own (`ParseImageName`, `pkg/util/parsers`).
fn is_pulled_always(container: &Container) -> bool {
    if let Some(policy) = container
        .image_pull_policy
        .as_deref()
        .filter(|it| !it.is_empty())
    {
        return policy == "Always";
    }
    let Some(image) = container.image.as_deref() else {
        return false;
    };
    let (name, has_digest) = match image.split_once('@') {
        Some((name, _)) => (name, true),
        None => (image, false),
    };
    let last = name.rsplit('/').next().unwrap_or(name);
    match last.split_once(':') {
        Some((_, tag)) => tag == "latest",
        None => !has_digest,
    }
}

#[cfg(test)]
mod tests {
    use super::super::variables::variables;
    use super::*;
    use serde_json::{Value, json};

    fn duties(container: Value) -> Vec<StartDuty> {
        let container: Container = serde_json::from_value(container).unwrap();
        let variables = variables(&container);
        StartDuty::of(&container, variables.as_ref())
            .into_iter()
            .collect()
    }

    #[test]
    fn a_plain_container_has_none() {
        let container = json!({
            "name": "a", "image": "i", "imagePullPolicy": "IfNotPresent",
            "env": [
                {"name": "A", "value": "1"},
                {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['c']"}}},
            ],
            "envFrom": [],
            "volumeMounts": [{"name": "v", "mountPath": "/v"}],
            "lifecycle": {"preStop": {"sleep": {"seconds": 1}}, "postStart": {"sleep": {"seconds": 1}}},
            "readinessProbe": {"exec": {"command": ["true"]}},
        });
        assert_eq!(duties(container), []);
    }

    #[test]
    fn an_image_without_a_policy_is_pulled_if_it_is_the_latest() {
        let digest = format!("@sha256:{}", "0".repeat(64));
        for (image, pulled) in [
            ("i".to_owned(), true),
            ("localhost:5000/i".to_owned(), true),
            ("i:latest".to_owned(), true),
            (format!("i:latest{digest}"), true),
            (format!("i{digest}"), false),
            (format!("i:1{digest}"), false),
            ("localhost:5000/i:1".to_owned(), false),
        ] {
            let container = json!({"name": "a", "image": image});
            assert_eq!(!duties(container).is_empty(), pulled, "{image}");
        }
    }

    #[test]
    fn each_is_seen() {
        use StartDuty::{Environment, ImagePull, LivenessProbe, StartupProbe, SubPath};
        let variable = |source: Value| json!({"env": [{"name": "A", "valueFrom": source}]});
        for (part, duty) in [
            (
                json!({"startupProbe": {"exec": {"command": ["true"]}}}),
                StartupProbe,
            ),
            (
                json!({"livenessProbe": {"exec": {"command": ["true"]}}}),
                LivenessProbe,
            ),
            (json!({"imagePullPolicy": "Always"}), ImagePull),
            (
                json!({"envFrom": [{"secretRef": {"name": "s"}}]}),
                Environment,
            ),
            (
                variable(json!({"configMapKeyRef": {"name": "c", "key": "k"}})),
                Environment,
            ),
            (
                variable(json!({"secretKeyRef": {"name": "c", "key": "k"}})),
                Environment,
            ),
            (
                variable(json!({"resourceFieldRef": {"resource": "limits.cpu"}})),
                Environment,
            ),
            (
                json!({"volumeMounts": [{"name": "v", "mountPath": "/v", "subPath": "s"}]}),
                SubPath,
            ),
        ] {
            let mut container = json!({"name": "a", "image": "i:1"});
            container
                .as_object_mut()
                .unwrap()
                .extend(part.as_object().unwrap().clone());
            assert_eq!(duties(container), [duty]);
        }
    }
}
