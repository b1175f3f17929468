//! The machine in a replay, and how it leaves one.

use std::time::Duration;

use super::tests::{FULL, PLAIN, Verdict, World, there};
use super::*;
use crate::kube::RestartPolicy;
use crate::node::{Instance, InstanceState, Maker};
use crate::plan::Starter;
use crate::plan::tests::{Shape, Was, draft};
use crate::times::{
    BURST_LIMIT, DOWN_LIMIT, FALLBACK_TIME, LONGEST_RECORDING, RELIST_INTERVAL, REST_OF_HOLD,
    time_of_relist,
};

/// How long making an attempt takes.
const MAKING: Duration = Duration::from_millis(100);

fn replay(policy: RestartPolicy, shape: Shape<'_>) -> World {
    let mut plan = draft(Some(policy), shape, "a", 42).settled();
    plan.starter = Starter::Plugin;
    World::begin(plan)
}

/// What was asked to be replayed, in turns.
fn turns(world: &World) -> Vec<Vec<&str>> {
    let turns = world.log.iter().filter_map(|effect| match effect {
        Effect::Replay(names) => Some(names.iter().map(ContainerName::as_str).collect()),
        _ => None,
    });
    turns.collect()
}

fn makes_placeholders(world: &World) -> bool {
    let mut log = world.log.iter();
    log.any(|effect| matches!(effect, Effect::MakePlaceholder(..)))
}

/// All old containers are down, and the configurations are there.
fn reach_replay(world: &mut World) {
    while world.machine.phase() == Phase::Down {
        let event = world.pending.pop_front().expect("it gets there");
        world.handle(event);
    }
    assert_eq!(world.machine.phase(), Phase::Replay);
}

#[test]
fn nothing_is_seen_before_everything_runs_again() {
    for policy in [
        RestartPolicy::Never,
        RestartPolicy::OnFailure,
        RestartPolicy::Always,
    ] {
        let mut world = replay(policy, FULL);
        reach_replay(&mut world);
        assert_eq!(world.admit_create("i"), Verdict::NotYet);
        world.settle();
        assert!(world.machine.holds_replayed(&"i".into()));
        assert!(!world.machine.holds_replayed(&"a".into()));
        assert_eq!(turns(&world), [vec!["i"]]);
        assert!(world.released.is_empty());
        world.end("i", 0);
        world.settle();
        assert_eq!(turns(&world), [vec!["i"], vec!["s"], vec!["a", "b"]]);
        assert_eq!(world.finished, Some(Outcome::Completed));
        let seen = ["a-0", "b-0", "i-0", "i-1", "s-0"].map(ContainerId::from);
        assert_eq!(world.released, seen.into());
        assert!(!makes_placeholders(&world));
    }
}

/// Up to the sidecar, whose postStart hook runs.
fn reach_hook(plan: Plan) -> World {
    let mut world = World::begin(plan);
    reach_replay(&mut world);
    world.settle();
    world.end("i", 0);
    world.settle();
    assert_eq!(turns(&world), [vec!["i"], vec!["s"]]);
    world
}

#[test]
fn what_follows_a_sidecar_waits_for_its_post_start_hook() {
    let mut plan = draft(Some(RestartPolicy::Never), FULL, "a", 42).settled();
    plan.starter = Starter::Plugin;
    plan.members[1].post_start = true;
    let mut world = reach_hook(plan);
    world.handle(Event::Hooked("s".into()));
    world.settle();
    assert_eq!(turns(&world), [vec!["i"], vec!["s"], vec!["a", "b"]]);
    assert_eq!(world.finished, Some(Outcome::Completed));
}

#[test]
fn what_the_kubelet_is_to_start_comes_after_what_is_replayed() {
    let mut plan = draft(Some(RestartPolicy::Always), FULL, "a", 42).settled();
    plan.starter = plan.replayed_until(&"s".into(), "s is probed").unwrap();
    let mut world = World::begin(plan);
    reach_replay(&mut world);
    world.settle();
    assert_eq!(turns(&world), [vec!["i"]]);
    assert!(world.released.is_empty());
    world.end("i", 0);
    world.settle();
    assert_eq!(world.machine.phase(), Phase::Up);
    let seen = ["a-0", "b-0", "i-0", "i-1", "s-0"].map(ContainerId::from);
    assert_eq!(world.released, seen.into());
    let removed = |id: &str| world.log.contains(&Effect::Remove(id.into()));
    assert!(removed("s-0") && !removed("i-0") && !removed("a-0"));
    assert_eq!(world.admit_create("a"), Verdict::OutOfOrder);
    for name in ["s", "a", "b"] {
        assert_eq!(world.admit_create(name), Verdict::Admit, "{name}");
        world.handle(Event::Started(name.into(), format!("{name}-1").into()));
    }
    assert_eq!(world.finished, Some(Outcome::Completed));
    assert_eq!(turns(&world), [vec!["i"]]);
}

#[test]
fn what_the_kubelet_is_to_start_waits_for_the_post_start_hook_of_what_is_replayed() {
    let mut plan = draft(Some(RestartPolicy::Always), FULL, "a", 42).settled();
    plan.members[1].post_start = true;
    plan.starter = plan.replayed_until(&"a".into(), "a is probed").unwrap();
    let mut world = reach_hook(plan);
    assert_eq!(world.admit_create("a"), Verdict::NotYet);
    world.handle(Event::Hooked("s".into()));
    assert_eq!(world.machine.phase(), Phase::Up);
    assert_eq!(world.admit_create("a"), Verdict::Admit);
}

/// The name of what the kubelet was let create is not to be had any more.
#[test]
fn what_the_kubelet_was_let_create_after_a_back_off_is_left_to_it() {
    let mut begun = draft(Some(RestartPolicy::Never), PLAIN, "a", 42);
    begun.back_off_ms = 40_000;
    let mut plan = begun.settled();
    plan.starter = Starter::Plugin;
    let mut world = World::begin(plan);
    // The answer comes late.
    world
        .pending
        .retain(|it| !matches!(it, Event::Recovered(_)));
    world.settle();
    assert_eq!(world.machine.phase(), Phase::Up);
    world.now += Duration::from_secs(40);
    world.handle(Event::Tick);
    assert_eq!(world.admit_create("a"), Verdict::Admit);
    world.handle(Event::Recovered(Ok(())));
    assert_eq!(world.machine.phase(), Phase::Up);
    assert!(turns(&world).is_empty(), "{:?}", turns(&world));
    for name in ["a", "b"] {
        world.handle(Event::Started(name.into(), format!("{name}-1").into()));
        world.relist();
    }
    assert_eq!(world.finished, Some(Outcome::Completed));
}

#[test]
fn what_cannot_be_replayed_is_shielded_for_the_kubelet() {
    let mut world = replay(RestartPolicy::Never, PLAIN);
    assert!(!makes_placeholders(&world));
    world.handle(Event::Recovered(Err("it is not known".into())));
    assert!(makes_placeholders(&world));
    world
        .pending
        .retain(|event| *event != Event::Recovered(Ok(())));
    world.settle();
    assert_eq!(turns(&world), Vec::<Vec<&str>>::new());
    assert_eq!(world.machine.phase(), Phase::Up);
    let why = Starter::Kubelet("it is not known".into());
    assert_eq!(world.machine.plan().starter, why);
}

#[test]
fn a_replay_that_fails_falls_back() {
    let mut world = replay(RestartPolicy::Never, PLAIN);
    reach_replay(&mut world);
    world.handle(Event::NotReplayed("b".into(), "no".into()));
    assert_eq!(world.fell_back.as_deref(), Some("b: no"));
    assert!(world.released.is_empty());
}

#[test]
fn a_replay_whose_attempt_vanishes_before_its_start_falls_back() {
    let mut world = replay(RestartPolicy::Never, FULL);
    reach_replay(&mut world);
    let made = Event::Made("i".into(), "i-1".into(), MAKING);
    world.handle(made);
    assert!(world.machine.is_to_start(&"i-1".into()));
    world.handle(Event::Gone("i-1".into()));
    let falls_back = |it: &Effect| {
        matches!(
            it,
            Effect::BeginAnew {
                disturbed: false,
                ..
            }
        )
    };
    assert!(world.log.iter().any(falls_back));
}

#[test]
fn a_replay_goes_on_when_what_the_kubelet_was_faster_than_is_removed() {
    let mut world = replay(RestartPolicy::Never, PLAIN);
    reach_replay(&mut world);
    world.handle(Event::Made("a".into(), "a-1".into(), MAKING));
    world.handle(Event::Started("a".into(), "a-2".into()));
    world.handle(Event::Gone("a-1".into()));
    let falls_back = |it: &Effect| {
        matches!(
            it,
            Effect::BeginAnew {
                disturbed: false,
                ..
            }
        )
    };
    assert!(!world.log.iter().any(falls_back));
}

/// A replay of an init container and what follows falls back while that is being made.
fn fall_back_on_a_stray() -> World {
    let mut world = replay(RestartPolicy::Never, FULL);
    reach_replay(&mut world);
    world.now = world.machine.deadline().unwrap();
    world.handle(Event::Tick);
    assert!(world.fell_back.is_some() && world.machine.has_replayed_inits());
    let mut plan = draft(Some(RestartPolicy::Never), FULL, "a", 42);
    plan.replayed_inits = true;
    world.begin_anew(plan.settled());
    world
}

#[test]
fn the_guard_is_not_shielded_before_what_was_asked_for_is_gone() {
    let makes = |world: &World, name: &str| {
        let mut log = world.log.iter();
        log.any(|it| matches!(it, Effect::MakePlaceholder(of, _) if *of == name.into()))
    };
    for stray in [None, Some(ContainerId::from("i-1"))] {
        let mut world = fall_back_on_a_stray();
        world.settle();
        assert!(!makes(&world, "a"));
        world.handle(Event::Stray("i".into(), stray.clone()));
        world.settle();
        assert_eq!(makes(&world, "a"), stray.is_none());
        world.handle(Event::Gone("i-1".into()));
        world.settle();
        assert!(makes(&world, "a"));
    }
    // Nobody waits for ever.
    let mut world = fall_back_on_a_stray();
    world.settle();
    world.now = world.machine.undo_until().unwrap();
    world.handle(Event::Tick);
    assert!(makes(&world, "a"));
}

#[test]
fn one_that_is_not_down_in_time_is_left_to_the_kubelet_while_there_is_time_for_shields() {
    let mut world = replay(RestartPolicy::Never, PLAIN);
    world.handle(Event::Recovered(Ok(())));
    world.now += DOWN_LIMIT.saturating_sub(FALLBACK_TIME);
    world.handle(Event::Tick);
    assert!(makes_placeholders(&world));
    assert!(world.released.is_empty());
}

#[test]
fn an_init_container_that_fails_fails_a_never_pod_and_is_the_kubelets_otherwise() {
    for policy in [RestartPolicy::Never, RestartPolicy::Always] {
        let mut world = replay(policy, FULL);
        reach_replay(&mut world);
        world.settle();
        world.end("i", 3);
        if policy == RestartPolicy::Never {
            assert_eq!(world.finished, Some(Outcome::InitFailed));
            assert!(world.released.contains(&"i-1".into()));
        } else {
            assert_eq!(world.fell_back.as_deref(), Some("i failed"));
        }
    }
}

#[test]
fn the_last_init_container_may_outlast_the_hold() {
    let mut world = replay(RestartPolicy::Never, FULL);
    reach_replay(&mut world);
    world.settle();
    world.now = world.machine.deadline().unwrap();
    world.handle(Event::Tick);
    assert!(
        !world.released.contains(&"a-0".into()),
        "before the guard is shielded"
    );
    world.settle();
    world.now = world.machine.deadline().unwrap();
    world.handle(Event::Tick);
    assert!(world.released.contains(&"a-0".into()));
    assert!(!world.machine.holds(&"a-0".into()));
    assert!(world.machine.holds_replayed(&"i".into()));
    assert_eq!((world.finished, &world.fell_back), (None, &None));
    world.end("i", 0);
    world.settle();
    world.relist();
    assert_eq!(world.finished, Some(Outcome::Completed));
}

#[test]
fn an_init_container_that_starts_late_is_waited_for_where_no_exit_needs_a_shield() {
    for (policy, waits) in [(RestartPolicy::Always, true), (RestartPolicy::Never, false)] {
        let mut world = replay(policy, FULL);
        reach_replay(&mut world);
        let starts = std::mem::take(&mut world.pending);
        world.now = world.machine.deadline().unwrap();
        world.handle(Event::Tick);
        assert_eq!(world.fell_back.is_none(), waits);
        if waits {
            world.pending = starts;
            world.settle();
            world.end("i", 0);
            world.settle();
            assert_eq!(world.finished, Some(Outcome::Completed));
            assert!(!makes_placeholders(&world));
        }
    }
}

/// All attempts are made and run at once. Returns after how long the exits are seen.
fn start_at_once(world: &mut World) -> Duration {
    world.pending.clear();
    for name in ["a", "b"] {
        let id: ContainerId = format!("{name}-1").into();
        world.handle(Event::Made(name.into(), id.clone(), MAKING));
        world.handle(Event::Started(name.into(), id));
    }
    let begun = world.now;
    while world.finished.is_none() {
        assert!(world.released.is_empty());
        let next = world.machine.deadline().unwrap();
        assert!(next > world.now);
        world.now = next;
        world.handle(Event::Tick);
    }
    assert_eq!(world.finished, Some(Outcome::Completed));
    assert!(!makes_placeholders(world));
    world.now - begun
}

#[test]
fn no_exit_is_seen_by_a_relist_from_before_the_attempts_were_there() {
    for policy in [RestartPolicy::Never, RestartPolicy::OnFailure] {
        let mut world = replay(policy, PLAIN);
        reach_replay(&mut world);
        assert_eq!(start_at_once(&mut world), time_of_relist(MAKING));
    }
    let mut world = replay(RestartPolicy::Always, PLAIN);
    reach_replay(&mut world);
    assert_eq!(start_at_once(&mut world), Duration::ZERO);
}

#[test]
fn a_relist_is_waited_for_when_the_replay_is_late() {
    let mut world = replay(RestartPolicy::Never, PLAIN);
    reach_replay(&mut world);
    world.now = world.machine.deadline().unwrap();
    world.now = world.now.checked_sub(MAKING).unwrap();
    assert_eq!(start_at_once(&mut world), time_of_relist(MAKING));
}

/// An init container that was replayed asks for another restart.
fn ask_again_in_a_replay() -> World {
    let shape = [
        ("i", ContainerKind::Init, Was::Running),
        ("a", ContainerKind::Regular, Was::Running),
    ];
    let mut again = draft(Some(RestartPolicy::Never), &shape, "i", 42);
    again.replayed_inits = true;
    World::begin(again.settled())
}

#[test]
fn init_containers_that_were_replayed_are_gone_before_the_others_are_shielded() {
    let mut world = ask_again_in_a_replay();
    assert_eq!(world.admit_create("a"), Verdict::NotYet);
    world.settle();
    let at = |wanted: &dyn Fn(&Effect) -> bool| world.log.iter().position(wanted).unwrap();
    let shields = |name: &'static str| move |it: &Effect| matches!(it, Effect::MakePlaceholder(of, _) if *of == name.into());
    let removes = |id: &'static str| move |it: &Effect| *it == Effect::Remove(id.into());
    let releases = |id: &'static str| move |it: &Effect| matches!(it, Effect::Release(ids) if ids.contains(&id.into()));
    let order = [
        at(&shields("i")),
        at(&releases("i-0")),
        at(&removes("i-0")),
        at(&removes("placeholder-2")),
        at(&shields("a")),
        at(&releases("a-0")),
    ];
    assert!(order.is_sorted(), "{order:?}");
    assert_eq!(world.machine.phase(), Phase::Shielded);
    assert_eq!(world.admit_create("a"), Verdict::NotYet);
    world.settle();
    assert_eq!(world.machine.phase(), Phase::Up);
}

#[test]
fn a_guard_that_is_shielded_before_the_runtime_has_removed_them_proves_nothing() {
    let mut world = ask_again_in_a_replay();
    let mut gone = Vec::new();
    while let Some(event) = world.pending.pop_front() {
        match event {
            Event::Gone(id) => gone.push(id),
            event => world.handle(event),
        }
    }
    world.now += DOWN_LIMIT;
    world.handle(Event::Tick);
    world.pending.retain(|it| !matches!(it, Event::Gone(_)));
    world.settle();
    assert_eq!(world.machine.phase(), Phase::Shielded);
    world.admit_create("a");
    assert_eq!(world.machine.phase(), Phase::Shielded);
    for id in gone {
        world.handle(Event::Gone(id));
    }
    world.settle();
    world.admit_create("a");
    assert_eq!(world.machine.phase(), Phase::Shielded);
    world.now += RELIST_INTERVAL;
    world.admit_create("a");
    assert_ne!(world.machine.phase(), Phase::Shielded);
}

/// All attempts of a Never pod are there, and wait for their turn for longer than exits can be held.
fn outlast_the_hold() -> World {
    let mut world = replay(RestartPolicy::Never, PLAIN);
    reach_replay(&mut world);
    world.pending.clear();
    world.handle(Event::Made("a".into(), "a-1".into(), MAKING));
    world.handle(Event::Made("b".into(), "b-1".into(), MAKING));
    assert!(!makes_placeholders(&world));
    world.now += DOWN_LIMIT.saturating_sub(FALLBACK_TIME);
    world.handle(Event::Tick);
    // With one, the pod would count as stopped: the guard's attempt and a placeholder are two.
    assert_eq!(world.pending.len(), 1);
    world.now += REST_OF_HOLD;
    world.handle(Event::Tick);
    assert!(world.released.is_empty());
    assert!(world.machine.is_holding());
    world.settle();
    assert_eq!(world.released, ["a-0", "b-0"].map(ContainerId::from).into());
    assert!(!world.machine.is_holding());
    assert_eq!(world.admit_create("a"), Verdict::NotYet);
    world
}

#[test]
fn attempts_that_wait_for_their_turn_shield_the_exits() {
    let mut world = outlast_the_hold();
    world.now += BURST_LIMIT / 2;
    world.handle(Event::Tick);
    for name in ["a", "b"] {
        let id = format!("{name}-1").into();
        world.handle(Event::Started(name.into(), id));
    }
    world.settle();
    assert_eq!(world.finished, Some(Outcome::Completed));
    assert!(world.removed("placeholder-1") && !world.removed("a-1") && !world.removed("b-1"));
}

/// All attempts of a Never pod run, and a placeholder for the guard is on its way.
fn start_before_the_placeholder_comes() -> World {
    let mut world = replay(RestartPolicy::Never, PLAIN);
    reach_replay(&mut world);
    world.pending.clear();
    world.now += DOWN_LIMIT.saturating_sub(FALLBACK_TIME);
    world.handle(Event::Tick);
    for name in ["a", "b"] {
        world.handle(Event::Started(name.into(), format!("{name}-1").into()));
    }
    world
}

#[test]
fn exits_are_released_when_no_placeholder_stands_before_what_runs() {
    let mut world = start_before_the_placeholder_comes();
    while let Some(event) = world.pending.pop_front() {
        assert!(world.released.is_empty() && world.finished.is_none());
        world.handle(event);
    }
    assert!(world.removed("placeholder-1"));
    assert_eq!(world.finished, Some(Outcome::Completed));
}

#[test]
fn a_placeholder_that_does_not_come_delays_no_exit_for_ever() {
    let mut world = start_before_the_placeholder_comes();
    assert_eq!(world.finished, None);
    world.now = world.machine.deadline().unwrap();
    world.handle(Event::Tick);
    assert_eq!(world.finished, Some(Outcome::Completed));
}

#[test]
fn what_cannot_be_started_after_the_hold_is_the_kubelets_behind_the_attempts() {
    let mut world = outlast_the_hold();
    world.handle(Event::NotReplayed("b".into(), "no".into()));
    assert_eq!(world.fell_back, None);
    // The kubelet gives its own attempt the number after that of the newest that it sees.
    assert!(world.removed("a-1") && !world.removed("b-1"));
    for name in ["a", "b"] {
        assert_eq!(world.admit_create(name), Verdict::Admit);
        let id = format!("{name}-2").into();
        world.handle(Event::Started(name.into(), id));
        world.relist();
        assert!(world.removed(&format!("{name}-1")));
    }
    assert_eq!(world.finished, Some(Outcome::Completed));
    assert_eq!(
        world.machine.plan().starter,
        Starter::Kubelet("b: no".into())
    );
}

#[test]
fn an_attempt_shields_until_the_placeholder_comes_after_which_the_kubelet_takes_its_number() {
    let mut world = replay(RestartPolicy::Never, PLAIN);
    reach_replay(&mut world);
    world.pending.clear();
    world.handle(Event::Made("a".into(), "a-1".into(), MAKING));
    world.handle(Event::Made("b".into(), "b-1".into(), MAKING));
    world.now += DOWN_LIMIT.saturating_sub(FALLBACK_TIME);
    world.handle(Event::Tick);
    let placeholder = world.pending.pop_front().unwrap();
    while world.machine.phase() == Phase::Replay {
        world.now = world.machine.deadline().unwrap();
        world.handle(Event::Tick);
    }
    assert_eq!(world.machine.phase(), Phase::Up);
    assert!(!world.removed("a-1"));
    world.handle(placeholder);
    assert!(!world.removed("a-1"), "one alone hides nothing");
    world.settle();
    world.now += LONGEST_RECORDING;
    world.handle(Event::Tick);
    assert!(world.removed("a-1") && !world.removed("b-1"));
}

#[test]
fn a_plugin_that_comes_back_after_the_hold_leaves_what_shields() {
    let mut plan = draft(Some(RestartPolicy::Never), PLAIN, "a", 42).settled();
    plan.starter = Starter::Plugin;
    let found = |id: &str, state| {
        let instance = Instance {
            maker: if id.ends_with('1') {
                Maker::Replay
            } else {
                Maker::Kubelet
            },
            state,
            ..Instance::running(&id[..1])
        };
        (id.into(), instance)
    };
    let exited = InstanceState::Ended(None);
    let found = [
        found("a-0", exited),
        found("b-0", exited),
        found("a-1", InstanceState::Created),
        found("b-1", InstanceState::Running),
    ];
    let (elapsed, now) = (Duration::from_secs(9), Instant::now());
    let (machine, effects) = Machine::resume(plan, Phase::Replay, &there(&found), elapsed, now);
    assert_eq!(machine.phase(), Phase::Up);
    assert_eq!(machine.leftovers(), [("a".into(), "a-1".into())]);
    let removes = |effect: &Effect| matches!(effect, Effect::Remove(_) | Effect::BeginAnew { .. });
    assert!(!effects.iter().any(removes));
}

#[test]
fn a_plugin_that_comes_back_leaves_the_rest_to_the_kubelet() {
    let mut plan = draft(Some(RestartPolicy::Never), PLAIN, "a", 42).settled();
    plan.starter = Starter::Plugin;
    for (elapsed, over) in [(1, false), (20, true)] {
        let elapsed = Duration::from_secs(elapsed);
        let now = Instant::now();
        let (_, effects) = Machine::resume(plan.clone(), Phase::Replay, &there(&[]), elapsed, now);
        let falls_back = effects.iter().any(|it| {
            matches!(
                it,
                Effect::BeginAnew {
                    disturbed: false,
                    ..
                }
            )
        });
        // What the kubelet has started meanwhile stays.
        assert_eq!(falls_back, !over);
    }
}
