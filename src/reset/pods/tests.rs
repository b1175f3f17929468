//! Which pods are reset, and when.

use proptest::prelude::*;

use super::super::count::tests::{after, clock, exit};
use super::super::sighting::Watched;
use super::*;
use crate::clock::Clock;
use crate::policy::FailurePolicy;

const MINUTE: Duration = Duration::from_mins(1);

/// The pods of a node, and a clock.
struct Node {
    pods: Pods,
    clock: Clock,
}

fn delete(max_restarts: Option<u32>) -> FailurePolicy {
    FailurePolicy {
        action: FailureAction::DeletePod,
        max_restarts,
    }
}

fn owned_by(kind: &str) -> OwnerReference {
    OwnerReference {
        api_version: "apps/v1".into(),
        kind: kind.into(),
        name: "o".into(),
        uid: "o1".into(),
        controller: Some(true),
        ..OwnerReference::default()
    }
}

/// A pod of a Deployment that has ended so often, told after the last exit.
fn pod(uid: &str, exits: u32) -> Sighting {
    let container = exits.checked_sub(1).map(|last| after(exit(last, 1)));
    Sighting {
        key: PodKey {
            namespace: format!("of-{uid}"),
            name: uid.into(),
        },
        uid: uid.into(),
        policy: Ok(Some(delete(None))),
        controller: Some(owned_by("ReplicaSet")),
        is_static: false,
        ending: false,
        ready: false,
        ready_changed: 1,
        containers: container.into_iter().collect(),
    }
}

impl Node {
    fn new(terms: Terms) -> Self {
        let clock = clock();
        let pods = Pods::new(terms, Memory::default(), &clock.moment());
        Self { pods, clock }
    }

    /// Pod `p` is to be reset by now.
    fn with_due_pod() -> Self {
        let mut node = Self::new(Terms::default());
        node.crash("p", 8);
        node.pass(10);
        node
    }

    fn pass(&self, minutes: u32) {
        self.clock.pass(MINUTE * minutes);
    }

    fn see(&mut self, sighting: Sighting) -> Vec<Deed> {
        self.pods.seen(sighting, &self.clock.moment())
    }

    /// Sees a pod end one by one up to that often.
    fn crash(&mut self, uid: &str, exits: u32) {
        for exits in 0..=exits {
            self.see(pod(uid, exits));
        }
    }

    /// What is to be prepared now.
    fn prepares(&mut self) -> Option<String> {
        let deeds = self.pods.poll(&self.clock.moment());
        deeds.into_iter().find_map(|deed| match deed {
            Deed::Prepare(task) => Some(task.seen.uid.to_string()),
            _ => None,
        })
    }

    fn outcome(&mut self, uid: &str, outcome: Outcome) -> Vec<Deed> {
        self.pods
            .outcome(&uid.into(), outcome, &self.clock.moment())
    }

    /// Whether it is struck, once it is due.
    fn strikes(&mut self, uid: &str) -> bool {
        self.prepares().as_deref() == Some(uid)
            && self
                .outcome(uid, Outcome::Reserved)
                .contains(&Deed::Strike(uid.into()))
    }

    /// Another plugin goes on, from what this one has written down.
    fn restart(&mut self) {
        let text = serde_json::to_vec(self.pods.memory()).unwrap();
        let memory = serde_json::from_slice(&text).unwrap();
        self.pods = Pods::new(self.pods.terms.clone(), memory, &self.clock.moment());
    }
}

fn owner() -> Owner {
    Owner {
        api_version: "apps/v1".into(),
        kind: "Deployment".into(),
        namespace: "n".into(),
        name: "d".into(),
        uid: "d1".into(),
    }
}

fn notices(deeds: &[Deed]) -> Vec<&Notice> {
    let notices = deeds.iter().filter_map(|deed| match deed {
        Deed::Tell(_, _, notice) => Some(notice),
        _ => None,
    });
    notices.collect()
}

#[test]
fn a_pod_is_reset_that_restarts_too_often_and_has_not_been_ready_for_ten_minutes() {
    let mut node = Node::new(Terms::default());
    node.crash("p", 7);
    node.pass(20);
    assert_eq!(node.prepares(), None);
    node.see(pod("p", 8));
    assert!(node.strikes("p"));
    // One at a time, and not the same twice.
    node.crash("q", 8);
    assert_eq!(node.prepares(), None);
    node.outcome("p", Outcome::Done);
    let mut going = pod("p", 8);
    going.ending = true;
    node.see(going);
    node.pass(10);
    assert!(node.strikes("q"));
    node.outcome("q", Outcome::Done);
    node.pods.gone(&"q".into());
    node.pass(60);
    assert_eq!(node.prepares(), None);
}

#[test]
fn it_is_waited_for_just_as_long_as_is_needed() {
    let mut node = Node::new(Terms::default());
    node.crash("p", 8);
    assert_eq!(node.prepares(), None);
    let now = node.clock.moment();
    let wake = node.pods.wake(&now);
    assert_eq!(wake, Some(now.up_ms + 600_000));
    node.clock.pass(Duration::from_millis(599_999));
    assert_eq!(node.prepares(), None);
    node.clock.pass(Duration::from_millis(1));
    assert_eq!(node.prepares().as_deref(), Some("p"));
    assert_eq!(node.pods.wake(&node.clock.moment()), None);
}

#[test]
fn a_pod_that_was_ready_is_left_for_ten_minutes_even_if_nobody_saw_it() {
    let ready = |sighting: Sighting| Sighting {
        ready: true,
        ..sighting
    };
    let missed = |sighting: Sighting| Sighting {
        ready_changed: 2,
        ..sighting
    };
    for between in [&ready as &dyn Fn(Sighting) -> Sighting, &missed] {
        let mut node = Node::new(Terms::default());
        node.crash("p", 7);
        node.pass(30);
        node.see(between(pod("p", 7)));
        assert_eq!(node.prepares(), None);
        node.pass(1);
        let mut after = pod("p", 8);
        after.ready_changed = 2;
        node.see(after);
        node.pass(8);
        assert_eq!(node.prepares(), None);
        node.pass(2);
        assert!(node.strikes("p"));
    }
}

#[test]
fn what_recovers_while_it_is_asked_for_is_not_struck() {
    let mut node = Node::with_due_pod();
    assert_eq!(node.prepares().as_deref(), Some("p"));
    let ready = Sighting {
        ready: true,
        ..pod("p", 8)
    };
    node.see(ready);
    let withdrawn = [Deed::Withdraw("p".into())];
    assert_eq!(node.outcome("p", Outcome::Reserved), withdrawn);
    assert!(node.pods.memory().spent.is_empty());
    // Until that is done nobody else's turn comes.
    node.crash("q", 8);
    node.pass(10);
    assert_eq!(node.prepares(), None);
    node.outcome("p", Outcome::Changed);
    assert_eq!(node.prepares().as_deref(), Some("q"));
}

#[test]
fn a_pod_that_always_changes_in_the_middle_of_it_is_tried_ever_more_seldom() {
    let mut node = Node::with_due_pod();
    let mut pauses = Vec::new();
    for reserved in [false, false, true, true, true] {
        assert_eq!(node.prepares().as_deref(), Some("p"));
        if reserved {
            node.outcome("p", Outcome::Reserved);
        }
        node.outcome("p", Outcome::Changed);
        let now = node.clock.moment();
        let wake = node.pods.wake(&now).unwrap();
        pauses.push((wake - now.up_ms) / 1000);
        node.clock.pass(Duration::from_millis(wake - now.up_ms));
    }
    assert_eq!(pauses, [5, 10, 20, 40, 80]);
    // Until it has been Ready.
    node.see(Sighting {
        ready: true,
        ..pod("p", 8)
    });
    node.see(pod("p", 9));
    node.pass(10);
    assert_eq!(node.prepares().as_deref(), Some("p"));
    node.outcome("p", Outcome::Changed);
    node.clock.pass(FIRST_PAUSE);
    assert_eq!(node.prepares().as_deref(), Some("p"));
}

#[test]
fn a_strike_that_has_come_to_something_after_all_stays_spent() {
    let mut node = Node::with_due_pod();
    assert!(node.strikes("p"));
    node.outcome("p", Outcome::Unanswered("late".into()));
    node.pass(1);
    assert_eq!(node.prepares().as_deref(), Some("p"));
    node.see(Sighting {
        ending: true,
        ..pod("p", 8)
    });
    let withdrawn = [Deed::Withdraw("p".into())];
    assert_eq!(node.outcome("p", Outcome::Reserved), withdrawn);
    node.outcome("p", Outcome::Changed);
    assert_eq!(node.pods.memory().spent.len(), 1);
}

#[test]
fn a_strike_that_nobody_has_answered_stays_spent() {
    let mut node = Node::with_due_pod();
    assert!(node.strikes("p"));
    node.outcome("p", Outcome::Unanswered("late".into()));
    node.pass(1);
    // Whatever comes of the question whether it may be tried again.
    assert_eq!(node.prepares().as_deref(), Some("p"));
    node.outcome("p", Outcome::Away("late".into()));
    assert_eq!(node.pods.memory().spent.len(), 1);
    node.pass(1);
    assert!(node.strikes("p"));
    assert_eq!(node.pods.memory().spent.len(), 1);
    node.outcome("p", Outcome::Away("full".into()));
    assert!(node.pods.memory().spent.is_empty());
}

#[test]
fn what_fails_again_is_told_to_people() {
    let mut node = Node::with_due_pod();
    for notice in [
        Some(Notice::Failed("full".into(), false)),
        Some(Notice::Failed("full".into(), true)),
        None,
    ] {
        assert_eq!(node.prepares().as_deref(), Some("p"));
        let deeds = node.outcome("p", Outcome::Away("full".into()));
        assert_eq!(notices(&deeds), notice.iter().collect::<Vec<_>>());
        node.pass(5);
    }
    // Nobody can read any more what was told then.
    node.pass(45);
    assert_eq!(node.prepares().as_deref(), Some("p"));
    let deeds = node.outcome("p", Outcome::Away("full".into()));
    let again = Notice::Failed("full".into(), true);
    assert_eq!(notices(&deeds), [&again]);
}

#[test]
fn what_could_not_be_written_down_is_written_before_anything_is_prepared() {
    let mut node = Node::with_due_pod();
    node.outcome("q", Outcome::Changed);
    assert_eq!(node.pods.poll(&node.clock.moment())[0], Deed::Save);
    assert_eq!(node.pods.poll(&node.clock.moment()), []);
    node.pods.not_saved();
    assert_eq!(node.pods.poll(&node.clock.moment()), [Deed::Save]);
}

#[test]
fn a_pod_says_itself_how_often_is_too_often_or_that_it_stays() {
    let mut node = Node::new(Terms::default());
    for exits in 0..=3 {
        node.see(Sighting {
            policy: Ok(Some(delete(Some(2)))),
            ..pod("p", exits)
        });
    }
    node.pass(10);
    assert!(node.strikes("p"));
    let mut node = Node::new(Terms {
        default: FailureAction::DeletePod,
        ..Terms::default()
    });
    for exits in 0..=20 {
        let stays = FailurePolicy {
            action: FailureAction::None,
            max_restarts: None,
        };
        node.see(Sighting {
            policy: Ok(Some(stays)),
            ..pod("p", exits)
        });
    }
    node.pass(10);
    assert_eq!(node.prepares(), None);
}

#[test]
fn pods_that_must_stay_do_and_those_that_asked_are_told_so_once() {
    let static_pod = |sighting: Sighting| Sighting {
        is_static: true,
        ..sighting
    };
    let of = |kind: &'static str| {
        move |sighting: Sighting| Sighting {
            controller: Some(owned_by(kind)),
            ..sighting
        }
    };
    let bare = |sighting: Sighting| Sighting {
        controller: None,
        ..sighting
    };
    let within = |namespace: &'static str| {
        move |sighting: Sighting| Sighting {
            key: PodKey {
                namespace: namespace.into(),
                ..sighting.key.clone()
            },
            ..sighting
        }
    };
    let terms = Terms {
        default: FailureAction::DeletePod,
        protected_namespaces: ["mine".to_owned()].into(),
        ..Terms::default()
    };
    let cases: Vec<Box<dyn Fn(Sighting) -> Sighting>> = vec![
        Box::new(static_pod),
        Box::new(of("DaemonSet")),
        Box::new(of("Job")),
        Box::new(bare),
        Box::new(within("kube-system")),
        Box::new(within("mine")),
    ];
    for case in cases {
        for (policy, told) in [(Some(delete(None)), 1), (None, 0)] {
            let mut node = Node::new(terms.clone());
            let mut deeds = Vec::new();
            for exits in 0..=20 {
                let seen = case(pod("p", exits));
                let policy = Ok(policy);
                deeds.extend(node.see(Sighting { policy, ..seen }));
            }
            node.pass(60);
            assert_eq!(node.prepares(), None);
            assert_eq!(notices(&deeds).len(), told, "{deeds:?}");
        }
    }
}

#[test]
fn by_default_nothing_is_done_that_nobody_asked_for() {
    for (default, asks) in [
        (FailureAction::None, None),
        (FailureAction::DeletePod, Some("p")),
    ] {
        let mut node = Node::new(Terms {
            default,
            ..Terms::default()
        });
        for exits in 0..=8 {
            let policy = Ok(None);
            node.see(Sighting {
                policy,
                ..pod("p", exits)
            });
        }
        node.pass(10);
        assert_eq!(node.prepares().as_deref(), asks);
    }
}

#[test]
fn what_is_deferred_is_done_later_and_said_once() {
    let mut node = Node::with_due_pod();
    let wait = Outcome::Wait(2 * MINUTE, Hindrance::Cooldown);
    for told in [1, 0] {
        assert_eq!(node.prepares().as_deref(), Some("p"));
        let deeds = node.outcome("p", wait.clone());
        assert_eq!(notices(&deeds).len(), told);
        node.pass(1);
        assert_eq!(node.prepares(), None);
        node.pass(1);
    }
    let given_up = Outcome::GivenUp(30 * MINUTE, 3, owner());
    assert_eq!(node.prepares().as_deref(), Some("p"));
    assert_eq!(notices(&node.outcome("p", given_up)).len(), 1);
    node.pass(29);
    assert_eq!(node.prepares(), None);
    node.pass(1);
    assert!(node.strikes("p"));
}

#[test]
fn who_has_waited_for_longest_goes_first_and_nobody_waits_for_one_that_is_refused() {
    let mut node = Node::new(Terms::default());
    node.crash("old", 8);
    node.pass(1);
    node.crash("new", 8);
    node.pass(10);
    assert_eq!(node.prepares().as_deref(), Some("old"));
    let wait = |seconds| Outcome::Wait(Duration::from_secs(seconds), Hindrance::Cooldown);
    node.outcome("old", wait(24));
    assert_eq!(node.prepares().as_deref(), Some("new"));
    // Half a second later it is told the next whole second.
    node.clock.pass(Duration::from_millis(500));
    node.outcome("new", wait(23));
    node.clock.pass(Duration::from_millis(23_200));
    assert_eq!(node.prepares(), None);
    node.clock.pass(Duration::from_millis(300));
    assert_eq!(node.prepares().as_deref(), Some("old"));
    node.outcome("old", Outcome::Changed);
    assert_eq!(node.prepares().as_deref(), Some("new"));
}

#[test]
fn what_is_refused_is_tried_again_ever_more_seldom() {
    let mut node = Node::with_due_pod();
    let mut pauses = Vec::new();
    for _ in 0..9 {
        assert_eq!(node.prepares().as_deref(), Some("p"));
        node.outcome("p", Outcome::Refused("no".into()));
        let now = node.clock.moment();
        let wake = node.pods.wake(&now).unwrap();
        pauses.push((wake - now.up_ms) / 1000);
        node.clock.pass(Duration::from_millis(wake - now.up_ms));
    }
    assert_eq!(pauses, [5, 10, 20, 40, 80, 160, 300, 300, 300]);
}

#[test]
fn a_node_and_a_namespace_on_it_have_so_many_an_hour() {
    let mut node = Node::new(Terms {
        max_resets_per_hour_on_node: 4,
        ..Terms::default()
    });
    let uids = ["a", "b", "c", "d", "e"];
    for uid in uids {
        for exits in 0..=8 {
            let mut seen = pod(uid, exits);
            if uid < "d" {
                seen.key.namespace = "greedy".into();
            }
            node.see(seen);
        }
    }
    node.pass(10);
    let mut struck = Vec::new();
    while let Some(uid) = node.prepares() {
        node.outcome(&uid, Outcome::Reserved);
        node.outcome(&uid, Outcome::Done);
        struck.push(uid);
    }
    assert_eq!(struck, ["a", "b", "d", "e"]);
    // Whatever becomes of the plugin.
    node.restart();
    node.see(Sighting {
        key: PodKey {
            namespace: "greedy".into(),
            name: "c".into(),
        },
        ..pod("c", 8)
    });
    assert_eq!(node.prepares(), None);
    node.pass(61);
    assert!(node.strikes("c"));
}

#[test]
fn counts_and_windows_outlive_the_plugin_and_what_is_gone_is_forgotten() {
    let mut node = Node::new(Terms::default());
    node.crash("p", 6);
    node.crash("q", 8);
    node.pass(9);
    node.restart();
    // Two more in the meantime, of which one is told.
    node.pods.listed(&["p".into()].into());
    node.see(pod("p", 8));
    node.pass(1);
    assert!(node.strikes("p"));
    assert!(node.pods.memory().pods.contains_key(&"p".into()));
    assert!(!node.pods.memory().pods.contains_key(&"q".into()));
}

#[test]
fn on_a_machine_that_was_started_anew_exits_are_counted_anew_and_resets_are_not_forgotten() {
    let terms = Terms {
        max_resets_per_hour_on_node: 1,
        ..Terms::default()
    };
    let mut node = Node::new(terms.clone());
    node.crash("q", 8);
    node.crash("p", 8);
    node.pass(10);
    assert!(node.strikes("p"));
    node.outcome("p", Outcome::Done);
    let text = serde_json::to_vec(node.pods.memory()).unwrap();
    let young = Clock::of(crate::clock::Times { up: 1000, unix: 0 });
    let memory: Memory = serde_json::from_slice(&text).unwrap();
    let clock = young;
    let pods = Pods::new(terms, memory, &clock.moment());
    node = Node { pods, clock };
    node.see(pod("q", 9));
    node.pass(10);
    assert_eq!(node.prepares(), None);
    for exits in 10..=17 {
        node.see(pod("q", exits));
    }
    assert_eq!(node.prepares(), None);
    node.pass(51);
    assert!(node.strikes("q"));
}

#[test]
fn what_must_be_remembered_is_written_down_before_anything_is_struck() {
    let mut node = Node::with_due_pod();
    let deeds = node.pods.poll(&node.clock.moment());
    assert_eq!(deeds[0], Deed::Save);
    let deeds = node.outcome("p", Outcome::Reserved);
    assert_eq!(deeds, [Deed::Save, Deed::Strike("p".into())]);
    assert_eq!(node.pods.memory().spent.len(), 1);
    // What was not done has cost nothing.
    node.outcome("p", Outcome::Changed);
    assert!(node.pods.memory().spent.is_empty());
    assert_eq!(node.pods.poll(&node.clock.moment()), [Deed::Save]);
}

/// What happens to one of three pods.
#[derive(Debug, Clone)]
enum Step {
    Exits(u8, Option<i32>),
    Ready(u8),
    Runs(u8),
    Passes(u64),
    Restarts,
    Answers(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..3_u8, prop::option::of(1..140_i32)).prop_map(|(pod, code)| Step::Exits(pod, code)),
        1 => (0..3_u8).prop_map(Step::Ready),
        1 => (0..3_u8).prop_map(Step::Runs),
        4 => (1..400_u64).prop_map(Step::Passes),
        1 => Just(Step::Restarts),
        4 => (0..6_u8).prop_map(Step::Answers),
    ]
}

/// What one of those pods is really like.
#[derive(Debug, Clone, Default)]
struct Truth {
    attempt: u32,
    /// Exits since it last ran for ten minutes.
    exits: u32,
    /// When it was last Ready, in milliseconds of the machine's time.
    ready: u64,
    changed: i64,
    running_since: Option<u64>,
}

impl Truth {
    fn sighting(&self, uid: &str, last: Option<i32>) -> Sighting {
        let mut seen = pod(uid, 0);
        seen.ready_changed = self.changed;
        seen.containers = vec![Watched {
            restarts: self.attempt,
            running: self
                .running_since
                .map(|_| format!("c{}", self.attempt).as_str().into()),
            exits: last
                .map(|code| exit(self.attempt, code))
                .into_iter()
                .collect(),
            ..after(exit(0, 1))
        }];
        seen
    }
}

proptest! {
    /// Whatever happens in whatever order, with plugins that end in between: nothing is struck that should not be, one pod at
    /// a time, and never more than the budget has.
    #[test]
    fn nothing_is_struck_that_has_not_earned_it(steps in prop::collection::vec(step(), 1..200)) {
        let terms = Terms { max_resets_per_hour_on_node: 2, max_restarts_on_node: 2, ..Terms::default() };
        let mut node = Node::new(terms);
        let began = node.clock.moment().up_ms;
        let mut truths = vec![Truth { ready: began, ..Truth::default() }; 3];
        let mut busy: Option<usize> = None;
        let mut struck: Vec<u64> = Vec::new();
        let mut uids = ["0", "1", "2"].map(str::to_owned);
        for (truth, uid) in truths.iter().zip(&uids) {
            node.see(truth.sighting(uid, None));
        }
        for step in steps {
            let now = node.clock.moment().up_ms;
            match step {
                Step::Passes(seconds) => node.clock.pass(Duration::from_secs(seconds)),
                Step::Exits(index, code) => {
                    let truth = &mut truths[usize::from(index)];
                    let ran = truth.running_since.take();
                    if ran.is_some_and(|since| now - since >= 600_000) {
                        truth.exits = 0;
                    }
                    truth.exits += 1;
                    let seen = truth.sighting(&uids[usize::from(index)], Some(code.unwrap_or(1)));
                    truth.attempt += 1;
                    node.see(seen);
                }
                Step::Ready(index) => {
                    let truth = &mut truths[usize::from(index)];
                    truth.ready = now;
                    truth.changed += 1;
                    let mut seen = truth.sighting(&uids[usize::from(index)], None);
                    seen.ready = true;
                    node.see(seen);
                    truth.changed += 1;
                    let seen = truth.sighting(&uids[usize::from(index)], None);
                    node.see(seen);
                }
                Step::Runs(index) => {
                    let truth = &mut truths[usize::from(index)];
                    truth.running_since.get_or_insert(now);
                    node.see(truth.sighting(&uids[usize::from(index)], None));
                }
                Step::Restarts => {
                    node.restart();
                    busy = None;
                    node.pods.listed(&uids.iter().map(|uid| uid.as_str().into()).collect());
                    for (truth, uid) in truths.iter().zip(&uids) {
                        node.see(truth.sighting(uid, None));
                    }
                }
                Step::Answers(kind) => {
                    let Some(index) = busy.take() else { continue };
                    let uid = uids[index].clone();
                    let outcome = match kind {
                        0 => Outcome::Wait(MINUTE, Hindrance::Cooldown),
                        1 => Outcome::Refused("no".into()),
                        2 => Outcome::Changed,
                        _ => Outcome::Reserved,
                    };
                    let deeds = node.outcome(&uid, outcome);
                    if deeds.contains(&Deed::Strike(uid.as_str().into())) {
                        let truth = &truths[index];
                        let runs_well = truth.running_since.is_some_and(|since| now - since >= 600_000);
                        prop_assert!(truth.exits > 2 && !runs_well, "{truth:?}");
                        prop_assert!(now - truth.ready >= 600_000, "{truth:?}");
                        struck.push(now);
                        prop_assert!(struck.iter().filter(|at| now - **at < 3_600_000).count() <= 2);
                        node.outcome(&uid, Outcome::Done);
                        // Its controller makes a new one.
                        node.pods.gone(&uid.as_str().into());
                        uids[index] = format!("{index}-{}", struck.len());
                        truths[index] = Truth { ready: now, ..Truth::default() };
                        node.see(truths[index].sighting(&uids[index], None));
                    } else if deeds.contains(&Deed::Withdraw(uid.as_str().into())) {
                        node.outcome(&uid, Outcome::Changed);
                    }
                }
            }
            let deeds = node.pods.poll(&node.clock.moment());
            for deed in deeds {
                if let Deed::Prepare(task) = deed {
                    prop_assert!(busy.is_none());
                    busy = uids.iter().position(|uid| *uid == task.seen.uid.as_str());
                }
            }
            // Whoever waits is woken, or has nothing to wait for.
            if busy.is_none() && let Some(wake) = node.pods.wake(&node.clock.moment()) {
                prop_assert!(wake > node.clock.moment().up_ms);
            }
        }
    }
}
