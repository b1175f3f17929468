//! From the text of an annotation to rules, with a problem noted for everything that is wrong on
//! the way.

use std::collections::BTreeMap;

use nix::sys::signal::Signal;
use serde_json::{Map, Value};

use super::error::{Fault, Place, Problems, Quoted, short};
use super::request::{self, Request};
use super::rules::{Condition, MAX_RULES, MAX_SIGNALS, MAX_VALUES, Operator, Rule, Rules};
use crate::yaml;

/// KEP-5307's manifests say `exitCodes`, its examples also `when` or `onExit` with that in it. The others are ours.
const RULE_FIELDS: &[&str] = &[
    "action",
    "exitCodes",
    "when",
    "onExit",
    "onSignal",
    // Last: whether another has matched does not wait for the news of it.
    "onOOMKilled",
];
const CONDITION_FIELDS: &[&str] = &["exitCodes"];
const EXIT_CODES_FIELDS: &[&str] = &["operator", "values"];

/// The longest name of a container: a DNS label (`ValidateDNS1123Label` in `pkg/apis/core/validation`).
pub(super) const MAX_NAME: usize = 63;
/// What all annotations of a pod may have together: 20 rules of 255 values fit, even with a line for each.
pub(super) const MAX_BYTES: usize = 64 * 1024;
/// Likewise, of scalars, lists and mappings: 20 rules of 255 values and 64 signals have 6,681.
const MAX_NODES: usize = 7 * 1024;

/// The annotations of a pod that say something to us, as they came, and no more of them than is read: whoever wrote them
/// has a node's time and memory to waste, and nobody's but their own.
#[derive(Debug, Default)]
pub struct Unread {
    /// By key; of a value that is too long, its length.
    texts: Vec<(String, Result<String, usize>)>,
}

impl Unread {
    /// Of all annotations of a pod.
    pub fn of<'a>(annotations: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let annotations = annotations.into_iter();
        let mut ours: Vec<_> = annotations.filter(|(key, _)| super::is_read(key)).collect();
        // They come in the order of a hash map: the same mistake must read the same every time.
        // What a pod was made with is known whatever else it says: it asks for nothing.
        ours.sort_unstable_by_key(|&(key, text)| (!request::is_request(key), key, text));
        let mut left = MAX_BYTES;
        let mut keep = |(key, text): (&str, &str)| match left.checked_sub(text.len()) {
            Some(rest) => {
                left = rest;
                (key.to_owned(), Ok(text.to_owned()))
            }
            None => (key.to_owned(), Err(text.len())),
        };
        Self {
            texts: ours.into_iter().map(&mut keep).collect(),
        }
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }

    /// Whether any of them is about rules, and not only about what is done by them.
    #[must_use]
    pub fn has_rules(&self) -> bool {
        self.at(super::RULES_KEY).next().is_some()
    }

    /// What somebody asks for, if that is something.
    pub(super) fn request(&self) -> Option<Request> {
        let get = |key: &str| {
            let mut texts = self.texts.iter();
            let text = texts.find(|it| it.0 == key)?;
            text.1.as_deref().ok()
        };
        Request::of(get)?.ok()
    }

    /// Whether nothing is to be known of it before it has been read.
    #[must_use]
    pub fn can_wait(&self) -> bool {
        !self.has_rules() && self.request().is_none()
    }

    /// How many bytes there are to be read.
    #[must_use]
    pub fn len(&self) -> usize {
        let texts = self.texts.iter();
        texts
            .filter_map(|(_, text)| text.as_ref().ok())
            .map(String::len)
            .sum()
    }

    /// Those of one key, with the place that each is for.
    pub(super) fn at(&self, wanted: &str) -> impl Iterator<Item = (&str, Text<'_>)> {
        self.texts.iter().filter_map(move |(key, text)| {
            let place = super::place(key, wanted)?;
            let key = key.as_str();
            Some((place, Text { key, text }))
        })
    }
}

/// The value of an annotation.
#[derive(Clone, Copy)]
pub(super) struct Text<'a> {
    pub(super) key: &'a str,
    text: &'a Result<String, usize>,
}

impl Text<'_> {
    /// Reads it, at the expense of what is left of the pod's `nodes`.
    pub(super) fn document(self, nodes: &mut Nodes) -> Result<Value, Fault> {
        let text = self
            .text
            .as_ref()
            .map_err(|length| Fault::TooLong(*length))?;
        let read = yaml::foreign(text, nodes.0);
        // Where nobody can count them: none is shorter than its separator and itself.
        let taken = read.as_ref().map_or(text.len() / 2, yaml::nodes);
        nodes.0 = nodes.0.saturating_sub(taken);
        read.map_err(Fault::Syntax)
    }
}

/// How many scalars, lists and mappings of a pod's annotations may yet be read.
#[derive(Debug)]
pub(super) struct Nodes(usize);

impl Nodes {
    pub(super) fn of_pod() -> Self {
        Self(MAX_NODES)
    }
}

/// Where a rule's faults are noted.
struct Notes<'p> {
    place: Place,
    problems: &'p mut Problems,
}

impl Notes<'_> {
    fn push(&mut self, fault: Fault) {
        self.problems.note(&self.place, fault);
    }
}

/// One of a fixed few words.
pub(super) trait Word: Copy + PartialEq + 'static {
    /// Every word with its meaning, each meaning once.
    const WORDS: &'static [(&'static str, Self)];

    fn from_word(word: &str) -> Option<Self> {
        Self::WORDS
            .iter()
            .find(|(name, _)| *name == word)
            .map(|(_, meaning)| *meaning)
    }

    fn word(self) -> &'static str {
        Self::WORDS
            .iter()
            .find(|(_, meaning)| *meaning == self)
            .map_or("", |(name, _)| name)
    }
}

/// What the value of `<key>/pod` says.
pub(super) enum PodRules {
    /// One list for every container.
    All(Rules),
    /// A list for each container that is named.
    Each(BTreeMap<String, Rules>),
}

/// Reads a value that must be a list of rules.
pub(super) fn rules(
    place: &Place,
    text: Text<'_>,
    nodes: &mut Nodes,
    problems: &mut Problems,
) -> Rules {
    match text.document(nodes) {
        Ok(value) => rules_value(place, &value, problems),
        Err(fault) => {
            problems.note(place, fault);
            Rules::default()
        }
    }
}

/// Reads a value that is a list of rules, or a mapping from container names to such lists.
pub(super) fn pod_rules(
    place: &Place,
    text: Text<'_>,
    nodes: &mut Nodes,
    problems: &mut Problems,
) -> PodRules {
    match text.document(nodes) {
        Ok(Value::Array(list)) => PodRules::All(rules_list(place, &list, problems)),
        Ok(Value::Object(lists)) => {
            let mut each = BTreeMap::new();
            for (container, list) in lists {
                let place = place.container(&container);
                if let Err(fault) = named(&container) {
                    problems.note(&place, fault);
                    continue;
                }
                let rules = rules_value(&place, &list, problems);
                each.insert(container, rules);
            }
            PodRules::Each(each)
        }
        other => {
            let fault = other.map_or_else(
                |fault| fault,
                |value| {
                    let expected =
                        "a list of rules, or a mapping from container names to such lists";
                    Fault::WrongKind {
                        what: "the value",
                        found: kind(&value),
                        expected,
                    }
                },
            );
            problems.note(place, fault);
            PodRules::All(Rules::default())
        }
    }
}

/// Fails if no container can have that name.
pub(super) fn named(container: &str) -> Result<(), Fault> {
    match container.chars().count() {
        0..=MAX_NAME => Ok(()),
        length => Err(Fault::LongName(length)),
    }
}

/// Reads rules that were YAML or JSON before.
pub(super) fn rules_value(place: &Place, value: &Value, problems: &mut Problems) -> Rules {
    match list_ref("the value", value, "a list of rules") {
        Ok(list) => rules_list(place, list, problems),
        Err(fault) => {
            problems.note(place, fault);
            Rules::default()
        }
    }
}

fn rules_list(place: &Place, list: &[Value], problems: &mut Problems) -> Rules {
    if list.len() > MAX_RULES {
        problems.note(place, Fault::TooManyRules(list.len()));
    }
    let mut rules = Vec::new();
    for (index, value) in list.iter().take(MAX_RULES).enumerate() {
        let mut notes = Notes {
            place: place.rule(index),
            problems,
        };
        rules.extend(rule(value, &mut notes));
    }
    Rules::from(rules)
}

fn rule(value: &Value, faults: &mut Notes<'_>) -> Option<Rule> {
    let fields = noted(mapping_ref("the rule", value), faults)?;
    refuse_others(fields, RULE_FIELDS, faults);
    let action = required("action", fields.get("action"), faults)
        .and_then(|value| noted(word("action", value), faults));
    let conditions = conditions(fields, faults)?;
    Some(Rule {
        action: action?,
        conditions,
    })
}

/// All that there are; `None` if there is none, or anything is wrong with one.
fn conditions(fields: &Map<String, Value>, faults: &mut Notes<'_>) -> Option<Vec<Condition>> {
    let spelled = ["exitCodes", "when", "onExit"];
    if spelled
        .iter()
        .filter(|it| fields.contains_key(**it))
        .count()
        > 1
    {
        faults.push(Fault::TwoConditions);
        return None;
    }
    let mut read = Vec::new();
    for name in RULE_FIELDS {
        let Some(value) = fields.get(*name) else {
            continue;
        };
        read.push(match *name {
            "exitCodes" => exit_codes(value, faults),
            "when" => exit_codes_within("when", "when.exitCodes", value, faults),
            "onExit" => exit_codes_within("onExit", "onExit.exitCodes", value, faults),
            "onOOMKilled" => oom_killed(value, faults),
            "onSignal" => signals(value, faults),
            _ => continue,
        });
    }
    if read.is_empty() {
        faults.push(Fault::Missing("exitCodes, onOOMKilled or onSignal"));
        return None;
    }
    read.into_iter().collect()
}

fn exit_codes_within(
    name: &'static str,
    field: &'static str,
    value: &Value,
    faults: &mut Notes<'_>,
) -> Option<Condition> {
    let within = noted(mapping_ref(name, value), faults)?;
    refuse_others(within, CONDITION_FIELDS, faults);
    let value = required(field, within.get("exitCodes"), faults)?;
    exit_codes(value, faults)
}

fn exit_codes(value: &Value, faults: &mut Notes<'_>) -> Option<Condition> {
    let fields = noted(mapping_ref("exitCodes", value), faults)?;
    refuse_others(fields, EXIT_CODES_FIELDS, faults);
    let operator = required("exitCodes.operator", fields.get("operator"), faults)
        .and_then(|value| noted(word("exitCodes.operator", value), faults));
    let values = required("exitCodes.values", fields.get("values"), faults)?;
    let values = list_ref("exitCodes.values", values, "a list of whole numbers");
    let values = noted(values, faults)?;
    if values.len() > MAX_VALUES {
        faults.push(Fault::TooManyValues(values.len()));
    }
    if values.is_empty() && operator == Some(Operator::In) {
        faults.push(Fault::NeverMatches);
    }
    let codes = values.iter().take(MAX_VALUES).filter_map(|value| {
        let code = value.as_i64().and_then(|code| i32::try_from(code).ok());
        noted(code.ok_or_else(|| Fault::NoExitCode(kind(value))), faults)
    });
    let codes = codes.collect();
    Some(Condition::ExitCodes(operator?, codes))
}

/// There is nothing to say of it, so far.
fn oom_killed(value: &Value, faults: &mut Notes<'_>) -> Option<Condition> {
    if value.as_object().is_some_and(Map::is_empty) {
        return Some(Condition::OomKilled);
    }
    faults.push(Fault::WrongKind {
        what: "onOOMKilled",
        found: kind(value),
        expected: "an empty mapping, {}",
    });
    None
}

fn signals(value: &Value, faults: &mut Notes<'_>) -> Option<Condition> {
    let names = list_ref("onSignal", value, "a list of names of signals");
    let names = noted(names, faults)?;
    if names.len() > MAX_SIGNALS {
        faults.push(Fault::TooManySignals(names.len()));
    }
    if names.is_empty() {
        faults.push(Fault::NoSignals);
    }
    let signals = names.iter().take(MAX_SIGNALS).filter_map(|name| {
        let signal = name.as_str().and_then(|name| name.parse::<Signal>().ok());
        noted(signal.ok_or_else(|| Fault::NoSignal(kind(name))), faults)
    });
    Some(Condition::Signals(signals.collect()))
}

/// The fields of a value that must be a mapping.
pub(super) fn mapping(what: &'static str, value: Value) -> Result<Map<String, Value>, Fault> {
    match value {
        Value::Object(fields) => Ok(fields),
        other => Err(Fault::WrongKind {
            what,
            found: kind(&other),
            expected: "a mapping",
        }),
    }
}

/// The meaning of a value that must be one of a fixed few words.
pub(super) fn word<W: Word>(what: &'static str, value: &Value) -> Result<W, Fault> {
    let allowed = || W::WORDS.iter().map(|(name, _)| *name).collect();
    match value {
        Value::String(word) => W::from_word(word).ok_or_else(|| Fault::UnknownWord {
            what,
            found: short(word),
            allowed: allowed(),
        }),
        other => Err(Fault::WrongKind {
            what,
            found: kind(other),
            expected: "a word",
        }),
    }
}

/// What a value is, in words that fit a message.
pub(super) fn kind(value: &Value) -> String {
    match value {
        Value::Null => "empty".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Number(value) => value.to_string(),
        Value::String(value) => Quoted(value).to_string(),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "a mapping".to_owned(),
    }
}

fn list_ref<'v>(
    what: &'static str,
    value: &'v Value,
    expected: &'static str,
) -> Result<&'v [Value], Fault> {
    let list = value.as_array().map(Vec::as_slice);
    list.ok_or_else(|| Fault::WrongKind {
        what,
        found: kind(value),
        expected,
    })
}

pub(super) fn mapping_ref<'v>(
    what: &'static str,
    value: &'v Value,
) -> Result<&'v Map<String, Value>, Fault> {
    value.as_object().ok_or_else(|| Fault::WrongKind {
        what,
        found: kind(value),
        expected: "a mapping",
    })
}

fn required<'v>(
    what: &'static str,
    value: Option<&'v Value>,
    faults: &mut Notes<'_>,
) -> Option<&'v Value> {
    noted(value.ok_or(Fault::Missing(what)), faults)
}

fn refuse_others(
    fields: &Map<String, Value>,
    allowed: &'static [&'static str],
    faults: &mut Notes<'_>,
) {
    let others = fields
        .keys()
        .filter(|name| !allowed.contains(&name.as_str()));
    for name in others {
        let name = short(name);
        faults.push(Fault::UnknownField { name, allowed });
    }
}

fn noted<T>(result: Result<T, Fault>, faults: &mut Notes<'_>) -> Option<T> {
    result.map_err(|fault| faults.push(fault)).ok()
}
