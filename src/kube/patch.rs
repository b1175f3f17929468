//! Writes conditions into a pod's status.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};

use super::connect::KubeError;
use super::pod_spec::PodObject;

/// Who writes, in the object's managed fields.
const FIELD_MANAGER: &str = "reprise";

/// A condition of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// Its type, such as "reprise.dev/Restarting".
    pub kind: String,
    /// Whether it holds.
    pub status: bool,
    /// Why, in one word.
    pub reason: String,
    /// The same for people.
    pub message: String,
    /// Since when `status` is what it is.
    pub since: Timestamp,
}

/// Sets one condition of a pod and leaves the others as they are. The patch names the UID, as the kubelet's does
/// (`pkg/util/pod/pod.go`): a new pod of the same name is left alone and gives [`KubeError::PodGone`].
///
/// Waits no longer than `limit`; whether the condition was set is unknown after [`KubeError::Deadline`], or when the
/// future is dropped.
pub async fn set_condition(
    client: kube::Client,
    pod: &PodObject,
    condition: &Condition,
    limit: Duration,
) -> Result<(), KubeError> {
    let api: Api<Pod> = Api::namespaced(client, &pod.key.namespace);
    let params = PatchParams {
        field_manager: Some(FIELD_MANAGER.into()),
        ..PatchParams::default()
    };
    let patch = Patch::Strategic(status_patch(pod, condition));
    let call = api.patch_status(&pod.key.name, &params, &patch);
    match tokio::time::timeout(limit, call).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => {
            Err(KubeError::PodGone {
                pod: pod.key.clone(),
            })
        }
        Ok(Err(error)) => Err(KubeError::Patch {
            pod: pod.key.clone(),
            source: Box::new(error),
        }),
        Err(_) => Err(KubeError::Deadline {
            pod: pod.key.clone(),
            limit,
        }),
    }
}

/// Conditions merge by their type in a strategic merge patch (`patchMergeKey` of `PodStatus.conditions`).
fn status_patch(pod: &PodObject, condition: &Condition) -> Value {
    json!({
        "metadata": {"uid": pod.uid},
        "status": {"conditions": [{
            "type": condition.kind,
            "status": if condition.status { "True" } else { "False" },
            "reason": condition.reason,
            "message": condition.message,
            // The API keeps whole seconds.
            "lastTransitionTime": condition.since.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        }]}
    })
}

#[cfg(test)]
mod tests {
    use http::StatusCode;

    use super::*;
    use crate::ids::PodKey;
    use crate::kube::fake::{Answer, Calls, client};

    async fn set(answers: Vec<Answer>) -> (Result<(), KubeError>, Calls) {
        let (client, calls) = client(answers);
        let pod = PodObject {
            key: PodKey {
                namespace: "n".into(),
                name: "web".into(),
            },
            uid: "u1".into(),
        };
        let condition = Condition {
            kind: "reprise.dev/Restarting".into(),
            status: true,
            reason: "ExitCode".into(),
            message: "app exited with 42".into(),
            since: Timestamp::UNIX_EPOCH,
        };
        let limit = Duration::from_millis(100);
        (set_condition(client, &pod, &condition, limit).await, calls)
    }

    #[tokio::test]
    async fn a_condition_is_merged_into_the_status_of_that_very_pod() {
        let pod = json!({"metadata": {}});
        let (set, calls) = set(vec![Answer::json(&pod)]).await;
        set.unwrap();
        let call = calls.lock().unwrap()[0].clone();
        let start = "PATCH /api/v1/namespaces/n/pods/web/status?&fieldManager=reprise ";
        let body: Value = serde_json::from_str(call.strip_prefix(start).unwrap()).unwrap();
        assert_eq!(body["metadata"], json!({"uid": "u1"}));
        let condition = &body["status"]["conditions"][0];
        assert_eq!(condition["status"], "True");
        assert_eq!(condition["lastTransitionTime"], "1970-01-01T00:00:00Z");
    }

    #[tokio::test]
    async fn failures_are_told_apart() {
        for gone in [StatusCode::NOT_FOUND, StatusCode::CONFLICT] {
            let (set, _) = set(vec![Answer::status(gone)]).await;
            assert!(matches!(set, Err(KubeError::PodGone { .. })));
        }
        let (refused, _) = set(vec![Answer::status(StatusCode::FORBIDDEN)]).await;
        assert!(matches!(refused, Err(KubeError::Patch { .. })));
        let (silent, _) = set(vec![]).await;
        assert!(matches!(silent, Err(KubeError::Deadline { .. })));
    }
}
