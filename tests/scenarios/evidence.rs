//! What the containers themselves wrote into the pod's emptyDir.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Deed {
    Began,
    /// An init container came to its end with 0.
    Ended,
    /// Ended with a code, because the scenario said so.
    Exited(i32),
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
    let path = dir.join("log");
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("no evidence at {}", path.display()))?;
    text.lines().map(parse).collect()
}

/// `<seconds since the epoch> <container> begin|end|exit N`
fn parse(line: &str) -> Result<Entry> {
    let words: Vec<_> = line.split(' ').collect();
    let (at, container, deed) = match words[..] {
        [at, container, "begin"] => (at, container, Deed::Began),
        [at, container, "end"] => (at, container, Deed::Ended),
        [at, container, "exit", code] => (at, container, Deed::Exited(code.parse()?)),
        _ => anyhow::bail!("not a line of evidence: {line:?}"),
    };
    Ok(Entry {
        at: Duration::try_from_secs_f64(at.parse()?)?,
        container: container.to_owned(),
        deed,
    })
}
