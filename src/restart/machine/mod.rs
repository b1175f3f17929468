//! The restart of one pod as a pure state machine: events and the time go in, effects come out.
//!
//! ```text
//!           all old containers down, all shields up
//!  Down ─┬─────────── Kept: trim, release the rest ──▶ Clear ──▶ Up
//!        ├─────────── Shielded: release ─────────────────────────▶ Up ──▶ over
//!        └─ Cleared: release ──▶ Shielded ── guard refused ──▶ Clear ──▶ Up
//! ```

mod facts;
mod notes;
mod progress;
mod terms;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::plan::{Plan, Way};
use crate::ids::{ContainerId, ContainerName};
use progress::{NewState, OldState, Progress};
pub use terms::*;

/// One restart of one pod.
#[derive(Debug)]
pub struct Machine {
    plan: Plan,
    phase: Phase,
    /// Parallel to `plan.members`.
    progress: Vec<Progress>,
    deadline: Instant,
    /// The guard's creation was refused after the release: the kubelet has recorded the shields.
    recorded: bool,
    /// The running containers have been told to stop.
    killed: bool,
    /// `Clear` removes containers first, then the placeholders that keep the kubelet waiting.
    placeholders_going: bool,
}

impl Machine {
    /// Begins the restart. `held`: exits that are held already; `leftover`: placeholders of a restart that this
    /// one replaces.
    #[must_use]
    pub fn begin(
        plan: Plan,
        held: &[ContainerId],
        leftover: Vec<(ContainerName, ContainerId)>,
        now: Instant,
    ) -> (Self, Vec<Effect>) {
        let progress = plan
            .members
            .iter()
            .map(|member| Progress {
                old: member.old.as_ref().map(|old| {
                    if held.contains(&old.id) {
                        OldState::Held
                    } else if old.exit.is_some() {
                        OldState::Exited
                    } else {
                        OldState::Running
                    }
                }),
                old_exit: member.old.as_ref().and_then(|old| old.exit),
                older: member.older.iter().cloned().collect(),
                placeholders: BTreeSet::new(),
                new: NewState::None,
            })
            .collect();
        let mut machine = Self::new(plan, Phase::Down, progress, now + DOWN_LIMIT);
        let mut effects = vec![Effect::Save];
        for (name, id) in leftover {
            // One that is older than the attempt that runs shields nothing.
            if machine.is_exited(&name) {
                machine.add_placeholder(&name, id);
            } else {
                effects.push(Effect::Remove(id));
            }
        }
        // What was started while no plugin was there has no hook: its exit is seen at once, so shields come first.
        if machine.plan.again == 0 {
            effects.extend(machine.kills());
        }
        effects.extend(machine.shields_wanted());
        effects.extend(machine.advance(now));
        (machine, effects)
    }

    /// Goes on with a restart that another process began, from what is in the runtime now. `elapsed`: since it
    /// was decided.
    #[must_use]
    pub fn resume(
        plan: Plan,
        phase: Phase,
        found: &[Found],
        elapsed: Duration,
        now: Instant,
    ) -> (Self, Vec<Effect>) {
        let progress = plan
            .members
            .iter()
            .map(|member| Progress::from_found(member, found))
            .collect();
        let deadline = now
            + match phase {
                Phase::Down => DOWN_LIMIT.saturating_sub(elapsed),
                Phase::Shielded => RECORD_LIMIT,
                Phase::Clear => CLEAR_LIMIT,
                Phase::Up | Phase::Over => UP_LIMIT,
            };
        let mut machine = Self::new(plan, phase, progress, deadline);
        let mut effects = Vec::new();
        if machine.intruded() {
            effects.extend(machine.again(elapsed < AGAIN_LIMIT, now));
            return (machine, effects);
        }
        match machine.phase {
            Phase::Down => {
                effects.extend(machine.kills());
                effects.extend(machine.shields_wanted());
            }
            Phase::Clear => effects.extend(machine.removals()),
            Phase::Up => effects.extend(machine.removals_of_replaced()),
            Phase::Shielded | Phase::Over => {}
        }
        effects.extend(machine.advance(now));
        (machine, effects)
    }

    fn new(plan: Plan, phase: Phase, progress: Vec<Progress>, deadline: Instant) -> Self {
        debug_assert_eq!(plan.members.len(), progress.len());
        Self {
            plan,
            phase,
            progress,
            deadline,
            recorded: false,
            killed: false,
            placeholders_going: false,
        }
    }

    /// What this restart is to do.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// How far it is.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// When to send [`Event::Tick`] at the latest; `None` once it is over.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        (self.phase != Phase::Over).then_some(self.deadline)
    }

    /// Whether exits are held in this phase.
    #[must_use]
    pub fn is_holding(&self) -> bool {
        self.phase.is_holding(self.plan.way)
    }

    /// Whether the exit of this container belongs to the restart and must stay unseen for now.
    #[must_use]
    pub fn holds(&self, id: &ContainerId) -> bool {
        let released = self.phase == Phase::Clear && self.goes_first_by_id(id);
        self.is_holding() && self.replaces(id) && !released
    }

    /// Whether this is an attempt that the restart replaces: its exit is part of the restart.
    #[must_use]
    pub fn replaces(&self, id: &ContainerId) -> bool {
        self.index_of_old(id).is_some()
    }

    /// Placeholders that still stand.
    #[must_use]
    pub fn leftovers(&self) -> Vec<(ContainerName, ContainerId)> {
        self.plan
            .members
            .iter()
            .zip(&self.progress)
            .flat_map(|(member, progress)| {
                let name = &member.name;
                progress
                    .placeholders
                    .iter()
                    .map(move |id| (name.clone(), id.clone()))
            })
            .collect()
    }

    /// Containers that are neither running again nor completed, for a log line.
    #[must_use]
    pub fn waiting_for(&self) -> Vec<&ContainerName> {
        (0..self.progress.len())
            .filter(|&index| !self.settled(index))
            .map(|index| &self.plan.members[index].name)
            .collect()
    }

    /// Takes note of what happened.
    pub fn handle(&mut self, now: Instant, event: Event) -> Vec<Effect> {
        if self.phase == Phase::Over {
            return after_the_end(event);
        }
        let mut effects = Vec::new();
        match event {
            Event::Held(id) => self.set_old(&id, OldState::Held),
            Event::Exited(id) => self.set_old(&id, OldState::Exited),
            Event::Ended(name, id, code) => effects.extend(self.ended(&name, id, code)),
            Event::Gone(id) => self.gone(&id),
            Event::PlaceholderMade(name, id) => {
                if self.phase == Phase::Down {
                    self.add_placeholder(&name, id);
                } else {
                    // Too late to shield anything.
                    effects.push(Effect::Remove(id));
                }
            }
            Event::Started(name, id) => {
                effects.extend(self.started(&name, id));
                if self.intruded() {
                    effects.extend(self.again(true, now));
                    return effects;
                }
            }
            Event::Deleted => {
                effects.extend(self.finish(Outcome::Deleted));
                return effects;
            }
            Event::Tick => {}
        }
        effects.extend(self.advance(now));
        effects
    }

    /// Whether the kubelet may create a container of that name now.
    pub fn attempt(&mut self, now: Instant, name: &ContainerName) -> (Verdict, Vec<Effect>) {
        let Some(index) = self.index_of(name) else {
            // Not part of the restart: an ephemeral container, or action Restart of another one.
            return (Verdict::Admit, Vec::new());
        };
        match self.phase {
            Phase::Down | Phase::Clear => (Verdict::NotYet, Vec::new()),
            Phase::Shielded => {
                self.recorded |= *name == self.plan.guard;
                (Verdict::NotYet, self.advance(now))
            }
            Phase::Up if self.is_turn_of(index) => (Verdict::Admit, Vec::new()),
            Phase::Up => (Verdict::OutOfOrder, Vec::new()),
            Phase::Over => (Verdict::Admit, Vec::new()),
        }
    }

    /// Moves on as far as the facts allow.
    fn advance(&mut self, now: Instant) -> Vec<Effect> {
        let mut effects = Vec::new();
        while self.step(now, &mut effects) {}
        effects
    }

    fn step(&mut self, now: Instant, effects: &mut Vec<Effect>) -> bool {
        let late = now >= self.deadline;
        match self.phase {
            Phase::Down if !self.killed && self.shields_stand() => {
                effects.extend(self.kills());
                true
            }
            Phase::Down if late || (self.all_down() && self.shields_stand()) => {
                self.leave_down(now, effects);
                true
            }
            Phase::Shielded if self.recorded => {
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
            Phase::Up => {
                let outcome = self.outcome(late);
                if let Some(outcome) = outcome {
                    effects.extend(self.finish(outcome));
                }
                false
            }
            Phase::Down | Phase::Shielded | Phase::Clear | Phase::Over => false,
        }
    }

    fn leave_down(&mut self, now: Instant, effects: &mut Vec<Effect>) {
        match self.plan.way {
            Way::Kept => {
                self.enter(Phase::Clear, now, effects);
                let first = (0..self.progress.len())
                    .filter(|&index| self.goes_first(index))
                    .filter_map(|index| self.old_id(index))
                    .collect::<Vec<_>>();
                if !first.is_empty() {
                    effects.push(Effect::Release(first));
                    effects.extend(self.removals());
                }
            }
            Way::Shielded => {
                self.enter(Phase::Up, now, effects);
                effects.push(Effect::Release(self.olds()));
            }
            Way::Cleared => {
                self.enter(Phase::Shielded, now, effects);
                effects.push(Effect::Release(self.olds()));
                // While it sees an exit, the kubelet may keep the container in back-off and not try to create
                // it (doBackOff), or collect it together with the log that it counts restarts by
                // (kuberuntime_gc.go keeps the newest dead one of a name, which is the placeholder).
                let shielded = (0..self.progress.len())
                    .filter(|&index| self.plan.members[index].placeholders > 0);
                effects.extend(shielded.flat_map(|index| self.removals_of(index)));
            }
        }
    }

    fn enter(&mut self, phase: Phase, now: Instant, effects: &mut Vec<Effect>) {
        self.phase = phase;
        self.deadline = now
            + match phase {
                Phase::Shielded => RECORD_LIMIT,
                // Under Kept the regular containers' exits are still held.
                Phase::Clear if self.plan.way == Way::Kept => {
                    self.deadline.saturating_duration_since(now) + Duration::from_millis(500)
                }
                Phase::Clear => CLEAR_LIMIT,
                Phase::Down | Phase::Up | Phase::Over => UP_LIMIT,
            };
        effects.push(Effect::Save);
    }

    fn finish(&mut self, outcome: Outcome) -> Vec<Effect> {
        self.phase = Phase::Over;
        let mut effects = vec![Effect::Release(self.olds())];
        effects.extend(self.removals_of_placeholders());
        effects.push(Effect::Finish(outcome));
        effects
    }

    /// Containers run that were not to start yet: the gate was not there. The kubelet will not run init
    /// containers while a regular one runs, so nothing but another round leads to the start order.
    fn again(&mut self, recent: bool, now: Instant) -> Vec<Effect> {
        if recent && self.plan.again < MOST_AGAIN {
            self.phase = Phase::Over;
            return vec![Effect::Again];
        }
        let mut effects = Vec::new();
        // The kubelet goes on by itself; what is left is to take away the placeholders of what has started.
        self.plan.way = Way::Shielded;
        self.enter(Phase::Up, now, &mut effects);
        effects.push(Effect::Release(self.olds()));
        effects.extend(self.removals_of_replaced());
        effects.extend(self.advance(now));
        effects
    }
}

/// A placeholder that was under way when the pod was deleted must not stay.
fn after_the_end(event: Event) -> Vec<Effect> {
    match event {
        Event::PlaceholderMade(_, id) => vec![Effect::Remove(id)],
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests;
