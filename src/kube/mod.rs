//! The API server: the pods of this node, and events on them. Everything works without it.

mod connect;
mod events;
mod pod_spec;
mod pods;

pub use connect::{KubeError, connect};
pub use events::{EventKind, Events};
pub use pod_spec::{ContainerKind, ContainerSpec, PodSpec, RestartPolicy};
pub use pods::{PodChange, Pods};
