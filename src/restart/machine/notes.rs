//! Taking note of what happened to the containers of a restart.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::Machine;
use super::progress::{NewState, OldState, Progress};
use super::terms::{Effect, Phase, WAKER};
use super::waker::Waker;
use crate::ids::{ContainerId, ContainerName, ExitCode};
use crate::plan::Way;
use crate::times::{LONGEST_RECORDING, SHIELD_TIME, TRUST_TIME, time_of_relist, time_of_shielding};

impl Machine {
    pub(super) fn get(&self, name: &ContainerName) -> Option<&Progress> {
        self.progress.iter().find(|it| it.member.name == *name)
    }

    pub(super) fn get_mut(&mut self, name: &ContainerName) -> Option<&mut Progress> {
        self.progress.iter_mut().find(|it| it.member.name == *name)
    }

    /// The container whose newest attempt that was when the restart was decided.
    pub(super) fn of_old(&self, id: &ContainerId) -> Option<&Progress> {
        let mut progress = self.progress.iter();
        progress.find(|it| it.member.old_id() == Some(id))
    }

    pub(super) fn of_old_mut(&mut self, id: &ContainerId) -> Option<&mut Progress> {
        let mut progress = self.progress.iter_mut();
        progress.find(|it| it.member.old_id() == Some(id))
    }

    pub(super) fn set_old(&mut self, id: &ContainerId, state: OldState) {
        if let Some(it) = self.of_old_mut(id)
            && !it.old_is_gone()
        {
            it.old = state;
        }
    }

    /// What was started again, and told to stop, has ended.
    pub(super) fn stopped(&mut self, id: &ContainerId) {
        if !self.ending.remove(id) {
            return;
        }
        let mut progress = self.progress.iter_mut();
        if let Some(it) = progress.find(|it| it.running() == Some(id)) {
            it.new = NewState::Ended(id.clone(), None);
        }
    }

    pub(super) fn ended(
        &mut self,
        name: &ContainerName,
        id: &ContainerId,
        code: Option<ExitCode>,
        now: Instant,
    ) {
        self.ending.remove(id);
        if self.of_old(id).is_some() {
            self.old_ended(id, code);
        } else if let Some(index) = self.index_of_new(name, id) {
            let it = &mut self.progress[index];
            it.made.take_if(|made| made == id);
            let known = match &it.new {
                NewState::Ended(new, known) if new == id => *known,
                _ => None,
            };
            it.new = NewState::Ended(id.clone(), code.or(known));
            self.replaced(index, now);
        }
    }

    /// The code of an exit may be known only after its release. If it is one that the kubelet would leave alone, the
    /// container is removed after the others.
    fn old_ended(&mut self, id: &ContainerId, code: Option<ExitCode>) {
        let stays = |it: &Self| it.of_old(id).is_some_and(|of| !it.is_cleared_away(of));
        let stayed = stays(self);
        if let Some(it) = self.of_old_mut(id) {
            it.old_exit = it.old_exit.or(code);
        }
        if stayed && !stays(self) && matches!(self.phase, Phase::Clear | Phase::Up) {
            self.effects.push(Effect::Release(vec![id.clone()]));
            self.remove_olds(|_, it| it.member.old_id() == Some(id));
        }
    }

    /// The member of that name, if this is no attempt from before the restart.
    fn index_of_new(&self, name: &ContainerName, id: &ContainerId) -> Option<usize> {
        let mut progress = self.progress.iter();
        let index = progress.position(|it| it.member.name == *name)?;
        (!self.plan.knew(id)).then_some(index)
    }

    pub(super) fn gone(&mut self, id: &ContainerId, now: Instant) {
        let mut progress = self.progress.iter();
        let hidden =
            |it: &Progress| !it.placeholders.is_empty() && it.attempts().any(|of| of == id);
        if progress.any(hidden) {
            let relist = now + self.relist;
            self.exits_told_until = self.exits_told_until.max(Some(relist));
        }
        if let Some(it) = self.of_old_mut(id) {
            it.old = OldState::Gone;
        }
        self.stopped(id);
        self.stray_is_gone(id);
        if self.waker.id() == Some(id) {
            self.waker = Waker::None;
        }
        let mut lost = None;
        for index in 0..self.progress.len() {
            let it = &mut self.progress[index];
            if it.older.remove(id) && it.removing && it.older.is_empty() {
                let newest = it.remove();
                self.effects.extend(newest);
            }
            if it.made.take_if(|made| made == id).is_some() {
                it.missed_until = None;
                // Where the kubelet was faster, it is removed for that.
                lost = lost.or_else(|| (!it.is_new()).then(|| it.member.name.clone()));
            }
            let shield = it.placeholders.remove(id).is_some();
            it.going.remove(id);
            // Whoever tidies up on a node takes what was never started for dead. Another takes its place, also just
            // after the release.
            if shield && !it.old_is_gone() && self.is_shielding(&self.progress[index]) {
                let it = &mut self.progress[index];
                let shields = it.shield(it.lacks_placeholders());
                if self.phase == Phase::Down && !shields.is_empty() {
                    self.deadline = self.deadline.max(now + SHIELD_TIME);
                }
                self.effects.extend(shields);
            }
        }
        if let Some(name) = lost.filter(|_| self.phase == Phase::Replay) {
            self.give_up(format!("{name}: its attempt is gone"), now);
        }
    }

    /// `listed`: when the kubelet has listed it, unless the pod's status says so before.
    pub(super) fn made(&mut self, name: &ContainerName, id: ContainerId, listed: Instant) {
        let replays = self.phase == Phase::Replay;
        self.replay.unanswered.remove(name);
        match self.get_mut(name) {
            Some(it) if replays && !it.is_new() => {
                it.made = Some(id);
                it.missed_until = Some(listed);
                if it.is_to_hide() {
                    self.let_nothing_be_seen_before(listed);
                }
            }
            // The kubelet may have been faster while no gate was there.
            _ => self.effects.push(Effect::Remove(id)),
        }
    }

    pub(super) fn placeholder_made(
        &mut self,
        name: &ContainerName,
        id: ContainerId,
        took: Duration,
        now: Instant,
    ) {
        // A pod of which the kubelet has seen an exit it looks at again and again, and it may be about to at any moment.
        let shown = self.progress.iter().any(|it| it.shown.is_some());
        let recording = if shown {
            LONGEST_RECORDING
        } else {
            time_of_shielding(took)
        };
        self.relist = self.relist.max(time_of_relist(took));
        let wanted = self.wants_shield(name);
        self.comes_no_more(name);
        if *name == WAKER.into() && wanted {
            self.waker = Waker::standing(id, now);
        } else {
            self.add_placeholder(name, id.clone(), Some(now + recording));
            if !wanted {
                // Too late to shield anything.
                self.effects.push(Effect::Remove(id));
            }
        }
    }

    pub(super) fn comes_no_more(&mut self, name: &ContainerName) {
        if let Some(it) = self.get_mut(name) {
            it.coming = it.coming.saturating_sub(1);
        }
    }

    /// The kubelet has listed these, and whatever it lists from now on has them as well.
    pub(super) fn recorded(&mut self, ids: &BTreeSet<ContainerId>, now: Instant) {
        let mut all = true;
        for it in &mut self.progress {
            let newest = it.new.id().or(it.made.as_ref());
            if newest.is_some_and(|id| ids.contains(id)) {
                it.missed_until = it.missed_until.map(|until| until.min(now));
            } else {
                all = false;
            }
            // And those of the same container that were there before.
            let shields = &mut it.placeholders;
            let listed = shields.iter().filter(|(id, _)| ids.contains(id));
            if let Some(last) = listed.filter_map(|(_, until)| *until).max() {
                for until in shields.values_mut() {
                    until.take_if(|until| *until <= last);
                }
            }
        }
        self.replay.seen_from.take_if(|_| all);
    }

    /// Whether this attempt waits to be started.
    pub(crate) fn is_to_start(&self, id: &ContainerId) -> bool {
        let mut progress = self.progress.iter();
        self.phase == Phase::Replay && progress.any(|it| it.made.as_ref() == Some(id))
    }

    /// Those that no relist can have missed any more hide what is behind them. Shortly before the exits are released they are
    /// taken to do so.
    pub(super) fn trust_placeholders(&mut self, now: Instant) {
        let ends = now + TRUST_TIME >= self.deadline;
        let progress = self.progress.iter_mut();
        for until in progress.flat_map(|it| it.placeholders.values_mut()) {
            until.take_if(|from| ends || now >= *from);
        }
    }

    /// When that is next to be looked at.
    pub(super) fn trusted_from(&self) -> Option<Instant> {
        let untrusted = self.progress.iter().flat_map(Progress::untrusted);
        let ends = self.deadline.checked_sub(TRUST_TIME);
        let from = untrusted.min().copied()?;
        Some(ends.map_or(from, |ends| ends.min(from)))
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
        if let Some(it) = self.get_mut(name) {
            it.placeholders.insert(id, untrusted_until);
        }
    }

    /// A placeholder that is to go shields nothing any more, whatever is wanted before it is gone.
    pub(super) fn note_removals(&mut self) {
        for effect in &self.effects {
            let Effect::Remove(id) = effect else { continue };
            let mut shielded = self.progress.iter_mut();
            if let Some(it) = shielded.find(|it| it.placeholders.contains_key(id)) {
                it.going.insert(id.clone());
            }
        }
    }

    pub(super) fn started(&mut self, name: &ContainerName, id: ContainerId, now: Instant) {
        let Some(index) = self.index_of_new(name, &id) else {
            return;
        };
        let it = &mut self.progress[index];
        // The news of its end may have been faster.
        if matches!(&it.new, NewState::Ended(ended, _) if *ended == id) {
            return;
        }
        it.made.take_if(|made| *made == id);
        it.new = NewState::Running(id);
        it.started = Some(now);
        self.replaced(index, now);
    }

    /// A container that has started needs its placeholders no more, nor another attempt: with them gone, the old one is
    /// its `lastState`.
    fn replaced(&mut self, index: usize, now: Instant) {
        let it = &mut self.progress[index];
        // One that the kubelet made was there after it was admitted, and before it started.
        let took = it.started.zip(it.admitted);
        let took = took.map_or(Duration::ZERO, |(started, admitted)| {
            started.saturating_duration_since(admitted)
        });
        let by = now + self.relist.max(time_of_relist(took));
        it.missed_until.get_or_insert(by);
        self.unshield(now);
    }

    /// Removes attempts that shielded until placeholders stand: the kubelet counts from these, and would take the number that the
    /// attempt has.
    pub(super) fn remove_outnumbered(&mut self) {
        let up = self.phase == Phase::Up;
        for it in self.progress.iter_mut().filter(|_| up) {
            let stands = it.lacks_placeholders() == 0 && it.untrusted().next().is_none();
            let made = it.made.take_if(|_| stands && !it.placeholders.is_empty());
            self.effects.extend(made.map(Effect::Remove));
        }
    }

    /// Removes what shielded containers that have started. Where the pod could be taken for failed, it stays until no relist
    /// is under way that has listed neither it nor what has started.
    pub(super) fn unshield(&mut self, now: Instant) {
        for index in 0..self.progress.len() {
            let until = self.shields_until(&self.progress[index]);
            let stays = until.is_some_and(|until| now < until);
            let it = &mut self.progress[index];
            if it.is_new() && !stays && it.missed_until.take().is_some() {
                let removals = it.unstarted().cloned().map(Effect::Remove);
                self.effects.extend(removals);
            }
        }
    }

    /// When no relist tells any more of exits that were removed: what shielded them can go.
    pub(super) fn exits_forgotten_from(&self) -> Option<Instant> {
        let clears = self.plan.way != Way::Shielded && !self.placeholders_going;
        let cleared = clears && matches!(self.phase, Phase::Clear | Phase::Up);
        let goes = cleared || self.is_removing_undone();
        self.exits_told_until.filter(|_| goes)
    }

    /// When what shields containers that have started can go.
    pub(super) fn unshields_from(&self) -> Option<Instant> {
        let progress = self.progress.iter();
        progress.filter_map(|it| self.shields_until(it)).min()
    }

    /// Until when what shields that container stays after its start: its exit can be seen, and is not to be.
    fn shields_until(&self, it: &Progress) -> Option<Instant> {
        let seen = !self.hides(it);
        let matters =
            it.is_to_hide() && it.is_new() && it.unstarted().next().is_some() && !it.old_is_gone();
        it.missed_until.filter(|_| seen && matters)
    }
}
