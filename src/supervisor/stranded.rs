//! Pods whose sandbox the kubelet ends in the middle of a restart.
//!
//! Where all that it sees of a `Never` pod has ended, it ends the sandbox, and makes another one only if there is no container of
//! the pod at all (`computePodActions`, `pkg/kubelet/kuberuntime/kuberuntime_manager.go`, 1.33 to 1.37). Containers that a restart
//! has removed by then wait, to the kubelet: so the pod neither fails nor begins anew, and waits for ever, until what is left of it
//! is removed as well.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use crate::cri::{self, ContainerState, CriError, SandboxState};
use crate::driver::Tools;
use crate::ids::PodIdentity;
use crate::kube::{Pods, RestartPolicy};

/// By then the API server has told of a pod that was deleted, evicted, or has failed.
const PATIENCE: Duration = Duration::from_secs(30);

/// Has the kubelet begin anew with that pod, if it waits for ever.
pub(super) async fn free(tools: Arc<Tools>, pods: Pods, pod: PodIdentity) {
    loop {
        sleep(PATIENCE).await;
        match remove_rest(&tools.cri, &pods, &pod).await {
            Ok(false) => return,
            Ok(true) => return tools.reporter.begins_in_another_sandbox(&pod),
            Err(error) => {
                tracing::warn!(pod = %pod.key, %error, "the pod waits for ever without a sandbox, and what is left of it cannot be removed, trying again");
            }
        }
    }
}

/// Returns whether that was in the way.
async fn remove_rest(cri: &cri::Client, pods: &Pods, pod: &PodIdentity) -> Result<bool, CriError> {
    let spec = pods.get(&pod.key, &pod.uid);
    let waits = spec.filter(|it| it.restart_policy == RestartPolicy::Never && !it.ending);
    let sandboxes = cri.list_sandboxes().await?;
    let mut sandboxes = sandboxes.iter();
    let goes_on = sandboxes.any(|it| it.uid == pod.uid && it.state == SandboxState::Ready);
    let rest = cri.list_containers(Some(&pod.sandbox)).await?;
    let runs = rest.iter().any(|it| it.state == ContainerState::Running);
    if waits.is_none() || goes_on || runs {
        return Ok(false);
    }
    for container in &rest {
        cri.remove_container(&container.id).await?;
    }
    Ok(!rest.is_empty())
}
