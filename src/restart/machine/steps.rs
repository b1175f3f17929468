//! From phase to phase.

use std::time::{Duration, Instant};

use super::Machine;
use super::progress::{OldState, Progress};
use super::terms::{Effect, Outcome, Phase};
use crate::ids::{ContainerId, ExitCode};
use crate::kube::{ContainerKind, RestartPolicy};
use crate::plan::Way;
use crate::policy::{Action, Request};
use crate::times::{
    CLEAR_LIMIT, FALLBACK_TIME, FIRST_BACK_OFF, KEPT_TIME, LAST_MOMENT, RECORD_LIMIT, UP_LIMIT,
};

impl Machine {
    /// Moves on as far as the facts allow.
    pub(super) fn advance(&mut self, now: Instant) {
        while self.phase != Phase::Over && self.step(now) {}
    }

    fn step(&mut self, now: Instant) -> bool {
        let late = now >= self.deadline;
        self.note_removals();
        self.trust_placeholders(now);
        self.unshield(now);
        self.remove_outnumbered();
        if self.start_at.take_if(|at| now >= *at).is_some() {
            // Until now it was asked to wait.
            self.heard = Some(now);
            // What goes then goes right after a relist, of which the next refusal tells.
            self.shields_recorded &= !self.plan.removals_show;
        }
        if self.owed_from.take_if(|from| now >= *from).is_some() {
            let owed = std::mem::take(&mut self.owed).into_iter();
            self.effects.push(Effect::Release(owed.collect()));
        }
        self.hooks_by.take_if(|by| now >= *by);
        self.starts_by.take_if(|by| now >= *by);
        self.unseen_until.take_if(|until| late || now >= *until);
        self.exits_told_until.take_if(|until| now >= *until);
        self.wake(now);
        if !self.waits() && (self.step_undo(now) || self.show_anew(now)) {
            return true;
        }
        match self.phase {
            Phase::Down if self.waits() => self.step_wait(now),
            Phase::Down if self.may_kill(now) => {
                self.kill_olds();
                true
            }
            Phase::Down if self.replays_at_once() => self.step_before_replay(now),
            Phase::Replay => self.step_replay(now),
            Phase::Down if self.undoes_first() || self.unseen_until.is_some() => false,
            Phase::Down if late || self.is_down() => {
                if self.last_moment || self.guard_stands() {
                    self.leave_down(now);
                } else {
                    self.last_moment = true;
                    self.deadline = now + LAST_MOMENT;
                }
                true
            }
            Phase::Shielded if (self.shields_recorded || self.begun) && self.start_at.is_none() => {
                self.enter(Phase::Clear, now);
                self.remove_olds(Self::is_cleared_away);
                true
            }
            Phase::Shielded if late => {
                self.finish(Outcome::TimedOut);
                false
            }
            Phase::Clear | Phase::Up if self.may_remove_shields(late) => {
                let shields = self
                    .progress
                    .iter()
                    .any(|it| it.unstarted().next().is_some());
                let told = shields && self.exits_forgotten_from().is_some();
                // Where its removal shows, the relist that has recorded the shields is over, and the next a second away.
                if told && !late && !self.plan.removals_show {
                    return false;
                }
                self.placeholders_going = true;
                self.remove_unstarted(|it| !it.is_new());
                true
            }
            Phase::Clear if late || self.cleared() => {
                self.enter(Phase::Up, now);
                self.release_all();
                true
            }
            Phase::Up if self.may_replay_now() => {
                if self.has_admitted() {
                    self.leave_to_kubelet("the kubelet was first".into());
                } else {
                    self.replay_after_back_off(now);
                }
                true
            }
            Phase::Up => {
                self.kill_halved();
                self.ends_by = self.may_change_until(now);
                // What the kubelet starts meanwhile, nobody hears of: it is listed when the gate is back, or comes soon after.
                let unheard = self.left && (!self.gate_is_there || self.starts_by.is_some());
                let waits = unheard || self.ends_by.is_some() || self.unshields_from().is_some();
                if let Some(outcome) = self.outcome(late).filter(|_| late || !waits) {
                    self.finish(outcome);
                }
                false
            }
            Phase::Down | Phase::Shielded | Phase::Clear | Phase::Over => false,
        }
    }

    /// Whether what stood before containers that were cleared away is to follow them. Under `Kept` it hides nothing for long.
    fn may_remove_shields(&self, late: bool) -> bool {
        !self.placeholders_going
            && match self.plan.way {
                Way::Kept => late || self.cleared(),
                Way::Shielded => false,
                Way::Cleared => self.cleared(),
            }
    }

    fn is_down(&self) -> bool {
        let enough = self.last_moment && self.guard_stands();
        let shielded = enough || self.shields_stand();
        self.killed && self.all_down() && shielded
    }

    fn may_kill(&self, now: Instant) -> bool {
        let told = self.announced || self.told_by().is_some_and(|by| now >= by);
        !self.killed && told && self.is_shielded_for_kills()
    }

    fn is_shielded_for_kills(&self) -> bool {
        !self.plan.shields_come_first() || self.shields_stand()
    }

    /// How long kills wait for the news of them: not for so long that what shields the exits could not be made.
    pub(super) fn told_by(&self) -> Option<Instant> {
        let begun = self.phase == Phase::Down && !self.killed && !self.waits();
        let waits = begun && !self.announced && self.is_shielded_for_kills();
        self.deadline.checked_sub(FALLBACK_TIME).filter(|_| waits)
    }

    fn shields_stand(&self) -> bool {
        !self.progress.iter().any(Progress::lacks_shield)
    }

    pub(super) fn announce(&mut self, restarting: bool) {
        if self.said_restarting != restarting {
            self.said_restarting = restarting;
            self.effects.push(Effect::Announce(restarting));
        }
    }

    /// The condition of KEP-5532 ends with the old containers, that of its earlier draft with the start of the new.
    pub(super) fn announce_down(&mut self) {
        if self.plan.action == Action::RestartAllContainers {
            self.announce(false);
        }
    }

    /// A predecessor may have died before or after it said so. Nothing waits for it this time.
    pub(super) fn announce_again(&mut self) {
        self.announced = true;
        self.said_restarting = match self.plan.action {
            Action::Restart => return,
            Action::RestartAllContainers => matches!(self.phase, Phase::Down | Phase::Replay),
            Action::RestartPod => self.phase != Phase::Over,
        };
        self.effects.push(Effect::Announce(self.said_restarting));
    }

    fn leave_down(&mut self, now: Instant) {
        if !self.guard_stands() && !self.plan.is_by_policy() {
            return self.fail(now);
        } else if self.has_succeeded() {
            return self.begin_anew(false, "all its containers have succeeded".into());
        }
        self.announce_down();
        // An exit that the kubelet has seen for longer it backs off from, twice as long with each creation that is refused
        // (`doBackOff`, `pkg/kubelet/kuberuntime/kuberuntime_manager.go`).
        self.remove_olds(|_, it| it.shown.is_some_and(|at| now >= at + FIRST_BACK_OFF));
        match self.plan.way {
            Way::Kept => {
                self.enter(Phase::Clear, now);
                self.release(|_, it| it.goes_first());
                self.remove_olds(Self::is_cleared_away);
            }
            Way::Shielded => {
                self.enter(Phase::Up, now);
                self.release_all();
                // What is gone the kubelet starts, what it has seen exit under Never it does not.
                self.remove_olds(|_, it| it.lacks_shield());
            }
            // The kubelet has nothing to record that it could be seen to have recorded.
            Way::Cleared if self.guard_is_gone() || !self.guard_stands() || self.is_passed() => {
                self.enter(Phase::Clear, now);
                self.release_all();
                self.remove_olds(Self::is_cleared_away);
            }
            Way::Cleared => {
                self.enter(Phase::Shielded, now);
                self.release_all();
                let mut shown = self.progress.iter().filter(|it| it.wanted);
                let proves = shown.any(|it| self.proves_recording(it));
                self.shields_recorded |= proves && self.is_undo_seen(now);
                // While it sees an exit, the kubelet may keep the container in back-off and not try to create
                // it (doBackOff).
                self.remove_shielded();
            }
        }
    }

    /// Whether the kubelet would take the pod for succeeded, and start none of it again, if it saw the exits that are held: the
    /// last of them was no failure, which was not known when the restart was decided.
    fn has_succeeded(&self) -> bool {
        let mut regulars = self
            .progress
            .iter()
            .filter(|it| it.is(ContainerKind::Regular));
        let held = regulars.clone().any(|it| it.old == OldState::Held);
        let succeeded = |it: &Progress| {
            let stays = it.member.restart_policy == RestartPolicy::OnFailure;
            stays && it.old_exit == Some(ExitCode::SUCCESS)
        };
        self.plan.way == Way::Kept && held && regulars.all(succeeded)
    }

    /// Whether the kubelet may be past the guard, and never want it again; where its policy has it start all, nothing need be
    /// recorded.
    fn is_passed(&self) -> bool {
        let begun = self.plan.again > 0 || self.plan.replayed_inits;
        let first = self
            .guard()
            .is_some_and(|it| !it.is(ContainerKind::Regular));
        begun && first && self.plan.is_by_policy()
    }

    /// It answers that request as well. If that is urgent, the back-off is over now.
    pub(super) fn join(&mut self, request: Request, waited: Duration, now: Instant) {
        let hurries = request.is_urgent() && self.start_at.is_some_and(|at| now < at);
        if hurries {
            self.start_at = Some(now);
            // A pod that has waited goes on as one that has, also after this process.
            let waited = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
            self.plan.back_off_ms = waited.clamp(1, self.plan.back_off_ms);
        }
        self.plan.joined = Some(request);
        self.effects.push(Effect::Save);
        if hurries {
            // The condition says until when it waits.
            self.effects.push(Effect::Announce(self.said_restarting));
        }
    }

    pub(super) fn enter(&mut self, phase: Phase, now: Instant) {
        self.phase = phase;
        self.heard = Some(now);
        let start = self.start_at.unwrap_or(now);
        self.deadline = match phase {
            Phase::Shielded => start + RECORD_LIMIT,
            // Under Kept the regular containers' exits are still held.
            Phase::Clear if self.plan.way == Way::Kept => self.deadline.max(now) + KEPT_TIME,
            Phase::Clear => now + CLEAR_LIMIT,
            Phase::Down | Phase::Replay => self.deadline,
            Phase::Up | Phase::Over => start + UP_LIMIT,
        };
        self.effects.push(Effect::Save);
    }

    pub(super) fn finish(&mut self, outcome: Outcome) {
        let mut held: Vec<ContainerId> = self.replayed_inits().cloned().collect();
        held.extend(self.progress.iter().flat_map(Progress::attempts).cloned());
        held.extend(std::mem::take(&mut self.owed));
        self.phase = Phase::Over;
        self.effects.push(Effect::Release(held));
        self.announce(false);
        self.remove_all_unstarted();
        self.effects.push(Effect::Finish(outcome));
    }
}
