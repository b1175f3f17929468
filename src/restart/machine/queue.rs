//! Before anything is killed, a pod waits for its turn among those that restart at once.
//!
//! Exits can be held for seconds, and what a busy node makes in that time is bounded. So the exit that asked for the restart
//! is all that is held meanwhile, and shielded; where that takes long it is released behind its shields, and the kubelet sees
//! that one container waits while the others run. Those are killed when their next attempts can be made at once, so that
//! their exits are held for no longer than that takes. A pod whose trigger cannot be shielded goes on as without the plugin.

use std::time::Instant;

use super::Machine;
use super::progress::{OldState, Progress};
use super::terms::{Effect, Phase};
use crate::exit_hold;
use crate::ids::ContainerId;
use crate::kube::ContainerKind;
use crate::restart::plan::Member;
use crate::restart::times::{BURST_LIMIT, DOWN_LIMIT, ENOUGH_TIME, LAST_MOMENT};

/// Whether it is the pod's turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Queue {
    /// It has asked, and nobody has answered yet.
    Asked(Instant),
    /// Other pods come first, since then.
    Waiting(Instant),
    /// It is, if what has ended can be held or seen for long enough.
    Called(Instant),
    /// It has been, or is, or need not be waited for.
    Passed,
}

impl Machine {
    /// Whether nothing has been killed yet because other pods come first.
    #[must_use]
    pub fn is_queued(&self) -> bool {
        self.phase == Phase::Down && self.queue != Queue::Passed
    }

    /// Whether others had better wait until what has ended of this pod is shielded: its hold ends first.
    #[must_use]
    pub fn is_exposed(&self) -> bool {
        let waits = matches!(self.queue, Queue::Waiting(_) | Queue::Called(_));
        let held = self.progress.iter().any(|it| it.held_since.is_some());
        let lacks = (0..self.progress.len()).any(|index| self.lacks_in_queue(index) > 0);
        self.is_queued() && waits && held && lacks
    }

    /// Whether it has, or still wants, a turn among the pods of this node.
    #[must_use]
    pub fn wants_turn(&self) -> bool {
        let lacks = |index: usize| {
            !self.progress[index].old_is_gone() && self.lacks_placeholders(index) > 0
        };
        let done = self.killed && self.all_down() && !(0..self.progress.len()).any(lacks);
        match self.phase {
            Phase::Down => self.is_queued() || self.replays_at_once() || !done,
            phase => phase == Phase::Replay,
        }
    }

    /// Other pods come first: what has ended is shielded meanwhile.
    pub(super) fn is_to_wait(&mut self) -> Vec<Effect> {
        if let Queue::Asked(since) = self.queue {
            self.queue = Queue::Waiting(since);
        }
        self.queue_shields()
    }

    pub(super) fn is_called(&mut self) {
        if let Queue::Asked(since) | Queue::Waiting(since) = self.queue {
            self.queue = Queue::Called(since);
        }
    }

    /// What shields the exits that are held, or have been seen, by now.
    pub(super) fn queue_shields(&mut self) -> Vec<Effect> {
        if !self.is_queued() || matches!(self.queue, Queue::Asked(_)) {
            return Vec::new();
        }
        let mut effects = Vec::new();
        for index in self.guard_first() {
            let lacks = self.lacks_in_queue(index);
            effects.extend(self.shields(index, lacks));
        }
        effects
    }

    /// Until when an exit that is held now can be.
    pub(super) fn held_until(&self) -> Option<Instant> {
        let since = self.progress.iter().filter_map(|it| it.held_since);
        since.min().map(|since| since + DOWN_LIMIT)
    }

    /// Returns whether it has got on.
    pub(super) fn step_queue(&mut self, now: Instant, effects: &mut Vec<Effect>) -> bool {
        let (Queue::Asked(since) | Queue::Waiting(since) | Queue::Called(since)) = self.queue
        else {
            return false;
        };
        let until = self.held_until();
        self.deadline = match until {
            None => since + BURST_LIMIT,
            // What could be shielded has been waited for.
            Some(until) if self.last_moment.is_none() => until + LAST_MOMENT,
            Some(until) => until,
        };
        let late = now >= self.deadline;
        let called = matches!(self.queue, Queue::Called(_));
        let enough = until.is_none_or(|until| now + ENOUGH_TIME <= until);
        if called && enough {
            self.pass(now, effects);
        } else if until.is_none() {
            // Whoever has their turn may have been stopped in it.
            if !late {
                return false;
            }
            self.pass(now, effects);
        } else if self.queue_stands() && (called || late) {
            self.show(effects);
        } else if !late {
            return false;
        } else if self.last_moment.take().is_some() {
            // That was for all of it.
        } else if self
            .guard()
            .is_none_or(|guard| !self.is_exposed_in_queue(guard))
        {
            self.show(effects);
        } else {
            self.queue = Queue::Passed;
            self.fail(now, effects);
        }
        true
    }

    /// Containers that have time to stop, and what begins anew, wait for nobody: the one for too long, the other has its turn.
    pub(super) fn queue_from(&self, now: Instant) -> Queue {
        let anew = self.plan.again > 0 || self.plan.replayed_inits;
        if anew || self.plan.grace_ms > 0 {
            Queue::Passed
        } else {
            Queue::Asked(now)
        }
    }

    pub(super) fn enter_queue(&mut self, now: Instant) -> Vec<Effect> {
        let mut effects = Vec::new();
        if self.queue == Queue::Passed {
            self.pass(now, &mut effects);
        } else {
            effects.push(Effect::AskForTurn);
        }
        effects
    }

    /// It is its turn.
    fn pass(&mut self, now: Instant, effects: &mut Vec<Effect>) {
        self.queue = Queue::Passed;
        self.last_moment = Some(LAST_MOMENT);
        self.deadline = self.held_until().unwrap_or(now + DOWN_LIMIT);
        effects.extend(self.announce(true));
        if self.replays() {
            effects.push(Effect::Recover);
        }
        if !self.replays_at_once() {
            effects.extend(self.begin_shields());
        }
        effects.extend(self.waker_wanted());
    }

    /// What has ended is released behind its shields. What is not shielded is removed: the kubelet starts what is gone.
    fn show(&mut self, effects: &mut Vec<Effect>) {
        let mut seen = Vec::new();
        for index in 0..self.progress.len() {
            if self.progress[index].held_since.is_none() {
                continue;
            }
            seen.extend(self.old_id(index));
            if self.is_exposed_in_queue(index) {
                effects.extend(self.removals_of(index));
            }
            let progress = &mut self.progress[index];
            progress.held_since = None;
            progress.shown = true;
            progress.old = Some(OldState::Exited);
        }
        self.last_moment = Some(LAST_MOMENT);
        effects.insert(0, Effect::Release(seen));
    }

    /// How many placeholders the exit of that container needs before it may be seen, beside those that stand. While another
    /// regular container runs, the pod cannot be taken for stopped (`getPhase`).
    fn lacks_in_queue(&self, index: usize) -> usize {
        let member = &self.plan.members[index];
        let is_trigger = member.name == self.plan.trigger.name;
        let ended = matches!(
            self.progress[index].old,
            Some(OldState::Held | OldState::Exited)
        );
        // What had ended before is seen as it is, and what the kubelet starts again may be seen.
        if self.plan.is_by_policy() || !ended || !(is_trigger || member.was_running()) {
            return 0;
        }
        let runs = |(at, (it, progress)): (usize, (&Member, &Progress))| {
            at != index
                && it.kind == ContainerKind::Regular
                && progress.old == Some(OldState::Running)
        };
        let alone = !self.members().enumerate().any(runs);
        let all = self.lacks_placeholders(index);
        // Where kinds are guessed, it may be an init container.
        let regular = self.plan.ordered && member.kind == ContainerKind::Regular;
        all.saturating_sub(usize::from(self.is_guard(index) && regular && !alone))
    }

    /// Whether the kubelet wants to create that container only after it has recorded what shields the pod: the guard, unless it
    /// has been wanted since it was shown.
    pub(super) fn proves_recording(&self, index: usize) -> bool {
        let shown = |index: usize| self.progress[index].shown;
        if !self.guard().is_some_and(shown) {
            return self.is_guard(index);
        }
        let proves = |&index: &usize| self.plan.members[index].placeholders > 0 && !shown(index);
        let any = (0..self.progress.len()).any(|index| proves(&index));
        if any {
            proves(&index)
        } else {
            self.is_guard(index)
        }
    }

    fn is_exposed_in_queue(&self, index: usize) -> bool {
        let untrusted = self.progress[index].untrusted().count();
        self.lacks_in_queue(index) + untrusted > 0
    }

    fn queue_stands(&self) -> bool {
        (0..self.progress.len()).all(|index| !self.is_exposed_in_queue(index))
    }

    /// Of exits that are held, those whose hooks have not given up.
    pub(super) fn is_held_still(since: Instant, now: Instant) -> bool {
        now.saturating_duration_since(since) < exit_hold::LIMIT
    }

    /// The exit of that container is held, since then.
    pub(super) fn set_held(&mut self, id: &ContainerId, since: Instant) {
        self.set_old(id, OldState::Held);
        if let Some(index) = self.index_of_old(id)
            && self.progress[index].old == Some(OldState::Held)
        {
            self.progress[index].held_since = Some(since);
            // A hook that another process told to wait has waited for long.
            if self.phase == Phase::Down && !self.is_queued() && self.plan.again == 0 {
                self.deadline = self.deadline.min(since + DOWN_LIMIT + LAST_MOMENT);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::{MADE, PLAIN, held, there};
    use super::*;
    use crate::kube::RestartPolicy;
    use crate::restart::machine::{Event, Outcome};
    use crate::restart::plan::tests::draft;
    use crate::restart::times::{RELIST_INTERVAL, time_of_relist};

    const LATER: Duration = Duration::from_secs(5);

    /// A Never pod of two whose `a` has exited, while other pods come first; and what it wants.
    fn queued(now: Instant) -> (Machine, Vec<Effect>) {
        let plan = draft(Some(RestartPolicy::Never), PLAIN, "a", 42).settled();
        let held = held(&plan, now);
        let (mut machine, mut effects) =
            Machine::begin(plan, &held, None, &there(&[]), RELIST_INTERVAL, now);
        effects.extend(machine.handle(now, Event::Queued));
        (machine, effects)
    }

    fn kills(effects: &[Effect]) -> bool {
        effects.iter().any(|it| matches!(it, Effect::Kill(_)))
    }

    fn is_shown(effects: &[Effect]) -> bool {
        effects.contains(&Effect::Release(vec!["a-0".into()]))
    }

    #[test]
    fn while_others_come_first_one_shield_is_made_and_nothing_killed() {
        let now = Instant::now();
        let (mut machine, effects) = queued(now);
        let one = Effect::MakePlaceholder("a".into(), "a-0".into());
        assert_eq!(effects, [Effect::Save, Effect::AskForTurn, one]);
        assert!(machine.is_exposed() && machine.holds(&"a-0".into()));
        // It is called soon enough.
        let mut effects = machine.handle(now, Event::Called);
        effects.extend(machine.handle(now, Event::Announced));
        assert!(kills(&effects) && !is_shown(&effects), "{effects:?}");
    }

    #[test]
    fn one_that_is_called_late_is_shown_before_anything_is_killed() {
        let now = Instant::now();
        let (mut machine, _) = queued(now);
        machine.handle(now, Event::PlaceholderMade("a".into(), "p".into(), MADE));
        machine.handle(now + time_of_relist(MADE), Event::Tick);
        assert!(!machine.is_exposed());
        let mut effects = machine.handle(now + LATER, Event::Called);
        assert!(is_shown(&effects), "{effects:?}");
        assert!(!machine.holds(&"a-0".into()) && !machine.is_queued());
        effects = machine.handle(now + LATER, Event::Announced);
        assert_eq!(effects, [Effect::Kill("b-0".into())]);
        // The others have all of a hold before them.
        assert_eq!(machine.deadline, now + LATER + DOWN_LIMIT);
    }

    #[test]
    fn one_that_is_not_called_is_shown_when_its_hold_ends_and_goes_on_waiting() {
        let now = Instant::now();
        let (mut machine, _) = queued(now);
        machine.handle(now, Event::PlaceholderMade("a".into(), "p".into(), MADE));
        let effects = machine.handle(now + DOWN_LIMIT, Event::Tick);
        assert!(is_shown(&effects) && !kills(&effects), "{effects:?}");
        assert!(machine.is_queued() && !machine.is_holding());
    }

    #[test]
    fn one_that_cannot_be_shielded_is_left_as_it_is() {
        let now = Instant::now();
        let (mut machine, _) = queued(now);
        machine.handle(now + DOWN_LIMIT, Event::Tick);
        let mut effects = machine.handle(now + DOWN_LIMIT + LAST_MOMENT, Event::Tick);
        let late = now + DOWN_LIMIT + LAST_MOMENT + RELIST_INTERVAL;
        effects.extend(machine.handle(late, Event::Tick));
        let over = Effect::Finish(Outcome::Unshielded);
        assert!(effects.contains(&over) && !kills(&effects), "{effects:?}");
    }
}
