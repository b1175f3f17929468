//! How a pod wants its restarts done: the annotation `restart-options.reprise.dev`.

use std::time::Duration;

use clap::ValueEnum;
use serde::Deserialize;
use serde_json::Value;

use super::OPTIONS_KEY;
use super::error::{Fault, Place, PolicyError, Problems, short};
use super::read::{self, Nodes, Text, Unread, Word};
use crate::back_off::Asked;

/// How a pod wants its restarts done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Who is to start the containers again, see [`Start::asked`].
    pub start: Option<Start>,
    /// How long containers may take to stop under [`super::Action::RestartPod`], in whole seconds, up to [`LONGEST_GRACE`];
    /// `None`: as long as when the pod ends.
    pub grace_period: Option<Duration>,
    /// What becomes of regular containers that had ended for good before the restart.
    pub completed_containers: CompletedContainers,
    /// How long it waits between restarts in a row, as far as its node lets it (see [`crate::back_off::BackOff::asked`]).
    pub back_off: Asked,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            start: None,
            grace_period: None,
            completed_containers: CompletedContainers::Restart,
            back_off: Asked::default(),
        }
    }
}

/// A day: whoever asks for more has mistaken the unit.
pub const LONGEST_GRACE: Duration = LONGEST;
/// The same of whatever is in seconds. The admission policies have the number as well (`hack/chart.sh check` compares).
const LONGEST: Duration = Duration::from_hours(24);

/// Who starts the containers again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Deserialize)]
#[value(rename_all = "PascalCase")]
pub enum Start {
    /// The plugin where the result cannot be told from the kubelet's own start, else the kubelet
    #[default]
    Auto,
    /// The kubelet
    Kubelet,
    /// The plugin wherever it can, from the configuration of the last start
    Replay,
}

impl Start {
    /// Who starts the containers of a pod that asks for `asked`, on a node that says `self`. A node that leaves it to the
    /// kubelet is not overruled: what the plugin may do as root is its operator's to say. Otherwise the pod has its way.
    /// What `Replay` takes the risk of beyond `Auto`, that containers start as they did the last time, is the pod's alone.
    #[must_use]
    pub fn asked(self, asked: Option<Self>) -> Self {
        match self {
            Self::Kubelet => Self::Kubelet,
            Self::Auto | Self::Replay => asked.unwrap_or(self),
        }
    }
}

impl Word for Start {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("Auto", Self::Auto),
        ("Kubelet", Self::Kubelet),
        ("Replay", Self::Replay),
    ];
}

/// What becomes of regular containers that had ended for good before the restart, as their policy says: with any
/// code under `Never`, with 0 under `OnFailure`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompletedContainers {
    /// They run again (KEP-5532, "Regular Containers").
    Restart,
    /// They stay as they are.
    Keep,
}

impl Word for CompletedContainers {
    const WORDS: &'static [(&'static str, Self)] =
        &[("Restart", Self::Restart), ("Keep", Self::Keep)];
}

impl Options {
    /// Reads the options of a pod from its annotations; what is not set has its default.
    /// `<key>/pod` replaces `<key>`.
    pub fn from_annotations<'a>(
        annotations: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, PolicyError> {
        let mut problems = Problems::default();
        let unread = Unread::of(annotations);
        let options = Self::read(&unread, &mut Nodes::of_pod(), &mut problems);
        problems.into_result().map(|()| options)
    }

    /// The same; what is wrong is noted and has its default.
    pub(super) fn read(unread: &Unread, nodes: &mut Nodes, problems: &mut Problems) -> Self {
        let mut plain = None;
        let mut pod = None;
        for (place, text) in unread.at(OPTIONS_KEY) {
            let at = Place::key(text.key);
            match place {
                "" => plain = Some(read_options(&at, text, nodes, problems)),
                "pod" => pod = Some(read_options(&at, text, nodes, problems)),
                _ => problems.note(
                    &at,
                    Fault::UnknownPlace(
                        "restart-options.reprise.dev, restart-options.reprise.dev/pod",
                    ),
                ),
            }
        }
        pod.or(plain).unwrap_or_default()
    }
}

/// The options in one annotation; what is wrong is noted and has its default.
fn read_options(
    place: &Place,
    text: Text<'_>,
    nodes: &mut Nodes,
    problems: &mut Problems,
) -> Options {
    const FIELDS: &[&str] = &[
        "start",
        "gracePeriodSeconds",
        "completedContainers",
        "backOff",
    ];
    let mut options = Options::default();
    let mut note = |fault| problems.note(place, fault);
    let value = text.document(nodes);
    let fields = match value.and_then(|value| read::mapping("the value", value)) {
        Ok(fields) => fields,
        Err(fault) => {
            note(fault);
            return options;
        }
    };
    for (name, value) in &fields {
        let read = match name.as_str() {
            "start" => read::word("start", value).map(|start| options.start = Some(start)),
            "gracePeriodSeconds" => {
                seconds("gracePeriodSeconds", value).map(|it| options.grace_period = Some(it))
            }
            "completedContainers" => read::word("completedContainers", value)
                .map(|what| options.completed_containers = what),
            "backOff" => {
                options.back_off = back_off(value, &mut note);
                Ok(())
            }
            _ => Err(Fault::UnknownField {
                name: short(name),
                allowed: FIELDS,
            }),
        };
        read.unwrap_or_else(&mut note);
    }
    options
}

/// What is wrong is noted, and not asked for.
fn back_off(value: &Value, note: &mut impl FnMut(Fault)) -> Asked {
    const FIELDS: &[&str] = &["firstSeconds", "maxSeconds", "resetSeconds"];
    let mut asked = Asked::default();
    let fields = match read::mapping_ref("backOff", value) {
        Ok(fields) => fields,
        Err(fault) => {
            note(fault);
            return asked;
        }
    };
    for (name, value) in fields {
        let read = match name.as_str() {
            "firstSeconds" => {
                seconds("backOff.firstSeconds", value).map(|it| asked.initial = Some(it))
            }
            "maxSeconds" => seconds("backOff.maxSeconds", value).map(|it| asked.longest = Some(it)),
            "resetSeconds" => {
                seconds("backOff.resetSeconds", value).map(|it| asked.forgotten_after = Some(it))
            }
            _ => Err(Fault::UnknownField {
                name: short(name),
                allowed: FIELDS,
            }),
        };
        read.unwrap_or_else(&mut *note);
    }
    asked.checked().unwrap_or_else(|error| {
        note(Fault::BackOff(error));
        Asked::default()
    })
}

fn seconds(what: &'static str, value: &Value) -> Result<Duration, Fault> {
    value
        .as_u64()
        .map(Duration::from_secs)
        .filter(|seconds| *seconds <= LONGEST)
        .ok_or_else(|| Fault::WrongKind {
            what,
            found: read::kind(value),
            expected: "a whole number from 0 to 86400",
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(annotations: &[(&'static str, &'static str)]) -> Result<Options, String> {
        Options::from_annotations(annotations.iter().copied()).map_err(|error| error.to_string())
    }

    #[test]
    fn everything_has_a_default() {
        assert_eq!(options(&[]), Ok(Options::default()));
        assert_eq!(options(&[(OPTIONS_KEY, "{}")]), Ok(Options::default()));
    }

    #[test]
    fn every_field_is_read() {
        let text = "{start: Replay, gracePeriodSeconds: 3, completedContainers: Keep, \
                    backOff: {firstSeconds: 0, maxSeconds: 86400, resetSeconds: 5}}";
        let [none, day, five] = [0, 86_400, 5].map(|it| Some(Duration::from_secs(it)));
        let expected = Options {
            start: Some(Start::Replay),
            grace_period: Some(Duration::from_secs(3)),
            completed_containers: CompletedContainers::Keep,
            back_off: Asked {
                initial: none,
                longest: day,
                forgotten_after: five,
            },
        };
        assert_eq!(options(&[(OPTIONS_KEY, text)]), Ok(expected));
    }

    #[test]
    fn a_pod_has_its_way_but_where_the_node_leaves_the_start_to_the_kubelet() {
        use Start::{Auto, Kubelet, Replay};
        let asked = [None, Some(Auto), Some(Kubelet), Some(Replay)];
        assert_eq!(asked.map(|asked| Kubelet.asked(asked)), [Kubelet; 4]);
        assert_eq!(
            asked.map(|asked| Auto.asked(asked)),
            [Auto, Auto, Kubelet, Replay]
        );
        assert_eq!(
            asked.map(|asked| Replay.asked(asked)),
            [Replay, Auto, Kubelet, Replay]
        );
    }

    #[test]
    fn the_pod_key_replaces_the_plain_one() {
        let both = [
            (OPTIONS_KEY, "start: Replay"),
            ("restart-options.reprise.dev/pod", "gracePeriodSeconds: 1"),
        ];
        let options = options(&both).unwrap();
        assert_eq!(
            (options.start, options.grace_period),
            (None, Some(Duration::from_secs(1)))
        );
    }

    #[test]
    fn every_mistake_is_named_with_what_is_allowed() {
        assert_eq!(
            options(&[(
                OPTIONS_KEY,
                "{start: auto, gracePeriodSeconds: -1, completed: Keep}"
            )])
            .unwrap_err(),
            "restart-options.reprise.dev: unknown field \"completed\", allowed are start, \
             gracePeriodSeconds, completedContainers, backOff; \
             restart-options.reprise.dev: gracePeriodSeconds is -1, expected a whole number from \
             0 to 86400; \
             restart-options.reprise.dev: start is \"auto\", allowed are Auto, Kubelet, Replay"
        );
        assert_eq!(
            options(&[("restart-options.reprise.dev/container.a", "{}")]).unwrap_err(),
            "restart-options.reprise.dev/container.a: unknown place, allowed are \
             restart-options.reprise.dev, restart-options.reprise.dev/pod"
        );
    }

    #[test]
    fn a_back_off_that_is_none_is_named() {
        for (text, expected) in [
            ("backOff: 10", "backOff is 10, expected a mapping"),
            ("backOff:", "backOff is empty, expected a mapping"),
            (
                "backOff: {first: 10s}",
                "unknown field \"first\", allowed are firstSeconds, maxSeconds, resetSeconds",
            ),
            (
                "backOff: {firstSeconds: 20, maxSeconds: 10}",
                "backOff: the first back-off is 20 s, longer than the longest, 10 s",
            ),
        ] {
            let error = options(&[(OPTIONS_KEY, text)]).unwrap_err();
            assert_eq!(error, format!("{OPTIONS_KEY}: {expected}"));
        }
        for name in ["firstSeconds", "maxSeconds", "resetSeconds"] {
            for value in [
                "-1",
                "86401",
                "1.5",
                "1e3",
                "10s",
                "'10'",
                "~",
                "[1]",
                "18446744073709551615",
                "18446744073709551616",
                "999999999999999999999999999999",
            ] {
                let text = format!("backOff: {{{name}: {value}}}");
                let annotations = [(OPTIONS_KEY, text.as_str())];
                let error = Options::from_annotations(annotations).unwrap_err();
                let (start, end) = (
                    format!("{OPTIONS_KEY}: backOff.{name} is "),
                    ", expected a whole number from 0 to 86400",
                );
                let error = error.to_string();
                assert!(error.starts_with(&start) && error.ends_with(end), "{error}");
            }
        }
    }
}
