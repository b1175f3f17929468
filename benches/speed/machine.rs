//! What it was measured on.

use std::fmt;
use std::fs::read_to_string;
use std::path::Path;
use std::process::Command;
use std::thread::available_parallelism;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use tokio::time::sleep;

use crate::node::Node;

const KIB_PER_GIB: f64 = 1024.0 * 1024.0;

/// A machine that is busy for less of its time is at rest.
const REST_PERCENT: f64 = 10.0;
const REST_TRIES: u32 = 15;

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

/// How much of its cores' time the machine has been busy since it started, and had in all, in ticks (`proc_stat(5)`).
pub(crate) struct Ticks {
    busy: f64,
    all: f64,
}

impl Ticks {
    pub(crate) fn now() -> Result<Self> {
        let stat = read_to_string("/proc/stat")?;
        let ticks = stat.split_whitespace().skip(1).take(8).map(str::parse);
        let ticks: Vec<f64> = ticks.collect::<Result<_, _>>()?;
        let [_, _, _, idle, iowait, ..] = ticks[..] else {
            bail!("/proc/stat begins with {ticks:?}")
        };
        let all: f64 = ticks.iter().sum();
        Ok(Self {
            busy: all - idle - iowait,
            all,
        })
    }

    /// Per cent of the time since then.
    pub(crate) fn busy_since(&self) -> Result<f64> {
        let now = Self::now()?;
        Ok(100.0 * (now.busy - self.busy) / (now.all - self.all))
    }
}

/// Waits until the machine has little to do beside what is measured, but not for long: per cent of its cores' time
/// that were in use then.
pub(crate) async fn at_rest() -> Result<f64> {
    let mut last = 100.0;
    for _ in 0..REST_TRIES {
        let before = Ticks::now()?;
        sleep(Duration::from_secs(2)).await;
        last = before.busy_since()?;
        if last < REST_PERCENT {
            break;
        }
    }
    Ok(last)
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
