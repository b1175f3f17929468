//! Start by replay: everything is started anew while the exits are held, and the kubelet sees all of it at once.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::Machine;
use super::progress::{NewState, OldState, Progress};
use super::terms::{Effect, Outcome, Phase};
use crate::ids::{ContainerId, ContainerName, ExitCode};
use crate::kube::{ContainerKind, RestartPolicy};
use crate::restart::plan::{Member, Starter, Way};
use crate::restart::times::{
    AGAIN_LIMIT, BURST_LIMIT, FALLBACK_TIME, HALVED_LIMIT, IN_FLIGHT_LIMIT, REST_OF_HOLD, UP_LIMIT,
    time_of_recording,
};

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
    /// The old containers may be seen to have exited: an init container takes its time.
    pub(super) released: bool,
    /// Whether it goes on when its time is up.
    time: Time,
    /// Until then a relist of the kubelet may be under way that has not listed all attempts.
    pub(super) seen_from: Option<Instant>,
    /// Why it has failed.
    pub(super) failure: Option<String>,
}

impl Machine {
    pub(super) fn replays(&self) -> bool {
        self.plan.starter == Starter::Plugin
    }

    /// Whether that is to be over before the exits are released. Behind shields a back-off can be waited for.
    pub(super) fn replays_at_once(&self) -> bool {
        self.replays() && self.plan.back_off_ms == 0
    }

    /// Whether it is replayed, or still can be.
    #[must_use]
    pub fn may_replay(&self) -> bool {
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
    pub(super) fn replay_after_back_off(&mut self, now: Instant, effects: &mut Vec<Effect>) {
        self.replay.released = true;
        self.replay.time = Time::BeyondHold;
        self.enter(Phase::Replay, now, effects);
        self.deadline = now + BURST_LIMIT;
    }

    /// Another process has begun it. What is yet to be made was to be made from what that process knew; what has been made is
    /// started.
    pub(super) fn resume_replay(
        &mut self,
        why: &str,
        elapsed: Duration,
        now: Instant,
    ) -> Vec<Effect> {
        let members = self.plan.members.iter();
        self.replay.asked = members.map(|it| it.name.clone()).collect();
        let all_there = self.replayed().all(|index| self.is_there(index));
        let halved = !all_there && self.running_regulars().next().is_some();
        let limit = if halved { HALVED_LIMIT } else { AGAIN_LIMIT };
        if elapsed >= limit || self.is_seen() {
            self.plan.starter = Starter::Kubelet(why.into());
            return self.leave_rest(now);
        } else if !all_there {
            self.plan.starter = Starter::Kubelet(why.into());
            return self.fall_back(why.into());
        }
        // When they were made, nobody knows.
        for index in 0..self.progress.len() {
            let listed = now + time_of_recording(elapsed);
            self.let_nothing_be_seen_before(listed, index);
        }
        let made = self.progress.iter().filter_map(|it| it.made.clone());
        let mut effects: Vec<Effect> = made.map(Effect::Start).collect();
        effects.extend(self.advance(now));
        effects
    }

    /// Whether it runs, is done, or only has to be started. One that has ended otherwise may be one whose start was cancelled
    /// with the process that asked for it.
    fn is_there(&self, index: usize) -> bool {
        let progress = &self.progress[index];
        let runs = matches!(progress.new, NewState::Running(_));
        let done = self.plan.members[index].kind == ContainerKind::Init && self.passed(index);
        progress.made.is_some() || runs || done
    }

    /// When the kubelet must be left to start what does not run by then.
    pub(super) fn replay_until(&self) -> Option<Instant> {
        let at = self.deadline.checked_sub(FALLBACK_TIME);
        at.filter(|_| {
            let down = self.phase == Phase::Down && !self.is_queued();
            self.phase == Phase::Replay || (down && self.replays_at_once())
        })
    }

    pub(super) fn recovered(&mut self, result: Result<(), String>) -> Vec<Effect> {
        match result {
            Ok(()) => self.replay.recovered = true,
            Err(why) if self.may_replay() && self.phase != Phase::Replay => {
                return self.leave_to_kubelet(why);
            }
            Err(_) => {}
        }
        Vec::new()
    }

    /// Nothing has been started yet.
    pub(super) fn leave_to_kubelet(&mut self, why: String) -> Vec<Effect> {
        let unshielded = self.replays_at_once();
        self.plan.starter = Starter::Kubelet(why);
        let mut effects = vec![Effect::Save];
        if unshielded {
            effects.extend(self.begin_shields());
        }
        effects.extend(self.waker_wanted());
        effects
    }

    pub(super) fn step_before_replay(&mut self, now: Instant, effects: &mut Vec<Effect>) -> bool {
        if self.is_late_for_replay(now) {
            effects.extend(self.leave_to_kubelet("it took too long".into()));
            return true;
        }
        // One that is gone leaves nothing to make another one from, one that was seen to exit is acted on.
        let seen = |old: Option<OldState>| matches!(old, Some(OldState::Exited | OldState::Gone));
        let escaped = self
            .members()
            .find(|(member, it)| member.was_running() && seen(it.old) && !it.shown)
            .map(|(member, _)| format!("the exit of {} was not held", member.name));
        if let Some(why) = escaped {
            effects.extend(self.leave_to_kubelet(why));
            return true;
        }
        let ready = self.replay.recovered && self.killed && self.all_down();
        if ready {
            effects.extend(self.announce_down());
            self.enter(Phase::Replay, now, effects);
        }
        ready
    }

    pub(super) fn step_replay(&mut self, now: Instant, effects: &mut Vec<Effect>) -> bool {
        let late = self.is_late_for_replay(now);
        self.replay.seen_from.take_if(|from| now >= *from);
        let failed = (0..self.progress.len()).find(|&index| self.init_has_failed(index));
        if self.outcome(false) == Some(Outcome::InitFailed) {
            effects.extend(self.finish(Outcome::InitFailed));
        } else if let Some(index) = failed {
            // With its back-off, and in its own time.
            let why = format!("{} failed", self.plan.members[index].name);
            effects.extend(self.fall_back(why));
        } else if let Some(why) = self.replay.failure.take() {
            effects.extend(self.give_up(why, now));
        } else if self.has_all_begun() {
            if let Some(from) = self.replay.seen_from {
                self.deadline = self.deadline.max(from + FALLBACK_TIME);
            } else if late || self.is_unshielded() {
                return self.leave_replay(now, effects);
            }
        } else if late && self.waits_for_init() && !self.replay.released {
            // When the last init container has ended, the kubelet may relist before any of the others has started.
            let shield = self.shield_of_guard();
            if self.replay.time == Time::Planned && shield.is_some() {
                self.replay.time = Time::WholeHold;
                self.deadline += REST_OF_HOLD;
            } else {
                // Until then the kubelet sees it run and waits for it, under every policy.
                self.replay.released = true;
                self.deadline = now + UP_LIMIT;
                effects.push(Effect::Release(self.olds()));
            }
            effects.extend(shield);
        } else if late && self.may_go_on() {
            // On a busy node to begin anew would only take longer.
            effects.extend(self.prolong(now));
            return true;
        } else if late {
            effects.extend(self.give_up("it took too long".into(), now));
        } else {
            if self.may_be_seen() {
                self.replay.released = true;
                self.deadline = now + BURST_LIMIT;
                effects.push(Effect::Release(self.olds()));
            }
            let turns = self.replayed().filter(|&index| self.is_turn_of(index));
            let turns = turns.filter(|&index| self.progress[index].new == NewState::None);
            let names = turns.map(|index| self.plan.members[index].name.clone());
            let mut names: Vec<ContainerName> = names.collect();
            names.retain(|name| self.replay.asked.insert(name.clone()));
            if !names.is_empty() {
                effects.push(Effect::Replay(names));
            }
        }
        false
    }

    /// All that was there runs again. In a pod that was still initialising the kubelet goes on with the rest. Returns whether
    /// it does.
    fn leave_replay(&mut self, now: Instant, effects: &mut Vec<Effect>) -> bool {
        if self.replayed().count() == self.progress.len() {
            effects.extend(self.finish(Outcome::Completed));
            return false;
        }
        let mut seen = self.olds();
        seen.extend(self.replayed_inits());
        self.enter(Phase::Up, now, effects);
        effects.push(Effect::Release(seen));
        true
    }

    /// Those of which there was an attempt to make another one like.
    fn replayed(&self) -> impl Iterator<Item = usize> + '_ {
        let members = self.plan.members.iter().enumerate();
        members.filter_map(|(index, member)| member.old.is_some().then_some(index))
    }

    /// Whether a kubelet that sees the exits sees none of the placeholders that stood before containers that run. It lists
    /// all containers and then asks for those of each pod that has changed: what it saw only then, and never in a list,
    /// it would not miss when it has gone (`Relist`, `pkg/kubelet/pleg/generic.go`).
    fn is_unshielded(&self) -> bool {
        let gone = self.progress.iter().all(|it| it.placeholders.is_empty());
        let come = self.progress.iter().all(|it| it.coming == 0);
        let released = self.replay.released && self.unshields_from().is_none();
        released || (gone && come)
    }

    /// When an exit may be seen at the earliest.
    pub(super) fn seen_from(&self) -> Option<Instant> {
        let from = self.replay.seen_from;
        from.filter(|_| self.phase == Phase::Replay)
    }

    /// Under Always the kubelet does no more than try to start again what it sees exited.
    pub(super) fn let_nothing_be_seen_before(&mut self, time: Instant, index: usize) {
        let member = &self.plan.members[index];
        let unseen = member.kind == ContainerKind::Regular && !self.replay.released;
        if unseen && member.restart_policy != RestartPolicy::Always {
            // No hold lasts for longer.
            let time = self.held_until().map_or(time, |until| time.min(until));
            self.replay.seen_from = self.replay.seen_from.max(Some(time));
        }
    }

    /// Whether the exits can be released before their time is up, because what shields them stands.
    fn may_be_seen(&self) -> bool {
        let guard = self.guard();
        let stands = guard.is_none_or(|index| self.lacks_shields(index) == 0);
        let ends = self.replay.time == Time::BeyondHold && !self.replay.released;
        ends && stands && self.replay.seen_from.is_none() && self.plan.starts_at_once()
    }

    /// How many, if its exit is seen before its attempt has been started. One that was made is as good as one.
    fn lacks_shields(&self, index: usize) -> usize {
        let progress = &self.progress[index];
        let made = usize::from(progress.made.is_some());
        let lacks = if progress.old_is_gone() {
            // There is no exit to hide, but it must be seen to wait.
            usize::from(progress.new == NewState::None && progress.placeholders.is_empty())
        } else {
            self.lacks_placeholders(index)
        };
        lacks.saturating_sub(made)
    }

    fn may_go_on(&self) -> bool {
        let mut inits = self.inits();
        // A completed init container must not be seen waiting: the kubelet would drop the pod's status, shields and all
        // (`checkContainerStateTransition`). Where there are none, that harms nobody.
        let init_waits = inits.any(|(member, it)| {
            self.replay.asked.contains(&member.name) && it.new == NewState::None
        });
        let harms = init_waits && !self.plan.is_by_policy();
        self.is_in_flight() && !harms && self.replay.time != Time::BeyondHold
    }

    fn prolong(&mut self, now: Instant) -> Vec<Effect> {
        let (time, limit) = match self.replay.time {
            Time::Planned => (Time::WholeHold, REST_OF_HOLD),
            Time::WholeHold | Time::BeyondHold => (Time::BeyondHold, IN_FLIGHT_LIMIT),
        };
        self.replay.time = time;
        self.deadline = now + limit + FALLBACK_TIME;
        self.shields_of_unstarted()
    }

    /// A placeholder that is newer than an attempt hides it when it runs, but only until it is removed, which wakes the
    /// kubelet.
    fn shields_of_unstarted(&mut self) -> Vec<Effect> {
        let beyond = self.replay.time == Time::BeyondHold;
        let mut effects = Vec::new();
        let all: Vec<usize> = self.replayed().collect();
        for index in all {
            if self.progress[index].new != NewState::None {
                continue;
            }
            // The guard's take their time on a busy node; the others' attempts are made before that, if anything is.
            let early = self.plan.way == Way::Shielded && self.is_guard(index);
            let lacks = if beyond && early {
                // If it cannot be started, the attempt has to go (see `leave_rest`).
                self.lacks_placeholders(index)
            } else {
                self.lacks_shields(index)
            };
            if beyond || early {
                effects.extend(self.shields(index, lacks));
            }
        }
        effects
    }

    /// Whether the exits are seen soon and containers that are not started yet must be shielded.
    pub(super) fn shields_unstarted(&self) -> bool {
        self.replay.time != Time::Planned || self.replay.released
    }

    /// Whether another process has released exits, behind attempts that it had made.
    pub(super) fn is_seen(&self) -> bool {
        let olds = || {
            let ran = self.members().filter(|(it, _)| it.was_running());
            ran.map(|(_, progress)| progress.old)
        };
        let runs = |old| matches!(old, Some(OldState::Running | OldState::Held));
        let any = olds().any(|old| old == Some(OldState::Exited));
        any && !olds().any(runs) && self.plan.way == Way::Shielded
    }

    /// What is seen cannot be taken back: what shields it stays, and the kubelet starts what does not run.
    fn give_up(&mut self, why: String, now: Instant) -> Vec<Effect> {
        let seen = self.replay.time == Time::BeyondHold && self.plan.way == Way::Shielded;
        if !seen {
            return self.fall_back(why);
        }
        self.plan.starter = Starter::Kubelet(why);
        self.leave_rest(now)
    }

    /// Whether attempts were asked for that have not started yet.
    fn is_in_flight(&self) -> bool {
        let mut asked = self
            .members()
            .filter(|(member, _)| self.replay.asked.contains(&member.name));
        asked.any(|(_, it)| it.new == NewState::None)
    }

    pub(super) fn inits(&self) -> impl DoubleEndedIterator<Item = (&Member, &Progress)> {
        let members = self.members();
        members.filter(|(member, _)| member.kind == ContainerKind::Init)
    }

    /// A first placeholder, if it is to have any.
    fn shield_of_guard(&mut self) -> Option<Effect> {
        let guard = self.guard()?;
        let wanted = self.lacks_placeholders(guard) > 0 && !self.guard_has_placeholder();
        let shields = self.shields(guard, usize::from(wanted));
        shields.into_iter().next()
    }

    pub(super) fn guard_has_placeholder(&self) -> bool {
        let guard = self.guard();
        guard.is_some_and(|guard| !self.progress[guard].placeholders.is_empty())
    }

    /// Whether a new attempt of the last init container runs, which the kubelet takes for the pod's state, or has run while
    /// the guard was being shielded.
    fn waits_for_init(&self) -> bool {
        let last = self.inits().next_back();
        last.is_some_and(|(_, it)| match it.new {
            NewState::Running(_) => true,
            NewState::Ended(..) => {
                self.replay.time != Time::Planned && self.guard_has_placeholder()
            }
            NewState::None => false,
        })
    }

    /// The new attempts of init containers that others wait for.
    #[must_use]
    pub fn running_inits(&self) -> Vec<ContainerId> {
        let ids = self.inits().filter_map(|(_, it)| match &it.new {
            NewState::Running(id) => Some(id.clone()),
            NewState::None | NewState::Ended(_, _) => None,
        });
        ids.collect()
    }

    /// The new attempts of init containers, whose exits are held while it goes on.
    pub(super) fn replayed_inits(&self) -> Vec<ContainerId> {
        let ids = self.inits().filter_map(|(_, it)| match &it.new {
            NewState::None => None,
            NewState::Running(id) | NewState::Ended(id, _) => Some(id.clone()),
        });
        ids.filter(|_| self.replays()).collect()
    }

    fn is_late_for_replay(&self, now: Instant) -> bool {
        self.replay_until().is_some_and(|until| now >= until)
    }

    fn has_all_begun(&self) -> bool {
        self.replayed().all(|index| self.has_begun(index))
    }

    /// Whether nothing is left to do for a container.
    fn has_begun(&self, index: usize) -> bool {
        match self.plan.members[index].kind {
            ContainerKind::Init => self.passed(index),
            ContainerKind::Sidecar | ContainerKind::Regular => {
                self.progress[index].new != NewState::None
            }
        }
    }

    fn init_has_failed(&self, index: usize) -> bool {
        let ended = match self.progress[index].new {
            NewState::Ended(_, code) => code,
            NewState::None | NewState::Running(_) => None,
        };
        let init = self.plan.members[index].kind == ContainerKind::Init;
        init && ended.is_some_and(|code| code != ExitCode::SUCCESS)
    }

    /// What runs by now is ended again: whatever the kubelet sees must be something that it can go on from.
    pub(super) fn fall_back(&mut self, why: String) -> Vec<Effect> {
        self.phase = Phase::Over;
        vec![Effect::FallBack(why)]
    }
}
