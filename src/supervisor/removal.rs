//! What a plugin has left on a node that is to be without it, and whether it is to be.
//!
//! Nothing of it does harm: a placeholder waits, a record is for a plugin that does not come, and a hook finds no socket.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::sole::{self, LockError, Sole};
use super::{CriError, KubeError};
use crate::config::{Config, DaemonSetName, HookPlace};
use crate::cri::{self, ContainerState};
use crate::exit_hold::{SUCCESSOR_FILE, remove_hooks_but};
use crate::ids::ContainerId;
use crate::kube::{self, DaemonSets, Traces};
use crate::node::Maker;
use crate::{records, reset, text};

/// The hooks' socket, in the run directory.
pub(super) const HOOK_SOCKET: &str = "hook.sock";
/// How long the API server may take to tell of the `DaemonSet`: it is asked again until then.
const API_LIMIT: Duration = Duration::from_secs(5);
/// How long a node is tried to be cleaned where nobody can do it later.
const LAST_LIMIT: Duration = Duration::from_secs(30);
/// How long all nodes may take. Each waits for restarts under way, and for its turn to have its plugin ended.
const NODES_LIMIT: Duration = Duration::from_mins(5);
/// Between two looks at it, and between two words of it.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
const SAY_INTERVAL: Duration = Duration::from_secs(10);

/// Why not everything is gone.
#[derive(Debug, thiserror::Error)]
pub enum RemovalError {
    /// A plugin is at work, or its directories cannot be used.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The API server's address cannot be used at all.
    #[error(transparent)]
    Kube(#[from] KubeError),
    /// Some of it stays.
    #[error("not everything could be removed: {0}; the rest is gone, try again")]
    Rest(String),
    /// All nodes are asked for, and nobody says whose.
    #[error("which DaemonSet runs the plugin on all nodes? Give --daemonset NAMESPACE/NAME")]
    NoDaemonSet,
    /// The same without an API server.
    #[error("no API server is known: run this in a pod, or give --kubeconfig")]
    NoApiServer,
    /// The API server refuses.
    #[error("cannot remove DaemonSet {name}: {source}")]
    Refused {
        /// Which one.
        name: DaemonSetName,
        /// What the API server says.
        source: kube::ApiError,
    },
    /// Some node does not come to an end.
    #[error(
        "DaemonSet {0} is still there after {limit} s: see which of its pods do not end, and why",
        limit = NODES_LIMIT.as_secs()
    )]
    Late(DaemonSetName),
}

/// Whether the node is to be without this plugin: the `DaemonSet` that runs it is being deleted. No, where nobody can tell.
pub(super) async fn is_under_way(config: &Config) -> bool {
    let Some(name) = &config.daemonset else {
        return false;
    };
    let ask = async || {
        let client = kube::connect_once(config.kubeconfig.as_deref())
            .await
            .ok()??;
        DaemonSets::new(client, name).is_being_removed().await.ok()
    };
    let asked = async {
        loop {
            match ask().await {
                Some(answer) => return answer,
                None => sleep(LOOK_INTERVAL).await,
            }
        }
    };
    let answer = timeout(API_LIMIT, asked).await.ok();
    if answer.is_none() {
        tracing::warn!(daemonset = %name, "cannot tell whether the node is to be without the plugin: its files stay for the next one");
    }
    answer.unwrap_or_default()
}

/// Deletes the `DaemonSet`, and waits until each of its pods has cleaned up its node.
pub async fn clean_all_nodes(config: &Config) -> Result<(), RemovalError> {
    let name = config.daemonset.as_ref().ok_or(RemovalError::NoDaemonSet)?;
    let client = kube::connect(config.kubeconfig.as_deref()).await?;
    let sets = DaemonSets::new(client.ok_or(RemovalError::NoApiServer)?, name);
    let refused = |source| RemovalError::Refused {
        name: name.clone(),
        source,
    };
    sets.remove().await.map_err(refused)?;
    tracing::info!(daemonset = %name, "each node's plugin cleans up its node and ends");
    let began = Instant::now();
    let mut said = began;
    // A node whose plugin is away holds up nobody but this process.
    loop {
        match sets.is_gone().await {
            Ok(true) => break,
            Ok(false) => {}
            Err(source @ kube::ApiError::Api(_)) => return Err(refused(source)),
            Err(error) => {
                tracing::debug!(%error, "the API server does not answer, trying until it does");
            }
        }
        if began.elapsed() >= NODES_LIMIT {
            return Err(RemovalError::Late(name.clone()));
        }
        if said.elapsed() >= SAY_INTERVAL {
            said = Instant::now();
            let so_far_s = began.elapsed().as_secs();
            tracing::info!(daemonset = %name, so_far_s, "waiting for its last pods to end");
        }
        sleep(LOOK_INTERVAL).await;
    }
    tracing::info!(daemonset = %name, "gone: each plugin has cleaned up its node as far as it could, and said in its log what stays");
    Ok(())
}

/// The same again and again, for a while: nobody comes after this plugin, and runtime or API server may be
/// in the way for a moment.
pub async fn clean_node_for_good(config: &Config) -> Result<(), RemovalError> {
    let began = Instant::now();
    loop {
        match clean_node(config).await {
            Err(error) if began.elapsed() < LAST_LIMIT => {
                tracing::warn!(%error, "trying again");
                sleep(LOOK_INTERVAL).await;
            }
            result => return result,
        }
    }
}

/// Removes from this node what plugins with these settings have left: placeholders and attempts that were never started, what
/// they say of pods and the node in the API, copies of the hook, and their files. No plugin may be at work there.
///
/// What cannot be removed keeps nothing else from being removed.
pub async fn clean_node(config: &Config) -> Result<(), RemovalError> {
    let sole = Sole::of(config, false, || ()).await?;
    let mut rest = Vec::new();
    // Hooks that wait for a successor wait no longer.
    remove_files(&config.run_dir, &records::RUN_FILES, &mut rest);
    remove_files(&config.run_dir, &[HOOK_SOCKET, SUCCESSOR_FILE], &mut rest);
    if let Err(error) = remove_containers(config, &mut rest).await {
        rest.push(format!("placeholders: {error}"));
    }
    match kube::connect(config.kubeconfig.as_deref()).await {
        Ok(Some(client)) => {
            let traces = Traces::new(client, &config.node_name);
            let (removed, left) = traces.remove().await;
            tracing::info!(removed, "conditions that the plugin has set");
            rest.extend(left);
        }
        Ok(None) => tracing::info!("no API server: nothing was said there"),
        Err(error) => rest.push(format!("conditions: {error}")),
    }
    if let HookPlace::Copy(dir) = &config.hook {
        match remove_hooks_but(dir, &BTreeSet::new()) {
            Ok(_) => drop(fs::remove_dir(dir)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => rest.push(format!("hooks in {}: {error}", dir.display())),
        }
    }
    for names in [&records::STATE_FILES[..], &reset::STATE_FILES] {
        remove_files(&config.state_dir, names, &mut rest);
    }
    // Another plugin that takes the lock between these two has directories of its own by then.
    for dir in [&config.state_dir, &config.run_dir] {
        remove_files(dir, &[sole::FILE], &mut rest);
        // One that is somebody else's too, or mounted, stays.
        let _ = fs::remove_dir(dir);
    }
    drop(sole);
    if rest.is_empty() {
        tracing::info!("the node is as it was before the plugin");
        Ok(())
    } else {
        Err(RemovalError::Rest(text::listed(&rest)))
    }
}

async fn remove_containers(config: &Config, rest: &mut Vec<String>) -> Result<(), CriError> {
    let mut there = config.cri_endpoints.iter();
    let Some(endpoint) = there.find(|it| it.socket().exists()) else {
        rest.push("placeholders: no runtime is there to be asked".to_owned());
        return Ok(());
    };
    let cri = cri::Client::connect(&endpoint.to_string())?;
    let (mut removed, mut stay) = (0, BTreeSet::new());
    // What a plugin that was killed had asked for may come a moment later.
    for look in 1.. {
        let mut unstarted = unstarted(&cri).await?;
        unstarted.retain(|id| !stay.contains(id));
        if unstarted.is_empty() && look > 1 {
            break;
        }
        for id in unstarted {
            match cri.remove_container(&id).await {
                Ok(()) => removed += 1,
                Err(error) => {
                    rest.push(format!("container {id}: {error}"));
                    stay.insert(id);
                }
            }
        }
        sleep(LOOK_INTERVAL).await;
    }
    tracing::info!(removed, "containers that a restart made and did not start");
    Ok(())
}

/// The containers that a restart made, and nobody has started.
async fn unstarted(cri: &cri::Client) -> Result<Vec<ContainerId>, CriError> {
    let mut containers = cri.list_containers(None).await?;
    containers.retain(|it| {
        it.state == ContainerState::Created && Maker::of(&it.annotations) != Maker::Kubelet
    });
    Ok(containers.into_iter().map(|it| it.id).collect())
}

/// Those that are not there are as they should be.
fn remove_files(dir: &Path, names: &[&str], rest: &mut Vec<String>) {
    for path in names.iter().map(|name| dir.join(name)) {
        if let Err(error) = remove(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            rest.push(format!("{}: {error}", path.display()));
        }
    }
}

fn remove(path: &PathBuf) -> io::Result<()> {
    if fs::symlink_metadata(path)?.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::create_dir(path("restarts")).unwrap();
        fs::write(path("restarts/s1.json"), "{}").unwrap();
        for file in ["hard-resets.json", "history.jsonl", "history.new"] {
            fs::write(path(file), "{}").unwrap();
        }
        fs::write(path("other"), "").unwrap();
        let mut rest = Vec::new();
        for names in [&records::STATE_FILES[..], &reset::STATE_FILES] {
            remove_files(dir.path(), names, &mut rest);
        }
        assert_eq!(rest, Vec::<String>::new());
        let left: Vec<_> = fs::read_dir(dir.path()).unwrap().flatten().collect();
        assert_eq!(left.len(), 1);
        assert_eq!(left[0].file_name(), "other");
    }

    #[test]
    fn a_link_is_removed_and_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let other = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(other.path(), dir.path().join("held")).unwrap();
        let mut rest = Vec::new();
        remove_files(dir.path(), &["held"], &mut rest);
        assert!(rest.is_empty() && other.path().exists());
    }
}
