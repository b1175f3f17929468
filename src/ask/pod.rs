//! What a pod in the API says of its restarts.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodCondition};
use k8s_openapi::jiff::Timestamp;

use crate::kube::{LAST_RESTART, RESTARTING};
use crate::policy::{POD_REQUEST_KEY, Request};
use crate::report::BACK_OFF;

/// A pod that can be asked to restart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fit {
    pub(super) name: String,
    pub(super) uid: String,
    pub(super) node: String,
    /// The value of the last request, whoever made it.
    pub(super) request: Option<String>,
    /// That of the last request that was answered when it was asked.
    pub(super) answered: Option<String>,
    /// Whether it is ready, and so is to be again when it has restarted.
    pub(super) ready: bool,
    /// The containers that run, by their IDs: a pod whose status still has one of them running tells of the time before.
    pub(super) running: BTreeSet<String>,
    /// Whether it was named, rather than selected.
    pub(super) named: bool,
}

impl Fit {
    /// The error says why the pod cannot be asked, as what it does or is.
    pub(super) fn from_pod(pod: &Pod, named: bool) -> Result<Self, String> {
        if let Some(why) = end(pod) {
            return Err(why);
        }
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        Ok(Self {
            name: pod.metadata.name.clone().unwrap_or_default(),
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            node: node.ok_or("is on no node yet")?,
            request: request(pod).map(str::to_owned),
            answered: None,
            ready: is_ready(pod),
            // One that is under way may answer what is asked: what it has started is new.
            running: match UnderWay::of(pod, Timestamp::now()) {
                Some(_) => BTreeSet::new(),
                None => running(pod).map(str::to_owned).collect(),
            },
            named,
        })
    }
}

/// Why the pod restarts no more.
pub(super) fn end(pod: &Pod) -> Option<String> {
    if pod.metadata.deletion_timestamp.is_some() {
        return Some("is being deleted".to_owned());
    }
    let phase = pod.status.as_ref()?.phase.as_deref()?;
    matches!(phase, "Failed" | "Succeeded").then(|| format!("has ended ({phase})"))
}

/// Whether the kubelet says that it is ready.
pub(super) fn is_ready(pod: &Pod) -> bool {
    let mut conditions = conditions(pod);
    conditions.any(|it| it.type_ == "Ready" && it.status == "True")
}

/// The IDs of its containers that run, as the kubelet has said last.
pub(super) fn running(pod: &Pod) -> impl Iterator<Item = &str> {
    let statuses = pod
        .status
        .as_ref()
        .and_then(|it| it.container_statuses.as_ref());
    let running = |it: &&ContainerStatus| {
        it.state
            .as_ref()
            .is_some_and(|state| state.running.is_some())
    };
    let running = statuses.into_iter().flatten().filter(running);
    running.filter_map(|it| it.container_id.as_deref())
}

/// The value of the last request.
pub(super) fn request(pod: &Pod) -> Option<&str> {
    let annotations = pod.metadata.annotations.as_ref()?;
    annotations.get(POD_REQUEST_KEY).map(String::as_str)
}

/// A restart that is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Last {
    /// Whether all containers run again.
    pub(super) restarted: bool,
    pub(super) reason: String,
    pub(super) message: String,
    pub(super) at: Option<Timestamp>,
}

impl Last {
    pub(super) fn of(pod: &Pod) -> Option<Self> {
        let condition = conditions(pod).find(|it| it.type_ == LAST_RESTART)?;
        Some(Self {
            restarted: condition.status == "True",
            reason: condition.reason.clone().unwrap_or_default(),
            message: condition.message.clone().unwrap_or_default(),
            at: since(condition),
        })
    }

    /// The value of the request that it answers.
    pub(super) fn answered(&self) -> Option<&str> {
        Request::answered_in(&self.message)
    }

    /// Whether that is this one.
    pub(super) fn answers(&self, value: &str) -> bool {
        self.answered() == Some(value)
    }

    /// How many restarts there were, by the message: `Restart 4: …`.
    pub(super) fn count(&self) -> Option<u64> {
        let (number, _) = self.message.strip_prefix("Restart ")?.split_once(':')?;
        number.parse().ok()
    }
}

/// A restart that is under way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct UnderWay {
    /// The condition that says so.
    pub(super) kind: String,
    pub(super) message: String,
    pub(super) since: Option<Timestamp>,
}

impl UnderWay {
    /// By its condition, which is False already in a back-off if the action is `RestartAllContainers`.
    pub(super) fn of(pod: &Pod, now: Timestamp) -> Option<Self> {
        let mut conditions = conditions(pod);
        conditions.find_map(|condition| {
            let it = Self {
                kind: condition.type_.clone(),
                message: condition.message.clone().unwrap_or_default(),
                since: since(condition),
            };
            let waits = || it.back_off_until().is_some_and(|until| now < until);
            let ours = RESTARTING.contains(&it.kind.as_str());
            (ours && (condition.status == "True" || waits())).then_some(it)
        })
    }

    /// When a back-off ends that the message tells of: `…; back-off until 2026-11-26T10:53:26Z`.
    pub(super) fn back_off_until(&self) -> Option<Timestamp> {
        let (_, until) = self.message.rsplit_once(BACK_OFF)?;
        until.parse().ok()
    }
}

fn conditions(pod: &Pod) -> impl Iterator<Item = &PodCondition> {
    let status = pod.status.as_ref();
    status
        .and_then(|it| it.conditions.as_ref())
        .into_iter()
        .flatten()
}

fn since(condition: &PodCondition) -> Option<Timestamp> {
    condition.last_transition_time.as_ref().map(|time| time.0)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(value: Value) -> Pod {
        serde_json::from_value(value).unwrap()
    }

    fn with(conditions: &Value) -> Pod {
        pod(json!({"metadata": {}, "status": {"conditions": conditions}}))
    }

    #[test]
    fn a_pod_that_ends_or_is_nowhere_cannot_be_asked() {
        let of = |meta: Value, spec: Value, phase: &str| {
            Fit::from_pod(
                &pod(json!({"metadata": meta, "spec": spec, "status": {"phase": phase}})),
                false,
            )
        };
        let meta = json!({"name": "a", "uid": "u", "annotations": {POD_REQUEST_KEY: "before"}});
        let spec = json!({"nodeName": "n", "containers": []});
        let fit = Fit {
            name: "a".to_owned(),
            uid: "u".to_owned(),
            node: "n".to_owned(),
            request: Some("before".to_owned()),
            answered: None,
            ready: false,
            running: BTreeSet::new(),
            named: false,
        };
        for phase in ["Running", "Pending", "Unknown"] {
            assert_eq!(of(meta.clone(), spec.clone(), phase), Ok(fit.clone()));
        }
        for phase in ["Failed", "Succeeded"] {
            let why = format!("has ended ({phase})");
            assert_eq!(of(meta.clone(), spec.clone(), phase), Err(why));
        }
        let nowhere = of(meta, json!({"containers": []}), "Pending");
        assert_eq!(nowhere, Err("is on no node yet".to_owned()));
        let going = json!({"name": "a", "deletionTimestamp": "2026-01-01T00:00:00Z"});
        assert_eq!(
            of(going, spec, "Running"),
            Err("is being deleted".to_owned())
        );
    }

    #[test]
    fn the_last_restart_says_how_it_ended_and_how_many_there_were() {
        let last = |status: &str, message: &str| {
            Last::of(&with(&json!([
                {"type": "Ready", "status": "True"},
                {"type": LAST_RESTART, "status": status, "reason": "Restarted", "message": message,
                 "lastTransitionTime": "2026-11-26T10:53:26Z"},
            ])))
            .unwrap()
        };
        let well = last(
            "True",
            "Restart 4: requested, restarted in 143 ms by replay; answers request t2",
        );
        assert!(well.restarted && well.answers("t2") && !well.answers("t") && !well.answers("4"));
        assert_eq!(well.count(), Some(4));
        assert_eq!(well.at, "2026-11-26T10:53:26Z".parse().ok());
        let not = last("False", "An init container failed; answers request t1");
        assert!(!not.restarted && not.answers("t1"));
        assert_eq!(not.count(), None);
        assert_eq!(
            Last::of(&with(&json!([{"type": "Ready", "status": "True"}]))),
            None
        );
    }

    #[test]
    fn a_restart_is_under_way_while_its_condition_is_true_or_it_backs_off() {
        for kind in RESTARTING {
            let of = |status: &str, message: &str| {
                let condition = json!({"type": kind, "status": status, "message": message});
                let now = "2026-11-26T10:53:26Z".parse().unwrap();
                UnderWay::of(&with(&json!([condition])), now).map(|it| it.kind)
            };
            assert_eq!(of("True", "why").as_deref(), Some(kind));
            assert_eq!(of("False", "why"), None);
            let waits = "why; back-off until 2026-11-26T10:53:27Z";
            assert_eq!(of("False", waits).as_deref(), Some(kind));
            assert_eq!(
                of("False", "why; back-off until 2026-11-26T10:53:26Z"),
                None
            );
        }
    }

    #[test]
    fn the_end_of_a_back_off_is_in_the_message() {
        let until = |message: &str| {
            let under_way = UnderWay {
                kind: String::new(),
                message: message.to_owned(),
                since: None,
            };
            under_way.back_off_until()
        };
        assert_eq!(
            until("why; back-off until 2026-11-26T10:53:26Z"),
            "2026-11-26T10:53:26Z".parse().ok()
        );
        for value in [
            "2026-11-26T10:53:26Z",
            "a; back-off until 2026-11-26T10:53:26Z",
        ] {
            let message = format!("Restart requested with value {value}, triggering pod restart");
            assert_eq!(until(&message), None, "{message}");
        }
        assert_eq!(until("wait; back-off until"), None);
    }
}
