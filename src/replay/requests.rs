//! How much memory containers requested when they were made. The kubelet changes that in place, and the runtime tells
//! nothing of it: what is made next has another score for the kernel's OOM killer (`GetContainerOOMScoreAdjust`,
//! `pkg/kubelet/qos/policy.go`).

use std::collections::BTreeMap;

use super::ReplayBlocker;
use crate::ids::ContainerId;
use crate::kube::PodSpec;
use crate::node::{Instance, Instances, Maker};
use crate::plan::Member;

/// By container, as the API has it.
#[derive(Debug, Default)]
pub(crate) struct Requests(BTreeMap<ContainerId, Option<String>>);

impl Requests {
    /// A container is about to be known, beside those that are: the kubelet has made it from the spec, a replay from the attempt
    /// before.
    pub(crate) fn note(
        &mut self,
        id: &ContainerId,
        instance: &Instance,
        known: &Instances,
        spec: Option<&PodSpec>,
    ) {
        let request = match instance.maker {
            Maker::Kubelet => {
                let container = spec.and_then(|spec| spec.container(&instance.name));
                container.map(|it| it.memory_request.clone())
            }
            Maker::Replay => {
                let before = known.newest(&instance.name);
                before.and_then(|(id, _)| self.0.get(id).cloned())
            }
            Maker::Placeholder => None,
        };
        if let Some(request) = request {
            self.0.entry(id.clone()).or_insert(request);
        }
    }

    /// It is gone.
    pub(crate) fn forget(&mut self, id: &ContainerId) {
        self.0.remove(id);
    }

    /// Whether one of these may request another amount by now. Nobody knows what those requested that are older than the
    /// plugin, but whether the spec was ever changed.
    pub(crate) fn changed(
        &self,
        members: &[&Member],
        spec: Option<&PodSpec>,
    ) -> Option<ReplayBlocker> {
        let spec = spec?;
        let changed = |member: &&&Member| {
            let then = member.old_id().and_then(|id| self.0.get(id));
            match then.zip(spec.container(&member.name)) {
                Some((then, now)) => *then != now.memory_request,
                None => spec.generation > 1,
            }
        };
        let member = members.iter().find(changed)?;
        Some(ReplayBlocker::Resized(member.name.clone()))
    }
}
