//! The plugin under test: one process for all scenarios, in directories of its own.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::jiff::Timestamp;
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use tempfile::TempDir;
use tokio::sync::Mutex;

use crate::node::Node;
use crate::wait::{self, PATIENCE};

/// What the plugin logs when the runtime has taken it in.
const READY: &str = "connected to NRI";

/// From SIGTERM to a clean end.
const TIME_TO_END: Duration = Duration::from_secs(15);

/// How far a restart has come, as the plugin's record on disk says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Phase {
    /// Decided: killing, holding exits, making placeholders.
    Down,
    /// The plugin starts the containers.
    Replay,
    /// Exits are released behind placeholders.
    Shielded,
    /// Everything old is being removed.
    Clear,
    /// The kubelet starts the containers.
    Up,
}

/// An API server that has just been started denies rights for a moment.
const MOMENT: Duration = Duration::from_secs(40);

/// The line in which the plugin, for longer than that moment, is denied a right. What the kubelet may not do is not told of:
/// one scenario borrows its name.
fn lacking_right(log: &str) -> Result<Option<&str>> {
    let (mut began, mut last) = (None::<Timestamp>, None::<Timestamp>);
    for line in log.lines().filter(|line| !line.contains("\"system:node:")) {
        if line.contains("the API server is back") {
            last = None;
        }
        if !line.contains("is forbidden") {
            continue;
        }
        let time = time_of(line)?;
        let goes_on = last.is_some_and(|last| age(last, time) < MOMENT);
        let first = *began.insert(began.filter(|_| goes_on).unwrap_or(time));
        if line.contains("grant the verb") || age(first, time) >= MOMENT {
            return Ok(Some(line));
        }
        last = Some(time);
    }
    Ok(None)
}

/// When a line of the log was written.
pub(crate) fn time_of(line: &str) -> Result<Timestamp> {
    Ok(line.split(' ').next().unwrap_or_default().parse()?)
}

fn age(from: Timestamp, to: Timestamp) -> Duration {
    to.duration_since(from).unsigned_abs()
}

#[derive(Deserialize)]
struct Record {
    phase: Phase,
}

/// Where the plugin finds the runtime and the API server, and the runtime the hook, and what it is to tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sockets {
    pub(crate) cri_endpoint: String,
    pub(crate) nri: PathBuf,
    pub(crate) kubeconfig: Option<PathBuf>,
    /// `None`: the plugin itself.
    pub(crate) hook: Option<PathBuf>,
    /// Where the plugin is to put it, in place of that.
    pub(crate) hook_dir: Option<PathBuf>,
    /// Whether it declares on the node what it honours.
    pub(crate) declares_features: bool,
    /// What else it is told.
    pub(crate) config: Option<PathBuf>,
}

impl Sockets {
    pub(crate) fn of(node: &Node) -> Self {
        Self {
            cri_endpoint: node.cri_endpoint.clone(),
            nri: node.nri_socket.clone(),
            kubeconfig: Some(node.plugin_kubeconfig.clone()),
            hook: None,
            hook_dir: None,
            declares_features: false,
            config: None,
        }
    }
}

pub(crate) struct Plugin {
    pub(crate) binary: PathBuf,
    /// Who starts containers again where a scenario leaves that open. Its pods ask for it.
    pub(crate) start: String,
    node: Arc<Node>,
    dir: TempDir,
    /// The node's own, unless a scenario put something in between.
    sockets: Mutex<Sockets>,
    process: Mutex<Option<Child>>,
    /// One that waits for its end.
    successor: Mutex<Option<Child>>,
    /// Where in the log the current process begins.
    log_start: AtomicUsize,
}

impl Plugin {
    pub(crate) fn new(binary: PathBuf, start: String, node: Arc<Node>) -> Result<Self> {
        let dir = tempfile::Builder::new()
            .prefix("reprise-scenarios-")
            .tempdir()?;
        File::create(dir.path().join("plugin.log"))?;
        Ok(Self {
            binary,
            start,
            sockets: Mutex::new(Sockets::of(&node)),
            node,
            dir,
            process: Mutex::new(None),
            successor: Mutex::new(None),
            log_start: AtomicUsize::new(0),
        })
    }

    /// Starts the plugin unless it runs, and returns, without waiting for it, whether it did.
    pub(crate) async fn start(&self) -> Result<bool> {
        let mut process = self.process.lock().await;
        if let Some(child) = process.as_mut()
            && child.try_wait()?.is_none()
        {
            return Ok(false);
        }
        self.log_begins()?;
        let sockets = self.sockets.lock().await.clone();
        *process = Some(self.spawn(self.command(self.dir.path(), &sockets))?);
        Ok(true)
    }

    /// What is logged from now on is the current process'.
    fn log_begins(&self) -> Result<()> {
        let start = usize::try_from(std::fs::metadata(self.log_file())?.len())?;
        self.log_start.store(start, Ordering::Relaxed);
        Ok(())
    }

    fn spawn(&self, mut command: Command) -> Result<Child> {
        let log = OpenOptions::new().append(true).open(self.log_file())?;
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot run {}", self.binary.display()))
    }

    /// One more plugin with the same directories.
    pub(crate) fn another(&self) -> Command {
        self.command(self.dir.path(), &Sockets::of(&self.node))
    }

    /// Starts one more that waits for this one's end, unless one does.
    pub(crate) async fn have_successor(&self) -> Result<()> {
        let mut successor = self.successor.lock().await;
        let waiting = "waiting for its end";
        let before = self.log_lines(waiting)?.len();
        let mut command = self.another();
        command.arg("--wait");
        *successor = Some(self.spawn(command)?);
        wait::until("the successor waits", wait::PATIENCE, async || {
            let waits = self.log_lines(waiting)?.len() > before;
            Ok(waits.then_some(()).ok_or_else(|| "not yet".to_owned()))
        })
        .await
    }

    /// The plugin has ended: the one that has waited for it is the plugin now, once it is ready.
    pub(crate) async fn succeed(&self) -> Result<()> {
        let successor = self.successor.lock().await.take();
        *self.process.lock().await = Some(successor.context("nobody waits")?);
        self.until_ready(1).await
    }

    /// Starts the plugin anew with other sockets than the node's, until [`Self::go_straight`].
    pub(crate) async fn detour(&self, change: impl FnOnce(&mut Sockets)) -> Result<()> {
        self.stop().await?;
        change(&mut *self.sockets.lock().await);
        self.start().await?;
        self.until_ready(1).await
    }

    /// Starts the plugin anew with a configuration file of that content, until [`Self::go_straight`].
    pub(crate) async fn configure(&self, content: &str) -> Result<()> {
        let file = self.config_file();
        std::fs::write(&file, content)?;
        self.detour(|sockets| sockets.config = Some(file)).await
    }

    /// What [`Self::configure`] writes.
    pub(crate) fn config_file(&self) -> PathBuf {
        self.dir.path().join("config.yaml")
    }

    /// Back to the node's own sockets: what a scenario put in between ends with it.
    pub(crate) async fn go_straight(&self) -> Result<()> {
        let straight = Sockets::of(&self.node);
        if *self.sockets.lock().await == straight {
            return Ok(());
        }
        let stopped = self.stop().await;
        *self.sockets.lock().await = straight;
        stopped?;
        self.start().await?;
        self.until_ready(1).await
    }

    /// `reprise run` for this node, with its directories in `dir`.
    pub(crate) fn command(&self, dir: &Path, sockets: &Sockets) -> Command {
        self.command_for("run", dir, sockets)
    }

    /// `reprise cleanup` of what the plugin leaves.
    pub(crate) fn cleaning(&self) -> Command {
        self.command_for("cleanup", self.dir.path(), &Sockets::of(&self.node))
    }

    fn command_for(&self, verb: &str, dir: &Path, sockets: &Sockets) -> Command {
        let mut command = Command::new(&self.binary);
        command
            .arg(verb)
            .arg("--nri-socket")
            .arg(&sockets.nri)
            .arg("--cri-endpoint")
            .arg(&sockets.cri_endpoint)
            .arg("--static-pod-path")
            .arg(&self.node.static_pod_path)
            .arg("--node-name")
            .arg(&self.node.name)
            .arg("--run-dir")
            .arg(dir.join("run"))
            .arg("--state-dir")
            .arg(dir.join("state"))
            // Several are on one machine.
            .args(["--listen", "127.0.0.1:0"])
            .args(["--start", "Auto"])
            .args(["--replay-devices", "example.com/*"])
            // What it removes is told apart from what the kubelet does.
            .args(["--log-level", "debug"]);
        match &sockets.hook_dir {
            Some(dir) => command.arg("--hook-dir").arg(dir),
            None => command
                .arg("--hook-path")
                .arg(sockets.hook.as_ref().unwrap_or(&self.binary)),
        };
        if sockets.declares_features {
            command.arg("--declare-features");
        }
        if let Some(config) = &sockets.config {
            command.arg("--config").arg(config);
        }
        if let Some(kubeconfig) = &sockets.kubeconfig {
            command.arg("--kubeconfig").arg(kubeconfig);
        }
        command
    }

    /// Waits until the plugin has said so often that it is ready, since its start. More than once
    /// where it lost the runtime in between.
    pub(crate) async fn until_ready(&self, times: usize) -> Result<()> {
        wait::until("the plugin is ready", wait::PATIENCE, async || {
            if let Some(child) = self.process.lock().await.as_mut()
                && let Some(status) = child.try_wait()?
            {
                bail!(
                    "the plugin ended before it was ready ({status}):\n{}",
                    self.last_lines(20)?
                );
            }
            if self.times_ready()? >= times {
                return Ok(Ok(()));
            }
            Ok(Err(self.last_lines(5)?))
        })
        .await
    }

    /// How often it has said so since its start.
    pub(crate) fn times_ready(&self) -> Result<usize> {
        Ok(self.new_log_lines(READY)?.len())
    }

    /// Waits until it hears of the API server, which a scenario may have taken away: it asks again after a pause, and knows no
    /// spec of a pod that is made meanwhile.
    pub(crate) async fn until_told(&self) -> Result<()> {
        wait::until("the API server is back", PATIENCE, async || {
            let last = self.new_log_lines("the API server is ")?.pop();
            let away = last.filter(|line| line.contains("the API server is away"));
            Ok(away.map_or(Ok(()), Err))
        })
        .await
    }

    /// SIGKILL, and the certainty that it is dead.
    pub(crate) async fn kill(&self) -> Result<()> {
        if let Some(mut child) = self.process.lock().await.take() {
            self.log_begins()?;
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// SIGTERM; a plugin that does not end by itself with code 0 is a failure.
    pub(crate) async fn stop(&self) -> Result<()> {
        let Some(mut child) = self.process.lock().await.take() else {
            return Ok(());
        };
        self.log_begins()?;
        kill_process(Pid::from_child(&child), Signal::TERM)?;
        let status = wait::until_ended(&mut child, TIME_TO_END)
            .await
            .context("the plugin was sent SIGTERM")?;
        ensure!(
            status.success(),
            "the plugin ended with {status} on SIGTERM"
        );
        Ok(())
    }

    /// Of the running process.
    pub(crate) async fn pid(&self) -> Result<u32> {
        let process = self.process.lock().await;
        Ok(process.as_ref().context("the plugin is not running")?.id())
    }

    /// Fails if the plugin died by itself, panicked anywhere, or lacks a right: it goes on without, and nobody would notice.
    pub(crate) async fn must_be_well(&self) -> Result<()> {
        if let Some(child) = self.process.lock().await.as_mut()
            && let Some(status) = child.try_wait()?
        {
            bail!("the plugin died: {status}\n{}", self.last_lines(20)?);
        }
        let log = self.log()?;
        let panic = log.lines().find(|line| line.contains("panicked at"));
        ensure!(panic.is_none(), "the plugin panicked: {panic:?}");
        let lacks = lacking_right(&log)?;
        ensure!(lacks.is_none(), "the plugin lacks a right: {lacks:?}");
        Ok(())
    }

    /// Where its sockets are.
    pub(crate) fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    /// Where it writes down what must outlive it.
    pub(crate) fn state_dir(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    pub(crate) fn record_file(&self, sandbox: &str) -> PathBuf {
        self.state_dir()
            .join("restarts")
            .join(format!("{sandbox}.json"))
    }

    /// The phase of a pod's restart; none if there is no restart, or its record is just being
    /// written.
    pub(crate) fn phase_of(&self, sandbox: &str) -> Option<Phase> {
        let text = std::fs::read(self.record_file(sandbox)).ok()?;
        let record: Record = serde_json::from_slice(&text).ok()?;
        Some(record.phase)
    }

    /// Log lines that contain `needle`.
    pub(crate) fn log_lines(&self, needle: &str) -> Result<Vec<String>> {
        Ok(lines_with(&self.log()?, needle))
    }

    /// The same since its start.
    pub(crate) fn new_log_lines(&self, needle: &str) -> Result<Vec<String>> {
        let log = self.log()?;
        let now = log.get(self.log_start.load(Ordering::Relaxed)..);
        Ok(lines_with(now.unwrap_or_default(), needle))
    }

    pub(crate) fn last_lines(&self, count: usize) -> Result<String> {
        let log = self.log()?;
        let lines: Vec<_> = log.lines().collect();
        Ok(lines[lines.len().saturating_sub(count)..].join("\n"))
    }

    fn log(&self) -> Result<String> {
        let path = self.log_file();
        let bytes =
            std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn log_file(&self) -> PathBuf {
        self.dir.path().join("plugin.log")
    }

    pub(crate) fn keep_log(&self, target: &Path) -> Result<()> {
        std::fs::copy(self.log_file(), target)?;
        Ok(())
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        for child in [&mut self.successor, &mut self.process] {
            let Some(child) = child.get_mut() else {
                continue;
            };
            // It may have ended by itself, and nobody is left to hear of anything else.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn lines_with(log: &str, needle: &str) -> Vec<String> {
    let lines = log.lines().filter(|line| line.contains(needle));
    lines.map(str::to_owned).collect()
}
