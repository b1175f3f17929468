//! The container runtime: a typed client of its CRI, and of containerd's own API beside it; the processes of its containers.
//!
//! Nothing here decides anything: every call is one request with a deadline, and every failure says what kind it is.

mod api;
mod client;
mod config;
mod containerd;
mod crio;
mod error;
#[cfg(test)]
pub(crate) mod fake;
mod handlers;
mod model;
mod poststop;
pub(crate) mod process;

pub use api::runtime::v1::{
    ContainerConfig, ContainerMetadata, ImageSpec, LinuxContainerConfig, LinuxContainerResources,
    LinuxContainerSecurityContext, NamespaceOption, PodSandboxConfig,
};
pub use client::{Client, Deadlines};
pub use config::Recovered;
pub use containerd::{Containerd, ExitFeed, TaskExit};
pub use crio::Told;
pub use error::CriError;
pub use model::{
    CONTAINER_NAME, ContainerState, ContainerStatus, ContainerSummary, RuntimeVersion,
    SandboxState, SandboxSummary,
};
pub(crate) use model::{Map, OF_POD, POD_UID};

/// Reads a text that claims to be a runtime's verbose info in every way in which one is read, for the fuzzer. The
/// configuration of a container in it, with the status that such a container would have.
pub(crate) fn read_verbose_info(info: &str) -> Option<(ContainerStatus, ContainerConfig)> {
    let _ = handlers::read(info);
    let _ = poststop::hooks(info);
    let _ = crio::read(info);
    let _ = config::recover::<PodSandboxConfig>("PodSandboxStatus", info);
    let recovered = config::recover::<ContainerConfig>("ContainerStatus", info);
    let config = recovered.ok()??.config;
    let status = api::runtime::v1::ContainerStatus {
        metadata: config.metadata.clone(),
        labels: config.labels.clone(),
        annotations: config.annotations.clone(),
        ..Default::default()
    };
    Some((status.try_into().ok()?, config))
}
