//! How long a pod must wait that restarts again and again (KEP-5532, "Unintended Pod Restart Loops").
//!
//! The curve is the kubelet's for containers (`MaxContainerBackOff`, `pkg/kubelet/kubelet.go`): the first restart is
//! immediate, then gaps double from 10 s to 300 s, and after 10 minutes without a restart all is forgotten. A gap
//! counts from the end of the restart before.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ids::ContainerName;
use crate::policy::Request;

/// The gaps between restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackOff {
    initial: Duration,
    longest: Duration,
    forgotten_after: Duration,
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
        })
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

    /// Takes note of a restart that begins at `up_ms`.
    pub fn begun(&mut self, of: Option<&ContainerName>, up_ms: u64, back_off: &BackOff) {
        let before = self.row(of, up_ms, back_off).map_or(0, |row| row.restarts);
        let row = Row {
            restarts: before.saturating_add(1),
            over_at_up_ms: up_ms,
        };
        match of {
            Some(name) => drop(self.containers.insert(name.clone(), row)),
            None => self.pod = Some(row),
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
    /// Zero if that is yet to come, which only a file can say that is none of ours: a wait too long is better than a loop.
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
    };

    #[test]
    fn gaps_double_from_ten_seconds_to_five_minutes_after_a_first_restart_at_once() {
        let mut past = Past::default();
        let mut now = 1_000_000;
        for gap in [0, 10, 20, 40, 80, 160, 300, 300] {
            let wait = past.wait(None, now, &KUBELETS);
            assert_eq!(wait, Duration::from_secs(gap));
            past.begun(None, now, &KUBELETS);
            now += gap * 1000 + 500;
            past.over(None, now);
        }
    }

    #[test]
    fn running_for_ten_minutes_is_a_new_beginning_and_running_for_a_while_counts() {
        let mut past = Past::default();
        past.begun(None, 0, &KUBELETS);
        past.over(None, 1_000);
        assert_eq!(past.wait(None, 5_000, &KUBELETS), Duration::from_secs(6));
        assert_eq!(past.wait(None, 11_000, &KUBELETS), Duration::ZERO);
        past.begun(None, 601_001, &KUBELETS);
        assert_eq!(past.pod.map(|row| row.restarts), Some(1));
    }

    #[test]
    fn a_container_that_restarts_alone_waits_for_itself_only() {
        let mut past = Past::default();
        let (a, b) = ("a".into(), "b".into());
        past.begun(Some(&a), 0, &KUBELETS);
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
            let back_off = BackOff { initial, longest: initial * 30, forgotten_after: initial };
            prop_assert!(back_off.gap(restarts) <= back_off.longest);
            prop_assert!(back_off.gap(restarts) <= back_off.gap(restarts.saturating_add(1)));
        }
    }
}
