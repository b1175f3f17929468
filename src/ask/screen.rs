//! What is said while pods restart: a bar on a terminal, and plain lines for whoever reads them later.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use super::rollout::{Counts, Outcome};
use super::time::Timeout;
use crate::text;

/// Of the bar.
const WIDTH: usize = 20;
/// Back to the beginning of the line, and away with what is in it.
const CLEAR: &str = "\r\x1b[K";

/// Where it is said.
pub(super) struct Screen<'a> {
    pub(super) out: &'a mut dyn Write,
    pub(super) err: &'a mut dyn Write,
    /// `err` is a terminal.
    pub(super) bar: bool,
    /// A line for each step on `out`. Where that is the terminal with the bar, it tells of what went wrong alone.
    pub(super) lines: bool,
}

impl<'a> Screen<'a> {
    /// Of this process: without a bar, until there is something to wait for.
    pub(super) fn new(out: &'a mut dyn Write, err: &'a mut dyn Write) -> Self {
        Self {
            out,
            err,
            bar: false,
            lines: true,
        }
    }

    /// There is progress to be seen from now on, on a terminal.
    pub(super) fn wait(&mut self) {
        self.bar = io::stderr().is_terminal();
        self.lines = !self.bar || !io::stdout().is_terminal();
    }

    /// A pod has been asked.
    pub(super) fn asked(&mut self, pod: &str, token: &str) -> io::Result<()> {
        self.line(&format!("pod/{pod} asked to restart, request {token}"))
    }

    /// It would be.
    pub(super) fn would_be_asked(&mut self, pod: &str) -> io::Result<()> {
        self.line(&format!("pod/{pod} would be asked to restart (dry run)"))
    }

    /// What has become of it.
    pub(super) fn over(&mut self, pod: &str, outcome: &Outcome, limit: Timeout) -> io::Result<()> {
        match outcome {
            Outcome::Restarted(message) => self.line(&format!("pod/{pod} restarted: {message}")),
            Outcome::NotRestarted(why) => self.trouble(&format!("pod/{pod} not restarted: {why}")),
            Outcome::LeftAlone(why) => self.note(&format!("pod/{pod} is left alone: {why}")),
            Outcome::Late(why) => {
                self.trouble(&format!("pod/{pod} not restarted in {limit}: {why}"))
            }
        }
    }

    /// What else there is to say, beside the results.
    pub(super) fn note(&mut self, note: &str) -> io::Result<()> {
        self.clear()?;
        writeln!(self.err, "{}", text::printable(note))
    }

    /// The bar anew.
    pub(super) fn draw(&mut self, counts: Counts, elapsed: Duration) -> io::Result<()> {
        if !self.bar {
            return Ok(());
        }
        write!(self.err, "{CLEAR}{}", bar(counts, elapsed))?;
        self.err.flush()
    }

    /// The bar for the last time.
    pub(super) fn leave(&mut self, counts: Counts, elapsed: Duration) -> io::Result<()> {
        self.draw(counts, elapsed)?;
        if self.bar {
            writeln!(self.err)?;
        }
        Ok(())
    }

    fn line(&mut self, line: &str) -> io::Result<()> {
        if !self.lines {
            return Ok(());
        }
        self.clear()?;
        writeln!(self.out, "{}", text::printable(line))?;
        self.out.flush()
    }

    fn trouble(&mut self, line: &str) -> io::Result<()> {
        if self.lines {
            self.line(line)
        } else {
            self.note(line)
        }
    }

    fn clear(&mut self) -> io::Result<()> {
        if self.bar {
            write!(self.err, "{CLEAR}")?;
            self.err.flush()?;
        }
        Ok(())
    }
}

/// One line of less than 80 columns.
fn bar(counts: Counts, elapsed: Duration) -> String {
    let done = WIDTH * counts.restarted / counts.all.max(1);
    let (full, empty) = ("#".repeat(done), "-".repeat(WIDTH - done));
    let mut line = format!(
        "[{full}{empty}] {} of {} restarted",
        counts.restarted, counts.all
    );
    for (count, what) in [
        (counts.asked, "under way"),
        (counts.not_restarted + counts.late, "failed"),
    ] {
        if count > 0 {
            line = format!("{line}, {count} {what}");
        }
    }
    let seconds = elapsed.as_secs();
    format!("{line}, {}:{:02}", seconds / 60, seconds % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts() -> Counts {
        Counts {
            all: 20,
            waiting: 4,
            asked: 3,
            restarted: 12,
            not_restarted: 1,
            late: 0,
        }
    }

    /// What `out` and `err` get to see.
    fn shown(
        bar: bool,
        lines: bool,
        say: impl FnOnce(&mut Screen<'_>) -> io::Result<()>,
    ) -> [String; 2] {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let mut screen = Screen {
            out: &mut out,
            err: &mut err,
            bar,
            lines,
        };
        say(&mut screen).unwrap();
        [out, err].map(|bytes| String::from_utf8(bytes).unwrap())
    }

    fn story(screen: &mut Screen<'_>) -> io::Result<()> {
        let limit = "5m".parse().unwrap();
        screen.asked("a", "t1")?;
        screen.draw(counts(), Duration::from_secs(83))?;
        screen.over("a", &Outcome::Restarted("Restart 4".to_owned()), limit)?;
        screen.over(
            "b",
            &Outcome::NotRestarted("it\nwas deleted".to_owned()),
            limit,
        )?;
        screen.over("c", &Outcome::Late("no answer".to_owned()), limit)?;
        screen.leave(counts(), Duration::from_secs(84))
    }

    #[test]
    fn a_pipe_gets_a_line_for_each_step() {
        let [out, err] = shown(false, true, story);
        assert_eq!(
            out,
            "pod/a asked to restart, request t1\n\
             pod/a restarted: Restart 4\n\
             pod/b not restarted: it\\nwas deleted\n\
             pod/c not restarted in 5m: no answer\n"
        );
        assert_eq!(err, "");
    }

    #[test]
    fn a_terminal_gets_a_bar_and_what_went_wrong() {
        let [out, err] = shown(true, false, story);
        assert_eq!(out, "");
        let bar = "[############--------] 12 of 20 restarted, 3 under way, 1 failed, 1:2";
        assert_eq!(
            err,
            format!(
                "{CLEAR}{bar}3{CLEAR}pod/b not restarted: it\\nwas deleted\n\
                 {CLEAR}pod/c not restarted in 5m: no answer\n{CLEAR}{bar}4\n"
            )
        );
    }

    #[test]
    fn a_bar_fits_into_a_line() {
        let full = Counts {
            all: 1000,
            restarted: 1000,
            ..Counts::default()
        };
        let line = bar(full, Duration::from_hours(2));
        assert_eq!(
            line,
            format!("[{}] 1000 of 1000 restarted, 120:00", "#".repeat(WIDTH))
        );
        let empty = bar(Counts::default(), Duration::ZERO);
        assert_eq!(
            empty,
            format!("[{}] 0 of 0 restarted, 0:00", "-".repeat(WIDTH))
        );
        let busy = Counts {
            all: 9999,
            asked: 900,
            restarted: 9000,
            not_restarted: 99,
            ..full
        };
        let busy = bar(busy, Duration::from_hours(2));
        assert!(busy.len() < 80, "{busy}");
    }
}
