//! What a driver knows of its pod.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use super::hooks::Hooks;
use super::places::{Place, Turn};
use super::replay::Replay;
use crate::ids::{ContainerId, ContainerName, ExitCode};
use crate::kube::{ContainerKind, KubeletFeatures, PodSpec, RestartPolicy, StartDuty};
use crate::node::{InstanceState, Instances};
use crate::policy::{Action, Policy, Written};
use crate::report::Unprotected;
use crate::restart::back_off::Past;
use crate::restart::machine::Machine;
use crate::restart::plan::{Member, Old, Plan, RestartId, Trigger};

/// For how long a list of the runtime may have been under way when it is looked at. That long it is remembered what has
/// been removed.
pub const OLDEST_LIST: Duration = Duration::from_mins(5);

/// An exit that is held.
#[derive(Debug)]
pub(super) struct Hold {
    /// When its hook began to wait.
    pub(super) since: Instant,
    /// The hook waits until this is dropped.
    release: oneshot::Sender<()>,
}

impl Hold {
    pub(super) fn new(release: oneshot::Sender<()>, waited: Duration) -> Self {
        let now = Instant::now();
        Self {
            since: now.checked_sub(waited).unwrap_or(now),
            release,
        }
    }

    /// Whether its hook still waits. It gives up by itself.
    pub(super) fn lasts(&self) -> bool {
        !self.release.is_closed()
    }
}

/// Since when a container is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gone {
    /// It is as good as gone, and being removed.
    Soon,
    /// Since then.
    At(Instant),
}

#[derive(Debug)]
pub(super) struct State {
    /// What the pod's annotations say. `None`: they are being read.
    pub(super) written: Option<Arc<Written>>,
    /// `None`: there are no rules, or they turned out to be wrong; the pod is left alone.
    pub(super) policy: Option<Arc<Policy>>,
    pub(super) spec: Option<Arc<PodSpec>>,
    /// Of a static pod, when it was first seen.
    pub(super) manifest: Option<PathBuf>,
    /// What the kubelet does by itself.
    pub(super) native: Option<KubeletFeatures>,
    pub(super) instances: Instances,
    pub(super) machine: Option<Machine>,
    /// Exits that are held; dropping one releases it.
    pub(super) holds: HashMap<ContainerId, Hold>,
    /// What the restart under way is replayed from.
    pub(super) replay: Option<Arc<Replay>>,
    /// While it may be replayed.
    pub(super) place: Option<Place>,
    /// Until its first containers have been started: the others follow when an init container has ended, which nobody
    /// waits for.
    pub(super) turn: Option<Turn>,
    /// Containers that the plugin is about to create itself.
    pub(super) creating: HashSet<ContainerName>,
    pub(super) hooks: Hooks,
    pub(super) kills: HashMap<ContainerId, AbortHandle>,
    /// Exits that have been seen before the annotations were read.
    pub(super) unjudged: Vec<ContainerId>,
    /// Exits that have been judged: none begins two restarts.
    pub(super) decided: HashSet<ContainerId>,
    /// Containers that are gone, or as good as gone: a list that was asked for before may still have them.
    pub(super) removed: HashMap<ContainerId, Gone>,
    /// Containers that are being removed: once is enough.
    pub(super) sweeping: HashSet<ContainerId>,
    pub(super) deleting: bool,
    pub(super) restarts: u32,
    pub(super) past: Past,
    /// What is said once.
    pub(super) said_bare: Option<Unprotected>,
    pub(super) said_invalid: bool,
}

impl State {
    pub(super) fn new(
        written: Option<Arc<Written>>,
        native: Option<KubeletFeatures>,
        past: Past,
    ) -> Self {
        Self {
            written,
            policy: None,
            spec: None,
            manifest: None,
            native,
            instances: Instances::default(),
            machine: None,
            holds: HashMap::new(),
            replay: None,
            place: None,
            turn: None,
            creating: HashSet::new(),
            hooks: Hooks::default(),
            kills: HashMap::new(),
            unjudged: Vec::new(),
            decided: HashSet::new(),
            removed: HashMap::new(),
            sweeping: HashSet::new(),
            deleting: false,
            restarts: 0,
            past,
            said_bare: None,
            said_invalid: false,
        }
    }

    /// Whether there is something to do for the pod, or may be when its annotations have been read.
    pub(super) fn may_act(&self) -> bool {
        self.policy.is_some() || self.written.is_none()
    }

    /// Containers whose exits cannot be held, by name.
    pub(super) fn bare(&self) -> BTreeSet<ContainerName> {
        let bare = self.instances.iter().filter(|(_, it)| {
            it.hooked == Some(false)
                && it.state < InstanceState::Ended(None)
                && !it.is_placeholder()
        });
        let names = bare.map(|(_, instance)| instance.name.clone());
        names.filter(|name| self.is_member(name)).collect()
    }

    /// Whatever the attempts that a restart replaces exit with belongs to it, even if the news comes when it is over.
    pub(super) fn settle_olds(&mut self, plan: &Plan) {
        let olds = plan.members.iter().filter_map(|member| member.old.as_ref());
        let olds = olds.map(|old| old.id.clone());
        let there = olds.filter(|id| self.instances.get(id).is_some());
        self.decided.extend(there);
    }

    /// A container is no longer in the runtime: nothing is kept of it but that.
    pub(super) fn gone(&mut self, id: &ContainerId, now: Instant) {
        self.instances.removed(id);
        self.holds.remove(id);
        self.decided.remove(id);
        self.kills.remove(id);
        self.removed.retain(|_, gone| match gone {
            Gone::Soon => true,
            Gone::At(at) => now.duration_since(*at) <= OLDEST_LIST,
        });
        self.removed.insert(id.clone(), Gone::At(now));
    }

    /// For how long the first exit has been held.
    pub(super) fn held_for(&self) -> Duration {
        let since = self.holds.values().map(|hold| hold.since).min();
        since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// What containers exited with that still count as running, because their exits are held.
    pub(super) fn codes_of_held(&self, plan: &Plan) -> Vec<(ContainerName, ContainerId, ExitCode)> {
        let members = plan.members.iter();
        let held = members.filter_map(|member| {
            let old = member.old.as_ref().filter(|old| old.exit.is_none())?;
            match self.instances.get(&old.id)?.state {
                InstanceState::Ended(code) => Some((member.name.clone(), old.id.clone(), code?)),
                InstanceState::Created | InstanceState::Running => None,
            }
        });
        held.collect()
    }

    /// For how long the oldest of the containers that the restart ends has been there, at the least.
    pub(super) fn oldest_run(&self, plan: &Plan) -> Duration {
        let olds = plan.members.iter().filter_map(|member| member.old.as_ref());
        let running = olds.filter(|old| old.exit.is_none());
        let since = running.filter_map(|old| Some(self.instances.get(&old.id)?.heard_at));
        since.min().map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// A container as the kubelet sees it: one whose exit is held runs.
    pub(super) fn member(
        &self,
        name: ContainerName,
        kind: ContainerKind,
        restart_policy: RestartPolicy,
    ) -> Member {
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
            restart_policy,
            older: self.instances.older(&name),
            bare: newest.is_some_and(|(_, instance)| instance.hooked == Some(false)),
            old,
            name,
            startup_probe: false,
            placeholders: 0,
        }
    }

    /// The pod's restart policy, and its containers in start order. A restart that goes on after the plugin came
    /// back may know them before the API server has told.
    pub(super) fn shape(&self) -> Option<(RestartPolicy, Vec<Member>)> {
        if let Some(spec) = &self.spec {
            // Other kubelets have the pod's alone.
            let own = self.native.is_some_and(|native| native.container_rules);
            let members = spec.containers.iter().map(|container| {
                let policy = container.restart_policy.filter(|_| own);
                let policy = policy.unwrap_or(spec.restart_policy);
                Member {
                    startup_probe: container.duties.contains(&StartDuty::StartupProbe),
                    ..self.member(container.name.clone(), container.kind, policy)
                }
            });
            return Some((spec.restart_policy, members.collect()));
        }
        let plan = self.machine.as_ref().map(Machine::plan)?;
        let members = plan.members.iter().map(|it| Member {
            startup_probe: it.startup_probe,
            ..self.member(it.name.clone(), it.kind, it.restart_policy)
        });
        (plan.is_whole_pod() && plan.ordered).then(|| (plan.restart_policy, members.collect()))
    }

    pub(super) fn trigger(&self, id: &ContainerId) -> Option<Trigger> {
        let instance = self.instances.get(id)?;
        let InstanceState::Ended(Some(code)) = instance.state else {
            return None;
        };
        (!instance.is_placeholder() && self.is_member(&instance.name)).then(|| Trigger {
            name: instance.name.clone(),
            container: id.clone(),
            code,
        })
    }

    /// Whether that restart is still under way, and so far.
    pub(super) fn is_restart(&self, id: &RestartId, so_far: impl Fn(&Machine) -> bool) -> bool {
        let machine = self.machine.as_ref();
        machine.is_some_and(|machine| machine.plan().id == *id && so_far(machine))
    }

    /// Whether it is an init container whose exit the replay under way keeps unseen.
    pub(super) fn is_replayed(&self, id: &ContainerId) -> bool {
        let (machine, instance) = (self.machine.as_ref(), self.instances.get(id));
        let both = machine.zip(instance);
        !self.deleting && both.is_some_and(|(machine, it)| machine.holds_replayed(&it.name))
    }

    /// Whether it has ended, and nobody has told its code.
    pub(super) fn lacks_code(&self, id: &ContainerId) -> bool {
        let instance = self.instances.get(id);
        instance.is_some_and(|it| it.state == InstanceState::Ended(None))
    }

    /// What the exit of this container asks for.
    pub(super) fn asked(&self, id: &ContainerId) -> Option<(Trigger, Action)> {
        let trigger = self.trigger(id)?;
        let policy = self.policy.as_ref()?;
        let action = policy.action(trigger.name.as_str(), trigger.code.0)?;
        Some((trigger, action))
    }

    /// Whether its failure is about to begin a restart.
    pub(super) fn will_ask(&self, id: &ContainerId) -> bool {
        let machine = self.machine.as_ref();
        let belongs = machine.is_some_and(|machine| machine.replaces(id));
        let failure = |(trigger, _): (Trigger, Action)| trigger.code != ExitCode::SUCCESS;
        !belongs && !self.deleting && self.asked(id).is_some_and(failure)
    }

    /// Rules for the whole pod are not for ephemeral containers, which are none of its spec's.
    pub(super) fn is_member(&self, name: &ContainerName) -> bool {
        self.spec.as_ref().is_none_or(|spec| {
            spec.containers
                .iter()
                .any(|container| container.name == *name)
        })
    }
}
