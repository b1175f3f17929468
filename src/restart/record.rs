//! Restarts under way, on disk: what a plugin that dies leaves to the next one, and to the hooks that wait.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::back_off::Past;
use super::machine::Phase;
use super::plan::Plan;
use crate::exit_hold::private_dir;
use crate::ids::SandboxId;

/// One restart under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// How far it was.
    pub phase: Phase,
    /// What it is to do.
    pub plan: Plan,
}

/// Where the records are.
#[derive(Debug, Clone)]
pub struct Records {
    /// Outlives the plugin: `<state-dir>/restarts/<sandbox>.json`.
    restarts: PathBuf,
    /// The same: `<state-dir>/back-off/<sandbox>.json`.
    pasts: PathBuf,
    /// Outlives the plugin, not the node: `<run-dir>/held/<sandbox>`.
    markers: PathBuf,
}

/// Why the records cannot be kept.
#[derive(Debug, thiserror::Error)]
#[error("cannot keep the record of restarts in {path}: {source}; choose another place with {flag}")]
pub struct RecordsError {
    path: PathBuf,
    flag: &'static str,
    source: io::Error,
}

impl Records {
    /// Prepares both directories, for root alone.
    pub fn open(state_dir: &Path, run_dir: &Path) -> Result<Self, RecordsError> {
        let restarts = state_dir.join("restarts");
        let pasts = state_dir.join("back-off");
        let markers = run_dir.join("held");
        for (dir, flag) in [
            (state_dir, "--state-dir"),
            (&restarts, "--state-dir"),
            (&pasts, "--state-dir"),
            (run_dir, "--run-dir"),
            (&markers, "--run-dir"),
        ] {
            private_dir(dir).map_err(|source| RecordsError {
                path: dir.to_owned(),
                flag,
                source,
            })?;
        }
        Ok(Self {
            restarts,
            pasts,
            markers,
        })
    }

    /// The file that tells the hooks of a pod that its exits are held (see `exit_hold::hook`).
    #[must_use]
    pub fn marker(&self, sandbox: &SandboxId) -> PathBuf {
        self.markers.join(sandbox.as_str())
    }

    /// Writes the record, whole or not at all. It need not survive a power cut: then no container does.
    pub fn save(&self, record: &Record) -> io::Result<()> {
        let sandbox = &record.plan.pod.sandbox;
        if record.phase.is_holding(record.plan.way) {
            fs::write(self.marker(sandbox), "")?;
        } else {
            self.unmark(sandbox)?;
        }
        write_whole(&self.path(sandbox), record)
    }

    /// Writes down how often a pod has restarted.
    pub fn save_past(&self, sandbox: &SandboxId, past: &Past) -> io::Result<()> {
        write_whole(&self.past_path(sandbox), past)
    }

    /// How often each pod has restarted. What cannot be read has never been: better a restart too early than none.
    pub fn pasts(&self) -> io::Result<HashMap<SandboxId, Past>> {
        let mut pasts = HashMap::new();
        for entry in fs::read_dir(&self.pasts)? {
            let path = entry?.path();
            let name = path.file_stem().and_then(|name| name.to_str());
            let Some(sandbox) = name.map(SandboxId::from) else {
                continue;
            };
            match read(&path) {
                Ok(past) => drop(pasts.insert(sandbox, past)),
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "forgot how often a pod has restarted: its record cannot be read");
                }
            }
        }
        Ok(pasts)
    }

    /// Forgets how often pods have restarted whose sandboxes are not among `there`.
    pub fn forget_pasts(&self, there: &HashSet<SandboxId>) -> io::Result<()> {
        for entry in fs::read_dir(&self.pasts)? {
            let path = entry?.path();
            let name = path.file_stem().and_then(|name| name.to_str());
            if !name.is_some_and(|name| there.contains(&SandboxId::from(name))) {
                ignore_missing(fs::remove_file(&path))?;
            }
        }
        Ok(())
    }

    fn unmark(&self, sandbox: &SandboxId) -> io::Result<()> {
        ignore_missing(fs::remove_file(self.marker(sandbox)))
    }

    /// Forgets the restart of that sandbox.
    pub fn forget(&self, sandbox: &SandboxId) -> io::Result<()> {
        self.unmark(sandbox)?;
        ignore_missing(fs::remove_file(self.path(sandbox)))
    }

    /// What a predecessor left. A record that cannot be read is dropped with a warning: better a restart that
    /// ends half-way than a plugin that does not start.
    pub fn load(&self) -> io::Result<Vec<Record>> {
        let mut records = Vec::new();
        for entry in fs::read_dir(&self.restarts)? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            match read(&path) {
                Ok(record) => records.push(record),
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "dropped the record of a restart that cannot be read");
                    ignore_missing(fs::remove_file(&path))?;
                }
            }
        }
        Ok(records)
    }

    fn path(&self, sandbox: &SandboxId) -> PathBuf {
        self.restarts.join(format!("{sandbox}.json"))
    }

    fn past_path(&self, sandbox: &SandboxId) -> PathBuf {
        self.pasts.join(format!("{sandbox}.json"))
    }
}

fn write_whole(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let new = path.with_extension("new");
    fs::write(&new, serde_json::to_vec(value)?)?;
    fs::rename(new, path)
}

fn read<T: DeserializeOwned>(path: &Path) -> io::Result<T> {
    Ok(serde_json::from_slice(&fs::read(path)?)?)
}

fn ignore_missing(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::back_off::BackOff;
    use super::super::plan::tests::plan;
    use super::*;

    #[test]
    fn what_was_saved_is_loaded_and_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::open(&dir.path().join("state"), &dir.path().join("run")).unwrap();
        let record = Record {
            phase: Phase::Down,
            plan: plan(),
        };
        records.save(&record).unwrap();
        assert_eq!(records.load().unwrap(), vec![record.clone()]);
        assert!(records.marker(&record.plan.pod.sandbox).exists());
        let record = Record {
            phase: Phase::Up,
            ..record
        };
        records.save(&record).unwrap();
        assert!(!records.marker(&record.plan.pod.sandbox).exists());
        records.forget(&record.plan.pod.sandbox).unwrap();
        records.forget(&record.plan.pod.sandbox).unwrap();
        assert!(records.load().unwrap().is_empty());
    }

    #[test]
    fn how_often_a_pod_has_restarted_is_kept_for_as_long_as_its_sandbox() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::open(&dir.path().join("state"), &dir.path().join("run")).unwrap();
        let sandbox = SandboxId::from("s1");
        let mut past = Past::default();
        let day = Duration::from_hours(24);
        past.begun(None, 5, &BackOff::try_new(day, day, day).unwrap());
        records.save_past(&sandbox, &past).unwrap();
        records.forget_pasts(&[sandbox.clone()].into()).unwrap();
        fs::write(dir.path().join("state/back-off/s2.json"), "{").unwrap();
        assert_eq!(records.pasts().unwrap(), [(sandbox, past)].into());
        records.forget_pasts(&HashSet::new()).unwrap();
        assert!(records.pasts().unwrap().is_empty());
    }

    #[test]
    fn a_record_that_cannot_be_read_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::open(&dir.path().join("state"), &dir.path().join("run")).unwrap();
        let path = dir.path().join("state/restarts/s1.json");
        fs::write(&path, "{").unwrap();
        assert!(records.load().unwrap().is_empty());
        assert!(!path.exists());
    }

    #[test]
    fn a_place_that_cannot_be_written_names_the_flag() {
        let error = Records::open(Path::new("/proc/x"), Path::new("/proc/y")).unwrap_err();
        assert!(error.to_string().contains("--state-dir"), "{error}");
    }
}
