//! Changes inputs as somebody would who knows what they are made of: words, brackets, lines and indented blocks of text;
//! calls in a row.
//!
//! What is repeated thousands of times, and what is nested hundreds of times, is how little text becomes much work.

use std::ops::Range;

use fastrand::Rng;

/// What means something to any reader of text here.
const WORDS: &[&str] = &[
    "restart-rules.reprise.dev",
    "restart-rules.reprise.dev/pod",
    "restart-rules.reprise.dev/container.trainer",
    "restart-options.reprise.dev",
    "action",
    "Restart",
    "RestartAllContainers",
    "RestartPod",
    "exitCodes",
    "onExit",
    "operator",
    "In",
    "NotIn",
    "values",
    "start",
    "Replay",
    "gracePeriodSeconds",
    "completedContainers",
    "backOff",
    "firstSeconds",
    "metadata",
    "annotations",
    "spec",
    "initContainers",
    "containers",
    "restartPolicy",
    "restartPolicyRules",
    "Never",
    "name",
    "kind",
    "apiVersion",
    "config",
    "info",
    "null",
    "true",
    "~",
    "0",
    "-1",
    "256",
    "4294967296",
    "18446744073709551615",
    "-9223372036854775808",
    "1e999",
    "-0.0",
    ".nan",
    "0x7f",
    "&a ",
    "*a",
    "<<: *a",
    "!!binary ",
    "!!set ",
    "? ",
    "- ",
    ": ",
    ", ",
    "|\n ",
    ">-\n ",
    "---\n",
    "...\n",
    "%YAML 1.2\n",
    "%%\n",
    "#",
    "'",
    "\"",
    "\\u0000",
    "\\ud800",
    "\u{feff}",
    "\u{2028}",
    "\u{7f}",
    "\t",
    "{}",
    "[]",
    "[{}]",
    "wait\n",
    "go\n",
];

const BRACKETS: &[(&str, &str)] = &[
    ("[", "]"),
    ("{a: ", "}"),
    ("{\"a\":", "}"),
    ("- ", ""),
    ("? ", ""),
    ("a: ", ""),
];

/// Changes a text in one to four ways.
pub(crate) fn text(input: &[u8], max: usize, rng: &mut Rng) -> Vec<u8> {
    let mut text = input.to_vec();
    for _ in 0..rng.usize(1..=4) {
        change(&mut text, max, rng);
    }
    text
}

fn change(text: &mut Vec<u8>, max: usize, rng: &mut Rng) {
    let unit = unit(text, rng);
    let piece = text[unit.clone()].to_vec();
    let room = max.saturating_sub(text.len());
    let new = match rng.u8(..10) {
        0 => Vec::new(),
        1 | 2 => word(rng),
        3 => [piece, word(rng)].concat(),
        4 => {
            let other = self::unit(text, rng);
            text[other].to_vec()
        }
        5 => {
            let other = self::unit(text, rng);
            [piece, text[other].to_vec()].concat()
        }
        6 => {
            let times = many(room / 8, rng);
            let (open, close) = *rng.choice(BRACKETS).unwrap_or(&("", ""));
            [
                open.repeat(times).into_bytes(),
                piece,
                close.repeat(times).into_bytes(),
            ]
            .concat()
        }
        7 => numbered(&piece, many(room / (piece.len() + 8), rng)),
        _ => piece.repeat(many(room / piece.len().max(1), rng)),
    };
    text.splice(unit, new);
    text.truncate(max);
}

fn word(rng: &mut Rng) -> Vec<u8> {
    rng.choice(WORDS)
        .map_or_else(Vec::new, |it| it.as_bytes().to_vec())
}

/// Mostly two, seldom as many as there is room for.
fn many(room: usize, rng: &mut Rng) -> usize {
    let bits = usize::BITS - room.leading_zeros();
    (2 << rng.u32(..=bits)).min(room + 1)
}

/// Copies of a piece that differ in their first word, as keys of a mapping must.
fn numbered(piece: &[u8], times: usize) -> Vec<u8> {
    let begin = piece.iter().position(|it| is_word(*it)).unwrap_or(0);
    let end = piece[begin..].iter().position(|it| !is_word(*it));
    let (before, after) = piece.split_at(end.map_or(piece.len(), |end| begin + end));
    (0..times)
        .flat_map(|number| [before, number.to_string().as_bytes(), after].concat())
        .collect()
}

/// A part of a text that means something by itself.
fn unit(text: &[u8], rng: &mut Rng) -> Range<usize> {
    if text.is_empty() {
        return 0..0;
    }
    let at = rng.usize(..text.len());
    match rng.u8(..5) {
        0 => {
            let begin = text[..at]
                .iter()
                .rposition(|it| !is_word(*it))
                .map_or(0, |it| it + 1);
            let end = text[at..]
                .iter()
                .position(|it| !is_word(*it))
                .map_or(text.len(), |it| at + it);
            begin..end.max(at + 1).max(begin)
        }
        1 => bracketed(text, at).unwrap_or(at..at + 1),
        2 => line(text, at),
        3 => block(text, at),
        _ => at..at,
    }
}

/// From the next opening bracket to the one that closes it.
fn bracketed(text: &[u8], at: usize) -> Option<Range<usize>> {
    let begin = at + text[at..].iter().position(|it| b"[{".contains(it))?;
    let mut depth = 0_usize;
    for (index, byte) in text[begin..].iter().enumerate() {
        match byte {
            b'[' | b'{' => depth += 1,
            b']' | b'}' if depth == 1 => return Some(begin..begin + index + 1),
            b']' | b'}' => depth -= 1,
            _ => {}
        }
    }
    None
}

fn line(text: &[u8], at: usize) -> Range<usize> {
    let begin = text[..at]
        .iter()
        .rposition(|it| *it == b'\n')
        .map_or(0, |it| it + 1);
    let end = text[at..]
        .iter()
        .position(|it| *it == b'\n')
        .map_or(text.len(), |it| at + it + 1);
    begin..end
}

/// A line, and those after it that are further in.
fn block(text: &[u8], at: usize) -> Range<usize> {
    let first = line(text, at);
    let depth = |line: Range<usize>| text[line].iter().take_while(|it| **it == b' ').count();
    let mut end = first.end;
    while end < text.len() {
        let next = line(text, end);
        if depth(next.clone()) <= depth(first.clone()) {
            break;
        }
        end = next.end;
    }
    first.start..end
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-_./".contains(&byte)
}

/// Changes a row of calls (see `targets::nri`): which they are, and what is in one of them.
pub(crate) fn calls(input: &[u8], rng: &mut Rng, mutate: impl Fn(&mut Vec<u8>)) -> Vec<u8> {
    let mut calls = Vec::new();
    let mut rest = input;
    while let [method, high, low, after @ ..] = rest {
        let length = usize::from(u16::from_be_bytes([*high, *low])).min(after.len());
        let (request, after) = after.split_at(length);
        calls.push((*method, request.to_vec()));
        rest = after;
    }
    if calls.is_empty() {
        calls.push((rng.u8(..), Vec::new()));
    }
    let index = rng.usize(..calls.len());
    match rng.u8(..8) {
        0 => drop(calls.remove(index)),
        1 => {
            let (_, request) = calls[index].clone();
            calls.insert(index, (rng.u8(..16), request));
        }
        2 => calls[index].0 = rng.u8(..16),
        3 => {
            let other = rng.usize(..calls.len());
            calls.swap(index, other);
        }
        _ => mutate(&mut calls[index].1),
    }
    let mut output = Vec::new();
    for (method, mut request) in calls {
        request.truncate(u16::MAX.into());
        output.push(method);
        output.extend(
            u16::try_from(request.len())
                .unwrap_or(u16::MAX)
                .to_be_bytes(),
        );
        output.extend(request);
    }
    output
}
