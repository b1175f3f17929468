//! The hook as the runtime runs it: whatever it is given and whatever it meets, it ends soon, with 0 and without a word. A
//! hook that fails or lingers would be the runtime's trouble.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};

const STATE: &[u8] = br#"{"ociVersion":"1.0.2","id":"c1","status":"stopped","bundle":"/b"}"#;

/// On a busy machine too.
const AT_ONCE: Duration = Duration::from_secs(1);
/// The runtime kills a hook that takes longer.
const RUNTIMES_LIMIT: Duration = Duration::from_secs(10);

struct Place {
    _dir: tempfile::TempDir,
    socket: PathBuf,
    marker: PathBuf,
}

fn place() -> Place {
    let dir = tempfile::tempdir().unwrap();
    Place {
        socket: dir.path().join("hook.sock"),
        marker: dir.path().join("held"),
        _dir: dir,
    }
}

impl Place {
    fn args(&self) -> Vec<OsString> {
        vec![self.socket.clone().into(), self.marker.clone().into()]
    }

    /// A plugin that does this with each hook that asks.
    fn plugin(&self, does: impl Fn(UnixStream) + Send + 'static) {
        let listener = UnixListener::bind(&self.socket).unwrap();
        thread::spawn(move || listener.incoming().flatten().for_each(does));
    }
}

fn hook(args: &[OsString]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_reprise"));
    command.arg("hook").args(args).env_clear();
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The hook, given that state as the runtime gives it: through a pipe that it closes.
fn given(args: &[OsString], state: &[u8]) -> Output {
    let mut hook = hook(args).stdin(Stdio::piped()).spawn().unwrap();
    // It may have gone without reading it.
    let _ = hook.stdin.take().unwrap().write_all(state);
    hook.wait_with_output().unwrap()
}

fn ends_well(limit: Duration, what: &str, run: impl FnOnce() -> Output) {
    let began = Instant::now();
    let output = run();
    let took = began.elapsed();
    assert!(output.status.success(), "{what}: {output:?}");
    assert!(output.stdout.is_empty(), "{what}: {output:?}");
    assert!(output.stderr.is_empty(), "{what}: {output:?}");
    assert!(took < limit, "{what}: {took:?}");
}

#[test]
fn arguments_of_any_version_are_none_of_its_business() {
    let place = place();
    let more = [place.args(), vec!["third".into()]].concat();
    let cases: Vec<Vec<OsString>> = vec![
        vec![],
        vec!["one".into()],
        more,
        vec!["--help".into()],
        vec!["--from-the-future=7".into(), "--".into()],
        vec!["".into(), "".into()],
        vec![OsStr::from_bytes(b"\xff\xfe").into(), "\n".into()],
        vec!["x".repeat(100_000).into(), "y".into()],
    ];
    for args in cases {
        ends_well(AT_ONCE, &format!("{args:?}"), || given(&args, STATE));
    }
}

#[test]
fn a_state_of_any_kind_lets_the_exit_go() {
    let place = place();
    place.plugin(|mut hook| {
        let _ = hook.write_all(b"go\n");
    });
    let deep = "[".repeat(200_000).into_bytes();
    let long = [br#"{"id":""#, "x".repeat(4 << 20).as_bytes(), br#""}"#].concat();
    let short: [&[u8]; 5] = [b"", b"\xff\x00", b"null", b"{\"id\": 7}", STATE];
    for state in short.into_iter().chain([&deep[..], &long]) {
        let what = String::from_utf8_lossy(&state[..state.len().min(40)]).into_owned();
        ends_well(AT_ONCE, &what, || given(&place.args(), state));
    }
}

#[test]
fn without_standard_streams_it_ends_as_ever() {
    let place = place();
    for closed in [
        "<&-",
        ">&-",
        "2>&-",
        "<&- >&- 2>&-",
        "<&- >/dev/full 2>/dev/full",
    ] {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", &format!("exec \"$@\" {closed}"), "sh"]);
        shell
            .arg(env!("CARGO_BIN_EXE_reprise"))
            .arg("hook")
            .args(place.args());
        ends_well(AT_ONCE, closed, || shell.output().unwrap());
    }
}

#[test]
fn a_plugin_that_talks_nonsense_is_not_waited_for() {
    let endless = "w".repeat(1 << 20);
    for words in [
        b"\n".as_slice(),
        b"\xff\xff\n",
        b"WAIT\n",
        endless.as_bytes(),
    ] {
        let (place, first, words) = (place(), words[0], words.to_owned());
        place.plugin(move |mut hook| {
            let _ = hook.write_all(&words);
            // For as long as the hook wants to read.
            let _ = hook.read_to_end(&mut Vec::new());
        });
        ends_well(AT_ONCE, &format!("{first:?}"), || {
            given(&place.args(), STATE)
        });
    }
}

/// What is in its way, how that comes there, and how the hook is started.
type Case<'a> = (&'a str, &'a (dyn Fn(&Place) + Sync), fn(&Place) -> Child);

/// Whatever keeps it, it ends before the runtime ends it.
#[test]
fn nothing_keeps_it_for_longer_than_the_runtime_waits() {
    fn without_end_of_state(place: &Place) -> Child {
        // The pipe is open for as long as the child is there.
        hook(&place.args()).stdin(Stdio::piped()).spawn().unwrap()
    }
    fn with_state(place: &Place) -> Child {
        let state = place.socket.with_file_name("state");
        fs::write(&state, STATE).unwrap();
        let state = fs::File::open(state).unwrap();
        hook(&place.args()).stdin(state).spawn().unwrap()
    }
    let silent = |place: &Place| {
        place.plugin(|hook| {
            drop(thread::spawn(move || {
                thread::sleep(RUNTIMES_LIMIT * 2);
                drop(hook);
            }));
        });
    };
    let says_wait_for_ever = |place: &Place| {
        place.plugin(|mut hook| while hook.write_all(b"wait\n").is_ok() {});
    };
    let says_no_word_to_its_end = |place: &Place| {
        place.plugin(|mut hook| {
            while hook.write_all(b"w").is_ok() {
                thread::sleep(Duration::from_millis(500));
            }
        });
    };
    let never_accepts = |place: &Place| {
        let socket = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        bind(&socket, &SocketAddrUnix::new(&place.socket).unwrap()).unwrap();
        listen(&socket, 0).unwrap();
        // Its queue is full with one.
        std::mem::forget((UnixStream::connect(&place.socket).unwrap(), socket));
    };
    let is_away = |place: &Place| fs::write(&place.marker, "").unwrap();
    let cases: [Case<'_>; 6] = [
        ("a state without an end", &|_| (), without_end_of_state),
        ("a plugin that never answers", &silent, with_state),
        (
            "a plugin that says wait for ever",
            &says_wait_for_ever,
            with_state,
        ),
        (
            "a plugin that says no word to its end",
            &says_no_word_to_its_end,
            with_state,
        ),
        ("a plugin that never accepts", &never_accepts, with_state),
        ("a plugin that is away for good", &is_away, with_state),
    ];
    thread::scope(|scope| {
        for (what, prepare, start) in cases {
            scope.spawn(move || {
                let place = place();
                prepare(&place);
                let began = Instant::now();
                let mut hook = start(&place);
                let mut ended = hook.try_wait().unwrap();
                while ended.is_none() && began.elapsed() < RUNTIMES_LIMIT {
                    thread::sleep(Duration::from_millis(20));
                    ended = hook.try_wait().unwrap();
                }
                hook.kill().unwrap();
                hook.wait().unwrap();
                let ended_well = ended.is_some_and(|status| status.success());
                assert!(ended_well, "{what}: {ended:?}");
            });
        }
    });
}
