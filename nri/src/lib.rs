//! Node Resource Interface (NRI): a stub to write plugins of container runtimes with.
//!
//! Implement [`Plugin`], give it to [`Stub::builder`], and [`run`](Stub::run) it: the stub connects
//! to the runtime (or takes the connection of a plugin that the runtime launched, see [`Launched`]),
//! registers, and calls the plugin for each event that it subscribed to. It speaks to NRI 0.2 to
//! 0.12, the versions in containerd 1.7 and later and CRI-O 1.26 and later.
//!
//! ```no_run
//! use nri::api::{Container, PodSandbox};
//! use nri::{EventMask, Plugin, Stub};
//!
//! struct Exits;
//!
//! impl Plugin for Exits {
//!     fn events(&self) -> EventMask {
//!         EventMask::STOP_CONTAINER
//!     }
//!
//!     async fn stop_container(&self, pod: PodSandbox, container: Container) {
//!         println!("{}/{} exited", pod.name, container.name);
//!     }
//! }
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), nri::NriError> {
//! let stub = Stub::builder(Exits).name("exits").index("10").build()?;
//! stub.run(std::future::pending()).await
//! # }
//! ```
//!
//! Two things that upstream's Go stub offers are left out: asking for updates of other containers,
//! and evicting them. The runtime ignores the latter, and the former deadlocks when asked for from
//! inside an event handler (`pkg/adaptation`, before v0.12.1). Of pods, containers and adjustments,
//! [`api`] says what is there.
//!
//! The stub logs with `tracing`: connections at info, and at warn and error what somebody should
//! look into. Events are not logged.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

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

/// What the messages in [`api`] are made with, in the version that they need.
pub use protobuf;

/// The messages of NRI's `pkg/api/api.proto` (v0.12.5) that a plugin receives or answers with.
///
/// A message inside another is a [`MessageField`](protobuf::MessageField), which reads as an empty
/// message where there is none:
///
/// ```
/// use nri::api::{Container, ContainerAdjustment, ContainerState, Hook};
///
/// let mut container = Container::new();
/// assert_eq!(container.linux.cgroups_path, "");
/// container.state = ContainerState::CONTAINER_RUNNING.into();
/// assert_eq!(
///     container.state.enum_value_or_default(),
///     ContainerState::CONTAINER_RUNNING
/// );
///
/// let mut hook = Hook::new();
/// hook.path = "/opt/say-goodbye".into();
/// hook.timeout.mut_or_insert_default().value = 2;
/// let mut adjustment = ContainerAdjustment::new();
/// adjustment.hooks.mut_or_insert_default().poststop.push(hook);
/// ```
pub mod api {
    pub use crate::wire::nri::{
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
