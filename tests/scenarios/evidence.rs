//! What the containers themselves wrote into the pod's emptyDir.

use std::path::Path;

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
    pub(crate) container: String,
    pub(crate) deed: Deed,
}

pub(crate) fn read(dir: &Path) -> Result<Vec<Entry>> {
    let path = dir.join("log");
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("no evidence at {}", path.display()))?;
    text.lines().map(parse).collect()
}

/// `<uptime> <container> begin|end|exit N`
fn parse(line: &str) -> Result<Entry> {
    let words: Vec<_> = line.split(' ').collect();
    let (container, deed) = match words[..] {
        [_, container, "begin"] => (container, Deed::Began),
        [_, container, "end"] => (container, Deed::Ended),
        [_, container, "exit", code] => (container, Deed::Exited(code.parse()?)),
        _ => anyhow::bail!("not a line of evidence: {line:?}"),
    };
    Ok(Entry {
        container: container.to_owned(),
        deed,
    })
}
