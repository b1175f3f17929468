//! Finding the API server.

use std::path::{Path, PathBuf};

use kube::Client;
use kube::config::{Config, InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};

/// Why the API server cannot be used at all. One that is away is no error: it is waited for.
#[derive(Debug, thiserror::Error)]
pub enum KubeError {
    /// The kubeconfig cannot be read.
    #[error("cannot use kubeconfig {path}: {source}; see --kubeconfig")]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<KubeconfigError>,
    },
    /// This is a pod, but its service account cannot be used.
    #[error(
        "cannot use the in-cluster configuration: {0}; mount a service account token or give --kubeconfig"
    )]
    InCluster(Box<InClusterError>),
    /// The client cannot be set up, for one because a certificate is malformed.
    #[error("cannot set up the API client: {0}")]
    Client(Box<kube::Error>),
}

/// A client from `kubeconfig`, else from the pod that this process runs in, else none.
///
/// Nothing is sent yet.
pub async fn connect(kubeconfig: Option<&Path>) -> Result<Option<Client>, KubeError> {
    client(kubeconfig, true).await
}

/// The same, for requests of which a refusal is an answer: by itself `kube` asks again and again where it is told 429, which is
/// also what a `PodDisruptionBudget` says.
pub(crate) async fn connect_once(kubeconfig: Option<&Path>) -> Result<Option<Client>, KubeError> {
    client(kubeconfig, false).await
}

async fn client(kubeconfig: Option<&Path>, retries: bool) -> Result<Option<Client>, KubeError> {
    let mut config = match kubeconfig {
        Some(path) => from_file(path)
            .await
            .map_err(|source| KubeError::Kubeconfig {
                path: path.to_owned(),
                source: Box::new(source),
            })?,
        None => match Config::incluster() {
            Ok(config) => config,
            // Not in a pod.
            Err(InClusterError::ReadEnvironmentVariable(_)) => return Ok(None),
            Err(error) => return Err(KubeError::InCluster(Box::new(error))),
        },
    };
    config.default_retry = retries;
    let client = Client::try_from(config).map_err(|error| KubeError::Client(Box::new(error)))?;
    Ok(Some(client))
}

async fn from_file(path: &Path) -> Result<Config, KubeconfigError> {
    let kubeconfig = Kubeconfig::read_from(path)?;
    Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_kubeconfig_that_is_not_there_is_named() {
        let error = connect(Some(Path::new("/nowhere/kubeconfig"))).await.err();
        let text = error.map(|error| error.to_string()).unwrap_or_default();
        assert!(text.contains("/nowhere/kubeconfig"), "{text}");
    }
}
