//! What is counted and measured, and the address at which people and probes ask for it, and for how the plugin is.
//!
//! No label tells of a pod, and each has few values: how many series there are does not depend on what runs on the node.

mod handlers;
mod health;
mod labels;
mod serve;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Metric, Registry, Unit};

use crate::plan::Plan;
use crate::replay::ReplayBlocker;
use crate::restart::Refused;
use crate::restart::machine::Outcome;
use crate::restart::pod::Timings;
pub use handlers::{Handlers, Handling};
pub use health::Health;
pub(crate) use serve::serve_beside;

/// Names and values.
type Labels<const N: usize> = [(&'static str, &'static str); N];
type Counters<const N: usize> = Family<Labels<N>, Counter>;
type Histograms<const N: usize> = Family<Labels<N>, Histogram, fn() -> Histogram>;

/// From a replay on an idle node to a pod that takes its grace period to the end.
const RESTART_SECONDS: [f64; 18] = [
    0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 15.0, 30.0, 60.0, 120.0,
    300.0,
];
/// No exit is held for longer (`exit_hold::LIMIT`), but for the moment that it takes to say so.
const HOLD_SECONDS: [f64; 12] = [0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.5, 6.0, 7.0, 8.1];
/// As they grow by default.
const BACK_OFF_SECONDS: [f64; 7] = [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 600.0];

/// All that is counted and measured since this process began.
#[derive(Debug)]
pub struct Metrics {
    restarts: Counters<4>,
    exit_to_killed: Histograms<2>,
    exit_to_first_running: Histograms<2>,
    exit_to_all_running: Histograms<2>,
    under_way: Gauge,
    backing_off: Gauge,
    back_offs: Histogram,
    replays_declined: Counters<1>,
    begun_anew: Counters<1>,
    unmatched_exits: Counter,
    exits_held: Gauge,
    exit_holds: Histogram,
    gate_refusals: Counters<1>,
    leftovers: Counter,
    nri_connected: Gauge,
    nri_reconnects: Counter,
    was_connected: AtomicBool,
    handlers: Handlers,
    registry: Registry,
}

/// One more of what a gauge shows, until this is dropped.
#[derive(Debug)]
pub struct Counted(Gauge);

impl Counted {
    fn by(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("reprise");
        let it = &mut registry;
        let version = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        it.register("build", "The plugin that runs", version);
        Self {
            restarts: counted(it, "restarts", "Restarts that are over"),
            exit_to_killed: of_restarts(
                it,
                "exit_to_killed",
                "From the exit, or the request, that asked for a restart until all that ran had ended",
            ),
            exit_to_first_running: of_restarts(
                it,
                "exit_to_first_running",
                "From the same until the first container ran again, where no back-off was due",
            ),
            exit_to_all_running: of_restarts(
                it,
                "exit_to_all_running",
                "From the same until all containers ran again, where no back-off was due",
            ),
            under_way: counted(it, "restarts_under_way", "Pods that restart now"),
            backing_off: counted(
                it,
                "pods_backing_off",
                "Those of them of which nothing may start yet, because they restart too often",
            ),
            back_offs: measured(
                it,
                "back_off",
                "How long a restart had to wait, because the pod restarts too often",
                Histogram::new(BACK_OFF_SECONDS),
            ),
            replays_declined: counted(
                it,
                "replays_declined",
                "Restarts that were left to the kubelet to start, by what is in the way of a replay",
            ),
            begun_anew: counted(
                it,
                "restarts_begun_anew",
                "Restarts that were left to the kubelet in the middle, because a replay failed or containers started out of order",
            ),
            unmatched_exits: counted(
                it,
                "unmatched_exits",
                "Failures of containers with rules, none of which matches",
            ),
            exits_held: counted(
                it,
                "exits_held",
                "Whether there is what keeps exits from being seen",
            ),
            exit_holds: measured(
                it,
                "exit_hold",
                "How long exits were kept from being seen",
                Histogram::new(HOLD_SECONDS),
            ),
            gate_refusals: counted(
                it,
                "gate_refusals",
                "Containers that the kubelet wanted to create too early, by why it was too early",
            ),
            leftovers: counted(
                it,
                "leftovers_swept",
                "Containers that were made for a restart, never started, and removed when it was over or had begun anew",
            ),
            nri_connected: counted(
                it,
                "nri_connected",
                "Whether the runtime asks the plugin before it creates a container",
            ),
            nri_reconnects: counted(
                it,
                "nri_reconnects",
                "How often the runtime has taken the plugin in again",
            ),
            was_connected: AtomicBool::default(),
            handlers: Handlers::new(measured(
                it,
                "nri_handler",
                "How long the runtime, and with it the node, waited for the plugin",
                handlers::histograms(),
            )),
            registry,
        }
    }
}

fn counted<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}

fn measured<M: Metric + Clone>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M {
    registry.register_with_unit(name, help, Unit::Seconds, metric.clone());
    metric
}

fn of_restarts(registry: &mut Registry, name: &str, help: &str) -> Histograms<2> {
    let histograms: Histograms<2> =
        Family::new_with_constructor(|| Histogram::new(RESTART_SECONDS));
    measured(registry, name, help, histograms)
}

impl Metrics {
    /// All of it in the text format of `OpenMetrics` 1.0.
    pub fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        text::encode(&mut text, &self.registry)?;
        Ok(text)
    }

    /// A restart is over.
    pub(crate) fn restarted(&self, plan: &Plan, outcome: Outcome, timings: Timings) {
        let (action, way) = (("action", plan.action.name()), ("way", labels::way(plan)));
        let trigger = ("trigger", labels::trigger(&plan.trigger));
        let counter = |outcome: Outcome| {
            let labels = [action, trigger, way, ("outcome", outcome.name())];
            self.restarts.get_or_create_owned(&labels)
        };
        // Of what begins at 1, Prometheus does not see that it has grown.
        for any in Outcome::ALL {
            counter(any);
        }
        counter(outcome).inc();
        if outcome != Outcome::Completed {
            return;
        }
        let measure = |histograms: &Histograms<2>, took: Duration| {
            let histogram = histograms.get_or_create(&[action, way]);
            histogram.observe(took.as_secs_f64());
        };
        if let Some(killed) = timings.killed {
            measure(&self.exit_to_killed, killed);
        }
        if plan.back_off().is_zero() {
            if let Some(first) = timings.first_running {
                measure(&self.exit_to_first_running, first);
            }
            measure(&self.exit_to_all_running, timings.all_running);
        }
    }

    /// A pod restarts, until this is dropped.
    pub(crate) fn under_way(&self) -> Counted {
        Counted::by(&self.under_way)
    }

    /// Nothing of it may start yet, until this is dropped.
    pub(crate) fn backing_off(&self) -> Counted {
        Counted::by(&self.backing_off)
    }

    /// A restart is to wait.
    pub(crate) fn back_off(&self, wait: Duration) {
        self.back_offs.observe(wait.as_secs_f64());
    }

    /// A restart is left to the kubelet before anything has been made.
    pub(crate) fn replay_declined(&self, blocker: &ReplayBlocker) {
        let reason = ("reason", labels::blocker(blocker));
        self.replays_declined.get_or_create(&[reason]).inc();
    }

    /// A restart is left to the kubelet in the middle: it was `disturbed`, or its replay has failed.
    pub(crate) fn begun_anew(&self, disturbed: bool) {
        let cause = if disturbed {
            "disturbed"
        } else {
            "replay_failed"
        };
        self.begun_anew.get_or_create(&[("cause", cause)]).inc();
    }

    /// A container with rules has failed, and none matches.
    pub(crate) fn exit_unmatched(&self) {
        self.unmatched_exits.inc();
    }

    /// Whether there is what can keep exits from being seen.
    pub(crate) fn exits_are_held(&self, held: bool) {
        self.exits_held.set(held.into());
    }

    /// An exit may be seen that was held.
    pub(crate) fn exit_held(&self, held: Duration) {
        self.exit_holds.observe(held.as_secs_f64());
    }

    /// The kubelet may not create a container yet.
    pub(crate) fn gate_refused(&self, refused: &Refused) {
        let reason = ("reason", labels::refused(refused));
        self.gate_refusals.get_or_create(&[reason]).inc();
    }

    /// What belongs to no restart is being removed.
    pub(crate) fn leftover_swept(&self) {
        self.leftovers.inc();
    }

    /// The runtime has taken the plugin in.
    pub(crate) fn nri_connected(&self) {
        self.nri_connected.set(1);
        if self.was_connected.swap(true, Ordering::Relaxed) {
            self.nri_reconnects.inc();
        }
    }

    /// The connection to the runtime is lost.
    pub(crate) fn nri_lost(&self) {
        self.nri_connected.set(0);
    }

    /// The handlers of the runtime's events.
    pub(crate) fn handlers(&self) -> &Handlers {
        &self.handlers
    }
}

#[cfg(test)]
mod tests;
