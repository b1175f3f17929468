//! The value of a request, by which its answer is known.

use std::fmt;
use std::hash::{BuildHasher, RandomState};

use k8s_openapi::jiff::Timestamp;

use crate::policy::URGENT;

/// One request: nobody else makes the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Token(String);

impl Token {
    pub(super) fn new() -> Self {
        Self::at(Timestamp::now(), RandomState::new().hash_one(0))
    }

    /// The time, for people, and four letters, for two who ask at the same time.
    fn at(now: Timestamp, random: u64) -> Self {
        let mut token = now.strftime("%Y-%m-%dT%H:%M:%S.%3fZ-").to_string();
        token.extend(
            random.to_be_bytes()[..4]
                .iter()
                .map(|byte| char::from(b'a' + byte % 26)),
        );
        Self(token)
    }

    /// The annotation's value.
    pub(super) fn value(&self, now: bool) -> String {
        let mut value = self.0.clone();
        value.extend(now.then_some(URGENT));
        value
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The token in somebody's value.
pub(super) fn of_value(value: &str) -> &str {
    value.strip_suffix(URGENT).unwrap_or(value)
}

/// Whether a message has the token for one of its words.
pub(super) fn is_named(message: &str, token: &str) -> bool {
    let is_part = |char: char| char.is_ascii_alphanumeric() || "._:-".contains(char);
    let mut words = message.split(|char| !is_part(char));
    // A sentence may end with it.
    words.any(|word| word == token || word.trim_end_matches(['.', ':']) == token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_short_and_of_few_characters_and_another_one_each_time() {
        let at = "2026-11-26T10:53:26.123456Z".parse().unwrap();
        let token = Token::at(at, 0x0001_191a_0000_0000);
        assert_eq!(token.as_str(), "2026-11-26T10:53:26.123Z-abza");
        assert_eq!(token.value(false), token.as_str());
        assert_eq!(token.value(true), "2026-11-26T10:53:26.123Z-abza!");
        assert_eq!(of_value(&token.value(true)), token.as_str());
        assert!(token.value(true).len() <= 63);
        let letters: Vec<_> = (0..8)
            .map(|_| Token::at(at, RandomState::new().hash_one(0)))
            .collect();
        assert!(letters.iter().any(|it| *it != letters[0]), "{letters:?}");
    }

    #[test]
    fn a_token_is_found_as_a_whole_word() {
        let token = "2026-11-26T10:53:26.123Z-abza";
        for message in [
            "Restart 4: requested with value 2026-11-26T10:53:26.123Z-abza, restarted in 143 ms by replay",
            "Restart 4: container a exited with code 42, restarted in 3 s; answers request 2026-11-26T10:53:26.123Z-abza",
            "Request 2026-11-26T10:53:26.123Z-abza: the pod is being deleted",
            "refused 2026-11-26T10:53:26.123Z-abza.",
            "asked with 2026-11-26T10:53:26.123Z-abza!",
            "(2026-11-26T10:53:26.123Z-abza)",
        ] {
            assert!(is_named(message, token), "{message}");
        }
        for message in [
            "",
            "requested with value 2026-11-26T10:53:26.123Z-abzab",
            "requested with value x2026-11-26T10:53:26.123Z-abza",
            "requested with value 2026-11-26T10:53:26.123Z-abza.2",
            "requested with value 2026-11-26T10:53:26.123Z",
        ] {
            assert!(!is_named(message, token), "{message}");
        }
    }
}
