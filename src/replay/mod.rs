//! Start by replay: the plugin makes the next attempt of each container from the very configuration that the kubelet
//! gave the runtime for the last one. What may be replayed, and what the next attempt is made from; no I/O.

mod attempt;
mod blocker;
mod requests;
#[cfg(test)]
mod tests;

pub use attempt::{
    Attempt, Room, complete, has_image, has_variables, have_their_cpus, images, inits_are_quick,
    log_link,
};
pub use blocker::{Devices, ReplayBlocker, blocker};
pub(crate) use blocker::{blockers_of, many};
pub(crate) use requests::Requests;

/// Until they are made, configurations take up to ten times as much memory as they have bytes.
const MOST_BYTES: usize = 1024 * 1024;
