//! What a restart has come to, and what it wants next.

use std::collections::BTreeSet;
use std::time::Instant;

use super::Machine;
use super::progress::{NewState, OldState, Progress};
use super::terms::{Effect, Outcome, Phase, WAKER};
use crate::ids::{ContainerId, ContainerName, ExitCode};
use crate::kube::{ContainerKind, RestartPolicy};
use crate::node::{InstanceState, Instances, Maker};
use crate::restart::plan::{Member, Way};

impl Machine {
    /// Each member, and how far it is.
    pub(super) fn members(&self) -> impl DoubleEndedIterator<Item = (&Member, &Progress)> {
        self.plan.members.iter().zip(&self.progress)
    }

    /// The guard's placeholders come first: they are what keeps a Never pod from being seen as stopped.
    pub(super) fn shields_wanted(&mut self) -> Vec<Effect> {
        let mut wanted = self.guard_first();
        wanted.retain(|&index| !self.is_undone(index));
        let wanted = wanted.into_iter();
        wanted.flat_map(|index| self.shields_of(index)).collect()
    }

    pub(super) fn guard_first(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.progress.len()).collect();
        order.sort_by_key(|&index| !self.is_guard(index));
        order
    }

    /// Those that it lacks, and that do not come yet.
    pub(super) fn shields_of(&mut self, index: usize) -> Vec<Effect> {
        self.shields(index, self.lacks_placeholders(index))
    }

    /// Of so many that it lacks, those that do not come yet.
    pub(super) fn shields(&mut self, index: usize, lacks: usize) -> Vec<Effect> {
        let name = self.plan.members[index].name.clone();
        let Some(old) = self.old_id(index) else {
            return Vec::new();
        };
        let coming = &mut self.progress[index].coming;
        let missing = lacks.saturating_sub(*coming);
        *coming += missing;
        vec![Effect::MakePlaceholder(name, old); missing]
    }

    pub(super) fn comes_no_more(&mut self, name: &ContainerName) {
        if let Some(index) = self.index_of(name) {
            let coming = &mut self.progress[index].coming;
            *coming = coming.saturating_sub(1);
        }
    }

    /// How many placeholders it lacks. One that is newer than an attempt that runs would hide it.
    pub(super) fn lacks_placeholders(&self, index: usize) -> usize {
        if self.progress[index].new != NewState::None {
            return 0;
        }
        let standing = self.progress[index].placeholders.len();
        usize::from(self.plan.members[index].placeholders).saturating_sub(standing)
    }

    /// Wanted where the kubelet is to start something when the back-off is over, and nothing else wakes it: with
    /// `Cleared`, the removals do.
    pub(super) fn waker_wanted(&self) -> Option<Effect> {
        let waits = self.start_at.is_some() && self.waker.is_none();
        let wanted = waits && self.plan.way != Way::Cleared && !self.replays();
        let guard = self.guard()?;
        let like = self.old_id(guard).filter(|_| wanted)?;
        Some(Effect::MakePlaceholder(WAKER.into(), like))
    }

    pub(super) fn kills(&mut self) -> Vec<Effect> {
        self.killed = true;
        let olds = (0..self.progress.len())
            .filter(|&index| self.progress[index].old == Some(OldState::Running))
            .filter_map(|index| self.old_id(index))
            .filter(|id| *id != self.plan.trigger.container);
        let all = olds.chain(self.ending.iter().cloned());
        all.map(Effect::Kill).collect()
    }

    pub(super) fn removals(&self) -> Vec<Effect> {
        (0..self.progress.len())
            .filter(|&index| self.is_cleared_away(index))
            .flat_map(|index| self.removals_of(index))
            .collect()
    }

    pub(super) fn removals_of(&self, index: usize) -> Vec<Effect> {
        let progress = &self.progress[index];
        let old = self
            .old_id(index)
            .filter(|_| progress.old != Some(OldState::Gone));
        let ids = progress.older.iter().cloned().chain(old);
        ids.map(Effect::Remove).collect()
    }

    /// The exits that placeholders hide.
    pub(super) fn removals_of_shielded(&self) -> Vec<Effect> {
        let members = 0..self.progress.len();
        let shielded = members.filter(|&index| self.plan.members[index].placeholders > 0);
        shielded.flat_map(|index| self.removals_of(index)).collect()
    }

    pub(super) fn removals_of_placeholders(&self) -> Vec<Effect> {
        let standing = self.leftovers().into_iter();
        standing.map(|(_, id)| Effect::Remove(id)).collect()
    }

    pub(super) fn removals_of_unstarted(&self) -> Vec<Effect> {
        let made = self.progress.iter().filter_map(|it| it.made.clone());
        made.map(Effect::Remove).collect()
    }

    pub(super) fn removals_of_replaced(&self) -> Vec<Effect> {
        self.progress
            .iter()
            .filter(|progress| progress.new != NewState::None)
            .flat_map(|progress| progress.unstarted().cloned().map(Effect::Remove))
            .collect()
    }

    /// Whether a placeholder of that name is good for anything.
    #[must_use]
    pub fn wants_shield(&self, name: &ContainerName) -> bool {
        if *name == WAKER.into() {
            self.start_at.is_some() && !self.failing
        } else {
            self.is_shielding(name)
        }
    }

    /// Whether a placeholder of that container still keeps the kubelet from seeing it stopped.
    #[must_use]
    pub(super) fn is_shielding(&self, name: &ContainerName) -> bool {
        let Some(index) = self.index_of(name) else {
            return false;
        };
        match self.phase {
            _ if self.failing || self.needs_no_shield(index) => false,
            _ if self.progress[index].new != NewState::None => false,
            Phase::Down => !self.replays_at_once() || self.is_queued() || self.is_shown(name),
            Phase::Shielded => true,
            Phase::Up => self.plan.way == Way::Shielded,
            Phase::Replay => self.shields_unstarted() || self.is_shown(name),
            Phase::Clear | Phase::Over => false,
        }
    }

    /// Whether its exit was released while the pod waited for its turn.
    fn is_shown(&self, name: &ContainerName) -> bool {
        self.index_of(name)
            .is_some_and(|index| self.progress[index].shown)
    }

    pub(super) fn all_down(&self) -> bool {
        let mut olds = self.progress.iter().map(|progress| progress.old);
        self.ending.is_empty() && olds.all(|old| old != Some(OldState::Running))
    }

    /// Old attempts that run beside a newer one: the kubelet started that when nobody kept it from doing so.
    pub(super) fn twins(&self, found: &Instances) -> BTreeSet<ContainerId> {
        let runs = |id: &&ContainerId| {
            let instance = found.get(id);
            instance.is_some_and(|it| it.state == InstanceState::Running)
        };
        let older = self.plan.members.iter().flat_map(|it| &it.older);
        older.filter(runs).cloned().collect()
    }

    pub(super) fn shields_stand(&self) -> bool {
        (0..self.progress.len()).all(|index| !self.lacks_shield(index))
    }

    pub(super) fn guard(&self) -> Option<usize> {
        self.index_of(&self.plan.guard)
    }

    pub(super) fn is_guard(&self, index: usize) -> bool {
        self.guard() == Some(index)
    }

    pub(super) fn guard_stands(&self) -> bool {
        let guard = self.guard();
        guard.is_none_or(|guard| !self.lacks_shield(guard))
    }

    /// Whether its shields are missing. What is gone cannot be copied, and shows nothing that a shield could hide.
    pub(super) fn lacks_shield(&self, index: usize) -> bool {
        let untrusted = self.progress[index].untrusted().count();
        !self.progress[index].old_is_gone() && self.lacks_placeholders(index) + untrusted > 0
    }

    /// Whether it was removed in the generation before this one, with what shielded it.
    pub(super) fn guard_is_gone(&self) -> bool {
        let index = self.guard();
        index.is_none_or(|index| {
            let guard = &self.progress[index];
            guard.old_is_gone() && guard.placeholders.is_empty()
        })
    }

    /// Under `Kept`: what the kubelet would not run again if it saw it exited, or not in order. Sidecars it
    /// would restart before the init containers; those that completed it would leave.
    pub(super) fn goes_first(&self, index: usize) -> bool {
        match self.plan.members[index].kind {
            ContainerKind::Init | ContainerKind::Sidecar => true,
            ContainerKind::Regular => {
                self.plan.members[index].restart_policy == RestartPolicy::OnFailure
                    && self.progress[index].old_exit == Some(ExitCode::SUCCESS)
            }
        }
    }

    pub(super) fn is_cleared_away(&self, index: usize) -> bool {
        match self.plan.way {
            Way::Kept => self.goes_first(index),
            Way::Shielded => false,
            Way::Cleared => true,
        }
    }

    pub(super) fn cleared(&self) -> bool {
        let containers = (0..self.progress.len())
            .filter(|&index| self.is_cleared_away(index))
            .map(|index| &self.progress[index])
            .all(Progress::is_gone);
        let placeholders = !self.placeholders_going || self.leftovers().is_empty();
        containers && placeholders
    }

    /// Start order: each init container after those before it, regular ones after all (KEP-753).
    pub(super) fn is_turn_of(&self, index: usize) -> bool {
        self.has_turn(index, |kind| kind != ContainerKind::Regular)
    }

    /// The same after those of these kinds alone.
    fn has_turn(&self, index: usize, goes_first: impl Fn(ContainerKind) -> bool) -> bool {
        if self.plan.way == Way::Shielded || !self.plan.ordered {
            return true;
        }
        let member = &self.plan.members[index];
        self.plan
            .members
            .iter()
            .enumerate()
            .filter(|(_, other)| goes_first(other.kind))
            .filter(|(other, _)| member.kind == ContainerKind::Regular || *other < index)
            .all(|(other, _)| self.passed(other))
    }

    /// While the kubelet sees a regular container, also a placeholder or one whose hook is about to return, it takes the
    /// pod for initialised: it starts the sidecars that it misses and goes on in the same sync, without waiting for their
    /// startup probes (`computePodActions`). It may have relisted in such a moment.
    pub(super) fn is_hasty(&self, index: usize, now: Instant) -> bool {
        let before = self.members().take(index);
        let sidecars = before.filter(|(it, _)| it.kind == ContainerKind::Sidecar);
        let mut probed = sidecars.filter(|(it, _)| it.startup_probe);
        probed.any(|(_, it)| it.steps_until().is_some_and(|until| now < until))
    }

    pub(super) fn passed(&self, index: usize) -> bool {
        let kind = self.plan.members[index].kind;
        match &self.progress[index].new {
            NewState::None => false,
            NewState::Running(_) => kind == ContainerKind::Sidecar,
            NewState::Ended(_, _) if kind == ContainerKind::Sidecar => true,
            // Without a code the kubelet is believed: it goes on only after a success.
            NewState::Ended(_, None) => self.phase != Phase::Replay,
            NewState::Ended(_, Some(code)) => *code == ExitCode::SUCCESS,
        }
    }

    pub(super) fn settled(&self, index: usize) -> bool {
        let member = &self.plan.members[index];
        let new = &self.progress[index].new;
        match member.kind {
            // What stands unshielded goes on as it is.
            _ if self.plan.way == Way::Shielded => {
                let waits = member.placeholders > 0 && *new == NewState::None;
                !waits || self.is_left(index)
            }
            ContainerKind::Init if self.plan.ordered => self.passed(index),
            ContainerKind::Init | ContainerKind::Sidecar | ContainerKind::Regular => {
                *new != NewState::None
            }
        }
    }

    pub(super) fn outcome(&self, late: bool) -> Option<Outcome> {
        let init_failed = self
            .members()
            .filter(|(member, _)| member.kind == ContainerKind::Init)
            .filter(|(member, _)| member.restart_policy == RestartPolicy::Never)
            .any(|(_, progress)| {
                matches!(progress.new, NewState::Ended(_, Some(code)) if code != ExitCode::SUCCESS)
            });
        if init_failed {
            Some(Outcome::InitFailed)
        } else if !self.ending.is_empty() {
            late.then_some(Outcome::TimedOut)
        } else if (0..self.progress.len()).all(|index| self.settled(index)) {
            let left = (0..self.progress.len()).any(|index| self.is_left(index));
            let none = self.progress.iter().all(|it| it.new == NewState::None);
            Some(if self.failing && none {
                Outcome::Unshielded
            } else if self.is_halved() {
                Outcome::MadeToFail
            } else if left {
                Outcome::TimedOut
            } else {
                Outcome::Completed
            })
        } else {
            late.then_some(Outcome::TimedOut)
        }
    }

    /// Whether a container runs that the gate would not have admitted.
    pub(super) fn intruded(&self) -> bool {
        let may_run = |index| match self.phase {
            // It has seen the sidecars run, and starts them again by itself.
            _ if self.begun => self.has_turn(index, |kind| kind == ContainerKind::Init),
            Phase::Up => self.is_turn_of(index),
            _ => false,
        };
        self.plan.way != Way::Shielded
            && self.phase != Phase::Replay
            && (0..self.progress.len()).any(|index| {
                let runs = matches!(self.progress[index].new, NewState::Running(_));
                runs && !may_run(index)
            })
    }

    /// Whether the kubelet has begun with the first init container since the restart was decided: it has recorded what it
    /// saw before. Sidecars it starts again at any time.
    pub(super) fn kubelet_has_begun(&self, found: &Instances) -> bool {
        let mut found = found.iter();
        self.plan.ordered
            && found.any(|(id, it)| {
                let member = self.plan.member(&it.name);
                let init = member.is_some_and(|member| member.kind == ContainerKind::Init);
                let began = it.maker == Maker::Kubelet && it.state != InstanceState::Created;
                init && !self.plan.knew(id) && began
            })
    }
}
