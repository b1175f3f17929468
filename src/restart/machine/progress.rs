//! How far each container of a restart is.

use std::collections::BTreeSet;

use super::terms::{Found, FoundState};
use crate::ids::{ContainerId, ExitCode};
use crate::restart::plan::Member;

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
    pub(super) placeholders: BTreeSet<ContainerId>,
    pub(super) new: NewState,
}
impl Progress {
    /// As a restart finds it that another process began.
    pub(super) fn from_found(member: &Member, found: &[Found]) -> Self {
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
                FoundState::Running if seen.new => {
                    progress.new = NewState::Running(seen.id.clone())
                }
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
}
