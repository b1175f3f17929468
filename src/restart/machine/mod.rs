//! The restart of one pod as a pure state machine: events and the time go in, effects come out.
//!
//! ```text
//!  Down: the pod's turn comes and its containers are killed, or they stop
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

mod begin;
mod facts;
mod leave;
mod notes;
mod progress;
mod replay;
mod steps;
mod terms;
mod undo;
mod wait;
mod waker;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::ids::{ContainerId, ContainerName};
use crate::kube::ContainerKind;
use crate::node::{Instance, Instances};
use crate::plan::Plan;
use crate::restart::Refused;
use crate::times::{STARTS_LIMIT, time_of_recording};
use progress::{OldState, Progress};
use replay::Replay;
pub use terms::*;
use undo::Undo;
use wait::Wait;
use waker::Waker;

/// One restart of one pod.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub(crate) struct Machine {
    plan: Plan,
    phase: Phase,
    /// In start order.
    progress: Vec<Progress>,
    /// What is wanted by now.
    effects: Vec<Effect>,
    /// `None`: what was to be waited for has come, or nothing was.
    wait: Option<Wait>,
    deadline: Instant,
    /// Before that, the kubelet may not have seen any of the containers run.
    unseen_until: Option<Instant>,
    /// Before that, a relist may be under way that was told of an exit before it was removed, and is not told of what shields
    /// it if that is removed too.
    exits_told_until: Option<Instant>,
    /// How long a relist may take, by what making placeholders has taken so far.
    relist: Duration,
    /// It waits for the guard's shields, and for nothing else.
    last_moment: bool,
    /// The guard's creation was refused after the release: the kubelet has recorded the shields.
    shields_recorded: bool,
    /// The kubelet has begun with the init containers while no plugin was there.
    begun: bool,
    /// Whoever watches the pod was told that it restarts, or there was no time for it.
    announced: bool,
    /// What was said last.
    said_restarting: bool,
    /// The running containers have been told to stop.
    killed: bool,
    replay: Replay,
    undo: Undo,
    /// When containers may start, until then.
    start_at: Option<Instant>,
    waker: Waker,
    /// When the kubelet showed last that it is at work on the pod.
    heard: Option<Instant>,
    /// Whether anybody hears of whatever the kubelet starts.
    gate_is_there: bool,
    /// Until then what the kubelet was let create while nobody heard of it may start.
    starts_by: Option<Instant>,
    /// The kubelet goes on by itself (see `leave_rest`).
    left: bool,
    /// What has started to the kubelet, its startup probe if it has one, as it was told last; `None`: nobody tells.
    probed: Option<BTreeSet<ContainerId>>,
    /// What keeps the pod from being taken for failed did not stand in time, and nothing of it may start (see `fail`).
    failing: bool,
    /// Until then something may end, or start, that is of account.
    ends_by: Option<Instant>,
    /// Another process has begun it: until then hooks may come that it told to wait.
    hooks_by: Option<Instant>,
    /// Exits that a restart before this one holds, behind attempts that run again, and when they may be seen: when the kubelet
    /// has listed those.
    owed: BTreeSet<ContainerId>,
    owed_from: Option<Instant>,
    /// What runs beside a newer attempt, or in a pod that is to fail (see `is_halved`), until it has ended.
    ending: BTreeSet<ContainerId>,
    /// `Clear` removes containers first, then the placeholders that keep the kubelet waiting.
    placeholders_going: bool,
}

impl Machine {
    /// What this restart is to do.
    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What must outlive this process.
    pub(crate) fn record(&self) -> Record {
        Record {
            phase: self.phase,
            plan: self.plan.clone(),
        }
    }

    /// How far it is.
    pub(crate) fn phase(&self) -> Phase {
        self.phase
    }

    /// When to send [`Event::Tick`] at the latest; `None` once it is over.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let next = self.start_at.into_iter().chain(self.unseen_until);
        let next = next.chain(self.replay_until()).chain(self.seen_from());
        let next = next.chain(self.undo_until()).chain(self.trusted_from());
        let next = next.chain(self.ends_by).chain(self.unshields_from());
        let next = next.chain(self.exits_forgotten_from());
        let next = next.chain(self.told_by()).chain(self.wakes_from());
        let next = next.chain(self.nudged_from()).chain(self.hooks_by);
        let next = next.chain(self.starts_by).chain(self.owed_from);
        (self.phase != Phase::Over).then(|| next.fold(self.deadline, Instant::min))
    }

    /// Whether nothing may start yet.
    pub(crate) fn backs_off(&self) -> bool {
        self.start_at.is_some() && self.phase != Phase::Over
    }

    /// Whether exits of what it replaces are held, or may be. A replay may have let them go, and wait for a slow init container.
    pub(crate) fn is_holding(&self) -> bool {
        let waits = self.waits() && self.held_until().is_none() && self.hooks_by.is_none();
        self.phase.is_holding(self.plan.way) && !self.replay.released && !waits
    }

    /// Whether the exit of this container belongs to the restart and must stay unseen for now.
    pub(crate) fn holds(&self, id: &ContainerId) -> bool {
        self.owes(id) || self.of_old(id).is_some_and(|it| self.hides(it))
    }

    /// Whether it belongs to a restart before this one.
    pub(crate) fn owes(&self, id: &ContainerId) -> bool {
        self.owed.contains(id)
    }

    fn hides(&self, it: &Progress) -> bool {
        let first = self.phase == Phase::Clear && it.goes_first();
        let holds = self.phase.is_holding(self.plan.way) && !self.replay.released;
        holds && !(self.is_released(it) || it.shown.is_some() || first)
    }

    /// Whether the exit of a new attempt of that container must stay unseen for now: under Never the kubelet would see a
    /// pod that has been initialised and whose containers have all exited.
    pub(crate) fn holds_replayed(&self, name: &ContainerName) -> bool {
        let init = self.get(name).is_some_and(|it| it.is(ContainerKind::Init));
        init && self.phase == Phase::Replay
    }

    /// Whether this is an attempt that the restart replaces: its exit is part of the restart.
    pub(crate) fn replaces(&self, id: &ContainerId) -> bool {
        self.of_old(id).is_some()
    }

    /// Whether it has ended any other container than that, and what is left of it waits for its start, or the whole pod has yet
    /// to be seen.
    pub(crate) fn has_ended_others(&self, name: &ContainerName) -> bool {
        let mut others = self.progress.iter().filter(|it| it.member.name != *name);
        let unseen = |it: &Progress| self.plan.is_whole_pod() && self.hides(it);
        let waits = |it: &Progress| it.old_has_ended() && (!it.is_new() || unseen(it));
        self.phase != Phase::Over && others.any(waits)
    }

    /// Whether that container runs again.
    pub(crate) fn runs_again(&self, name: &ContainerName) -> bool {
        self.get(name).is_some_and(|it| it.running().is_some())
    }

    /// Whether that container ran before, and has yet to start again.
    pub(crate) fn is_to_run_again(&self, name: &ContainerName) -> bool {
        let ran = self.plan.member(name).is_some_and(|it| it.is_to_run);
        ran && self.is_to_start_again(name)
    }

    /// Whether that container has yet to start again.
    pub(crate) fn is_to_start_again(&self, name: &ContainerName) -> bool {
        self.phase != Phase::Over && self.get(name).is_some_and(|it| !it.is_new())
    }

    /// Whether it stops this container.
    pub(crate) fn ends(&self, id: &ContainerId) -> bool {
        self.phase != Phase::Over && (self.replaces(id) || self.ending.contains(id))
    }

    /// Whether this container is being killed, or is to be as soon as it is shielded: all that run are, or it is, though others
    /// have time to stop.
    pub(crate) fn kills_at_once(&self, id: &ContainerId) -> bool {
        let all = self.plan.grace_ms == 0 && (self.killed || self.plan.shields_come_first());
        all || (self.waits() && self.of_old(id).is_some_and(|it| it.member.at_once))
    }

    /// Whether a container runs behind its shield.
    pub(crate) fn hides_what_runs(&self) -> bool {
        let hidden = |it: &Progress| it.old == OldState::Running && !it.placeholders.is_empty();
        self.phase == Phase::Down && self.progress.iter().any(hidden)
    }

    /// Whether an exit was seen that should have been shielded.
    #[cfg(test)]
    pub(crate) fn is_failing(&self) -> bool {
        self.failing
    }

    /// Placeholders that still stand.
    pub(crate) fn leftovers(&self) -> Vec<(ContainerName, ContainerId)> {
        let waker = self.waker.id().map(|id| (WAKER.into(), id.clone()));
        let progress = self.progress.iter();
        let placeholders = progress.flat_map(|it| {
            let ids = it.placeholders.keys();
            ids.map(move |id| (it.member.name.clone(), id.clone()))
        });
        placeholders.chain(waker).collect()
    }

    /// Whether that container, which a restart made and did not start, is one of this one's, or may be: such a one is being
    /// made.
    pub(crate) fn expects(&self, id: &ContainerId, it: &Instance) -> bool {
        let coming = match self.get(&it.name) {
            Some(of) if it.is_placeholder() => of.coming > 0,
            Some(_) => self.phase == Phase::Replay,
            None => self.waker.is_wanted(),
        };
        let mut progress = self.progress.iter();
        let known = |of: &Progress| of.unstarted().any(|known| known == id);
        coming || self.waker.id() == Some(id) || progress.any(known)
    }

    /// When containers have started again, as far as that was under our eyes.
    pub(crate) fn starts(&self) -> impl Iterator<Item = Instant> {
        self.progress.iter().filter_map(|it| it.started)
    }

    /// Containers that are neither running again nor completed, for a log line.
    pub(crate) fn waiting_for(&self) -> Vec<&ContainerName> {
        let progress = self.progress.iter();
        let waiting = progress.filter(|it| !self.settled(it) || self.is_left(it));
        waiting.map(|it| &it.member.name).collect()
    }

    /// `there`: whatever the kubelet starts is heard of, and may be refused.
    pub(crate) fn note_gate(&mut self, there: bool) {
        self.gate_is_there = there;
    }

    /// Takes note of what happened.
    pub(crate) fn handle(&mut self, now: Instant, event: Event) -> Vec<Effect> {
        if self.phase == Phase::Over {
            return after_the_end(event);
        }
        if matches!(event, Event::Started(..) | Event::Ended(..)) {
            self.heard = Some(now);
        }
        match event {
            // A generation before may have told its containers to stop. A request stands.
            Event::CalledOff
                if !self.killed && self.plan.again == 0 && self.plan.trigger.request.is_none() =>
            {
                self.finish(Outcome::CalledOff);
            }
            // Too late to call it off, it is an answer all the same.
            Event::Announced | Event::CalledOff => self.announced = true,
            Event::Recovered(result) => self.recovered(result),
            Event::NotReplayed(name, why) if self.phase == Phase::Replay => {
                self.replay.unanswered.remove(&name);
                self.give_up(format!("{name}: {why}"), now);
            }
            Event::Made(name, id, took) => self.made(&name, id, now + time_of_recording(took)),
            Event::Stray(name, id) => self.strayed(&name, id),
            Event::Recorded { seen, started } => {
                self.probed = Some(started);
                self.recorded(&seen, now);
            }
            Event::Asked(request, waited) => self.join(request, waited, now),
            Event::Called => self.is_called(),
            Event::Queued => self.is_to_wait(),
            Event::Held(id, since) => {
                self.set_held(&id, since);
                self.shield_in_queue();
            }
            Event::Exited(id) => {
                self.stopped(&id);
                self.set_old(&id, OldState::Exited);
                self.note_shown(&id, now);
                self.shield_in_queue();
            }
            Event::Ended(name, id, code) => {
                self.ended(&name, &id, code, now);
                self.look_for_intruders(now);
            }
            Event::Gone(id) => self.gone(&id, now),
            Event::PlaceholderMade(name, id, took) => self.placeholder_made(&name, id, took, now),
            Event::NotMade(name) => {
                self.comes_no_more(&name);
                if name == WAKER.into() && matches!(self.waker, Waker::Asked) {
                    self.waker = Waker::None;
                }
            }
            Event::Started(name, id) => {
                self.started(&name, id, now);
                self.look_for_intruders(now);
            }
            Event::Hooked(name) => drop(self.replay.hooked.insert(name)),
            Event::Deleted => {
                // A pod that could only fail has: that is the end that it came to.
                let failed = self.failing.then(|| self.outcome(false)).flatten();
                self.finish(failed.unwrap_or(Outcome::Deleted));
            }
            Event::NotReplayed(..) | Event::Tick => {}
        }
        self.advance(now);
        self.take_effects()
    }

    fn look_for_intruders(&mut self, now: Instant) {
        if self.intruded() {
            self.again(true, now);
        }
    }

    fn take_effects(&mut self) -> Vec<Effect> {
        self.note_removals();
        std::mem::take(&mut self.effects)
    }

    /// Takes note of what is in the runtime, some of which may have come while nobody was there to tell.
    pub(crate) fn relisted(&mut self, found: &Instances, now: Instant) {
        self.begun |= self.kubelet_has_begun(found);
        self.starts_by = Some(now + STARTS_LIMIT);
    }

    /// Whether the kubelet may create a container of that name now.
    pub(crate) fn admit_create(
        &mut self,
        now: Instant,
        name: &ContainerName,
    ) -> (Result<(), Refused>, Vec<Effect>) {
        let admitted = self.judge(now, name);
        // A kubelet that goes on asking for the wrong one has missed something.
        if !matches!(admitted, Err(Refused::OutOfOrder(..))) {
            self.heard = Some(now);
        }
        (admitted, self.take_effects())
    }

    fn judge(&mut self, now: Instant, name: &ContainerName) -> Result<(), Refused> {
        let Some(index) = self.progress.iter().position(|it| it.member.name == *name) else {
            // Not part of the restart: an ephemeral container, or action Restart of another one.
            return Ok(());
        };
        let it = &self.progress[index];
        let not_yet = Err(Refused::NotYet(self.plan.id.clone(), name.clone()));
        match self.phase {
            Phase::Down | Phase::Replay | Phase::Clear => {
                self.progress[index].wanted = it.shown.is_some();
                not_yet
            }
            Phase::Shielded => {
                self.shields_recorded |= self.proves_recording(it) && self.is_undo_seen(now);
                self.advance(now);
                let waits = self.start_at.is_some();
                if waits {
                    self.backed_off(name)
                } else {
                    not_yet
                }
            }
            Phase::Up if self.failing && !it.was_removed() => not_yet,
            Phase::Up if self.start_at.is_some_and(|at| now < at) => self.backed_off(name),
            Phase::Up if self.is_turn_of(it) && !self.is_hasty(it, now) => {
                self.progress[index].admitted = Some(now);
                Ok(())
            }
            Phase::Up => Err(Refused::OutOfOrder(self.plan.id.clone(), name.clone())),
            Phase::Over => Ok(()),
        }
    }

    fn backed_off(&self, name: &ContainerName) -> Result<(), Refused> {
        Err(Refused::BackOff {
            restart: self.plan.id.clone(),
            name: name.clone(),
            start_at: self.plan.start_at(),
        })
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
