//! The hard resets of the whole cluster of late, and whether there may be one more.
//!
//! Pure. All times are the API server's, in seconds since the epoch: nodes need not agree on what time it is.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::terms::{HOUR, Terms, share};

/// What is written down in the cluster. The budget bounds how much that is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Ledger {
    entries: Vec<Entry>,
}

/// One reset, or that one is about to be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    /// Whose pod it was: the UID of the Deployment, or of what else makes such pods.
    owner: String,
    namespace: String,
    /// The pod's UID.
    pod: String,
    /// When it was granted first: what the window and the budgets go by.
    at: i64,
    /// When it was granted last, if that was later: it may not have come to anything before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    again: Option<i64>,
}

/// Who wants to reset what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The UID of the pod's owner, from the API server and not from the pod.
    pub owner: String,
    /// Where both are.
    pub namespace: String,
    /// The pod's UID.
    pub pod: String,
}

/// The answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It may be done, at once, and counts as done.
    Granted,
    /// Later.
    Wait {
        /// In that time at the soonest; not zero.
        wait: Duration,
        /// For what.
        why: Hindrance,
    },
    /// So many resets of this owner have not helped: not before the first of them is out of the window.
    GivenUp {
        /// In that time; not zero.
        wait: Duration,
        /// How many.
        resets: usize,
    },
}

/// What a reset waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hindrance {
    /// Another pod of the same owner was reset just before.
    Cooldown,
    /// The cluster has had as many as it may in an hour, or those of one namespace.
    ClusterBudget,
    /// The same of this node.
    NodeBudget,
}

impl Ledger {
    /// Asks for one more at `now`, and notes it if it is granted. A claim for a pod that was granted before takes the place of
    /// that, which has not come to anything, and no more room: it goes out of the window when the first would have.
    pub(super) fn ask(&mut self, claim: &Claim, terms: &Terms, now: i64) -> Verdict {
        self.tidy(terms, now);
        let verdict = self.verdict(claim, terms, now);
        if verdict == Verdict::Granted {
            let window = i64::from(terms.window_seconds);
            let mut own = self.entries.iter().filter(|entry| entry.pod == claim.pod);
            let standing = own.find(|entry| now.saturating_sub(entry.at) <= window);
            let at = standing.map_or(now, |entry| entry.at);
            let last = standing.map_or(now, |entry| entry.last().max(now));
            self.withdraw(&claim.pod);
            self.entries.push(Entry {
                owner: claim.owner.clone(),
                namespace: claim.namespace.clone(),
                pod: claim.pod.clone(),
                at,
                again: (at < last).then_some(last),
            });
        }
        verdict
    }

    /// What was granted for that pod has not come to anything, and will not.
    pub(super) fn withdraw(&mut self, pod: &str) {
        self.entries.retain(|entry| entry.pod != pod);
    }

    /// What matters to nobody any more goes. What is yet to come, by another API server's clock, stays as it was written, so
    /// that it means the same to that one; but nobody can have written what is further away than a window.
    fn tidy(&mut self, terms: &Terms, now: i64) {
        let window = i64::from(terms.window_seconds);
        let longest = [window, terms.cooldown_seconds.into(), seconds(HOUR)];
        let kept = longest.into_iter().max().unwrap_or_default();
        let latest = now.saturating_add(window);
        for entry in &mut self.entries {
            entry.at = entry.at.min(latest);
            entry.again = entry.again.map(|again| again.min(latest));
        }
        self.entries
            .retain(|entry| now.saturating_sub(entry.last()) <= kept);
        self.entries.sort_by_key(|entry| entry.at);
    }

    fn verdict(&self, claim: &Claim, terms: &Terms, now: i64) -> Verdict {
        let others = || self.entries.iter().filter(|entry| entry.pod != claim.pod);
        let owners = || others().filter(|entry| entry.owner == claim.owner);
        let window = i64::from(terms.window_seconds);
        if let Some(wait) = full(
            owners().map(|it| it.at),
            terms.max_resets_per_owner,
            window,
            now,
        ) {
            let recent = owners().filter(|entry| now.saturating_sub(entry.at) <= window);
            let resets = recent.count();
            return Verdict::GivenUp { wait, resets };
        }
        if let Some(wait) = full(
            owners().map(Entry::last),
            1,
            terms.cooldown_seconds.into(),
            now,
        ) && terms.cooldown_seconds > 0
        {
            let why = Hindrance::Cooldown;
            return Verdict::Wait { wait, why };
        }
        let all = others().map(|entry| entry.at);
        let neighbours = others().filter(|entry| entry.namespace == claim.namespace);
        let neighbours = neighbours.map(|entry| entry.at);
        let budget = terms.max_resets_per_hour;
        let waits = [
            full(all, budget, seconds(HOUR), now),
            full(neighbours, share(budget), seconds(HOUR), now),
        ];
        match waits.into_iter().flatten().max() {
            Some(wait) => Verdict::Wait {
                wait,
                why: Hindrance::ClusterBudget,
            },
            None => Verdict::Granted,
        }
    }
}

impl Entry {
    fn last(&self) -> i64 {
        self.again.unwrap_or(self.at)
    }
}

/// How long until there is room again, if `most` of these times are no longer than `span` ago; those to come are now. Times
/// are cut to seconds, so that what is one more than `span` ago may have been just beyond it.
fn full(times: impl Iterator<Item = i64>, most: u32, span: i64, now: i64) -> Option<Duration> {
    let times = times.map(|at| at.min(now));
    let mut recent: Vec<i64> = times.filter(|at| now.saturating_sub(*at) <= span).collect();
    recent.sort_unstable();
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    let over = recent.len().checked_sub(most)?;
    // With a budget of nothing there is never room.
    let until = recent.get(over).copied().unwrap_or(now) + span + 1;
    Some(Duration::from_secs(
        u64::try_from(until - now).unwrap_or(1).max(1),
    ))
}

fn seconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NOW: i64 = 1_000_000;

    fn claim(owner: &str, pod: &str) -> Claim {
        Claim {
            owner: owner.into(),
            namespace: format!("of-{owner}"),
            pod: pod.into(),
        }
    }

    fn wait(seconds: u64, why: Hindrance) -> Verdict {
        let wait = Duration::from_secs(seconds);
        Verdict::Wait { wait, why }
    }

    #[test]
    fn one_pod_of_an_owner_in_two_minutes_and_others_meanwhile() {
        let (mut ledger, terms) = (Ledger::default(), Terms::default());
        let mut ask = |owner, pod, at| ledger.ask(&claim(owner, pod), &terms, NOW + at);
        assert_eq!(ask("d", "p1", 0), Verdict::Granted);
        assert_eq!(ask("d", "p2", 0), wait(121, Hindrance::Cooldown));
        assert_eq!(ask("e", "q1", 0), Verdict::Granted);
        assert_eq!(ask("d", "p2", 120), wait(1, Hindrance::Cooldown));
        assert_eq!(ask("d", "p2", 121), Verdict::Granted);
    }

    #[test]
    fn a_claim_that_came_to_nothing_does_not_count_twice() {
        let (mut ledger, terms) = (Ledger::default(), Terms::default());
        for at in 0..10 {
            let verdict = ledger.ask(&claim("d", "p"), &terms, NOW + at);
            assert_eq!(verdict, Verdict::Granted);
        }
        assert_eq!(ledger.entries.len(), 1);
        // But it counts from then on.
        assert_eq!(
            ledger.ask(&claim("d", "p2"), &terms, NOW + 100),
            wait(30, Hindrance::Cooldown)
        );
    }

    #[test]
    fn who_tries_again_and_again_takes_no_room_for_longer_than_the_window() {
        let mut ledger = Ledger::default();
        let terms = Terms {
            max_resets_per_owner: 1,
            ..Terms::default()
        };
        for at in (0..3600).step_by(300) {
            let verdict = ledger.ask(&claim("d", "p"), &terms, NOW + at);
            assert_eq!(verdict, Verdict::Granted);
        }
        let other = claim("d", "p2");
        let given_up = Verdict::GivenUp {
            wait: Duration::from_secs(1),
            resets: 1,
        };
        assert_eq!(ledger.ask(&other, &terms, NOW + 3600), given_up);
        assert_eq!(ledger.ask(&other, &terms, NOW + 3601), Verdict::Granted);
    }

    #[test]
    fn what_is_withdrawn_has_never_been() {
        let (mut ledger, terms) = (Ledger::default(), Terms::default());
        for number in 0..10 {
            let pod = format!("p{number}");
            let verdict = ledger.ask(&claim("d", &pod), &terms, NOW + number);
            assert_eq!(verdict, Verdict::Granted);
            ledger.withdraw(&pod);
        }
        assert_eq!(ledger, Ledger::default());
    }

    #[test]
    fn after_three_in_an_hour_it_is_the_application_until_the_hour_is_over() {
        let (mut ledger, terms) = (Ledger::default(), Terms::default());
        for (pod, at) in [("p1", 0), ("p2", 200), ("p3", 400)] {
            let verdict = ledger.ask(&claim("d", pod), &terms, NOW + at);
            assert_eq!(verdict, Verdict::Granted);
        }
        let given_up = |seconds| Verdict::GivenUp {
            wait: Duration::from_secs(seconds),
            resets: 3,
        };
        let mut ask = |at| ledger.ask(&claim("d", "p4"), &terms, NOW + at);
        assert_eq!(ask(401), given_up(3600 + 1 - 401));
        assert_eq!(ask(3600), given_up(1));
        assert_eq!(ask(3601), Verdict::Granted);
    }

    #[test]
    fn one_namespace_cannot_use_up_what_the_cluster_has() {
        let mut ledger = Ledger::default();
        let terms = Terms {
            max_resets_per_hour: 4,
            ..Terms::default()
        };
        let ask = |ledger: &mut Ledger, namespace: &str, number: i64| {
            let claim = Claim {
                owner: format!("{namespace}{number}"),
                namespace: namespace.into(),
                pod: format!("{namespace}{number}"),
            };
            ledger.ask(&claim, &terms, NOW + number)
        };
        for number in 0..2 {
            assert_eq!(ask(&mut ledger, "greedy", number), Verdict::Granted);
        }
        let waits = wait(3601 - 2, Hindrance::ClusterBudget);
        assert_eq!(ask(&mut ledger, "greedy", 2), waits);
        for number in 2..4 {
            assert_eq!(ask(&mut ledger, "other", number), Verdict::Granted);
        }
        let all = ask(&mut ledger, "third", 4);
        assert_eq!(all, wait(3601 - 4, Hindrance::ClusterBudget));
    }

    #[test]
    fn clocks_that_differ_do_not_shorten_the_cooldown() {
        let (mut ledger, terms) = (Ledger::default(), Terms::default());
        let other = claim("d", "p2");
        ledger.ask(&claim("d", "p1"), &terms, NOW + 60);
        // To the one whose clock is behind that is just now.
        for at in [0, 30] {
            let verdict = ledger.ask(&other, &terms, NOW + at);
            assert_eq!(verdict, wait(121, Hindrance::Cooldown));
        }
        let waits = wait(1, Hindrance::Cooldown);
        assert_eq!(ledger.ask(&other, &terms, NOW + 180), waits);
        // Who tries again by that clock does not shorten it either.
        let verdict = ledger.ask(&claim("d", "p1"), &terms, NOW);
        assert_eq!(verdict, Verdict::Granted);
        assert_eq!(ledger.ask(&other, &terms, NOW + 180), waits);
        assert_eq!(ledger.ask(&other, &terms, NOW + 181), Verdict::Granted);
    }

    #[test]
    fn a_time_that_nobody_can_have_written_keeps_nobody_waiting_for_longer_than_a_window() {
        let (mut ledger, terms) = (Ledger::default(), Terms::default());
        ledger.ask(&claim("d", "p1"), &terms, i64::MAX);
        let other = claim("d", "p2");
        let verdict = ledger.ask(&other, &terms, NOW);
        assert_eq!(verdict, wait(121, Hindrance::Cooldown));
        let verdict = ledger.ask(&other, &terms, NOW + 3600 + 121);
        assert_eq!(verdict, Verdict::Granted);
    }

    #[test]
    fn nothing_is_kept_for_longer_than_it_matters() {
        let (mut ledger, terms) = (Ledger::default(), Terms::default());
        for number in 0..50 {
            let owner = number.to_string();
            let at = NOW + 100 * number;
            ledger.ask(&claim(&owner, &owner), &terms, at);
        }
        assert_eq!(ledger.entries.len(), 37);
    }

    proptest! {
        /// Whatever is asked, and whenever, and whatever of it comes to nothing: what was granted keeps within all limits.
        #[test]
        fn what_is_granted_keeps_within_every_limit(
            asked in prop::collection::vec((0..4_u8, 0..12_u8, 0..900_i64, prop::bool::weighted(0.2)), 1..120),
            per_owner in 1..4_u32,
            budget in 1..8_u32,
        ) {
            let terms = Terms { max_resets_per_owner: per_owner, max_resets_per_hour: budget, ..Terms::default() };
            let mut ledger = Ledger::default();
            // Each with when it was granted first, and last.
            let mut granted: Vec<(i64, i64, String, String)> = Vec::new();
            let mut now = NOW;
            for (owner, pod, later, is_withdrawn) in asked {
                now += later;
                let owner = format!("d{owner}");
                let pod = format!("{owner}-{pod}");
                let claim = Claim { namespace: "n".into(), owner: owner.clone(), pod: pod.clone() };
                match ledger.ask(&claim, &terms, now) {
                    Verdict::Granted => {
                        let known = granted.iter().position(|(.., known)| *known == pod);
                        let known = known.map(|index| granted.remove(index));
                        let first = known.map(|(first, ..)| first).filter(|first| now - first <= 3600);
                        if is_withdrawn {
                            ledger.withdraw(&pod);
                        } else {
                            granted.push((first.unwrap_or(now), now, owner, pod));
                        }
                    }
                    Verdict::Wait { wait, .. } | Verdict::GivenUp { wait, .. } => {
                        prop_assert!(!wait.is_zero());
                        // Whoever waits as he is told gets there, if nobody else comes.
                        let (mut later, mut then) = (ledger.clone(), now);
                        let mut tries = 0;
                        while let Verdict::Wait { wait, .. } | Verdict::GivenUp { wait, .. } = later.ask(&claim, &terms, then) {
                            then += i64::try_from(wait.as_secs()).unwrap();
                            tries += 1;
                            prop_assert!(tries < 4);
                        }
                    }
                }
            }
            for (first, last, owner, _) in &granted {
                let of_owner = || granted.iter().filter(|(_, _, of, _)| of == owner);
                let cooling = of_owner().filter(|(_, it, ..)| (0..=120).contains(&(last - it)));
                prop_assert_eq!(cooling.count(), 1);
                let is_recent = |it: &i64| (0..=3600).contains(&(first - it));
                prop_assert!(of_owner().filter(|(it, ..)| is_recent(it)).count() <= per_owner as usize);
                let all = granted.iter().filter(|(it, ..)| is_recent(it)).count();
                prop_assert!(all <= share(budget) as usize);
            }
        }
    }
}
