//! Reads YAML (and so JSON) that a stranger may have written: bounded, and with errors of one line.

use std::io::{self, Read};
use std::thread;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_saphyr::granit_parser::{Event, Parser, ScalarStyle};
use serde_saphyr::{Options, budget, budget::BudgetBreach, options};

use crate::text;

/// An error may quote the text, in as much of it as there is.
const LONGEST_ERROR: usize = 384;

/// Text that is not the YAML that was asked for; says what and where, on one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct YamlError {
    what: String,
    line: Option<usize>,
}

impl YamlError {
    /// Where it is, if that can be told.
    pub(crate) fn line(&self) -> Option<usize> {
        self.line
    }
}

impl From<serde_saphyr::Error> for YamlError {
    fn from(error: serde_saphyr::Error) -> Self {
        let error = error.without_snippet();
        let line = error.location().map(|location| location.line());
        let line = line.and_then(|line| usize::try_from(line).ok());
        let text = match error {
            serde_saphyr::Error::Budget { breach, location } => {
                let what = breached(breach);
                format!(
                    "{what} at line {}, column {}",
                    location.line(),
                    location.column()
                )
            }
            error => error.to_string(),
        };
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        Self {
            what: text::cut(&text::printable(&text), LONGEST_ERROR).into_owned(),
            // Unknown places are on line 0.
            line: line.filter(|line| *line > 0),
        }
    }
}

fn breached(breach: &BudgetBreach) -> &'static str {
    match breach {
        BudgetBreach::Anchors { .. } | BudgetBreach::Aliases { .. } => {
            "too many anchors or aliases"
        }
        BudgetBreach::Depth { .. } => "too deep",
        BudgetBreach::Nodes { .. } => "too many lists and mappings for its length",
        _ => "too much",
    }
}

/// What aliases may add to a text, in bytes, and also what anchors may have kept.
const EXPANSION: usize = 1 << 20;
/// The same in events, of some 100 bytes each.
const EXPANSION_EVENTS: usize = 5_000;
/// A text has at most one scalar, list or mapping in so many bytes. Manifests without a blank have one in 7 to 16.
const BYTES_A_NODE: usize = 6;
const DEPTH: usize = 32;

/// Far above any manifest, far below what would trouble a node: aliases must not make it grow.
fn bounds(text: &str) -> Options {
    options! {
        budget: budget! {
            max_depth: DEPTH,
            max_nodes: text.len() / BYTES_A_NODE + EXPANSION_EVENTS,
            max_anchors: 1_000,
            max_aliases: 1_000,
            max_total_scalar_bytes: text.len() + EXPANSION,
            max_recorded_anchor_bytes: text.len() + EXPANSION,
            max_recorded_anchor_events: EXPANSION_EVENTS,
        },
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: EXPANSION_EVENTS },
        with_snippet: false,
    }
}

/// A collection that is being read.
enum Open {
    List,
    /// What a `<<` merges.
    Merged,
    /// Of a mapping, what comes next.
    Mapping(Next),
}

#[derive(Clone, Copy, PartialEq)]
enum Next {
    Key,
    Value,
    Merged,
}

/// Keys are texts, as in JSON, and `<<` merges what has a name. Whoever reads a key that is a list or a mapping, or merges
/// one that is written there, keeps it, and copies it once for each that it is within.
fn is_plain(text: &str) -> Result<(), YamlError> {
    let mut open: Vec<Open> = Vec::new();
    // Whoever reads the text says what else is wrong with it.
    for (event, span) in Parser::new_from_str(text).map_while(Result::ok) {
        let scalar = match &event {
            Event::Scalar(scalar, style, ..) => Some((scalar, *style)),
            Event::MappingStart(..) | Event::SequenceStart(..) | Event::Alias(_) => None,
            Event::MappingEnd | Event::SequenceEnd => {
                open.pop();
                continue;
            }
            _ => continue,
        };
        let named = matches!(event, Event::Alias(_));
        let list = matches!(event, Event::SequenceStart(..));
        let (mut wrong, mut merged) = (None, false);
        match open.last_mut() {
            Some(Open::Mapping(next)) => {
                match next {
                    Next::Key if scalar.is_none() => wrong = Some("a key that is no text"),
                    Next::Merged if !named && !list => {
                        wrong = Some("a merge of what is written in place");
                    }
                    Next::Key | Next::Value | Next::Merged => {}
                }
                merged = *next == Next::Merged;
                *next = match scalar {
                    _ if *next != Next::Key => Next::Key,
                    Some((key, ScalarStyle::Plain)) if key == "<<" => Next::Merged,
                    _ => Next::Value,
                };
            }
            Some(Open::Merged) if !named => wrong = Some("a merge of what is written in place"),
            Some(Open::Merged | Open::List) | None => {}
        }
        if let Some(wrong) = wrong {
            let (line, column) = (span.start.line(), span.start.col() + 1);
            return Err(YamlError {
                what: format!("{wrong} at line {line}, column {column}"),
                line: Some(line),
            });
        }
        match event {
            Event::MappingStart(..) => open.push(Open::Mapping(Next::Key)),
            Event::SequenceStart(..) if merged => open.push(Open::Merged),
            Event::SequenceStart(..) => open.push(Open::List),
            _ => {}
        }
    }
    Ok(())
}

/// Reads one document. Of types with many others in them, such as the API's, read a [`Value`], and them from that: each makes
/// some 20 KiB of code here, and the place of an error is worth that only in what was written for us.
pub(crate) fn document<T: DeserializeOwned>(text: &str) -> Result<T, YamlError> {
    is_plain(text)?;
    Ok(serde_saphyr::from_str_with_options(text, bounds(text))?)
}

/// Reads every document of a stream; empty ones are left out.
pub(crate) fn documents(text: &str) -> Result<Vec<Value>, YamlError> {
    is_plain(text)?;
    Ok(serde_saphyr::from_multiple_with_options(
        text,
        bounds(text),
    )?)
}

/// A text of which a little is read at a time. Without a pause, whatever the core is wanted for meanwhile would wait for the
/// scheduler's next tick, 4 ms at 250 Hz, and one tick after another.
struct Sips<'t> {
    rest: &'t [u8],
    begun: bool,
}

impl Sips<'_> {
    /// What is read of it at once, in bytes: as nodes of three bytes each it takes some 0.1 ms, and an answer may have to
    /// wait for that at each of its few steps.
    const SIZE: usize = 128;
    const PAUSE: Duration = Duration::from_micros(50);
}

impl Read for Sips<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.begun && !self.rest.is_empty() {
            thread::sleep(Self::PAUSE);
        }
        self.begun = true;
        let size = into.len().min(Self::SIZE);
        self.rest.read(&mut into[..size])
    }
}

/// Reads what a pod's author wrote, on a node that has better things to do: no more than `nodes` scalars, lists and
/// mappings, in few levels, and without anchors, so that there is nothing in it that is not written there. Takes some
/// 2 µs a node, and pauses in between. Blocks.
pub(crate) fn foreign(text: &str, nodes: usize) -> Result<Value, YamlError> {
    let bounds = options! {
        budget: budget! {
            max_depth: 16,
            max_nodes: nodes,
            max_anchors: 0,
            max_aliases: 0,
        },
        with_snippet: false,
    };
    let sips = Sips {
        rest: text.as_bytes(),
        begun: false,
    };
    Ok(serde_saphyr::from_reader_with_options(sips, bounds)?)
}

/// How many nodes a value has been made of.
pub(crate) fn nodes(value: &Value) -> usize {
    let within: usize = match value {
        Value::Array(items) => items.iter().map(nodes).sum(),
        Value::Object(fields) => fields.values().map(|value| 1 + nodes(value)).sum(),
        _ => 0,
    };
    1 + within
}

#[cfg(test)]
mod tests {
    use serde::de::IgnoredAny;

    use super::*;

    #[test]
    fn an_error_is_one_line_with_its_place() {
        let error = document::<Value>("a: 1\nb: [1, *c]\n").unwrap_err();
        assert_eq!(error.line(), Some(2));
        let error = error.to_string();
        assert!(!error.contains('\n') && error.contains("line"), "{error}");
    }

    #[test]
    fn aliases_cannot_multiply() {
        let mut lines = vec!["a: &a [x, x, x, x, x, x, x, x, x, x]".to_owned()];
        for (from, to) in ('a'..='i').zip('b'..='j') {
            lines.push(format!(
                "{to}: &{to} [{}]",
                vec![format!("*{from}"); 10].join(", ")
            ));
        }
        let text = lines.join("\n");
        assert!(document::<Value>(&text).is_err());
    }

    #[test]
    fn aliases_cannot_multiply_what_is_long() {
        let anchors: Vec<_> = (0..100).map(|it| format!("a{it}: &a{it} x")).collect();
        let long = format!("{}\nlong: &long {}", anchors.join("\n"), "x".repeat(16_000));
        let repeated = |times| {
            let text = format!("{long}\nlist: [{}]", vec!["*long"; times].join(", "));
            document::<Value>(&text)
        };
        assert!(repeated(50).is_ok());
        assert!(repeated(100).is_err());
    }

    fn kept_in_each_level(content: &str) -> Result<Value, YamlError> {
        let levels = DEPTH - 2;
        let anchors: Vec<_> = (0..levels).map(|it| format!("&a{it} [")).collect();
        let ends = "]".repeat(levels);
        document(&format!("{}{content}{ends}", anchors.concat()))
    }

    #[test]
    fn anchors_cannot_keep_a_list_again_and_again() {
        let kept = |length: usize| kept_in_each_level(&"x, ".repeat(length));
        assert!(kept(100).is_ok());
        assert!(kept(1_000).is_err());
    }

    #[test]
    fn anchors_cannot_keep_a_text_again_and_again() {
        // An escape, so that there is something to keep.
        let kept = |length: usize| kept_in_each_level(&format!("\"\\t{}\"", "x".repeat(length)));
        assert!(kept(10_000).is_ok());
        assert!(kept(60_000).is_err());
    }

    #[test]
    fn a_list_cannot_be_thousands_of_mappings() {
        let text = format!("[{}]", "{x},".repeat(30_000));
        let refused = document::<Value>(&text).unwrap_err().to_string();
        assert!(refused.contains("for its length"), "{refused}");
    }

    #[test]
    fn depth_is_bounded() {
        assert!(document::<Value>(&"[".repeat(10_000)).is_err());
        let nested = |depth| {
            let text = "&a [".repeat(depth) + &"]".repeat(depth);
            document::<Value>(&text)
        };
        assert!(nested(DEPTH).is_ok());
        assert!(nested(DEPTH + 1).is_err());
    }

    #[test]
    fn keys_are_texts_and_what_is_merged_has_a_name() {
        for text in [
            "? a\n: b",
            "{\"a\": [b, {c: d}], \"<<\": {e: f}}",
            "a: &a {b: c}\nd: &d {e: f}\ng: {<<: [*a, *d]}",
            "[[a, b], {c: [d], e: f}]",
            "a: &a {b: c}\nd: {<<: *a}",
            "---\na: b\n---\nc: d",
        ] {
            assert!(documents(text).is_ok(), "{text}");
        }
        for (text, what) in [
            ("? [a]\n: b", "key that is no text at line 1, column 3"),
            ("a: b\n? {c: d}", "key that is no text at line 2, column 3"),
            ("{[]: a}", "key that is no text at line 1, column 2"),
            ("a:\n  ? ? b", "key that is no text at line 2, column 5"),
            ("a: &a b\n*a : c", "key that is no text at line 2, column 1"),
            (
                "<<: {a: b}",
                "merge of what is written in place at line 1, column 5",
            ),
            (
                "<<: [[a]]",
                "merge of what is written in place at line 1, column 6",
            ),
        ] {
            let refused = document::<IgnoredAny>(text).unwrap_err().to_string();
            assert_eq!(refused, format!("a {what}"), "{text}");
        }
    }

    #[test]
    fn a_manifest_may_have_anchors_and_an_annotation_none() {
        let text = "a: &codes [1, 2]\nb: *codes";
        let [manifest] = &documents(text).unwrap()[..] else {
            panic!("one document")
        };
        assert_eq!(manifest["b"], manifest["a"]);
        for text in [
            text,
            "&codes [1, 2]",
            "{a: &a {b: 1}, c: {<<: *a}}",
            "*codes",
        ] {
            assert!(foreign(text, 100).is_err(), "{text}");
        }
    }

    #[test]
    fn nodes_are_counted_as_they_are_bounded() {
        for text in [
            "1",
            "[]",
            "{}",
            "[1, [2, 3], {a: 1, b: {c: []}}]",
            "a:\n- b\n- c: d",
        ] {
            let count = nodes(&foreign(text, 100).unwrap());
            assert!(foreign(text, count).is_ok(), "{text}");
            assert!(foreign(text, count - 1).is_err(), "{text}");
        }
    }

    #[test]
    fn an_error_quotes_no_more_than_fits_and_nothing_that_a_terminal_acts_on() {
        let long = "9".repeat(60_000);
        let error = foreign(&long, 100).unwrap_err().to_string();
        assert!(error.len() <= LONGEST_ERROR, "{} bytes", error.len());
        let error = document::<Vec<u8>>("[\"\\e[31m\\u202e\"]").unwrap_err();
        assert_eq!(text::printable(&error.what), error.what);
    }
}
