//! The runner's command line.

use std::collections::HashMap;
use std::str::FromStr;

use anyhow::{Context, Result, ensure};
use clap::Parser;

use crate::scenario::{Company, Scenario};

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

    /// Only every N-th, from the I-th on; those that want the whole machine are all in the first part
    #[arg(long, value_name = "I/N", default_value = "1/1")]
    pub(crate) part: Part,

    /// Those that cannot share the node before the others
    #[arg(long)]
    pub(crate) alone_first: bool,

    /// Do not start the plugin: shows which scenarios can tell
    #[arg(long)]
    pub(crate) without_plugin: bool,

    /// Who starts containers again where a scenario leaves that open: Auto, Kubelet or Replay
    #[arg(long, value_name = "WHO", default_value = "Kubelet")]
    pub(crate) start: String,

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

/// One of several runs that share the scenarios out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    index: usize,
    of: usize,
}

impl FromStr for Part {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (index, of) = text.split_once('/').context("not I/N")?;
        let (index, of) = (index.parse()?, of.parse()?);
        ensure!(
            (1..=of).contains(&index),
            "there is no part {index} of {of}"
        );
        Ok(Self { index, of })
    }
}

impl Part {
    /// The scenarios of this part, each company shared out by itself.
    pub(crate) fn of(self, scenarios: Vec<Scenario>) -> Vec<Scenario> {
        let mut counts = HashMap::new();
        let is_here = |scenario: &Scenario| {
            let count = counts.entry(scenario.company).or_insert(0);
            *count += 1;
            match scenario.company {
                Company::Undisturbed => self.index == 1,
                Company::Shared | Company::Alone => *count % self.of == self.index % self.of,
            }
        };
        scenarios.into_iter().filter(is_here).collect()
    }
}

impl Options {
    pub(crate) fn wants(&self, name: &str) -> bool {
        let mut filters = self.filter.iter().chain(&self.also_filter).peekable();
        filters.peek().is_none() || filters.any(|filter| name.contains(filter.as_str()))
    }
}
