//! The API server, as far as this node needs it: its pods, their events and conditions.
//!
//! Nothing waits for it. Without it, or while it is away, the pods last heard of are still known, and what should have
//! been told is dropped.

mod connect;
mod events;
#[cfg(test)]
mod fake;
mod patch;
mod pod_spec;
mod pods;

pub use connect::{KubeError, connect};
pub use events::{Events, Notice, Severity};
pub use patch::{Condition, set_condition};
pub use pod_spec::{
    ContainerKind, ContainerSpec, ExitCodeOperator, Phase, PodObject, PodSpec, RestartPolicy,
    RestartRule,
};
pub use pods::{PodChange, Pods};
