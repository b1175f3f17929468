//! What a restart has come to, and what it wants next.

use super::Machine;
use super::progress::{NewState, OldState};
use super::terms::{Effect, Outcome, Phase};
use crate::ids::{ContainerId, ExitCode};
use crate::kube::{ContainerKind, RestartPolicy};
use crate::restart::plan::Way;

impl Machine {
    /// The guard's placeholders come first: they are what keeps a Never pod from being seen as stopped.
    pub(super) fn shields_wanted(&self) -> Vec<Effect> {
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

    pub(super) fn kills(&mut self) -> Vec<Effect> {
        self.killed = true;
        (0..self.progress.len())
            .filter(|&index| self.progress[index].old == Some(OldState::Running))
            .filter(|&index| self.old_id(index).as_ref() != Some(&self.plan.trigger.container))
            .filter_map(|index| self.old_id(index).map(Effect::Kill))
            .collect()
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

    pub(super) fn removals_of_placeholders(&self) -> Vec<Effect> {
        let standing = self.leftovers().into_iter();
        standing.map(|(_, id)| Effect::Remove(id)).collect()
    }

    pub(super) fn removals_of_replaced(&self) -> Vec<Effect> {
        self.progress
            .iter()
            .filter(|progress| progress.new != NewState::None)
            .flat_map(|progress| progress.placeholders.iter().cloned().map(Effect::Remove))
            .collect()
    }

    pub(super) fn all_down(&self) -> bool {
        self.progress
            .iter()
            .all(|progress| progress.old != Some(OldState::Running))
    }

    pub(super) fn shields_stand(&self) -> bool {
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
    pub(super) fn goes_first(&self, index: usize) -> bool {
        match self.plan.members[index].kind {
            ContainerKind::Init | ContainerKind::Sidecar => true,
            ContainerKind::Regular => {
                self.plan.restart_policy == RestartPolicy::OnFailure
                    && self.progress[index].old_exit == Some(ExitCode::SUCCESS)
            }
        }
    }

    pub(super) fn goes_first_by_id(&self, id: &ContainerId) -> bool {
        self.index_of_old(id)
            .is_some_and(|index| self.goes_first(index))
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
            .all(|it| it.older.is_empty() && matches!(it.old, None | Some(OldState::Gone)));
        let placeholders = !self.placeholders_going || self.leftovers().is_empty();
        containers && placeholders
    }

    /// Start order: each init container after those before it, regular ones after all (KEP-753).
    pub(super) fn is_turn_of(&self, index: usize) -> bool {
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

    pub(super) fn passed(&self, index: usize) -> bool {
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

    pub(super) fn settled(&self, index: usize) -> bool {
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

    pub(super) fn outcome(&self, late: bool) -> Option<Outcome> {
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
    pub(super) fn intruded(&self) -> bool {
        self.plan.way != Way::Shielded
            && (0..self.progress.len()).any(|index| {
                let runs = matches!(self.progress[index].new, NewState::Running(_));
                runs && (self.phase != Phase::Up || !self.is_turn_of(index))
            })
    }
}
