//! From the text of an annotation to rules, with a problem noted for everything that is wrong on
//! the way.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::error::{Fault, Place, Problem, Quoted};
use super::rules::{MAX_RULES, MAX_VALUES, Operator, Rule, Rules};
use crate::yaml;

const RULE_FIELDS: &[&str] = &["action", "exitCodes", "onExit"];
const CONDITION_FIELDS: &[&str] = &["exitCodes"];
const EXIT_CODES_FIELDS: &[&str] = &["operator", "values"];

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
pub(super) fn rules(place: &Place, text: &str, problems: &mut Vec<Problem>) -> Rules {
    match document(text) {
        Ok(value) => rules_value(place, &value, problems),
        Err(fault) => {
            problems.push(Problem {
                place: place.clone(),
                fault,
            });
            Rules::default()
        }
    }
}

/// Reads a value that is a list of rules, or a mapping from container names to such lists.
pub(super) fn pod_rules(place: &Place, text: &str, problems: &mut Vec<Problem>) -> PodRules {
    match document(text) {
        Ok(Value::Array(list)) => PodRules::All(rules_list(place, &list, problems)),
        Ok(Value::Object(lists)) => {
            let mut each = BTreeMap::new();
            for (container, list) in lists {
                let rules = rules_value(&place.container(&container), &list, problems);
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
            problems.push(Problem {
                place: place.clone(),
                fault,
            });
            PodRules::All(Rules::default())
        }
    }
}

/// Reads rules that were YAML or JSON before.
pub(super) fn rules_value(place: &Place, value: &Value, problems: &mut Vec<Problem>) -> Rules {
    if let Value::Array(list) = value {
        return rules_list(place, list, problems);
    }
    let fault = Fault::WrongKind {
        what: "the value",
        found: kind(value),
        expected: "a list of rules",
    };
    problems.push(Problem {
        place: place.clone(),
        fault,
    });
    Rules::default()
}

fn rules_list(place: &Place, list: &[Value], problems: &mut Vec<Problem>) -> Rules {
    if list.len() > MAX_RULES {
        problems.push(Problem {
            place: place.clone(),
            fault: Fault::TooManyRules(list.len()),
        });
    }
    let mut rules = Vec::new();
    for (index, value) in list.iter().enumerate() {
        let mut faults = Vec::new();
        rules.extend(rule(value, &mut faults));
        problems.extend(faults.into_iter().map(|fault| Problem {
            place: place.rule(index),
            fault,
        }));
    }
    Rules::from(rules)
}

fn rule(value: &Value, faults: &mut Vec<Fault>) -> Option<Rule> {
    let fields = noted(mapping_ref("the rule", value), faults)?;
    refuse_others(fields, RULE_FIELDS, faults);
    let action = required("action", fields.get("action"), faults)
        .and_then(|value| noted(word("action", value), faults));
    let exit_codes = match (fields.get("exitCodes"), fields.get("onExit")) {
        (Some(_), Some(_)) => {
            faults.push(Fault::TwoConditions);
            None
        }
        (None, Some(condition)) => {
            noted(mapping_ref("onExit", condition), faults).and_then(|condition| {
                refuse_others(condition, CONDITION_FIELDS, faults);
                required("onExit.exitCodes", condition.get("exitCodes"), faults)
            })
        }
        (exit_codes, None) => required("exitCodes", exit_codes, faults),
    };
    let (operator, values) = condition(exit_codes?, faults)?;
    Some(Rule {
        action: action?,
        operator,
        values,
    })
}

fn condition(value: &Value, faults: &mut Vec<Fault>) -> Option<(Operator, Vec<i32>)> {
    let fields = noted(mapping_ref("exitCodes", value), faults)?;
    refuse_others(fields, EXIT_CODES_FIELDS, faults);
    let operator = required("exitCodes.operator", fields.get("operator"), faults)
        .and_then(|value| noted(word("exitCodes.operator", value), faults));
    let values = required("exitCodes.values", fields.get("values"), faults)?;
    let Value::Array(values) = values else {
        let expected = "a list of whole numbers from 0 to 255";
        faults.push(Fault::WrongKind {
            what: "exitCodes.values",
            found: kind(values),
            expected,
        });
        return None;
    };
    if values.len() > MAX_VALUES {
        faults.push(Fault::TooManyValues(values.len()));
    }
    if values.is_empty() && operator == Some(Operator::In) {
        faults.push(Fault::NeverMatches);
    }
    let codes = values.iter().filter_map(|value| {
        let code = value
            .as_u64()
            .and_then(|code| u8::try_from(code).ok())
            .map(i32::from);
        noted(code.ok_or_else(|| Fault::NoExitCode(kind(value))), faults)
    });
    let codes = codes.collect();
    Some((operator?, codes))
}

/// Reads the text of an annotation.
pub(super) fn document(text: &str) -> Result<Value, Fault> {
    yaml::document(text).map_err(Fault::Syntax)
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
            found: word.clone(),
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

fn mapping_ref<'v>(what: &'static str, value: &'v Value) -> Result<&'v Map<String, Value>, Fault> {
    value.as_object().ok_or_else(|| Fault::WrongKind {
        what,
        found: kind(value),
        expected: "a mapping",
    })
}

fn required<'v>(
    what: &'static str,
    value: Option<&'v Value>,
    faults: &mut Vec<Fault>,
) -> Option<&'v Value> {
    noted(value.ok_or(Fault::Missing(what)), faults)
}

fn refuse_others(
    fields: &Map<String, Value>,
    allowed: &'static [&'static str],
    faults: &mut Vec<Fault>,
) {
    let others = fields
        .keys()
        .filter(|name| !allowed.contains(&name.as_str()));
    faults.extend(others.map(|name| Fault::UnknownField {
        name: name.clone(),
        allowed,
    }));
}

fn noted<T>(result: Result<T, Fault>, faults: &mut Vec<Fault>) -> Option<T> {
    result.map_err(|fault| faults.push(fault)).ok()
}
