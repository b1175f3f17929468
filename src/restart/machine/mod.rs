//! The restart of one pod as a pure state machine: events and the time go in, effects come out.
//!
//! ```text
//!  Down: the pod's turn comes, its containers are killed
//!        │ all old containers down
//!        ├─ by replay ──▶ Replay ── all started: release ────────────▶ over
//!        │     └─ not possible, or failed: Down once more, for the kubelet
//!        │  all shields up
//!        ├─────────── Kept: trim, release the rest ──▶ Clear ──▶ Up
//!        ├─────────── Shielded: release ─────────────────────────▶ Up ──▶ over
//!        └─ Cleared: release ──▶ Shielded ── guard refused ──▶ Clear ──▶ Up
//! ```
//!
//! A back-off is waited for in `Up`, or in `Shielded` where that comes first: everything is down then, and the gate
//! is shut. A replay goes on from `Up` when it is over.

mod facts;
mod notes;
mod progress;
mod queue;
mod replay;
mod terms;
mod undo;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::plan::{Old, Plan, Starter, Way};
use super::times::{
    AGAIN_LIMIT, CLEAR_LIMIT, DOWN_LIMIT, KEPT_TIME, LAST_MOMENT, RECORD_LIMIT, RELIST_INTERVAL,
    STOP_LIMIT, UP_LIMIT, time_of_relist,
};
use crate::ids::{ContainerId, ContainerName};
use crate::kube::ContainerKind;
use crate::node::Maker;
use crate::policy::Action;
use progress::{NewState, OldState, Progress};
use queue::Queue;
use replay::Replay;
pub use terms::*;
use undo::Undo;

/// One restart of one pod.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct Machine {
    plan: Plan,
    phase: Phase,
    /// Parallel to `plan.members`.
    progress: Vec<Progress>,
    queue: Queue,
    deadline: Instant,
    /// Before that, the kubelet may not have seen any of the containers run.
    unseen_until: Option<Instant>,
    /// How long it may yet wait for the guard's shields, and for nothing else.
    last_moment: Option<Duration>,
    /// The guard's creation was refused after the release: the kubelet has recorded the shields.
    recorded: bool,
    /// The kubelet has begun with the init containers while no plugin was there.
    begun: bool,
    told: Told,
    /// The running containers have been told to stop.
    killed: bool,
    replay: Replay,
    undo: Undo,
    /// When containers may start, until then.
    start_at: Option<Instant>,
    waker: Option<ContainerId>,
    /// The kubelet goes on by itself (see `leave_rest`).
    left: bool,
    /// What keeps the pod from being taken for failed did not stand in time, and nothing of it may start (see `fail`).
    failing: bool,
    /// Until then something may end, or start, that is of account.
    ends_by: Option<Instant>,
    /// What runs in a pod that is to fail, until it has ended (see `is_halved`).
    ending: BTreeSet<ContainerId>,
    /// `Clear` removes containers first, then the placeholders that keep the kubelet waiting.
    placeholders_going: bool,
}

/// What whoever watches the pod knows.
#[derive(Debug, Default)]
struct Told {
    /// That it restarts, or there was no time for it.
    announced: bool,
    /// What was said last.
    restarting: bool,
}

impl Machine {
    /// Begins the restart. `held`: exits that are held already, and since when; `before`: a restart that this one replaces,
    /// or a generation of this one, whose placeholders may still stand; `ran`: for how long the oldest of the containers has
    /// run.
    #[must_use]
    pub fn begin(
        plan: Plan,
        held: &BTreeMap<ContainerId, Instant>,
        before: Option<&Self>,
        ran: Duration,
        now: Instant,
    ) -> (Self, Vec<Effect>) {
        let progress = plan
            .members
            .iter()
            .map(|member| Progress {
                old: member.old.as_ref().map(|old| {
                    if held.contains_key(&old.id) {
                        OldState::Held
                    } else if old.exit.is_some() {
                        OldState::Exited
                    } else {
                        OldState::Running
                    }
                }),
                old_exit: member.old.as_ref().and_then(Old::code),
                older: member.older.iter().cloned().collect(),
                held_since: {
                    // Those of a replay that has not ended are held as well. What is held no longer is no reason for haste.
                    let old = member.old.iter().map(|old| &old.id);
                    let since = old.chain(&member.older).filter_map(|id| held.get(id));
                    let since = since.copied();
                    since.filter(|it| Self::is_held_still(*it, now)).min()
                },
                shown: false,
                coming: 0,
                placeholders: BTreeMap::new(),
                made: None,
                new: NewState::None,
                missed_until: None,
                admitted: None,
                started: None,
            })
            .collect();
        let start_at = now + plan.back_off();
        let mut machine = Self::new(plan, Phase::Down, progress, now + DOWN_LIMIT);
        if before.is_none() {
            machine.queue = machine.queue_from(now);
        }
        machine.start_at = (now < start_at).then_some(start_at);
        if machine.plan.way == Way::Cleared {
            machine.unseen_until = Some(now + RELIST_INTERVAL.saturating_sub(ran));
        }
        let mut effects = vec![Effect::Save];
        for (name, id) in before.map(Self::leftovers).unwrap_or_default() {
            // One that is older than the attempt that runs shields nothing.
            let old = machine
                .index_of(&name)
                .and_then(|index| machine.old_id(index));
            let made_for_it = before.is_some_and(|it| old.is_some_and(|old| it.replaces(&old)));
            if made_for_it || machine.is_exited(&name) {
                let until = before.and_then(|it| it.untrusted_until(&id));
                machine.add_placeholder(&name, id, until);
            } else {
                effects.push(Effect::Remove(id));
            }
        }
        effects.extend(machine.enter_queue(now));
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
        let members = plan.members.iter();
        let progress = members
            .map(|member| Progress::from_found(member, found))
            .collect();
        let start_at = now + plan.back_off().saturating_sub(elapsed);
        let deadline = match phase {
            // What is held, its hook tells with how long that was.
            Phase::Down => now + DOWN_LIMIT,
            Phase::Replay => now + DOWN_LIMIT.saturating_sub(elapsed),
            Phase::Shielded => start_at + RECORD_LIMIT,
            Phase::Clear => now + CLEAR_LIMIT,
            Phase::Up | Phase::Over => start_at + UP_LIMIT,
        };
        let mut machine = Self::new(plan, phase, progress, deadline);
        machine.start_at = (now < start_at).then_some(start_at);
        machine.begun = machine.kubelet_has_begun(found);
        let waker = found
            .iter()
            .find(|it| it.maker == Maker::Placeholder && it.name == WAKER.into());
        machine.waker = waker.map(|found| found.id.clone());
        let mut effects = machine.announce_again();
        // What it was to be replayed from was not written down. It is still there in a back-off.
        let why = "the plugin was restarted";
        let waits = machine.phase != Phase::Replay && machine.start_at.is_some();
        if machine.replays() && waits {
            effects.extend((machine.phase != Phase::Down).then_some(Effect::Recover));
        } else if machine.replays() {
            machine.plan.starter = Starter::Kubelet(why.into());
        }
        if machine.phase == Phase::Replay {
            let members = machine.plan.members.iter();
            machine.replay.asked = members.map(|it| it.name.clone()).collect();
            effects.extend(if elapsed < AGAIN_LIMIT && !machine.is_seen() {
                machine.fall_back(why.into())
            } else {
                machine.leave_rest(now)
            });
            return (machine, effects);
        }
        if machine.intruded() {
            effects.extend(machine.again(elapsed < AGAIN_LIMIT, now));
            return (machine, effects);
        }
        match machine.phase {
            Phase::Down => {
                machine.queue = machine.queue_from(now);
                effects.extend(machine.enter_queue(now));
            }
            Phase::Clear => effects.extend(machine.removals()),
            Phase::Shielded => {
                effects.extend(machine.begin_undo());
                effects.extend(machine.removals_of_shielded());
            }
            Phase::Up => {
                // A success that was learnt late may still be there.
                if machine.plan.way == Way::Kept {
                    effects.extend(machine.removals());
                }
                effects.extend(machine.removals_of_replaced());
            }
            Phase::Replay | Phase::Over => {}
        }
        if machine.phase != Phase::Down {
            effects.extend(machine.waker_wanted());
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
            queue: Queue::Passed,
            deadline,
            unseen_until: None,
            last_moment: Some(LAST_MOMENT),
            recorded: false,
            begun: false,
            told: Told::default(),
            killed: false,
            replay: Replay::default(),
            undo: Undo::default(),
            start_at: None,
            waker: None,
            left: false,
            failing: false,
            ends_by: None,
            ending: BTreeSet::new(),
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
        let next = self.start_at.into_iter().chain(self.unseen_until);
        let next = next.chain(self.replay_until()).chain(self.seen_from());
        let next = next.chain(self.undo_until()).chain(self.trusted_from());
        let next = next.chain(self.ends_by).chain(self.unshields_from());
        (self.phase != Phase::Over).then(|| next.fold(self.deadline, Instant::min))
    }

    /// Whether exits of what it replaces are held. A replay may have let them go, and wait for a slow init container.
    #[must_use]
    pub fn is_holding(&self) -> bool {
        let queued = self.is_queued() && self.held_until().is_none();
        self.phase.is_holding(self.plan.way) && !self.replay.released && !queued
    }

    /// Whether the exit of this container belongs to the restart and must stay unseen for now.
    #[must_use]
    pub fn holds(&self, id: &ContainerId) -> bool {
        let released = |index| {
            let first = self.phase == Phase::Clear && self.goes_first(index);
            self.is_released(index) || self.progress[index].shown || first
        };
        let index = self.index_of_old(id);
        let waits = index.is_some_and(|index| !released(index));
        self.phase.is_holding(self.plan.way) && !self.replay.released && waits
    }

    /// Whether placeholders that stand before it, or are about to, are still wanted.
    #[must_use]
    pub fn is_to_be_shielded(&self, id: &ContainerId) -> bool {
        let shown = |index: usize| {
            self.progress[index].shown && self.is_shielding(&self.plan.members[index].name)
        };
        self.holds(id) || self.index_of_old(id).is_some_and(shown)
    }

    /// Whether the exit of a new attempt of that container must stay unseen for now: under Never the kubelet would see a
    /// pod that has been initialised and whose containers have all exited.
    #[must_use]
    pub fn holds_replayed(&self, name: &ContainerName) -> bool {
        let member = self.plan.member(name);
        let init = member.is_some_and(|member| member.kind == ContainerKind::Init);
        init && self.phase == Phase::Replay
    }

    /// Whether this is an attempt that the restart replaces: its exit is part of the restart.
    #[must_use]
    pub fn replaces(&self, id: &ContainerId) -> bool {
        self.index_of_old(id).is_some()
    }

    /// Whether it stops this container.
    #[must_use]
    pub fn ends(&self, id: &ContainerId) -> bool {
        self.phase != Phase::Over && (self.replaces(id) || self.ending.contains(id))
    }

    /// Whether what runs is being killed, or is to be as soon as it is shielded.
    #[must_use]
    pub fn kills_at_once(&self) -> bool {
        self.plan.grace_ms == 0 && (self.killed || self.plan.shields_come_first())
    }

    /// Whether an exit was seen that should have been shielded.
    #[cfg(test)]
    pub(in crate::restart) fn is_failing(&self) -> bool {
        self.failing
    }

    /// Placeholders that still stand.
    #[must_use]
    pub fn leftovers(&self) -> Vec<(ContainerName, ContainerId)> {
        let waker = self.waker.iter().map(|id| (WAKER.into(), id.clone()));
        self.members()
            .flat_map(|(member, progress)| {
                let name = &member.name;
                let placeholders = progress.placeholders.keys();
                placeholders.map(move |id| (name.clone(), id.clone()))
            })
            .chain(waker)
            .collect()
    }

    /// Containers that are neither running again nor completed, for a log line.
    #[must_use]
    pub fn waiting_for(&self) -> Vec<&ContainerName> {
        (0..self.progress.len())
            .filter(|&index| !self.settled(index) || self.is_left(index))
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
            Event::Announced => self.told.announced = true,
            Event::Recovered(result) => effects.extend(self.recovered(result)),
            Event::NotReplayed(name, why) => {
                let failure = &mut self.replay.failure;
                failure.get_or_insert_with(|| format!("{name}: {why}"));
            }
            Event::Made(name, id, took) => {
                let relisted = now + time_of_relist(took);
                effects.extend(self.made(&name, id, relisted));
            }
            Event::Called => self.is_called(),
            Event::Queued => effects.extend(self.is_to_wait()),
            Event::Held(id, since) => {
                self.set_held(&id, since);
                effects.extend(self.queue_shields());
            }
            Event::Exited(id) => {
                self.stopped(&id);
                self.set_old(&id, OldState::Exited);
                effects.extend(self.queue_shields());
            }
            Event::Ended(name, id, code) => effects.extend(self.ended(&name, id, code, now)),
            Event::PlaceholderMade(name, id, _)
                if name == WAKER.into() && self.start_at.is_some() =>
            {
                self.waker = Some(id);
            }
            Event::Gone(id) => effects.extend(self.gone(&id, now)),
            Event::PlaceholderMade(name, id, took) => {
                self.comes_no_more(&name);
                self.add_placeholder(&name, id.clone(), Some(now + time_of_relist(took)));
                if !self.is_shielding(&name) {
                    // Too late to shield anything.
                    effects.push(Effect::Remove(id));
                }
            }
            Event::NotMade(name) => self.comes_no_more(&name),
            Event::Started(name, id) => {
                effects.extend(self.started(&name, id, now));
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

    /// Takes note of what is in the runtime, some of which may have come while nobody was there to tell.
    pub fn relisted(&mut self, found: &[Found]) {
        self.begun |= self.kubelet_has_begun(found);
    }

    /// Whether the kubelet may create a container of that name now.
    pub fn admit_create(&mut self, now: Instant, name: &ContainerName) -> (Verdict, Vec<Effect>) {
        let Some(index) = self.index_of(name) else {
            // Not part of the restart: an ephemeral container, or action Restart of another one.
            return (Verdict::Admit, Vec::new());
        };
        match self.phase {
            Phase::Down | Phase::Replay | Phase::Clear => (Verdict::NotYet, Vec::new()),
            Phase::Shielded => {
                self.recorded |= self.proves_recording(index) && self.is_undo_seen(now);
                let effects = self.advance(now);
                let verdict = if self.start_at.is_some() {
                    Verdict::BackOff
                } else {
                    Verdict::NotYet
                };
                (verdict, effects)
            }
            Phase::Up if self.failing && self.progress[index].old != Some(OldState::Gone) => {
                (Verdict::NotYet, Vec::new())
            }
            Phase::Up if self.start_at.is_some_and(|at| now < at) => (Verdict::BackOff, Vec::new()),
            Phase::Up if self.is_turn_of(index) && !self.is_hasty(index, now) => {
                self.progress[index].admitted = Some(now);
                (Verdict::Admit, Vec::new())
            }
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
            Phase::Shielded if (self.recorded || self.begun) && self.start_at.is_none() => {
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
                self.replay_after_back_off(now, effects);
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

    /// KEP-5532 has one condition a kind of restart; a container that restarts alone has none (KEP-5307).
    fn announce(&mut self, restarting: bool) -> Option<Effect> {
        if !self.plan.is_whole_pod() {
            self.told.announced = true;
            return None;
        }
        (std::mem::replace(&mut self.told.restarting, restarting) != restarting)
            .then_some(Effect::Announce(restarting))
    }

    /// The condition of KEP-5532 ends with the old containers, that of its earlier draft with the start of the new.
    fn announce_down(&mut self) -> Option<Effect> {
        let ends = self.plan.action == Action::RestartAllContainers;
        if ends { self.announce(false) } else { None }
    }

    /// A predecessor may have died before or after it said so. Nothing waits for it this time.
    fn announce_again(&mut self) -> Vec<Effect> {
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

    fn enter(&mut self, phase: Phase, now: Instant, effects: &mut Vec<Effect>) {
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

    /// Nothing that is started in a pod that the kubelet takes for failed would last. It may have seen the others wait, and
    /// starts what is gone: the pod is made to fail then (see `is_halved`).
    fn fail(&mut self, now: Instant, effects: &mut Vec<Effect>) {
        self.failing = true;
        self.left = true;
        self.plan.starter = Starter::Kubelet("nothing shielded it in time".into());
        self.plan.way = Way::Shielded;
        let mut progress = self.progress.iter();
        let gone = progress.any(|it| it.new != NewState::None || it.old == Some(OldState::Gone));
        let whole = self.plan.is_whole_pod() && (gone || (self.killed && !self.all_down()));
        let ends = Duration::from_millis(self.plan.grace_ms) + STOP_LIMIT;
        self.ends_by = Some(now + if whole { ends } else { RELIST_INTERVAL });
        self.enter(Phase::Up, now, effects);
        effects.extend(self.announce(false));
        effects.push(Effect::Release(self.olds()));
        effects.extend(self.removals_of_placeholders());
        effects.extend(self.removals_of_unstarted());
    }

    fn finish(&mut self, outcome: Outcome) -> Vec<Effect> {
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

    /// Containers run that were not to start yet: the gate was not there. The kubelet will not run init
    /// containers while a regular one runs, so nothing but another generation leads to the start order.
    fn again(&mut self, recent: bool, now: Instant) -> Vec<Effect> {
        if recent && self.plan.again < MOST_AGAIN {
            self.phase = Phase::Over;
            return vec![Effect::Again];
        }
        self.leave_rest(now)
    }

    /// The kubelet goes on by itself; what is left is to take away what shields a container until it has started.
    fn leave_rest(&mut self, now: Instant) -> Vec<Effect> {
        let mut effects = Vec::new();
        for index in 0..self.progress.len() {
            let progress = &mut self.progress[index];
            if progress.placeholders.is_empty() {
                let made = progress.made.take().map(|id| (id, None));
                progress.placeholders.extend(made);
            } else if let Some(made) = progress.made.take() {
                // The kubelet counts from the placeholder, and would take the number that the attempt has.
                effects.push(Effect::Remove(made));
                effects.extend(self.shields_of(index));
            }
        }
        let grace = Duration::from_millis(self.plan.grace_ms);
        self.left = true;
        self.ends_by = Some(now + grace + STOP_LIMIT);
        self.plan.way = Way::Shielded;
        self.enter(Phase::Up, now, &mut effects);
        effects.extend(self.announce_down());
        effects.push(Effect::Release(self.olds()));
        effects.extend(self.removals_of_replaced());
        effects.extend(self.advance(now));
        effects
    }
}

/// What was being made when the pod was deleted must not stay.
fn after_the_end(event: Event) -> Vec<Effect> {
    match event {
        Event::PlaceholderMade(_, id, _) | Event::Made(_, id, _) => vec![Effect::Remove(id)],
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod replay_tests;
#[cfg(test)]
mod tests;
