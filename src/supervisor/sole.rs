//! One plugin at a time works with a run directory and a state directory.
//!
//! The locks go with the process, however it ends. They are the first thing that a plugin touches.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use tokio::time::sleep;

use crate::config::Config;
use crate::dirs::{self, DirError};

/// Its name in both directories, which may be shared ones: there is a `/run/lock` already.
pub(super) const FILE: &str = "reprise.lock";
/// Between two tries. Hooks wait for a successor in the middle of a restart.
const INTERVAL: Duration = Duration::from_millis(100);
/// What is read of who is there.
const LONGEST_NAME: u64 = 200;

/// Why the directories are not this plugin's.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another plugin has them.
    #[error(
        "another plugin is at work with {path} ({who}): end it, or wait for its end with --wait, or give this one \
         directories of its own with --run-dir and --state-dir", path = path.display()
    )]
    Taken {
        /// The directory.
        path: PathBuf,
        /// Its process, and since when it has been there.
        who: String,
    },
    /// A directory cannot be used.
    #[error("cannot lock {path}: {source}; choose another place with {flag}", path = path.display())]
    Unusable {
        /// The directory.
        path: PathBuf,
        /// How to choose another one.
        flag: &'static str,
        /// What is wrong.
        source: DirError,
    },
}

/// The right to both directories, until it is dropped.
#[derive(Debug)]
pub(super) struct Sole {
    run_dir: PathBuf,
    run: File,
    /// None where the disk cannot be written to: that is no reason not to run, and the other lock is there.
    _state: Option<File>,
}

impl Sole {
    /// Takes both, or says who has them; if it is to `wait`, when those have ended. `waits` is called whenever it waits still.
    pub(super) async fn of(
        config: &Config,
        wait: bool,
        mut waits: impl FnMut(),
    ) -> Result<Self, LockError> {
        let mut said = false;
        loop {
            let (run_dir, state_dir) = (config.run_dir.clone(), config.state_dir.clone());
            let dirs = [&*config.run_dir, &*config.state_dir];
            match dirs::answer(dirs, move || Self::take(&run_dir, &state_dir)).await {
                Err(LockError::Taken { path, who }) if wait => {
                    if !std::mem::replace(&mut said, true) {
                        tracing::info!(path = %path.display(), who, "another plugin is at work: waiting for its end");
                    }
                    waits();
                }
                Ok(sole) if said => {
                    tracing::info!("the other plugin has ended: taking over");
                    return Ok(sole);
                }
                result => return result,
            }
            sleep(INTERVAL).await;
        }
    }

    fn take(run_dir: &Path, state_dir: &Path) -> Result<Self, LockError> {
        let state = match lock(state_dir, "--state-dir") {
            Ok(state) => Some(state),
            Err(LockError::Unusable {
                source: DirError::Io(_),
                ..
            }) => None,
            Err(error) => return Err(error),
        };
        let run = lock(run_dir, "--run-dir")?;
        state.iter().chain([&run]).for_each(sign);
        Ok(Self {
            run_dir: run_dir.to_owned(),
            run,
            _state: state,
        })
    }

    /// The same right to a run directory that may have been taken away and made again.
    pub(super) fn renew(&mut self) -> Result<(), LockError> {
        let there = fs::metadata(self.run_dir.join(FILE)).map(|file| (file.dev(), file.ino()));
        let ours = self.run.metadata().map(|file| (file.dev(), file.ino()));
        if there.is_ok_and(|there| ours.is_ok_and(|ours| ours == there)) {
            return Ok(());
        }
        self.run = lock(&self.run_dir, "--run-dir")?;
        sign(&self.run);
        Ok(())
    }
}

fn lock(dir: &Path, flag: &'static str) -> Result<File, LockError> {
    let unusable = |source: DirError| LockError::Unusable {
        path: dir.to_owned(),
        flag,
        source,
    };
    dirs::private(dir).map_err(unusable)?;
    let path = dir.join(FILE);
    // Nobody else may open it: to lock it, reading is enough.
    let mut whole = OpenOptions::new();
    whole.read(true).write(true).create(true).mode(0o600);
    // One that is there can be locked on a disk that cannot be written to.
    let file = whole
        .open(&path)
        .or_else(|error| File::open(&path).map_err(|_| error));
    let mut file = file.map_err(|error| unusable(error.into()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::Error(error)) => Err(unusable(error.into())),
        Err(TryLockError::WouldBlock) => Err(LockError::Taken {
            path: dir.to_owned(),
            who: name_on(&mut file),
        }),
    }
}

fn name_on(file: &mut File) -> String {
    let mut name = String::new();
    // It may have just begun, or have had no room for its name.
    match file.take(LONGEST_NAME).read_to_string(&mut name) {
        Ok(length) if length > 0 => name.trim_end().to_owned(),
        Ok(_) | Err(_) => "it has not said who it is".to_owned(),
    }
}

/// For people: what counts is the lock.
fn sign(mut file: &File) {
    let name = format!("pid {}, since {:.0}\n", process::id(), Timestamp::now());
    let _: io::Result<()> = file
        .set_len(0)
        .and_then(|()| file.write_all(name.as_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Place(tempfile::TempDir);

    impl Place {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn dir(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn take(&self, run: &str, state: &str) -> Result<Sole, LockError> {
            Sole::take(&self.dir(run), &self.dir(state))
        }
    }

    #[test]
    fn the_second_is_told_who_is_there_until_the_first_has_ended() {
        let place = Place::new();
        let first = place.take("run", "state").unwrap();
        for (run, state) in [("run", "state"), ("run", "other"), ("other", "state")] {
            let error = place.take(run, state).unwrap_err().to_string();
            let pid = format!("(pid {}, since 20", process::id());
            assert!(error.contains(&pid) && error.contains("--wait"), "{error}");
        }
        place.take("other", "another").unwrap();
        drop(first);
        place.take("run", "state").unwrap();
    }

    #[test]
    fn a_state_directory_that_cannot_be_made_is_no_reason_not_to_run() {
        let place = Place::new();
        let nowhere = Path::new("/proc/nowhere");
        let first = Sole::take(&place.dir("run"), nowhere).unwrap();
        let error = Sole::take(&place.dir("run"), nowhere).unwrap_err();
        assert!(matches!(error, LockError::Taken { .. }), "{error}");
        drop(first);
        let error = Sole::take(nowhere, &place.dir("state")).unwrap_err();
        assert!(error.to_string().contains("--run-dir"), "{error}");
    }

    #[test]
    fn a_run_directory_that_was_made_again_is_locked_again() {
        let place = Place::new();
        let mut first = place.take("run", "state").unwrap();
        // Perhaps it was the socket alone that was taken away.
        first.renew().unwrap();
        fs::remove_dir_all(place.dir("run")).unwrap();
        first.renew().unwrap();
        let error = place.take("run", "other").unwrap_err();
        assert!(matches!(error, LockError::Taken { .. }), "{error}");
    }
}
