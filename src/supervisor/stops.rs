//! When to register with NRI: not while containers are being stopped.
//!
//! A runtime that takes in a plugin waits for every call that it has begun, and keeps every other one waiting meanwhile.
//! `StopContainer` lasts for the whole grace period (containerd 1.7.26 and later: `BlockPluginSync` in
//! `internal/cri/server/container_stop.go`, `acceptPluginConnections` in `pkg/adaptation` of NRI;
//! <https://github.com/containerd/containerd/issues/14083>). Nothing tells of such a call but the pod: it is being deleted,
//! or has been evicted, and containers of it run.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::ids::{PodKey, PodUid};

/// What it takes beyond the grace period: SIGKILL, and the runtime's own time.
const SLACK: Duration = Duration::from_secs(5);
/// After that long, a node on which there is always something being stopped is kept waiting for as long as pods take by
/// default (`DefaultTerminationGracePeriodSeconds`), and for no longer.
const PATIENCE: Duration = Duration::from_mins(1);
const TOLERABLE: Duration = Duration::from_secs(30);

/// A pod that ends and whose containers run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stop {
    /// Its UID as the kubelet knows it.
    pub(super) uid: PodUid,
    /// Its name.
    pub(super) pod: PodKey,
    /// How long its containers may take to stop, from beginning to end.
    pub(super) grace: Duration,
}

/// How long has been waited for what.
#[derive(Debug)]
pub(super) struct Patience {
    began: Instant,
    seen: HashMap<PodUid, Instant>,
}

impl Patience {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            began: now,
            seen: HashMap::new(),
        }
    }

    /// For which of these to wait now. No pod is waited for longer than it may take; when it began to stop nobody knows, so
    /// that this counts from when it was first seen.
    pub(super) fn waits_for<'s>(&mut self, stops: &'s [Stop], now: Instant) -> Vec<&'s Stop> {
        let patient = now.duration_since(self.began) < PATIENCE;
        let waits = |stop: &&Stop| {
            let seen = *self.seen.entry(stop.uid.clone()).or_insert(now);
            let left = (stop.grace + SLACK).saturating_sub(now.duration_since(seen));
            !left.is_zero() && (patient || left > TOLERABLE)
        };
        stops.iter().filter(waits).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stop(name: &str, grace: u64) -> Stop {
        Stop {
            uid: name.into(),
            pod: PodKey {
                namespace: "n".into(),
                name: name.into(),
            },
            grace: Duration::from_secs(grace),
        }
    }

    fn waits(patience: &mut Patience, stops: &[Stop], at: Instant) -> Vec<String> {
        let waits = patience.waits_for(stops, at).into_iter();
        waits.map(|stop| stop.pod.name.clone()).collect()
    }

    #[test]
    fn a_stop_is_waited_for_until_its_grace_period_is_over() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut patience = Patience::new(begin);
        let stops = [stop("short", 1), stop("long", 600)];
        assert_eq!(waits(&mut patience, &stops, at(0)), ["short", "long"]);
        assert_eq!(waits(&mut patience, &stops, at(6)), ["long"]);
        assert_eq!(waits(&mut patience, &stops, at(570)), ["long"]);
        // What is left of it by then is what any pod may take.
        assert!(waits(&mut patience, &stops, at(576)).is_empty());
    }

    #[test]
    fn a_node_that_always_stops_something_is_not_waited_for_for_ever() {
        let begin = Instant::now();
        let mut patience = Patience::new(begin);
        for second in 0..59 {
            let stops = [stop(&second.to_string(), 25)];
            let now = begin + Duration::from_secs(second);
            assert_eq!(waits(&mut patience, &stops, now).len(), 1);
        }
        let now = begin + Duration::from_mins(1);
        assert!(waits(&mut patience, &[stop("last", 25)], now).is_empty());
        assert_eq!(waits(&mut patience, &[stop("long", 90)], now), ["long"]);
    }
}
