//! Reads YAML (and so JSON) that a stranger may have written: bounded, and with errors of one line.

use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_saphyr::{Options, budget, options};

/// Text that is not the YAML that was asked for; says what and where, on one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct YamlError(String);

impl From<serde_saphyr::Error> for YamlError {
    fn from(error: serde_saphyr::Error) -> Self {
        let text = error.without_snippet().to_string();
        Self(text.split_whitespace().collect::<Vec<_>>().join(" "))
    }
}

/// Far above any manifest, far below what would trouble a node: an annotation is at most 256 KiB by
/// itself, and aliases must not make it grow.
fn bounds() -> Options {
    options! {
        budget: budget! {
            max_depth: 256,
            max_nodes: 1_000_000,
            max_anchors: 1_000,
            max_aliases: 1_000,
        },
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: 100_000 },
        with_snippet: false,
    }
}

/// Reads one document.
pub(crate) fn document<T: DeserializeOwned>(text: &str) -> Result<T, YamlError> {
    Ok(serde_saphyr::from_str_with_options(text, bounds())?)
}

/// Reads every document of a stream; empty ones are left out.
pub(crate) fn documents(text: &str) -> Result<Vec<Value>, YamlError> {
    Ok(serde_saphyr::from_multiple_with_options(text, bounds())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_one_line_with_its_place() {
        let error = document::<Value>("a: 1\nb: [1,\n").unwrap_err().to_string();
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
    fn depth_is_bounded() {
        assert!(document::<Value>(&"[".repeat(10_000)).is_err());
        assert!(document::<Value>(&format!("{}{}", "[".repeat(500), "]".repeat(500))).is_err());
    }
}
