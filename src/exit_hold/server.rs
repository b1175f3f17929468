//! The socket at which the hooks ask.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::RecvFlags;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixSocket, UnixStream};
use tokio::select;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use super::{GO, LIMIT, OOM, WAIT};
use crate::dirs::{self, DirError};
use crate::ids::{ContainerId, Exit, ExitCode};

/// A hook says who it is within this time, or is not one of ours.
const INTRODUCTION_LIMIT: Duration = Duration::from_secs(1);
/// The longest line a hook sends: an id of 64 characters, two numbers and a word.
const LINE_LIMIT: u64 = 256;
/// How many hooks may ask at once, before they are heard: all containers of a busy node.
const BACKLOG: u32 = 1024;
/// Between two checks that the socket is there.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A hook that asks whether the exit of its container may be seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HoldRequest {
    /// Whose exit it is.
    pub container: ContainerId,
    /// How long this hook has been waiting already: more than a moment when it outlived another plugin.
    pub waited: Duration,
    /// How it has ended, if whoever asks knows.
    pub exit: Option<Exit>,
}

/// What the hook is told.
#[derive(Debug)]
pub enum HoldDecision {
    /// The exit may be seen now.
    Go,
    /// It may be seen when the sender speaks or is dropped, at the latest at [`LIMIT`].
    Wait(oneshot::Receiver<()>),
}

/// Why the socket could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The directory of the socket cannot be made, or is open to others.
    #[error("cannot prepare {path}: {source}; choose another place with --run-dir")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What is wrong with it.
        source: DirError,
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
    path: PathBuf,
    /// By which the socket is known: device and inode.
    file: (u64, u64),
}

impl Server {
    /// Opens `socket`, for root alone: whoever can ask could delay exits.
    pub fn bind(socket: &Path) -> Result<Self, ServerError> {
        if let Some(dir) = socket.parent() {
            dirs::private(dir).map_err(|source| ServerError::Directory {
                path: dir.into(),
                source,
            })?;
        }
        // A predecessor's socket: nobody can be listening on it, one plugin runs per node and run directory.
        let _ = fs::remove_file(socket);
        let (listener, file) = listen(socket).map_err(|source| ServerError::Bind {
            path: socket.into(),
            source,
        })?;
        Ok(Self {
            listener,
            path: socket.to_owned(),
            file,
        })
    }

    /// Answers every hook with what `decide` says, until hooks find the socket no longer because somebody has cleared its
    /// directory. Who waits by then goes on waiting. `decide` is called on the async runtime and must not block.
    pub async fn serve<F>(self, decide: F)
    where
        F: Fn(HoldRequest) -> HoldDecision + Send + Sync + 'static,
    {
        let decide = Arc::new(decide);
        select! {
            () = self.accept(decide) => {}
            () = self.is_lost() => {}
        }
    }

    async fn is_lost(&self) {
        loop {
            sleep(CHECK_INTERVAL).await;
            // It is in memory (/run); another thread that looks would be woken for it every second.
            let found = fs::symlink_metadata(&self.path);
            if !found.is_ok_and(|found| (found.dev(), found.ino()) == self.file) {
                return;
            }
        }
    }

    async fn accept<F>(&self, decide: Arc<F>)
    where
        F: Fn(HoldRequest) -> HoldDecision + Send + Sync + 'static,
    {
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
                    sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }
}

/// The directory may be open to others: the socket is not, from its first moment. It gets the mode that it has before it
/// has a name (`unix_bind`, `net/unix/af_unix.c`).
fn listen(path: &Path) -> io::Result<(UnixListener, (u64, u64))> {
    let socket = UnixSocket::new_stream()?;
    let file = File::from(socket.as_fd().try_clone_to_owned()?);
    file.set_permissions(fs::Permissions::from_mode(0o600))?;
    socket.bind(path)?;
    let bound = fs::symlink_metadata(path)?;
    Ok((socket.listen(BACKLOG)?, (bound.dev(), bound.ino())))
}

async fn converse(
    stream: UnixStream,
    decide: &(dyn Fn(HoldRequest) -> HoldDecision + Sync),
) -> io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read.take(LINE_LIMIT));
    let mut line = String::new();
    timeout(INTRODUCTION_LIMIT, lines.read_line(&mut line)).await??;
    let Some(request) = parse(&line) else {
        return write.write_all(GO.as_bytes()).await;
    };
    // A hook that was not answered in time asks once more, and what it knows by then is newer.
    let stream: &UnixStream = lines.get_ref().get_ref().as_ref();
    if has_gone(stream) {
        return Ok(());
    }
    let left = LIMIT.saturating_sub(request.waited);
    if let HoldDecision::Wait(released) = decide(request) {
        write.write_all(WAIT.as_bytes()).await?;
        // All ways of ending mean the same: a dropped sender is a pod that nobody restarts any more.
        select! {
            _ = timeout(left, released) => {}
            () = ends(&mut lines) => {}
        }
    }
    write.write_all(GO.as_bytes()).await
}

/// Whether the hook has closed its end, of which the async runtime may not have heard yet.
fn has_gone(stream: &UnixStream) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    rustix::net::recv(stream, &mut [0; 1][..], flags).is_ok_and(|(read, _)| read == 0)
}

/// Waits until the hook closes its end, or says more than it should.
async fn ends(lines: &mut (impl AsyncBufRead + Unpin)) {
    let _ = lines.fill_buf().await;
}

fn parse(line: &str) -> Option<HoldRequest> {
    let mut words = line.trim_end().split(' ');
    let id = words.next().filter(|id| !id.is_empty())?;
    let waited = words.next()?.parse().ok()?;
    let code = words.next().map(str::parse).transpose().ok()?;
    let oom_killed = match (words.next(), words.next()) {
        (None, _) => false,
        (Some(OOM), None) => true,
        _ => return None,
    };
    let exit = code.map(|code| Exit {
        code: ExitCode(code),
        oom_killed,
    });
    Some(HoldRequest {
        container: ContainerId::from(id),
        waited: Duration::from_millis(waited),
        exit,
    })
}

#[cfg(test)]
mod tests {
    use super::super::hook::{self, HookArgs};
    use super::*;
    use std::collections::BTreeSet;
    use std::sync::Mutex;
    use tokio::task::spawn_blocking;

    fn place() -> (tempfile::TempDir, HookArgs) {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("run/hook.sock");
        let marker = dir.path().join("held");
        (dir, HookArgs { socket, marker })
    }

    #[test]
    fn a_line_that_is_no_request_is_none() {
        let request = parse("c1 20\n").unwrap();
        assert_eq!((request.waited.as_millis(), request.exit), (20, None));
        assert_eq!(parse("c1 20 42\n").unwrap().exit, Some(Exit::from(42)));
        let out_of_memory = parse("c1 20 137 oom\n").unwrap().exit;
        let killed = Exit {
            oom_killed: true,
            ..Exit::from(137)
        };
        assert_eq!(out_of_memory, Some(killed));
        for line in [
            "",
            "c1\n",
            " 5\n",
            "c1 soon\n",
            "c1 -1\n",
            "c1 5 no\n",
            "c1 5 4 2\n",
            "c1 5 4 oom 2\n",
            "c1 5 oom\n",
        ] {
            assert_eq!(parse(line), None, "{line:?}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_hook_waits_until_its_hold_is_dropped() {
        let (_dir, args) = place();
        let server = Server::bind(&args.socket).unwrap();
        let taken = Arc::new(Mutex::new(None));
        let (asked, mut requests) = tokio::sync::mpsc::unbounded_channel();
        let kept = Arc::clone(&taken);
        tokio::spawn(server.serve(move |request| {
            let (release, released) = oneshot::channel();
            *kept.lock().unwrap() = Some(release);
            asked.send(request).unwrap();
            HoldDecision::Wait(released)
        }));
        let hook = spawn_blocking(move || hook::run(&args, &br#"{"id":"c1"}"#[..]));
        assert_eq!(
            requests.recv().await.unwrap().container,
            ContainerId::from("c1")
        );
        assert!(!hook.is_finished());
        taken.lock().unwrap().take();
        hook.await.unwrap();
    }

    /// As after the plugin has been stopped for a while: of what has come meanwhile the last may be heard first.
    #[tokio::test]
    async fn a_hook_that_has_gone_is_not_asked_about_and_ends_its_hold() {
        let (_dir, args) = place();
        let server = Server::bind(&args.socket).unwrap();
        let gone = || {
            let mut stream = std::os::unix::net::UnixStream::connect(&args.socket).unwrap();
            std::io::Write::write_all(&mut stream, b"c1 0\n").unwrap();
            stream
        };
        drop(gone());
        let (asked, mut requests) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(server.serve(move |_| {
            let (release, released) = oneshot::channel();
            asked.send(release).unwrap();
            HoldDecision::Wait(released)
        }));
        let hook = gone();
        let mut release = requests.recv().await.unwrap();
        assert!(!release.is_closed());
        drop(hook);
        timeout(INTRODUCTION_LIMIT, release.closed()).await.unwrap();
        assert!(requests.try_recv().is_err(), "two were asked about");
    }

    #[tokio::test]
    async fn who_says_more_than_a_hook_does_is_let_go() {
        let (_dir, args) = place();
        let server = Server::bind(&args.socket).unwrap();
        let (kept, _holds) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(server.serve(move |_| {
            let (release, released) = oneshot::channel();
            kept.send(release).unwrap();
            HoldDecision::Wait(released)
        }));
        let mut stream = UnixStream::connect(&args.socket).await.unwrap();
        stream.write_all(b"c1 0\nc2").await.unwrap();
        let mut heard = String::new();
        let hear = stream.read_to_string(&mut heard);
        timeout(INTRODUCTION_LIMIT, hear).await.unwrap().unwrap();
        assert_eq!(heard, format!("{WAIT}{GO}"));
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
        tokio::spawn(server.serve(|_| HoldDecision::Go));
        spawn_blocking(move || hook::run(&args, &br#"{"id":"c1"}"#[..]))
            .await
            .unwrap();
    }

    #[tokio::test]
    async fn the_socket_is_roots_alone_in_a_directory_that_is_not_and_that_keeps_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        let open = fs::Permissions::from_mode(0o755);
        fs::set_permissions(dir.path(), open).unwrap();
        let socket = dir.path().join("hook.sock");
        let _server = Server::bind(&socket).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!(mode(&socket), 0o600);
        assert_eq!(mode(dir.path()), 0o755);
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let error = Server::bind(&socket).unwrap_err();
        assert!(matches!(error, ServerError::Directory { .. }), "{error}");
    }

    /// It is made again and again until a thread has looked at it often.
    #[tokio::test]
    async fn the_socket_is_roots_alone_from_its_first_moment() {
        const LOOKS: usize = 20_000;
        let (_dir, args) = place();
        let path = args.socket.clone();
        let watcher = std::thread::spawn(move || {
            let found = std::iter::repeat_with(|| fs::symlink_metadata(&path)).flatten();
            let modes = found.map(|it| it.mode() & 0o777).take(LOOKS);
            modes.collect::<BTreeSet<_>>()
        });
        while !watcher.is_finished() {
            drop(Server::bind(&args.socket).unwrap());
        }
        assert_eq!(watcher.join().unwrap(), BTreeSet::from([0o600]));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_socket_that_was_taken_away_is_noticed_and_who_waits_goes_on_waiting() {
        let (_dir, args) = place();
        let server = Server::bind(&args.socket).unwrap();
        let kept = Arc::new(Mutex::new(None));
        let (asked, mut requests) = tokio::sync::mpsc::unbounded_channel();
        let holds = Arc::clone(&kept);
        let serving = tokio::spawn(server.serve(move |request| {
            let (release, released) = oneshot::channel();
            *holds.lock().unwrap() = Some(release);
            asked.send(request).unwrap();
            HoldDecision::Wait(released)
        }));
        let socket = args.socket.clone();
        let hook = spawn_blocking(move || hook::run(&args, &br#"{"id":"c1"}"#[..]));
        requests.recv().await.unwrap();
        assert!(!serving.is_finished());
        fs::remove_dir_all(socket.parent().unwrap()).unwrap();
        timeout(10 * CHECK_INTERVAL, serving)
            .await
            .unwrap()
            .unwrap();
        assert!(!hook.is_finished());
        let _again = Server::bind(&socket).unwrap();
        kept.lock().unwrap().take();
        hook.await.unwrap();
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_named() {
        let error = Server::bind(Path::new("/proc/nowhere/hook.sock")).unwrap_err();
        assert!(error.to_string().contains("/proc/nowhere"), "{error}");
    }
}
