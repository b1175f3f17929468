//! Directories for what is nobody else's business.

use std::fs;
use std::io;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::panic::resume_unwind;
use std::path::Path;
use std::time::Duration;

use rustix::process::geteuid;
use serde::Serialize;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// How long a disk is waited for in silence.
const PATIENCE: Duration = Duration::from_secs(1);

/// Why a directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DirError {
    /// It cannot be made, or looked at.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Somebody else could take away what is put there, and put something else in its place.
    #[error("others than root may write there")]
    Shared,
}

/// Makes `dir` for root alone if it is missing. One that is there stays as it is: it may be `/run`. Whatever is put there
/// needs a mode of its own.
pub(crate) fn private(dir: &Path) -> Result<(), DirError> {
    let mut new = fs::DirBuilder::new();
    new.recursive(true).mode(0o700).create(dir)?;
    let found = fs::metadata(dir)?;
    let ours = found.uid() == geteuid().as_raw() && found.mode() & 0o022 == 0;
    if ours { Ok(()) } else { Err(DirError::Shared) }
}

/// Does `work`, which writes to `dir`, and once more if somebody has taken the directory away.
pub(crate) fn within(dir: &Path, work: impl Fn() -> io::Result<()>) -> io::Result<()> {
    match work() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            private(dir).map_err(io::Error::other)?;
            work()
        }
        result => result,
    }
}

/// Writes a file, whole or not at all. What was there before is worse than nothing: it says that something is not as far as
/// it is.
pub(crate) fn write_whole(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let written = replace_whole(path, value);
    if written.is_err() {
        // Where that is not possible either, nothing else is.
        let _ = fs::remove_file(path);
    }
    written
}

/// Writes a file for root alone, or leaves what was there before.
pub(crate) fn replace_whole(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(value)?;
    let new = path.with_extension("new");
    let write = || {
        let mut options = fs::OpenOptions::new();
        let options = options.write(true).create(true).truncate(true);
        options.mode(0o600).open(&new)?.write_all(&text)?;
        fs::rename(&new, path)
    };
    let written = within(path.parent().unwrap_or(path), write);
    if written.is_err() {
        // As above.
        let _ = fs::remove_file(&new);
    }
    written
}

/// What the disks of these directories are asked for at the start. One that does not answer is waited for, aloud: nothing is
/// done for any pod meanwhile, and nothing to it.
pub(crate) async fn answer<T: Send + 'static>(
    dirs: [&Path; 2],
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let dirs = dirs.map(|dir| dir.display().to_string()).join(", ");
    let late = || {
        tracing::error!(
            dirs,
            "a disk does not answer: waiting for it, pods run as without the plugin"
        );
    };
    answer_or(late, work).await
}

/// Waits for `work`, which a disk may hold up, and calls `late` once if that takes long.
pub(crate) async fn answer_or<T: Send + 'static>(
    late: impl FnOnce(),
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let mut work = spawn_blocking(work);
    let done = if let Ok(done) = timeout(PATIENCE, &mut work).await {
        done
    } else {
        late();
        work.await
    };
    done.unwrap_or_else(|panic| resume_unwind(panic.into_panic()))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::os::unix::fs::PermissionsExt;
    use std::thread::sleep;

    use super::*;

    fn mode(dir: &Path) -> u32 {
        fs::metadata(dir).unwrap().mode() & 0o7777
    }

    #[tokio::test]
    async fn a_disk_that_does_not_answer_is_waited_for_aloud() {
        let said = Cell::new(false);
        for (takes, aloud) in [(Duration::ZERO, false), (PATIENCE * 2, true)] {
            let work = move || {
                sleep(takes);
                takes
            };
            assert_eq!(answer_or(|| said.set(true), work).await, takes);
            assert_eq!(said.get(), aloud);
        }
    }

    fn with_mode(mode: u32) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
        dir
    }

    #[test]
    fn what_is_made_is_roots_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b");
        private(&path).unwrap();
        assert_eq!(mode(&path), 0o700);
    }

    #[test]
    fn a_directory_that_was_there_keeps_its_mode() {
        let run = with_mode(0o755);
        private(run.path()).unwrap();
        assert_eq!(mode(run.path()), 0o755);
    }

    #[test]
    fn a_directory_that_others_write_to_is_refused() {
        for shared in [0o1777, 0o775] {
            let dir = with_mode(shared);
            let error = private(dir.path()).unwrap_err();
            assert!(matches!(error, DirError::Shared), "{error}");
            assert_eq!(mode(dir.path()), shared);
        }
    }

    /// A state directory with a file in it, and no room for another.
    fn full() -> (tempfile::TempDir, std::path::PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file.json");
        replace_whole(&path, &1).unwrap();
        assert_eq!(mode(&path), 0o600);
        fs::create_dir(dir.path().join("file.new")).unwrap();
        (dir, path)
    }

    #[test]
    fn what_cannot_be_written_leaves_what_was_there_only_where_that_is_of_use() {
        let (_dir, path) = full();
        replace_whole(&path, &2).unwrap_err();
        assert_eq!(fs::read_to_string(&path).unwrap(), "1");
        write_whole(&path, &2).unwrap_err();
        assert!(!path.exists());
    }

    #[test]
    fn a_directory_that_was_taken_away_is_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        within(&path, || fs::write(path.join("file"), "")).unwrap();
        assert!(path.join("file").exists());
        assert_eq!(mode(&path), 0o700);
    }
}
