//! How a restart begins, or goes on after its process has died.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::progress::{OldState, Progress};
use super::queue::Queue;
use super::replay::Replay;
use super::terms::{Effect, Outcome, Phase, WAKER};
use super::undo::Undo;
use super::{Machine, Told};
use crate::ids::ContainerId;
use crate::node::Instances;
use crate::restart::plan::{Plan, Starter, Way};
use crate::restart::times::{
    AGAIN_LIMIT, CLEAR_LIMIT, DOWN_LIMIT, HALVED_LIMIT, LAST_MOMENT, RECORD_LIMIT, RELIST_INTERVAL,
    UP_LIMIT,
};

impl Machine {
    /// Begins the restart. `held`: exits that are held already, and since when; `before`: a restart that this one replaces,
    /// or a generation of this one, whose placeholders may still stand; `found`: what is in the runtime; `ran`: for how long
    /// the oldest of the containers has run.
    #[must_use]
    pub fn begin(
        plan: Plan,
        held: &BTreeMap<ContainerId, Instant>,
        before: Option<&Self>,
        found: &Instances,
        ran: Duration,
        now: Instant,
    ) -> (Self, Vec<Effect>) {
        let progress = plan
            .members
            .iter()
            .map(|member| Progress {
                old: member.old.as_ref().map(|old| {
                    if held.contains_key(&old.id) {
                        OldState::Held
                    } else if old.exit.is_some() {
                        OldState::Exited
                    } else {
                        OldState::Running
                    }
                }),
                older: member.older.iter().cloned().collect(),
                held_since: {
                    // Those of a replay that has not ended are held as well. What is held no longer is no reason for haste.
                    let old = member.old.iter().map(|old| &old.id);
                    let since = old.chain(&member.older).filter_map(|id| held.get(id));
                    let since = since.copied();
                    since.filter(|it| Self::is_held_still(*it, now)).min()
                },
                ..Progress::of(member)
            })
            .collect();
        let start_at = now + plan.back_off();
        let mut machine = Self::new(plan, Phase::Down, progress, now + DOWN_LIMIT);
        if before.is_none() {
            machine.queue = machine.queue_from(now);
        }
        machine.start_at = (now < start_at).then_some(start_at);
        machine.ending = machine.twins(found);
        if machine.plan.way == Way::Cleared {
            machine.unseen_until = Some(now + RELIST_INTERVAL.saturating_sub(ran));
        }
        let mut effects = vec![Effect::Save];
        for (name, id) in before.map(Self::leftovers).unwrap_or_default() {
            // One that is older than the attempt that runs shields nothing.
            let old = machine
                .index_of(&name)
                .and_then(|index| machine.old_id(index));
            let made_for_it = before.is_some_and(|it| old.is_some_and(|old| it.replaces(&old)));
            if made_for_it {
                let until = before.and_then(|it| it.untrusted_until(&id));
                machine.add_placeholder(&name, id, until);
            } else {
                effects.push(Effect::Remove(id));
            }
        }
        effects.extend(machine.enter_queue(now));
        effects.extend(machine.advance(now));
        (machine, effects)
    }

    /// Goes on with a restart that another process began, from what is in the runtime now. `elapsed`: since it
    /// was decided.
    #[must_use]
    pub fn resume(
        plan: Plan,
        phase: Phase,
        found: &Instances,
        elapsed: Duration,
        now: Instant,
    ) -> (Self, Vec<Effect>) {
        let members = plan.members.iter();
        let progress = members
            .map(|member| Progress::from_found(member, found))
            .collect();
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
        if phase == Phase::Down {
            machine.ending = machine.twins(found);
        }
        let mut found = found.iter();
        let waker = found.find(|(_, it)| it.is_placeholder() && it.name == WAKER.into());
        machine.waker = waker.map(|(id, _)| id.clone());
        let mut effects = machine.announce_again();
        // What it was to be replayed from was not written down. It is still there in a back-off.
        let why = "the plugin was restarted";
        let waits = machine.phase != Phase::Replay && machine.start_at.is_some();
        if machine.replays() && waits {
            effects.extend((machine.phase != Phase::Down).then_some(Effect::Recover));
        } else if machine.replays() && phase != Phase::Replay {
            machine.plan.starter = Starter::Kubelet(why.into());
        }
        if machine.phase == Phase::Replay {
            effects.extend(machine.resume_replay(why, elapsed, now));
            return (machine, effects);
        }
        if machine.intruded() {
            let limit = if machine.all_down() {
                AGAIN_LIMIT
            } else {
                HALVED_LIMIT
            };
            effects.extend(machine.again(elapsed < limit, now));
            return (machine, effects);
        }
        match machine.phase {
            Phase::Down => {
                machine.queue = machine.queue_from(now);
                effects.extend(machine.enter_queue(now));
            }
            Phase::Clear => effects.extend(machine.removals()),
            Phase::Shielded => {
                effects.extend(machine.begin_undo());
                effects.extend(machine.removals_of_shielded());
            }
            Phase::Up => {
                // A success that was learnt late may still be there.
                if machine.plan.way == Way::Kept {
                    effects.extend(machine.removals());
                }
                effects.extend(machine.removals_of_replaced());
            }
            // Nothing says so on the disk but what an older version has left.
            Phase::Over => {
                effects.extend(machine.finish(Outcome::Completed));
                return (machine, effects);
            }
            Phase::Replay => {}
        }
        if machine.phase != Phase::Down {
            effects.extend(machine.waker_wanted());
        }
        effects.extend(machine.advance(now));
        (machine, effects)
    }

    fn new(plan: Plan, phase: Phase, progress: Vec<Progress>, deadline: Instant) -> Self {
        debug_assert_eq!(plan.members.len(), progress.len());
        Self {
            plan,
            phase,
            progress,
            queue: Queue::Passed,
            deadline,
            unseen_until: None,
            last_moment: Some(LAST_MOMENT),
            shields_recorded: false,
            begun: false,
            told: Told::default(),
            killed: false,
            replay: Replay::default(),
            undo: Undo::default(),
            start_at: None,
            waker: None,
            left: false,
            failing: false,
            ends_by: None,
            ending: BTreeSet::new(),
            placeholders_going: false,
        }
    }
}
