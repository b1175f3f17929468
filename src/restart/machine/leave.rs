//! Leaves a restart that cannot go on as planned: the kubelet starts what it starts, or the pod fails, all of it.

use std::time::{Duration, Instant};

use super::Machine;
use super::progress::{NewState, OldState};
use super::terms::{Effect, MOST_AGAIN, Phase};
use crate::ids::ContainerId;
use crate::kube::{ContainerKind, RestartPolicy};
use crate::restart::plan::{Old, Starter, Way};
use crate::restart::times::{RELIST_INTERVAL, STOP_LIMIT};

impl Machine {
    /// Nothing that is started in a pod that the kubelet takes for failed would last. It may have seen the others wait, and
    /// starts what is gone: the pod is made to fail then (see `is_halved`).
    pub(super) fn fail(&mut self, now: Instant, effects: &mut Vec<Effect>) {
        self.failing = true;
        self.left = true;
        self.plan.starter = Starter::Kubelet("nothing shielded it in time".into());
        self.plan.way = Way::Shielded;
        let mut progress = self.progress.iter();
        let gone = progress.any(|it| it.new != NewState::None || it.old == Some(OldState::Gone));
        let whole = self.plan.is_whole_pod() && (gone || (self.killed && !self.all_down()));
        self.ends_by = Some(if whole {
            self.ends_at(now)
        } else {
            now + RELIST_INTERVAL
        });
        self.enter(Phase::Up, now, effects);
        effects.extend(self.announce(false));
        effects.push(Effect::Release(self.olds()));
        effects.extend(self.removals_of_placeholders());
        effects.extend(self.removals_of_unstarted());
    }

    /// Containers run that were not to start yet: the gate was not there. The kubelet will not run init
    /// containers while a regular one runs, so nothing but another generation leads to the start order.
    pub(super) fn again(&mut self, recent: bool, now: Instant) -> Vec<Effect> {
        if recent && self.plan.again < MOST_AGAIN {
            self.phase = Phase::Over;
            return vec![Effect::Again];
        }
        self.leave_rest(now)
    }

    /// The kubelet goes on by itself; what is left is to take away what shields a container until it has started.
    pub(super) fn leave_rest(&mut self, now: Instant) -> Vec<Effect> {
        let mut effects = Vec::new();
        for index in 0..self.progress.len() {
            let progress = &mut self.progress[index];
            progress.missed_until = None;
            if progress.placeholders.is_empty() {
                let made = progress.made.take().map(|id| (id, None));
                progress.placeholders.extend(made);
            } else if let Some(made) = progress.made.take() {
                // The kubelet counts from the placeholder, and would take the number that the attempt has.
                effects.push(Effect::Remove(made));
                effects.extend(self.shields_of(index));
            }
        }
        self.left = true;
        self.ends_by = Some(self.ends_at(now));
        self.plan.way = Way::Shielded;
        self.enter(Phase::Up, now, &mut effects);
        effects.extend(self.announce_down());
        effects.push(Effect::Release(self.olds()));
        effects.extend(self.removals_of_replaced());
        effects.extend(self.advance(now));
        effects
    }

    /// Whether it goes on as without the plugin: it was not started again, and nothing stands before it.
    pub(super) fn is_left(&self, index: usize) -> bool {
        let progress = &self.progress[index];
        let was_to_wait = self.plan.members[index].placeholders > 0;
        let was_to_end = progress.old == Some(OldState::Running);
        self.left
            && (was_to_wait || was_to_end)
            && progress.new == NewState::None
            && (progress.coming == 0 || self.failing)
            && progress.unstarted().next().is_none()
    }

    /// Whether the pod would go on with some of its containers for ever: the kubelet has seen the exit of one that it does
    /// not start again (`ShouldContainerBeRestarted`, `pkg/kubelet/container/helpers.go`), and no status is recorded in
    /// which that runs after all.
    pub(super) fn is_halved(&self) -> bool {
        let seen_for_good = |index: usize| {
            let member = &self.plan.members[index];
            let ran = |old: &Old| old.exit.is_none() || old.id == self.plan.trigger.container;
            member.kind == ContainerKind::Regular
                && member.restart_policy == RestartPolicy::Never
                && member.old.as_ref().is_some_and(ran)
                && matches!(
                    self.progress[index].old,
                    Some(OldState::Held | OldState::Exited)
                )
                && self.is_left(index)
        };
        self.plan.is_whole_pod() && (0..self.progress.len()).any(seen_for_good)
    }

    /// When what is told to stop now has ended.
    fn ends_at(&self, now: Instant) -> Instant {
        now + Duration::from_millis(self.plan.grace_ms) + STOP_LIMIT
    }

    /// Until when something may end that another process has told to stop, or be started by a kubelet that has seen it wait.
    pub(super) fn may_change_until(&self, now: Instant) -> Option<Instant> {
        let seen = (self.failing && !self.leftovers().is_empty()).then(|| now + RELIST_INTERVAL);
        let may_end = self.failing || (self.plan.is_whole_pod() && !self.all_down());
        let until = self.ends_by.filter(|&until| may_end && now < until);
        until.max(seen)
    }

    /// The new attempts of regular containers that run.
    pub(super) fn running_regulars(&self) -> impl Iterator<Item = &ContainerId> {
        let members = self.members();
        let regulars = members.filter(|(member, _)| member.kind == ContainerKind::Regular);
        regulars.filter_map(|(_, progress)| match &progress.new {
            NewState::Running(id) => Some(id),
            NewState::None | NewState::Ended(..) => None,
        })
    }

    /// What runs of a pod that can only fail.
    pub(super) fn kills_of_halved(&mut self) -> Vec<Effect> {
        if !self.is_halved() {
            return Vec::new();
        }
        let running: Vec<ContainerId> = self.running_regulars().cloned().collect();
        let news = running.into_iter();
        news.filter(|id| self.ending.insert(id.clone()))
            .map(Effect::Kill)
            .collect()
    }
}
