//! Whether a pod's exits were held: by what the plugin left on disk, and by the hooks that live. The plugin's own words
//! count for nothing here.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::plugin::Plugin;

const POLL: Duration = Duration::from_millis(5);
/// A hook that waits for nobody ends sooner.
const LINGERING: Duration = Duration::from_millis(250);

/// Watches one pod until dropped.
pub(crate) struct Witness {
    /// What tells its hooks that its exits are held.
    marker: PathBuf,
    held: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Witness {
    pub(super) fn of(plugin: &Plugin, sandbox: &str) -> Self {
        let marker = plugin.run_dir().join("held").join(sandbox);
        let held = Arc::<AtomicBool>::default();
        let (path, seen) = (marker.clone(), Arc::clone(&held));
        let task = tokio::spawn(async move {
            while !path.exists() {
                sleep(POLL).await;
            }
            seen.store(true, Ordering::Relaxed);
        });
        Self { marker, held, task }
    }

    /// With nobody to answer them, whether hooks of the pod wait: they were told to, then.
    pub(super) async fn look_for_hooks(&self) {
        let first = self.hooks();
        if first.is_empty() {
            return;
        }
        sleep(LINGERING).await;
        if self.hooks().iter().any(|pid| first.contains(pid)) {
            self.held.store(true, Ordering::Relaxed);
        }
    }

    pub(super) fn held(&self) -> bool {
        self.held.load(Ordering::Relaxed)
    }

    /// Processes that were started as hooks of this pod.
    fn hooks(&self) -> Vec<String> {
        let marker = self.marker.as_os_str().as_encoded_bytes();
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = processes.filter_map(|it| it.file_name().into_string().ok());
        pids.filter(|pid| pid.bytes().all(|it| it.is_ascii_digit()))
            .filter(|pid| {
                let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                let mut words = line.split(|it| *it == 0);
                words.nth(1) == Some(b"hook") && words.any(|word| word == marker)
            })
            .collect()
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.task.abort();
    }
}
