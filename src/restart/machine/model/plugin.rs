//! The plugin around the machine, by the rules of `driver/`: what the machine is told, and what comes of its effects.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use super::runtime::{Container, Is};
use super::{Case, Job, Ms, World};
use crate::ids::{Attempt, ContainerId, ContainerName, ExitCode};
use crate::node::{Instance, InstanceState, Instances};
use crate::restart::machine::{Effect, Event, FoundState, Machine, Phase, Verdict};
use crate::restart::plan::{Plan, RestartId};

/// Which restart, and which round of it, a placeholder was made for.
pub(super) type Round = (RestartId, u8);

#[derive(Debug, Default)]
pub(super) struct Plugin {
    pub(super) machine: Option<Machine>,
    pub(super) instances: Instances,
    pub(super) holds: BTreeSet<ContainerId>,
    pub(super) decided: BTreeSet<ContainerId>,
    pub(super) kills: BTreeSet<ContainerId>,
    pub(super) sweeping: BTreeSet<ContainerId>,
    pub(super) queue: VecDeque<Effect>,
    pub(super) deleting: bool,
    pub(super) restarts: u32,
    /// NRI asks it.
    pub(super) connected: bool,
}

/// What is on disk.
#[derive(Debug, Clone)]
pub(super) struct Record {
    pub(super) phase: Phase,
    pub(super) plan: Plan,
}

impl Plugin {
    pub(super) fn round(&self) -> Option<Round> {
        let plan = self.machine.as_ref()?.plan();
        Some((plan.id.clone(), plan.again))
    }

    pub(super) fn replaces(&self, id: &ContainerId) -> bool {
        self.machine.as_ref().is_some_and(|it| it.replaces(id))
    }

    pub(super) fn still_holds(&self, id: &ContainerId) -> bool {
        self.machine.as_ref().is_some_and(|it| it.holds(id))
    }

    pub(super) fn holds_replayed(&self, id: &ContainerId) -> bool {
        let both = self.machine.as_ref().zip(self.instances.get(id));
        let replays = both.is_some_and(|(machine, it)| machine.holds_replayed(&it.name));
        replays && !self.deleting && !self.replaces(id)
    }

    pub(super) fn state(&self, id: &ContainerId) -> Option<InstanceState> {
        Some(self.instances.get(id)?.state)
    }

    pub(super) fn code(&self, id: &ContainerId) -> Option<ExitCode> {
        match self.state(id)? {
            InstanceState::Ended(code) => code,
            InstanceState::Created | InstanceState::Running => None,
        }
    }

    /// Whether the end of this container asks for a restart.
    pub(super) fn asks(&self, case: &Case, id: &ContainerId) -> bool {
        let code = self.code(id);
        let name = self.instances.get(id).map(|it| &it.name);
        code == Some(case.code) && name == Some(&case.trigger_name()) && !self.deleting
    }

    pub(super) fn settle_olds(&mut self, plan: &Plan) {
        let olds = plan.members.iter().filter_map(|it| it.old.as_ref());
        self.decided.extend(olds.map(|old| old.id.clone()));
    }

    pub(super) fn waits_for_code(&self, id: &ContainerId) -> bool {
        let wanted = self.replaces(id) || self.holds.contains(id);
        self.state(id) == Some(InstanceState::Ended(None)) && wanted
    }

    pub(super) fn is_idle(&self) -> bool {
        self.machine.is_none() && self.queue.is_empty() && self.holds.is_empty() && self.connected
    }
}

impl World {
    pub(super) fn listening(&self) -> bool {
        self.plugin.is_some()
    }

    pub(super) fn connected(&self) -> bool {
        self.plugin.as_ref().is_some_and(|it| it.connected)
    }

    pub(super) fn is_held(&self, id: &ContainerId) -> bool {
        let plugin = self.plugin.as_ref();
        plugin.is_some_and(|it| it.holds.contains(id))
    }

    /// Whether hooks wait for a plugin that is away.
    pub(super) fn marked(&self) -> bool {
        let record = self.record.as_ref();
        record.is_some_and(|it| it.phase.is_holding(it.plan.way))
    }

    pub(super) fn machine(&self) -> Option<&Machine> {
        self.plugin.as_ref()?.machine.as_ref()
    }

    pub(super) fn tell_created(&mut self, id: &ContainerId) {
        if self.connected() {
            self.note(id);
        }
    }

    pub(super) fn note(&mut self, id: &ContainerId) {
        let Some((container, plugin)) = self.runtime.containers.get(id).zip(self.plugin.as_mut())
        else {
            return;
        };
        let running = container.seen() == FoundState::Running;
        let instance = Instance {
            name: container.name.clone(),
            state: match container.seen() {
                FoundState::Created => InstanceState::Created,
                FoundState::Running => InstanceState::Running,
                FoundState::Exited(code) => InstanceState::Ended(code),
            },
            maker: container.maker,
            // Clocks are not set here.
            attempt: Attempt(0),
            created_at: container.created_at,
            heard_at: Instant::now(),
            listed: true,
            hooked: running.then_some(container.hooked),
        };
        plugin.instances.insert(id.clone(), instance);
    }

    pub(super) fn tell_started(&mut self, id: &ContainerId) {
        if !self.connected() {
            return;
        }
        self.note(id);
        let plugin = self.plugin.as_mut().unwrap();
        if let Some(name) = plugin.instances.started(id) {
            self.feed(Event::Started(name, id.clone()));
        }
    }

    pub(super) fn ended(&mut self, id: &ContainerId, code: ExitCode) {
        if !self.note_end(id, Some(code)) {
            return;
        }
        let plugin = self.plugin.as_ref().unwrap();
        let bare = plugin.instances.get(id).unwrap().hooked == Some(false);
        if bare || plugin.holds.contains(id) {
            self.decide(id);
        } else {
            self.after(1000, Job::NoHook(self.epoch, id.clone()));
        }
    }

    pub(super) fn no_hook_came(&mut self, id: &ContainerId) {
        if !self.is_held(id) {
            self.decide(id);
        }
    }

    pub(super) fn note_end(&mut self, id: &ContainerId, code: Option<ExitCode>) -> bool {
        let Some(plugin) = &mut self.plugin else {
            return false;
        };
        let news = plugin.instances.ended(id, code);
        let failure = self.case.code != ExitCode::SUCCESS;
        let will_ask = failure && !plugin.replaces(id) && plugin.asks(&self.case, id);
        let tell = |it: &&Instance| news && !it.is_placeholder() && !will_ask;
        if let Some(instance) = plugin.instances.get(id).filter(tell) {
            let name = instance.name.clone();
            self.feed(Event::Ended(name, id.clone(), code));
        }
        news
    }

    pub(super) fn removed(&mut self, id: &ContainerId) {
        if let Some(plugin) = &mut self.plugin {
            plugin.instances.removed(id);
            plugin.holds.remove(id);
            plugin.decided.remove(id);
            self.feed(Event::Gone(id.clone()));
        }
    }

    /// Whether the hook is to wait.
    pub(super) fn knock(&mut self, id: &ContainerId) -> bool {
        let plugin = self.plugin.as_mut().unwrap();
        if plugin.instances.get(id).is_none() {
            return false;
        }
        let replays = plugin.holds_replayed(id);
        let held = plugin.still_holds(id) || replays;
        if plugin.deleting || (plugin.replaces(id) && !held) {
            let replaced = plugin.replaces(id);
            self.note_end(id, None);
            if replaced {
                self.after(300, Job::AskForCode(self.epoch, id.clone()));
            }
            return false;
        }
        plugin.holds.insert(id.clone());
        let code = plugin.code(id);
        self.note_end(id, None);
        if held || code.is_some() {
            self.decide(id);
        }
        if code.is_none() {
            self.after(300, Job::AskForCode(self.epoch, id.clone()));
        }
        self.is_held(id)
    }

    pub(super) fn ask_for_code(&mut self, id: &ContainerId) {
        let code = self.runtime.containers.get(id).map(|it| it.is);
        if let Some(Is::Stopped(code) | Is::Exited(code)) = code
            && self.plugin.as_ref().unwrap().waits_for_code(id)
        {
            self.ended(id, code);
        }
    }

    /// A hook has gone.
    pub(super) fn let_go(&mut self, id: &ContainerId) {
        if let Some(plugin) = &mut self.plugin {
            plugin.holds.remove(id);
        }
    }

    /// Whether the kubelet may create that container.
    pub(super) fn admits(&mut self, name: &ContainerName) -> bool {
        let now = self.instant();
        let Some(plugin) = self
            .plugin
            .as_mut()
            .filter(|it| it.connected && !it.deleting)
        else {
            return true;
        };
        if let Some(id) = plugin.instances.running(name).cloned() {
            let asking = self.upto(20);
            self.after(asking, Job::Verify(self.epoch, id));
            return false;
        }
        let Some(machine) = &mut plugin.machine else {
            return true;
        };
        let (verdict, effects) = machine.attempt(now, name);
        self.apply(effects);
        verdict == Verdict::Admit
    }

    pub(super) fn verify(&mut self, id: &ContainerId) {
        match self.runtime.containers.get(id).map(Container::seen) {
            Some(FoundState::Exited(Some(code))) => self.ended(id, code),
            None => self.removed(id),
            Some(_) => {}
        }
    }

    pub(super) fn decide(&mut self, id: &ContainerId) {
        let plugin = self.plugin.as_mut().unwrap();
        let held = plugin.holds.contains(id);
        if plugin.replaces(id) {
            plugin.kills.remove(id);
            let event = if held { Event::Held } else { Event::Exited };
            return self.feed(event(id.clone()));
        }
        if plugin.decided.insert(id.clone()) && plugin.asks(&self.case, id) {
            self.begin(id);
        } else if !plugin.holds_replayed(id) {
            plugin.holds.remove(id);
        }
    }

    pub(super) fn let_pod_go(&mut self) {
        if let Some(plugin) = &mut self.plugin {
            plugin.deleting = true;
            self.feed(Event::Deleted);
            self.plugin.as_mut().unwrap().holds.clear();
        }
        self.lost |= self.plugin.is_none();
    }

    pub(super) fn tick_at(&self) -> Option<Ms> {
        let at = self.machine()?.deadline()?;
        let since = at.saturating_duration_since(self.begun);
        Some(u64::try_from(since.as_millis()).unwrap().max(self.now))
    }

    pub(super) fn instant(&self) -> Instant {
        self.begun + Duration::from_millis(self.now)
    }
}
