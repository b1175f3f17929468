//! What can keep a plugin from running.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::plugin::Refusal;

/// Why a [`Stub`](crate::Stub) could not be built, or stopped running.
///
/// A runtime that goes away is not among them: the stub waits for it to come back. The messages say
/// what to do, so show them to whoever starts the plugin.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NriError {
    /// The name is not one that runtimes accept (`CheckPluginName`, `pkg/api/plugin.go`, v0.12.5).
    #[error("plugin name {0:?} is empty or has characters other than A-Z, a-z, 0-9 and -_.+")]
    InvalidName(String),
    /// The index is not two digits (`CheckPluginIndex`, `pkg/api/plugin.go`, v0.12.5).
    #[error("plugin index {0:?} is not two digits")]
    InvalidIndex(String),
    /// The plugin subscribes to nothing, which runtimes take for everything.
    #[error("the plugin subscribes to no event")]
    NoEvents,
    /// There is no socket: the runtime has no NRI, has it switched off, or uses another path.
    #[error(
        "no NRI here: {} does not exist; switch NRI on in the runtime's configuration (containerd \
         before 2.0: `disable = false` under [plugins.\"io.containerd.nri.v1.nri\"]; CRI-O before \
         1.30: `enable_nri = true` under [crio.nri]), and mount the socket's directory if this \
         runs in a container", .path.display()
    )]
    NoSocket {
        /// Where the socket was looked for.
        path: PathBuf,
    },
    /// The socket is there, but this process may not connect to it.
    #[error("not allowed to connect to NRI at {}: run as root, the socket is root's", .path.display())]
    PermissionDenied {
        /// The socket.
        path: PathBuf,
    },
    /// A runtime launched this process, but what it passed on cannot be used.
    #[error("cannot use {variable}={value:?} as the runtime that launched this plugin set it")]
    Launch {
        /// The environment variable at fault.
        variable: &'static str,
        /// Its value, empty if it was not set.
        value: String,
        /// What came of trying.
        #[source]
        source: io::Error,
    },
    /// The runtime did not take the plugin in.
    #[error("the runtime refused to register the plugin: {0}")]
    RegistrationRefused(String),
    /// The plugin did not accept the runtime or its configuration.
    #[error("the plugin refused to be configured: {0}")]
    ConfigurationRefused(Refusal),
}
