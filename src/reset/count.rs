//! How often one container has come to its end on this node, of itself, since it last ran well.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::sighting::{Exit, Watched};
use super::terms::Terms;
use crate::clock::Moment;
use crate::ids::{ContainerId, ExitCode};

/// How many exits are remembered for people.
const REMEMBERED: usize = 10;
/// The API tells whole seconds.
const ROUNDING: Duration = Duration::from_secs(2);
/// The reason that no probe can be behind.
const OUT_OF_MEMORY: &str = "OOMKilled";

/// The exits of one container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Count {
    counted: u32,
    /// Exits of attempts with lower numbers are accounted for.
    through: u32,
    running: Option<Running>,
    history: VecDeque<Told>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Running {
    id: ContainerId,
    /// When it was first seen to, see [`crate::clock`].
    since_up_ms: u64,
}

/// An exit, for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Told {
    at: i64,
    code: ExitCode,
    reason: String,
    counts: Cause,
}

/// Why an exit counts or does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Cause {
    /// It came to its end by itself, or was restarted with its pod.
    Counted,
    /// An init container has done its work.
    Completed,
    /// A probe may have failed.
    PerhapsProbe,
}

impl Count {
    /// Of a container that is seen for the first time: nobody knows what became of its attempts so far.
    pub(super) fn beginning_with(seen: &Watched) -> Self {
        let through = seen.restarts;
        Self {
            through,
            ..Self::default()
        }
    }

    /// Takes in what is told of the container now. `unseen`: whether exits that nobody told of count as well, because no
    /// attempt can have run well in the meantime.
    pub(super) fn note(&mut self, seen: &Watched, unseen: bool, terms: &Terms, now: &Moment) {
        let unseen = unseen && seen.probed_after.is_none() && !seen.completes;
        // Perhaps it has ended before that, and nobody told so: then too much is forgotten.
        if self.has_run(terms, now) {
            self.counted = 0;
        }
        for exit in &seen.exits {
            if exit.attempt < self.through {
                continue;
            }
            self.skip_to(exit.attempt, unseen);
            self.through = exit.attempt.saturating_add(1);
            if exit.ran() >= terms.forgotten_after() {
                self.counted = 0;
            }
            let cause = judge(exit, seen);
            self.counted = self
                .counted
                .saturating_add(u32::from(cause == Cause::Counted));
            self.remember(exit, cause);
        }
        self.skip_to(seen.restarts, unseen);
        let known = self.running.take();
        self.running = seen.running.clone().map(|id| match known {
            Some(known) if known.id == id => known,
            _ => Running {
                id,
                since_up_ms: now.up_ms,
            },
        });
    }

    /// So many times it has ended since it last ran well.
    pub(super) fn value(&self, terms: &Terms, now: &Moment) -> u32 {
        if self.has_run(terms, now) {
            0
        } else {
            self.counted
        }
    }

    pub(super) fn history(&self) -> &VecDeque<Told> {
        &self.history
    }

    /// Whether the attempt that runs, as far as is known, has for long enough.
    fn has_run(&self, terms: &Terms, now: &Moment) -> bool {
        let running = self.running.as_ref();
        running.is_some_and(|it| now.since(it.since_up_ms) >= terms.forgotten_after())
    }

    fn skip_to(&mut self, attempt: u32, counts: bool) {
        let skipped = attempt.saturating_sub(self.through);
        if counts {
            self.counted = self.counted.saturating_add(skipped);
        }
        self.through = self.through.max(attempt);
    }

    fn remember(&mut self, exit: &Exit, counts: Cause) {
        if self.history.len() == REMEMBERED {
            self.history.pop_front();
        }
        self.history.push_back(Told {
            at: exit.finished,
            code: exit.code,
            reason: exit.reason.clone(),
            counts,
        });
    }
}

/// Restarts because of a failed probe do not count (enhancements#5734, "Risks and Mitigation"). Nothing but an event tells of
/// them, and the kubelet drops most events of a pod that has many (`EventSourceObjectSpamFilter`, client-go
/// `tools/record/events_cache.go`), those among them: so no exit counts that a probe may have caused.
fn judge(exit: &Exit, seen: &Watched) -> Cause {
    if seen.completes && exit.code == ExitCode::SUCCESS {
        return Cause::Completed;
    }
    let perhaps = seen
        .probed_after
        .is_some_and(|soonest| exit.ran() + ROUNDING >= soonest);
    if perhaps && exit.reason != OUT_OF_MEMORY {
        Cause::PerhapsProbe
    } else {
        Cause::Counted
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::clock::{Clock, Times};

    pub(in super::super) fn clock() -> Clock {
        Clock::of(Times {
            up: 10_000_000,
            unix: 1_700_000_000_000,
        })
    }

    /// An exit of attempt number `attempt`, which ran for a second.
    pub(in super::super) fn exit(attempt: u32, code: i32) -> Exit {
        let started = 100 * i64::from(attempt);
        Exit {
            id: format!("c{attempt}").as_str().into(),
            attempt,
            code: ExitCode(code),
            reason: "Error".into(),
            started,
            finished: started + 1,
        }
    }

    /// A container that waits for its back-off after that exit.
    pub(in super::super) fn after(exit: Exit) -> Watched {
        Watched {
            name: "a".into(),
            probed_after: None,
            completes: false,
            restarts: exit.attempt,
            running: None,
            exits: vec![exit],
        }
    }

    fn running(attempt: u32) -> Watched {
        Watched {
            running: Some(format!("c{attempt}").as_str().into()),
            restarts: attempt,
            exits: Vec::new(),
            ..after(exit(attempt, 1))
        }
    }

    fn noted(count: &mut Count, seen: &Watched, clock: &Clock) -> u32 {
        let terms = Terms::default();
        count.note(seen, false, &terms, &clock.moment());
        count.value(&terms, &clock.moment())
    }

    #[test]
    fn each_exit_counts_once_however_often_it_is_told() {
        let (mut count, clock) = (Count::default(), clock());
        for attempt in 0..5 {
            for _ in 0..2 {
                assert_eq!(
                    noted(&mut count, &after(exit(attempt, 1)), &clock),
                    attempt + 1
                );
            }
            let mut next = running(attempt + 1);
            next.exits = vec![exit(attempt, 1)];
            assert_eq!(noted(&mut count, &next, &clock), attempt + 1);
        }
    }

    #[test]
    fn what_was_before_the_first_look_does_not_count() {
        let seen = after(exit(40, 1));
        let mut count = Count::beginning_with(&seen);
        assert_eq!(noted(&mut count, &seen, &clock()), 1);
    }

    #[test]
    fn a_container_that_runs_for_ten_minutes_begins_anew() {
        let (mut count, clock) = (Count::default(), clock());
        noted(&mut count, &after(exit(0, 1)), &clock);
        assert_eq!(noted(&mut count, &running(1), &clock), 1);
        clock.pass(Duration::from_secs(599));
        assert_eq!(count.value(&Terms::default(), &clock.moment()), 1);
        // Whatever becomes of the wall clock.
        clock.set_wall(5);
        clock.pass(Duration::from_secs(1));
        assert_eq!(count.value(&Terms::default(), &clock.moment()), 0);
        assert_eq!(noted(&mut count, &after(exit(1, 1)), &clock), 1);
        let mut long = exit(2, 1);
        long.finished = long.started + 600;
        assert_eq!(noted(&mut count, &after(long), &clock), 1);
    }

    #[test]
    fn exits_that_nobody_told_of_count_if_no_attempt_can_have_run_well_meanwhile() {
        let (terms, clock) = (Terms::default(), clock());
        for (unseen, counted) in [(true, 5), (false, 1)] {
            let mut count = Count::default();
            count.note(&after(exit(4, 1)), unseen, &terms, &clock.moment());
            assert_eq!(count.value(&terms, &clock.moment()), counted);
        }
        // With probes nobody knows why.
        let mut count = Count::default();
        let probed = Watched {
            probed_after: Some(Duration::from_hours(1)),
            ..after(exit(4, 1))
        };
        count.note(&probed, true, &terms, &clock.moment());
        assert_eq!(count.value(&terms, &clock.moment()), 1);
    }

    #[test]
    fn init_containers_that_complete_do_not_count() {
        let (mut count, clock) = (Count::default(), clock());
        let init = |exit| Watched {
            completes: true,
            ..after(exit)
        };
        assert_eq!(noted(&mut count, &init(exit(0, 0)), &clock), 0);
        assert_eq!(noted(&mut count, &init(exit(1, 1)), &clock), 1);
    }

    fn probed(exit: Exit, after_seconds: u64) -> Watched {
        Watched {
            probed_after: Some(Duration::from_secs(after_seconds)),
            ..after(exit)
        }
    }

    #[test]
    fn what_a_probe_may_have_restarted_does_not_count() {
        let oom = Exit {
            reason: "OOMKilled".into(),
            ..exit(1, 137)
        };
        for (what, seen, counts) in [
            ("as if by itself", probed(exit(1, 1), 1), false),
            ("by SIGTERM", probed(exit(1, 143), 1), false),
            ("out of memory", probed(oom, 1), true),
            ("perhaps too soon", probed(exit(1, 1), 3), false),
            ("too soon for any probe", probed(exit(1, 143), 4), true),
        ] {
            let mut count = Count::default();
            assert_eq!(
                noted(&mut count, &seen, &clock()),
                u32::from(counts),
                "{what}"
            );
        }
    }

    proptest! {
        /// Whatever is told, in whatever order, of attempts up to a number.
        #[test]
        fn never_more_are_counted_than_there_were(
            told in prop::collection::vec((0..20_u32, any::<bool>(), any::<bool>(), 0..140_i32), 0..60),
        ) {
            let (mut count, clock) = (Count::default(), clock());
            for (attempt, unseen, runs, code) in &told {
                let seen = if *runs { running(*attempt) } else { after(exit(*attempt, *code)) };
                count.note(&seen, *unseen, &Terms::default(), &clock.moment());
            }
            let highest = told.iter().map(|(attempt, ..)| attempt + 1).max().unwrap_or(0);
            prop_assert!(count.counted <= highest);
            prop_assert!(count.history.len() <= REMEMBERED);
        }
    }
}
