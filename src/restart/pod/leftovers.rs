//! What a list of the runtime shows, what a predecessor has left, and what a restart leaves behind.

use std::time::Instant;

use super::decide::scope;
use super::{Command, Course, Finished, Pod, Task};
use crate::clock::Moment;
use crate::ids::{ContainerId, ContainerName};
use crate::node::{Instance, InstanceState};
use crate::plan::RestartId;
use crate::restart::machine::{Event, Machine, Outcome, Phase, Record};

impl Pod {
    /// What was in the runtime at `asked`, no longer than [`OLDEST_LIST`](crate::node::OLDEST_LIST) ago, whatever was heard before.
    /// `begun`: a restart that a predecessor left; `sweep`: what belongs to no restart is a leftover.
    pub(crate) fn relisted(
        &mut self,
        found: Vec<(ContainerId, Instance)>,
        asked: Instant,
        begun: Option<Record>,
        sweep: bool,
        now: &Moment,
    ) {
        for id in self.instances.missing_from(&found, asked) {
            self.removed(&id, now);
        }
        let mut news = Vec::new();
        let mut shown = Vec::new();
        for (id, instance) in found {
            let (name, order, state) = (instance.name.clone(), instance.order(), instance.state);
            let placeholder = instance.is_placeholder();
            // Whoever held it is gone, or the runtime has looked for itself, as CRI-O does when it starts.
            if matches!(state, InstanceState::Ended(_)) && self.holds.remove(&id).is_some() {
                shown.push(id.clone());
            }
            // A list may be older than what was heard meanwhile.
            if self.instances.insert(id.clone(), instance) && !placeholder {
                news.push((id, name, order, state));
            }
        }
        if let Some(record) = begun {
            self.resume(record, now);
        } else if let Some(machine) = &mut self.machine {
            machine.relisted(&self.instances, now.at);
            // As the kubelet starts them: what it has begun in order is to look so.
            let members = &machine.plan().members;
            let place = |name: &ContainerName| members.iter().position(|it| it.name == *name);
            news.sort_by_key(|(_, name, order, _)| (place(name), *order));
            for (id, name, _, state) in news {
                match state {
                    InstanceState::Created => self.watch(id),
                    InstanceState::Running => self.feed(Event::Started(name, id), now),
                    InstanceState::Ended(code) => {
                        if !self.is_followed(&id) {
                            self.feed(Event::Ended(name, id.clone(), code), now);
                        }
                        self.feed(Event::Exited(id), now);
                    }
                }
            }
            for id in shown {
                self.feed(Event::Exited(id), now);
            }
            self.sweep_unknown(now.at);
            // It may have waited for the list.
            self.feed(Event::Tick, now);
        } else if sweep {
            self.sweep_leftovers();
        }
        self.end_twins();
        self.say_what_is_unhooked();
        self.look_for_request(now);
    }

    fn resume(&mut self, record: Record, now: &Moment) {
        let Record { phase, plan } = record;
        let elapsed = now.since(plan.decided_up_ms);
        tracing::info!(
            pod = %self.identity.key, restart = %plan.id, ?phase, "went on with a restart that was under way"
        );
        let (machine, effects) = Machine::resume(plan, phase, &self.instances, elapsed, now.at);
        let plan = machine.plan();
        let trigger = &plan.trigger;
        if trigger.request.is_none() {
            self.instances.ended(&trigger.container, Some(trigger.code));
            self.decided.insert(trigger.container.clone());
            self.past_before = self.past.clone();
            let (scope, back_off) = (scope(plan.action, trigger), &self.back_off());
            self.past.resumed(
                scope.as_ref(),
                plan.decided_up_ms,
                plan.back_off(),
                back_off,
            );
        }
        self.settle_olds(plan);
        self.machine = Some(machine);
        let since = now.at.checked_sub(elapsed).unwrap_or(now.at);
        self.course = Some(Course::new(since));
        self.apply(effects, now);
        let found: Vec<ContainerId> = self.instances.iter().map(|(id, _)| id.clone()).collect();
        for id in found {
            self.watch(id);
        }
    }

    /// What it wanted done when that restart was over has been done. Returns it, unless another has taken its place
    /// meanwhile.
    pub(crate) fn finish(
        &mut self,
        restart: &RestartId,
        outcome: Outcome,
        now: &Moment,
    ) -> Option<Finished> {
        let is_over = |it: &mut Machine| it.phase() == Phase::Over && it.plan().id == *restart;
        let machine = self.machine.take_if(is_over)?;
        // It began with the machine.
        let course = self.course.take()?;
        // One before may have ended with a plugin that died before all were removed.
        self.sweep_leftovers();
        let plan = machine.record().plan;
        if outcome == Outcome::CalledOff {
            self.past.take_back(&self.past_before);
        } else {
            self.note_over(&plan, now);
        }
        let after = now.since(plan.decided_up_ms);
        let finished = Finished {
            waiting_for: machine.waiting_for().into_iter().cloned().collect(),
            past: self.past.clone(),
            began_at_ms: now.unix_ms_at(course.since),
            waited: course.waited(&plan, after),
            timings: course.timings(&machine, now.at),
            plan,
        };
        // It may be one that this restart could not answer.
        self.look_for_request(now);
        Some(finished)
    }

    /// What belongs to no restart any more.
    fn sweep_leftovers(&mut self) {
        self.sweep(|_, _, it| it.is_unstarted_of_ours());
    }

    /// What a replay made and did not start shields nothing, and nobody else would remove it before the kubelet collects
    /// it.
    pub(super) fn sweep_unstarted(&mut self) {
        self.sweep(|pod, id, it| {
            let attempt = it.is_unstarted_of_ours() && !it.is_placeholder();
            // One that was left as a shield is as good as a placeholder.
            attempt && !pod.wants(Task::Stand(id))
        });
    }

    /// A call that failed, because the runtime ended for one, may have made something nevertheless, of ours or of the kubelet's.
    /// It has the name of what the kubelet is to make, hides that it is gone, or is in the way.
    pub(super) fn sweep_unknown(&mut self, now: Instant) {
        self.sweep(|pod, id, it| {
            pod.has_restart(|machine| {
                let unknown = it.is_unstarted_of_ours() && !machine.expects(id, it);
                unknown || machine.is_in_the_way(id, it, now)
            })
        });
    }

    fn sweep(&mut self, such: impl Fn(&Self, &ContainerId, &Instance) -> bool) {
        let swept = self.instances.iter().filter(|(id, it)| such(self, id, it));
        let swept: Vec<ContainerId> = swept.map(|(id, _)| id.clone()).collect();
        for id in swept {
            self.give_up(id);
        }
    }

    /// Whatever is heard of it until it is gone: one that was just being started is none of the next generation's.
    pub(super) fn give_up(&mut self, id: ContainerId) {
        self.instances.given_up(&id);
        self.commands.push(Command::Remove(id));
    }

    /// Nobody tells what becomes of it.
    pub(super) fn watch(&mut self, id: ContainerId) {
        if self.wants(Task::Watch(&id)) {
            self.commands.push(Command::Watch(id));
        }
    }

    /// Nobody kept the kubelet from starting another attempt beside one that ran: this process was frozen, for one.
    pub(super) fn end_twins(&mut self) {
        if !self.may_act() || self.deleting {
            return;
        }
        for id in self.instances.twins() {
            self.decided.insert(id.clone());
            self.commands.push(Command::Kill(id));
        }
    }
}
