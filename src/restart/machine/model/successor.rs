//! The plugin dies and comes back.

use std::time::Duration;

use super::plugin::{Plugin, Record};
use super::{Job, World};
use crate::ids::ContainerId;
use crate::node::InstanceState;
use crate::restart::machine::{Event, Found, FoundState, Machine, Phase};

impl World {
    pub(super) fn comes(&mut self, connected: bool) {
        self.epoch += 1;
        self.plugin = Some(Plugin {
            connected,
            ..Plugin::default()
        });
        if self.lost {
            return self.record = None;
        }
        let record = self.record.clone();
        self.relisted(record);
        if self.machine().is_none() {
            // Nobody carries on what it tells of.
            self.condition = false;
        }
        for id in self.runtime.hooks.clone() {
            self.knock(&id);
        }
        if !connected {
            self.after(10, Job::Connect(self.epoch));
        }
    }

    /// A runtime takes no plugin in while exits are held.
    pub(super) fn connect(&mut self) {
        let plugin = self.plugin.as_mut().unwrap();
        let holding = plugin.machine.as_ref().is_some_and(Machine::is_holding);
        if holding || !plugin.holds.is_empty() {
            return self.after(10, Job::Connect(self.epoch));
        }
        plugin.connected = true;
        self.relisted(None);
    }

    pub(super) fn dies(&mut self) {
        self.plugin = None;
        self.died.push(self.now);
        self.lost |= self.over.is_some();
        for call in self.calls_under_way() {
            if self.upto(1) == 1 {
                self.carry_out_call(call);
            }
        }
    }

    fn relisted(&mut self, begun: Option<Record>) {
        let plugin = self.plugin.as_mut().unwrap();
        let known: Vec<_> = plugin.instances.iter().map(|(id, _)| id.clone()).collect();
        for id in known {
            if !self.runtime.containers.contains_key(&id) {
                self.removed(&id);
            }
        }
        let mut news = Vec::new();
        for id in self.runtime.containers.keys().cloned().collect::<Vec<_>>() {
            let state = |world: &Self| world.plugin.as_ref()?.instances.get(&id).map(|it| it.state);
            let before = state(self);
            self.note(&id);
            if state(self) != before && !self.runtime.containers[&id].is_placeholder() {
                news.push(id);
            }
        }
        let plugin = self.plugin.as_mut().unwrap();
        if let Some(record) = begun {
            return self.resume(record);
        }
        if plugin.machine.is_some() {
            for id in news {
                self.tell_news(&id);
            }
        } else if plugin.connected {
            self.sweep_leftovers();
        }
    }

    fn tell_news(&mut self, id: &ContainerId) {
        let container = &self.runtime.containers[id];
        let (name, id) = (container.name.clone(), id.clone());
        match container.seen() {
            FoundState::Created => {}
            FoundState::Running => self.feed(Event::Started(name, id)),
            FoundState::Exited(code) => {
                self.feed(Event::Ended(name, id.clone(), code));
                self.feed(Event::Exited(id));
            }
        }
    }

    fn resume(&mut self, record: Record) {
        let Record { phase, plan } = record;
        let (now, plugin) = (self.instant(), self.plugin.as_mut().unwrap());
        let found: Vec<Found> = plugin
            .instances
            .iter()
            .map(|(id, instance)| Found {
                id: id.clone(),
                name: instance.name.clone(),
                maker: instance.maker,
                created_at: instance.created_at,
                new: !plan.knew(id),
                state: match instance.state {
                    InstanceState::Created => FoundState::Created,
                    InstanceState::Running => FoundState::Running,
                    InstanceState::Ended(code) => FoundState::Exited(code),
                },
            })
            .collect();
        let trigger = &plan.trigger;
        plugin
            .instances
            .ended(&trigger.container, Some(trigger.code));
        plugin.decided.insert(trigger.container.clone());
        plugin.settle_olds(&plan);
        if matches!(phase, Phase::Shielded | Phase::Up) {
            for old in plan.members.iter().filter_map(|it| it.old.as_ref()) {
                plugin.instances.ended(&old.id, old.exit);
            }
        }
        let elapsed = Duration::from_millis(self.now - plan.decided_at_ms);
        self.log
            .push(format!("{} resumes in {phase:?}: {found:?}", self.now));
        let (machine, effects) = Machine::resume(plan, phase, &found, elapsed, now);
        plugin.machine = Some(machine);
        self.apply(effects);
    }
}
