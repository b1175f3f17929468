//! What is measured how often.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Parser;
use serde::Serialize;

/// Measures the plugin on a real node, which comes from `hack/node.sh up`
#[derive(Parser, Debug, Serialize)]
pub(crate) struct Options {
    /// Rounds of each pod, in each way
    #[arg(long, env = "ROUNDS", value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,

    /// The pods' terminationGracePeriodSeconds, which deleting them takes into account
    #[arg(long, env = "GRACE", value_name = "SECONDS", default_value_t = 1)]
    pub(crate) grace: i64,

    /// Pods with rules on the node while memory and the handler are measured
    #[arg(long, env = "PODS", value_name = "N", default_value_t = 50)]
    pub(crate) pods: usize,

    /// Pods that restart in the same second
    #[arg(long, env = "BURST", value_name = "N", default_value_t = 30)]
    pub(crate) burst: usize,

    /// Containers to be created of pods without rules
    #[arg(long, env = "CALLS", value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) calls: u32,

    /// Starts of the hook
    #[arg(long, env = "HOOKS", value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) hooks: u32,

    /// Where to write every round
    #[arg(long, env = "OUTPUT", value_name = "FILE", default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/target/bench/results.json"))]
    #[serde(skip)]
    pub(crate) output: PathBuf,

    /// The plugin's binary, as it is shipped
    #[arg(long, env = "REPRISE_BIN", value_name = "FILE")]
    #[serde(skip)]
    plugin: Option<PathBuf>,

    /// The env file that `hack/node.sh up` has written
    #[arg(long, env = "REPRISE_NODE_ENV", value_name = "FILE")]
    #[serde(skip)]
    pub(crate) node_env: Option<PathBuf>,

    /// What `cargo bench` adds
    #[arg(long, hide = true)]
    #[serde(skip)]
    bench: bool,
}

impl Options {
    /// Never cargo's own: what it builds for tests has features that the shipped one has not.
    pub(crate) fn plugin(&self) -> Result<PathBuf> {
        self.plugin
            .clone()
            .context("--plugin must name the release binary")
    }
}
