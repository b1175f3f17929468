//! Keeps a container's exit from being seen until the plugin has decided what it means.
//!
//! The runtime runs an OCI `poststop` hook after a container's processes are gone and before its
//! status turns EXITED. The [`hook`] asks at the plugin's socket; the [`server`] answers whether to wait.
//! Both sides give up after [`LIMIT`]: containerd ends runc, and with it the hold, after 10 s (docs/design.md).

use std::time::Duration;

pub mod hook;
mod hook_copy;
mod hook_path;
mod server;

pub use hook_copy::{HookCopies, HookDirError, remove_all_but as remove_hooks_but};
pub use hook_path::{HookPathError, check as check_hook_path, check_copy as check_hook_copy};
pub use server::{HoldDecision, HoldRequest, Server, ServerError};

/// How long an exit can be held at the most, from the hook's start.
pub const LIMIT: Duration = Duration::from_secs(8);

/// The three words of the protocol. The hook says `<container id> <milliseconds waited>\n` and gets
/// `wait\n`, followed by `go\n` once the exit may be seen; or `go\n` at once.
const WAIT: &str = "wait\n";
const GO: &str = "go\n";
