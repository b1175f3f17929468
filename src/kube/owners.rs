//! Who makes a new pod when one is deleted. A pod says whose it is, but whoever writes pods may say anything: what counts is
//! what the API server tells of that owner, in the pod's own namespace.

use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, OwnerReference};
use kube::core::{ApiResource, DynamicObject, Selector, SelectorExt};
use kube::{Api, Client, Error};
use tokio::time::{Duration, timeout};

/// How long the API server may take over one object.
const LIMIT: Duration = Duration::from_secs(2);

/// Who makes new pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) api_version: String,
    pub(crate) kind: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
}

impl Owner {
    pub(crate) fn is_deployment(&self) -> bool {
        self.kind == "Deployment"
    }

    /// For events on it.
    pub(crate) fn reference(&self) -> ObjectReference {
        ObjectReference {
            api_version: Some(self.api_version.clone()),
            kind: Some(self.kind.clone()),
            namespace: Some(self.namespace.clone()),
            name: Some(self.name.clone()),
            uid: Some(self.uid.clone()),
            ..ObjectReference::default()
        }
    }
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.kind, self.name)
    }
}

/// Why nobody is known who would make a new pod.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OwnerError {
    /// That is so until somebody changes something.
    #[error("{0}")]
    None(String),
    /// It may not be known.
    #[error("{0} may not be read: apply deploy/kustomize/components/hard-reset/rbac.yaml")]
    Denied(String),
    /// The API server does not tell.
    #[error("{0}")]
    Away(String),
}

/// The kinds that are known to make a new pod for each that goes, on whatever node has room. Those of a Job may be its last
/// try, and those of a `DaemonSet` come back to the same node.
fn resource(owner: &OwnerReference) -> Option<ApiResource> {
    match (owner.api_version.as_str(), owner.kind.as_str()) {
        ("apps/v1", "ReplicaSet") => Some(ApiResource::erase::<ReplicaSet>(&())),
        ("apps/v1", "StatefulSet") => Some(ApiResource::erase::<StatefulSet>(&())),
        ("apps/v1", "Deployment") => Some(ApiResource::erase::<Deployment>(&())),
        _ => None,
    }
}

/// Whether the API server need not be asked about that controller of a pod.
pub(crate) fn may_replace(controller: &OwnerReference) -> bool {
    controller.kind != "Deployment" && resource(controller).is_some()
}

/// The uppermost controller of a pod, which is there and wants such a pod.
pub(crate) async fn owner_of(
    client: &Client,
    pod: &Pod,
    controller: &OwnerReference,
) -> Result<Owner, OwnerError> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let whose = || format!("{} {}", controller.kind, controller.name);
    let found = find(client, namespace, controller).await?;
    let found = found.ok_or_else(|| {
        OwnerError::None(format!(
            "{}, its controller as it says, is not there",
            whose()
        ))
    })?;
    if !wants(&found, pod) {
        return Err(OwnerError::None(format!(
            "{} would make no new one",
            whose()
        )));
    }
    let above = found.metadata.owner_references.iter().flatten();
    let mut above = above.filter(|it| it.controller == Some(true) && it.kind == "Deployment");
    if let Some(deployment) = above.next()
        && find(client, namespace, deployment).await?.is_some()
    {
        return Ok(owner(namespace, deployment));
    }
    Ok(owner(namespace, controller))
}

fn owner(namespace: &str, of: &OwnerReference) -> Owner {
    Owner {
        api_version: of.api_version.clone(),
        kind: of.kind.clone(),
        namespace: namespace.to_owned(),
        name: of.name.clone(),
        uid: of.uid.clone(),
    }
}

/// The object of that name, if it is the one that is meant.
async fn find(
    client: &Client,
    namespace: &str,
    owner: &OwnerReference,
) -> Result<Option<DynamicObject>, OwnerError> {
    let Some(resource) = resource(owner).filter(|_| is_name(&owner.name)) else {
        return Ok(None);
    };
    let api = Api::<DynamicObject>::namespaced_with(client.clone(), namespace, &resource);
    match timeout(LIMIT, api.get_opt(&owner.name)).await {
        Ok(Ok(found)) => Ok(found.filter(|it| {
            let meta = &it.metadata;
            meta.uid.as_ref() == Some(&owner.uid) && meta.name.as_ref() == Some(&owner.name)
        })),
        Ok(Err(Error::Api(status))) if status.code == 403 => {
            Err(OwnerError::Denied(format!("{} {}", owner.kind, owner.name)))
        }
        Ok(Err(error)) => Err(OwnerError::Away(error.to_string())),
        Err(_) => Err(OwnerError::Away("the API server does not answer".into())),
    }
}

/// Whether it stays one segment of a path: the API server takes any name in an owner reference.
fn is_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '?', '#', '%'])
}

/// Whether it takes the pod for its own and wants any: it lets go of pods that its selector does not match
/// (`ClaimPods`, `pkg/controller/controller_ref_manager.go`).
fn wants(controller: &DynamicObject, pod: &Pod) -> bool {
    let spec = &controller.data["spec"];
    let selector = serde_json::from_value::<LabelSelector>(spec["selector"].clone()).ok();
    let selector = selector.and_then(|selector| Selector::try_from(selector).ok());
    let labels = pod.metadata.labels.clone().unwrap_or_default();
    let matches =
        selector.is_some_and(|selector| !selector.selects_all() && selector.matches(&labels));
    let replicas = spec["replicas"].as_i64().unwrap_or(1);
    matches && replicas > 0 && controller.metadata.deletion_timestamp.is_none()
}

#[cfg(test)]
mod tests {
    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::{Value, json};
    use tower_test::mock::pair;

    use super::*;

    fn controller(kind: &str, uid: &str) -> Value {
        json!({"apiVersion": "apps/v1", "kind": kind, "name": "x", "uid": uid, "controller": true})
    }

    fn pod() -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "n", "labels": {"app": "a"}},
        }))
        .unwrap()
    }

    fn replica_set(uid: &str, labels: &Value, owner: &Value) -> Value {
        json!({
            "apiVersion": "apps/v1", "kind": "ReplicaSet",
            "metadata": {"name": "x", "uid": uid, "ownerReferences": [owner]},
            "spec": {"replicas": 2, "selector": {"matchLabels": labels}},
        })
    }

    /// What comes of these answers, in turn.
    async fn asked(claimed: Value, answers: Vec<Option<Value>>) -> Result<Owner, OwnerError> {
        let (service, mut server) = pair::<Request<Body>, Response<Body>>();
        let client = Client::new(service, "default");
        let claimed: OwnerReference = serde_json::from_value(claimed).unwrap();
        let asked = tokio::spawn(async move { owner_of(&client, &pod(), &claimed).await });
        for answer in answers {
            let (request, send) = server.next_request().await.unwrap();
            let path = request.uri().path();
            assert!(path.starts_with("/apis/apps/v1/namespaces/n/"), "{path}");
            let code = if answer.is_some() { 200 } else { 404 };
            let missing =
                json!({"status": "Failure", "code": 404, "message": "no", "reason": "NotFound"});
            let body = answer.unwrap_or(missing).to_string().into_bytes();
            let response = Response::builder().status(code);
            send.send_response(response.body(Body::from(body)).unwrap());
        }
        asked.await.unwrap()
    }

    #[tokio::test]
    async fn the_deployment_above_the_replica_set_is_the_owner() {
        let labels = json!({"app": "a"});
        let set = replica_set("r1", &labels, &controller("Deployment", "d1"));
        let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x", "uid": "d1"}});
        let claimed = controller("ReplicaSet", "r1");
        let owner = asked(claimed.clone(), vec![Some(set.clone()), Some(deployment)]).await;
        let owner = owner.unwrap();
        assert!(owner.is_deployment() && owner.uid == "d1");
        // What a replica set says of its owner is no more true than what a pod says.
        let other = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x", "uid": "d2"}});
        for answer in [Some(other), None] {
            let owner = asked(claimed.clone(), vec![Some(set.clone()), answer]).await;
            assert_eq!(owner.unwrap().uid, "r1");
        }
    }

    #[tokio::test]
    async fn a_pod_that_claims_an_owner_which_is_not_its_own_has_none() {
        let claimed = || controller("ReplicaSet", "r1");
        let above = json!({"apiVersion": "x/v1", "kind": "Rollout", "name": "x", "uid": "o", "controller": true});
        let mut unwanted = replica_set("r1", &json!({"app": "a"}), &above);
        unwanted["spec"]["replicas"] = json!(0);
        let mut going = replica_set("r1", &json!({"app": "a"}), &above);
        going["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        for answer in [
            None,
            Some(replica_set("r2", &json!({"app": "a"}), &above)),
            Some(replica_set("r1", &json!({"app": "b"}), &above)),
            Some(replica_set("r1", &json!({}), &above)),
            Some(unwanted),
            Some(going),
        ] {
            let result = asked(claimed(), vec![answer.clone()]).await;
            assert!(matches!(result, Err(OwnerError::None(_))), "{answer:?}");
        }
        let mine = replica_set("r1", &json!({"app": "a"}), &above);
        assert_eq!(asked(claimed(), vec![Some(mine)]).await.unwrap().uid, "r1");
    }

    #[tokio::test]
    async fn a_name_that_is_none_is_not_asked_for() {
        for name in ["", "..", "../../x", "x?y", "x#", "x%2f"] {
            let mut claimed = controller("ReplicaSet", "r1");
            claimed["name"] = json!(name);
            let result = asked(claimed, Vec::new()).await;
            assert!(matches!(result, Err(OwnerError::None(_))), "{name}");
        }
        // Nor is another one's object taken for it.
        let above = json!({"apiVersion": "x/v1", "kind": "Rollout", "name": "x", "uid": "o", "controller": true});
        let mut other = replica_set("r1", &json!({"app": "a"}), &above);
        other["metadata"]["name"] = json!("y");
        let result = asked(controller("ReplicaSet", "r1"), vec![Some(other)]).await;
        assert!(matches!(result, Err(OwnerError::None(_))), "{result:?}");
    }

    #[test]
    fn only_what_makes_a_new_pod_elsewhere_may_replace_one() {
        let may = |version: &str, kind: &str| {
            may_replace(&OwnerReference {
                api_version: version.into(),
                kind: kind.into(),
                ..OwnerReference::default()
            })
        };
        assert!(may("apps/v1", "ReplicaSet") && may("apps/v1", "StatefulSet"));
        for (version, kind) in [
            ("apps/v1", "DaemonSet"),
            ("batch/v1", "Job"),
            ("v1", "Node"),
            ("example.com/v1", "ReplicaSet"),
            ("apps/v1", "Deployment"),
        ] {
            assert!(!may(version, kind), "{kind}");
        }
    }
}
