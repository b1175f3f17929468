//! What is remembered, and what is kept of pods that were reset, on disk.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::evidence::Evidence;
use super::record::Memory;
use crate::dirs;

/// Older ones go first: one may have hundreds of KiB.
const MOST_FILES: usize = 256;

/// All that is kept in the state directory: what is remembered, of each pod what is kept, and what an end in the middle of
/// writing leaves.
pub(crate) const STATE_FILES: [&str; 3] = ["hard-resets.json", "hard-resets", "hard-resets.new"];

/// Files in the state directory. All of it blocks.
#[derive(Debug, Clone)]
pub(super) struct Store {
    /// `<state-dir>/hard-resets.json`
    memory: PathBuf,
    /// `<state-dir>/hard-resets/<pod's UID>.json`
    evidence: PathBuf,
}

impl Store {
    pub(super) fn new(state_dir: &Path) -> Self {
        let [memory, evidence, _] = STATE_FILES.map(|name| state_dir.join(name));
        Self { memory, evidence }
    }

    /// What a predecessor remembered. What cannot be read has never been: restarts are counted anew.
    pub(super) fn load(&self) -> Memory {
        let read = match fs::read(&self.memory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Memory::default(),
            read => read,
        };
        let memory = read.and_then(|text| Ok(serde_json::from_slice(&text)?));
        memory.unwrap_or_else(|error: io::Error| {
            tracing::warn!(path = %self.memory.display(), %error, "forgot how often pods have crashed: that cannot be read");
            Memory::default()
        })
    }

    pub(super) fn save(&self, memory: &Memory) -> io::Result<()> {
        dirs::replace_whole(&self.memory, memory)
    }

    /// Keeps what is known of a pod, in the place of what was kept of it when it was to be reset before, and removes what
    /// [`Self::clear`] does; returns where.
    pub(super) fn keep(&self, evidence: &Evidence, kept: Duration) -> io::Result<PathBuf> {
        // It is the API server's, but it becomes part of a path.
        let uid = evidence
            .uid
            .replace(|it: char| !it.is_ascii_alphanumeric(), "-");
        let path = self.evidence.join(format!("{uid}.json"));
        dirs::private(&self.evidence).map_err(io::Error::other)?;
        dirs::replace_whole(&path, evidence)?;
        self.clear(kept);
        Ok(path)
    }

    /// Removes files that are older than `kept`, and the oldest of more than there may be.
    pub(super) fn clear(&self, kept: Duration) {
        if let Err(error) = self.try_clear(kept) {
            tracing::warn!(%error, "old files about hard resets cannot be removed");
        }
    }

    fn try_clear(&self, kept: Duration) -> io::Result<()> {
        let entries = match fs::read_dir(&self.evidence) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        let mut files = Vec::new();
        for entry in entries {
            let entry = entry?;
            let meta = entry.metadata()?;
            if meta.is_file() {
                files.push((meta.modified()?, entry.path()));
            }
        }
        files.sort_unstable();
        let now = SystemTime::now();
        let over = files.len().saturating_sub(MOST_FILES);
        for (index, (modified, path)) in files.into_iter().enumerate() {
            let is_old = now.duration_since(modified).is_ok_and(|age| age > kept);
            if index < over || is_old {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn what_cannot_be_read_has_never_been() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        assert_eq!(store.load(), Memory::default());
        let memory = Memory {
            spent: vec![super::super::record::Spent {
                pod: "u".into(),
                namespace: "n".into(),
                at_up_ms: 7,
            }],
            ..Memory::default()
        };
        store.save(&memory).unwrap();
        assert_eq!(store.load(), memory);
        fs::write(dir.path().join("hard-resets.json"), "{").unwrap();
        assert_eq!(store.load(), Memory::default());
    }

    fn evidence(uid: &str) -> Evidence {
        let mut evidence = Evidence::default();
        uid.clone_into(&mut evidence.uid);
        evidence
    }

    #[test]
    fn a_pod_has_one_file_however_often_it_is_to_be_reset() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        let (other, hour) = (evidence("u2"), Duration::from_hours(1));
        let others = store.keep(&other, hour).unwrap();
        for _ in 0..MOST_FILES + 5 {
            let path = store.keep(&evidence("u/1"), hour).unwrap();
            assert_eq!(path, dir.path().join("hard-resets/u-1.json"));
        }
        assert!(others.exists());
        assert_eq!(fs::metadata(&others).unwrap().mode() & 0o7777, 0o600);
        let files = dir.path().join("hard-resets");
        assert_eq!(fs::read_dir(&files).unwrap().count(), 2);
        // What is too old goes with it.
        let age = SystemTime::now() - 2 * hour;
        let file = fs::File::options().write(true).open(&others).unwrap();
        file.set_modified(age).unwrap();
        store.keep(&evidence("u3"), hour).unwrap();
        assert!(!others.exists());
    }

    #[test]
    fn a_disk_that_is_full_keeps_what_was_remembered() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        let mut memory = Memory::default();
        memory.spent.push(super::super::record::Spent {
            pod: "u".into(),
            namespace: "n".into(),
            at_up_ms: 7,
        });
        store.save(&memory).unwrap();
        fs::create_dir(dir.path().join("hard-resets.new")).unwrap();
        store.save(&Memory::default()).unwrap_err();
        assert_eq!(store.load(), memory);
    }

    #[test]
    fn evidence_goes_when_it_is_old_or_too_much() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        store.clear(Duration::ZERO);
        let files = dir.path().join("hard-resets");
        // Whoever made that.
        fs::create_dir_all(files.join("lost+found")).unwrap();
        for number in 0..MOST_FILES + 5 {
            fs::write(files.join(format!("{number}.json")), "").unwrap();
        }
        store.clear(Duration::from_hours(1));
        assert_eq!(fs::read_dir(&files).unwrap().count(), MOST_FILES + 1);
        store.clear(Duration::ZERO);
        assert_eq!(fs::read_dir(&files).unwrap().count(), 1);
    }
}
