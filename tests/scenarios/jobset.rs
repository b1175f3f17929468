//! `JobSet`'s own controller, and what its agents find the API server by.

use std::fs::{self, File};
use std::net::IpAddr;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Weak};

use anyhow::{Context, Result, ensure};
use kube::api::ListParams;
use kube::config::{AuthInfo, Kubeconfig};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::json;
use tempfile::TempDir;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use crate::node::Node;
use crate::wait::{self, PATIENCE};

/// All of the node's `JobSets` are its: a second one would be in its way.
static RUNNING: Mutex<Weak<Controller>> = Mutex::const_new(Weak::new());

/// What it says, and where, when it has begun to look after them.
const WORKS: &str = "Starting workers";
const LOG: &str = "jobset";

pub(crate) fn kind() -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk(
        "jobset.x-k8s.io",
        "v1alpha2",
        "JobSet",
    ))
}

/// Ends with the last scenario that has it.
pub(crate) struct Controller {
    process: Child,
    _dir: TempDir,
}

impl Controller {
    /// The one that works on the node, or a new one.
    pub(crate) async fn of(node: &Node) -> Result<Arc<Self>> {
        let mut running = RUNNING.lock().await;
        if let Some(controller) = running.upgrade() {
            return Ok(controller);
        }
        let controller = Arc::new(Self::start(node).await?);
        *running = Arc::downgrade(&controller);
        Ok(controller)
    }

    async fn start(node: &Node) -> Result<Self> {
        ensure!(
            node.jobset.is_dir(),
            "JobSet is not built (hack/node.sh jobset)"
        );
        let definition = node.jobset.join("crd.yaml");
        // It is too long for what `apply` alone writes on it.
        node.kubectl(&["apply", "--server-side"], &definition)
            .await?;
        wait::until("JobSets are known", PATIENCE, async || {
            let listed = node.objects_of(&kind()).list(&ListParams::default()).await;
            Ok(listed.map(drop).map_err(|error| error.to_string()))
        })
        .await?;

        // Nobody asks its webhooks, and they must be there. The node's address is its own, whatever other nodes there are.
        let dir = TempDir::new()?;
        for (from, to) in [("apiserver.crt", "tls.crt"), ("apiserver.key", "tls.key")] {
            fs::copy(node.pki().join(from), dir.path().join(to))?;
        }
        let config = json!({
            "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "featureGates": {"InPlaceRestart": true},
            "leaderElection": {"leaderElect": false},
            "internalCertManagement": {"enable": false},
            "webhook": {"host": node.address().await?, "certDir": dir.path()},
            "metrics": {"bindAddress": "0"},
            "health": {"healthProbeBindAddress": "0"},
        });
        let file = dir.path().join("config.json");
        fs::write(&file, config.to_string())?;
        let log = File::create(node.log_file(LOG))?;
        let process = Command::new(node.jobset.join("jobset"))
            .arg("--config")
            .arg(file)
            .env("KUBECONFIG", node.kubeconfig())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("cannot run JobSet's controller")?;
        let controller = Self { process, _dir: dir };
        wait::until("JobSet's controller works", PATIENCE, async || {
            let log = node.log(LOG);
            Ok(log.contains(WORKS).then_some(()).ok_or(log))
        })
        .await?;
        Ok(controller)
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        // It may have ended by itself, and nobody is left to hear of anything else.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What lets pods in to the API server, which listens on the loopback address alone.
pub(crate) struct Door {
    /// By which whoever has a token in that file finds it.
    pub(crate) kubeconfig: String,
    _task: JoinSet<()>,
}

impl Door {
    /// Open until dropped.
    pub(crate) async fn open(node: &Node, token_file: &str) -> Result<Self> {
        let mut kubeconfig = Kubeconfig::read_from(node.kubeconfig())?;
        let address: IpAddr = node.address().await?.parse()?;
        let listener = TcpListener::bind((address, 0)).await?;
        let mut clusters = kubeconfig.clusters.iter_mut();
        let cluster = clusters.find_map(|it| it.cluster.as_mut());
        let cluster = cluster.context("a kubeconfig without a cluster")?;
        let outside = format!("https://{}", listener.local_addr()?);
        let inside = cluster.server.replace(outside);
        let inside = inside.as_deref().and_then(|it| it.strip_prefix("https://"));
        let inside = inside.context("a cluster without a server")?.to_owned();
        // One of the names that its certificate has.
        cluster.tls_server_name = Some("localhost".to_owned());
        for user in &mut kubeconfig.auth_infos {
            user.auth_info = Some(AuthInfo {
                token_file: Some(token_file.to_owned()),
                ..AuthInfo::default()
            });
        }
        let mut task = JoinSet::new();
        task.spawn(lead(listener, inside));
        Ok(Self {
            kubeconfig: serde_json::to_string(&kubeconfig)?,
            _task: task,
        })
    }
}

/// Until dropped, with all that it leads.
async fn lead(listener: TcpListener, target: String) {
    let mut led = JoinSet::new();
    while let Ok((mut client, _)) = listener.accept().await {
        let target = target.clone();
        led.spawn(async move {
            let mut server = TcpStream::connect(target).await?;
            copy_bidirectional(&mut client, &mut server).await
        });
    }
}
