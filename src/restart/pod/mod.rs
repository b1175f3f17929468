//! One pod with restart rules, as a pure value: news go in, with the moment at which they came, and [`Command`]s come out.
//!
//! What is known of the pod is kept here, and the restart under way; all that is decided about it is decided here. The
//! driver carries the commands out and tells what came of them. So does the simulator of the tests, with a runtime and a
//! kubelet of its own.

mod command;
mod course;
mod decide;
mod facts;
mod leftovers;
mod request;
mod shared;
#[cfg(test)]
mod tests;
mod wanted;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Refused;
use super::machine::{Event, Machine};
use crate::back_off::Past;
use crate::clock::Moment;
use crate::ids::{ContainerId, ContainerName, ExitCode, PodIdentity};
use crate::kube::{KubeletFeatures, PodSpec};
use crate::node::{Instance, InstanceState, Instances};
use crate::plan::{Generation, RestartId};
use crate::policy::{Policy, RequestError, Written};
use crate::replay::Requests;
pub(crate) use command::{BegunAnew, Command, Finished, Order, Saying};
use course::Course;
pub use course::Timings;
pub use shared::{Gate, Shared};
pub(crate) use wanted::Task;

/// What is known of one pod, and its restart if one is under way.
#[derive(Debug)]
pub(crate) struct Pod {
    shared: Arc<Shared>,
    identity: PodIdentity,
    /// What the pod's annotations say. `None`: they are being read.
    written: Option<Arc<Written>>,
    /// `None`: there are no rules, or they turned out to be wrong; the pod is left alone.
    policy: Option<Arc<Policy>>,
    spec: Option<Arc<PodSpec>>,
    /// Of a static pod, when it was first seen.
    manifest: Option<PathBuf>,
    /// What the kubelet does by itself.
    native: Option<KubeletFeatures>,
    instances: Instances,
    requests: Requests,
    machine: Option<Machine>,
    course: Option<Course>,
    /// Exits that are held, and since when their hooks wait.
    holds: BTreeMap<ContainerId, Instant>,
    /// What has ended a moment ago, and whose hook has yet to ask: nobody sees it exited.
    awaited: BTreeSet<ContainerId>,
    /// Exits that have been seen before the annotations were read.
    unjudged: Vec<ContainerId>,
    /// Whether the kernel has killed a process of it because it was out of memory, as far as that is known.
    oom_killed: BTreeMap<ContainerId, bool>,
    /// Exits that are judged as soon as it is.
    unsettled: BTreeSet<ContainerId>,
    /// Exits that have been judged: none begins two restarts.
    decided: HashSet<ContainerId>,
    /// Their postStart hooks have failed, for which they are stopped.
    failed: BTreeSet<ContainerId>,
    /// Those that had ended for good when a restart began, for all that the kubelet records since.
    completed: BTreeSet<ContainerName>,
    deleting: bool,
    restarts: u32,
    past: Past,
    /// The same before the restart under way.
    past_before: Past,
    /// What was wrong with the last one.
    refused: Option<RequestError>,
    /// What is said once.
    said_invalid: bool,
    said_kills: bool,
    commands: Vec<Command>,
}

impl Pod {
    /// One whose annotations are being read. `native`: what the kubelet does by itself, if the API server has told; `past`: its
    /// restarts under another plugin.
    pub(crate) fn new(
        identity: PodIdentity,
        shared: Arc<Shared>,
        native: Option<KubeletFeatures>,
        past: Past,
    ) -> Self {
        Self {
            shared,
            identity,
            written: None,
            policy: None,
            spec: None,
            manifest: None,
            native,
            instances: Instances::default(),
            requests: Requests::default(),
            machine: None,
            course: None,
            holds: BTreeMap::new(),
            awaited: BTreeSet::new(),
            unjudged: Vec::new(),
            oom_killed: BTreeMap::new(),
            unsettled: BTreeSet::new(),
            decided: HashSet::new(),
            failed: BTreeSet::new(),
            completed: BTreeSet::new(),
            deleting: false,
            restarts: 0,
            past_before: past.clone(),
            past,
            refused: None,
            said_invalid: false,
            said_kills: false,
            commands: Vec::new(),
        }
    }

    /// What is to be done since it was last asked, in this order. To be asked whenever it was told something.
    pub(crate) fn commands(&mut self) -> Vec<Command> {
        std::mem::take(&mut self.commands)
    }

    /// What the pod's author wrote has been read.
    pub(crate) fn written(&mut self, written: Written, now: &Moment) {
        self.written = Some(Arc::new(written));
        self.judge();
        self.say_what_is_unhooked();
        for id in std::mem::take(&mut self.unjudged) {
            self.decide(&id, now);
        }
        self.look_for_request(now);
    }

    /// The pod's spec is known, or has changed.
    pub(crate) fn spec_changed(&mut self, spec: Arc<PodSpec>, now: &Moment) {
        self.past.told(spec.restarts);
        let ends = spec.ending && !self.deleting;
        let first = self.spec.is_none();
        self.spec = Some(spec);
        self.tell_recorded(now);
        if first {
            self.judge();
        }
        if ends {
            self.deleted(now);
        }
        self.look_for_request(now);
    }

    /// Of a pod that the API server does not know nobody tells what the kubelet says.
    pub(super) fn tell_recorded(&mut self, now: &Moment) {
        let Some(spec) = self.spec.clone().filter(|it| !it.recorded.is_empty()) else {
            return;
        };
        let told = Event::Recorded {
            seen: spec.recorded.clone(),
            started: spec.started.clone(),
        };
        self.feed(told, now);
    }

    /// The manifest of a static pod was found. Without an API server it says what the pod is made of as well.
    pub(crate) fn manifest_found(&mut self, path: PathBuf, spec: PodSpec, now: &Moment) {
        self.manifest = Some(path);
        // The API server may have been faster.
        if self.spec.is_none() {
            self.spec_changed(Arc::new(spec), now);
        }
    }

    /// What the kubelet does by itself is known, or has changed.
    pub(crate) fn features_changed(&mut self, native: KubeletFeatures) {
        self.native = Some(native);
        self.judge();
    }

    /// The pod is being deleted or its sandbox is gone: nothing is held any more.
    pub(crate) fn deleted(&mut self, now: &Moment) {
        self.deleting = true;
        self.release_all(now);
    }

    /// The kubelet is ending the pod by itself, which its status does not tell yet.
    pub(crate) fn is_ending(&mut self, now: &Moment) {
        if !self.deleting {
            self.say(Saying::Ending);
            self.deleted(now);
        }
    }

    /// What that restart was asked for has come of it. Another may have taken its place meanwhile.
    pub(crate) fn feed_to(&mut self, restart: &RestartId, event: Event, now: &Moment) {
        if self.plan().is_some_and(|it| it.id == *restart) {
            self.feed(event, now);
        }
    }

    /// The kubelet, or we, made a container.
    pub(crate) fn created(&mut self, id: ContainerId, instance: Instance) {
        if self.instances.is_gone(&id) {
            return;
        }
        let spec = self.spec.as_deref();
        self.requests.note(&id, &instance, &self.instances, spec);
        self.instances.insert(id.clone(), instance);
        self.watch(id);
        self.say_what_is_unhooked();
    }

    /// A container's process runs.
    pub(crate) fn started(&mut self, id: &ContainerId, now: &Moment) {
        if let Some(name) = self.instances.started(id, now.at) {
            self.feed(Event::Started(name, id.clone()), now);
            self.end_twins();
            self.look_for_request(now);
        }
    }

    /// A container's process has ended. The exit may not be visible yet.
    pub(crate) fn ended(&mut self, id: &ContainerId, code: Option<ExitCode>, now: &Moment) {
        // A hook that has asked has told of it.
        let before = self.instances.get(id).map(|it| it.state);
        let first = before.is_none_or(|state| state < InstanceState::Ended(None));
        if !self.note_end(id, code, now) {
            return;
        }
        let instance = self.instances.get(id);
        let unhooked = instance.is_some_and(|it| it.hooked == Some(false));
        if unhooked || self.is_held(id) {
            self.decide(id, now);
        } else {
            if first {
                self.awaited.insert(id.clone());
            }
            self.commands.push(Command::AwaitHook(id.clone()));
        }
    }

    /// The kernel has killed a process of this container because it was out of memory; or whoever would know of that by now does
    /// not.
    pub(crate) fn oom_told(&mut self, id: &ContainerId, killed: bool, now: &Moment) {
        if self.instances.get(id).is_none() {
            return;
        }
        let untold = self.will_ask(id);
        *self.oom_killed.entry(id.clone()).or_default() |= killed;
        if untold {
            self.tell_end(id, now);
        }
        if self.unsettled.remove(id) {
            self.decide(id, now);
        }
    }

    /// The exit of this container cannot be held: no hook has come, and it may be seen by now.
    pub(crate) fn hook_is_missing(&mut self, id: &ContainerId, now: &Moment) {
        self.awaited.remove(id);
        if !self.is_held(id) {
            self.decide(id, now);
        }
    }

    /// Nobody can tell what this container exited with. Returns whether it was held for that.
    pub(crate) fn code_is_unknown(&mut self, id: &ContainerId) -> bool {
        !self.is_replaced(id) && self.holds.remove(id).is_some()
    }

    /// The postStart hook of this container has failed. Returns whether it is to be stopped for that; its exit asks for nothing.
    pub(crate) fn hook_failed(&mut self, id: &ContainerId) -> bool {
        let runs = self
            .instances
            .get(id)
            .is_some_and(|it| it.state == InstanceState::Running);
        let stops = runs && !self.deleting;
        if stops {
            self.decided.insert(id.clone());
            self.failed.insert(id.clone());
        }
        stops
    }

    /// A container is no longer in the runtime.
    pub(crate) fn removed(&mut self, id: &ContainerId, now: &Moment) {
        self.gone(id, now);
        self.feed(Event::Gone(id.clone()), now);
    }

    /// A hook, which has waited for so long, asks whether the exit of this container may be seen. Returns whether it is to
    /// wait, until [`Self::is_held`] is no longer true of it.
    pub(crate) fn decide_hold(&mut self, id: &ContainerId, waited: Duration, now: &Moment) -> bool {
        let Some(instance) = self.instances.get(id) else {
            return false;
        };
        self.awaited.remove(id);
        let (name, ended) = (instance.name.clone(), instance.state);
        let replaced = self.is_replaced(id);
        let held = self.has_restart(|it| it.holds(id));
        let hidden = !replaced && self.is_replayed(id);
        let policy = self.policy.as_ref();
        // Whether it is so is settled when the annotations have been read.
        let covered =
            self.written.is_none() || policy.is_some_and(|policy| policy.covers(name.as_str()));
        let watched = !replaced && covered && self.is_member(&name);
        if self.deleting || !(held || hidden || watched) {
            // It may be one that the restart under way waits for.
            self.note_end(id, None, now);
            if replaced {
                self.commands.push(Command::LearnCode(id.clone()));
            }
            return false;
        }
        let since = now.at.checked_sub(waited).unwrap_or(now.at);
        self.holds.insert(id.clone(), since);
        self.note_end(id, None, now);
        let known = matches!(ended, InstanceState::Ended(Some(_)));
        // What an exit means is not known before its code, unless it is part of the restart.
        if held || known {
            self.decide(id, now);
        }
        if !known {
            self.commands.push(Command::LearnCode(id.clone()));
        }
        self.is_held(id)
    }

    /// Whether the kubelet may create a container of that name now.
    pub(crate) fn admit_create(
        &mut self,
        name: &ContainerName,
        now: &Moment,
    ) -> Result<(), Refused> {
        if !self.may_act() || self.deleting {
            return Ok(());
        }
        // Under load the kubelet may act on what it saw half a second ago.
        if let Some(id) = self.instances.running(name).cloned()
            && self.is_member(name)
        {
            self.commands.push(Command::Verify(id));
            return Err(Refused::Runs(name.clone()));
        }
        if self.has_just_run(name, now) {
            return Err(Refused::HasJustRun(name.clone()));
        }
        if let Some(policy) = self.stays_ended(name) {
            return Err(Refused::StaysEnded(name.clone(), policy));
        }
        // It may come before the tick that the same moment brings.
        self.feed(Event::Tick, now);
        let Some(machine) = &mut self.machine else {
            return Ok(());
        };
        let (admitted, effects) = machine.admit_create(now.at, name);
        self.apply(effects, now);
        if let Err(Refused::OutOfOrder(..)) = &admitted {
            let inits = self.machine.iter().flat_map(Machine::running_inits);
            self.commands.extend(inits.map(Command::Verify));
        }
        admitted
    }

    /// What came of an effect, or time has passed: see [`Self::deadline`].
    pub(crate) fn feed(&mut self, event: Event, now: &Moment) {
        if let Event::Exited(id) = &event {
            self.awaited.remove(id);
        }
        if let Some(machine) = &mut self.machine {
            tracing::debug!(pod = %self.identity.key, phase = ?machine.phase(), ?event);
            machine.note_gate(self.shared.gate.is_there());
            let effects = machine.handle(now.at, event);
            if let Some(course) = &mut self.course {
                course.note(machine, now.at);
            }
            self.apply(effects, now);
        }
    }

    /// A placeholder for that container, which this generation wanted, was made, which took so long. Returns whether it
    /// stands, or is not needed.
    pub(crate) fn placeholder_made(
        &mut self,
        name: ContainerName,
        id: ContainerId,
        generation: &Generation,
        took: Duration,
        now: &Moment,
    ) -> bool {
        if self.generation().as_ref() != Some(generation) {
            // The restart that wanted it is over: the pod was deleted, for one.
            self.commands.push(Command::Remove(id));
        } else if self.instances.is_gone(&id) {
            return false;
        } else {
            self.feed(Event::PlaceholderMade(name, id.clone(), took), now);
            self.watch(id);
        }
        true
    }

    /// One was not made, and nobody goes on trying.
    pub(crate) fn placeholder_not_made(
        &mut self,
        name: ContainerName,
        generation: &Generation,
        now: &Moment,
    ) {
        if self.generation().as_ref() == Some(generation) {
            self.feed(Event::NotMade(name), now);
        }
    }

    /// The next attempt of a container was made by a replay, which took so long. If it is wanted no longer, nobody else
    /// knows of it.
    pub(crate) fn attempt_made(
        &mut self,
        restart: &RestartId,
        id: &ContainerId,
        attempt: Instance,
        took: Duration,
        now: &Moment,
    ) {
        if !self.wants(Task::Replay(restart)) {
            self.commands.push(Command::Remove(id.clone()));
            return self.feed(Event::Stray(attempt.name, Some(id.clone())), now);
        }
        self.feed(Event::Made(attempt.name.clone(), id.clone(), took), now);
        if self.instances.insert(id.clone(), attempt) {
            // NRI was cut meanwhile. Nobody would tell how it ends, and its hook is told not to wait.
            self.give_up(id.clone());
        }
    }

    /// None was made, or started, for this reason.
    pub(crate) fn not_replayed(
        &mut self,
        restart: &RestartId,
        name: ContainerName,
        why: String,
        now: &Moment,
    ) {
        if self.wants(Task::Replay(restart)) {
            self.feed(Event::NotReplayed(name, why), now);
        } else {
            self.feed(Event::Stray(name, None), now);
        }
    }

    /// A container is no longer in the runtime: nothing is kept of it but that.
    fn gone(&mut self, id: &ContainerId, now: &Moment) {
        self.instances.removed(id, now.at);
        self.requests.forget(id);
        self.holds.remove(id);
        self.awaited.remove(id);
        self.oom_killed.remove(id);
        self.unsettled.remove(id);
        self.decided.remove(id);
        self.failed.remove(id);
        self.commands.push(Command::EndKill(id.clone()));
    }

    /// Says which containers are not protected.
    fn say_what_is_unhooked(&mut self) {
        let unhooked = self.unhooked();
        if !unhooked.is_empty() && self.policy.is_some() {
            self.say(Saying::NotProtected(unhooked));
        }
    }

    fn say(&mut self, what: Saying) {
        self.commands.push(Command::Say(what));
    }
}
