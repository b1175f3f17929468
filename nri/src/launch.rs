//! A plugin that the runtime launched itself, from its plugin directory (`/opt/nri/plugins`).

use std::env;
use std::io;
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;

use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

use crate::error::NriError;

const NAME: &str = "NRI_PLUGIN_NAME";
const INDEX: &str = "NRI_PLUGIN_IDX";
const SOCKET: &str = "NRI_PLUGIN_SOCKET";

/// The identity and the connection that a runtime gives to a plugin that it launches
/// (`newLaunchedPlugin`, `pkg/adaptation/plugin.go`, v0.12.5).
///
/// Such a plugin has no other chance: the runtime never launches it again, and kills it when the
/// connection ends. Its output goes nowhere, and its environment has nothing else. The runtime takes
/// index and name from the file's name, `10-exits`, and what [`Plugin::configure`] is given from
/// `10-exits.conf` or `exits.conf` in `/etc/nri/conf.d`.
///
/// ```no_run
/// # use nri::{EventMask, Launched, NriError, Plugin, Stub};
/// # struct Exits;
/// # impl Plugin for Exits {
/// #     fn events(&self) -> EventMask { EventMask::STOP_CONTAINER }
/// # }
/// # fn main() -> Result<(), NriError> {
/// // Launched, or started by anybody else, who may choose.
/// let mut builder = Stub::builder(Exits).name("exits").index("10");
/// if let Some(launched) = Launched::from_env()? {
///     builder = builder.launched(launched);
/// }
/// let stub = builder.build()?;
/// # Ok(())
/// # }
/// ```
///
/// [`Plugin::configure`]: crate::Plugin::configure
#[derive(Debug)]
pub struct Launched {
    pub(crate) name: String,
    pub(crate) index: String,
    pub(crate) connection: UnixStream,
}

impl Launched {
    /// Reads `NRI_PLUGIN_SOCKET`, `NRI_PLUGIN_NAME` and `NRI_PLUGIN_IDX`: nothing if no runtime
    /// launched this process, [`NriError::Launch`] if what it passed on cannot be used.
    pub fn from_env() -> Result<Option<Self>, NriError> {
        Self::from_variables(|variable| env::var(variable).ok())
    }

    pub(crate) fn from_variables(
        get: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, NriError> {
        let Some(socket) = get(SOCKET) else {
            return Ok(None);
        };
        let need = |variable| {
            get(variable).ok_or_else(|| NriError::Launch {
                variable,
                value: String::new(),
                source: io::Error::new(io::ErrorKind::NotFound, "not set"),
            })
        };
        let connection = socket
            .parse::<u16>()
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
            .and_then(|descriptor| inherited(descriptor.into()))
            .map_err(|source| NriError::Launch {
                variable: SOCKET,
                value: socket,
                source,
            })?;
        Ok(Some(Self {
            name: need(NAME)?,
            index: need(INDEX)?,
            connection,
        }))
    }
}

/// A duplicate of a descriptor that this process was started with. To claim the descriptor itself
/// would need unsafe code, since nothing proves that nobody else owns it; to ask the kernel for a
/// duplicate by number does not (Linux 5.6, always allowed on oneself).
fn inherited(descriptor: RawFd) -> io::Result<UnixStream> {
    let this_process = pidfd_open(getpid(), PidfdFlags::empty())?;
    let duplicate = pidfd_getfd(this_process, descriptor, PidfdGetfdFlags::empty())?;
    let connection = UnixStream::from(duplicate);
    // Fails on what is not a socket.
    connection.peer_addr()?;
    Ok(connection)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    fn launched(socket: Option<&str>, index: Option<&str>) -> Result<Option<Launched>, NriError> {
        Launched::from_variables(|variable| match variable {
            NAME => Some("test".into()),
            INDEX => index.map(Into::into),
            SOCKET => socket.map(Into::into),
            _ => None,
        })
    }

    #[test]
    fn a_process_that_no_runtime_launched_has_nothing_to_take() {
        assert!(launched(None, Some("10")).unwrap().is_none());
    }

    #[test]
    fn a_descriptor_that_is_no_socket_is_refused() {
        let file = std::fs::File::open("/dev/null").unwrap();
        for socket in ["three", "-1", &file.as_raw_fd().to_string()] {
            let error = launched(Some(socket), Some("10")).unwrap_err();
            assert!(error.to_string().contains("NRI_PLUGIN_SOCKET"), "{error}");
        }
    }

    #[test]
    fn a_missing_identity_is_named() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let error = launched(Some(&ours.as_raw_fd().to_string()), None).unwrap_err();
        assert!(error.to_string().contains("NRI_PLUGIN_IDX"), "{error}");
    }
}
