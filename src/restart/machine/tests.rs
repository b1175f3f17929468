//! The machine, told what happens by a small runtime that does what the effects say.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::progress::NewState;
use super::*;
use crate::ids::ExitCode;
use crate::kube::{ContainerKind, RestartPolicy};
use crate::node::{Instance, InstanceState, Maker};
use crate::plan::tests::{DONE, RUNS, Shape, Was, draft};
use crate::plan::{Old, Way};
use crate::policy::Action;
use crate::policy::Request;
use crate::times::{
    DOWN_LIMIT, LAST_MOMENT, LONGEST_RECORDING, LONGEST_RELIST, NUDGE_INTERVAL, RELIST_INTERVAL,
    STOP_LIMIT, time_of_relist,
};
use ContainerKind::{Init, Regular, Sidecar};

/// How long making a placeholder takes.
pub(super) const MADE: Duration = Duration::ZERO;

/// Whether the restart begins anew because containers were started out of order.
fn is_disturbed(effects: &[Effect]) -> bool {
    let disturbed = |it: &Effect| {
        matches!(
            it,
            Effect::BeginAnew {
                disturbed: true,
                ..
            }
        )
    };
    effects.iter().any(disturbed)
}

/// What the gate says, without words.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Admit,
    NotYet,
    BackOff,
    OutOfOrder,
}

impl From<Result<(), Refused>> for Verdict {
    fn from(admitted: Result<(), Refused>) -> Self {
        match admitted {
            Ok(()) => Self::Admit,
            Err(Refused::NotYet(..)) => Self::NotYet,
            Err(Refused::BackOff { .. }) => Self::BackOff,
            Err(Refused::OutOfOrder(..)) => Self::OutOfOrder,
            Err(other) => panic!("{other}: is the pod's to say"),
        }
    }
}

/// Plays the runtime: answers effects with events, in the order that `shuffle` says.
pub(super) struct World {
    pub(super) machine: Machine,
    pub(super) now: Instant,
    pub(super) pending: VecDeque<Event>,
    pub(super) released: BTreeSet<ContainerId>,
    removed: BTreeSet<ContainerId>,
    pub(super) finished: Option<Outcome>,
    pub(super) fell_back: Option<String>,
    made: u32,
    pub(super) log: Vec<Effect>,
}

/// The trigger is, since now.
pub(super) fn held(plan: &Plan, now: Instant) -> BTreeMap<ContainerId, Instant> {
    BTreeMap::from([(plan.trigger.container.clone(), now)])
}

impl World {
    pub(super) fn begin(plan: Plan) -> Self {
        Self::begin_after(plan, RELIST_INTERVAL)
    }

    /// Once the oldest container has run for so long.
    fn begin_after(plan: Plan, ran: Duration) -> Self {
        let now = Instant::now();
        let held = held(&plan, now);
        let found = since(&plan, now.checked_sub(ran).unwrap());
        let (machine, effects) = Machine::begin(plan, &held, None, &found, now);
        let mut world = Self {
            machine,
            now,
            pending: VecDeque::new(),
            released: BTreeSet::new(),
            removed: BTreeSet::new(),
            finished: None,
            fell_back: None,
            made: 0,
            log: Vec::new(),
        };
        world.take(effects);
        world
    }

    /// The same restart, of which all that ran is held, in another generation.
    pub(super) fn begin_anew(&mut self, plan: Plan) {
        let olds = plan.members.iter().filter_map(|it| it.old_id());
        let held = olds.map(|id| (id.clone(), self.now)).collect();
        let found = since(&plan, self.now.checked_sub(RELIST_INTERVAL).unwrap());
        let before = Some(&self.machine);
        let (machine, effects) = Machine::begin(plan, &held, before, &found, self.now);
        self.machine = machine;
        self.pending.clear();
        self.log.clear();
        self.take(effects);
    }

    fn take(&mut self, effects: Vec<Effect>) {
        let announced = effects.contains(&Effect::Announce(true));
        let asks = effects.contains(&Effect::AskForTurn);
        for effect in effects {
            match effect.clone() {
                Effect::Save | Effect::Announce(_) | Effect::AskForTurn => {}
                Effect::Kill(id) => self.pending.push_back(Event::Held(id, self.now)),
                Effect::MakePlaceholder(name, _) => {
                    self.made += 1;
                    let id = format!("placeholder-{}", self.made).into();
                    self.pending
                        .push_back(Event::PlaceholderMade(name, id, MADE));
                }
                Effect::Release(ids) => self.released.extend(ids),
                Effect::Remove(id) => {
                    self.removed.insert(id.clone());
                    self.pending.push_back(Event::Gone(id));
                }
                Effect::Recover => self.pending.push_back(Event::Recovered(Ok(()))),
                Effect::Replay(names) => {
                    for name in names {
                        let id = format!("{name}-1").into();
                        self.pending.push_back(Event::Started(name, id));
                    }
                }
                Effect::BeginAnew {
                    disturbed: false,
                    why,
                } => self.fell_back = Some(why),
                Effect::BeginAnew { .. } | Effect::Start(_) => panic!("nobody else was here"),
                Effect::Finish(outcome) => {
                    assert_eq!(self.finished.replace(outcome), None, "finished twice");
                }
            }
            self.log.push(effect);
        }
        if asks {
            self.handle(Event::Called);
        }
        if announced {
            self.handle(Event::Announced);
        }
    }

    pub(super) fn handle(&mut self, event: Event) {
        let shields = matches!(event, Event::PlaceholderMade(..));
        let effects = self.machine.handle(self.now, event);
        self.take(effects);
        if shields {
            // No relist can have missed it any more.
            self.tick_after_relist();
        }
    }

    fn hold(&mut self, id: &str) {
        self.handle(Event::Held(id.into(), self.now));
    }

    /// Answers everything that is under way.
    pub(super) fn settle(&mut self) {
        loop {
            match self.pending.pop_front() {
                Some(event) => self.handle(event),
                None if self.machine.exits_forgotten_from().is_some() => self.tick_after_relist(),
                None => break,
            }
        }
    }

    fn tick_after_relist(&mut self) {
        self.now += time_of_relist(MADE);
        self.handle(Event::Tick);
    }

    /// Until no relist can have missed what has happened so far.
    pub(super) fn relist(&mut self) {
        self.tick_after_relist();
        self.settle();
    }

    pub(super) fn admit_create(&mut self, name: &str) -> Verdict {
        let (admitted, effects) = self.machine.admit_create(self.now, &name.into());
        self.take(effects);
        admitted.into()
    }

    fn start(&mut self, name: &str) {
        assert_eq!(self.admit_create(name), Verdict::Admit, "{name}");
        self.handle(Event::Started(name.into(), format!("{name}-1").into()));
        self.settle();
    }

    fn complete(&mut self, name: &str) {
        self.start(name);
        self.end(name, 0);
    }

    pub(super) fn end(&mut self, name: &str, code: i32) {
        let id = format!("{name}-1").into();
        self.handle(Event::Ended(name.into(), id, Some(ExitCode(code))));
    }

    pub(super) fn removed(&self, name: &str) -> bool {
        self.removed.contains(&ContainerId::from(name))
    }
}

pub(super) const FULL: Shape<'_> = &[
    ("i", Init, DONE),
    ("s", Sidecar, RUNS),
    ("a", Regular, RUNS),
    ("b", Regular, RUNS),
];
pub(super) const PLAIN: Shape<'_> = &[("a", Regular, RUNS), ("b", Regular, RUNS)];

fn all(policy: RestartPolicy, shape: Shape<'_>, trigger: &str) -> World {
    World::begin(draft(Some(policy), shape, trigger, 42).settled())
}

#[test]
fn what_follows_a_probed_sidecar_in_the_same_sync_waits_and_what_follows_its_probe_does_not() {
    for start in [80, 400] {
        let shape: Shape<'_> = &[("s", Sidecar, RUNS), ("a", Regular, RUNS)];
        let mut begun = draft(Some(RestartPolicy::Never), shape, "a", 42);
        begun.members[0].startup_probe = true;
        let mut world = World::begin(begun.settled());
        world.settle();
        assert_eq!(world.admit_create("a"), Verdict::NotYet);
        world.settle();
        assert_eq!(world.admit_create("s"), Verdict::Admit);
        world.now += Duration::from_millis(start);
        world.handle(Event::Started("s".into(), "s-1".into()));
        world.now += Duration::from_millis(start / 2);
        assert_eq!(world.admit_create("a"), Verdict::OutOfOrder, "{start}");
        world.now += Duration::from_millis(start / 2 + 20);
        assert_eq!(world.admit_create("a"), Verdict::Admit, "{start}");
    }
}

#[test]
fn what_goes_first_is_released_with_the_attempts_before_it() {
    let mut plan = draft(Some(RestartPolicy::Always), FULL, "a", 42).settled();
    plan.members[1].older = vec!["s-older".into()];
    let mut world = World::begin(plan);
    world.settle();
    let mut log = world.log.iter();
    let first = log.find_map(|effect| match effect {
        Effect::Release(ids) => Some(ids),
        _ => None,
    });
    let first = first.expect("exits are released");
    assert!(first.contains(&"s-older".into()));
    assert!(!first.contains(&"a-0".into()));
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
    world.hold("s-0");
    assert!(world.released.is_empty());
    world.hold("b-0");
    assert_eq!(world.released, ["i-0", "s-0"].map(ContainerId::from).into());
    assert!(world.machine.holds(&"a-0".into()));
    assert_eq!(world.admit_create("i"), Verdict::NotYet);
    world.settle();
    assert!(world.removed("i-0") && world.removed("s-0") && !world.removed("a-0"));
    assert!(world.released.contains(&"a-0".into()));
    assert_eq!(world.admit_create("a"), Verdict::OutOfOrder);
    assert_eq!(world.admit_create("s"), Verdict::OutOfOrder);
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
    world.hold("b-0");
    world.handle(Event::PlaceholderMade("a".into(), "p1".into(), MADE));
    world.handle(Event::PlaceholderMade("a".into(), "p2".into(), MADE));
    assert!(world.released.is_empty());
    world.handle(Event::PlaceholderMade("b".into(), "p3".into(), MADE));
    assert_eq!(world.released.len(), 2);
    world.pending.clear();
    world.start("b");
    world.relist();
    assert!(world.removed("p3") && !world.removed("p1"));
    world.start("a");
    world.relist();
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
    assert_eq!(world.admit_create("b"), Verdict::NotYet);
    let shielded = ["a-0", "b-0"].map(ContainerId::from);
    assert_eq!(world.removed, shielded.into(), "no exit to back off from");
    assert_eq!(world.admit_create("a"), Verdict::NotYet);
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
fn what_is_to_vanish_is_held_until_the_kubelet_has_seen_it_run() {
    for (shape, held) in [(FULL, true), (PLAIN, false)] {
        let plan = draft(Some(RestartPolicy::Never), shape, "a", 42).settled();
        let mut world = World::begin_after(plan, Duration::from_millis(100));
        world.settle();
        assert_eq!(world.machine.phase() == Phase::Down, held);
        world.now = world.machine.deadline().unwrap();
        world.handle(Event::Tick);
        assert_ne!(world.machine.phase(), Phase::Down);
    }
}

#[test]
fn attempts_before_the_one_that_is_removed_are_removed_with_it() {
    let mut draft = draft(Some(RestartPolicy::Always), FULL, "a", 42);
    for member in &mut draft.members {
        member.older = vec![format!("{}-before", member.name).into()];
    }
    let mut world = World::begin(draft.settled());
    world.settle();
    assert!(world.removed("i-before") && world.removed("s-before"));
    assert!(!world.removed("a-before"), "it stays with its successor");
    assert_eq!(world.machine.phase(), Phase::Up);
}

#[test]
fn late_news_of_an_attempt_before_is_not_taken_for_a_new_one() {
    let mut draft = draft(Some(RestartPolicy::Never), FULL, "a", 42);
    for member in &mut draft.members {
        member.older = vec![format!("{}-before", member.name).into()];
    }
    let mut world = World::begin(draft.settled());
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
    world.admit_create("a");
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
    assert_eq!(world.admit_create("s"), Verdict::OutOfOrder);
    world.complete("i");
    assert_eq!(world.admit_create("s"), Verdict::Admit);
}

#[test]
fn an_init_container_may_end_before_it_is_known_to_have_started() {
    let mut world = all(RestartPolicy::Always, FULL, "a");
    world.settle();
    assert_eq!(world.admit_create("i"), Verdict::Admit);
    world.end("i", 0);
    assert_eq!(world.admit_create("s"), Verdict::Admit);
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
fn a_success_that_is_known_late_does_not_leave_its_container_behind() {
    let shape: Shape<'_> = &[("a", Regular, RUNS), ("b", Regular, RUNS)];
    let mut world = all(RestartPolicy::OnFailure, shape, "a");
    // Its hook was faster than the news of its code.
    world.hold("b-0");
    assert_eq!(world.machine.phase(), Phase::Up);
    assert!(!world.removed("b-0"));
    for (name, code) in [("a", 42), ("b", 0)] {
        let id = format!("{name}-0").into();
        world.handle(Event::Ended(name.into(), id, Some(ExitCode(code))));
    }
    assert!(world.removed("b-0") && !world.removed("a-0"));
}

#[test]
fn what_shields_a_container_that_starts_stays_until_no_relist_can_have_missed_the_start() {
    let mut world = all(RestartPolicy::Never, PLAIN, "a");
    world.hold("b-0");
    world.settle();
    let (now, started) = (world.now, Event::Started("a".into(), "a-1".into()));
    let removes = |effects: &[Effect]| effects.iter().any(|it| matches!(it, Effect::Remove(_)));
    assert!(!removes(&world.machine.handle(now, started)));
    assert_eq!(world.machine.deadline(), Some(now + time_of_relist(MADE)));
    let later = now + time_of_relist(MADE);
    assert!(removes(&world.machine.handle(later, Event::Tick)));
}

#[test]
fn action_restart_concerns_one_container() {
    let draft = draft(Some(RestartPolicy::Never), PLAIN, "a", 42).alone();
    let mut world = World::begin(draft.settled());
    assert!(!world.log.contains(&Effect::Kill("b-0".into())));
    assert_eq!(world.admit_create("b"), Verdict::Admit);
    assert_eq!(world.admit_create("a"), Verdict::NotYet);
    world.settle();
    world.start("a");
    world.relist();
    assert_eq!(world.finished, Some(Outcome::Completed));
}

#[test]
fn a_container_that_cannot_be_killed_does_not_hold_the_others_for_ever() {
    let mut world = all(RestartPolicy::Never, PLAIN, "a");
    for id in ["shield-1", "shield-2"] {
        world.handle(Event::PlaceholderMade("a".into(), id.into(), MADE));
    }
    world.now += DOWN_LIMIT;
    world.handle(Event::Tick);
    assert_eq!(world.released.len(), 2);
}

#[test]
fn a_pod_whose_guard_could_not_be_shielded_is_left_to_fail_with_its_exits() {
    // The kubelet may take long to say that it has failed.
    for (shape, end) in [PLAIN, FULL].into_iter().zip([Event::Tick, Event::Deleted]) {
        let mut world = all(RestartPolicy::Never, shape, "a");
        for (name, _, was) in shape {
            if matches!(was, Was::Running) {
                world.hold(&format!("{name}-0"));
            }
        }
        world.handle(Event::PlaceholderMade("b".into(), "shield-1".into(), MADE));
        world.now += DOWN_LIMIT;
        world.handle(Event::Tick);
        assert!(world.released.is_empty());
        world.now += LAST_MOMENT;
        world.handle(Event::Tick);
        assert_eq!(world.released.len(), shape.len());
        assert_eq!(world.removed, [ContainerId::from("shield-1")].into());
        // The kubelet may have seen that one wait.
        assert_eq!(world.admit_create("b"), Verdict::NotYet);
        world.handle(Event::Gone("shield-1".into()));
        assert_eq!(world.finished, None);
        world.now += LONGEST_RECORDING;
        world.handle(end.clone());
        assert_eq!(world.finished, Some(Outcome::Unshielded));
    }
}

#[test]
fn what_the_kubelet_was_let_create_of_a_pod_that_fails_is_waited_for_and_ended() {
    let mut world = all(RestartPolicy::Never, PLAIN, "a");
    world.hold("a-0");
    world.hold("b-0");
    world.now += DOWN_LIMIT;
    world.handle(Event::Tick);
    world.now += LAST_MOMENT;
    world.handle(Event::Tick);
    world.machine.note_gate(false);
    world.now += LONGEST_RECORDING;
    world.handle(Event::Tick);
    world.machine.note_gate(true);
    world.machine.relisted(&there(&[]), world.now);
    world.handle(Event::Tick);
    assert_eq!(world.finished, None);
    world.handle(Event::Started("b".into(), "b-1".into()));
    assert!(world.log.contains(&Effect::Kill("b-1".into())));
}

#[test]
fn a_container_that_alone_could_not_be_shielded_is_removed_to_start_again() {
    let mut world = all(RestartPolicy::Never, PLAIN, "a");
    for id in ["shield-1", "shield-2"] {
        world.handle(Event::PlaceholderMade("a".into(), id.into(), MADE));
    }
    world.now += DOWN_LIMIT;
    world.handle(Event::Tick);
    assert_eq!(world.machine.phase(), Phase::Up);
    assert!(world.removed("b-0") && !world.removed("a-0"));
}

#[test]
fn a_start_that_is_told_after_the_end_takes_nothing_back() {
    let mut world = all(RestartPolicy::Always, FULL, "a");
    world.settle();
    world.complete("i");
    world.handle(Event::Started("i".into(), "i-1".into()));
    assert_eq!(world.admit_create("s"), Verdict::Admit);
}

#[test]
fn a_guard_that_is_shielded_in_the_last_moment_saves_the_pod() {
    let mut world = all(RestartPolicy::Never, PLAIN, "a");
    world.hold("b-0");
    world.now += DOWN_LIMIT;
    world.handle(Event::Tick);
    for id in ["shield-1", "shield-2"] {
        world.handle(Event::PlaceholderMade("a".into(), id.into(), MADE));
    }
    assert_eq!(world.machine.phase(), Phase::Up);
    assert!(world.removed("b-0") && !world.removed("a-0"));
}

#[test]
fn a_deleted_pod_is_released_at_once_and_nothing_stays() {
    let mut world = all(RestartPolicy::Never, PLAIN, "a");
    world.handle(Event::PlaceholderMade("a".into(), "p1".into(), MADE));
    world.handle(Event::Deleted);
    assert_eq!(world.finished, Some(Outcome::Deleted));
    assert_eq!(world.released.len(), 2);
    assert!(world.removed("p1"));
    world.handle(Event::PlaceholderMade("a".into(), "p2".into(), MADE));
    assert!(world.removed("p2"), "one that was under way");
    assert_eq!(world.admit_create("a"), Verdict::Admit);
}

pub(super) type Found = (ContainerId, Instance);

fn found(id: &str, name: &str, placeholder: bool, new: bool, state: InstanceState) -> Found {
    let instance = Instance {
        maker: if placeholder {
            Maker::Placeholder
        } else {
            Maker::Kubelet
        },
        created_at: if placeholder || new { 2 } else { 1 },
        state,
        ..Instance::running(name)
    };
    (id.into(), instance)
}

fn made_at(created_at: i64, (id, instance): Found) -> Found {
    let instance = Instance {
        created_at,
        ..instance
    };
    (id, instance)
}

pub(super) fn there(found: &[Found]) -> Instances {
    let mut instances = Instances::default();
    for (id, instance) in found {
        instances.insert(id.clone(), instance.clone());
    }
    instances
}

/// The old containers that run, which have been there since then.
pub(super) fn since(plan: &Plan, heard_at: Instant) -> Instances {
    let mut instances = Instances::default();
    for member in plan.members.iter().filter(|it| it.was_running()) {
        let instance = Instance {
            heard_at,
            ..Instance::running(member.name.as_str())
        };
        instances.insert(member.old_id().unwrap().clone(), instance);
    }
    instances
}

#[test]
fn what_has_come_since_a_restart_was_decided_is_new_whatever_the_clock_on_the_wall_was_set_to() {
    let shape = &[("a", Regular, RUNS)];
    let plan = draft(Some(RestartPolicy::Never), shape, "a", 42).settled();
    let seen = |id: &str, created_at| {
        let runs = found(id, "a", false, false, InstanceState::Running);
        let seen = there(&[made_at(created_at, runs)]);
        Progress::from_found(&plan.members[0], &seen).new
    };
    assert_eq!(seen("a-1", 0), NewState::Running("a-1".into()));
    assert_eq!(seen("a-0", i64::MAX), NewState::None);
}

#[test]
fn of_what_has_ended_since_a_restart_was_decided_the_newest_counts() {
    let shape = &[("i", Init, DONE), ("a", Regular, RUNS)];
    let plan = draft(Some(RestartPolicy::Never), shape, "a", 42).settled();
    let ended = |id, at, code| {
        let it = found(
            id,
            "i",
            false,
            true,
            InstanceState::Ended(Some(ExitCode(code))),
        );
        made_at(at, it)
    };
    for ids in [["i-1", "i-2"], ["i-2", "i-1"]] {
        let seen = there(&[ended(ids[0], 3, 1), ended(ids[1], 4, 0)]);
        let new = Progress::from_found(&plan.members[0], &seen).new;
        assert_eq!(new, NewState::Ended(ids[1].into(), Some(ExitCode::SUCCESS)));
    }
}

#[test]
fn what_shields_nothing_any_more_goes_when_a_successor_finds_it() {
    let shape = &[("i", Init, DONE), ("a", Regular, RUNS)];
    let shield = found("p", "a", true, true, InstanceState::Created);
    let (mut machine, effects) = resume(shape, Phase::Up, std::slice::from_ref(&shield), 3);
    let goes = Effect::Remove("p".into());
    assert!(!effects.contains(&goes), "{effects:?}");
    // No relist tells any more of what it may have shielded.
    let then = machine.deadline().unwrap();
    assert_eq!(machine.handle(then, Event::Tick), [goes]);
    let (_, effects) = resume(&shape[1..], Phase::Up, &[shield], 3);
    assert!(
        !effects.contains(&Effect::Remove("p".into())),
        "{effects:?}"
    );
}

/// While its exit is held, the runtime takes it for running.
#[test]
fn a_trigger_of_a_generation_before_is_not_waited_for() {
    let mut draft = draft(Some(RestartPolicy::Never), PLAIN, "a", 42);
    draft.again = 1;
    draft.trigger.container = "a-before".into();
    draft.members[0].older = vec!["a-before".into()];
    let seen = [
        found("a-before", "a", false, false, InstanceState::Running),
        found("a-0", "a", false, false, InstanceState::Running),
        found("b-0", "b", false, false, InstanceState::Running),
    ];
    let (machine, _) = resume_plan(draft.settled(), Phase::Down, &seen, Duration::ZERO);
    assert!(machine.ending.is_empty(), "{:?}", machine.ending);
}

#[test]
fn a_kubelet_that_is_silent_is_woken() {
    let seen = InstanceState::Ended(Some(ExitCode(42)));
    let there = [
        found("a-0", "a", false, false, seen),
        found("b-0", "b", false, false, seen),
        found("p-1", "a", true, true, InstanceState::Created),
        found("p-2", "a", true, true, InstanceState::Created),
        found("p-3", "b", true, true, InstanceState::Created),
    ];
    let (mut machine, _) = resume(PLAIN, Phase::Down, &there, 20);
    assert_eq!(machine.phase(), Phase::Up);
    let wants = |machine: &Machine| machine.wants_shield(&WAKER.into());
    let mut now = machine.deadline().unwrap();
    let _ = machine.admit_create(now, &"a".into());
    machine.handle(now, Event::Tick);
    assert!(!wants(&machine), "it has wanted something");
    now += NUDGE_INTERVAL;
    let effects = machine.handle(now, Event::Tick);
    let waker = Effect::MakePlaceholder(WAKER.into(), Some("a-0".into()));
    assert_eq!(effects, [waker]);
    assert!(wants(&machine));
}

#[test]
fn what_the_kubelet_could_not_start_before_its_turn_is_in_the_way() {
    let shape = &[("i", Init, DONE), ("a", Regular, RUNS)];
    let plan = draft(Some(RestartPolicy::Never), shape, "a", 42).settled();
    let (_, made) = found("a-1", "a", false, true, InstanceState::Created);
    let by_us = Instance {
        maker: Maker::Replay,
        ..made.clone()
    };
    let through = found(
        "i-1",
        "i",
        false,
        true,
        InstanceState::Ended(Some(ExitCode::SUCCESS)),
    );
    let id = "a-1".into();
    let now = Instant::now() + RELIST_INTERVAL;
    let early = resume_plan(plan.clone(), Phase::Up, &[], Duration::ZERO).0;
    assert!(early.is_in_the_way(&id, &made, now));
    assert!(!early.is_in_the_way(&id, &by_us, now));
    let turn = resume_plan(plan, Phase::Up, &[through], Duration::ZERO).0;
    assert!(!turn.is_in_the_way(&id, &made, now));
}

#[test]
fn a_placeholder_that_an_earlier_restart_left_shields_nothing() {
    let plan = draft(Some(RestartPolicy::Never), &PLAIN[..1], "a", 42).settled();
    let stale = made_at(0, found("p-0", "a", true, false, InstanceState::Created));
    let seen = [
        found("a-0", "a", false, false, InstanceState::Running),
        found("p-1", "a", true, true, InstanceState::Created),
        stale,
    ];
    let elapsed = Duration::from_millis(200);
    let (_, effects) = resume_plan(plan, Phase::Down, &seen, elapsed);
    let wanted = effects
        .iter()
        .filter(|it| matches!(it, Effect::MakePlaceholder(..)));
    assert_eq!(wanted.count(), 1, "{effects:?}");
}

fn resume(way_of: Shape<'_>, phase: Phase, seen: &[Found], elapsed: u64) -> (Machine, Vec<Effect>) {
    let plan = draft(Some(RestartPolicy::Never), way_of, "a", 42).settled();
    resume_plan(plan, phase, seen, Duration::from_secs(elapsed))
}

/// It is its turn, if it is to wait for one.
fn resume_plan(
    plan: Plan,
    phase: Phase,
    seen: &[Found],
    elapsed: Duration,
) -> (Machine, Vec<Effect>) {
    let now = Instant::now();
    let (mut machine, mut effects) = Machine::resume(plan, phase, &there(seen), elapsed, now);
    effects.extend(machine.handle(now, Event::Called));
    (machine, effects)
}

/// Also where the clock was stepped meanwhile.
#[test]
fn what_the_kubelet_began_in_order_since_the_decision_is_left_to_run() {
    let shape: Shape<'_> = &[("i", Init, DONE), ("a", Regular, RUNS)];
    for created_at in [i64::MAX, 1] {
        let begun = found("i-1", "i", false, true, InstanceState::Running);
        let begun = made_at(created_at, begun);
        let seen = [
            found("a-0", "a", false, false, InstanceState::Ended(None)),
            found("p-1", "a", true, true, InstanceState::Created),
            begun,
        ];
        let (machine, effects) = resume(shape, Phase::Shielded, &seen, 1);
        assert!(!is_disturbed(&effects), "{effects:?}");
        assert_eq!(machine.phase(), Phase::Clear);
    }
}

#[test]
fn a_restart_that_the_kubelet_has_gone_on_without_is_over() {
    let shape: Shape<'_> = &[
        ("i", Init, DONE),
        ("a", Regular, RUNS),
        ("b", Regular, RUNS),
    ];
    let seen = |b| {
        let done = InstanceState::Ended(Some(ExitCode(0)));
        let asked = InstanceState::Ended(Some(ExitCode(42)));
        [
            found("i-0", "i", false, false, done),
            found("a-0", "a", false, false, asked),
            found("a-1", "a", false, true, InstanceState::Running),
            found("b-0", "b", false, false, b),
        ]
    };
    // Nothing had been killed when the plugin died, as it turns out.
    let (_, effects) = resume(shape, Phase::Down, &seen(InstanceState::Running), 20);
    assert!(is_disturbed(&effects), "{effects:?}");
    let (mut machine, _) = resume(shape, Phase::Down, &seen(InstanceState::Running), 90);
    let over = |outcome| Effect::Finish(outcome);
    let later = Instant::now() + STOP_LIMIT;
    let effects = machine.handle(later, Event::Tick);
    assert!(effects.contains(&over(Outcome::TimedOut)), "{effects:?}");
    assert_eq!(machine.waiting_for(), [&"b".into()]);
    // Nothing had been shielded, and the kubelet starts the other one never again.
    let killed = InstanceState::Ended(Some(ExitCode(137)));
    let (mut machine, effects) = resume(shape, Phase::Down, &seen(killed), 90);
    assert!(effects.contains(&Effect::Kill("a-1".into())), "{effects:?}");
    assert!(machine.ends(&"a-1".into()));
    let effects = machine.handle(Instant::now(), Event::Exited("a-1".into()));
    assert!(effects.contains(&over(Outcome::MadeToFail)), "{effects:?}");
}

#[test]
fn a_successor_makes_only_the_placeholders_that_are_missing() {
    let seen = [
        found("a-0", "a", false, false, InstanceState::Running),
        found("b-0", "b", false, false, InstanceState::Running),
        found("p1", "a", true, true, InstanceState::Created),
    ];
    let (machine, effects) = resume(PLAIN, Phase::Down, &seen, 3);
    let made = |effect: &&Effect| matches!(effect, Effect::MakePlaceholder(..));
    assert_eq!(effects.iter().filter(made).count(), 2);
    assert!(effects.contains(&Effect::Announce(true)));
    assert!(effects.contains(&Effect::Kill("b-0".into())));
    assert_eq!(machine.phase(), Phase::Down);
}

#[test]
fn a_successor_leaves_what_the_kubelet_is_about_to_start() {
    let by_replay = |(id, instance): Found| {
        let maker = Maker::Replay;
        (id, Instance { maker, ..instance })
    };
    let exited = InstanceState::Ended(None);
    let seen = [
        found("a-0", "a", false, false, exited),
        found("b-0", "b", false, false, exited),
        found("a-1", "a", false, true, exited),
        found("a-2", "a", false, true, InstanceState::Created),
        found("b-1", "b", false, true, exited),
        by_replay(found("b-2", "b", false, true, InstanceState::Created)),
    ];
    let (_, effects) = resume(PLAIN, Phase::Up, &seen, 3);
    assert!(!effects.contains(&Effect::Remove("a-2".into())));
    assert!(effects.contains(&Effect::Remove("b-2".into())));
}

#[test]
fn a_success_that_is_learnt_after_the_decision_is_started_again() {
    let shape: Shape<'_> = &[
        ("a", Regular, RUNS),
        ("b", Regular, Was::Exited(ExitCode::UNKNOWN.0)),
    ];
    let plan = draft(Some(RestartPolicy::OnFailure), shape, "a", 42).settled();
    assert_eq!(plan.way, Way::Kept);
    let now = Instant::now();
    let (mut machine, _) = begin_round(plan, None, now);
    let success = Some(ExitCode::SUCCESS);
    let mut effects = machine.handle(now, Event::Ended("b".into(), "b-0".into(), success));
    effects.extend(machine.handle(now, Event::Announced));
    assert!(
        effects.contains(&Effect::Remove("b-0".into())),
        "{effects:?}"
    );
}

fn intruders() -> [Found; 5] {
    [
        found("a-0", "a", false, false, InstanceState::Ended(None)),
        found("a-1", "a", false, true, InstanceState::Running),
        found("b-1", "b", false, true, InstanceState::Running),
        found("p1", "a", true, true, InstanceState::Created),
        found("p3", "b", true, true, InstanceState::Created),
    ]
}

#[test]
fn a_successor_that_finds_containers_started_without_their_inits_begins_anew() {
    let (_, effects) = resume(FULL, Phase::Shielded, &intruders(), 2);
    assert!(is_disturbed(&effects[effects.len() - 1..]));
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
    let mut plan = draft(Some(RestartPolicy::Always), FULL, "a", 42).settled();
    for again in 0..=MOST_AGAIN {
        plan.again = again;
        let (mut machine, _) = begin_round(plan.clone(), None, Instant::now());
        let started = Event::Started("b".into(), "b-1".into());
        let effects = machine.handle(Instant::now(), started);
        assert_eq!(is_disturbed(&effects), again < MOST_AGAIN);
    }
}

#[test]
fn what_runs_behind_its_shields_is_ended_by_a_successor_and_shown_where_they_have_just_been_made() {
    let shielded = [
        found("a-1", "a", false, true, InstanceState::Running),
        found("b-0", "b", false, false, InstanceState::Running),
        found("p1", "b", true, true, InstanceState::Created),
    ];
    let (_, effects) = resume(PLAIN, Phase::Up, &shielded, 1);
    assert!(effects.contains(&Effect::Kill("b-0".into())), "{effects:?}");

    let mut plan = draft(Some(RestartPolicy::Never), FULL, "a", 42).settled();
    plan.again = MOST_AGAIN;
    let now = Instant::now();
    let (mut machine, _) = begin_round(plan, None, now);
    machine.handle(now, Event::PlaceholderMade("b".into(), "p1".into(), MADE));
    let mut effects = machine.handle(now, Event::Started("a".into(), "a-1".into()));
    assert!(
        !effects.contains(&Effect::Kill("b-0".into())),
        "{effects:?}"
    );
    effects.extend(machine.handle(now, Event::PlaceholderMade("b".into(), "p2".into(), MADE)));
    for id in ["p1", "p2"] {
        assert!(effects.contains(&Effect::Remove(id.into())), "{effects:?}");
    }
}

#[test]
fn an_init_container_that_has_run_out_of_order_makes_it_begin_anew_as_well() {
    let shape: Shape<'_> = &[("i", Init, DONE), ("j", Init, DONE), ("a", Regular, RUNS)];
    for (ended, anew) in [("i", false), ("j", true)] {
        let mut world = all(RestartPolicy::Never, shape, "a");
        world.settle();
        assert_eq!(world.admit_create("a"), Verdict::NotYet);
        world.settle();
        assert_eq!(world.machine.phase(), Phase::Up);
        // NRI was away: nobody heard that it began.
        let id = format!("{ended}-1").as_str().into();
        let ended = Event::Ended(ended.into(), id, Some(ExitCode::SUCCESS));
        let effects = world.machine.handle(world.now, ended);
        assert_eq!(is_disturbed(&effects), anew);
    }
}

#[test]
fn a_placeholder_that_the_kubelet_collects_is_made_again() {
    let mut world = all(RestartPolicy::Never, PLAIN, "a");
    let of_a = |it: &Event| matches!(it, Event::PlaceholderMade(name, ..) if *name == "a".into());
    world.pending.retain(|it| !of_a(it));
    for id in ["shield-1", "shield-2"] {
        world.handle(Event::PlaceholderMade("a".into(), id.into(), MADE));
    }
    let made = world.made;
    world.handle(Event::Gone("shield-1".into()));
    assert_eq!(world.made, made + 1);
    world.settle();
    assert_eq!(world.machine.phase(), Phase::Up);
    // The kubelet has not relisted yet.
    world.handle(Event::Gone("shield-2".into()));
    assert_eq!(world.made, made + 2);
    world.settle();
    world.start("a");
    assert_eq!(world.made, made + 2, "it hides nothing any more");
}

#[test]
fn a_round_that_finds_the_guard_removed_does_not_wait_for_it() {
    let shape: Shape<'_> = &[
        ("i", Init, DONE),
        ("s", Sidecar, RUNS),
        ("a", Regular, Was::Absent),
        ("b", Regular, Was::Absent),
    ];
    let mut world = all(RestartPolicy::Never, shape, "a");
    world.settle();
    assert!(world.removed("i-0") && world.removed("s-0"));
    world.complete("i");
    world.start("s");
    world.start("a");
    world.start("b");
    assert_eq!(world.finished, Some(Outcome::Completed));
}

/// A generation of a restart whose trigger is held, and whose turn it is.
fn begin_round(plan: Plan, before: Option<&Machine>, now: Instant) -> (Machine, Vec<Effect>) {
    let held = held(&plan, now);
    let found = since(&plan, now.checked_sub(RELIST_INTERVAL).unwrap());
    let (mut machine, mut effects) = Machine::begin(plan, &held, before, &found, now);
    effects.extend(machine.handle(now, Event::Called));
    (machine, effects)
}

fn old(id: &str, exit: Option<ExitCode>) -> Old {
    Old {
        id: id.into(),
        exit,
    }
}

#[test]
fn a_round_waits_for_the_kubelet_to_record_what_shields_a_guard_that_is_gone() {
    let shape: Shape<'_> = &[
        ("s", Sidecar, RUNS),
        ("a", Regular, RUNS),
        ("b", Regular, RUNS),
    ];
    let mut plan = draft(Some(RestartPolicy::Never), shape, "a", 42).settled();
    let now = Instant::now();
    let (mut before, _) = begin_round(plan.clone(), None, now);
    for id in ["p1", "p2"] {
        before.handle(now, Event::PlaceholderMade("a".into(), id.into(), MADE));
    }
    // The kubelet has started the sidecar once more, and what shielded the other is gone with it.
    plan.members[0].old = Some(old("s-1", None));
    plan.members[2].old = None;
    let (mut machine, _) = begin_round(plan, Some(&before), now);
    for event in [
        Event::Announced,
        Event::Gone("a-0".into()),
        Event::PlaceholderMade("s".into(), "p3".into(), MADE),
        Event::Held("s-1".into(), now),
    ] {
        machine.handle(now, event);
    }
    let now = now + time_of_relist(MADE);
    machine.handle(now, Event::Tick);
    assert_eq!(machine.phase(), Phase::Shielded);
    let _ = machine.admit_create(now, &"a".into());
    assert_eq!(machine.phase(), Phase::Clear);
}

#[test]
fn what_had_ended_for_good_and_runs_again_is_seen_to_end_before_the_guard_is_shielded() {
    let shape: Shape<'_> = &[
        ("i", Init, DONE),
        ("a", Regular, RUNS),
        ("b", Regular, RUNS),
    ];
    let mut plan = draft(Some(RestartPolicy::Never), shape, "a", 42);
    plan.members[2].runs_unrecorded = true;
    let now = Instant::now();
    let shield = Effect::MakePlaceholder("a".into(), Some("a-0".into()));
    let (mut machine, effects) = begin_round(plan.settled(), None, now);
    assert!(
        !effects.contains(&Effect::Remove("b-0".into())),
        "{effects:?}"
    );
    assert!(!effects.contains(&shield), "{effects:?}");
    let effects = machine.handle(now, Event::Exited("b-0".into()));
    assert_eq!(effects, [shield.clone(), shield]);
}

#[test]
fn what_turns_out_to_have_succeeded_is_not_shown_as_the_last_of_its_pod() {
    let shape: Shape<'_> = &[
        ("s", Sidecar, RUNS),
        ("a", Regular, RUNS),
        ("b", Regular, DONE),
    ];
    let plan = draft(Some(RestartPolicy::OnFailure), shape, "s", 42).settled();
    assert_eq!(plan.way, Way::Kept);
    let now = Instant::now();
    for (code, succeeds) in [(0, true), (137, false)] {
        let (mut machine, _) = begin_round(plan.clone(), None, now);
        machine.handle(now, Event::Held("a-0".into(), now));
        let mut effects = Vec::new();
        for event in [
            Event::Ended("a".into(), "a-0".into(), Some(ExitCode(code))),
            Event::Exited("s-0".into()),
            Event::Announced,
        ] {
            effects.extend(machine.handle(now, event));
        }
        let anew = |it: &Effect| {
            matches!(
                it,
                Effect::BeginAnew {
                    disturbed: false,
                    ..
                }
            )
        };
        assert_eq!(effects.iter().any(anew), succeeds, "{effects:?}");
    }
}

#[test]
fn an_init_container_that_is_seen_to_have_succeeded_stays_until_that_is_recorded() {
    let shape: Shape<'_> = &[("i", Init, RUNS), ("j", Init, DONE), ("a", Regular, RUNS)];
    let mut plan = draft(Some(RestartPolicy::Never), shape, "a", 42);
    plan.replayed_inits = true;
    let now = Instant::now();
    let (mut machine, _) = begin_round(plan.settled(), None, now);
    for id in ["p1", "p2"] {
        machine.handle(now, Event::PlaceholderMade("i".into(), id.into(), MADE));
    }
    let effects = machine.handle(now + time_of_relist(MADE), Event::Tick);
    let removes = |id: &str| effects.contains(&Effect::Remove(id.into()));
    assert!(removes("i-0") && !removes("j-0"), "{effects:?}");
}

#[test]
fn a_placeholder_of_the_round_before_is_trusted_no_sooner() {
    let plan = draft(Some(RestartPolicy::Never), PLAIN, "a", 42).settled();
    let now = Instant::now();
    let (mut before, _) = begin_round(plan.clone(), None, now);
    for (name, id) in [("a", "p1"), ("a", "p2"), ("b", "p3")] {
        before.handle(now, Event::PlaceholderMade(name.into(), id.into(), MADE));
    }
    let (mut machine, _) = begin_round(plan, Some(&before), now);
    for event in [Event::Announced, Event::Held("b-0".into(), now)] {
        machine.handle(now, event);
    }
    assert_eq!(machine.phase(), Phase::Down);
    assert_eq!(machine.deadline(), Some(now + time_of_relist(MADE)));
    machine.handle(now + time_of_relist(MADE), Event::Tick);
    assert_eq!(machine.phase(), Phase::Up);
}

#[test]
fn exits_of_a_slow_node_are_released_when_the_pods_status_shows_their_placeholders() {
    let slow = Duration::from_millis(200);
    for shows in [&["p2"][..], &["p2", "p3"], &["p1", "p3"]] {
        let plan = draft(Some(RestartPolicy::Never), PLAIN, "a", 42).settled();
        let now = Instant::now();
        let (mut machine, _) = begin_round(plan, None, now);
        machine.handle(now, Event::Announced);
        for (name, id) in [("a", "p1"), ("b", "p3"), ("a", "p2")] {
            let now = if id == "p2" { now + slow } else { now };
            machine.handle(now, Event::PlaceholderMade(name.into(), id.into(), slow));
        }
        machine.handle(now + slow, Event::Held("b-0".into(), now));
        let recorded = shows.iter().map(|&id| id.into()).collect();
        machine.handle(
            now + 4 * slow,
            Event::Recorded {
                seen: recorded,
                started: BTreeSet::new(),
            },
        );
        // Of the newest of each.
        let is_seen = machine.phase() == Phase::Up;
        assert_eq!(is_seen, shows == ["p2", "p3"], "{shows:?}");
        machine.handle(now + slow + LONGEST_RECORDING, Event::Tick);
        assert_eq!(machine.phase(), Phase::Up);
    }
}

#[test]
fn a_placeholder_of_the_round_before_shields_only_what_has_not_run_since() {
    let shape: Shape<'_> = &[
        ("a", Regular, RUNS),
        ("b", Regular, RUNS),
        ("c", Regular, RUNS),
    ];
    let plan = draft(Some(RestartPolicy::Never), shape, "a", 42).settled();
    let now = Instant::now();
    let (mut before, _) = begin_round(plan.clone(), None, now);
    for (name, id) in [("a", "p1"), ("b", "p2"), ("c", "p3")] {
        before.handle(now, Event::PlaceholderMade(name.into(), id.into(), MADE));
    }
    let mut plan = plan;
    plan.members[1].old = Some(old("b-1", None));
    plan.members[2].old = Some(old("c-1", Some(ExitCode::SUCCESS)));
    let (machine, effects) = begin_round(plan, Some(&before), now);
    for older in ["p2", "p3"] {
        assert!(effects.contains(&Effect::Remove(older.into())));
    }
    assert_eq!(machine.leftovers(), [("a".into(), "p1".into())]);
}

#[test]
fn a_successor_ends_what_an_older_version_says_is_over() {
    let seen = [
        found("a-1", "a", false, true, InstanceState::Running),
        found("p1", "a", true, true, InstanceState::Created),
    ];
    let (machine, effects) = resume(PLAIN, Phase::Over, &seen, 9);
    assert!(effects.contains(&Effect::Remove("p1".into())));
    assert!(effects.contains(&Effect::Finish(Outcome::Completed)));
    assert_eq!(machine.phase(), Phase::Over);
}

#[test]
fn a_successor_goes_on_removing() {
    let seen = [
        found("b-0", "b", false, false, InstanceState::Ended(None)),
        found("p1", "a", true, true, InstanceState::Created),
    ];
    let (mut machine, effects) = resume(FULL, Phase::Clear, &seen, 9);
    let expected = [Effect::Announce(false), Effect::Remove("b-0".into())];
    assert_eq!(effects, expected);
    let effects = machine.handle(Instant::now(), Event::Gone("b-0".into()));
    assert_eq!(effects, []);
    let effects = machine.handle(machine.deadline().unwrap(), Event::Tick);
    assert_eq!(effects, [Effect::Remove("p1".into())]);
    machine.handle(Instant::now(), Event::Gone("p1".into()));
    assert_eq!(machine.phase(), Phase::Up);
}

#[test]
fn a_successor_takes_relists_for_as_long_as_any_may_be() {
    let seen = [
        found("a-0", "a", false, false, InstanceState::Ended(None)),
        found("p1", "a", true, true, InstanceState::Created),
    ];
    let (mut machine, _) = resume(FULL, Phase::Clear, &seen, 9);
    let later = Instant::now() + LONGEST_RECORDING;
    assert_eq!(machine.handle(later, Event::Gone("a-0".into())), []);
    assert_eq!(
        machine.handle(later + time_of_relist(MADE), Event::Tick),
        []
    );
    let effects = machine.handle(later + LONGEST_RELIST, Event::Tick);
    assert_eq!(effects, [Effect::Remove("p1".into())]);
}

/// A plan whose containers may not start for 40 s.
fn backing_off(policy: RestartPolicy, shape: Shape<'_>) -> World {
    let mut draft = draft(Some(policy), shape, "a", 42);
    draft.back_off_ms = 40_000;
    World::begin(draft.settled())
}

#[test]
fn a_back_off_shuts_the_gate_until_it_is_over_and_then_wakes_the_kubelet() {
    for (policy, shape) in [(RestartPolicy::Never, PLAIN), (RestartPolicy::Always, FULL)] {
        let mut world = backing_off(policy, shape);
        let over = world.now + Duration::from_secs(40);
        world.settle();
        assert_eq!(world.machine.phase(), Phase::Up);
        assert!(world.released.contains(&"a-0".into()), "nothing is held");
        let first = shape[0].0;
        assert_eq!(world.admit_create(first), Verdict::BackOff);
        let waker = world
            .machine
            .waker
            .id()
            .cloned()
            .expect("nothing else wakes it");
        assert_eq!(world.machine.deadline(), Some(over));
        world.now = over;
        world.handle(Event::Tick);
        assert!(world.removed(waker.as_str()));
        assert_eq!(world.admit_create(first), Verdict::Admit);
    }
}

#[test]
fn a_back_off_that_is_cut_short_is_over_at_once_and_told_anew() {
    let mut world = backing_off(RestartPolicy::Never, PLAIN);
    world.settle();
    assert_eq!(world.admit_create("a"), Verdict::BackOff);
    let request = Request::of(|_| Some("now!")).unwrap().unwrap();
    let asked = Event::Asked(request, Duration::from_secs(3));
    let effects = world.machine.handle(world.now, asked);
    let told = [Effect::Save, Effect::Announce(false)];
    assert_eq!(effects[..2], told);
    assert_eq!(world.machine.plan().back_off_ms, 3_000);
    assert_eq!(world.admit_create("a"), Verdict::Admit);
}

#[test]
fn a_waker_that_is_made_when_the_back_off_is_over_goes_when_it_has_been_listed() {
    let mut world = backing_off(RestartPolicy::Never, PLAIN);
    world.now += Duration::from_secs(40);
    let waker = Event::PlaceholderMade(WAKER.into(), "w".into(), MADE);
    for event in [Event::Tick, waker] {
        world.handle(event);
    }
    assert!(!world.removed("w"));
    assert!(world.machine.deadline() <= Some(world.now + RELIST_INTERVAL));
    world.now += RELIST_INTERVAL;
    world.handle(Event::Tick);
    assert!(world.removed("w"));
}

#[test]
fn what_is_to_be_cleared_is_cleared_when_the_back_off_is_over() {
    let mut world = backing_off(RestartPolicy::Never, FULL);
    world.settle();
    assert_eq!(world.admit_create("a"), Verdict::BackOff);
    world.settle();
    assert_eq!(world.machine.phase(), Phase::Shielded);
    assert_eq!(world.machine.leftovers().len(), 3, "no waker among them");
    world.now += Duration::from_secs(40);
    world.handle(Event::Tick);
    world.settle();
    assert_eq!(world.machine.phase(), Phase::Up);
    assert_eq!(world.admit_create("i"), Verdict::Admit);
}

#[test]
fn a_successor_waits_for_what_is_left_of_a_back_off() {
    let mut draft = draft(Some(RestartPolicy::Never), PLAIN, "a", 42);
    draft.back_off_ms = 40_000;
    let seen = [
        found("a-0", "a", false, false, InstanceState::Ended(None)),
        found("p1", "a", true, true, InstanceState::Created),
        found("w", WAKER, true, true, InstanceState::Created),
    ];
    let now = Instant::now();
    let elapsed = Duration::from_secs(30);
    let plan = draft.settled();
    let (mut machine, effects) = Machine::resume(plan, Phase::Up, &there(&seen), elapsed, now);
    assert!(
        !effects
            .iter()
            .any(|it| matches!(it, Effect::MakePlaceholder(..)))
    );
    assert_eq!(machine.deadline(), Some(now + Duration::from_secs(10)));
    assert_eq!(
        Verdict::from(machine.admit_create(now, &"a".into()).0),
        Verdict::BackOff
    );
    let effects = machine.handle(now + Duration::from_secs(10), Event::Tick);
    assert_eq!(effects, [Effect::Remove("w".into())]);
}

#[test]
fn watchers_are_told_before_anything_is_killed_and_when_all_is_dead() {
    let plan = draft(Some(RestartPolicy::Never), PLAIN, "a", 42).settled();
    let now = Instant::now();
    let (mut machine, effects) = begin_round(plan, None, now);
    let begins = [Effect::Save, Effect::AskForTurn, Effect::Announce(true)];
    assert_eq!(effects[..3], begins);
    assert!(!effects.contains(&Effect::Kill("b-0".into())));
    let effects = machine.handle(now, Event::Announced);
    assert_eq!(effects, [Effect::Kill("b-0".into())]);
    for (name, id) in [("a", "p1"), ("a", "p2"), ("b", "p3")] {
        machine.handle(now, Event::PlaceholderMade(name.into(), id.into(), MADE));
    }
    assert!(machine.said_restarting);
    let now = now + time_of_relist(MADE);
    let effects = machine.handle(now, Event::Held("b-0".into(), now));
    assert!(effects.contains(&Effect::Announce(false)));
}

#[test]
fn a_pod_that_restarts_with_grace_says_so_until_all_runs_again() {
    let mut draft = draft(Some(RestartPolicy::Never), PLAIN, "a", 42);
    draft.action = Action::RestartPod;
    let mut world = World::begin(draft.settled());
    world.settle();
    world.start("a");
    assert!(world.machine.said_restarting);
    world.start("b");
    world.relist();
    assert!(world.log.contains(&Effect::Announce(false)));
}

#[test]
fn no_exit_that_cannot_be_held_comes_before_its_shields() {
    let mut draft = draft(Some(RestartPolicy::Never), PLAIN, "a", 42);
    draft.members[1].unhooked = true;
    let mut world = World::begin(draft.settled());
    assert!(!world.log.contains(&Effect::Kill("b-0".into())));
    assert!(!world.machine.hides_what_runs());
    let shield = Event::PlaceholderMade("b".into(), "p".into(), MADE);
    world.machine.handle(world.now, shield);
    assert!(world.machine.hides_what_runs());
    world.settle();
    assert!(world.log.contains(&Effect::Kill("b-0".into())));
    assert!(!world.machine.hides_what_runs());
}

#[test]
fn what_the_kubelet_began_in_order_while_nri_was_away_is_left_to_run() {
    for relisted in [true, false] {
        let mut world = all(RestartPolicy::Never, FULL, "a");
        world.settle();
        assert_eq!(world.machine.phase(), Phase::Shielded);
        let since = InstanceState::Ended(Some(ExitCode::SUCCESS));
        let init = made_at(i64::MAX, found("i-1", "i", false, true, since));
        if relisted {
            world.machine.relisted(&there(&[init]), world.now);
        }
        let started = Event::Started("i".into(), "i-1".into());
        let effects = world.machine.handle(world.now, started);
        assert_eq!(is_disturbed(&effects), !relisted);
    }
}
