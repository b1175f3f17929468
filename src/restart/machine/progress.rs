//! How far each container of a restart is.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::terms::Effect;
use crate::exit_hold;
use crate::ids::{ContainerId, ExitCode};
use crate::kube::{ContainerKind, RestartPolicy};
use crate::node::{InstanceState, Instances, Maker};
use crate::plan::{Member, Old};
use crate::times::time_of_step;

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

impl NewState {
    /// The attempt.
    pub(super) fn id(&self) -> Option<&ContainerId> {
        match self {
            Self::None => None,
            Self::Running(id) | Self::Ended(id, _) => Some(id),
        }
    }
}

#[derive(Debug)]
pub(super) struct Progress {
    /// What it is, and how it was when the restart was decided.
    pub(super) member: Member,
    /// The attempt that it had then; `Gone` also if it had none.
    pub(super) old: OldState,
    /// The old one's code where it was learnt only after the decision.
    pub(super) old_exit: Option<ExitCode>,
    /// Attempts before the old one that are still there.
    pub(super) older: BTreeSet<ContainerId>,
    /// Since when its exit is held.
    pub(super) held_since: Option<Instant>,
    /// When its exit was released, while the pod waited for its turn, or for others to stop.
    pub(super) shown: Option<Instant>,
    /// The kubelet has wanted to create it since then: it has recorded that it waits.
    pub(super) wanted: bool,
    /// It has been told to stop.
    pub(super) told: bool,
    /// What ran before is being removed.
    pub(super) removing: bool,
    /// Placeholders that were asked for and are not there yet.
    pub(super) coming: usize,
    /// Each with the moment until which a relist of the kubelet may be under way that has not listed it; `None`: no longer.
    pub(super) placeholders: BTreeMap<ContainerId, Option<Instant>>,
    /// Those of them that are being removed.
    pub(super) going: BTreeSet<ContainerId>,
    /// An attempt that a replay has made and not started. Until then it is as good as a placeholder.
    pub(super) made: Option<ContainerId>,
    /// One whose start was cancelled.
    pub(super) stillborn: Option<ContainerId>,
    pub(super) new: NewState,
    /// Until then a relist may be under way that has not listed the new one.
    pub(super) missed_until: Option<Instant>,
    /// When the kubelet was let create the new one, if it was.
    pub(super) admitted: Option<Instant>,
    /// When the new one started, if that was under our eyes.
    pub(super) started: Option<Instant>,
}

impl Progress {
    pub(super) fn is(&self, kind: ContainerKind) -> bool {
        self.member.kind == kind
    }

    /// Whether the kubelet is not to see its exit: under Always it does no more than try to start again what it sees exited,
    /// and only under Never is a pod over with an init container that failed.
    pub(super) fn is_to_hide(&self) -> bool {
        match self.member.kind {
            ContainerKind::Init => self.member.may_fail_pod(self.old_exit),
            ContainerKind::Sidecar => false,
            ContainerKind::Regular => self.member.restart_policy != RestartPolicy::Always,
        }
    }

    /// All attempts from before the restart. A replay that fell back has made old ones older.
    pub(super) fn attempts(&self) -> impl Iterator<Item = &ContainerId> {
        self.member.old_id().into_iter().chain(&self.member.older)
    }

    /// Removes those of them that are still there. The last exit goes after those before it where nothing hides them: one of
    /// them would be taken for the last.
    pub(super) fn remove(&mut self) -> Vec<Effect> {
        self.removing = true;
        let waits = self.placeholders.is_empty() && !self.older.is_empty();
        let old = self
            .member
            .old_id()
            .filter(|_| !waits && !self.old_is_gone());
        let all = self.older.iter().chain(old).cloned();
        all.map(Effect::Remove).collect()
    }

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
        self.old == OldState::Gone
    }

    /// Whether it was in the runtime, and is no longer.
    pub(super) fn was_removed(&self) -> bool {
        self.member.old.is_some() && self.old_is_gone()
    }

    /// Whether the old one has ended, and is still there.
    pub(super) fn old_has_ended(&self) -> bool {
        matches!(self.old, OldState::Held | OldState::Exited)
    }

    /// Whether there is a new one that has run.
    pub(super) fn is_new(&self) -> bool {
        self.new != NewState::None
    }

    /// The new one, while it runs.
    pub(super) fn running(&self) -> Option<&ContainerId> {
        match &self.new {
            NewState::Running(id) => Some(id),
            NewState::None | NewState::Ended(..) => None,
        }
    }

    /// Until when the kubelet may be in the sync that has started it.
    pub(super) fn steps_until(&self) -> Option<Instant> {
        let (admitted, started) = self.admitted.zip(self.started)?;
        Some(started + time_of_step(started.saturating_duration_since(admitted)))
    }

    /// How many placeholders it lacks. One that is newer than an attempt that runs would hide it.
    pub(super) fn lacks_placeholders(&self) -> usize {
        let wanted = usize::from(self.member.placeholders);
        let wanted = if self.is_new() { 0 } else { wanted };
        wanted.saturating_sub(self.standing())
    }

    /// Placeholders that stay.
    pub(super) fn standing(&self) -> usize {
        self.placeholders.len() - self.going.len()
    }

    /// Whether its shields are missing. What is gone cannot be copied, and shows nothing that a shield could hide.
    pub(super) fn lacks_shield(&self) -> bool {
        !self.old_is_gone() && self.lacks_placeholders() + self.untrusted().count() > 0
    }

    /// How many shields it lacks, if its exit is seen before its attempt has been started. One that was made is as good as one.
    pub(super) fn lacks_shields(&self) -> usize {
        let lacks = if self.old_is_gone() {
            // There is no exit to hide, but it must be seen to wait.
            usize::from(!self.is_new() && self.placeholders.is_empty())
        } else {
            self.lacks_placeholders()
        };
        lacks.saturating_sub(usize::from(self.made.is_some()))
    }

    /// Whether it is an init container whose new attempt has failed.
    pub(super) fn has_failed(&self) -> bool {
        let failed =
            matches!(self.new, NewState::Ended(_, Some(code)) if code != ExitCode::SUCCESS);
        failed && self.is(ContainerKind::Init)
    }

    /// Asks for placeholders, of so many that it lacks for those that do not come yet.
    pub(super) fn shield(&mut self, lacks: usize) -> Vec<Effect> {
        let Some(old) = self.member.old_id() else {
            return Vec::new();
        };
        let missing = lacks.saturating_sub(self.coming);
        self.coming += missing;
        vec![Effect::MakePlaceholder(self.member.name.clone(), Some(old.clone())); missing]
    }

    /// Under `Kept`: what the kubelet would not run again if it saw it exited, or not in order. Sidecars it
    /// would restart before the init containers; those that completed it would leave.
    pub(super) fn goes_first(&self) -> bool {
        match self.member.kind {
            ContainerKind::Init | ContainerKind::Sidecar => true,
            ContainerKind::Regular => {
                self.member.restart_policy == RestartPolicy::OnFailure
                    && self.old_exit == Some(ExitCode::SUCCESS)
            }
        }
    }

    /// While nothing has been found of it.
    fn of(member: &Member) -> Self {
        Self {
            member: member.clone(),
            old: OldState::Gone,
            old_exit: member.old.as_ref().and_then(Old::code),
            older: BTreeSet::new(),
            held_since: None,
            shown: None,
            wanted: false,
            told: false,
            removing: false,
            coming: 0,
            placeholders: BTreeMap::new(),
            made: None,
            going: BTreeSet::new(),
            stillborn: None,
            new: NewState::None,
            missed_until: None,
            admitted: None,
            started: None,
        }
    }

    /// As it is when a restart is decided. `held`: exits that are held, and since when.
    pub(super) fn at_first(
        member: &Member,
        held: &BTreeMap<ContainerId, Instant>,
        found: &Instances,
        now: Instant,
    ) -> Self {
        let mut progress = Self::of(member);
        // While its exit is held it counts as running.
        let old = member.old_id().and_then(|old| found.get(old));
        if let Some(InstanceState::Ended(code)) = old.map(|it| it.state) {
            progress.old_exit = progress.old_exit.or(code);
        }
        progress.old = match &member.old {
            None => OldState::Gone,
            Some(old) if held.contains_key(&old.id) => OldState::Held,
            Some(old) if old.exit.is_some() => OldState::Exited,
            Some(_) => OldState::Running,
        };
        progress.older.extend(member.older.iter().cloned());
        // Those of a replay that has not ended are held as well. Where the hook has given up, there is no haste.
        let still = |since: &&Instant| now.saturating_duration_since(**since) < exit_hold::LIMIT;
        let since = progress.attempts().filter_map(|id| held.get(id));
        progress.held_since = since.filter(still).min().copied();
        progress
    }

    /// As a restart finds it that another process began.
    pub(super) fn from_found(member: &Member, found: &Instances) -> Self {
        let mut progress = Self::of(member);
        let old = member.old_id();
        let old_made = old.and_then(|old| found.get(old)).map(|it| it.created_at);
        for (id, seen) in found.iter().filter(|(_, seen)| seen.name == member.name) {
            let new = !member.knew(id);
            let newest = |other: Option<&ContainerId>| {
                let other = other.and_then(|other| found.get(other));
                other.is_none_or(|other| other.order() < seen.order())
            };
            match seen.state {
                _ if seen.is_placeholder() => {
                    // One that an earlier restart left shields nothing.
                    if old_made.is_none_or(|made| made < seen.created_at) {
                        progress.placeholders.insert(id.clone(), None);
                    }
                }
                InstanceState::Running if Some(id) == old => progress.old = OldState::Running,
                InstanceState::Ended(code) if Some(id) == old => {
                    progress.old = OldState::Exited;
                    progress.old_exit = progress.old_exit.or(code);
                }
                // Of two that run, the older is ended.
                InstanceState::Running if new => {
                    if newest(progress.running()) {
                        progress.new = NewState::Running(id.clone());
                    }
                }
                // Its start was cancelled with the process that asked for it: it has never run.
                InstanceState::Ended(Some(ExitCode::START_ERROR))
                    if new && seen.maker == Maker::Replay =>
                {
                    progress.stillborn = Some(id.clone());
                }
                InstanceState::Ended(code) if new => {
                    if progress.running().is_none() && newest(progress.new.id()) {
                        progress.new = NewState::Ended(id.clone(), code);
                    }
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
