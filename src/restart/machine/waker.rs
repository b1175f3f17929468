//! Wakes a kubelet that has something to start, and does not look: by a placeholder that is no container's, and that vanishes when
//! it has been listed.

use std::time::Instant;

use super::Machine;
use super::progress::Progress;
use super::terms::{Effect, Phase, WAKER};
use crate::ids::ContainerId;
use crate::kube::ContainerKind;
use crate::node::Instances;
use crate::plan::Way;
use crate::times::{NUDGE_INTERVAL, RELIST_INTERVAL};

#[derive(Debug, Default)]
pub(super) enum Waker {
    #[default]
    None,
    /// It is being made.
    Asked,
    /// Before that moment, the kubelet may not have listed it, and would not notice that it vanishes.
    Stands(ContainerId, Instant),
}

impl Waker {
    pub(super) fn standing(id: ContainerId, now: Instant) -> Self {
        Self::Stands(id, now + RELIST_INTERVAL)
    }

    /// One that another process has made.
    pub(super) fn from_found(found: &Instances, now: Instant) -> Self {
        let mut found = found.iter();
        let waker = found.find(|(_, it)| it.is_placeholder() && it.name == WAKER.into());
        waker.map_or(Self::None, |(id, _)| Self::standing(id.clone(), now))
    }

    pub(super) fn id(&self) -> Option<&ContainerId> {
        match self {
            Self::Stands(id, _) => Some(id),
            Self::None | Self::Asked => None,
        }
    }

    pub(super) fn is_wanted(&self) -> bool {
        !matches!(self, Self::None)
    }
}

impl Machine {
    /// Asks for it where the kubelet is to start something when the back-off is over, and nothing else wakes it: with `Cleared`,
    /// the removals do, unless they wait for a relist themselves.
    pub(super) fn want_waker(&mut self) {
        let removals_wake = self.plan.way == Way::Cleared && !self.plan.removals_show;
        if self.start_at.is_some() && !removals_wake && !self.replays() {
            self.ask_for_waker();
        }
    }

    /// When a kubelet that has been silent is woken: what it has seen long ago, or nobody has shown it, does not. While an init
    /// container or a startup probe runs, it waits for that.
    pub(super) fn nudged_from(&self) -> Option<Instant> {
        let runs_init = |it: &Progress| it.is(ContainerKind::Init) && it.running().is_some();
        let is_waited_for = |it: &Progress| runs_init(it) || self.probes(it);
        let busy = self.failing || self.start_at.is_some() || self.waker.is_wanted();
        let waits = self.is_the_kubelets() && self.progress.iter().any(|it| !self.settled(it));
        let silent = waits && !busy && !self.progress.iter().any(is_waited_for);
        self.heard.filter(|_| silent).map(|at| at + NUDGE_INTERVAL)
    }

    /// When it can go.
    pub(super) fn wakes_from(&self) -> Option<Instant> {
        match &self.waker {
            Waker::Stands(_, listed) if self.start_at.is_none() => {
                Some(*listed).filter(|_| self.is_the_kubelets())
            }
            _ => None,
        }
    }

    pub(super) fn wake(&mut self, now: Instant) {
        if self.wakes_from().is_some_and(|from| now >= from) {
            self.effects
                .extend(self.waker.id().cloned().map(Effect::Remove));
            self.waker = Waker::None;
            // It is being woken, and has its time from now on.
            self.heard = self.heard.map(|_| now);
        }
        if self.nudged_from().is_some_and(|from| now >= from) {
            self.heard = Some(now);
            self.ask_for_waker();
        }
    }

    /// Whether it is for the kubelet to do something.
    fn is_the_kubelets(&self) -> bool {
        matches!(self.phase, Phase::Shielded | Phase::Up)
    }

    fn ask_for_waker(&mut self) {
        let there = |it: &&Progress| !it.old_is_gone();
        let guard = self.guard().filter(there);
        let old = guard.or_else(|| self.progress.iter().find(there));
        let old = old.and_then(|it| it.member.old_id());
        let mut running = self.progress.iter().filter_map(Progress::running);
        let like = old.or_else(|| running.next()).cloned();
        if !self.waker.is_wanted() {
            let waker = Effect::MakePlaceholder(WAKER.into(), like);
            self.effects.push(waker);
            self.waker = Waker::Asked;
        }
    }
}
