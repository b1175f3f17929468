//! One line for each thing that is said, whatever words of strangers are in it.

use std::io::{self, Write};

use tracing_subscriber::fmt::MakeWriter;

use crate::text;

/// Writes what it is given with nothing in it that ends a line before its end, or that a terminal acts on: an error may
/// have the words of a runtime in it, and those the words of a pod. For text only; JSON has escapes of its own.
#[derive(Debug)]
pub struct Escaping<M>(pub M);

impl<'a, M: MakeWriter<'a>> MakeWriter<'a> for Escaping<M> {
    type Writer = EscapedLine<M::Writer>;

    fn make_writer(&'a self) -> Self::Writer {
        EscapedLine(self.0.make_writer())
    }

    fn make_writer_for(&'a self, meta: &tracing::Metadata<'_>) -> Self::Writer {
        EscapedLine(self.0.make_writer_for(meta))
    }
}

/// The writer of one line, which is written at once (`Layer::on_event` in `tracing_subscriber::fmt`).
#[derive(Debug)]
pub struct EscapedLine<W>(W);

impl<W: Write> Write for EscapedLine<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        let text = text.strip_suffix('\n').unwrap_or(&text);
        // In one go, or the lines of two tasks would mingle.
        self.0
            .write_all(format!("{}\n", text::printable(text)).as_bytes())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[test]
    fn whatever_is_in_it_a_line_is_one() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let lines = tracing_subscriber::fmt::layer()
            .without_time()
            .with_target(false)
            .with_ansi(false)
            .with_writer(Escaping(file.reopen().unwrap()));
        let there = tracing::subscriber::set_default(tracing_subscriber::registry().with(lines));
        let error = "no such file: \"a\n INFO all is well\"\r\u{202e}";
        tracing::warn!(%error, "first");
        tracing::warn!("second");
        drop(there);
        assert_eq!(
            fs::read_to_string(file.path()).unwrap(),
            " WARN first error=no such file: \"a\\n INFO all is well\"\\r\\u{202e}\n WARN second\n"
        );
    }
}
