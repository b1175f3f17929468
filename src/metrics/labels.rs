//! Values of labels.

use crate::kube::StartDuty;
use crate::plan::{Plan, Starter, Trigger, Way};
use crate::policy::MatchedBy;
use crate::replay::ReplayBlocker;
use crate::restart::Refused;

pub(super) fn trigger(trigger: &Trigger) -> &'static str {
    let by = trigger.rule.as_ref().map(|rule| rule.by);
    match (&trigger.request, by.unwrap_or_default()) {
        (Some(_), _) => "request",
        (None, MatchedBy::ExitCodes) => "exit",
        (None, MatchedBy::Signal) => "signal",
        (None, MatchedBy::OomKilled) => "oom",
    }
}

/// How the containers were started again in the end.
pub(super) fn way(plan: &Plan) -> &'static str {
    match (&plan.starter, plan.way) {
        (Starter::Plugin, _) => "replay",
        (Starter::Both { .. }, _) => "replay_and_policy",
        (Starter::Kubelet(_), Way::Kept) => "policy",
        (Starter::Kubelet(_), Way::Shielded) => "placeholders",
        (Starter::Kubelet(_), Way::Cleared) => "cleared",
    }
}

pub(super) fn refused(refused: &Refused) -> &'static str {
    match refused {
        Refused::Runs(_) => "runs",
        Refused::HasJustRun(_) => "has_just_run",
        Refused::StaysEnded(..) => "stays_ended",
        Refused::NotYet(..) => "not_yet",
        Refused::BackOff { .. } => "back_off",
        Refused::OutOfOrder(..) => "out_of_order",
    }
}

pub(super) fn blocker(blocker: &ReplayBlocker) -> &'static str {
    match blocker {
        ReplayBlocker::Asked => "asked",
        ReplayBlocker::Untold => "runtime",
        ReplayBlocker::NoSpec => "no_spec",
        ReplayBlocker::BackOff => "back_off",
        ReplayBlocker::NoGate => "no_nri",
        ReplayBlocker::Many(_) => "many_containers",
        ReplayBlocker::Large => "large",
        ReplayBlocker::NotHeld(_) => "exit_not_held",
        ReplayBlocker::NeverCreated(_) => "never_created",
        ReplayBlocker::Completed(_) => "completed",
        ReplayBlocker::PostStart(_) => "post_start",
        ReplayBlocker::Duty(_, StartDuty::StartupProbe) => "startup_probe",
        ReplayBlocker::Duty(_, StartDuty::LivenessProbe) => "liveness_probe",
        ReplayBlocker::Duty(_, StartDuty::ImagePull) => "image_pull",
        ReplayBlocker::Duty(_, StartDuty::Environment) => "environment",
        ReplayBlocker::Duty(_, StartDuty::SubPath) => "sub_path",
        ReplayBlocker::Device(..) => "device",
        ReplayBlocker::NotTold(_) => "not_told",
        ReplayBlocker::Lost(..) => "not_all_known",
        ReplayBlocker::Resized(_) => "resized",
        ReplayBlocker::Cpus(_) => "cpus",
        ReplayBlocker::ImageChanged(_) => "image_changed",
        ReplayBlocker::VariableChanged(..) => "variable_changed",
        ReplayBlocker::SpecChanged => "spec_changed",
        ReplayBlocker::HostsTouched => "etc_hosts",
        ReplayBlocker::SlowInits(_) => "slow_inits",
        ReplayBlocker::Failed(_) => "runtime_failed",
    }
}
