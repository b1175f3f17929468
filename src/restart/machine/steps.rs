//! From phase to phase.

use std::time::Instant;

use super::Machine;
use super::terms::{Effect, Outcome, Phase};
use crate::policy::Action;
use crate::restart::plan::Way;
use crate::restart::times::{CLEAR_LIMIT, KEPT_TIME, RECORD_LIMIT, UP_LIMIT};

impl Machine {
    /// Moves on as far as the facts allow.
    pub(super) fn advance(&mut self, now: Instant) -> Vec<Effect> {
        let mut effects = Vec::new();
        while self.step(now, &mut effects) {}
        effects
    }

    fn step(&mut self, now: Instant, effects: &mut Vec<Effect>) -> bool {
        let late = now >= self.deadline;
        self.trust_placeholders(now);
        effects.extend(self.unshield(now));
        self.start_at = self.start_at.filter(|&at| now < at);
        self.unseen_until = self.unseen_until.filter(|&until| now < until && !late);
        if !self.is_queued() && self.step_undo(now, effects) {
            return true;
        }
        match self.phase {
            Phase::Down if self.is_queued() => self.step_queue(now, effects),
            Phase::Down if self.may_kill(now) => {
                effects.extend(self.kills());
                true
            }
            Phase::Down if self.replays_at_once() => self.step_before_replay(now, effects),
            Phase::Replay => self.step_replay(now, effects),
            Phase::Down if self.undoes_first() => false,
            Phase::Down if self.unseen_until.is_some() => false,
            Phase::Down if late || self.is_down() => {
                match self.last_moment.take() {
                    Some(more) if !self.guard_stands() => self.deadline = now + more,
                    _ => self.leave_down(now, effects),
                }
                true
            }
            Phase::Shielded if (self.shields_recorded || self.begun) && self.start_at.is_none() => {
                self.enter(Phase::Clear, now, effects);
                effects.extend(self.removals());
                true
            }
            Phase::Shielded if late => {
                effects.extend(self.finish(Outcome::TimedOut));
                false
            }
            Phase::Clear if late || self.cleared() => {
                if self.plan.way == Way::Cleared && !self.placeholders_going && !late {
                    self.placeholders_going = true;
                    effects.extend(self.removals_of_placeholders());
                    return true;
                }
                self.enter(Phase::Up, now, effects);
                effects.push(Effect::Release(self.olds()));
                true
            }
            Phase::Up if self.may_replay_now() => {
                if self.has_admitted() {
                    effects.extend(self.leave_to_kubelet("the kubelet was first".into()));
                } else {
                    self.replay_after_back_off(now, effects);
                }
                true
            }
            Phase::Up => {
                let waker = self.waker.take_if(|_| self.start_at.is_none());
                effects.extend(waker.map(Effect::Remove));
                effects.extend(self.kills_of_halved());
                self.ends_by = self.may_change_until(now);
                let outcome = self.outcome(late).filter(|_| {
                    late || !(self.ends_by.is_some() || self.unshields_from().is_some())
                });
                if let Some(outcome) = outcome {
                    effects.extend(self.finish(outcome));
                }
                false
            }
            Phase::Down | Phase::Shielded | Phase::Clear | Phase::Over => false,
        }
    }

    fn is_down(&self) -> bool {
        let enough = self.last_moment.is_none() && self.guard_stands();
        let shielded = self.shields_stand() || enough;
        self.killed && self.all_down() && shielded
    }

    fn may_kill(&self, now: Instant) -> bool {
        let shielded = !self.plan.shields_come_first() || self.shields_stand();
        let told = self.told.announced || now >= self.deadline;
        !self.killed && told && shielded
    }

    pub(super) fn announce(&mut self, restarting: bool) -> Option<Effect> {
        (std::mem::replace(&mut self.told.restarting, restarting) != restarting)
            .then_some(Effect::Announce(restarting))
    }

    /// The condition of KEP-5532 ends with the old containers, that of its earlier draft with the start of the new.
    pub(super) fn announce_down(&mut self) -> Option<Effect> {
        let ends = self.plan.action == Action::RestartAllContainers;
        if ends { self.announce(false) } else { None }
    }

    /// A predecessor may have died before or after it said so. Nothing waits for it this time.
    pub(super) fn announce_again(&mut self) -> Vec<Effect> {
        self.told.announced = true;
        let restarting = match self.plan.action {
            Action::Restart => return Vec::new(),
            Action::RestartAllContainers => matches!(self.phase, Phase::Down | Phase::Replay),
            Action::RestartPod => self.phase != Phase::Over,
        };
        self.told.restarting = restarting;
        vec![Effect::Announce(restarting)]
    }

    fn leave_down(&mut self, now: Instant, effects: &mut Vec<Effect>) {
        if !self.guard_stands() && !self.plan.is_by_policy() {
            self.fail(now, effects);
            return;
        }
        // What is gone the kubelet starts, what it has seen exit under Never it does not.
        let exposed = (0..self.progress.len()).filter(|&index| self.lacks_shield(index));
        let exposed: Vec<Effect> = exposed.flat_map(|index| self.removals_of(index)).collect();
        effects.extend(self.announce_down());
        match self.plan.way {
            Way::Kept => {
                self.enter(Phase::Clear, now, effects);
                let first = (0..self.progress.len())
                    .filter(|&index| self.goes_first(index))
                    .flat_map(|index| self.attempts_of(index))
                    .collect::<Vec<_>>();
                if !first.is_empty() {
                    effects.push(Effect::Release(first));
                    effects.extend(self.removals());
                }
            }
            Way::Shielded => {
                self.enter(Phase::Up, now, effects);
                effects.push(Effect::Release(self.olds()));
                effects.extend(exposed);
            }
            // The kubelet has nothing to record that it could be seen to have recorded.
            Way::Cleared if self.guard_is_gone() || !self.guard_stands() => {
                self.enter(Phase::Clear, now, effects);
                effects.push(Effect::Release(self.olds()));
                effects.extend(self.removals());
            }
            Way::Cleared => {
                self.enter(Phase::Shielded, now, effects);
                effects.push(Effect::Release(self.olds()));
                // While it sees an exit, the kubelet may keep the container in back-off and not try to create
                // it (doBackOff).
                effects.extend(self.removals_of_shielded());
            }
        }
    }

    pub(super) fn enter(&mut self, phase: Phase, now: Instant, effects: &mut Vec<Effect>) {
        self.phase = phase;
        let start = self.start_at.unwrap_or(now);
        self.deadline = match phase {
            Phase::Shielded => start + RECORD_LIMIT,
            // Under Kept the regular containers' exits are still held.
            Phase::Clear if self.plan.way == Way::Kept => self.deadline.max(now) + KEPT_TIME,
            Phase::Clear => now + CLEAR_LIMIT,
            Phase::Replay => self.deadline,
            Phase::Down | Phase::Up | Phase::Over => start + UP_LIMIT,
        };
        effects.push(Effect::Save);
    }

    pub(super) fn finish(&mut self, outcome: Outcome) -> Vec<Effect> {
        self.phase = Phase::Over;
        let mut held = self.olds();
        held.extend(self.replayed_inits());
        let mut effects = vec![Effect::Release(held)];
        effects.extend(self.announce(false));
        effects.extend(self.removals_of_placeholders());
        effects.extend(self.removals_of_unstarted());
        effects.push(Effect::Finish(outcome));
        effects
    }
}
