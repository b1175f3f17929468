//! The restart of one pod as a pure state machine: events and the time go in, effects come out.
//!
//! ```text
//!           all old containers down, all shields up
//!  Down ─┬─────────── Kept: trim, release the rest ──▶ Clear ──▶ Up
//!        ├─────────── Shielded: release ─────────────────────────▶ Up ──▶ over
//!        └─ Cleared: release ──▶ Shielded ── guard refused ──▶ Clear ──▶ Up
//! ```

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::plan::{Plan, Way};
use crate::ids::{ContainerId, ContainerName, ExitCode};
use crate::kube::{ContainerKind, RestartPolicy};

/// From the first hold until everything is let go, whatever is missing. The hooks give up at 8 s; the rest is
/// for the release itself on a busy node.
pub const DOWN_LIMIT: Duration = Duration::from_millis(6500);
/// The kubelet retries a failed sync after 10-15 s, and may itself be away for a while.
pub const RECORD_LIMIT: Duration = Duration::from_secs(600);
/// Removing containers takes milliseconds; a runtime that is restarted takes seconds.
pub const CLEAR_LIMIT: Duration = Duration::from_secs(60);
/// Init containers may be slow. After this the gate no longer keeps any order.
pub const UP_LIMIT: Duration = Duration::from_secs(600);

/// After that long, what the kubelet started while no plugin was there stays: it may have run for hours.
pub const AGAIN_LIMIT: Duration = Duration::from_secs(10);
/// A restart that is disturbed more often than this is left to the kubelet.
const MOST_AGAIN: u8 = 3;

/// How far the restart is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Old containers are killed and their exits held, placeholders are made.
    Down,
    /// The exits are released behind the placeholders; the kubelet has yet to record what it sees.
    Shielded,
    /// Containers that must not be there when the kubelet looks again are removed.
    Clear,
    /// The kubelet starts the containers.
    Up,
    /// Nothing is left to do.
    Over,
}

impl Phase {
    /// Whether exits are held in this phase.
    #[must_use]
    pub fn is_holding(self, way: Way) -> bool {
        match self {
            Self::Down => true,
            Self::Clear => way == Way::Kept,
            Self::Shielded | Self::Up | Self::Over => false,
        }
    }
}

/// What the machine is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// This container's processes are gone and its exit is held.
    Held(ContainerId),
    /// Its exit can be seen by the kubelet, or nothing holds it.
    Exited(ContainerId),
    /// An attempt of that container ended with this code; the exit may be held or not. It may come before the
    /// news that it started.
    Ended(ContainerName, ContainerId, Option<ExitCode>),
    /// It is no longer in the runtime.
    Gone(ContainerId),
    /// A placeholder for that container stands.
    PlaceholderMade(ContainerName, ContainerId),
    /// A new attempt of that container runs.
    Started(ContainerName, ContainerId),
    /// The pod is being deleted.
    Deleted,
    /// Time has passed; see [`Machine::deadline`].
    Tick,
}

/// What the machine wants done, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Write the plan and the phase to disk before anything that follows.
    Save,
    /// Stop this container, within the plan's grace period.
    Kill(ContainerId),
    /// Make a placeholder for this container, like its old attempt.
    MakePlaceholder(ContainerName, ContainerId),
    /// Let these exits be seen.
    Release(Vec<ContainerId>),
    /// Remove this container as soon as its exit has been processed.
    Remove(ContainerId),
    /// Containers were started behind our back, out of order: plan the restart anew from what there is now.
    Again,
    /// The restart is over; forget it on disk.
    Finish(Outcome),
}

/// How a restart ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All containers have been started again.
    Completed,
    /// An init container failed under `restartPolicy: Never`: the pod fails (KEP-5532, "API").
    InitFailed,
    /// The pod was deleted meanwhile.
    Deleted,
    /// The kubelet did not start all containers in time; it may still do so.
    TimedOut,
}

/// What the gate says of a container that the kubelet wants to create.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It may be created.
    Admit,
    /// Not yet: the old containers are not out of the way.
    NotYet,
    /// Another container must have started, or completed, before.
    OutOfOrder,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OldState {
    Running,
    Held,
    Exited,
    Gone,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum NewState {
    None,
    Running(ContainerId),
    Ended(ContainerId, Option<ExitCode>),
}

#[derive(Debug)]
struct Progress {
    old: Option<OldState>,
    /// The old one's code where it was learnt only after the decision.
    old_exit: Option<ExitCode>,
    /// Attempts before the old one that are still there.
    older: BTreeSet<ContainerId>,
    placeholders: BTreeSet<ContainerId>,
    new: NewState,
}

/// A container that was found in the runtime when the plugin came back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Its id.
    pub id: ContainerId,
    /// Its container's name.
    pub name: ContainerName,
    /// Whether it is one of our placeholders.
    pub placeholder: bool,
    /// Whether it was created after the restart was decided.
    pub new: bool,
    /// What it is doing.
    pub state: FoundState,
}

/// What a found container is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FoundState {
    /// Created, never started.
    Created,
    /// Running, as far as the runtime shows.
    Running,
    /// Ended, visibly.
    Exited(Option<ExitCode>),
}

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
            .map(|member| progress_from(member, found))
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
            return self.after_the_end(event);
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
                    effects.extend(
                        self.leftovers()
                            .into_iter()
                            .map(|(_, id)| Effect::Remove(id)),
                    );
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
        effects.extend(
            self.leftovers()
                .into_iter()
                .map(|(_, id)| Effect::Remove(id)),
        );
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

    /// A placeholder that was under way when the pod was deleted must not stay.
    fn after_the_end(&mut self, event: Event) -> Vec<Effect> {
        match event {
            Event::PlaceholderMade(_, id) => vec![Effect::Remove(id)],
            _ => Vec::new(),
        }
    }

    // --- what is wanted -------------------------------------------------------------------------------------

    /// The guard's placeholders come first: they are what keeps a Never pod from being seen as stopped.
    fn shields_wanted(&self) -> Vec<Effect> {
        let mut order: Vec<usize> = (0..self.progress.len()).collect();
        order.sort_by_key(|&index| self.plan.members[index].name != self.plan.guard);
        let mut effects = Vec::new();
        for index in order {
            let member = &self.plan.members[index];
            let Some(old) = self.old_id(index) else {
                continue;
            };
            let standing = self.progress[index].placeholders.len();
            for _ in standing..usize::from(member.placeholders) {
                effects.push(Effect::MakePlaceholder(member.name.clone(), old.clone()));
            }
        }
        effects
    }

    fn kills(&mut self) -> Vec<Effect> {
        self.killed = true;
        (0..self.progress.len())
            .filter(|&index| self.progress[index].old == Some(OldState::Running))
            .filter(|&index| self.old_id(index).as_ref() != Some(&self.plan.trigger.container))
            .filter_map(|index| self.old_id(index).map(Effect::Kill))
            .collect()
    }

    fn removals(&self) -> Vec<Effect> {
        (0..self.progress.len())
            .filter(|&index| self.is_cleared_away(index))
            .flat_map(|index| self.removals_of(index))
            .collect()
    }

    fn removals_of(&self, index: usize) -> Vec<Effect> {
        let progress = &self.progress[index];
        let old = self
            .old_id(index)
            .filter(|_| progress.old != Some(OldState::Gone));
        let ids = progress.older.iter().cloned().chain(old);
        ids.map(Effect::Remove).collect()
    }

    fn removals_of_replaced(&self) -> Vec<Effect> {
        self.progress
            .iter()
            .filter(|progress| progress.new != NewState::None)
            .flat_map(|progress| progress.placeholders.iter().cloned().map(Effect::Remove))
            .collect()
    }

    // --- what is so -----------------------------------------------------------------------------------------

    fn all_down(&self) -> bool {
        self.progress
            .iter()
            .all(|progress| progress.old != Some(OldState::Running))
    }

    fn shields_stand(&self) -> bool {
        self.plan
            .members
            .iter()
            .zip(&self.progress)
            // What is gone cannot be copied, and shows nothing that a shield could hide.
            .filter(|(_, progress)| !matches!(progress.old, None | Some(OldState::Gone)))
            .all(|(member, progress)| {
                progress.placeholders.len() >= usize::from(member.placeholders)
            })
    }

    /// Under `Kept`: what the kubelet would not run again if it saw it exited, or not in order. Sidecars it
    /// would restart before the init containers; those that completed it would leave.
    fn goes_first(&self, index: usize) -> bool {
        match self.plan.members[index].kind {
            ContainerKind::Init | ContainerKind::Sidecar => true,
            ContainerKind::Regular => {
                self.plan.restart_policy == RestartPolicy::OnFailure
                    && self.progress[index].old_exit == Some(ExitCode::SUCCESS)
            }
        }
    }

    fn goes_first_by_id(&self, id: &ContainerId) -> bool {
        self.index_of_old(id)
            .is_some_and(|index| self.goes_first(index))
    }

    fn is_cleared_away(&self, index: usize) -> bool {
        match self.plan.way {
            Way::Kept => self.goes_first(index),
            Way::Shielded => false,
            Way::Cleared => true,
        }
    }

    fn cleared(&self) -> bool {
        let containers = (0..self.progress.len())
            .filter(|&index| self.is_cleared_away(index))
            .map(|index| &self.progress[index])
            .all(|it| it.older.is_empty() && matches!(it.old, None | Some(OldState::Gone)));
        let placeholders = !self.placeholders_going || self.leftovers().is_empty();
        containers && placeholders
    }

    /// Start order: each init container after those before it, regular ones after all (KEP-753).
    fn is_turn_of(&self, index: usize) -> bool {
        if self.plan.way == Way::Shielded || !self.plan.ordered {
            return true;
        }
        let member = &self.plan.members[index];
        self.plan
            .members
            .iter()
            .enumerate()
            .filter(|(_, other)| other.kind != ContainerKind::Regular)
            .filter(|(other, _)| member.kind == ContainerKind::Regular || *other < index)
            .all(|(other, _)| self.passed(other))
    }

    fn passed(&self, index: usize) -> bool {
        let kind = self.plan.members[index].kind;
        match &self.progress[index].new {
            NewState::None => false,
            NewState::Running(_) => kind == ContainerKind::Sidecar,
            // Without a code the kubelet is believed: it goes on only after a success.
            NewState::Ended(_, code) => {
                kind == ContainerKind::Sidecar || code.is_none_or(|code| code == ExitCode::SUCCESS)
            }
        }
    }

    fn settled(&self, index: usize) -> bool {
        let member = &self.plan.members[index];
        let new = &self.progress[index].new;
        match member.kind {
            // What stands unshielded goes on as it is.
            _ if self.plan.way == Way::Shielded => {
                member.placeholders == 0 || *new != NewState::None
            }
            ContainerKind::Init if self.plan.ordered => self.passed(index),
            ContainerKind::Init | ContainerKind::Sidecar | ContainerKind::Regular => {
                *new != NewState::None
            }
        }
    }

    fn outcome(&self, late: bool) -> Option<Outcome> {
        let init_failed = self.plan.restart_policy == RestartPolicy::Never
            && self
                .plan
                .members
                .iter()
                .zip(&self.progress)
                .any(|(member, progress)| {
                    let failed = matches!(progress.new, NewState::Ended(_, Some(code)) if code != ExitCode::SUCCESS);
                    member.kind == ContainerKind::Init && failed
                });
        if init_failed {
            Some(Outcome::InitFailed)
        } else if (0..self.progress.len()).all(|index| self.settled(index)) {
            Some(Outcome::Completed)
        } else {
            late.then_some(Outcome::TimedOut)
        }
    }

    /// Whether a container runs that the gate would not have admitted.
    fn intruded(&self) -> bool {
        self.plan.way != Way::Shielded
            && (0..self.progress.len()).any(|index| {
                let runs = matches!(self.progress[index].new, NewState::Running(_));
                runs && (self.phase != Phase::Up || !self.is_turn_of(index))
            })
    }

    // --- taking note ----------------------------------------------------------------------------------------

    fn index_of(&self, name: &ContainerName) -> Option<usize> {
        self.plan
            .members
            .iter()
            .position(|member| member.name == *name)
    }

    fn index_of_old(&self, id: &ContainerId) -> Option<usize> {
        self.plan
            .members
            .iter()
            .position(|member| member.old.as_ref().is_some_and(|old| old.id == *id))
    }

    fn old_id(&self, index: usize) -> Option<ContainerId> {
        self.plan.members[index]
            .old
            .as_ref()
            .map(|old| old.id.clone())
    }

    fn is_exited(&self, name: &ContainerName) -> bool {
        self.index_of(name)
            .is_some_and(|index| self.progress[index].old == Some(OldState::Exited))
    }

    fn olds(&self) -> Vec<ContainerId> {
        (0..self.progress.len())
            .filter_map(|index| self.old_id(index))
            .collect()
    }

    fn set_old(&mut self, id: &ContainerId, state: OldState) {
        if let Some(index) = self.index_of_old(id)
            && self.progress[index].old != Some(OldState::Gone)
        {
            self.progress[index].old = Some(state);
        }
    }

    fn ended(
        &mut self,
        name: &ContainerName,
        id: ContainerId,
        code: Option<ExitCode>,
    ) -> Vec<Effect> {
        if let Some(index) = self.index_of_old(&id) {
            self.progress[index].old_exit = self.progress[index].old_exit.or(code);
            return Vec::new();
        }
        let Some(index) = self.index_of(name) else {
            return Vec::new();
        };
        let progress = &mut self.progress[index];
        let known = match &progress.new {
            NewState::Ended(new, known) if *new == id => *known,
            _ => None,
        };
        progress.new = NewState::Ended(id, code.or(known));
        self.replaced(index)
    }

    fn gone(&mut self, id: &ContainerId) {
        if let Some(index) = self.index_of_old(id) {
            self.progress[index].old = Some(OldState::Gone);
        }
        for progress in &mut self.progress {
            progress.placeholders.remove(id);
            progress.older.remove(id);
        }
    }

    fn add_placeholder(&mut self, name: &ContainerName, id: ContainerId) {
        if let Some(index) = self.index_of(name) {
            self.progress[index].placeholders.insert(id);
        }
    }

    fn started(&mut self, name: &ContainerName, id: ContainerId) -> Vec<Effect> {
        let Some(index) = self.index_of(name) else {
            return Vec::new();
        };
        if self.index_of_old(&id).is_some() {
            return Vec::new();
        }
        self.progress[index].new = NewState::Running(id);
        self.replaced(index)
    }

    /// A container that has started needs its placeholders no more: with them gone, the old attempt is its
    /// `lastState`.
    fn replaced(&self, index: usize) -> Vec<Effect> {
        let placeholders = self.progress[index].placeholders.iter().cloned();
        placeholders.map(Effect::Remove).collect()
    }
}

fn progress_from(member: &super::plan::Member, found: &[Found]) -> Progress {
    let mut progress = Progress {
        old: member.old.as_ref().map(|_| OldState::Gone),
        old_exit: member.old.as_ref().and_then(|old| old.exit),
        older: BTreeSet::new(),
        placeholders: BTreeSet::new(),
        new: NewState::None,
    };
    for seen in found.iter().filter(|seen| seen.name == member.name) {
        let is_old = member.old.as_ref().is_some_and(|old| old.id == seen.id);
        match seen.state {
            _ if seen.placeholder => {
                progress.placeholders.insert(seen.id.clone());
            }
            FoundState::Running if is_old => progress.old = Some(OldState::Running),
            FoundState::Exited(code) if is_old => {
                progress.old = Some(OldState::Exited);
                progress.old_exit = progress.old_exit.or(code);
            }
            FoundState::Running if seen.new => progress.new = NewState::Running(seen.id.clone()),
            FoundState::Exited(code) if seen.new && progress.new == NewState::None => {
                progress.new = NewState::Ended(seen.id.clone(), code);
            }
            _ if member.older.contains(&seen.id) => {
                progress.older.insert(seen.id.clone());
            }
            FoundState::Created | FoundState::Running | FoundState::Exited(_) => {}
        }
    }
    progress
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
