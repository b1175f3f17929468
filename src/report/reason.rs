//! The reasons of events, as people search for them. docs/operate.md has a row for each.

use crate::kube::{EventKind, Said};

macro_rules! reasons {
    ($($name:ident: $kind:ident,)+) => {
        /// Why an event is published.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Reason {
            $(
                #[doc = concat!("`", stringify!($name), "`.")]
                $name,
            )+
        }

        impl Reason {
            #[cfg(test)]
            const ALL: &[Self] = &[$(Self::$name,)+];

            /// As it is written.
            pub(crate) fn name(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)+
                }
            }

            /// How serious that is.
            pub(crate) fn kind(self) -> EventKind {
                match self {
                    $(Self::$name => EventKind::$kind,)+
                }
            }
        }
    };
}

reasons! {
    RestartingContainer: Normal,
    RestartingAllContainers: Normal,
    RestartingPod: Normal,
    RestartedContainer: Normal,
    RestartedAllContainers: Normal,
    RestartedPod: Normal,
    Created: Normal,
    Started: Normal,
    NotRestarted: Normal,
    BackOff: Warning,
    NotProtected: Warning,
    RestartIncomplete: Warning,
    FailedPreStopHook: Warning,
    FailedPostStartHook: Warning,
    RulesMatchKills: Warning,
    InvalidRestartRules: Warning,
    InvalidRestartRequest: Warning,
    InvalidFailurePolicy: Warning,
    HardReset: Warning,
    HardResetDeferred: Normal,
    HardResetRefused: Warning,
    HardResetGivenUp: Warning,
    HardResetImpossible: Warning,
    HardResetDenied: Warning,
    HardResetFailed: Warning,
}

impl Reason {
    /// With these words, which are the same whenever they mean the same.
    pub(crate) fn said(self, message: &str) -> Said<'_> {
        self.said_of(message, message)
    }

    /// With words that differ each time, of which the last stand for all of that series.
    pub(crate) fn said_of<'a>(self, series: &'a str, message: &'a str) -> Said<'a> {
        Said {
            kind: self.kind(),
            reason: self.name(),
            series,
            message,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::*;

    fn repository(path: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
    }

    #[test]
    fn each_reason_is_in_the_documents_with_its_type_and_no_other_is() {
        let text = fs::read_to_string(repository("docs/operate.md")).unwrap();
        let (_, text) = text.split_once("\n## Events\n").unwrap();
        let (table, _) = text.split_once("\n## ").unwrap();
        let rows = table.lines().filter_map(|line| line.strip_prefix("| `"));
        let mut told: Vec<_> = rows
            .map(|row| {
                let (reason, rest) = row.split_once("` | ").unwrap();
                format!("{reason}: {}", rest.split(' ').next().unwrap())
            })
            .collect();
        let reasons = Reason::ALL.iter();
        let mut known: Vec<_> = reasons
            .map(|it| format!("{}: {:?}", it.name(), it.kind()))
            .collect();
        told.sort_unstable();
        told.dedup();
        known.sort_unstable();
        assert_eq!(told, known);
    }

    #[test]
    fn each_reason_has_a_scenario() {
        let cases = fs::read_dir(repository("tests/scenarios/cases")).unwrap();
        let cases = cases.map(|case| case.unwrap().path());
        let files = cases.chain([repository("tests/scenarios/restarted.rs")]);
        let text: String = files.map(|it| fs::read_to_string(it).unwrap()).collect();
        for reason in Reason::ALL {
            let name = reason.name();
            assert!(text.contains(&format!("\"{name}\"")), "{name}");
        }
    }
}
