//! Finding the API server.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use kube::Client;
use kube::config::{Config, InClusterError, KubeConfigOptions, KubeconfigError};
use serde_json::Value;

use crate::yaml::{self, YamlError};

/// Why the API server cannot be used at all. One that is away is no error: it is waited for.
#[derive(Debug, thiserror::Error)]
pub enum KubeError {
    /// The kubeconfig cannot be read.
    #[error("cannot use kubeconfig {path}: {source}; see --kubeconfig")]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: KubeconfigFault,
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

/// What is wrong with a kubeconfig.
#[derive(Debug, thiserror::Error)]
pub enum KubeconfigFault {
    /// It is not there, or may not be read.
    #[error(transparent)]
    Unreadable(#[from] io::Error),
    /// It is no YAML.
    #[error(transparent)]
    Yaml(#[from] YamlError),
    /// It has something else where it should have this or that.
    #[error(transparent)]
    Shape(#[from] serde_json::Error),
    /// It names what is not there.
    #[error(transparent)]
    Use(Box<KubeconfigError>),
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
                source,
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

/// As `Kubeconfig::read_from`, which makes two thirds of a MiB of code of its types for YAML alone.
async fn from_file(path: &Path) -> Result<Config, KubeconfigFault> {
    let mut kubeconfig: Value = yaml::document(&fs::read_to_string(path)?)?;
    resolve(&mut kubeconfig, path.parent().unwrap_or(path));
    let kubeconfig = serde_json::from_value(kubeconfig)?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
    config.map_err(|error| KubeconfigFault::Use(Box::new(error)))
}

/// Files that a kubeconfig names are beside it (`ResolveLocalPaths`, client-go `tools/clientcmd/loader.go`).
fn resolve(kubeconfig: &mut Value, dir: &Path) {
    let command = "/user/exec/command";
    let named = [
        ("clusters", "/cluster/certificate-authority"),
        ("users", "/user/client-certificate"),
        ("users", "/user/client-key"),
        ("users", "/user/tokenFile"),
        ("users", command),
    ];
    for (list, at) in named {
        let entries = kubeconfig.get_mut(list).and_then(Value::as_array_mut);
        let of_each = entries.into_iter().flatten();
        for entry in of_each.filter_map(|entry| entry.pointer_mut(at)) {
            // A command without a slash is looked for elsewhere.
            let is_path = |text: &&str| !text.is_empty() && (at != command || text.contains('/'));
            if let Some(path) = entry.as_str().filter(is_path) {
                *entry = dir.join(path).display().to_string().into();
            }
        }
    }
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

    #[tokio::test]
    async fn files_that_a_kubeconfig_names_are_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kubeconfig");
        fs::write(dir.path().join("token"), "secret").unwrap();
        let text = "
current-context: here
clusters: [{name: c, cluster: {server: 'https://127.0.0.1:6443', certificate-authority: CA}}]
contexts: [{name: here, context: {cluster: c, user: u}}]
users: [{name: u, user: {tokenFile: token}}]
";
        fs::write(&path, text.replace(", certificate-authority: CA", "")).unwrap();
        let config = from_file(&path).await.unwrap();
        assert_eq!(config.cluster_url.to_string(), "https://127.0.0.1:6443/");
        for (command, found) in [
            ("./auth", dir.path().join("./auth")),
            ("auth", "auth".into()),
        ] {
            let mut kubeconfig =
                serde_json::json!({"users": [{"user": {"exec": {"command": command}}}]});
            resolve(&mut kubeconfig, dir.path());
            let resolved = &kubeconfig["users"][0]["user"]["exec"]["command"];
            assert_eq!(resolved.as_str().map(Path::new), Some(&*found));
        }
        let token = dir.path().join("token").display().to_string();
        assert_eq!(config.auth_info.token_file, Some(token));
        for (bad, word) in [
            (text.to_owned(), dir.path().join("CA").display().to_string()),
            ("clusters: 1".to_owned(), "invalid type".to_owned()),
            ("{".to_owned(), "line 1".to_owned()),
            ("current-context: here".to_owned(), "here".to_owned()),
        ] {
            fs::write(&path, &bad).unwrap();
            let error = format!("{:?}", from_file(&path).await.unwrap_err());
            assert!(error.contains(&word), "{bad}: {error}");
        }
    }
}
