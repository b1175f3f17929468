//! A plugin that waits for the end of another is known to hooks: one that finds nobody waits for it.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Beside the hooks' socket. Whoever has its lock, which goes with the process, is about to listen there.
pub(crate) const FILE: &str = "successor.lock";

/// The mark of such a plugin, until it is dropped.
#[derive(Debug)]
pub struct Successor {
    _lock: File,
}

impl Successor {
    /// Fails if there is another one, or a hook looks for one just now.
    pub fn announce(run_dir: &Path) -> io::Result<Self> {
        let mut file = OpenOptions::new();
        file.write(true).create(true).mode(0o600);
        let lock = file.open(run_dir.join(FILE))?;
        lock.try_lock()?;
        Ok(Self { _lock: lock })
    }
}

/// Whether one is about to listen at that socket.
pub(super) fn is_expected(socket: &Path) -> bool {
    let file = socket.parent().map(|dir| File::open(dir.join(FILE)));
    matches!(file, Some(Ok(file)) if matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_expected_for_as_long_as_it_waits() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("hook.sock");
        assert!(!is_expected(&socket));
        let successor = Successor::announce(dir.path()).unwrap();
        assert!(is_expected(&socket));
        Successor::announce(dir.path()).unwrap_err();
        drop(successor);
        assert!(!is_expected(&socket));
    }
}
