//! How far each container of a restart is.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use crate::ids::{ContainerId, ExitCode};
use crate::node::{InstanceState, Instances, Maker};
use crate::restart::plan::{Member, Old};
use crate::restart::times::time_of_step;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OldState {
    Running,
    Held,
    Exited,
    Gone,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NewState {
    None,
    Running(ContainerId),
    Ended(ContainerId, Option<ExitCode>),
}

#[derive(Debug)]
pub(super) struct Progress {
    pub(super) old: Option<OldState>,
    /// The old one's code where it was learnt only after the decision.
    pub(super) old_exit: Option<ExitCode>,
    /// Attempts before the old one that are still there.
    pub(super) older: BTreeSet<ContainerId>,
    /// Since when its exit is held, in the queue for a turn or later.
    pub(super) held_since: Option<Instant>,
    /// Its exit was released while the pod waited for its turn.
    pub(super) shown: bool,
    /// Placeholders that were asked for and are not there yet.
    pub(super) coming: usize,
    /// Each with the moment until which a relist of the kubelet may be under way that has not listed it; `None`: no longer.
    pub(super) placeholders: BTreeMap<ContainerId, Option<Instant>>,
    /// An attempt that a replay has made and not started. Until then it is as good as a placeholder.
    pub(super) made: Option<ContainerId>,
    pub(super) new: NewState,
    /// Until then a relist may be under way that has not listed the new one.
    pub(super) missed_until: Option<Instant>,
    /// When the kubelet was let create the new one, if it was.
    pub(super) admitted: Option<Instant>,
    /// When the new one started, if that was under our eyes.
    pub(super) started: Option<Instant>,
}

impl Progress {
    /// Whatever was created and never started.
    pub(super) fn unstarted(&self) -> impl Iterator<Item = &ContainerId> {
        self.placeholders.keys().chain(&self.made)
    }

    /// Placeholders that a relist may have missed.
    pub(super) fn untrusted(&self) -> impl Iterator<Item = &Instant> {
        self.placeholders.values().flatten()
    }

    /// Whether nothing is left of what ran before.
    pub(super) fn is_gone(&self) -> bool {
        self.older.is_empty() && self.old_is_gone()
    }

    /// Whether it did not run before, or the attempt that did is no longer in the runtime.
    pub(super) fn old_is_gone(&self) -> bool {
        matches!(self.old, None | Some(OldState::Gone))
    }

    /// Until when the kubelet may be in the sync that has started it.
    pub(super) fn steps_until(&self) -> Option<Instant> {
        let (admitted, started) = self.admitted.zip(self.started)?;
        Some(started + time_of_step(started.saturating_duration_since(admitted)))
    }

    /// While nothing has been found of it.
    pub(super) fn of(member: &Member) -> Self {
        Self {
            old: member.old.as_ref().map(|_| OldState::Gone),
            old_exit: member.old.as_ref().and_then(Old::code),
            older: BTreeSet::new(),
            held_since: None,
            shown: false,
            coming: 0,
            placeholders: BTreeMap::new(),
            made: None,
            new: NewState::None,
            missed_until: None,
            admitted: None,
            started: None,
        }
    }

    /// As a restart finds it that another process began.
    pub(super) fn from_found(member: &Member, found: &Instances) -> Self {
        let mut progress = Self::of(member);
        let old = member.old.as_ref().map(|old| &old.id);
        let old_made = old.and_then(|old| found.get(old)).map(|it| it.created_at);
        for (id, seen) in found.iter().filter(|(_, seen)| seen.name == member.name) {
            let new = !member.knew(id);
            match seen.state {
                _ if seen.is_placeholder() => {
                    // One that an earlier restart left shields nothing.
                    if old_made.is_none_or(|made| made < seen.created_at) {
                        progress.placeholders.insert(id.clone(), None);
                    }
                }
                InstanceState::Running if Some(id) == old => progress.old = Some(OldState::Running),
                InstanceState::Ended(code) if Some(id) == old => {
                    progress.old = Some(OldState::Exited);
                    progress.old_exit = progress.old_exit.or(code);
                }
                InstanceState::Running if new => progress.new = NewState::Running(id.clone()),
                InstanceState::Ended(code) if new && progress.new == NewState::None => {
                    progress.new = NewState::Ended(id.clone(), code);
                }
                _ if member.older.contains(id) => drop(progress.older.insert(id.clone())),
                InstanceState::Created if seen.maker == Maker::Replay || !new => {
                    progress.made = Some(id.clone());
                }
                InstanceState::Created | InstanceState::Running | InstanceState::Ended(_) => {}
            }
        }
        progress
    }
}
