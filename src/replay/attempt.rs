//! What the next attempt of a container is made from: the very configuration that the kubelet gave the runtime for the last one.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use prost::Message;

use super::{MOST_BYTES, ReplayBlocker};
use crate::cri::{
    ContainerConfig, ContainerStatus, ImageSpec, LinuxContainerResources, POD_UID, Recovered,
};
use crate::ids::{ContainerId, ContainerName};
use crate::kube::{PodSpec, StartDuty};
use crate::node::{REPLAY_ANNOTATION, RESTART_COUNT};
use crate::plan::RestartId;

/// The kubelet's annotation with the path of the termination message in the container.
pub(super) const TERMINATION_MESSAGE_PATH: &str = "io.kubernetes.container.terminationMessagePath";
/// Where a node's log collectors look (`legacyContainerLogsDir`, `pkg/kubelet/kuberuntime/legacy.go`).
const LOG_LINKS: &str = "/var/log/containers";
/// The longest name of a file (`ext4MaxFileNameLen`, the same file).
const LONGEST_NAME: usize = 255;

/// Whether the image that the container was made from is the one that its spec has: it may be changed in place. Nothing is
/// different of what nobody tells.
pub fn has_image(
    name: &ContainerName,
    config: &ContainerConfig,
    spec: Option<&PodSpec>,
) -> Result<(), ReplayBlocker> {
    let wanted = spec.and_then(|spec| spec.container(name)?.image.as_ref());
    let made = config.image.as_ref().map(|it| &it.user_specified_image);
    let made = made.filter(|made| !made.is_empty());
    match made.zip(wanted) {
        Some((made, wanted)) if made != wanted => Err(ReplayBlocker::ImageChanged(name.clone())),
        _ => Ok(()),
    }
}

/// Whether the variables that hold labels and annotations of the pod would have the same values at a start by the kubelet,
/// which goes by the pod as the API server told it, too.
pub fn has_variables(
    name: &ContainerName,
    config: &ContainerConfig,
    spec: &PodSpec,
) -> Result<(), ReplayBlocker> {
    let Some(container) = spec.container(name).filter(|it| !it.variables.is_empty()) else {
        return Ok(());
    };
    let made = config.envs.iter().map(|it| (&*it.key, &*it.value));
    let made: HashMap<&str, &[u8]> = made.collect();
    for (variable, field) in &container.variables {
        if made.get(&**variable) != Some(&spec.fields.value(field).as_bytes()) {
            let variable = variable.clone();
            return Err(ReplayBlocker::VariableChanged(name.clone(), variable));
        }
    }
    Ok(())
}

/// The images that the container was made from, and by which names the kubelet would look for them again. It does so before
/// each start (`EnsureImageExists`, `pkg/kubelet/images/image_manager.go`), and a name may be another image's by then. What it
/// would pull is not looked for: see [`StartDuty::ImagePull`].
pub fn images<'c>(
    name: &ContainerName,
    config: &'c ContainerConfig,
    spec: Option<&PodSpec>,
) -> impl Iterator<Item = (&'c ImageSpec, ImageSpec)> {
    let container = spec.and_then(|spec| spec.container(name));
    let pulled = container.is_some_and(|it| it.duties.contains(&StartDuty::ImagePull));
    let volumes = config.mounts.iter().filter_map(|it| it.image.as_ref());
    let all = config.image.iter().chain(volumes);
    let named = all.filter(move |image| !pulled && !image.user_specified_image.is_empty());
    named.map(|image| {
        let wanted = ImageSpec {
            image: image.user_specified_image.clone(),
            image_ref: String::new(),
            ..image.clone()
        };
        (image, wanted)
    })
}

/// Whether the containers may run where they ran. The kubelet's CPU manager moves what runs (`reconcileState`,
/// `pkg/kubelet/cm/cpumanager/cpu_manager.go`), and what does not run it gives its CPUs at its start. `waits`: they start
/// only after a back-off.
pub fn have_their_cpus(
    containers: &[(ContainerStatus, ContainerConfig)],
    waits: bool,
) -> Result<(), ReplayBlocker> {
    let cpus = |(status, config): &(ContainerStatus, ContainerConfig)| {
        let made = config.linux.as_ref().and_then(|it| it.resources.as_ref());
        let now = status.resources.as_ref().or(made);
        now.map(|it| it.cpuset_cpus.clone())
            .filter(|cpus| !cpus.is_empty())
    };
    let runs = |(status, _): &(ContainerStatus, _)| !waits && status.finished_at == 0;
    let running: Vec<_> = containers.iter().filter(|it| runs(it)).map(cpus).collect();
    let mut ended = containers.iter().filter(|it| !runs(it));
    let moved = ended.find(|it| cpus(it).is_some_and(|own| !running.contains(&Some(own))));
    moved.map_or(Ok(()), |(status, _)| {
        Err(ReplayBlocker::Cpus(status.name.clone()))
    })
}

/// Whether the init containers took no longer than that last time. `now`: nanoseconds since the Unix epoch.
pub fn inits_are_quick<'a>(
    inits: impl IntoIterator<Item = &'a ContainerStatus>,
    now: i64,
    limit: Duration,
) -> Result<(), ReplayBlocker> {
    let took = inits.into_iter().map(|status| {
        // The exit of one that runs, to the runtime, may be held.
        let end = if status.finished_at == 0 {
            now
        } else {
            status.finished_at
        };
        Duration::from_nanos(u64::try_from(end - status.started_at).unwrap_or(0))
    });
    let took = took.sum();
    if took > limit {
        return Err(ReplayBlocker::SlowInits(took));
    }
    Ok(())
}

/// How much room there still is for what a pod's containers were made from.
#[derive(Debug)]
pub struct Room(AtomicUsize);

impl Default for Room {
    fn default() -> Self {
        Self(AtomicUsize::new(MOST_BYTES))
    }
}

impl Room {
    /// Takes room for one more.
    pub fn take(&self, config: &ContainerConfig) -> Result<(), ReplayBlocker> {
        let bytes = config.encoded_len();
        let less = |room: usize| room.checked_sub(bytes);
        let taken = self.0.fetch_update(Relaxed, Relaxed, less);
        taken.map(drop).map_err(|_| ReplayBlocker::Large)
    }
}

/// All of what a container or a sandbox was made from.
pub fn complete<T>(what: &str, recovered: Option<Recovered<T>>) -> Result<T, ReplayBlocker> {
    let recovered = recovered.ok_or_else(|| ReplayBlocker::NotTold(what.to_owned()))?;
    if recovered.is_complete() {
        Ok(recovered.config)
    } else {
        Err(ReplayBlocker::Lost(what.to_owned(), recovered.lost))
    }
}

/// The next attempt of a container.
#[derive(Debug, Clone, PartialEq)]
pub struct Attempt {
    /// What it is made from.
    pub config: ContainerConfig,
    /// The new file for its termination message, on the node; `None`: it has none.
    pub termination_message: Option<PathBuf>,
}

impl Attempt {
    /// The attempt after the one of `status`, which was made from `config`, in this restart. `unique` names the file for its
    /// termination message among others of the container (`makeMounts`, `pkg/kubelet/kuberuntime/kuberuntime_container.go`).
    pub fn after(
        status: &ContainerStatus,
        mut config: ContainerConfig,
        restart: &RestartId,
        unique: u32,
    ) -> Result<Self, ReplayBlocker> {
        let name = &status.name;
        let unreadable = |what: &str| ReplayBlocker::Lost(name.to_string(), vec![what.to_owned()]);
        let Some(metadata) = &mut config.metadata else {
            return Err(unreadable("metadata"));
        };
        metadata.attempt += 1;
        let count = config.annotations.get_mut(RESTART_COUNT);
        let restarts: Option<u32> = count.as_ref().and_then(|count| count.parse().ok());
        let Some((count, restarts)) = count.zip(restarts) else {
            return Err(unreadable(RESTART_COUNT));
        };
        let restarts = restarts + 1;
        *count = restarts.to_string();
        let replayed = (REPLAY_ANNOTATION.to_owned(), restart.to_string());
        config.annotations.extend([replayed]);
        config.log_path = format!("{name}/{restarts}.log");
        let termination_message = fresh_termination_message(&mut config, name, unique);
        take_resources(&mut config, status)?;
        Ok(Self {
            config,
            termination_message,
        })
    }
}

/// The kubelet's own mount alone: a pod may mount a volume at the same path.
fn fresh_termination_message(
    config: &mut ContainerConfig,
    name: &ContainerName,
    unique: u32,
) -> Option<PathBuf> {
    let uid = config.labels.get(POD_UID)?;
    let dir = Path::new("pods").join(uid).join("containers");
    let dir = dir.join(name.as_str());
    let inside = config.annotations.get(TERMINATION_MESSAGE_PATH)?;
    let mut mounts = config.mounts.iter_mut();
    let mount = mounts.find(|mount| {
        let host_dir = Path::new(&mount.host_path).parent();
        mount.container_path == *inside && host_dir.is_some_and(|host| host.ends_with(&dir))
    })?;
    let path = Path::new(&mount.host_path).with_file_name(format!("{unique:08x}"));
    mount.host_path = path.display().to_string();
    Some(path)
}

/// What the kubelet has resized it sets from the pod's spec at the next start. What its CPU and memory managers set
/// goes on as it is now.
fn take_resources(
    config: &mut ContainerConfig,
    status: &ContainerStatus,
) -> Result<(), ReplayBlocker> {
    let Some(now) = &status.resources else {
        return Ok(());
    };
    let Some(made) = config.linux.as_mut().and_then(|it| it.resources.as_mut()) else {
        return Ok(());
    };
    let sizes = |it: &LinuxContainerResources| {
        (
            it.cpu_period,
            it.cpu_quota,
            it.cpu_shares,
            it.memory_limit_in_bytes,
        )
    };
    if sizes(now) != sizes(made) {
        return Err(ReplayBlocker::Resized(status.name.clone()));
    }
    made.cpuset_cpus.clone_from(&now.cpuset_cpus);
    made.cpuset_mems.clone_from(&now.cpuset_mems);
    Ok(())
}

/// The name under which log collectors find a container's log (`logSymlink`, `pkg/kubelet/kuberuntime/legacy.go`).
#[must_use]
pub fn log_link(pod: &str, namespace: &str, name: &ContainerName, id: &ContainerId) -> PathBuf {
    let mut link = format!("{pod}_{namespace}_{name}-{id}");
    link.truncate(LONGEST_NAME - ".log".len());
    Path::new(LOG_LINKS).join(link + ".log")
}
