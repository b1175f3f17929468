//! One function for each door that strangers' bytes come in by.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

mod annotations;
mod hooks;
mod info;
mod manifests;
mod nri;
mod plugin;
mod records;

/// A way to read an input.
pub(crate) struct Target {
    /// Also of its directory in `corpus/`.
    pub(crate) name: &'static str,
    pub(crate) run: fn(&[u8]),
    /// What mutation must know.
    #[cfg_attr(not(fuzzing), expect(dead_code, reason = "only the engine mutates"))]
    pub(crate) form: Form,
}

/// What an input is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// Words, brackets and lines: YAML, JSON, or lines.
    Text,
    /// Calls, see [`nri::messages`].
    Calls,
    /// Anything.
    Bytes,
}

pub(crate) const ALL: &[Target] = &[
    Target {
        name: "annotations",
        run: annotations::read,
        form: Form::Text,
    },
    Target {
        name: "nri-frames",
        run: nri::frames,
        form: Form::Bytes,
    },
    Target {
        name: "nri-messages",
        run: nri::messages,
        form: Form::Calls,
    },
    Target {
        name: "cri-info",
        run: info::read,
        form: Form::Text,
    },
    Target {
        name: "hook-lines",
        run: hooks::talk,
        form: Form::Text,
    },
    Target {
        name: "records",
        run: records::load,
        form: Form::Text,
    },
    Target {
        name: "manifests",
        run: manifests::find,
        form: Form::Text,
    },
    Target {
        name: "check",
        run: manifests::check,
        form: Form::Text,
    },
];

pub(crate) fn named(name: &str) -> Option<&'static Target> {
    ALL.iter().find(|target| target.name == name)
}

/// What stands between the parts of an input, on a line of its own.
const SEPARATOR: &str = "%%\n";

/// The parts of an input.
fn parts(input: &str) -> std::str::Split<'_, &'static str> {
    input.split(SEPARATOR)
}

static DIR: OnceLock<PathBuf> = OnceLock::new();

/// Says where targets may write files, before the first one runs.
pub(crate) fn work_in(dir: PathBuf) {
    // Once is enough.
    let _ = DIR.set(dir);
}

fn dir() -> &'static Path {
    DIR.get().expect("a directory to work in")
}
