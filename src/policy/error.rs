//! What can be wrong with a pod's annotations, and where.

use std::fmt;

use super::rules::{MAX_RULES, MAX_VALUES};
use crate::yaml::YamlError;

/// More than this many problems say no more, and the sentence must fit an event (1 KiB).
const MAX_SHOWN: usize = 8;

/// Everything that is wrong with a pod's annotations; displays as one line, problems separated by
/// `; `.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyError {
    /// Never empty; ordered by annotation key, then as written.
    problems: Vec<Problem>,
}

impl PolicyError {
    /// `Err` with all of `problems`, or `Ok` if there is none.
    pub(super) fn from_problems(mut problems: Vec<Problem>) -> Result<(), Self> {
        if problems.is_empty() {
            return Ok(());
        }
        // The order of a pod's annotations is a hash map's: the same mistake must read the same
        // every time.
        problems.sort_by(|a, b| a.place.key.cmp(&b.place.key));
        Err(Self { problems })
    }

    /// The problems one by one.
    #[must_use]
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }
}

impl std::error::Error for PolicyError {}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.problems.iter().take(MAX_SHOWN).enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{problem}")?;
        }
        match self.problems.len().checked_sub(MAX_SHOWN) {
            None | Some(0) => Ok(()),
            Some(more) => write!(f, "; and {more} more"),
        }
    }
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{place}: {fault}")]
pub struct Problem {
    /// Where it is.
    pub place: Place,
    /// What it is.
    pub fault: Fault,
}

/// Where a problem is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The annotation key.
    pub key: String,
    /// The entry of a mapping from container names to lists.
    pub container: Option<String>,
    /// The rule, counted from 1.
    pub rule: Option<usize>,
}

impl Place {
    pub(super) fn key(key: &str) -> Self {
        Self {
            key: key.to_owned(),
            container: None,
            rule: None,
        }
    }

    pub(super) fn container(&self, name: &str) -> Self {
        Self {
            container: Some(name.to_owned()),
            ..self.clone()
        }
    }

    pub(super) fn rule(&self, index: usize) -> Self {
        Self {
            rule: Some(index + 1),
            ..self.clone()
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.key)?;
        if let Some(container) = &self.container {
            write!(f, ": container {}", Quoted(container))?;
        }
        if let Some(rule) = self.rule {
            write!(f, ": rule {rule}")?;
        }
        Ok(())
    }
}

/// What is wrong with an annotation.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Fault {
    /// The value is neither YAML nor JSON.
    #[error("not valid YAML: {0}")]
    Syntax(YamlError),
    /// Something of one kind stands where another is needed.
    #[error("{what} is {found}, expected {expected}")]
    WrongKind {
        /// The field, or `the value` for the whole.
        what: &'static str,
        /// What stands there.
        found: String,
        /// What is needed.
        expected: &'static str,
    },
    /// A field that means nothing here: a typo must not be silent.
    #[error("unknown field {}, allowed are {}", Quoted(name), allowed.join(", "))]
    UnknownField {
        /// The field as written.
        name: String,
        /// The fields that mean something.
        allowed: &'static [&'static str],
    },
    /// A word that is not one of a fixed few.
    #[error("{what} is {}, allowed are {}", Quoted(found), allowed.join(", "))]
    UnknownWord {
        /// The field.
        what: &'static str,
        /// The word as written.
        found: String,
        /// The words that mean something.
        allowed: Vec<&'static str>,
    },
    /// A field without which the rule means nothing.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// Both spellings of the condition.
    #[error("both exitCodes and onExit are given, only one is allowed")]
    TwoConditions,
    /// KEP-5307 allows 20.
    #[error("the list has {0} rules, at most {MAX_RULES} are allowed")]
    TooManyRules(usize),
    /// KEP-5307 allows 255.
    #[error("exitCodes.values has {0} entries, at most {MAX_VALUES} are allowed")]
    TooManyValues(usize),
    /// No process ends with such a code.
    #[error("exitCodes.values has {0}, allowed are whole numbers from 0 to 255")]
    NoExitCode(String),
    /// `In` nothing.
    #[error("exitCodes.values is empty, so that operator In never matches")]
    NeverMatches,
    /// The key has a name part that says nothing about where it applies.
    #[error("unknown place, allowed are {0}")]
    UnknownPlace(&'static str),
    /// A container that is not in the pod.
    #[error("the pod has no container {}", Quoted(.0))]
    NoSuchContainer(String),
}

/// A stranger's word in quotes, escaped and cut: it ends up in logs and events.
pub(super) struct Quoted<'a>(pub(super) &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const LONGEST: usize = 63;
        match self.0.char_indices().nth(LONGEST) {
            None => write!(f, "{:?}", self.0),
            Some((end, _)) => write!(f, "{:?}…", &self.0[..end]),
        }
    }
}
