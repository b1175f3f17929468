//! What goes into a restart's machine and what comes out of it, and how long each part may take.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ids::{ContainerId, ContainerName, ExitCode};
use crate::restart::plan::Way;

/// From the first hold until everything is let go, whatever is missing. The hooks give up at 8 s; the rest is
/// for the release itself on a busy node.
pub const DOWN_LIMIT: Duration = Duration::from_millis(6500);
/// The kubelet retries a failed sync after 10-15 s, and may itself be away for a while.
pub const RECORD_LIMIT: Duration = Duration::from_secs(600);
/// Removing containers takes milliseconds; a runtime that is restarted takes seconds.
pub const CLEAR_LIMIT: Duration = Duration::from_secs(60);
/// Init containers may be slow. After this the gate no longer keeps any order.
pub const UP_LIMIT: Duration = Duration::from_secs(600);

/// After that long, what the kubelet started while no plugin was there stays: it may have run for hours.
pub const AGAIN_LIMIT: Duration = Duration::from_secs(10);
/// A restart that is disturbed more often than this is left to the kubelet.
pub(super) const MOST_AGAIN: u8 = 3;

/// How far the restart is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Old containers are killed and their exits held, placeholders are made.
    Down,
    /// The exits are released behind the placeholders; the kubelet has yet to record what it sees.
    Shielded,
    /// Containers that must not be there when the kubelet looks again are removed.
    Clear,
    /// The kubelet starts the containers.
    Up,
    /// Nothing is left to do.
    Over,
}

impl Phase {
    /// Whether exits are held in this phase.
    #[must_use]
    pub fn is_holding(self, way: Way) -> bool {
        match self {
            Self::Down => true,
            Self::Clear => way == Way::Kept,
            Self::Shielded | Self::Up | Self::Over => false,
        }
    }
}

/// What the machine is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// This container's processes are gone and its exit is held.
    Held(ContainerId),
    /// Its exit can be seen by the kubelet, or nothing holds it.
    Exited(ContainerId),
    /// An attempt of that container ended with this code; the exit may be held or not. It may come before the
    /// news that it started.
    Ended(ContainerName, ContainerId, Option<ExitCode>),
    /// It is no longer in the runtime.
    Gone(ContainerId),
    /// A placeholder for that container stands.
    PlaceholderMade(ContainerName, ContainerId),
    /// A new attempt of that container runs.
    Started(ContainerName, ContainerId),
    /// The pod is being deleted.
    Deleted,
    /// Time has passed; see [`Machine::deadline`].
    Tick,
}

/// What the machine wants done, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Write the plan and the phase to disk before anything that follows.
    Save,
    /// Stop this container, within the plan's grace period.
    Kill(ContainerId),
    /// Make a placeholder for this container, like its old attempt.
    MakePlaceholder(ContainerName, ContainerId),
    /// Let these exits be seen.
    Release(Vec<ContainerId>),
    /// Remove this container as soon as its exit has been processed.
    Remove(ContainerId),
    /// Containers were started behind our back, out of order: plan the restart anew from what there is now.
    Again,
    /// The restart is over; forget it on disk.
    Finish(Outcome),
}

/// How a restart ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All containers have been started again.
    Completed,
    /// An init container failed under `restartPolicy: Never`: the pod fails (KEP-5532, "API").
    InitFailed,
    /// The pod was deleted meanwhile.
    Deleted,
    /// The kubelet did not start all containers in time; it may still do so.
    TimedOut,
}

/// What the gate says of a container that the kubelet wants to create.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It may be created.
    Admit,
    /// Not yet: the old containers are not out of the way.
    NotYet,
    /// Another container must have started, or completed, before.
    OutOfOrder,
}

/// A container that was found in the runtime when the plugin came back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Its id.
    pub id: ContainerId,
    /// Its container's name.
    pub name: ContainerName,
    /// Whether it is one of our placeholders.
    pub placeholder: bool,
    /// Whether it was created after the restart was decided.
    pub new: bool,
    /// What it is doing.
    pub state: FoundState,
}

/// What a found container is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FoundState {
    /// Created, never started.
    Created,
    /// Running, as far as the runtime shows.
    Running,
    /// Ended, visibly.
    Exited(Option<ExitCode>),
}
