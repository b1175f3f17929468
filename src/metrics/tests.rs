//! What is counted comes out as it went in, in a text that can be read.

use std::collections::BTreeMap;

use super::*;
use crate::plan::tests::plan;
use crate::plan::{Starter, Way};
use crate::policy::{Action, MatchedBy, MatchedRule};

/// All families, with their types.
const FAMILIES: [(&str, &str); 18] = [
    ("reprise_back_off_seconds", "histogram"),
    ("reprise_build", "info"),
    ("reprise_exit_hold_seconds", "histogram"),
    ("reprise_exit_to_all_running_seconds", "histogram"),
    ("reprise_exit_to_first_running_seconds", "histogram"),
    ("reprise_exit_to_killed_seconds", "histogram"),
    ("reprise_exits_held", "gauge"),
    ("reprise_gate_refusals", "counter"),
    ("reprise_leftovers_swept", "counter"),
    ("reprise_nri_connected", "gauge"),
    ("reprise_nri_handler_seconds", "histogram"),
    ("reprise_nri_reconnects", "counter"),
    ("reprise_pods_backing_off", "gauge"),
    ("reprise_replays_declined", "counter"),
    ("reprise_restarts", "counter"),
    ("reprise_restarts_begun_anew", "counter"),
    ("reprise_restarts_under_way", "gauge"),
    ("reprise_unmatched_exits", "counter"),
];

/// What a scrape shows, by name and labels.
#[derive(Debug)]
pub(crate) struct Scrape {
    types: BTreeMap<String, String>,
    samples: BTreeMap<String, f64>,
}

impl Scrape {
    /// Panics at what is no text of `OpenMetrics`.
    pub(crate) fn read(text: &str) -> Self {
        let body = text.strip_suffix("# EOF\n").expect("an end");
        let (mut types, mut samples) = (BTreeMap::new(), BTreeMap::new());
        let mut helped = 0;
        for line in body.lines() {
            if let Some(kind) = line.strip_prefix("# TYPE ") {
                let (name, kind) = kind.split_once(' ').expect("a name and a type");
                types.insert(name.to_owned(), kind.to_owned());
            } else if let Some(help) = line.strip_prefix("# HELP ") {
                let (_, help) = help.split_once(' ').expect("a name and a help");
                assert!(help.ends_with('.') && !help.ends_with(".."), "{line}");
                helped += 1;
            } else if !line.starts_with("# UNIT ") {
                let (series, value) = line.rsplit_once(' ').expect("a series and a value");
                let name = series.split('{').next().unwrap_or_default();
                assert!(
                    types.keys().any(|family| name.starts_with(family)),
                    "{line}"
                );
                let before = samples.insert(series.to_owned(), value.parse().expect("a number"));
                assert_eq!(before, None, "twice: {line}");
            }
        }
        assert_eq!(helped, types.len());
        Self { types, samples }
    }

    /// 0 where there is no such series yet.
    pub(crate) fn value(&self, series: &str) -> f64 {
        self.samples.get(series).copied().unwrap_or_default()
    }

    fn has(&self, series: &str) -> bool {
        self.samples.contains_key(series)
    }
}

impl Metrics {
    pub(crate) fn value(&self, series: &str) -> u64 {
        let value = Scrape::read(&self.text().unwrap()).value(series);
        assert!(value >= 0.0 && value.fract() == 0.0, "{series} {value}");
        format!("{value}").parse().unwrap()
    }
}

fn timings() -> Timings {
    Timings {
        killed: Some(Duration::from_millis(70)),
        first_running: Some(Duration::from_millis(250)),
        all_running: Duration::from_millis(260),
    }
}

/// As after a restart, in which everything happened that is counted.
fn eventful() -> Metrics {
    let metrics = Metrics::default();
    metrics.restarted(&plan(), Outcome::Completed, timings());
    metrics.replay_declined(&ReplayBlocker::Asked);
    metrics.begun_anew(true);
    metrics.gate_refused(&Refused::Runs("a".into()));
    drop(metrics.handlers().begin("CreateContainer"));
    metrics
}

#[test]
fn a_scrape_can_be_read_and_has_every_family() {
    let text = eventful().text().unwrap();
    // hack/metrics.sh gives it to promtool.
    println!("{text}");
    let scrape = Scrape::read(&text);
    let families = scrape.types.iter();
    let families: Vec<_> = families.map(|(name, kind)| (&**name, &**kind)).collect();
    assert_eq!(families, FAMILIES);
    let version = env!("CARGO_PKG_VERSION");
    assert!(scrape.has(&format!("reprise_build_info{{version=\"{version}\"}}")));
}

#[test]
fn what_has_no_labels_is_there_before_it_is_counted() {
    let scrape = Scrape::read(&Metrics::default().text().unwrap());
    assert!(scrape.has("reprise_nri_reconnects_total"));
    assert!(scrape.has("reprise_exit_hold_seconds_count"));
}

#[test]
fn a_restart_is_counted_by_what_it_was_and_measured_if_it_was_one() {
    let metrics = Metrics::default();
    let replayed = Plan {
        starter: Starter::Plugin,
        ..plan()
    };
    metrics.restarted(&replayed, Outcome::Completed, timings());
    metrics.restarted(&replayed, Outcome::Completed, timings());
    metrics.restarted(&replayed, Outcome::Deleted, timings());
    let kept = Plan {
        way: Way::Kept,
        action: Action::RestartPod,
        ..plan()
    };
    metrics.restarted(&kept, Outcome::Completed, timings());
    let value = |series: &str| metrics.value(series);
    let of = |action, way, outcome| {
        value(&format!(
            "reprise_restarts_total{{action=\"{action}\",trigger=\"exit\",way=\"{way}\",outcome=\"{outcome}\"}}"
        ))
    };
    let text = metrics.text().unwrap();
    assert_eq!(text.matches("reprise_restarts_total{").count(), 2 * 7);
    assert_eq!(of("RestartAllContainers", "replay", "Restarted"), 2);
    assert_eq!(of("RestartAllContainers", "replay", "PodEnded"), 1);
    assert_eq!(of("RestartPod", "policy", "Restarted"), 1);
    for (by, trigger) in [(MatchedBy::Signal, "signal"), (MatchedBy::OomKilled, "oom")] {
        let mut plan = plan();
        plan.trigger.rule = Some(MatchedRule {
            number: 1,
            source: String::new(),
            by,
        });
        metrics.restarted(&plan, Outcome::Completed, timings());
        let text = metrics.text().unwrap();
        assert!(text.contains(&format!(",trigger=\"{trigger}\",")), "{text}");
    }
    let labels = "action=\"RestartAllContainers\",way=\"replay\"";
    for phase in ["killed", "first_running", "all_running"] {
        let series = format!("reprise_exit_to_{phase}_seconds_count{{{labels}}}");
        assert_eq!(value(&series), 2, "{phase}");
    }
    let bucket = |le| {
        value(&format!(
            "reprise_exit_to_all_running_seconds_bucket{{le=\"{le}\",{labels}}}"
        ))
    };
    assert_eq!((bucket("0.2"), bucket("0.3")), (0, 2));
}

#[test]
fn what_waited_for_a_back_off_says_nothing_of_how_fast_pods_start() {
    let metrics = Metrics::default();
    let waited = Plan {
        starter: Starter::Plugin,
        back_off_ms: 10_000,
        ..plan()
    };
    metrics.restarted(&waited, Outcome::Completed, timings());
    let count = |phase| {
        let labels = "action=\"RestartAllContainers\",way=\"replay\"";
        metrics.value(&format!(
            "reprise_exit_to_{phase}_seconds_count{{{labels}}}"
        ))
    };
    assert_eq!(
        ["killed", "first_running", "all_running"].map(count),
        [1, 0, 0]
    );
}

#[test]
fn a_gauge_shows_what_is_there() {
    let metrics = Metrics::default();
    let first = metrics.under_way();
    let second = metrics.under_way();
    assert_eq!(metrics.value("reprise_restarts_under_way"), 2);
    drop((first, second));
    assert_eq!(metrics.value("reprise_restarts_under_way"), 0);
}

#[test]
fn only_what_follows_the_first_connection_is_a_reconnect() {
    let metrics = Metrics::default();
    let values =
        || ["reprise_nri_connected", "reprise_nri_reconnects_total"].map(|it| metrics.value(it));
    metrics.nri_connected();
    assert_eq!(values(), [1, 0]);
    metrics.nri_lost();
    assert_eq!(values(), [0, 0]);
    metrics.nri_connected();
    assert_eq!(values(), [1, 1]);
}

#[tokio::test(start_paused = true)]
async fn a_handler_is_measured_from_its_beginning_to_its_end() {
    let metrics = Metrics::default();
    let handling = metrics.handlers().begin("CreateContainer");
    tokio::time::advance(Duration::from_millis(30)).await;
    let other = metrics.handlers().begin("StopContainer");
    assert_eq!(
        metrics.handlers().longest(),
        Some(Duration::from_millis(30))
    );
    drop(handling);
    assert_eq!(metrics.handlers().longest(), Some(Duration::ZERO));
    drop(other);
    assert_eq!(metrics.handlers().longest(), None);
    let bucket = |le| {
        let labels = format!("le=\"{le}\",event=\"CreateContainer\"");
        metrics.value(&format!("reprise_nri_handler_seconds_bucket{{{labels}}}"))
    };
    assert_eq!((bucket("0.025"), bucket("0.05")), (0, 1));
}
