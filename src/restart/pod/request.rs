//! Restarts that somebody asks for, by a new value of an annotation.
//!
//! Level-triggered: what is asked for is compared with what was answered last, whenever either may have changed. So a request
//! that came while no plugin was there is found, and one that was answered by a plugin that died is not answered twice.

use super::decide::scope;
use super::{Pod, Saying};
use crate::clock::Moment;
use crate::ids::ExitCode;
use crate::kube::ContainerKind;
use crate::node::InstanceState;
use crate::plan::{Plan, Trigger};
use crate::policy::{Action, Policy, Request};
use crate::restart::machine::{Event, Phase};

impl Pod {
    /// Begins the restart that is asked for, unless there is none. One of the whole pod that is under way answers it as well:
    /// everything that runs by then has been started after the question, or is about to be ended.
    pub(super) fn look_for_request(&mut self, now: &Moment) {
        let Some(request) = self.unanswered() else {
            return;
        };
        if self.may_begin_requested() {
            self.begin_requested(request, now);
        } else if let Some(plan) = self.plan() {
            let waited = now.since(plan.decided_up_ms);
            self.feed(Event::Asked(request, waited), now);
        }
    }

    /// Whether no restart is under way that answers a request, or has yet to be finished. One of a single container is replaced.
    fn may_begin_requested(&self) -> bool {
        let machine = self.machine.as_ref();
        machine.is_none_or(|it| !it.plan().is_whole_pod() && it.phase() != Phase::Over)
    }

    /// Whether that is what somebody still asks for, and it is not under way.
    pub(super) fn is_still_asked(&mut self, request: &Request) -> bool {
        self.may_begin_requested() && self.unanswered().as_ref() == Some(request)
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
        let under_way = self.plan().and_then(Plan::answers);
        (![answered, under_way].contains(&Some(&request))).then_some(request)
    }

    fn begin_requested(&mut self, request: Request, now: &Moment) {
        // Where nothing has begun to run yet, it is looked for again when something has.
        let Some(trigger) = self.ended_for(request) else {
            return;
        };
        let policy = self.policy.as_deref();
        let action = policy.map_or(Action::RestartAllContainers, Policy::action_on_request);
        self.begin_if_there(trigger, action, now);
    }

    /// The container whose end stands for all: a regular one that runs, or what comes next to that. One that has ended is what the
    /// kubelet waits to start again. While it goes from one init container to the next, and sidecars are all that runs, nothing
    /// is.
    fn ended_for(&self, request: Request) -> Option<Trigger> {
        let containers = self.spec.as_ref()?.containers.iter();
        let containers = containers.filter(|it| it.kind != ContainerKind::Sidecar);
        let newest = containers.filter_map(|container| {
            let (id, it) = self.instances.newest(&container.name)?;
            let regular = container.kind == ContainerKind::Regular;
            let code = match it.state {
                InstanceState::Running => None,
                InstanceState::Ended(code) => {
                    let member = self.known_member(&container.name)?;
                    let again = self.has_restart(|it| it.is_to_run_again(&container.name));
                    let waits = |code: &ExitCode| again || !member.stays_ended_after(*code);
                    Some(code.filter(waits)?)
                }
                InstanceState::Created => return None,
            };
            Some(((code.is_some(), !regular), container, id, code))
        });
        let (_, container, id, code) = newest.min_by_key(|it| it.0)?;
        Some(Trigger {
            name: container.name.clone(),
            container: id.clone(),
            code: code.unwrap_or(ExitCode::KILLED),
            rule: None,
            request: Some(request),
        })
    }

    /// A restart is over. The row of restarts goes on from its end; what was asked for was no crash.
    pub(super) fn note_over(&mut self, plan: &Plan, now: &Moment) {
        if plan.trigger.request.is_none() {
            let of = scope(plan.action, &plan.trigger);
            self.past.over(of.as_ref(), now.up_ms);
        }
        if plan.is_whole_pod() {
            self.past.count();
        }
        if let Some(answered) = plan.answers() {
            self.past.answered = Some(answered.clone());
        }
    }
}
