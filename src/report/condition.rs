//! The pod conditions of KEP-5532: `AllContainersRestarting`, and `PodRestarting` of its earlier draft.

use super::{RestartEnding, Story};
use crate::kube::{Condition, KubeletFeatures, LAST_RESTART};
use crate::policy::Action;

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
pub(super) fn last(story: &Story<'_>, ending: &RestartEnding<'_>) -> Condition {
    let cause = match story.request {
        Some(request) => format!("requested with value {request}"),
        None => format!(
            "container {} exited with code {}{}",
            story.container,
            story.code,
            story.by_rule()
        ),
    };
    let RestartEnding { restarts, what, .. } = ending;
    let joined = ending.joined.map(|it| format!("; answers request {it}"));
    let joined = joined.unwrap_or_default();
    let message = format!("Restart {restarts}: {cause}, {what}{joined}");
    of(LAST_RESTART, ending.complete, ending.reason, message)
}

#[cfg(test)]
mod tests {
    use super::*;

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
