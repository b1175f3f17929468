//! Runs a plugin: connects it to the runtime, and again whenever the runtime comes back.

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::UnixStream;
use tokio::time::sleep;
use tracing::{debug, error, info, warn};

use crate::error::NriError;
use crate::launch::Launched;
use crate::plugin::Plugin;
use crate::session::{self, Ended, Identity};

/// Where runtimes listen unless configured otherwise (`pkg/api/plugin.go`, v0.12.5). The runtime
/// makes the socket anew when it starts: in a container, mount its directory.
pub const DEFAULT_SOCKET: &str = "/var/run/nri/nri.sock";

/// The pause before the first attempt to connect again, and the longest one.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A connection that lasted this long was a good one: what ended it is a new outage. One that keeps
/// being dropped sooner must not be made again at once each time, as the node's containers wait
/// while a plugin connects.
const STEADY: Duration = Duration::from_secs(30);

/// Runs a [`Plugin`].
///
/// ```no_run
/// # use nri::{EventMask, NriError, Plugin, Stub};
/// # struct Exits;
/// # impl Plugin for Exits {
/// #     fn events(&self) -> EventMask { EventMask::STOP_CONTAINER }
/// # }
/// # async fn run() -> Result<(), NriError> {
/// let stub = Stub::builder(Exits).name("exits").index("10").build()?;
/// let shutdown = async {
///     // Without signals, until it is killed.
///     let _ = tokio::signal::ctrl_c().await;
/// };
/// stub.run(shutdown).await
/// # }
/// ```
#[derive(Debug)]
pub struct Stub<P> {
    plugin: Arc<P>,
    identity: Identity,
    origin: Origin,
}

/// Where the connection comes from.
#[derive(Debug)]
enum Origin {
    Socket(PathBuf),
    Launched(std::os::unix::net::UnixStream),
}

/// Sets up a [`Stub`].
///
/// ```
/// # use nri::{EventMask, NriError, Plugin, Stub};
/// # struct Exits;
/// # impl Plugin for Exits {
/// #     fn events(&self) -> EventMask { EventMask::STOP_CONTAINER }
/// # }
/// let builder = Stub::builder(Exits).name("exits");
/// let stub = builder.index("10").socket("/run/nri/nri.sock").build();
/// assert!(stub.is_ok());
///
/// let nameless = Stub::builder(Exits).build();
/// assert!(matches!(nameless, Err(NriError::InvalidName(_))));
/// ```
#[derive(Debug)]
pub struct StubBuilder<P> {
    stub: Stub<P>,
}

impl<P: Plugin> Stub<P> {
    /// Begins to set up a stub for `plugin`, by default at [`DEFAULT_SOCKET`] with index 00.
    pub fn builder(plugin: impl Into<Arc<P>>) -> StubBuilder<P> {
        StubBuilder {
            stub: Self {
                plugin: plugin.into(),
                identity: Identity {
                    name: String::new(),
                    index: "00".into(),
                },
                origin: Origin::Socket(DEFAULT_SOCKET.into()),
            },
        }
    }

    /// Runs the plugin until `shutdown` completes.
    ///
    /// A plugin that connects to a socket stays: when the runtime goes away, the stub tries until it
    /// is back. It only fails if the plugin refuses its configuration, or if, before there was any
    /// connection, the socket is missing or forbidden, or the runtime refuses the plugin. A plugin
    /// that was launched ends with its connection.
    ///
    /// To drop the future closes the connection too. Calls of the plugin that have begun are not cut
    /// off by either.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<(), NriError> {
        let Self {
            plugin,
            identity,
            origin,
        } = self;
        let serve = async {
            match origin {
                Origin::Socket(path) => serve(&path, &identity, &plugin).await,
                Origin::Launched(connection) => serve_once(connection, &identity, &plugin).await,
            }
        };
        tokio::select! {
            biased;
            () = shutdown => Ok(()),
            result = serve => result,
        }
    }
}

impl<P: Plugin> StubBuilder<P> {
    /// The plugin's name, which has none by default: ASCII letters, digits, and `-_.+`.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.stub.identity.name = name.into();
        self
    }

    /// The plugin's index, two digits, by default `00`: runtimes call plugins in its order.
    #[must_use]
    pub fn index(mut self, index: impl Into<String>) -> Self {
        self.stub.identity.index = index.into();
        self
    }

    /// The runtime's socket, by default [`DEFAULT_SOCKET`].
    #[must_use]
    pub fn socket(mut self, path: impl Into<PathBuf>) -> Self {
        self.stub.origin = Origin::Socket(path.into());
        self
    }

    /// Uses the connection, the name, and the index that the runtime gave to this process.
    #[must_use]
    pub fn launched(mut self, launched: Launched) -> Self {
        self.stub.identity = Identity {
            name: launched.name,
            index: launched.index,
        };
        self.stub.origin = Origin::Launched(launched.connection);
        self
    }

    /// Checks what a runtime would refuse: [`NriError::InvalidName`], [`NriError::InvalidIndex`],
    /// [`NriError::NoEvents`].
    pub fn build(self) -> Result<Stub<P>, NriError> {
        let Identity { name, index } = &self.stub.identity;
        let fits = |c: char| c.is_ascii_alphanumeric() || "-_.+".contains(c);
        if name.is_empty() || !name.chars().all(fits) {
            return Err(NriError::InvalidName(name.clone()));
        }
        if index.len() != 2 || !index.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(NriError::InvalidIndex(index.clone()));
        }
        if self.stub.plugin.events().is_empty() {
            return Err(NriError::NoEvents);
        }
        Ok(self.stub)
    }
}

async fn serve_once<P: Plugin>(
    connection: std::os::unix::net::UnixStream,
    identity: &Identity,
    plugin: &Arc<P>,
) -> Result<(), NriError> {
    let trunk = connection
        .set_nonblocking(true)
        .and_then(|()| UnixStream::from_std(connection))
        .map_err(|source| NriError::Launch {
            variable: "NRI_PLUGIN_SOCKET",
            value: String::new(),
            source,
        })?;
    match session::run(trunk, identity, plugin).await {
        Ended::RegistrationRefused(reason) => Err(NriError::RegistrationRefused(reason)),
        Ended::ConfigurationRefused(refusal) => Err(NriError::ConfigurationRefused(refusal)),
        Ended::Closed { why, .. } => {
            info!(reason = %why, "the connection to the runtime that launched this plugin ended");
            Ok(())
        }
    }
}

/// Never completes but with what no second attempt can mend.
async fn serve<P: Plugin>(
    path: &Path,
    identity: &Identity,
    plugin: &Arc<P>,
) -> Result<(), NriError> {
    // Whether the runtime has been there, and did not refuse the plugin.
    let mut met = false;
    let mut outage = Outage::new();
    loop {
        plugin.connecting().await;
        let trunk = match UnixStream::connect(path).await {
            Ok(trunk) => trunk,
            Err(error) => match fatal(path, &error) {
                Some(fatal) if !met => return Err(fatal),
                _ => {
                    outage.goes_on(&error.to_string()).await;
                    continue;
                }
            },
        };
        let begin = Instant::now();
        match session::run(trunk, identity, plugin).await {
            Ended::ConfigurationRefused(refusal) => {
                return Err(NriError::ConfigurationRefused(refusal));
            }
            Ended::RegistrationRefused(reason) if !met => {
                return Err(NriError::RegistrationRefused(reason));
            }
            Ended::RegistrationRefused(reason) => outage.refused(&reason).await,
            Ended::Closed { why, synchronized } => {
                met = true;
                if synchronized {
                    outage.was_over(begin.elapsed());
                    disconnected(plugin).await;
                }
                outage.goes_on(&why.to_string()).await;
            }
        }
    }
}

/// In a task of its own for the same reasons as any call of the plugin.
async fn disconnected<P: Plugin>(plugin: &Arc<P>) {
    let plugin = Arc::clone(plugin);
    if let Err(panic) = tokio::spawn(async move { plugin.disconnected().await }).await {
        error!(%panic, "the plugin failed to handle the lost connection");
    }
}

/// A time without a runtime: when to try again, and what to say meanwhile.
struct Outage {
    pause: Duration,
    told: bool,
    refusal: Option<String>,
}

impl Outage {
    fn new() -> Self {
        Self {
            pause: FIRST_PAUSE,
            told: false,
            refusal: None,
        }
    }

    /// There was a connection in between, for so long.
    fn was_over(&mut self, connected: Duration) {
        let pause = self.pause;
        *self = Self::new();
        if connected < STEADY {
            self.pause = pause;
        }
    }

    /// Waits until it is time to try again. Only the first attempt of an outage is worth a warning.
    async fn goes_on(&mut self, reason: &str) {
        if self.told {
            debug!(reason, pause = ?self.pause, "no connection to the runtime yet");
        } else {
            warn!(
                reason,
                "no connection to the runtime: trying until it is back"
            );
            self.told = true;
        }
        self.wait().await;
    }

    /// The same, after what somebody has to change.
    async fn refused(&mut self, reason: &str) {
        if self.refusal.as_deref() != Some(reason) {
            warn!(
                reason,
                "the runtime refuses to register the plugin: trying again"
            );
            self.refusal = Some(reason.into());
        }
        self.wait().await;
    }

    async fn wait(&mut self) {
        sleep(self.pause).await;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }
}

/// What is wrong with the node rather than with the moment.
fn fatal(path: &Path, error: &io::Error) -> Option<NriError> {
    let path = path.to_path_buf();
    match error.kind() {
        io::ErrorKind::NotFound => Some(NriError::NoSocket { path }),
        io::ErrorKind::PermissionDenied => Some(NriError::PermissionDenied { path }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[test]
    fn only_a_socket_that_is_missing_or_forbidden_is_worth_giving_up_for() {
        let path = Path::new("/run/nri.sock");
        let fatal = |kind: io::ErrorKind| fatal(path, &kind.into());

        let forbidden = fatal(io::ErrorKind::PermissionDenied).unwrap().to_string();
        assert!(forbidden.contains("/run/nri.sock"), "{forbidden}");
        assert!(fatal(io::ErrorKind::NotFound).is_some());
        assert!(fatal(io::ErrorKind::ConnectionRefused).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_double_up_to_a_limit_and_start_over_after_a_steady_connection() {
        let mut outage = Outage::new();
        let pause = async |outage: &mut Outage| {
            let begin = Instant::now();
            outage.goes_on("gone").await;
            begin.elapsed()
        };

        assert_eq!(pause(&mut outage).await, FIRST_PAUSE);
        assert_eq!(pause(&mut outage).await, 2 * FIRST_PAUSE);
        outage.was_over(Duration::from_secs(1));
        assert_eq!(pause(&mut outage).await, 4 * FIRST_PAUSE);
        for _ in 0..10 {
            pause(&mut outage).await;
        }
        assert_eq!(pause(&mut outage).await, LONGEST_PAUSE);
        outage.was_over(STEADY);
        assert_eq!(pause(&mut outage).await, FIRST_PAUSE);
    }
}
