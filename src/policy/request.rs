//! A request to restart a pod: a new value of one of its annotations.

use serde::{Deserialize, Serialize};

/// The annotation whose value asks.
pub const REQUEST_KEY: &str = "restart-request.reprise.dev";
/// The one that is looked at first.
pub(crate) const POD_REQUEST_KEY: &str = "restart-request.reprise.dev/pod";
/// At the end of a value: a back-off is not waited for.
pub(crate) const URGENT: char = '!';
/// What stands before the value in a message that tells of its answer.
const ANSWER: &str = "; answers request ";
/// The longest value, in bytes: it is repeated in conditions, events and logs.
const LONGEST: usize = 128;

/// The value that asks for a restart. Whoever asks chooses it, and finds it again in the pod's conditions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Request(String);

/// What is wrong with the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// Nobody could find it again.
    #[error("the value of {POD_REQUEST_KEY} is empty: any other asks for a restart")]
    Empty,
    /// It has so many bytes.
    #[error("the value of {POD_REQUEST_KEY} has {0} bytes: at most {LONGEST} are taken")]
    TooLong(usize),
    /// It would break the line that it is shown in.
    #[error("the value of {POD_REQUEST_KEY} has line breaks or other control characters")]
    Control,
}

impl Request {
    /// What the annotations of a pod ask for: of `get`, which finds one by its key.
    pub(crate) fn of<'a>(
        get: impl Fn(&str) -> Option<&'a str>,
    ) -> Option<Result<Self, RequestError>> {
        let value = get(POD_REQUEST_KEY).or_else(|| get(REQUEST_KEY))?;
        Some(Self::read(value))
    }

    fn read(value: &str) -> Result<Self, RequestError> {
        if value.is_empty() {
            Err(RequestError::Empty)
        } else if value.len() > LONGEST {
            Err(RequestError::TooLong(value.len()))
        } else if value.chars().any(char::is_control) {
            Err(RequestError::Control)
        } else {
            Ok(Self(value.to_owned()))
        }
    }

    /// As it was written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it waits for no back-off.
    #[must_use]
    pub fn is_urgent(&self) -> bool {
        self.0.ends_with(URGENT)
    }

    /// The end of a message that tells of its answer.
    pub(crate) fn answer(&self) -> String {
        format!("{ANSWER}{}", self.0)
    }

    /// The value whose answer that message tells of. It is what comes last, whatever is in it.
    pub(crate) fn answered_in(message: &str) -> Option<&str> {
        message.split_once(ANSWER).map(|(_, value)| value)
    }
}

/// Whether an annotation of that key is one that asks.
pub(super) fn is_request(key: &str) -> bool {
    [POD_REQUEST_KEY, REQUEST_KEY].contains(&key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(annotations: &[(&str, &str)]) -> Option<Result<Request, RequestError>> {
        let get = |key: &str| annotations.iter().find(|it| it.0 == key).map(|it| it.1);
        Request::of(get)
    }

    #[test]
    fn the_pods_own_place_goes_before_the_plain_key() {
        let (pod, plain) = ("restart-request.reprise.dev/pod", REQUEST_KEY);
        assert_eq!(of(&[(plain, "1")]), Some(Request::read("1")));
        assert_eq!(of(&[(plain, "1"), (pod, "2")]), Some(Request::read("2")));
        assert_eq!(of(&[("restart-request.reprise.dev/x", "1")]), None);
        assert!(
            is_request(pod) && is_request(plain) && !is_request("restart-request.reprise.dev/")
        );
    }

    #[test]
    fn what_cannot_be_shown_on_one_line_asks_for_nothing() {
        assert_eq!(Request::read(""), Err(RequestError::Empty));
        assert_eq!(Request::read("a\nb"), Err(RequestError::Control));
        let longest = "x".repeat(LONGEST);
        assert!(Request::read(&longest).is_ok());
        let longer = longest + "x";
        assert_eq!(Request::read(&longer), Err(RequestError::TooLong(129)));
        assert!(Request::read("at once!").unwrap().is_urgent());
    }

    #[test]
    fn a_condition_answers_the_value_that_it_names_and_no_other() {
        for value in ["a-1", "second, of the kind", "x; answers request y", "5!"] {
            let answer = Request::read(value).unwrap().answer();
            let message = format!("Restart 2: requested, restarted in 9 ms{answer}");
            assert_eq!(Request::answered_in(&message), Some(value));
        }
        let none = "Restart 2: container a exited with code 42, restarted in 9 ms";
        assert_eq!(Request::answered_in(none), None);
    }
}
