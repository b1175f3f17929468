//! Node Resource Interface (NRI): a stub to write plugins of container runtimes with.
//!
//! Implement [`Plugin`], give it to [`Stub::builder`], and [`run`](Stub::run) it: the stub connects
//! to the runtime (or takes the connection of a plugin that the runtime launched, see [`Launched`]),
//! registers, and calls the plugin for each event that it subscribed to. It speaks to NRI 0.2 to
//! 0.12, the versions in containerd 1.7 and later and CRI-O 1.26 and later.
//!
//! Two things that upstream's Go stub offers are left out: asking for updates of other containers,
//! and evicting them. The runtime ignores the latter, and the former deadlocks when asked for from
//! inside an event handler (`pkg/adaptation`, before v0.12.1).

mod error;
mod events;
mod launch;
mod mux;
mod plugin;
mod runtime;
mod service;
mod session;
mod stub;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use error::NriError;
pub use events::EventMask;
pub use launch::Launched;
pub use plugin::{Plugin, Refusal};
pub use runtime::{NriVersion, RuntimeInfo};
pub use stub::{DEFAULT_SOCKET, Stub, StubBuilder};

/// The messages of NRI's `pkg/api/api.proto` (v0.12.5) that a plugin receives or answers with.
pub mod api {
    pub use super::wire::nri::{
        Container, ContainerAdjustment, ContainerState, FailurePolicy, Hook, Hooks, Image,
        KeyValue, LinuxContainer, LinuxPodSandbox, Mount, OptionalInt, PodSandbox, User,
    };
}

/// Generated from `protos/nri.proto`.
#[allow(
    clippy::all,
    clippy::pedantic,
    dead_code,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unused_imports,
    unused_mut
)]
mod wire {
    pub mod nri {
        include!(concat!(env!("OUT_DIR"), "/nri.rs"));
    }
    pub mod nri_ttrpc {
        include!(concat!(env!("OUT_DIR"), "/nri_ttrpc.rs"));
    }
}
