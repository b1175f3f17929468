//! The containers of a pod as the kubelet sees them, of which a plan is made.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::{Member, Old, Plan};
use crate::ids::{ContainerId, ContainerName, ExitCode};
use crate::kube::{ContainerKind, PodSpec, RestartPolicy, StartDuty};
use crate::node::{InstanceState, Instances};

/// What is in the runtime, and the exits that are held, or are about to be: a container whose exit is held runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen<'a> {
    pub(crate) instances: &'a Instances,
    pub(crate) holds: &'a BTreeMap<ContainerId, Instant>,
    pub(crate) awaited: &'a BTreeSet<ContainerId>,
}

impl Seen<'_> {
    /// The pod's containers in start order. `own`: this kubelet goes by their own restart policies, others have the pod's
    /// alone.
    pub(crate) fn of_spec(&self, spec: &PodSpec, own: bool) -> Vec<Member> {
        let members = spec.containers.iter().map(|container| {
            let policy = container.restart_policy.filter(|_| own);
            let policy = policy.unwrap_or(spec.restart_policy);
            Member {
                startup_probe: container.duties.contains(&StartDuty::StartupProbe),
                post_start: container.lifecycle.post_start.is_some(),
                ..self.member(container.name.clone(), container.kind, policy)
            }
        });
        members.collect()
    }

    /// The same by a plan of that pod, if it is for all of them.
    pub(crate) fn of_plan(&self, plan: &Plan) -> Option<Vec<Member>> {
        let members = plan.members.iter().map(|it| Member {
            startup_probe: it.startup_probe,
            post_start: it.post_start,
            ..self.member(it.name.clone(), it.kind, it.restart_policy)
        });
        plan.is_whole_pod().then(|| members.collect())
    }

    /// As far as one can tell without a spec: what has ended while others run was an init container.
    pub(crate) fn guessed(&self, trigger: &ContainerName) -> Vec<Member> {
        let names = self.instances.names_by_creation().into_iter();
        names
            .map(|name| {
                let mut member = self.member(name, ContainerKind::Regular, RestartPolicy::Never);
                if member.had_ended() && member.name != *trigger {
                    member.kind = ContainerKind::Init;
                }
                member
            })
            .collect()
    }

    fn member(
        &self,
        name: ContainerName,
        kind: ContainerKind,
        restart_policy: RestartPolicy,
    ) -> Member {
        let newest = self.instances.newest(&name);
        let is_unseen = |id| self.holds.contains_key(id) || self.awaited.contains(id);
        let old = newest.map(|(id, instance)| Old {
            id: id.clone(),
            exit: match instance.state {
                InstanceState::Ended(code) if !is_unseen(id) => {
                    Some(code.unwrap_or(ExitCode::UNKNOWN))
                }
                _ => None,
            },
        });
        let may_have_succeeded = newest.is_some_and(|(id, instance)| {
            let succeeds = |code: Option<ExitCode>| code.is_none_or(|it| it == ExitCode::SUCCESS);
            is_unseen(id) && matches!(instance.state, InstanceState::Ended(code) if succeeds(code))
        });
        Member {
            kind,
            restart_policy,
            older: self.instances.older(&name),
            unhooked: newest.is_some_and(|(_, instance)| instance.hooked == Some(false)),
            at_once: false,
            old,
            name,
            startup_probe: false,
            post_start: false,
            is_to_run: false,
            may_have_succeeded,
            runs_unrecorded: false,
            placeholders: 0,
        }
    }
}
