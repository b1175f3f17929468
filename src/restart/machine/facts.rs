//! What a restart has come to, and what it wants next.

use std::collections::BTreeSet;
use std::time::Instant;

use super::Machine;
use super::progress::{NewState, OldState, Progress};
use super::terms::{Effect, Outcome, Phase, WAKER};
use crate::ids::{ContainerId, ContainerName, ExitCode};
use crate::kube::{ContainerKind, RestartPolicy};
use crate::node::{Instance, InstanceState, Instances, Maker};
use crate::plan::Way;
use crate::policy::Action;
use crate::times::RELIST_INTERVAL;

impl Machine {
    /// Asks for placeholders where there are fewer than are wanted. The guard's come first: they are what keeps a Never pod
    /// from being seen as stopped.
    pub(super) fn shield(&mut self, lacks: impl Fn(&Self, &Progress) -> usize) {
        let mut order: Vec<usize> = (0..self.progress.len()).collect();
        order.sort_by_key(|&index| !self.is_guard(&self.progress[index]));
        // One that nobody wants any more is not made.
        order.retain(|&index| self.is_shielding(&self.progress[index]));
        for index in order {
            let lacks = lacks(self, &self.progress[index]);
            self.effects.extend(self.progress[index].shield(lacks));
        }
    }

    /// What shields all that the kubelet is to see: before what is `undone`, or all else.
    pub(super) fn shield_all(&mut self, undone: bool) {
        self.shield(|it, of| {
            let is_meant = it.is_undone(of) == undone;
            if is_meant { of.lacks_placeholders() } else { 0 }
        });
    }

    /// Stops what runs, once. What is killed at once is shielded before.
    pub(super) fn kill_olds(&mut self) {
        if !self.killed {
            let twins = self.ending.iter().cloned();
            self.effects.extend(twins.map(Effect::Kill));
        }
        self.killed = true;
        self.end_olds(|machine, it| {
            let runs = it.old == OldState::Running && !it.told;
            let exposed = it.member.at_once && machine.is_exposed_in_wait(it);
            runs && !exposed && !machine.has_asked(it)
        });
    }

    /// Stops what ran before of these containers.
    pub(super) fn end_olds(&mut self, of: impl Fn(&Self, &Progress) -> bool) {
        for index in 0..self.progress.len() {
            let it = &self.progress[index];
            if let Some(id) = it.member.old_id().filter(|_| of(self, it)).cloned() {
                self.progress[index].told = true;
                self.effects.push(Effect::Kill(id));
            }
        }
    }

    /// Whether it is the container that asked for the restart by its exit.
    pub(super) fn has_asked(&self, it: &Progress) -> bool {
        let id = it.member.old_id();
        id.is_some_and(|id| self.plan.has_asked(id))
    }

    /// Removes what ran before of these containers.
    pub(super) fn remove_olds(&mut self, of: impl Fn(&Self, &Progress) -> bool) {
        for index in 0..self.progress.len() {
            if of(self, &self.progress[index]) {
                let removals = self.progress[index].remove();
                self.effects.extend(removals);
            }
        }
    }

    /// The exits that placeholders hide.
    pub(super) fn remove_shielded(&mut self) {
        self.remove_olds(|_, it| it.member.placeholders > 0);
    }

    /// What stands before these containers, or was to be started.
    pub(super) fn remove_unstarted(&mut self, of: impl Fn(&Progress) -> bool) {
        let these = self.progress.iter().filter(|it| of(it));
        let unstarted = these.flat_map(Progress::unstarted).cloned();
        self.effects.extend(unstarted.map(Effect::Remove));
    }

    /// Whatever has not been started, and nobody is to start any more.
    pub(super) fn remove_all_unstarted(&mut self) {
        let waker = self.waker.id().cloned();
        self.effects.extend(waker.map(Effect::Remove));
        self.remove_unstarted(|_| true);
    }

    /// Lets the exits of these containers be seen, those of the attempts before as well.
    pub(super) fn release(&mut self, of: impl Fn(&Self, &Progress) -> bool) {
        let these = self.progress.iter().filter(|it| of(self, it));
        let attempts = these.flat_map(Progress::attempts).cloned().collect();
        self.effects.push(Effect::Release(attempts));
    }

    pub(super) fn release_all(&mut self) {
        self.release(|_, _| true);
    }

    /// Whether a placeholder of that name is good for anything.
    pub(crate) fn wants_shield(&self, name: &ContainerName) -> bool {
        if *name == WAKER.into() {
            self.waker.is_wanted() && !self.failing
        } else {
            self.get(name).is_some_and(|it| self.is_shielding(it))
        }
    }

    /// Whether a placeholder of that container still keeps the kubelet from seeing it stopped.
    pub(super) fn is_shielding(&self, it: &Progress) -> bool {
        match self.phase {
            _ if self.failing || self.needs_no_shield(it) || it.is_new() => false,
            Phase::Down => !self.replays_at_once() || self.waits() || it.shown.is_some(),
            Phase::Shielded => true,
            Phase::Up => self.plan.way == Way::Shielded && (it.told || it.old != OldState::Running),
            Phase::Replay => self.shields_unstarted() || it.shown.is_some(),
            Phase::Clear | Phase::Over => false,
        }
    }

    pub(super) fn all_down(&self) -> bool {
        let mut progress = self.progress.iter();
        self.ending.is_empty() && progress.all(|it| it.old != OldState::Running)
    }

    /// Old attempts that run beside a newer one: the kubelet started that when nobody kept it from doing so. The trigger only
    /// seems to, while its exit is held.
    pub(super) fn twins(&self, found: &Instances) -> BTreeSet<ContainerId> {
        let runs = |id: &&ContainerId| {
            let instance = found.get(id);
            let runs = instance.is_some_and(|it| it.state == InstanceState::Running);
            runs && !self.plan.has_asked(id)
        };
        let older = self.plan.members.iter().flat_map(|it| &it.older);
        older.filter(runs).cloned().collect()
    }

    /// Since when the oldest of the containers that are to end has been there, at the latest.
    pub(super) fn running_since(&self, found: &Instances) -> Option<Instant> {
        let members = self.plan.members.iter().filter(|it| it.was_running());
        let running = members.filter_map(|it| found.get(it.old_id()?));
        running.map(|it| it.heard_at).min()
    }

    pub(super) fn guard(&self) -> Option<&Progress> {
        self.get(&self.plan.guard)
    }

    pub(super) fn is_guard(&self, it: &Progress) -> bool {
        it.member.name == self.plan.guard
    }

    pub(super) fn guard_stands(&self) -> bool {
        self.guard().is_none_or(|guard| !guard.lacks_shield())
    }

    /// Whether it was removed in the generation before this one, with what shielded it.
    pub(super) fn guard_is_gone(&self) -> bool {
        let guard = self.guard();
        guard.is_none_or(|guard| guard.old_is_gone() && guard.standing() == 0)
    }

    pub(super) fn is_cleared_away(&self, it: &Progress) -> bool {
        match self.plan.way {
            Way::Kept => it.goes_first(),
            Way::Shielded => false,
            Way::Cleared => true,
        }
    }

    pub(super) fn cleared(&self) -> bool {
        let mut away = self.progress.iter().filter(|it| self.is_cleared_away(it));
        let shields = |it: &Progress| !it.is_new() && it.unstarted().next().is_some();
        let stay = !self.placeholders_going;
        away.all(Progress::is_gone) && (stay || !self.progress.iter().any(shields))
    }

    /// Start order: each init container after those before it, regular ones after all (KEP-753).
    pub(super) fn is_turn_of(&self, it: &Progress) -> bool {
        self.has_turn(it, |kind| kind != ContainerKind::Regular)
    }

    /// The same after those of these kinds alone.
    fn has_turn(&self, it: &Progress, goes_first: impl Fn(ContainerKind) -> bool) -> bool {
        let mut first = self.before(it).filter(|it| goes_first(it.member.kind));
        self.plan.way == Way::Shielded || !self.plan.ordered || first.all(|it| self.passed(it))
    }

    pub(super) fn before(&self, it: &Progress) -> impl Iterator<Item = &Progress> {
        let mut progress = self.progress.iter();
        let place = progress.position(|other| other.member.name == it.member.name);
        self.progress.iter().take(place.unwrap_or_default())
    }

    /// While the kubelet sees a regular container, also a placeholder or one whose hook is about to return, it takes the
    /// pod for initialised: it starts the sidecars that it misses and goes on in the same sync, without waiting for their
    /// startup probes (`computePodActions`). It may have relisted in such a moment.
    pub(super) fn is_hasty(&self, it: &Progress, now: Instant) -> bool {
        let sidecars = self.before(it).filter(|it| it.is(ContainerKind::Sidecar));
        let mut probed = sidecars.filter(|it| it.member.startup_probe);
        probed.any(|it| it.steps_until().is_some_and(|until| now < until))
    }

    pub(super) fn passed(&self, it: &Progress) -> bool {
        let sidecar = it.is(ContainerKind::Sidecar);
        match it.new {
            NewState::None => false,
            NewState::Running(_) => sidecar && !self.waits_for_hook(it),
            NewState::Ended(..) if sidecar => true,
            // Without a code the kubelet is believed: it goes on only after a success.
            NewState::Ended(_, None) => self.phase != Phase::Replay,
            NewState::Ended(_, Some(code)) => code == ExitCode::SUCCESS,
        }
    }

    /// Whether a sidecar that a replay has started has a postStart hook that is not over.
    fn waits_for_hook(&self, it: &Progress) -> bool {
        let over = self.replay.hooked.contains(&it.member.name);
        self.phase == Phase::Replay && it.member.post_start && !over
    }

    pub(super) fn settled(&self, it: &Progress) -> bool {
        // What stands unshielded goes on as it is.
        if self.plan.way == Way::Shielded {
            let waits = it.member.placeholders > 0 && !it.is_new();
            return !waits || self.is_left(it);
        }
        self.has_begun(it)
    }

    /// Whether it runs again, or has passed.
    pub(super) fn has_begun(&self, it: &Progress) -> bool {
        if it.is(ContainerKind::Init) && self.plan.ordered {
            return self.passed(it);
        }
        it.is_new()
    }

    pub(super) fn outcome(&self, late: bool) -> Option<Outcome> {
        let for_good = |it: &Progress| it.member.restart_policy == RestartPolicy::Never;
        let mut progress = self.progress.iter();
        if progress.any(|it| it.has_failed() && for_good(it)) {
            return Some(Outcome::InitFailed);
        }
        let settled = self.progress.iter().all(|it| self.settled(it));
        if !self.ending.is_empty() || !settled {
            return late.then_some(Outcome::TimedOut);
        }
        if !late && self.is_probing() {
            return None;
        }
        let left = self.progress.iter().any(|it| self.is_left(it));
        let none = !self.progress.iter().any(Progress::is_new);
        Some(if self.failing && none {
            Outcome::Unshielded
        } else if self.is_halved() {
            Outcome::MadeToFail
        } else if left {
            Outcome::TimedOut
        } else {
            Outcome::Completed
        })
    }

    /// Whether the restart is not over yet to the earlier draft of KEP-5532 ("Startup Phase"), because of a startup probe.
    fn is_probing(&self) -> bool {
        self.plan.action == Action::RestartPod && self.progress.iter().any(|it| self.probes(it))
    }

    /// Whether the new one's startup probe has yet to succeed, as far as the kubelet tells.
    pub(super) fn probes(&self, it: &Progress) -> bool {
        let told = self.probed.as_ref().filter(|_| !self.is_stale());
        let running = it.running().filter(|_| it.member.startup_probe);
        told.zip(running)
            .is_some_and(|(told, id)| !told.contains(id))
    }

    /// Whether the kubelet tells nothing new of the pod: one runs again that had ended for good
    /// (`checkContainerStateTransition`, `pkg/kubelet/status/status_manager.go`).
    fn is_stale(&self) -> bool {
        let for_good = |it: &Progress| {
            let had_ended = it.member.had_completed() || it.member.runs_unrecorded;
            it.is(ContainerKind::Regular) && had_ended
        };
        self.progress.iter().any(|it| for_good(it) && it.is_new())
    }

    /// Whether a container has run that the gate would not have admitted: the kubelet goes on from there.
    pub(super) fn intruded(&self) -> bool {
        let may_run = |it: &Progress| match self.phase {
            // It has seen the sidecars run, and starts them again by itself.
            _ if self.begun => self.has_turn(it, |kind| kind == ContainerKind::Init),
            Phase::Up => self.is_turn_of(it),
            _ => false,
        };
        let mut begun = self.progress.iter().filter(|it| it.is_new());
        let keeps_order = self.plan.way != Way::Shielded && self.phase != Phase::Replay;
        keeps_order && begun.any(|it| !may_run(it))
    }

    /// Whether that container, which the kubelet has made and not started, keeps it from beginning with the init containers: to
    /// it the pod is initialised (`HasAnyRegularContainerCreated`, `pkg/kubelet/kuberuntime/util`).
    pub(crate) fn is_in_the_way(&self, id: &ContainerId, it: &Instance, now: Instant) -> bool {
        // One that was just made is about to be started.
        let lasts = it.state == InstanceState::Created && now >= it.heard_at + RELIST_INTERVAL;
        let unstarted = lasts && it.maker == Maker::Kubelet;
        let begins = matches!(self.phase, Phase::Clear | Phase::Up);
        let regular = self
            .get(&it.name)
            .filter(|of| of.is(ContainerKind::Regular));
        let early = regular.is_some_and(|of| !self.is_turn_of(of));
        unstarted && begins && early && !self.plan.knew(id)
    }

    /// Whether the kubelet has begun with the first init container since the restart was decided: it has recorded what it
    /// saw before. Sidecars it starts again at any time.
    pub(super) fn kubelet_has_begun(&self, found: &Instances) -> bool {
        let mut found = found.iter();
        self.plan.ordered
            && found.any(|(id, it)| {
                let member = self.plan.member(&it.name);
                let init = member.is_some_and(|member| member.kind == ContainerKind::Init);
                let began = it.maker == Maker::Kubelet && it.state != InstanceState::Created;
                init && !self.plan.knew(id) && began
            })
    }
}
