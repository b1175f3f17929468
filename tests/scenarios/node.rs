//! The node that the scenarios run on, as `hack/node.sh up` describes it in its env file.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Event, NodeStatus, Pod};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use tokio::task::spawn_blocking;

use crate::runtime::Runtime;

const NAMESPACE: &str = "default";

/// What `node.status.declaredFeatures` calls the kubelet's own restart of all containers.
pub(crate) const NATIVE: &str = "RestartAllContainersOnContainerExits";

pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) plugin_kubeconfig: PathBuf,
    pub(crate) cri_endpoint: String,
    pub(crate) nri_socket: PathBuf,
    pub(crate) image: String,
    pub(crate) runtime: Runtime,
    kubelet_root: PathBuf,
    client: Client,
}

impl Node {
    pub(crate) async fn read(env_file: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(env_file)
            .with_context(|| format!("cannot read the node's env file {}", env_file.display()))?;
        let env: HashMap<&str, &str> = text
            .lines()
            .filter_map(|line| line.split_once('='))
            .map(|(key, value)| (key.trim_start_matches("export ").trim(), unquoted(value)))
            .collect();
        let get = |key: &str| {
            env.get(key)
                .map(|value| (*value).to_owned())
                .with_context(|| format!("{} has no {key}", env_file.display()))
        };
        let dir = PathBuf::from(get("NODE_DIR")?);
        let kubeconfig = PathBuf::from(get("KUBECONFIG")?);
        let config = Config::from_custom_kubeconfig(
            Kubeconfig::read_from(&kubeconfig)?,
            &KubeConfigOptions::default(),
        )
        .await?;
        let cri_endpoint = get("CRI_ENDPOINT")?;
        Ok(Self {
            name: get("NODE_NAME")?,
            runtime: Runtime::new(&cri_endpoint)?,
            cri_endpoint,
            nri_socket: get("NRI_SOCKET")?.into(),
            image: get("BUSYBOX_IMAGE")?,
            kubelet_root: dir.join("kubelet"),
            plugin_kubeconfig: get("PLUGIN_KUBECONFIG")?.into(),
            client: Client::try_from(config)?,
        })
    }

    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    /// Whether the kubelet says that it has a feature.
    pub(crate) async fn declares(&self, feature: &str) -> Result<bool> {
        let declared = self.status().await?.declared_features;
        Ok(declared.is_some_and(|declared| declared.iter().any(|it| it == feature)))
    }

    pub(crate) async fn status(&self) -> Result<NodeStatus> {
        let nodes: Api<k8s_openapi::api::core::v1::Node> = Api::all(self.client.clone());
        Ok(nodes
            .get_status(&self.name)
            .await?
            .status
            .unwrap_or_default())
    }

    pub(crate) fn events(&self) -> Api<Event> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    /// The emptyDir `ev` of a pod, as the host sees it.
    pub(crate) fn evidence_dir(&self, pod_uid: &str) -> PathBuf {
        self.kubelet_root
            .join("pods")
            .join(pod_uid)
            .join("volumes/kubernetes.io~empty-dir/ev")
    }

    /// `hack/node.sh ACTION NAME COMPONENT`, for scenarios in which a part of the node ends.
    pub(crate) async fn script(&self, action: &str, component: &str) -> Result<()> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("hack/node.sh");
        let mut command = Command::new(&script);
        command.args([action, &self.name, component]);
        let output = spawn_blocking(move || command.output())
            .await?
            .with_context(|| format!("cannot run {}", script.display()))?;
        ensure!(
            output.status.success(),
            "{} {action} {component}: {}",
            script.display(),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(())
    }
}

fn unquoted(value: &str) -> &str {
    value.trim().trim_matches(|c| c == '\'' || c == '"')
}
