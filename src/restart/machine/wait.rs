//! What a pod waits for while its exits are shielded and shown one by one: its turn, or that its containers stop.
//!
//! Exits can be held for seconds. Before anything is killed, a pod waits for its turn among those that restart at once, for what
//! a busy node makes in that time is bounded. So the exit that asked for the restart is all that is held meanwhile, and
//! shielded; where that takes long it is released behind its shields, and the kubelet sees that one container waits while the
//! others run. Those are killed when their next attempts can be made at once, so that their exits are held for no longer than
//! that takes. A pod whose trigger cannot be shielded goes on as without the plugin.
//!
//! Containers that have time to stop (the earlier draft of KEP-5532, "Termination Phase") exit one after another, within minutes:
//! each exit is shown behind its shields while others still run. The last one is held, and the restart goes on from there as if
//! all had been killed at once.

use std::time::Instant;

use super::Machine;
use super::progress::{OldState, Progress};
use super::terms::{Effect, Outcome, Phase};
use crate::ids::ContainerId;
use crate::kube::ContainerKind;
use crate::times::{BURST_LIMIT, DOWN_LIMIT, ENOUGH_TIME, LAST_MOMENT, PATIENCE, UP_LIMIT};

/// Since when it waits for what.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wait {
    since: Instant,
    until: Until,
    /// When all have stopped, it is asked once more whether the kubelet is ending the pod.
    asked_again: bool,
    /// Before that, the kubelet may not have listed attempts that hide what is held of a restart before.
    shows_from: Option<Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Until {
    /// It has asked for a turn, and nobody has answered yet.
    Answered,
    /// Other pods come first.
    Turn,
    /// It is the pod's turn, if what has ended can be held or seen for long enough.
    Called,
    /// Its containers have stopped.
    Stopped,
}

impl Machine {
    /// Whether exits are shielded and shown one by one, because the pod waits.
    pub(super) fn waits(&self) -> bool {
        self.phase == Phase::Down && self.wait.is_some()
    }

    /// Whether its containers have time to stop, and some have yet to.
    pub(crate) fn lets_stop(&self) -> bool {
        self.waits() && self.waits_for(Until::Stopped) && !self.are_stopped()
    }

    /// Whether nothing has been killed yet because other pods come first.
    pub(crate) fn is_queued(&self) -> bool {
        self.waits() && !self.waits_for(Until::Stopped)
    }

    /// Whether others had better wait until what has ended of this pod is shielded: its hold ends first.
    pub(crate) fn is_exposed(&self) -> bool {
        let held = self.progress.iter().any(|it| it.held_since.is_some());
        let stops = self.waits_for(Until::Stopped);
        // Of those that stop, it may be that none need be shielded at all.
        let lacks = |it: &Progress| self.lacks_in_wait(it) > 0 && (!stops || it.coming > 0);
        let asked = self.waits() && !self.waits_for(Until::Answered);
        asked && held && self.progress.iter().any(lacks)
    }

    /// Whether it has, or still wants, a turn among the pods of this node.
    pub(crate) fn wants_turn(&self) -> bool {
        let lacks = |it: &Progress| !it.old_is_gone() && it.lacks_placeholders() > 0;
        let done = self.killed && self.all_down() && !self.progress.iter().any(lacks);
        match self.phase {
            Phase::Down if self.waits() => self.is_queued(),
            Phase::Down => self.replays_at_once() || !done,
            phase => phase == Phase::Replay,
        }
    }

    /// Whether this container is to be told to stop now. As when a pod ends, sidecars follow those that they are there for, in
    /// reverse order (KEP-753; `terminationOrdering`, `pkg/kubelet/kuberuntime`).
    pub(crate) fn is_to_stop(&self, id: &ContainerId) -> bool {
        let runs = |it: &Progress| it.old == OldState::Running && !it.is(ContainerKind::Init);
        let sidecar = |it: &Progress| it.is(ContainerKind::Sidecar);
        let mut others = self.progress.iter().rev();
        match self.of_old(id).filter(|it| sidecar(it)) {
            Some(it) => others.all(|other| {
                let after = self.before(other).any(|it| it.member.old_id() == Some(id));
                !runs(other) || other.member.name == it.member.name || (sidecar(other) && !after)
            }),
            None => true,
        }
    }

    fn waits_for(&self, until: Until) -> bool {
        self.wait.is_some_and(|it| it.until == until)
    }

    /// Other pods come first: what has ended is shielded meanwhile.
    pub(super) fn is_to_wait(&mut self) {
        if let Some(wait) = self.wait.as_mut().filter(|it| it.until == Until::Answered) {
            wait.until = Until::Turn;
        }
        self.shield_in_queue();
    }

    pub(super) fn is_called(&mut self) {
        if let Some(wait) = self.wait.as_mut().filter(|it| it.until != Until::Stopped) {
            wait.until = Until::Called;
        }
    }

    /// Shields the exits that are held, or have been seen, by now.
    pub(super) fn shield_in_queue(&mut self) {
        if self.is_queued() && !self.waits_for(Until::Answered) {
            self.shield(Self::lacks_in_wait);
        }
    }

    /// Until when an exit that is held now can be.
    pub(super) fn held_until(&self) -> Option<Instant> {
        self.held_since().map(|since| since + DOWN_LIMIT)
    }

    fn held_since(&self) -> Option<Instant> {
        self.progress.iter().filter_map(|it| it.held_since).min()
    }

    /// Returns whether it has got on.
    pub(super) fn step_wait(&mut self, now: Instant) -> bool {
        let Some(wait) = self.wait else {
            return false;
        };
        let over = match wait.until {
            Until::Answered | Until::Turn => false,
            Until::Called => true,
            Until::Stopped => self.has_stopped(),
        };
        match self.held_since() {
            None => self.wait_on(wait, over, now),
            Some(since) => self.wait_while_held(wait, over, since, now),
        }
    }

    /// Stops the containers, and says whether they have all stopped and the kubelet is not ending the pod.
    fn has_stopped(&mut self) -> bool {
        if self.killed || self.announced {
            self.kill_olds();
        }
        let stopped = self.are_stopped();
        if let Some(wait) = self.wait.as_mut().filter(|it| stopped && !it.asked_again) {
            // It may have begun to meanwhile.
            wait.asked_again = true;
            self.announced = false;
            self.effects.push(Effect::Announce(true));
        }
        stopped && self.announced
    }

    /// Whether all that ran has been told to end, and has.
    pub(crate) fn are_stopped(&self) -> bool {
        self.killed && self.all_down()
    }

    /// Nothing is held. Returns whether it has got on.
    fn wait_on(&mut self, wait: Wait, over: bool, now: Instant) -> bool {
        let stops = wait.until == Until::Stopped;
        let limit = if stops {
            self.plan.grace() + UP_LIMIT
        } else {
            BURST_LIMIT
        };
        self.deadline = wait.since + limit;
        let late = now >= self.deadline;
        if stops && late {
            // The runtime does not end them.
            self.finish(Outcome::TimedOut);
        } else if over || late {
            // Whoever has their turn may have been stopped in it.
            self.pass(now);
        } else if stops {
            // What could not be held is seen.
            self.shield(Self::lacks_in_wait);
        }
        over || late
    }

    /// The same while an exit is held, since then.
    fn wait_while_held(&mut self, wait: Wait, over: bool, since: Instant, now: Instant) -> bool {
        let until = since + DOWN_LIMIT;
        if over && now + ENOUGH_TIME <= until {
            self.pass(now);
            return true;
        }
        let stops = wait.until == Until::Stopped;
        if stops {
            // Most containers stop at once, and what was not shielded is replayed sooner.
            let patient = (since + PATIENCE).max(wait.shows_from.unwrap_or(since));
            if now < patient.min(until) {
                self.deadline = patient.min(until);
                return false;
            }
            self.shield(Self::lacks_in_wait);
        }
        self.deadline = if self.last_moment {
            // What could be shielded has been waited for.
            until + LAST_MOMENT
        } else {
            until
        };
        let late = now >= self.deadline;
        // What runs hides nothing.
        let stands = |it: &Progress| it.old == OldState::Running || !self.is_exposed_in_wait(it);
        let all_stand = self.progress.iter().all(stands);
        let guard_stands = self.guard().is_none_or(stands);
        if all_stand && (stops || over || late) {
            self.show(now, |_, it| it.held_since.is_some());
        } else if !late {
            return false;
        } else if !self.last_moment {
            self.last_moment = true;
        } else if guard_stands {
            // Those that are held for less time yet may be shielded in theirs.
            self.show(now, |it, of| {
                let due = |since| now >= since + DOWN_LIMIT || !it.is_exposed_in_wait(of);
                of.held_since.is_some_and(due)
            });
        } else {
            self.wait = None;
            self.fail(now);
        }
        true
    }

    /// What begins anew waits for no turn: it has one. Nor do containers that have time to stop, for it would take too long.
    pub(super) fn begin_wait(&mut self, anew: bool, before: Option<&Self>, now: Instant) {
        let until = if self.plan.grace_ms > 0 {
            self.announce(true);
            Until::Stopped
        } else if anew {
            return self.pass(now);
        } else {
            self.effects.push(Effect::AskForTurn);
            Until::Answered
        };
        self.wait = Some(Wait {
            since: now,
            until,
            asked_again: false,
            shows_from: before.and_then(|before| before.replay.seen_from),
        });
    }

    /// It is its turn, or its containers have stopped.
    pub(super) fn pass(&mut self, now: Instant) {
        self.wait = None;
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
    fn show(&mut self, now: Instant, of: impl Fn(&Self, &Progress) -> bool) {
        let held = self.progress.iter().filter(|it| of(self, it));
        let olds: Vec<ContainerId> = held.filter_map(|it| it.member.old_id()).cloned().collect();
        self.remove_olds(|machine, it| {
            of(machine, it) && it.old_has_ended() && machine.is_exposed_in_wait(it)
        });
        self.release(of);
        for id in &olds {
            if let Some(it) = self.of_old_mut(id) {
                it.held_since = None;
                // Of one that runs, what is held is older.
                if it.old_has_ended() {
                    it.shown = Some(now);
                    it.wanted = false;
                    it.old = OldState::Exited;
                }
            }
        }
        self.last_moment = false;
    }

    /// What begins anew needs the gate, and while a hook waits, a plugin that came back has none. So what is shielded is shown,
    /// and what needs no shield: sidecars. Returns whether anything is.
    pub(super) fn show_anew(&mut self, now: Instant) -> bool {
        let shielded = |it: &Self, of: &Progress| {
            let shields = of.member.placeholders > 0 || of.is(ContainerKind::Sidecar);
            let stand = shields && !of.lacks_shield();
            it.phase == Phase::Down && it.plan.again > 0 && of.old == OldState::Held && stand
        };
        let any = self.progress.iter().any(|it| shielded(self, it));
        if any {
            self.show(now, shielded);
        }
        any
    }

    /// How many placeholders the exit of that container needs before it may be seen, beside those that stand. While another
    /// regular container runs, the pod cannot be taken for stopped (`getPhase`).
    fn lacks_in_wait(&self, it: &Progress) -> usize {
        let is_trigger = it.member.name == self.plan.trigger.name;
        let ended = it.old_has_ended() && (is_trigger || it.member.was_running());
        let is_about_to = it.member.at_once && it.old == OldState::Running;
        // What had ended before is seen as it is, and what the kubelet starts again may be seen.
        if self.plan.is_by_policy() || !(ended || is_about_to) {
            return 0;
        }
        // An attempt that runs is another's: this one has ended, or is about to. The exit of one that is undone is not held.
        let runs = |it: &Progress| {
            let lasts = it.old == OldState::Running && !it.member.at_once;
            it.is(ContainerKind::Regular) && lasts && !self.is_undone(it)
        };
        let alone = !self.progress.iter().any(runs);
        // Where kinds are guessed, it may be an init container.
        let regular = self.plan.ordered && it.is(ContainerKind::Regular);
        let spared = self.is_guard(it) && regular && !alone;
        it.lacks_placeholders().saturating_sub(usize::from(spared))
    }

    /// Whether the kubelet wants to create that container only after it has recorded what shields the pod: the guard, unless
    /// others were released after it.
    pub(super) fn proves_recording(&self, it: &Progress) -> bool {
        let release = |it: &Progress| (it.shown.is_none(), it.shown);
        let is_shielded = |it: &&Progress| it.member.placeholders > 0 && !self.is_undone(it);
        let last = self.progress.iter().filter(is_shielded);
        let last = last.map(release).max();
        let is_last = |it: &Progress| is_shielded(&it) && Some(release(it)) == last;
        if self.guard().is_none_or(is_last) {
            self.is_guard(it)
        } else {
            is_last(it)
        }
    }

    /// What is killed at once has ended behind its shield, and nothing holds it: the kubelet sees that it waits.
    pub(super) fn note_shown(&mut self, id: &ContainerId, now: Instant) {
        let waits = self.waits();
        if let Some(it) = self.of_old_mut(id).filter(|it| waits && it.member.at_once) {
            it.shown.get_or_insert(now);
        }
    }

    pub(super) fn is_exposed_in_wait(&self, it: &Progress) -> bool {
        self.lacks_in_wait(it) + it.untrusted().count() > 0
    }

    /// The exit of that container is held, since then.
    pub(super) fn set_held(&mut self, id: &ContainerId, since: Instant) {
        self.set_old(id, OldState::Held);
        let replaces = self.plan.again == 0 && self.phase == Phase::Down && !self.waits();
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
    use std::collections::BTreeMap;
    use std::time::Duration;

    use super::super::tests::{FULL, MADE, PLAIN, held, since};
    use super::*;
    use crate::kube::RestartPolicy;
    use crate::plan::tests::draft;
    use crate::policy::Action;
    use crate::restart::machine::Event;
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
        let one = Effect::MakePlaceholder("a".into(), Some("a-0".into()));
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

    #[test]
    fn what_is_called_off_when_all_have_stopped_goes_on() {
        let now = Instant::now();
        let mut plan = draft(Some(RestartPolicy::Always), PLAIN, "a", 42);
        plan.action = Action::RestartPod;
        plan.grace_ms = 30_000;
        let plan = plan.settled();
        let held = held(&plan, now);
        let found = since(&plan, now.checked_sub(RELIST_INTERVAL).unwrap());
        let (mut machine, mut effects) = Machine::begin(plan, &held, None, &found, now);
        effects.extend(machine.handle(now, Event::Announced));
        assert!(kills(&effects), "{effects:?}");
        let asks = machine.handle(now, Event::Exited("b-0".into()));
        assert!(asks.contains(&Effect::Announce(true)), "{asks:?}");
        assert!(machine.waits());
        machine.handle(now, Event::CalledOff);
        assert!(!machine.waits() && machine.phase() != Phase::Over);
    }

    #[test]
    fn beside_one_whose_exit_is_not_held_the_guard_is_shielded_as_if_it_were_alone() {
        let now = Instant::now();
        for (unrecorded, shields) in [(false, 1), (true, 2)] {
            let mut plan = draft(Some(RestartPolicy::Never), FULL, "a", 42);
            plan.action = Action::RestartPod;
            plan.grace_ms = 30_000;
            let other = plan.members.iter_mut().find(|it| it.name == "b".into());
            other.unwrap().runs_unrecorded = unrecorded;
            let plan = plan.settled();
            let held = held(&plan, now);
            let found = since(&plan, now.checked_sub(RELIST_INTERVAL).unwrap());
            let (mut machine, _) = Machine::begin(plan, &held, None, &found, now);
            machine.handle(now, Event::Announced);
            let effects = machine.handle(now + PATIENCE, Event::Tick);
            let shield = Effect::MakePlaceholder("a".into(), Some("a-0".into()));
            assert_eq!(effects, vec![shield; shields]);
        }
    }

    /// While no plugin was there.
    #[test]
    fn what_the_kubelet_has_just_started_is_killed_behind_its_shield_while_others_stop() {
        let now = Instant::now();
        let mut plan = draft(Some(RestartPolicy::Never), PLAIN, "a", 42);
        plan.action = Action::RestartPod;
        plan.grace_ms = 30_000;
        plan.again = 1;
        plan.trigger.container = "a-of-the-generation-before".into();
        plan.members[0].at_once = true;
        let plan = plan.settled();
        let [fresh, other] = ["a-0", "b-0"].map(ContainerId::from);
        assert_eq!(plan.grace_of(&fresh), Duration::ZERO);
        assert_eq!(plan.grace_of(&other), Duration::from_secs(30));
        let found = since(&plan, now.checked_sub(RELIST_INTERVAL).unwrap());
        let none = BTreeMap::new();
        let (mut machine, mut effects) = Machine::begin(plan, &none, None, &found, now);
        effects.extend(machine.handle(now, Event::Announced));
        assert!(effects.contains(&Effect::Kill(other)), "{effects:?}");
        let shield = Effect::MakePlaceholder("a".into(), Some(fresh.clone()));
        assert!(effects.contains(&shield), "{effects:?}");
        assert!(!effects.contains(&Effect::Kill(fresh.clone())));
        machine.handle(now, Event::PlaceholderMade("a".into(), "p".into(), MADE));
        let effects = machine.handle(now + LONGEST_RECORDING, Event::Tick);
        assert_eq!(effects, [Effect::Kill(fresh)]);
    }
}
