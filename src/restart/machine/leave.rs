//! Leaves a restart that cannot go on as planned: the kubelet starts what it starts, or the pod fails, all of it.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::Machine;
use super::progress::{OldState, Progress};
use super::terms::{Effect, MOST_AGAIN, Phase};
use crate::ids::{ContainerId, ExitCode};
use crate::kube::{ContainerKind, RestartPolicy};
use crate::plan::{Starter, Way};
use crate::times::{AGAIN_LIMIT, HALVED_LIMIT, LONGEST_RECORDING, STOP_LIMIT};

impl Machine {
    /// Nothing that is started in a pod that the kubelet takes for failed would last. It may have seen the others wait, and
    /// starts what is gone: the pod is made to fail then (see `is_halved`).
    pub(super) fn fail(&mut self, now: Instant) {
        self.failing = true;
        self.left = true;
        self.plan.starter = Starter::Kubelet("nothing shielded it in time".into());
        self.plan.way = Way::Shielded;
        let mut progress = self.progress.iter();
        let gone = progress.any(|it| it.is_new() || it.was_removed());
        let whole = self.plan.is_whole_pod() && (gone || (self.killed && !self.all_down()));
        self.ends_by = Some(if whole {
            self.ends_at(now)
        } else {
            now + LONGEST_RECORDING
        });
        self.enter(Phase::Up, now);
        self.announce(false);
        self.release_all();
        self.remove_all_unstarted();
    }

    /// Containers run that were not to start yet: the gate was not there. The kubelet will not run init
    /// containers while a regular one runs, so nothing but another generation leads to the start order.
    pub(super) fn again(&mut self, recent: bool, now: Instant) {
        if recent && self.plan.again < MOST_AGAIN {
            let why = "containers were started out of order while the gate was away";
            self.begin_anew(true, why.into());
        } else {
            self.leave_rest(now);
        }
    }

    pub(super) fn begin_anew(&mut self, disturbed: bool, why: String) {
        self.phase = Phase::Over;
        self.effects.push(Effect::BeginAnew { disturbed, why });
    }

    /// The kubelet goes on by itself; what is left is to take away what shields a container until it has started.
    pub(super) fn leave_rest(&mut self, now: Instant) {
        for it in &mut self.progress {
            it.missed_until = None;
            // To the kubelet it has failed, and hides what shields the one before it.
            self.effects.extend(it.stillborn.take().map(Effect::Remove));
            let Some(made) = it.made.take() else { continue };
            let had_completed = it.old_exit == Some(ExitCode::SUCCESS);
            if it.is(ContainerKind::Init) && had_completed {
                // There is no exit to hide, and a kubelet that sees it wait waits with it
                // (`computeInitContainerActions`, `pkg/kubelet/kuberuntime/kuberuntime_container.go`).
                self.effects.push(Effect::Remove(made));
            } else if it.placeholders.is_empty() && it.coming == 0 {
                it.placeholders.insert(made, None);
            } else if it.placeholders.is_empty() {
                // Until they stand (see `remove_outnumbered`).
                it.made = Some(made);
                let lacks = it.lacks_placeholders();
                self.effects.extend(it.shield(lacks));
            } else {
                // The kubelet counts from the placeholder, and would take the number that the attempt has.
                self.effects.push(Effect::Remove(made));
                let lacks = it.lacks_placeholders();
                self.effects.extend(it.shield(lacks));
            }
        }
        self.left = true;
        self.ends_by = Some(self.ends_at(now));
        self.plan.way = Way::Shielded;
        self.enter(Phase::Up, now);
        self.announce_down();
        self.release_all();
        self.remove_unstarted(Progress::is_new);
        self.end_hidden();
    }

    /// What runs behind its shields is ended: the kubelet has seen it wait, and starts it. Where it may have yet to see that,
    /// it goes on as it is.
    pub(super) fn end_hidden(&mut self) {
        let runs = |it: &&mut Progress| it.old == OldState::Running && !it.told && !it.is_new();
        for it in self.progress.iter_mut().filter(runs) {
            let shields = it.placeholders.keys().cloned();
            if it.lacks_shield() {
                self.effects.extend(shields.map(Effect::Remove));
            } else if it.standing() > 0 {
                it.told = true;
                self.effects
                    .extend(it.member.old_id().cloned().map(Effect::Kill));
            }
        }
    }

    /// Whether it goes on as without the plugin: it was not started again, and nothing stands before it.
    pub(super) fn is_left(&self, it: &Progress) -> bool {
        let has_ended = it.member.is_to_run && it.old_has_ended();
        let was_to_wait = it.member.placeholders > 0 || has_ended;
        let was_to_end = it.old == OldState::Running;
        self.left
            && (was_to_wait || was_to_end)
            && !it.is_new()
            && (it.coming == 0 || self.failing)
            && it.unstarted().next().is_none()
    }

    /// Whether the pod would go on with some of its containers for ever: the kubelet has seen the exit of one that it does
    /// not start again (`ShouldContainerBeRestarted`, `pkg/kubelet/container/helpers.go`), and no status is recorded in
    /// which that runs after all.
    pub(super) fn is_halved(&self) -> bool {
        let seen_for_good = |it: &Progress| {
            it.is(ContainerKind::Regular)
                && it.member.restart_policy == RestartPolicy::Never
                && it.member.is_to_run
                && it.old_has_ended()
                && self.is_left(it)
        };
        self.plan.is_whole_pod() && self.progress.iter().any(seen_for_good)
    }

    /// How long after the decision a plugin that comes back begins anew what is out of order; `halved`: see the limits.
    pub(super) fn time_to_begin_anew(&self, halved: bool) -> Duration {
        self.plan.grace() + if halved { HALVED_LIMIT } else { AGAIN_LIMIT }
    }

    /// When what is told to stop now has ended.
    fn ends_at(&self, now: Instant) -> Instant {
        now + self.plan.grace() + STOP_LIMIT
    }

    /// Until when something may end that another process has told to stop, or be started by a kubelet that has seen it wait.
    pub(super) fn may_change_until(&self, now: Instant) -> Option<Instant> {
        let seen = (self.failing && !self.leftovers().is_empty()).then(|| now + LONGEST_RECORDING);
        let may_end = self.failing || (self.plan.is_whole_pod() && !self.all_down());
        let until = self.ends_by.filter(|&until| may_end && now < until);
        until.max(seen)
    }

    /// The new attempts of regular containers that run.
    pub(super) fn running_regulars(&self) -> impl Iterator<Item = &ContainerId> {
        let progress = self.progress.iter();
        let regulars = progress.filter(|it| it.is(ContainerKind::Regular));
        regulars.filter_map(Progress::running)
    }

    /// Ends what runs of a pod that can only fail.
    pub(super) fn kill_halved(&mut self) {
        if self.is_halved() {
            let running: BTreeSet<ContainerId> = self.running_regulars().cloned().collect();
            let kills = running.difference(&self.ending).cloned();
            self.effects.extend(kills.map(Effect::Kill));
            self.ending.extend(running);
        }
    }
}
