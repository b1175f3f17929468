//! What goes into a restart's machine and what comes out of it.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::ids::{ContainerId, ContainerName, ExitCode};
use crate::plan::{Plan, Way};
use crate::policy::Request;

/// A restart that is disturbed more often than this is left to the kubelet.
pub(super) const MOST_AGAIN: u8 = 3;

/// The name of the placeholder that is no container's: the kubelet ignores it, but when it vanishes it
/// syncs the pod (`pkg/kubelet/pleg/generic.go`, `generateEvents`).
pub(crate) const WAKER: &str = "reprise-waker";

/// How far the restart is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Old containers are killed and their exits held, placeholders are made.
    Down,
    /// The plugin starts new attempts, while the exits of the old ones are held.
    Replay,
    /// The exits are released behind the placeholders; the kubelet has yet to record what it sees.
    Shielded,
    /// Containers that must not be there at the next relist are removed.
    Clear,
    /// The kubelet starts the containers.
    Up,
    /// Nothing is left to do.
    Over,
}

impl Phase {
    /// Whether exits are held in this phase.
    pub(crate) fn is_holding(self, way: Way) -> bool {
        match self {
            Self::Down | Self::Replay => true,
            Self::Clear => way == Way::Kept,
            Self::Shielded | Self::Up | Self::Over => false,
        }
    }
}

/// A restart under way, as it must outlive its process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// How far it was.
    pub phase: Phase,
    /// What it is to do.
    pub plan: Plan,
}

/// What the machine is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// The pod's condition is set, and the kubelet is not ending the pod, as far as can be told in time.
    Announced,
    /// It is the pod's turn to restart.
    Called,
    /// It is not yet: other pods come first.
    Queued,
    /// This container's processes are gone and its exit is held, since then.
    Held(ContainerId, Instant),
    /// Its exit can be seen by the kubelet, or nothing holds it.
    Exited(ContainerId),
    /// An attempt of that container ended with this code; the exit may be held or not. It may come before the
    /// news that it started.
    Ended(ContainerName, ContainerId, Option<ExitCode>),
    /// The old containers can be replayed, or not for this reason.
    Recovered(Result<(), String>),
    /// A new attempt of that container is there, and waits to be started. To make it took so long.
    Made(ContainerName, ContainerId, Duration),
    /// By the pod's status the kubelet has seen these containers, and to it those have started: their startup probes have
    /// succeeded, if they have any.
    Recorded {
        seen: BTreeSet<ContainerId>,
        started: BTreeSet<ContainerId>,
    },
    /// No new attempt of that container could be started, for this reason.
    NotReplayed(ContainerName, String),
    /// What a restart, or a generation, before had asked to be made of that container: this attempt, which is being removed, or
    /// none.
    Stray(ContainerName, Option<ContainerId>),
    /// It is no longer in the runtime.
    Gone(ContainerId),
    /// A placeholder for that container is there. To make it took so long.
    PlaceholderMade(ContainerName, ContainerId, Duration),
    /// A placeholder for that container was not made, and nobody goes on trying.
    NotMade(ContainerName),
    /// A new attempt of that container runs.
    Started(ContainerName, ContainerId),
    /// The postStart hook of that container is over, or others wait for it no longer.
    Hooked(ContainerName),
    /// The pod is being deleted.
    Deleted,
    /// The kubelet has ended the trigger by itself, and starts it again: natively no rule heeds that.
    CalledOff,
    /// Somebody asks for what is under way, so long after it was decided.
    Asked(Request, Duration),
    /// Time has passed; see [`Machine::deadline`].
    Tick,
}

/// What the machine wants done, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Write the plan and the phase to disk before anything that follows.
    Save,
    /// Ask for a turn among the pods of this node that restart, and say with [`Event::Called`] when it has come, and before
    /// that with [`Event::Queued`] if it has not come at once.
    AskForTurn,
    /// Set the pod's condition to this, if it has one (KEP-5532; a container that restarts alone has none, KEP-5307), and ask
    /// before a restart whether the kubelet is ending the pod. Say when that is done with [`Event::Announced`].
    Announce(bool),
    /// Stop this container, within the plan's grace period.
    Kill(ContainerId),
    /// Learn what the old containers were made from, and say so with [`Event::Recovered`].
    Recover,
    /// Make the next attempts of these containers, say so with [`Event::Made`] and start them, or say why not with
    /// [`Event::NotReplayed`].
    Replay(Vec<ContainerName>),
    /// Start this attempt, which another process has made and may be starting.
    Start(ContainerId),
    /// Make a placeholder for this container like this attempt, or the [`WAKER`], which may be like none.
    MakePlaceholder(ContainerName, Option<ContainerId>),
    /// Let these exits be seen.
    Release(Vec<ContainerId>),
    /// Remove this container as soon as its exit has been processed.
    Remove(ContainerId),
    /// Plan the restart anew from what there is now, for the kubelet to start, for this reason: it was disturbed, because
    /// containers were started behind our back, out of order, or what was planned cannot be done, as when a replay fails.
    BeginAnew { disturbed: bool, why: String },
    /// The restart is over; forget it on disk.
    Finish(Outcome),
}

/// How a restart ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All containers have been started again.
    Completed,
    /// An init container failed under `restartPolicy: Never`: the pod fails (KEP-5532, "API").
    InitFailed,
    /// The pod was deleted meanwhile.
    Deleted,
    /// The kubelet has ended the trigger by itself, and nothing else has been ended.
    CalledOff,
    /// The placeholders were not there in time: what the kubelet sees is for it to act on.
    Unshielded,
    /// The kubelet has seen the exit of a container that it never starts again, while it started others: those were stopped,
    /// so that the pod fails.
    MadeToFail,
    /// The kubelet did not start all containers in time; it may still do so.
    TimedOut,
}

impl Outcome {
    pub(crate) const ALL: [Self; 7] = [
        Self::Completed,
        Self::InitFailed,
        Self::Deleted,
        Self::CalledOff,
        Self::Unshielded,
        Self::MadeToFail,
        Self::TimedOut,
    ];

    /// For people and programs: in the pod's condition, the history and the metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Completed => "Restarted",
            Self::InitFailed => "InitFailed",
            Self::Deleted => "PodEnded",
            Self::CalledOff => "CalledOff",
            Self::Unshielded => "Unshielded",
            Self::MadeToFail => "MadeToFail",
            Self::TimedOut => "TimedOut",
        }
    }
}
