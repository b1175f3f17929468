//! The pod conditions of KEP-5532: `AllContainersRestarting`, and `PodRestarting` of its earlier draft.

use super::{RestartEnding, Story};
use crate::kube::{Condition, KubeletFeatures, LAST_RESTART};
use crate::policy::{Action, Request};

const ALL_CONTAINERS: &str = "AllContainersRestarting";
const POD: &str = "PodRestarting";
/// Why it is set: a rule names what a container exited with.
pub(super) const EXITED: &str = "ContainerExited";
/// Somebody asked for it.
pub(super) const REQUESTED: &str = "RestartRequested";

/// The type of the condition that tells of a restart; `None`: the action has none. A kubelet with the feature owns
/// `AllContainersRestarting` and drops a foreign one (`kubelet_pods.go`, `generateAPIPodStatus`, k8s 1.36).
#[must_use]
pub fn kind(action: Action, native: Option<KubeletFeatures>) -> Option<&'static str> {
    match action {
        Action::Restart => None,
        Action::RestartAllContainers if native.is_some_and(|native| !native.restart_all) => {
            Some(ALL_CONTAINERS)
        }
        Action::RestartAllContainers => Some("reprise.dev/AllContainersRestarting"),
        Action::RestartPod => Some(POD),
    }
}

/// Whether nobody but us sets a condition of this type.
pub(super) fn is_ours(kind: &str, native: KubeletFeatures) -> bool {
    kind != ALL_CONTAINERS || !native.restart_all
}

pub(super) fn of(kind: &str, restarting: bool, reason: &str, message: String) -> Condition {
    Condition {
        kind: kind.to_owned(),
        status: restarting,
        reason: reason.to_owned(),
        message,
    }
}

/// The condition that stays when a restart is over.
pub(crate) fn last(story: &Story<'_>, ending: &RestartEnding<'_>) -> Condition {
    let cause = match story.request {
        Some(_) => "requested".to_owned(),
        None => format!(
            "container {} exited with code {}{}",
            story.container,
            story.code,
            story.by_rule()
        ),
    };
    let RestartEnding { restarts, what, .. } = ending;
    let answer = ending.answers.map(Request::answer).unwrap_or_default();
    let message = format!("Restart {restarts}: {cause}, {what}{answer}");
    of(LAST_RESTART, ending.complete, ending.reason, message)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::ids::{ContainerName, ExitCode, PodIdentity, PodKey};
    use crate::policy::{MatchedBy, MatchedRule};

    /// Tells of a pod's restart, as `change` has it.
    fn told(change: impl FnOnce(&mut Story<'_>), told: impl Fn(&Story<'_>) -> String) -> String {
        let key = PodKey {
            namespace: "n".to_owned(),
            name: "p".to_owned(),
        };
        let pod = PodIdentity {
            sandbox: "s".into(),
            uid: "u".into(),
            key,
        };
        let container = ContainerName::from("my-container");
        let mut story = Story {
            pod: &pod,
            restart: "r-1",
            container: &container,
            code: ExitCode(88),
            rule: Some(&RULE),
            request: None,
            action: Action::RestartAllContainers,
            condition: Some(ALL_CONTAINERS),
            back_off: Duration::ZERO,
            start_at: "2026-01-01T00:00:00Z".to_owned(),
            way: "by replay",
            no_replay: None,
        };
        change(&mut story);
        told(&story)
    }

    static RULE: MatchedRule = MatchedRule {
        number: 2,
        source: String::new(),
        by: MatchedBy::ExitCodes,
    };
    static BY_MEMORY: MatchedRule = MatchedRule {
        number: 2,
        source: String::new(),
        by: MatchedBy::OomKilled,
    };
    const CAUSE: &str = "Container my-container exited with code 88, triggering pod restart";

    #[test]
    fn a_condition_names_the_rule_and_the_end_of_the_back_off_after_what_is_fixed() {
        fn message(story: &Story<'_>) -> String {
            story.condition_message()
        }
        let told = |change: fn(&mut Story<'_>)| told(change, message);
        assert_eq!(told(|_| {}), format!("{CAUSE} (rule 2)"));
        assert_eq!(told(|it| it.rule = None), CAUSE);
        let by_memory = told(|it| it.rule = Some(&BY_MEMORY));
        assert_eq!(by_memory, format!("{CAUSE} (rule 2, onOOMKilled)"));
        let backs_off = told(|it| it.back_off = Duration::from_secs(10));
        let until = "back-off until 2026-01-01T00:00:00Z";
        assert_eq!(backs_off, format!("{CAUSE} (rule 2); {until}"));
        let asked = told(|it| (it.request, it.rule) = (Some("t1"), None));
        let cause = "Restart requested with value t1, triggering pod restart";
        assert_eq!(asked, cause);
    }

    #[test]
    fn the_last_restart_is_told_with_its_number_its_cause_and_what_it_answers() {
        let request = serde_json::from_value("t2".into()).unwrap();
        let ending = RestartEnding {
            reason: "Restarted",
            complete: true,
            what: "restarted in 9 ms by replay".to_owned(),
            restarts: 3,
            answers: Some(&request),
        };
        let last = |story: &Story<'_>| last(story, &ending).message;
        assert_eq!(
            told(|_| {}, last),
            "Restart 3: container my-container exited with code 88 (rule 2), restarted in 9 ms by replay; answers request t2"
        );
        assert_eq!(
            told(|it| it.request = Some("t1"), last),
            "Restart 3: requested, restarted in 9 ms by replay; answers request t2"
        );
    }

    #[test]
    fn a_type_that_the_kubelet_owns_is_ours_under_another_name() {
        let features = |restart_all| KubeletFeatures {
            container_rules: true,
            restart_all,
            exited_initialises: false,
        };
        let name = |native| kind(Action::RestartAllContainers, native);
        assert_eq!(name(Some(features(false))), Some(ALL_CONTAINERS));
        for native in [Some(features(true)), None] {
            assert_eq!(name(native), Some("reprise.dev/AllContainersRestarting"));
        }
        assert!(is_ours(ALL_CONTAINERS, features(false)));
        assert!(!is_ours(ALL_CONTAINERS, features(true)));
        assert_eq!(kind(Action::Restart, None), None);
    }
}
