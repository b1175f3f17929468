//! How much memory containers requested when they were made. The kubelet changes that in place, and the runtime tells
//! nothing of it: what is made next has another score for the kernel's OOM killer (`GetContainerOOMScoreAdjust`,
//! `pkg/kubelet/qos/policy.go`).

use std::collections::BTreeMap;

use super::Pod;
use crate::ids::ContainerId;
use crate::node::{Instance, Maker};
use crate::plan::Member;
use crate::replay::ReplayBlocker;

/// By container, as the API has it.
pub(super) type Requests = BTreeMap<ContainerId, Option<String>>;

impl Pod {
    /// A container is about to be known: the kubelet has made it from the spec, a replay from the attempt before.
    pub(super) fn note_request(&mut self, id: &ContainerId, instance: &Instance) {
        let request = match instance.maker {
            Maker::Kubelet => {
                let spec = self.spec.as_ref();
                let container = spec.and_then(|spec| spec.container(&instance.name));
                container.map(|it| it.memory_request.clone())
            }
            Maker::Replay => {
                let before = self.instances.newest(&instance.name);
                before.and_then(|(id, _)| self.requests.get(id).cloned())
            }
            Maker::Placeholder => None,
        };
        if let Some(request) = request {
            self.requests.entry(id.clone()).or_insert(request);
        }
    }

    /// Whether one of these may request another amount by now. Nobody knows what those requested that are older than the
    /// plugin, but whether the spec was ever changed.
    pub(super) fn request_changed(&self, members: &[&Member]) -> Option<ReplayBlocker> {
        let spec = self.spec.as_ref()?;
        let changed = |member: &&&Member| {
            let id = member.old.as_ref().map(|old| &old.id);
            let then = id.and_then(|id| self.requests.get(id));
            match then.zip(spec.container(&member.name)) {
                Some((then, now)) => *then != now.memory_request,
                None => spec.generation > 1,
            }
        };
        let member = members.iter().find(changed)?;
        Some(ReplayBlocker::Resized(member.name.clone()))
    }
}
