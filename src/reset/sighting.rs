//! What hard resets go by of a pod, as the API server tells of it.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{
    Container, ContainerStateTerminated, ContainerStatus, Pod, PodSpec, Probe,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};

use super::terms::Terms;
use crate::ids::{ContainerId, ContainerName, ExitCode, PodKey, PodUid};
use crate::kube::statuses;
use crate::policy::{self, FailureAction, FailurePolicy, PolicyError};

/// On mirror pods (`pkg/kubelet/types/pod_update.go`). Any pod may have it: then it is never reset.
const CONFIG_MIRROR: &str = "kubernetes.io/config.mirror";

/// One look at a pod.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sighting {
    pub(super) key: PodKey,
    pub(super) uid: PodUid,
    /// What its author wants; `None`: as the node says.
    pub(super) policy: Result<Option<FailurePolicy>, PolicyError>,
    /// Who would make a new one, as it says itself.
    pub(super) controller: Option<OwnerReference>,
    /// It comes from a manifest on the node.
    pub(super) is_static: bool,
    /// It is being deleted, or is over.
    pub(super) ending: bool,
    pub(super) ready: bool,
    /// When that changed last, in seconds since the epoch.
    pub(super) ready_changed: i64,
    pub(super) containers: Vec<Watched>,
}

/// One of its containers, sidecars and init containers among them.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Watched {
    pub(super) name: ContainerName,
    /// How long it must have run before a probe that fails can have it restarted; `None`: no probe can.
    pub(super) probed_after: Option<Duration>,
    /// An init container, which is meant to end.
    pub(super) completes: bool,
    /// The number of the newest attempt.
    pub(super) restarts: u32,
    /// The newest attempt, if it runs.
    pub(super) running: Option<ContainerId>,
    /// What is told of exits: of the newest attempt and the one before; oldest first.
    pub(super) exits: Vec<Exit>,
}

/// One exit.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Exit {
    pub(super) id: ContainerId,
    /// The number of the attempt.
    pub(super) attempt: u32,
    pub(super) code: ExitCode,
    /// In one word: `Error`, `OOMKilled`.
    pub(super) reason: String,
    /// In seconds since the epoch, by the kubelet's clock.
    pub(super) started: i64,
    pub(super) finished: i64,
}

pub(super) fn uid(pod: &Pod) -> Option<PodUid> {
    Some(pod.metadata.uid.as_deref()?.into())
}

impl Sighting {
    /// `None`: nobody wants it reset. Of most pods of a node nothing more is looked at.
    pub(super) fn of(pod: &Pod, terms: &Terms) -> Option<Self> {
        let meta = &pod.metadata;
        let annotations = meta.annotations.iter().flatten();
        let annotations = annotations.map(|(key, value)| (key.as_str(), value.as_str()));
        let controller = controller(meta.owner_references.as_deref());
        let annotated = policy::has_failure_policy(annotations.clone().map(|(key, _)| key));
        let by_default = terms.default == FailureAction::DeletePod
            && controller.is_some_and(|it| it.kind == "ReplicaSet");
        if !annotated && !by_default {
            return None;
        }
        let status = pod.status.as_ref();
        let conditions = status.iter().flat_map(|it| it.conditions.iter().flatten());
        let ready = conditions.into_iter().find(|it| it.type_ == "Ready");
        let phase = status.and_then(|status| status.phase.as_deref());
        let mut keys = annotations.clone().map(|(key, _)| key);
        Some(Self {
            key: PodKey {
                namespace: meta.namespace.clone()?,
                name: meta.name.clone()?,
            },
            uid: uid(pod)?,
            is_static: keys.any(|key| key == CONFIG_MIRROR),
            policy: FailurePolicy::from_annotations(annotations),
            controller: controller.cloned(),
            ending: meta.deletion_timestamp.is_some()
                || matches!(phase, Some("Failed" | "Succeeded")),
            ready: ready.is_some_and(|it| it.status == "True"),
            ready_changed: ready
                .map(|it| second(it.last_transition_time.as_ref()))
                .unwrap_or_default(),
            containers: containers(pod),
        })
    }
}

impl Sighting {
    /// Whether it says nothing of what it wants: then it is reset only if the node's configuration wants that.
    pub(super) fn is_silent(&self) -> bool {
        self.policy == Ok(None)
    }

    /// Whether what was decided of the pod when it looked like this still holds: it is the same one, was not Ready since, and
    /// nobody has changed what is wanted for it.
    pub(super) fn holds(&self, now: &Self) -> bool {
        let is_same = self.uid == now.uid
            && self.ready_changed == now.ready_changed
            && self.policy == now.policy
            && self.controller == now.controller
            && self.is_static == now.is_static;
        is_same && !now.ready && !now.ending
    }
}

/// The owner that manages the pod: there is one at most (`ValidateOwnerReferences`, apimachinery).
pub(super) fn controller(owners: Option<&[OwnerReference]>) -> Option<&OwnerReference> {
    let mut owners = owners.into_iter().flatten();
    owners.find(|owner| owner.controller == Some(true))
}

fn containers(pod: &Pod) -> Vec<Watched> {
    let Some((spec, status)) = pod.spec.as_ref().zip(pod.status.as_ref()) else {
        return Vec::new();
    };
    let specs: BTreeMap<&str, (&Container, bool)> = specs(spec).collect();
    statuses(status)
        .filter_map(|status| {
            let (container, completes) = *specs.get(status.name.as_str())?;
            Some(Watched::of(container, completes, status))
        })
        .collect()
}

/// By name, and whether they are meant to end.
fn specs(spec: &PodSpec) -> impl Iterator<Item = (&str, (&Container, bool))> {
    let inits = spec.init_containers.iter().flatten();
    let inits = inits.map(|it| (it, it.restart_policy.as_deref() != Some("Always")));
    let all = inits.chain(spec.containers.iter().map(|it| (it, false)));
    all.map(|(container, completes)| (container.name.as_str(), (container, completes)))
}

impl Watched {
    fn of(container: &Container, completes: bool, status: &ContainerStatus) -> Self {
        let restarts = u32::try_from(status.restart_count).unwrap_or(0);
        let newest = status.container_id.as_deref();
        let last = status.last_state.as_ref();
        let now = status.state.as_ref();
        let told = [last, now].map(|state| state.and_then(|state| state.terminated.as_ref()));
        let exit = |exit: &ContainerStateTerminated| Exit::of(exit, newest, restarts);
        let running = now.is_some_and(|state| state.running.is_some());
        Self {
            name: container.name.as_str().into(),
            probed_after: probed_after(container),
            completes,
            restarts,
            running: newest.filter(|_| running).map(ContainerId::from),
            exits: told.into_iter().flatten().filter_map(exit).collect(),
        }
    }
}

impl Exit {
    /// `None`: nobody knows of which container.
    fn of(exit: &ContainerStateTerminated, newest: Option<&str>, restarts: u32) -> Option<Self> {
        let id = exit.container_id.as_deref()?;
        // While it waits for its back-off, a container's newest attempt is told of as its last state.
        let attempt = if Some(id) == newest {
            Some(restarts)
        } else {
            restarts.checked_sub(1)
        };
        Some(Self {
            id: id.into(),
            attempt: attempt?,
            code: ExitCode(exit.exit_code),
            reason: exit.reason.clone().unwrap_or_default(),
            started: second(exit.started_at.as_ref()),
            finished: second(exit.finished_at.as_ref()),
        })
    }

    /// How long it ran, if the clock was not set meanwhile.
    pub(super) fn ran(&self) -> Duration {
        let seconds = self.finished.saturating_sub(self.started);
        Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
    }
}

/// The kubelet restarts a container when a liveness or startup probe has failed so often in a row, failures of the attempts
/// before among them (`doProbe`, `pkg/kubelet/prober/worker.go`): the first one of this attempt may be enough.
fn probed_after(container: &Container) -> Option<Duration> {
    let probes = [&container.liveness_probe, &container.startup_probe];
    let first = |probe: &Probe| {
        let delay = probe.initial_delay_seconds.unwrap_or(0);
        Duration::from_secs(u64::try_from(delay).unwrap_or(0))
    };
    probes.into_iter().flatten().map(first).min()
}

fn second(time: Option<&Time>) -> i64 {
    time.map_or(0, |time| time.0.as_second())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(status: &Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {
                "name": "p", "namespace": "n", "uid": "u",
                "annotations": {"failure-policy.reprise.dev": "action: DeletePod"},
            },
            "spec": {
                "initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}],
                "containers": [{"name": "a", "livenessProbe": {"initialDelaySeconds": 5, "periodSeconds": 2}}],
            },
            "status": status,
        }))
        .unwrap()
    }

    fn sighting(status: &Value) -> Sighting {
        Sighting::of(&pod(status), &Terms::default()).unwrap()
    }

    fn terminated(id: &str, code: i32) -> Value {
        json!({"terminated": {
            "containerID": id, "exitCode": code, "reason": "Error",
            "startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:00:09Z",
        }})
    }

    fn status(newest: &str, restarts: i32, state: &Value, last: &Value) -> Value {
        json!({"containerStatuses": [{
            "name": "a", "containerID": newest, "restartCount": restarts, "state": state, "lastState": last,
            "image": "", "imageID": "", "ready": false,
        }]})
    }

    #[test]
    fn exits_have_the_numbers_of_their_attempts() {
        let running = json!({"running": {"startedAt": "2026-01-01T00:00:20Z"}});
        let waiting = json!({"waiting": {"reason": "CrashLoopBackOff"}});
        for (status, attempts, runs) in [
            (
                status("c2", 2, &running, &terminated("c1", 1)),
                vec![1],
                true,
            ),
            (
                status("c2", 2, &terminated("c2", 1), &terminated("c1", 1)),
                vec![1, 2],
                false,
            ),
            (
                status("c2", 2, &waiting, &terminated("c2", 1)),
                vec![2],
                false,
            ),
            (status("c0", 0, &running, &json!({})), vec![], true),
        ] {
            let seen = sighting(&status);
            let [container] = seen.containers.as_slice() else {
                panic!("{seen:?}")
            };
            let found: Vec<_> = container.exits.iter().map(|it| it.attempt).collect();
            assert_eq!(found, attempts, "{status}");
            assert_eq!(container.running.is_some(), runs, "{status}");
        }
        let seen = sighting(&status("c2", 2, &waiting, &terminated("c2", 1)));
        assert_eq!(seen.containers[0].exits[0].ran(), Duration::from_secs(9));
    }

    #[test]
    fn one_failure_of_a_probe_may_be_enough_and_there_is_none_before_its_delay() {
        let seen = sighting(&status("c0", 0, &json!({}), &json!({})));
        assert_eq!(
            seen.containers[0].probed_after,
            Some(Duration::from_secs(5))
        );
    }

    #[test]
    fn what_nobody_wants_reset_is_not_looked_at() {
        let mut pod = pod(&json!({}));
        pod.metadata.annotations = None;
        let off = Terms::default();
        let on = Terms {
            default: FailureAction::DeletePod,
            ..Terms::default()
        };
        assert_eq!(Sighting::of(&pod, &off), None);
        assert_eq!(Sighting::of(&pod, &on), None);
        for (kind, controller, wanted) in [
            ("ReplicaSet", Some(true), true),
            ("ReplicaSet", None, false),
            ("DaemonSet", Some(true), false),
        ] {
            let owner = OwnerReference {
                kind: kind.into(),
                controller,
                ..OwnerReference::default()
            };
            pod.metadata.owner_references = Some(vec![owner]);
            assert_eq!(Sighting::of(&pod, &off), None);
            assert_eq!(Sighting::of(&pod, &on).is_some(), wanted, "{kind}");
        }
    }

    #[test]
    fn what_was_decided_holds_until_the_pod_was_ready_or_something_else_is_wanted() {
        let status = |ready: &str, at: &str| json!({"conditions": [{"type": "Ready", "status": ready, "lastTransitionTime": at}]});
        let (long_ago, since) = ("1970-01-01T00:00:07Z", "1970-01-01T00:00:08Z");
        let before = sighting(&status("False", long_ago));
        let mut crashed = before.clone();
        crashed.containers.clear();
        assert!(before.holds(&crashed));
        for other in [
            sighting(&status("True", long_ago)),
            // In between.
            sighting(&status("False", since)),
            Sighting {
                uid: "v".into(),
                ..before.clone()
            },
            Sighting {
                policy: Ok(None),
                ..before.clone()
            },
            Sighting {
                controller: Some(OwnerReference::default()),
                ..before.clone()
            },
            Sighting {
                is_static: true,
                ..before.clone()
            },
            Sighting {
                ending: true,
                ..before.clone()
            },
        ] {
            assert!(!before.holds(&other), "{other:?}");
        }
    }

    #[test]
    fn ready_and_ending_are_told() {
        let seen = sighting(&json!({"phase": "Running", "conditions": [
            {"type": "Ready", "status": "True", "lastTransitionTime": "1970-01-01T00:00:07Z"},
        ]}));
        assert!(seen.ready && !seen.ending && seen.ready_changed == 7);
        let seen = sighting(&json!({"phase": "Failed"}));
        assert!(!seen.ready && seen.ending);
    }
}
