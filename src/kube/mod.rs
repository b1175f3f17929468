//! The API server: the pods of this node, and events on them. Everything works without it.

mod conditions;
mod connect;
mod daemon_sets;
mod declaration;
mod endings;
mod events;
mod evictions;
mod features;
mod leases;
mod lifecycle;
mod owners;
mod pod_spec;
mod pods;
mod start_duties;
mod static_pods;
mod traces;
mod variables;

pub use conditions::{Condition, Conditions};
pub(crate) use conditions::{LAST_RESTART, is_gone};
pub use connect::{KubeError, connect};
pub(crate) use connect::{connect_as_user, connect_once};
pub(crate) use daemon_sets::DaemonSets;
pub use declaration::Declaration;
pub use endings::{Ending, Endings, ExitTimes};
pub use events::{EventKind, Events, Said};
pub(crate) use evictions::{Evicted, Evictions, Version};
pub use features::{KubeletFeatures, NoVersion, watch_features};
pub use leases::LeaseError;
pub(crate) use leases::SharedLease;
pub use lifecycle::{HttpGet, Lifecycle, LifecycleHook};
pub(crate) use owners::{Owner, OwnerError, may_replace, owner_of};
pub use pod_spec::{ContainerKind, ContainerSpec, DEFAULT_GRACE, PodSpec, RestartPolicy};
pub(crate) use pod_spec::{RESTARTING, container_id, statuses};
pub use pods::{PodChange, Pods};
pub use start_duties::StartDuty;
pub use static_pods::{Manifest, StaticPods};
pub(crate) use traces::Traces;
pub use variables::{Field, Fields, Variables};

/// What the API server, or the way to it, answers instead of what was asked for.
pub use ::kube::Error as ApiError;
