//! What goes into a restart's machine and what comes out of it, and how long each part may take.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ids::{ContainerId, ContainerName, ExitCode};
use crate::node::Maker;
use crate::restart::plan::Way;

/// From the first hold until everything is let go, whatever is missing. The hooks give up at 8 s; the rest is
/// for the release itself on a busy node.
pub const DOWN_LIMIT: Duration = Duration::from_millis(6500);
/// How long before that a replay gives up: making placeholders takes time.
pub const FALLBACK_TIME: Duration = Duration::from_secs(2);
/// How much longer than [`DOWN_LIMIT`] the guard's placeholders may take, without which the pod fails: a second before
/// the hooks give up.
pub const LAST_MOMENT: Duration = Duration::from_millis(500);
/// How long before everything is let go a placeholder that stands is told of, whether or not the kubelet may yet act on a
/// relist from before it was there.
pub(super) const TELL_TIME: Duration = Duration::from_millis(100);
/// How long one that is removed in the last moment takes to make again: the hooks wait for longer than this.
pub const SHIELD_TIME: Duration = Duration::from_millis(500);
/// How long a replay whose attempts are being started may go on when it should give up: a second before the hooks do.
pub const REST_OF_HOLD: Duration = Duration::from_millis(2500);
/// How long a replay whose attempts are being started may go on when exits can be held no longer: calls to the runtime
/// may take 10 s.
pub const IN_FLIGHT_LIMIT: Duration = Duration::from_secs(6);
/// How long attempts that shield the exits before them may wait to be started: hundreds of pods that restart at once.
pub const BURST_LIMIT: Duration = Duration::from_mins(1);
/// The kubelet lists a pod's containers and then asks for the state of each (`getPodContainerStatuses`,
/// pkg/kubelet/kuberuntime). If it had listed before what shields an exit was there, and asked after the release, it would
/// see an exit that nothing shields, or nothing of a container that was removed. On a busy node that takes it this.
const LONGEST_RELIST: Duration = Duration::from_millis(1500);
/// A kubelet that has other pods to look after takes longer than a runtime that has not: 120 ms were seen where making
/// a placeholder took 25.
const SHORTEST_RELIST: Duration = Duration::from_millis(250);
/// How many times as long as making a container: half a second was seen where that took 300 ms.
const RELIST_PER_MAKING: u32 = 3;
/// What vanishes wakes the kubelet only if it had been seen to run (`generateEvents`, pkg/kubelet/pleg/generic.go). It
/// relists a second after it has finished the relist before, from 1.36 on also after each sync that started something.
/// Where that takes longer, the patch of the pod's condition wakes it.
pub const RELIST_INTERVAL: Duration = Duration::from_millis(1500);
/// The kubelet retries a failed sync after 10-15 s, and may itself be away for a while.
pub const RECORD_LIMIT: Duration = Duration::from_mins(10);
/// Removing containers takes milliseconds; a runtime that is restarted takes seconds.
pub const CLEAR_LIMIT: Duration = Duration::from_mins(1);
/// From the start of a sidecar to the creation of the next container in one sync of the kubelet. Less than it took to
/// create and start the sidecar, and on any node between these two.
const SHORTEST_STEP: Duration = Duration::from_millis(100);
const LONGEST_STEP: Duration = Duration::from_millis(750);
/// Init containers may be slow. After this the gate no longer keeps any order.
pub const UP_LIMIT: Duration = Duration::from_mins(10);

/// After that long, what the kubelet started while no plugin was there stays: it may have run for hours.
pub const AGAIN_LIMIT: Duration = Duration::from_secs(10);
/// A restart that is disturbed more often than this is left to the kubelet.
pub(super) const MOST_AGAIN: u8 = 3;

/// The name of the placeholder that is no container's: the kubelet ignores it, but when it vanishes it
/// syncs the pod (`pkg/kubelet/pleg/generic.go`, `generateEvents`).
pub const WAKER: &str = "reprise-waker";

/// How long the kubelet's relist of one pod may take on a node where making a container took so long.
#[must_use]
pub fn time_of_relist(making: Duration) -> Duration {
    (RELIST_PER_MAKING * making).clamp(SHORTEST_RELIST, LONGEST_RELIST)
}

/// How soon after a sidecar's start, which took so long, the kubelet may go on in the sync that started it. For its
/// startup probe to succeed it takes a relist, the probe, and another relist: a second apart until 1.35; from 1.36 on the
/// first follows the sync, and the second may come at any time after it (`PLEGOnDemandRelist`).
#[must_use]
pub(super) fn time_of_step(start: Duration) -> Duration {
    start.clamp(SHORTEST_STEP, LONGEST_STEP)
}

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
            Self::Down | Self::Replay => true,
            Self::Clear => way == Way::Kept,
            Self::Shielded | Self::Up | Self::Over => false,
        }
    }
}

/// What the machine is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The pod's condition is set, or will not be in time.
    Announced,
    /// This container's processes are gone and its exit is held.
    Held(ContainerId),
    /// Its exit can be seen by the kubelet, or nothing holds it.
    Exited(ContainerId),
    /// An attempt of that container ended with this code; the exit may be held or not. It may come before the
    /// news that it started.
    Ended(ContainerName, ContainerId, Option<ExitCode>),
    /// The old containers can be replayed, or not for this reason.
    Recovered(Result<(), String>),
    /// A new attempt of that container is there, and waits to be started. To make it took so long.
    Made(ContainerName, ContainerId, Duration),
    /// No new attempt of that container could be started, for this reason.
    NotReplayed(ContainerName, String),
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
    /// Set the pod's condition to this, and say when that is done with [`Event::Announced`].
    Announce(bool),
    /// Stop this container, within the plan's grace period.
    Kill(ContainerId),
    /// Learn what the old containers were made from, and say so with [`Event::Recovered`].
    Recover,
    /// Make the next attempts of these containers, say so with [`Event::Made`] and start them, or say why not with
    /// [`Event::NotReplayed`].
    Replay(Vec<ContainerName>),
    /// Make a placeholder for this container, or the [`WAKER`], like this attempt.
    MakePlaceholder(ContainerName, ContainerId),
    /// Let these exits be seen.
    Release(Vec<ContainerId>),
    /// Remove this container as soon as its exit has been processed.
    Remove(ContainerId),
    /// Containers were started behind our back, out of order: plan the restart anew from what there is now.
    Again,
    /// The replay has failed for this reason: plan the restart anew from what there is now, for the kubelet to start.
    HandOver(String),
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
    /// The placeholders were not there in time: what the kubelet sees is for it to act on.
    Unshielded,
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
    /// Not yet: the pod restarts too often.
    BackOff,
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
    /// Who made it.
    pub maker: Maker,
    /// When it was created: nanoseconds since the Unix epoch.
    pub created_at: i64,
    /// Whether that was after the restart was decided.
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
