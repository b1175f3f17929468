//! Restarts under way, on disk: what a plugin that dies leaves to the next one, and to the hooks that wait.

mod disk;

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::de::DeserializeOwned;

use crate::back_off::Past;
use crate::dirs::{self, DirError};
use crate::history;
use crate::ids::SandboxId;
pub(crate) use crate::restart::machine::Record;
use disk::{Disk, Kind};

/// All that is kept in the state directory, and in the run directory.
pub(crate) const STATE_FILES: [&str; 4] =
    ["restarts", "back-off", history::FILES[0], history::FILES[1]];
pub(crate) const RUN_FILES: [&str; 1] = ["held"];

/// The records. They are written by a thread of their own, and whoever writes waits a second for it at the most. One
/// line says that it does not work, and one when it works again: restarts go on without.
#[derive(Debug, Clone)]
pub struct Records {
    files: Arc<Files>,
    disk: Disk,
}

/// Where the records are.
#[derive(Debug)]
struct Files {
    /// Outlives the plugin: `<state-dir>/restarts/<sandbox>.json`.
    restarts: PathBuf,
    /// The same: `<state-dir>/back-off/<sandbox>.json`.
    pasts: PathBuf,
    /// Outlives the plugin, not the node: `<run-dir>/held/<sandbox>`.
    markers: PathBuf,
    history: history::File,
}

/// Why the records cannot be kept.
#[derive(Debug, thiserror::Error)]
#[error("cannot keep the record of restarts in {path}: {source}; choose another place with {flag}")]
pub struct RecordsError {
    path: PathBuf,
    flag: &'static str,
    source: DirError,
}

impl Records {
    /// Prepares both directories. Fails only for what somebody has to change: a disk that cannot be written to may be
    /// mended while the plugin runs.
    pub fn open(state_dir: &Path, run_dir: &Path) -> Result<Self, RecordsError> {
        let [restarts, pasts, ..] = STATE_FILES.map(|name| state_dir.join(name));
        let [markers] = RUN_FILES.map(|name| run_dir.join(name));
        let no_thread = |source: io::Error| RecordsError {
            path: state_dir.to_owned(),
            flag: "--state-dir",
            source: source.into(),
        };
        let disk = Disk::start().map_err(no_thread)?;
        for (dir, flag) in [
            (state_dir, "--state-dir"),
            (&restarts, "--state-dir"),
            (&pasts, "--state-dir"),
            (run_dir, "--run-dir"),
            (&markers, "--run-dir"),
        ] {
            match dirs::private(dir) {
                Ok(()) => {}
                Err(DirError::Io(error)) if flag == "--state-dir" => {
                    let why = format!("{}: {error}", dir.display());
                    disk.trouble().begins(&why);
                }
                Err(source) => {
                    return Err(RecordsError {
                        path: dir.to_owned(),
                        flag,
                        source,
                    });
                }
            }
        }
        let files = Files {
            restarts,
            pasts,
            markers,
            history: history::File::in_dir(state_dir),
        };
        Ok(Self {
            files: Arc::new(files),
            disk,
        })
    }

    /// The file that tells the hooks of a pod that its exits are held (see `exit_hold::hook`).
    #[must_use]
    pub fn marker(&self, sandbox: &SandboxId) -> PathBuf {
        self.files.marker(sandbox)
    }

    /// Writes the record, whole or not at all. It need not survive a power cut: then no container does.
    pub async fn save(&self, record: Record) {
        let files = Arc::clone(&self.files);
        let save = move || files.save(&record);
        self.disk.perform(Kind::Write, save).await;
    }

    /// Writes down how often a pod has restarted.
    pub async fn save_past(&self, sandbox: SandboxId, past: Past) {
        let files = Arc::clone(&self.files);
        let save = move || dirs::write_whole(&files.past_path(&sandbox), &past);
        self.disk.perform(Kind::Write, save).await;
    }

    /// Forgets the restart of that sandbox.
    pub async fn forget(&self, sandbox: SandboxId) {
        let files = Arc::clone(&self.files);
        let forget = move || files.forget(&sandbox);
        self.disk.perform(Kind::Remove, forget).await;
    }

    /// Adds a restart that is over to the history.
    pub(crate) async fn note(&self, entry: history::Entry) {
        let files = Arc::clone(&self.files);
        // What the file has room for says nothing of the disk.
        let note = move || {
            files.history.note(&entry);
            Ok(())
        };
        self.disk.perform(Kind::Remove, note).await;
    }

    /// Forgets how often pods have restarted whose sandboxes are not among `there`.
    pub async fn forget_pasts(&self, there: HashSet<SandboxId>) {
        let files = Arc::clone(&self.files);
        let forget = move || files.forget_pasts(&there);
        self.disk.perform(Kind::Remove, forget).await;
    }

    /// What a predecessor left. A record that cannot be read is dropped with a warning: better a restart that
    /// ends half-way than a plugin that does not start.
    #[must_use]
    pub fn load(&self) -> Vec<Record> {
        let loaded = self.files.load();
        self.or_nothing(loaded)
    }

    /// How often each pod has restarted. What cannot be read has never been: better a restart too early than none.
    #[must_use]
    pub fn pasts(&self) -> HashMap<SandboxId, Past> {
        let pasts = self.files.pasts();
        self.or_nothing(pasts)
    }

    /// From a place that cannot be read.
    fn or_nothing<T: Default>(&self, result: io::Result<T>) -> T {
        result.unwrap_or_else(|error| {
            self.disk.trouble().begins(&error.to_string());
            T::default()
        })
    }
}

impl Files {
    fn marker(&self, sandbox: &SandboxId) -> PathBuf {
        self.markers.join(sandbox.as_str())
    }

    /// One without the other is better than neither: the hooks go by the marker, a successor by the record.
    fn save(&self, record: &Record) -> io::Result<()> {
        let sandbox = &record.plan.pod.sandbox;
        let marked = if record.phase.is_holding(record.plan.way) {
            dirs::within(&self.markers, || fs::write(self.marker(sandbox), ""))
        } else {
            self.unmark(sandbox)
        };
        dirs::write_whole(&self.path(sandbox), record)?;
        marked
    }

    fn pasts(&self) -> io::Result<HashMap<SandboxId, Past>> {
        let mut pasts = HashMap::new();
        for path in json_files(&self.pasts)? {
            let path = path?;
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

    fn forget_pasts(&self, there: &HashSet<SandboxId>) -> io::Result<()> {
        for path in json_files(&self.pasts)? {
            let path = path?;
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

    fn forget(&self, sandbox: &SandboxId) -> io::Result<()> {
        let unmarked = self.unmark(sandbox);
        ignore_missing(fs::remove_file(self.path(sandbox)))?;
        unmarked
    }

    fn load(&self) -> io::Result<Vec<Record>> {
        let mut records = Vec::new();
        for path in json_files(&self.restarts)? {
            let path = path?;
            match read::<Record>(&path) {
                // What becomes of it is written to the place that it names.
                Ok(record) if self.path(&record.plan.pod.sandbox) == path => records.push(record),
                read => {
                    let error = read.err().map_or_else(
                        || "it is another sandbox's".to_owned(),
                        |error| error.to_string(),
                    );
                    tracing::warn!(path = %path.display(), error, "dropped the record of a restart that cannot be read");
                    // Where that does not work either, it is dropped again the next time.
                    let _ = fs::remove_file(&path);
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

/// Restarts that are under way, in that state directory. What cannot be read is left out: it may be being written.
pub(crate) fn under_way(state_dir: &Path) -> io::Result<Vec<Record>> {
    let restarts = state_dir.join(STATE_FILES[0]);
    let paths = json_files(&restarts)?;
    let records = paths.map(|path| Ok(read(&path?).ok()));
    let records: io::Result<Vec<_>> = records.collect();
    Ok(records?.into_iter().flatten().collect())
}

/// A directory that is not there has none.
fn json_files(dir: &Path) -> io::Result<impl Iterator<Item = io::Result<PathBuf>>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        entries => Some(entries?),
    };
    let paths = entries.into_iter().flatten().map(|entry| Ok(entry?.path()));
    Ok(paths.filter(|path| {
        let path = path.as_ref();
        path.is_ok_and(|path| path.extension().is_some_and(|it| it == "json"))
    }))
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
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;
    use std::time::Duration;

    use super::*;
    use crate::back_off::BackOff;
    use crate::history::tests::exited;
    use crate::plan::tests::plan;
    use crate::restart::machine::Phase;

    struct Place {
        dir: tempfile::TempDir,
        records: Records,
    }

    impl Place {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let records = Records::open(&dir.path().join("state"), &dir.path().join("run"));
            Self {
                records: records.unwrap(),
                dir,
            }
        }

        fn state(&self, file: &str) -> PathBuf {
            self.dir.path().join("state").join(file)
        }

        fn marker(&self) -> PathBuf {
            self.records.marker(&plan().pod.sandbox)
        }
    }

    fn record(phase: Phase) -> Record {
        Record {
            phase,
            plan: plan(),
        }
    }

    async fn until(condition: impl Fn() -> bool) {
        let waiting = async {
            while !condition() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(20), waiting).await;
        waited.expect("it comes to pass");
    }

    fn past() -> Past {
        let mut past = Past::default();
        let day = Duration::from_hours(24);
        past.begun(
            None,
            5,
            Duration::ZERO,
            &BackOff::try_new(day, day, day).unwrap(),
        );
        past
    }

    /// Fuzzing that begins with what is refused does not get far.
    #[test]
    fn what_fuzzing_begins_with_can_be_read() {
        let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fuzz/corpus/records");
        for seed in fs::read_dir(corpus).unwrap() {
            let path = seed.unwrap().path();
            let text = fs::read(&path).unwrap();
            if path.ends_with("past.json") {
                serde_json::from_slice::<Past>(&text).unwrap();
            } else if path.extension().is_some_and(|it| it == "json") {
                serde_json::from_slice::<Record>(&text).unwrap();
            }
        }
    }

    #[test]
    fn a_record_that_names_another_place_is_dropped() {
        let place = Place::new();
        let mut record = record(Phase::Down);
        for sandbox in ["../../outside", "s2"] {
            record.plan.pod.sandbox = sandbox.into();
            fs::write(
                place.state("restarts/s1.json"),
                serde_json::to_vec(&record).unwrap(),
            )
            .unwrap();
            assert!(place.records.load().is_empty(), "{sandbox}");
            assert!(!place.state("restarts/s1.json").exists());
        }
    }

    #[tokio::test]
    async fn what_was_saved_is_loaded_and_forgotten() {
        let place = Place::new();
        let records = &place.records;
        records.save(record(Phase::Down)).await;
        assert_eq!(records.load(), vec![record(Phase::Down)]);
        assert!(place.marker().exists());
        records.save(record(Phase::Up)).await;
        assert_eq!(records.load(), vec![record(Phase::Up)]);
        assert!(!place.marker().exists());
        for _ in 0..2 {
            records.forget(plan().pod.sandbox).await;
        }
        assert!(records.load().is_empty());
    }

    #[tokio::test]
    async fn how_often_a_pod_has_restarted_is_kept_for_as_long_as_its_sandbox() {
        let place = Place::new();
        let records = &place.records;
        let sandbox = SandboxId::from("s1");
        records.save_past(sandbox.clone(), past()).await;
        records.forget_pasts([sandbox.clone()].into()).await;
        fs::write(place.state("back-off/s2.json"), "{").unwrap();
        assert_eq!(records.pasts(), [(sandbox, past())].into());
        records.forget_pasts(HashSet::new()).await;
        assert!(records.pasts().is_empty());
    }

    #[test]
    fn a_record_that_cannot_be_read_is_dropped() {
        let place = Place::new();
        let path = place.state("restarts/s1.json");
        fs::write(&path, "{").unwrap();
        assert!(place.records.load().is_empty());
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_marker_that_cannot_be_written_does_not_lose_the_record() {
        let place = Place::new();
        let markers = place.marker().parent().unwrap().to_owned();
        fs::remove_dir(&markers).unwrap();
        fs::write(&markers, "").unwrap();
        place.records.save(record(Phase::Down)).await;
        assert_eq!(place.records.load(), vec![record(Phase::Down)]);
        assert!(place.records.disk.trouble().is_there());
        // Nobody waits for a disk in trouble.
        place.records.forget(plan().pod.sandbox).await;
        until(|| place.records.load().is_empty()).await;
    }

    #[tokio::test]
    async fn directories_that_were_cleared_are_made_again() {
        let place = Place::new();
        for dir in ["state", "run"] {
            fs::remove_dir_all(place.dir.path().join(dir)).unwrap();
        }
        assert!(place.records.load().is_empty() && place.records.pasts().is_empty());
        place.records.save(record(Phase::Down)).await;
        place.records.save_past("s1".into(), past()).await;
        assert_eq!(place.records.load(), vec![record(Phase::Down)]);
        assert!(place.marker().exists());
        assert_eq!(place.records.pasts().len(), 1);
        assert!(!place.records.disk.trouble().is_there());
    }

    #[test]
    fn a_run_directory_that_cannot_be_used_names_the_flag() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let error = Records::open(&state, Path::new("/proc/y")).unwrap_err();
        assert!(error.to_string().contains("--run-dir"), "{error}");
        // Others could put records there.
        let shared = dir.path().join("shared");
        fs::create_dir(&shared).unwrap();
        fs::set_permissions(&shared, fs::Permissions::from_mode(0o777)).unwrap();
        let error = Records::open(&shared, &dir.path().join("run")).unwrap_err();
        assert!(error.to_string().contains("--state-dir"), "{error}");
    }

    #[tokio::test]
    async fn a_history_that_cannot_be_written_is_no_trouble_of_the_records() {
        let place = Place::new();
        fs::create_dir(place.state("history.jsonl")).unwrap();
        place.records.note(exited("p")).await;
        assert!(!place.records.disk.trouble().is_there());
        fs::remove_dir(place.state("history.jsonl")).unwrap();
        place.records.note(exited("p")).await;
        let text = fs::read_to_string(place.state("history.jsonl")).unwrap();
        assert_eq!(text.lines().count(), 1);
    }

    #[tokio::test]
    async fn restarts_under_way_are_seen_without_being_touched() {
        let place = Place::new();
        let state = place.dir.path().join("state");
        assert!(
            under_way(&place.dir.path().join("none"))
                .unwrap()
                .is_empty()
        );
        place.records.save(record(Phase::Down)).await;
        fs::write(place.state("restarts/s2.json"), "{").unwrap();
        assert_eq!(under_way(&state).unwrap(), [record(Phase::Down)]);
        assert!(place.state("restarts/s2.json").exists());
    }

    #[tokio::test]
    async fn a_state_directory_that_cannot_be_made_is_done_without() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::open(Path::new("/proc/x"), &dir.path().join("run")).unwrap();
        assert!(records.disk.trouble().is_there());
        records.save(record(Phase::Down)).await;
        assert!(records.load().is_empty());
    }

    /// A file system of a few KiB, where there is root to mount it.
    struct Small(tempfile::TempDir);

    impl Small {
        fn mount() -> Option<Self> {
            let dir = tempfile::tempdir().unwrap();
            let small = ["-t", "tmpfs", "-o", "size=16k,mode=700", "tmpfs"];
            let mount = Command::new("mount").args(small).arg(dir.path()).status();
            if !mount.is_ok_and(|status| status.success()) {
                println!("skipped: nothing can be mounted here");
                return None;
            }
            Some(Self(dir))
        }

        fn remount(&self, how: &str) {
            let options = format!("remount,{how}");
            let mut mount = Command::new("mount");
            let remounted = mount.args(["-o", &options]).arg(self.0.path()).status();
            assert!(remounted.unwrap().success());
        }
    }

    impl Drop for Small {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
        }
    }

    #[tokio::test]
    async fn a_full_disk_keeps_no_record_rather_than_one_that_is_not_true() {
        let Some(small) = Small::mount() else { return };
        let run = tempfile::tempdir().unwrap();
        let records = Records::open(small.0.path(), run.path()).unwrap();
        records.save(record(Phase::Down)).await;
        assert_eq!(records.load().len(), 1);
        // It fails when all is taken.
        let _ = fs::write(small.0.path().join("full"), vec![0; 1 << 20]);
        records.save(record(Phase::Up)).await;
        assert!(records.disk.trouble().is_there());
        assert!(records.load().is_empty());
        // A line may fit where no file does.
        records.note(exited("p")).await;
        assert!(records.disk.trouble().is_there());
        records.forget(plan().pod.sandbox).await;
        assert!(records.disk.trouble().is_there());
        fs::remove_file(small.0.path().join("full")).unwrap();
        records.save(record(Phase::Up)).await;
        until(|| records.load() == [record(Phase::Up)]).await;
        until(|| !records.disk.trouble().is_there()).await;
    }

    #[tokio::test]
    async fn a_disk_that_turns_read_only_ends_nothing() {
        let Some(small) = Small::mount() else { return };
        let run = tempfile::tempdir().unwrap();
        let records = Records::open(small.0.path(), run.path()).unwrap();
        fs::write(small.0.path().join("restarts/s1.json"), "{").unwrap();
        small.remount("ro");
        records.save(record(Phase::Down)).await;
        assert!(records.disk.trouble().is_there());
        assert!(records.load().is_empty() && records.pasts().is_empty());
        // The hooks are told all the same.
        assert!(records.marker(&plan().pod.sandbox).exists());
        let records = Records::open(small.0.path(), run.path()).unwrap();
        assert!(records.load().is_empty());
    }
}
