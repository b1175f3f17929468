//! Why the kubelet may not create a container just now.

use crate::ids::ContainerName;
use crate::kube::RestartPolicy;
use crate::plan::RestartId;

/// Written for people: the kubelet shows it in an event of the pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    /// Under load the kubelet may act on what it saw half a second ago.
    #[error("container {0} is running already")]
    Runs(ContainerName),
    /// Likewise.
    #[error("container {0} has just run")]
    HasJustRun(ContainerName),
    /// Where the kubelet does not know the container's own restart policy.
    #[error("container {0} has ended and is not started again: its own restartPolicy is {1:?}")]
    StaysEnded(ContainerName, RestartPolicy),
    /// The old containers are not out of the way.
    #[error("pod restarts in place ({0}), container {1} starts again in a moment")]
    NotYet(RestartId, ContainerName),
    /// The pod restarts too often.
    #[error(
        "back-off: the pod restarts too often ({restart}), container {name} starts again at {start_at}"
    )]
    BackOff {
        restart: RestartId,
        name: ContainerName,
        start_at: String,
    },
    /// Another one must have started, or completed, before.
    #[error(
        "pod restarts in place ({0}), container {1} starts after the init containers before it"
    )]
    OutOfOrder(RestartId, ContainerName),
}
