//! Containers and sandboxes as the runtime reports them, in our own types.

use std::collections::BTreeMap;

use super::api::runtime::v1 as api;
use super::error::CriError;
use crate::ids::{Attempt, ContainerId, ContainerName, ExitCode, PodKey, PodUid, SandboxId};

/// The kubelet's label with the container's name in the pod (`pkg/kubelet/types/labels.go`).
pub const CONTAINER_NAME: &str = "io.kubernetes.container.name";

/// The kubelet's label with the pod's UID (`pkg/kubelet/types/labels.go`).
pub(crate) const POD_UID: &str = "io.kubernetes.pod.uid";
/// The labels by which the kubelet finds a container's pod (`pkg/kubelet/types/labels.go`).
pub(crate) const OF_POD: [&str; 3] = [
    "io.kubernetes.pod.name",
    "io.kubernetes.pod.namespace",
    POD_UID,
];

/// Labels or annotations.
pub(crate) type Map = BTreeMap<String, String>;

/// Who answers on the socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimeVersion {
    /// The runtime's name for itself: "containerd" or "cri-o".
    pub name: String,
    /// Its version, such as "v2.3.7" or "1.36.0".
    pub version: String,
    /// The version of the CRI: "v1".
    pub api_version: String,
}

impl RuntimeVersion {
    /// Whether containerd's own API is there beside the CRI.
    #[must_use]
    pub fn is_containerd(&self) -> bool {
        self.name == "containerd"
    }
}

impl From<api::VersionResponse> for RuntimeVersion {
    fn from(wire: api::VersionResponse) -> Self {
        Self {
            name: wire.runtime_name,
            version: wire.runtime_version,
            api_version: wire.runtime_api_version,
        }
    }
}

/// The state of a container in the CRI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ContainerState {
    /// Made, never started.
    Created,
    /// Started, and its exit not yet published: an exit that is held still counts as running.
    Running,
    /// Exited, and the exit published.
    Exited,
    /// The runtime cannot tell, or says something that this version does not know.
    Unknown,
}

impl From<i32> for ContainerState {
    fn from(wire: i32) -> Self {
        match api::ContainerState::try_from(wire) {
            Ok(api::ContainerState::ContainerCreated) => Self::Created,
            Ok(api::ContainerState::ContainerRunning) => Self::Running,
            Ok(api::ContainerState::ContainerExited) => Self::Exited,
            Ok(api::ContainerState::ContainerUnknown) | Err(_) => Self::Unknown,
        }
    }
}

/// The state of a sandbox in the CRI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SandboxState {
    /// Containers can run in it.
    Ready,
    /// Stopped, or in a state that this version does not know.
    NotReady,
}

impl From<i32> for SandboxState {
    fn from(wire: i32) -> Self {
        match api::PodSandboxState::try_from(wire) {
            Ok(api::PodSandboxState::SandboxReady) => Self::Ready,
            Ok(api::PodSandboxState::SandboxNotready) | Err(_) => Self::NotReady,
        }
    }
}

/// One container of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerSummary {
    /// The container.
    pub id: ContainerId,
    /// The sandbox that it is in.
    pub sandbox: SandboxId,
    /// Its name in the pod: the kubelet's label, or the CRI name where there is none.
    pub name: ContainerName,
    /// Which attempt of that name.
    pub attempt: Attempt,
    /// Its state.
    pub state: ContainerState,
    /// When it was made, in nanoseconds since the epoch. The kubelet orders attempts by this.
    pub created_at: i64,
    /// Its labels.
    pub labels: Map,
    /// Its annotations.
    pub annotations: Map,
    /// The image that it runs, by digest or id.
    pub image_ref: String,
}

impl TryFrom<api::Container> for ContainerSummary {
    type Error = CriError;

    fn try_from(wire: api::Container) -> Result<Self, CriError> {
        let metadata = wire.metadata.ok_or_else(|| CriError::Malformed {
            call: "ListContainers",
            problem: format!("container {:?} has no metadata", wire.id),
        })?;
        Ok(Self {
            id: wire.id.into(),
            sandbox: wire.pod_sandbox_id.into(),
            name: name_of(&wire.labels, metadata.name),
            attempt: Attempt(metadata.attempt),
            state: wire.state.into(),
            created_at: wire.created_at,
            labels: wire.labels,
            annotations: wire.annotations,
            image_ref: wire.image_ref,
        })
    }
}

/// All that the runtime says of one container.
#[derive(Debug, Clone, PartialEq)]
pub struct ContainerStatus {
    /// The container.
    pub id: ContainerId,
    /// Its name in the pod: the kubelet's label, or the CRI name where there is none.
    pub name: ContainerName,
    /// Which attempt of that name.
    pub attempt: Attempt,
    /// Its state.
    pub state: ContainerState,
    /// When it was made, in nanoseconds since the epoch.
    pub created_at: i64,
    /// When it was started, in nanoseconds since the epoch; 0 if it never was.
    pub started_at: i64,
    /// When it exited, in nanoseconds since the epoch; 0 if it has not.
    pub finished_at: i64,
    /// What it exited with, once it has.
    pub exit_code: Option<ExitCode>,
    /// Why it is in its state, in one word: "Completed", "Error", `OOMKilled`.
    pub reason: String,
    /// The log file's whole path; `None` if it has none.
    pub log_path: Option<String>,
    /// Its resources as they are now; `None` if the runtime does not tell.
    pub resources: Option<api::LinuxContainerResources>,
    /// The image that it runs, by digest or id.
    pub image_ref: String,
    /// The image as the kubelet asked for it.
    pub image: api::ImageSpec,
    /// Its labels.
    pub labels: Map,
    /// Its annotations.
    pub annotations: Map,
}

impl ContainerStatus {
    /// Whether the kernel has killed a process of it because it was out of memory. containerd knows that while it shows the
    /// container running, too.
    #[must_use]
    pub fn is_oom_killed(&self) -> bool {
        self.reason == "OOMKilled"
    }
}

impl TryFrom<api::ContainerStatus> for ContainerStatus {
    type Error = CriError;

    fn try_from(wire: api::ContainerStatus) -> Result<Self, CriError> {
        let metadata = wire.metadata.ok_or_else(|| CriError::Malformed {
            call: "ContainerStatus",
            problem: format!("container {:?} has no metadata", wire.id),
        })?;
        let state = ContainerState::from(wire.state);
        Ok(Self {
            id: wire.id.into(),
            name: name_of(&wire.labels, metadata.name),
            attempt: Attempt(metadata.attempt),
            state,
            created_at: wire.created_at,
            started_at: wire.started_at,
            finished_at: wire.finished_at,
            exit_code: (state == ContainerState::Exited).then_some(ExitCode(wire.exit_code)),
            reason: wire.reason,
            log_path: Some(wire.log_path).filter(|path| !path.is_empty()),
            resources: wire.resources.and_then(|resources| resources.linux),
            image_ref: wire.image_ref,
            image: wire.image.unwrap_or_default(),
            labels: wire.labels,
            annotations: wire.annotations,
        })
    }
}

/// One sandbox of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxSummary {
    /// The sandbox.
    pub id: SandboxId,
    /// Its pod.
    pub pod: PodKey,
    /// Its pod's UID as the kubelet knows it.
    pub uid: PodUid,
    /// Which attempt at a sandbox for this pod.
    pub attempt: Attempt,
    /// Its state.
    pub state: SandboxState,
    /// Its labels: the pod's, and the kubelet's.
    pub labels: Map,
    /// Its annotations: the pod's, and the kubelet's, as they were when the sandbox was made.
    pub annotations: Map,
    /// The runtime class' handler; empty for the default.
    pub runtime_handler: String,
}

impl TryFrom<api::PodSandbox> for SandboxSummary {
    type Error = CriError;

    fn try_from(wire: api::PodSandbox) -> Result<Self, CriError> {
        let metadata = wire.metadata.ok_or_else(|| CriError::Malformed {
            call: "ListPodSandbox",
            problem: format!("sandbox {:?} has no metadata", wire.id),
        })?;
        Ok(Self {
            id: wire.id.into(),
            pod: PodKey {
                namespace: metadata.namespace,
                name: metadata.name,
            },
            uid: metadata.uid.into(),
            attempt: Attempt(metadata.attempt),
            state: wire.state.into(),
            labels: wire.labels,
            annotations: wire.annotations,
            runtime_handler: wire.runtime_handler,
        })
    }
}

fn name_of(labels: &Map, cri_name: String) -> ContainerName {
    labels
        .get(CONTAINER_NAME)
        .cloned()
        .unwrap_or(cri_name)
        .into()
}
