//! The runtime's side of NRI, as little of it as it takes to ask a plugin what it says to a container
//! about to be created. Not the product's own stub, which is what is measured. One thread and plain
//! blocking calls, so that next to nothing but the plugin's own time is in the answer.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use prost::Message;

/// A frame's header: connection and length, both words big-endian (`pkg/net/multiplex`).
const FRAME_HEADER: usize = 8;
/// On which the plugin is the server.
const PLUGIN: u32 = 1;
/// On which the runtime is.
const RUNTIME: u32 = 2;

/// A message's header: length, stream, type, flags (ttrpc, `channel.go`).
const MESSAGE_HEADER: usize = 10;
const REQUEST: u8 = 1;
const RESPONSE: u8 = 2;

/// As runtimes have it by default.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Clone, PartialEq, Message)]
struct Request {
    #[prost(string, tag = "1")]
    service: String,
    #[prost(string, tag = "2")]
    method: String,
    #[prost(bytes = "vec", tag = "3")]
    payload: Vec<u8>,
    #[prost(int64, tag = "4")]
    timeout_nano: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Response {
    #[prost(message, optional, tag = "1")]
    status: Option<Status>,
    #[prost(bytes = "vec", tag = "2")]
    payload: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct Status {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
}

#[derive(Clone, PartialEq, Message)]
struct ConfigureRequest {
    #[prost(string, tag = "2")]
    runtime_name: String,
    #[prost(string, tag = "3")]
    runtime_version: String,
}

#[derive(Clone, PartialEq, Message)]
struct SynchronizeRequest {}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PodSandbox {
    #[prost(string, tag = "1")]
    pub(crate) id: String,
    #[prost(string, tag = "2")]
    pub(crate) name: String,
    #[prost(string, tag = "3")]
    pub(crate) uid: String,
    #[prost(string, tag = "4")]
    pub(crate) namespace: String,
    #[prost(map = "string, string", tag = "5")]
    pub(crate) labels: HashMap<String, String>,
    #[prost(map = "string, string", tag = "6")]
    pub(crate) annotations: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Container {
    #[prost(string, tag = "1")]
    pub(crate) id: String,
    #[prost(string, tag = "2")]
    pub(crate) pod_sandbox_id: String,
    #[prost(string, tag = "3")]
    pub(crate) name: String,
    #[prost(map = "string, string", tag = "5")]
    pub(crate) labels: HashMap<String, String>,
    #[prost(map = "string, string", tag = "6")]
    pub(crate) annotations: HashMap<String, String>,
    #[prost(string, repeated, tag = "7")]
    pub(crate) args: Vec<String>,
    #[prost(string, repeated, tag = "8")]
    pub(crate) env: Vec<String>,
    #[prost(message, repeated, tag = "9")]
    pub(crate) mounts: Vec<Mount>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Mount {
    #[prost(string, tag = "1")]
    pub(crate) destination: String,
    #[prost(string, tag = "2")]
    pub(crate) kind: String,
    #[prost(string, tag = "3")]
    pub(crate) source: String,
    #[prost(string, repeated, tag = "4")]
    pub(crate) options: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct CreateContainerRequest {
    #[prost(message, optional, tag = "1")]
    pub(crate) pod: Option<PodSandbox>,
    #[prost(message, optional, tag = "2")]
    pub(crate) container: Option<Container>,
}

/// What the plugin says to a container.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It may be created as it is.
    Unchanged,
    Adjusted,
    Refused(String),
}

/// A connection to a plugin that has been taken in.
pub(crate) struct Runtime {
    trunk: UnixStream,
    /// What has come on each connection and is not yet a whole message.
    received: HashMap<u32, Vec<u8>>,
    /// A client's streams are odd.
    stream: u32,
}

struct Incoming {
    connection: u32,
    stream: u32,
    kind: u8,
    payload: Vec<u8>,
}

impl Runtime {
    /// Takes in the plugin that has connected: it registers, is configured and told of no container.
    pub(crate) fn welcome(trunk: UnixStream) -> Result<Self> {
        trunk.set_nonblocking(false)?;
        trunk.set_read_timeout(Some(REQUEST_TIMEOUT))?;
        let mut runtime = Self {
            trunk,
            received: HashMap::new(),
            stream: 1,
        };
        let registration = runtime.receive().context("the plugin does not register")?;
        ensure!(
            registration.connection == RUNTIME && registration.kind == REQUEST,
            "the plugin began with something else than its registration"
        );
        let accepted = message(registration.stream, RESPONSE, &Response::default());
        runtime.trunk.write_all(&frame(RUNTIME, &accepted))?;
        let who = ConfigureRequest {
            runtime_name: "containerd".to_owned(),
            runtime_version: "v2.3.7".to_owned(),
        };
        runtime.call("Configure", &who)?;
        runtime.call("Synchronize", &SynchronizeRequest {})?;
        Ok(runtime)
    }

    /// Asks about a container, and says how long the answer took.
    pub(crate) fn create_container(
        &mut self,
        request: &CreateContainerRequest,
    ) -> Result<(Answer, Duration)> {
        let (response, took) = self.call("CreateContainer", request)?;
        let answer = match response.status {
            Some(status) if status.code != 0 => Answer::Refused(status.message),
            // Field 1, the adjustment, is empty or has something in it.
            _ if matches!(response.payload[..], [] | [0x0a, 0]) => Answer::Unchanged,
            _ => Answer::Adjusted,
        };
        Ok((answer, took))
    }

    fn call(&mut self, method: &str, request: &impl Message) -> Result<(Response, Duration)> {
        let request = Request {
            service: "nri.pkg.api.v1alpha1.Plugin".to_owned(),
            method: method.to_owned(),
            payload: request.encode_to_vec(),
            timeout_nano: i64::try_from(REQUEST_TIMEOUT.as_nanos())?,
        };
        let stream = self.stream;
        self.stream += 2;
        let bytes = frame(PLUGIN, &message(stream, REQUEST, &request));
        let asked = Instant::now();
        self.trunk.write_all(&bytes)?;
        let answer = self
            .receive()
            .with_context(|| format!("no answer to {method}"))?;
        let took = asked.elapsed();
        ensure!(
            (answer.connection, answer.stream, answer.kind) == (PLUGIN, stream, RESPONSE),
            "what came back is no answer to {method}"
        );
        Ok((Response::decode(&answer.payload[..])?, took))
    }

    /// The next whole message, whatever frames it comes in.
    fn receive(&mut self) -> Result<Incoming> {
        loop {
            let mut header = [0; FRAME_HEADER];
            self.trunk.read_exact(&mut header)?;
            let (connection, length) = (word(&header[..4])?, word(&header[4..])?);
            let received = self.received.entry(connection).or_default();
            let before = received.len();
            received.resize(before + length as usize, 0);
            self.trunk.read_exact(&mut received[before..])?;
            if let Some(message) = whole(received)? {
                let [.., kind, _flags] = received[..MESSAGE_HEADER] else {
                    bail!("a message without a header");
                };
                let incoming = Incoming {
                    connection,
                    stream: word(&received[4..8])?,
                    kind,
                    payload: received[MESSAGE_HEADER..message].to_vec(),
                };
                received.drain(..message);
                return Ok(incoming);
            }
        }
    }
}

/// The length of the message that is there as a whole.
fn whole(received: &[u8]) -> Result<Option<usize>> {
    if received.len() < MESSAGE_HEADER {
        return Ok(None);
    }
    let length = MESSAGE_HEADER + word(&received[..4])? as usize;
    Ok((received.len() >= length).then_some(length))
}

fn word(bytes: &[u8]) -> Result<u32> {
    Ok(u32::from_be_bytes(bytes.try_into()?))
}

fn frame(connection: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = connection.to_be_bytes().to_vec();
    bytes.extend(length_of(payload));
    bytes.extend(payload);
    bytes
}

fn message(stream: u32, kind: u8, content: &impl Message) -> Vec<u8> {
    let content = content.encode_to_vec();
    let mut bytes = length_of(&content).to_vec();
    bytes.extend(stream.to_be_bytes());
    bytes.extend([kind, 0]);
    bytes.extend(content);
    bytes
}

/// Nothing here comes near four gigabytes.
fn length_of(bytes: &[u8]) -> [u8; 4] {
    u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_be_bytes()
}
