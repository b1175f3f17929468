//! The holder as the plugin runs it, and conmon as the kernel sees it: whoever opens the file that tells of an exit waits for
//! nobody but the plugin of that container, and never for long.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(2);
const NOT_YET: Duration = Duration::from_millis(100);
/// For how long an exit is held at most.
const LIMIT: Duration = Duration::from_secs(8);
/// Longer than a plugin is waited for that does not answer, and shorter than a hold.
const NO_ANSWER: Duration = Duration::from_secs(5);

struct Holder {
    dir: tempfile::TempDir,
    process: Child,
    words: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    said: String,
}

impl Holder {
    fn start(exits: Option<&Path>) -> Self {
        Self::under(&["env"], exits)
    }

    /// Run by another program.
    fn under(program: &[&str], exits: Option<&Path>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("exits")).unwrap();
        let exits = exits.map_or(dir.path().join("exits"), PathBuf::from);
        let mut process = Command::new(program[0])
            .args(&program[1..])
            .args([env!("CARGO_BIN_EXE_reprise"), "hold"])
            .args([exits, dir.path().join("hook.sock")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let words = process.stdin.take();
        let mut answers = BufReader::new(process.stdout.take().unwrap());
        let mut said = String::new();
        answers.read_line(&mut said).unwrap();
        Self {
            dir,
            process,
            words,
            answers,
            said,
        }
    }

    /// `None` where the kernel lets nobody hold anything, as in many containers.
    fn ready() -> Option<Self> {
        let holder = Self::start(None);
        if holder.said == "ready\n" {
            return Some(holder);
        }
        eprintln!("skipped: {}", holder.said.trim_end());
        None
    }

    fn say(&mut self, line: &str) {
        let words = self.words.as_mut().unwrap();
        writeln!(words, "{line}").unwrap();
    }

    /// The exits of this container may be held, when this returns.
    fn hold(&mut self, id: &str) {
        let marker = self.dir.path().join("marker");
        self.say(&format!("hold {id} {}", marker.display()));
        self.ping();
    }

    fn ping(&mut self) {
        self.say("ping");
        let mut answer = String::new();
        self.answers.read_line(&mut answer).unwrap();
        assert_eq!(answer, "pong\n");
    }

    /// What conmon does when this container has exited. The receiver hears when it has told of it.
    fn exit(&self, id: &str, code: i32) -> Receiver<()> {
        self.exit_by(&format!("{id}.A1b2C3"), id, code)
    }

    /// The same by a file that has that name before.
    fn exit_by(&self, temporary: &str, id: &str, code: i32) -> Receiver<()> {
        fs::write(self.dir.path().join("exit"), code.to_string()).unwrap();
        let exits = self.dir.path().join("exits");
        let mut conmon = Command::new("/bin/sh");
        conmon.args(["-c", ": >\"$0\" && mv \"$0\" \"$1\""]);
        conmon.args([exits.join(temporary), exits.join(id)]);
        conmon.arg("--persist-dir").arg(self.dir.path());
        let (done, told) = channel();
        thread::spawn(move || {
            assert!(conmon.status().unwrap().success());
            // The test may be over.
            let _ = done.send(());
        });
        told
    }

    /// A plugin that has to hold everything, and lets it go when it hears that it may.
    fn plugin(&self) -> (Receiver<String>, std::sync::mpsc::Sender<()>) {
        let listener = UnixListener::bind(self.dir.path().join("hook.sock")).unwrap();
        let (ask, asked) = channel();
        let (release, released) = channel::<()>();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = BufReader::new(stream.unwrap());
                let mut line = String::new();
                stream.read_line(&mut line).unwrap();
                stream.get_mut().write_all(b"wait\n").unwrap();
                if ask.send(line).is_err() || released.recv().is_err() {
                    return;
                }
                stream.get_mut().write_all(b"go\n").unwrap();
            }
        });
        (asked, release)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

fn waits(told: &Receiver<()>) -> bool {
    told.recv_timeout(NOT_YET) == Err(RecvTimeoutError::Timeout)
}

#[test]
fn an_exit_waits_until_the_plugin_lets_it_go() {
    waits_for_the_plugin("c1.A1b2C3");
}

#[test]
fn an_exit_of_which_conmon_3_tells_waits_as_well() {
    waits_for_the_plugin(".c1.4711.tmp");
}

/// Told of by a file that has that name before.
fn waits_for_the_plugin(temporary: &str) {
    let Some(mut holder) = Holder::ready() else {
        return;
    };
    let (asked, release) = holder.plugin();
    holder.hold("c1");
    let told = holder.exit_by(temporary, "c1", 42);
    let question = asked.recv_timeout(SOON).unwrap();
    let words: Vec<&str> = question.split_whitespace().collect();
    assert!(matches!(words[..], ["c1", _, "42"]), "{question}");
    assert!(waits(&told));
    assert!(!holder.dir.path().join("exits/c1").exists());
    release.send(()).unwrap();
    told.recv_timeout(SOON).unwrap();
}

#[test]
fn the_plugin_is_told_of_a_container_that_was_out_of_memory() {
    let Some(mut holder) = Holder::ready() else {
        return;
    };
    let (asked, release) = holder.plugin();
    holder.hold("c1");
    File::create(holder.dir.path().join("oom")).unwrap();
    let told = holder.exit("c1", 137);
    let question = asked.recv_timeout(SOON).unwrap();
    let words: Vec<&str> = question.split_whitespace().collect();
    assert!(matches!(words[..], ["c1", _, "137", "oom"]), "{question}");
    release.send(()).unwrap();
    told.recv_timeout(SOON).unwrap();
}

/// Nor does anything else that is run by this executable.
#[test]
fn a_process_of_ours_takes_no_huge_pages() {
    let Some(holder) = Holder::ready() else {
        return;
    };
    let status = format!("/proc/{}/status", holder.process.id());
    let status = fs::read_to_string(status).unwrap();
    let refused = status.lines().any(|line| line == "THP_enabled:\t0");
    assert!(refused || !status.contains("THP_enabled:"), "{status}");
}

#[test]
fn nobody_is_asked_about_containers_without_rules() {
    let Some(mut holder) = Holder::ready() else {
        return;
    };
    let (asked, _release) = holder.plugin();
    holder.hold("c1");
    holder.say("forget c1");
    holder.ping();
    let exits = holder.dir.path().join("exits");
    for id in ["c1", "c2"] {
        holder.exit(id, 1).recv_timeout(SOON).unwrap();
        assert_eq!(fs::read(exits.join(id)).unwrap(), b"");
    }
    assert!(asked.try_recv().is_err());
}

#[test]
fn a_plugin_that_is_not_there_or_does_not_answer_is_not_waited_for() {
    let Some(mut holder) = Holder::ready() else {
        return;
    };
    holder.hold("c1");
    holder.exit("c1", 1).recv_timeout(SOON).unwrap();
    let _silent = UnixListener::bind(holder.dir.path().join("hook.sock")).unwrap();
    holder.exit("c1", 1).recv_timeout(NO_ANSWER).unwrap();
}

#[test]
fn nobody_hears_of_a_hidden_exit_before_it_is_shown_and_nothing_is_left_of_it() {
    let Some(mut holder) = Holder::ready() else {
        return;
    };
    holder.say("hide c1");
    holder.ping();
    let told = holder.exit("c1", 137);
    holder.say("forget c1");
    assert!(waits(&told));
    holder.say("show c1");
    told.recv_timeout(SOON).unwrap();
    let exit = holder.dir.path().join("exits/c1");
    let began = Instant::now();
    while exit.exists() {
        assert!(began.elapsed() < SOON);
        thread::sleep(NOT_YET);
    }
}

#[test]
fn a_holder_that_dies_holds_nothing() {
    let Some(mut holder) = Holder::ready() else {
        return;
    };
    let (asked, _release) = holder.plugin();
    holder.hold("c1");
    let told = holder.exit("c1", 42);
    asked.recv_timeout(SOON).unwrap();
    assert!(waits(&told));
    holder.process.kill().unwrap();
    told.recv_timeout(SOON).unwrap();
}

#[test]
fn a_holder_whose_plugin_has_died_goes_on_holding_for_a_while_and_ends() {
    let Some(mut holder) = Holder::ready() else {
        return;
    };
    holder.hold("c1");
    fs::write(holder.dir.path().join("marker"), "").unwrap();
    holder.words.take();
    let told = holder.exit("c1", 42);
    assert!(waits(&told));
    // The next plugin.
    let (asked, release) = holder.plugin();
    let question = asked.recv_timeout(SOON).unwrap();
    assert!(question.starts_with("c1 "), "{question}");
    release.send(()).unwrap();
    told.recv_timeout(SOON).unwrap();
    let began = Instant::now();
    while holder.process.try_wait().unwrap().is_none() {
        assert!(began.elapsed() < Duration::from_secs(12));
        thread::sleep(NOT_YET);
    }
}

#[test]
fn a_thousand_exits_at_once_are_told_at_once() {
    let Some(mut holder) = Holder::ready() else {
        return;
    };
    holder.hold("c1");
    let began = Instant::now();
    let exits = holder.dir.path().join("exits");
    for number in 0..1000 {
        File::create(exits.join(format!("{number:064x}.A1b2C3"))).unwrap();
    }
    let took = began.elapsed();
    assert!(took < SOON, "{took:?}");
    holder.ping();
}

/// Its queue of those who want to be accepted is full.
#[test]
fn exits_are_kept_no_longer_than_a_hold_by_a_plugin_that_is_stopped() {
    let Some(mut holder) = Holder::ready() else {
        return;
    };
    let listener = UnixListener::bind(holder.dir.path().join("hook.sock")).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    fs::write(holder.dir.path().join("marker"), "").unwrap();
    let ids: Vec<String> = (0..10).map(|number| format!("c{number}")).collect();
    for id in &ids {
        holder.hold(id);
    }
    let began = Instant::now();
    let told: Vec<Receiver<()>> = ids.iter().map(|id| holder.exit(id, 42)).collect();
    assert!(waits(&told[9]));
    for told in told {
        told.recv_timeout(LIMIT).unwrap();
    }
    let took = began.elapsed();
    assert!(took < LIMIT + NOT_YET * 5, "{took:?}");
    holder.ping();
}

#[test]
fn a_holder_that_may_not_says_what_it_lacks() {
    for (program, lacks) in [
        (["setpriv", "--bounding-set=-sys_admin"], "CAP_SYS_ADMIN"),
        (["prlimit", "--nofile=512:512"], "LimitNOFILE"),
    ] {
        let holder = Holder::under(&program, None);
        assert!(holder.said.contains(lacks), "{}", holder.said);
    }
}

#[test]
fn a_directory_of_exits_that_is_replaced_ends_it() {
    let Some(mut holder) = Holder::ready() else {
        return;
    };
    let exits = holder.dir.path().join("exits");
    fs::remove_dir(&exits).unwrap();
    fs::create_dir(&exits).unwrap();
    holder.say("ping");
    let mut answer = String::new();
    assert_eq!(holder.answers.read_line(&mut answer).unwrap(), 0);
}

#[test]
fn a_directory_of_exits_that_is_not_there_is_named() {
    let holder = Holder::start(Some(Path::new("/nowhere/exits")));
    assert!(holder.said.contains("/nowhere/exits"), "{}", holder.said);
}
