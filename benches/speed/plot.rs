//! The restarts as bars, for docs/speed.md and the README.

use std::fmt::Write;

use crate::Results;
use crate::report::sample;
use crate::restarts::{PodKind, Way};

const WIDTH: f64 = 760.0;
/// Where the bars begin.
const LEFT: f64 = 230.0;
/// What is written behind a bar.
const RIGHT: f64 = 60.0;
const TOP: f64 = 34.0;
const BAR: f64 = 13.0;
const GAP: f64 = 12.0;
const WAYS: [(Way, &str); 4] = [
    (Way::Replay, "#1a7f37"),
    (Way::Kubelet, "#54aeff"),
    (Way::Native, "#8c959f"),
    (Way::Recreate, "#d4a72c"),
];

/// Bars of medians; a line goes on to the worst.
pub(crate) fn svg(results: &Results) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = draw(&mut text, results);
    text
}

fn draw(text: &mut String, results: &Results) -> std::fmt::Result {
    let samples = PodKind::ALL.map(|pod| WAYS.map(|(way, _)| sample(results, pod, way)));
    let worst = samples
        .iter()
        .flatten()
        .flatten()
        .map(crate::stats::Sample::worst);
    let scale = (WIDTH - LEFT - RIGHT) / worst.fold(f64::MIN_POSITIVE, f64::max);
    // A handful of bars: exact.
    let bars = f64::from(u32::try_from(WAYS.len()).unwrap_or(u32::MAX));
    let pods = f64::from(u32::try_from(PodKind::ALL.len()).unwrap_or(u32::MAX));
    let height = TOP + pods * (bars * BAR + GAP);
    writeln!(
        text,
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="11">
<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>"##
    )?;
    let mut x = 10.0;
    for (way, colour) in WAYS {
        writeln!(
            text,
            r#"<rect x="{x}" y="8" width="10" height="10" fill="{colour}"/><text x="{}" y="17">{way}</text>"#,
            x + 14.0
        )?;
        x += 185.0;
    }
    let mut y = TOP;
    for (pod, samples) in PodKind::ALL.iter().zip(&samples) {
        let middle = y + bars * BAR / 2.0 + 4.0;
        writeln!(
            text,
            r#"<text x="{}" y="{middle}" text-anchor="end">{pod}</text>"#,
            LEFT - 8.0
        )?;
        for (sample, (_, colour)) in samples.iter().zip(WAYS) {
            if let Some(sample) = sample {
                let (median, worst) = (sample.median(), sample.worst());
                let (to, line) = (median * scale, y + BAR / 2.0 - 1.0);
                let end = LEFT + worst * scale;
                writeln!(
                    text,
                    r#"<rect x="{LEFT}" y="{y}" width="{to:.1}" height="{}" fill="{colour}"/><path d="M{:.1} {line}H{end:.1}" stroke="{colour}"/><text x="{:.1}" y="{}">{median:.2} s</text>"#,
                    BAR - 2.0,
                    LEFT + to,
                    end + 4.0,
                    y + BAR - 3.0
                )?;
            }
            y += BAR;
        }
        y += GAP;
    }
    writeln!(text, "</svg>")
}
