//! Both ends of a connection, for tests.

mod plugin;
mod runtime;

pub(super) use plugin::{Recorder, Running, connected, container, create, pod, stop};
pub(super) use runtime::{
    Connection, Registration, Runtime, containerd, frame, in_two_seconds, soon,
};
