//! Finds the API server, or finds that there is none.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kube::config::{Config, InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};

use crate::ids::PodKey;

/// Set by the kubelet in every container, unless its pod asks for no service links to the API server.
const IN_CLUSTER: &str = "KUBERNETES_SERVICE_HOST";
/// How long a connection may take. Only background work waits for it.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A failure on the way to or at the API server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KubeError {
    /// The kubeconfig that was asked for is of no use.
    #[error("cannot use kubeconfig {}: {source}", path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<KubeconfigError>,
    },
    /// There is a cluster around this process, but its service account is of no use.
    #[error("cannot use the pod's service account: {0}; is automountServiceAccountToken off?")]
    InCluster(#[source] Box<InClusterError>),
    /// The configuration makes no client, for example for a certificate that cannot be read.
    #[error("cannot make an API client: {0}")]
    Client(#[source] Box<kube::Error>),
    /// The pod is gone, or another one has its name now. Nothing was changed.
    #[error("pod {pod} is gone from the API server")]
    PodGone {
        /// The pod.
        pod: PodKey,
    },
    /// The API server did not answer in time. Whether anything was changed is unknown.
    #[error("no answer from the API server within {limit:?} about pod {pod}")]
    Deadline {
        /// The pod.
        pod: PodKey,
        /// How long was waited.
        limit: Duration,
    },
    /// The API server refused, or cannot be reached.
    #[error("cannot patch the status of pod {pod}: {source}")]
    Patch {
        /// The pod.
        pod: PodKey,
        /// Why.
        source: Box<kube::Error>,
    },
}

/// A client of the API server: by `kubeconfig` if one is given, else by the pod's service account, else `None`.
///
/// Nothing is asked of the server yet: it may be away.
pub async fn connect(kubeconfig: Option<&Path>) -> Result<Option<kube::Client>, KubeError> {
    let mut config = if let Some(path) = kubeconfig {
        from_file(path)
            .await
            .map_err(|source| KubeError::Kubeconfig {
                path: path.to_owned(),
                source: Box::new(source),
            })?
    } else if std::env::var_os(IN_CLUSTER).is_some() {
        Config::incluster().map_err(|source| KubeError::InCluster(Box::new(source)))?
    } else {
        return Ok(None);
    };
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    kube::Client::try_from(config)
        .map(Some)
        .map_err(|source| KubeError::Client(Box::new(source)))
}

async fn from_file(path: &Path) -> Result<Config, KubeconfigError> {
    let kubeconfig = Kubeconfig::read_from(path)?;
    Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_kubeconfig_that_is_missing_is_named() {
        let Err(error) = connect(Some(Path::new("/nowhere/kubeconfig"))).await else {
            panic!("there is no such file");
        };
        let said = error.to_string();
        assert!(
            said.starts_with("cannot use kubeconfig /nowhere/kubeconfig: "),
            "{said}"
        );
    }

    #[tokio::test]
    async fn a_kubeconfig_makes_a_client_without_asking_the_server() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kubeconfig");
        let kubeconfig = r#"{"apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "k", "cluster": {"server": "http://127.0.0.1:1"}}],
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "users": [{"name": "u", "user": {}}]}"#;
        std::fs::write(&path, kubeconfig).unwrap();
        assert!(connect(Some(&path)).await.unwrap().is_some());
    }
}
