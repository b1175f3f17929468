//! The kubelet: what it sees at a relist, what it makes of it, and what it starts.
//!
//! After `pkg/kubelet` 1.33 to 1.37: `pleg/generic.go`, `kubelet_pods.go` (`convertToAPIContainerStatuses`, `getPhase`),
//! `status/status_manager.go` (`checkContainerStateTransition`), `kuberuntime_manager.go` (`computePodActions`).

use std::collections::{BTreeMap, BTreeSet};

use super::case::{Kind, Version};
use super::runtime::Is;
use super::{Case, Job, Ms, RESYNC, World};
use crate::ids::{ContainerId, ContainerName, ExitCode};
use crate::kube::{ContainerKind, RestartPolicy};
use crate::node::{InstanceState, Maker};

/// How much longer its calls take at the most, where the runtime takes its time: those that ask for the states of a pod's
/// containers together, and each that makes one.
pub(super) const SLOWED: Ms = 3000;

/// What a relist finds in a pod, beside what the one before found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Noticed {
    Nothing,
    /// It asks for the containers' states, and tells nobody.
    Changed,
    /// The pod's worker has something to do.
    Wakes,
}

/// Something that was in the runtime when the kubelet asked.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    id: ContainerId,
    name: ContainerName,
    created_at: i64,
    state: InstanceState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Waiting,
    Running,
    Terminated(ExitCode),
}

/// What it reports of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Status {
    state: State,
    /// The exit code in `lastState`.
    last: Option<ExitCode>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Pending,
    Running,
    Succeeded,
    Failed,
}

/// What is relisted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Relist {
    All,
    Pod,
}

#[derive(Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub(super) struct Kubelet {
    /// What the last relist listed.
    listed: Vec<Seen>,
    /// What it was told when it asked for states. The newest of a name come first.
    view: Vec<Seen>,
    /// What it has been told so far by the relist under way.
    view_to_be: Vec<Seen>,
    view_at: Ms,
    /// When the last relist began.
    relist_at: Ms,
    relisting: Option<Relist>,
    /// When the last of all pods began.
    all_at: Ms,
    /// The last statuses that were not refused as an illegal transition.
    recorded: BTreeMap<ContainerName, Status>,
    /// Whose creation was refused, and that have not started since (`reasonCache`).
    reasons: BTreeSet<ContainerName>,
    /// A regular container that is reported as terminated runs again: nothing is recorded until it ends.
    pub(super) stale: bool,
    /// When the last sync began: what it knows of probes is newer than what it sees.
    sync_at: Ms,
    synced_at: Ms,
    wanted: bool,
    syncing: bool,
    /// Whether that sync has started anything.
    has_started: bool,
    /// Syncs so far: only the last one's retry counts.
    syncs: u32,
}

impl Kubelet {
    /// Takes note of what a relist lists (`generateEvents`).
    fn notice(&mut self, listed: Vec<Seen>) -> Noticed {
        let ended = |old: &&Seen| listed.iter().all(|new| new.id != old.id);
        let gone: Vec<&Seen> = self.listed.iter().filter(ended).collect();
        let mut new = listed.iter().filter(|new| !self.listed.contains(new));
        let wakes = gone
            .iter()
            .any(|old| !matches!(old.state, InstanceState::Ended(_)))
            || new.clone().any(|new| new.state != InstanceState::Created);
        let noticed = if wakes {
            Noticed::Wakes
        } else if !gone.is_empty() || new.next().is_some() {
            Noticed::Changed
        } else {
            Noticed::Nothing
        };
        self.listed = listed;
        noticed
    }

    fn of<'k>(&'k self, name: &'k ContainerName) -> impl Iterator<Item = &'k Seen> {
        self.view.iter().filter(move |seen| seen.name == *name)
    }

    fn state(&self, name: &ContainerName) -> Option<InstanceState> {
        self.of(name).next().map(|seen| seen.state)
    }

    fn is_probed(&self, case: &Case, name: &ContainerName) -> bool {
        let ns = self.of(name).next().map_or(0, |seen| seen.created_at);
        let age = self
            .sync_at
            .saturating_sub(u64::try_from(ns / 1_000_000).unwrap());
        case.probe.is_none_or(|long| age >= long)
    }

    /// What is to be started, and was not when that was tried, waits, whatever is known of it
    /// (`convertToAPIContainerStatuses`, `ShouldContainerBeRestarted`).
    fn status(&self, case: &Case, name: &ContainerName, kind: ContainerKind) -> Status {
        let status = self.status_seen(case, name, kind);
        let succeeded = Some(InstanceState::Ended(Some(ExitCode::SUCCESS)));
        let is_to_start = match self.state(name) {
            _ if kind == ContainerKind::Init && self.state(name) == succeeded => false,
            None => kind != ContainerKind::Init || status.state == State::Waiting,
            Some(InstanceState::Running) => false,
            Some(InstanceState::Created) => true,
            Some(InstanceState::Ended(code)) => case.restarts_after(code.unwrap()),
        };
        if !is_to_start || !self.reasons.contains(name) {
            return status;
        }
        let last = match status.state {
            State::Terminated(code) => Some(code),
            State::Waiting | State::Running => status.last,
        };
        Status {
            state: State::Waiting,
            last,
        }
    }

    fn status_seen(&self, case: &Case, name: &ContainerName, kind: ContainerKind) -> Status {
        let before = self.recorded[name];
        let mut newest = self.of(name);
        let Some(first) = newest.next() else {
            let initialised = case.regulars().any(|it| self.state(it).is_some());
            return match before.state {
                // It used to run, and nobody knows how it ended.
                State::Running => Status {
                    state: State::Waiting,
                    last: before.last.or(Some(ExitCode::KILLED)),
                },
                State::Waiting if kind == ContainerKind::Init && initialised => Status {
                    state: State::Terminated(ExitCode::SUCCESS),
                    ..before
                },
                _ => before,
            };
        };
        let last = match (newest.next().map(|seen| seen.state), before.state) {
            (Some(InstanceState::Ended(code)), _) => code,
            (Some(_), _) => None,
            (None, _) if case.kubelet < Version::V1_36 => None,
            (None, State::Terminated(code)) if !matches!(first.state, InstanceState::Ended(_)) => {
                Some(code)
            }
            (None, _) => before.last,
        };
        let state = match first.state {
            InstanceState::Created => State::Waiting,
            InstanceState::Running => State::Running,
            InstanceState::Ended(code) => State::Terminated(code.unwrap()),
        };
        Status { state, last }
    }

    /// Takes note of what it sees, and says what phase the pod is in.
    fn conclude(&mut self, case: &Case) -> Phase {
        let mut statuses = BTreeMap::new();
        for (name, kind) in &case.containers {
            statuses.insert(name.clone(), self.status(case, name, *kind));
        }
        let phase = phase(case, &statuses);
        let illegal = |(name, kind): &&(ContainerName, ContainerKind)| {
            *kind != ContainerKind::Sidecar
                && match self.recorded[name].state {
                    State::Terminated(code) => {
                        !case.restarts_after(code)
                            && !matches!(statuses[name].state, State::Terminated(_))
                    }
                    State::Waiting | State::Running => false,
                }
        };
        let illegal: Vec<_> = case.containers.iter().filter(illegal).collect();
        self.stale = illegal
            .iter()
            .any(|(_, kind)| *kind == ContainerKind::Regular);
        if illegal.is_empty() {
            self.recorded = statuses;
        }
        phase
    }

    /// What to start, in this order; `None`: an init container failed for good, or nothing is left to do.
    fn actions(&self, case: &Case) -> Option<Vec<ContainerName>> {
        let up = |name| match self.state(name) {
            Some(InstanceState::Created | InstanceState::Running) => true,
            Some(InstanceState::Ended(_)) | None => false,
        };
        let mut initialised = case.regulars().any(|name| match case.kubelet {
            Version::V1_33 | Version::V1_36 => up(name),
            Version::V1_37 => self.state(name).is_some(),
        });
        let mut known = initialised;
        let mut first = Vec::new();
        let inits: Vec<_> = case.inits().collect();
        for (at, (name, kind)) in inits.iter().enumerate().rev() {
            let sidecar = *kind == ContainerKind::Sidecar;
            let Some(state) = self.state(name) else {
                first.extend((known && sidecar).then_some(at));
                continue;
            };
            if known && !sidecar {
                continue;
            }
            match state {
                InstanceState::Running if !sidecar => {}
                InstanceState::Ended(Some(code)) if !sidecar && code != ExitCode::SUCCESS => {
                    case.restarts_after(code).then(|| first.push(at))?;
                }
                InstanceState::Ended(_) if sidecar => first.push(at),
                InstanceState::Created => first.push(at),
                // Its startup probe has not succeeded yet.
                InstanceState::Running if sidecar && !self.is_probed(case, name) => {}
                InstanceState::Running | InstanceState::Ended(_) if at + 1 == inits.len() => {
                    initialised = true;
                }
                InstanceState::Running | InstanceState::Ended(_) => {
                    first.extend((!known).then_some(at + 1));
                }
            }
            known = true;
        }
        if !inits.is_empty() && !known {
            first.push(0);
        }
        let mut start: Vec<ContainerName> =
            first.iter().rev().map(|at| inits[*at].0.clone()).collect();
        if !initialised && !inits.is_empty() {
            return Some(start);
        }
        let mut keeps = false;
        let mut regulars = Vec::new();
        for name in case.regulars() {
            match self.state(name) {
                Some(InstanceState::Running) => keeps = true,
                Some(InstanceState::Ended(Some(code))) if !case.restarts_after(code) => {}
                _ => regulars.push(name.clone()),
            }
        }
        let alive = keeps || !regulars.is_empty();
        start.extend(regulars);
        alive.then_some(start)
    }
}

fn phase(case: &Case, statuses: &BTreeMap<ContainerName, Status>) -> Phase {
    let (mut pending, mut waiting, mut running, mut stopped, mut succeeded) = (0, 0, 0, 0, 0);
    for (name, kind) in &case.containers {
        let Status { state, last } = statuses[name];
        let failed = match state {
            State::Terminated(code) => code != ExitCode::SUCCESS,
            State::Waiting => last.is_some_and(|code| code != ExitCode::SUCCESS),
            State::Running => false,
        };
        match (kind, state) {
            (ContainerKind::Init, _) if failed => {
                if case.policy == RestartPolicy::Never {
                    return Phase::Failed;
                }
            }
            (ContainerKind::Init, State::Running) => pending += 1,
            (ContainerKind::Init, State::Waiting) => pending += i32::from(last.is_none()),
            (_, State::Running) => running += 1,
            (_, State::Waiting) if last.is_none() => waiting += 1,
            (ContainerKind::Regular, State::Terminated(_)) => {
                stopped += 1;
                succeeded += i32::from(!failed);
            }
            (ContainerKind::Regular, State::Waiting) => stopped += 1,
            (ContainerKind::Init | ContainerKind::Sidecar, _) => {}
        }
    }
    match case.policy {
        _ if pending + waiting > 0 => Phase::Pending,
        _ if running > 0 || stopped == 0 => Phase::Running,
        RestartPolicy::Always => Phase::Running,
        _ if stopped == succeeded => Phase::Succeeded,
        RestartPolicy::Never => Phase::Failed,
        RestartPolicy::OnFailure => Phase::Running,
    }
}

/// Its call to create a container, which the runtime has begun.
#[derive(Debug)]
pub(super) struct KubeletsCall {
    name: ContainerName,
    hooked: bool,
    /// What the sync starts after it.
    rest: Vec<ContainerName>,
    ok: bool,
}

impl World {
    /// It has seen the pod as it is, and has nothing to do.
    pub(super) fn meet_kubelet(&mut self) {
        let names = self.case.containers.iter().map(|(name, _)| name.clone());
        self.kubelet.recorded = names
            .map(|name| {
                (
                    name,
                    Status {
                        state: State::Waiting,
                        last: None,
                    },
                )
            })
            .collect();
        self.kubelet.listed = self.all_seen();
        self.kubelet.view = self.all_seen();
        self.kubelet.view_at = self.now;
        self.kubelet.conclude(&self.case);
        self.kubelet.synced_at = self.now;
    }

    fn all_seen(&self) -> Vec<Seen> {
        let containers = self.runtime.containers.iter();
        let seen = containers.map(|(id, container)| Seen {
            id: id.clone(),
            name: container.name.clone(),
            created_at: container.created_at,
            state: container.seen(),
        });
        let mut seen: Vec<Seen> = seen.collect();
        seen.sort_by_key(|seen| -seen.created_at);
        seen
    }

    /// It lists the containers of all pods, then those of each pod that has changed, and then asks for the state of each
    /// (`Relist`, `getPodContainerStatuses`).
    pub(super) fn relist(&mut self) {
        if self.kubelet.relisting.is_some() {
            return self.after(10, Job::Relist);
        }
        self.kubelet.all_at = self.now;
        self.begin_relist(Relist::All);
    }

    /// From 1.36 on a sync that has started something asks for one of its pod alone (`RequestPodRelist`, `relistPod`).
    pub(super) fn relist_pod(&mut self, asked: Ms) {
        if self.kubelet.relisting.is_some() {
            self.after(10, Job::RelistPod(asked));
        } else if asked > self.kubelet.all_at {
            self.begin_relist(Relist::Pod);
        }
    }

    fn begin_relist(&mut self, of: Relist) {
        self.kubelet.relist_at = self.now;
        self.kubelet.relisting = Some(of);
        let listed = self.all_seen();
        match self.kubelet.notice(listed) {
            Noticed::Nothing => self.end_relist(),
            noticed => {
                let others = match of {
                    Relist::All => self.upto(100),
                    Relist::Pod => 0,
                };
                self.after(others, Job::ListPod(noticed == Noticed::Wakes));
            }
        }
    }

    pub(super) fn list_pod(&mut self, wakes: bool) {
        let mut ids: Vec<ContainerId> = self.runtime.containers.keys().cloned().collect();
        let first = self.upto(ids.len().saturating_sub(1) as u64);
        ids.rotate_left(usize::try_from(first).unwrap());
        self.kubelet.view_to_be.clear();
        let slow = self.slowed(Kind::Make, 0).min(SLOWED);
        let each = (self.case.inspecting + slow) / (ids.len() as u64).max(1);
        self.inspect(ids, each, wakes);
    }

    /// One after the other; what is gone by then it leaves out.
    pub(super) fn inspect(&mut self, mut ids: Vec<ContainerId>, each: Ms, wakes: bool) {
        let Some(id) = ids.pop() else {
            let mut view = std::mem::take(&mut self.kubelet.view_to_be);
            view.sort_by_key(|seen| -seen.created_at);
            self.kubelet.view = view;
            self.kubelet.wanted |= wakes;
            return self.end_relist();
        };
        let seen = self.all_seen().into_iter().find(|seen| seen.id == id);
        self.kubelet.view_to_be.extend(seen);
        let asking = self.upto(each);
        self.after(asking, Job::Inspect(ids, each, wakes));
    }

    fn end_relist(&mut self) {
        self.kubelet.view_at = self.kubelet.relist_at;
        if self.kubelet.relisting.take() == Some(Relist::All) {
            self.after(1000, Job::Relist);
        }
        self.sync_if_wanted();
    }

    pub(super) fn wake_kubelet(&mut self, sync: Option<u32>) {
        if sync.is_none_or(|sync| sync == self.kubelet.syncs) {
            self.kubelet.wanted = true;
            self.sync_if_wanted();
        }
    }

    fn sync_if_wanted(&mut self) {
        let kubelet = &mut self.kubelet;
        // A worker waits for a relist that is newer than its last sync.
        let ready = kubelet.wanted && !kubelet.syncing && kubelet.view_at > kubelet.synced_at;
        if !ready || self.over.is_some() {
            return;
        }
        kubelet.wanted = false;
        kubelet.syncing = true;
        kubelet.has_started = false;
        kubelet.sync_at = self.now;
        let phase = kubelet.conclude(&self.case);
        self.phase_is(phase);
        self.report_status();
        match self.kubelet.actions(&self.case) {
            _ if self.over.is_some() => {}
            Some(names) => {
                self.prune_inits();
                let slow = self.slowed(Kind::Make, 0).min(SLOWED);
                let thinking = self.upto(300 + slow);
                self.after(thinking, Job::StartAll(names, true));
            }
            None => self.phase_is(Phase::Failed),
        }
    }

    /// The API server tells the plugin of the pod's status.
    fn report_status(&mut self) {
        if self.case.api && self.case.spec_known && !self.kubelet.stale {
            let containers = self.case.containers.iter();
            let newest = containers.filter_map(|(name, _)| self.kubelet.of(name).next());
            let newest: Vec<&Seen> = newest.collect();
            let started = newest.iter().filter(|seen| {
                let probed = self.kubelet.is_probed(&self.case, &seen.name);
                let sidecar = self.case.kind_of(&seen.name) == ContainerKind::Sidecar;
                seen.state == InstanceState::Running && (probed || !sidecar)
            });
            let started = started.map(|seen| seen.id.clone()).collect();
            let ids = newest.iter().map(|seen| seen.id.clone()).collect();
            let telling = self.upto(200);
            self.after(telling, Job::Recorded(self.epoch, ids, started));
        }
    }

    /// Of an init container that has ended, the last attempt stays.
    fn prune_inits(&mut self) {
        let ended = |seen: &&Seen| matches!(seen.state, InstanceState::Ended(_));
        let inits = self.case.containers.iter();
        let inits = inits.filter(|(_, kind)| *kind != ContainerKind::Regular);
        let old: Vec<ContainerId> = inits
            .flat_map(|(name, _)| self.kubelet.of(name).filter(ended).skip(1))
            .map(|seen| seen.id.clone())
            .collect();
        for id in old {
            self.remove(&id);
        }
    }

    /// Goes on with a sync. `ok`: nothing has failed so far.
    pub(super) fn start_all(&mut self, mut names: Vec<ContainerName>, ok: bool) {
        if self.over.is_some() {
            return;
        }
        if names.is_empty() {
            return self.end_sync(ok);
        }
        let name = names.remove(0);
        if self.admits(&name) {
            self.admitted(&name);
            self.runtime.reserved = Some(name.clone());
            let hooked = self.connected();
            let making = self.upto(300);
            let making = making + self.slowed(Kind::Make, 0).min(SLOWED);
            let call = KubeletsCall {
                name,
                hooked,
                rest: names,
                ok,
            };
            self.after(making, Job::Create(call));
        } else {
            let init = self.case.kind_of(&name) == ContainerKind::Init;
            self.kubelet.reasons.insert(name);
            if init {
                self.end_sync(false);
            } else {
                self.after(0, Job::StartAll(names, false));
            }
        }
    }

    /// What it was let create is there, whatever has been decided since.
    pub(super) fn create(&mut self, call: KubeletsCall) {
        let KubeletsCall {
            name,
            hooked,
            rest,
            ok,
        } = call;
        self.runtime.reserved = None;
        if self.over.is_some() {
            return;
        }
        let id = self
            .runtime
            .create(self.now, &name, Maker::Kubelet, Is::Created);
        self.runtime.containers.get_mut(&id).unwrap().hooked = hooked;
        self.kubelet.reasons.remove(&name);
        self.kubelet.has_started = true;
        self.tell_created(&id);
        let starting = self.upto(100);
        self.after(starting, Job::Start(id, rest, ok));
    }

    fn end_sync(&mut self, ok: bool) {
        if ok && self.kubelet.has_started && self.case.kubelet >= Version::V1_36 {
            self.after(0, Job::RelistPod(self.now));
        }
        let kubelet = &mut self.kubelet;
        kubelet.syncing = false;
        kubelet.synced_at = self.now;
        kubelet.syncs += 1;
        let sync = kubelet.syncs;
        let again = if ok { RESYNC } else { 10_000 };
        let jitter = self.upto(again / 2);
        self.after(again + jitter, Job::Wake(Some(sync)));
    }
}
