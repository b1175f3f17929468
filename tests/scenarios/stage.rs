//! What a scenario is given: a node, a plugin, and pods that are cleared away behind it.

use std::path::PathBuf;
use std::process::Output;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::core::{ApiResource, DynamicObject};
use kube::{Resource, ResourceExt};
use serde_json::Value;
use tokio::process::Command;

use crate::evidence::Deed;
use crate::node::Node;
use crate::plugin::Plugin;
use crate::pod::LivePod;
use crate::recorder::Snapshot;
use crate::shape::Shape;
use crate::skipped::Skipped;
use crate::wait::{self, PATIENCE};

/// A host name has 63 characters at most, and the pod's is its own, or that of what makes it with more at the end.
const LONGEST_NAME: usize = 50;

static NAMES_MADE: AtomicU32 = AtomicU32::new(0);

#[derive(Clone)]
pub(crate) struct Stage {
    pub(crate) node: Arc<Node>,
    pub(crate) plugin: Arc<Plugin>,
    scenario: String,
    pods: Arc<Mutex<Vec<Arc<LivePod>>>>,
    /// Of static pods.
    manifests: Arc<Mutex<Vec<PathBuf>>>,
    objects: Arc<Mutex<Vec<(ApiResource, String)>>>,
}

impl Stage {
    pub(crate) fn new(node: Arc<Node>, plugin: Arc<Plugin>, scenario: &str) -> Self {
        Self {
            node,
            plugin,
            scenario: scenario.to_owned(),
            pods: Arc::default(),
            manifests: Arc::default(),
            objects: Arc::default(),
        }
    }

    /// A name that tells of the scenario and that no other object has.
    pub(crate) fn name(&self) -> String {
        let suffix = format!(
            "-{}-{:04}",
            std::process::id(),
            NAMES_MADE.fetch_add(1, Ordering::Relaxed)
        );
        let mut name = self.scenario.replace('_', "-");
        name.truncate(LONGEST_NAME - suffix.len());
        name.trim_end_matches('-').to_owned() + &suffix
    }

    /// `reprise restart` by an administrator.
    pub(crate) async fn ask_for_restart(&self, args: &[&str]) -> Result<Output> {
        let mut command = Command::new(&self.plugin.binary);
        command.arg("restart").args(args).args(["-n", "default"]);
        command.arg("--kubeconfig").arg(self.node.kubeconfig());
        Ok(command.output().await?)
    }

    /// A pod of that shape, created and no more.
    pub(crate) async fn pod(&self, shape: Shape) -> Result<Arc<LivePod>> {
        self.replays_if_asked(&shape)?;
        let name = self.name();
        let node = Arc::clone(&self.node);
        let plugin = Arc::clone(&self.plugin);
        let pod = Arc::new(LivePod::create(node, plugin, shape, name).await?);
        lock(&self.pods).push(Arc::clone(&pod));
        Ok(pod)
    }

    fn replays_if_asked(&self, shape: &Shape) -> Result<()> {
        if self.node.is_crio() && shape.asks_for_replay() {
            bail!(Skipped("nothing is replayed on CRI-O"));
        }
        Ok(())
    }

    /// A pod of that shape, all of it running.
    pub(crate) async fn running(&self, shape: Shape) -> Result<Arc<LivePod>> {
        let pod = self.pod(shape).await?;
        pod.until_running().await?;
        Ok(pod)
    }

    /// A Job, a Service or their like. At the end it is deleted with all that was made for it.
    pub(crate) async fn create<K>(&self, manifest: Value) -> Result<()>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        self.create_of(ApiResource::erase::<K>(&()), manifest).await
    }

    /// The same for a kind that is known at run time only.
    pub(crate) async fn create_of(&self, kind: ApiResource, manifest: Value) -> Result<()> {
        let object: DynamicObject = serde_json::from_value(manifest)?;
        let objects = self.node.objects_of(&kind);
        let made = objects.create(&PostParams::default(), &object).await;
        let made = made.context("the API server refuses the scenario's object")?;
        lock(&self.objects).push((kind, made.name_any()));
        Ok(())
    }

    /// At the end it is deleted as well, though whatever made it goes: the garbage collector may take its time to hear of
    /// objects of that kind.
    pub(crate) fn takes_along<K>(&self, name: String)
    where
        K: Resource<DynamicType = ()>,
    {
        lock(&self.objects).push((ApiResource::erase::<K>(&()), name));
    }

    /// The pod with that label, which a controller is to make from the shape, all of it running.
    pub(crate) async fn adopt(&self, shape: Shape, label: &str) -> Result<Arc<LivePod>> {
        let pods = self.node.pods();
        let selected = ListParams::default().labels(label);
        let pod = wait::until("a controller makes a pod", PATIENCE, async || {
            let pod = pods.list(&selected).await?.items.pop();
            Ok(pod.ok_or_else(|| "none".to_owned()))
        })
        .await?;
        self.takes_charge_of(shape, &pod).await
    }

    /// A static pod of that shape, all of it running: the kubelet makes it from a manifest, and the API server has its
    /// mirror.
    pub(crate) async fn static_pod(&self, shape: Shape) -> Result<(Arc<LivePod>, PathBuf)> {
        self.replays_if_asked(&shape)?;
        let name = self.name();
        let shape = shape.started_by_default(&self.plugin.start);
        let mut manifest = shape.manifest(&name, &self.node.name, &self.node.image)?;
        if let Some(spec) = &mut manifest.spec {
            spec.node_name = None;
        }
        let file = self.node.static_pod_path.join(format!("{name}.json"));
        // The kubelet reads it as soon as it is there, so it must be there as a whole.
        let whole = file.with_file_name(format!(".{name}.json"));
        std::fs::write(&whole, serde_json::to_vec(&manifest)?)?;
        std::fs::rename(&whole, &file)?;
        lock(&self.manifests).push(file.clone());
        let pods = self.node.pods();
        let mirror = format!("{name}-{}", self.node.name);
        let pod = wait::until("the static pod has a mirror", PATIENCE, async || {
            let pod = pods.get_opt(&mirror).await?;
            Ok(pod.ok_or_else(|| "none".to_owned()))
        })
        .await?;
        Ok((self.takes_charge_of(shape, &pod).await?, file))
    }

    /// A pod that others made, once all of it runs.
    async fn takes_charge_of(&self, shape: Shape, pod: &Pod) -> Result<Arc<LivePod>> {
        let node = Arc::clone(&self.node);
        let plugin = Arc::clone(&self.plugin);
        let pod = Arc::new(LivePod::adopt(node, plugin, shape, pod)?);
        lock(&self.pods).push(Arc::clone(&pod));
        pod.until_running().await?;
        Ok(pod)
    }

    /// All pods of the scenario, as they are now.
    pub(crate) async fn report(&self) -> String {
        let mut reports = Vec::new();
        for pod in self.all() {
            reports.push(pod.report().await);
        }
        if reports.is_empty() {
            let found = self.report_of_node().await;
            reports.push(found.unwrap_or_else(|error| format!("  {error:#}")));
        }
        reports.join("\n")
    }

    /// Of a scenario whose pods others have made.
    async fn report_of_node(&self) -> Result<String> {
        let pods = self.node.pods().list(&ListParams::default()).await?;
        let pods = pods
            .items
            .iter()
            .map(|pod| format!("  {}: {}", pod.name_any(), Snapshot::from(pod)));
        let log = self.plugin.last_lines(60)?;
        let log = log.lines().map(|line| format!("    {line}"));
        let heading = ["  plugin's log:".to_owned()];
        Ok(pods
            .chain(heading)
            .chain(log)
            .collect::<Vec<_>>()
            .join("\n"))
    }

    /// Asked at the end of every scenario, whatever it was about.
    pub(crate) fn no_container_ran_twice_at_once(&self) -> Result<()> {
        for pod in self.all() {
            // A pod that has come to nothing, or is deleted already, has none.
            let evidence = pod.evidence().unwrap_or_default();
            let doubled = evidence.iter().find(|entry| entry.deed == Deed::Doubled);
            ensure!(
                doubled.is_none(),
                "{} began while another instance of it was alive: {doubled:?}",
                pod.name
            );
        }
        Ok(())
    }

    /// Whatever made pods goes first, with them, or it would make others.
    pub(crate) async fn begin_delete(&self) -> Result<()> {
        for manifest in lock(&self.manifests).drain(..) {
            // The scenario may have been about that.
            let _ = std::fs::remove_file(manifest);
        }
        let objects = lock(&self.objects).clone();
        for (kind, name) in objects {
            let objects = self.node.objects_of(&kind);
            match objects.delete(&name, &DeleteParams::foreground()).await {
                // With what it was made for.
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                deleted => {
                    deleted.with_context(|| format!("cannot delete the {} {name}", kind.kind))?;
                }
            }
        }
        for pod in self.all() {
            pod.begin_delete().await?;
        }
        Ok(())
    }

    pub(crate) async fn delete_pods(&self) -> Result<()> {
        self.begin_delete().await?;
        self.until_gone().await
    }

    /// The API server has let go of all pods.
    async fn until_gone(&self) -> Result<()> {
        for pod in self.all() {
            pod.recorder.until_gone(PATIENCE).await?;
        }
        Ok(())
    }

    pub(crate) async fn until_nothing_is_left(&self) -> Result<()> {
        self.until_gone().await?;
        for pod in self.all() {
            pod.until_nothing_is_left().await?;
        }
        Ok(())
    }

    fn all(&self) -> Vec<Arc<LivePod>> {
        lock(&self.pods).clone()
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
