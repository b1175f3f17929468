//! What one restart is to do, settled at the moment it is decided.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::{ContainerId, ContainerName, ExitCode, PodIdentity};
use crate::kube::{ContainerKind, RestartPolicy};

/// Names a restart in logs, events and on disk.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RestartId(pub String);

impl fmt::Display for RestartId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// How the kubelet is brought to start the containers again. All three are "start by the kubelet".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// The pod's own restart policy restarts exited containers: they stay in the runtime, with their
    /// `lastState`, count and logs. Only what the policy would not run again is removed.
    Kept,
    /// Placeholders stand before the exited containers until the kubelet has replaced them.
    Shielded,
    /// Placeholders stand until the kubelet has recorded them as waiting, then everything is removed: with no
    /// container of the pod left, it begins with the first init container (`computePodActions`).
    Cleared,
}

/// The exit that the restart answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trigger {
    /// The container's name.
    pub name: ContainerName,
    /// The attempt that exited.
    pub container: ContainerId,
    /// What it exited with.
    pub code: ExitCode,
}

/// A container's newest attempt when the restart was decided.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Old {
    /// Its id.
    pub id: ContainerId,
    /// Its exit code; `None` while it ran.
    pub exit: Option<ExitCode>,
}

/// A container of the pod that takes part in the restart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Its name.
    pub name: ContainerName,
    /// What it is to the kubelet.
    pub kind: ContainerKind,
    /// Its newest attempt; `None` if it was never created.
    pub old: Option<Old>,
    /// Its attempts before that one, if the runtime still has any: where the newest is removed, they would be
    /// taken for it.
    pub older: Vec<ContainerId>,
    /// How many placeholders shield it.
    pub placeholders: u8,
}

impl Member {
    fn had_ended(&self) -> bool {
        self.old.as_ref().is_some_and(|old| old.exit.is_some())
    }

    fn was_running(&self) -> bool {
        self.old.as_ref().is_some_and(|old| old.exit.is_none())
    }
}

/// All that a restart needs to know; written to disk before anything is killed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The restart's name.
    pub id: RestartId,
    /// The pod, whose sandbox is kept.
    pub pod: PodIdentity,
    /// What set it off.
    pub trigger: Trigger,
    /// The pod's restart policy, or the safest one where it is not known.
    pub restart_policy: RestartPolicy,
    /// How the containers are started again.
    pub way: Way,
    /// The container whose refused creation proves that the kubelet has recorded the shields.
    pub guard: ContainerName,
    /// The containers, in start order. Under action `Restart` the trigger alone.
    pub members: Vec<Member>,
    /// Whether all containers of the pod take part.
    pub whole_pod: bool,
    /// Whether kinds and order are the spec's; else they are guessed, and no order is kept.
    pub ordered: bool,
    /// How long a container may take to stop, in milliseconds; 0 kills at once.
    pub grace_ms: u64,
    /// When it was decided: milliseconds since the Unix epoch.
    pub decided_at_ms: u64,
    /// How often it has begun anew because containers were started behind its back.
    pub again: u8,
}

/// What a plan is made from.
#[derive(Debug)]
pub struct Circumstances {
    /// The restart's name.
    pub id: RestartId,
    /// The pod, whose sandbox is kept.
    pub pod: PodIdentity,
    /// What set it off.
    pub trigger: Trigger,
    /// `None`: the pod's spec is not known.
    pub restart_policy: Option<RestartPolicy>,
    /// The pod's containers in start order, or in the order they were first created where the spec is not known.
    pub containers: Vec<Member>,
    /// Whether regular containers that had ended before stay as they are.
    pub keep_completed: bool,
    /// How long a container may take to stop, in milliseconds.
    pub grace_ms: u64,
    /// Milliseconds since the Unix epoch.
    pub decided_at_ms: u64,
    /// How often the restart has begun anew.
    pub again: u8,
}

impl Circumstances {
    /// Whether the kubelet starts the trigger again by itself, as the pod's policy says.
    fn kubelet_restarts_trigger(&self) -> bool {
        let kind = kind_of(&self.containers, &self.trigger.name);
        match self.restart_policy {
            _ if kind == Some(ContainerKind::Sidecar) => true,
            // It has completed (KEP-5307: init containers restart "until it succeeds").
            _ if kind == Some(ContainerKind::Init) && self.trigger.code == ExitCode::SUCCESS => {
                true
            }
            Some(RestartPolicy::Always) => true,
            Some(RestartPolicy::OnFailure) => self.trigger.code != ExitCode::SUCCESS,
            Some(RestartPolicy::Never) | None => false,
        }
    }

    /// The plan for `RestartAllContainers` and `RestartPod` (KEP-5532, "Restart Phases").
    #[must_use]
    pub fn restart_all(mut self) -> Plan {
        if self.keep_completed {
            let trigger = self.trigger.name.clone();
            self.containers.retain(|member| {
                member.name == trigger
                    || member.kind != ContainerKind::Regular
                    || !member.had_ended()
            });
        }
        let way = self.way();
        let mut plan = self.into_plan(way, true);
        plan.guard = plan.choose_guard();
        if way != Way::Kept {
            plan.place_shields();
        }
        plan
    }

    /// The plan for `Restart` (KEP-5307); `None` where the kubelet restarts that container by itself.
    #[must_use]
    pub fn restart_one(mut self) -> Option<Plan> {
        if self.kubelet_restarts_trigger() {
            return None;
        }
        let trigger = self.trigger.name.clone();
        self.containers.retain(|member| member.name == trigger);
        for member in &mut self.containers {
            // With one, the pod would count as stopped if every other container had ended (getPhase).
            member.placeholders = 2;
        }
        Some(self.into_plan(Way::Shielded, false))
    }

    fn way(&self) -> Way {
        let members = &self.containers;
        let trigger_kind = kind_of(members, &self.trigger.name);
        let Some(policy) = self.restart_policy else {
            return Way::Cleared;
        };
        let regular_runs = members
            .iter()
            .any(|member| member.kind == ContainerKind::Regular && member.was_running());
        let trigger_is_regular = trigger_kind == Some(ContainerKind::Regular);
        let plain = members
            .iter()
            .all(|member| member.kind == ContainerKind::Regular);
        match policy {
            // The release of a regular container's exit is what wakes the kubelet; without one to release,
            // nothing tells it that the init containers are gone.
            _ if !regular_runs && !trigger_is_regular => Way::Cleared,
            RestartPolicy::Always => Way::Kept,
            RestartPolicy::OnFailure if self.kubelet_restarts_trigger() => Way::Kept,
            RestartPolicy::OnFailure | RestartPolicy::Never if plain => Way::Shielded,
            RestartPolicy::OnFailure | RestartPolicy::Never => Way::Cleared,
        }
    }

    fn into_plan(self, way: Way, whole_pod: bool) -> Plan {
        Plan {
            id: self.id,
            pod: self.pod,
            guard: self.trigger.name.clone(),
            trigger: self.trigger,
            ordered: self.restart_policy.is_some(),
            restart_policy: self.restart_policy.unwrap_or(RestartPolicy::Never),
            way,
            members: self.containers,
            whole_pod,
            grace_ms: self.grace_ms,
            decided_at_ms: self.decided_at_ms,
            again: self.again,
        }
    }
}

fn kind_of(members: &[Member], name: &ContainerName) -> Option<ContainerKind> {
    let member = members.iter().find(|member| member.name == *name);
    member.map(|member| member.kind)
}

impl Plan {
    /// The member of that name; ephemeral containers, for one, are none.
    #[must_use]
    pub fn member(&self, name: &ContainerName) -> Option<&Member> {
        self.members.iter().find(|member| member.name == *name)
    }

    /// The kubelet must be about to create the guard when it sees it waiting: a regular container, else the
    /// init container that stopped, else the sidecar that is all there is.
    fn choose_guard(&self) -> ContainerName {
        let trigger = self
            .member(&self.trigger.name)
            .filter(|member| member.old.is_some() && member.kind != ContainerKind::Sidecar);
        let running = |kind| {
            self.members
                .iter()
                .find(move |member| member.kind == kind && member.was_running())
        };
        let guard = trigger
            .or_else(|| running(ContainerKind::Regular))
            .or_else(|| running(ContainerKind::Init));
        guard.map_or_else(|| self.trigger.name.clone(), |member| member.name.clone())
    }

    fn place_shields(&mut self) {
        for member in &mut self.members {
            let exited = member.had_ended();
            member.placeholders = match member.kind {
                _ if member.name == self.guard => 2,
                // A completed regular container is to run again too, and is removed or replaced like the others.
                ContainerKind::Regular if member.was_running() || exited => 1,
                _ => 0,
            };
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::ids::PodKey;
    use ContainerKind::{Init, Regular, Sidecar};

    /// What a container was doing when the restart was decided.
    #[derive(Debug, Clone, Copy)]
    pub(crate) enum Was {
        Absent,
        Running,
        Exited(i32),
    }

    pub(crate) type Shape<'a> = &'a [(&'a str, ContainerKind, Was)];

    pub(crate) fn circumstances(
        policy: Option<RestartPolicy>,
        shape: Shape<'_>,
        trigger: &str,
        code: i32,
    ) -> Circumstances {
        let containers = shape
            .iter()
            .map(|&(name, kind, old)| {
                let id = format!("{name}-0").into();
                let old = match old {
                    Was::Absent => None,
                    Was::Running => Some(Old { id, exit: None }),
                    Was::Exited(code) => {
                        let exit = Some(ExitCode(code));
                        Some(Old { id, exit })
                    }
                };
                Member {
                    name: name.into(),
                    kind,
                    old,
                    older: Vec::new(),
                    placeholders: 0,
                }
            })
            .collect();
        Circumstances {
            id: RestartId("r1".into()),
            pod: PodIdentity {
                sandbox: "s1".into(),
                uid: "u1".into(),
                key: PodKey {
                    namespace: "default".into(),
                    name: "p".into(),
                },
            },
            trigger: Trigger {
                name: trigger.into(),
                container: format!("{trigger}-0").into(),
                code: ExitCode(code),
            },
            restart_policy: policy,
            containers,
            keep_completed: false,
            grace_ms: 0,
            decided_at_ms: 1,
            again: 0,
        }
    }

    pub(crate) fn plan() -> Plan {
        circumstances(
            Some(RestartPolicy::Always),
            &[("a", Regular, RUNS)],
            "a",
            42,
        )
        .restart_all()
    }

    pub(crate) const RUNS: Was = Was::Running;
    pub(crate) const DONE: Was = Was::Exited(0);

    fn shields(plan: &Plan) -> Vec<(&str, u8)> {
        plan.members
            .iter()
            .map(|member| (member.name.as_str(), member.placeholders))
            .collect()
    }

    #[test]
    fn always_keeps_the_containers() {
        let shape: Shape<'_> = &[
            ("i", Init, DONE),
            ("s", Sidecar, RUNS),
            ("a", Regular, RUNS),
        ];
        for trigger in ["s", "a"] {
            let plan = circumstances(Some(RestartPolicy::Always), shape, trigger, 42).restart_all();
            assert_eq!(plan.way, Way::Kept);
            assert_eq!(shields(&plan), [("i", 0), ("s", 0), ("a", 0)]);
        }
    }

    #[test]
    fn an_init_container_that_triggers_is_guarded_under_every_policy() {
        let shape: Shape<'_> = &[("i", Init, RUNS), ("a", Regular, Was::Absent)];
        for policy in [
            RestartPolicy::Always,
            RestartPolicy::OnFailure,
            RestartPolicy::Never,
        ] {
            let plan = circumstances(Some(policy), shape, "i", 42).restart_all();
            assert_eq!(plan.way, Way::Cleared);
            assert_eq!(plan.guard, "i".into());
            assert_eq!(shields(&plan), [("i", 2), ("a", 0)]);
        }
    }

    #[test]
    fn never_without_inits_is_shielded_and_with_them_cleared() {
        let regulars: Shape<'_> = &[
            ("a", Regular, RUNS),
            ("b", Regular, DONE),
            ("c", Regular, RUNS),
        ];
        let plan = circumstances(Some(RestartPolicy::Never), regulars, "c", 42).restart_all();
        assert_eq!(plan.way, Way::Shielded);
        assert_eq!(shields(&plan), [("a", 1), ("b", 1), ("c", 2)]);
        let with_init: Shape<'_> = &[("i", Init, DONE), ("a", Regular, RUNS)];
        let plan = circumstances(Some(RestartPolicy::Never), with_init, "a", 42).restart_all();
        assert_eq!(plan.way, Way::Cleared);
        assert_eq!(shields(&plan), [("i", 0), ("a", 2)]);
    }

    #[test]
    fn completed_containers_run_again_unless_they_are_to_be_kept() {
        let shape: Shape<'_> = &[
            ("i", Init, DONE),
            ("a", Regular, RUNS),
            ("b", Regular, DONE),
        ];
        let mut kept = circumstances(Some(RestartPolicy::Never), shape, "a", 42);
        kept.keep_completed = true;
        assert_eq!(shields(&kept.restart_all()), [("i", 0), ("a", 2)]);
        let all = circumstances(Some(RestartPolicy::Never), shape, "a", 42).restart_all();
        assert_eq!(shields(&all), [("i", 0), ("a", 2), ("b", 1)]);
    }

    #[test]
    fn a_sidecar_that_triggers_is_guarded_by_a_regular_container() {
        let shape: Shape<'_> = &[
            ("s", Sidecar, RUNS),
            ("a", Regular, RUNS),
            ("b", Regular, RUNS),
        ];
        let plan = circumstances(Some(RestartPolicy::Never), shape, "s", 42).restart_all();
        assert_eq!(plan.guard, "a".into());
        assert_eq!(shields(&plan), [("s", 0), ("a", 2), ("b", 1)]);
    }

    #[test]
    fn on_failure_is_like_always_after_a_failure_and_like_never_after_a_success() {
        let shape: Shape<'_> = &[("a", Regular, RUNS), ("b", Regular, RUNS)];
        let way = |code| {
            circumstances(Some(RestartPolicy::OnFailure), shape, "a", code)
                .restart_all()
                .way
        };
        assert_eq!((way(42), way(0)), (Way::Kept, Way::Shielded));
    }

    #[test]
    fn an_unknown_spec_is_the_safest_case() {
        let shape: Shape<'_> = &[("a", Regular, RUNS), ("b", Regular, RUNS)];
        let plan = circumstances(None, shape, "a", 42).restart_all();
        assert_eq!(plan.way, Way::Cleared);
        assert_eq!(plan.restart_policy, RestartPolicy::Never);
    }

    #[test]
    fn action_restart_is_left_to_a_kubelet_that_does_it_itself() {
        let shape: Shape<'_> = &[("s", Sidecar, RUNS), ("a", Regular, RUNS)];
        let restart =
            |policy, trigger, code| circumstances(Some(policy), shape, trigger, code).restart_one();
        assert_eq!(restart(RestartPolicy::Always, "a", 0), None);
        assert_eq!(restart(RestartPolicy::OnFailure, "a", 1), None);
        assert_eq!(restart(RestartPolicy::Never, "s", 1), None);
        let plan = restart(RestartPolicy::Never, "a", 1).unwrap();
        assert!(!plan.whole_pod);
        assert_eq!(shields(&plan), [("a", 2)]);
    }
}
