//! What people see of the plugin's decisions: one log line and one event on the pod for each.

use std::fmt;
use std::time::Duration;

use crate::ids::{ContainerName, ExitCode, PodIdentity};
use crate::kube::{EventKind, Events};

/// What there is to say of a restart.
#[derive(Debug, Clone, Copy)]
pub struct Story<'a> {
    /// Whose restart.
    pub pod: &'a PodIdentity,
    /// Its name.
    pub restart: &'a str,
    /// The container that set it off.
    pub container: &'a ContainerName,
    /// What it exited with.
    pub code: ExitCode,
    /// All containers, or that one.
    pub whole_pod: bool,
    /// How the containers are started again.
    pub way: &'static str,
}

/// Tells people. Events go to the API when it is there and are dropped when it is not: nothing waits for it.
#[derive(Debug, Clone)]
pub struct Reporter {
    events: Option<Events>,
}

impl Reporter {
    /// `None`: there is no API server, the log is all.
    #[must_use]
    pub fn new(events: Option<Events>) -> Self {
        Self { events }
    }

    /// A restart was decided.
    pub fn restarting(&self, story: &Story<'_>) {
        let (what, reason, target) = if story.whole_pod {
            ("all containers", "RestartingAllContainers", "pod")
        } else {
            ("one container", "RestartingContainer", "container")
        };
        let Story {
            container, code, ..
        } = story;
        tracing::info!(
            pod = %story.pod.key, %container, exit_code = %code, restart = story.restart,
            "restarting {what} in place, {}", story.way
        );
        // The wording of KEP-5532, "Pod condition AllContainersRestarting".
        let message =
            format!("Container {container} exited with code {code}, triggering {target} restart");
        self.event(story.pod, EventKind::Normal, reason, message);
    }

    /// All containers have been started again.
    pub fn restarted(&self, story: &Story<'_>, took: Duration) {
        let took_ms = took.as_millis();
        tracing::info!(pod = %story.pod.key, restart = story.restart, took_ms, "all containers run again");
        let reason = if story.whole_pod {
            "RestartedAllContainers"
        } else {
            "RestartedContainer"
        };
        let message = format!("Restarted in place in {took_ms} ms");
        self.event(story.pod, EventKind::Normal, reason, message);
    }

    /// An init container failed under `restartPolicy: Never`; the kubelet says so itself.
    pub fn init_failed(&self, story: &Story<'_>, took: Duration) {
        tracing::warn!(
            pod = %story.pod.key, restart = story.restart, took_ms = took.as_millis(),
            "an init container failed after the restart: the pod fails"
        );
    }

    /// The pod was deleted during the restart.
    pub fn deleted_meanwhile(&self, story: &Story<'_>, took: Duration) {
        tracing::info!(
            pod = %story.pod.key, restart = story.restart, took_ms = took.as_millis(),
            "the pod was deleted during the restart: let it go"
        );
    }

    /// The kubelet did not start these containers in time.
    pub fn gave_up(&self, story: &Story<'_>, took: Duration, waiting_for: &[&ContainerName]) {
        let names: Vec<&str> = waiting_for.iter().map(|name| name.as_str()).collect();
        let names = names.join(", ");
        tracing::warn!(
            pod = %story.pod.key, restart = story.restart, took_ms = took.as_millis(), containers = names,
            "gave up waiting for the kubelet to start containers; nothing keeps it from doing so"
        );
        let message = format!("Gave up waiting for the kubelet to start {names}");
        self.event(story.pod, EventKind::Warning, "RestartIncomplete", message);
    }

    /// A pod's annotations cannot be used: it runs as without the plugin.
    pub fn invalid_rules(&self, pod: &PodIdentity, error: &dyn fmt::Display) {
        tracing::warn!(pod = %pod.key, %error, "the pod's restart rules are not used");
        let message = format!("Restart rules are not used: {error}");
        self.event(pod, EventKind::Warning, "InvalidRestartRules", message);
    }

    fn event(&self, pod: &PodIdentity, kind: EventKind, reason: &'static str, message: String) {
        if let Some(events) = &self.events {
            events.publish(&pod.key, &pod.uid, kind, reason, message);
        }
    }
}
