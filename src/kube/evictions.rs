//! Evicting a pod, or deleting it: that very one, as it was last seen.

use std::fmt;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::core::Status;
use kube::{Api, Client, Error};
use serde_json::json;
use tokio::time::{Duration, timeout};

use crate::ids::PodKey;

/// How long the API server may take over it.
const LIMIT: Duration = Duration::from_secs(5);
/// The cause of a refusal for the sake of a budget (`DisruptionBudgetCause`, `k8s.io/api/policy/v1`).
const BUDGET: &str = "DisruptionBudget";

/// What has become of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Evicted {
    /// The pod ends.
    Done,
    /// It has changed, is another one, or is gone.
    Changed,
    /// A budget of disruption forbids it; in its words.
    Refused(String),
    /// The right to it is missing, or somebody else forbids it; in the API server's words.
    Denied(&'static str, String),
    /// The API server does not do it now.
    Away(String),
}

/// A pod in a certain state of it.
#[derive(Debug, Clone)]
pub(crate) struct Version {
    pub(crate) pod: PodKey,
    pub(crate) uid: String,
    /// Its `resourceVersion`.
    pub(crate) seen: String,
}

/// Ends pods.
#[derive(Clone)]
pub(crate) struct Evictions {
    client: Client,
}

impl Evictions {
    pub(crate) fn new(client: Client) -> Self {
        Self { client }
    }

    /// The pod as it is now.
    pub(crate) async fn look(&self, pod: &PodKey) -> Result<Option<Pod>, Evicted> {
        match timeout(LIMIT, self.pods(pod).get_opt(&pod.name)).await {
            Ok(Ok(found)) => Ok(found),
            Ok(Err(error)) => Err(ending(&error, "get pods")),
            Err(_) => Err(late()),
        }
    }

    /// Evicts it, or only asks whether that would be allowed.
    pub(crate) async fn evict(&self, version: &Version, dry_run: bool) -> Evicted {
        let Version { pod, uid, seen } = version;
        // Written out, because `kube` 5.0.0 calls `deleteOptions` by a name that the API server does not know.
        let mut eviction = json!({
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"namespace": pod.namespace, "name": pod.name},
            "deleteOptions": {"preconditions": {"uid": uid, "resourceVersion": seen}},
        });
        if dry_run {
            eviction["deleteOptions"]["dryRun"] = json!(["All"]);
        }
        let params = PostParams::default();
        let pods = self.pods(pod);
        let asked = pods.create_subresource::<_, Status>("eviction", &pod.name, &params, &eviction);
        match timeout(LIMIT, asked).await {
            Ok(Ok(_)) => Evicted::Done,
            Ok(Err(error)) => ending(&error, "create pods/eviction"),
            Err(_) => late(),
        }
    }

    /// Deletes it, whatever any budget says; or only asks whether that would be allowed.
    pub(crate) async fn delete(&self, version: &Version, dry_run: bool) -> Evicted {
        let params = DeleteParams {
            dry_run,
            preconditions: Some(Preconditions {
                uid: Some(version.uid.clone()),
                resource_version: Some(version.seen.clone()),
            }),
            ..DeleteParams::default()
        };
        let pods = self.pods(&version.pod);
        match timeout(LIMIT, pods.delete(&version.pod.name, &params)).await {
            Ok(Ok(_)) => Evicted::Done,
            Ok(Err(error)) => ending(&error, "delete pods"),
            Err(_) => late(),
        }
    }

    fn pods(&self, pod: &PodKey) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &pod.namespace)
    }
}

impl fmt::Debug for Evictions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Evictions").finish_non_exhaustive()
    }
}

fn late() -> Evicted {
    Evicted::Away("the API server does not answer in time".to_owned())
}

fn ending(error: &Error, right: &'static str) -> Evicted {
    let Error::Api(status) = error else {
        return Evicted::Away(error.to_string());
    };
    let causes = status.details.iter().flat_map(|it| &it.causes);
    let mut budgets = causes.into_iter().filter(|cause| cause.reason == BUDGET);
    match (status.code, budgets.next()) {
        (429, Some(cause)) => Evicted::Refused(format!("{} {}", status.message, cause.message)),
        (404 | 409, _) => Evicted::Changed,
        (403, _) => Evicted::Denied(right, status.message.clone()),
        // Several budgets match the pod, which none of them can allow (`pkg/registry/core/pod/storage/eviction.go`).
        (500, _) if status.message.contains("PodDisruptionBudget") => {
            Evicted::Refused(status.message.clone())
        }
        _ => Evicted::Away(status.message.clone()),
    }
}

#[cfg(test)]
mod tests {
    use http::{Method, Request, Response};
    use kube::client::Body;
    use serde_json::Value;
    use tower_test::mock::pair;

    use super::*;

    fn version() -> Version {
        Version {
            pod: PodKey {
                namespace: "n".into(),
                name: "p".into(),
            },
            uid: "u1".into(),
            seen: "7".into(),
        }
    }

    /// What comes of that answer, and what was asked for.
    async fn answered(
        code: u16,
        answer: Value,
        how: impl AsyncFnOnce(&Evictions) -> Evicted,
    ) -> (Evicted, Method, String, Value) {
        let (service, mut server) = pair::<Request<Body>, Response<Body>>();
        let evictions = Evictions::new(Client::new(service, "default"));
        let serve = async {
            let (request, send) = server.next_request().await.unwrap();
            let body = Body::from(answer.to_string().into_bytes());
            send.send_response(Response::builder().status(code).body(body).unwrap());
            let (parts, body) = request.into_parts();
            let body = body.collect_bytes().await.unwrap();
            let body = serde_json::from_slice(&body).unwrap();
            (parts.method, parts.uri.path().to_owned(), body)
        };
        let (ending, (method, path, body)) = tokio::join!(how(&evictions), serve);
        (ending, method, path, body)
    }

    fn success() -> Value {
        json!({"kind": "Status", "status": "Success", "code": 201})
    }

    #[tokio::test]
    async fn that_very_pod_is_evicted_as_it_was_seen() {
        let evict = async |it: &Evictions| it.evict(&version(), true).await;
        let (ending, method, path, body) = answered(201, success(), evict).await;
        assert_eq!((ending, method), (Evicted::Done, Method::POST));
        assert_eq!(path, "/api/v1/namespaces/n/pods/p/eviction");
        let options =
            json!({"preconditions": {"uid": "u1", "resourceVersion": "7"}, "dryRun": ["All"]});
        assert_eq!(body["deleteOptions"], options);
        let evict = async |it: &Evictions| it.evict(&version(), false).await;
        let (.., body) = answered(201, success(), evict).await;
        assert_eq!(body["deleteOptions"]["dryRun"], Value::Null);
    }

    #[tokio::test]
    async fn a_deletion_is_of_that_very_pod_as_well() {
        for (dry_run, told) in [(true, json!(["All"])), (false, Value::Null)] {
            let delete = async |it: &Evictions| it.delete(&version(), dry_run).await;
            let (ending, method, path, body) = answered(200, success(), delete).await;
            assert_eq!((ending, method), (Evicted::Done, Method::DELETE));
            assert_eq!(path, "/api/v1/namespaces/n/pods/p");
            let preconditions = json!({"uid": "u1", "resourceVersion": "7"});
            assert_eq!(body["preconditions"], preconditions);
            assert_eq!(body["dryRun"], told);
        }
    }

    #[tokio::test]
    async fn what_a_budget_says_is_kept_and_what_else_is_refused_is_told_apart() {
        let failure = |code: u16, causes: Value| json!({"status": "Failure", "code": code, "message": "Cannot evict.", "details": {"causes": causes}});
        let budget = json!([{"reason": "DisruptionBudget", "message": "The budget b needs 2."}]);
        for (code, causes, expected) in [
            (
                429,
                budget,
                Evicted::Refused("Cannot evict. The budget b needs 2.".into()),
            ),
            // The API server has too much to do.
            (429, json!([]), Evicted::Away("Cannot evict.".into())),
            (409, json!([]), Evicted::Changed),
            (404, json!([]), Evicted::Changed),
            (
                403,
                json!([]),
                Evicted::Denied("create pods/eviction", "Cannot evict.".into()),
            ),
            (503, json!([]), Evicted::Away("Cannot evict.".into())),
        ] {
            let evict = async |it: &Evictions| it.evict(&version(), false).await;
            let (ending, ..) = answered(code, failure(code, causes), evict).await;
            assert_eq!(ending, expected, "{code}");
        }
    }
}
