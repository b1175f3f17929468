//! Whether what was begun for a pod is wanted still. Whoever does it asks before each call, and when one has failed.

use super::Pod;
use crate::ids::{ContainerId, ContainerName};
use crate::node::{InstanceState, Maker};
use crate::plan::{Generation, RestartId};
use crate::restart::machine::{Machine, Phase, WAKER};

/// What is done for a pod.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Task<'t> {
    /// A container that is about to be made has our hook: there is something to do for the pod, or may be.
    Hook,
    /// A restart is under way, or is over and wants things done.
    Restart,
    /// Nothing of it may start yet: the pod restarts too often.
    BackOff,
    /// Exits of that restart are held. A generation that begins anew is about containers that were started without a hook,
    /// and needs the gate.
    Holds,
    /// It waits for its turn among the pods of this node.
    Queue,
    /// It has that turn.
    Turn,
    /// Others wait until what has ended of it is shielded: its hold ends first.
    GoFirst,
    /// The hook of this container waits.
    Hold(&'t ContainerId),
    /// This container is stopped.
    Kill(&'t ContainerId),
    /// It is told to: those that it is there for have stopped.
    Signal(&'t ContainerId),
    /// Its containers have time to stop, and have yet to.
    Stop,
    /// That generation needs a placeholder for a container.
    Shield(&'t Generation, &'t ContainerName),
    /// One of that name that is made like this old container may stand.
    ShieldNow(&'t ContainerName, Option<&'t ContainerId>),
    /// What runs is stopped behind its shield: the kubelet would start another one beside it, if nobody refused that.
    Hide,
    /// This one stands, made and not started.
    Stand(&'t ContainerId),
    /// The runtime is asked what becomes of that. A placeholder others may remove: while exits are held, NRI is not there to
    /// tell a plugin that came back. What the kubelet has made ends without having been started if that fails.
    Watch(&'t ContainerId),
    /// The runtime is asked whether this one, which was to stop, has ended.
    End(&'t ContainerId),
    /// What the old containers were made from is learnt, for that restart, and kept.
    Recover(&'t RestartId),
    /// Attempts are made for that restart.
    Replay(&'t RestartId),
    /// This attempt, which a replay has made, is started.
    Start(&'t ContainerId),
    /// It is asked what this container exited with, whose hook waits or which has ended in a restart.
    Code(&'t ContainerId),
    /// It is asked whether the kernel has killed a process of this container because it was out of memory.
    Oom(&'t ContainerId),
}

impl Pod {
    /// Whether that is wanted now.
    pub(crate) fn wants(&self, task: Task<'_>) -> bool {
        let is_of = |it: &Machine, id: &RestartId| it.plan().id == *id;
        let stands = |id| move |it: &Machine| it.leftovers().iter().any(|(_, it)| it == id);
        match task {
            Task::Hook => self.may_act(),
            Task::Restart => self.machine.is_some(),
            Task::BackOff => self.has_restart(Machine::backs_off),
            Task::Holds => self.has_restart(|it| it.is_holding() && it.plan().again == 0),
            Task::Queue => self.has_restart(Machine::is_queued),
            Task::Turn => self.has_restart(Machine::wants_turn),
            Task::GoFirst => self.has_restart(Machine::is_exposed),
            Task::Hold(id) => self.is_held(id),
            Task::Kill(id) => {
                let failed = self.failed.contains(id) && !self.deleting;
                failed || self.has_restart(|it| it.ends(id)) || self.instances.twins().contains(id)
            }
            Task::Signal(id) => {
                self.failed.contains(id) || self.has_restart(|it| it.is_to_stop(id))
            }
            Task::Stop => self.has_restart(Machine::lets_stop),
            Task::Shield(generation, name) => self
                .has_restart(|it| it.plan().generation() == *generation && it.wants_shield(name)),
            // What wakes the kubelet hides nothing.
            Task::ShieldNow(name, like) => {
                *name == WAKER.into() || like.is_none_or(|id| self.may_be_shielded(id))
            }
            Task::Hide => self.has_restart(Machine::hides_what_runs),
            Task::Stand(id) => self.has_restart(stands(id)),
            Task::Watch(id) => {
                let instance = self.instances.get(id);
                let waits = instance.filter(|it| it.state == InstanceState::Created);
                let kubelets = waits.is_some_and(|it| it.maker == Maker::Kubelet);
                let untold = kubelets || !self.shared.gate.is_there();
                untold && self.has_restart(|it| kubelets || (it.is_holding() && stands(id)(it)))
            }
            Task::End(id) => {
                let state = self.instance(id).map(|it| it.state);
                state.is_some_and(|state| !matches!(state, InstanceState::Ended(_)))
            }
            Task::Recover(id) => self.has_restart(|it| is_of(it, id) && it.may_replay()),
            Task::Replay(id) => self.has_restart(|it| is_of(it, id) && it.phase() == Phase::Replay),
            Task::Start(id) => {
                !self.instances.is_gone(id) && self.has_restart(|it| it.is_to_start(id))
            }
            Task::Code(id) => {
                let lacks = self.lacks_code(id);
                lacks && (self.is_held(id) || self.has_restart(|it| it.ends(id)))
            }
            Task::Oom(id) => self.unsettled.contains(id),
        }
    }

    /// Behind a placeholder the kubelet does not see that a container runs, and starts another one beside it as
    /// soon as no gate keeps it from doing so: if this process dies, for one. That is risked for the moment that a kill
    /// takes, but not for a grace period, and not if the gate is away.
    fn may_be_shielded(&self, id: &ContainerId) -> bool {
        let at_once = self.has_restart(|it| it.kills_at_once(id));
        let instance = self.instances.get(id);
        // One that the kubelet has just created is about to run.
        let lives = instance.is_some_and(|it| !matches!(it.state, InstanceState::Ended(_)));
        !lives || (at_once && self.shared.gate.is_there())
    }
}
