//! What the plugin has said in the API of pods and of its node, and how it is taken back.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, Client, Error};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::conditions::FIELD_MANAGER;
use super::declaration::Declaration;

/// How long the API server may take over one request.
const LIMIT: Duration = Duration::from_secs(5);

/// What was said of one node and its pods.
pub(crate) struct Traces {
    client: Client,
    node: String,
}

impl Traces {
    /// Nothing is sent yet.
    pub(crate) fn new(client: Client, node: &str) -> Self {
        Self {
            client,
            node: node.to_owned(),
        }
    }

    /// Removes the conditions that the plugin has set on the node's pods, and says how many those were, and what is left and
    /// why. Takes back what it declared of the node.
    pub(crate) async fn remove(&self) -> (usize, Vec<String>) {
        let mut left = Vec::new();
        let mut removed = 0;
        match self.pods().await {
            Ok(pods) => {
                for pod in pods {
                    let name = pod.name.clone().unwrap_or_default();
                    match self.remove_from(&pod).await {
                        Ok(count) => removed += count,
                        Err(why) => left.push(format!("conditions of pod {name}: {why}")),
                    }
                }
            }
            Err(why) => left.push(format!("conditions of pods: {why}")),
        }
        if let Err(why) = self.take_back().await {
            left.push(format!("what the node declares: {why}"));
        }
        (removed, left)
    }

    async fn pods(&self) -> Result<Vec<ObjectMeta>, String> {
        let of_node = ListParams::default().fields(&format!("spec.nodeName={}", self.node));
        let pods = Api::<Pod>::all(self.client.clone());
        let list = in_time(pods.list_metadata(&of_node)).await?;
        Ok(list.items.into_iter().map(|pod| pod.metadata).collect())
    }

    async fn remove_from(&self, pod: &ObjectMeta) -> Result<usize, String> {
        let conditions = conditions(pod);
        if conditions.is_empty() {
            return Ok(0);
        }
        let (name, namespace) = (pod.name.as_deref(), pod.namespace.as_deref());
        let pods = Api::<Pod>::namespaced(self.client.clone(), namespace.unwrap_or_default());
        let patch = Patch::Strategic(patch(pod.uid.as_deref(), &conditions));
        let params = PatchParams::default();
        let sent = pods.patch_status(name.unwrap_or_default(), &params, &patch);
        in_time(sent).await.map(|_| conditions.len())
    }

    async fn take_back(&self) -> Result<(), String> {
        let of_name = ListParams::default().fields(&format!("metadata.name={}", self.node));
        let nodes = Api::<Node>::all(self.client.clone());
        for node in in_time(nodes.list(&of_name)).await? {
            Declaration::new(self.client.clone(), &self.node, false)
                .take_back_from(&node)
                .await?;
        }
        Ok(())
    }
}

async fn in_time<T>(request: impl Future<Output = Result<T, Error>>) -> Result<T, String> {
    match timeout(LIMIT, request).await {
        Ok(answer) => answer.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no answer within {LIMIT:?}")),
    }
}

/// The types of those whose status is the plugin's word: a kubelet from 1.36 on sets one of the same name.
fn conditions(pod: &ObjectMeta) -> Vec<String> {
    let entries = pod.managed_fields.iter().flatten();
    let ours = entries.filter(|it| it.manager.as_deref() == Some(FIELD_MANAGER));
    let fields = ours.filter_map(|it| it.fields_v1.as_ref()?.0.pointer("/f:status/f:conditions"));
    let fields = fields.filter_map(Value::as_object).flatten();
    let ours = fields.filter(|(_, owned)| owned.get("f:status").is_some());
    ours.filter_map(|(key, _)| kind(key)).collect()
}

/// Out of `k:{"type":"Ready"}` (`sigs.k8s.io/structured-merge-diff`, `fieldpath/serialize-pe.go`).
fn kind(key: &str) -> Option<String> {
    let key: Value = serde_json::from_str(key.strip_prefix("k:")?).ok()?;
    Some(key.get("type")?.as_str()?.to_owned())
}

/// For the pod of that UID alone.
fn patch(uid: Option<&str>, conditions: &[String]) -> Value {
    let delete = |kind: &String| json!({"$patch": "delete", "type": kind});
    let conditions: Vec<Value> = conditions.iter().map(delete).collect();
    json!({"metadata": {"uid": uid}, "status": {"conditions": conditions}})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(managed: &Value) -> ObjectMeta {
        serde_json::from_value(json!({"name": "demo", "managedFields": managed})).unwrap()
    }

    fn entry(manager: &str, fields: &Value) -> Value {
        json!({
            "manager": manager,
            "operation": "Update",
            "subresource": "status",
            "fieldsV1": {"f:status": {"f:conditions": fields}},
        })
    }

    #[test]
    fn conditions_are_taken_back_that_are_the_plugins_word() {
        let owned = json!({".": {}, "f:status": {}, "f:type": {}});
        let pod = pod(&json!([
            entry("kubelet", &json!({"k:{\"type\":\"Ready\"}": owned, "k:{\"type\":\"AllContainersRestarting\"}": owned})),
            entry("reprise", &json!({
                "k:{\"type\":\"PodRestarting\"}": owned,
                "k:{\"type\":\"reprise.dev/AllContainersRestarting\"}": owned,
                // Somebody else has set the status since.
                "k:{\"type\":\"Other\"}": {"f:message": {}},
                "v:odd": owned,
            })),
            {"manager": "reprise"},
        ]));
        let expected = ["PodRestarting", "reprise.dev/AllContainersRestarting"];
        assert_eq!(conditions(&pod), expected);
        assert_eq!(conditions(&ObjectMeta::default()), Vec::<String>::new());
    }
}
