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
    /// When it was granted, oldest first: each of them may have come to something, or be about to.
    granted: Vec<i64>,
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
    Granted {
        /// By which it can be given back: no other grant for that pod has the same.
        stamp: i64,
    },
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
    /// Asks for one more at `now`, and notes it if it is granted. A pod for which that was granted before takes no more room,
    /// but from now on.
    pub(super) fn ask(&mut self, claim: &Claim, terms: &Terms, now: i64) -> Verdict {
        self.tidy(terms, now);
        if let Some(hindered) = self.hindrance(claim, terms, now) {
            return hindered;
        }
        let mut own = self.entries.iter_mut();
        let own = own.find(|entry| entry.pod == claim.pod);
        let stamp = own
            .as_ref()
            .map_or(now, |entry| now.max(entry.last().saturating_add(1)));
        if let Some(entry) = own {
            entry.granted.push(stamp);
        } else {
            self.entries.push(Entry {
                owner: claim.owner.clone(),
                namespace: claim.namespace.clone(),
                pod: claim.pod.clone(),
                granted: vec![stamp],
            });
        }
        Verdict::Granted { stamp }
    }

    /// What was granted for that pod with that stamp has not come to anything, and will not. What was granted for it before or
    /// after, to another plugin or to this one, stands.
    pub(super) fn withdraw(&mut self, pod: &str, stamp: i64) {
        self.keep(|of, granted| of != pod || granted != stamp);
    }

    /// Of each pod the grants that are to stay, and no entry without any.
    fn keep(&mut self, stays: impl Fn(&str, i64) -> bool) {
        for Entry { pod, granted, .. } in &mut self.entries {
            granted.retain(|granted| stays(pod, *granted));
        }
        self.entries.retain(|entry| !entry.granted.is_empty());
    }

    /// What matters to nobody any more goes. What is yet to come, by another API server's clock, stays as it was written, so
    /// that it means the same to that one; but nobody can have written what is further away than a window.
    fn tidy(&mut self, terms: &Terms, now: i64) {
        let kept = seconds(terms.remembered());
        let latest = now.saturating_add(terms.window_seconds.into());
        for entry in &mut self.entries {
            for granted in &mut entry.granted {
                *granted = latest.min(*granted);
            }
        }
        self.keep(|_, granted| now.saturating_sub(granted) <= kept);
    }

    /// Why one more may not be done now.
    fn hindrance(&self, claim: &Claim, terms: &Terms, now: i64) -> Option<Verdict> {
        let others = || self.entries.iter().filter(|entry| entry.pod != claim.pod);
        let owners = || others().filter(|entry| entry.owner == claim.owner);
        let window = i64::from(terms.window_seconds);
        if let Some(wait) = full(
            owners().map(Entry::last),
            terms.max_resets_per_owner,
            window,
            now,
        ) {
            let recent = owners().filter(|entry| now.saturating_sub(entry.last()) <= window);
            let resets = recent.count();
            return Some(Verdict::GivenUp { wait, resets });
        }
        if let Some(wait) = full(
            owners().map(Entry::last),
            1,
            terms.cooldown_seconds.into(),
            now,
        ) && terms.cooldown_seconds > 0
        {
            let why = Hindrance::Cooldown;
            return Some(Verdict::Wait { wait, why });
        }
        let all = others().map(Entry::last);
        let neighbours = others().filter(|entry| entry.namespace == claim.namespace);
        let neighbours = neighbours.map(Entry::last);
        let budget = terms.max_resets_per_hour;
        let waits = [
            full(all, budget, seconds(HOUR), now),
            full(neighbours, share(budget), seconds(HOUR), now),
        ];
        let wait = waits.into_iter().flatten().max()?;
        let why = Hindrance::ClusterBudget;
        Some(Verdict::Wait { wait, why })
    }
}

impl Entry {
    fn last(&self) -> i64 {
        self.granted.last().copied().unwrap_or_default()
    }
}

/// How long until there is room again, if `most` of these times are no longer than `span` ago; those to come are now. Times
/// are cut to seconds, so that what is one more than `span` ago may have been just beyond it.
pub(super) fn full(
    times: impl Iterator<Item = i64>,
    most: u32,
    span: i64,
    now: i64,
) -> Option<Duration> {
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

pub(super) fn seconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;

    const NOW: i64 = 1_000_000;

    fn claim(owner: &str, pod: &str) -> Claim {
        Claim {
            owner: owner.into(),
            namespace: format!("of-{owner}"),
            pod: pod.into(),
        }
    }

    fn is_granted(verdict: &Verdict) -> bool {
        matches!(verdict, Verdict::Granted { .. })
    }

    fn wait(seconds: u64, why: Hindrance) -> Verdict {
        let wait = Duration::from_secs(seconds);
        Verdict::Wait { wait, why }
    }

    #[test]
    fn one_pod_of_an_owner_in_two_minutes_and_others_meanwhile() {
        let (mut ledger, terms) = (Ledger::default(), Terms::default());
        let mut ask = |owner, pod, at| ledger.ask(&claim(owner, pod), &terms, NOW + at);
        assert!(is_granted(&ask("d", "p1", 0)));
        assert_eq!(ask("d", "p2", 0), wait(121, Hindrance::Cooldown));
        assert!(is_granted(&ask("e", "q1", 0)));
        assert_eq!(ask("d", "p2", 120), wait(1, Hindrance::Cooldown));
        assert!(is_granted(&ask("d", "p2", 121)));
    }

    #[test]
    fn a_claim_that_came_to_nothing_does_not_count_twice() {
        let (mut ledger, terms) = (Ledger::default(), Terms::default());
        for at in 0..10 {
            let verdict = ledger.ask(&claim("d", "p"), &terms, NOW + at);
            assert!(is_granted(&verdict));
        }
        assert_eq!(ledger.entries.len(), 1);
        // But it counts from then on.
        assert_eq!(
            ledger.ask(&claim("d", "p2"), &terms, NOW + 100),
            wait(30, Hindrance::Cooldown)
        );
    }

    #[test]
    fn what_is_granted_again_counts_from_then_on_for_the_window_too() {
        let mut ledger = Ledger::default();
        let terms = Terms {
            max_resets_per_owner: 1,
            ..Terms::default()
        };
        for at in [0, 3500] {
            assert!(is_granted(&ledger.ask(&claim("d", "p"), &terms, NOW + at)));
        }
        let other = claim("d", "p2");
        let given_up = Verdict::GivenUp {
            wait: Duration::from_secs(1),
            resets: 1,
        };
        assert_eq!(ledger.ask(&other, &terms, NOW + 7100), given_up);
        assert!(is_granted(&ledger.ask(&other, &terms, NOW + 7101)));
    }

    #[test]
    fn who_withdraws_takes_back_what_was_granted_to_him_and_nothing_else() {
        let terms = Terms::default();
        // Two plugins are granted the same pod within a second; what of it stands keeps others waiting.
        for (withdrawn, stands_from) in [
            (&[0][..], Some(1)),
            (&[1], Some(0)),
            (&[0, 1], None),
            (&[1, 0], None),
            (&[7], Some(1)),
        ] {
            let mut ledger = Ledger::default();
            for stamp in [NOW, NOW + 1] {
                let granted = ledger.ask(&claim("d", "p"), &terms, NOW);
                assert_eq!(granted, Verdict::Granted { stamp });
            }
            for stamp in withdrawn {
                ledger.withdraw("p", NOW + stamp);
            }
            let last = ledger.entries.first().map(Entry::last);
            assert_eq!(last, stands_from.map(|from| NOW + from), "{withdrawn:?}");
        }
    }

    #[test]
    fn what_is_withdrawn_has_never_been() {
        let (mut ledger, terms) = (Ledger::default(), Terms::default());
        for number in 0..10 {
            let pod = format!("p{number}");
            let verdict = ledger.ask(&claim("d", &pod), &terms, NOW + number);
            assert!(is_granted(&verdict));
            ledger.withdraw(&pod, NOW + number);
        }
        assert_eq!(ledger, Ledger::default());
    }

    #[test]
    fn after_three_in_an_hour_it_is_the_application_until_the_hour_is_over() {
        let (mut ledger, terms) = (Ledger::default(), Terms::default());
        for (pod, at) in [("p1", 0), ("p2", 200), ("p3", 400)] {
            let verdict = ledger.ask(&claim("d", pod), &terms, NOW + at);
            assert!(is_granted(&verdict));
        }
        let given_up = |seconds| Verdict::GivenUp {
            wait: Duration::from_secs(seconds),
            resets: 3,
        };
        let mut ask = |at| ledger.ask(&claim("d", "p4"), &terms, NOW + at);
        assert_eq!(ask(401), given_up(3600 + 1 - 401));
        assert_eq!(ask(3600), given_up(1));
        assert!(is_granted(&ask(3601)));
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
            assert!(is_granted(&ask(&mut ledger, "greedy", number)));
        }
        let waits = wait(3601 - 2, Hindrance::ClusterBudget);
        assert_eq!(ask(&mut ledger, "greedy", 2), waits);
        for number in 2..4 {
            assert!(is_granted(&ask(&mut ledger, "other", number)));
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
        assert_eq!(verdict, Verdict::Granted { stamp: NOW + 61 });
        assert_eq!(ledger.ask(&other, &terms, NOW + 181), waits);
        assert!(is_granted(&ledger.ask(&other, &terms, NOW + 182)));
    }

    #[test]
    fn a_time_that_nobody_can_have_written_keeps_nobody_waiting_for_longer_than_a_window() {
        let (mut ledger, terms) = (Ledger::default(), Terms::default());
        ledger.ask(&claim("d", "p1"), &terms, i64::MAX);
        let other = claim("d", "p2");
        let verdict = ledger.ask(&other, &terms, NOW);
        assert_eq!(verdict, wait(121, Hindrance::Cooldown));
        let verdict = ledger.ask(&other, &terms, NOW + 3600 + 121);
        assert!(is_granted(&verdict));
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
            asked in prop::collection::vec((0..4_u8, 0..12_u8, 0..900_i64, prop::option::weighted(0.2, any::<Index>())), 1..120),
            per_owner in 1..4_u32,
            budget in 1..8_u32,
        ) {
            let terms = Terms { max_resets_per_owner: per_owner, max_resets_per_hour: budget, ..Terms::default() };
            let mut ledger = Ledger::default();
            // Each with every time that it was granted and has not been taken back.
            let mut granted: BTreeMap<(String, String), Vec<i64>> = BTreeMap::new();
            let mut now = NOW;
            for (owner, pod, later, withdrawn) in asked {
                now += later;
                let owner = format!("d{owner}");
                let pod = format!("{owner}-{pod}");
                let claim = Claim { namespace: "n".into(), owner: owner.clone(), pod: pod.clone() };
                match ledger.ask(&claim, &terms, now) {
                    Verdict::Granted { stamp } => {
                        let stamps = granted.entry((owner, pod.clone())).or_default();
                        stamps.push(stamp);
                        if let Some(index) = withdrawn {
                            let stamp = stamps.remove(index.index(stamps.len()));
                            ledger.withdraw(&pod, stamp);
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
            let last = |stamps: &Vec<i64>| stamps.last().copied();
            for ((owner, _), stamps) in &granted {
                let Some(at) = last(stamps) else { continue };
                let within = |span: i64| move |it: &i64| (0..=span).contains(&(at - it));
                let of_owner = || granted.iter().filter(|((of, _), _)| of == owner).filter_map(|(_, it)| last(it));
                prop_assert_eq!(of_owner().filter(within(120)).count(), 1);
                prop_assert!(of_owner().filter(within(3600)).count() <= per_owner as usize);
                let all = granted.values().filter_map(last).filter(within(3600)).count();
                prop_assert!(all <= share(budget) as usize);
            }
        }
    }
}
