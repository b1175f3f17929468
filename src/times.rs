//! How long each part of a restart may take, and how the hold's 8 s ([`exit_hold::LIMIT`]) are spent.
//!
//! ```text
//!  s  0         1         2         3         4         5         6         7         8
//!     |---------|---------|---------|---------|---------|---------|---------|---------|
//!     the trigger exits, and its hook asks                                            the hooks give up
//!     |--------------------------------------------|                        a replay, as planned
//!     |                                            |------------------------|  REST_OF_HOLD: what is being started by then
//!     |------------------------| INITS_LIMIT: what its init containers may have taken last time
//!          |---------------------------------------| ENOUGH_TIME: what must be left of DOWN_LIMIT when the turn comes
//!     |                                            |-------------------|    FALLBACK_TIME: shields, for the kubelet
//!     |                                                      |---------|    SHIELDS_TIME: the guard's, after an undo
//!     |----------------------------------------------------------------|    DOWN_LIMIT: all exits are released
//!     |                                                                |----|  LAST_MOMENT: if only the guard's shields lack
//!     |                                                                     |---------|  a busy node's release
//! ```

use std::time::Duration;

use crate::exit_hold;

/// From the first hold until everything is released, whatever is missing. The hooks give up at 8 s; the rest is
/// for the release itself on a busy node.
pub const DOWN_LIMIT: Duration = Duration::from_millis(6500);
/// How long the exit of a container is held, where others have time to stop, before it is shielded and shown: most stop at once,
/// and what was not shielded is replayed sooner.
pub(crate) const PATIENCE: Duration = Duration::from_millis(500);
/// How long before that a replay falls back: making placeholders takes time.
pub(crate) const FALLBACK_TIME: Duration = Duration::from_secs(2);
/// How much longer than [`DOWN_LIMIT`] the guard's placeholders may take, without which the pod fails.
pub(crate) const LAST_MOMENT: Duration = Duration::from_millis(500);
/// How long a replay whose attempts are being started may go on when it should fall back.
pub(crate) const REST_OF_HOLD: Duration = Duration::from_millis(2500);
/// For the release, and for hooks that a busy node schedules late.
const RELEASE_TIME: Duration = Duration::from_secs(1);
const _: () = {
    let limit = exit_hold::LIMIT.as_millis() - RELEASE_TIME.as_millis();
    let falls_back = DOWN_LIMIT.as_millis() - FALLBACK_TIME.as_millis();
    assert!(DOWN_LIMIT.as_millis() + LAST_MOMENT.as_millis() <= limit);
    assert!(DOWN_LIMIT.as_millis() + KEPT_TIME.as_millis() <= limit);
    assert!(falls_back + REST_OF_HOLD.as_millis() <= limit);
    assert!(INITS_LIMIT.as_millis() < falls_back && falls_back > ENOUGH_TIME.as_millis());
    assert!(SHIELDS_TIME.as_millis() < FALLBACK_TIME.as_millis());
    assert!(OOM_LIMIT.as_millis() + ENOUGH_TIME.as_millis() < DOWN_LIMIT.as_millis());
};

/// How long before everything is released a placeholder that is there is trusted, whether or not the kubelet may yet act on
/// a relist from before it was.
pub(crate) const TRUST_TIME: Duration = Duration::from_millis(100);
/// How long one that is removed in the last moment takes to make again: the hooks wait for longer than this.
pub(crate) const SHIELD_TIME: Duration = Duration::from_millis(500);
/// How much longer the regular containers' exits are held where the kubelet restarts them, while what goes first is removed.
pub(crate) const KEPT_TIME: Duration = Duration::from_millis(500);
/// How long before the exits are released the undo of a replay must be through: the guard's placeholders are still to be
/// made.
pub(crate) const SHIELDS_TIME: Duration = Duration::from_secs(1);

/// While exits are held, the kubelet takes dead containers for living ones, and the hold ends: init containers that
/// took longer last time are left to it.
pub(crate) const INITS_LIMIT: Duration = Duration::from_millis(2500);
/// What must be left of [`DOWN_LIMIT`] to restart a pod whose turn has come. With less, what has ended of it is shown behind
/// shields before anything else ends.
pub(crate) const ENOUGH_TIME: Duration = Duration::from_secs(4);
/// How long a replay whose attempts are being started may go on when exits can be held no longer: calls to the runtime
/// may take 10 s.
pub(crate) const IN_FLIGHT_LIMIT: Duration = Duration::from_secs(6);
/// What the killing, making and starting of one pod's containers takes where a node can bear more of it at once, and where it
/// should bear less: exits are held meanwhile.
pub(crate) const QUICK_TURN: Duration = Duration::from_millis(2500);
pub(crate) const SLOW_TURN: Duration = Duration::from_secs(4);
/// How long a turn waits for shields of pods that have none yet.
pub(crate) const EXPOSED_LIMIT: Duration = Duration::from_secs(3);
/// How long a pod waits for its turn, or for its attempts, which shield the exits before them, to be started: hundreds of
/// pods that restart at once.
pub(crate) const BURST_LIMIT: Duration = Duration::from_mins(3);

/// What vanishes wakes the kubelet only if it had been seen to run (`generateEvents`, pkg/kubelet/pleg/generic.go). It
/// relists a second after it has finished the relist before, from 1.36 on also after each sync that started something.
/// Where that takes longer, it sees it in its next sync: up to 15 s after one that failed.
pub(crate) const RELIST_INTERVAL: Duration = Duration::from_millis(1500);
/// The kubelet lists a pod's containers and then asks for the state of each (`getPodContainerStatuses`,
/// pkg/kubelet/kuberuntime). If it had listed before what shields an exit was there, and asked after the release, it would
/// see an exit that nothing shields, or nothing of a container that was removed. More than 1.5 s were seen where the runtime
/// had a fifth of a core for fifteen pods at once. No exit is held meanwhile: what shields those that are to be shown is waited
/// for by [`time_of_shielding`].
pub(crate) const LONGEST_RELIST: Duration = Duration::from_secs(4);
/// A kubelet that has other pods to look after takes longer than a runtime that has not: 120 ms were seen where making
/// a placeholder took 25.
const SHORTEST_RELIST: Duration = Duration::from_millis(250);
/// How many times as long as making a container: half a second was seen where that took 300 ms.
const RELIST_PER_MAKING: u32 = 3;
/// Where an attempt takes no longer than this to make, a relist takes as long as it usually does. Where it takes longer, the
/// kubelet is believed to have listed what hides an exit when the pod's status in the API says so, and after the other.
const USUAL_MAKING: Duration = Duration::from_millis(150);
pub(crate) const LONGEST_RECORDING: Duration = Duration::from_secs(4);
/// From the start of a sidecar to the creation of the next container in one sync of the kubelet. Less than it took to
/// create and start the sidecar, and on any node between these two.
const SHORTEST_STEP: Duration = Duration::from_millis(100);
const LONGEST_STEP: Duration = Duration::from_millis(750);

/// How long a kubelet is silent that has something to start before it is woken: longer than it takes to act on what it has seen,
/// and shorter than it waits after a sync that failed (`backOffPeriod`, pkg/kubelet/kubelet.go: 10 s, and half as much again),
/// which the gate may have refused a moment too early.
pub(crate) const NUDGE_INTERVAL: Duration = Duration::from_secs(6);
/// The kubelet's first wait before it starts a container again that has exited twice (`containerBackOffPeriod` and
/// `initialBackOff`, pkg/kubelet/kubelet.go).
pub(crate) const FIRST_BACK_OFF: Duration = Duration::from_secs(10);
/// How often it is asked whether the kubelet is ending a pod whose containers stop.
pub(crate) const ENDING_INTERVAL: Duration = Duration::from_secs(10);
/// How long the next container waits for a postStart hook. The kubelet waits for ever, and holds no exits meanwhile.
pub(crate) const POST_START_LIMIT: Duration = Duration::from_mins(1);
/// How long a plugin that comes back waits for the spec of a pod whose hooks it is to run.
pub(crate) const SPEC_LIMIT: Duration = Duration::from_secs(2);
/// The kubelet retries a failed sync after 10-15 s, and may itself be away for a while.
pub(crate) const RECORD_LIMIT: Duration = Duration::from_mins(10);
/// Removing containers takes milliseconds; a runtime that is restarted takes seconds.
pub(crate) const CLEAR_LIMIT: Duration = Duration::from_mins(1);
/// Init containers may be slow. After this the gate no longer keeps any order.
pub(crate) const UP_LIMIT: Duration = Duration::from_mins(10);
/// How long after the decision, and the time to stop, a plugin that comes back begins anew where containers were started behind
/// its back. After that what the kubelet started stays: it may have run for hours.
pub(crate) const AGAIN_LIMIT: Duration = Duration::from_secs(10);
/// The same where others still run that were to end, or have not been started again: half of a pod helps nobody.
pub(crate) const HALVED_LIMIT: Duration = Duration::from_mins(1);

/// An exit that no hook has announced by then may not be held: the container was made before the plugin, or its hook did
/// not run. On a busy node the hook may come even later.
pub(crate) const HOOK_LIMIT: Duration = Duration::from_secs(1);
/// How often the runtime is asked whether an exit whose hook is late can be seen.
pub(crate) const HOOK_INTERVAL: Duration = Duration::from_millis(200);
/// The exit event is sent before the hook runs; one that is this late was lost, or came before this process.
pub(crate) const EVENT_LIMIT: Duration = Duration::from_millis(300);
/// How much later an exit by SIGKILL is judged because the runtime may have yet to tell that the container was out of memory,
/// and between two questions. Its shim tells of both at about the same moment, before the hook runs.
pub(crate) const OOM_LIMIT: Duration = Duration::from_millis(300);
pub(crate) const OOM_INTERVAL: Duration = Duration::from_millis(50);
/// What is done between the decision and the first kill may take that long, and is none of the time that containers have to stop:
/// a record on a slow disk, and an API server that is asked what the kubelet is ending.
pub(crate) const LONGEST_ANNOUNCEMENT: Duration = Duration::from_secs(3);
/// How long the kills wait for the pod's condition to be set.
pub(crate) const ANNOUNCE_LIMIT: Duration = Duration::from_millis(150);
/// How often the runtime is asked about a container of whose removal, or end, nobody would tell.
pub(crate) const UNTOLD_INTERVAL: Duration = Duration::from_millis(200);
/// Between two tries of a call that failed.
pub(crate) const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// How soon an attempt is asked for again whose name the runtime has reserved for somebody else, who is being refused.
pub(crate) const RESERVED_INTERVAL: Duration = Duration::from_millis(20);
/// For how long. Whoever has the name after that keeps it.
pub(crate) const RESERVED_LIMIT: Duration = Duration::from_secs(3);
/// The least that a container has to stop, whatever others before it took (`minimumGracePeriodInSeconds`,
/// `pkg/kubelet/kuberuntime/kuberuntime_container.go`).
pub(crate) const SHORTEST_GRACE: Duration = Duration::from_secs(2);
/// In which the runtime has sent a stop signal that it was asked for, and how soon it is asked once more.
pub(crate) const SIGNAL_LIMIT: Duration = Duration::from_secs(2);
pub(crate) const SIGNAL_INTERVAL: Duration = Duration::from_secs(5);
/// In which what the kubelet was let create has started.
pub(crate) const STARTS_LIMIT: Duration = Duration::from_secs(6);
/// The runtime's answer where it is to kill a container.
pub(crate) const STOP_LIMIT: Duration = Duration::from_secs(10);
/// In which conmon writes down what a placeholder has ended with. CRI-O looks for it when it is to remove it, and next half a
/// second later (`waitForExitFile`, `internal/oci/runtime_oci.go` 1.36).
pub(crate) const NOTED_LIMIT: Duration = Duration::from_millis(60);
/// How long one removal is tried before it is tried afresh.
pub(crate) const REMOVE_LIMIT: Duration = Duration::from_secs(30);
/// How long a call counts as one of those at once: where it waits for a container to end, the work is done by then.
pub(crate) const TURN: Duration = Duration::from_millis(250);
/// How long anybody waits for a disk. Exits are held meanwhile.
pub(crate) const DISK_LIMIT: Duration = Duration::from_secs(1);

/// How long the kubelet's relist of one pod may take on a node where making a container took so long.
pub(crate) fn time_of_relist(making: Duration) -> Duration {
    (RELIST_PER_MAKING * making).clamp(SHORTEST_RELIST, LONGEST_RELIST)
}

/// How long an exit is held after what shields it was made, which took so long. The pod's status does not show it before
/// anything has been released, and where making it takes long, other things are slower still.
pub(crate) fn time_of_shielding(making: Duration) -> Duration {
    if making > USUAL_MAKING {
        (2 * RELIST_PER_MAKING * making).min(LONGEST_RECORDING)
    } else {
        time_of_relist(making)
    }
}

/// How long the pod's status is waited for to show an attempt that took so long to make.
pub(crate) fn time_of_recording(making: Duration) -> Duration {
    if making > USUAL_MAKING {
        LONGEST_RECORDING
    } else {
        time_of_relist(making)
    }
}

/// How soon after a sidecar's start, which took so long, the kubelet may go on in the sync that started it. For its
/// startup probe to succeed it takes a relist, the probe, and another relist: a second apart until 1.35; from 1.36 on the
/// first follows the sync, and the second may come at any time after it (`PLEGOnDemandRelist`).
pub(crate) fn time_of_step(start: Duration) -> Duration {
    start.clamp(SHORTEST_STEP, LONGEST_STEP)
}
