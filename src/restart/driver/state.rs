//! What a driver knows of its pod.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use crate::ids::{ContainerId, ContainerName, ExitCode};
use crate::kube::{ContainerKind, PodSpec, RestartPolicy};
use crate::node::{InstanceState, Instances};
use crate::policy::Policy;
use crate::restart::machine::Machine;
use crate::restart::plan::{Member, Old, Plan, Trigger};

#[derive(Debug)]
pub(super) struct State {
    /// `None`: the rules turned out to be wrong; the pod is left alone.
    pub(super) policy: Option<Arc<Policy>>,
    pub(super) spec: Option<Arc<PodSpec>>,
    pub(super) instances: Instances,
    pub(super) machine: Option<Machine>,
    /// Exits that are held; dropping a sender releases one.
    pub(super) holds: HashMap<ContainerId, oneshot::Sender<()>>,
    pub(super) kills: HashMap<ContainerId, AbortHandle>,
    /// Exits that have been judged: none begins two restarts.
    pub(super) decided: HashSet<ContainerId>,
    /// Containers that are gone, and since when (nanoseconds since the Unix epoch): a list that was asked for before
    /// may still have them.
    pub(super) removed: HashMap<ContainerId, i64>,
    pub(super) deleting: bool,
    pub(super) restarts: u32,
}

impl State {
    /// Whatever the attempts that a restart replaces exit with belongs to it, even if the news comes when it is over.
    pub(super) fn settle_olds(&mut self, plan: &Plan) {
        let olds = plan.members.iter().filter_map(|member| member.old.as_ref());
        self.decided.extend(olds.map(|old| old.id.clone()));
    }

    /// A container as the kubelet sees it: one whose exit is held runs.
    pub(super) fn member(&self, name: ContainerName, kind: ContainerKind) -> Member {
        let newest = self.instances.newest(&name);
        let old = newest.map(|(id, instance)| Old {
            id: id.clone(),
            exit: match instance.state {
                InstanceState::Ended(code) if !self.holds.contains_key(id) => {
                    Some(code.unwrap_or(ExitCode::UNKNOWN))
                }
                _ => None,
            },
        });
        Member {
            kind,
            older: self.instances.older(&name),
            old,
            name,
            placeholders: 0,
        }
    }

    /// The pod's restart policy, and its containers in start order. A restart that goes on after the plugin came
    /// back may know them before the API server has told.
    pub(super) fn shape(&self) -> Option<(RestartPolicy, Vec<(ContainerName, ContainerKind)>)> {
        if let Some(spec) = &self.spec {
            let containers = spec.containers.iter();
            let containers = containers.map(|it| (it.name.clone(), it.kind));
            return Some((spec.restart_policy, containers.collect()));
        }
        let plan = self.machine.as_ref().map(Machine::plan)?;
        let members = plan.members.iter();
        let members = members.map(|it| (it.name.clone(), it.kind));
        (plan.whole_pod && plan.ordered).then(|| (plan.restart_policy, members.collect()))
    }

    pub(super) fn trigger(&self, id: &ContainerId) -> Option<Trigger> {
        let instance = self.instances.get(id)?;
        let InstanceState::Ended(Some(code)) = instance.state else {
            return None;
        };
        (!instance.placeholder).then(|| Trigger {
            name: instance.name.clone(),
            container: id.clone(),
            code,
        })
    }

    pub(super) fn is_member(&self, name: &ContainerName) -> bool {
        self.spec.as_ref().is_none_or(|spec| {
            spec.containers
                .iter()
                .any(|container| container.name == *name)
        })
    }
}
