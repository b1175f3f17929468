//! What becomes of a pod that crashes for ever: the annotation `failure-policy.reprise.dev`.

use serde::Deserialize;
use serde_json::Value;

use super::FAILURE_KEY;
use super::error::{Fault, Place, PolicyError, Problems, short};
use super::read::{self, Nodes, Text, Unread, Word};

/// The longest that is read, in bytes: one with comments fits.
pub(super) const MAX_POLICY: usize = 1024;

/// What a pod wants done when it does not come up on its node (enhancements#5734, "New API Field": there a field of the
/// pod template of a Deployment).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FailurePolicy {
    /// What is done.
    pub action: FailureAction,
    /// More restarts than that are too many; `None`: as the node says.
    pub max_restarts: Option<u32>,
}

/// What is done with a pod that crashes for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub enum FailureAction {
    /// It is deleted, so that its controller makes a new one.
    DeletePod,
    /// Nothing.
    #[default]
    None,
}

impl Word for FailureAction {
    const WORDS: &'static [(&'static str, Self)] =
        &[("DeletePod", Self::DeletePod), ("None", Self::None)];
}

impl FailurePolicy {
    /// Reads a pod's annotations; `<key>/pod` replaces `<key>`. `None`: the pod does not say.
    pub fn from_annotations<'a>(
        annotations: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Option<Self>, PolicyError> {
        let mut problems = Problems::default();
        let annotations = annotations.into_iter();
        let ours = annotations.filter(|(key, _)| super::place(key, FAILURE_KEY).is_some());
        // It is read at each update of the pod: no more of it than it can need.
        let (short, long): (Vec<_>, Vec<_>) = ours.partition(|(_, text)| text.len() <= MAX_POLICY);
        for (key, text) in long {
            let fault = Fault::LongPolicy(text.len());
            problems.note(&Place::key(key), fault);
        }
        let unread = Unread::of(short);
        let nodes = &mut Nodes::of_pod();
        let (mut plain, mut pod) = (None, None);
        for (place, text) in unread.at(FAILURE_KEY) {
            let at = Place::key(text.key);
            match place {
                "" => plain = read_policy(&at, text, nodes, &mut problems),
                "pod" => pod = read_policy(&at, text, nodes, &mut problems),
                _ => problems.note(
                    &at,
                    Fault::UnknownPlace(
                        "failure-policy.reprise.dev, failure-policy.reprise.dev/pod",
                    ),
                ),
            }
        }
        problems.into_result().map(|()| pod.or(plain))
    }
}

/// `None` if anything is wrong with it, which is noted.
fn read_policy(
    place: &Place,
    text: Text<'_>,
    nodes: &mut Nodes,
    problems: &mut Problems,
) -> Option<FailurePolicy> {
    const FIELDS: &[&str] = &["action", "maxRestartsOnNode"];
    let value = text.document(nodes);
    let fields = match value.and_then(|value| read::mapping("the value", value)) {
        Ok(fields) => fields,
        Err(fault) => {
            problems.note(place, fault);
            return None;
        }
    };
    let mut action = Err(Fault::Missing("action"));
    let mut max_restarts = None;
    for (name, value) in &fields {
        match name.as_str() {
            "action" => action = read::word("action", value),
            "maxRestartsOnNode" => match restarts(value) {
                Ok(restarts) => max_restarts = Some(restarts),
                Err(fault) => problems.note(place, fault),
            },
            _ => problems.note(
                place,
                Fault::UnknownField {
                    name: short(name),
                    allowed: FIELDS,
                },
            ),
        }
    }
    let action = action.map_err(|fault| problems.note(place, fault)).ok()?;
    Some(FailurePolicy {
        action,
        max_restarts,
    })
}

fn restarts(value: &Value) -> Result<u32, Fault> {
    let restarts = value.as_u64().filter(|restarts| *restarts > 0);
    let restarts = restarts.and_then(|restarts| u32::try_from(restarts).ok());
    restarts.ok_or_else(|| Fault::WrongKind {
        what: "maxRestartsOnNode",
        found: read::kind(value),
        expected: "a whole number from 1 to 4294967295",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ON_POD: &str = "failure-policy.reprise.dev/pod";

    fn read(annotations: &[(&str, &str)]) -> Result<Option<FailurePolicy>, String> {
        FailurePolicy::from_annotations(annotations.iter().copied())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn both_actions_are_read() {
        let policy = |action, max_restarts| {
            Ok(Some(FailurePolicy {
                action,
                max_restarts,
            }))
        };
        let delete = "{action: DeletePod, maxRestartsOnNode: 3}";
        assert_eq!(
            read(&[(FAILURE_KEY, delete)]),
            policy(FailureAction::DeletePod, Some(3))
        );
        assert_eq!(
            read(&[(FAILURE_KEY, "action: None")]),
            policy(FailureAction::None, None)
        );
        assert_eq!(read(&[("restart-rules.reprise.dev", "[]")]), Ok(None));
    }

    #[test]
    fn the_pod_key_replaces_the_plain_one() {
        let both = [(FAILURE_KEY, "action: DeletePod"), (ON_POD, "action: None")];
        let policy = read(&both).unwrap().unwrap();
        assert_eq!(policy.action, FailureAction::None);
    }

    #[test]
    fn one_that_is_longer_than_any_need_be_is_not_read() {
        let long = format!("action: None{}", " ".repeat(MAX_POLICY));
        let expected = "the value has 1036 bytes, at most 1024 are allowed";
        let result = read(&[(FAILURE_KEY, &long)]);
        assert_eq!(result, Err(format!("{FAILURE_KEY}: {expected}")));
    }

    #[test]
    fn every_mistake_is_named_with_what_is_allowed() {
        for (key, text, expected) in [
            (FAILURE_KEY, "{}", "action is missing"),
            (
                FAILURE_KEY,
                "DeletePod",
                "the value is \"DeletePod\", expected a mapping",
            ),
            (
                FAILURE_KEY,
                "action: Delete",
                "action is \"Delete\", allowed are DeletePod, None",
            ),
            (
                FAILURE_KEY,
                "{action: DeletePod, maxRestartsOnNode: 0}",
                "maxRestartsOnNode is 0, expected a whole number from 1 to 4294967295",
            ),
            (
                FAILURE_KEY,
                "{action: DeletePod, maxRestarts: 7}",
                "unknown field \"maxRestarts\", allowed are action, maxRestartsOnNode",
            ),
            (
                "failure-policy.reprise.dev/container.a",
                "action: None",
                "unknown place, allowed are failure-policy.reprise.dev, failure-policy.reprise.dev/pod",
            ),
        ] {
            assert_eq!(read(&[(key, text)]), Err(format!("{key}: {expected}")));
        }
    }
}
