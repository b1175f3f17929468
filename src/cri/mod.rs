//! The container runtime: a typed client of its CRI, and of containerd's own API beside it.
//!
//! Nothing here decides anything: every call is one request with a deadline, and every failure says what kind it is.

mod api;
mod client;
mod config;
mod containerd;
mod error;
#[cfg(test)]
mod fake;
mod handlers;
mod model;

pub use api::runtime::v1::{
    ContainerConfig, ContainerMetadata, ImageSpec, LinuxContainerConfig, LinuxContainerResources,
    LinuxContainerSecurityContext, NamespaceOption, PodSandboxConfig,
};
pub use client::{Client, Deadlines};
pub use config::Recovered;
pub use containerd::{Containerd, ExitFeed, TaskExit};
pub use error::CriError;
pub use model::{
    CONTAINER_NAME, ContainerState, ContainerStatus, ContainerSummary, RuntimeVersion,
    SandboxState, SandboxSummary,
};
