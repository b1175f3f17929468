//! Pods of three kinds, one for each way in which the plugin has the kubelet restart them.

use serde_json::json;

use crate::plugin::Phase::{self, Clear, Down, Shielded, Up};
use crate::shape::Shape;

#[derive(Clone, Copy)]
pub(super) struct PodKind {
    pub(super) name: &'static str,
    /// Its `trainer` restarts it with 42.
    pub(super) shape: fn() -> Shape,
    /// What its restart goes through.
    pub(super) phases: &'static [Phase],
}

pub(super) const NEVER: PodKind = PodKind {
    name: "never_pod",
    shape: never,
    phases: &[Down, Up],
};

pub(super) const NEVER_WITH_INITS: PodKind = PodKind {
    name: "never_pod_with_inits",
    shape: never_with_inits,
    phases: &[Down, Shielded, Clear, Up],
};

pub(super) const ALWAYS_WITH_INITS: PodKind = PodKind {
    name: "always_pod_with_inits",
    shape: always_with_inits,
    phases: &[Down, Clear, Up],
};

/// Its exits are held for seconds.
pub(super) const NEVER_WITH_GRACE: PodKind = PodKind {
    name: "never_pod_with_time_to_stop",
    shape: never_with_grace,
    phases: &[Down, Up],
};

pub(super) const ALL: [PodKind; 3] = [NEVER, NEVER_WITH_INITS, ALWAYS_WITH_INITS];

fn never() -> Shape {
    Shape::never()
        .regular("trainer")
        .regular("logger")
        .regular("server")
        .restarts_all("trainer", 42)
        .started_by("Kubelet")
}

fn never_with_grace() -> Shape {
    never()
        .ignoring_term()
        .restarts_pod("trainer", 42)
        .options(&json!({"gracePeriodSeconds": 3}))
}

fn never_with_inits() -> Shape {
    Shape::never()
        .init("fetch")
        .sidecar("proxy")
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42)
        .started_by("Kubelet")
}

fn always_with_inits() -> Shape {
    Shape::always()
        .init("fetch")
        .sidecar("proxy")
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42)
        .started_by("Kubelet")
}
