//! Drivers beside a runtime of the test's own.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use tokio::sync::oneshot::error::TryRecvError;

use super::perform::story;
use super::testing::tools;
use super::*;
use crate::back_off::BackOff;
use crate::clock::Clock;
use crate::cri::fake::{Fake, api};
use crate::ids::PodKey;
use crate::node::{InstanceState, Maker};
use crate::plan::Plan;
use crate::plan::tests::plan;
use crate::restart::machine::Phase;
use crate::restart::pod::BegunAnew;
use crate::times::{DISK_LIMIT, DOWN_LIMIT, OOM_LIMIT};

const RULES: &str =
    r#"[{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]"#;
const HOUR: u64 = 3_600_000;

struct Place {
    fake: Fake,
    dir: tempfile::TempDir,
    clock: Clock,
    past: Past,
    options: &'static str,
}

impl Place {
    fn new() -> Self {
        let (fake, dir) = (Fake::start(), tempfile::tempdir().unwrap());
        let clock = tools(fake.client(), dir.path()).clock;
        Self {
            fake,
            dir,
            clock,
            past: Past::default(),
            options: "{}",
        }
    }

    /// The driver of a Never pod of containers `a` and `b`, with a rule for exit code 42.
    async fn driver(&self) -> Arc<Driver> {
        self.driver_with(RULES).await
    }

    async fn driver_with(&self, rules: &str) -> Arc<Driver> {
        let tools = Tools {
            clock: self.clock.clone(),
            ..tools(self.fake.client(), self.dir.path())
        };
        let pod: Value = json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {"restartPolicy": "Never", "containers": [{"name": "a"}, {"name": "b"}]},
        });
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let charge = Charge {
            annotations: Unread::of([
                ("restart-rules.reprise.dev", rules),
                ("restart-options.reprise.dev", self.options),
            ]),
            is_static: false,
            holdable: true,
            native: None,
            spec: PodSpec::from_pod(&pod, "node").map(Arc::new),
            past: self.past.clone(),
        };
        let key = PodKey {
            namespace: "n".into(),
            name: "p".into(),
        };
        let pod = PodIdentity {
            sandbox: "s".into(),
            uid: "u".into(),
            key,
        };
        let driver = Driver::spawn(Arc::new(tools), pod, charge);
        driver.until_read().await;
        driver
    }
}

fn ask(driver: &Arc<Driver>, id: &str) -> HoldDecision {
    ask_after(driver, id, Duration::ZERO)
}

fn ask_after(driver: &Arc<Driver>, id: &str, waited: Duration) -> HoldDecision {
    let container = id.into();
    driver.decide_hold(&HoldRequest {
        container,
        waited,
        exit: None,
    })
}

const OOM_RULES: &str = r#"[{"action": "RestartAllContainers", "onOOMKilled": {}}]"#;

/// What the runtime says of a container whose exit is held.
fn held(reason: &str) -> api::ContainerStatus {
    api::ContainerStatus {
        metadata: Some(api::ContainerMetadata::default()),
        reason: reason.into(),
        ..Default::default()
    }
}

/// The container `a` ends with that code, and has been judged when this returns.
async fn judge(place: &Place, code: i32, reason: &str) -> (bool, Duration, usize) {
    place.fake.answers().status = Some(held(reason));
    let driver = place.driver_with(OOM_RULES).await;
    driver.created("a-0".into(), Instance::running("a"));
    let _answer = ask(&driver, "a-0");
    let began = Instant::now();
    driver.ended(&"a-0".into(), Some(ExitCode(code)));
    while driver.wants(Task::Oom(&"a-0".into())) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let calls = place.fake.answers().calls.clone();
    let asked = calls.iter().filter(|it| *it == "ContainerStatus").count();
    (driver.is_busy(), began.elapsed(), asked)
}

/// A restart that `a` has asked for.
fn begin(driver: &Arc<Driver>) -> HoldDecision {
    driver.created("a-0".into(), Instance::running("a"));
    driver.created("b-0".into(), Instance::running("b"));
    let answer = ask(driver, "a-0");
    driver.ended(&"a-0".into(), Some(ExitCode(42)));
    assert!(driver.is_busy());
    answer
}

#[tokio::test]
async fn what_has_become_of_a_restart_is_in_the_history() {
    let place = Place::new();
    let driver = place.driver().await;
    begin(&driver);
    place.clock.pass(Duration::from_secs(1));
    driver.deleted();
    let history = place.dir.path().join("state/history.jsonl");
    let text = loop {
        match std::fs::read_to_string(&history) {
            Ok(text) if text.ends_with('\n') => break text,
            _ => tokio::task::yield_now().await,
        }
    };
    let entry: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (&entry["container"], &entry["exitCode"]),
        (&json!("a"), &json!(42))
    );
    let rule = json!({"number": 1, "source": "restart-rules.reprise.dev", "by": "exitCodes"});
    assert_eq!(entry["rule"], rule);
    assert_eq!(
        (&entry["outcome"], &entry["restarts"]),
        (&json!("PodEnded"), &json!(1))
    );
}

#[tokio::test]
async fn a_restart_and_what_is_held_for_it_are_counted() {
    let place = Place::new();
    let driver = place.driver().await;
    let value = |series: &str| driver.tools.metrics.value(series);
    let answer = begin(&driver);
    assert_eq!(value("reprise_restarts_under_way"), 1);
    assert_eq!(
        value("reprise_replays_declined_total{reason=\"no_nri\"}"),
        1
    );
    assert_eq!(value("reprise_exit_hold_seconds_count"), 0);
    assert!(driver.admit_create(&"b".into()).is_err());
    assert_eq!(value("reprise_gate_refusals_total{reason=\"runs\"}"), 1);
    driver.deleted();
    drop(answer);
    assert_eq!(value("reprise_exit_hold_seconds_count"), 1);
    while driver.is_busy() {
        tokio::task::yield_now().await;
    }
    assert_eq!(value("reprise_restarts_under_way"), 0);
    while !driver
        .tools
        .metrics
        .text()
        .unwrap()
        .contains("reprise_restarts_total{")
    {
        tokio::task::yield_now().await;
    }
    let of = "action=\"RestartAllContainers\",trigger=\"exit\",way=\"placeholders\",outcome=\"PodEnded\"";
    assert_eq!(value(&format!("reprise_restarts_total{{{of}}}")), 1);
}

#[tokio::test]
async fn what_people_are_told_of_is_counted() {
    let place = Place::new();
    let tools = tools(place.fake.client(), place.dir.path());
    let (reporter, value) = (&tools.reporter, |series: &str| tools.metrics.value(series));
    let waits = Plan {
        back_off_ms: 20_000,
        ..plan()
    };
    reporter.restarting(&story(&plan()));
    reporter.restarting(&story(&waits));
    assert_eq!(value("reprise_back_off_seconds_count"), 1);
    assert_eq!(value("reprise_back_off_seconds_sum"), 20);
    for (disturbed, cause) in [(false, "replay_failed"), (true, "disturbed")] {
        let begun = BegunAnew {
            restart: plan().id,
            again: 0,
            disturbed,
            why: "it took too long".to_owned(),
        };
        reporter.begun_anew(&plan().pod, &begun);
        let series = format!("reprise_restarts_begun_anew_total{{cause=\"{cause}\"}}");
        assert_eq!(value(&series), 1, "{cause}");
    }
    reporter.unmatched(&plan().pod, &"a".into(), ExitCode(1));
    assert_eq!(value("reprise_unmatched_exits_total"), 1);
}

#[tokio::test]
async fn a_pods_conditions_stay_its_drivers_when_its_restart_is_over() {
    let place = Place::new();
    let driver = place.driver().await;
    assert!(!driver.sets_conditions());
    begin(&driver);
    while !driver.lock().announced {
        tokio::task::yield_now().await;
    }
    driver.deleted();
    while driver.is_busy() {
        tokio::task::yield_now().await;
    }
    assert!(driver.sets_conditions());
}

fn with_plan<T>(driver: &Driver, look: impl FnOnce(&Plan) -> T) -> T {
    look(driver.lock().pod.plan().unwrap())
}

/// Until the machine wants to be asked again.
fn left(driver: &Driver) -> Duration {
    let deadline = driver.lock().pod.deadline();
    deadline.unwrap().saturating_duration_since(Instant::now())
}

fn is_about(left: Duration, seconds: f64) -> bool {
    (left.as_secs_f64() - seconds).abs() < 0.5
}

/// As a clock may be set at any moment.
const WALLS: [u64; 3] = [0, 1_700_000_000_000 - HOUR, 1_700_000_000_000 + HOUR];

#[tokio::test]
async fn a_hold_is_as_old_as_it_is_whatever_the_clock_on_the_wall_is_set_to() {
    for wall in WALLS {
        let place = Place::new();
        let driver = place.driver().await;
        let _answer = begin(&driver);
        place.clock.set_wall(wall);
        let _again = ask_after(&driver, "a-0", Duration::from_secs(4));
        driver.tell(|pod, now| pod.begin_anew(false, "a test".into(), now));
        // 6.5 s less 4 s; of those, kills wait for the news of them until 2 s before.
        let left = left(&driver);
        assert!(is_about(left, 0.5), "{wall}: {left:?}");
    }
}

#[tokio::test]
async fn a_pod_waits_by_a_back_off_of_its_own_unless_it_is_shorter_than_its_nodes() {
    for (options, waits) in [
        ("backOff: {firstSeconds: 25}", 25_000),
        ("backOff: {firstSeconds: 400}", 400_000),
        (
            "backOff: {firstSeconds: 0, maxSeconds: 0, resetSeconds: 0}",
            10_000,
        ),
    ] {
        let mut place = Place::new();
        place.options = options;
        let [ten, most, reset] = [10, 300, 600].map(Duration::from_secs);
        let back_off = BackOff::try_new(ten, most, reset).unwrap();
        let up = place.clock.moment().up_ms;
        place.past.begun(None, up, Duration::ZERO, &back_off);
        let driver = place.driver().await;
        let _answer = begin(&driver);
        let planned = with_plan(&driver, |plan| plan.back_off_ms);
        assert_eq!(planned, waits, "{options}");
    }
}

#[tokio::test]
async fn a_back_off_is_as_long_as_it_was_meant_to_be_whatever_the_clock_on_the_wall_is_set_to() {
    for wall in WALLS {
        let mut place = Place::new();
        let back_off = BackOff::try_new(
            Duration::from_secs(10),
            Duration::from_mins(5),
            Duration::from_mins(10),
        );
        let up = place.clock.moment().up_ms;
        place
            .past
            .begun(None, up, Duration::ZERO, &back_off.unwrap());
        let driver = place.driver().await;
        let _answer = begin(&driver);
        assert_eq!(with_plan(&driver, |plan| plan.back_off_ms), 10_000);
        place.clock.pass(Duration::from_secs(4));
        place.clock.set_wall(wall);
        driver.tell(|pod, now| pod.begin_anew(false, "a test".into(), now));
        assert_eq!(with_plan(&driver, |plan| plan.back_off_ms), 6_000);

        let plan = with_plan(&driver, Plan::clone);
        let successor = place.driver().await;
        place.clock.pass(Duration::from_secs(2));
        place.clock.set_wall(wall.wrapping_add(HOUR));
        let phase = Phase::Up;
        successor.relisted(
            Vec::new(),
            Instant::now(),
            Some(Record { phase, plan }),
            false,
        );
        let left = left(&successor);
        assert!(is_about(left, 4.0), "{wall}: {left:?}");
    }
}

#[tokio::test]
async fn a_replay_that_falls_back_leaves_what_the_kubelet_is_about_to_start() {
    let place = Place::new();
    let driver = place.driver().await;
    let _answer = begin(&driver);
    for (id, maker) in [("a-1", Maker::Replay), ("b-1", Maker::Kubelet)] {
        let made = Instance {
            state: InstanceState::Created,
            maker,
            ..Instance::running(&id[..1])
        };
        driver.created(id.into(), made);
    }
    driver.tell(|pod, now| pod.begin_anew(false, "a test".into(), now));
    assert!(driver.instance(&"a-1".into()).is_none());
    assert!(driver.instance(&"b-1".into()).is_some());
}

#[tokio::test]
async fn a_hold_whose_hook_has_given_up_keeps_nobody_waiting() {
    let place = Place::new();
    let driver = place.driver().await;
    driver.created("a-0".into(), Instance::running("a"));
    let HoldDecision::Wait(hook) = ask(&driver, "a-0") else {
        panic!("it is not held")
    };
    assert!(driver.holds());
    drop(hook);
    assert!(!driver.holds());
}

#[tokio::test]
async fn whoever_asks_about_an_exit_lets_nobody_go_who_has_asked_before() {
    let place = Place::new();
    let driver = place.driver().await;
    driver.created("a-0".into(), Instance::running("a"));
    let [HoldDecision::Wait(mut first), HoldDecision::Wait(second)] =
        [ask(&driver, "a-0"), ask(&driver, "a-0")]
    else {
        panic!("it is not held")
    };
    assert!(matches!(first.try_recv(), Err(TryRecvError::Empty)));
    driver.deleted();
    assert!(first.await.is_err() && second.await.is_err());
}

/// What is decided is written down before it is done; how long an exit is held is none of the disk's business.
#[tokio::test]
async fn an_exit_is_let_go_in_time_while_the_disk_stalls() {
    let place = Place::new();
    let driver = place.driver().await;
    driver.created("a-0".into(), Instance::running("a"));
    // Whoever opens it to write waits for a reader.
    let record = place.dir.path().join("state/restarts/s.new");
    let made = Command::new("mkfifo").arg(&record).status().unwrap();
    assert!(made.success());
    let held = DOWN_LIMIT.saturating_sub(DISK_LIMIT / 20);
    let HoldDecision::Wait(hook) = ask_after(&driver, "a-0", held) else {
        panic!("an exit whose restart is not decided is not held");
    };
    driver.ended(&"a-0".into(), Some(ExitCode(42)));
    assert!(driver.is_busy());
    let began = Instant::now();
    let _dropped = hook.await;
    let took = began.elapsed();
    fs::File::open(&record).unwrap();
    assert!(took < DISK_LIMIT * 9 / 10, "{took:?}");
}

#[tokio::test]
async fn nothing_is_kept_of_containers_that_are_gone() {
    let place = Place::new();
    let driver = place.driver().await;
    let _answer = begin(&driver);
    driver.removed(&"a-0".into());
    driver.relisted(
        Vec::new(),
        Instant::now() + Duration::from_secs(3),
        None,
        false,
    );
    let state = driver.lock();
    assert!(state.pod.keeps_nothing() && state.waiting.is_empty() && state.kills.is_empty());
}

#[tokio::test]
async fn the_runtime_is_asked_whether_a_container_was_out_of_memory_for_as_long_as_it_may_have_yet_to_hear_of_it()
 {
    let (restarts, _, asked) = judge(&Place::new(), 137, "OOMKilled").await;
    assert_eq!((restarts, asked), (true, 1));
    let (restarts, took, asked) = judge(&Place::new(), 137, "").await;
    assert!(
        !restarts && took >= OOM_LIMIT && asked > 1,
        "{took:?}, {asked}"
    );
    // Another process of the container may have been killed, long ago.
    let (restarts, _, asked) = judge(&Place::new(), 3, "OOMKilled").await;
    assert_eq!((restarts, asked), (true, 1));
    let (restarts, _, asked) = judge(&Place::new(), 3, "").await;
    assert_eq!((restarts, asked), (false, 1));
}

#[tokio::test]
async fn a_runtime_that_does_not_say_whether_a_container_was_out_of_memory_keeps_nobody_waiting() {
    let place = Place::new();
    place.fake.answers().hangs = true;
    let (restarts, _, asked) = judge(&place, 137, "OOMKilled").await;
    assert_eq!((restarts, asked), (false, 1));
}

#[tokio::test]
async fn what_whoever_holds_an_exit_knows_of_the_memory_is_not_asked_for() {
    for oom_killed in [true, false] {
        let place = Place::new();
        let driver = place.driver_with(OOM_RULES).await;
        driver.created("a-0".into(), Instance::running("a"));
        let exit = Exit {
            oom_killed,
            ..Exit::from(137)
        };
        let answer = driver.decide_hold(&HoldRequest {
            container: "a-0".into(),
            waited: Duration::ZERO,
            exit: Some(exit),
        });
        assert_eq!(matches!(answer, HoldDecision::Wait(_)), oom_killed);
        assert_eq!(driver.is_busy(), oom_killed);
    }
}
