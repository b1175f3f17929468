//! When a pod is reset, how, and how often at most: the mapping `hardReset` of the configuration.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::Deserialize;
use thiserror::Error;

use crate::policy::FailureAction;

/// Where the control plane's own pods are: never reset, whatever is configured.
const SYSTEM: &str = "kube-system";
/// A budget is so many resets in that time.
pub(super) const HOUR: Duration = Duration::from_hours(1);
/// There is room for so many in an annotation: all of an object have 256 KiB (`TotalAnnotationSizeLimitB`, apimachinery's
/// `pkg/api/validation`), a reset has some 160 bytes.
const MOST_REMEMBERED: u64 = 1000;

/// How pods go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub enum Method {
    /// By the eviction API, which asks the budgets of disruption (PDB).
    #[default]
    Evict,
    /// By a plain deletion, which asks nobody.
    Delete,
}

/// There may be more resets than the Lease has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "hardReset: up to {0} resets would have to be remembered, and there is room for {MOST_REMEMBERED}: lower \
     maxResetsPerHour, windowSeconds or cooldownSeconds"
)]
pub struct TooManyResets(u64);

/// The numbers of hard resets. The defaults are those of enhancements#5734 where it has any.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Terms {
    /// What becomes of pods of Deployments that do not say.
    pub default: FailureAction,
    /// More restarts of one container than that are too many, where the pod does not say.
    pub max_restarts_on_node: u32,
    /// For how long the pod must not have been Ready.
    pub not_ready_seconds: u32,
    /// After running for so long, the restarts of a container are forgotten.
    pub forget_after_seconds: u32,
    /// How pods go.
    pub method: Method,
    /// Namespaces whose pods are never reset, beside `kube-system`.
    pub protected_namespaces: BTreeSet<String>,
    /// Between two resets of pods of one owner, in the whole cluster.
    pub cooldown_seconds: u32,
    /// After so many resets of one owner within the window, no more until that has passed.
    pub max_resets_per_owner: u32,
    /// That window.
    pub window_seconds: u32,
    /// In the whole cluster; one namespace may take half of them.
    pub max_resets_per_hour: u32,
    /// On this node; likewise.
    pub max_resets_per_hour_on_node: u32,
    /// How long the files about resets are kept.
    pub keep_evidence_hours: u32,
}

impl Default for Terms {
    fn default() -> Self {
        Self {
            default: FailureAction::None,
            max_restarts_on_node: 7,
            not_ready_seconds: 600,
            forget_after_seconds: 600,
            method: Method::Evict,
            protected_namespaces: BTreeSet::new(),
            cooldown_seconds: 120,
            max_resets_per_owner: 3,
            window_seconds: 3600,
            max_resets_per_hour: 60,
            max_resets_per_hour_on_node: 10,
            keep_evidence_hours: 168,
        }
    }
}

impl Terms {
    pub(super) fn is_protected(&self, namespace: &str) -> bool {
        namespace == SYSTEM || self.protected_namespaces.contains(namespace)
    }

    pub(super) fn not_ready(&self) -> Duration {
        seconds(self.not_ready_seconds)
    }

    pub(super) fn keep_evidence(&self) -> Duration {
        Duration::from_hours(self.keep_evidence_hours.into())
    }

    /// For how long the cluster remembers a reset.
    pub(super) fn remembered(&self) -> Duration {
        let own = self.window_seconds.max(self.cooldown_seconds);
        seconds(own).max(HOUR)
    }

    /// These, if they can be kept to.
    pub(crate) fn checked(self) -> Result<Self, TooManyResets> {
        let hours = self.remembered().as_secs().div_ceil(HOUR.as_secs());
        let most = hours.saturating_mul(self.max_resets_per_hour.into());
        if most > MOST_REMEMBERED {
            return Err(TooManyResets(most));
        }
        Ok(self)
    }

    pub(super) fn forgotten_after(&self) -> Duration {
        seconds(self.forget_after_seconds)
    }
}

/// Of a budget, what one namespace may take: its tenants must not be able to keep all others waiting.
pub(super) fn share(budget: u32) -> u32 {
    budget.div_ceil(2)
}

fn seconds(seconds: u32) -> Duration {
    Duration::from_secs(seconds.into())
}
