//! How the plugin performs what the machine wants done (`driver/perform.rs`).

use std::time::Duration;

use super::plugin::{Record, Round};
use super::{Call, Job, World};
use crate::ids::{ContainerId, ContainerName};
use crate::restart::machine::{Effect, Event, Machine, Phase};

impl World {
    pub(super) fn feed(&mut self, event: Event) {
        let now = self.instant();
        let Some(machine) = self.plugin.as_mut().and_then(|it| it.machine.as_mut()) else {
            return;
        };
        self.log
            .push(format!("{} {:?} {event:?}", self.now, machine.phase()));
        let effects = machine.handle(now, event);
        self.apply(effects);
    }

    pub(super) fn apply(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            self.log.push(format!("{}   {effect:?}", self.now));
            self.judge(&effect);
            let plugin = self.plugin.as_mut().unwrap();
            match effect {
                Effect::Release(ids) => plugin.holds.retain(|id| !ids.contains(id)),
                Effect::Again => self.begin_again(),
                Effect::HandOver(why) => self.hand_over(why),
                effect => {
                    plugin.queue.push_back(effect);
                    if plugin.queue.len() == 1 {
                        self.after(0, Job::Work(self.epoch));
                    }
                }
            }
        }
    }

    /// Performs one effect.
    pub(super) fn work(&mut self) {
        let plugin = self.plugin.as_mut().unwrap();
        let Some(effect) = plugin.queue.pop_front() else {
            return;
        };
        if !plugin.queue.is_empty() {
            let pause = self.upto(4);
            self.after(pause, Job::Work(self.epoch));
        }
        self.perform(effect);
    }

    pub(super) fn perform(&mut self, effect: Effect) {
        let plugin = self.plugin.as_mut().unwrap();
        match effect {
            Effect::Save => {
                let machine = plugin.machine.as_ref();
                self.record = machine.map(|machine| Record {
                    phase: machine.phase(),
                    plan: machine.plan().clone(),
                });
            }
            Effect::Announce(restarting) => {
                self.condition = restarting;
                let patience = if self.case.api { self.upto(150) } else { 150 };
                self.after(patience, Job::Announced(self.epoch));
            }
            Effect::Kill(id) => {
                plugin.kills.insert(id.clone());
                let stopping = self.upto(100 + self.case.grace);
                self.call(stopping, Call::Kill(id));
            }
            Effect::MakePlaceholder(name, like) => {
                if let Some(round) = plugin.round() {
                    let making = self.upto(100);
                    self.call(making, Call::Make(name, like, round));
                }
            }
            Effect::Remove(id) => self.sweep(id),
            Effect::Finish(_) => self.finish(),
            Effect::Recover => {
                let asking = self.upto(50);
                self.after(asking, Job::Recovered(self.epoch));
            }
            Effect::Replay(names) => {
                let Some(round) = plugin.round() else { return };
                for name in names {
                    let making = self.upto(100);
                    self.call(making, Call::Replay(name, round.clone()));
                }
            }
            Effect::Release(_) | Effect::Again | Effect::HandOver(_) => {
                unreachable!("done at once")
            }
        }
    }

    pub(super) fn recovered(&mut self) {
        let result = self.case.tells.then_some(()).ok_or_else(|| "untold".into());
        self.feed(Event::Recovered(result));
    }

    pub(super) fn finish(&mut self) {
        let machine = &mut self.plugin.as_mut().unwrap().machine;
        if machine.take_if(|it| it.phase() == Phase::Over).is_some() {
            self.record = None;
            self.sweep_leftovers();
        }
    }

    /// What belongs to no restart any more.
    pub(super) fn sweep_leftovers(&mut self) {
        let instances = self.plugin.as_ref().unwrap().instances.iter();
        let left = instances.filter(|(_, it)| it.is_unstarted_of_ours());
        let left: Vec<ContainerId> = left.map(|(id, _)| id.clone()).collect();
        for id in left {
            self.sweep(id);
        }
    }

    pub(super) fn sweep(&mut self, id: ContainerId) {
        if self.plugin.as_mut().unwrap().sweeping.insert(id.clone()) {
            let removing = self.upto(50);
            self.call(removing, Call::Remove(id));
        }
    }

    /// A failed call is made again if it is still wanted.
    pub(super) fn retry(&mut self, call: Call) {
        let plugin = self.plugin.as_mut().unwrap();
        let wanted = match &call {
            Call::Kill(id) => plugin.kills.contains(id) && plugin.still_holds(id),
            Call::Make(_, like, _) => plugin.still_holds(like),
            Call::Replay(name, _) => {
                let event = Event::NotReplayed(name.clone(), "it fails".into());
                return self.feed(event);
            }
            Call::Remove(_) => true,
        };
        if wanted {
            self.call(5, call);
        }
    }

    pub(super) fn answer_kill(&mut self, event: Event, id: &ContainerId) {
        let plugin = self.plugin.as_mut();
        if plugin.is_some_and(|it| it.kills.remove(id)) {
            self.feed(event);
        }
    }

    pub(super) fn made(&mut self, name: ContainerName, id: ContainerId, round: &Round) {
        if self.plugin.as_ref().unwrap().round().as_ref() == Some(round) {
            self.feed(Event::PlaceholderMade(name, id));
        } else {
            self.sweep(id);
        }
    }

    /// An attempt is there, and waits to be started.
    pub(super) fn replay_made(&mut self, name: ContainerName, id: ContainerId, round: &Round) {
        let Some(plugin) = &self.plugin else { return };
        let wanted = plugin.round().as_ref() == Some(round);
        if wanted && self.machine().map(Machine::phase) == Some(Phase::Replay) {
            self.feed(Event::Made(name, id, Duration::ZERO));
        } else {
            self.sweep(id);
        }
    }

    pub(super) fn swept(&mut self, id: &ContainerId) {
        if let Some(plugin) = &mut self.plugin {
            plugin.sweeping.remove(id);
            self.removed(id);
        }
    }
}
