//! What drivers of tests work with: a runtime that answers as it is told to, nobody else, and a directory.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::{Readers, Starts, Tools};
use crate::back_off::BackOff;
use crate::clock::{Clock, Times};
use crate::cri;
use crate::driver::turns::Turns;
use crate::exit_hold::Hold;
use crate::kube::StaticPods;
use crate::metrics::Metrics;
use crate::policy::Start;
use crate::records::Records;
use crate::report::Reporter;
use crate::restart::pod::Shared;

pub(crate) fn tools(cri: cri::Client, dir: &Path) -> Tools {
    let metrics = Arc::<Metrics>::default();
    let [ten, most, reset] = [10, 300, 600].map(Duration::from_secs);
    Tools {
        cri,
        containerd: None,
        hold: Hold::Hook,
        records: Records::open(&dir.join("state"), &dir.join("run")).unwrap(),
        reporter: Reporter::new(None, None, Arc::clone(&metrics)),
        metrics,
        endings: None,
        static_pods: StaticPods::new(&dir.join("manifests"), "node"),
        readers: Readers::default(),
        starts: Starts::default(),
        clock: Clock::of(Times {
            up: 3_600_000,
            unix: 1_700_000_000_000,
        }),
        shared: Arc::new(Shared {
            gate: Arc::default(),
            start: Start::Kubelet,
            tells_all: true,
            removals_show: false,
            replay_devices: Vec::new(),
            back_off: BackOff::try_new(ten, most, reset).unwrap(),
        }),
        turns: Turns::of(1),
    }
}
