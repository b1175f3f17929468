//! How long a pod must wait that restarts again and again (KEP-5532, "Unintended Pod Restart Loops").
//!
//! The curve is the kubelet's for containers (`MaxContainerBackOff`, `pkg/kubelet/kubelet.go`): the first restart is
//! immediate, then gaps double from 10 s to 300 s, and after 10 minutes without a restart all is forgotten. A gap
//! counts from the end of the restart before.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ids::ContainerName;
use crate::kube::Condition;
use crate::policy::Request;

/// The gaps between restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackOff {
    initial: Duration,
    longest: Duration,
    forgotten_after: Duration,
    /// How short pods may make each of these for themselves; `None`: no shorter than they are.
    floor: Option<Duration>,
}

/// What a pod asks for in place of its node's gaps; `None`: these.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Asked {
    /// The gap after the first restart in a row; zero: none at all.
    pub initial: Option<Duration>,
    /// The longest gap.
    pub longest: Option<Duration>,
    /// How long it is to run for a new row.
    pub forgotten_after: Option<Duration>,
}

impl Asked {
    /// This, if its gaps do not shrink.
    pub(crate) fn checked(self) -> Result<Self, BackOffError> {
        if let (Some(initial), Some(longest)) = (self.initial, self.longest) {
            BackOff::try_new(initial, longest, Duration::ZERO)?;
        }
        Ok(self)
    }
}

/// The gaps would shrink.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the first back-off is {initial} s, longer than the longest, {longest} s")]
pub struct BackOffError {
    initial: u64,
    longest: u64,
}

impl BackOff {
    /// Gaps from `initial` (zero: none at all) to `longest`.
    pub fn try_new(
        initial: Duration,
        longest: Duration,
        forgotten_after: Duration,
    ) -> Result<Self, BackOffError> {
        if initial > longest {
            return Err(BackOffError {
                initial: initial.as_secs(),
                longest: longest.as_secs(),
            });
        }
        Ok(Self {
            initial,
            longest,
            forgotten_after,
            floor: None,
        })
    }

    /// The same, of which pods may make each as short as that for themselves; `None`: no shorter than it is.
    #[must_use]
    pub fn with_floor(self, floor: Option<Duration>) -> Self {
        Self { floor, ..self }
    }

    /// The gaps of a pod that asks for `asked`. It may wait for as long as it likes, and less long down to the floor: how
    /// often a node does this work for strangers is its operator's to say. A row forgotten early is a restart at once, so
    /// that the floor holds for that as well.
    #[must_use]
    pub fn asked(self, asked: &Asked) -> Self {
        let allowed = |ours: Duration, asked: Option<Duration>| {
            let least = self.floor.map_or(ours, |floor| floor.min(ours));
            asked.map_or(ours, |asked| asked.max(least))
        };
        let initial = allowed(self.initial, asked.initial);
        let longest = allowed(self.longest, asked.longest);
        // Where one is asked for and the other is not, the other gives way.
        let (initial, longest) = match asked.initial {
            Some(_) => (initial, longest.max(initial)),
            None => (initial.min(longest), longest),
        };
        Self {
            initial,
            longest,
            forgotten_after: allowed(self.forgotten_after, asked.forgotten_after),
            ..self
        }
    }

    /// The gap after that many restarts in a row.
    fn gap(&self, restarts: u32) -> Duration {
        match restarts.checked_sub(1) {
            None => Duration::ZERO,
            Some(doublings) => {
                let factor = 2u32.saturating_pow(doublings);
                self.initial.saturating_mul(factor).min(self.longest)
            }
        }
    }
}

/// A row of restarts: how many, and when the last one was over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Row {
    restarts: u32,
    /// How long the machine had been up, in milliseconds (see [`crate::clock`]).
    over_at_up_ms: u64,
}

/// The restarts of one pod so far, and those of its containers under action `Restart`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Past {
    pod: Option<Row>,
    containers: BTreeMap<ContainerName, Row>,
    /// How often all its containers were restarted.
    #[serde(default)]
    pub(crate) restarts: u32,
    /// What was asked for and answered last.
    #[serde(default)]
    pub(crate) answered: Option<Request>,
    /// What there is to say of the last restart of the whole pod, which the API server may never have been told.
    #[serde(default)]
    pub(crate) last: Option<Condition>,
}

impl Past {
    /// How long the next restart must wait, decided when the machine had been up for `up_ms`: of one container, or of the
    /// pod.
    #[must_use]
    pub fn wait(&self, of: Option<&ContainerName>, up_ms: u64, back_off: &BackOff) -> Duration {
        let Some(row) = self.row(of, up_ms, back_off) else {
            return Duration::ZERO;
        };
        back_off.gap(row.restarts).saturating_sub(row.age(up_ms))
    }

    /// Takes note of a restart that was decided at `up_ms`, and waits for so long. Until it is over, which one that another
    /// replaces never is, it counts as over by then: what was waited is no time that the pod ran for.
    pub fn begun(
        &mut self,
        of: Option<&ContainerName>,
        up_ms: u64,
        wait: Duration,
        back_off: &BackOff,
    ) {
        let before = self.row(of, up_ms, back_off).map_or(0, |row| row.restarts);
        let wait = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
        let row = Row {
            restarts: before.saturating_add(1),
            over_at_up_ms: up_ms.saturating_add(wait),
        };
        match of {
            Some(name) => drop(self.containers.insert(name.clone(), row)),
            None => self.pod = Some(row),
        }
    }

    /// The same of one that another process has begun, which may have died before or after it was over.
    pub(crate) fn resumed(
        &mut self,
        of: Option<&ContainerName>,
        up_ms: u64,
        wait: Duration,
        back_off: &BackOff,
    ) {
        let row = self.row(of, up_ms, back_off);
        if row.is_none_or(|row| row.over_at_up_ms < up_ms) {
            self.begun(of, up_ms, wait, back_off);
        }
    }

    /// The restart that begun last is over.
    pub fn over(&mut self, of: Option<&ContainerName>, up_ms: u64) {
        let row = match of {
            Some(name) => self.containers.get_mut(name),
            None => self.pod.as_mut(),
        };
        if let Some(row) = row {
            row.over_at_up_ms = up_ms;
        }
    }

    /// All containers of the pod were restarted once more.
    pub(crate) fn count(&mut self) {
        self.restarts = self.restarts.saturating_add(1);
    }

    /// So many restarts are known of the pod, which may be of another sandbox.
    pub(crate) fn told(&mut self, restarts: u32) {
        self.restarts = self.restarts.max(restarts);
    }

    /// The restart that begun last is called off: it never was. `before`: the past by then.
    pub(crate) fn take_back(&mut self, before: &Self) {
        self.pod = before.pod;
        self.containers.clone_from(&before.containers);
    }

    fn row(&self, of: Option<&ContainerName>, up_ms: u64, back_off: &BackOff) -> Option<Row> {
        let row = match of {
            Some(name) => self.containers.get(name).copied(),
            None => self.pod,
        };
        row.filter(|row| row.age(up_ms) < back_off.forgotten_after)
    }
}

impl Row {
    /// Zero if that is yet to come: the restart waits, or a file says so that is none of ours, and a wait too long is better
    /// than a loop.
    fn age(&self, up_ms: u64) -> Duration {
        Duration::from_millis(up_ms.saturating_sub(self.over_at_up_ms))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KUBELETS: BackOff = BackOff {
        initial: Duration::from_secs(10),
        longest: Duration::from_mins(5),
        forgotten_after: Duration::from_mins(10),
        floor: None,
    };

    /// What becomes of the kubelet's gaps, in seconds, on a node with that floor, for a pod that asks for these.
    fn asked(
        floor: Option<u64>,
        initial: Option<u64>,
        longest: Option<u64>,
        reset: Option<u64>,
    ) -> [u64; 3] {
        let [initial, longest, forgotten_after] =
            [initial, longest, reset].map(|it| it.map(Duration::from_secs));
        let asked = Asked {
            initial,
            longest,
            forgotten_after,
        };
        let floor = floor.map(Duration::from_secs);
        let it = KUBELETS.with_floor(floor).asked(&asked.checked().unwrap());
        [it.initial, it.longest, it.forgotten_after].map(|it| it.as_secs())
    }

    #[test]
    fn a_pod_may_wait_for_longer_and_less_long_only_where_the_node_lets_it() {
        assert_eq!(asked(None, None, None, None), [10, 300, 600]);
        assert_eq!(asked(None, Some(20), Some(900), Some(700)), [20, 900, 700]);
        assert_eq!(asked(None, Some(1), Some(2), Some(3)), [10, 300, 600]);
        assert_eq!(asked(Some(2), Some(1), Some(3), Some(0)), [2, 3, 2]);
        assert_eq!(asked(Some(0), Some(0), Some(0), Some(0)), [0, 0, 0]);
        // A floor above what the node itself has is no more than that.
        assert_eq!(asked(Some(60), Some(1), Some(1), Some(1)), [10, 60, 60]);
    }

    #[test]
    fn what_a_pod_does_not_ask_for_gives_way_to_what_it_asks_for() {
        assert_eq!(asked(None, Some(400), None, None), [400, 400, 600]);
        assert_eq!(asked(Some(0), None, Some(5), None), [5, 5, 600]);
    }

    #[test]
    fn a_pod_cannot_ask_for_gaps_that_shrink() {
        let [two, one] = [2, 1].map(|it| Some(Duration::from_secs(it)));
        let shrinking = Asked {
            initial: two,
            longest: one,
            forgotten_after: None,
        };
        assert!(shrinking.checked().is_err());
    }

    #[test]
    fn gaps_double_from_ten_seconds_to_five_minutes_after_a_first_restart_at_once() {
        let mut past = Past::default();
        let mut now = 1_000_000;
        for gap in [0, 10, 20, 40, 80, 160, 300, 300] {
            let wait = past.wait(None, now, &KUBELETS);
            assert_eq!(wait, Duration::from_secs(gap));
            past.begun(None, now, wait, &KUBELETS);
            now += gap * 1000 + 500;
            past.over(None, now);
        }
    }

    #[test]
    fn the_wait_of_a_restart_that_another_replaces_is_no_time_that_the_pod_ran_for() {
        for longest in [300, 700] {
            let longest = Duration::from_secs(longest);
            let back_off = BackOff {
                longest,
                ..KUBELETS
            };
            let (mut past, mut now, mut waited) = (Past::default(), 1_000_000, Duration::ZERO);
            for _ in 0..12 {
                let wait = past.wait(None, now, &back_off);
                assert!(wait >= waited, "{wait:?} after {waited:?}");
                past.begun(None, now, wait, &back_off);
                // It exits as soon as it runs, and its restart is not over.
                now += u64::try_from(wait.as_millis()).unwrap();
                waited = wait;
            }
            assert_eq!(waited, longest);
        }
    }

    #[test]
    fn a_restart_that_another_process_has_begun_counts_once() {
        let mut past = Past::default();
        let wait = |past: &Past, now| past.wait(None, now, &KUBELETS).as_secs();
        past.resumed(None, 1_000, Duration::ZERO, &KUBELETS);
        assert_eq!(wait(&past, 1_000), 10);
        // The process died before it had saved that, or after.
        past.resumed(None, 1_000, Duration::ZERO, &KUBELETS);
        assert_eq!(wait(&past, 1_000), 10);
        past.resumed(None, 2_000, Duration::from_secs(9), &KUBELETS);
        past.resumed(None, 2_000, Duration::from_secs(9), &KUBELETS);
        assert_eq!(wait(&past, 11_000), 20);
    }

    #[test]
    fn running_for_ten_minutes_is_a_new_beginning_and_running_for_a_while_counts() {
        let mut past = Past::default();
        past.begun(None, 0, Duration::ZERO, &KUBELETS);
        past.over(None, 1_000);
        assert_eq!(past.wait(None, 5_000, &KUBELETS), Duration::from_secs(6));
        assert_eq!(past.wait(None, 11_000, &KUBELETS), Duration::ZERO);
        past.begun(None, 601_001, Duration::ZERO, &KUBELETS);
        assert_eq!(past.pod.map(|row| row.restarts), Some(1));
    }

    #[test]
    fn a_container_that_restarts_alone_waits_for_itself_only() {
        let mut past = Past::default();
        let (a, b) = ("a".into(), "b".into());
        past.begun(Some(&a), 0, Duration::ZERO, &KUBELETS);
        assert_eq!(past.wait(Some(&a), 0, &KUBELETS), Duration::from_secs(10));
        assert_eq!(past.wait(Some(&b), 0, &KUBELETS), Duration::ZERO);
        assert_eq!(past.wait(None, 0, &KUBELETS), Duration::ZERO);
    }

    #[test]
    fn the_number_of_restarts_never_goes_back() {
        let mut past = Past::default();
        past.count();
        for (told, then) in [(0, 1), (7, 7), (3, 7), (u32::MAX, u32::MAX)] {
            past.told(told);
            assert_eq!(past.restarts, then);
        }
        past.count();
        assert_eq!(past.restarts, u32::MAX);
    }

    #[test]
    fn a_first_gap_longer_than_the_longest_is_refused() {
        let [ten, one] = [10, 1].map(Duration::from_secs);
        assert!(BackOff::try_new(one, ten, ten).is_ok());
        let error = BackOff::try_new(ten, one, ten).unwrap_err();
        assert!(error.to_string().contains("longer than the longest"));
    }

    proptest! {
        #[test]
        fn no_gap_is_longer_than_the_longest(restarts in any::<u32>(), initial in 0u64..1000) {
            let initial = Duration::from_secs(initial);
            let back_off = BackOff { initial, longest: initial * 30, forgotten_after: initial, floor: None };
            prop_assert!(back_off.gap(restarts) <= back_off.longest);
            prop_assert!(back_off.gap(restarts) <= back_off.gap(restarts.saturating_add(1)));
        }

        /// Nothing that it asks for lets a pod restart sooner after a restart than the node's own gaps, or its floor.
        #[test]
        fn no_pod_restarts_sooner_than_its_node_lets_it(
            restarts in 1u32..40, ago in 0u64..2000, floor in proptest::option::of(0u64..1000),
            initial in proptest::option::of(0u64..1000), more in proptest::option::of(0u64..100_000),
            reset in proptest::option::of(0u64..100_000),
        ) {
            let seconds = |it: Option<u64>| it.map(Duration::from_secs);
            let longest = more.map(|more| initial.unwrap_or(0) + more);
            let asked = Asked { initial: seconds(initial), longest: seconds(longest), forgotten_after: seconds(reset) };
            let node = KUBELETS.with_floor(seconds(floor));
            let own = node.asked(&asked.checked().unwrap());
            prop_assert!(own.initial <= own.longest);
            let row = Row { restarts, over_at_up_ms: 0 };
            let past = Past { pod: Some(row), ..Past::default() };
            // How long after the last restart the next one begins.
            let gap = |back_off: &BackOff| {
                let ago = ago * 1000;
                Duration::from_millis(ago) + past.wait(None, ago, back_off)
            };
            let least = floor.map_or(gap(&node), |floor| gap(&node).min(Duration::from_secs(floor)));
            prop_assert!(gap(&own) >= least);
        }
    }
}
