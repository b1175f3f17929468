//! What the plugin must know of a pod's spec, and nothing else: the CRI tells neither policies nor kinds.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::{
    Container, ContainerRestartRule, ContainerStatus, Pod, PodStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Serialize};

use super::conditions::LAST_RESTART;
use super::lifecycle::Lifecycle;
use super::start_duties::StartDuty;
use super::variables::{Fields, Variables, variables};
use crate::ids::{ContainerId, ContainerName, PodKey, PodUid};
use crate::policy::{Request, RequestError};

/// On mirror pods: the UID under which the kubelet runs the static pod (`pkg/kubelet/types/pod_update.go`).
const CONFIG_HASH: &str = "kubernetes.io/config.hash";
/// On mirror pods, and what makes a pod one to the kubelet, which then runs no containers for it (`IsMirrorPod`, the same
/// file).
const CONFIG_MIRROR: &str = "kubernetes.io/config.mirror";
/// Where the pod does not say (`DefaultTerminationGracePeriodSeconds`, pkg/apis/core/v1).
pub const DEFAULT_GRACE: Duration = Duration::from_secs(30);
/// A year. The API takes numbers that no clock does.
const LONGEST_GRACE: Duration = Duration::from_hours(365 * 24);
/// The conditions that say that a restart is under way: KEP-5532's, and ours where the kubelet owns those.
pub(crate) const RESTARTING: [&str; 4] = [
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

/// One container of a pod. Read as the API has it, it is a regular one.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(from = "Container")]
pub struct ContainerSpec {
    /// Its name.
    pub name: ContainerName,
    /// What it is.
    pub kind: ContainerKind,
    /// The image that its next attempt is to have; `None` in a template that leaves it out.
    pub image: Option<String>,
    /// Its own restart policy, which goes before the pod's (KEP-5307).
    pub restart_policy: Option<RestartPolicy>,
    /// Its `restartPolicyRules` (KEP-5307), in order.
    pub rules: Vec<ContainerRestartRule>,
    /// What is run right after its start, and before it is told to stop.
    pub lifecycle: Lifecycle,
    /// What the kubelet does at its start beside creating and starting it.
    pub duties: BTreeSet<StartDuty>,
    /// Variables that hold labels and annotations of the pod.
    pub variables: Variables,
    /// Extended resources, which device plugins give it.
    pub devices: BTreeSet<String>,
    /// How much memory it requests, as the API has it: of what may be changed in place, this alone does not show in the
    /// runtime.
    pub memory_request: Option<String>,
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
    /// What of its labels and annotations the variables hold.
    pub fields: Fields,
    /// Whether it is being deleted, or has Failed or Succeeded, which no kubelet takes back. Never of a static pod: it ends
    /// with its manifest, and a mirror that is deleted is made anew (`tryReconcileMirrorPods`, `pkg/kubelet/kubelet.go`).
    pub ending: bool,
    /// How long its containers may take to stop when it ends.
    pub grace: Duration,
    /// Its IP address, if it has one yet.
    pub address: Option<String>,
    /// The conditions that say that it is being restarted, by type. A plugin that died leaves them behind.
    pub restarting: BTreeSet<String>,
    /// The newest container of each name that the kubelet has seen, by its status.
    pub recorded: BTreeSet<ContainerId>,
    /// Those of them that have started to the kubelet: their startup probes, if they have any, have succeeded.
    pub started: BTreeSet<ContainerId>,
    /// How often the spec was written: 1 for the one that the pod was made with. From 1.33 on the API server counts
    /// (`metadata.generation`, KEP-5067); before, images alone may change, which the runtime's configuration shows.
    pub generation: i64,
    /// How often it has restarted, as far as a condition says.
    pub restarts: u32,
    /// A restart that somebody asks for, unless a condition says that it was answered.
    pub request: Option<Result<Request, RequestError>>,
}

impl PodSpec {
    /// Of a pod on the node of that name. `None`: an object without metadata or spec, which no API server sends.
    #[must_use]
    pub fn from_pod(pod: &Pod, node: &str) -> Option<Self> {
        let meta = &pod.metadata;
        let spec = pod.spec.as_ref()?;
        let api_uid = meta.uid.as_ref()?;
        let hash = static_uid(meta, node);
        let inits = spec.init_containers.iter().flatten();
        let inits = inits.map(|container| ContainerSpec::from(container).before_regular());
        let regulars = spec.containers.iter().map(ContainerSpec::from);
        let containers: Vec<_> = inits.chain(regulars).collect();
        Some(Self {
            uid: hash.unwrap_or(api_uid).as_str().into(),
            api_uid: api_uid.as_str().into(),
            key: PodKey {
                namespace: meta.namespace.clone()?,
                name: meta.name.clone()?,
            },
            restart_policy: pod_policy(spec.restart_policy.as_deref()),
            fields: Fields::of(
                containers.iter().map(|it| &it.variables),
                meta.labels.as_ref(),
                meta.annotations.as_ref(),
            ),
            containers,
            ending: hash.is_none() && (meta.deletion_timestamp.is_some() || is_over(pod)),
            // Whoever deletes a pod may give it another time than the pod asked for.
            grace: grace(
                meta.deletion_grace_period_seconds
                    .or(spec.termination_grace_period_seconds),
            ),
            address: pod.status.as_ref().and_then(|it| it.pod_ip.clone()),
            restarting: pod.status.as_ref().map(restarting).unwrap_or_default(),
            recorded: pod.status.as_ref().map(recorded).unwrap_or_default(),
            started: pod.status.as_ref().map(started).unwrap_or_default(),
            generation: meta.generation.unwrap_or(1),
            restarts: last_restart(pod).and_then(restarts).unwrap_or_default(),
            request: request(pod),
        })
    }

    /// Whether the API's object is only the mirror of a static pod.
    #[must_use]
    pub fn is_mirrored(&self) -> bool {
        self.uid != self.api_uid
    }

    /// The container of that name; an ephemeral one is none.
    #[must_use]
    pub fn container(&self, name: &ContainerName) -> Option<&ContainerSpec> {
        self.containers.iter().find(|it| it.name == *name)
    }

    /// The names of all containers, in start order.
    pub fn container_names(&self) -> impl Iterator<Item = &str> {
        self.containers
            .iter()
            .map(|container| container.name.as_str())
    }
}

/// The UID of the static pod of which this is the mirror; `None`: it is a pod in its own right. Any pod may have the
/// annotations. The owner keeps a pod that has them by mistake apart, but whoever may create pods may also write that: the
/// API server holds only nodes to it (`admitPodCreate`, `plugin/pkg/admission/noderestriction`). So nothing may follow
/// from a UID alone, but only from a UID together with a namespace and a name, which belong to one pod at a time.
fn static_uid<'p>(meta: &'p ObjectMeta, node: &str) -> Option<&'p String> {
    let annotations = meta.annotations.as_ref()?;
    let mut owners = meta.owner_references.iter().flatten();
    let is_mirror = annotations.contains_key(CONFIG_MIRROR)
        && owners.any(|owner| {
            (
                owner.api_version.as_str(),
                owner.kind.as_str(),
                owner.name.as_str(),
            ) == ("v1", "Node", node)
        });
    annotations.get(CONFIG_HASH).filter(|_| is_mirror)
}

/// How long containers may take to stop, of what the API says in seconds.
pub(super) fn grace(seconds: Option<i64>) -> Duration {
    let grace = seconds.map_or(DEFAULT_GRACE, |seconds| {
        Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
    });
    grace.min(LONGEST_GRACE)
}

fn is_over(pod: &Pod) -> bool {
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Failed" | "Succeeded"))
}

/// A pod's policy, of what the API says.
pub(super) fn pod_policy(text: Option<&str>) -> RestartPolicy {
    restart_policy(text).unwrap_or(RestartPolicy::Always)
}

fn restart_policy(text: Option<&str>) -> Option<RestartPolicy> {
    match text? {
        "Always" => Some(RestartPolicy::Always),
        "OnFailure" => Some(RestartPolicy::OnFailure),
        "Never" => Some(RestartPolicy::Never),
        _ => None,
    }
}

impl From<&Container> for ContainerSpec {
    fn from(container: &Container) -> Self {
        let variables = variables(container);
        Self {
            name: container.name.as_str().into(),
            kind: ContainerKind::Regular,
            image: container.image.clone(),
            restart_policy: restart_policy(container.restart_policy.as_deref()),
            rules: container.restart_policy_rules.clone().unwrap_or_default(),
            lifecycle: Lifecycle::of(container),
            duties: StartDuty::of(container, variables.as_ref()),
            variables: variables.unwrap_or_default(),
            devices: devices(container),
            memory_request: memory_request(container),
        }
    }
}

/// As the kubelet tells them from its own (`IsExtendedResourceName`, `pkg/apis/core/v1/helper/helpers.go`).
fn devices(container: &Container) -> BTreeSet<String> {
    let resources = container.resources.as_ref();
    let limits = resources.and_then(|it| it.limits.as_ref());
    let names = limits.into_iter().flat_map(|limits| limits.keys());
    let extended = names.filter(|name| name.contains('/') && !name.contains("kubernetes.io/"));
    extended.cloned().collect()
}

fn memory_request(container: &Container) -> Option<String> {
    let requests = container.resources.as_ref()?.requests.as_ref()?;
    requests.get("memory").map(|quantity| quantity.0.clone())
}

impl From<Container> for ContainerSpec {
    fn from(container: Container) -> Self {
        Self::from(&container)
    }
}

impl ContainerSpec {
    /// The same among `spec.initContainers`.
    pub(super) fn before_regular(self) -> Self {
        let kind = match self.restart_policy {
            Some(RestartPolicy::Always) => ContainerKind::Sidecar,
            _ => ContainerKind::Init,
        };
        Self { kind, ..self }
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

/// Other plugins may have answered it whose disk is gone.
fn request(pod: &Pod) -> Option<Result<Request, RequestError>> {
    let annotations = pod.metadata.annotations.as_ref()?;
    let request = Request::of(|key| annotations.get(key).map(String::as_str))?;
    let message = last_restart(pod);
    let answered = message.and_then(Request::answered_in);
    let is_answered = |request: &Request| answered == Some(request.as_str());
    (!request.as_ref().is_ok_and(is_answered)).then_some(request)
}

/// What the condition says of it.
fn last_restart(pod: &Pod) -> Option<&str> {
    let conditions = pod.status.iter().flat_map(|it| &it.conditions).flatten();
    let mut last = conditions.filter(|it| it.type_ == LAST_RESTART);
    last.next()?.message.as_deref()
}

/// How many there were by then: the message begins with the number (`report::condition`).
fn restarts(message: &str) -> Option<u32> {
    let (number, _) = message.strip_prefix("Restart ")?.split_once(':')?;
    number.parse().ok()
}

fn recorded(status: &PodStatus) -> BTreeSet<ContainerId> {
    let ids = statuses(status).filter_map(|it| it.container_id.as_deref());
    ids.filter_map(container_id).collect()
}

fn started(status: &PodStatus) -> BTreeSet<ContainerId> {
    let started = statuses(status).filter(|it| it.started == Some(true));
    let ids = started.filter_map(|it| it.container_id.as_deref());
    ids.filter_map(container_id).collect()
}

/// Of the init containers, then of the regular ones.
pub(crate) fn statuses(status: &PodStatus) -> impl Iterator<Item = &ContainerStatus> {
    let inits = status.init_container_statuses.iter().flatten();
    inits.chain(status.container_statuses.iter().flatten())
}

/// Written as `<runtime>://<id>` (`ContainerID`, `pkg/kubelet/container/runtime.go`).
pub(crate) fn container_id(written: &str) -> Option<ContainerId> {
    Some(written.split_once("://")?.1.into())
}

#[cfg(test)]
mod tests {
    use super::ContainerKind::{Init, Regular, Sidecar};
    use super::*;
    use serde_json::{Value, json};

    fn spec(value: serde_json::Value) -> Option<PodSpec> {
        PodSpec::from_pod(&serde_json::from_value(value).unwrap(), "node-1")
    }

    fn meta(annotations: &Value, owner: &Value) -> Value {
        json!({
            "name": "p", "namespace": "n", "uid": "u",
            "annotations": annotations, "ownerReferences": [owner],
        })
    }

    /// As the kubelet makes it (`CreateMirrorPod`, `pkg/kubelet/pod/mirror_client.go`).
    fn mirror() -> Value {
        meta(
            &json!({"kubernetes.io/config.hash": "abc", "kubernetes.io/config.mirror": "abc"}),
            &json!({"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "x", "controller": true}),
        )
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
    fn a_mirror_goes_by_the_hash_of_its_manifest_and_ends_with_nothing_that_is_done_to_it() {
        let mut meta = mirror();
        meta["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        let spec = spec(json!({
            "metadata": meta,
            "spec": {"containers": [{"name": "a"}]},
            "status": {"phase": "Failed"},
        }))
        .unwrap();
        assert_eq!(spec.uid, "abc".into());
        assert_eq!(spec.api_uid, "u".into());
        assert_eq!(spec.restart_policy, RestartPolicy::Always);
        assert!(spec.is_mirrored() && !spec.ending);
    }

    #[test]
    fn a_pod_that_is_no_mirror_of_this_node_cannot_say_what_its_uid_is() {
        let hash = "kubernetes.io/config.hash";
        let both = json!({hash: "abc", "kubernetes.io/config.mirror": "abc"});
        let owner = |version: &str, kind: &str, name: &str| json!({"apiVersion": version, "kind": kind, "name": name, "uid": "x"});
        let node = owner("v1", "Node", "node-1");
        for meta in [
            meta(&json!({hash: "abc"}), &node),
            meta(&both, &owner("apps/v1", "ReplicaSet", "node-1")),
            meta(&both, &owner("example.com/v1", "Node", "node-1")),
            meta(&both, &owner("v1", "Node", "node-2")),
        ] {
            let pod = json!({"metadata": meta, "spec": {"containers": [{"name": "a"}]}});
            let spec = spec(pod).unwrap();
            assert_eq!(spec.uid, "u".into(), "{meta}");
            assert!(!spec.is_mirrored());
        }
    }

    #[test]
    fn what_has_failed_or_succeeded_or_is_being_deleted_ends() {
        let ends = |deleted: Value, phase: &str| {
            let pod = json!({
                "metadata": {"name": "p", "namespace": "n", "uid": "u", "deletionTimestamp": deleted},
                "spec": {"containers": [{"name": "a"}]},
                "status": {"phase": phase},
            });
            spec(pod).unwrap().ending
        };
        for (phase, over) in [("Running", false), ("Failed", true), ("Succeeded", true)] {
            assert_eq!(ends(json!(null), phase), over);
        }
        assert!(ends(json!("2026-01-01T00:00:00Z"), "Running"));
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
    fn a_pod_stops_in_the_time_that_it_or_whoever_deletes_it_says() {
        let grace = |deletion: Value, pod: Value| {
            let pod = json!({
                "metadata": {"name": "p", "namespace": "n", "uid": "u", "deletionGracePeriodSeconds": deletion},
                "spec": {"containers": [{"name": "a"}], "terminationGracePeriodSeconds": pod},
            });
            spec(pod).unwrap().grace.as_secs()
        };
        assert_eq!(grace(json!(5), json!(600)), 5);
        assert_eq!(grace(json!(null), json!(600)), 600);
        assert_eq!(grace(json!(null), json!(null)), 30);
        assert_eq!(grace(json!(-1), json!(null)), 0);
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
    fn a_condition_tells_how_often_the_pod_has_restarted() {
        let restarts = |message: &str| {
            let pod = json!({
                "metadata": {"name": "p", "namespace": "n", "uid": "u"},
                "spec": {"containers": [{"name": "a"}]},
                "status": {"conditions": [
                    {"type": "Ready", "status": "True", "message": "Restart 7: not ours"},
                    {"type": LAST_RESTART, "status": "True", "message": message},
                ]},
            });
            spec(pod).unwrap().restarts
        };
        assert_eq!(restarts("Restart 12: container a exited with code 3"), 12);
        for unknown in ["", "Restart : a", "Restart -1: a", "Restart 5000000000: a"] {
            assert_eq!(restarts(unknown), 0, "{unknown}");
        }
    }

    #[test]
    fn an_object_without_a_spec_is_none() {
        assert_eq!(spec(json!({"metadata": {"name": "p"}})), None);
    }
}
