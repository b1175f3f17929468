//! What is known of a pod, as it is asked for.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use super::Pod;
use crate::clock::Moment;
use crate::ids::{ContainerId, ContainerName, Exit, ExitCode};
use crate::kube::PodSpec;
use crate::node::{Instance, InstanceState, Maker};
use crate::plan::{Generation, Member, Plan, Seen, Trigger};
use crate::policy::{Action, Options, Start};
use crate::restart::machine::Machine;
use crate::times::RELIST_INTERVAL;

impl Pod {
    /// Whether there is such a restart.
    pub(super) fn has_restart(&self, such: impl FnOnce(&Machine) -> bool) -> bool {
        self.machine.as_ref().is_some_and(such)
    }

    /// Its restart, if there is one.
    #[cfg(test)]
    pub(crate) fn machine(&self) -> Option<&Machine> {
        self.machine.as_ref()
    }

    /// What its restart is to do.
    pub(crate) fn plan(&self) -> Option<&Plan> {
        self.machine.as_ref().map(Machine::plan)
    }

    pub(super) fn generation(&self) -> Option<Generation> {
        self.plan().map(Plan::generation)
    }

    /// What the pod's containers are to be, if it has been told.
    pub(crate) fn spec(&self) -> Option<Arc<PodSpec>> {
        self.spec.clone()
    }

    /// Who is to start its containers again.
    pub(crate) fn start(&self) -> Start {
        let asked = self.options().and_then(|it| it.start);
        self.shared.start.asked(asked)
    }

    /// How the pod wants its restarts done, also those that nobody's rules ask for. `None`: that is being read.
    pub(super) fn options(&self) -> Option<&Options> {
        self.written.as_ref().map(|it| it.options())
    }

    /// When it is to be told that time has passed.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.machine.as_ref().and_then(Machine::deadline)
    }

    /// Whether the hook of this container is to wait.
    pub(crate) fn is_held(&self, id: &ContainerId) -> bool {
        self.holds.contains_key(id)
    }

    pub(crate) fn instance(&self, id: &ContainerId) -> Option<&Instance> {
        self.instances.get(id)
    }

    /// Whether there is something to do for the pod, or may be when its annotations have been read. A pod without rules may be
    /// restarted on request.
    pub(super) fn may_act(&self) -> bool {
        self.policy.is_some() || self.written.is_none() || self.machine.is_some()
    }

    /// Containers whose exits cannot be held, by name.
    pub(super) fn unhooked(&self) -> BTreeSet<ContainerName> {
        let unhooked = self.instances.iter().filter(|(_, it)| {
            it.hooked == Some(false)
                && it.state < InstanceState::Ended(None)
                && !it.is_placeholder()
        });
        let names = unhooked.map(|(_, instance)| instance.name.clone());
        names.filter(|name| self.is_member(name)).collect()
    }

    /// Whatever the attempts that a restart replaces exit with belongs to it, even if the news comes when it is over. To the
    /// kubelet what had ended for good stays so.
    pub(super) fn settle_olds(&mut self, plan: &Plan) {
        let olds = plan.members.iter().filter_map(|member| member.old.as_ref());
        let olds = olds.map(|old| old.id.clone());
        let there = olds.filter(|id| self.instances.get(id).is_some());
        self.decided.extend(there);
        let completed = plan.members.iter().filter(|it| it.would_run_unrecorded());
        self.completed.extend(completed.map(|it| it.name.clone()));
    }

    /// Whether a replay has started it, it has ended for good, and the kubelet may know of neither: it may have seen the
    /// attempt, or a placeholder, wait to be started.
    pub(super) fn has_just_run(&self, name: &ContainerName, now: &Moment) -> bool {
        let replayed = |it: &Instance| {
            let since = it.started_at.unwrap_or(it.heard_at);
            it.maker == Maker::Replay && now.at < since + RELIST_INTERVAL
        };
        let newest = self.instances.newest(name);
        let ended = newest
            .filter(|(_, it)| replayed(it))
            .map(|(_, it)| it.state);
        let Some(InstanceState::Ended(Some(code))) = ended else {
            return false;
        };
        let member = self.known_member(name);
        member.is_some_and(|it| it.stays_ended_after(code))
    }

    /// That container, if it is known what it is to the kubelet.
    pub(super) fn known_member(&self, name: &ContainerName) -> Option<Member> {
        self.shape()?.into_iter().find(|it| it.name == *name)
    }

    pub(super) fn seen(&self) -> Seen<'_> {
        Seen {
            instances: &self.instances,
            holds: &self.holds,
            awaited: &self.awaited,
        }
    }

    /// The pod's containers in start order. A restart that goes on after the plugin came back may know them before the API
    /// server has told.
    pub(super) fn shape(&self) -> Option<Vec<Member>> {
        let own = self.native.is_some_and(|native| native.container_rules);
        match &self.spec {
            Some(spec) => Some(self.seen().of_spec(spec, own)),
            None => self.seen().of_plan(self.plan().filter(|it| it.ordered)?),
        }
    }

    /// The same as far as one can tell without a spec. What the restart under way has removed still belongs to the pod.
    pub(super) fn guessed(&self, trigger: &ContainerName) -> Vec<Member> {
        let mut members = self.seen().guessed(trigger);
        let known = self.plan().and_then(|plan| self.seen().of_plan(plan));
        let gone = known.into_iter().flatten().filter(|it| it.old.is_none());
        members.extend(gone);
        members
    }

    /// Whether it is an attempt that the restart under way replaces.
    pub(super) fn is_replaced(&self, id: &ContainerId) -> bool {
        self.has_restart(|it| it.replaces(id))
    }

    /// Whether it is an init container whose exit the replay under way keeps unseen.
    pub(super) fn is_replayed(&self, id: &ContainerId) -> bool {
        let instance = self.instances.get(id).filter(|_| !self.deleting);
        instance.is_some_and(|of| self.has_restart(|it| it.holds_replayed(&of.name)))
    }

    /// Whether it has ended, and nobody has told its code.
    pub(super) fn lacks_code(&self, id: &ContainerId) -> bool {
        let instance = self.instances.get(id);
        instance.is_some_and(|it| it.state == InstanceState::Ended(None))
    }

    /// What the exit of this container asks for.
    pub(super) fn asked(&self, id: &ContainerId) -> Option<(Trigger, Action)> {
        self.asked_if(id, self.is_oom_killed(id))
    }

    /// Whether that depends on what nobody has told yet: whether the kernel has killed a process of it because it was out of
    /// memory.
    pub(super) fn awaits_oom(&self, id: &ContainerId) -> bool {
        let settled = self.oom_killed.contains_key(id) || self.decided.contains(id);
        let open = !settled && !self.deleting && !self.is_replaced(id);
        let asked = |oom_killed| {
            let (trigger, action) = self.asked_if(id, oom_killed)?;
            Some((trigger.rule.map(|rule| rule.number), action))
        };
        open && asked(true) != asked(false)
    }

    fn asked_if(&self, id: &ContainerId, oom_killed: bool) -> Option<(Trigger, Action)> {
        let instance = self.instances.get(id)?;
        let InstanceState::Ended(Some(code)) = instance.state else {
            return None;
        };
        if instance.is_placeholder() || !self.is_member(&instance.name) {
            return None;
        }
        let policy = self.policy.as_ref()?;
        let exit = Exit { code, oom_killed };
        let (action, rule) = policy.matched(instance.name.as_str(), exit)?;
        let trigger = Trigger {
            name: instance.name.clone(),
            container: id.clone(),
            code,
            rule,
            request: None,
        };
        Some((trigger, action))
    }

    /// What this container has failed with, if it has rules and none matches.
    pub(super) fn unmatched(&self, id: &ContainerId) -> Option<(ContainerName, ExitCode)> {
        let instance = self.instances.get(id).filter(|it| !it.is_placeholder())?;
        let InstanceState::Ended(Some(code)) = instance.state else {
            return None;
        };
        let name = &instance.name;
        let covered = self.policy.as_ref()?.covers(name.as_str()) && self.is_member(name);
        let failed = code != ExitCode::SUCCESS && !self.deleting;
        (covered && failed && self.asked(id).is_none()).then(|| (name.clone(), code))
    }

    /// Whether its failure is about to begin a restart, or may be.
    pub(super) fn will_ask(&self, id: &ContainerId) -> bool {
        let failure = |(trigger, _): (Trigger, Action)| trigger.code != ExitCode::SUCCESS;
        let asked = self.asked_if(id, self.awaits_oom(id) || self.is_oom_killed(id));
        !self.is_replaced(id) && !self.deleting && asked.is_some_and(failure)
    }

    fn is_oom_killed(&self, id: &ContainerId) -> bool {
        self.oom_killed.get(id) == Some(&true)
    }

    /// Rules for the whole pod are not for ephemeral containers, which are none of its spec's.
    pub(super) fn is_member(&self, name: &ContainerName) -> bool {
        let spec = self.spec.as_ref();
        spec.is_none_or(|spec| spec.container(name).is_some())
    }
}
