//! Keeps a container's exit from being seen until the plugin has decided what it means.
//!
//! containerd runs an OCI `poststop` hook after a container's processes are gone and before its status turns EXITED. The
//! [`hook`] asks at the plugin's socket; the [`server`] answers whether to wait. Both sides give up after [`LIMIT`]:
//! containerd ends runc, and with it the hold, after 10 s (docs/design.md).
//!
//! CRI-O runs hooks too late for that. There the [`holder`], a process that the plugin [keeps](keeper), asks in their place.

use std::time::Duration;

pub mod holder;
pub mod hook;
mod hook_copy;
mod hook_path;
mod keeper;
mod server;
mod successor;

pub use hook_copy::{HookCopies, HookDirError, remove_all_but as remove_hooks_but};
pub use hook_path::{HookPathError, check as check_hook_path, check_copy as check_hook_copy};
pub use keeper::Keeper;
pub use server::{HoldDecision, HoldRequest, Server, ServerError};
pub(crate) use successor::FILE as SUCCESSOR_FILE;
pub use successor::Successor;

/// How exits are held on this node.
#[derive(Debug, Clone)]
pub enum Hold {
    /// By a hook, which each container is made with.
    Hook,
    /// By a process that answers for all of them.
    Holder(Keeper),
    /// They are not.
    Nothing,
}

impl Hold {
    /// Who keeps that process.
    #[must_use]
    pub fn keeper(&self) -> Option<&Keeper> {
        match self {
            Self::Holder(keeper) => Some(keeper),
            Self::Hook | Self::Nothing => None,
        }
    }
}

/// How long an exit can be held at the most, from the hook's start.
pub const LIMIT: Duration = Duration::from_secs(8);

/// Two of the words of the protocol. The hook says `<container id> <milliseconds waited>\n`, with the exit code as a third
/// word if it is known, and [`OOM`] as a fourth if that is so, and gets `wait\n`, followed by `go\n` once the exit may be seen;
/// or `go\n` at once.
const WAIT: &str = "wait\n";
const GO: &str = "go\n";
/// The kernel has killed a process of the container because it was out of memory.
const OOM: &str = "oom";
