//! The socket at which the hooks knock.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::{GO, LIMIT, WAIT};
use crate::ids::ContainerId;

/// A hook says who it is within this time, or is not one of ours.
const INTRODUCTION_LIMIT: Duration = Duration::from_secs(1);
/// The longest line a hook sends: an id of 64 characters and a number.
const LINE_LIMIT: u64 = 256;

/// A hook that asks whether the exit of its container may be seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Knock {
    /// Whose exit it is.
    pub container: ContainerId,
    /// How long this hook has been waiting already: more than a moment when it outlived another plugin.
    pub waited: Duration,
}

/// What the hook is told.
#[derive(Debug)]
pub enum Answer {
    /// The exit may be seen now.
    Go,
    /// It may be seen when the sender speaks or is dropped, at the latest at [`LIMIT`].
    Wait(oneshot::Receiver<()>),
}

/// Why the socket could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The directory of the socket cannot be made or closed to others.
    #[error("cannot prepare {path}: {source}; choose another place with --run-dir")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The socket cannot be bound.
    #[error("cannot listen on {path}: {source}; choose another place with --run-dir")]
    Bind {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// The plugin's end of the exit hold.
#[derive(Debug)]
pub struct Server {
    listener: UnixListener,
}

impl Server {
    /// Opens `socket`, in a directory for root alone: whoever can knock could delay exits.
    pub fn bind(socket: &Path) -> Result<Self, ServerError> {
        if let Some(dir) = socket.parent() {
            private_dir(dir).map_err(|source| ServerError::Directory {
                path: dir.into(),
                source,
            })?;
        }
        // A predecessor's socket: nobody can be listening on it, one plugin runs per node and run directory.
        let _ = fs::remove_file(socket);
        let listener = UnixListener::bind(socket).map_err(|source| ServerError::Bind {
            path: socket.into(),
            source,
        })?;
        Ok(Self { listener })
    }

    /// Answers every knock with what `decide` says, until dropped. `decide` is called on the async runtime
    /// and must not block.
    pub async fn serve<F>(self, decide: F)
    where
        F: Fn(Knock) -> Answer + Send + Sync + 'static,
    {
        let decide = Arc::new(decide);
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let decide = Arc::clone(&decide);
                    tokio::spawn(async move {
                        // A conversation ends early when the runtime gives up on its hook: nobody is left to tell.
                        let _ = converse(stream, &*decide).await;
                    });
                }
                Err(error) => {
                    // Out of descriptors, mostly: the hooks that wait in the queue time out by themselves.
                    tracing::warn!(%error, "cannot accept a hook's connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }
}

/// Makes `dir` if it is missing and closes it to everyone but root.
pub(crate) fn private_dir(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)?;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700))
}

async fn converse(stream: UnixStream, decide: &(dyn Fn(Knock) -> Answer + Sync)) -> io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read.take(LINE_LIMIT));
    let mut line = String::new();
    timeout(INTRODUCTION_LIMIT, lines.read_line(&mut line)).await??;
    let Some(knock) = parse(&line) else {
        return write.write_all(GO.as_bytes()).await;
    };
    let left = LIMIT.saturating_sub(knock.waited);
    if let Answer::Wait(released) = decide(knock) {
        write.write_all(WAIT.as_bytes()).await?;
        // Both ways of ending mean the same: a dropped sender is a pod that nobody restarts any more.
        let _ = timeout(left, released).await;
    }
    write.write_all(GO.as_bytes()).await
}

fn parse(line: &str) -> Option<Knock> {
    let (id, waited) = line.trim_end().split_once(' ')?;
    (!id.is_empty()).then_some(())?;
    Some(Knock {
        container: ContainerId::from(id),
        waited: Duration::from_millis(waited.parse().ok()?),
    })
}

#[cfg(test)]
mod tests {
    use super::super::hook::{self, HookArgs};
    use super::*;
    use std::sync::Mutex;
    use tokio::task::spawn_blocking;

    fn place() -> (tempfile::TempDir, HookArgs) {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("run/hook.sock");
        let marker = dir.path().join("held");
        (dir, HookArgs { socket, marker })
    }

    #[test]
    fn a_line_that_is_not_a_knock_is_none() {
        assert_eq!(parse("c1 20\n").unwrap().waited.as_millis(), 20);
        for line in ["", "c1\n", " 5\n", "c1 soon\n", "c1 -1\n"] {
            assert_eq!(parse(line), None, "{line:?}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_hook_waits_until_its_hold_is_dropped() {
        let (_dir, args) = place();
        let server = Server::bind(&args.socket).unwrap();
        let taken = Arc::new(Mutex::new(None));
        let (knocked, mut knocks) = tokio::sync::mpsc::unbounded_channel();
        let kept = Arc::clone(&taken);
        tokio::spawn(server.serve(move |knock| {
            let (release, released) = oneshot::channel();
            *kept.lock().unwrap() = Some(release);
            knocked.send(knock).unwrap();
            Answer::Wait(released)
        }));
        let hook = spawn_blocking(move || hook::run(&args, &br#"{"id":"c1"}"#[..]));
        assert_eq!(
            knocks.recv().await.unwrap().container,
            ContainerId::from("c1")
        );
        assert!(!hook.is_finished());
        taken.lock().unwrap().take();
        hook.await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_directory_is_roots_alone_and_an_old_socket_is_replaced() {
        let (_dir, args) = place();
        drop(Server::bind(&args.socket).unwrap());
        let server = Server::bind(&args.socket).unwrap();
        let mode = fs::metadata(args.socket.parent().unwrap())
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o700);
        tokio::spawn(server.serve(|_| Answer::Go));
        spawn_blocking(move || hook::run(&args, &br#"{"id":"c1"}"#[..]))
            .await
            .unwrap();
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_named() {
        let error = Server::bind(Path::new("/proc/nowhere/hook.sock")).unwrap_err();
        assert!(error.to_string().contains("/proc/nowhere"), "{error}");
    }
}
