//! Log lines on their way to where they are written, which may take its time: nobody waits for whoever reads them.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

/// How many lines wait for a reader that has stalled. Those that come after them are lost, which is said when it reads
/// again.
const BACKLOG: usize = 4096;
/// How long the last lines may take when the process ends.
const FAREWELL: Duration = Duration::from_secs(1);

/// Takes lines, a whole one in each call, and never waits. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Queue {
    queue: SyncSender<Piece>,
    lost: Arc<AtomicU64>,
}

/// Waits, when it is dropped, until the lines before that have been written.
#[derive(Debug)]
pub struct LastLines(SyncSender<Piece>);

enum Piece {
    Line(Vec<u8>),
    End(SyncSender<()>),
}

impl Queue {
    /// Lines for `sink`, which a thread of its own writes to.
    pub fn to(sink: impl Write + Send + 'static) -> io::Result<(Self, LastLines)> {
        let (queue, pieces) = sync_channel(BACKLOG);
        let lost = Arc::<AtomicU64>::default();
        let counted = Arc::clone(&lost);
        thread::Builder::new()
            .name("log".into())
            .spawn(move || write(&pieces, &counted, sink))?;
        let end = LastLines(queue.clone());
        Ok((Self { queue, lost }, end))
    }
}

impl Write for Queue {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.queue.try_send(Piece::Line(line.to_vec())).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for LastLines {
    fn drop(&mut self) {
        let (written, is_written) = sync_channel(1);
        // Where the queue is full, nobody reads: there is nothing to wait for.
        if self.0.try_send(Piece::End(written)).is_ok() {
            let _ = is_written.recv_timeout(FAREWELL);
        }
    }
}

fn write(pieces: &Receiver<Piece>, lost: &AtomicU64, mut sink: impl Write) {
    for piece in pieces {
        let lost = lost.swap(0, Ordering::Relaxed);
        // There is nowhere to say that a line could not be written.
        let _ = match piece {
            Piece::Line(line) => sink.write_all(&line),
            Piece::End(written) => written.send(()).map_err(io::Error::other),
        };
        if lost > 0 {
            let _ = writeln!(
                sink,
                "reprise: {lost} lines of this log were lost: nobody read it"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_log_that_nobody_reads_holds_up_nobody() {
        let (reader, sink) = io::pipe().unwrap();
        let (mut lines, last) = Queue::to(sink).unwrap();
        let began = Instant::now();
        // A pipe takes 64 KiB before its writer waits.
        for number in 0..20_000 {
            let line = format!("line {number}, which is not short\n");
            lines.write_all(line.as_bytes()).unwrap();
        }
        assert!(began.elapsed() < Duration::from_secs(10));
        drop(last);
        drop(lines);
        let text: Vec<String> = BufReader::new(reader).lines().map(Result::unwrap).collect();
        assert_eq!(text[0], "line 0, which is not short");
        assert!(text.len() < 20_000);
        let said = text
            .iter()
            .any(|line| line.contains("lines of this log were lost"));
        assert!(said, "{:?}", text.last());
    }

    #[test]
    fn the_last_lines_are_written_before_the_end() {
        let (reader, sink) = io::pipe().unwrap();
        let (mut lines, last) = Queue::to(sink).unwrap();
        for _ in 0..10 {
            lines.write_all(b"line\n").unwrap();
        }
        drop(last);
        drop(lines);
        assert_eq!(BufReader::new(reader).lines().count(), 10);
    }
}
