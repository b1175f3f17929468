//! Undoes what a replay has done to init containers before the kubelet is to start the pod.
//!
//! To the kubelet they have completed. It drops every status of a pod in which one of them is not terminated, the
//! shields with it (`checkContainerStateTransition`, `pkg/kubelet/status/status_manager.go`), and fails a Never pod in
//! which one was killed (`getPhase`, `pkg/kubelet/kubelet_pods.go`). So their new attempts are removed, behind shields of
//! their own where the exit would fail the pod, before the guard is shielded: whoever sees the guard wait sees none of
//! them. A regular container that had ended for good, and that the kubelet has started again, is ended, and seen to be: one that
//! is gone the kubelet would want to create, and what was refused once waits in every status from then on (`reasonCache`,
//! `convertToAPIContainerStatuses`), which drops them all.

use std::collections::BTreeSet;
use std::time::Instant;

use super::Machine;
use super::progress::{OldState, Progress};
use super::terms::{Effect, Phase};
use crate::ids::{ContainerId, ContainerName, ExitCode};
use crate::kube::ContainerKind;
use crate::plan::Way;
use crate::times::{RELIST_INTERVAL, SHIELDS_TIME};

/// Undoing a replay.
#[derive(Debug, Default)]
pub(super) struct Undo {
    stage: Stage,
    /// The shields of the others wait for it no longer.
    late: bool,
    /// Before that, the kubelet may act on what it saw before it was over.
    trusted_from: Option<Instant>,
    /// Attempts that were made and not started, until they are gone.
    strays: BTreeSet<ContainerId>,
    /// What may yet become one.
    unanswered: BTreeSet<ContainerName>,
}

/// How far it is.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// There is nothing to undo, or no longer.
    #[default]
    Over,
    /// An exit that would fail the pod is being shielded.
    Shielding,
    /// The exits are released, and the attempts removed that are not to be seen.
    Removing,
    /// They are, their shields are removed.
    Unshielding,
}

impl Machine {
    /// Whether it, or one that it replaces, has run init containers again of which the kubelet does not know.
    pub(crate) fn has_replayed_inits(&self) -> bool {
        let mut inits = self.inits();
        let begun = inits.any(|it| {
            let name = &it.member.name;
            let made = it.is_new() || it.made.is_some() || self.replay.unanswered.contains(name);
            self.replay.asked.contains(name) && made
        });
        let before = matches!(self.phase, Phase::Down | Phase::Replay | Phase::Over);
        begun || (before && self.plan.replayed_inits)
    }

    /// What shields the old containers, as soon as the kubelet can record that.
    pub(super) fn begin_shields(&mut self) {
        self.begin_undo();
        if self.undo.stage == Stage::Over {
            self.shield_all(false);
        }
    }

    /// What the generation before has made of init containers and not started is being removed, or will be when it is there.
    pub(super) fn take_over_strays(&mut self, before: &Self) {
        let made = before.inits().filter_map(|it| it.made.as_ref());
        let strays = made.chain(&before.undo.strays);
        // One that has run after all is part of this restart.
        let strays = strays.filter(|id| !self.plan.knew(id)).cloned();
        self.undo.strays = strays.collect();
        let inits = before.inits().map(|it| &it.member.name);
        let unanswered = inits.filter(|it| before.replay.unanswered.contains(*it));
        let unanswered = unanswered.chain(&before.undo.unanswered).cloned();
        self.undo.unanswered = unanswered.collect();
    }

    /// The same where another process has made it.
    pub(super) fn sweep_strays(&mut self) {
        let inits = self.progress.iter_mut();
        let inits = inits.filter(|it| it.is(ContainerKind::Init));
        let strays: BTreeSet<ContainerId> = inits.filter_map(|it| it.made.take()).collect();
        self.effects
            .extend(strays.iter().cloned().map(Effect::Remove));
        self.undo.strays.extend(strays);
    }

    pub(super) fn strayed(&mut self, name: &ContainerName, id: Option<ContainerId>) {
        if self.undo.unanswered.remove(name) {
            self.undo.strays.extend(id);
        }
    }

    pub(super) fn stray_is_gone(&mut self, id: &ContainerId) {
        self.undo.strays.remove(id);
    }

    fn waits_for_strays(&self) -> bool {
        let none = self.undo.strays.is_empty() && self.undo.unanswered.is_empty();
        !none && !self.undo.late
    }

    pub(super) fn begin_undo(&mut self) {
        if self.waits_for_strays() || self.progress.iter().any(|it| self.is_undone(it)) {
            self.undo.stage = Stage::Shielding;
        }
        self.shield_all(true);
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

    /// Whether the kubelet is to see that container's attempts removed, or ended, before the guard is shielded. A success that it
    /// sees stays: it may have yet to record it, and would take what ran for lost.
    pub(super) fn is_undone(&self, it: &Progress) -> bool {
        let succeeded = it.member.exit() == Some(ExitCode::SUCCESS);
        let seen = succeeded && it.placeholders.is_empty();
        let replayed = self.plan.replayed_inits && it.is(ContainerKind::Init) && !seen;
        let runs_unrecorded = it.member.runs_unrecorded && it.member.old.is_some();
        let undoes = replayed || runs_unrecorded;
        undoes && self.plan.way == Way::Cleared && !self.is_guard(it)
    }

    /// Whether the exit of that container's attempt need not be hidden any more.
    pub(super) fn is_released(&self, it: &Progress) -> bool {
        let removes = matches!(self.undo.stage, Stage::Removing | Stage::Unshielding);
        removes && self.is_undone(it)
    }

    /// Whether what shielded those attempts is to follow them.
    pub(super) fn is_removing_undone(&self) -> bool {
        self.undo.stage == Stage::Removing
    }

    /// Whether that is so, and nothing of it is to be hidden.
    pub(super) fn needs_no_shield(&self, it: &Progress) -> bool {
        let removed = matches!(self.undo.stage, Stage::Unshielding | Stage::Over);
        removed && self.is_undone(it)
    }

    /// Whether what the kubelet wants by now is wanted after a relist without them.
    pub(super) fn is_undo_seen(&self, now: Instant) -> bool {
        let trusted = self.undo.trusted_from.is_none_or(|from| now >= from);
        self.undo.stage == Stage::Over && trusted
    }

    /// Ends what runs although the kubelet has recorded its end, and has that seen: whatever else is killed waits for what shields
    /// it, and that for this. When a kill is done, the exit is seen, also that of one which has ended by itself.
    fn end_unrecorded(&mut self) {
        let waits = self.plan.shields_come_first() || self.phase != Phase::Down;
        self.end_olds(|machine, it| {
            let ends = match it.old {
                OldState::Held => true,
                OldState::Running => waits || machine.has_asked(it),
                OldState::Exited | OldState::Gone => false,
            };
            ends && it.member.runs_unrecorded && machine.is_undone(it)
        });
    }

    /// Returns whether it has got on.
    pub(super) fn step_undo(&mut self, now: Instant) -> bool {
        if self.undo_until().is_some_and(|until| now >= until) {
            self.undo.late = true;
            self.shield_all(false);
            return true;
        }
        let mut undone = self.progress.iter().filter(|it| self.is_undone(it));
        let is_undone = |it: &Progress| {
            let ended = matches!(it.old, OldState::Exited | OldState::Gone);
            it.is_gone() || (it.member.runs_unrecorded && ended)
        };
        let told = self.exits_forgotten_from().is_none();
        match self.undo.stage {
            Stage::Shielding if undone.all(|it| !it.lacks_shield()) => {
                self.undo.stage = Stage::Removing;
                self.release(Self::is_undone);
                self.remove_olds(|it, of| it.is_undone(of) && !of.member.runs_unrecorded);
                self.end_unrecorded();
            }
            Stage::Removing if undone.all(is_undone) && told && !self.waits_for_strays() => {
                self.undo.stage = Stage::Unshielding;
                let undone = self.progress.iter().filter(|it| self.is_undone(it));
                let shields = undone.flat_map(|it| it.placeholders.keys().cloned());
                let removals: Vec<Effect> = shields.map(Effect::Remove).collect();
                self.effects.extend(removals);
            }
            Stage::Unshielding if undone.all(|it| it.placeholders.is_empty()) => {
                let first = self.undoes_first();
                // Whoever saw the guard wait by now may have seen them.
                if !first || self.guard_has_placeholder() {
                    self.undo.trusted_from = Some(now + RELIST_INTERVAL);
                }
                if first {
                    self.shield_all(false);
                }
                self.undo.stage = Stage::Over;
            }
            _ => return false,
        }
        true
    }
}
