//! What one source of settings sets: the command line, a file, or NRI.

use std::path::PathBuf;

use clap::Args;
use clap::builder::BoolishValueParser;
use serde::Deserialize;

use super::ConfigError;
use super::values::{CriEndpoint, DaemonSetName, Listen, LogFormat, LogLevel, NriIndex};
use crate::policy::Start;
use crate::replay::Devices;
use crate::reset::Terms;
use crate::yaml;

/// The command line of `reprise run`.
#[derive(Debug, Clone, Default, Args)]
pub struct RunArgs {
    /// Read settings from this YAML file; its keys are the long flags without dashes in front
    /// [default: /etc/reprise/config.yaml, if it exists]
    #[arg(long, value_name = "FILE", env = "REPRISE_CONFIG")]
    pub config: Option<PathBuf>,
    /// Settings given as flags or in the environment.
    #[command(flatten)]
    pub settings: Settings,
}

/// What one source (flags and environment, a file, NRI) sets; `None`: it leaves that to the next.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Settings {
    /// The runtime's NRI socket [default: /var/run/nri/nri.sock]
    #[arg(long, value_name = "PATH", env = "REPRISE_NRI_SOCKET")]
    pub nri_socket: Option<PathBuf>,
    /// Two digits that order this plugin among others: later ones see what earlier ones adjusted
    /// [default: 10]
    #[arg(long, value_name = "NN", env = "REPRISE_NRI_INDEX")]
    pub nri_index: Option<NriIndex>,
    /// The runtime's CRI socket, as `unix:///path` [default: containerd's or CRI-O's, whichever
    /// exists]
    #[arg(long, value_name = "URI", env = "REPRISE_CRI_ENDPOINT")]
    pub cri_endpoint: Option<CriEndpoint>,
    /// How to reach the API server [default: as the pod that this runs in, else not at all]
    #[arg(long, value_name = "PATH", env = "REPRISE_KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,
    /// The node's name in the cluster [default: `NODE_NAME` of the
    /// environment, else the host's name]
    #[arg(long, value_name = "NAME", env = "REPRISE_NODE_NAME")]
    pub node_name: Option<String>,
    /// Where the sockets are made; root's alone [default: /run/reprise]
    #[arg(long, value_name = "DIR", env = "REPRISE_RUN_DIR")]
    pub run_dir: Option<PathBuf>,
    /// Where is kept what must outlive a restart of the plugin [default: /var/lib/reprise]
    #[arg(long, value_name = "DIR", env = "REPRISE_STATE_DIR")]
    pub state_dir: Option<PathBuf>,
    /// Where /metrics, /healthz and /readyz are served by HTTP, as IP:PORT; empty: nowhere [default: 127.0.0.1:9808]
    #[arg(long, value_name = "ADDR", env = "REPRISE_LISTEN")]
    pub listen: Option<Listen>,
    /// This executable, as the container runtime sees it [default: as it sees itself]
    #[arg(long, value_name = "PATH", env = "REPRISE_HOOK_PATH")]
    pub hook_path: Option<PathBuf>,
    /// Put a copy of this executable here for the container runtime to run, which sees this directory under the same
    /// path; for a plugin in a container [default: none, see --hook-path]
    #[arg(long, value_name = "DIR", env = "REPRISE_HOOK_DIR")]
    pub hook_dir: Option<PathBuf>,
    /// The `DaemonSet` that runs this plugin: when it is being deleted, whatever the plugin has left on the node goes with
    /// the plugin, as by `reprise cleanup` [default: none]
    #[arg(long, value_name = "NAMESPACE/NAME", env = "REPRISE_DAEMONSET")]
    pub daemonset: Option<DaemonSetName>,
    /// Where the kubelet finds its static pods, whose specs are read there where no API server
    /// tells them [default: /etc/kubernetes/manifests]
    #[arg(long, value_name = "DIR", env = "REPRISE_STATIC_POD_PATH")]
    pub static_pod_path: Option<PathBuf>,
    /// Wait for the end of another plugin that works with the same directories, and take over
    /// from it [default: say who it is, and end with 1]
    #[arg(long, value_name = "BOOL", env = "REPRISE_WAIT", value_parser = BoolishValueParser::new(),
        num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub wait: Option<bool>,
    /// Who starts containers again; a pod may ask for something else, unless this is Kubelet [default: Auto]
    #[arg(long, value_name = "WHO", env = "REPRISE_START")]
    pub start: Option<Start>,
    /// Extended resources whose device plugins want no call before a container starts, so that containers with
    /// them may be started by replay: VENDOR/NAME or VENDOR/*, separated by commas [default: none]
    #[arg(
        long,
        value_name = "NAMES",
        env = "REPRISE_REPLAY_DEVICES",
        value_delimiter = ','
    )]
    pub replay_devices: Option<Vec<Devices>>,
    /// Declare on the node what is honoured of pods' specs in the kubelet's place, so that schedulers from 1.36 on send
    /// such pods there [default: no]
    #[arg(long, value_name = "BOOL", env = "REPRISE_DECLARE_FEATURES", value_parser = BoolishValueParser::new(),
        num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub declare_features: Option<bool>,
    /// The pause before the second restart of a pod in a row, in seconds; it doubles with each that
    /// follows; 0: no pauses at all [default: 10]
    #[arg(long, value_name = "SECONDS", env = "REPRISE_BACK_OFF")]
    pub back_off: Option<u32>,
    /// The longest such pause, in seconds [default: 300]
    #[arg(long, value_name = "SECONDS", env = "REPRISE_BACK_OFF_MAX")]
    pub back_off_max: Option<u32>,
    /// A pod that has run for so long since its last restart begins a new row, in seconds
    /// [default: 600]
    #[arg(long, value_name = "SECONDS", env = "REPRISE_BACK_OFF_RESET")]
    pub back_off_reset: Option<u32>,
    /// How short pods may make each of these three for themselves, in seconds; longer they may make them anyway
    /// [default: no shorter than they are]
    #[arg(long, value_name = "SECONDS", env = "REPRISE_BACK_OFF_FLOOR")]
    pub back_off_floor: Option<u32>,
    /// When pods are deleted that crash for ever: a mapping, which no flag has.
    #[arg(skip)]
    #[serde(rename = "hardReset")]
    pub hard_reset: Option<Terms>,
    /// How log lines are written [default: text]
    #[arg(long, value_name = "FORMAT", env = "REPRISE_LOG_FORMAT")]
    pub log_format: Option<LogFormat>,
    /// The least important lines that are logged [default: info]
    #[arg(long, value_name = "LEVEL", env = "REPRISE_LOG_LEVEL")]
    pub log_level: Option<LogLevel>,
}

impl Settings {
    /// Reads a file; `origin` names it in errors.
    pub(super) fn parse(origin: &str, text: &str) -> Result<Self, ConfigError> {
        // A file of nothing but comments is a file that sets nothing.
        let settings: Option<Self> =
            yaml::document(text).map_err(|error| ConfigError::Invalid {
                origin: origin.to_owned(),
                error,
            })?;
        Ok(settings.unwrap_or_default())
    }

    /// What this source leaves open is filled from `lower`.
    pub(super) fn or(self, lower: Self) -> Self {
        Self {
            nri_socket: self.nri_socket.or(lower.nri_socket),
            nri_index: self.nri_index.or(lower.nri_index),
            cri_endpoint: self.cri_endpoint.or(lower.cri_endpoint),
            kubeconfig: self.kubeconfig.or(lower.kubeconfig),
            node_name: self.node_name.or(lower.node_name),
            run_dir: self.run_dir.or(lower.run_dir),
            state_dir: self.state_dir.or(lower.state_dir),
            listen: self.listen.or(lower.listen),
            hook_path: self.hook_path.or(lower.hook_path),
            hook_dir: self.hook_dir.or(lower.hook_dir),
            daemonset: self.daemonset.or(lower.daemonset),
            static_pod_path: self.static_pod_path.or(lower.static_pod_path),
            wait: self.wait.or(lower.wait),
            start: self.start.or(lower.start),
            declare_features: self.declare_features.or(lower.declare_features),
            replay_devices: self.replay_devices.or(lower.replay_devices),
            back_off: self.back_off.or(lower.back_off),
            back_off_max: self.back_off_max.or(lower.back_off_max),
            back_off_reset: self.back_off_reset.or(lower.back_off_reset),
            back_off_floor: self.back_off_floor.or(lower.back_off_floor),
            hard_reset: self.hard_reset.or(lower.hard_reset),
            log_format: self.log_format.or(lower.log_format),
            log_level: self.log_level.or(lower.log_level),
        }
    }
}
