//! Taking note of what happened to the containers of a restart.

use super::Machine;
use super::progress::{NewState, OldState};
use super::terms::Effect;
use crate::ids::{ContainerId, ContainerName, ExitCode};

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

    pub(super) fn is_exited(&self, name: &ContainerName) -> bool {
        self.index_of(name)
            .is_some_and(|index| self.progress[index].old == Some(OldState::Exited))
    }

    pub(super) fn olds(&self) -> Vec<ContainerId> {
        (0..self.progress.len())
            .filter_map(|index| self.old_id(index))
            .collect()
    }

    pub(super) fn set_old(&mut self, id: &ContainerId, state: OldState) {
        if let Some(index) = self.index_of_old(id)
            && self.progress[index].old != Some(OldState::Gone)
        {
            self.progress[index].old = Some(state);
        }
    }

    pub(super) fn ended(
        &mut self,
        name: &ContainerName,
        id: ContainerId,
        code: Option<ExitCode>,
    ) -> Vec<Effect> {
        if let Some(index) = self.index_of_old(&id) {
            self.progress[index].old_exit = self.progress[index].old_exit.or(code);
            return Vec::new();
        }
        let Some(index) = self.index_of_new(name, &id) else {
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

    /// The member of that name, if this is no attempt from before the restart.
    fn index_of_new(&self, name: &ContainerName, id: &ContainerId) -> Option<usize> {
        let index = self.index_of(name)?;
        let before = self.plan.members[index].older.contains(id) || self.index_of_old(id).is_some();
        (!before).then_some(index)
    }

    pub(super) fn gone(&mut self, id: &ContainerId) {
        if let Some(index) = self.index_of_old(id) {
            self.progress[index].old = Some(OldState::Gone);
        }
        for progress in &mut self.progress {
            progress.placeholders.remove(id);
            progress.older.remove(id);
        }
    }

    pub(super) fn add_placeholder(&mut self, name: &ContainerName, id: ContainerId) {
        if let Some(index) = self.index_of(name) {
            self.progress[index].placeholders.insert(id);
        }
    }

    pub(super) fn started(&mut self, name: &ContainerName, id: ContainerId) -> Vec<Effect> {
        let Some(index) = self.index_of_new(name, &id) else {
            return Vec::new();
        };
        self.progress[index].new = NewState::Running(id);
        self.replaced(index)
    }

    /// A container that has started needs its placeholders no more: with them gone, the old attempt is its
    /// `lastState`.
    pub(super) fn replaced(&self, index: usize) -> Vec<Effect> {
        let placeholders = self.progress[index].placeholders.iter().cloned();
        placeholders.map(Effect::Remove).collect()
    }
}
