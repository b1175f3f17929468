//! The node that the scenarios run on, as `hack/node.sh up` describes it in its env file.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use anyhow::{Context, Result, ensure};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{ConfigMap, Event, NodeStatus, Pod};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::{ApiResource, DynamicObject};
use kube::{Api, Client, Config, Resource};
use rustix::process::{Pid, Signal, kill_process};
use tokio::task::spawn_blocking;

use crate::runtime::Runtime;
use crate::skipped::Skipped;

const NAMESPACE: &str = "default";

/// What `node.status.declaredFeatures` calls the kubelet's own restart of all containers.
pub(crate) const NATIVE: &str = "RestartAllContainersOnContainerExits";

/// In the order in which they need each other.
const CONTROL_PLANE: [&str; 3] = ["etcd", "apiserver", "controller-manager"];

pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) plugin_kubeconfig: PathBuf,
    pub(crate) cri_endpoint: String,
    pub(crate) nri_socket: PathBuf,
    pub(crate) static_pod_path: PathBuf,
    pub(crate) image: String,
    /// The same but for a file, `/other`.
    pub(crate) other_image: String,
    /// Where its controller, its agent and its definition are, if they are built.
    pub(crate) jobset: PathBuf,
    pub(crate) runtime: Runtime,
    /// `containerd` or `crio`.
    pub(crate) runtime_name: String,
    dir: PathBuf,
    /// containerd's own client.
    ctr: Option<PathBuf>,
    kubectl: PathBuf,
    kubeconfig: PathBuf,
    client: Client,
    /// Of the kubelet's version: 37 of 1.37.2.
    kubelet_minor: u32,
}

impl Node {
    pub(crate) async fn read(env_file: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(env_file)
            .with_context(|| format!("cannot read the node's env file {}", env_file.display()))?;
        let env: HashMap<&str, &str> = text
            .lines()
            .filter_map(|line| line.split_once('='))
            .map(|(key, value)| (key.trim_start_matches("export ").trim(), unquoted(value)))
            .collect();
        let get = |key: &str| {
            env.get(key)
                .map(|value| (*value).to_owned())
                .with_context(|| format!("{} has no {key}", env_file.display()))
        };
        let dir = PathBuf::from(get("NODE_DIR")?);
        let kubeconfig = PathBuf::from(get("KUBECONFIG")?);
        let config = Config::from_custom_kubeconfig(
            Kubeconfig::read_from(&kubeconfig)?,
            &KubeConfigOptions::default(),
        )
        .await?;
        let cri_endpoint = get("CRI_ENDPOINT")?;
        let client = Client::try_from(config)?;
        let name = get("NODE_NAME")?;
        Ok(Self {
            kubelet_minor: kubelet_minor(&client, &name).await?,
            name,
            runtime: Runtime::new(&cri_endpoint)?,
            cri_endpoint,
            nri_socket: get("NRI_SOCKET")?.into(),
            static_pod_path: get("STATIC_POD_PATH")?.into(),
            image: get("BUSYBOX_IMAGE")?,
            kubectl: get("KUBECTL")?.into(),
            kubeconfig,
            other_image: get("OTHER_IMAGE")?,
            jobset: get("JOBSET")?.into(),
            dir,
            runtime_name: get("RUNTIME")?,
            ctr: get("CTR").ok().map(Into::into),
            plugin_kubeconfig: get("PLUGIN_KUBECONFIG")?.into(),
            client,
        })
    }

    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    pub(crate) fn config_maps(&self) -> Api<ConfigMap> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    /// Jobs, Services and whatever else there is in the scenarios' namespace.
    pub(crate) fn objects<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    /// The same for a kind that is known at run time only.
    pub(crate) fn objects_of(&self, kind: &ApiResource) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), NAMESPACE, kind)
    }

    /// Makes a `RuntimeClass` for the runtime handler of the same name, which stays with the node.
    pub(crate) async fn have_runtime_class(&self, name: &str) -> Result<()> {
        let class = RuntimeClass {
            handler: name.to_owned(),
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                ..ObjectMeta::default()
            },
            ..RuntimeClass::default()
        };
        let classes: Api<RuntimeClass> = Api::all(self.client.clone());
        match classes.create(&PostParams::default(), &class).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
            Err(error) => Err(error).with_context(|| format!("cannot make RuntimeClass {name}")),
        }
    }

    /// Whether the kubelet says that it has a feature.
    pub(crate) async fn declares(&self, feature: &str) -> Result<bool> {
        let declared = self.status().await?.declared_features;
        Ok(declared.is_some_and(|declared| declared.iter().any(|it| it == feature)))
    }

    /// Whether the kubelet acts on rules with action `Restart`, which it does not declare: from 1.35 on.
    pub(crate) fn has_container_rules(&self) -> bool {
        self.kubelet_minor >= 35
    }

    /// Whether the kubelet mounts images as volumes (`ImageVolume`) unless it is told not to: from 1.35 on.
    pub(crate) fn mounts_images(&self) -> bool {
        self.kubelet_minor >= 35
    }

    /// Whether the kubelet runs no init container while a regular one is there, an exited one as well: from 1.37 on.
    pub(crate) fn is_initialised_by_exited(&self) -> bool {
        self.kubelet_minor >= 37
    }

    /// Whether `EventedPLEG` only makes the kubelet relist sooner (`pkg/kubelet/pleg/evented.go`): from 1.37 on.
    pub(crate) fn relists_on_events(&self) -> bool {
        self.kubelet_minor >= 37
    }

    /// What the node consists of.
    pub(crate) async fn versions(&self) -> Result<String> {
        let info = self.status().await?.node_info;
        let info = info.context("a node without its kubelet")?;
        let server = self.client.apiserver_version().await?.git_version;
        let runtime = info.container_runtime_version.replace("://", " ");
        let [kubelet, server] =
            [&info.kubelet_version, &server].map(|version| version.trim_start_matches('v'));
        Ok(format!("kubelet {kubelet}, API server {server}, {runtime}"))
    }

    pub(crate) async fn status(&self) -> Result<NodeStatus> {
        status(&self.client, &self.name).await
    }

    pub(crate) fn events(&self) -> Api<Event> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    /// The emptyDir `ev` of a pod, as the host sees it.
    pub(crate) fn evidence_dir(&self, pod_uid: &str) -> PathBuf {
        self.pod_dir(pod_uid)
            .join("volumes/kubernetes.io~empty-dir/ev")
    }

    /// The `/etc/hosts` of a pod.
    pub(crate) fn hosts_file(&self, pod_uid: &str) -> PathBuf {
        self.pod_dir(pod_uid).join("etc-hosts")
    }

    /// What the kubelet keeps of a pod.
    fn pod_dir(&self, pod_uid: &str) -> PathBuf {
        self.dir.join("kubelet/pods").join(pod_uid)
    }

    /// From now on a probe of the pod fails that looks for this file.
    pub(crate) fn make_sick(&self, pod_uid: &str) -> Result<()> {
        std::fs::write(self.evidence_dir(pod_uid).join("sick"), "")?;
        Ok(())
    }

    /// `kubectl VERB` what a file, of the repository unless it says otherwise, describes, as an administrator.
    pub(crate) async fn kubectl(&self, verb: &[&str], file: impl AsRef<Path>) -> Result<()> {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        let mut command = Command::new(&self.kubectl);
        command.arg("--kubeconfig").arg(&self.kubeconfig);
        command.args(verb).arg("--filename").arg(file);
        succeeds(command).await
    }

    /// kubectl with these arguments, as somebody runs it who has installed the plugin for it.
    pub(crate) fn kubectl_with_plugin(&self, plugins: &Path, args: &[&str]) -> Command {
        let mut command = Command::new(&self.kubectl);
        let path = std::env::var_os("PATH").unwrap_or_default();
        let dirs = [plugins.to_owned()]
            .into_iter()
            .chain(std::env::split_paths(&path));
        // Paths of directories that exist have no colon in them.
        command.env("PATH", std::env::join_paths(dirs).unwrap_or(path.clone()));
        command.env("KUBECONFIG", &self.kubeconfig).args(args);
        command
    }

    /// How an administrator finds the API server.
    pub(crate) fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Whatever kind it is of, in its namespace.
    pub(crate) fn objects_in<K>(&self, namespace: &str) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// The same for what is in none.
    pub(crate) fn objects_of_cluster<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = ()>,
    {
        Api::all(self.client.clone())
    }

    /// What speaks to the API server with the plugin's rights.
    pub(crate) async fn client_of_plugin(&self) -> Result<Client> {
        let kubeconfig = Kubeconfig::read_from(&self.plugin_kubeconfig)?;
        let options = KubeConfigOptions::default();
        let config = Config::from_custom_kubeconfig(kubeconfig, &options).await?;
        Ok(Client::try_from(config)?)
    }

    /// Gives an image that name, too; another loses it.
    pub(crate) async fn name_image(&self, image: &str, name: &str) -> Result<()> {
        let socket = self.cri_endpoint.trim_start_matches("unix://");
        let ctr = self.ctr.as_ref();
        let ctr = ctr.ok_or(Skipped("only containerd's client names images"))?;
        let mut command = Command::new(ctr);
        command.args([
            "--address",
            socket,
            "--namespace",
            "k8s.io",
            "images",
            "tag",
            "--force",
        ]);
        command.args([image, name]);
        succeeds(command).await
    }

    /// Where the kubelet looks for plugins. The other way, to register with it, is in a place that all kubelets of a
    /// machine share.
    pub(crate) fn kubelet_plugins(&self) -> PathBuf {
        self.dir.join("kubelet/plugins_registry")
    }

    pub(crate) fn kubelet_kubeconfig(&self) -> PathBuf {
        self.dir.join("kubelet.kubeconfig")
    }

    /// The API server's certificate and key are there.
    pub(crate) fn pki(&self) -> PathBuf {
        self.dir.join("pki")
    }

    /// Its pods reach the machine at that one, too.
    pub(crate) async fn address(&self) -> Result<String> {
        let addresses = self.status().await?.addresses.unwrap_or_default();
        let mut internal = addresses.into_iter().filter(|it| it.type_ == "InternalIP");
        Ok(internal
            .next()
            .context("a node without an address")?
            .address)
    }

    /// Files of the node that have a token or a private key in them.
    pub(crate) fn secrets(&self) -> Result<Vec<PathBuf>> {
        let mut secrets = Vec::new();
        for dir in [self.dir.clone(), self.pki()] {
            for file in std::fs::read_dir(&dir).with_context(|| dir.display().to_string())? {
                let file = file?.path();
                let kind = file.extension().and_then(|it| it.to_str());
                if matches!(kind, Some("kubeconfig" | "key" | "csv")) {
                    secrets.push(file);
                }
            }
        }
        Ok(secrets)
    }

    pub(crate) fn is_crio(&self) -> bool {
        self.runtime_name == "crio"
    }

    /// What containerd is started with.
    pub(crate) fn containerd_config(&self) -> PathBuf {
        self.dir.join("containerd.toml")
    }

    /// Where the runtime looks for CDI specifications.
    pub(crate) fn cdi_dir(&self) -> PathBuf {
        self.dir.join("cdi")
    }

    /// Whether containers under runc can have users of their own.
    pub(crate) async fn has_user_namespaces(&self) -> Result<bool> {
        let handlers = self.status().await?.runtime_handlers;
        let mut features = handlers.into_iter().flatten().filter_map(|it| it.features);
        Ok(features.any(|it| it.user_namespaces == Some(true)))
    }

    /// Ends the kubelet and starts it so that it does or does not give whole cores away. It refuses the state that the
    /// other has left.
    pub(crate) async fn with_exclusive_cpus(&self, exclusive: bool) -> Result<()> {
        let kubelets = ["kubelet", "kubelet-exclusive-cpus"];
        self.script("kill", kubelets[usize::from(!exclusive)])
            .await?;
        std::fs::remove_file(self.dir.join("kubelet/cpu_manager_state"))?;
        self.script("start", kubelets[usize::from(exclusive)]).await
    }

    /// Where `kubelet-other-runtime` looks for its runtime.
    pub(crate) fn other_runtime_socket(&self) -> PathBuf {
        self.dir.join("other-runtime.sock")
    }

    /// Where `kubelet-shutdown` looks for whoever says that the machine shuts down.
    pub(crate) fn login_manager_socket(&self) -> PathBuf {
        self.dir.join("logind.sock")
    }

    /// Puts one way to run the kubelet in the place of another.
    pub(crate) async fn swap_kubelet(&self, from: &str, to: &str) -> Result<()> {
        self.script("kill", from).await?;
        self.script("start", to).await
    }

    /// SIGKILL for a component.
    pub(crate) fn kill(&self, component: &str) -> Result<()> {
        self.signal(component, Signal::KILL)
    }

    /// In the moment of the call: `hack/node.sh kill` takes its time.
    pub(crate) fn signal(&self, component: &str, signal: Signal) -> Result<()> {
        kill_process(self.pid(component)?, signal)
            .with_context(|| format!("cannot send {signal:?} to the {component}"))
    }

    /// Starts what a scenario left dead, and complains of it: all that follow would fail by it.
    pub(crate) async fn must_be_well(&self) -> Result<()> {
        let mut dead = Vec::new();
        let of_node = [&*self.runtime_name, "kubelet"];
        for component in CONTROL_PLANE.into_iter().chain(of_node) {
            if !self.is_alive(component)? {
                let log = self.log(component);
                let end: Vec<&str> = log.lines().rev().take(10).collect();
                let end: Vec<&str> = end.into_iter().rev().collect();
                dead.push(format!("{component} has ended:\n{}", end.join("\n")));
                self.script("start", component).await?;
            }
        }
        ensure!(dead.is_empty(), "{}", dead.join("\n"));
        Ok(())
    }

    /// All that a component has written, also before it was started anew.
    pub(crate) fn log(&self, component: &str) -> String {
        std::fs::read_to_string(self.log_file(component)).unwrap_or_default()
    }

    pub(crate) fn log_file(&self, component: &str) -> PathBuf {
        self.dir.join("log").join(component).with_extension("log")
    }

    fn is_alive(&self, component: &str) -> Result<bool> {
        let pid = self.pid(component)?;
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid()));
        let state = stat.as_deref().ok().and_then(|stat| stat.rsplit_once(") "));
        Ok(state.is_some_and(|(_, rest)| !rest.starts_with('Z')))
    }

    /// The runtime, and what looks after each of its containers: that is told where the runtime is, or its directory.
    pub(crate) fn runtime_pids(&self) -> Result<Vec<i32>> {
        let mut pids = vec![self.pid(&self.runtime_name)?.as_raw_pid()];
        let (program, place) = match &*self.runtime_name {
            "crio" => ("conmon", "crio/"),
            _ => ("shim", "containerd.sock"),
        };
        let place = self.dir.join(place);
        for entry in std::fs::read_dir("/proc")? {
            let entry = entry?;
            // Not all are processes, and those that are may end.
            let Some(pid) = entry.file_name().to_str().and_then(|it| it.parse().ok()) else {
                continue;
            };
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line);
            let is_its = line
                .split('\0')
                .next()
                .is_some_and(|it| it.contains(program));
            if is_its && line.contains(&*place.to_string_lossy()) {
                pids.push(pid);
            }
        }
        Ok(pids)
    }

    /// When the kubelet that runs, of whichever kind, was started.
    pub(crate) fn kubelet_began(&self) -> Result<SystemTime> {
        let mut began = SystemTime::UNIX_EPOCH;
        for entry in std::fs::read_dir(self.dir.join("run"))? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with("kubelet") && name.ends_with(".pid") {
                began = began.max(path.metadata()?.modified()?);
            }
        }
        Ok(began)
    }

    fn pid(&self, component: &str) -> Result<Pid> {
        let path = self.dir.join("run").join(component).with_extension("pid");
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        // When the process began follows.
        let pid = text.split(' ').next().unwrap_or_default().parse()?;
        Pid::from_raw(pid).context("no process has the id 0")
    }

    /// Starts a component that was killed, as soon as it is gone.
    pub(crate) async fn start_again(&self, component: &str) -> Result<()> {
        // Waits for its end even if it is dying already.
        self.script("kill", component).await?;
        self.script("start", component).await
    }

    /// What pods may ask for, in thousandths of a core.
    pub(crate) async fn allocatable_millicpus(&self) -> Result<u64> {
        let allocatable = self.status().await?.allocatable;
        let cpus = allocatable.as_ref().and_then(|all| all.get("cpu"));
        let cpus = &cpus.context("a node without processors")?.0;
        Ok(match cpus.strip_suffix('m') {
            Some(millis) => millis.parse()?,
            None => cpus.parse::<u64>()? * 1000,
        })
    }

    /// `hack/node.sh ACTION NAME COMPONENT`, for scenarios in which a part of the node ends.
    pub(crate) async fn script(&self, action: &str, component: &str) -> Result<()> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("hack/node.sh");
        let mut command = Command::new(script);
        command.args([action, &self.name, component]);
        succeeds(command).await
    }

    /// Whatever the runtime is doing.
    pub(crate) async fn restart_runtime(&self) -> Result<()> {
        self.script("kill", &self.runtime_name).await?;
        self.script("start", &self.runtime_name).await
    }
}

async fn succeeds(mut command: Command) -> Result<()> {
    let what = format!("{command:?}");
    let output = spawn_blocking(move || command.output())
        .await?
        .with_context(|| format!("cannot run {what}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    // The reason comes last; a summary shows the first line.
    let reason = said.lines().last().unwrap_or_default();
    ensure!(
        output.status.success(),
        "{what}: {}: {reason}\n{said}",
        output.status
    );
    Ok(())
}

async fn status(client: &Client, node: &str) -> Result<NodeStatus> {
    let nodes: Api<k8s_openapi::api::core::v1::Node> = Api::all(client.clone());
    Ok(nodes.get_status(node).await?.status.unwrap_or_default())
}

async fn kubelet_minor(client: &Client, node: &str) -> Result<u32> {
    let info = status(client, node).await?.node_info;
    let version = info.context("a node without its kubelet")?.kubelet_version;
    let minor = version.split('.').nth(1);
    Ok(minor.context("a kubelet without a version")?.parse()?)
}

fn unquoted(value: &str) -> &str {
    value.trim().trim_matches(|c| c == '\'' || c == '"')
}
