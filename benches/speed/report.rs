//! The tables, for people.

use std::fmt::Write;

use crate::Results;
use crate::bursts::POD_KINDS;
use crate::costs::BETWEEN_HOSTILE;
use crate::restarts::{PodKind, Way};
use crate::stats::Sample;

const KIB_PER_MIB: f64 = 1024.0;
const BYTES_PER_MIB: f64 = 1024.0 * 1024.0;

/// What the project set out to reach.
mod target {
    /// The kubelet's own time for three containers that ignore SIGTERM, divided by that of a replay.
    pub(super) const THREE: f64 = 15.0;
    /// The same for five.
    pub(super) const FIVE: f64 = 25.0;
    /// The worst of a burst, of the kubelet's own.
    pub(super) const BURST: f64 = 2.0 / 3.0;
    pub(super) const HANDLER_MS: f64 = 1.0;
    pub(super) const HOOK_MS: f64 = 5.0;
    pub(super) const RESIDENT_MIB: f64 = 15.0;
    pub(super) const HOSTILE_MIB: f64 = 40.0;
}

pub(crate) fn markdown(results: &Results) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = restarts(&mut text, results);
    let _ = bursts(&mut text, results);
    let _ = costs(&mut text, results);
    let _ = targets(&mut text, results);
    text
}

fn restarts(text: &mut String, results: &Results) -> std::fmt::Result {
    let options = &results.options;
    writeln!(text, "{}.\n", results.machine)?;
    writeln!(
        text,
        "From the exit of one container to all containers running, as the containers themselves \
         wrote it down: median (worst) of {} rounds in seconds, `restartPolicy: Never`, the four \
         ways in turns, each round a fresh pod. Containers end at SIGTERM unless the row says \
         otherwise. Deleting and creating begins with the exit too, with nobody who has to notice \
         it first; the pods have `terminationGracePeriodSeconds: {}`.\n",
        options.rounds, options.grace
    )?;
    writeln!(
        text,
        "| pod | Reprise, replay | Reprise, start by kubelet | the kubelet alone | delete and create | \
         replay: times as fast as the kubelet |\n|---|--:|--:|--:|--:|--:|"
    )?;
    for pod in PodKind::ALL {
        write!(text, "| {pod} ")?;
        for way in [Way::Replay, Way::Kubelet, Way::Native, Way::Recreate] {
            write!(text, "| {} ", cell(results, pod, way))?;
        }
        let factor = factor(results, pod).map_or("-".to_owned(), |it| format!("{it:.1}"));
        writeln!(text, "| {factor} |")?;
    }
    writeln!(text)
}

/// Pods that restart in the same second.
fn bursts(text: &mut String, results: &Results) -> std::fmt::Result {
    writeln!(
        text,
        "| {} pods at once, from each pod's exit to all running | | median | worst |\n\
         |---|---|--:|--:|",
        results.options.burst
    )?;
    for burst in &results.bursts {
        let (pod, way, failed) = (burst.pod, burst.way, burst.failed);
        let Some(sample) = Sample::of(burst.seconds.iter().copied()) else {
            writeln!(text, "| {pod} | {way} | - | {failed} failed |")?;
            continue;
        };
        let (median, worst) = (sample.median(), sample.worst());
        let failed = failures(failed);
        writeln!(text, "| {pod} | {way} | {median:.1} | {worst:.1}{failed} |")?;
    }
    writeln!(
        text,
        "\n| pods of one container each, asked to restart together, by replay; from the asking to all running | median | worst | \
         of the cores' time in use until then, % |\n\
         |--:|--:|--:|--:|"
    )?;
    for group in &results.groups {
        let samples = [&group.seconds, &group.busy].map(|it| Sample::of(it.iter().copied()));
        if let [Some(seconds), Some(busy)] = samples {
            let (pods, busy) = (group.pods, busy.median());
            let (median, worst) = (seconds.median(), seconds.worst());
            writeln!(text, "| {pods} | {median:.2} | {worst:.2} | {busy:.0} |")?;
        }
    }
    writeln!(text)
}

fn worst_of_burst(results: &Results, pod: PodKind, way: Way) -> Option<f64> {
    let mut bursts = results.bursts.iter();
    let burst = bursts.find(|burst| burst.pod == pod && burst.way == way)?;
    Some(Sample::of(burst.seconds.iter().copied())?.worst())
}

pub(crate) fn sample(results: &Results, pod: PodKind, way: Way) -> Option<Sample> {
    let rounds = results.restarts.iter();
    let rounds = rounds.filter(|it| it.pod == pod && it.way == way);
    Sample::of(rounds.filter_map(crate::restarts::Round::seconds))
}

fn cell(results: &Results, pod: PodKind, way: Way) -> String {
    let wanted = results.options.rounds as usize;
    let Some(sample) = sample(results, pod, way) else {
        return "failed".to_owned();
    };
    let failed = failures(wanted - sample.count());
    format!("{:.2} ({:.2}{failed})", sample.median(), sample.worst())
}

/// What follows the worst of those that did not fail.
fn failures(count: usize) -> String {
    match count {
        0 => String::new(),
        count => format!(", {count} failed"),
    }
}

/// How many times as long the kubelet takes.
fn factor(results: &Results, pod: PodKind) -> Option<f64> {
    let native = sample(results, pod, Way::Native)?.median();
    Some(native / sample(results, pod, Way::Replay)?.median())
}

fn costs(text: &mut String, results: &Results) -> std::fmt::Result {
    let (costs, hostile, options) = (&results.costs, &results.hostile, &results.options);
    writeln!(text, "| cost | median | p99 | worst |\n|---|--:|--:|--:|")?;
    if let Some(calls) = Sample::of(costs.create_container_us.iter().map(|us| us / 1e3)) {
        writeln!(
            text,
            "| creating a container of a pod without rules, {} calls, {} pods with rules known, {:.0} % of \
             the cores' time in use: the runtime's question ({:.1} KiB) to the answer over a unix socket, the \
             handler in it, ms \
             | {:.3} | {:.3} | {:.3} |",
            calls.count(),
            options.pods,
            costs.busy_percent,
            // Lossless: far below 2^52.
            f64::from(u32::try_from(costs.create_container_request_bytes).unwrap_or(u32::MAX))
                / 1024.0,
            calls.median(),
            calls.p99(),
            calls.worst()
        )?;
    }
    if let Some(echo) = Sample::of(costs.echo_us.iter().map(|us| us / 1e3)) {
        writeln!(
            text,
            "| in turns with them, as many bytes to a thread that answers at once, ms | {:.3} | {:.3} | {:.3} |",
            echo.median(),
            echo.p99(),
            echo.worst()
        )?;
    }
    let questions = [
        (
            "the same right behind the first container of a pod with hostile annotations",
            &costs.create_container_behind_hostile_us,
        ),
        (
            "that first container and the one behind it, one after the other as the runtime asks",
            &costs.create_container_with_hostile_us,
        ),
        (
            "in turns with them, the thread that answers at once, right behind such a first container",
            &costs.echo_behind_hostile_us,
        ),
    ];
    for (what, took_us) in questions {
        if let Some(calls) = Sample::of(took_us.iter().map(|us| us / 1e3)) {
            writeln!(
                text,
                "| {what}, {} times, {} ms between them, ms | {:.3} | {:.3} | {:.3} |",
                calls.count(),
                BETWEEN_HOSTILE.as_millis(),
                calls.median(),
                calls.p99(),
                calls.worst()
            )?;
        }
    }
    if let Some(hook) = Sample::of(costs.hook_ms.iter().copied()) {
        writeln!(
            text,
            "| the hook with no plugin there, the whole process, {} runs, ms | {:.1} | {:.1} | {:.1} |",
            hook.count(),
            hook.median(),
            hook.p99(),
            hook.worst()
        )?;
    }
    writeln!(
        text,
        "\n| size | MiB | of it anonymous |\n|---|--:|--:|\n\
         | resident memory, just started | {:.1} | {:.1} |\n\
         | resident memory with {} pods with rules | {:.1} | {:.1} |\n\
         | the most since the start | {:.1} | |\n\
         | resident memory with {} hostile pods, after a start with them | {:.1} | {:.1} |\n\
         | the most with them, made while it runs | {:.1} | |\n\
         | the most at a start with them | {:.1} | |\n\
         | release binary | {:.1} | |\n",
        mib(costs.idle.kib),
        mib(costs.idle.anonymous_kib),
        options.pods,
        mib(costs.with_pods.kib),
        mib(costs.with_pods.anonymous_kib),
        mib(costs.resident_kib_peak),
        hostile.pods,
        mib(hostile.in_the_end.kib),
        mib(hostile.in_the_end.anonymous_kib),
        mib(hostile.peak_kib),
        mib(hostile.peak_kib_at_start),
        float(costs.binary_bytes) / BYTES_PER_MIB,
    )
}

fn targets(text: &mut String, results: &Results) -> std::fmt::Result {
    let (costs, hostile) = (&results.costs, &results.hostile);
    let p99 = |values: &[f64], per: f64| {
        Sample::of(values.iter().map(|value| value / per)).map(|sample| sample.p99())
    };
    writeln!(text, "| target | measured | |\n|---|--:|---|")?;
    let mut line =
        |what: String, measured: Option<(f64, &str)>, met: fn(f64, f64) -> bool, than: f64| {
            let (measured, verdict) = match measured {
                Some((value, unit)) if met(value, than) => (format!("{value:.2}{unit}"), "met"),
                Some((value, unit)) => (format!("{value:.2}{unit}"), "missed"),
                None => ("-".to_owned(), "not measured"),
            };
            writeln!(text, "| {what} | {measured} | {verdict} |")
        };
    let at_least: fn(f64, f64) -> bool = |value, than| value >= than;
    let below: fn(f64, f64) -> bool = |value, than| value < than;
    for (pod, than) in [
        (PodKind::ThreeIgnoringTerm, target::THREE),
        (PodKind::FiveIgnoringTerm, target::FIVE),
    ] {
        line(
            format!("{pod}: replay at least {than} times as fast as the kubelet alone"),
            factor(results, pod).map(|factor| (factor, " times")),
            at_least,
            than,
        )?;
    }
    for pod in POD_KINDS {
        let burst = worst_of_burst(results, pod, Way::Replay);
        let burst = burst.zip(worst_of_burst(results, pod, Way::Native));
        line(
            format!("a burst, {pod}: the worst replay at most two thirds of the kubelet's worst"),
            burst.map(|(replay, native)| (replay / native, " of it")),
            |value, than| value <= than,
            target::BURST,
        )?;
    }
    let questions = [
        (
            "creating a container of a pod without rules",
            &costs.create_container_us,
            &costs.echo_us,
        ),
        (
            "the same right behind one of a hostile pod",
            &costs.create_container_behind_hostile_us,
            &costs.echo_behind_hostile_us,
        ),
    ];
    for (what, took_us, echo_us) in questions {
        let more = p99(took_us, 1e3).zip(p99(echo_us, 1e3));
        line(
            format!(
                "{what}: p99 less than {} ms above that of a thread which answers at once",
                target::HANDLER_MS
            ),
            more.map(|(ours, threads)| (ours - threads, " ms")),
            below,
            target::HANDLER_MS,
        )?;
    }
    line(
        format!("the hook: p99 below {} ms", target::HOOK_MS),
        p99(&costs.hook_ms, 1.0).map(|it| (it, " ms")),
        below,
        target::HOOK_MS,
    )?;
    line(
        format!(
            "resident memory with {} pods: below {} MiB",
            results.options.pods,
            target::RESIDENT_MIB
        ),
        Some((mib(costs.with_pods.kib), " MiB")),
        below,
        target::RESIDENT_MIB,
    )?;
    let most = hostile.peak_kib.max(hostile.peak_kib_at_start);
    line(
        format!(
            "most resident memory with {} hostile pods: below {} MiB",
            hostile.pods,
            target::HOSTILE_MIB
        ),
        Some((mib(most), " MiB")),
        below,
        target::HOSTILE_MIB,
    )
}

fn mib(kib: u64) -> f64 {
    float(kib) / KIB_PER_MIB
}

/// Exact for everything that a process or a file comes to.
#[allow(clippy::cast_precision_loss)]
fn float(value: u64) -> f64 {
    value as f64
}
