//! The runtime: containers, the hooks that keep their exits from being seen, and calls that take their time.

use std::collections::BTreeMap;

use super::{BEGIN, Call, Job, Ms, SECOND, World};
use crate::exit_hold;
use crate::ids::{ContainerId, ContainerName, ExitCode};
use crate::kube::ContainerKind;
use crate::node::{InstanceState, Maker};
use crate::policy::Action;
use crate::restart::machine::Event;
use crate::restart::pod::{Pod, Task};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Is {
    Created,
    Running,
    /// Its processes are gone and its hook runs: whoever asks is told that it runs.
    Stopped(ExitCode),
    Exited(ExitCode),
}

#[derive(Debug)]
pub(super) struct Container {
    pub(super) name: ContainerName,
    pub(super) maker: Maker,
    pub(super) hooked: bool,
    pub(super) created_at: i64,
    pub(super) is: Is,
}

impl Container {
    pub(super) fn is_placeholder(&self) -> bool {
        self.maker == Maker::Placeholder
    }

    pub(super) fn age(&self, now: Ms) -> Ms {
        now - u64::try_from(self.created_at / 1_000_000).unwrap()
    }

    pub(super) fn seen(&self) -> InstanceState {
        match self.is {
            Is::Created => InstanceState::Created,
            Is::Running | Is::Stopped(_) => InstanceState::Running,
            Is::Exited(code) => InstanceState::Ended(Some(code)),
        }
    }
}

/// That a container ran.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) name: ContainerName,
    pub(super) id: ContainerId,
    pub(super) at: Ms,
    pub(super) end: Option<ExitCode>,
}

#[derive(Debug, Default)]
pub(super) struct Runtime {
    pub(super) containers: BTreeMap<ContainerId, Container>,
    pub(super) runs: Vec<Run>,
    /// Hooks that wait.
    pub(super) hooks: Vec<ContainerId>,
    /// When each began.
    pub(super) hook_asked: BTreeMap<ContainerId, Ms>,
    /// The container that the kubelet is creating.
    pub(super) reserved: Option<ContainerName>,
    made: i64,
}

impl Runtime {
    pub(super) fn create(
        &mut self,
        now: Ms,
        name: &ContainerName,
        maker: Maker,
        is: Is,
    ) -> ContainerId {
        self.made += 1;
        let id: ContainerId = format!("{name}-{}", self.made).into();
        let container = Container {
            name: name.clone(),
            maker,
            hooked: true,
            created_at: i64::try_from(now).unwrap() * 1_000_000 + self.made,
            is,
        };
        self.containers.insert(id.clone(), container);
        id
    }

    pub(super) fn runs(&self, name: &ContainerName) -> bool {
        self.running(name) > 0
    }

    /// How many attempts of that container run.
    pub(super) fn running(&self, name: &ContainerName) -> usize {
        let attempts = self.containers.values().filter(|it| it.name == *name);
        attempts.filter(|it| it.is == Is::Running).count()
    }
}

impl World {
    pub(super) fn start(&mut self, id: &ContainerId) {
        let Some(container) = self.runtime.containers.get(id) else {
            return;
        };
        let name = container.name.clone();
        self.runtime.containers.get_mut(id).unwrap().is = Is::Running;
        self.runtime.runs.push(Run {
            name: name.clone(),
            id: id.clone(),
            at: self.now,
            end: None,
        });
        if let Some((after, code)) = self.life_of(&name) {
            self.after(after, Job::Exit(id.clone(), code));
        }
        if let Some(long) = self.case.probe
            && self.case.kind_of(&name) == ContainerKind::Sidecar
        {
            self.after(long, Job::Wake(None));
        }
        self.tell_started(id);
    }

    /// How long a container that has just started runs, if it ends by itself.
    fn life_of(&mut self, name: &ContainerName) -> Option<(Ms, ExitCode)> {
        let trigger = *name == self.case.trigger_name();
        if let Some(after) = self.case.again.filter(|_| trigger) {
            self.case.again = None;
            return Some((after, self.case.code));
        }
        if self.case.kind_of(name) != ContainerKind::Init {
            return None;
        }
        let failure = self.case.init_fails.take();
        Some((20 + self.upto(2000), failure.unwrap_or(ExitCode::SUCCESS)))
    }

    /// It is told to end, and does.
    pub(super) fn stop(&mut self, id: &ContainerId) {
        let code = match self.grace_of(id) {
            0 => ExitCode::KILLED,
            _ => self.case.stops_with,
        };
        self.ends_with(id, code, true);
    }

    /// It ends by itself.
    pub(super) fn exit(&mut self, id: &ContainerId, code: ExitCode) {
        self.ends_with(id, code, false);
    }

    fn ends_with(&mut self, id: &ContainerId, code: ExitCode, asked: bool) {
        let Some(container) = self.runtime.containers.get_mut(id) else {
            return;
        };
        if container.is != Is::Running {
            return;
        }
        let (name, hooked) = (container.name.clone(), container.hooked);
        container.is = Is::Stopped(code);
        let run = self.runtime.runs.iter_mut().find(|run| run.id == *id);
        if let Some(run) = run {
            run.end = Some(code);
        }
        // Without the trigger, or by a restart of one container, the pod would be over.
        let regular = self.case.kind_of(&name) == ContainerKind::Regular;
        let meant = [self.case.code, SECOND, ExitCode::KILLED].contains(&code);
        let own = regular && !asked && !meant;
        let last = !self.case.regulars().any(|name| self.runtime.runs(name));
        let failed = self.case.asked && !asked && code != ExitCode::SUCCESS;
        let init = self.case.kind_of(&name) == ContainerKind::Init;
        self.excuse(failed && init, "an init container fails by itself");
        let alone = own && (last || self.case.action == Action::Restart);
        self.excuse(alone, "the last container ends by itself");
        let pod = self.pod();
        let unheard = pod.is_some_and(|pod| pod.instance(id).is_none());
        self.excuse(
            unheard,
            "an exit of a container that was made while NRI was cut",
        );
        let (early, late) = (self.upto(300), self.upto(300));
        self.after(early, Job::ExitNews(id.clone(), code));
        if hooked {
            self.after(late, Job::HookStarts(id.clone()));
        } else {
            // With a grace period, shields wait for the ends, but for what is killed at once.
            let seen = code != ExitCode::KILLED || self.grace_of(id) > 0;
            let done = self.case.kind_of(&name) == ContainerKind::Init && code == ExitCode::SUCCESS;
            self.excuse(seen && !done, "an exit that cannot be held");
            self.after(0, Job::Appear(id.clone()));
        }
    }

    /// A hook begins to wait, if there is something to wait for.
    pub(super) fn hook_starts(&mut self, id: &ContainerId) {
        self.runtime.hook_asked.insert(id.clone(), self.now);
        let waits = if self.listening() {
            self.decide_hold(id)
        } else {
            self.marked()
        };
        if waits {
            self.runtime.hooks.push(id.clone());
            let limit = u64::try_from(exit_hold::LIMIT.as_millis()).unwrap();
            self.after(limit, Job::HookGivesUp(id.clone()));
        } else {
            // Nobody was there who could have held it.
            let alone = !self.listening();
            self.excuse(alone, "no plugin is there");
            self.after(0, Job::Appear(id.clone()));
        }
    }

    pub(super) fn hook_gives_up(&mut self, id: &ContainerId) {
        if let Some(at) = self.runtime.hooks.iter().position(|it| it == id) {
            let late = self.shields_may_be_late();
            self.demand(late, || format!("{id} is released in time"));
            self.excuse(true, "a hook gives up");
            self.runtime.hooks.swap_remove(at);
            self.after(0, Job::Appear(id.clone()));
        }
    }

    /// The hooks that the plugin has released return.
    pub(super) fn settle_hooks(&mut self) {
        if !self.listening() {
            return;
        }
        let hooks = std::mem::take(&mut self.runtime.hooks).into_iter();
        let (held, released): (Vec<_>, Vec<_>) = hooks.partition(|id| self.is_held(id));
        self.runtime.hooks = held;
        for id in released {
            let processing = self.upto(50);
            self.after(processing, Job::Appear(id));
        }
    }

    /// The exit can be seen.
    pub(super) fn appear(&mut self, id: &ContainerId) {
        if let Some(container) = self.runtime.containers.get_mut(id)
            && let Is::Stopped(code) = container.is
        {
            container.is = Is::Exited(code);
            self.answer_kill(Event::Exited(id.clone()), id);
        }
    }

    pub(super) fn remove(&mut self, id: &ContainerId) {
        self.runtime.containers.remove(id);
        if self.connected() {
            self.removed(id);
        }
    }

    /// Container GC: of each name the newest dead one stays. Placeholders have names of their own.
    pub(super) fn collect(&mut self) {
        let containers = self
            .runtime
            .containers
            .iter()
            .filter(|(_, it)| !it.is_placeholder());
        let mut dead: Vec<_> = containers
            .filter(|(_, it)| matches!(it.is, Is::Created | Is::Exited(_)))
            .map(|(id, it)| (it.name.clone(), -it.created_at, id.clone()))
            .collect();
        dead.sort();
        for pair in dead.windows(2).filter(|pair| pair[0].0 == pair[1].0) {
            self.remove(&pair[1].2);
        }
        self.after(60_000, Job::Collect);
    }

    /// Whether the kubelet makes the attempt of that container that follows the old one, or has made it.
    fn is_taken(&self, name: &ContainerName) -> bool {
        let Some(plan) = self.pod().and_then(Pod::plan) else {
            return false;
        };
        let decided = i64::try_from(plan.decided_at_ms).unwrap() * 1_000_000;
        let old = plan.member(name).and_then(|member| member.old.as_ref());
        let old = old.and_then(|old| self.runtime.containers.get(&old.id));
        let since = old.map_or(decided, |old| old.created_at);
        let mut containers = self.runtime.containers.values();
        let made = containers
            .any(|it| it.name == *name && it.maker == Maker::Kubelet && it.created_at > since);
        made || self.runtime.reserved.as_ref() == Some(name)
    }

    /// A call takes effect. What comes back is for the plugin that made it.
    pub(super) fn carry_out_call(&mut self, call: Call) {
        if self.fails(&call) {
            self.note_failure(&call);
            return self.after(100, Job::Retry(self.epoch, call));
        }
        if self.loses(&call) {
            return self.lose(call);
        }
        match call {
            Call::Kill(id) => match self.runtime.containers.get(&id).map(|it| it.is) {
                None => self.answer_kill(Event::Gone(id.clone()), &id),
                Some(Is::Exited(_)) => self.answer_kill(Event::Exited(id.clone()), &id),
                // It is not its turn yet, and its time is not up.
                Some(Is::Running) if !self.may_signal(&id) => {
                    self.after(20, Job::Call(self.epoch, Call::Kill(id)));
                }
                // The runtime stops nothing that it has not started, and starts it then.
                Some(Is::Created) => self.after(100, Job::Call(self.epoch, Call::Kill(id))),
                Some(_) => self.stop(&id),
            },
            Call::Make(name, like, generation) => {
                let gone = |it: &&ContainerId| !self.runtime.containers.contains_key(*it);
                if let Some(like) = like.as_ref().filter(gone) {
                    self.feed(Event::Gone(like.clone()));
                    return self.not_made(name, &generation);
                }
                // What a plugin asked for that is dead, nobody can take back.
                if let Some(pod) = self.pod() {
                    if !pod.wants(Task::Shield(&generation, &name)) {
                        return self.not_made(name, &generation);
                    }
                    if !pod.wants(Task::ShieldNow(&name, like.as_ref())) {
                        let call = Call::Make(name, like, generation);
                        return self.after(100, Job::Retry(self.epoch, call));
                    }
                }
                let maker = Maker::Placeholder;
                let id = self.runtime.create(self.now, &name, maker, Is::Created);
                self.tell_created(&id);
                let answering = self.upto(20);
                self.after(answering, Job::Made(self.epoch, name, id, generation));
            }
            // Otherwise its exit could not be held.
            call @ Call::Replay(..) if self.listening() && !self.connected() => self.retry(call),
            Call::Replay(name, batch, since) if self.is_taken(&name) => {
                self.reach("the kubelet has the name of an attempt");
                let call = Call::Replay(name, batch, since);
                if self.goes_on_asking(batch, since) {
                    self.after(20, Job::Call(self.epoch, call));
                } else {
                    self.retry(call);
                }
            }
            Call::Replay(name, batch, _) => {
                let maker = Maker::Replay;
                let id = self.runtime.create(self.now, &name, maker, Is::Created);
                self.runtime.containers.get_mut(&id).unwrap().hooked = self.connected();
                self.tell_created(&id);
                self.attempt_answered(batch, &name, Some(id));
            }
            Call::Remove(id) => {
                let there = self.runtime.containers.get(&id);
                let running = there.filter(|it| it.seen() == InstanceState::Running);
                if let Some(hooked) = running.map(|it| it.hooked) {
                    // The runtime stops it by force, and removes it when its exit has been processed, unless who asked for
                    // that is dead.
                    self.excuse(!hooked && !self.listening(), "a removal is cancelled");
                    self.exit(&id, ExitCode::KILLED);
                    self.after(100, Job::Call(self.epoch, Call::Remove(id)));
                } else {
                    self.remove(&id);
                    self.swept(&id);
                }
            }
        }
    }

    /// It is done, and the runtime ends before it answers: NRI is cut with it. What was to be made is found when it is back.
    fn lose(&mut self, call: Call) {
        let away = self.upto(3000);
        self.cut(away);
        self.case.cut.get_or_insert((self.now - BEGIN, away));
        let mut make = |name, maker| self.runtime.create(self.now, name, maker, Is::Created);
        let next = match &call {
            Call::Make(name, _, generation) => {
                let id = make(name, Maker::Placeholder);
                Job::Made(self.epoch, name.clone(), id, generation.clone())
            }
            Call::Replay(name, batch, _) => {
                let id = make(name, Maker::Replay);
                Job::AttemptMade(self.epoch, *batch, name.clone(), id)
            }
            Call::Kill(id) => {
                self.stop(id);
                Job::Retry(self.epoch, call)
            }
            Call::Remove(id) => {
                let containers = &mut self.runtime.containers;
                containers.retain(|it, of| it != id || of.seen() == InstanceState::Running);
                Job::Retry(self.epoch, call)
            }
        };
        self.after(away, next);
    }
}
