//! Taking note of what happened to the containers of a restart.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::Machine;
use super::progress::{NewState, OldState, Progress};
use super::terms::{Effect, Phase};
use crate::ids::{ContainerId, ContainerName, ExitCode};
use crate::kube::{ContainerKind, RestartPolicy};
use crate::restart::times::{
    LONGEST_RECORDING, SHIELD_TIME, TRUST_TIME, time_of_recording, time_of_relist,
};

impl Machine {
    pub(super) fn index_of(&self, name: &ContainerName) -> Option<usize> {
        self.plan
            .members
            .iter()
            .position(|member| member.name == *name)
    }

    pub(super) fn index_of_old(&self, id: &ContainerId) -> Option<usize> {
        self.plan
            .members
            .iter()
            .position(|member| member.old.as_ref().is_some_and(|old| old.id == *id))
    }

    pub(super) fn old_id(&self, index: usize) -> Option<ContainerId> {
        self.plan.members[index]
            .old
            .as_ref()
            .map(|old| old.id.clone())
    }

    /// Those from before the restart. A replay that fell back has made old ones older.
    pub(super) fn attempts_of(&self, index: usize) -> impl Iterator<Item = ContainerId> {
        let older = self.plan.members[index].older.iter().cloned();
        self.old_id(index).into_iter().chain(older)
    }

    pub(super) fn olds(&self) -> Vec<ContainerId> {
        let members = 0..self.progress.len();
        members.flat_map(|index| self.attempts_of(index)).collect()
    }

    pub(super) fn set_old(&mut self, id: &ContainerId, state: OldState) {
        if let Some(index) = self.index_of_old(id)
            && self.progress[index].old != Some(OldState::Gone)
        {
            self.progress[index].old = Some(state);
        }
    }

    /// What was started again, and told to stop, has ended.
    pub(super) fn stopped(&mut self, id: &ContainerId) {
        if !self.ending.remove(id) {
            return;
        }
        let mut news = self.progress.iter_mut().map(|it| &mut it.new);
        if let Some(new) = news.find(|new| **new == NewState::Running(id.clone())) {
            *new = NewState::Ended(id.clone(), None);
        }
    }

    pub(super) fn ended(
        &mut self,
        name: &ContainerName,
        id: ContainerId,
        code: Option<ExitCode>,
        now: Instant,
    ) -> Vec<Effect> {
        self.ending.remove(&id);
        if let Some(index) = self.index_of_old(&id) {
            let stays = !self.is_cleared_away(index);
            self.progress[index].old_exit = self.progress[index].old_exit.or(code);
            return self
                .not_to_stay(index)
                .filter(|_| stays)
                .unwrap_or_default();
        }
        let Some(index) = self.index_of_new(name, &id) else {
            return Vec::new();
        };
        let progress = &mut self.progress[index];
        progress.made.take_if(|made| *made == id);
        let known = match &progress.new {
            NewState::Ended(new, known) if *new == id => *known,
            _ => None,
        };
        progress.new = NewState::Ended(id, code.or(known));
        self.replaced(index, now)
    }

    /// The code of an exit may be known only after its release. If it is one that the kubelet would leave alone, the
    /// container is removed after the others.
    fn not_to_stay(&self, index: usize) -> Option<Vec<Effect>> {
        let cleared = matches!(self.phase, Phase::Clear | Phase::Up) && self.is_cleared_away(index);
        let id = self.old_id(index).filter(|_| cleared)?;
        let mut effects = vec![Effect::Release(vec![id])];
        effects.extend(self.removals_of(index));
        Some(effects)
    }

    /// The member of that name, if this is no attempt from before the restart.
    fn index_of_new(&self, name: &ContainerName, id: &ContainerId) -> Option<usize> {
        let index = self.index_of(name)?;
        let before = self.plan.members[index].older.contains(id) || self.index_of_old(id).is_some();
        (!before).then_some(index)
    }

    pub(super) fn gone(&mut self, id: &ContainerId, now: Instant) -> Vec<Effect> {
        if let Some(index) = self.index_of_old(id) {
            self.progress[index].old = Some(OldState::Gone);
        }
        self.stopped(id);
        self.waker.take_if(|waker| waker == id);
        let mut effects = Vec::new();
        for index in 0..self.progress.len() {
            let name = self.plan.members[index].name.clone();
            let progress = &mut self.progress[index];
            progress.older.remove(id);
            if progress.made.take_if(|made| made == id).is_some() {
                progress.missed_until = None;
            }
            let shield = progress.placeholders.remove(id).is_some();
            let seen = progress.old != Some(OldState::Gone);
            // Whoever tidies up on a node takes what was never started for dead. Another takes its place, also just
            // after the release.
            if shield && seen && self.is_shielding(&name) {
                let shields = self.shields_of(index);
                if self.phase == Phase::Down && !shields.is_empty() {
                    self.deadline = self.deadline.max(now + SHIELD_TIME);
                }
                effects.extend(shields);
            }
        }
        effects
    }

    /// `listed`: when the kubelet has listed it, unless the pod's status says so before.
    pub(super) fn made(
        &mut self,
        name: &ContainerName,
        id: ContainerId,
        listed: Instant,
    ) -> Vec<Effect> {
        // The kubelet may have been faster while no gate was there.
        let wanted = |index: &usize| {
            self.phase == Phase::Replay && self.progress[*index].new == NewState::None
        };
        match self.index_of(name).filter(wanted) {
            Some(index) => {
                self.progress[index].made = Some(id);
                self.progress[index].missed_until = Some(listed);
                self.let_nothing_be_seen_before(listed, index);
                Vec::new()
            }
            None => vec![Effect::Remove(id)],
        }
    }

    /// When the kubelet has listed a placeholder that took so long to make, unless the pod's status says so before. A pod of
    /// which it has seen an exit it looks at again and again, and it may be about to at any moment.
    pub(super) fn listed_by(&self, took: Duration, now: Instant) -> Instant {
        let shown = self.progress.iter().any(|it| it.shown);
        now + if shown {
            LONGEST_RECORDING
        } else {
            time_of_recording(took)
        }
    }

    /// The kubelet has listed these, and whatever it lists from now on has them as well.
    pub(super) fn recorded(&mut self, ids: &BTreeSet<ContainerId>, now: Instant) {
        let mut all = true;
        for progress in &mut self.progress {
            let newest = match &progress.new {
                NewState::None => progress.made.as_ref(),
                NewState::Running(id) | NewState::Ended(id, _) => Some(id),
            };
            if newest.is_some_and(|id| ids.contains(id)) {
                progress.missed_until = progress.missed_until.map(|until| until.min(now));
            } else {
                all = false;
            }
            // And those of the same container that were there before.
            let shields = progress.placeholders.iter();
            let listed = shields.filter(|(id, _)| ids.contains(id));
            if let Some(until) = listed.filter_map(|(_, until)| *until).max() {
                for it in progress.placeholders.values_mut() {
                    it.take_if(|it| *it <= until);
                }
            }
        }
        self.replay.seen_from.take_if(|_| all);
    }

    /// Whether this attempt waits to be started.
    #[must_use]
    pub fn is_to_start(&self, id: &ContainerId) -> bool {
        let mut made = self.progress.iter().filter_map(|it| it.made.as_ref());
        self.phase == Phase::Replay && made.any(|made| made == id)
    }

    /// Those that no relist can have missed any more hide what is behind them. Shortly before the exits are released they are
    /// taken to do so.
    pub(super) fn trust_placeholders(&mut self, now: Instant) {
        let ends = now + TRUST_TIME >= self.deadline;
        let placeholders = self
            .progress
            .iter_mut()
            .flat_map(|it| it.placeholders.values_mut());
        for until in placeholders {
            until.take_if(|from| ends || now >= *from);
        }
    }

    /// When that is next to be looked at.
    pub(super) fn trusted_from(&self) -> Option<Instant> {
        let untrusted = self.progress.iter().flat_map(Progress::untrusted);
        let ends = self.deadline.checked_sub(TRUST_TIME);
        untrusted
            .min()
            .map(|from| ends.map_or(*from, |ends| ends.min(*from)))
    }

    /// Until when that placeholder may have been missed by a relist.
    pub(super) fn untrusted_until(&self, id: &ContainerId) -> Option<Instant> {
        let mut progress = self.progress.iter();
        progress.find_map(|it| *it.placeholders.get(id)?)
    }

    pub(super) fn add_placeholder(
        &mut self,
        name: &ContainerName,
        id: ContainerId,
        untrusted_until: Option<Instant>,
    ) {
        if let Some(index) = self.index_of(name) {
            let placeholders = &mut self.progress[index].placeholders;
            placeholders.insert(id, untrusted_until);
        }
    }

    pub(super) fn started(
        &mut self,
        name: &ContainerName,
        id: ContainerId,
        now: Instant,
    ) -> Vec<Effect> {
        let Some(index) = self.index_of_new(name, &id) else {
            return Vec::new();
        };
        // The news of its end may have been faster.
        if matches!(&self.progress[index].new, NewState::Ended(ended, _) if *ended == id) {
            return Vec::new();
        }
        let progress = &mut self.progress[index];
        progress.made.take_if(|made| *made == id);
        progress.new = NewState::Running(id);
        progress.started = Some(now);
        self.replaced(index, now)
    }

    /// A container that has started needs its placeholders no more, nor another attempt: with them gone, the old one is
    /// its `lastState`.
    pub(super) fn replaced(&mut self, index: usize, now: Instant) -> Vec<Effect> {
        let progress = &mut self.progress[index];
        // One that the kubelet made was there after it was admitted, and before it started.
        let took = progress.started.zip(progress.admitted);
        let took = took.map(|(started, admitted)| started.saturating_duration_since(admitted));
        let by = now + time_of_relist(took.unwrap_or_default());
        progress.missed_until.get_or_insert(by);
        self.unshield(now)
    }

    /// Removes what shielded containers that have started. Where the pod could be taken for failed, it stays until no relist
    /// is under way that has listed neither it nor what has started.
    pub(super) fn unshield(&mut self, now: Instant) -> Vec<Effect> {
        let mut effects = Vec::new();
        for index in 0..self.progress.len() {
            let until = self.shields_until(index).is_some_and(|until| now < until);
            let progress = &mut self.progress[index];
            if progress.new != NewState::None && !until && progress.missed_until.take().is_some() {
                effects.extend(progress.unstarted().cloned().map(Effect::Remove));
            }
        }
        effects
    }

    /// When what shields containers that have started can go.
    pub(super) fn unshields_from(&self) -> Option<Instant> {
        let all = 0..self.progress.len();
        all.filter_map(|index| self.shields_until(index)).min()
    }

    /// Until when what shields that container stays after its start: its exit can be seen, and is not to be.
    fn shields_until(&self, index: usize) -> Option<Instant> {
        let (member, progress) = (&self.plan.members[index], &self.progress[index]);
        let seen = self.old_id(index).is_some_and(|old| !self.holds(&old));
        let matters = member.kind == ContainerKind::Regular
            && member.restart_policy != RestartPolicy::Always
            && progress.new != NewState::None
            && progress.unstarted().next().is_some()
            && !progress.old_is_gone();
        progress.missed_until.filter(|_| seen && matters)
    }
}
