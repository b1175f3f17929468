//! What a pod wants done.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::Timings;
use crate::back_off::Past;
use crate::ids::{ContainerId, ContainerName, ExitCode};
use crate::kube::PodSpec;
use crate::plan::{Plan, RestartId, Trigger};
use crate::policy::{Action, PolicyError, RequestError};
use crate::replay::ReplayBlocker;
use crate::restart::machine::{Effect, Record};

/// What is to be done about a pod.
#[derive(Debug)]
pub(crate) enum Command {
    /// What the restart under way wants, one after another.
    Do(Order),
    /// Stop this container at once.
    Kill(ContainerId),
    /// Remove this container as soon as its exit has been processed.
    Remove(ContainerId),
    /// Stop trying to kill this one: its end is known.
    EndKill(ContainerId),
    /// The hook of this container is missing, which has ended: wait for it while nobody can see the exit, and then call
    /// [`super::Pod::hook_is_missing`].
    AwaitHook(ContainerId),
    /// Learn the exit code of this container, which has ended, or call [`super::Pod::code_is_unknown`].
    LearnCode(ContainerId),
    /// Learn whether the kernel has killed a process of this container, which has ended, because it was out of memory, and then
    /// call [`super::Pod::oom_told`].
    LearnOom(ContainerId),
    /// Ask the runtime whether this container really runs.
    Verify(ContainerId),
    /// Ask whether the manifest is still there, and then call [`super::Pod::manifest_asked`].
    AskManifest(Trigger, Action, PathBuf),
    /// See to it that it is heard what becomes of this container, which is made and not started: nobody tells.
    Watch(ContainerId),
    /// Say what people should know.
    Say(Saying),
}

/// What a restart wants, and how it was by then.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) effect: Effect,
    /// What must outlive the plugin.
    pub(crate) record: Arc<Record>,
    /// When the container was made whose exit is the trigger: nanoseconds since the Unix epoch.
    pub(crate) trigger_made_at: i64,
    /// When its exit was known: milliseconds since the Unix epoch.
    pub(crate) trigger_known_at_ms: u64,
    /// What the pod's containers are to be, if the API server has told.
    pub(crate) spec: Option<Arc<PodSpec>>,
}

/// A restart that is over.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) plan: Plan,
    /// The pod's restarts so far, with this one.
    pub(crate) past: Past,
    /// When its trigger's exit was held, or it was asked for: milliseconds since the Unix epoch.
    pub(crate) began_at_ms: u64,
    /// How long it has waited because the pod restarts too often.
    pub(crate) waited: Duration,
    /// When it came to what, as far as this process has seen it.
    pub(crate) timings: Timings,
    /// Containers that are neither running again nor completed, for a log line.
    pub(crate) waiting_for: Vec<ContainerName>,
}

/// What people should know.
#[derive(Debug)]
pub(crate) enum Saying {
    /// The restart that begins is left to the kubelet.
    NotReplayed(ReplayBlocker),
    Restarting(Box<Plan>),
    BegunAnew(Box<BegunAnew>),
    /// A container with rules has failed with this, and none matches.
    Unmatched(ContainerName, ExitCode),
    Ending,
    /// The exits of these cannot be held.
    NotProtected(BTreeSet<ContainerName>),
    InvalidRules(PolicyError),
    InvalidRequest(RequestError),
    /// These restart their pod whoever kills them.
    KillsRestart(BTreeSet<ContainerName>),
}

/// A restart that begins anew, for the kubelet to start.
#[derive(Debug)]
pub(crate) struct BegunAnew {
    pub(crate) restart: RestartId,
    /// How often it had before because it was disturbed.
    pub(crate) again: u8,
    /// Whether it is disturbed; else what was planned cannot be done.
    pub(crate) disturbed: bool,
    pub(crate) why: String,
}
