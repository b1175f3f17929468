//! The value of a request, by which its answer is known.

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
        assert!(token.value(true).len() <= 63);
        let letters: Vec<_> = (0..8)
            .map(|_| Token::at(at, RandomState::new().hash_one(0)))
            .collect();
        assert!(letters.iter().any(|it| *it != letters[0]), "{letters:?}");
    }
}
