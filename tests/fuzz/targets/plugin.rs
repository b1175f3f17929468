//! What a plugin needs, with nobody at the other ends.

use std::sync::Arc;
use std::time::Duration;

use reprise::back_off::BackOff;
use reprise::clock::Clock;
use reprise::cri;
use reprise::driver::turns::Turns;
use reprise::driver::{Readers, Starts, Tools};
use reprise::exit_hold::Hold;
use reprise::kube::StaticPods;
use reprise::policy::Start;
use reprise::records::Records;
use reprise::report::Reporter;
use reprise::restart::pod::{Gate, Shared};
use tokio::runtime::{Builder, Runtime};

use super::dir;

pub(super) fn records() -> Records {
    Records::open(&dir().join("state"), &dir().join("run")).expect("a directory")
}

/// A runtime of one thread, whose clock stands still while there is anything to do.
pub(super) fn runtime() -> Runtime {
    let mut builder = Builder::new_current_thread();
    builder
        .enable_all()
        .start_paused(true)
        .build()
        .expect("a runtime")
}

/// Must be called on the async runtime.
pub(super) fn tools() -> Tools {
    let second = Duration::from_secs(1);
    let gate = Gate::default();
    gate.set(true);
    Tools {
        cri: cri::Client::connect("unix:///nonexistent/cri.sock").expect("an endpoint"),
        containerd: None,
        hold: Hold::Hook,
        records: records(),
        reporter: Reporter::new(None, None, Arc::default()),
        metrics: Arc::default(),
        endings: None,
        static_pods: StaticPods::new(dir(), "node"),
        clock: Clock::default(),
        readers: Readers::default(),
        starts: Starts::default(),
        shared: Arc::new(Shared {
            gate: Arc::new(gate),
            start: Start::Auto,
            tells_all: true,
            removals_show: false,
            replay_devices: Vec::new(),
            back_off: BackOff::try_new(second, 10 * second, 60 * second).expect("gaps that grow"),
        }),
        turns: Turns::of(2),
    }
}
