//! On which line of a text each field of its documents is written.

use std::borrow::Cow;
use std::collections::HashMap;
use std::mem;

use serde_saphyr::granit_parser::{Event, Parser};

/// The fields and items of a text of YAML, or JSON. What an alias or a merge stands for is not written where it counts.
pub(super) struct Lines<'t> {
    documents: Vec<(usize, Spot)>,
    /// By what they are in, and by name or index there.
    within: HashMap<(usize, Cow<'t, str>), Spot>,
    /// How many spots there are.
    count: usize,
}

#[derive(Clone, Copy)]
struct Spot {
    id: usize,
    line: usize,
}

/// A list or a mapping that is being read.
struct Open<'t> {
    id: usize,
    next: Next<'t>,
}

enum Next<'t> {
    Item(usize),
    Key,
    /// Of the key of that name and line.
    Value(Cow<'t, str>, usize),
}

/// A value of a document.
#[derive(Clone, Copy)]
pub(super) struct Place<'l> {
    lines: &'l Lines<'l>,
    /// `None`: it is not written there.
    spot: Option<usize>,
    line: Option<usize>,
}

impl<'t> Lines<'t> {
    /// Of a text that has been read without an error.
    pub(super) fn of(text: &'t str) -> Self {
        let mut lines = Self {
            documents: Vec::new(),
            within: HashMap::new(),
            count: 0,
        };
        let mut open: Vec<Open<'t>> = Vec::new();
        let mut document = 0;
        for (event, span) in Parser::new_from_str(text).map_while(Result::ok) {
            let line = span.start.line();
            let next = match event {
                Event::DocumentEnd => {
                    document += 1;
                    continue;
                }
                Event::MappingEnd | Event::SequenceEnd => {
                    open.pop();
                    continue;
                }
                Event::Scalar(name, ..) => match open.last_mut() {
                    Some(Open { next, .. }) if matches!(next, Next::Key) => {
                        *next = Next::Value(name, line);
                        continue;
                    }
                    _ => None,
                },
                Event::Alias(_) => None,
                Event::MappingStart(..) => Some(Next::Key),
                Event::SequenceStart(..) => Some(Next::Item(0)),
                _ => continue,
            };
            let spot = lines.add(&mut open, line);
            if open.is_empty() && next.is_some() {
                lines.documents.push((document, spot));
            }
            open.extend(next.map(|next| Open { id: spot.id, next }));
        }
        lines
    }

    /// What comes next in the innermost list or mapping that is open.
    fn add(&mut self, open: &mut [Open<'t>], line: usize) -> Spot {
        self.count += 1;
        let id = self.count;
        let Some(Open { id: within, next }) = open.last_mut() else {
            return Spot { id, line };
        };
        let (name, line, then) = match mem::replace(next, Next::Key) {
            Next::Item(index) => (Cow::Owned(index.to_string()), line, Next::Item(index + 1)),
            Next::Value(name, line) => (name, line, Next::Key),
            // Never comes: such keys are refused.
            Next::Key => return Spot { id, line },
        };
        *next = then;
        let spot = Spot { id, line };
        self.within.insert((*within, name), spot);
        spot
    }

    /// The place of the document of that index among those that are no mere words, and its index among all.
    pub(super) fn document(&self, index: usize) -> (usize, Place<'_>) {
        let document = self.documents.get(index).copied();
        let spot = document.map(|(_, spot)| spot);
        let place = Place {
            lines: self,
            spot: spot.map(|spot| spot.id),
            line: spot.map(|spot| spot.line),
        };
        (document.map_or(index, |(number, _)| number), place)
    }
}

impl Place<'_> {
    /// Its line, or that of the innermost of what it is in that is written in the document.
    pub(super) fn line(self) -> Option<usize> {
        self.line
    }

    pub(super) fn is_written(self) -> bool {
        self.spot.is_some()
    }

    pub(super) fn field(self, name: &str) -> Self {
        let key = |id| (id, Cow::Borrowed(name));
        let spot = self.spot.and_then(|id| self.lines.within.get(&key(id)));
        Self {
            lines: self.lines,
            spot: spot.map(|spot| spot.id),
            line: spot.map(|spot| spot.line).or(self.line),
        }
    }

    pub(super) fn item(self, index: usize) -> Self {
        self.field(&index.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str, document: usize, path: &[&str]) -> Option<usize> {
        let lines = Lines::of(text);
        let (_, place) = lines.document(document);
        let place = path.iter().fold(place, |place, name| place.field(name));
        place.line()
    }

    #[test]
    fn fields_and_items_are_where_their_keys_and_dashes_are() {
        let text = "\
# a comment
a:
  b: |
    text
  \"c\":
  - x
  -
    d: 1
  - {e: 1,
     f: [g, h]}
";
        for (path, expected) in [
            (&[][..], 2),
            (&["a"], 2),
            (&["a", "b"], 3),
            (&["a", "c"], 5),
            (&["a", "c", "0"], 6),
            (&["a", "c", "1", "d"], 8),
            (&["a", "c", "2"], 9),
            (&["a", "c", "2", "f"], 10),
        ] {
            assert_eq!(line(text, 0, path), Some(expected), "{path:?}");
        }
    }

    #[test]
    fn json_is_read_as_well() {
        let text = "{\n  \"a\": {\n    \"b\":\n      [1,\n 2]}}";
        assert_eq!(line(text, 0, &["a", "b"]), Some(3));
        assert_eq!(line(text, 0, &["a", "b", "1"]), Some(5));
    }

    #[test]
    fn what_is_not_written_is_where_it_is_missing() {
        let text = "a: &a {b: 1}\nc:\n  <<: *a\n  d: *a\n";
        for (path, expected) in [
            (&["c", "b"][..], 2),
            (&["c", "d", "b"], 4),
            // Not the `d` of what it would be in.
            (&["c", "b", "d"], 2),
        ] {
            assert_eq!(line(text, 0, path), Some(expected), "{path:?}");
        }
    }

    #[test]
    fn documents_count_that_are_no_mere_words_and_know_their_own_numbers() {
        let text = "---\n# nothing\n---\na: 1\n---\nwords\n---\n\n- b\n...\n";
        let lines = Lines::of(text);
        let document = |index| {
            let (number, place) = lines.document(index);
            (number, place.line())
        };
        assert_eq!(document(0), (1, Some(4)));
        assert_eq!(document(1), (3, Some(9)));
        assert_eq!(document(2), (2, None));
    }
}
