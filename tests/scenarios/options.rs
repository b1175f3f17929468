//! The runner's command line.

use clap::Parser;

use crate::scenario::{Deal, Scenario};

/// Scenarios on a real node. The node comes from `hack/node.sh up`; its env file is named by
/// `REPRISE_NODE_ENV`. Without one, every scenario is skipped.
#[derive(Parser, Debug)]
pub(crate) struct Options {
    /// Only scenarios whose name contains one of these
    pub(crate) filter: Vec<String>,

    /// The same
    #[arg(long = "filter", value_name = "TEXT")]
    also_filter: Vec<String>,

    /// Play everything N times
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) repeat: usize,

    /// Scenarios at the same time, of those that can share a node
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(crate) jobs: usize,

    /// A directory for several runs on nodes of one kind: each scenario is played by the first that comes to it
    #[arg(long, value_name = "DIR")]
    pub(crate) share_out: Option<std::path::PathBuf>,

    /// Only what falls to nodes of the K-th of N kinds, by --seed, and what tells kinds of nodes apart; nothing that takes long
    #[arg(long, value_name = "K/N", value_parser = kind, requires = "seed", group = "drawn")]
    kind: Option<(u64, u64)>,

    /// Those that cannot share the node before the others
    #[arg(long)]
    pub(crate) alone_first: bool,

    /// Do not start the plugin: shows which scenarios can tell
    #[arg(long)]
    pub(crate) without_plugin: bool,

    /// Who starts containers again where a scenario leaves that open: Auto, Kubelet or Replay
    #[arg(long, value_name = "WHO", default_value = "Kubelet")]
    pub(crate) start: String,

    /// Instead of scenarios, for so long: pods restart while the plugin, the kubelet or the runtime ends at any instant
    #[arg(long, value_name = "MINUTES", group = "drawn")]
    pub(crate) soak: Option<u64>,

    /// What the first bout of a soak is drawn from, each other one from the number after it, by default the time; or what
    /// scenarios are dealt out by
    #[arg(long, value_name = "N", requires = "drawn")]
    pub(crate) seed: Option<u64>,

    /// Print the names and end
    #[arg(long)]
    pub(crate) list: bool,

    /// The plugin's binary
    #[arg(long, value_name = "FILE", env = "REPRISE_BIN", default_value = env!("CARGO_BIN_EXE_reprise"))]
    pub(crate) plugin: std::path::PathBuf,

    /// Where to keep the plugin's log
    #[arg(long, value_name = "FILE", env = "REPRISE_PLUGIN_LOG")]
    pub(crate) plugin_log: Option<std::path::PathBuf>,

    /// The env file that `hack/node.sh up` has written
    #[arg(long, value_name = "FILE", env = "REPRISE_NODE_ENV")]
    pub(crate) node_env: Option<std::path::PathBuf>,
}

impl Options {
    pub(crate) fn wants(&self, scenario: &Scenario) -> bool {
        let mut filters = self.filter.iter().chain(&self.also_filter).peekable();
        let named = filters.peek().is_none()
            || filters.any(|filter| scenario.name.contains(filter.as_str()));
        named && self.deal().is_none_or(|deal| scenario.falls_to(deal))
    }

    fn deal(&self) -> Option<Deal> {
        let (number, of) = self.kind?;
        Some(Deal {
            index: number - 1,
            of,
            seed: self.seed?,
        })
    }
}

fn kind(text: &str) -> Result<(u64, u64), String> {
    let parts = text.split_once('/');
    let parsed = parts.and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
    parsed
        .filter(|(k, n)| (1..=*n).contains(k))
        .ok_or_else(|| "K/N, K from 1 to N".to_owned())
}
