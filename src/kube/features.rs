//! What this node's kubelet does by itself.

use std::sync::Arc;

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Node;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, watch_object};
use kube::{Api, Client};
use tokio::sync::watch;

use super::declaration::{self, Declaration};

/// The entry of `status.declaredFeatures` (`component-helpers/nodedeclaredfeatures/features/restartallcontainers`,
/// k8s 1.35, 1.36).
pub(super) const RESTART_ALL: &str = "RestartAllContainersOnContainerExits";
/// From this version on, the gate `ContainerRestartRules` is on unless somebody turns it off; in 1.34 it is alpha
/// (`pkg/features/kube_features.go`, k8s 1.36). No entry in `status.declaredFeatures` tells of it
/// (`component-helpers/nodedeclaredfeatures/features/registry.go`, k8s 1.35, 1.36).
const CONTAINER_RULES: (u32, u32) = (1, 35);
/// The same of the gate `RestartAllContainersOnContainerExits`, which is alpha in 1.35.
const RESTART_ALL_RULES: (u32, u32) = (1, 36);
/// From this version on, a regular container that has exited counts as well (`HasAnyActiveRegularContainerStarted`,
/// `pkg/kubelet/container/helpers.go`, k8s 1.37; before, `podHasInitialized` in `kuberuntime_container.go` asked for one
/// that was created or running).
const EXITED_INITIALISES: (u32, u32) = (1, 37);

/// What a kubelet does by itself with the `restartPolicyRules` of a spec.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KubeletFeatures {
    /// It acts on `Restart` (KEP-5307), and on the restart policy of a container.
    pub container_rules: bool,
    /// It acts on `RestartAllContainers` (KEP-5532).
    pub restart_all: bool,
    /// It takes a pod for initialised as soon as a regular container is in its sandbox, an exited one too: to run init
    /// containers again it must find none. True where the version cannot be told.
    pub exited_initialises: bool,
}

impl KubeletFeatures {
    /// What the kubelet says of itself in its node's status.
    #[must_use]
    pub fn from_node(node: &Node) -> Self {
        let is_declared = declared(node).any(|it| it == RESTART_ALL);
        let restart_all = is_declared && !declaration::is_ours(node);
        let version = version(node);
        Self {
            // The gate that is declared needs the other one (`defaultKubernetesFeatureGateDependencies`,
            // `pkg/features/kube_features.go`, k8s 1.36).
            container_rules: restart_all || version.is_some_and(|it| it >= CONTAINER_RULES),
            restart_all,
            exited_initialises: version.is_none_or(|it| it >= EXITED_INITIALISES),
        }
    }

    /// What a kubelet of that version does, `1.36` or `v1.36.3`, as long as nobody changes its feature gates.
    pub fn of_version(version: &str) -> Result<Self, NoVersion> {
        let version = numbers(version).ok_or(NoVersion)?;
        Ok(Self {
            container_rules: version >= CONTAINER_RULES,
            restart_all: version >= RESTART_ALL_RULES,
            exited_initialises: version >= EXITED_INITIALISES,
        })
    }
}

/// What is no version of a kubelet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a version of Kubernetes: it must be as in 1.36 or v1.36.3")]
pub struct NoVersion;

/// What is said to be honoured on the node.
pub(super) fn declared(node: &Node) -> impl Iterator<Item = &str> {
    let status = node.status.as_ref();
    let declared = status.and_then(|status| status.declared_features.as_ref());
    declared.into_iter().flatten().map(String::as_str)
}

/// The first two numbers of its kubelet's version, if that can be told.
pub(super) fn version(node: &Node) -> Option<(u32, u32)> {
    let info = node.status.as_ref()?.node_info.as_ref()?;
    numbers(&info.kubelet_version)
}

/// Reads the beginning of `v1.36.3`, `v1.35.0-rc.1+vendor`.
fn numbers(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.strip_prefix('v').unwrap_or(text).split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Watches the node's object for as long as the receiver is kept: `None` until the API server has told of it, then
/// what it told last. The node's declaration is compared with each. Must be called on the async runtime.
#[must_use]
pub fn watch_features(
    client: Client,
    node: &str,
    declaration: Arc<Declaration>,
) -> watch::Receiver<Option<KubeletFeatures>> {
    let (known, receiver) = watch::channel(None);
    let stream = watch_object(Api::<Node>::all(client), node).default_backoff();
    tokio::spawn(follow(stream, known, async move |node| {
        declaration.compare(&node).await;
    }));
    receiver
}

async fn follow(
    stream: impl Stream<Item = watcher::Result<Option<Node>>>,
    known: watch::Sender<Option<KubeletFeatures>>,
    heard: impl AsyncFn(Node),
) {
    let mut stream = std::pin::pin!(stream);
    let mut said = false;
    loop {
        let event = tokio::select! {
            event = stream.next() => event,
            () = known.closed() => return,
        };
        match event {
            Some(Ok(Some(node))) => {
                let features = KubeletFeatures::from_node(&node);
                known.send_if_modified(|known| known.replace(features) != Some(features));
                heard(node).await;
            }
            // The kubelet registers itself again.
            Some(Ok(None)) => {}
            Some(Err(error)) => {
                if known.borrow().is_none() && !std::mem::replace(&mut said, true) {
                    tracing::warn!(
                        %error,
                        "not known yet what this node's kubelet does by itself: it needs list and watch on nodes"
                    );
                }
            }
            None => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn node(version: &str, declared: &[&str]) -> Node {
        serde_json::from_value(json!({
            "metadata": {"name": "node-1"},
            "status": {
                "declaredFeatures": declared,
                "nodeInfo": {
                    "kubeletVersion": version, "architecture": "", "bootID": "", "containerRuntimeVersion": "",
                    "kernelVersion": "", "kubeProxyVersion": "", "machineID": "", "operatingSystem": "",
                    "osImage": "", "systemUUID": "",
                },
            },
        }))
        .unwrap()
    }

    fn acts_on(container_rules: bool, restart_all: bool) -> impl Fn(KubeletFeatures) -> bool {
        move |it| (it.container_rules, it.restart_all) == (container_rules, restart_all)
    }

    #[test]
    fn container_rules_go_by_the_version() {
        for (version, acts) in [
            ("v1.33.13", false),
            ("v1.34.4", false),
            ("v1.35.0-rc.1", true),
            ("v1.36.3+vendor1", true),
            ("v2.0.0", true),
            ("unknown", false),
            ("", false),
        ] {
            let told = KubeletFeatures::from_node(&node(version, &["Other"]));
            assert!(acts_on(acts, false)(told), "{version}: {told:?}");
        }
        let told = KubeletFeatures::from_node(&Node::default());
        assert!(acts_on(false, false)(told), "{told:?}");
    }

    #[test]
    fn exited_containers_initialise_a_pod_from_1_37_on_and_where_nobody_knows() {
        for (version, counts) in [
            ("v1.33.13", false),
            ("v1.36.3", false),
            ("v1.37.0-beta.0", true),
            ("v1.37.2", true),
            ("unknown", true),
        ] {
            let told = KubeletFeatures::from_node(&node(version, &[]));
            assert_eq!(told.exited_initialises, counts, "{version}");
        }
        assert!(KubeletFeatures::from_node(&Node::default()).exited_initialises);
    }

    #[test]
    fn restart_all_goes_by_what_is_declared() {
        for version in ["v1.35.4", "v1.36.3", "unknown"] {
            let told = KubeletFeatures::from_node(&node(version, &["Other", RESTART_ALL]));
            assert!(acts_on(true, true)(told), "{version}: {told:?}");
        }
    }

    #[test]
    fn a_version_alone_tells_what_is_on_by_default() {
        for (version, acts) in [
            ("1.34", (false, false, false)),
            ("v1.35.4", (true, false, false)),
            ("1.36", (true, true, false)),
            ("1.37.2", (true, true, true)),
        ] {
            let it = KubeletFeatures::of_version(version).unwrap();
            let told = (it.container_rules, it.restart_all, it.exited_initialises);
            assert_eq!(told, acts, "{version}");
        }
        for version in ["", "1", "v1", "latest", "1.x", "1.36beta"] {
            let told = KubeletFeatures::of_version(version);
            assert_eq!(told, Err(NoVersion), "{version}");
        }
    }

    #[tokio::test]
    async fn the_last_known_stays_while_the_api_server_is_away() {
        let (known, receiver) = watch::channel(None);
        let away = || Err(watcher::Error::NoResourceVersion);
        let events = futures::stream::iter([
            away(),
            Ok(Some(node("v1.36.3", &[RESTART_ALL]))),
            away(),
            Ok(None),
        ]);
        Box::pin(follow(events, known, async |_| ())).await;
        assert!(receiver.borrow().is_some_and(acts_on(true, true)));
    }

    #[tokio::test]
    async fn nobody_is_woken_by_a_node_that_is_as_before() {
        let (known, mut receiver) = watch::channel(None);
        let (events, stream) = tokio::sync::mpsc::unbounded_channel();
        let stream = tokio_stream::wrappers::UnboundedReceiverStream::new(stream);
        let task = tokio::spawn(follow(stream, known, async |_| ()));
        events.send(Ok(Some(node("v1.35.4", &[])))).unwrap();
        receiver.changed().await.unwrap();
        let known = *receiver.borrow_and_update();
        assert!(known.is_some_and(acts_on(true, false)));
        events.send(Ok(Some(node("v1.35.5", &[])))).unwrap();
        drop(events);
        task.await.unwrap();
        // What has changed is told even when nothing more will come.
        assert!(receiver.changed().await.is_err());
    }

    #[tokio::test]
    async fn the_watch_ends_with_its_receiver() {
        let (known, receiver) = watch::channel(None);
        drop(receiver);
        follow(futures::stream::pending(), known, async |_| ()).await;
    }
}
