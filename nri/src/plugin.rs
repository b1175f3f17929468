//! What a plugin author writes.

use std::error::Error;
use std::fmt;
use std::future::{Future, ready};

use crate::api::{Container, ContainerAdjustment, FailurePolicy, PodSandbox};
use crate::events::EventMask;
use crate::runtime::RuntimeInfo;

/// A plugin: one method per event, of the same name, and none but [`events`](Self::events) mandatory.
/// Implement the others as `async fn`.
///
/// ```
/// use nri::api::{Container, ContainerAdjustment, Mount, PodSandbox};
/// use nri::{EventMask, Plugin, Refusal};
///
/// /// Gives containers the node's time zone.
/// struct TimeZone;
///
/// impl Plugin for TimeZone {
///     fn events(&self) -> EventMask {
///         EventMask::CREATE_CONTAINER
///     }
///
///     async fn create_container(
///         &self,
///         _pod: PodSandbox,
///         container: Container,
///     ) -> Result<ContainerAdjustment, Refusal> {
///         let mut adjustment = ContainerAdjustment::new();
///         let there = |mount: &Mount| mount.destination == "/etc/localtime";
///         if !container.mounts.iter().any(there) {
///             adjustment.mounts.push(Mount {
///                 destination: "/etc/localtime".into(),
///                 type_: "bind".into(),
///                 source: "/etc/localtime".into(),
///                 options: vec!["bind".into(), "ro".into()],
///                 ..Mount::new()
///             });
///         }
///         Ok(adjustment)
///     }
/// }
/// ```
///
/// A runtime handles one event at a time for the whole node and drops a plugin that takes two
/// seconds over one, so methods should record, decide, and return in milliseconds. Calling the
/// runtime's CRI from inside one can deadlock. A method that panics or takes too long is answered
/// for with "no objection", so that it costs the node nothing; it is not cancelled.
///
/// Methods may run at the same time, and those of a lost connection may end after a new one began.
///
/// The counterpart of the interfaces in NRI's `pkg/stub/stub.go` (v0.12.5).
pub trait Plugin: Send + Sync + 'static {
    /// The events to be called for. Those that the runtime is too old to know are left out.
    fn events(&self) -> EventMask;

    /// What the runtime is to do when a call is not answered in time: by default it drops the plugin and goes on
    /// without it. Runtimes with NRI before 0.12.5 always do.
    fn failure_policy(&self) -> FailurePolicy {
        FailurePolicy::new()
    }

    /// A runtime took the plugin in. `config` is what the runtime's configuration holds for a plugin
    /// that it launched, else empty. To refuse ends [`Stub::run`](crate::Stub::run).
    fn configure(
        &self,
        runtime: RuntimeInfo,
        config: String,
    ) -> impl Future<Output = Result<(), Refusal>> + Send {
        drop((runtime, config));
        ready(Ok(()))
    }

    /// Everything that the runtime knows of, once per connection and before any event. Containers
    /// that have exited are not in it, and CRI-O may lose events that happen meanwhile: where that
    /// matters, compare with the runtime's own lists.
    fn synchronize(
        &self,
        pods: Vec<PodSandbox>,
        containers: Vec<Container>,
    ) -> impl Future<Output = ()> + Send {
        drop((pods, containers));
        ready(())
    }

    /// Awaited before each attempt to connect to the runtime's socket.
    fn connecting(&self) -> impl Future<Output = ()> + Send {
        ready(())
    }

    /// The connection to the runtime was lost. Events are missed until the next
    /// [`configure`](Self::configure) and [`synchronize`](Self::synchronize).
    fn disconnected(&self) -> impl Future<Output = ()> + Send {
        ready(())
    }

    /// A pod's sandbox was created.
    fn run_pod_sandbox(&self, pod: PodSandbox) -> impl Future<Output = ()> + Send {
        drop(pod);
        ready(())
    }

    /// A pod's resources are about to be changed.
    fn update_pod_sandbox(&self, pod: PodSandbox) -> impl Future<Output = ()> + Send {
        drop(pod);
        ready(())
    }

    /// A pod's resources were changed.
    fn post_update_pod_sandbox(&self, pod: PodSandbox) -> impl Future<Output = ()> + Send {
        drop(pod);
        ready(())
    }

    /// A pod's sandbox was stopped.
    fn stop_pod_sandbox(&self, pod: PodSandbox) -> impl Future<Output = ()> + Send {
        drop(pod);
        ready(())
    }

    /// A pod's sandbox was removed.
    fn remove_pod_sandbox(&self, pod: PodSandbox) -> impl Future<Output = ()> + Send {
        drop(pod);
        ready(())
    }

    /// A container is about to be created: how to adjust it. A refusal makes its creation fail with
    /// the refusal's reason.
    fn create_container(
        &self,
        pod: PodSandbox,
        container: Container,
    ) -> impl Future<Output = Result<ContainerAdjustment, Refusal>> + Send {
        drop((pod, container));
        ready(Ok(ContainerAdjustment::new()))
    }

    /// A container was created.
    fn post_create_container(
        &self,
        pod: PodSandbox,
        container: Container,
    ) -> impl Future<Output = ()> + Send {
        drop((pod, container));
        ready(())
    }

    /// A container is about to be started.
    fn start_container(
        &self,
        pod: PodSandbox,
        container: Container,
    ) -> impl Future<Output = ()> + Send {
        drop((pod, container));
        ready(())
    }

    /// A container was started.
    fn post_start_container(
        &self,
        pod: PodSandbox,
        container: Container,
    ) -> impl Future<Output = ()> + Send {
        drop((pod, container));
        ready(())
    }

    /// A container's resources are about to be changed.
    fn update_container(
        &self,
        pod: PodSandbox,
        container: Container,
    ) -> impl Future<Output = ()> + Send {
        drop((pod, container));
        ready(())
    }

    /// A container's resources were changed.
    fn post_update_container(
        &self,
        pod: PodSandbox,
        container: Container,
    ) -> impl Future<Output = ()> + Send {
        drop((pod, container));
        ready(())
    }

    /// A container was stopped, or exited by itself. For the latter, the runtime promises no order
    /// against anything else that tells of the exit.
    fn stop_container(
        &self,
        pod: PodSandbox,
        container: Container,
    ) -> impl Future<Output = ()> + Send {
        drop((pod, container));
        ready(())
    }

    /// A container was removed.
    fn remove_container(
        &self,
        pod: PodSandbox,
        container: Container,
    ) -> impl Future<Output = ()> + Send {
        drop((pod, container));
        ready(())
    }

    /// All plugins have adjusted a container that is about to be created. A refusal makes its
    /// creation fail.
    fn validate_container_adjustment(
        &self,
        pod: PodSandbox,
        container: Container,
        adjustment: ContainerAdjustment,
    ) -> impl Future<Output = Result<(), Refusal>> + Send {
        drop((pod, container, adjustment));
        ready(Ok(()))
    }
}

/// A plugin's "no", with the reason that the runtime passes on.
///
/// Of a container that was refused, the kubelet reports the reason in the pod's events and statuses.
///
/// ```
/// use nri::Refusal;
/// use nri::api::Container;
///
/// fn check(container: &Container) -> Result<(), Refusal> {
///     if container.labels.contains_key("owner") {
///         Ok(())
///     } else {
///         Err(Refusal::new(format!("{} has no owner", container.name)))
///     }
/// }
///
/// let refusal = check(&Container::new()).unwrap_err();
/// assert_eq!(refusal.to_string(), " has no owner");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal(String);

impl Refusal {
    /// Refuses for this reason.
    pub fn new(reason: impl Into<String>) -> Self {
        Self(reason.into())
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Refusal {}
