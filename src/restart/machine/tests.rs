//! The machine, told what happens by a small runtime that does what the effects say.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::ids::ExitCode;
use crate::kube::{ContainerKind, RestartPolicy};
use crate::restart::plan::tests::{DONE, RUNS, Shape, circumstances};
use ContainerKind::{Init, Regular, Sidecar};
use std::collections::BTreeSet;

/// Plays the runtime: answers effects with events, in the order that `shuffle` says.
struct World {
    machine: Machine,
    now: Instant,
    pending: VecDeque<Event>,
    released: BTreeSet<ContainerId>,
    removed: BTreeSet<ContainerId>,
    finished: Option<Outcome>,
    made: u32,
    log: Vec<Effect>,
}

impl World {
    fn begin(plan: Plan) -> Self {
        let now = Instant::now();
        let held = [plan.trigger.container.clone()];
        let (machine, effects) = Machine::begin(plan, &held, Vec::new(), now);
        let mut world = Self {
            machine,
            now,
            pending: VecDeque::new(),
            released: BTreeSet::new(),
            removed: BTreeSet::new(),
            finished: None,
            made: 0,
            log: Vec::new(),
        };
        world.take(effects);
        world
    }

    fn take(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect.clone() {
                Effect::Save => {}
                Effect::Kill(id) => self.pending.push_back(Event::Held(id)),
                Effect::MakePlaceholder(name, _) => {
                    self.made += 1;
                    let id = format!("placeholder-{}", self.made).into();
                    self.pending.push_back(Event::PlaceholderMade(name, id));
                }
                Effect::Release(ids) => self.released.extend(ids),
                Effect::Remove(id) => {
                    self.removed.insert(id.clone());
                    self.pending.push_back(Event::Gone(id));
                }
                Effect::Again => panic!("nothing intrudes here"),
                Effect::Finish(outcome) => {
                    assert_eq!(self.finished.replace(outcome), None, "finished twice");
                }
            }
            self.log.push(effect);
        }
    }

    fn handle(&mut self, event: Event) {
        let effects = self.machine.handle(self.now, event);
        self.take(effects);
    }

    /// Answers everything that is under way.
    fn settle(&mut self) {
        while let Some(event) = self.pending.pop_front() {
            self.handle(event);
        }
    }

    fn attempt(&mut self, name: &str) -> Verdict {
        let (verdict, effects) = self.machine.attempt(self.now, &name.into());
        self.take(effects);
        verdict
    }

    fn start(&mut self, name: &str) {
        assert_eq!(self.attempt(name), Verdict::Admit, "{name}");
        self.handle(Event::Started(name.into(), format!("{name}-1").into()));
        self.settle();
    }

    fn complete(&mut self, name: &str) {
        self.start(name);
        self.end(name, 0);
    }

    fn end(&mut self, name: &str, code: i32) {
        let id = format!("{name}-1").into();
        self.handle(Event::Ended(name.into(), id, Some(ExitCode(code))));
    }

    fn removed(&self, name: &str) -> bool {
        self.removed.contains(&ContainerId::from(name))
    }
}

const FULL: Shape<'_> = &[
    ("i", Init, DONE),
    ("s", Sidecar, RUNS),
    ("a", Regular, RUNS),
    ("b", Regular, RUNS),
];
const PLAIN: Shape<'_> = &[("a", Regular, RUNS), ("b", Regular, RUNS)];

fn all(policy: RestartPolicy, shape: Shape<'_>, trigger: &str) -> World {
    World::begin(circumstances(Some(policy), shape, trigger, 42).restart_all())
}

#[test]
fn nothing_is_killed_before_the_plan_is_on_disk() {
    let world = all(RestartPolicy::Never, PLAIN, "a");
    assert_eq!(world.log[0], Effect::Save);
    assert!(world.log.contains(&Effect::Kill("b-0".into())));
    assert!(!world.log.contains(&Effect::Kill("a-0".into())));
}

#[test]
fn always_removes_inits_and_sidecars_and_keeps_the_rest_held_meanwhile() {
    let mut world = all(RestartPolicy::Always, FULL, "a");
    world.handle(Event::Held("s-0".into()));
    assert!(world.released.is_empty());
    world.handle(Event::Held("b-0".into()));
    assert_eq!(world.released, ["i-0", "s-0"].map(ContainerId::from).into());
    assert!(world.machine.holds(&"a-0".into()));
    assert_eq!(world.attempt("i"), Verdict::NotYet);
    world.settle();
    assert!(world.removed("i-0") && world.removed("s-0") && !world.removed("a-0"));
    assert!(world.released.contains(&"a-0".into()));
    assert_eq!(world.attempt("a"), Verdict::OutOfOrder);
    assert_eq!(world.attempt("s"), Verdict::OutOfOrder);
    world.complete("i");
    world.start("s");
    world.start("b");
    assert_eq!(world.finished, None);
    world.start("a");
    assert_eq!(world.finished, Some(Outcome::Completed));
}

#[test]
fn never_without_inits_releases_only_behind_all_placeholders() {
    let mut world = all(RestartPolicy::Never, PLAIN, "a");
    world.handle(Event::Held("b-0".into()));
    world.handle(Event::PlaceholderMade("a".into(), "p1".into()));
    world.handle(Event::PlaceholderMade("a".into(), "p2".into()));
    assert!(world.released.is_empty());
    world.handle(Event::PlaceholderMade("b".into(), "p3".into()));
    assert_eq!(world.released.len(), 2);
    world.pending.clear();
    world.start("b");
    assert!(world.removed("p3") && !world.removed("p1"));
    world.start("a");
    assert!(world.removed("p1") && world.removed("p2"));
    assert!(!world.removed("a-0"), "the old attempt is the lastState");
    assert_eq!(world.finished, Some(Outcome::Completed));
}

#[test]
fn never_with_inits_clears_everything_once_the_guard_was_refused() {
    let mut world = all(RestartPolicy::Never, FULL, "a");
    world.settle();
    assert_eq!(world.machine.phase(), Phase::Shielded);
    assert_eq!(world.released.len(), 4);
    assert_eq!(world.attempt("b"), Verdict::NotYet);
    let shielded = ["a-0", "b-0"].map(ContainerId::from);
    assert_eq!(world.removed, shielded.into(), "no exit to back off from");
    assert_eq!(world.attempt("a"), Verdict::NotYet);
    let before = world.removed.len();
    assert_eq!(before, 4, "containers first, placeholders after them");
    world.settle();
    assert_eq!(world.removed.len(), 4 + 3);
    world.complete("i");
    world.start("s");
    world.start("a");
    world.start("b");
    assert_eq!(world.finished, Some(Outcome::Completed));
}

#[test]
fn attempts_before_the_one_that_is_removed_are_removed_with_it() {
    let mut circumstances = circumstances(Some(RestartPolicy::Always), FULL, "a", 42);
    for member in &mut circumstances.containers {
        member.older = vec![format!("{}-before", member.name).into()];
    }
    let mut world = World::begin(circumstances.restart_all());
    world.settle();
    assert!(world.removed("i-before") && world.removed("s-before"));
    assert!(!world.removed("a-before"), "it stays with its successor");
    assert_eq!(world.machine.phase(), Phase::Up);
}

#[test]
fn late_news_of_an_attempt_before_is_not_taken_for_a_new_one() {
    let mut circumstances = circumstances(Some(RestartPolicy::Never), FULL, "a", 42);
    for member in &mut circumstances.containers {
        member.older = vec![format!("{}-before", member.name).into()];
    }
    let mut world = World::begin(circumstances.restart_all());
    world.settle();
    world.handle(Event::Ended("a".into(), "a-before".into(), None));
    world.handle(Event::Started("b".into(), "b-before".into()));
    assert_eq!(world.machine.phase(), Phase::Shielded);
    assert_eq!(world.machine.leftovers().len(), 3);
}

#[test]
fn a_never_pod_whose_init_container_fails_again_is_left_to_fail() {
    let mut world = all(RestartPolicy::Never, FULL, "a");
    world.settle();
    world.attempt("a");
    world.settle();
    world.start("i");
    world.end("i", 1);
    assert_eq!(world.finished, Some(Outcome::InitFailed));
}

#[test]
fn a_failing_init_container_is_retried_under_always() {
    let mut world = all(RestartPolicy::Always, FULL, "a");
    world.settle();
    world.start("i");
    world.end("i", 1);
    assert_eq!(world.attempt("s"), Verdict::OutOfOrder);
    world.complete("i");
    assert_eq!(world.attempt("s"), Verdict::Admit);
}

#[test]
fn an_init_container_may_end_before_it_is_known_to_have_started() {
    let mut world = all(RestartPolicy::Always, FULL, "a");
    world.settle();
    assert_eq!(world.attempt("i"), Verdict::Admit);
    world.end("i", 0);
    assert_eq!(world.attempt("s"), Verdict::Admit);
}

#[test]
fn a_completed_container_under_on_failure_is_removed_to_run_again() {
    let shape: Shape<'_> = &[
        ("a", Regular, RUNS),
        ("b", Regular, DONE),
        ("c", Regular, RUNS),
    ];
    let mut world = all(RestartPolicy::OnFailure, shape, "a");
    // It ended by itself, successfully, just before it would have been killed.
    world.handle(Event::Ended(
        "c".into(),
        "c-0".into(),
        Some(ExitCode::SUCCESS),
    ));
    world.settle();
    assert!(world.removed("b-0") && world.removed("c-0") && !world.removed("a-0"));
}

#[test]
fn action_restart_concerns_one_container() {
    let plan = circumstances(Some(RestartPolicy::Never), PLAIN, "a", 42).restart_one();
    let mut world = World::begin(plan.unwrap());
    assert!(!world.log.contains(&Effect::Kill("b-0".into())));
    assert_eq!(world.attempt("b"), Verdict::Admit);
    assert_eq!(world.attempt("a"), Verdict::NotYet);
    world.settle();
    world.start("a");
    assert_eq!(world.finished, Some(Outcome::Completed));
}

#[test]
fn a_container_that_cannot_be_killed_does_not_hold_the_others_for_ever() {
    let mut world = all(RestartPolicy::Never, PLAIN, "a");
    world.now += DOWN_LIMIT;
    world.handle(Event::Tick);
    assert_eq!(world.released.len(), 2);
}

#[test]
fn a_deleted_pod_is_let_go_at_once_and_nothing_stays() {
    let mut world = all(RestartPolicy::Never, PLAIN, "a");
    world.handle(Event::PlaceholderMade("a".into(), "p1".into()));
    world.handle(Event::Deleted);
    assert_eq!(world.finished, Some(Outcome::Deleted));
    assert_eq!(world.released.len(), 2);
    assert!(world.removed("p1"));
    world.handle(Event::PlaceholderMade("a".into(), "p2".into()));
    assert!(world.removed("p2"), "one that was under way");
    assert_eq!(world.attempt("a"), Verdict::Admit);
}

fn found(id: &str, name: &str, placeholder: bool, new: bool, state: FoundState) -> Found {
    Found {
        id: id.into(),
        name: name.into(),
        placeholder,
        new,
        state,
    }
}

fn resume(way_of: Shape<'_>, phase: Phase, seen: &[Found], elapsed: u64) -> (Machine, Vec<Effect>) {
    let plan = circumstances(Some(RestartPolicy::Never), way_of, "a", 42).restart_all();
    let elapsed = Duration::from_secs(elapsed);
    Machine::resume(plan, phase, seen, elapsed, Instant::now())
}

#[test]
fn a_successor_makes_only_the_placeholders_that_are_missing() {
    let seen = [
        found("a-0", "a", false, false, FoundState::Running),
        found("b-0", "b", false, false, FoundState::Running),
        found("p1", "a", true, true, FoundState::Created),
    ];
    let (machine, effects) = resume(PLAIN, Phase::Down, &seen, 3);
    let made = |effect: &&Effect| matches!(effect, Effect::MakePlaceholder(..));
    assert_eq!(effects.iter().filter(made).count(), 2);
    assert!(effects.contains(&Effect::Kill("b-0".into())));
    assert_eq!(machine.phase(), Phase::Down);
}

fn intruders() -> [Found; 5] {
    [
        found("a-0", "a", false, false, FoundState::Exited(None)),
        found("a-1", "a", false, true, FoundState::Running),
        found("b-1", "b", false, true, FoundState::Running),
        found("p1", "a", true, true, FoundState::Created),
        found("p3", "b", true, true, FoundState::Created),
    ]
}

#[test]
fn a_successor_that_finds_containers_started_without_their_inits_begins_anew() {
    let (_, effects) = resume(FULL, Phase::Shielded, &intruders(), 2);
    assert_eq!(effects, [Effect::Again]);
}

#[test]
fn a_successor_that_comes_late_leaves_running_what_the_kubelet_started_and_only_sweeps() {
    let (_, effects) = resume(FULL, Phase::Shielded, &intruders(), 60);
    assert!(effects.contains(&Effect::Finish(Outcome::Completed)));
    for id in ["p1", "p3"] {
        assert!(effects.contains(&Effect::Remove(id.into())), "{id}");
    }
}

#[test]
fn a_container_that_starts_out_of_order_makes_it_begin_anew_but_not_for_ever() {
    let mut plan = circumstances(Some(RestartPolicy::Always), FULL, "a", 42).restart_all();
    for again in 0..=MOST_AGAIN {
        plan.again = again;
        let (mut machine, _) = Machine::begin(plan.clone(), &[], Vec::new(), Instant::now());
        let started = Event::Started("b".into(), "b-1".into());
        let effects = machine.handle(Instant::now(), started);
        assert_eq!(effects.contains(&Effect::Again), again < MOST_AGAIN);
    }
}

#[test]
fn a_placeholder_of_the_round_before_shields_only_what_has_not_run_since() {
    let shape: Shape<'_> = &[("a", Regular, RUNS), ("b", Regular, DONE)];
    let plan = circumstances(Some(RestartPolicy::Never), shape, "a", 42).restart_all();
    let leftover = vec![("a".into(), "p1".into()), ("b".into(), "p2".into())];
    let held = ["a-0".into()];
    let (machine, effects) = Machine::begin(plan, &held, leftover, Instant::now());
    assert!(effects.contains(&Effect::Remove("p1".into())));
    assert_eq!(machine.leftovers(), [("b".into(), "p2".into())]);
}

#[test]
fn a_successor_goes_on_removing() {
    let seen = [
        found("b-0", "b", false, false, FoundState::Exited(None)),
        found("p1", "a", true, true, FoundState::Created),
    ];
    let (mut machine, effects) = resume(FULL, Phase::Clear, &seen, 9);
    assert_eq!(effects, [Effect::Remove("b-0".into())]);
    let effects = machine.handle(Instant::now(), Event::Gone("b-0".into()));
    assert_eq!(effects, [Effect::Remove("p1".into())]);
    machine.handle(Instant::now(), Event::Gone("p1".into()));
    assert_eq!(machine.phase(), Phase::Up);
}

fn any_shape() -> impl Strategy<Value = Shape<'static>> {
    prop_oneof![Just(FULL), Just(PLAIN)]
}

fn any_policy() -> impl Strategy<Value = RestartPolicy> {
    prop_oneof![
        Just(RestartPolicy::Always),
        Just(RestartPolicy::OnFailure),
        Just(RestartPolicy::Never)
    ]
}

proptest! {
    /// Whatever the order of answers and of the kubelet's attempts: nothing is admitted before the old ones are
    /// out of the way or out of order, a Never pod's exits are seen only behind its shields, and every restart ends.
    #[test]
    fn every_order_of_events_ends_well(
        shape in any_shape(),
        policy in any_policy(),
        code in prop_oneof![Just(0), Just(42)],
        steps in prop::collection::vec((0usize..6, 0usize..8), 0..80),
    ) {
        let plan = circumstances(Some(policy), shape, "a", code).restart_all();
        let way = plan.way;
        let shields: usize = plan.members.iter().map(|it| usize::from(it.placeholders)).sum();
        let mut world = World::begin(plan);
        let mut standing = 0;
        let mut running: Vec<&str> = Vec::new();
        for (step, choice) in steps {
            let (name, kind, _) = shape[choice % shape.len()];
            match step {
                0..=2 if !world.pending.is_empty() => {
                    let index = choice % world.pending.len();
                    let event = world.pending.remove(index).unwrap();
                    standing += usize::from(matches!(event, Event::PlaceholderMade(..)));
                    let before = world.released.len();
                    world.handle(event);
                    if world.released.len() > before && way != Way::Kept {
                        prop_assert_eq!(standing, shields, "released behind half a shield");
                    }
                }
                // The kubelet starts no container twice that has not failed.
                3 | 4 if !running.contains(&name) => {
                    let phase = world.machine.phase();
                    let verdict = world.attempt(name);
                    if verdict == Verdict::Admit && phase != Phase::Over {
                        prop_assert_eq!(phase, Phase::Up);
                        if kind == Regular && way != Way::Shielded {
                            for (other, kind, _) in shape {
                                prop_assert!(*kind == Regular || running.contains(other));
                            }
                        }
                        world.handle(Event::Started(name.into(), format!("{name}-1").into()));
                        running.push(name);
                        if kind == Init {
                            world.end(name, 0);
                        }
                    }
                }
                _ => world.handle(Event::Tick),
            }
        }
        while let Some(at) = world.machine.deadline() {
            world.now = world.now.max(at);
            world.handle(Event::Tick);
        }
        prop_assert!(world.finished.is_some());
        world.settle();
        for id in (1..=world.made).map(|n| format!("placeholder-{n}")) {
            prop_assert!(world.removed(&id), "{} stays", id);
        }
    }
}
