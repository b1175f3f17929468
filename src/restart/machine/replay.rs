//! Start by replay: everything is started anew while the exits are held, and the kubelet sees all of it at once.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::Machine;
use super::progress::{NewState, OldState, Progress};
use super::terms::{Effect, Outcome, Phase};
use crate::ids::{ContainerId, ContainerName};
use crate::kube::ContainerKind;
use crate::plan::{Member, Starter, Way};
use crate::times::{
    BURST_LIMIT, FALLBACK_TIME, IN_FLIGHT_LIMIT, REST_OF_HOLD, UP_LIMIT, time_of_recording,
};

const TOO_LONG: &str = "it took too long";

/// How long it may take.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Time {
    /// Until the kubelet must be left to start what does not run.
    #[default]
    Planned,
    /// For as long as the exits can be held.
    WholeHold,
    /// For as long as the runtime may take for its calls, whatever is seen by then.
    BeyondHold,
}

/// How far it is.
#[derive(Debug, Default)]
pub(super) struct Replay {
    /// The configurations are there.
    recovered: bool,
    /// The containers of which an attempt was asked for.
    pub(super) asked: BTreeSet<ContainerName>,
    /// Those of them of which nobody has said yet whether it was made.
    pub(super) unanswered: BTreeSet<ContainerName>,
    /// Those whose postStart hooks are over.
    pub(super) hooked: BTreeSet<ContainerName>,
    /// The old containers may be seen to have exited: an init container takes its time.
    pub(super) released: bool,
    /// Whether it goes on when its time is up.
    time: Time,
    /// Until then a relist of the kubelet may be under way that has not listed all attempts.
    pub(super) seen_from: Option<Instant>,
}

impl Machine {
    pub(crate) fn replays(&self) -> bool {
        !matches!(self.plan.starter, Starter::Kubelet(_))
    }

    /// Whether that is to be over before the exits are released. Behind shields a back-off can be waited for.
    pub(super) fn replays_at_once(&self) -> bool {
        self.replays() && self.plan.back_off_ms == 0
    }

    /// Whether it is replayed, or still can be.
    pub(crate) fn may_replay(&self) -> bool {
        let waits = self.plan.back_off_ms > 0 && matches!(self.phase, Phase::Clear | Phase::Up);
        self.replays() && (waits || matches!(self.phase, Phase::Down | Phase::Replay))
    }

    /// Whether the exits are released, and all that was to be waited for is over.
    pub(super) fn may_replay_now(&self) -> bool {
        let ready = self.replay.recovered && self.start_at.is_none() && self.all_down();
        ready && self.may_replay()
    }

    /// Whether the kubelet was let create a container, which need not be there yet, but has the name.
    pub(super) fn has_admitted(&self) -> bool {
        self.progress.iter().any(|it| it.admitted.is_some())
    }

    /// The exits are seen, behind what shields them until each container runs.
    pub(super) fn replay_after_back_off(&mut self, now: Instant) {
        self.replay.released = true;
        self.replay.time = Time::BeyondHold;
        self.enter(Phase::Replay, now);
        self.deadline = now + BURST_LIMIT;
    }

    /// Another process has begun it. What is yet to be made was to be made from what that process knew; what has been made is
    /// started.
    pub(super) fn resume_replay(&mut self, why: &str, elapsed: Duration, now: Instant) {
        let members = self.plan.replayed().iter();
        self.replay.asked = members.map(|it| it.name.clone()).collect();
        // Which hooks have run nobody knows.
        let hooks = self.replayed().any(|it| it.member.post_start);
        let all_there = !hooks && self.replayed().all(|it| self.is_there(it));
        let halved = !all_there && self.running_regulars().next().is_some();
        // A kubelet that has begun with the init containers goes on with the rest.
        if elapsed >= self.time_to_begin_anew(halved) || self.is_seen() || self.begun {
            self.plan.starter = Starter::Kubelet(why.into());
            return self.leave_rest(now);
        } else if !all_there {
            return self.fall_back(why.into());
        }
        if self.progress.iter().any(Progress::is_to_hide) {
            // When they were made, nobody knows.
            self.let_nothing_be_seen_before(now + time_of_recording(elapsed));
        }
        // While no gate was there the kubelet may have started one that has been made here as well.
        self.remove_unstarted(Progress::is_new);
        let waiting = self.progress.iter().filter(|it| !it.is_new());
        let made = waiting.filter_map(|it| it.made.clone());
        self.effects.extend(made.map(Effect::Start));
    }

    /// Whether it runs, is done, or only has to be started. One that has ended otherwise may be one whose start was cancelled
    /// with the process that asked for it.
    fn is_there(&self, it: &Progress) -> bool {
        let done = it.is(ContainerKind::Init) && self.passed(it);
        it.made.is_some() || it.running().is_some() || done
    }

    /// When the kubelet must be left to start what does not run by then.
    pub(super) fn replay_until(&self) -> Option<Instant> {
        let at = self.deadline.checked_sub(FALLBACK_TIME);
        at.filter(|_| {
            let down = self.phase == Phase::Down && !self.waits();
            self.phase == Phase::Replay || (down && self.replays_at_once())
        })
    }

    pub(super) fn recovered(&mut self, result: Result<(), String>) {
        match result {
            Ok(()) => self.replay.recovered = true,
            Err(why) if self.may_replay() && self.phase != Phase::Replay => {
                self.leave_to_kubelet(why);
            }
            Err(_) => {}
        }
    }

    /// Nothing has been started yet.
    pub(super) fn leave_to_kubelet(&mut self, why: String) {
        let unshielded = self.replays_at_once();
        self.plan.starter = Starter::Kubelet(why);
        self.effects.push(Effect::Save);
        if unshielded {
            self.begin_shields();
        }
        self.want_waker();
    }

    pub(super) fn step_before_replay(&mut self, now: Instant) -> bool {
        // One that is gone leaves nothing to make another one from, one that was seen to exit is acted on.
        let escaped = |it: &&Progress| {
            let seen = matches!(it.old, OldState::Exited | OldState::Gone);
            it.member.was_running() && seen && it.shown.is_none()
        };
        if self.is_late_for_replay(now) {
            self.leave_to_kubelet(TOO_LONG.into());
        } else if let Some(it) = self.progress.iter().find(escaped) {
            self.leave_to_kubelet(format!("the exit of {} was not held", it.member.name));
        } else if self.replay.recovered && self.killed && self.all_down() {
            self.announce_down();
            self.enter(Phase::Replay, now);
        } else {
            return false;
        }
        true
    }

    pub(super) fn step_replay(&mut self, now: Instant) -> bool {
        let late = self.is_late_for_replay(now);
        self.replay.seen_from.take_if(|from| now >= *from);
        let failed = self.progress.iter().find(|it| it.has_failed());
        if self.outcome(false) == Some(Outcome::InitFailed) {
            self.finish(Outcome::InitFailed);
        } else if let Some(it) = failed {
            // With its back-off, and in its own time.
            self.fall_back(format!("{} failed", it.member.name));
        } else if self.replayed().all(|it| self.has_begun(it)) && !self.owes_hook() {
            if let Some(from) = self.replay.seen_from {
                self.deadline = self.deadline.max(from + FALLBACK_TIME);
            } else if late || self.is_unshielded() {
                return self.leave_replay(now);
            }
        } else if late && self.waits_for_init() && !self.replay.released {
            // When the last init container has ended, the kubelet may relist before any of the others has started.
            let shields = self.guard_wants_shield();
            if shields && self.replay.time == Time::Planned {
                self.replay.time = Time::WholeHold;
                self.deadline += REST_OF_HOLD;
            } else {
                // Until then the kubelet sees it run and waits for it, under every policy.
                self.let_be_seen(now + UP_LIMIT);
            }
            self.shield(|it, of| usize::from(shields && it.is_guard(of)));
        } else if late && self.may_go_on() {
            // On a busy node to begin anew would only take longer.
            self.prolong(now);
            return true;
        } else if late {
            self.give_up(TOO_LONG.into(), now);
            return true;
        } else {
            if self.may_be_seen() {
                self.let_be_seen(now + BURST_LIMIT);
            }
            let turns = self.replayed().filter(|it| self.is_turn_of(it));
            let turns = turns.filter(|it| !it.is_new());
            let mut names: Vec<ContainerName> = turns.map(|it| it.member.name.clone()).collect();
            names.retain(|name| self.replay.asked.insert(name.clone()));
            if !names.is_empty() {
                self.replay.unanswered.extend(names.iter().cloned());
                self.effects.push(Effect::Replay(names));
            }
        }
        false
    }

    /// All that was there runs again, or all that was to be replayed. The kubelet goes on with the rest, as in a pod that was
    /// still initialising. Returns whether it does.
    fn leave_replay(&mut self, now: Instant) -> bool {
        let whole = self.replays_all();
        if whole {
            self.finish(Outcome::Completed);
        } else {
            let inits = self.replayed_inits().cloned().collect();
            self.enter(Phase::Up, now);
            self.release_all();
            self.effects.push(Effect::Release(inits));
            self.remove_olds(|it, of| it.is_cleared_away(of) && !it.is_replayed(&of.member));
        }
        !whole
    }

    /// Whether the kubelet, which is to go on, would not wait for a postStart hook, which it does not run.
    fn owes_hook(&self) -> bool {
        let runs = |it: &Progress| it.is(ContainerKind::Sidecar) && it.running().is_some();
        !self.replays_all() && self.replayed().any(|it| runs(it) && !self.passed(it))
    }

    /// Whether the kubelet has nothing to start.
    fn replays_all(&self) -> bool {
        self.replayed().count() == self.progress.len()
    }

    /// Those of which there was an attempt to make another one like.
    fn replayed(&self) -> impl DoubleEndedIterator<Item = &Progress> {
        let progress = self.progress.iter().take(self.plan.replayed().len());
        progress.filter(|it| it.member.old.is_some())
    }

    fn is_replayed(&self, member: &Member) -> bool {
        self.plan.replayed().iter().any(|it| it.name == member.name)
    }

    /// The exits are seen before it is over.
    fn let_be_seen(&mut self, deadline: Instant) {
        self.replay.released = true;
        self.deadline = deadline;
        self.release_all();
    }

    /// Whether a kubelet that sees the exits sees none of the placeholders that stood before containers that run. It lists
    /// all containers and then asks for those of each pod that has changed: what it saw only then, and never in a list,
    /// it would not miss when it has gone (`Relist`, `pkg/kubelet/pleg/generic.go`).
    fn is_unshielded(&self) -> bool {
        let mut progress = self.progress.iter();
        let gone = progress.all(|it| it.placeholders.is_empty() && it.coming == 0);
        gone || (self.replay.released && self.unshields_from().is_none())
    }

    /// When an exit may be seen at the earliest.
    pub(super) fn seen_from(&self) -> Option<Instant> {
        let from = self.replay.seen_from;
        from.filter(|_| self.phase == Phase::Replay)
    }

    /// An exit that is to be hidden has an attempt that the kubelet has listed by then.
    pub(super) fn let_nothing_be_seen_before(&mut self, time: Instant) {
        if !self.replay.released {
            // No hold lasts for longer.
            let time = self.held_until().map_or(time, |until| time.min(until));
            self.replay.seen_from = self.replay.seen_from.max(Some(time));
        }
    }

    /// Whether the exits can be released before their time is up, because what shields them stands.
    fn may_be_seen(&self) -> bool {
        let stands = self.progress.iter().all(|it| it.lacks_shields() == 0);
        let ends = self.replay.time == Time::BeyondHold && !self.replay.released;
        let waits = |it: &Progress| !it.is(ContainerKind::Regular) && !self.has_begun(it);
        let in_order = self.progress.iter().any(waits);
        ends && stands && self.replay.seen_from.is_none() && !in_order
    }

    fn may_go_on(&self) -> bool {
        // A completed init container must not be seen waiting: the kubelet would drop the pod's status, shields and all
        // (`checkContainerStateTransition`). Where there are none, that harms nobody.
        let init_waits = self.inits().any(|it| self.is_in_flight(it));
        let harms = init_waits && !self.plan.is_by_policy();
        let any = self.progress.iter().any(|it| self.is_in_flight(it));
        any && !harms && self.replay.time != Time::BeyondHold
    }

    fn prolong(&mut self, now: Instant) {
        let (time, limit) = match self.replay.time {
            Time::Planned => (Time::WholeHold, REST_OF_HOLD),
            Time::WholeHold | Time::BeyondHold => (Time::BeyondHold, IN_FLIGHT_LIMIT),
        };
        self.replay.time = time;
        self.deadline = now + limit + FALLBACK_TIME;
        // A placeholder that is newer than an attempt hides it when it runs, but only until it is removed, which wakes the
        // kubelet.
        self.shield(|it, of| {
            let beyond = it.replay.time == Time::BeyondHold;
            // The guard's take their time on a busy node; the others' attempts are made before that, if anything is.
            let early = it.plan.way == Way::Shielded && it.is_guard(of);
            if beyond && early {
                // If it cannot be started, the attempt has to go (see `leave_rest`).
                of.lacks_placeholders()
            } else if beyond || early {
                of.lacks_shields()
            } else {
                0
            }
        });
    }

    /// Whether the exits are seen soon and containers that are not started yet must be shielded.
    pub(super) fn shields_unstarted(&self) -> bool {
        self.replay.time != Time::Planned || self.replay.released
    }

    /// Whether another process has released exits, behind attempts that it had made.
    fn is_seen(&self) -> bool {
        let ran = || self.progress.iter().filter(|it| it.member.was_running());
        let runs = |it: &Progress| matches!(it.old, OldState::Running | OldState::Held);
        let any = ran().any(|it| it.old == OldState::Exited);
        any && !ran().any(runs) && self.plan.way == Way::Shielded
    }

    /// What is seen cannot be taken back: what shields it stays, and the kubelet starts what does not run.
    pub(super) fn give_up(&mut self, why: String, now: Instant) {
        if self.replay.time == Time::BeyondHold && self.plan.way == Way::Shielded {
            self.plan.starter = Starter::Kubelet(why);
            self.leave_rest(now);
        } else {
            self.fall_back(why);
        }
    }

    /// Whether an attempt was asked for that has not started yet.
    fn is_in_flight(&self, it: &Progress) -> bool {
        !it.is_new() && self.replay.asked.contains(&it.member.name)
    }

    pub(super) fn inits(&self) -> impl DoubleEndedIterator<Item = &Progress> {
        let progress = self.progress.iter();
        progress.filter(|it| it.is(ContainerKind::Init))
    }

    /// Whether it is to have placeholders, and has none.
    fn guard_wants_shield(&self) -> bool {
        let guard = self.guard();
        guard.is_some_and(|it| it.lacks_placeholders() > 0 && it.coming == 0)
            && !self.guard_has_placeholder()
    }

    pub(super) fn guard_has_placeholder(&self) -> bool {
        let guard = self.guard();
        guard.is_some_and(|guard| !guard.placeholders.is_empty())
    }

    /// Whether a new attempt of the last init container runs, which the kubelet takes for the pod's state, or has run while
    /// the guard was being shielded.
    fn waits_for_init(&self) -> bool {
        let mut inits = self.replayed().filter(|it| it.is(ContainerKind::Init));
        let last = inits.next_back();
        last.is_some_and(|it| match it.new {
            NewState::Running(_) => true,
            NewState::Ended(..) => {
                self.replay.time != Time::Planned && self.guard_has_placeholder()
            }
            NewState::None => false,
        })
    }

    /// The new attempts of init containers that others wait for.
    pub(crate) fn running_inits(&self) -> Vec<ContainerId> {
        self.inits()
            .filter_map(Progress::running)
            .cloned()
            .collect()
    }

    /// The new attempts of init containers, whose exits are held while it goes on.
    pub(super) fn replayed_inits(&self) -> impl Iterator<Item = &ContainerId> {
        let inits = self.inits().filter(|_| self.replays());
        inits.filter_map(|it| it.new.id())
    }

    fn is_late_for_replay(&self, now: Instant) -> bool {
        self.replay_until().is_some_and(|until| now >= until)
    }

    /// What runs by now is ended again: whatever the kubelet sees must be something that it can go on from.
    fn fall_back(&mut self, why: String) {
        self.begin_anew(false, why);
    }
}
