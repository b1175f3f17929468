//! Wires the rooms together and runs them.

mod exits;
mod plugin;
mod registry;
mod removal;
mod sole;
mod stops;
mod stranded;

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use futures::future::OptionFuture;
use nri::{Launched, NriError, Stub};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::{sleep, timeout};

use crate::clock::Clock;
use crate::config::{Config, ConfigError, CriEndpoint, HookPlace};
use crate::cri::{self, Containerd, CriError, process};
use crate::dirs;
use crate::driver::turns::Turns;
use crate::driver::{Readers, Starts, Tools};
use crate::exit_hold::holder::HolderArgs;
use crate::exit_hold::{
    Hold, HookCopies, HookDirError, HookPathError, Keeper, Server, ServerError, check_hook_copy,
    check_hook_path,
};
use crate::kube::{
    self, Conditions, Declaration, Endings, Events, KubeError, KubeletFeatures, PodChange, Pods,
    StaticPods,
};
use crate::metrics::{self, Health, Metrics};
use crate::node::OLDEST_LIST;
use crate::records::{Records, RecordsError};
use crate::report::Reporter;
use crate::reset::{self, Resets};
use crate::restart::machine::Record;
use crate::restart::pod::{Gate, Shared};
use exits::{Listens, Waited};
pub(crate) use plugin::{Parts, Reprise};
pub(crate) use registry::Registry;
pub use removal::{RemovalError, clean_all_nodes, clean_node, clean_node_for_good};
pub use sole::LockError;
use sole::Sole;

/// Between two tries of a runtime that is away.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Between two tries to open the hooks' socket.
const SOCKET_INTERVAL: Duration = Duration::from_secs(5);
/// How often the runtime's lists are looked at while a pod restarts, whatever is told.
const LOOK_INTERVAL: Duration = Duration::from_secs(30);
/// Between two looks for the socket of a runtime that is starting.
const LAUNCH_INTERVAL: Duration = Duration::from_millis(100);

/// Why the plugin could not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The runtime handed over a configuration that cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// There is no runtime's socket.
    #[error("no container runtime at {0}: start it, or say where it listens with --cri-endpoint")]
    NoRuntime(String),
    /// The runtime's CRI cannot be used at all.
    #[error(transparent)]
    Cri(#[from] CriError),
    /// The API server's address cannot be used at all.
    #[error(transparent)]
    Kube(#[from] KubeError),
    /// The runtime's NRI cannot be used.
    #[error(transparent)]
    Nri(#[from] NriError),
    /// The hook's socket cannot be opened.
    #[error(transparent)]
    Hook(#[from] ServerError),
    /// The runtime cannot run the hook.
    #[error(transparent)]
    HookPath(#[from] HookPathError),
    /// The hook cannot be put where the runtime is to find it.
    #[error(transparent)]
    HookDir(#[from] HookDirError),
    /// The records of restarts cannot be kept.
    #[error(transparent)]
    Records(#[from] RecordsError),
    /// The directories are another plugin's.
    #[error(transparent)]
    Lock(#[from] LockError),
}

/// Whether another plugin is to be expected when this one has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// What is left is for it.
    ForNow,
    /// The node is to be without: [`clean_node`] is due.
    ForGood,
}

/// Runs the plugin until `shutdown`, or until the runtime that launched it goes away.
///
/// On `shutdown` what is being started is waited for. The hooks' connections end with the process: they wait for a
/// successor as after a crash, and restarts under way stay on disk for it.
pub async fn run(
    config: Config,
    launched: Option<Launched>,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<End, RunError> {
    let was_launched = launched.is_some();
    let (plugin, configuration) = Reprise::new();
    let plugin = Arc::new(plugin);
    let stub = stub(Arc::clone(&plugin), &config, launched)?;
    let (taken_over, is_taken_over) = oneshot::channel();
    let work = async {
        let config = if was_launched {
            // Never given only if the connection ends first, and with it this process.
            let text = configuration.await.unwrap_or_default();
            config.merge_nri_config(&text)?
        } else {
            config.clone()
        };
        work(&config, was_launched, &plugin, taken_over).await
    };
    let for_good = AtomicBool::new(false);
    let shutdown = async {
        shutdown.await;
        // The runtime goes on asking this plugin meanwhile.
        if removal::is_under_way(&config).await {
            for_good.store(true, Ordering::Relaxed);
            plugin.finish().await;
        }
        plugin.end().await;
    };
    let serve = async {
        let mut shutdown = std::pin::pin!(shutdown);
        if !was_launched {
            tokio::select! {
                () = shutdown.as_mut() => return Ok(()),
                // Not sent only if the work failed, which ends everything.
                _ = is_taken_over => {}
            }
        }
        stub.run(shutdown).await
    };
    tokio::select! {
        result = work => result?,
        result = serve => result?,
    }
    Ok(if for_good.load(Ordering::Relaxed) {
        End::ForGood
    } else {
        End::ForNow
    })
}

/// Sets everything up and runs it, beside the NRI connection. Ends only on an error. `taken_over` hears when
/// what a predecessor left is in our hands.
async fn work(
    config: &Config,
    was_launched: bool,
    plugin: &Reprise,
    taken_over: oneshot::Sender<()>,
) -> Result<(), RunError> {
    let health = plugin.health();
    // Before anything is touched that another plugin may be at work with.
    let (sole, mut waited) = alone(config, &health).await?;
    let listens = waited.takes_over();
    let endpoint = cri_endpoint(&config.cri_endpoints, was_launched).await?;
    let cri = cri::Client::connect(&endpoint.to_string())?;
    health.found(cri.clone());
    let client = kube::connect(config.kubeconfig.as_deref()).await?;
    let (state_dir, run_dir) = (config.state_dir.clone(), config.run_dir.clone());
    let dirs = [&*config.state_dir, &*config.run_dir];
    let opened = dirs::answer(dirs, move || {
        let records = Records::open(&state_dir, &run_dir)?;
        let (left, pasts) = (records.load(), records.pasts());
        Ok::<_, RecordsError>((records, left, pasts))
    });
    let (records, left, pasts) = opened.await?;
    if client.is_none() {
        tracing::info!("no API server: pods are known by what the runtime tells of them");
    }
    let node = config.node_name.as_str();
    let events = client.clone().map(|client| Events::new(client, node));
    let conditions = client.clone().map(Conditions::new);
    let hook_socket = config.run_dir.join(removal::HOOK_SOCKET);
    let runtime = runtime(&cri).await;
    let hold = hold(&runtime, &cri, endpoint, &hook_socket, health.metrics()).await;
    let (hook, copies) = match hold {
        Hold::Hook => hook(config, endpoint).await?,
        Hold::Holder(_) | Hold::Nothing => (None, None),
    };
    let is_crio = matches!(runtime, Runtime::Crio);
    let containerd = match runtime {
        Runtime::Containerd(containerd) => Some(*containerd),
        Runtime::Crio | Runtime::Other => None,
    };
    let tools = Arc::new(Tools {
        cri,
        containerd: containerd.clone(),
        hold,
        records: records.clone(),
        reporter: Reporter::new(events.clone(), conditions, Arc::clone(health.metrics())),
        metrics: Arc::clone(health.metrics()),
        endings: client.clone().map(Endings::new),
        static_pods: StaticPods::new(&config.static_pod_path, node),
        readers: Readers::default(),
        starts: Starts::default(),
        clock: Clock::default(),
        shared: Arc::new(shared(config, plugin.gate(), is_crio)),
        turns: Turns::of(cores()),
    });
    let missed = Arc::new(Notify::new());
    follow_holds(&tools.hold, &missed);
    let declaration = client.clone().map(|client| {
        let declaration = Declaration::new(client, node, config.declare_features);
        Arc::new(declaration)
    });
    let registry = match client.zip(events).zip(declaration.clone()) {
        Some(((client, events), declaration)) => {
            let (beside, news) = reset::news(config.hard_reset.clone());
            let (pods, changes) = Pods::watch(client.clone(), node, beside);
            begin_resets(config, tools.cri.clone(), events, news).await?;
            let registry = Arc::new(Registry::new(tools, pods, pasts));
            let features = kube::watch_features(client, node, declaration);
            tokio::spawn(follow_pods(
                Arc::clone(&registry),
                changes,
                Arc::clone(&missed),
            ));
            tokio::spawn(follow_features(Arc::clone(&registry), features));
            registry
        }
        None => Arc::new(Registry::new(tools, Pods::default(), pasts)),
    };
    waited.follow(containerd);
    plugin.begin(Parts {
        registry: Arc::clone(&registry),
        declaration,
        records,
        hook,
        copies,
        hook_socket: hook_socket.clone(),
        missed: Arc::clone(&missed),
    });
    // Whoever holds must know what it holds: until then a predecessor's hooks find no socket and try again.
    relist(&registry, left).await;
    waited.tell(Arc::clone(&registry), Arc::clone(&missed));
    health.synchronised();
    let hooks = Server::bind(&hook_socket)?;
    tokio::spawn(serve_hooks(
        hooks,
        hook_socket,
        Arc::clone(&registry),
        sole,
        health,
    ));
    OptionFuture::from(listens.map(Listens::by_now)).await;
    // Nobody listens if the runtime launched this plugin: it could not wait.
    let _ = taken_over.send(());
    loop {
        until_look(&registry, &missed).await;
        relist(&registry, Vec::new()).await;
    }
}

/// The right to the directories, which a successor may wait for as long as the other plugin is at work: whoever asks for its
/// health meanwhile is told so.
async fn alone(config: &Config, health: &Arc<Health>) -> Result<(Sole, Waited), LockError> {
    if let Some(address) = config.listen {
        metrics::serve_beside(address, Arc::clone(health));
    }
    let mut waited = Waited::default();
    let waits = || {
        health.waits();
        waited.goes_on(config);
    };
    let sole = Sole::of(config, config.wait, waits).await?;
    health.is_alone();
    Ok((sole, waited))
}

/// Until something may have been missed. A runtime that has just come back does not tell of everything: of a sandbox that is
/// stopped while it takes in plugins, for one.
async fn until_look(registry: &Registry, missed: &Notify) {
    while timeout(LOOK_INTERVAL, missed.notified()).await.is_err() {
        if registry.may_have_missed() {
            return;
        }
    }
}

/// Where the hook is, which the runtime can run there, and the copies beside it if this process has put it there.
async fn hook(
    config: &Config,
    endpoint: &CriEndpoint,
) -> Result<(Option<PathBuf>, Option<HookCopies>), RunError> {
    match &config.hook {
        HookPlace::There(path) => {
            check_hook_path(path, endpoint.socket()).await?;
            Ok((Some(path.clone()), None))
        }
        HookPlace::Copy(dir) => {
            let dir = dir.clone();
            let late =
                || tracing::error!("a disk does not answer: waiting until the hook is there");
            let copies = dirs::answer_or(late, move || HookCopies::install(&dir)).await?;
            check_hook_copy(copies.path())?;
            Ok((Some(copies.path().to_owned()), Some(copies)))
        }
    }
}

/// Looks after pods that crash for ever, from now on.
async fn begin_resets(
    config: &Config,
    cri: cri::Client,
    events: Events,
    news: reset::Inbox,
) -> Result<(), KubeError> {
    let Some(client) = kube::connect_once(config.kubeconfig.as_deref()).await? else {
        return Ok(());
    };
    let (terms, node) = (config.hard_reset.clone(), &config.node_name);
    let resets = Resets::new(client, cri, events, terms, node, &config.state_dir);
    let resets = tokio::spawn(Arc::new(resets).run(news));
    tokio::spawn(async move {
        if let Err(error) = resets.await {
            tracing::error!(%error, "pods that crash for ever are not reset any more: start the plugin again");
        }
    });
    Ok(())
}

/// The first socket that exists. A runtime that launches plugins does so before it listens.
async fn cri_endpoint(endpoints: &[CriEndpoint], launched: bool) -> Result<&CriEndpoint, RunError> {
    loop {
        if let Some(found) = endpoints.iter().find(|it| it.socket().exists()) {
            return Ok(found);
        }
        if !launched {
            let tried: Vec<String> = endpoints.iter().map(ToString::to_string).collect();
            return Err(RunError::NoRuntime(tried.join(" and ")));
        }
        sleep(LAUNCH_INTERVAL).await;
    }
}

fn shared(config: &Config, gate: Arc<Gate>, is_crio: bool) -> Shared {
    Shared {
        gate,
        start: config.start,
        tells_all: !is_crio,
        removals_show: is_crio,
        replay_devices: config.replay_devices.clone(),
        back_off: config.back_off,
    }
}

fn cores() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

/// Who makes the containers.
enum Runtime {
    Containerd(Box<Containerd>),
    Crio,
    Other,
}

/// Once it has answered.
async fn runtime(cri: &cri::Client) -> Runtime {
    let mut said = false;
    loop {
        match cri.containerd().await {
            Ok(containerd) => return Runtime::Containerd(Box::new(containerd)),
            Err(CriError::NotContainerd { runtime }) if runtime == "cri-o" => return Runtime::Crio,
            Err(CriError::NotContainerd { runtime }) => {
                tracing::warn!(
                    runtime,
                    "exits cannot be held on this runtime yet: pods with restartPolicy Never may fail before they are restarted"
                );
                return Runtime::Other;
            }
            Err(error) => say_once(&mut said, &error),
        }
        sleep(RETRY_INTERVAL).await;
    }
}

/// How exits are held there. Where they cannot be, pods are as those that were there before the plugin.
async fn hold(
    runtime: &Runtime,
    cri: &cri::Client,
    endpoint: &CriEndpoint,
    hook_socket: &Path,
    metrics: &Arc<Metrics>,
) -> Hold {
    if !matches!(runtime, Runtime::Crio) {
        metrics.exits_are_held(matches!(runtime, Runtime::Containerd(_)));
        return Hold::Hook;
    }
    let mut said = false;
    let seen = loop {
        match process::are_seen(endpoint.socket()).await {
            Ok(seen) => break seen,
            Err(error) => say_once(&mut said, &error),
        }
        sleep(RETRY_INTERVAL).await;
    };
    if !seen {
        tracing::warn!(
            "exits are not held: CRI-O tells at once of a container that it ends itself, so that the plugin is to end them, and it does not see their processes; in a pod it needs hostPID"
        );
        return Hold::Nothing;
    }
    let exits = loop {
        match cri.exits().await {
            Ok(exits) => break exits,
            Err(error) if error.is_transient() => say_once(&mut said, &error),
            Err(error) => {
                tracing::warn!(%error, "exits are not held: CRI-O does not tell how it is configured");
                return Hold::Nothing;
            }
        }
        sleep(RETRY_INTERVAL).await;
    };
    let Some(exits) = exits else {
        tracing::warn!("exits are not held: CRI-O does not tell where its directory of exits is");
        return Hold::Nothing;
    };
    let socket = hook_socket.to_owned();
    Hold::Holder(Keeper::start(HolderArgs { exits, socket }, Arc::clone(metrics)).await)
}

fn stub(
    plugin: Arc<Reprise>,
    config: &Config,
    launched: Option<Launched>,
) -> Result<Stub<Reprise>, NriError> {
    let builder = Stub::builder(plugin);
    match launched {
        Some(launched) => builder.launched(launched).build(),
        None => builder
            .name("reprise")
            .index(config.nri_index.as_str())
            .socket(config.nri_socket.clone())
            .build(),
    }
}

/// Whether the exit of a container can be held is asked anew for each that the runtime lists.
fn follow_holds(hold: &Hold, missed: &Arc<Notify>) {
    if let Hold::Holder(keeper) = hold {
        let (mut keeper, missed) = (keeper.clone(), Arc::clone(missed));
        tokio::spawn(async move {
            while keeper.changed().await {
                missed.notify_one();
            }
        });
    }
}

/// Answers hooks for ever, in a new place when the old one is taken away.
async fn serve_hooks(
    mut hooks: Server,
    socket: PathBuf,
    registry: Arc<Registry>,
    mut sole: Sole,
    health: Arc<Health>,
) {
    loop {
        health.hooks_are_heard(true);
        let asked = Arc::clone(&registry);
        hooks
            .serve(move |request| asked.decide_hold(&request))
            .await;
        health.hooks_are_heard(false);
        tracing::warn!(socket = %socket.display(), "hooks find their socket no longer: opening it again");
        hooks = loop {
            if let Err(error) = sole.renew() {
                tracing::warn!(%error, "another plugin is not kept away from the run directory");
            }
            match Server::bind(&socket) {
                Ok(hooks) => break hooks,
                Err(error) => {
                    tracing::warn!(%error, "exits are not held, trying until they can be");
                }
            }
            sleep(SOCKET_INTERVAL).await;
        };
    }
}

/// Compares with the runtime, trying until it has answered.
async fn relist(registry: &Registry, records: Vec<Record>) {
    let mut said = false;
    loop {
        match timeout(OLDEST_LIST, registry.relist(records.clone())).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => say_once(&mut said, &error),
            Err(_) => {
                tracing::warn!("the runtime took too long to tell of its containers: asking again");
            }
        }
        sleep(RETRY_INTERVAL).await;
    }
}

fn say_once(said: &mut bool, error: &dyn std::fmt::Display) {
    if !std::mem::replace(said, true) {
        tracing::warn!(%error, "the runtime does not answer, trying until it does");
    }
}

async fn follow_pods(
    registry: Arc<Registry>,
    mut changes: mpsc::UnboundedReceiver<PodChange>,
    missed: Arc<Notify>,
) {
    while let Some(change) = changes.recv().await {
        if registry.pod_changed(change) {
            missed.notify_one();
        }
    }
}

async fn follow_features(
    registry: Arc<Registry>,
    mut features: watch::Receiver<Option<KubeletFeatures>>,
) {
    // Ends with the watch, which ends with the process.
    while features.changed().await.is_ok() {
        let native = *features.borrow_and_update();
        if let Some(native) = native {
            registry.features_changed(native);
        }
    }
}
