//! Restarts that somebody asks for, by a new value of an annotation.
//!
//! Level-triggered: what is asked for is compared with what was answered last, whenever either may have changed. So a request
//! that came while no plugin was there is found, and one that was answered by a plugin that died is not answered twice.

use super::decide::scope;
use super::{Command, Pod, Saying};
use crate::clock::Moment;
use crate::ids::ExitCode;
use crate::kube::ContainerKind;
use crate::node::InstanceState;
use crate::plan::Trigger;
use crate::policy::{Action, Policy, Request};
use crate::restart::machine::{Event, Phase};

impl Pod {
    /// Begins the restart that is asked for, unless there is none. One of the whole pod that is under way answers it as well:
    /// everything that runs by then has been started after the question, or is about to be ended.
    pub(super) fn look_for_request(&mut self, now: &Moment) {
        let Some(request) = self.unanswered() else {
            return;
        };
        let Some(machine) = &self.machine else {
            return self.begin_requested(request, now);
        };
        // What it cannot join begins when it is over.
        if machine.plan().is_whole_pod() && machine.phase() != Phase::Over {
            let waited = now.since(machine.plan().decided_up_ms);
            let urgent = request.is_urgent();
            self.joined = Some(request);
            if urgent {
                self.feed(Event::Hurry(waited), now);
            }
        }
    }

    /// What is asked for and has yet to be answered. What the sandbox was made with asks for nothing.
    fn unanswered(&mut self) -> Option<Request> {
        let written = self.written.as_ref()?.request().cloned();
        let asked = self.spec.as_ref()?.request.clone()?;
        if self.deleting {
            return None;
        }
        let request = match asked {
            Ok(request) => request,
            Err(error) => {
                if self.refused.replace(error) != Some(error) {
                    self.say(Saying::InvalidRequest(error));
                }
                return None;
            }
        };
        let answered = self.past.answered.as_ref().or(written.as_ref());
        let under_way = self.plan().and_then(|plan| plan.trigger.request.as_ref());
        let known = [answered, under_way, self.joined.as_ref()];
        (!known.contains(&Some(&request))).then_some(request)
    }

    fn begin_requested(&mut self, request: Request, now: &Moment) {
        // Where nothing has begun to run yet, it is looked for again when something has.
        let Some(trigger) = self.ended_for(request) else {
            return;
        };
        let policy = self.policy.as_deref();
        let action = policy.map_or(Action::RestartAllContainers, Policy::action_on_request);
        match self.manifest.clone() {
            Some(manifest) => {
                let ask = Command::AskManifest(trigger, action, manifest);
                self.commands.push(ask);
            }
            None => self.begin(&trigger, action, now),
        }
    }

    /// The container whose end stands for all: a regular one that runs, or what comes next to that.
    fn ended_for(&self, request: Request) -> Option<Trigger> {
        let containers = self.spec.as_ref()?.containers.iter();
        let newest = containers.filter_map(|container| {
            let (id, it) = self.instances.newest(&container.name)?;
            let code = match it.state {
                InstanceState::Created => return None,
                InstanceState::Running => None,
                InstanceState::Ended(code) => Some(code.unwrap_or(ExitCode::UNKNOWN)),
            };
            Some((container, id, code))
        });
        let rank = |(container, _, code): &(&crate::kube::ContainerSpec, _, Option<ExitCode>)| {
            (code.is_some(), container.kind != ContainerKind::Regular)
        };
        let (container, id, code) = newest.min_by_key(rank)?;
        Some(Trigger {
            name: container.name.clone(),
            container: id.clone(),
            code: code.unwrap_or(ExitCode::KILLED),
            request: Some(request),
        })
    }

    /// The restart that is over has answered what was asked for.
    pub(super) fn note_answer(&mut self, of: Option<Request>) -> Option<Request> {
        let joined = self.joined.take();
        if let Some(answered) = joined.clone().or(of) {
            self.past.answered = Some(answered);
        }
        joined
    }

    /// The row of restarts goes on from the end of this one.
    pub(super) fn note_over(&mut self, trigger: &Trigger, action: Action, now: &Moment) {
        if trigger.request.is_none() {
            self.past.over(scope(action, trigger).as_ref(), now.up_ms);
        }
    }
}
