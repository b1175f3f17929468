//! The handlers of NRI's events: how long each takes, and which take too long just now.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;

use super::Histograms;
use crate::clock;

/// Up to NRI's own limit for an answer.
const SECONDS: [f64; 12] = [
    0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 2.0,
];

/// The runtime waits for each of them, for all pods of the node.
#[derive(Debug)]
pub struct Handlers {
    took: Histograms<1>,
    running: Mutex<Running>,
}

#[derive(Debug, Default)]
struct Running {
    next: u64,
    since: HashMap<u64, Instant>,
}

/// A handler that runs until this is dropped.
#[derive(Debug)]
pub struct Handling<'h> {
    handlers: &'h Handlers,
    event: &'static str,
    number: u64,
    since: Instant,
}

pub(super) fn histograms() -> Histograms<1> {
    Family::new_with_constructor(|| Histogram::new(SECONDS))
}

impl Handlers {
    pub(super) fn new(took: Histograms<1>) -> Self {
        let running = Mutex::default();
        Self { took, running }
    }

    /// The handler of an event, as NRI calls it, begins.
    pub(crate) fn begin(&self, event: &'static str) -> Handling<'_> {
        let since = clock::now();
        let mut running = self.running();
        running.next += 1;
        let number = running.next;
        running.since.insert(number, since);
        drop(running);
        Handling {
            handlers: self,
            event,
            number,
            since,
        }
    }

    /// For how long the oldest of those that run has been running.
    #[must_use]
    pub fn longest(&self) -> Option<Duration> {
        let oldest = self.running().since.values().min().copied();
        oldest.map(|since| clock::now().saturating_duration_since(since))
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Handling<'_> {
    fn drop(&mut self) {
        let took = clock::now().saturating_duration_since(self.since);
        let histogram = self.handlers.took.get_or_create(&[("event", self.event)]);
        histogram.observe(took.as_secs_f64());
        self.handlers.running().since.remove(&self.number);
    }
}
