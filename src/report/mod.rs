//! What people see of the plugin's decisions: one log line and one event on the pod for each.

mod condition;
mod reason;

pub use condition::kind as condition_type;
pub(crate) use condition::last as last_restart;
pub(crate) use reason::Reason;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use crate::ids::{ContainerName, ExitCode, PodIdentity, PodKey, PodUid};
use crate::kube::{Condition, Conditions, Events, KubeletFeatures, PodSpec, Said};
use crate::metrics::Metrics;
use crate::policy::{Action, MatchedRule, Request, RequestError};
use crate::restart::pod::BegunAnew;
use crate::text;

/// What stands before the time in a condition's message that tells of a back-off.
pub(crate) const BACK_OFF: &str = "; back-off until ";

/// What there is to say of a restart.
#[derive(Debug, Clone)]
pub struct Story<'a> {
    /// Whose restart.
    pub pod: &'a PodIdentity,
    /// Its name.
    pub restart: &'a str,
    /// The container that set it off.
    pub container: &'a ContainerName,
    /// What it exited with.
    pub code: ExitCode,
    /// The rule that this has matched.
    pub rule: Option<&'a MatchedRule>,
    /// What somebody asked for it with, if no exit did.
    pub request: Option<&'a str>,
    /// What is done about it.
    pub action: Action,
    /// The type of the pod condition that tells of it, if there is one.
    pub condition: Option<&'a str>,
    /// How long no container may start.
    pub back_off: Duration,
    /// Until when that is, as people read it.
    pub start_at: String,
    /// How the containers are started again.
    pub way: &'static str,
    /// Why that is not by replay.
    pub no_replay: Option<&'a str>,
}

impl Story<'_> {
    /// How the containers are started again, and why not by replay.
    #[must_use]
    pub fn how(&self) -> String {
        match self.no_replay {
            Some(why) => format!("{} (no replay: {why})", self.way),
            None => self.way.to_owned(),
        }
    }

    /// The wording of KEP-5532, "Pod condition `AllContainersRestarting`", and by which rule.
    fn cause(&self) -> String {
        let Self {
            container, code, ..
        } = self;
        if let Some(request) = self.request {
            return format!("Restart requested with value {request}, triggering pod restart");
        }
        let target = match self.action {
            Action::Restart => "container",
            Action::RestartAllContainers | Action::RestartPod => "pod",
        };
        let rule = self.by_rule();
        format!("Container {container} exited with code {code}, triggering {target} restart{rule}")
    }

    fn by_rule(&self) -> String {
        let rule = self.rule.map(|rule| format!(" ({rule})"));
        rule.unwrap_or_default()
    }

    /// The same, and until when nothing starts.
    fn condition_message(&self) -> String {
        if self.back_off.is_zero() {
            self.cause()
        } else {
            format!("{}{BACK_OFF}{}", self.cause(), self.start_at)
        }
    }
}

/// How a restart of a pod ended.
#[derive(Debug, Clone)]
pub struct RestartEnding<'a> {
    /// In one word, for machines.
    pub reason: &'static str,
    /// Whether all containers run again.
    pub complete: bool,
    /// The same for people.
    pub what: String,
    /// How often the pod has restarted, with this time.
    pub restarts: u32,
    /// The last of the requests that are answered by it.
    pub answers: Option<&'a Request>,
}

/// Why exits of a pod's containers cannot be held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unprotected {
    /// They were started before the plugin.
    FromBefore,
    /// The pod's runtime handler runs no hooks on the host or, on CRI-O, no conmon.
    ItsHandler,
    /// The runtime makes no containers with our hook.
    HooksRefused,
    /// Nobody holds exits on this node.
    NotHeld,
}

/// Tells people, and counts what it tells of. Events go to the API when it is there and are dropped when it is not: nothing
/// waits for it.
#[derive(Debug, Clone)]
pub struct Reporter {
    events: Option<Events>,
    conditions: Option<Conditions>,
    metrics: Arc<Metrics>,
}

impl Reporter {
    /// `None`: there is no API server, the log is all.
    #[must_use]
    pub fn new(
        events: Option<Events>,
        conditions: Option<Conditions>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            events,
            conditions,
            metrics,
        }
    }

    /// A restart was decided.
    pub fn restarting(&self, story: &Story<'_>) {
        let (what, reason) = match story.action {
            Action::Restart => ("one container", Reason::RestartingContainer),
            Action::RestartAllContainers => ("all containers", Reason::RestartingAllContainers),
            Action::RestartPod => ("the pod", Reason::RestartingPod),
        };
        let Story {
            container, code, ..
        } = story;
        let code = story.request.is_none().then_some(code.0);
        tracing::info!(
            pod = %story.pod.key, %container, exit_code = code, request = story.request, restart = story.restart,
            "restarting {what} in place, {}", story.how()
        );
        let cause = story.cause();
        // Each request has a value of its own.
        let series = story.request.map_or(cause.as_str(), |_| "request");
        self.event(story.pod, reason.said_of(series, &cause));
        if !story.back_off.is_zero() {
            self.metrics.back_off(story.back_off);
            let seconds = story.back_off.as_secs();
            tracing::warn!(pod = %story.pod.key, restart = story.restart, seconds, "the pod restarts too often: backing off");
            let message = format!(
                "Back-off: the pod restarts too often, nothing starts before {}",
                story.start_at
            );
            self.event(story.pod, Reason::BackOff.said_of("", &message));
        }
    }

    /// A restart begins anew from what there is now, for the kubelet to start.
    pub(crate) fn begun_anew(&self, pod: &PodIdentity, begun: &BegunAnew) {
        let BegunAnew {
            restart,
            again,
            disturbed,
            why,
        } = begun;
        tracing::warn!(
            pod = %pod.key, %restart, again, why,
            "beginning anew: the kubelet starts the containers"
        );
        self.metrics.begun_anew(*disturbed);
    }

    /// A container with rules has failed, and none says what to do about that.
    pub(crate) fn unmatched(&self, pod: &PodIdentity, container: &ContainerName, code: ExitCode) {
        tracing::debug!(pod = %pod.key, %container, exit_code = %code, "no rule matches");
        self.metrics.exit_unmatched();
    }

    /// Sets the pod's condition, of the pod with `api_uid` in the API. The receiver hears when that is done; `None`:
    /// there is nobody to tell, or nothing.
    #[must_use]
    pub fn condition(
        &self,
        story: &Story<'_>,
        api_uid: &PodUid,
        restarting: bool,
    ) -> Option<oneshot::Receiver<()>> {
        let conditions = self.conditions.as_ref()?;
        let reason = if story.request.is_some() {
            condition::REQUESTED
        } else {
            condition::EXITED
        };
        let condition = condition::of(
            story.condition?,
            restarting,
            reason,
            story.condition_message(),
        );
        Some(conditions.set(&story.pod.key, api_uid, condition))
    }

    /// Sets the condition that tells how the pod's last restart ended.
    pub fn ended(&self, pod: &PodKey, api_uid: &PodUid, last: Condition) {
        if let Some(conditions) = &self.conditions {
            drop(conditions.set(pod, api_uid, last));
        }
    }

    /// Takes back conditions of restarts that nobody carries out any more.
    pub fn end_conditions(&self, spec: &PodSpec, native: KubeletFeatures) {
        let Some(conditions) = &self.conditions else {
            return;
        };
        for kind in &spec.restarting {
            if condition::is_ours(kind, native) {
                tracing::info!(pod = %spec.key, kind, "a condition was left behind: taking it back");
                let message = "The plugin ended during the restart".to_owned();
                // Whoever waits for it is the API server's watchers.
                drop(conditions.set(
                    &spec.key,
                    &spec.api_uid,
                    condition::of(kind, false, condition::EXITED, message),
                ));
            }
        }
    }

    /// The kubelet's own features are known.
    pub fn features(&self, native: KubeletFeatures) {
        let KubeletFeatures {
            container_rules,
            restart_all,
            ..
        } = native;
        let what = match (container_rules, restart_all) {
            (true, true) => "standing aside for all of them",
            (true, false) => "standing aside for action Restart, not for RestartAllContainers",
            (false, true) => "standing aside for action RestartAllContainers, not for Restart",
            (false, false) => "acting on them in its place",
        };
        tracing::info!(
            container_rules,
            restart_all,
            "rules in the spec of a pod, which this kubelet may act on itself: {what}"
        );
    }

    /// Exits of these containers cannot be held.
    pub fn not_protected(
        &self,
        pod: &PodIdentity,
        containers: &BTreeSet<ContainerName>,
        why: Unprotected,
    ) {
        let names: Vec<&str> = containers.iter().map(ContainerName::as_str).collect();
        let names = text::listed(&names);
        let why = match why {
            Unprotected::FromBefore => {
                "they were started before the plugin. They are protected once they have restarted"
            }
            Unprotected::ItsHandler => {
                "the pod's runtime handler runs no hooks on the host (of CRI-O: no conmon)"
            }
            Unprotected::NotHeld => "exits are not held on this node (the plugin's log says why)",
            Unprotected::HooksRefused => {
                "the runtime did not create them with the plugin's hook, but without it (does its NRI validator have reject_oci_hook_adjustment?)"
            }
        };
        tracing::warn!(pod = %pod.key, containers = names, "exits cannot be held: {why}");
        let message = format!(
            "Exits of {names} cannot be held, so that the kubelet may act on them before the pod is restarted (with restartPolicy Never the pod may fail): {why}"
        );
        self.event(pod, Reason::NotProtected.said(&message));
    }

    /// All containers have been started again.
    pub fn restarted(&self, story: &Story<'_>, took: Duration) {
        let took_ms = took.as_millis();
        let (what, reason) = match story.action {
            Action::Restart => ("the container runs", Reason::RestartedContainer),
            Action::RestartAllContainers => ("all containers run", Reason::RestartedAllContainers),
            Action::RestartPod => ("all containers run", Reason::RestartedPod),
        };
        let way = story.how();
        tracing::info!(pod = %story.pod.key, restart = story.restart, took_ms, "{what} again, {way}");
        let message = format!("Restarted in place in {took_ms} ms, {way}");
        self.event(story.pod, reason.said_of(story.way, &message));
    }

    /// The plugin itself has made and started a container, as the kubelet tells of those that it starts.
    pub fn started(&self, pod: &PodIdentity, container: &ContainerName) {
        for (reason, done) in [(Reason::Created, "created"), (Reason::Started, "started")] {
            let message = format!("Container {container} {done} by replay");
            self.event(pod, reason.said(&message));
        }
    }

    /// The preStop hook of a container has failed, in the kubelet's words: why may be a secret.
    pub fn pre_stop_failed(
        &self,
        pod: &PodIdentity,
        container: &ContainerName,
        error: &dyn fmt::Display,
    ) {
        tracing::warn!(pod = %pod.key, %container, %error, "a preStop hook failed");
        let message = format!("PreStopHook of {container} failed");
        self.event(pod, Reason::FailedPreStopHook.said(&message));
    }

    /// The same of a postStart hook; the container is ended for it.
    pub fn post_start_failed(
        &self,
        pod: &PodIdentity,
        container: &ContainerName,
        error: &dyn fmt::Display,
    ) {
        tracing::warn!(pod = %pod.key, %container, %error, "a postStart hook failed: the container is ended");
        let message = format!("PostStartHook of {container} failed");
        self.event(pod, Reason::FailedPostStartHook.said(&message));
    }

    /// An init container failed under `restartPolicy: Never`; the kubelet says so itself.
    pub fn init_failed(&self, story: &Story<'_>, took: Duration) {
        tracing::warn!(
            pod = %story.pod.key, restart = story.restart, took_ms = took.as_millis(),
            "an init container failed after the restart: the pod fails"
        );
    }

    /// The kubelet is ending the pod, of whose containers one exited as its rules say.
    pub fn ending(&self, pod: &PodIdentity) {
        tracing::info!(pod = %pod.key, "the kubelet is ending the pod: it is left to it");
        let message = "Not restarted: the kubelet is ending the pod";
        self.event(pod, Reason::NotRestarted.said(message));
    }

    /// The kubelet itself has ended the container whose exit asked for the restart.
    pub fn called_off(&self, story: &Story<'_>) {
        let container = story.container;
        tracing::info!(
            pod = %story.pod.key, restart = story.restart, %container,
            "the kubelet has ended the container to start it again: that restarts nothing else"
        );
        let message =
            format!("Not restarted: the kubelet has ended container {container} to start it again");
        self.event(story.pod, Reason::NotRestarted.said(&message));
    }

    /// The pod was deleted, or came to its end, during the restart.
    pub fn deleted_meanwhile(&self, story: &Story<'_>, took: Duration) {
        tracing::info!(
            pod = %story.pod.key, restart = story.restart, took_ms = took.as_millis(),
            "the pod was deleted or ended during the restart: let it go"
        );
    }

    /// The kubelet did not start these containers in time.
    pub fn gave_up(&self, story: &Story<'_>, took: Duration, waiting_for: &[ContainerName]) {
        let names: Vec<&str> = waiting_for.iter().map(ContainerName::as_str).collect();
        let names = text::listed(&names);
        tracing::warn!(
            pod = %story.pod.key, restart = story.restart, took_ms = took.as_millis(), containers = names,
            "gave up: not all containers were started again; nothing keeps the kubelet from starting them"
        );
        self.incomplete(story.pod, &format!("not started again: {names}"));
    }

    /// The exits are let go without a placeholder that hides them.
    pub fn unshielded(&self, story: &Story<'_>, took: Duration) {
        let why = "the runtime did not make placeholders in time, the kubelet sees what has exited";
        tracing::warn!(
            pod = %story.pod.key, restart = story.restart, took_ms = took.as_millis(),
            "gave up: {why}"
        );
        self.incomplete(story.pod, why);
    }

    /// What the kubelet would have left half alive is stopped.
    pub fn made_to_fail(&self, story: &Story<'_>, took: Duration) {
        let why = "the kubelet saw the exit of a container that it never starts again, and had started another: that was stopped, so that the pod fails";
        tracing::warn!(
            pod = %story.pod.key, restart = story.restart, took_ms = took.as_millis(),
            "gave up: {why}"
        );
        self.incomplete(story.pod, why);
    }

    /// The kubelet has ended the pod's sandbox in the middle of a restart, and would have made no other one.
    pub fn begins_in_another_sandbox(&self, pod: &PodIdentity) {
        let why = "the kubelet ended the pod's sandbox in the middle of the restart: the pod begins anew in another one";
        tracing::warn!(pod = %pod.key, "gave up: {why}");
        self.incomplete(pod, why);
    }

    fn incomplete(&self, pod: &PodIdentity, why: &str) {
        let message = format!("Gave up: {why}");
        self.event(pod, Reason::RestartIncomplete.said(&message));
    }

    /// A pod's annotations cannot be used: it runs as without the plugin.
    pub fn invalid_rules(&self, pod: &PodIdentity, error: &dyn fmt::Display) {
        tracing::warn!(pod = %pod.key, %error, "the pod's restart rules are not used");
        let message = format!("Restart rules are not used: {error}");
        self.event(pod, Reason::InvalidRestartRules.said(&message));
    }

    /// A request to restart the pod cannot be used.
    pub fn invalid_request(&self, pod: &PodIdentity, error: RequestError) {
        tracing::warn!(pod = %pod.key, %error, "a request to restart the pod is not used");
        let message = format!("Not restarted as requested: {error}");
        self.event(pod, Reason::InvalidRestartRequest.said(&message));
    }

    /// Rules of these containers match exits by signals, whoever sent them.
    pub fn kills_restart(&self, pod: &PodIdentity, containers: &BTreeSet<ContainerName>) {
        let names: Vec<&str> = containers.iter().map(ContainerName::as_str).collect();
        let names = text::listed(&names);
        tracing::warn!(pod = %pod.key, containers = names, "rules match exits by SIGKILL or SIGTERM, whoever sends it");
        let message = format!(
            "Rules of {names} match 137 or 143, with which containers also end that somebody else kills: list these codes in a \
             NotIn rule, or do not name SIGKILL and SIGTERM"
        );
        self.event(pod, Reason::RulesMatchKills.said(&message));
    }

    fn event(&self, pod: &PodIdentity, said: Said<'_>) {
        if let Some(events) = &self.events {
            events.publish(&pod.key, &pod.uid, said);
        }
    }
}
