//! Makes and starts the next attempts of a pod's containers, as the kubelet would.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, Permissions};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;

use futures::future::{join_all, try_join_all};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout};

use super::Driver;
use super::hosts::Hosts;
use crate::cri::{ContainerConfig, CriError, PodSandboxConfig};
use crate::driver::turns::Turn;
use crate::ids::{ContainerId, ContainerName};
use crate::kube::{ContainerKind, PodSpec};
use crate::node::{Instance, now_ns};
use crate::plan::{Plan, RestartId};
use crate::policy::Start;
use crate::replay::{
    Attempt, ReplayBlocker, Room, complete, has_image, has_variables, have_their_cpus, images,
    inits_are_quick, log_link,
};
use crate::restart::machine::{Event, Record};
use crate::restart::pod::Task;
use crate::times::{EVENT_LIMIT, INITS_LIMIT, RESERVED_INTERVAL, RESERVED_LIMIT, RETRY_INTERVAL};

/// What a restart is replayed from.
#[derive(Debug)]
pub(super) struct Replay {
    pub(super) restart: RestartId,
    sandbox: PodSandboxConfig,
    attempts: BTreeMap<ContainerName, Attempt>,
    hosts: Option<Hosts>,
    /// Of the spec that was known when the rest was read.
    generation: Option<i64>,
}

/// An attempt that was made and is to be started.
struct Made<'r> {
    name: &'r ContainerName,
    attempt: &'r Attempt,
    id: ContainerId,
}

/// Why an attempt was not started.
#[derive(Debug, thiserror::Error)]
enum ReplayError {
    #[error(transparent)]
    Cri(#[from] CriError),
    #[error("cannot make the file for its termination message: {0}")]
    TerminationMessage(#[from] io::Error),
    #[error("no connection to NRI")]
    NoGate,
    #[error("{0}")]
    Blocked(ReplayBlocker),
    #[error("it is no longer wanted")]
    Unwanted,
}

impl ReplayError {
    /// Whether the attempt may be as it was before.
    fn leaves_it_created(&self) -> bool {
        match self {
            Self::Unwanted => true,
            Self::Cri(error) => error.is_transient(),
            Self::TerminationMessage(_) | Self::NoGate | Self::Blocked(_) => false,
        }
    }
}

impl Driver {
    /// Learns what the old containers were made from.
    pub(super) async fn recover(self: Arc<Self>, record: Arc<Record>, spec: Option<Arc<PodSpec>>) {
        let plan = &record.plan;
        let replay = self.replay_of(plan, spec.as_deref()).await;
        self.with(|state, now| {
            if !state.pod.wants(Task::Recover(&plan.id)) {
                return;
            }
            let result = replay.map(|replay| state.replay = Some(Arc::new(replay)));
            let result = result.map_err(|blocker| {
                self.tools.metrics.replay_declined(&blocker);
                blocker.to_string()
            });
            state.pod.feed(Event::Recovered(result), now);
        });
    }

    async fn replay_of(
        &self,
        plan: &Plan,
        spec: Option<&PodSpec>,
    ) -> Result<Replay, ReplayBlocker> {
        let cri = &self.tools.cri;
        let failed = |error: CriError| ReplayBlocker::Failed(error.to_string());
        let olds = plan.replayed().iter().filter_map(|it| it.old.as_ref());
        let room = Room::default();
        let containers = try_join_all(olds.map(async |old| {
            let _turn = self.bounds.to_make().await;
            let (status, config) = cri.container_config(&old.id).await.map_err(failed)?;
            let config = complete(status.name.as_str(), config)?;
            room.take(&config)?;
            Ok((status, config))
        }));
        let sandbox = cri.sandbox_config(&self.pod.sandbox);
        let containers: Vec<_> = containers.await?;
        let made = containers.iter().map(|(it, config)| (&it.name, config));
        self.have_their_variables(made.clone(), spec)?;
        self.have_their_images(made, spec).await?;
        have_their_cpus(&containers, !plan.back_off().is_zero())?;
        let is_init = |name: &ContainerName| {
            let member = plan.member(name);
            member.is_some_and(|member| member.kind == ContainerKind::Init)
        };
        let statuses = containers.iter().map(|(status, _)| status);
        inits_are_quick(
            statuses.filter(|it| is_init(&it.name)),
            now_ns(),
            INITS_LIMIT,
        )?;
        let hosts = Hosts::of(&containers, &self.hosts).await?;
        let attempts = containers.into_iter().map(|(status, config)| {
            let attempt = Attempt::after(&status, config, &plan.id, random())?;
            Ok((status.name, attempt))
        });
        Ok(Replay {
            restart: plan.id.clone(),
            hosts,
            attempts: attempts.collect::<Result<_, ReplayBlocker>>()?,
            sandbox: complete("the sandbox", sandbox.await.map_err(failed)?)?,
            generation: spec.map(|it| it.generation),
        })
    }

    /// Whether these containers would have the variables that they were made with. Whoever asks for a replay knows.
    fn have_their_variables<'c>(
        &self,
        mut containers: impl Iterator<Item = (&'c ContainerName, &'c ContainerConfig)>,
        spec: Option<&PodSpec>,
    ) -> Result<(), ReplayBlocker> {
        let start = self.lock().pod.start();
        match spec.filter(|_| start == Start::Auto) {
            Some(spec) => containers.try_for_each(|(name, it)| has_variables(name, it, spec)),
            None => Ok(()),
        }
    }

    /// Whether a start by the kubelet would find the images that these containers were made from.
    async fn have_their_images<'c>(
        &self,
        containers: impl Iterator<Item = (&'c ContainerName, &'c ContainerConfig)>,
        spec: Option<&PodSpec>,
    ) -> Result<(), ReplayBlocker> {
        let mut known = BTreeSet::new();
        for (name, config) in containers {
            has_image(name, config, spec)?;
            for (made, wanted) in images(name, config, spec) {
                if !known.insert((wanted.image.clone(), &made.image)) {
                    continue;
                }
                let now = self.tools.cri.image_id(wanted).await;
                let now = now.map_err(|error| ReplayBlocker::Failed(error.to_string()))?;
                if now.as_ref() != Some(&made.image) {
                    return Err(ReplayBlocker::ImageChanged(name.clone()));
                }
            }
        }
        Ok(())
    }

    /// Makes the next attempts of these containers, then starts them. Among containers that run the kubelet would see
    /// that one waits; while all wait nothing wakes it (`generateEvents`, pkg/kubelet/pleg/generic.go). What is made
    /// shields the exits as placeholders do, so that its start may wait for its turn for longer than exits can be held.
    pub(super) async fn replay(
        self: Arc<Self>,
        record: Arc<Record>,
        spec: Option<Arc<PodSpec>>,
        names: Vec<ContainerName>,
    ) {
        let plan = &record.plan;
        let replay = self.lock().replay.clone();
        // Another restart may have taken its place.
        let Some(replay) = replay.filter(|it| it.restart == plan.id) else {
            let unwanted = |name| self.not_replayed(&plan.id, name, &ReplayError::Unwanted);
            return names.iter().for_each(unwanted);
        };
        let attempts = names
            .iter()
            .filter_map(|name| replay.attempts.get_key_value(name));
        let attempts: Vec<_> = attempts.collect();
        let mut turn = self.turn(plan).await;
        if let Err(blocker) = self.still_fits(&replay, plan).await
            && let Some((name, _)) = attempts.first()
        {
            return self.not_replayed(&plan.id, name, &ReplayError::Blocked(blocker));
        }
        if let Some(hosts) = replay.hosts.clone() {
            hosts.restore().await;
        }
        // Each waits for the hook of the one before it: at the end of each group is one that has a hook.
        let hooked = |it: &Made<'_>| plan.member(it.name).is_some_and(|it| it.post_start);
        let first = async {
            let made = self.make_all(plan, &replay, attempts, &mut turn).await;
            let first = made.split_inclusive(hooked).next().unwrap_or_default();
            let runs = self.start_all(plan, &replay, first).await;
            (made, runs)
        };
        let (made, mut runs) = self.tools.starts.carry_out(first).await;
        drop(turn);
        for (index, group) in made.split_inclusive(hooked).enumerate() {
            if index > 0 {
                let starting = self.start_all(plan, &replay, group);
                runs = self.tools.starts.carry_out(starting).await;
            }
            let Some(last) = group.last().filter(|it| runs && hooked(it)) else {
                return;
            };
            if let Some(spec) = spec.clone() {
                self.run_post_start(&last.id, last.name, spec).await;
            }
            // Another restart may have ended it meanwhile, and has a hook of its own to wait for.
            self.tell(|pod, now| {
                if pod.plan().is_some_and(|it| it.id == plan.id) {
                    pod.feed(Event::Hooked(last.name.clone()), now);
                }
            });
        }
    }

    /// Whether a start by the kubelet would be the same, after a turn or a back-off, as when the containers were read.
    async fn still_fits(&self, replay: &Replay, plan: &Plan) -> Result<(), ReplayBlocker> {
        let spec = self.lock().pod.spec();
        let spec = spec.as_deref();
        let made = replay.attempts.iter().map(|(name, it)| (name, &it.config));
        self.have_their_variables(made.clone(), spec)?;
        if plan.back_off().is_zero() {
            return Ok(());
        }
        if spec.map(|it| it.generation) != replay.generation {
            return Err(ReplayBlocker::SpecChanged);
        }
        self.have_their_images(made, spec).await
    }

    /// Returns what has been made: all, or nothing.
    async fn make_all<'r>(
        self: &Arc<Self>,
        plan: &Plan,
        replay: &Replay,
        attempts: Vec<(&'r ContainerName, &'r Attempt)>,
        turn: &mut Option<Turn>,
    ) -> Vec<Made<'r>> {
        let making = attempts
            .iter()
            .map(|(_, attempt)| self.make(&plan.id, attempt, &replay.sandbox));
        let began = Instant::now();
        let made = join_all(making).await;
        let took = began.elapsed();
        // Either all or none: the kubelet is to take over from what never ran.
        let failed = attempts.iter().zip(&made);
        let mut failed = failed.filter_map(|((name, _), made)| Some((name, made.as_ref().err()?)));
        if let Some((name, error)) = failed.next() {
            self.not_replayed(&plan.id, name, error);
            // What was wanted no longer says nothing of the node.
            turn.take().into_iter().for_each(Turn::give_back);
            made.into_iter().flatten().for_each(|id| self.sweep(id));
            return Vec::new();
        }
        for ((name, attempt), id) in attempts.iter().zip(made.iter().flatten()) {
            let annotations = &attempt.config.annotations;
            let it = Instance::just_made((*name).clone(), annotations, None);
            self.tell(|pod, now| pod.attempt_made(&plan.id, id, it, took, now));
        }
        let made = attempts.into_iter().zip(made.into_iter().flatten());
        made.map(|((name, attempt), id)| Made { name, attempt, id })
            .collect()
    }

    /// Starts these, and returns whether the last of them runs.
    async fn start_all(self: &Arc<Self>, plan: &Plan, replay: &Replay, made: &[Made<'_>]) -> bool {
        let starting = made.iter().map(|it| self.start_or_sweep(&plan.id, it));
        let started = join_all(starting).await;
        // What tells of it would only delay the others.
        for (it, _) in made.iter().zip(&started).filter(|(_, runs)| **runs) {
            self.show(it, &replay.sandbox);
        }
        started.last() == Some(&true)
    }

    /// Returns whether it runs.
    async fn start_or_sweep(
        self: &Arc<Self>,
        restart: &RestartId,
        Made { name, id, .. }: &Made<'_>,
    ) -> bool {
        let started = self.start(id).await;
        match &started {
            // The runtime may have told of it already.
            Ok(()) => self.started(id),
            Err(error) => {
                self.not_replayed(restart, name, error);
                if !(error.leaves_it_created() && self.wants(Task::Stand(id))) {
                    self.sweep(id.clone());
                }
            }
        }
        started.is_ok()
    }

    /// The one that the pod has waited for, if these are its first containers. After a back-off it takes another; what
    /// follows an init container follows at once.
    async fn turn(&self, plan: &Plan) -> Option<Turn> {
        let turn = self.lock().turn.take();
        if turn.is_none() && plan.starts_at_once() {
            return Some(self.tools.turns.turn().await);
        }
        turn
    }

    fn not_replayed(
        self: &Arc<Self>,
        restart: &RestartId,
        name: &ContainerName,
        error: &ReplayError,
    ) {
        let (name, why) = (name.clone(), error.to_string());
        self.tell(|pod, now| pod.not_replayed(restart, name, why, now));
    }

    async fn make(
        self: &Arc<Self>,
        restart: &RestartId,
        attempt: &Attempt,
        sandbox: &PodSandboxConfig,
    ) -> Result<ContainerId, ReplayError> {
        let _turn = self.bounds.to_make().await;
        if !self.wants(Task::Replay(restart)) {
            return Err(ReplayError::Unwanted);
        }
        // Otherwise its exit could not be held.
        if !self.tools.shared.gate.is_there() {
            return Err(ReplayError::NoGate);
        }
        if let Some(path) = attempt.termination_message.clone() {
            let made = spawn_blocking(move || make_termination_message(&path)).await;
            made.map_err(io::Error::other)??;
        }
        let cri = &self.tools.cri;
        let until = Instant::now() + RESERVED_LIMIT;
        let wanted = || self.wants(Task::Replay(restart));
        loop {
            let pod = &self.pod.sandbox;
            let made = cri.create_container(pod, &attempt.config, sandbox, wanted);
            match made.await {
                // The kubelet has asked for the same attempt, and is being refused.
                Err(CriError::NameReserved { .. }) if Instant::now() < until && wanted() => {
                    sleep(RESERVED_INTERVAL).await;
                }
                made => return Ok(made?),
            }
        }
    }

    /// Starts an attempt that another process has made, and which the runtime may be starting.
    pub(super) async fn start_made(self: Arc<Self>, id: ContainerId) {
        while self.wants(Task::Start(&id)) {
            match self.tools.starts.carry_out(self.start(&id)).await {
                Ok(()) => self.started(&id),
                Err(_) => Arc::clone(&self).verify(id.clone()).await,
            }
            sleep(RETRY_INTERVAL).await;
        }
    }

    /// A runtime whose NRI is disturbed may say only seconds later that the container runs.
    async fn start(self: &Arc<Self>, id: &ContainerId) -> Result<(), ReplayError> {
        let _turn = self.bounds.to_make().await;
        if !self.wants(Task::Start(id)) {
            return Err(ReplayError::Unwanted);
        }
        let mut start = pin!(self.tools.cri.start_container(id));
        let result = loop {
            match timeout(EVENT_LIMIT, &mut start).await {
                Ok(result) => break result,
                Err(_) => Arc::clone(self).verify(id.clone()).await,
            }
        };
        match result {
            Err(error) if error.is_transient() && self.has_started(id).await => Ok(()),
            result => Ok(result?),
        }
    }

    /// Whether a runtime that did not answer has started it all the same. It is asked until it tells.
    async fn has_started(&self, id: &ContainerId) -> bool {
        loop {
            match self.tools.cri.container_status(id).await {
                Ok(status) => return status.started_at > 0,
                Err(error) if error.is_transient() && self.wants(Task::Start(id)) => {
                    sleep(RETRY_INTERVAL).await;
                }
                Err(_) => return false,
            }
        }
    }

    /// Leaves the traces that people look for.
    fn show(&self, Made { name, attempt, id }: &Made<'_>, sandbox: &PodSandboxConfig) {
        self.tools.reporter.started(&self.pod, name);
        let log = Path::new(&sandbox.log_directory).join(&attempt.config.log_path);
        let key = &self.pod.key;
        let link = log_link(&key.name, &key.namespace, name, id);
        spawn_blocking(move || {
            // Its directory is not there if the plugin runs in a container that does not have it.
            if let Err(error) = symlink(&log, &link) {
                tracing::debug!(link = %link.display(), %error, "no link to a container's log");
            }
        });
    }
}

/// Writable for everybody, whatever the umask (`makeMounts`, `pkg/kubelet/kuberuntime/kuberuntime_container.go`).
fn make_termination_message(path: &Path) -> io::Result<()> {
    // By the open file: whatever stands at that path by then.
    File::create_new(path)?.set_permissions(Permissions::from_mode(0o666))
}

fn random() -> u32 {
    // Each hasher has keys of its own.
    let drawn = RandomState::new().hash_one(0);
    u32::try_from(drawn >> 32).unwrap_or_default()
}
