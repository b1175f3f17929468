//! What the containers themselves wrote into the pod's emptyDir.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Deed {
    Began,
    /// Began while another instance of the same container was alive.
    Doubled,
    /// An init container came to its end with 0.
    Ended,
    /// Its preStop hook came to its end.
    Warned,
    /// Ended with a code, because the scenario said so.
    Exited(i32),
    /// What the scenario has it note.
    Noted(String),
}

/// One line of the log, in the order in which they were written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Since the epoch, to the microsecond.
    pub(crate) at: Duration,
    pub(crate) container: String,
    pub(crate) deed: Deed,
}

pub(crate) fn read(dir: &Path) -> Result<Vec<Entry>> {
    entries(open(dir)?)
}

pub(crate) fn open(dir: &Path) -> Result<File> {
    let path = dir.join("log");
    File::open(&path).with_context(|| format!("no evidence at {}", path.display()))
}

pub(crate) fn entries(log: impl Read) -> Result<Vec<Entry>> {
    std::io::read_to_string(log)?.lines().map(parse).collect()
}

/// `<seconds since the epoch> <container> begin|double|end|prestop|exit N|note WORD`
fn parse(line: &str) -> Result<Entry> {
    let words: Vec<_> = line.split(' ').collect();
    let (at, container, deed) = match words[..] {
        [at, container, "begin"] => (at, container, Deed::Began),
        [at, container, "double"] => (at, container, Deed::Doubled),
        [at, container, "end"] => (at, container, Deed::Ended),
        [at, container, "prestop"] => (at, container, Deed::Warned),
        [at, container, "exit", code] => (at, container, Deed::Exited(code.parse()?)),
        [at, container, "note", word] => (at, container, Deed::Noted(word.to_owned())),
        _ => anyhow::bail!("not a line of evidence: {line:?}"),
    };
    Ok(Entry {
        at: Duration::try_from_secs_f64(at.parse()?)?,
        container: container.to_owned(),
        deed,
    })
}

/// Who did what, in that order.
pub(crate) fn deeds(entries: &[Entry]) -> Vec<(&str, &Deed)> {
    let entries = entries.iter();
    entries
        .map(|entry| (entry.container.as_str(), &entry.deed))
        .collect()
}

/// Says which of these containers has not begun, if there is one.
pub(crate) fn have_begun<'n>(
    entries: &[Entry],
    mut containers: impl Iterator<Item = &'n str>,
) -> std::result::Result<(), String> {
    let began = |name| {
        let mut entries = entries.iter();
        entries.any(|entry| entry.container == name && entry.deed == Deed::Began)
    };
    let missing = containers.find(|&name| !began(name));
    missing.map_or(Ok(()), |name| Err(format!("{name} has not")))
}

/// The words of those that are notes.
pub(crate) fn notes(entries: Vec<Entry>) -> Vec<String> {
    let note = |entry: Entry| match entry.deed {
        Deed::Noted(word) => Some(word),
        _ => None,
    };
    entries.into_iter().filter_map(note).collect()
}
