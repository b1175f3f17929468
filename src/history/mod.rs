//! What this node's plugin did, restart by restart: kept in the state directory, and shown by `reprise history`.

mod file;
mod show;
mod table;

use std::path::Path;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::plan::Plan;
use crate::policy::{MatchedRule, Request};
use crate::records;
use crate::restart::machine::{Outcome, Phase};
use crate::restart::pod::Finished;
use crate::text;
pub(crate) use file::{FILES, File};
pub use show::{Format, HistoryArgs, HistoryError, run};

/// The longest reason that is kept, in bytes: errors of the runtime may be in it.
const LONGEST_WHY: usize = 256;

/// One restart. Times are in milliseconds, and counted from the exit, or the request, that asked for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Entry {
    /// When that was: RFC 3339.
    at: String,
    id: String,
    namespace: String,
    pod: String,
    uid: String,
    /// What exited, unless somebody asked.
    container: Option<String>,
    exit_code: Option<i32>,
    /// The value that asked for it.
    request: Option<String>,
    /// The value that asked while it was under way, and is answered by it.
    joined_request: Option<String>,
    rule: Option<MatchedRule>,
    action: String,
    /// How the containers were started again, and why not by replay.
    way: String,
    no_replay: Option<String>,
    back_off_ms: u64,
    killed_ms: Option<u64>,
    first_running_ms: Option<u64>,
    /// Only of one that came to its end.
    all_running_ms: Option<u64>,
    /// How it ended, in one word.
    outcome: String,
    /// What was not started again.
    not_started: Vec<String>,
    /// How far it is, if it is under way.
    phase: Option<Phase>,
    /// How often the pod had restarted by then.
    restarts: Option<u32>,
}

impl Entry {
    /// Of a restart that is over.
    pub(crate) fn of(finished: &Finished, outcome: Outcome) -> Self {
        let timings = finished.timings;
        let joined = finished.plan.joined.as_ref().map(Request::as_str);
        let complete = outcome == Outcome::Completed;
        Self {
            at: time(finished.began_at_ms),
            joined_request: joined.map(str::to_owned),
            back_off_ms: millis(finished.waited),
            killed_ms: timings.killed.map(millis),
            first_running_ms: timings.first_running.map(millis),
            all_running_ms: complete.then(|| millis(timings.all_running)),
            outcome: outcome.name().to_owned(),
            not_started: finished
                .waiting_for
                .iter()
                .map(ToString::to_string)
                .collect(),
            restarts: Some(finished.past.restarts),
            ..Self::planned(&finished.plan)
        }
    }

    /// Of one that is under way.
    fn under_way(record: &records::Record) -> Self {
        Self {
            phase: Some(record.phase),
            ..Self::planned(&record.plan)
        }
    }

    fn planned(plan: &Plan) -> Self {
        let trigger = &plan.trigger;
        let exited = trigger.request.is_none();
        let why = plan.no_replay();
        Self {
            at: time(plan.decided_at_ms),
            id: plan.id.to_string(),
            namespace: plan.pod.key.namespace.clone(),
            pod: plan.pod.key.name.clone(),
            uid: plan.pod.uid.to_string(),
            container: exited.then(|| trigger.name.to_string()),
            exit_code: exited.then_some(trigger.code.0),
            request: trigger.request.as_ref().map(|it| it.as_str().to_owned()),
            joined_request: None,
            rule: trigger.rule.clone(),
            action: plan.action.name().to_owned(),
            way: plan.how().to_owned(),
            no_replay: why.map(|why| text::cut(why, LONGEST_WHY).into_owned()),
            back_off_ms: plan.back_off_ms,
            killed_ms: None,
            first_running_ms: None,
            all_running_ms: None,
            outcome: "UnderWay".to_owned(),
            not_started: Vec::new(),
            phase: None,
            restarts: None,
        }
    }

    /// Restarts that are under way, by their records, the newest first.
    fn all_under_way(state_dir: &Path) -> std::io::Result<Vec<Self>> {
        let records = records::under_way(state_dir)?;
        let mut entries: Vec<_> = records.iter().map(Self::under_way).collect();
        entries.sort_by(|a, b| b.at.cmp(&a.at));
        Ok(entries)
    }
}

fn time(unix_ms: u64) -> String {
    let ms = i64::try_from(unix_ms).ok();
    let at = ms.and_then(|ms| Timestamp::from_millisecond(ms).ok());
    format!("{:.3}", at.unwrap_or_default())
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::plan::tests::plan;
    use crate::policy::MatchedBy;
    use crate::restart::pod::Timings;

    /// A restart of that pod that is over.
    pub(crate) fn exited(pod: &str) -> Entry {
        let rule = MatchedRule {
            number: 2,
            source: "restart-rules.reprise.dev/pod".to_owned(),
            by: MatchedBy::Signal,
        };
        Entry {
            at: "2026-01-01T00:00:00.123Z".to_owned(),
            id: format!("{pod}-1"),
            namespace: "n".to_owned(),
            pod: pod.to_owned(),
            uid: "u".to_owned(),
            container: Some("trainer".to_owned()),
            exit_code: Some(42),
            request: None,
            joined_request: None,
            rule: Some(rule),
            action: "RestartAllContainers".to_owned(),
            way: "by replay".to_owned(),
            no_replay: None,
            back_off_ms: 10_000,
            killed_ms: Some(52),
            first_running_ms: Some(310),
            all_running_ms: Some(10_410),
            outcome: "Restarted".to_owned(),
            not_started: Vec::new(),
            phase: None,
            restarts: Some(3),
        }
    }

    /// One that somebody has asked for, and that is under way.
    pub(super) fn asked(pod: &str) -> Entry {
        Entry {
            at: "2026-01-01T00:00:01.000Z".to_owned(),
            container: None,
            exit_code: None,
            request: Some("t1".to_owned()),
            rule: None,
            action: "RestartPod".to_owned(),
            way: "behind placeholders".to_owned(),
            no_replay: Some("trainer has a startup probe".to_owned()),
            back_off_ms: 0,
            killed_ms: None,
            first_running_ms: None,
            all_running_ms: None,
            outcome: "UnderWay".to_owned(),
            phase: Some(Phase::Up),
            restarts: None,
            ..exited(pod)
        }
    }

    fn finished() -> Finished {
        let [killed, first, all] = [50, 300, 410].map(Duration::from_millis);
        Finished {
            plan: plan(),
            past: crate::back_off::Past::default(),
            began_at_ms: 1_767_225_600_123,
            waited: Duration::from_secs(10),
            timings: Timings {
                killed: Some(killed),
                first_running: Some(first),
                all_running: all,
            },
            waiting_for: Vec::new(),
        }
    }

    #[test]
    fn a_restart_is_kept_with_its_cause_its_times_and_its_end() {
        let entry = Entry::of(&finished(), Outcome::Completed);
        assert_eq!(entry.at, "2026-01-01T00:00:00.123Z");
        assert_eq!(
            (entry.container.as_deref(), entry.exit_code),
            (Some("a"), Some(42))
        );
        let times = [
            entry.killed_ms,
            entry.first_running_ms,
            entry.all_running_ms,
        ];
        assert_eq!(times, [50, 300, 410].map(Some));
        assert_eq!(
            (entry.back_off_ms, entry.outcome.as_str()),
            (10_000, "Restarted")
        );
        let mut left = finished();
        left.waiting_for = vec!["a".into()];
        let entry = Entry::of(&left, Outcome::TimedOut);
        assert_eq!((entry.all_running_ms, entry.not_started.len()), (None, 1));
    }

    #[test]
    fn a_reason_is_cut_and_a_request_has_no_exit() {
        let mut asked = finished();
        let policy = crate::policy::Unread::of([("restart-request.reprise.dev", "t1")]);
        asked.plan.trigger.request = crate::policy::Written::read(&policy).request().cloned();
        asked.plan.starter = crate::plan::Starter::Kubelet("why".repeat(1000));
        let entry = Entry::of(&asked, Outcome::Completed);
        assert_eq!((entry.container, entry.exit_code), (None, None));
        assert_eq!(entry.request.as_deref(), Some("t1"));
        assert_eq!(entry.no_replay.map(|it| it.len()), Some(LONGEST_WHY));
    }

    #[test]
    fn json_has_these_keys() {
        let json = serde_json::to_value(asked("b")).unwrap();
        let keys: Vec<_> = json
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect();
        let expected = "action allRunningMs at backOffMs container exitCode firstRunningMs id joinedRequest killedMs \
                        namespace noReplay notStarted outcome phase pod request restarts rule uid way";
        assert_eq!(keys.join(" "), expected);
        assert_eq!(json["phase"], "up");
    }
}
