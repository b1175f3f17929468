//! The runtime at the other end of NRI, as bytes and as calls.

use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use reprise::fuzzing;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;
use tokio::time::sleep;
use ttrpc::proto::{Codec, MESSAGE_TYPE_REQUEST, MessageHeader, Request};

use super::{dir, plugin};

/// The connection that the plugin serves (`pkg/net/multiplex`).
const PLUGIN: u32 = 1;
const SERVICE: &str = "nri.pkg.api.v1alpha1.Plugin";
/// What a runtime calls. With `StateChange` it tells of everything but creations before NRI 0.12, with a method of its
/// own of each event after that.
const METHODS: [&str; 16] = [
    "Configure",
    "Synchronize",
    "CreateContainer",
    "StateChange",
    "StopContainer",
    "RemoveContainer",
    "PostCreateContainer",
    "PostStartContainer",
    "StartContainer",
    "RunPodSandbox",
    "StopPodSandbox",
    "RemovePodSandbox",
    "UpdateContainer",
    "ValidateContainerAdjustment",
    "Shutdown",
    "NoSuchMethod",
];

/// An input is all that the runtime sends over one connection.
pub(super) fn frames(input: &[u8]) {
    serve(input);
}

/// An input is a row of calls: a byte for the method, two for the length of the request, big-endian, and the request.
pub(super) fn messages(input: &[u8]) {
    let mut sent = Vec::new();
    let mut rest = input;
    let mut stream = 1;
    while let [method, high, low, after @ ..] = rest {
        let length = usize::from(u16::from_be_bytes([*high, *low])).min(after.len());
        let (payload, after) = after.split_at(length);
        call(
            &mut sent,
            stream,
            METHODS[usize::from(*method) % METHODS.len()],
            payload,
        );
        stream += 2;
        rest = after;
    }
    serve(&sent);
}

fn call(sent: &mut Vec<u8>, stream: u32, method: &str, payload: &[u8]) {
    let request = Request {
        service: SERVICE.into(),
        method: method.into(),
        payload: payload.to_vec(),
        timeout_nano: 2_000_000_000,
        ..Default::default()
    };
    let request = request.encode().expect("a request");
    let header = MessageHeader {
        length: u32::try_from(request.len()).expect("a small request"),
        stream_id: stream,
        type_: MESSAGE_TYPE_REQUEST,
        flags: 0,
    };
    let message = [Vec::from(header), request].concat();
    sent.extend(PLUGIN.to_be_bytes());
    sent.extend(
        u32::try_from(message.len())
            .expect("a small request")
            .to_be_bytes(),
    );
    sent.extend(message);
}

static RUNTIME: LazyLock<std::os::unix::net::UnixListener> = LazyLock::new(|| {
    let listener = std::os::unix::net::UnixListener::bind(socket()).expect("a socket");
    listener.set_nonblocking(true).expect("a socket");
    listener
});

fn socket() -> PathBuf {
    dir().join("nri.sock")
}

/// Lets a runtime say `sent` to a plugin, until the plugin has nothing more to do about it.
fn serve(sent: &[u8]) {
    plugin::runtime().block_on(async {
        let runtime = RUNTIME
            .try_clone()
            .and_then(UnixListener::from_std)
            .expect("a socket");
        let stub = fuzzing::stub(plugin::tools(), dir());
        let stub = stub.name("fuzz").index("10").socket(socket());
        let run = stub.build().expect("a stub").run(std::future::pending());
        let talk = async {
            let (mut trunk, _) = runtime.accept().await.expect("a plugin");
            let (mut answers, mut words) = trunk.split();
            let mut heard = vec![0; 4096];
            let hear = async { while matches!(answers.read(&mut heard).await, Ok(1..)) {} };
            let speak = async {
                let _ = words.write_all(sent).await;
                // The clock goes on once nobody has anything to do.
                sleep(Duration::from_millis(5)).await;
            };
            tokio::select! {
                () = hear => {}
                () = speak => {}
            }
        };
        tokio::select! {
            _ = run => {}
            () = talk => {}
        }
    });
}
