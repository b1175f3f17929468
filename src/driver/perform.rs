//! Does what is to be done, in tasks that hold no lock while they wait.

use std::future::pending;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::future::OptionFuture;
use k8s_openapi::jiff::Timestamp;
use tokio::select;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::{Driver, Job, State};
use crate::cri::CriError;
use crate::driver::turns::Turn;
use crate::history::Entry;
use crate::ids::{ContainerId, ContainerName, PodIdentity, PodUid};
use crate::kube::{Ending, Endings, ExitTimes, PodSpec};
use crate::plan::{Generation, Plan, RestartId, Trigger};
use crate::policy::{Action, Request};
use crate::report::{RestartEnding, Story, last_restart};
use crate::restart::machine::{Effect, Event, Outcome};
use crate::restart::pod::{Command, Finished, Order, Pod, Saying, Task};
use crate::times::{
    ANNOUNCE_LIMIT, LONGEST_ANNOUNCEMENT, REMOVE_LIMIT, RETRY_INTERVAL, UNTOLD_INTERVAL,
};

impl Driver {
    /// Carries out what has been decided since the last time, and releases what is held no longer: together and now, for
    /// the kubelet is to see all exits as one event.
    pub(super) fn settle(self: &Arc<Self>, state: &mut State) {
        let State { pod, waiting, .. } = state;
        waiting.retain(|id, _| pod.wants(Task::Hold(id)));
        for command in state.pod.commands() {
            match command {
                Command::Do(order) => self.enqueue(Job::Do(order)),
                Command::Kill(id) => self.begin_kill(state, &id),
                Command::Remove(id) => self.sweep_leftover(id),
                Command::EndKill(id) => {
                    if let Some(kill) = state.kills.remove(&id) {
                        kill.task.abort();
                    }
                }
                Command::AwaitHook(id) => drop(tokio::spawn(Arc::clone(self).await_hook(id))),
                Command::LearnCode(id) => drop(tokio::spawn(Arc::clone(self).learn_code(id))),
                Command::LearnOom(id) => drop(tokio::spawn(Arc::clone(self).learn_oom(id))),
                Command::Verify(id) => drop(tokio::spawn(Arc::clone(self).verify(id))),
                Command::AskManifest(trigger, action, path) => {
                    self.ask_manifest(trigger, action, path);
                }
                Command::Watch(id) => drop(tokio::spawn(Arc::clone(self).watch(id))),
                Command::Say(saying) => self.say(state, saying),
            }
        }
        let State { pod, replay, .. } = state;
        replay.take_if(|it| !pod.wants(Task::Recover(&it.restart)));
        if !state.pod.wants(Task::Turn) {
            state.turn = None;
        }
        let goes_first = state.pod.wants(Task::GoFirst);
        if goes_first != state.exposed.is_some() {
            state.exposed = goes_first.then(|| self.tools.turns.expose());
        }
        self.count(state);
    }

    fn count(&self, state: &mut State) {
        let metrics = &self.tools.metrics;
        let restarts = state.pod.wants(Task::Restart);
        if restarts != state.under_way.is_some() {
            state.under_way = restarts.then(|| metrics.under_way());
        }
        let backs_off = state.pod.wants(Task::BackOff);
        if backs_off != state.backing_off.is_some() {
            state.backing_off = backs_off.then(|| metrics.backing_off());
        }
    }

    fn say(&self, state: &mut State, saying: Saying) {
        let reporter = &self.tools.reporter;
        match saying {
            Saying::NotReplayed(blocker) => self.tools.metrics.replay_declined(&blocker),
            Saying::Restarting(plan) => reporter.restarting(&story(&plan)),
            Saying::BegunAnew(begun) => reporter.begun_anew(&self.pod, &begun),
            Saying::Unmatched(container, code) => {
                reporter.unmatched(&self.pod, &container, code);
            }
            Saying::Ending => reporter.ending(&self.pod),
            Saying::NotProtected(containers) => {
                if let Some(why) = state.hooks.why_unprotected(self.tools.clock.moment().at) {
                    reporter.not_protected(&self.pod, &containers, why);
                }
            }
            Saying::InvalidRequest(error) => reporter.invalid_request(&self.pod, error),
            Saying::InvalidRules(error) => reporter.invalid_rules(&self.pod, &error),
            Saying::KillsRestart(names) => reporter.kills_restart(&self.pod, &names),
        }
    }

    /// Until the driver is closed. What is due is due, however long what was decided before waits for a disk.
    pub(super) async fn work(self: Arc<Self>, queue: mpsc::UnboundedReceiver<Job>) {
        select! {
            () = self.perform_all(queue) => {}
            () = self.keep_time() => {}
        }
    }

    async fn perform_all(self: &Arc<Self>, mut queue: mpsc::UnboundedReceiver<Job>) {
        while let Some(Job::Do(order)) = queue.recv().await {
            if self.tools.starts.are_ending() {
                return;
            }
            self.perform(order).await;
        }
    }

    /// Tells the pod when its deadlines have come.
    async fn keep_time(self: &Arc<Self>) {
        while !self.tools.starts.are_ending() {
            let deadline = self.lock().pod.deadline();
            let due = OptionFuture::from(deadline.map(|at| sleep_until(at.into())));
            select! {
                Some(()) = due => self.feed(Event::Tick),
                () = self.retimed.notified() => {}
            }
        }
        // What is being written is written.
        pending::<()>().await;
    }

    async fn perform(self: &Arc<Self>, order: Order) {
        let plan = &order.record.plan;
        match order.effect.clone() {
            Effect::Save => {
                let record = Arc::unwrap_or_clone(order.record);
                self.tools.records.save(record).await;
            }
            Effect::AskForTurn => self.ask_for_turn(),
            Effect::Announce(restarting) => self.announce(&order, restarting),
            // What has ended by itself has nothing to stop.
            Effect::Kill(id) if plan.grace_of(&id).is_zero() || !self.wants(Task::End(&id)) => {
                self.begin_kill(&mut self.lock(), &id);
            }
            Effect::Kill(id) => {
                let gone = self.tools.clock.since(plan.decided_up_ms);
                let gone = gone.saturating_sub(LONGEST_ANNOUNCEMENT);
                let left = plan.grace_of(&id).saturating_sub(gone);
                self.begin_stop(&mut self.lock(), &id, left);
            }
            Effect::Recover => drop(tokio::spawn(
                Arc::clone(self).recover(order.record, order.spec),
            )),
            Effect::Replay(names) => {
                tokio::spawn(Arc::clone(self).replay(order.record, order.spec, names));
            }
            Effect::Start(id) => drop(tokio::spawn(Arc::clone(self).start_made(id))),
            Effect::MakePlaceholder(name, like) => {
                let generation = plan.generation();
                tokio::spawn(Arc::clone(self).make_placeholder(name, like, generation));
            }
            Effect::Remove(id) => self.sweep(id),
            Effect::Finish(outcome) => self.finish(&plan.id, outcome).await,
            // Done at once in `apply`.
            Effect::Release(_) | Effect::BeginAnew { .. } => {}
        }
    }

    fn ask_for_turn(self: &Arc<Self>) {
        if let Some(turn) = self.tools.turns.at_once() {
            return self.called(turn);
        }
        self.feed(Event::Queued);
        let driver = Arc::clone(self);
        tokio::spawn(async move {
            let turn = driver.tools.turns.turn().await;
            driver.called(turn);
        });
    }

    fn called(self: &Arc<Self>, turn: Turn) {
        self.with(|state, now| {
            if state.pod.wants(Task::Queue) {
                state.turn = Some(turn);
                state.pod.feed(Event::Called, now);
            } else {
                turn.give_back();
            }
        });
    }

    /// Nothing waits for an API server that does not answer longer than a moment, nor at all where there is none.
    fn announce(self: &Arc<Self>, order: &Order, restarting: bool) {
        self.lock().announced |= order.record.plan.condition.is_some();
        let reporter = &self.tools.reporter;
        let api_uid = self.api_uid(order.spec.as_deref());
        let told = reporter.condition(&story(&order.record.plan), api_uid, restarting);
        let endings = self.tools.endings.clone().filter(|_| restarting);
        if told.is_none() && endings.is_none() {
            return self.tell(|pod, now| pod.feed_to(&order.record.plan.id, Event::Announced, now));
        }
        let restart = order.record.plan.id.clone();
        let driver = Arc::clone(self);
        // The condition has a limit of its own.
        let patience = endings.as_ref().map_or(Duration::MAX, Endings::patience);
        let question = endings.map(|endings| Question {
            endings,
            exit: exit_times(order),
        });
        if let Some(question) = question.clone().filter(|_| self.wants(Task::Stop)) {
            tokio::spawn(Arc::clone(self).watch_for_ending(question));
        }
        tokio::spawn(async move {
            let pod = &driver.pod;
            let ends = async {
                // Too late or given up: the restart is worth more than the news of it.
                let _ = timeout(ANNOUNCE_LIMIT, OptionFuture::from(told)).await;
                // Asked for after that: the kubelet's event is on its way while the container ends.
                let ends = question.as_ref().map(|question| question.ask(pod));
                OptionFuture::from(ends).await.flatten()
            };
            let mut ends = pin!(ends);
            let answer = |it| driver.tell(|pod, now| pod.feed_to(&restart, it, now));
            match timeout(patience, &mut ends).await {
                Ok(Some(Ending::Pod)) => driver.tell(Pod::is_ending),
                Ok(Some(Ending::Container)) => answer(Event::CalledOff),
                Ok(None) => answer(Event::Announced),
                Err(_) => {
                    tracing::debug!(pod = %pod.key, "not told in time what the kubelet is ending");
                    answer(Event::Announced);
                    // The others of one that the kubelet starts again may be dead by then.
                    if ends.await == Some(Ending::Pod) {
                        driver.tell(Pod::is_ending);
                    }
                }
            }
        });
    }

    async fn make_placeholder(
        self: Arc<Self>,
        name: ContainerName,
        like: Option<ContainerId>,
        generation: Generation,
    ) {
        let mut said = false;
        let wanted = || self.wants(Task::Shield(&generation, &name));
        while wanted() && !self.tools.starts.are_ending() {
            if !self.wants(Task::ShieldNow(&name, like.as_ref())) {
                sleep(RETRY_INTERVAL).await;
                continue;
            }
            let turn = self.bounds.to_make().await;
            let (began, then) = (Instant::now(), self.bounds.being_made());
            let cri = &self.tools.cri;
            let made = self
                .placeholders
                .make(cri, &name, like.as_ref(), &generation.0, wanted)
                .await;
            let took = self.bounds.of_usual(began.elapsed(), then);
            drop(turn);
            match made {
                Ok(id) => {
                    let stands = self.tell(|pod, now| {
                        pod.placeholder_made(name.clone(), id, &generation, took, now)
                    });
                    // Otherwise somebody has removed it meanwhile.
                    if stands {
                        return;
                    }
                }
                Err(CriError::Gone { .. }) => {
                    if let Some(like) = like {
                        self.feed(Event::Gone(like));
                    }
                    break;
                }
                Err(error) => {
                    if !std::mem::replace(&mut said, true) {
                        tracing::warn!(pod = %self.pod.key, container = %name, %error, "could not make a placeholder, trying until it stands or is wanted no longer");
                    }
                    sleep(RETRY_INTERVAL).await;
                }
            }
        }
        self.tell(|pod, now| pod.placeholder_not_made(name, &generation, now));
    }

    async fn watch(self: Arc<Self>, id: ContainerId) {
        loop {
            sleep(UNTOLD_INTERVAL).await;
            if !self.wants(Task::Watch(&id)) {
                return;
            }
            Arc::clone(&self).verify(id.clone()).await;
        }
    }

    pub(super) fn sweep(self: &Arc<Self>, id: ContainerId) {
        self.sweep_once(id, || ());
    }

    /// What belongs to no restart any more, and is not being removed as part of one.
    fn sweep_leftover(self: &Arc<Self>, id: ContainerId) {
        let metrics = Arc::clone(&self.tools.metrics);
        self.sweep_once(id, move || metrics.leftover_swept());
    }

    fn sweep_once(self: &Arc<Self>, id: ContainerId, begins: impl FnOnce() + Send + 'static) {
        let driver = Arc::clone(self);
        tokio::spawn(async move {
            if driver.tools.starts.are_ending() || !driver.lock().sweeping.insert(id.clone()) {
                return;
            }
            begins();
            loop {
                let remove = async {
                    driver.end_unseen(&id).await;
                    let until = Instant::now() + REMOVE_LIMIT;
                    driver.tools.cri.remove_when_exited(&id, until).await
                };
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
            driver.end_is_over(&id);
        });
    }

    async fn finish(self: &Arc<Self>, restart: &RestartId, outcome: Outcome) {
        let finished = self.tell(|pod, now| pod.finish(restart, outcome, now));
        let Some(mut finished) = finished else {
            return;
        };
        let (plan, sandbox) = (&finished.plan, &self.pod.sandbox);
        let (reporter, story) = (&self.tools.reporter, story(plan));
        let ending = ending(&finished, &story, outcome);
        let last = ending.map(|ending| last_restart(&story, &ending));
        finished.past.last = self.lock().told.now(last.clone());
        let took = finished.timings.all_running;
        let records = &self.tools.records;
        records
            .save_past(sandbox.clone(), finished.past.clone())
            .await;
        records.forget(sandbox.clone()).await;
        self.tools
            .metrics
            .restarted(plan, outcome, finished.timings);
        records.note(Entry::of(&finished, outcome)).await;
        if let Some(last) = last {
            let spec = self.lock().pod.spec();
            reporter.ended(&self.pod.key, self.api_uid(spec.as_deref()), last);
        }
        match outcome {
            Outcome::Completed => reporter.restarted(&story, took),
            Outcome::InitFailed => reporter.init_failed(&story, took),
            Outcome::CalledOff => reporter.called_off(&story),
            Outcome::Deleted => reporter.deleted_meanwhile(&story, took),
            Outcome::Unshielded => reporter.unshielded(&story, took),
            Outcome::MadeToFail => reporter.made_to_fail(&story, took),
            Outcome::TimedOut => reporter.gave_up(&story, took, &finished.waiting_for),
        }
    }

    /// In the API, where only a static pod has another one.
    fn api_uid<'u>(&'u self, spec: Option<&'u PodSpec>) -> &'u PodUid {
        spec.map_or(&self.pod.uid, |spec| &spec.api_uid)
    }

    pub(super) fn wants(&self, task: Task<'_>) -> bool {
        self.lock().pod.wants(task)
    }

    fn ask_manifest(self: &Arc<Self>, trigger: Trigger, action: Action, path: PathBuf) {
        let driver = Arc::clone(self);
        spawn_blocking(move || {
            let withdrawn = driver.tools.static_pods.is_withdrawn(&path, &driver.pod);
            driver.tell(|pod, now| pod.manifest_asked(&trigger, action, withdrawn, now));
        });
    }
}

/// What the API server is asked: whether the kubelet is ending the pod, or the container that has asked for its restart.
#[derive(Debug, Clone)]
pub(super) struct Question {
    endings: Endings,
    exit: ExitTimes,
}

impl Question {
    pub(super) async fn ask(&self, pod: &PodIdentity) -> Option<Ending> {
        let Self { endings, exit } = self;
        endings.begun(&pod.key, &pod.uid, exit).await
    }
}

/// Those of a restart's trigger.
fn exit_times(order: &Order) -> ExitTimes {
    let plan = &order.record.plan;
    let made = Timestamp::from_nanosecond(order.trigger_made_at.into());
    let known = i64::try_from(order.trigger_known_at_ms).map(Timestamp::from_millisecond);
    ExitTimes {
        container: plan.trigger.name.clone(),
        made: made.unwrap_or_default(),
        known: known.ok().and_then(Result::ok).unwrap_or(Timestamp::MAX),
    }
}

/// What is said of it afterwards; `None`: nothing of the pod was restarted, or the pod is going.
fn ending<'f>(
    finished: &'f Finished,
    story: &Story<'_>,
    outcome: Outcome,
) -> Option<RestartEnding<'f>> {
    let what = match outcome {
        Outcome::Completed => {
            let took_ms = finished.timings.all_running.as_millis();
            format!("restarted in {took_ms} ms {}", story.how())
        }
        Outcome::InitFailed => "an init container failed".to_owned(),
        Outcome::MadeToFail => "what was left of the pod was stopped".to_owned(),
        Outcome::Unshielded | Outcome::TimedOut => {
            "not all containers were started again".to_owned()
        }
        Outcome::CalledOff | Outcome::Deleted => return None,
    };
    finished.plan.is_whole_pod().then(|| RestartEnding {
        reason: outcome.name(),
        complete: outcome == Outcome::Completed,
        what,
        restarts: finished.past.restarts,
        answers: finished.plan.answers(),
    })
}

pub(super) fn story(plan: &Plan) -> Story<'_> {
    Story {
        pod: &plan.pod,
        restart: &plan.id.0,
        container: &plan.trigger.name,
        code: plan.trigger.code,
        rule: plan.trigger.rule.as_ref(),
        request: plan.trigger.request.as_ref().map(Request::as_str),
        action: plan.action,
        condition: plan.condition.as_deref(),
        back_off: plan.back_off(),
        start_at: plan.start_at(),
        way: plan.how(),
        no_replay: plan.no_replay(),
    }
}
