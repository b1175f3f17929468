//! Declares on the node, as a kubelet does (KEP-5328), what of a pod's spec is honoured there in the kubelet's place: the
//! scheduler of a control plane from 1.36 on sends pods that use a feature to nodes that declare it.
//!
//! A condition of the node beside it says that it is not the kubelet's word. Nothing is declared for kubelets from 1.35 on:
//! they have the field themselves, and write it (`pkg/kubelet/nodestatus/setters.go`, `DeclaredFeatures`). Older ones leave
//! what they do not know (`PatchNodeStatus`, `k8s.io/component-helpers/node/util`).

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Error};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::features::{RESTART_ALL, declared, version};

/// On the node while a declaration is ours.
const CONDITION: &str = "reprise.dev/DeclaresFeatures";
/// From this version on the declaration is the kubelet's own (`NodeDeclaredFeatures`, alpha).
const DECLARES_ITSELF: (u32, u32) = (1, 35);
/// How long the API server may take over one request.
const LIMIT: Duration = Duration::from_secs(2);

/// Keeps up the declaration on one node.
#[derive(Debug)]
pub struct Declaration {
    nodes: Api<Node>,
    node: String,
    wanted: bool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// What the node declares besides, while ours is there.
    besides: Option<BTreeSet<String>>,
    /// The API server drops what is declared.
    is_dropped: bool,
    /// What is in the way has been said.
    said: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Declare,
    TakeBack,
}

impl Declaration {
    /// Nothing is sent yet. Not `wanted`: what another plugin may have left is taken back.
    #[must_use]
    pub fn new(client: Client, node: &str, wanted: bool) -> Self {
        Self {
            nodes: Api::all(client),
            node: node.to_owned(),
            wanted,
            state: Mutex::default(),
        }
    }

    /// Makes it so, if the node is not as wanted. What fails is tried again when more is heard of the node.
    pub(super) async fn compare(&self, node: &Node) {
        self.state().besides = is_ours(node).then(|| besides(node));
        if self.wanted && !may_declare(node) {
            self.has_no_effect("this kubelet declares its features itself");
        }
        let Some(change) = change(node, self.wanted) else {
            return;
        };
        if self.state().is_dropped {
            return;
        }
        match self.send(change, &besides(node)).await {
            Ok(now) if change == Change::Declare && !is_declared(&now) => {
                self.state().is_dropped = true;
                self.has_no_effect("this API server keeps no declared features");
            }
            Ok(now) => {
                tracing::info!(
                    feature = RESTART_ALL,
                    ?change,
                    "the node's declared features"
                );
                self.state().besides = is_ours(&now).then(|| besides(&now));
            }
            Err(why) => self.complain(&why),
        }
    }

    /// The plugin ends, and with it what was declared.
    pub async fn take_back(&self) {
        let besides = self.state().besides.take();
        if let Some(besides) = besides
            && let Err(why) = self.send(Change::TakeBack, &besides).await
        {
            tracing::warn!(%why, "the node goes on declaring what nobody honours");
        }
    }

    /// The same for one that another process has declared, and the node is as this says.
    pub(super) async fn take_back_from(&self, node: &Node) -> Result<(), String> {
        match change(node, false) {
            Some(change) => self.send(change, &besides(node)).await.map(drop),
            None => Ok(()),
        }
    }

    async fn send(&self, change: Change, besides: &BTreeSet<String>) -> Result<Node, String> {
        let patch = Patch::Strategic(patch(change, besides));
        let params = PatchParams::default();
        // On the heap: everything that waits for it would be as large.
        let sent = Box::pin(self.nodes.patch_status(&self.node, &params, &patch));
        match timeout(LIMIT, sent).await {
            Ok(Ok(node)) => Ok(node),
            Ok(Err(Error::Api(status))) if status.code == 403 => Err(format!(
                "{}: it needs patch on nodes/status (deploy/kustomize/components/declare/rbac.yaml)",
                status.message
            )),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("no answer within {LIMIT:?}")),
        }
    }

    fn has_no_effect(&self, why: &str) {
        self.complain(&format!("--declare-features has no effect: {why}"));
    }

    fn complain(&self, why: &str) {
        if !std::mem::replace(&mut self.state().said, true) {
            tracing::warn!(why, "the node's declared features are not as wanted");
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is to be done about a node; `None`: it is as wanted.
fn change(node: &Node, wanted: bool) -> Option<Change> {
    let there = is_marked(node) && is_declared(node);
    if wanted && may_declare(node) {
        (!there).then_some(Change::Declare)
    } else {
        is_marked(node).then_some(Change::TakeBack)
    }
}

/// Whether what the node declares of that feature is our word, not its kubelet's.
pub(super) fn is_ours(node: &Node) -> bool {
    is_marked(node) && may_declare(node)
}

/// Whether its kubelet cannot.
fn may_declare(node: &Node) -> bool {
    version(node).is_some_and(|version| version < DECLARES_ITSELF)
}

fn is_declared(node: &Node) -> bool {
    declared(node).any(|it| it == RESTART_ALL)
}

fn is_marked(node: &Node) -> bool {
    let status = node.status.as_ref();
    let conditions = status.and_then(|status| status.conditions.as_ref());
    let mut conditions = conditions.into_iter().flatten();
    conditions.any(|it| it.type_ == CONDITION && it.status == "True")
}

/// What the node declares besides.
fn besides(node: &Node) -> BTreeSet<String> {
    let besides = declared(node).filter(|it| *it != RESTART_ALL);
    besides.map(str::to_owned).collect()
}

/// The list is replaced as a whole, and must be in order; conditions are merged by type.
fn patch(change: Change, besides: &BTreeSet<String>) -> Value {
    let mut features = besides.clone();
    let condition = match change {
        Change::Declare => {
            features.insert(RESTART_ALL.to_owned());
            let now = Timestamp::now();
            json!({
                "type": CONDITION,
                "status": "True",
                "reason": "HonouredByReprise",
                "message": format!("{RESTART_ALL} is honoured by reprise, not by the kubelet"),
                "lastTransitionTime": now,
                "lastHeartbeatTime": now,
            })
        }
        Change::TakeBack => json!({"type": CONDITION, "$patch": "delete"}),
    };
    json!({"status": {"declaredFeatures": features, "conditions": [condition]}})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(version: &str, declared: &[&str], marked: bool) -> Node {
        let marked = marked.then(|| json!({"type": CONDITION, "status": "True"}));
        serde_json::from_value(json!({
            "metadata": {"name": "node-1"},
            "status": {
                "declaredFeatures": declared,
                "conditions": marked.into_iter().collect::<Vec<_>>(),
                "nodeInfo": {
                    "kubeletVersion": version, "architecture": "", "bootID": "", "containerRuntimeVersion": "",
                    "kernelVersion": "", "kubeProxyVersion": "", "machineID": "", "operatingSystem": "",
                    "osImage": "", "systemUUID": "",
                },
            },
        }))
        .unwrap()
    }

    #[test]
    fn it_is_declared_once_for_a_kubelet_that_cannot_and_taken_back_where_it_is_not_wanted() {
        let old = |declared: &[&str], marked| node("v1.33.13", declared, marked);
        for (node, wanted, todo) in [
            (old(&[], false), true, Some(Change::Declare)),
            (old(&[RESTART_ALL], true), true, None),
            // Somebody has taken a half of it away.
            (old(&[], true), true, Some(Change::Declare)),
            (old(&[RESTART_ALL], false), true, Some(Change::Declare)),
            (old(&[], false), false, None),
            (old(&[RESTART_ALL], true), false, Some(Change::TakeBack)),
        ] {
            assert_eq!(change(&node, wanted), todo, "{node:?}");
        }
    }

    #[test]
    fn what_a_kubelet_declares_itself_is_its_word_whatever_was_declared_for_the_one_before() {
        for version in ["v1.35.4", "v1.36.3", "unknown"] {
            let upgraded = node(version, &[RESTART_ALL], true);
            assert!(!is_ours(&upgraded), "{version}");
            assert_eq!(change(&upgraded, true), Some(Change::TakeBack));
            let settled = node(version, &[RESTART_ALL], false);
            assert_eq!(change(&settled, true), None);
        }
        assert!(is_ours(&node("v1.34.4", &[RESTART_ALL], true)));
        assert!(!is_ours(&node("v1.34.4", &[RESTART_ALL], false)));
    }

    #[test]
    fn what_else_the_node_declares_stays_in_order() {
        let node = node("v1.33.13", &["Zeta", "Alpha"], false);
        let features =
            |change| patch(change, &besides(&node))["status"]["declaredFeatures"].clone();
        assert_eq!(
            features(Change::Declare),
            json!(["Alpha", RESTART_ALL, "Zeta"])
        );
        assert_eq!(features(Change::TakeBack), json!(["Alpha", "Zeta"]));
    }
}
