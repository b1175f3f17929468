//! Start by replay: the plugin makes the next attempt of each container from the very configuration that the kubelet
//! gave the runtime for the last one. What may be replayed, and what the next attempt is made from; no I/O.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use prost::Message;
use serde::Deserialize;

use super::plan::{Member, RestartId, start_at_once};
use super::times::INITS_LIMIT;
use crate::cri::{
    ContainerConfig, ContainerStatus, ImageSpec, LinuxContainerResources, POD_UID, Recovered,
};
use crate::ids::{ContainerId, ContainerName};
use crate::kube::{ContainerKind, PodSpec, StartDuty};
use crate::node::{REPLAY_ANNOTATION, RESTART_COUNT};
use crate::policy::Start;
use crate::text;

/// The kubelet's annotation with the path of the termination message in the container.
const TERMINATION_MESSAGE_PATH: &str = "io.kubernetes.container.terminationMessagePath";
/// Where a node's log collectors look (`legacyContainerLogsDir`, `pkg/kubelet/kuberuntime/legacy.go`).
const LOG_LINKS: &str = "/var/log/containers";
/// The longest name of a file (`ext4MaxFileNameLen`, the same file).
const LONGEST_NAME: usize = 255;
/// Of more containers too many may not have been made when the hold ends.
const MOST_CONTAINERS: usize = 32;
/// Until they are made, configurations take up to ten times as much memory as they have bytes.
const MOST_BYTES: usize = 1024 * 1024;

/// Why the kubelet starts the containers and not the plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplayBlocker {
    /// The pod, or the plugin's configuration, wants it so.
    Asked,
    /// Nobody has told the pod's spec.
    NoSpec,
    /// Containers may not start yet.
    BackOff,
    /// Containers have time to stop, which the hold may not outlast.
    GracePeriod,
    /// The runtime does not ask before it creates a container.
    NoGate,
    /// The pod has that many containers.
    Many(usize),
    /// What its containers were made from has more than [`MOST_BYTES`].
    Large,
    /// The exit of this container cannot be held.
    NotHeld(ContainerName),
    /// This container has no attempt to make another one like.
    NeverCreated(ContainerName),
    /// This container had ended for good. While it runs again the kubelet reports nothing of the pod, and remembers
    /// what runs now as running: when everything is cleared away for a later restart, it would take the pod for failed.
    Completed(ContainerName),
    /// The kubelet does more for this container.
    Duty(ContainerName, StartDuty),
    /// It may have to ask the device plugin of this resource before it starts this container (`PreStartContainer`,
    /// `pkg/kubelet/cm/devicemanager/manager.go`).
    Device(ContainerName, String),
    /// The runtime does not tell what this container, or the sandbox, was made from.
    NotTold(String),
    /// What the runtime tells cannot be read to its end.
    Lost(String, Vec<String>),
    /// This container's resources have changed since it was made.
    Resized(ContainerName),
    /// The kubelet's CPU manager may have given this container's CPUs to others.
    Cpus(ContainerName),
    /// The pod's spec has another image for this container by now, or its name has become another image's.
    ImageChanged(ContainerName),
    /// The pod's spec was written while its back-off was waited for.
    SpecChanged,
    /// Somebody has written to the pod's `/etc/hosts`, which the kubelet writes anew before it makes a container.
    HostsTouched,
    /// The init containers took that long last time.
    SlowInits(Duration),
    /// The runtime did not answer.
    Failed(String),
}

impl fmt::Display for ReplayBlocker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Asked => write!(f, "start: Kubelet"),
            Self::NoSpec => write!(f, "the pod's spec is not known"),
            Self::BackOff => write!(
                f,
                "a back-off is due, and the containers start one after another"
            ),
            Self::GracePeriod => write!(f, "the containers have time to stop"),
            Self::NoGate => write!(f, "no connection to NRI"),
            Self::Many(count) => write!(f, "{count} containers are too many"),
            Self::Large => write!(
                f,
                "what its containers were made from has more than {} KiB",
                MOST_BYTES / 1024
            ),
            Self::NotHeld(name) => write!(f, "the exit of {name} cannot be held"),
            Self::NeverCreated(name) => write!(f, "{name} was not created yet"),
            Self::Completed(name) => write!(f, "{name} had ended for good"),
            Self::Duty(name, duty) => write!(f, "{name} has {duty}"),
            Self::NotTold(what) => write!(f, "the runtime does not tell what {what} was made from"),
            Self::Lost(what, lost) => {
                let lost = text::listed(lost);
                write!(f, "not all that {what} was made from is known: {lost}")
            }
            Self::Resized(name) => write!(f, "{name} was resized"),
            Self::Cpus(name) => write!(f, "{name} may have to run on other CPUs by now"),
            Self::Device(name, resource) => write!(
                f,
                "{name} has {resource}, whose device plugin may want to be asked (see --replay-devices)"
            ),
            Self::ImageChanged(name) => write!(f, "{name} has another image by now"),
            Self::SpecChanged => f.write_str("the pod was changed during its back-off"),
            Self::HostsTouched => write!(f, "a container has written to /etc/hosts"),
            Self::SlowInits(took) => {
                write!(
                    f,
                    "the init containers took {} ms last time",
                    took.as_millis()
                )
            }
            Self::Failed(why) => f.write_str(why),
        }
    }
}

/// What is in the way of a replay, as far as that can be said without asking the runtime.
#[must_use]
pub fn blocker(
    start: Start,
    spec: Option<&PodSpec>,
    members: &[&Member],
    devices: &[Devices],
) -> Option<ReplayBlocker> {
    if start == Start::Kubelet {
        return Some(ReplayBlocker::Asked);
    }
    let Some(spec) = spec else {
        return Some(ReplayBlocker::NoSpec);
    };
    if members.len() > MOST_CONTAINERS {
        return Some(ReplayBlocker::Many(members.len()));
    }
    let duty = |member: &Member| {
        let container = spec.container(&member.name)?;
        let asked = |it: &&String| !devices.iter().any(|devices| devices.have(it));
        if let Some(device) = container.devices.iter().find(asked) {
            return Some(ReplayBlocker::Device(member.name.clone(), device.clone()));
        }
        let duty = container.duties.iter().find(|duty| match duty {
            // If the kubelet relists between its creation and its start, the probe counts as failed and the
            // container is killed (`doProbe`, `pkg/kubelet/prober/worker.go`).
            StartDuty::PostStart | StartDuty::StartupProbe | StartDuty::LivenessProbe => true,
            // Whoever asks for it knows.
            StartDuty::ImagePull | StartDuty::Environment | StartDuty::SubPath => {
                start == Start::Auto
            }
        })?;
        Some(ReplayBlocker::Duty(member.name.clone(), *duty))
    };
    let in_order = !start_at_once(members.iter().copied());
    // A pod that was still initialising is replayed as far as there are containers.
    let there = |member: &&Member| member.old.is_some();
    let mut regulars = members
        .iter()
        .filter(|it| it.kind == ContainerKind::Regular);
    let members = match members.iter().rposition(there) {
        Some(last) if !regulars.any(there) => &members[..=last],
        _ => members,
    };
    members.iter().find_map(|member| match &member.old {
        Some(_) if in_order && member.had_completed() && member.kind == ContainerKind::Regular => {
            Some(ReplayBlocker::Completed(member.name.clone()))
        }
        None => Some(ReplayBlocker::NeverCreated(member.name.clone())),
        Some(old) if member.unhooked && old.exit.is_none() => {
            Some(ReplayBlocker::NotHeld(member.name.clone()))
        }
        Some(_) => duty(member),
    })
}

/// Extended resources whose device plugins are not asked before a container starts: `example.com/gpu`, or all of a
/// vendor's, `example.com/*`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Devices(String);

impl Devices {
    fn have(&self, resource: &str) -> bool {
        match self.0.strip_suffix('*') {
            Some(vendor) => resource.starts_with(vendor),
            None => resource == self.0,
        }
    }
}

impl FromStr for Devices {
    type Err = NoDevices;

    fn from_str(text: &str) -> Result<Self, NoDevices> {
        match text.split_once('/') {
            Some((vendor, name)) if !vendor.is_empty() && !name.is_empty() => {
                Ok(Self(text.to_owned()))
            }
            _ => Err(NoDevices),
        }
    }
}

impl TryFrom<String> for Devices {
    type Error = NoDevices;

    fn try_from(text: String) -> Result<Self, NoDevices> {
        text.parse()
    }
}

/// What is no name of an extended resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not an extended resource: it must be VENDOR/NAME or VENDOR/*, as in example.com/gpu")]
pub struct NoDevices;

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

/// Whether the init containers are likely to be done before the hold ends. `now`: nanoseconds since the Unix epoch.
pub fn inits_are_quick<'a>(
    inits: impl IntoIterator<Item = &'a ContainerStatus>,
    now: i64,
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
    if took > INITS_LIMIT {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Attempt as Number, ExitCode};
    use crate::kube::RestartPolicy;
    use crate::restart::plan::Old;
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use std::collections::BTreeSet;

    /// A configuration as containerd tells it, with everything in it that a kubelet can set.
    fn sample() -> ContainerConfig {
        let info = include_str!("../cri/config/container.json");
        let info: Value = serde_json::from_str(info).unwrap();
        serde_json::from_value(info["config"].clone()).unwrap()
    }

    fn restart() -> RestartId {
        RestartId("c1-1".into())
    }

    fn status(config: &ContainerConfig) -> ContainerStatus {
        ContainerStatus {
            id: "c1".into(),
            name: "app".into(),
            attempt: Number(0),
            state: crate::cri::ContainerState::Running,
            created_at: 0,
            started_at: 0,
            finished_at: 0,
            exit_code: None,
            reason: String::new(),
            log_path: None,
            resources: config.linux.as_ref().and_then(|it| it.resources.clone()),
            image_ref: String::new(),
            image: crate::cri::ImageSpec::default(),
            labels: config.labels.clone(),
            annotations: config.annotations.clone(),
        }
    }

    #[test]
    fn a_container_whose_image_has_changed_since_is_the_kubelets() {
        let spec = |image: Value| {
            let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"},
                "spec": {"containers": [{"name": "app", "image": image}]}});
            PodSpec::from_pod(&serde_json::from_value(pod).unwrap(), "n").unwrap()
        };
        let mut made = sample();
        let image = made.image.as_mut().unwrap();
        image.user_specified_image = "i:1".to_owned();
        let app = "app".into();
        let changed = Err(ReplayBlocker::ImageChanged("app".into()));
        assert_eq!(has_image(&app, &made, Some(&spec(json!("i:1")))), Ok(()));
        assert_eq!(has_image(&app, &made, Some(&spec(json!("i:2")))), changed);
        assert_eq!(has_image(&app, &made, Some(&spec(json!(null)))), Ok(()));
        assert_eq!(has_image(&app, &made, None), Ok(()));
        made.image.as_mut().unwrap().user_specified_image.clear();
        assert_eq!(has_image(&app, &made, Some(&spec(json!("i:2")))), Ok(()));
    }

    #[test]
    fn a_pod_has_room_for_configurations_of_a_mebibyte() {
        let mut large = sample();
        large.args = vec!["x".repeat(MOST_BYTES / 3)];
        let room = Room::default();
        room.take(&large).unwrap();
        room.take(&large).unwrap();
        assert_eq!(room.take(&large), Err(ReplayBlocker::Large));
        room.take(&sample()).unwrap();
    }

    #[test]
    fn images_are_looked_for_by_the_names_that_the_spec_has_but_for_those_that_are_pulled() {
        let spec = |policy: &str| {
            let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"},
                "spec": {"containers": [{"name": "app", "image": "i:1", "imagePullPolicy": policy}]}});
            PodSpec::from_pod(&serde_json::from_value(pod).unwrap(), "n").unwrap()
        };
        let mut made = sample();
        let image = |id: &str, name: &str| ImageSpec {
            image: id.into(),
            user_specified_image: name.into(),
            image_ref: id.into(),
            ..ImageSpec::default()
        };
        made.image = Some(image("sha256:a", "i:1"));
        made.mounts[0].image = Some(image("sha256:b", "files:1"));
        let looked_for = |made: &ContainerConfig, spec: Option<&PodSpec>| {
            let name = "app".into();
            let images = images(&name, made, spec);
            let both = images.map(|(made, wanted)| (made.image.clone(), wanted.image));
            both.collect::<Vec<_>>()
        };
        let both = [("sha256:a", "i:1"), ("sha256:b", "files:1")];
        let both = both.map(|(id, name)| (id.to_owned(), name.to_owned()));
        assert_eq!(looked_for(&made, Some(&spec("IfNotPresent"))), both);
        assert_eq!(looked_for(&made, None), both);
        assert_eq!(looked_for(&made, Some(&spec("Always"))), []);
        // Older kubelets do not tell.
        made.image = Some(image("sha256:a", ""));
        assert_eq!(looked_for(&made, None), both[1..]);
    }

    #[test]
    fn a_device_is_asked_for_unless_the_node_says_that_it_need_not_be() {
        let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"containers": [
            {"name": "app", "resources": {"limits": {"cpu": 1, "example.com/gpu": 1, "hugepages-2Mi": "2Mi"}}},
        ]}});
        let pod = PodSpec::from_pod(&serde_json::from_value(pod).unwrap(), "n").unwrap();
        let app = member("app", ContainerKind::Regular);
        let why = |exempt: &[&str]| {
            let exempt: Vec<Devices> = exempt.iter().map(|it| it.parse().unwrap()).collect();
            blocker(Start::Replay, Some(&pod), &[&app], &exempt)
        };
        let declined = ReplayBlocker::Device("app".into(), "example.com/gpu".into());
        assert_eq!(why(&[]), Some(declined.clone()));
        assert_eq!(why(&["example.com/gpus", "example.co/*"]), Some(declined));
        assert_eq!(why(&["example.com/gpu"]), None);
        assert_eq!(why(&["other.com/x", "example.com/*"]), None);
        for wrong in ["", "gpu", "/gpu", "example.com/", "*"] {
            assert_eq!(wrong.parse::<Devices>(), Err(NoDevices), "{wrong}");
        }
    }

    #[test]
    fn what_has_ended_may_only_have_the_cpus_that_what_runs_has() {
        let on = |cpus: &str, finished_at| {
            let mut config = sample();
            let resources = config.linux.as_mut().unwrap().resources.as_mut().unwrap();
            resources.cpuset_cpus = cpus.into();
            let status = ContainerStatus {
                finished_at,
                ..status(&config)
            };
            (status, config)
        };
        let moved = Err(ReplayBlocker::Cpus("app".into()));
        assert_eq!(have_their_cpus(&[on("0-3", 0), on("4", 0)], false), Ok(()));
        assert_eq!(
            have_their_cpus(&[on("0-3", 9), on("0-3", 0)], false),
            Ok(())
        );
        assert_eq!(have_their_cpus(&[on("0-3", 9), on("0-2", 0)], false), moved);
        assert_eq!(have_their_cpus(&[on("0-3", 0)], true), moved);
        // There is no CPU manager.
        assert_eq!(have_their_cpus(&[on("", 9), on("", 0)], true), Ok(()));
    }

    /// The paths of what differs.
    fn differences(a: &Value, b: &Value, path: &str, found: &mut BTreeSet<String>) {
        match (a, b) {
            (Value::Object(a), Value::Object(b)) => {
                for name in a.keys().chain(b.keys()) {
                    let (a, b) = (a.get(name), b.get(name));
                    let path = format!("{path}.{name}");
                    differences(
                        a.unwrap_or(&Value::Null),
                        b.unwrap_or(&Value::Null),
                        &path,
                        found,
                    );
                }
            }
            (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
                for (at, (a, b)) in a.iter().zip(b).enumerate() {
                    differences(a, b, &format!("{path}[{at}]"), found);
                }
            }
            _ if a == b => {}
            _ => drop(found.insert(path.to_owned())),
        }
    }

    proptest! {
        #[test]
        fn the_next_attempt_differs_in_nothing_but_its_number(
            attempt in 0u32..1000,
            restarts in 0u32..1000,
            unique: u32,
            envs in prop::collection::vec(("[A-Z]{1,8}", "\\PC{0,12}"), 0..5),
            mounts in prop::collection::vec("/[a-z]{1,8}", 0..4),
            message in prop::option::of("/dev/[a-z]{3,9}"),
            args in prop::collection::vec("\\PC{0,12}", 0..4),
            shares in 2i64..10_000,
        ) {
            let mut config = sample();
            config.metadata.as_mut().unwrap().attempt = attempt;
            config.annotations.insert(RESTART_COUNT.into(), restarts.to_string());
            config.log_path = format!("app/{restarts}.log");
            config.args = args;
            let env = |(key, value): (String, String)| json!({"key": key, "value": value});
            let envs: Vec<Value> = envs.into_iter().map(env).collect();
            config.envs = serde_json::from_value(json!(envs)).unwrap();
            config.labels.insert(POD_UID.into(), "u1".into());
            let mut mounts: Vec<(&str, String)> = mounts
                .iter()
                .enumerate()
                .map(|(at, inside)| (inside.as_str(), format!("/pods/u1/volumes/{at}")))
                .collect();
            if let Some(message) = &message {
                // A volume at the same place is none.
                mounts.push((message, "/pods/u1/volumes/v".into()));
                mounts.push((message, "/kubelet/pods/u1/containers/app/0123abcd".into()));
            }
            let inside = mounts.len();
            let mounts: Vec<Value> = mounts
                .into_iter()
                .map(|(inside, host)| json!({"container_path": inside, "host_path": host}))
                .collect();
            config.mounts = serde_json::from_value(json!(mounts)).unwrap();
            config.annotations.remove(TERMINATION_MESSAGE_PATH);
            if let Some(message) = &message {
                config.annotations.insert(TERMINATION_MESSAGE_PATH.into(), message.clone());
            }
            config.linux.as_mut().unwrap().resources.as_mut().unwrap().cpu_shares = shares;

            let next = Attempt::after(&status(&config), config.clone(), &restart(), unique).unwrap();
            let mut found = BTreeSet::new();
            let value = |config| serde_json::to_value(config).unwrap();
            differences(&value(&config), &value(&next.config), "", &mut found);
            let mut expected: BTreeSet<String> = [
                ".metadata.attempt".into(),
                format!(".annotations.{RESTART_COUNT}"),
                format!(".annotations.{REPLAY_ANNOTATION}"),
                ".log_path".into(),
            ].into();
            if message.is_some() {
                expected.insert(format!(".mounts[{}].host_path", inside - 1));
            }
            prop_assert_eq!(found, expected);
            prop_assert_eq!(next.config.metadata.unwrap().attempt, attempt + 1);
            prop_assert_eq!(next.config.log_path, format!("app/{}.log", restarts + 1));
            let file = message.map(|_| PathBuf::from(format!("/kubelet/pods/u1/containers/app/{unique:08x}")));
            prop_assert_eq!(next.termination_message, file);
        }
    }

    #[test]
    fn cpus_go_on_as_they_are_now_and_a_resize_is_the_kubelets() {
        let mut config = sample();
        config.annotations.insert(RESTART_COUNT.into(), "0".into());
        let mut status = status(&config);
        status.resources.as_mut().unwrap().cpuset_cpus = "2-3".into();
        let next = Attempt::after(&status, config.clone(), &restart(), 0).unwrap();
        let resources = next.config.linux.unwrap().resources.unwrap();
        assert_eq!(resources.cpuset_cpus, "2-3");
        status.resources.as_mut().unwrap().cpu_quota += 1;
        let refused = Attempt::after(&status, config.clone(), &restart(), 0);
        assert_eq!(refused, Err(ReplayBlocker::Resized("app".into())));
        config
            .annotations
            .insert(RESTART_COUNT.into(), "many".into());
        assert!(matches!(
            Attempt::after(&status, config, &restart(), 0),
            Err(ReplayBlocker::Lost(..))
        ));
    }

    fn member(name: &str, kind: ContainerKind) -> Member {
        Member {
            name: name.into(),
            kind,
            restart_policy: RestartPolicy::Never,
            old: Some(Old {
                id: "c1".into(),
                exit: None,
            }),
            unhooked: false,
            older: Vec::new(),
            startup_probe: false,
            placeholders: 0,
        }
    }

    #[test]
    fn every_blocker_is_seen_and_some_can_be_overruled() {
        let pod = |part: Value| {
            let mut container = json!({"name": "app"});
            let fields = part.as_object().unwrap().clone();
            container.as_object_mut().unwrap().extend(fields);
            let pod = json!({
                "metadata": {"name": "p", "namespace": "n", "uid": "u"},
                "spec": {"containers": [container]},
            });
            PodSpec::from_pod(&serde_json::from_value(pod).unwrap(), "n").unwrap()
        };
        let app = member("app", ContainerKind::Regular);
        let why = |start, part: Value, member: &Member| {
            let found = blocker(start, Some(&pod(part)), &[member], &[]);
            found.map(|blocker| blocker.to_string())
        };
        assert_eq!(why(Start::Auto, json!({}), &app), None);
        assert_eq!(
            why(Start::Kubelet, json!({}), &app).unwrap(),
            "start: Kubelet"
        );
        assert_eq!(
            blocker(Start::Auto, None, &[&app], &[]),
            Some(ReplayBlocker::NoSpec)
        );
        let pull = json!({"imagePullPolicy": "Always"});
        assert_eq!(
            why(Start::Auto, pull.clone(), &app).unwrap(),
            "app has imagePullPolicy Always"
        );
        assert_eq!(why(Start::Replay, pull, &app), None);
        let hook = json!({"lifecycle": {"postStart": {"sleep": {"seconds": 1}}}});
        assert_eq!(
            why(Start::Replay, hook, &app).unwrap(),
            "app has a postStart hook"
        );
        let probe = json!({"startupProbe": {"exec": {"command": ["true"]}}});
        assert_eq!(
            why(Start::Auto, probe, &app).unwrap(),
            "app has a startup probe"
        );
        let probe = json!({"livenessProbe": {"exec": {"command": ["true"]}}});
        assert_eq!(
            why(Start::Replay, probe, &app).unwrap(),
            "app has a liveness probe"
        );
        let probe = json!({"readinessProbe": {"exec": {"command": ["true"]}}});
        assert_eq!(why(Start::Auto, probe, &app), None);
        let unhooked = Member {
            unhooked: true,
            ..app.clone()
        };
        assert_eq!(
            why(Start::Auto, json!({}), &unhooked).unwrap(),
            "the exit of app cannot be held"
        );
        let spec = pod(json!({}));
        let of = |count| blocker(Start::Replay, Some(&spec), &vec![&app; count], &[]);
        assert_eq!(of(32), None);
        assert_eq!(of(33), Some(ReplayBlocker::Many(33)));
        let absent = Member { old: None, ..app };
        assert_eq!(
            why(Start::Auto, json!({}), &absent).unwrap(),
            "app was not created yet"
        );
    }

    #[test]
    fn a_pod_that_was_still_initialising_is_replayed_as_far_as_there_are_containers() {
        let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"containers": [{"name": "app"}]}});
        let pod = PodSpec::from_pod(&serde_json::from_value(pod).unwrap(), "n").unwrap();
        let why = |members: &[&Member]| blocker(Start::Auto, Some(&pod), members, &[]);
        let there = member("first", ContainerKind::Init);
        let absent = |name, kind| Member {
            old: None,
            ..member(name, kind)
        };
        let second = absent("second", ContainerKind::Init);
        let sidecar = member("sidecar", ContainerKind::Sidecar);
        let app = absent("app", ContainerKind::Regular);
        assert_eq!(why(&[&there, &second, &app]), None);
        // The kubelet has removed it.
        let gone = |name: &str| Some(ReplayBlocker::NeverCreated(name.into()));
        assert_eq!(why(&[&there, &second, &sidecar, &app]), gone("second"));
        // It was about to create all regular containers.
        let begun = member("begun", ContainerKind::Regular);
        assert_eq!(why(&[&there, &begun, &app]), gone("app"));
        assert_eq!(why(&[&begun, &app]), gone("app"));
    }

    #[test]
    fn a_container_that_had_ended_for_good_is_not_replayed_behind_init_containers() {
        let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"containers": [{"name": "app"}]}});
        let pod = PodSpec::from_pod(&serde_json::from_value(pod).unwrap(), "n").unwrap();
        let why = |members: &[&Member]| blocker(Start::Auto, Some(&pod), members, &[]);
        let init = member("init", ContainerKind::Init);
        let mut app = member("app", ContainerKind::Regular);
        assert_eq!(why(&[&init, &app]), None);
        app.old = Some(Old {
            id: "c1".into(),
            exit: Some(ExitCode(0)),
        });
        assert_eq!(
            why(&[&init, &app]),
            Some(ReplayBlocker::Completed("app".into()))
        );
        assert_eq!(why(&[&app]), None);
        app.restart_policy = RestartPolicy::Always;
        assert_eq!(why(&[&init, &app]), None);
    }

    #[test]
    fn init_containers_that_took_long_are_the_kubelets() {
        let ran = |from_ms: i64, to_ms: i64| ContainerStatus {
            started_at: from_ms * 1_000_000,
            finished_at: to_ms * 1_000_000,
            exit_code: Some(ExitCode(0)),
            ..status(&sample())
        };
        let now = 10_000 * 1_000_000;
        assert_eq!(
            inits_are_quick(&[ran(5, 1000), ran(1000, 2500)], now),
            Ok(())
        );
        let slow = inits_are_quick(&[ran(1, 1501), ran(1000, 2001)], now).unwrap_err();
        assert_eq!(
            slow.to_string(),
            "the init containers took 2501 ms last time"
        );
        // One that has not ended.
        assert!(inits_are_quick(&[ran(9000, 0)], now).is_ok());
        assert!(inits_are_quick(&[ran(1000, 0)], now).is_err());
    }

    #[test]
    fn a_log_is_linked_as_the_kubelet_links_it() {
        let link = log_link("web-0", "prod", &"app".into(), &"c1".into());
        assert_eq!(link, Path::new("/var/log/containers/web-0_prod_app-c1.log"));
        let long = log_link(&"x".repeat(250), "prod", &"app".into(), &"c1".into());
        assert_eq!(long.file_name().unwrap().len(), 255);
    }
}
