//! What is played: pods, and what ends when.

use std::fmt;
use std::time::Duration;

use fastrand::Rng;

use crate::shape::Shape;

/// The container that asks for the restart.
pub(super) const TRIGGER: &str = "trainer";

/// Longer than any exit is held.
const LEISURELY: &str = "sleep 10; exit 143";

/// From one relist of the kubelet to the next.
const RELIST: Duration = Duration::from_secs(1);

pub(crate) struct Bout {
    pub(super) pods: Vec<DrawnPod>,
    pub(super) strikes: Vec<Strike>,
}

pub(crate) struct DrawnPod {
    kind: Kind,
    start: &'static str,
    /// When its trigger exits.
    pub(super) after: Duration,
}

/// One shape for each way through a restart.
#[derive(Clone, Copy, Debug)]
enum Kind {
    NeverOne,
    NeverThree,
    NeverTwoInits,
    NeverInitSidecar,
    OnFailureTwo,
    OnFailureInit,
    AlwaysTwo,
    AlwaysInitSidecar,
    NeverTimeToStop,
    NeverTimeToStopSidecar,
    AlwaysTimeToStop,
}

const KINDS: [Kind; 11] = [
    Kind::NeverOne,
    Kind::NeverThree,
    Kind::NeverTwoInits,
    Kind::NeverInitSidecar,
    Kind::OnFailureTwo,
    Kind::OnFailureInit,
    Kind::AlwaysTwo,
    Kind::AlwaysInitSidecar,
    Kind::NeverTimeToStop,
    Kind::NeverTimeToStopSidecar,
    Kind::AlwaysTimeToStop,
];

/// What ends, for how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Strike {
    pub(super) what: Fault,
    /// Since the pods were told to exit, or since the strike before was over.
    pub(super) after: Duration,
    pub(super) away: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    PluginKilled,
    PluginTerminated,
    PluginFrozen,
    KubeletKilled,
    KubeletTerminated,
    RuntimeKilled,
    RuntimeTerminated,
    NriCut,
}

/// Faults of the plugin's own are as many as all others.
const FAULTS: [Fault; 10] = [
    Fault::PluginKilled,
    Fault::PluginKilled,
    Fault::PluginKilled,
    Fault::PluginTerminated,
    Fault::PluginFrozen,
    Fault::KubeletKilled,
    Fault::KubeletTerminated,
    Fault::RuntimeKilled,
    Fault::RuntimeTerminated,
    Fault::NriCut,
];

impl Fault {
    /// Whether nobody answers hooks meanwhile.
    pub(super) fn silences_plugin(self) -> bool {
        matches!(
            self,
            Self::PluginKilled | Self::PluginTerminated | Self::PluginFrozen
        )
    }

    /// Whether no restart gets on meanwhile: a runtime that was killed while hooks wait answers only when they have ended.
    pub(super) fn halts_restarts(self) -> bool {
        self.silences_plugin() || matches!(self, Self::RuntimeKilled | Self::RuntimeTerminated)
    }
}

impl DrawnPod {
    /// Whether the plugin may start its containers.
    pub(super) fn is_replayed(&self) -> bool {
        self.start == "Auto"
    }
}

impl Bout {
    pub(super) fn kills_plugin(&self) -> bool {
        self.strikes_any(&[Fault::PluginKilled])
    }

    pub(super) fn kills_kubelet(&self) -> bool {
        self.strikes_any(&[Fault::KubeletKilled, Fault::KubeletTerminated])
    }

    pub(super) fn ends_runtime(&self) -> bool {
        self.strikes_any(&[Fault::RuntimeKilled, Fault::RuntimeTerminated])
    }

    /// Whether the kubelet may see that a container waits, and start it without a hook.
    pub(super) fn cuts_nri_for_long(&self) -> bool {
        let mut strikes = self.strikes.iter();
        strikes.any(|it| it.what == Fault::NriCut && it.away >= RELIST)
    }

    /// Whether the kubelet may create containers meanwhile that nobody looks at.
    pub(super) fn takes_gate_away(&self) -> bool {
        self.strikes_any(&[
            Fault::PluginKilled,
            Fault::PluginTerminated,
            Fault::PluginFrozen,
            Fault::NriCut,
        ])
    }

    fn strikes_any(&self, faults: &[Fault]) -> bool {
        self.strikes.iter().any(|it| faults.contains(&it.what))
    }

    pub(super) fn drawn_from(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let pods = (0..rng.usize(1..=4)).map(|_| DrawnPod::drawn(&mut rng));
        let pods = pods.collect();
        let mut strikes = vec![Strike::drawn(&mut rng)];
        if rng.u8(..4) == 0 {
            strikes.push(Strike::drawn(&mut rng));
        }
        Self { pods, strikes }
    }
}

impl DrawnPod {
    fn drawn(rng: &mut Rng) -> Self {
        Self {
            kind: KINDS[rng.usize(..KINDS.len())],
            start: if rng.bool() { "Auto" } else { "Kubelet" },
            after: millis(rng, 50),
        }
    }

    pub(super) fn shape(&self) -> Shape {
        let shape = match self.kind {
            Kind::NeverOne => Shape::never(),
            Kind::NeverThree => Shape::never().regular("logger").regular("server"),
            Kind::NeverTwoInits => Shape::never()
                .init("fetch")
                .init("prepare")
                .regular("logger"),
            Kind::NeverInitSidecar => Shape::never()
                .init("fetch")
                .sidecar("proxy")
                .regular("logger"),
            Kind::OnFailureTwo => Shape::on_failure().regular("logger"),
            Kind::OnFailureInit => Shape::on_failure().init("fetch").regular("logger"),
            Kind::AlwaysTwo => Shape::always().regular("logger"),
            Kind::AlwaysInitSidecar => Shape::always()
                .init("fetch")
                .sidecar("proxy")
                .regular("logger"),
            Kind::NeverTimeToStop => Shape::never().regular("logger").on_term(LEISURELY),
            Kind::NeverTimeToStopSidecar => Shape::never()
                .init("fetch")
                .sidecar("proxy")
                .regular("logger")
                .on_term(LEISURELY),
            Kind::AlwaysTimeToStop => Shape::always().regular("logger").on_term(LEISURELY),
        };
        let shape = shape.regular(TRIGGER).grace_period_seconds(20);
        let shape = match self.kind {
            Kind::NeverTimeToStop | Kind::NeverTimeToStopSidecar | Kind::AlwaysTimeToStop => {
                shape.restarts_pod(TRIGGER, 42)
            }
            _ => shape.restarts_all(TRIGGER, 42),
        };
        shape.started_by(self.start)
    }
}

impl Strike {
    fn drawn(rng: &mut Rng) -> Self {
        let after = millis(rng, 3000);
        // Half of them within what a hook waits for a plugin.
        let longest = if rng.bool() { 4000 } else { 20_000 };
        Self {
            what: FAULTS[rng.usize(..FAULTS.len())],
            after,
            away: millis(rng, longest),
        }
    }
}

fn millis(rng: &mut Rng, most: u64) -> Duration {
    Duration::from_millis(rng.u64(..=most))
}

impl fmt::Display for Bout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, pod) in self.pods.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            write!(f, "{comma}{:?} by {}", pod.kind, pod.start)?;
        }
        for strike in &self.strikes {
            let Strike { what, after, away } = strike;
            let (after, away) = (after.as_millis(), away.as_millis());
            write!(f, "; {what:?} after {after} ms for {away} ms")?;
        }
        Ok(())
    }
}
