//! A login manager (`org.freedesktop.login1`) that tells the kubelet that the machine is about to shut down, and shuts nothing
//! down. It speaks as much D-Bus as the kubelet asks for (`pkg/kubelet/nodeshutdown/systemd/inhibit_linux.go`), and is the
//! bus as well.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::{Context, Result, ensure};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::wait::{self, PATIENCE};

/// How long the machine may be kept from shutting down: as long as the kubelet wants.
const LONGEST_DELAY_US: u64 = 600_000_000;

/// Kinds of messages, and fields of their headers, by the D-Bus specification.
const RETURN: u8 = 2;
const SIGNAL: u8 = 4;
const PATH: u8 = 1;
const INTERFACE: u8 = 2;
const MEMBER: u8 = 3;
const REPLY_SERIAL: u8 = 5;
const SIGNATURE: u8 = 8;
const UNIX_FDS: u8 = 9;

pub(crate) struct Logind {
    socket: PathBuf,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    clients: Vec<UnixStream>,
    /// Our ends of what the kubelet holds to keep the machine from shutting down.
    inhibitors: Vec<UnixStream>,
}

impl Logind {
    pub(crate) fn listen(socket: &Path) -> Result<Self> {
        let listener = UnixListener::bind(socket)?;
        let state = Arc::new(Mutex::new(State::default()));
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let shared = Arc::clone(&shared);
                thread::spawn(move || serve(client, &shared));
            }
        });
        let socket = socket.to_owned();
        Ok(Self { socket, state })
    }

    /// Waits until the kubelet is to be asked before the machine shuts down.
    pub(crate) async fn until_inhibited(&self) -> Result<()> {
        wait::until("the kubelet wants to be asked", PATIENCE, async || {
            let inhibited = !lock(&self.state).inhibitors.is_empty();
            Ok(inhibited.then_some(()).ok_or_else(|| "not yet".to_owned()))
        })
        .await
    }

    /// Says that the machine is about to shut down, or is not any more.
    pub(crate) fn shuts_down(&self, is_about_to: bool) -> Result<()> {
        let fields = [
            (PATH, Field::Path("/org/freedesktop/login1")),
            (INTERFACE, Field::Text("org.freedesktop.login1.Manager")),
            (MEMBER, Field::Text("PrepareForShutdown")),
            (SIGNATURE, Field::Signature("b")),
        ];
        let signal = message(SIGNAL, &fields, &u32::from(is_about_to).to_le_bytes());
        for client in &mut lock(&self.state).clients {
            client.write_all(&signal)?;
        }
        Ok(())
    }
}

impl Drop for Logind {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
    }
}

fn lock(state: &Mutex<State>) -> std::sync::MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Until the client has gone.
fn serve(mut client: UnixStream, state: &Mutex<State>) -> Result<()> {
    authenticate(&mut client)?;
    lock(state).clients.push(client.try_clone()?);
    loop {
        let (serial, member) = read_call(&mut client)?;
        let (signature, body) = match member.as_str() {
            "Hello" => ("s", text_of(":1.1")),
            // `InhibitDelayMaxUSec`, a variant of an unsigned number of 8 bytes.
            "Get" => {
                let mut variant = vec![1, b't', 0, 0, 0, 0, 0, 0];
                variant.extend(LONGEST_DELAY_US.to_le_bytes());
                ("v", variant)
            }
            "Inhibit" => ("h", vec![0; 4]),
            _ => ("", Vec::new()),
        };
        let mut fields = vec![(REPLY_SERIAL, Field::Number(serial))];
        if !signature.is_empty() {
            fields.push((SIGNATURE, Field::Signature(signature)));
        }
        if member == "Inhibit" {
            fields.push((UNIX_FDS, Field::Number(1)));
            let (ours, theirs) = UnixStream::pair()?;
            send_with(&client, &message(RETURN, &fields, &body), &theirs)?;
            lock(state).inhibitors.push(ours);
        } else {
            client.write_all(&message(RETURN, &fields, &body))?;
        }
    }
}

/// By what the kernel says of the peer, which is asked for nothing.
fn authenticate(client: &mut UnixStream) -> Result<()> {
    loop {
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            let mut byte = [0];
            client.read_exact(&mut byte)?;
            line.extend(byte);
        }
        let line = String::from_utf8(line)?;
        let answer = match line.trim_start_matches('\0').trim_end() {
            "BEGIN" => return Ok(()),
            "AUTH" => "REJECTED EXTERNAL\r\n",
            "NEGOTIATE_UNIX_FD" => "AGREE_UNIX_FD\r\n",
            _ => "OK 0123456789abcdef0123456789abcdef\r\n",
        };
        client.write_all(answer.as_bytes())?;
    }
}

/// The call's serial number and the name of the method.
fn read_call(client: &mut UnixStream) -> Result<(u32, String)> {
    let mut head = [0; 16];
    client.read_exact(&mut head)?;
    ensure!(head[0] == b'l', "it is no message of a small end");
    let number =
        |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let (body, serial, fields) = (number(4) as usize, number(8), number(12) as usize);
    let mut rest = vec![0; fields.next_multiple_of(8) + body];
    client.read_exact(&mut rest)?;
    let member = member(&rest[..fields]).context("the call names no method")?;
    Ok((serial, member))
}

/// Each field begins at a multiple of 8: its code, the type of its value, and the value.
fn member(fields: &[u8]) -> Option<String> {
    let mut at = 0;
    while at < fields.len() {
        let (code, kind) = (*fields.get(at)?, *fields.get(at + 2)?);
        at += 4;
        let length = match kind {
            b's' | b'o' => {
                let length = fields.get(at..at + 4)?.try_into().ok()?;
                at += 4;
                u32::from_le_bytes(length) as usize
            }
            b'g' => {
                at += 1;
                usize::from(*fields.get(at - 1)?)
            }
            _ => 3,
        };
        let value = fields.get(at..at + length)?;
        if code == MEMBER {
            return String::from_utf8(value.to_vec()).ok();
        }
        at = (at + length + 1).next_multiple_of(8);
    }
    None
}

enum Field {
    Path(&'static str),
    Text(&'static str),
    Signature(&'static str),
    Number(u32),
}

fn text_of(text: &str) -> Vec<u8> {
    let mut bytes = u32::try_from(text.len())
        .unwrap_or(u32::MAX)
        .to_le_bytes()
        .to_vec();
    bytes.extend(text.bytes());
    bytes.push(0);
    bytes
}

fn message(kind: u8, fields: &[(u8, Field)], body: &[u8]) -> Vec<u8> {
    let mut header = Vec::new();
    for (code, field) in fields {
        header.resize(header.len().next_multiple_of(8), 0);
        let (kind, value) = match field {
            Field::Path(path) => (b'o', text_of(path)),
            Field::Text(text) => (b's', text_of(text)),
            // Its length takes one byte.
            Field::Signature(text) => {
                let mut value = text_of(text);
                value.drain(1..4);
                (b'g', value)
            }
            Field::Number(number) => (b'u', number.to_le_bytes().to_vec()),
        };
        header.extend([*code, 1, kind, 0]);
        header.extend(value);
    }
    let length = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes();
    let mut message = vec![b'l', kind, 0, 1];
    message.extend(length(body));
    // Nobody answers us: any number serves as the serial number.
    message.extend(1_u32.to_le_bytes());
    message.extend(length(&header));
    message.extend(header);
    message.resize(message.len().next_multiple_of(8), 0);
    message.extend(body);
    message
}

fn send_with(client: &UnixStream, message: &[u8], file: &UnixStream) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files = [file.as_fd()];
    ancillary.push(SendAncillaryMessage::ScmRights(&files));
    let sent = sendmsg(
        client,
        &[IoSlice::new(message)],
        &mut ancillary,
        SendFlags::empty(),
    )?;
    ensure!(sent == message.len(), "the answer was cut");
    Ok(())
}
