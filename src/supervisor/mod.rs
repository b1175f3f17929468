//! Wires the rooms together and runs them.

mod plugin;
mod roster;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::sleep;

use crate::config::Config;
use crate::cri::{self, CriError};
use crate::exit_hold::{Server, ServerError};
use crate::kube::{self, Events, KubeError, Pods};
use crate::nri::{Launched, NriError, Stub};
use crate::report::Reporter;
use crate::restart::driver::Tools;
use crate::restart::record::{Record, Records, RecordsError};
use plugin::Reprise;
use roster::Roster;

/// Between two tries of a runtime that is away.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Why the plugin could not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
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
    /// The records of restarts cannot be kept.
    #[error(transparent)]
    Records(#[from] RecordsError),
    /// What a predecessor left cannot be read.
    #[error("cannot read the records of restarts: {0}")]
    Load(std::io::Error),
}

/// Runs the plugin until `shutdown`, or until the runtime that launched it goes away.
///
/// On `shutdown` held exits are let go; restarts under way stay on disk for the next one.
pub async fn run(
    config: Config,
    launched: Option<Launched>,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), RunError> {
    let cri = cri::Client::connect(&config.cri_endpoint)?;
    let client = kube::connect(config.kubeconfig.as_deref()).await?;
    let records = Records::open(&config.state_dir, &config.run_dir)?;
    let left = records.load().map_err(RunError::Load)?;
    let (pods, events) = match client {
        Some(client) => (
            Pods::watch(client.clone(), &config.node_name),
            Some(Events::new(client, &config.node_name)),
        ),
        None => {
            tracing::info!("no API server: pods are known by what the runtime tells of them");
            (Pods::none(), None)
        }
    };
    let tools = Arc::new(Tools {
        cri: cri.clone(),
        records: records.clone(),
        reporter: Reporter::new(events),
    });
    let roster = Arc::new(Roster::new(tools, pods.clone()));
    tokio::spawn(follow_pods(Arc::clone(&roster), pods));

    // A plugin that holds must know what it holds: the hooks of a predecessor wait until the socket is there.
    let hook_socket = config.run_dir.join("hook.sock");
    let synchronized = Arc::new(Notify::new());
    let nri = Reprise::new(
        Arc::clone(&roster),
        records,
        config.hook_path.clone(),
        hook_socket.clone(),
        Arc::clone(&synchronized),
    );
    let stub = stub(nri, &config, launched)?;
    let work = work(Arc::clone(&roster), cri, hook_socket, left, synchronized);
    tokio::select! {
        result = work => result,
        result = stub.run(shutdown) => Ok(result?),
    }
}

fn stub(
    plugin: Reprise,
    config: &Config,
    launched: Option<Launched>,
) -> Result<Stub<Reprise>, NriError> {
    let builder = Stub::builder(plugin);
    match launched {
        Some(launched) => builder.launched(launched).build(),
        None => builder
            .name("reprise")
            .index(config.nri_index.clone())
            .socket(config.nri_socket.clone())
            .build(),
    }
}

/// Everything that runs beside the NRI connection. Ends only on an error.
async fn work(
    roster: Arc<Roster>,
    cri: cri::Client,
    hook_socket: PathBuf,
    left: Vec<Record>,
    synchronized: Arc<Notify>,
) -> Result<(), RunError> {
    relist(&roster, left).await;
    let hooks = Server::bind(&hook_socket)?;
    let knocked = Arc::clone(&roster);
    tokio::spawn(hooks.serve(move |knock| knocked.knock(&knock)));
    let exited = Arc::clone(&roster);
    tokio::spawn(async move {
        cri.exits(|exit| exited.ended(&exit.container, Some(exit.code)))
            .await;
    });
    loop {
        synchronized.notified().await;
        relist(&roster, Vec::new()).await;
    }
}

/// Compares with the runtime until it has answered once.
async fn relist(roster: &Roster, records: Vec<Record>) {
    let mut said = false;
    while let Err(error) = roster.relist(records.clone()).await {
        if !said {
            tracing::warn!(%error, "the runtime does not answer, trying until it does");
            said = true;
        }
        sleep(RETRY_INTERVAL).await;
    }
}

async fn follow_pods(roster: Arc<Roster>, pods: Pods) {
    let mut changes = pods.subscribe();
    while let Some(change) = changes.recv().await {
        roster.pod_changed(change);
    }
}
