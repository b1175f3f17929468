//! How a restart begins, or goes on after its process has died.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::Machine;
use super::progress::{OldState, Progress};
use super::replay::Replay;
use super::terms::{Effect, Outcome, Phase};
use super::undo::Undo;
use super::waker::Waker;
use crate::ids::ContainerId;
use crate::node::Instances;
use crate::plan::{Plan, Starter, Way};
use crate::times::{
    CLEAR_LIMIT, DOWN_LIMIT, HOOK_LIMIT, LONGEST_RELIST, RECORD_LIMIT, RELIST_INTERVAL, UP_LIMIT,
    time_of_relist,
};

impl Machine {
    /// Begins the restart. `held`: exits that are held already, and since when; `before`: a restart that this one replaces,
    /// or a generation of this one, whose placeholders may still stand; `found`: what is in the runtime.
    pub(crate) fn begin(
        plan: Plan,
        held: &BTreeMap<ContainerId, Instant>,
        before: Option<&Self>,
        found: &Instances,
        now: Instant,
    ) -> (Self, Vec<Effect>) {
        let members = plan.members.iter();
        let progress = members.map(|member| Progress::at_first(member, held, found, now));
        let (progress, start_at) = (progress.collect(), now + plan.back_off());
        let mut machine = Self::new(plan, Phase::Down, progress, now + DOWN_LIMIT);
        machine.start_at = (now < start_at).then_some(start_at);
        machine.ending = machine.twins(found);
        if machine.plan.way == Way::Cleared {
            // Since the oldest of them is there, at the latest.
            let since = machine.running_since(found).unwrap_or(now);
            machine.unseen_until = Some((since + RELIST_INTERVAL).max(now));
        }
        machine.effects.push(Effect::Save);
        if let Some(before) = before {
            machine.take_over(before);
            machine.owe(before, held, now);
        }
        machine.begin_wait(before.is_some(), before, now);
        machine.advance(now);
        let effects = machine.take_effects();
        (machine, effects)
    }

    /// What is held of a restart before this one, and is none of this one's.
    fn owe(&mut self, before: &Self, held: &BTreeMap<ContainerId, Instant>, now: Instant) {
        let others = held.keys().filter(|id| !self.plan.knew(id));
        let owed = others.filter(|id| before.plan.knew(id) || before.owed.contains(*id));
        self.owed = owed.cloned().collect();
        let from = before.replay.seen_from.max(before.owed_from);
        self.owed_from = (!self.owed.is_empty()).then(|| from.unwrap_or(now));
    }

    /// What shielded the very attempts that this restart is about goes on doing so.
    fn take_over(&mut self, before: &Self) {
        self.exits_told_until = before.exits_told_until;
        self.relist = before.relist;
        self.take_over_strays(before);
        // The kubelet may have wanted for long what was shown.
        for it in &mut self.progress {
            let then = it.member.old_id().and_then(|id| before.of_old(id));
            if let Some(then) = then.filter(|it| it.shown.is_some()) {
                (it.shown, it.wanted) = (then.shown, then.wanted);
            }
        }
        for (name, id) in before.leftovers() {
            // One that is older than the attempt that runs shields nothing. Of those before it, some may still be there. Where
            // none is, the kubelet may have yet to record that the container waits.
            let it = self.get(&name);
            let old = it.and_then(|it| it.member.old_id());
            let goes = before.progress.iter().any(|it| it.going.contains(&id));
            let shields = it.is_some() && old.is_none_or(|old| before.plan.knew(old));
            if shields {
                let until = before.untrusted_until(&id);
                self.add_placeholder(&name, id.clone(), until);
            }
            if goes || !shields {
                self.effects.push(Effect::Remove(id));
            }
        }
    }

    /// Goes on with a restart that another process began, from what is in the runtime now. `elapsed`: since it
    /// was decided.
    pub(crate) fn resume(
        plan: Plan,
        phase: Phase,
        found: &Instances,
        elapsed: Duration,
        now: Instant,
    ) -> (Self, Vec<Effect>) {
        let members = plan.members.iter();
        let progress = members.map(|member| Progress::from_found(member, found));
        let progress = progress.collect();
        let start_at = now + plan.back_off().saturating_sub(elapsed);
        let deadline = match phase {
            // What is held, its hook tells with how long that was.
            Phase::Down => now + DOWN_LIMIT,
            Phase::Replay => now + DOWN_LIMIT.saturating_sub(elapsed),
            Phase::Shielded => start_at + RECORD_LIMIT,
            Phase::Clear => now + CLEAR_LIMIT,
            Phase::Up | Phase::Over => start_at + UP_LIMIT,
        };
        let mut machine = Self::new(plan, phase, progress, deadline);
        machine.start_at = (now < start_at).then_some(start_at);
        machine.begun = machine.kubelet_has_begun(found);
        // What making them took that stand, nobody knows.
        machine.relist = LONGEST_RELIST;
        machine.exits_told_until = Some(now + machine.relist);
        if phase == Phase::Down {
            machine.ending = machine.twins(found);
        }
        machine.waker = Waker::from_found(found, now);
        machine.heard = Some(now);
        let may_wait = phase.is_holding(machine.plan.way);
        machine.hooks_by = may_wait.then_some(now + HOOK_LIMIT);
        machine.announce_again();
        machine.go_on(elapsed, now);
        machine.advance(now);
        let effects = machine.take_effects();
        (machine, effects)
    }

    fn go_on(&mut self, elapsed: Duration, now: Instant) {
        let why = "the plugin was restarted";
        if self.phase != Phase::Replay {
            self.sweep_strays();
        }
        if self.replays() && self.phase != Phase::Replay {
            // What it was to be replayed from was not written down. It is still there in a back-off.
            if self.start_at.is_none() {
                self.plan.starter = Starter::Kubelet(why.into());
            } else if self.phase != Phase::Down {
                self.effects.push(Effect::Recover);
            }
        }
        match self.phase {
            // Nothing says so on the disk but what an older version has left.
            Phase::Over => return self.finish(Outcome::Completed),
            Phase::Replay => return self.resume_replay(why, elapsed, now),
            _ if self.intruded() => {
                let recent = elapsed < self.time_to_begin_anew(!self.all_down());
                return self.again(recent, now);
            }
            Phase::Down => {
                // Whatever is seen behind its shields, or needs none, was shown, nobody knows when.
                let needs_none = self.plan.is_by_policy();
                let seen = |it: &&mut Progress| {
                    let shown = needs_none || !it.placeholders.is_empty();
                    it.old == OldState::Exited && shown
                };
                let since = now.checked_sub(elapsed).unwrap_or(now);
                for it in self.progress.iter_mut().filter(seen) {
                    it.shown = Some(since);
                }
                let anew = self.plan.again > 0 || self.plan.replayed_inits;
                return self.begin_wait(anew, None, now);
            }
            Phase::Clear => self.remove_olds(Self::is_cleared_away),
            Phase::Shielded => {
                self.begin_undo();
                self.remove_shielded();
            }
            Phase::Up => {
                // A success that was learnt late may still be there.
                if self.plan.way == Way::Kept {
                    self.remove_olds(Self::is_cleared_away);
                }
                self.remove_unstarted(Progress::is_new);
                self.end_hidden();
            }
        }
        self.want_waker();
    }

    fn new(plan: Plan, phase: Phase, progress: Vec<Progress>, deadline: Instant) -> Self {
        debug_assert_eq!(plan.members.len(), progress.len());
        Self {
            plan,
            phase,
            progress,
            effects: Vec::new(),
            wait: None,
            deadline,
            unseen_until: None,
            exits_told_until: None,
            relist: time_of_relist(Duration::ZERO),
            last_moment: false,
            shields_recorded: false,
            begun: false,
            announced: false,
            said_restarting: false,
            killed: false,
            replay: Replay::default(),
            undo: Undo::default(),
            start_at: None,
            waker: Waker::None,
            heard: None,
            gate_is_there: true,
            starts_by: None,
            hooks_by: None,
            left: false,
            probed: None,
            failing: false,
            ends_by: None,
            owed: BTreeSet::new(),
            owed_from: None,
            ending: BTreeSet::new(),
            placeholders_going: false,
        }
    }
}
