//! What was said of a pod's last restart, for whoever has to say it again.

use crate::back_off::Past;
use crate::kube::Condition;
use crate::policy::Request;

/// What was said last.
#[derive(Debug)]
pub(super) struct Told {
    last: Option<Condition>,
    /// The request that was answered with it, if that was a predecessor: it may have died before the API server knew.
    by_predecessor: Option<Request>,
}

impl Told {
    /// Of a pod that has that past.
    pub(super) fn of(past: &Past) -> Self {
        Self {
            last: past.last.clone(),
            by_predecessor: past.answered.clone(),
        }
    }

    /// A restart is over; `None`: there is nothing to say of it. Returns what was said last.
    pub(super) fn now(&mut self, last: Option<Condition>) -> Option<Condition> {
        if last.is_some() {
            *self = Self {
                last,
                by_predecessor: None,
            };
        }
        self.last.clone()
    }

    /// To the API nobody has answered this request. Returns the answer, once, if a predecessor has.
    pub(super) fn again(&mut self, request: &Request) -> Option<Condition> {
        let lost = self.by_predecessor.take_if(|it| it == request)?;
        let answers =
            |last: &&Condition| Request::answered_in(&last.message) == Some(lost.as_str());
        self.last.as_ref().filter(answers).cloned()
    }
}
