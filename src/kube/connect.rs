//! Finding the API server.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::slice;

use kube::Client;
use kube::client::AuthError;
use kube::config::{
    AuthInfo, Config, InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError,
};
use serde_json::Value;

use crate::yaml::{self, YamlError};

/// Why the API server cannot be used at all. One that is away is no error: it is waited for.
#[derive(Debug, thiserror::Error)]
pub enum KubeError {
    /// The kubeconfig cannot be used.
    #[error("cannot use kubeconfig {files}: {source}; see --kubeconfig")]
    Kubeconfig {
        /// The file, or the files that make it up.
        files: String,
        /// What is wrong with it.
        source: KubeconfigFault,
    },
    /// This is a pod, but its service account cannot be used.
    #[error(
        "cannot use the in-cluster configuration: {0}; mount a service account token or give --kubeconfig"
    )]
    InCluster(Box<InClusterError>),
    /// Neither a kubeconfig nor a pod's service account says where the API server is.
    #[error("there is no kubeconfig: give --kubeconfig, set KUBECONFIG, or write ~/.kube/config")]
    Nowhere,
    /// The command that the kubeconfig names to log in cannot be run, or has failed.
    #[error("cannot log in with {command}, as the kubeconfig says: {why}")]
    Login {
        /// The command.
        command: String,
        /// What is wrong with it.
        why: String,
    },
    /// Another way to log in.
    #[error(
        "cannot log in: auth-provider {0} of the kubeconfig is not supported, only exec, tokens and certificates are"
    )]
    AuthProvider(String),
    /// A way through somebody else.
    #[error(
        "the API server is behind the proxy {0}, says the kubeconfig (proxy-url) or HTTPS_PROXY, and proxies are not supported"
    )]
    Proxy(String),
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
    /// It names what is not there, or does not go together.
    #[error(transparent)]
    Use(#[from] Box<KubeconfigError>),
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
        Some(path) => from_files(slice::from_ref(&path.to_owned()), None).await?,
        None => match Config::incluster() {
            Ok(config) => config,
            // Not in a pod.
            Err(InClusterError::ReadEnvironmentVariable(_)) => return Ok(None),
            Err(error) => return Err(KubeError::InCluster(Box::new(error))),
        },
    };
    config.default_retry = retries;
    Ok(Some(set_up(config)?))
}

/// A client of the user who calls, as kubectl finds it: from `kubeconfig`, else the files of $KUBECONFIG, else ~/.kube/config,
/// else the pod that this process runs in. `context`: another one than the current.
///
/// A command that the kubeconfig names to log in is run here, and may ask the user.
pub(crate) async fn connect_as_user(
    kubeconfig: Option<&Path>,
    context: Option<&str>,
) -> Result<Client, KubeError> {
    let files = kubeconfig.map_or_else(usual_files, |path| vec![path.to_owned()]);
    if files.is_empty() {
        return connect(None).await?.ok_or(KubeError::Nowhere);
    }
    set_up(from_files(&files, context).await?)
}

/// Where kubeconfigs are that nobody named (`NewDefaultClientConfigLoadingRules`, client-go `tools/clientcmd/loader.go`).
fn usual_files() -> Vec<PathBuf> {
    let [kubeconfig, home] = ["KUBECONFIG", "HOME"].map(env::var_os);
    let mut files = usual_places(kubeconfig.as_deref(), home.as_deref());
    files.retain(|path| path.exists());
    files
}

fn usual_places(kubeconfig: Option<&OsStr>, home: Option<&OsStr>) -> Vec<PathBuf> {
    match kubeconfig.filter(|text| !text.is_empty()) {
        Some(list) => env::split_paths(list)
            .filter(|path| !path.as_os_str().is_empty())
            .collect(),
        None => home
            .map(|home| Path::new(home).join(".kube/config"))
            .into_iter()
            .collect(),
    }
}

/// The configuration of a context, of the current one by default. Of what several files name, the first counts.
async fn from_files(files: &[PathBuf], context: Option<&str>) -> Result<Config, KubeError> {
    let mut all = Kubeconfig::default();
    for path in files {
        let merged = read(path).and_then(|next| Ok(all.merge(next).map_err(Box::new)?));
        all = merged.map_err(|source| KubeError::Kubeconfig {
            files: path.display().to_string(),
            source,
        })?;
    }
    let options = KubeConfigOptions {
        context: context.map(str::to_owned),
        ..KubeConfigOptions::default()
    };
    let config = Config::from_custom_kubeconfig(all, &options).await;
    config.map_err(|error| KubeError::Kubeconfig {
        files: listed(files),
        source: Box::new(error).into(),
    })
}

fn listed(files: &[PathBuf]) -> String {
    let files: Vec<_> = files.iter().map(|it| it.display().to_string()).collect();
    files.join(", ")
}

fn set_up(config: Config) -> Result<Client, KubeError> {
    if let Some(proxy) = &config.proxy_url {
        // Its user and password are nobody's business.
        let host = proxy.host().unwrap_or_default();
        return Err(KubeError::Proxy(host.to_owned()));
    }
    let login = config.auth_info.clone();
    Client::try_from(config).map_err(|error| explained(error, login))
}

/// `kube` shows all that a command has printed that was to log in: secrets, for all it knows.
fn explained(error: kube::Error, login: AuthInfo) -> KubeError {
    let kube::Error::Auth(fault) = &error else {
        return KubeError::Client(Box::new(error));
    };
    if let Some(provider) = login.auth_provider {
        return KubeError::AuthProvider(provider.name);
    }
    let Some(exec) = login.exec else {
        return KubeError::Client(Box::new(error));
    };
    let why = match fault {
        AuthError::AuthExecRun { out, .. } => format!("it failed ({})", out.status),
        AuthError::AuthExecStart(error) => match exec.install_hint {
            Some(hint) => format!("{error}; {}", hint.trim()),
            None => error.to_string(),
        },
        other => other.to_string(),
    };
    KubeError::Login {
        command: exec.command.unwrap_or_default(),
        why,
    }
}

/// As `Kubeconfig::read_from`, which reads its types from YAML (see [`yaml::document`]).
fn read(path: &Path) -> Result<Kubeconfig, KubeconfigFault> {
    let mut kubeconfig: Value = yaml::document(&fs::read_to_string(path)?)?;
    resolve(&mut kubeconfig, path.parent().unwrap_or(path));
    Ok(serde_json::from_value(kubeconfig)?)
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
        let config = from_files(slice::from_ref(&path), None).await.unwrap();
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
            let error = format!(
                "{:?}",
                from_files(slice::from_ref(&path), None).await.unwrap_err()
            );
            assert!(error.contains(&word), "{bad}: {error}");
        }
    }
    #[test]
    fn kubeconfigs_are_where_kubectl_looks_for_them() {
        let files = |kubeconfig: Option<&str>, home: Option<&str>| {
            usual_places(kubeconfig.map(OsStr::new), home.map(OsStr::new))
        };
        let home = Some("/home/me");
        assert_eq!(files(None, home), [Path::new("/home/me/.kube/config")]);
        assert_eq!(files(Some(""), home), files(None, home));
        assert_eq!(files(Some("/a::/b"), home), ["/a", "/b"].map(Path::new));
        assert!(files(None, None).is_empty());
    }

    #[tokio::test]
    async fn several_files_are_read_as_one_and_the_context_may_be_chosen() {
        let dir = tempfile::tempdir().unwrap();
        let files = ["one", "two"].map(|name| {
            let path = dir.path().join(name);
            let text = format!(
                "
current-context: {name}
clusters: [{{name: {name}, cluster: {{server: 'https://{name}:6443'}}}}]
contexts: [{{name: {name}, context: {{cluster: {name}, user: u, namespace: of-{name}}}}}]
users: [{{name: u, user: {{token: of-{name}}}}}]
"
            );
            fs::write(&path, text).unwrap();
            path
        });
        for (context, host) in [(None, "one"), (Some("two"), "two")] {
            let config = from_files(&files, context).await.unwrap();
            assert_eq!(config.cluster_url.host(), Some(host));
            assert_eq!(config.default_namespace, format!("of-{host}"));
        }
        let error = from_files(&files, Some("three")).await.unwrap_err();
        let error = error.to_string();
        assert!(error.contains("three") && error.contains("two"), "{error}");
    }

    fn user(user: &Value) -> Config {
        let mut config = Config::new("https://127.0.0.1:6443".parse().unwrap());
        config.auth_info = serde_json::from_value(user.clone()).unwrap();
        config
    }

    #[tokio::test]
    async fn a_command_that_logs_in_is_run_and_named_if_it_fails() {
        let exec = |script: &str| serde_json::json!({"exec": {"command": "/bin/sh", "args": ["-c", script], "interactiveMode": "Never"}});
        let answer = r#"echo '{"kind": "ExecCredential", "status": {"token": "t"}}'"#;
        set_up(user(&exec(answer))).map(drop).unwrap();
        let error = set_up(user(&exec("echo secret; exit 3"))).map(drop);
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("/bin/sh") && error.contains('3') && !error.contains("secret"),
            "{error}"
        );
        let missing =
            serde_json::json!({"exec": {"command": "/nowhere", "installHint": "install it\n"}});
        let error = set_up(user(&missing)).map(drop).unwrap_err().to_string();
        assert!(
            error.contains("/nowhere") && error.ends_with("install it"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn what_is_not_supported_is_named() {
        let azure = serde_json::json!({"auth-provider": {"name": "azure"}});
        let error = set_up(user(&azure)).map(drop).unwrap_err().to_string();
        assert!(error.contains("auth-provider azure"), "{error}");
        let mut config = user(&serde_json::json!({}));
        config.proxy_url = Some("http://me:secret@proxy.example.com:3128".parse().unwrap());
        let error = set_up(config).map(drop).unwrap_err().to_string();
        assert!(
            error.contains("proxy.example.com") && !error.contains("secret"),
            "{error}"
        );
    }
}
