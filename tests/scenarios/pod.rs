//! A pod on the node: made from a shape, told what to do, looked at, deleted.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams, LogParams, Patch, PatchParams, PostParams};
use rustix::fs::OFlags;
use rustix::io::Errno;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::evidence::{self, Entry};
use crate::node::Node;
use crate::plugin::Plugin;
use crate::recorder::{Recorder, Snapshot};
use crate::runtime::{Container, State, describe};
use crate::shape::{Kind, Shape};
use crate::wait::{self, PATIENCE};

/// The kubelet's garbage collection removes what a deleted pod leaves in the runtime, once a minute. A kubelet's first
/// one, right at its start, spares all: it does not know yet which pods there are.
const COLLECTED: Duration = Duration::from_mins(3);

/// Between two looks at what many deleted pods leave, while other scenarios are played.
const CALM: Duration = Duration::from_secs(1);

pub(crate) struct LivePod {
    pub(crate) shape: Shape,
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) recorder: Recorder,
    pub(crate) plugin: Arc<Plugin>,
    pub(crate) node: Arc<Node>,
}

impl LivePod {
    pub(crate) async fn create(
        node: Arc<Node>,
        plugin: Arc<Plugin>,
        shape: Shape,
        name: String,
    ) -> Result<Self> {
        let shape = shape.started_by_default(&plugin.start);
        let recorder = Recorder::start(node.pods(), &name);
        let manifest = shape.manifest(&name, &node.name, &node.image)?;
        let class = manifest.spec.as_ref();
        if let Some(class) = class.and_then(|spec| spec.runtime_class_name.as_ref()) {
            node.have_runtime_class(class).await?;
        }
        let (pods, as_usual) = (node.pods(), PostParams::default());
        let made = match pods.create(&as_usual, &manifest).await {
            // It closes connections that were idle, at the very moment in which one is used for instance.
            Err(kube::Error::Service(_) | kube::Error::HyperError(_)) => {
                pods.create(&as_usual, &manifest).await
            }
            made => made,
        };
        let pod = made.context("the API server refuses the scenario's pod")?;
        Ok(Self {
            uid: pod.uid().context("a created pod without a UID")?,
            shape,
            name,
            recorder,
            plugin,
            node,
        })
    }

    /// A pod that somebody else has made from the shape.
    pub(crate) fn adopt(
        node: Arc<Node>,
        plugin: Arc<Plugin>,
        shape: Shape,
        pod: &Pod,
    ) -> Result<Self> {
        let name = pod.name_any();
        Ok(Self {
            recorder: Recorder::start(node.pods(), &name),
            // A mirror's is its own, not that of the static pod.
            uid: match pod.annotations().get("kubernetes.io/config.hash") {
                Some(hash) => hash.clone(),
                None => pod.uid().context("a pod without a UID")?,
            },
            shape,
            name,
            plugin,
            node,
        })
    }

    /// Waits until inits are through and everything else runs and is ready.
    pub(crate) async fn until_running(&self) -> Result<Snapshot> {
        let running = self
            .recorder
            .until("all containers run", PATIENCE, |snapshot| {
                self.not_running(snapshot)
            })
            .await?;
        self.until_begun().await?;
        Ok(running)
    }

    /// Waits until each container that lasts has written its first line: a busy machine takes its time between making
    /// a process and running it.
    async fn until_begun(&self) -> Result<()> {
        wait::until("all containers have begun", PATIENCE, async || {
            let entries = self.evidence().unwrap_or_default();
            let lasting = self.shape.containers.iter();
            let lasting = lasting.filter(|it| it.kind != Kind::Init);
            Ok(evidence::have_begun(&entries, lasting.map(|it| it.name)))
        })
        .await
    }

    /// The first container that is not as it is in a healthy pod.
    pub(crate) fn not_running(&self, snapshot: &Snapshot) -> Option<String> {
        let mut containers = self.shape.containers.iter();
        if let Some(unhealthy) = containers.find_map(|container| container.unhealthy(snapshot)) {
            return Some(unhealthy);
        }
        if snapshot.phase != "Running" {
            return Some(format!("phase is {}", snapshot.phase));
        }
        (!snapshot.ready).then(|| "the pod is not Ready".to_owned())
    }

    /// Waits until one container runs, whatever the others do.
    pub(crate) async fn until_container_runs(&self, name: &str) -> Result<Snapshot> {
        self.until_state(name, "running").await
    }

    /// Waits until a container's state begins so: `running`, `exit 7`, `waiting`.
    pub(crate) async fn until_state(&self, name: &str, state: &str) -> Result<Snapshot> {
        self.recorder
            .until(
                &format!("{name} is {state}"),
                PATIENCE,
                |snapshot| match snapshot.containers.get(name) {
                    Some(seen) if seen.state.starts_with(state) => None,
                    Some(seen) => Some(format!("{name} is {}", seen.state)),
                    None => Some(format!("{name} has no status")),
                },
            )
            .await
    }

    pub(crate) async fn until_phase(&self, phase: &str) -> Result<Snapshot> {
        self.recorder
            .until(&format!("phase {phase}"), PATIENCE, |snapshot| {
                (snapshot.phase != phase).then(|| format!("phase is {}", snapshot.phase))
            })
            .await
    }

    /// Lets the running instance of a container end with `code`.
    pub(crate) async fn exit(&self, container: &str, code: i32) -> Result<()> {
        let mut fifo = self.until_listening(container).await?;
        writeln!(fifo, "{code}").with_context(|| format!("cannot tell {container} to exit"))
    }

    /// Waits until a container has begun and listens for its exit code.
    pub(crate) async fn until_listening(&self, container: &str) -> Result<File> {
        let what = format!("{container} waits for its exit code");
        wait::until(&what, PATIENCE, async || self.listening(container)).await
    }

    /// What a container that listens for its exit code is told it by; or why there is none, as soon as it is dead.
    pub(crate) fn listening(&self, container: &str) -> Result<std::result::Result<File, String>> {
        let fifo = self.node.evidence_dir(&self.uid).join(container);
        let opened = OpenOptions::new()
            .write(true)
            .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
            .open(&fifo);
        match opened {
            Ok(fifo) => Ok(Ok(fifo)),
            // Nobody has it open for reading.
            Err(error) if error.raw_os_error() == Some(Errno::NXIO.raw_os_error()) => {
                Ok(Err("it is not listening".to_owned()))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Ok(Err("it has not begun".to_owned()))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Changes the pod as `kubectl patch` does, by a strategic merge.
    pub(crate) async fn patch(&self, patch: &Value) -> Result<()> {
        let (pods, params) = (self.node.pods(), PatchParams::default());
        pods.patch(&self.name, &params, &Patch::Strategic(patch))
            .await?;
        Ok(())
    }

    /// Adds an ephemeral container, which does what a regular one does, and waits until it is seen to
    /// run.
    pub(crate) async fn add_ephemeral(&self, name: &'static str) -> Result<()> {
        let container = self
            .shape
            .ephemeral(name, &self.node.name, &self.node.image)?;
        let patch = json!({"spec": {"ephemeralContainers": [container]}});
        self.node
            .pods()
            .patch_ephemeral_containers(
                &self.name,
                &PatchParams::default(),
                &Patch::Strategic(patch),
            )
            .await
            .with_context(|| format!("cannot add the ephemeral container {name}"))?;
        self.until_ephemeral(name, "running").await
    }

    /// Waits until an ephemeral container's state begins so, as `until_state` does for the others.
    pub(crate) async fn until_ephemeral(&self, name: &str, state: &str) -> Result<()> {
        let what = format!("{name} is {state}");
        let missing = |now: &Snapshot| match now.ephemeral.get(name) {
            Some(seen) if seen.state.starts_with(state) => None,
            Some(seen) => Some(format!("{name} is {}", seen.state)),
            None => Some(format!("{name} has no status")),
        };
        self.recorder.until(&what, PATIENCE, missing).await?;
        Ok(())
    }

    pub(crate) fn evidence(&self) -> Result<Vec<Entry>> {
        evidence::read(&self.node.evidence_dir(&self.uid))
    }

    /// What its containers have noted so far, with `say "note WORD"`.
    pub(crate) async fn notes(&self) -> Result<Vec<String>> {
        wait::until("something is noted", PATIENCE, async || {
            let notes = evidence::notes(self.evidence()?);
            let any = !notes.is_empty();
            Ok(any.then_some(notes).ok_or_else(|| "nothing is".to_owned()))
        })
        .await
    }

    /// The evidence as a file, which can be read even after the pod's end.
    pub(crate) fn evidence_file(&self) -> Result<File> {
        evidence::open(&self.node.evidence_dir(&self.uid))
    }

    pub(crate) async fn containers(&self) -> Result<Vec<Container>> {
        self.node.runtime.containers(&self.uid).await
    }

    /// The one sandbox of the pod.
    pub(crate) async fn sandbox(&self) -> Result<String> {
        let mut sandboxes = self.node.runtime.sandboxes(&self.uid).await?;
        ensure!(sandboxes.len() == 1, "sandboxes of the pod: {sandboxes:?}");
        Ok(sandboxes.remove(0))
    }

    /// Poststop hooks of each container in the runtime.
    pub(crate) async fn hooks(&self) -> Result<Vec<(String, Vec<String>)>> {
        let mut hooks = Vec::new();
        for container in self.containers().await? {
            let paths = self.node.runtime.poststop_hooks(&container.id).await?;
            hooks.push((container.name().to_owned(), paths));
        }
        Ok(hooks)
    }

    pub(crate) async fn previous_log(&self, container: &str) -> Result<String> {
        let params = LogParams {
            container: Some(container.to_owned()),
            previous: true,
            ..LogParams::default()
        };
        self.node
            .pods()
            .logs(&self.name, &params)
            .await
            .with_context(|| format!("logs --previous of {container}"))
    }

    pub(crate) async fn events(&self, reason: &str) -> Result<Vec<Event>> {
        let fields = format!("involvedObject.uid={},reason={reason}", self.uid);
        let events = self.node.events();
        Ok(events
            .list(&ListParams::default().fields(&fields))
            .await?
            .items)
    }

    /// Waits until an event for that reason has `what` in its message.
    pub(crate) async fn until_told(&self, reason: &str, what: &str) -> Result<()> {
        let awaited = format!("an event {reason} tells that {what:?}");
        wait::until(&awaited, PATIENCE, async || {
            let events = self.events(reason).await?;
            let messages: Vec<String> = events.into_iter().filter_map(|it| it.message).collect();
            let told = messages.iter().any(|message| message.contains(what));
            Ok(told.then_some(()).ok_or_else(|| messages.join("; ")))
        })
        .await
    }

    /// Waits until no placeholder is left and exactly one instance of each lasting container runs, but for those
    /// that have ended for good.
    pub(crate) async fn until_runtime_is_tidy(&self, ended: &[&str]) -> Result<()> {
        wait::until("the runtime is tidy again", PATIENCE, async || {
            let containers = self.containers().await?;
            let placeholders = containers.iter().any(Container::is_placeholder);
            let created = containers.iter().any(|c| c.state() == State::Created);
            let one_each = self.shape.lasting().all(|wanted| {
                let running = containers
                    .iter()
                    .filter(|c| c.name() == wanted.name && c.state() == State::Running);
                running.count() == usize::from(!ended.contains(&wanted.name))
            });
            Ok(if placeholders || created || !one_each {
                Err(format!("\n{}", describe(&containers)))
            } else {
                Ok(())
            })
        })
        .await
    }

    pub(crate) async fn begin_delete(&self) -> Result<()> {
        self.begin_delete_with(&DeleteParams::default().grace_period(1))
            .await
    }

    /// Asks for deletion and says how long it took until the API server had let go of the pod.
    pub(crate) async fn time_to_delete(&self, params: &DeleteParams) -> Result<Duration> {
        let asked = Instant::now();
        self.begin_delete_with(params).await?;
        self.recorder.until_gone(PATIENCE).await?;
        Ok(asked.elapsed())
    }

    async fn begin_delete_with(&self, params: &DeleteParams) -> Result<()> {
        match self.node.pods().delete(&self.name, params).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            Err(error) => Err(error).context("cannot delete the scenario's pod"),
        }
    }

    /// After deletion: waits until nothing of the pod is in the runtime. The sandbox, containers that have exited, and those
    /// that the kubelet made and could not start are the kubelet's to collect; a placeholder is not, and nothing may still
    /// run.
    pub(crate) async fn until_nothing_is_left(&self) -> Result<()> {
        wait::until_every(CALM, "no live container is left", PATIENCE, async || {
            // The next scenario may have ended the runtime.
            let Ok(mut left) = self.containers().await else {
                return Ok(Err("the runtime is away".to_owned()));
            };
            left.retain(|container| match container.state() {
                State::Exited => container.is_placeholder(),
                State::Created => !container.is_the_kubelets(),
                _ => true,
            });
            Ok(if left.is_empty() {
                Ok(())
            } else {
                Err(format!("\n{}", describe(&left)))
            })
        })
        .await?;
        // Scenarios that kill the kubelet more often than once a minute keep it from collecting, however long they go on.
        loop {
            let kubelet = self.node.kubelet_began()?;
            match self.until_collected().await {
                Err(_) if self.node.kubelet_began()? != kubelet => {}
                collected => return collected,
            }
        }
    }

    async fn until_collected(&self) -> Result<()> {
        let what = "nothing is left in the runtime";
        wait::until_every(CALM, what, COLLECTED, async || {
            let sandboxes = self.node.runtime.sandboxes(&self.uid).await;
            let (Ok(containers), Ok(sandboxes)) = (self.containers().await, sandboxes) else {
                return Ok(Err("the runtime is away".to_owned()));
            };
            Ok(if containers.is_empty() && sandboxes.is_empty() {
                Ok(())
            } else {
                Err(format!(
                    "sandboxes {sandboxes:?}, containers\n{}",
                    describe(&containers)
                ))
            })
        })
        .await
    }

    /// What a person would look at after a failure.
    pub(crate) async fn report(&self) -> String {
        let mut lines = vec![format!("pod {} ({})", self.name, self.uid)];
        let moments = self.recorder.since(0);
        let began = moments.first().map(|moment| moment.at);
        for moment in &moments {
            let at = began.map_or(Duration::ZERO, |began| moment.at - began);
            lines.push(format!("  {:8.3} s {}", at.as_secs_f64(), moment.snapshot));
        }
        lines.push("  in the runtime:".to_owned());
        let containers = self.containers().await.map(|found| describe(&found));
        lines.push(indented(containers));
        lines.push("  evidence:".to_owned());
        let evidence = std::fs::read_to_string(self.node.evidence_dir(&self.uid).join("log"));
        lines.push(indented(evidence.map_err(Into::into)));
        lines.push("  plugin's log:".to_owned());
        let log = self.plugin.log_lines(&self.name);
        lines.push(indented(
            log.map(|log| log[log.len().saturating_sub(40)..].join("\n")),
        ));
        lines.join("\n")
    }
}

fn indented(text: Result<String>) -> String {
    let text = text.unwrap_or_else(|error| format!("{error:#}"));
    text.lines()
        .map(|line| format!("    {line}"))
        .collect::<Vec<_>>()
        .join("\n")
}
