//! Does what the machine wants done, in tasks that hold no lock while they wait.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::decide::scope;
use super::state::State;
use super::{Driver, HOOK_LIMIT, Job};
use crate::cri::{ContainerState, CriError};
use crate::exit_hold;
use crate::ids::{ContainerId, ContainerName, ExitCode};
use crate::node::InstanceState;
use crate::report::Story;
use crate::restart::machine::{Effect, Event, Machine, Outcome, Phase, time_of_relist};
use crate::restart::plan::{Plan, Starter, Way};
use crate::restart::record::Record;

/// The exit event is sent before the hook runs; one that is this late was lost, or came before this process.
const EVENT_LIMIT: Duration = Duration::from_millis(300);
/// How long the kills wait for the pod's condition to be set.
const ANNOUNCE_LIMIT: Duration = Duration::from_millis(150);
/// Between two looks for an exit whose hook is late.
const HOOK_INTERVAL: Duration = Duration::from_millis(200);
/// Between two tries of a call that failed.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Between two looks for placeholders of whose removal nobody would tell.
const SHIELDS_INTERVAL: Duration = Duration::from_millis(200);
/// The runtime's answer to a stop, beyond the grace period.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// How long one removal is tried before it is tried afresh.
const REMOVE_LIMIT: Duration = Duration::from_secs(30);

impl Driver {
    pub(super) async fn work(self: Arc<Self>, mut queue: mpsc::UnboundedReceiver<Job>) {
        loop {
            let deadline = self.lock().machine.as_ref().and_then(Machine::deadline);
            let tick = async {
                match deadline {
                    Some(at) => sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                job = queue.recv() => match job {
                    Some(Job::Do(effect)) => self.perform(effect).await,
                    Some(Job::Retime) => {}
                    Some(Job::Close) | None => return,
                },
                () = tick => self.feed(&mut self.lock(), Event::Tick),
            }
        }
    }

    async fn perform(self: &Arc<Self>, effect: Effect) {
        match effect {
            Effect::Save => self.save().await,
            Effect::Announce(restarting) => self.announce(restarting),
            Effect::Kill(id) => {
                let mut state = self.lock();
                let task = tokio::spawn(Arc::clone(self).kill(id.clone()));
                state.kills.insert(id, task.abort_handle());
            }
            Effect::Recover => drop(tokio::spawn(Arc::clone(self).recover())),
            Effect::Replay(names) => drop(tokio::spawn(Arc::clone(self).replay(names))),
            Effect::MakePlaceholder(name, like) => {
                tokio::spawn(Arc::clone(self).make_placeholder(name, like));
            }
            Effect::Remove(id) => self.sweep(id),
            Effect::Finish(outcome) => self.finish(outcome).await,
            // Done at once in `apply`.
            Effect::Release(_) | Effect::Again | Effect::HandOver(_) => {}
        }
    }

    async fn save(&self) {
        let record = self.lock().machine.as_ref().map(|machine| Record {
            phase: machine.phase(),
            plan: machine.plan().clone(),
        });
        if let Some(record) = record {
            self.tools.records.save(record).await;
        }
    }

    /// Nothing waits for the API server longer than a moment, nor at all where there is none.
    fn announce(self: &Arc<Self>, restarting: bool) {
        let mut state = self.lock();
        let told = state.machine.as_ref().and_then(|machine| {
            let story = story(machine.plan());
            let spec = state.spec.as_ref();
            // Only a static pod has another one in the API, and its mirror is not known then.
            let api_uid = spec.map_or(&self.pod.uid, |spec| &spec.api_uid);
            let reporter = &self.tools.reporter;
            reporter.condition(&story, api_uid, restarting)
        });
        let Some(told) = told else {
            self.feed(&mut state, Event::Announced);
            return;
        };
        let driver = Arc::clone(self);
        tokio::spawn(async move {
            // Too late or given up: the restart is worth more than the news of it.
            let _ = timeout(ANNOUNCE_LIMIT, told).await;
            driver.feed(&mut driver.lock(), Event::Announced);
        });
    }

    async fn kill(self: Arc<Self>, id: ContainerId) {
        let grace = Duration::from_millis(
            self.lock()
                .machine
                .as_ref()
                .map_or(0, |machine| machine.plan().grace_ms),
        );
        loop {
            let cri = &self.tools.cri;
            let stop = cri.stop_container(&id, grace, grace + STOP_LIMIT);
            let result = self.bounds.kill(stop).await;
            let event = match result {
                // The runtime stops nothing that it has not started (containerd `stopContainer`), and starts it then.
                Ok(()) if self.is_yet_to_end(&id).await => None,
                Ok(()) => Some(Event::Exited(id.clone())),
                Err(CriError::Gone { .. }) => Some(Event::Gone(id.clone())),
                Err(error) => {
                    tracing::warn!(pod = %self.pod.key, container = %id, %error, "could not stop a container, trying again");
                    None
                }
            };
            let Some(event) = event else {
                sleep(RETRY_INTERVAL).await;
                // Even when its exit can no longer be held: it cannot start again before it has ended.
                if self.is_to_be_replaced(&id) {
                    continue;
                }
                self.lock().kills.remove(&id);
                return;
            };
            let mut state = self.lock();
            state.kills.remove(&id);
            self.feed(&mut state, event);
            return;
        }
    }

    /// Asks the runtime only about a container of which no end has been heard.
    async fn is_yet_to_end(&self, id: &ContainerId) -> bool {
        let known = self.lock().instances.get(id).map(|it| it.state);
        if known.is_none_or(|state| matches!(state, InstanceState::Ended(_))) {
            return false;
        }
        match self.tools.cri.container_status(id).await {
            Ok(status) => status.state != ContainerState::Exited,
            Err(CriError::Gone { .. }) => false,
            Err(_) => true,
        }
    }

    async fn make_placeholder(self: Arc<Self>, name: ContainerName, like: ContainerId) {
        let round = |state: &State| {
            let machine = state.machine.as_ref()?;
            Some((machine.plan().id.clone(), machine.plan().again))
        };
        let Some(wanted) = round(&self.lock()) else {
            return;
        };
        let mut said = false;
        loop {
            if !self.may_be_shielded(&like) {
                sleep(RETRY_INTERVAL).await;
                if self.still_holds(&like) {
                    continue;
                }
                return;
            }
            let turn = self.bounds.to_make().await;
            let began = Instant::now();
            let making = self
                .placeholders
                .make(&self.tools.cri, &name, &like, &wanted.0);
            let made = making.await;
            drop(turn);
            match made {
                Ok(id) => {
                    let relist = time_of_relist(began.elapsed());
                    if let Some(limit) = self.shields_until(&name) {
                        sleep_until((Instant::now() + relist).min(limit)).await;
                    }
                    let mut state = self.lock();
                    if round(&state).as_ref() != Some(&wanted) {
                        // The restart that wanted it is over: the pod was deleted, for one.
                        self.sweep(id);
                    } else if state.removed.contains_key(&id) {
                        // Somebody has removed it meanwhile.
                        continue;
                    } else {
                        self.feed(&mut state, Event::PlaceholderMade(name, id));
                    }
                    return;
                }
                Err(CriError::Gone { .. }) => {
                    self.feed(&mut self.lock(), Event::Gone(like));
                    return;
                }
                Err(error) => {
                    if !std::mem::replace(&mut said, true) {
                        tracing::warn!(pod = %self.pod.key, container = %name, %error, "could not make a placeholder, trying until it stands or the exit is let go");
                    }
                    sleep(RETRY_INTERVAL).await;
                    if !self.still_holds(&like) {
                        return;
                    }
                }
            }
        }
    }

    /// `None`: a placeholder of that container has nothing to hide.
    fn shields_until(&self, name: &ContainerName) -> Option<Instant> {
        let state = self.lock();
        let machine = state.machine.as_ref()?;
        let until = machine.is_shielding(name).then(|| machine.shields_until());
        until.map(Instant::from)
    }

    /// While exits are held NRI is not there for a plugin that came back, and does not tell what others remove.
    pub(super) fn watch_shields(self: &Arc<Self>) {
        let driver = Arc::clone(self);
        tokio::spawn(async move {
            loop {
                sleep(SHIELDS_INTERVAL).await;
                let shields = match &driver.lock().machine {
                    Some(machine) if machine.is_holding() && !driver.tools.gate.is_there() => {
                        machine.leftovers()
                    }
                    _ => return,
                };
                let list = driver.tools.cri.list_containers(Some(&driver.pod.sandbox));
                let Ok(there) = list.await else { continue };
                for (_, id) in shields {
                    if !there.iter().any(|it| it.id == id) {
                        driver.removed(&id);
                    }
                }
            }
        });
    }

    pub(super) fn sweep(self: &Arc<Self>, id: ContainerId) {
        let driver = Arc::clone(self);
        tokio::spawn(async move {
            if !driver.lock().sweeping.insert(id.clone()) {
                return;
            }
            loop {
                let cri = &driver.tools.cri;
                let remove = cri.remove_when_exited(&id, Instant::now() + REMOVE_LIMIT);
                let Err(error) = driver.bounds.remove(remove).await else {
                    break;
                };
                tracing::warn!(pod = %driver.pod.key, container = %id, %error, "could not remove a container, trying again");
                if driver.jobs.is_closed() {
                    return;
                }
                sleep(RETRY_INTERVAL).await;
            }
            driver.lock().sweeping.remove(&id);
            driver.removed(&id);
        });
    }

    /// What belongs to no restart any more.
    pub(super) fn sweep_leftovers(self: &Arc<Self>, state: &State) {
        let instances = state.instances.iter();
        let leftover = instances.filter(|(_, it)| it.is_unstarted_of_ours());
        for (id, _) in leftover {
            self.sweep(id.clone());
        }
    }

    async fn finish(self: &Arc<Self>, outcome: Outcome) {
        let over = {
            let mut state = self.lock();
            // Another restart may have taken its place meanwhile: the record is that one's.
            let over = state
                .machine
                .take_if(|machine| machine.phase() == Phase::Over);
            if over.is_some() {
                // One before may have ended with a plugin that died before all were removed.
                self.sweep_leftovers(&state);
            }
            over
        };
        let Some(machine) = over else { return };
        let took = self.tools.clock.since(machine.plan().decided_up_ms);
        self.remember(&machine).await;
        self.tools.records.forget(self.pod.sandbox.clone()).await;
        let (reporter, story) = (&self.tools.reporter, story(machine.plan()));
        match outcome {
            Outcome::Completed => reporter.restarted(&story, took),
            Outcome::InitFailed => reporter.init_failed(&story, took),
            Outcome::Deleted => reporter.deleted_meanwhile(&story, took),
            Outcome::Unshielded => reporter.unshielded(&story, took),
            Outcome::TimedOut => reporter.gave_up(&story, took, &machine.waiting_for()),
        }
    }

    /// The row of restarts goes on from the end of this one.
    async fn remember(&self, machine: &Machine) {
        let plan = machine.plan();
        let past = {
            let mut state = self.lock();
            let scope = scope(plan.action, &plan.trigger);
            state.past.over(scope.as_ref(), self.tools.clock.up_ms());
            state.past.clone()
        };
        let sandbox = self.pod.sandbox.clone();
        self.tools.records.save_past(sandbox, past).await;
    }

    fn is_to_be_replaced(&self, id: &ContainerId) -> bool {
        let state = self.lock();
        let under_way = state
            .machine
            .as_ref()
            .filter(|machine| machine.phase() != Phase::Over);
        under_way.is_some_and(|machine| machine.replaces(id))
    }

    /// Behind a placeholder the kubelet does not see that a container runs, and starts another one beside it as
    /// soon as no gate keeps it from doing so: if this process dies, for one. That is risked for the moment that a kill
    /// takes, but not before it is under way, not for a grace period, and not if the gate is away.
    fn may_be_shielded(&self, id: &ContainerId) -> bool {
        let state = self.lock();
        let machine = state.machine.as_ref();
        let at_once = machine.is_some_and(Machine::kills_at_once);
        let instance = state.instances.get(id);
        // One that the kubelet has just created is about to run.
        let lives = instance.is_some_and(|it| !matches!(it.state, InstanceState::Ended(_)));
        !lives || (at_once && self.tools.gate.is_there())
    }

    fn still_holds(&self, id: &ContainerId) -> bool {
        self.lock()
            .machine
            .as_ref()
            .is_some_and(|machine| machine.holds(id))
    }

    /// The hook of a container that has exited is missing. While the runtime shows that it runs, nobody has seen the exit
    /// and the hook may yet come.
    pub(super) fn wait_for_hook(self: &Arc<Self>, id: &ContainerId) {
        let driver = Arc::clone(self);
        let id = id.clone();
        tokio::spawn(async move {
            let until = Instant::now() + exit_hold::LIMIT;
            sleep(HOOK_LIMIT).await;
            while Instant::now() < until && !driver.is_held(&id) && driver.shows_running(&id).await
            {
                sleep(HOOK_INTERVAL).await;
            }
            let mut state = driver.lock();
            if !state.holds.contains_key(&id) {
                driver.decide(&mut state, &id);
            }
        });
    }

    fn is_held(&self, id: &ContainerId) -> bool {
        self.lock().holds.contains_key(id)
    }

    async fn shows_running(&self, id: &ContainerId) -> bool {
        let status = self.tools.cri.container_status(id).await;
        status.is_ok_and(|status| status.state == ContainerState::Running)
    }

    /// The exit event of a container whose hook waits is missing: asks the runtime, and lets go if it does not
    /// know either.
    pub(super) fn ask_for_code(self: &Arc<Self>, id: &ContainerId) {
        let driver = Arc::clone(self);
        let id = id.clone();
        tokio::spawn(async move {
            sleep(EVENT_LIMIT).await;
            if !driver.waits_for_code(&id) {
                return;
            }
            if let Some(code) = driver.code_from_task(&id).await {
                driver.ended(&id, Some(code));
                return;
            }
            sleep(HOOK_LIMIT).await;
            if driver.waits_for_code(&id) {
                tracing::warn!(pod = %driver.pod.key, container = %id, "nobody knows the exit code: let the exit go");
                driver.lock().holds.remove(&id);
            }
        });
    }

    /// A container that is part of a restart ended by itself, and its exit event is missing: after a success, for
    /// one, the kubelet may not start it again.
    pub(super) fn learn_code(self: &Arc<Self>, id: &ContainerId) {
        let driver = Arc::clone(self);
        let id = id.clone();
        tokio::spawn(async move {
            loop {
                sleep(EVENT_LIMIT).await;
                if !driver.lacks_code(&id) || !driver.is_to_be_replaced(&id) {
                    return;
                }
                let code = match driver.code_from_task(&id).await {
                    None => driver.code_from_status(&id).await,
                    code => code,
                };
                if code.is_some() {
                    return driver.ended(&id, code);
                }
            }
        });
    }

    async fn code_from_status(&self, id: &ContainerId) -> Option<ExitCode> {
        let status = self.tools.cri.container_status(id).await;
        status.ok()?.exit_code
    }

    async fn code_from_task(&self, id: &ContainerId) -> Option<ExitCode> {
        let containerd = self.tools.containerd.as_ref()?;
        // The shim may not answer while its hook runs: then nobody knows, which is said by who asked.
        containerd.task_exit_code(id).await.ok().flatten()
    }

    fn waits_for_code(&self, id: &ContainerId) -> bool {
        let state = self.lock();
        let replaced = state
            .machine
            .as_ref()
            .is_some_and(|machine| machine.replaces(id));
        !replaced && state.lacks_code(id) && state.holds.contains_key(id)
    }

    fn lacks_code(&self, id: &ContainerId) -> bool {
        self.lock().lacks_code(id)
    }
}

pub(super) fn story(plan: &Plan) -> Story<'_> {
    Story {
        pod: &plan.pod,
        restart: &plan.id.0,
        container: &plan.trigger.name,
        code: plan.trigger.code,
        action: plan.action,
        condition: plan.condition.as_deref(),
        back_off: plan.back_off(),
        start_at: plan.start_at(),
        way: match (&plan.starter, plan.way) {
            (Starter::Plugin, _) => "by replay",
            (Starter::Kubelet(_), Way::Kept) => "by the pod's restart policy",
            (Starter::Kubelet(_), Way::Shielded) => "behind placeholders",
            (Starter::Kubelet(_), Way::Cleared) => "from the first init container",
        },
        no_replay: match &plan.starter {
            Starter::Plugin => None,
            Starter::Kubelet(why) => Some(why),
        },
    }
}
