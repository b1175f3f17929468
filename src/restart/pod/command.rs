//! What a pod wants done.

use std::collections::BTreeSet;
use std::path::PathBuf;

use crate::ids::{ContainerId, ContainerName};
use crate::policy::{Action, PolicyError};
use crate::report::Unprotected;
use crate::restart::machine::{Effect, Phase};
use crate::restart::plan::{Plan, RestartId, Trigger};

/// What is to be done about a pod.
#[derive(Debug)]
pub(in crate::restart) enum Command {
    /// What the restart under way wants, one after another.
    Do(Effect),
    /// Remove this container as soon as its exit has been processed.
    Remove(ContainerId),
    /// Stop trying to kill this one: its end is known.
    EndKill(ContainerId),
    /// The hook of this container is missing, which has ended: wait for it while nobody can see the exit, and then call
    /// [`super::Pod::hook_is_missing`].
    AwaitHook(ContainerId),
    /// Learn the exit code of this container, whose hook waits, or let it go.
    AskForCode(ContainerId),
    /// Learn the exit code of this container, which has ended in a restart.
    LearnCode(ContainerId),
    /// Ask the runtime whether this container really runs.
    Verify(ContainerId),
    /// Ask whether the manifest is still there, and then call [`super::Pod::manifest_asked`].
    AskManifest(Trigger, Action, PathBuf),
    /// See to it that it is heard when placeholders are removed: there is no NRI that tells.
    WatchShields,
    /// Say what people should know.
    Say(Saying),
}

/// What people should know.
#[derive(Debug)]
pub(in crate::restart) enum Saying {
    Restarting(Box<Plan>),
    FellBack(RestartId, String),
    BegunAnew(RestartId, u8),
    WentOn(RestartId, Phase),
    NotProtected(BTreeSet<ContainerName>, Unprotected),
    InvalidRules(PolicyError),
}
