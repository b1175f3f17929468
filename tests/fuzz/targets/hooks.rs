//! Both ends of the exit hold. An input is what the runtime and the other end say, with a line `%%` between them: the
//! OCI state that the hook gets, the plugin's answer to the hook, and the line that a hook sends to the plugin.

use std::io::Write;
use std::os::unix::net::UnixListener;
use std::sync::mpsc::{Sender, channel};
use std::sync::{LazyLock, Mutex};
use std::thread;
use std::time::Duration;

use reprise::exit_hold::hook::{self, HookArgs};
use reprise::exit_hold::{HoldDecision, Server};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::{dir, parts, plugin};

pub(super) fn talk(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let mut parts = parts(&text).map(str::as_bytes);
    let mut part = || parts.next().unwrap_or_default();
    let (state, answer, line) = (part(), part(), part());

    PLUGIN.answers(answer);
    hook::run(&PLUGIN.args, state);
    converse(line);
}

/// A plugin that says what it is told to, once, and lets go of every exit after that.
struct Impostor {
    args: HookArgs,
    answers: Mutex<Sender<Vec<u8>>>,
}

static PLUGIN: LazyLock<Impostor> = LazyLock::new(|| {
    let args = HookArgs {
        socket: dir().join("impostor.sock"),
        marker: dir().join("no-marker"),
    };
    let listener = UnixListener::bind(&args.socket).expect("a socket");
    let (answers, told) = channel::<Vec<u8>>();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let answer = told.try_iter().last().unwrap_or_else(|| b"go\n".to_vec());
            let _ = stream.and_then(|mut stream| stream.write_all(&answer));
        }
    });
    Impostor {
        args,
        answers: Mutex::new(answers),
    }
});

impl Impostor {
    fn answers(&self, answer: &[u8]) {
        let answers = self.answers.lock().expect("nobody panics with it");
        answers.send(answer.to_vec()).expect("it never ends");
    }
}

/// The plugin hears a line, and must say something that ends a hook.
fn converse(line: &[u8]) {
    plugin::runtime().block_on(async {
        let socket = dir().join("run/hook.sock");
        let server = Server::bind(&socket).expect("a socket");
        // Dropped at once: the exit is let go.
        let serve = server.serve(|_| HoldDecision::Wait(oneshot::channel().1));
        let talk = async {
            let mut stream = UnixStream::connect(&socket).await.expect("a server");
            let (mut answers, mut words) = stream.split();
            let mut heard = Vec::new();
            let hear = timeout(Duration::from_secs(10), answers.read_to_end(&mut heard));
            // More than it reads may be refused.
            let _ = tokio::join!(words.write_all(line), hear);
            heard
        };
        let heard = tokio::select! {
            () = serve => unreachable!("it serves for ever"),
            heard = talk => heard,
        };
        assert!(heard.is_empty() || heard.ends_with(b"go\n"), "{heard:?}");
    });
}
