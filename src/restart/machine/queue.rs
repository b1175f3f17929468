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
use crate::ids::ContainerId;
use crate::kube::ContainerKind;
use crate::times::{BURST_LIMIT, DOWN_LIMIT, ENOUGH_TIME, LAST_MOMENT};

/// A place among the pods that restart at once.
#[derive(Debug, Clone, Copy)]
pub(super) struct Queued {
    since: Instant,
    place: Place,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// It has asked, and nobody has answered yet.
    Asked,
    /// Other pods come first.
    Waiting,
    /// It is the pod's turn, if what has ended can be held or seen for long enough.
    Called,
}

impl Machine {
    /// Whether nothing has been killed yet because other pods come first.
    pub(crate) fn is_queued(&self) -> bool {
        self.phase == Phase::Down && self.queue.is_some()
    }

    /// Whether others had better wait until what has ended of this pod is shielded: its hold ends first.
    pub(crate) fn is_exposed(&self) -> bool {
        let held = self.progress.iter().any(|it| it.held_since.is_some());
        let mut progress = self.progress.iter();
        let lacks = progress.any(|it| self.lacks_in_queue(it) > 0);
        self.is_queued() && !self.has_just_asked() && held && lacks
    }

    /// Whether it has, or still wants, a turn among the pods of this node.
    pub(crate) fn wants_turn(&self) -> bool {
        let lacks = |it: &Progress| !it.old_is_gone() && it.lacks_placeholders() > 0;
        let done = self.killed && self.all_down() && !self.progress.iter().any(lacks);
        match self.phase {
            Phase::Down => self.is_queued() || self.replays_at_once() || !done,
            phase => phase == Phase::Replay,
        }
    }

    fn has_just_asked(&self) -> bool {
        self.queue.is_some_and(|it| it.place == Place::Asked)
    }

    /// Other pods come first: what has ended is shielded meanwhile.
    pub(super) fn is_to_wait(&mut self) {
        if let Some(queued) = self.queue.as_mut().filter(|it| it.place == Place::Asked) {
            queued.place = Place::Waiting;
        }
        self.shield_in_queue();
    }

    pub(super) fn is_called(&mut self) {
        if let Some(queued) = &mut self.queue {
            queued.place = Place::Called;
        }
    }

    /// Shields the exits that are held, or have been seen, by now.
    pub(super) fn shield_in_queue(&mut self) {
        if self.is_queued() && !self.has_just_asked() {
            self.shield(Self::lacks_in_queue);
        }
    }

    /// Until when an exit that is held now can be.
    pub(super) fn held_until(&self) -> Option<Instant> {
        let since = self.progress.iter().filter_map(|it| it.held_since);
        since.min().map(|since| since + DOWN_LIMIT)
    }

    /// Returns whether it has got on.
    pub(super) fn step_queue(&mut self, now: Instant) -> bool {
        let Some(Queued { since, place }) = self.queue else {
            return false;
        };
        let called = place == Place::Called;
        let Some(until) = self.held_until() else {
            self.deadline = since + BURST_LIMIT;
            // Whoever has their turn may have been stopped in it.
            let passes = called || now >= self.deadline;
            if passes {
                self.pass(now);
            }
            return passes;
        };
        self.deadline = if self.last_moment {
            // What could be shielded has been waited for.
            until + LAST_MOMENT
        } else {
            until
        };
        let late = now >= self.deadline;
        let stands = |it: &Progress| !self.is_exposed_in_queue(it);
        let all_stand = self.progress.iter().all(stands);
        let guard_stands = self.guard().is_none_or(stands);
        if called && now + ENOUGH_TIME <= until {
            self.pass(now);
        } else if all_stand && (called || late) {
            self.show(|_, it| it.held_since.is_some());
        } else if !late {
            return false;
        } else if !self.last_moment {
            self.last_moment = true;
        } else if guard_stands {
            self.show(|_, it| it.held_since.is_some());
        } else {
            self.queue = None;
            self.fail(now);
        }
        true
    }

    /// Containers that have time to stop, and what begins anew, wait for nobody: the one for too long, the other has its turn.
    pub(super) fn enter_queue(&mut self, now: Instant) {
        let anew = self.plan.again > 0 || self.plan.replayed_inits;
        if anew || self.plan.grace_ms > 0 {
            self.pass(now);
        } else {
            self.queue = Some(Queued {
                since: now,
                place: Place::Asked,
            });
            self.effects.push(Effect::AskForTurn);
        }
    }

    /// It is its turn.
    pub(super) fn pass(&mut self, now: Instant) {
        self.queue = None;
        self.last_moment = false;
        self.deadline = self.held_until().unwrap_or(now + DOWN_LIMIT);
        self.announce(true);
        if self.replays() {
            self.effects.push(Effect::Recover);
        }
        if !self.replays_at_once() {
            self.begin_shields();
        }
        self.want_waker();
    }

    /// What has ended is released behind its shields. What is not shielded is removed: the kubelet starts what is gone.
    fn show(&mut self, of: impl Fn(&Self, &Progress) -> bool) {
        let held = self.progress.iter().filter(|it| of(self, it));
        let olds: Vec<ContainerId> = held.filter_map(|it| it.member.old_id()).cloned().collect();
        self.remove_olds(|machine, it| of(machine, it) && machine.is_exposed_in_queue(it));
        for id in &olds {
            if let Some(it) = self.of_old_mut(id) {
                it.held_since = None;
                it.shown = true;
                it.old = OldState::Exited;
            }
        }
        self.effects.push(Effect::Release(olds));
        self.last_moment = false;
    }

    /// What begins anew needs the gate, and while a hook waits, a plugin that came back has none. So what is shielded is shown.
    /// Returns whether anything is.
    pub(super) fn show_anew(&mut self) -> bool {
        let shielded = |it: &Self, of: &Progress| {
            let shield = of.member.placeholders > 0 && !of.lacks_shield();
            it.phase == Phase::Down && it.plan.again > 0 && of.old == OldState::Held && shield
        };
        let any = self.progress.iter().any(|it| shielded(self, it));
        if any {
            self.show(shielded);
        }
        any
    }

    /// How many placeholders the exit of that container needs before it may be seen, beside those that stand. While another
    /// regular container runs, the pod cannot be taken for stopped (`getPhase`).
    fn lacks_in_queue(&self, it: &Progress) -> usize {
        let is_trigger = it.member.name == self.plan.trigger.name;
        let ended = it.old_has_ended() && (is_trigger || it.member.was_running());
        // What had ended before is seen as it is, and what the kubelet starts again may be seen.
        if self.plan.is_by_policy() || !ended {
            return 0;
        }
        // An attempt that runs is another's: this one has ended.
        let runs = |it: &Progress| it.is(ContainerKind::Regular) && it.old == OldState::Running;
        let alone = !self.progress.iter().any(runs);
        // Where kinds are guessed, it may be an init container.
        let regular = self.plan.ordered && it.is(ContainerKind::Regular);
        let spared = self.is_guard(it) && regular && !alone;
        it.lacks_placeholders().saturating_sub(usize::from(spared))
    }

    /// Whether the kubelet wants to create that container only after it has recorded what shields the pod: the guard, unless it
    /// has been wanted since it was shown.
    pub(super) fn proves_recording(&self, it: &Progress) -> bool {
        let shields = |it: &Progress| it.member.placeholders > 0 && !it.shown;
        let shown = self.guard().is_some_and(|it| it.shown);
        if shown && self.progress.iter().any(shields) {
            shields(it)
        } else {
            self.is_guard(it)
        }
    }

    fn is_exposed_in_queue(&self, it: &Progress) -> bool {
        self.lacks_in_queue(it) + it.untrusted().count() > 0
    }

    /// The exit of that container is held, since then.
    pub(super) fn set_held(&mut self, id: &ContainerId, since: Instant) {
        self.set_old(id, OldState::Held);
        let replaces = self.plan.again == 0 && self.phase == Phase::Down && !self.is_queued();
        if let Some(it) = self.of_old_mut(id)
            && it.old == OldState::Held
        {
            it.held_since = Some(since);
            // A hook that another process told to wait has waited for long.
            if replaces {
                self.deadline = self.deadline.min(since + DOWN_LIMIT + LAST_MOMENT);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::{MADE, PLAIN, held, since};
    use super::*;
    use crate::kube::RestartPolicy;
    use crate::plan::tests::draft;
    use crate::restart::machine::{Event, Outcome};
    use crate::times::{LONGEST_RECORDING, RELIST_INTERVAL, time_of_relist};

    const LATER: Duration = Duration::from_secs(5);

    /// A Never pod of two whose `a` has exited, while other pods come first; and what it wants.
    fn queued(now: Instant) -> (Machine, Vec<Effect>) {
        let plan = draft(Some(RestartPolicy::Never), PLAIN, "a", 42).settled();
        let held = held(&plan, now);
        let found = since(&plan, now.checked_sub(RELIST_INTERVAL).unwrap());
        let (mut machine, mut effects) = Machine::begin(plan, &held, None, &found, now);
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
        let late = now + DOWN_LIMIT + LAST_MOMENT + LONGEST_RECORDING;
        effects.extend(machine.handle(late, Event::Tick));
        let over = Effect::Finish(Outcome::Unshielded);
        assert!(effects.contains(&over) && !kills(&effects), "{effects:?}");
    }
}
