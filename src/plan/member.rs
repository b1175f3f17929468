//! A container as it takes part in a restart, and what the kubelet would make of its exits.

use serde::{Deserialize, Serialize};

use crate::ids::{ContainerId, ContainerName, ExitCode};
use crate::kube::{ContainerKind, RestartPolicy};

/// A container's newest attempt when the restart was decided.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Old {
    /// Its id.
    pub id: ContainerId,
    /// Its exit code; `None` while it ran.
    pub exit: Option<ExitCode>,
}

/// A container of the pod that takes part in the restart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct Member {
    /// Its name.
    pub name: ContainerName,
    /// What it is to the kubelet.
    pub kind: ContainerKind,
    /// By what the kubelet decides whether it starts again: its own restart policy where this kubelet has such
    /// (KEP-5307), else the pod's.
    pub restart_policy: RestartPolicy,
    /// Its newest attempt; `None` if it was never created.
    pub old: Option<Old>,
    /// Whether that one was made without our hook: its exit is seen at once.
    pub unhooked: bool,
    /// Whether the kubelet has just started that one, in the middle of this restart and without a hook: it has nothing to
    /// lose by being killed at once, and its exit would be seen if it were not shielded before.
    #[serde(default)]
    pub at_once: bool,
    /// Its attempts before that one, if the runtime still has any: where the newest is removed, they would be
    /// taken for it.
    pub older: Vec<ContainerId>,
    /// Whether it has a startup probe, which the containers after a sidecar wait for.
    pub startup_probe: bool,
    /// Whether it has a postStart hook, which the containers after it wait for.
    #[serde(default)]
    pub post_start: bool,
    /// Whether it ran when the restart was decided, or has asked for it: it is to run again, whatever it has come to in a
    /// generation before this one.
    #[serde(default)]
    pub is_to_run: bool,
    /// Whether it had ended by itself when the restart was decided, which nobody has seen yet, and with a success as far as is
    /// known.
    #[serde(default)]
    pub may_have_succeeded: bool,
    /// Whether the kubelet has recorded that it ended for good, and that one runs nevertheless, or the next one will: while it
    /// sees it run, or wait, it records nothing of the pod (`checkContainerStateTransition`, `pkg/kubelet/status/status_manager.go`).
    #[serde(default)]
    pub runs_unrecorded: bool,
    /// How many placeholders shield it.
    pub placeholders: u8,
}

impl Old {
    /// What it exited with, where that was known.
    pub(crate) fn code(&self) -> Option<ExitCode> {
        self.exit.filter(|code| *code != ExitCode::UNKNOWN)
    }
}

impl Member {
    /// Its newest attempt.
    pub(crate) fn old_id(&self) -> Option<&ContainerId> {
        self.old.as_ref().map(|old| &old.id)
    }

    /// Whether that attempt of it was there when the restart was decided.
    pub(crate) fn knew(&self, id: &ContainerId) -> bool {
        self.old_id() == Some(id) || self.older.contains(id)
    }

    pub(super) fn had_ended(&self) -> bool {
        self.exit().is_some()
    }

    /// Whether it had ended for good, and does not wait for the kubelet to start it again.
    pub(crate) fn had_completed(&self) -> bool {
        self.exit()
            .is_some_and(|code| !self.is_restarted_after(code))
    }

    /// Whether the kubelet records nothing of the pod when this one runs again.
    pub(crate) fn would_run_unrecorded(&self) -> bool {
        self.runs_unrecorded || (self.had_completed() && !self.is_to_run)
    }

    /// Whether the kubelet leaves it as it is when it has ended with this code.
    pub(crate) fn stays_ended_after(&self, code: ExitCode) -> bool {
        let completed = self.kind == ContainerKind::Init && code == ExitCode::SUCCESS;
        completed || !self.is_restarted_after(code)
    }

    pub(crate) fn exit(&self) -> Option<ExitCode> {
        self.old.as_ref()?.exit
    }

    /// Whether the pod would fail if this init container were seen to have ended, with that code as far as it is known.
    pub(crate) fn may_fail_pod(&self, code: Option<ExitCode>) -> bool {
        let fails = self.old.is_some() && code != Some(ExitCode::SUCCESS);
        fails && self.restart_policy == RestartPolicy::Never
    }

    /// Whether the kubelet must find no regular container to start the others after it: sidecars it starts by itself, but
    /// without waiting for their startup probes.
    pub(super) fn starts_in_order(&self) -> bool {
        match self.kind {
            ContainerKind::Init => true,
            ContainerKind::Sidecar => self.startup_probe,
            ContainerKind::Regular => false,
        }
    }

    pub(crate) fn was_running(&self) -> bool {
        self.old.as_ref().is_some_and(|old| old.exit.is_none())
    }

    pub(super) fn runs_recorded(&self) -> bool {
        self.was_running() && !self.runs_unrecorded
    }

    /// Whether the kubelet starts it again by itself when it ends with this code
    /// (`pkg/kubelet/container/helpers.go`, `ShouldContainerBeRestarted`).
    pub(crate) fn is_restarted_after(&self, code: ExitCode) -> bool {
        match self.kind {
            ContainerKind::Sidecar => true,
            // It has completed (KEP-5307: init containers restart "until it succeeds").
            ContainerKind::Init if code == ExitCode::SUCCESS => true,
            ContainerKind::Init | ContainerKind::Regular => match self.restart_policy {
                RestartPolicy::Always => true,
                RestartPolicy::OnFailure => code != ExitCode::SUCCESS,
                RestartPolicy::Never => false,
            },
        }
    }
}
