//! What people see of hard resets: a log line and an event for each decision.

use super::evidence::Evidence;
use super::ledger::Hindrance;
use super::pods::Notice;
use super::terms::Method;
use crate::ids::{PodKey, PodUid};
use crate::kube::{EventKind, Events, Owner};
use crate::report::Reason;

/// Tells people.
#[derive(Debug)]
pub(super) struct Voice {
    events: Events,
}

impl Voice {
    pub(super) fn new(events: Events) -> Self {
        Self { events }
    }

    /// The pod is about to go: before it does, people should know, if that does not take long.
    pub(super) async fn resets(
        &self,
        pod: &PodKey,
        uid: &PodUid,
        owner: &Owner,
        method: Method,
        evidence: &Evidence,
    ) {
        let doing = match method {
            Method::Evict => "Hard reset: evicting",
            Method::Delete => "Hard reset: deleting",
        };
        let message = evidence.summary(doing);
        tracing::warn!(%pod, %owner, "{message}");
        let said = Reason::HardReset.said(&message);
        self.events
            .publish_before((pod, uid), owner.reference(), said)
            .await;
    }

    pub(super) fn tell(&self, pod: &PodKey, uid: &PodUid, notice: &Notice) {
        let series = notice.essence();
        let (reason, message) = match notice {
            Notice::Invalid(error) => (
                Reason::InvalidFailurePolicy,
                format!("The failure policy is not used: {error}"),
            ),
            Notice::Unusable(why) => (
                Reason::HardResetImpossible,
                format!("The pod is not deleted however often it crashes: {why}"),
            ),
            Notice::Deferred(why, wait) => {
                let why = match why {
                    Hindrance::Cooldown => "another pod of its owner was just reset",
                    Hindrance::ClusterBudget => {
                        "the cluster, or the namespace, has had as many as it may in an hour"
                    }
                    Hindrance::NodeBudget => {
                        "the node, or the namespace on it, has had as many as it may in an hour"
                    }
                };
                let wait = wait.as_secs();
                (
                    Reason::HardResetDeferred,
                    format!("The hard reset waits for {wait} s: {why}"),
                )
            }
            Notice::GivenUp(owner, resets, wait) => {
                let wait = wait.as_secs();
                let message = format!(
                    "No hard reset: {resets} of {owner} have not helped, which looks like a bug of the application; the next is possible in {wait} s"
                );
                let said = Reason::HardResetGivenUp.said_of(&series, &message);
                self.events.publish_on(owner.reference(), said);
                (Reason::HardResetGivenUp, message)
            }
            Notice::Refused(why) => (
                Reason::HardResetRefused,
                format!("The hard reset is tried again later: {why}"),
            ),
            Notice::Denied(what) => (Reason::HardResetDenied, format!("No hard reset: {what}")),
            Notice::Failed(why, false) => {
                tracing::warn!(%pod, why, "a hard reset did not work: it is tried again");
                return;
            }
            Notice::Failed(why, true) => (
                Reason::HardResetFailed,
                format!("The hard reset did not work, again, and is tried later: {why}"),
            ),
        };
        let name = reason.name();
        match reason.kind() {
            EventKind::Normal => tracing::info!(%pod, reason = name, "{message}"),
            EventKind::Warning => tracing::warn!(%pod, reason = name, "{message}"),
        }
        self.events
            .publish(pod, uid, reason.said_of(&series, &message));
    }
}
