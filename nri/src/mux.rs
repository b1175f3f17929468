//! Two ttrpc connections over one socket: NRI's multiplexing (`pkg/net/multiplex`, v0.12.5).
//!
//! Every frame has a header of two big-endian words, connection and length, and a payload. Two
//! connections are in use: on one, the plugin serves the runtime; on the other, the runtime serves
//! the plugin.

use std::io;

use thiserror::Error;
use tokio::io::{
    AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, DuplexStream, ReadHalf, WriteHalf,
    copy_buf, duplex, sink, split,
};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::Mutex;

/// Where the plugin is the server (`PluginServiceConn`).
pub(crate) const PLUGIN: u32 = 1;
/// Where the runtime is the server (`RuntimeServiceConn`).
pub(crate) const RUNTIME: u32 = 2;

const FRAME_HEADER: usize = 8;
const TTRPC_HEADER: usize = 10;
/// A whole ttrpc message of the largest size.
const PAYLOAD_MAX: u32 = 10 + (4 << 20);

/// The most that may come in the frame that begins a ttrpc message: Go's ttrpc reads its header
/// through a buffer of 4096 bytes, and `conn.Read` (`mux.go`) fails on a frame that does not fit the
/// reader's buffer. The rest of the message is read straight into a buffer of its size.
const FIRST_PAYLOAD_MAX: usize = 4096;

/// Only decides how often a large message changes hands inside the process.
const PIPE: usize = 64 << 10;

/// Why a multiplexed connection ended.
#[derive(Debug, Error)]
pub(crate) enum Closed {
    #[error("the runtime closed the connection")]
    ByRuntime,
    #[error("the connection broke: {0}")]
    Broken(io::Error),
    #[error("the runtime sent a frame of {0} bytes, more than any message has")]
    OversizedFrame(u32),
    #[error("the plugin's side of ttrpc stopped")]
    ByPlugin,
}

/// The plugin's ends of the two connections.
pub(crate) struct Connections {
    pub(crate) plugin: DuplexStream,
    pub(crate) runtime: DuplexStream,
}

/// Multiplexes two connections over `trunk` for as long as the returned future is polled. It
/// completes when the connection ends; to drop it closes the connection.
pub(crate) fn multiplex(trunk: UnixStream) -> (Connections, impl Future<Output = Closed>) {
    let (plugin, plugin_pipe) = duplex(PIPE);
    let (runtime, runtime_pipe) = duplex(PIPE);
    let connections = Connections { plugin, runtime };
    (connections, drive(trunk, plugin_pipe, runtime_pipe))
}

async fn drive(trunk: UnixStream, plugin: DuplexStream, runtime: DuplexStream) -> Closed {
    // Dropping the write half shuts the socket down, even if the process holds another descriptor
    // of it, as a launched plugin does.
    let (trunk_reader, trunk_writer) = trunk.into_split();
    let trunk_writer = Mutex::new(trunk_writer);
    let (plugin_reader, plugin_writer) = split(plugin);
    let (runtime_reader, runtime_writer) = split(runtime);

    tokio::select! {
        closed = receive(trunk_reader, plugin_writer, runtime_writer) => closed,
        closed = send(PLUGIN, plugin_reader, &trunk_writer) => closed,
        closed = send(RUNTIME, runtime_reader, &trunk_writer) => closed,
    }
}

async fn receive(
    trunk: OwnedReadHalf,
    mut plugin: WriteHalf<DuplexStream>,
    mut runtime: WriteHalf<DuplexStream>,
) -> Closed {
    let mut trunk = BufReader::with_capacity(PIPE, trunk);
    loop {
        let (id, length) = match frame_header(&mut trunk).await {
            Ok(header) => header,
            Err(closed) => return closed,
        };
        let passed = match id {
            PLUGIN => pass(&mut trunk, length, &mut plugin).await,
            RUNTIME => pass(&mut trunk, length, &mut runtime).await,
            // A connection that nobody opened, maybe of a later version. Upstream drops these too.
            _ => pass(&mut trunk, length, &mut sink()).await,
        };
        if let Err(closed) = passed {
            return closed;
        }
    }
}

async fn frame_header(trunk: &mut BufReader<OwnedReadHalf>) -> Result<(u32, u32), Closed> {
    let id = trunk.read_u32().await.map_err(end_or_break)?;
    let length = trunk.read_u32().await.map_err(end_or_break)?;
    if length > PAYLOAD_MAX {
        return Err(Closed::OversizedFrame(length));
    }
    Ok((id, length))
}

/// Passes a payload on as it comes: whoever reads it keeps all of it, and nobody else.
async fn pass(
    trunk: &mut BufReader<OwnedReadHalf>,
    length: u32,
    to: &mut (impl AsyncWrite + Unpin),
) -> Result<(), Closed> {
    let mut payload = trunk.take(length.into());
    match copy_buf(&mut payload, to).await {
        Ok(_) if payload.limit() == 0 => Ok(()),
        Ok(_) => Err(Closed::ByRuntime),
        // A socket that is read has no such error.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(Closed::ByPlugin),
        Err(error) => Err(end_or_break(error)),
    }
}

fn end_or_break(error: io::Error) -> Closed {
    match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => Closed::ByRuntime,
        _ => Closed::Broken(error),
    }
}

/// Sends whole ttrpc messages, never bytes as they come: frames must begin where messages begin.
async fn send(
    id: u32,
    mut messages: ReadHalf<DuplexStream>,
    trunk: &Mutex<OwnedWriteHalf>,
) -> Closed {
    loop {
        let Ok(message) = next_message(&mut messages).await else {
            return Closed::ByPlugin;
        };
        if let Err(error) = trunk.lock().await.write_all(&frames(id, &message)).await {
            return match error.kind() {
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Closed::ByRuntime,
                _ => Closed::Broken(error),
            };
        }
    }
}

async fn next_message(messages: &mut ReadHalf<DuplexStream>) -> io::Result<Vec<u8>> {
    let length = messages.read_u32().await?;
    let mut message = vec![0; TTRPC_HEADER + length as usize];
    message[..4].copy_from_slice(&length.to_be_bytes());
    messages.read_exact(&mut message[4..]).await?;
    Ok(message)
}

/// A message as one frame, or two if it is long. No more, as the runtime closes the connection when
/// 256 frames wait to be read.
fn frames(id: u32, message: &[u8]) -> Vec<u8> {
    let (first, rest) = message.split_at(message.len().min(FIRST_PAYLOAD_MAX));
    let mut out = Vec::with_capacity(2 * FRAME_HEADER + message.len());
    for payload in [first, rest] {
        // A ttrpc message is shorter than 4 GiB, as its own header has a length of 32 bits.
        if let Ok(length) = u32::try_from(payload.len())
            && length > 0
        {
            out.extend(id.to_be_bytes());
            out.extend(length.to_be_bytes());
            out.extend(payload);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(mut frames: &[u8]) -> Vec<usize> {
        let mut lengths = Vec::new();
        while !frames.is_empty() {
            let length = u32::from_be_bytes(frames[4..8].try_into().unwrap()) as usize;
            lengths.push(length);
            frames = &frames[FRAME_HEADER + length..];
        }
        lengths
    }

    #[test]
    fn a_message_up_to_4096_bytes_is_one_frame_and_a_longer_one_is_two() {
        assert_eq!(lengths(&frames(PLUGIN, &[0; 10])), [10]);
        assert_eq!(lengths(&frames(PLUGIN, &[0; 4096])), [4096]);
        assert_eq!(lengths(&frames(PLUGIN, &[0; 4097])), [4096, 1]);
        assert_eq!(
            lengths(&frames(PLUGIN, &vec![0; 10 + (4 << 20)])),
            [4096, (4 << 20) - 4086]
        );
    }
}
