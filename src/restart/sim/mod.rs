//! Restarts of whole pods, played to their end: the pod that ships, in a small model of the kubelet, the runtime and the
//! driver.
//!
//! A case is a pod and what befalls it; its `luck` says how long everything takes, so that a failure can be
//! replayed and shrinks. Time is in milliseconds.

mod case;
mod kubelet;
mod plugin;
mod properties;
mod runtime;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use proptest::prelude::*;
use proptest::test_runner::{FileFailurePersistence, RngSeed, TestRunner};

use crate::back_off::Past;
use crate::ids::{ContainerId, ContainerName, ExitCode};
use crate::node::Maker;
use crate::plan::{Generation, Plan, RestartId};
use crate::restart::machine::{Event, Phase, Record};
use case::{Case, Fault, Kind, SECOND, any_case};
use kubelet::{Kubelet, KubeletsCall};
use plugin::Plugin;
use runtime::{Is, Runtime};

type Ms = u64;

const FEWEST_CASES: u32 = 20_000;
/// What one case of a thousand must come to at the least: otherwise nothing is shown by their passing.
const MUST_BE_REACHED: &[&str] = &[
    "Down",
    "Replay",
    "Shielded",
    "Clear",
    "Up",
    "Over",
    "by replay, Cleared",
    "by replay, Kept",
    "by replay, Shielded",
    "by both, Kept",
    "by the kubelet, Cleared",
    "by the kubelet, Kept",
    "by the kubelet, Shielded",
    "a replay falls back",
    "it waits for its turn",
    "it is shown while it waits",
    "it is shown while others stop",
    "a replay after a back-off",
    "a restart replaces another, or follows it",
    "two containers restart alone together",
    "somebody asks: no restart",
    "somebody asks: Down",
    "somebody asks: Up",
    "a request is answered by another restart",
    "a back-off is cut short",
    "it begins anew",
    "another goes on: Down",
    "another goes on: Replay",
    "another goes on: Shielded",
    "another goes on: Clear",
    "another goes on: Up",
    "a call fails: Kill in Down",
    "a call fails: Make in Down",
    "a call fails: Make in Replay",
    "a call fails: Remove in Clear",
    "a call fails: Remove in Shielded",
    "a call fails: Remove in Up",
    "an answer is lost: Kill in Down",
    "an answer is lost: Make in Down",
    "an answer is lost: Make in Replay",
    "an answer is lost: Remove in Clear",
    "an answer is lost: Remove in Shielded",
    "over: Completed",
    "over: Deleted",
    "over: InitFailed",
    "over: TimedOut",
    "over: Unshielded",
];

/// The story begins long after the pod, and some time after the node.
const BEGIN: Ms = 100_000;
/// By then every restart has ended, whatever went wrong.
const PATIENCE: Ms = 30 * 60_000;
/// How long nothing may happen to a pod that is not as it should be: less than until the kubelet looks at it by itself.
const STANDSTILL: Ms = 45_000;
/// Until the kubelet looks at a pod by itself, at least; at most half as long again.
const RESYNC: Ms = 60_000;

#[derive(Debug)]
enum Call {
    Kill(ContainerId),
    Make(ContainerName, Option<ContainerId>, Generation),
    /// Of one batch, and since when it is asked for.
    Replay(ContainerName, usize, Ms),
    Remove(ContainerId),
}

impl Call {
    fn kind(&self) -> Kind {
        match self {
            Self::Kill(_) => Kind::Kill,
            Self::Make(..) | Self::Replay(..) => Kind::Make,
            Self::Remove(_) => Kind::Remove,
        }
    }
}

/// What is to happen. With a number: it is for the plugin of that number.
#[derive(Debug)]
enum Job {
    Exit(ContainerId, ExitCode),
    ExitNews(ContainerId, ExitCode),
    HookStarts(ContainerId),
    HookGivesUp(ContainerId),
    Appear(ContainerId),
    Collect,
    Relist,
    /// Of the pod alone, asked for at that time.
    RelistPod(Ms),
    ListPod(bool),
    Inspect(Vec<ContainerId>, Ms, bool),
    Wake(Option<u32>),
    StartAll(Vec<ContainerName>, bool),
    Create(KubeletsCall),
    Start(ContainerId, Vec<ContainerName>, bool),
    Ask(String),
    Delete,
    LetGo,
    Die,
    Come,
    Cut(Ms),
    Connect(u32),
    Work(u32),
    Called(u32),
    Announced(u32, RestartId),
    Recovered(u32),
    Recorded(u32, BTreeSet<ContainerId>, BTreeSet<ContainerId>),
    Replayed(u32, ContainerId),
    NoHook(u32, ContainerId),
    LearnCode(u32, ContainerId),
    Verify(u32, ContainerId),
    Call(u32, Call),
    Retry(u32, Call),
    Made(u32, ContainerName, ContainerId, Generation),
    AttemptMade(u32, usize, ContainerName, ContainerId),
}

impl Job {
    fn epoch(&self) -> Option<u32> {
        match self {
            Self::Connect(epoch)
            | Self::Work(epoch)
            | Self::Called(epoch)
            | Self::Announced(epoch, _)
            | Self::Recovered(epoch)
            | Self::Recorded(epoch, ..)
            | Self::Replayed(epoch, ..)
            | Self::NoHook(epoch, _)
            | Self::LearnCode(epoch, _)
            | Self::Verify(epoch, _)
            | Self::Call(epoch, _)
            | Self::Retry(epoch, _)
            | Self::Made(epoch, ..)
            | Self::AttemptMade(epoch, ..) => Some(*epoch),
            _ => None,
        }
    }

    /// It comes again and again, and changes nothing by itself.
    fn is_routine(&self) -> bool {
        let relists = matches!(self, Self::Relist | Self::RelistPod(_));
        relists || matches!(self, Self::Collect | Self::Wake(Some(_)))
    }

    /// The kubelet looks, and tells what it sees.
    fn is_look(&self) -> bool {
        let looks = matches!(
            self,
            Self::ListPod(_) | Self::Inspect(..) | Self::StartAll(..)
        );
        looks || matches!(self, Self::Recorded(..) | Self::Wake(None))
    }

    /// What is not possible yet is tried again.
    fn is_retry(&self) -> bool {
        matches!(self, Self::Retry(..) | Self::Connect(_) | Self::Call(..))
    }
}

#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
struct World {
    case: Case,
    begun: Instant,
    now: Ms,
    agenda: BTreeMap<(Ms, u32), Job>,
    jobs: u32,
    drawn: usize,
    runtime: Runtime,
    kubelet: Kubelet,
    plugin: Option<Plugin>,
    epoch: u32,
    record: Option<Record>,
    past: Past,
    /// What somebody asks for.
    request: Option<String>,
    /// The pod's condition, as asked for last.
    condition: bool,
    told: bool,
    decisions: Vec<Plan>,
    /// The plugin has died, or its connection to NRI was cut.
    was_away: bool,
    /// When it listed what there is.
    listed: Ms,
    /// How old that was when the last restart was decided, if nobody told it of anything since.
    deaf: Ms,
    /// When something happened last.
    stirred: Ms,
    /// When the pod failed, succeeded or was deleted.
    over: Option<Ms>,
    /// The pod has ended, and no plugin saw that to its end.
    lost: bool,
    /// An exit may be seen that nobody could have held back.
    excused: bool,
    /// Nothing happens but the one restart.
    plain: bool,
    log: Vec<String>,
    /// How far its restart was last.
    phase: Option<Phase>,
    /// What it came to, in words.
    reached: BTreeSet<String>,
    wrong: Option<String>,
}

impl World {
    fn new(case: Case) -> Self {
        let mut world = Self {
            begun: Instant::now(),
            now: BEGIN,
            agenda: BTreeMap::new(),
            jobs: 0,
            drawn: 0,
            runtime: Runtime::default(),
            kubelet: Kubelet::default(),
            plugin: None,
            epoch: 0,
            record: None,
            past: plugin::past(&case),
            request: None,
            condition: false,
            told: false,
            decisions: Vec::new(),
            was_away: false,
            listed: BEGIN,
            deaf: 0,
            stirred: BEGIN,
            over: None,
            lost: false,
            excused: false,
            plain: case.is_plain(),
            log: Vec::new(),
            phase: None,
            reached: BTreeSet::new(),
            wrong: None,
            case,
        };
        world.set_the_stage();
        world
    }

    fn set_the_stage(&mut self) {
        let case = self.case.clone();
        for (at, (name, _)) in case.containers.iter().enumerate() {
            let Some(is) = case.was(at) else { continue };
            if case.older {
                self.runtime
                    .create(1, name, Maker::Kubelet, Is::Exited(case.code));
            }
            let id = self.runtime.create(2, name, Maker::Kubelet, is);
            self.runtime.containers.get_mut(&id).unwrap().hooked = case.unhooked != Some(at);
            if at == case.trigger && !case.asked {
                self.after(0, Job::Exit(id, case.code));
            } else if let Some((_, when, _)) = case.second.filter(|it| it.0 == at) {
                self.after(when, Job::Exit(id, SECOND));
            } else if let Some((_, when, code)) = case.own_exit.filter(|own| own.0 == at) {
                self.after(when, Job::Exit(id, code));
            }
        }
        self.meet_kubelet();
        self.comes(true);
        let relist = self.upto(1000);
        self.after(relist, Job::Relist);
        self.after(case.collected, Job::Collect);
        for when in case.nudges {
            self.after(when, Job::Wake(None));
        }
        for (when, away) in case.deaths {
            self.after(when, Job::Die);
            self.after(when + away, Job::Come);
        }
        if let Some((when, away)) = case.cut {
            self.after(when, Job::Cut(away));
        }
        for (number, (when, urgent)) in case.asks.into_iter().enumerate() {
            let value = format!("{number}{}", if urgent { "!" } else { "" });
            self.after(when, Job::Ask(value));
        }
        if let Some(when) = case.deleted {
            self.after(when, Job::Delete);
        }
    }

    /// Plays until everything is as it should be, or something is wrong. Then it says what.
    fn play(mut self) -> Result<Self, String> {
        let mut ticks = 0;
        while self.wrong.is_none() && !self.is_quiet() {
            let next = self.agenda.first_key_value().map(|((at, _), _)| *at);
            let next = next.unwrap_or(Ms::MAX);
            match self.tick_at() {
                Some(at) if at < next => {
                    ticks = if at == self.now { ticks + 1 } else { 0 };
                    self.demand(ticks < 100, || "time is waited for, not asked for".into());
                    self.now = at;
                    self.feed(Event::Tick);
                }
                _ => {
                    let ((at, _), job) = self.agenda.pop_first().unwrap();
                    self.now = at;
                    if job
                        .epoch()
                        .is_none_or(|it| it == self.epoch && self.plugin.is_some())
                    {
                        let is_news = !(job.is_routine() || job.is_retry());
                        if is_news {
                            self.log.push(format!("{} {job:?}", self.now));
                        }
                        if is_news && !job.is_look() {
                            self.stirred = self.now;
                        }
                        self.happens(job);
                    }
                }
            }
            self.settle_hooks();
            self.demand(!self.stands_still(), || "it gets on".into());
            let in_time = self.now < BEGIN + PATIENCE;
            self.demand(in_time, || "it ends".into());
        }
        self.look_back();
        match &self.wrong {
            Some(wrong) => Err(format!(
                "{wrong}\n{}\n{}",
                self.log[..self.log.len().min(300)].join("\n"),
                wrong
            )),
            None => Ok(self),
        }
    }

    fn happens(&mut self, job: Job) {
        match job {
            Job::Exit(id, code) => self.exit(&id, code),
            Job::ExitNews(id, code) => {
                self.tell(|pod, now| pod.ended(&id, Some(code), now));
            }
            Job::HookStarts(id) => self.hook_starts(&id),
            Job::HookGivesUp(id) => self.hook_gives_up(&id),
            Job::Appear(id) => self.appear(&id),
            Job::Collect => self.collect(),
            Job::Relist => self.relist(),
            Job::RelistPod(asked) => self.relist_pod(asked),
            Job::ListPod(wakes) => self.list_pod(wakes),
            Job::Inspect(ids, each, wakes) => self.inspect(ids, each, wakes),
            Job::Wake(sync) => self.wake_kubelet(sync),
            Job::StartAll(names, ok) => self.start_all(names, ok),
            Job::Create(call) => self.create(call),
            Job::Start(id, rest, ok) => {
                self.start(&id);
                self.start_all(rest, ok);
            }
            Job::Ask(value) => self.is_asked(value),
            Job::Delete => self.ends(true),
            Job::LetGo => self.let_pod_go(),
            Job::Die => self.dies(),
            Job::Come => self.comes(false),
            Job::Cut(away) => self.cut(away),
            Job::Connect(_) => self.connect(),
            Job::Work(_) => self.work(),
            Job::Called(_) => self.called(),
            Job::Announced(_, restart) => {
                self.tell(|pod, now| pod.feed_to(&restart, Event::Announced, now));
            }
            Job::Recovered(_) => self.recovered(),
            Job::Recorded(_, seen, started) => {
                self.feed(Event::Recorded { seen, started });
            }
            Job::Replayed(_, id) => self.start_replayed(&id),
            Job::NoHook(_, id) => {
                self.tell(|pod, now| pod.hook_is_missing(&id, now));
            }
            Job::LearnCode(_, id) => self.learn_code(&id),
            Job::Verify(_, id) => self.verify(&id),
            Job::Call(_, call) => self.carry_out_call(call),
            Job::Retry(_, call) => self.retry(call),
            Job::Made(_, name, id, generation) => self.stands(name, id, &generation),
            Job::AttemptMade(_, batch, name, id) => self.attempt_answered(batch, &name, Some(id)),
        }
    }

    /// The kubelet is done with the pod.
    fn ends(&mut self, deleted: bool) {
        if self.over.is_some() {
            return;
        }
        self.over = Some(self.now);
        let running = self.runtime.containers.iter();
        let running = running.filter(|(_, it)| it.is == Is::Running);
        let running: Vec<ContainerId> = running.map(|(id, _)| id.clone()).collect();
        for id in running {
            let stopping = self.upto(1000);
            self.after(stopping, Job::Exit(id, ExitCode::KILLED));
        }
        let hearing = if deleted { 50 } else { 2000 };
        let hearing = self.upto(hearing);
        self.after(hearing, Job::LetGo);
    }

    /// An exit may be seen, for this reason, if it is so, that the pod does not survive.
    fn excuse(&mut self, so: bool, why: &str) {
        if so {
            self.excused = true;
            self.reach(format!("excused: {why}"));
        }
    }

    fn reach(&mut self, what: impl Into<String>) {
        self.reached.insert(what.into());
    }

    /// How far its restart is, in words.
    fn stage(&self) -> String {
        match self.machine() {
            Some(machine) => format!("{:?}", machine.phase()),
            None => "no restart".into(),
        }
    }

    /// Draws a number, more often a small one.
    fn upto(&mut self, most: u64) -> u64 {
        // Over and over: the end of a long case is played with as much luck as its beginning.
        let luck = &self.case.luck;
        let next = luck.get(self.drawn % luck.len().max(1));
        let drawn = next.map_or(0, |it| u64::from(*it));
        self.drawn += 1;
        (most * drawn * drawn + 32_512) / 65_025
    }

    fn after(&mut self, delay: Ms, job: Job) {
        self.jobs += 1;
        self.agenda.insert((self.now + delay, self.jobs), job);
    }

    fn call(&mut self, takes: Ms, call: Call) {
        self.after(self.slowed(call.kind(), takes), Job::Call(self.epoch, call));
    }

    /// How long calls of that kind take that usually take so long.
    fn slowed(&self, kind: Kind, takes: Ms) -> Ms {
        match self.case.fault {
            Fault::Slow(slow, extra) if slow == kind => takes + extra,
            _ => takes,
        }
    }

    fn fails(&mut self, call: &Call) -> bool {
        match self.case.fault {
            Fault::Once(kind) if kind == call.kind() => {
                self.case.fault = Fault::None;
                true
            }
            Fault::Down(kind, long) => self.is_about(call, kind) && self.now < BEGIN + long,
            _ => false,
        }
    }

    /// Whether its answer is lost.
    fn loses(&mut self, call: &Call) -> bool {
        let kind = call.kind();
        let lost = matches!(self.case.fault, Fault::Lost(it) if it == kind) && self.connected();
        if lost {
            self.case.fault = Fault::None;
            let stage = self.stage();
            self.reach(format!("an answer is lost: {kind:?} in {stage}"));
        }
        lost
    }

    fn note_failure(&mut self, call: &Call) {
        let (kind, stage) = (call.kind(), self.stage());
        self.reach(format!("a call fails: {kind:?} in {stage}"));
    }

    /// What cannot be killed cannot be removed.
    fn is_about(&self, call: &Call, kind: Kind) -> bool {
        let kills = match call {
            Call::Remove(id) => self
                .runtime
                .containers
                .get(id)
                .is_some_and(|it| it.is == Is::Running),
            _ => false,
        };
        call.kind() == kind || (kills && kind == Kind::Kill)
    }

    /// Attempts that the plugin has made and is starting.
    fn starts_under_way(&mut self) -> Vec<ContainerId> {
        let epoch = self.epoch;
        let starts = self.agenda.extract_if(
            ..,
            |_, job| matches!(job, Job::Replayed(it, _) if *it == epoch),
        );
        let starts = starts.map(|(_, job)| match job {
            Job::Replayed(_, id) => id,
            _ => unreachable!(),
        });
        starts.collect()
    }

    fn calls_under_way(&mut self) -> Vec<Call> {
        let epoch = self.epoch;
        let calls = self
            .agenda
            .extract_if(.., |_, job| matches!(job, Job::Call(it, _) if *it == epoch));
        let calls = calls.map(|(_, job)| match job {
            Job::Call(_, call) => call,
            _ => unreachable!(),
        });
        calls.collect()
    }
}

/// Cases that once failed are played first. What fails is added.
const ONCE_FAILED: &str = "src/restart/sim/once-failed.txt";

/// Plays as many cases as `PROPTEST_CASES` says, the same ones everywhere unless `PROPTEST_RNG_SEED` says otherwise, and
/// tells how many of them came to what.
#[test]
fn whatever_befalls_a_pod_it_restarts_as_it_should() {
    let default = ProptestConfig::default();
    let cases = default.cases.max(FEWEST_CASES);
    let mut runner = TestRunner::new(ProptestConfig {
        cases,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(ONCE_FAILED))),
        rng_seed: match default.rng_seed {
            RngSeed::Random => RngSeed::Fixed(5532),
            given @ RngSeed::Fixed(_) => given,
        },
        max_shrink_iters: 5000,
        ..default
    });
    let (reached, played) = (RefCell::new(BTreeMap::new()), Cell::new(0));
    let result = runner.run(&any_case(), |case| {
        let world = World::new(case).play().map_err(TestCaseError::fail)?;
        for what in world.reached {
            *reached.borrow_mut().entry(what).or_insert(0_u32) += 1;
        }
        played.set(played.get() + 1);
        if played.get() % 50_000 == 0 {
            eprintln!("{} of {cases} cases", played.get());
        }
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    let reached = reached.into_inner();
    for (what, times) in &reached {
        println!("{times:8}  {what}");
    }
    for what in MUST_BE_REACHED {
        let times = reached.get(*what).copied().unwrap_or(0);
        assert!(times >= cases / 1000, "{what}: {times} times");
    }
}
