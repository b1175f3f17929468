//! What it was measured on.

use std::fmt;
use std::fs::read_to_string;
use std::path::Path;
use std::process::Command;
use std::thread::available_parallelism;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::node::Node;

const KIB_PER_GIB: f64 = 1024.0 * 1024.0;

#[derive(Serialize)]
pub(crate) struct Machine {
    cores: usize,
    cpu: String,
    memory_gib: f64,
    kernel: String,
    /// When the measurement began: what else the machine had to do.
    load: String,
    kubelet: String,
    runtime: String,
    plugin: String,
}

impl Machine {
    pub(crate) async fn of(node: &Node, plugin: &Path) -> Result<Self> {
        let info = node.status().await?.node_info.unwrap_or_default();
        let version = Command::new(plugin)
            .arg("version")
            .output()
            .with_context(|| format!("cannot run {}", plugin.display()))?;
        let memory_kib: f64 = value_of("/proc/meminfo", "MemTotal")?
            .trim_end_matches(" kB")
            .parse()?;
        Ok(Self {
            cores: available_parallelism()?.get(),
            // ARM has no such line.
            cpu: value_of("/proc/cpuinfo", "model name")
                .unwrap_or_else(|_| info.architecture.clone()),
            memory_gib: memory_kib / KIB_PER_GIB,
            kernel: info.kernel_version,
            load: read_to_string("/proc/loadavg")?.trim().to_owned(),
            kubelet: info.kubelet_version,
            runtime: info.container_runtime_version,
            plugin: String::from_utf8_lossy(&version.stdout).trim().to_owned(),
        })
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}; kubelet {}, {}; {} cores of {}, {:.1} GiB of memory, Linux {}",
            self.plugin,
            self.kubelet,
            self.runtime.replace("://", " "),
            self.cores,
            self.cpu,
            self.memory_gib,
            self.kernel
        )
    }
}

/// The value of the first line `KEY: VALUE` of one of the kernel's files.
pub(crate) fn value_of(file: &str, key: &str) -> Result<String> {
    let text = read_to_string(file).with_context(|| format!("cannot read {file}"))?;
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| name.trim() == key)
        .map(|(_, value)| value.trim().to_owned())
        .with_context(|| format!("{file} has no {key}"))
}
