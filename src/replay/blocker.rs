//! What is in the way of a replay: then the kubelet starts the containers.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::Deserialize;

use super::MOST_BYTES;
use crate::ids::ContainerName;
use crate::kube::{ContainerKind, ContainerSpec, PodSpec, StartDuty};
use crate::plan::{Member, start_at_once};
use crate::policy::Start;
use crate::text;

/// Of more containers too many may not have been made when the hold ends.
const MOST_CONTAINERS: usize = 32;
/// A variable's name is anything of any length but for `=`.
const LONGEST_VARIABLE: usize = 64;

/// Why the kubelet starts the containers and not the plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplayBlocker {
    /// The pod, or the plugin's configuration, wants it so.
    Asked,
    /// The runtime tells of no container what it was made from.
    Untold,
    /// Nobody has told the pod's spec.
    NoSpec,
    /// Containers may not start yet.
    BackOff,
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
    /// This container has a postStart hook that is not run here: it is a request, which is to come from the node.
    PostStart(ContainerName),
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
    /// This variable of this container would have another value by now.
    VariableChanged(ContainerName, String),
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
            Self::Untold => write!(
                f,
                "the runtime does not tell what containers were made from, as CRI-O"
            ),
            Self::NoSpec => write!(f, "the pod's spec is not known"),
            Self::BackOff => write!(
                f,
                "a back-off is due, and the containers start one after another"
            ),
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
            Self::PostStart(name) => write!(f, "{name} has a postStart hook"),
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
            Self::VariableChanged(name, variable) => {
                let variable = text::cut(variable, LONGEST_VARIABLE);
                let variable = text::printable(&variable);
                write!(f, "{name} has another value of {variable} by now")
            }
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

impl ReplayBlocker {
    /// The container that the kubelet is to start for that. Those before it may be replayed all the same.
    pub(crate) fn container(&self) -> Option<&ContainerName> {
        match self {
            Self::PostStart(name) | Self::Duty(name, _) | Self::Device(name, _) => Some(name),
            _ => None,
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
    if let Some(many) = many(members.len()) {
        return Some(many);
    }
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
    let obstacle = members.iter().find_map(|member| match &member.old {
        Some(_) if in_order && member.had_completed() && member.kind == ContainerKind::Regular => {
            Some(ReplayBlocker::Completed(member.name.clone()))
        }
        None => Some(ReplayBlocker::NeverCreated(member.name.clone())),
        Some(old) if member.unhooked && old.exit.is_none() => {
            Some(ReplayBlocker::NotHeld(member.name.clone()))
        }
        Some(_) => None,
    });
    // Those alone leave something to replay.
    obstacle.or_else(|| {
        members.iter().find_map(|member| {
            let container = spec.container(&member.name)?;
            blockers_of(container, start, devices).next()
        })
    })
}

/// The same for a pod of so many containers.
pub(crate) fn many(containers: usize) -> Option<ReplayBlocker> {
    (containers > MOST_CONTAINERS).then_some(ReplayBlocker::Many(containers))
}

/// What of a container's spec is in the way of a replay.
pub(crate) fn blockers_of(
    container: &ContainerSpec,
    start: Start,
    devices: &[Devices],
) -> impl Iterator<Item = ReplayBlocker> {
    let name = &container.name;
    let hook = container.lifecycle.post_start.as_ref();
    let hook = hook.filter(|hook| !hook.is_run_anywhere());
    let asked = |it: &&String| !devices.iter().any(|devices| devices.have(it));
    let device = container.devices.iter().filter(move |it| asked(it));
    let duties = container.duties.iter().filter(move |duty| match duty {
        // If the kubelet relists between its creation and its start, the probe counts as failed and the
        // container is killed (`doProbe`, `pkg/kubelet/prober/worker.go`).
        StartDuty::StartupProbe | StartDuty::LivenessProbe => true,
        // Whoever asks for it knows.
        StartDuty::ImagePull | StartDuty::Environment | StartDuty::SubPath => start == Start::Auto,
    });
    let hook = hook.map(|_| ReplayBlocker::PostStart(name.clone()));
    let device = device.map(|device| ReplayBlocker::Device(name.clone(), device.clone()));
    let duties = duties.map(|duty| ReplayBlocker::Duty(name.clone(), *duty));
    hook.into_iter().chain(device).chain(duties)
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
