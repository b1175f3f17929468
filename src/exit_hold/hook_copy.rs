//! A copy of this executable on the host: a plugin in a container brings its hook along.
//!
//! Each build has a file of its own, which is never written to again: a hook may be running from it. Containers name the file
//! that they were made with for as long as they are there.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::dirs::{self, DirError};

/// What is being written. One plugin at a time writes here.
const UNFINISHED: &str = ".reprise-unfinished";
/// What the names of finished copies begin with.
const PREFIX: &str = "reprise-";

/// Why there is no copy.
#[derive(Debug, thiserror::Error)]
#[error("cannot put the hook into {dir}: {source}; choose another place with --hook-dir")]
pub struct HookDirError {
    dir: PathBuf,
    source: DirError,
}

/// The copies in a directory that the runtime sees under the same path. All of it blocks.
#[derive(Debug, Clone)]
pub struct HookCopies {
    dir: PathBuf,
    /// That of this process.
    path: PathBuf,
}

impl HookCopies {
    /// Puts this executable into `dir`. One that is there already stays. The file is there as a whole or not at all,
    /// whenever this process ends.
    pub fn install(dir: &Path) -> Result<Self, HookDirError> {
        let executable = fs::read("/proc/self/exe").map_err(DirError::Io);
        let path = executable.and_then(|executable| put(dir, &executable));
        let path = path.map_err(|source| HookDirError {
            dir: dir.to_owned(),
            source,
        })?;
        Ok(Self {
            dir: dir.to_owned(),
            path,
        })
    }

    /// What containers are to run.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes those that no container names, which are not running either.
    pub fn remove_unnamed(&self, mut named: BTreeSet<PathBuf>) {
        named.insert(self.path.clone());
        match remove_all_but(&self.dir, &named) {
            Ok(removed) if removed.is_empty() => {}
            Ok(removed) => tracing::info!(
                ?removed,
                "hooks of other versions, which no container has any more"
            ),
            Err(error) => {
                tracing::warn!(dir = %self.dir.display(), %error, "hooks of other versions stay");
            }
        }
    }
}

fn put(dir: &Path, executable: &[u8]) -> Result<PathBuf, DirError> {
    dirs::private(dir)?;
    let mut hasher = DefaultHasher::new();
    executable.hash(&mut hasher);
    let version = env!("CARGO_PKG_VERSION");
    let path = dir.join(format!("{PREFIX}{version}-{:016x}", hasher.finish()));
    // A disk that was full or lost power may have left less than was written.
    if fs::read(&path).is_ok_and(|there| there == executable) {
        return Ok(path);
    }
    let unfinished = dir.join(UNFINISHED);
    if let Err(error) = fs::remove_file(&unfinished)
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(error.into());
    }
    let mut options = OpenOptions::new();
    let options = options.write(true).create_new(true).mode(0o755);
    let mut file = options.open(&unfinished)?;
    file.write_all(executable)?;
    file.sync_all()?;
    drop(file);
    fs::rename(&unfinished, &path)?;
    Ok(path)
}

/// Removes the copies in `dir` but those `named`, and says which they were. What else is there stays.
pub fn remove_all_but(dir: &Path, named: &BTreeSet<PathBuf>) -> io::Result<Vec<PathBuf>> {
    let mut removed = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let ours = name == UNFINISHED || name.starts_with(PREFIX);
        if ours && entry.file_type()?.is_file() && !named.contains(&entry.path()) {
            fs::remove_file(entry.path())?;
            removed.push(entry.path());
        }
    }
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;

    fn names(dir: &Path) -> BTreeSet<PathBuf> {
        let entries = fs::read_dir(dir).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    }

    #[test]
    fn each_build_has_a_file_of_its_own_which_is_written_once() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("reprise");
        let first = put(&dir, b"one").unwrap();
        let inode = || fs::metadata(&first).unwrap().ino();
        let before = inode();
        assert_eq!(put(&dir, b"one").unwrap(), first);
        assert_eq!(inode(), before);
        let second = put(&dir, b"two").unwrap();
        assert_eq!(fs::read(&first).unwrap(), b"one");
        assert_eq!(fs::read(&second).unwrap(), b"two");
        assert_eq!(fs::metadata(&second).unwrap().mode() & 0o7777, 0o755);
        assert_eq!(names(&dir), BTreeSet::from([first, second]));
    }

    #[test]
    fn what_an_end_in_the_middle_left_is_replaced_and_not_written_to() {
        let dir = tempfile::tempdir().unwrap();
        let other = dir.path().join("other");
        fs::write(&other, "not ours").unwrap();
        let copy = put(dir.path(), b"whole").unwrap();
        fs::write(&copy, b"wh").unwrap();
        let torn = fs::metadata(&copy).unwrap().ino();
        symlink(&other, dir.path().join(UNFINISHED)).unwrap();
        assert_eq!(put(dir.path(), b"whole").unwrap(), copy);
        assert_eq!(fs::read(&copy).unwrap(), b"whole");
        assert_ne!(fs::metadata(&copy).unwrap().ino(), torn);
        assert_eq!(fs::read(&other).unwrap(), b"not ours");
    }

    #[test]
    fn copies_go_that_no_container_names_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let [old, named, new] = [b"old", b"nam", b"new"].map(|it| put(dir.path(), it).unwrap());
        let other = dir.path().join("somebody.conf");
        fs::write(&other, "").unwrap();
        fs::write(dir.path().join(UNFINISHED), "").unwrap();
        fs::create_dir(dir.path().join("reprise-dir")).unwrap();
        let keep = BTreeSet::from([named.clone(), new.clone()]);
        let removed = remove_all_but(dir.path(), &keep).unwrap();
        let unfinished = dir.path().join(UNFINISHED);
        let removed: BTreeSet<_> = removed.into_iter().collect();
        assert_eq!(removed, BTreeSet::from([old, unfinished]));
        let dir_there = dir.path().join("reprise-dir");
        assert_eq!(
            names(dir.path()),
            BTreeSet::from([named, new, other, dir_there])
        );
    }

    #[test]
    fn a_directory_that_others_may_write_to_is_refused_by_the_flags_name() {
        let dir = tempfile::tempdir().unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        fs::set_permissions(dir.path(), mode).unwrap();
        let error = HookCopies::install(dir.path()).unwrap_err().to_string();
        assert!(error.contains("--hook-dir"), "{error}");
        assert!(names(dir.path()).is_empty());
    }
}
