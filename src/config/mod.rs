//! The settings of `reprise run`: flags, then `REPRISE_<NAME>` in the environment, then the config
//! file, then what NRI hands over, then defaults.

mod settings;
mod values;

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use settings::{RunArgs, Settings};
pub use values::{BadValue, CriEndpoint, DaemonSetName, Listen, LogFormat, LogLevel, NriIndex};

use crate::back_off::{BackOff, BackOffError};
use crate::policy::Start;
use crate::replay::Devices;
use crate::reset::{Terms, TooManyResets};
use crate::yaml::YamlError;

const DEFAULT_FILE: &str = "/etc/reprise/config.yaml";
const DEFAULT_CRI_SOCKETS: [&str; 2] = ["/run/containerd/containerd.sock", "/run/crio/crio.sock"];

/// Settings that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file is not there or may not be read; only an error if it was asked for by name.
    #[error("cannot read the config file {path}: {source}", path = path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// An unknown key or a value that means nothing.
    #[error("{origin}: {error}")]
    Invalid {
        /// The file, or NRI.
        origin: String,
        /// What and where.
        error: YamlError,
    },
    /// NRI hands its text over on the connection that such a setting makes.
    #[error(
        "configuration from NRI: {0} has no effect here, because the connection to NRI stands \
         already; set it as a flag, in the environment or in the config file"
    )]
    TooLate(&'static str),
    /// The kernel does not say where this executable is.
    #[error("cannot tell the path of this executable; give --hook-path")]
    NoHookPath,
    /// Only one of them can be meant.
    #[error("both --hook-path and --hook-dir: the hook is either there already, or is put there")]
    TwoHooks,
    /// The gaps between restarts make no sense.
    #[error("{0}; see --back-off and --back-off-max")]
    BackOff(#[from] BackOffError),
    /// The numbers of hard resets make no sense.
    #[error(transparent)]
    HardReset(#[from] TooManyResets),
    /// Neither flag, nor `NODE_NAME`, nor a host name.
    #[error("cannot tell the name of this node; give --node-name")]
    NoNodeName,
}

/// What the machine says of itself where nobody set anything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Surroundings {
    /// The node's name: `NODE_NAME`, else the host's name.
    pub node_name: Option<String>,
    /// The path of this executable.
    pub executable: Option<PathBuf>,
}

impl Surroundings {
    /// Asks the machine.
    #[must_use]
    pub fn read() -> Self {
        let named = std::env::var("NODE_NAME").ok();
        // The kubelet registers under the host's name in lower case (nodeutil.GetHostname).
        let host = || {
            Some(
                fs::read_to_string("/proc/sys/kernel/hostname")
                    .ok()?
                    .to_lowercase(),
            )
        };
        let name = named.filter(|name| !name.is_empty()).or_else(host);
        Self {
            node_name: name
                .map(|name| name.trim().to_owned())
                .filter(|name| !name.is_empty()),
            executable: std::env::current_exe().ok(),
        }
    }
}

/// Where the executable of the hook is, as the container runtime sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HookPlace {
    /// There already.
    There(PathBuf),
    /// In this directory, where this process has to put a copy.
    Copy(PathBuf),
}

/// Settings that are complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The runtime's NRI socket.
    pub nri_socket: PathBuf,
    /// The place of this plugin among others.
    pub nri_index: NriIndex,
    /// CRI sockets in the order in which to look for them: the first that exists is the runtime's.
    /// They may appear late, since the runtime can start this plugin before it listens.
    pub cri_endpoints: Vec<CriEndpoint>,
    /// How to reach the API server; `None`: in-cluster if there, else not at all.
    pub kubeconfig: Option<PathBuf>,
    /// The node's name in the cluster.
    pub node_name: String,
    /// Where the sockets are made.
    pub run_dir: PathBuf,
    /// Where is kept what must outlive a restart of the plugin.
    pub state_dir: PathBuf,
    /// Where metrics and health can be asked for; `None`: nowhere.
    pub listen: Option<SocketAddr>,
    /// The hook's executable, as the container runtime sees it.
    pub hook: HookPlace,
    /// The `DaemonSet` that runs this plugin.
    pub daemonset: Option<DaemonSetName>,
    /// Where the kubelet finds its static pods.
    pub static_pod_path: PathBuf,
    /// Whether to wait for the end of another plugin with the same directories.
    pub wait: bool,
    /// Who starts containers again, see [`Start::asked`].
    pub start: Start,
    /// Devices that containers may have which are started by replay.
    pub replay_devices: Vec<Devices>,
    /// Whether to declare on the node what is honoured of pods' specs.
    pub declare_features: bool,
    /// The gaps between restarts of one pod.
    pub back_off: BackOff,
    /// When pods are deleted that crash for ever.
    pub hard_reset: Terms,
    /// How log lines are written.
    pub log_format: LogFormat,
    /// The least important lines that are logged.
    pub log_level: LogLevel,
    given: Settings,
    surroundings: Surroundings,
}

impl Config {
    /// Completes the command line from the config file and the machine.
    pub fn load(args: RunArgs) -> Result<Self, ConfigError> {
        let file = match &args.config {
            Some(path) => read(path)?,
            None => match read(Path::new(DEFAULT_FILE)) {
                Err(ConfigError::Unreadable { source, .. })
                    if source.kind() == io::ErrorKind::NotFound =>
                {
                    Settings::default()
                }
                other => other?,
            },
        };
        Self::complete(args.settings.or(file), Surroundings::read())
    }

    /// The same with what NRI's `Configure` hands over, for everything that was not set otherwise.
    pub fn merge_nri_config(&self, text: &str) -> Result<Self, ConfigError> {
        let nri = Settings::parse("configuration from NRI", text)?;
        if nri.nri_socket.is_some() {
            return Err(ConfigError::TooLate("nri-socket"));
        }
        if nri.nri_index.is_some() {
            return Err(ConfigError::TooLate("nri-index"));
        }
        Self::complete(self.given.clone().or(nri), self.surroundings.clone())
    }

    fn complete(given: Settings, surroundings: Surroundings) -> Result<Self, ConfigError> {
        let settings = given.clone();
        let default_endpoints = || DEFAULT_CRI_SOCKETS.map(CriEndpoint::at).into();
        Ok(Self {
            nri_socket: settings
                .nri_socket
                .unwrap_or_else(|| "/var/run/nri/nri.sock".into()),
            nri_index: settings.nri_index.unwrap_or_default(),
            cri_endpoints: settings
                .cri_endpoint
                .map_or_else(default_endpoints, |it| vec![it]),
            kubeconfig: settings.kubeconfig,
            node_name: settings
                .node_name
                .or_else(|| surroundings.node_name.clone())
                .ok_or(ConfigError::NoNodeName)?,
            run_dir: settings.run_dir.unwrap_or_else(|| "/run/reprise".into()),
            state_dir: settings
                .state_dir
                .unwrap_or_else(|| "/var/lib/reprise".into()),
            listen: settings.listen.unwrap_or_default().0,
            hook: match (settings.hook_path, settings.hook_dir) {
                (Some(_), Some(_)) => return Err(ConfigError::TwoHooks),
                (None, Some(dir)) => HookPlace::Copy(dir),
                (path, None) => HookPlace::There(
                    path.or_else(|| surroundings.executable.clone())
                        .ok_or(ConfigError::NoHookPath)?,
                ),
            },
            daemonset: settings.daemonset,
            static_pod_path: settings
                .static_pod_path
                .unwrap_or_else(|| "/etc/kubernetes/manifests".into()),
            wait: settings.wait.unwrap_or_default(),
            start: settings.start.unwrap_or_default(),
            declare_features: settings.declare_features.unwrap_or_default(),
            replay_devices: settings.replay_devices.unwrap_or_default(),
            back_off: BackOff::try_new(
                seconds(settings.back_off.unwrap_or(10)),
                seconds(settings.back_off_max.unwrap_or(300)),
                seconds(settings.back_off_reset.unwrap_or(600)),
            )?
            .with_floor(settings.back_off_floor.map(seconds)),
            hard_reset: settings.hard_reset.unwrap_or_default().checked()?,
            log_format: settings.log_format.unwrap_or_default(),
            log_level: settings.log_level.unwrap_or_default(),
            given,
            surroundings,
        })
    }
}

fn seconds(seconds: u32) -> Duration {
    Duration::from_secs(seconds.into())
}

fn read(path: &Path) -> Result<Settings, ConfigError> {
    let text = fs::read_to_string(path).map_err(|source| ConfigError::Unreadable {
        path: path.to_owned(),
        source,
    })?;
    Settings::parse(&path.display().to_string(), &text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::FailureAction;
    use crate::reset::Method;

    fn surroundings() -> Surroundings {
        Surroundings {
            node_name: Some("node-1".into()),
            executable: Some("/bin/reprise".into()),
        }
    }

    fn load(file: &str) -> Result<Config, ConfigError> {
        Config::complete(Settings::parse("config.yaml", file)?, surroundings())
    }

    fn error(file: &str) -> String {
        load(file).unwrap_err().to_string()
    }

    #[test]
    fn nothing_has_to_be_set() {
        for nothing in ["", "# only a comment\n", "{}"] {
            let config = load(nothing).unwrap();
            assert_eq!(config.nri_socket, Path::new("/var/run/nri/nri.sock"));
            assert_eq!(config.nri_index.as_str(), "10");
            let endpoints: Vec<_> = config
                .cri_endpoints
                .iter()
                .map(ToString::to_string)
                .collect();
            let expected = [
                "unix:///run/containerd/containerd.sock",
                "unix:///run/crio/crio.sock",
            ];
            assert_eq!(endpoints, expected);
            assert_eq!(config.node_name, "node-1");
            assert_eq!(config.hook, HookPlace::There("/bin/reprise".into()));
            assert_eq!(
                (config.log_format, config.log_level),
                (LogFormat::Text, LogLevel::Info)
            );
        }
    }

    #[test]
    fn a_file_sets_everything_under_the_names_of_the_flags() {
        let file = "
nri-socket: /n
nri-index: 07
cri-endpoint: unix:///c
kubeconfig: /k
node-name: other
run-dir: /r
state-dir: /s
listen: '[::]:1'
hook-path: /h
daemonset: kube-system/reprise
static-pod-path: /p
start: Kubelet
back-off: 1
back-off-max: 2
back-off-reset: 3
back-off-floor: 1
log-format: json
log-level: debug
";
        let config = load(file).unwrap();
        assert_eq!(config.nri_socket, Path::new("/n"));
        assert_eq!(config.nri_index.as_str(), "07");
        assert_eq!(config.cri_endpoints[0].socket(), Path::new("/c"));
        assert_eq!(config.cri_endpoints.len(), 1);
        assert_eq!(config.kubeconfig.as_deref(), Some(Path::new("/k")));
        assert_eq!(config.node_name, "other");
        assert_eq!(config.run_dir, Path::new("/r"));
        assert_eq!(config.state_dir, Path::new("/s"));
        assert_eq!(config.listen, Some("[::]:1".parse().unwrap()));
        assert_eq!(config.hook, HookPlace::There("/h".into()));
        let daemonset = config.daemonset.map(|it| it.to_string());
        assert_eq!(daemonset.as_deref(), Some("kube-system/reprise"));
        assert_eq!(config.static_pod_path, Path::new("/p"));
        let [one, two, three] = [1, 2, 3].map(Duration::from_secs);
        let back_off = BackOff::try_new(one, two, three).unwrap();
        assert_eq!(config.back_off, back_off.with_floor(Some(one)));
        assert_eq!(
            (config.log_format, config.log_level),
            (LogFormat::Json, LogLevel::Debug)
        );
    }

    #[test]
    fn the_hook_is_there_or_is_put_there() {
        let config = load("hook-dir: /opt/reprise").unwrap();
        assert_eq!(config.hook, HookPlace::Copy("/opt/reprise".into()));
        let both = error("{hook-dir: /opt/reprise, hook-path: /h}");
        assert!(both.contains("--hook-dir"), "{both}");
        for bad in ["reprise", "/reprise", "kube-system/", "a/b/c"] {
            let error = error(&format!("daemonset: {bad}"));
            assert!(error.contains("a namespace and a name"), "{error}");
        }
    }

    #[test]
    fn metrics_are_the_nodes_own_unless_they_are_wanted_elsewhere_or_nowhere() {
        let listen = |file| load(file).unwrap().listen.map(|it| it.to_string());
        assert_eq!(listen("").as_deref(), Some("127.0.0.1:9808"));
        assert_eq!(listen("listen: 0.0.0.0:80").as_deref(), Some("0.0.0.0:80"));
        assert_eq!(listen("listen: ''"), None);
        for bad in [
            "9808",
            "':9808'",
            "localhost:9808",
            "1.2.3.4",
            "1.2.3.4:70000",
        ] {
            let error = error(&format!("listen: {bad}"));
            assert!(error.contains("IP:PORT"), "{error}");
        }
    }

    #[test]
    fn flags_go_before_the_file_and_the_file_before_nri() {
        let level = |log_level| Settings {
            log_level: Some(log_level),
            ..Settings::default()
        };
        let file = Settings {
            run_dir: Some("/file".into()),
            ..level(LogLevel::Warn)
        };
        let given = level(LogLevel::Debug).or(file);
        let config = Config::complete(given, surroundings()).unwrap();
        let config = config
            .merge_nri_config("{log-level: trace, run-dir: /nri, state-dir: /nri}")
            .unwrap();
        assert_eq!(config.log_level, LogLevel::Debug);
        assert_eq!(config.run_dir, Path::new("/file"));
        assert_eq!(config.state_dir, Path::new("/nri"));
    }

    #[test]
    fn nri_cannot_say_how_to_reach_itself() {
        let config = load("").unwrap();
        assert_eq!(config.merge_nri_config("").unwrap(), config);
        let error = config
            .merge_nri_config("nri-index: 11")
            .unwrap_err()
            .to_string();
        assert!(error.contains("nri-index has no effect here"), "{error}");
        let error = config
            .merge_nri_config("verbose: 1")
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("configuration from NRI: unknown field `verbose`"),
            "{error}"
        );
    }

    #[test]
    fn a_bad_key_or_value_is_named_with_its_place() {
        let error_of = |file| {
            let error = error(file);
            assert!(
                error.starts_with("config.yaml: ") && error.contains("line 1"),
                "{error}"
            );
            error
        };
        assert!(error_of("nri_socket: /x").contains("unknown field `nri_socket`"));
        assert!(error_of("config: /x").contains("unknown field `config`"));
        assert!(error_of("log-level: loud").contains("loud"));
        error_of("back-off: -1");
        assert!(error_of("nri-index: 100").contains("an NRI index is two digits"));
        assert!(error_of("cri-endpoint: tcp://x").contains("a CRI endpoint is unix://"));
    }

    #[test]
    fn hard_resets_are_a_mapping_of_their_own() {
        assert_eq!(load("").unwrap().hard_reset, Terms::default());
        let file = "hardReset: {default: DeletePod, method: Delete, maxRestartsOnNode: 3, protectedNamespaces: [a]}";
        let terms = load(file).unwrap().hard_reset;
        let expected = Terms {
            default: FailureAction::DeletePod,
            method: Method::Delete,
            max_restarts_on_node: 3,
            protected_namespaces: ["a".to_owned()].into(),
            ..Terms::default()
        };
        assert_eq!(terms, expected);
        assert!(error("hardReset: {cooldown: 3}").contains("unknown field `cooldown`"));
        assert!(error("hardReset: {cooldownSeconds: -3}").starts_with("config.yaml: "));
        assert!(error("hardReset: {default: Delete}").contains("Delete"));
        load("hardReset: {maxResetsPerHour: 1000}").unwrap();
        for more in [
            "maxResetsPerHour: 1001",
            "windowSeconds: 72001",
            "cooldownSeconds: 72001",
        ] {
            let error = error(&format!("hardReset: {{{more}}}"));
            assert!(error.contains("lower maxResetsPerHour"), "{error}");
        }
    }

    #[test]
    fn gaps_that_shrink_are_refused() {
        let expected =
            "the first back-off is 301 s, longer than the longest, 300 s; see --back-off";
        assert!(error("back-off: 301").starts_with(expected));
    }

    #[test]
    fn a_file_that_was_asked_for_must_be_there() {
        let config = Some(PathBuf::from("/nonexistent/reprise.yaml"));
        let error = Config::load(RunArgs {
            config,
            ..RunArgs::default()
        })
        .unwrap_err();
        let expected = "cannot read the config file /nonexistent/reprise.yaml: No such file";
        assert!(error.to_string().starts_with(expected), "{error}");
    }

    #[test]
    fn a_machine_that_says_nothing_must_be_told() {
        let error = Config::complete(Settings::default(), Surroundings::default()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot tell the name of this node; give --node-name"
        );
    }
}
