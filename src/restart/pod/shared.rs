//! What the pods of a node have in common.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::back_off::BackOff;
use crate::policy::Start;
use crate::replay::Devices;

/// What all pods of a node share.
#[derive(Debug)]
pub struct Shared {
    /// Whether the kubelet can be kept from creating containers just now.
    pub gate: Arc<Gate>,
    /// Who starts containers again where no pod asks for anything else, and may.
    pub start: Start,
    /// Whether the runtime tells what containers were made from, so that others can be made like them.
    pub tells_all: bool,
    /// Whether the runtime shows that what was never started has exited while it removes it.
    pub removals_show: bool,
    /// Devices that containers may have which are replayed.
    pub replay_devices: Vec<Devices>,
    /// The gaps between restarts, where no pod asks for others, and may.
    pub back_off: BackOff,
}

/// Whether the runtime asks before it creates a container, which it does not while it is not connected.
#[derive(Debug, Default)]
pub struct Gate(AtomicBool);

impl Gate {
    /// It asks from now on, or does not.
    pub fn set(&self, there: bool) {
        self.0.store(there, Ordering::Relaxed);
    }

    pub(crate) fn is_there(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
