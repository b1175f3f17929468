//! The disk for what must be remembered: one that does not answer holds up nobody, and nothing is reset meanwhile.

use std::io;

use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::timeout;

use super::record::Memory;
use super::store::Store;
use crate::dirs;
use crate::times::DISK_LIMIT;

/// Writes one thing after another.
#[derive(Debug)]
pub(super) struct Disk {
    store: Store,
    /// What is being written.
    writing: Option<JoinHandle<io::Result<()>>>,
    /// What was to be written last has been.
    is_well: bool,
}

impl Disk {
    pub(super) fn new(store: Store) -> Self {
        Self {
            store,
            writing: None,
            is_well: true,
        }
    }

    /// What a predecessor remembered. A disk that does not answer is waited for, aloud.
    pub(super) async fn load(&self) -> Memory {
        let store = self.store.clone();
        let late = || {
            tracing::warn!(
                "the disk does not tell how often pods have crashed: no pod is reset meanwhile"
            );
        };
        dirs::answer_or(late, move || store.load()).await
    }

    /// Whether that could be written down, and so nothing was lost. While something older is still being written nothing is.
    pub(super) async fn save(&mut self, memory: &Memory) -> bool {
        let saved = self.try_save(memory).await;
        let was_well = std::mem::replace(&mut self.is_well, saved.is_ok());
        match &saved {
            Ok(()) if !was_well => {
                tracing::info!("how often pods have crashed can be written down again");
            }
            Err(error) if was_well => {
                tracing::warn!(%error, "how often pods have crashed cannot be written down: no pod is reset meanwhile");
            }
            Ok(()) | Err(_) => {}
        }
        saved.is_ok()
    }

    async fn try_save(&mut self, memory: &Memory) -> io::Result<()> {
        if self.writing.as_ref().is_some_and(|it| !it.is_finished()) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let (store, memory) = (self.store.clone(), memory.clone());
        let writing = spawn_blocking(move || store.save(&memory));
        let saved = limited(self.writing.insert(writing)).await?;
        self.writing = None;
        saved
    }
}

/// Waits for what is done to a disk, but not for long.
pub(super) async fn limited<T>(work: &mut JoinHandle<T>) -> io::Result<T> {
    Ok(timeout(DISK_LIMIT, work).await??)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[tokio::test]
    async fn a_disk_that_stalls_is_waited_for_once_and_nothing_is_saved_meanwhile() {
        let dir = tempfile::tempdir().unwrap();
        // To open that for writing takes until somebody reads.
        let stalled = dir.path().join("hard-resets.new");
        let mode = Mode::from_raw_mode(0o600);
        mknodat(CWD, &stalled, FileType::Fifo, mode, 0).unwrap();
        let mut disk = Disk::new(Store::new(dir.path()));
        let began = Instant::now();
        assert!(!disk.save(&Memory::default()).await);
        assert!(began.elapsed() < 3 * DISK_LIMIT);
        let began = Instant::now();
        assert!(!disk.save(&Memory::default()).await);
        assert!(began.elapsed() < DISK_LIMIT / 2);
        std::fs::read(&stalled).unwrap();
        while !disk.save(&Memory::default()).await {
            tokio::task::yield_now().await;
        }
        assert!(
            dir.path()
                .join("hard-resets.json")
                .metadata()
                .unwrap()
                .is_file()
        );
    }
}
