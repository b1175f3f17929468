//! `reprise history`.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::Entry;
use super::file::{File, Mark};
use super::table::Table;
use crate::config::{Config, ConfigError, RunArgs, Settings};
use crate::text;

/// Between two looks at what has happened.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// The command line of `reprise history`.
#[derive(Debug, Clone, Default, Args)]
pub struct HistoryArgs {
    /// Only restarts of pods of that name
    #[arg(value_name = "POD")]
    pub pod: Option<String>,
    /// Only those of pods in that namespace [default: all]
    #[arg(short, long, value_name = "NAME")]
    pub namespace: Option<String>,
    /// How they are written
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub output: Format,
    /// Begin with the oldest, and go on with each restart when it is over, until interrupted
    #[arg(short, long)]
    pub watch: bool,
    /// Where the plugin keeps its state [default: as for `reprise run`]
    #[arg(long, value_name = "DIR", env = "REPRISE_STATE_DIR")]
    pub state_dir: Option<PathBuf>,
    /// The plugin's config file [default: as for `reprise run`]
    #[arg(long, value_name = "FILE", env = "REPRISE_CONFIG")]
    pub config: Option<PathBuf>,
}

/// How restarts are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A line each, for people.
    #[default]
    Table,
    /// A list with an object each; with --watch an object a line.
    Json,
}

/// Why there is nothing to show.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    /// The settings do not say where it is.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The state directory is not there.
    #[error("no history: there is no {path}; has the plugin run on this node, and with this --state-dir?", path = .0.display())]
    NoDirectory(PathBuf),
    /// It cannot be read.
    #[error("no history: cannot read {path}, which is root's alone", path = path.display())]
    Unreadable {
        /// What of it.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// No restart is as asked for.
    #[error("no restart of {0} is in the history of this node")]
    NoneSuch(String),
    /// Nobody reads what is written.
    #[error(transparent)]
    Output(#[from] io::Error),
}

/// Writes what this node's plugin did, the newest first; what else there is to say goes to `err`.
pub fn run(
    args: &HistoryArgs,
    out: &mut impl Write,
    err: &mut impl Write,
) -> Result<(), HistoryError> {
    let settings = Settings {
        state_dir: args.state_dir.clone(),
        ..Settings::default()
    };
    let config = args.config.clone();
    let dir = Config::load(RunArgs { config, settings })?.state_dir;
    let shown = if args.watch {
        watch(args, &dir, out, err)
    } else {
        list(args, &dir, out, err)
    };
    match shown {
        // Whoever reads has seen enough.
        Err(HistoryError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        shown => shown,
    }
}

fn list(
    args: &HistoryArgs,
    dir: &Path,
    out: &mut impl Write,
    err: &mut impl Write,
) -> Result<(), HistoryError> {
    let mut past = Past::open(dir)?;
    let records = dir.join("restarts");
    let mut entries = Entry::all_under_way(dir).map_err(|source| unreadable(&records, source))?;
    entries.extend(past.news(err)?.into_iter().rev());
    entries.retain(|entry| args.wants(entry));
    if entries.is_empty() {
        match args.pod.as_ref().or(args.namespace.as_ref()) {
            Some(name) => return Err(HistoryError::NoneSuch(text::printable(name).into_owned())),
            None => writeln!(err, "no restart so far")?,
        }
    }
    match args.output {
        Format::Table if entries.is_empty() => {}
        Format::Table => {
            let table = Table::of(&entries);
            writeln!(out, "{}", table.headings())?;
            for entry in &entries {
                writeln!(out, "{}", table.row(entry))?;
            }
        }
        Format::Json => {
            writeln!(out, "[")?;
            for (index, entry) in entries.iter().enumerate() {
                let comma = if index > 0 { "," } else { "" };
                writeln!(out, "{comma}{}", json(entry)?)?;
            }
            writeln!(out, "]")?;
        }
    }
    Ok(())
}

/// Ends only with an error.
fn watch(
    args: &HistoryArgs,
    dir: &Path,
    out: &mut impl Write,
    err: &mut impl Write,
) -> Result<(), HistoryError> {
    let mut past = Past::open(dir)?;
    let mut entries = past.news(err)?;
    let table = Table::of(entries.iter().filter(|entry| args.wants(entry)));
    if args.output == Format::Table {
        writeln!(out, "{}", table.headings())?;
    }
    loop {
        for entry in entries.iter().filter(|entry| args.wants(entry)) {
            match args.output {
                Format::Table => writeln!(out, "{}", table.row(entry))?,
                Format::Json => writeln!(out, "{}", json(entry)?)?,
            }
        }
        out.flush()?;
        sleep(LOOK_INTERVAL);
        entries = past.news(err)?;
    }
}

impl HistoryArgs {
    fn wants(&self, entry: &Entry) -> bool {
        let is = |wanted: &Option<String>, name| wanted.as_ref().is_none_or(|it| it == name);
        is(&self.pod, &entry.pod) && is(&self.namespace, &entry.namespace)
    }
}

fn json(entry: &Entry) -> io::Result<String> {
    Ok(text::printable_json(&serde_json::to_string(entry)?))
}

fn unreadable(path: &Path, source: io::Error) -> HistoryError {
    HistoryError::Unreadable {
        path: path.to_owned(),
        source,
    }
}

/// Restarts that are over, as far as they have been told.
struct Past {
    file: File,
    mark: Option<Mark>,
    /// The last that was, by pod and id.
    last: Option<(String, String)>,
}

impl Past {
    fn open(dir: &Path) -> Result<Self, HistoryError> {
        match std::fs::read_dir(dir) {
            Ok(_) => Ok(Self {
                file: File::in_dir(dir),
                mark: None,
                last: None,
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(HistoryError::NoDirectory(dir.to_owned()))
            }
            Err(error) => Err(unreadable(dir, error)),
        }
    }

    /// Those that have come since, the oldest first.
    fn news(&mut self, err: &mut impl Write) -> Result<Vec<Entry>, HistoryError> {
        let cannot = |source| unreadable(self.file.path(), source);
        let mark = self.file.mark().map_err(cannot)?;
        if mark.is_none() || mark == self.mark {
            return Ok(Vec::new());
        }
        let kept = self.file.read().map_err(cannot)?;
        if kept.unreadable > 0 && self.mark.is_none() {
            let path = self.file.path().display();
            writeln!(err, "{} lines of {path} cannot be read", kept.unreadable)?;
        }
        self.mark = mark;
        let mut entries = kept.entries;
        let is_last = |entry: &Entry| {
            let last = self.last.as_ref();
            last.is_some_and(|(uid, id)| (uid, id) == (&entry.uid, &entry.id))
        };
        if let Some(told) = entries.iter().rposition(is_last) {
            entries.drain(..=told);
        }
        if let Some(last) = entries.last() {
            self.last = Some((last.uid.clone(), last.id.clone()));
        }
        Ok(entries)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::history::tests::{asked, exited};
    use crate::plan::tests::plan;
    use crate::restart::machine::{Phase, Record};

    /// A node on which pods `a` and `b` have restarted.
    fn node() -> (tempfile::TempDir, File) {
        let dir = tempfile::tempdir().unwrap();
        let file = File::in_dir(dir.path());
        for pod in ["a", "b"] {
            file.note(&exited(pod));
        }
        (dir, file)
    }

    /// What is written, and what is said beside.
    fn shown(args: &HistoryArgs, dir: &Path) -> Result<[String; 2], HistoryError> {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        list(args, dir, &mut out, &mut err)?;
        Ok([out, err].map(|bytes| String::from_utf8(bytes).unwrap()))
    }

    fn of_pod(pod: &str) -> HistoryArgs {
        HistoryArgs {
            pod: Some(pod.to_owned()),
            ..HistoryArgs::default()
        }
    }

    #[test]
    fn what_is_under_way_comes_first_then_the_newest() {
        let (dir, _) = node();
        fs::create_dir(dir.path().join("restarts")).unwrap();
        let phase = Phase::Up;
        let record = serde_json::to_vec(&Record {
            phase,
            plan: plan(),
        })
        .unwrap();
        fs::write(dir.path().join("restarts/s1.json"), record).unwrap();
        fs::write(dir.path().join("restarts/s2.json"), "{").unwrap();
        let [out, err] = shown(&HistoryArgs::default(), dir.path()).unwrap();
        let pods = out
            .lines()
            .map(|line| line.split_whitespace().nth(1).unwrap());
        assert_eq!(pods.collect::<Vec<_>>(), ["POD", "default/p", "n/b", "n/a"]);
        assert!(out.contains("UnderWay (Up)"), "{out}");
        assert_eq!(err, "");
        assert!(dir.path().join("restarts/s2.json").exists());
    }

    #[test]
    fn pods_are_chosen_by_name_and_namespace() {
        let (dir, _) = node();
        let [out, _] = shown(&of_pod("a"), dir.path()).unwrap();
        assert!(out.contains("n/a") && !out.contains("n/b"), "{out}");
        let mut elsewhere = of_pod("a");
        elsewhere.namespace = Some("m".to_owned());
        for args in [of_pod("c\n"), elsewhere] {
            let error = shown(&args, dir.path()).unwrap_err().to_string();
            assert!(error.starts_with("no restart of ") && !error.contains('\n'));
        }
    }

    #[test]
    fn a_list_of_objects_is_json_that_no_terminal_acts_on() {
        let (dir, file) = node();
        let mut hostile = asked("c");
        hostile.request = Some("t\u{202e}\u{9b}".to_owned());
        file.note(&hostile);
        let json = HistoryArgs {
            output: Format::Json,
            ..HistoryArgs::default()
        };
        let [out, _] = shown(&json, dir.path()).unwrap();
        assert!(out.is_ascii(), "{out}");
        let entries: Vec<Entry> = serde_json::from_str(&out).unwrap();
        assert_eq!(entries, [hostile, exited("b"), exited("a")]);
        let none = tempfile::tempdir().unwrap();
        let [out, err] = shown(&json, none.path()).unwrap();
        assert_eq!(
            (out.as_str(), err.as_str()),
            ("[\n]\n", "no restart so far\n")
        );
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let (dir, file) = node();
        let error = shown(&HistoryArgs::default(), &dir.path().join("other")).unwrap_err();
        assert!(
            error.to_string().contains("other; has the plugin run"),
            "{error}"
        );
        fs::remove_file(file.path()).unwrap();
        fs::create_dir(file.path()).unwrap();
        let error = shown(&HistoryArgs::default(), dir.path()).unwrap_err();
        assert!(
            error.to_string().contains("history.jsonl, which is root's"),
            "{error}"
        );
        fs::remove_dir(file.path()).unwrap();
        fs::write(file.path(), "{torn").unwrap();
        let [_, err] = shown(&HistoryArgs::default(), dir.path()).unwrap();
        assert!(
            err.starts_with("1 lines of ") && err.contains("cannot be read"),
            "{err}"
        );
    }

    #[test]
    fn whoever_watches_is_told_of_each_restart_once() {
        let (dir, file) = node();
        let mut past = Past::open(dir.path()).unwrap();
        let mut news = || {
            let entries = past.news(&mut Vec::new()).unwrap().into_iter();
            entries.map(|entry| entry.pod).collect::<Vec<_>>()
        };
        assert_eq!(news(), ["a", "b"]);
        assert_eq!(news(), [""; 0]);
        for pod in ["c", "d"] {
            file.note(&exited(pod));
        }
        assert_eq!(news(), ["c", "d"]);
        fs::remove_file(file.path()).unwrap();
        assert_eq!(news(), [""; 0]);
        // In another file, which has the last once more.
        for pod in ["d", "e"] {
            file.note(&exited(pod));
        }
        assert_eq!(news(), ["e"]);
    }
}
