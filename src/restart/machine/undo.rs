//! Undoes what a replay has done to init containers before the kubelet is to start the pod.
//!
//! To the kubelet they have completed. It drops every status of a pod in which one of them is not terminated, the
//! shields with it (`checkContainerStateTransition`, `pkg/kubelet/status/status_manager.go`), and fails a Never pod in
//! which one was killed (`getPhase`, `pkg/kubelet/kubelet_pods.go`). So their new attempts are removed, behind shields of
//! their own where the exit would fail the pod, before the guard is shielded: whoever sees the guard wait sees none of
//! them.

use std::time::Instant;

use super::Machine;
use super::progress::{NewState, Progress};
use super::terms::{Effect, Phase};
use crate::kube::ContainerKind;
use crate::restart::plan::Way;
use crate::restart::times::{RELIST_INTERVAL, SHIELDS_TIME};

/// Undoing a replay.
#[derive(Debug, Default)]
pub(super) struct Undo {
    stage: Stage,
    /// The shields of the others wait for it no longer.
    late: bool,
    /// Before that, the kubelet may act on what it saw before it was over.
    trusted_from: Option<Instant>,
}

/// How far it is.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// There is nothing to undo, or no longer.
    #[default]
    Over,
    /// An exit that would fail the pod is being shielded.
    Shielding,
    /// The exits are released and the attempts removed.
    Removing,
    /// The attempts are gone, their shields are removed.
    Unshielding,
}

impl Machine {
    /// Whether it, or one that it replaces, has run init containers again of which the kubelet does not know.
    #[must_use]
    pub fn has_replayed_inits(&self) -> bool {
        let mut inits = self.inits();
        let begun = inits.any(|(member, it)| {
            self.replay.asked.contains(&member.name)
                && (it.new != NewState::None || it.made.is_some())
        });
        let before = matches!(self.phase, Phase::Down | Phase::Replay | Phase::Over);
        begun || (before && self.plan.replayed_inits)
    }

    /// What shields the old containers, as soon as the kubelet can record that.
    pub(super) fn begin_shields(&mut self) -> Vec<Effect> {
        let inits = self.begin_undo();
        if self.undo.stage == Stage::Over {
            self.shields_wanted()
        } else {
            inits
        }
    }

    pub(super) fn begin_undo(&mut self) -> Vec<Effect> {
        let inits = self.undone();
        if !inits.is_empty() {
            self.undo.stage = Stage::Shielding;
        }
        let inits = inits.into_iter();
        inits.flat_map(|index| self.shields_of(index)).collect()
    }

    /// When the guard must be shielded whatever stands in its way.
    pub(super) fn undo_until(&self) -> Option<Instant> {
        let at = self.deadline.checked_sub(SHIELDS_TIME);
        at.filter(|_| self.undoes_first())
    }

    /// Whether the others' shields wait for it.
    pub(super) fn undoes_first(&self) -> bool {
        self.phase == Phase::Down && self.undo.stage != Stage::Over && !self.undo.late
    }

    /// Whether that container's attempts are none of the kubelet's business.
    pub(super) fn is_undone(&self, index: usize) -> bool {
        let undoes = self.plan.replayed_inits && self.plan.way == Way::Cleared;
        let init = self.plan.members[index].kind == ContainerKind::Init;
        undoes && init && !self.is_guard(index)
    }

    /// Whether the exit of that container's attempt need not be hidden any more.
    pub(super) fn is_released(&self, index: usize) -> bool {
        let removes = matches!(self.undo.stage, Stage::Removing | Stage::Unshielding);
        removes && self.is_undone(index)
    }

    /// Whether its attempts are gone, and nothing of it is to be hidden.
    pub(super) fn needs_no_shield(&self, index: usize) -> bool {
        let removed = matches!(self.undo.stage, Stage::Unshielding | Stage::Over);
        removed && self.is_undone(index)
    }

    /// Whether what the kubelet wants by now is wanted after a relist without them.
    pub(super) fn is_undo_seen(&self, now: Instant) -> bool {
        let trusted = self.undo.trusted_from.is_none_or(|from| now >= from);
        self.undo.stage == Stage::Over && trusted
    }

    fn undone(&self) -> Vec<usize> {
        let all = 0..self.progress.len();
        all.filter(|&index| self.is_undone(index)).collect()
    }

    /// Returns whether it has got on.
    pub(super) fn step_undo(&mut self, now: Instant, effects: &mut Vec<Effect>) -> bool {
        if self.undo_until().is_some_and(|until| now >= until) {
            self.undo.late = true;
            effects.extend(self.shields_wanted());
            return true;
        }
        let inits = self.undone();
        let mut progress = inits.iter().map(|&index| &self.progress[index]);
        match self.undo.stage {
            Stage::Shielding if inits.iter().all(|&index| !self.lacks_shield(index)) => {
                self.undo.stage = Stage::Removing;
                let attempts = inits.iter().flat_map(|&index| self.attempts_of(index));
                effects.push(Effect::Release(attempts.collect()));
                effects.extend(inits.iter().flat_map(|&index| self.removals_of(index)));
            }
            Stage::Removing if progress.all(Progress::is_gone) => {
                self.undo.stage = Stage::Unshielding;
                let shields = inits
                    .iter()
                    .flat_map(|&index| self.progress[index].placeholders.keys());
                effects.extend(shields.cloned().map(Effect::Remove));
            }
            Stage::Unshielding if progress.all(|it| it.placeholders.is_empty()) => {
                let first = self.undoes_first();
                // Whoever saw the guard wait by now may have seen them.
                if !first || self.guard_has_placeholder() {
                    self.undo.trusted_from = Some(now + RELIST_INTERVAL);
                }
                if first {
                    effects.extend(self.shields_wanted());
                }
                self.undo.stage = Stage::Over;
            }
            _ => return false,
        }
        true
    }
}
