//! When a restart came to what, for those who measure.

use std::time::{Duration, Instant};

use crate::plan::Plan;
use crate::restart::machine::Machine;

/// The restart under way so far.
#[derive(Debug, Clone, Copy)]
pub(super) struct Course {
    /// Since when the trigger's exit is held; of a request, when it was heard.
    pub(super) since: Instant,
    down: Option<Instant>,
    /// What has been waited of its back-off before it began anew.
    waited: Duration,
}

/// How long after the exit, or the request, that asked for it a restart came to what. What happened while another plugin was there
/// is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timings {
    /// All that ran had ended.
    pub killed: Option<Duration>,
    /// The first container ran again.
    pub first_running: Option<Duration>,
    /// All did.
    pub all_running: Duration,
}

impl Course {
    pub(super) fn new(since: Instant) -> Self {
        Self {
            since,
            down: None,
            waited: Duration::ZERO,
        }
    }

    /// Looks how far it is.
    pub(super) fn note(&mut self, machine: &Machine, now: Instant) {
        if machine.are_stopped() {
            self.down.get_or_insert(now);
        }
    }

    /// It begins anew, so long after its plan was made.
    pub(super) fn note_anew(&mut self, before: &Plan, after: Duration) {
        self.waited += before.back_off().min(after);
    }

    /// How much of its back-off has been waited, so long after its plan was made.
    pub(super) fn waited(&self, plan: &Plan, after: Duration) -> Duration {
        self.waited + plan.back_off().min(after)
    }

    pub(super) fn timings(&self, machine: &Machine, now: Instant) -> Timings {
        let after = |then: Instant| then.saturating_duration_since(self.since);
        Timings {
            killed: self.down.map(after),
            first_running: machine.starts().min().map(after),
            all_running: after(machine.starts().max().unwrap_or(now)),
        }
    }
}
