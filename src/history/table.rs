//! Restarts as lines for people.

use std::iter::once;

use super::Entry;
use crate::columns::Columns;
use crate::policy::{MatchedBy, MatchedRule, RULES_KEY};
use crate::text;

const HEADINGS: [&str; COLUMNS] = [
    "WHEN",
    "POD",
    "TRIGGER",
    "RULE",
    "ACTION",
    "OUTCOME",
    "RESTARTS",
    "BACK-OFF",
    "KILLED",
    "FIRST",
    "ALL",
    "WAY",
    "NO REPLAY",
    "ID",
];
const COLUMNS: usize = 14;

/// What comes later is set as what came first.
pub(super) struct Table(Columns);

impl Table {
    /// For these restarts, and others.
    pub(super) fn of<'e>(entries: impl IntoIterator<Item = &'e Entry>) -> Self {
        let lines: Vec<_> = once(headings())
            .chain(entries.into_iter().map(cells))
            .collect();
        Self(Columns::of(lines.iter().map(|line| &line[..])))
    }

    pub(super) fn headings(&self) -> String {
        self.0.line(&headings())
    }

    pub(super) fn row(&self, entry: &Entry) -> String {
        self.0.line(&cells(entry))
    }
}

fn headings() -> [String; COLUMNS] {
    HEADINGS.map(str::to_owned)
}

fn cells(entry: &Entry) -> [String; COLUMNS] {
    let none = || "-".to_owned();
    let or_none = |cell: Option<String>| cell.unwrap_or_else(none);
    let back_off = Some(entry.back_off_ms).filter(|ms| *ms > 0);
    [
        entry.at.clone(),
        format!("{}/{}", entry.namespace, entry.pod),
        trigger(entry),
        or_none(entry.rule.as_ref().map(rule)),
        entry.action.clone(),
        match (&entry.phase, entry.not_started.as_slice()) {
            (Some(phase), _) => format!("{} ({phase:?})", entry.outcome),
            (None, []) => entry.outcome.clone(),
            (None, names) => format!("{} ({})", entry.outcome, text::listed(names)),
        },
        or_none(entry.restarts.map(|it| it.to_string())),
        or_none(back_off.map(seconds)),
        or_none(entry.killed_ms.map(seconds)),
        or_none(entry.first_running_ms.map(seconds)),
        or_none(entry.all_running_ms.map(seconds)),
        entry.way.clone(),
        or_none(entry.no_replay.clone()),
        entry.id.clone(),
    ]
    .map(|cell| text::printable(&cell).into_owned())
}

fn trigger(entry: &Entry) -> String {
    let exit = entry.container.as_ref().zip(entry.exit_code);
    match (&entry.request, exit) {
        (Some(request), _) => format!("request {request}"),
        (None, Some((container, code))) => format!("{container} exit {code}"),
        (None, None) => "-".to_owned(),
    }
}

/// The place is named as far as it tells anything, and so is the key by which it has matched.
fn rule(rule: &MatchedRule) -> String {
    let MatchedRule { number, source, by } = rule;
    let place = source.strip_prefix(RULES_KEY).unwrap_or(source);
    let mut told = number.to_string();
    if *by != MatchedBy::ExitCodes {
        told = format!("{told} {by}");
    }
    if !place.is_empty() {
        told = format!("{told} ({place})");
    }
    told
}

fn seconds(ms: u64) -> String {
    format!("{}.{:03}s", ms / 1000, ms % 1000)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::tests::{asked, exited};

    #[test]
    fn a_line_says_what_set_a_restart_off_and_what_came_of_it() {
        let entries = [exited("a"), asked("b")];
        let table = Table::of(&entries);
        let lines = [table.headings()];
        let lines: Vec<_> = lines
            .into_iter()
            .chain(entries.iter().map(|it| table.row(it)))
            .collect();
        assert_eq!(
            lines.join("\n"),
            "\
WHEN                       POD   TRIGGER           RULE                ACTION                 OUTCOME         RESTARTS   BACK-OFF   KILLED   FIRST    ALL       WAY                   NO REPLAY                     ID
2026-01-01T00:00:00.123Z   n/a   trainer exit 42   2 onSignal (/pod)   RestartAllContainers   Restarted       3          10.000s    0.052s   0.310s   10.410s   by replay             -                             a-1
2026-01-01T00:00:01.000Z   n/b   request t1        -                   RestartPod             UnderWay (Up)   -          -          -        -        -         behind placeholders   trainer has a startup probe   b-1"
        );
    }

    #[test]
    fn what_strangers_wrote_is_one_line_that_no_terminal_acts_on() {
        let mut entry = asked("b");
        entry.request = Some("t\n\x1b[31m\u{202e}".to_owned());
        entry.not_started = vec!["c\x07".to_owned()];
        entry.phase = None;
        let row = Table::of([&entry]).row(&entry);
        assert!(row.contains(r"request t\n\u{1b}[31m\u{202e} "), "{row}");
        assert!(row.contains(r"(c\u{7})"), "{row}");
    }
}
