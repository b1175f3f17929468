//! How often one container has come to its end on this node, of itself, since it last ran well.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::sighting::{Exit, Watched};
use super::terms::Terms;
use crate::clock::Moment;
use crate::ids::{ContainerId, ContainerName, ExitCode};

/// How many exits are remembered for people.
const REMEMBERED: usize = 10;
/// The API tells whole seconds.
const ROUNDING: Duration = Duration::from_secs(2);
/// By SIGKILL and by SIGTERM.
const STOPPED: [ExitCode; 2] = [ExitCode(137), ExitCode(143)];

/// That the kubelet ended a container because of a probe, as its event says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ProbeKill {
    /// Which container.
    pub(super) container: ContainerName,
    /// When for the last time, in seconds since the epoch.
    pub(super) at: i64,
}

/// The exits of one container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Count {
    counted: u32,
    /// Exits of attempts with lower numbers are accounted for.
    through: u32,
    running: Option<Running>,
    /// A probe has ended it before.
    probed: bool,
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
    /// A probe had failed, as the kubelet says.
    Probe,
    /// Nobody says so, but a probe may have failed.
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

    /// Takes in what is told of the container now. `kills`: what the kubelet says of probes; `None`: nobody knows. `unseen`:
    /// whether exits that nobody told of count as well, because no attempt can have run well in the meantime.
    pub(super) fn note(
        &mut self,
        seen: &Watched,
        kills: Option<&[ProbeKill]>,
        unseen: bool,
        terms: &Terms,
        now: &Moment,
    ) {
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
            let cause = self.judge(exit, seen, kills);
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

    /// Whether it matters what the kubelet says of probes.
    pub(super) fn asks_for_probes(&self, seen: &Watched) -> bool {
        let mut exits = seen.exits.iter();
        seen.probed_after.is_some() && exits.any(|exit| exit.attempt >= self.through)
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

    /// A machine that was started anew is up for less than what was written down before: whatever that was is just now.
    pub(super) fn rebase(&mut self, up_ms: u64) {
        if let Some(running) = &mut self.running {
            running.since_up_ms = running.since_up_ms.min(up_ms);
        }
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

    /// Restarts because of a failed probe do not count (enhancements#5734, "Risks and Mitigation"). Nothing but an event
    /// tells of them, and the kubelet drops events where it has many for one pod (`EventSourceObjectSpamFilter`, client-go
    /// `tools/record/events_cache.go`): so an exit that a probe may have caused counts only if it does not look like it.
    fn judge(&mut self, exit: &Exit, seen: &Watched, kills: Option<&[ProbeKill]>) -> Cause {
        if seen.completes && exit.code == ExitCode::SUCCESS {
            return Cause::Completed;
        }
        let Some(soonest) = seen.probed_after else {
            return Cause::Counted;
        };
        if exit.reason == "OOMKilled" || exit.ran() + ROUNDING < soonest {
            return Cause::Counted;
        }
        let Some(kills) = kills else {
            return Cause::PerhapsProbe;
        };
        let mut kills = kills.iter().filter(|kill| kill.container == seen.name);
        if kills.any(|kill| (exit.started..=exit.finished).contains(&kill.at)) {
            self.probed = true;
            return Cause::Probe;
        }
        if self.probed || STOPPED.contains(&exit.code) {
            return Cause::PerhapsProbe;
        }
        Cause::Counted
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
        count.note(seen, Some(&[]), false, &terms, &clock.moment());
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
            count.note(&after(exit(4, 1)), None, unseen, &terms, &clock.moment());
            assert_eq!(count.value(&terms, &clock.moment()), counted);
        }
        // With probes nobody knows why.
        let mut count = Count::default();
        let probed = Watched {
            probed_after: Some(Duration::from_hours(1)),
            ..after(exit(4, 1))
        };
        count.note(&probed, Some(&[]), true, &terms, &clock.moment());
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

    fn kill(at: i64) -> ProbeKill {
        ProbeKill {
            container: "a".into(),
            at,
        }
    }

    #[test]
    fn what_a_probe_has_restarted_does_not_count_and_what_it_may_have_only_if_it_does_not_look_so()
    {
        let oom = Exit {
            reason: "OOMKilled".into(),
            ..exit(1, 137)
        };
        for (what, seen, kills, counts) in [
            (
                "killed by a probe",
                probed(exit(1, 1), 1),
                Some(vec![kill(100)]),
                false,
            ),
            (
                "killed by a probe in another life",
                probed(exit(1, 1), 1),
                Some(vec![kill(99)]),
                true,
            ),
            ("by itself", probed(exit(1, 1), 1), Some(vec![]), true),
            ("nobody knows", probed(exit(1, 1), 1), None, false),
            ("by SIGTERM", probed(exit(1, 143), 1), Some(vec![]), false),
            ("out of memory", probed(oom, 1), None, true),
            (
                "too soon for any probe",
                probed(exit(1, 143), 4),
                None,
                true,
            ),
        ] {
            let mut count = Count::default();
            count.note(
                &seen,
                kills.as_deref(),
                false,
                &Terms::default(),
                &clock().moment(),
            );
            assert_eq!(count.counted, u32::from(counts), "{what}");
        }
    }

    #[test]
    fn once_a_probe_has_restarted_it_the_kubelet_need_not_say_so_again() {
        let (mut count, terms, now) = (Count::default(), Terms::default(), clock().moment());
        count.note(
            &probed(exit(0, 0), 1),
            Some(&[kill(0)]),
            false,
            &terms,
            &now,
        );
        for attempt in 1..20 {
            count.note(&probed(exit(attempt, 3), 1), Some(&[]), false, &terms, &now);
        }
        assert_eq!(count.counted, 0);
        // Unless no probe can have been it.
        count.note(&probed(exit(20, 3), 9), Some(&[]), false, &terms, &now);
        assert_eq!(count.counted, 1);
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
                count.note(&seen, Some(&[]), *unseen, &Terms::default(), &clock.moment());
            }
            let highest = told.iter().map(|(attempt, ..)| attempt + 1).max().unwrap_or(0);
            prop_assert!(count.counted <= highest);
            prop_assert!(count.history.len() <= REMEMBERED);
        }
    }
}
