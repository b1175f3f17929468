//! What can be wrong with a pod's annotations, and where.

use std::fmt;

use super::failure::MAX_POLICY;
use super::read::{MAX_BYTES, MAX_NAME};
use super::rules::{MAX_RULES, MAX_SIGNALS, MAX_VALUES};
use crate::back_off::BackOffError;
use crate::text;
use crate::yaml::YamlError;

/// More than this many problems are counted, not kept: how many there are is up to whoever wrote the annotations.
const MAX_KEPT: usize = 32;
/// More than this many problems say no more, and the sentence must fit an event (1 KiB).
const MAX_SHOWN: usize = 8;
/// The longest that a place or a word of theirs is kept: no valid key is longer than 89.
const MAX_TEXT: usize = 128;

/// What has been found to be wrong so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Problems {
    first: Vec<Problem>,
    more: usize,
}

impl Problems {
    pub(super) fn note(&mut self, place: &Place, fault: Fault) {
        if self.first.len() == MAX_KEPT {
            self.more += 1;
        } else {
            let place = place.clone();
            self.first.push(Problem { place, fault });
        }
    }

    pub(super) fn extend(&mut self, others: &Self) {
        self.more += others.more;
        for Problem { place, fault } in &others.first {
            self.note(place, fault.clone());
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first.is_empty()
    }

    /// `Err` with all of them, or `Ok` if there is none.
    pub(super) fn into_result(self) -> Result<(), PolicyError> {
        if self.is_empty() {
            return Ok(());
        }
        Err(PolicyError(self))
    }
}

/// Everything that is wrong with a pod's annotations; displays as one line, problems separated by
/// `; `. Never empty; ordered by annotation key, then as written.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyError(Problems);

impl PolicyError {
    /// The first problems, one by one.
    #[must_use]
    pub fn problems(&self) -> &[Problem] {
        &self.0.first
    }

    /// How many there are beyond these.
    #[must_use]
    pub fn more(&self) -> usize {
        self.0.more
    }
}

impl std::error::Error for PolicyError {}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let problems = self.problems();
        for (index, problem) in problems.iter().take(MAX_SHOWN).enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{problem}")?;
        }
        match problems.len().saturating_sub(MAX_SHOWN) + self.more() {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
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
            key: short(&text::printable(key)),
            container: None,
            rule: None,
        }
    }

    pub(super) fn container(&self, name: &str) -> Self {
        Self {
            container: Some(short(name)),
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
    /// The value is too long to be read.
    #[error("the value has {0} bytes: all annotations of Reprise together may have {MAX_BYTES}")]
    TooLong(usize),
    /// The same of a failure policy.
    #[error("the value has {0} bytes, at most {MAX_POLICY} are allowed")]
    LongPolicy(usize),
    /// No container can be called that.
    #[error("a container's name has {0} characters, at most {MAX_NAME} are allowed")]
    LongName(usize),
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
    /// More than one spelling of the condition.
    #[error("of exitCodes, when and onExit only one is allowed")]
    TwoConditions,
    /// KEP-5307 allows 20.
    #[error("the list has {0} rules, at most {MAX_RULES} are allowed")]
    TooManyRules(usize),
    /// KEP-5307 allows 255.
    #[error("exitCodes.values has {0} entries, at most {MAX_VALUES} are allowed")]
    TooManyValues(usize),
    /// Its gaps would shrink.
    #[error("backOff: {0}")]
    BackOff(BackOffError),
    /// Not what the API server takes.
    #[error("exitCodes.values has {0}, allowed are whole numbers of 32 bits")]
    NoExitCode(String),
    /// `In` nothing.
    #[error("exitCodes.values is empty, so that operator In never matches")]
    NeverMatches,
    /// More than there are.
    #[error("onSignal has {0} entries, at most {MAX_SIGNALS} are allowed")]
    TooManySignals(usize),
    /// Numbers are none: they say something else on other machines.
    #[error("onSignal has {0}, allowed are names of Linux's signals, such as SIGSEGV")]
    NoSignal(String),
    /// None of them.
    #[error("onSignal is empty, so that it never matches")]
    NoSignals,
    /// The API server knows exit codes alone.
    #[error("onOOMKilled and onSignal are for annotations: a pod's spec has exitCodes alone")]
    NotOfSpec,
    /// The kubelet would restart what we restart.
    #[error(
        "the pod's spec has restartPolicyRules, which this node's kubelet acts on: rules in annotations are not used beside them"
    )]
    KubeletActs,
    /// The key has a name part that says nothing about where it applies.
    #[error("unknown place, allowed are {0}")]
    UnknownPlace(&'static str),
    /// A container that is not in the pod.
    #[error("the pod has no container {}", Quoted(.0))]
    NoSuchContainer(String),
}

/// As much of a stranger's word as is kept.
pub(super) fn short(word: &str) -> String {
    text::cut(word, MAX_TEXT).into_owned()
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
