//! A runtime that has a share of the machine's processors only, with its shims, hooks and whatever else it runs: containers
//! have cgroups of their own.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::node::Node;

/// Of cgroup v1, which is where the local node's are.
const CPU: &str = "/sys/fs/cgroup/cpu";

/// In microseconds, as the kernel has it.
const PERIOD: u64 = 100_000;

/// Slow until this is dropped.
pub(crate) struct SlowRuntime {
    group: PathBuf,
}

impl SlowRuntime {
    /// Gives a node's runtime so many hundredths of one core. `None`: this machine has no such cgroups.
    pub(crate) fn new(node: &Node, hundredths: u64) -> Result<Option<Self>> {
        let of_node = PathBuf::from(CPU).join(format!("reprise-{}", node.name));
        if !of_node.join("cpu.cfs_quota_us").exists() {
            return Ok(None);
        }
        let group = of_node.join("slow-runtime");
        // A run that was killed may have left one.
        fs::create_dir_all(&group).with_context(|| group.display().to_string())?;
        let slow = Self { group };
        fs::write(slow.group.join("cpu.cfs_period_us"), PERIOD.to_string())?;
        let quota = PERIOD * hundredths / 100;
        fs::write(slow.group.join("cpu.cfs_quota_us"), quota.to_string())?;
        for pid in node.runtime_pids()? {
            // A shim may have ended meanwhile.
            let _ = fs::write(slow.group.join("cgroup.procs"), pid.to_string());
        }
        Ok(Some(slow))
    }
}

impl Drop for SlowRuntime {
    fn drop(&mut self) {
        let procs = PathBuf::from(CPU).join("cgroup.procs");
        // What is being forked while the list is read is in the next one.
        for _ in 0..100 {
            let left = fs::read_to_string(self.group.join("cgroup.procs")).unwrap_or_default();
            for pid in left.lines() {
                let _ = fs::write(&procs, pid);
            }
            if fs::remove_dir(&self.group).is_ok() {
                return;
            }
        }
    }
}
