//! The OCI hook: asks the plugin whether an exit may be seen, and waits while it says no.
//!
//! Runs once for every exit of a container with restart rules, in the runtime's mount namespace, while the
//! runtime waits: hence no async runtime, no allocation worth naming, and no trouble that is not a return.

use std::ffi::OsString;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::{LIMIT, OOM, WAIT, successor};
use crate::ids;

/// The executable's name among the hook's arguments.
const PROGRAM: &str = "reprise";
/// A plugin that does not answer within this time is taken for dead.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// Between two questions to a plugin that died while it held this exit.
const ASK_INTERVAL: Duration = Duration::from_millis(20);
/// The OCI state is a few hundred bytes; more is not for us (runtime-spec, "State").
const STATE_LIMIT: u64 = 1 << 20;
/// A conversation has two words; more is none of ours.
const ANSWERS_LIMIT: u64 = 64;
/// What the process takes at most, whatever it meets: a standard input that nobody closes, a socket whose queue is full, a
/// disk that hangs. The runtime would kill it a second later.
const LONGEST: Duration = Duration::from_secs(9);

/// Where the plugin is, and what it leaves behind when it dies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HookArgs {
    /// The socket of [`super::Server`].
    pub socket: PathBuf,
    /// A file that exists while the plugin holds this pod's exits. With it, a plugin that does not answer
    /// is expected back: without, the exit is none of ours.
    pub marker: PathBuf,
}

impl HookArgs {
    /// The arguments as the runtime passes them on: the executable's name, `hook SOCKET MARKER`.
    #[must_use]
    pub fn to_args(&self) -> Vec<String> {
        vec![
            PROGRAM.into(),
            "hook".into(),
            self.socket.display().to_string(),
            self.marker.display().to_string(),
        ]
    }

    /// Whether a container's hook with these arguments, its executable's name among them, is ours.
    #[must_use]
    pub fn are_ours(args: &[String]) -> bool {
        matches!(args, [program, name, _, _] if program == PROGRAM && name == "hook")
    }

    /// Reads what [`Self::to_args`] wrote, without its first two words.
    #[must_use]
    pub fn parse(args: &[OsString]) -> Option<Self> {
        let [socket, marker] = args else { return None };
        Some(Self {
            socket: socket.into(),
            marker: marker.into(),
        })
    }
}

/// The whole process. Arguments of another version, or of nobody's, ask for nothing: a container's hook stays as it was made
/// when the plugin is replaced by another version, older or newer.
pub fn main(args: &[OsString], state: impl Read + Send + 'static) {
    let Some(args) = HookArgs::parse(args) else {
        return;
    };
    bounded(Instant::now() + LONGEST, move || run(&args, state));
}

/// Does it, or gives up waiting for it then.
pub(super) fn bounded(until: Instant, work: impl FnOnce() + Send + 'static) {
    let (done, over) = mpsc::channel::<()>();
    let working = thread::Builder::new().spawn(move || {
        // Dropped at the end, also by a panic.
        let _done = done;
        work();
    });
    if working.is_ok() {
        // Nothing is ever sent: it is over, or it takes too long.
        let _ = over.recv_timeout(until.saturating_duration_since(Instant::now()));
    }
}

/// The exit of a container, about which the plugin is asked.
#[derive(Debug)]
pub(super) struct Exit {
    pub(super) id: String,
    /// How it has ended, where whoever asks can tell.
    pub(super) known: Option<ids::Exit>,
    /// When it is let go in any case.
    pub(super) deadline: Instant,
}

impl Exit {
    /// How long it is kept yet. Not nothing: as a timeout of a socket that would mean "for ever".
    fn left(&self) -> Duration {
        let left = self.deadline.saturating_duration_since(Instant::now());
        left.max(Duration::from_millis(1))
    }

    /// What the plugin is asked.
    fn question(&self) -> String {
        let Self {
            id,
            known,
            deadline,
        } = self;
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = LIMIT.saturating_sub(left).as_millis();
        match known {
            Some(exit) if exit.oom_killed => format!("{id} {waited} {} {OOM}\n", exit.code),
            Some(exit) => format!("{id} {waited} {}\n", exit.code),
            None => format!("{id} {waited}\n"),
        }
    }
}

/// Reads the container's OCI state from `state` and waits until its exit may be seen, at most [`LIMIT`].
///
/// Returns at once when there is no plugin or it does not understand us: a hook that fails or lingers
/// without a reason would only delay the runtime.
pub fn run(args: &HookArgs, state: impl Read) {
    let deadline = Instant::now() + LIMIT;
    let Some(id) = container_id(state) else {
        return;
    };
    let exit = Exit {
        id,
        known: None,
        deadline,
    };
    wait(args, &exit);
}

/// Waits until this exit may be seen.
pub(super) fn wait(args: &HookArgs, exit: &Exit) {
    let mut told_to_wait = false;
    while Instant::now() < exit.deadline {
        match ask(&args.socket, exit, &mut told_to_wait) {
            // The plugin died with this exit in its hands. What it had decided is on disk, and it may be
            // back in a second: until then, nobody may see the exit.
            Err(_) if told_to_wait || is_held(&args.marker) => thread::sleep(ASK_INTERVAL),
            // It has heard of this exit as well.
            Err(error) if is_nobody(&error) && successor::is_expected(&args.socket) => {
                thread::sleep(ASK_INTERVAL);
            }
            // Let go, or nobody to wait for.
            Ok(()) | Err(_) => return,
        }
    }
}

/// One conversation with the plugin. `Ok`: the exit may be seen.
fn ask(socket: &Path, exit: &Exit, told_to_wait: &mut bool) -> io::Result<()> {
    let mut stream = connect(socket, exit.left().min(ANSWER_LIMIT))?;
    stream.write_all(exit.question().as_bytes())?;
    let mut answers = BufReader::new(stream.take(ANSWERS_LIMIT));
    let mut line = String::new();
    loop {
        line.clear();
        if answers.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // Anything but "wait" lets the exit pass, also a word of another version.
        if line != WAIT {
            return Ok(());
        }
        *told_to_wait = true;
        let stream = answers.get_ref().get_ref();
        stream.set_read_timeout(Some(exit.left()))?;
    }
}

/// A socket on which nothing takes longer. A plugin that is stopped accepts nobody, and its queue has an end.
fn connect(socket: &Path, limit: Duration) -> io::Result<UnixStream> {
    let stream = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    for timeout in [Timeout::Send, Timeout::Recv] {
        sockopt::set_socket_timeout(&stream, timeout, Some(limit))?;
    }
    rustix::net::connect(&stream, &SocketAddrUnix::new(socket)?)?;
    Ok(stream.into())
}

/// Whether there is no plugin, rather than one that does not answer.
fn is_nobody(error: &io::Error) -> bool {
    !matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}

fn is_held(marker: &Path) -> bool {
    fs::exists(marker).unwrap_or(false)
}

fn container_id(state: impl Read) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct State {
        id: String,
    }
    let mut text = Vec::new();
    state.take(STATE_LIMIT).read_to_end(&mut text).ok()?;
    serde_json::from_slice::<State>(&text)
        .ok()
        .map(|state| state.id)
}

#[cfg(test)]
mod tests {
    use super::super::Successor;
    use super::*;
    use std::os::unix::net::UnixListener;

    const STATE: &[u8] = br#"{"ociVersion":"1.0.2","id":"c1","status":"stopped","bundle":"/b"}"#;

    struct Place {
        dir: tempfile::TempDir,
        args: HookArgs,
    }

    fn place() -> Place {
        let dir = tempfile::tempdir().unwrap();
        let args = HookArgs {
            socket: dir.path().join("hook.sock"),
            marker: dir.path().join("held"),
        };
        Place { dir, args }
    }

    /// Runs the hook in a thread; the receiver hears when it has returned.
    fn spawn(args: &HookArgs) -> std::sync::mpsc::Receiver<()> {
        let (done, returned) = std::sync::mpsc::channel();
        let args = args.clone();
        thread::spawn(move || {
            run(&args, STATE);
            done.send(()).unwrap();
        });
        returned
    }

    fn accept(listener: &UnixListener) -> (BufReader<UnixStream>, String) {
        let mut stream = BufReader::new(listener.accept().unwrap().0);
        let mut line = String::new();
        stream.read_line(&mut line).unwrap();
        (stream, line)
    }

    const SOON: Duration = Duration::from_secs(1);
    const NOT_YET: Duration = Duration::from_millis(50);

    #[test]
    fn without_a_plugin_it_returns_at_once() {
        let place = place();
        spawn(&place.args).recv_timeout(SOON).unwrap();
    }

    #[test]
    fn without_a_plugin_it_waits_for_one_that_comes() {
        let place = place();
        let successor = Successor::announce(place.dir.path()).unwrap();
        let returned = spawn(&place.args);
        assert!(returned.recv_timeout(NOT_YET).is_err());
        let listener = UnixListener::bind(&place.args.socket).unwrap();
        let (mut plugin, line) = accept(&listener);
        assert!(line.starts_with("c1 "), "{line}");
        plugin.get_mut().write_all(b"go\n").unwrap();
        returned.recv_timeout(SOON).unwrap();
        // Nor does one that waits keep an exit when it has ended itself.
        drop(listener);
        fs::remove_file(&place.args.socket).unwrap();
        let returned = spawn(&place.args);
        assert!(returned.recv_timeout(NOT_YET).is_err());
        drop(successor);
        returned.recv_timeout(SOON).unwrap();
    }

    #[test]
    fn a_state_that_cannot_be_read_is_released() {
        let place = place();
        let _listener = UnixListener::bind(&place.args.socket).unwrap();
        run(&place.args, &b"not json"[..]);
        run(&place.args, &b""[..]);
    }

    #[test]
    fn it_names_the_container_and_waits_until_released() {
        let place = place();
        let listener = UnixListener::bind(&place.args.socket).unwrap();
        let returned = spawn(&place.args);
        let (mut plugin, line) = accept(&listener);
        assert!(line.starts_with("c1 "), "{line}");
        plugin.get_mut().write_all(b"wait\n").unwrap();
        assert!(returned.recv_timeout(NOT_YET).is_err());
        plugin.get_mut().write_all(b"go\n").unwrap();
        returned.recv_timeout(SOON).unwrap();
    }

    #[test]
    fn a_plugin_that_dies_before_it_answers_is_not_waited_for() {
        let place = place();
        let listener = UnixListener::bind(&place.args.socket).unwrap();
        let returned = spawn(&place.args);
        drop(accept(&listener));
        returned.recv_timeout(SOON).unwrap();
    }

    #[test]
    fn a_plugin_that_dies_while_it_holds_is_waited_for_and_asked_again() {
        let place = place();
        let listener = UnixListener::bind(&place.args.socket).unwrap();
        let returned = spawn(&place.args);
        let (mut plugin, _) = accept(&listener);
        plugin.get_mut().write_all(b"wait\n").unwrap();
        fs::remove_file(&place.args.socket).unwrap();
        drop((plugin, listener));
        assert!(returned.recv_timeout(NOT_YET).is_err());
        let listener = UnixListener::bind(&place.args.socket).unwrap();
        let (mut plugin, line) = accept(&listener);
        assert!(line.starts_with("c1 "), "{line}");
        plugin.get_mut().write_all(b"go\n").unwrap();
        returned.recv_timeout(SOON).unwrap();
    }

    #[test]
    fn a_marker_makes_it_wait_for_a_plugin_that_died_before_it_could_answer() {
        let place = place();
        fs::write(&place.args.marker, "").unwrap();
        let returned = spawn(&place.args);
        assert!(returned.recv_timeout(NOT_YET).is_err());
        fs::remove_file(&place.args.marker).unwrap();
        returned.recv_timeout(SOON).unwrap();
        drop(place.dir);
    }

    #[test]
    fn arguments_survive_the_runtime() {
        let args = place().args;
        let passed_on: Vec<OsString> = args.to_args().into_iter().map(Into::into).collect();
        assert_eq!(HookArgs::parse(&passed_on[2..]), Some(args));
        assert_eq!(HookArgs::parse(&["only-one".into()]), None);
    }
}
