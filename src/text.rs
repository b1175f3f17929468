//! Words of strangers on their way into logs, events and terminals.

use std::borrow::{Borrow, Cow};
use std::fmt::Write;

/// The same text on one line, with nothing in it that a terminal acts on: such characters are written as Rust writes
/// them, `\n` or `\u{1b}`.
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_acted_on) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for char in text.chars() {
        if is_acted_on(char) {
            // Writing to a string cannot fail.
            let _ = write!(safe, "{}", char.escape_debug());
        } else {
            safe.push(char);
        }
    }
    Cow::Owned(safe)
}

/// The same of JSON: such characters stand in its strings alone, and are written as JSON has them.
#[must_use]
pub fn printable_json(json: &str) -> String {
    let mut safe = String::with_capacity(json.len());
    for char in json.chars() {
        if is_acted_on(char) {
            // As above.
            let _ = write!(safe, "\\u{:04x}", u32::from(char));
        } else {
            safe.push(char);
        }
    }
    safe
}

/// The beginning of the text, in at most `limit` bytes, three of which are an ellipsis if anything is left out.
#[must_use]
pub fn cut(text: &str, limit: usize) -> Cow<'_, str> {
    const ELLIPSIS: &str = "…";
    if text.len() <= limit {
        return Cow::Borrowed(text);
    }
    let end = text.floor_char_boundary(limit.saturating_sub(ELLIPSIS.len()));
    Cow::Owned(format!("{}{ELLIPSIS}", &text[..end]))
}

/// The first few of `names`, and how many more there are.
#[must_use]
pub fn listed(names: &[impl Borrow<str>]) -> String {
    const SHOWN: usize = 8;
    let shown = names[..names.len().min(SHOWN)].join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Controls, and what turns the direction of a line around or ends it unseen.
fn is_acted_on(char: char) -> bool {
    char.is_control()
        || matches!(char, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lines_and_colours_are_written_out() {
        assert_eq!(
            printable("a\nINFO b\x1b[31m\u{9b}2J\u{202e}\0é…"),
            r"a\nINFO b\u{1b}[31m\u{9b}2J\u{202e}\0é…"
        );
    }

    #[test]
    fn a_few_names_are_listed() {
        assert_eq!(listed(&["a", "b"]), "a, b");
        assert_eq!(listed(&["a"; 10]), "a, a, a, a, a, a, a, a and 2 more");
    }

    proptest! {
        #[test]
        fn what_is_printable_stays_so(text in any::<String>()) {
            let safe = printable(&text);
            prop_assert!(!safe.chars().any(is_acted_on));
            prop_assert_eq!(printable(&safe), safe.clone());
        }

        #[test]
        fn json_that_is_printable_says_the_same(text in any::<String>()) {
            let safe = printable_json(&serde_json::to_string(&text).unwrap());
            prop_assert!(!safe.chars().any(is_acted_on));
            prop_assert_eq!(serde_json::from_str::<String>(&safe).unwrap(), text);
        }

        #[test]
        fn a_cut_text_keeps_within_its_limit(text in any::<String>(), limit in 3..100_usize) {
            let short = cut(&text, limit);
            prop_assert!(short.len() <= limit);
            let kept = short.strip_suffix('…').unwrap_or(&short);
            prop_assert!(text.starts_with(kept) && (short == text || short.ends_with('…')));
        }
    }
}
