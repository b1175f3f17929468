//! The pods with restart rules on this node, each with its driver, and the way from news to the right one.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use crate::cri::{self, ContainerSummary, SandboxSummary};
use crate::exit_hold::{Answer, Knock};
use crate::ids::{ContainerId, ExitCode, PodIdentity, PodUid, SandboxId};
use crate::kube::{PodChange, Pods};
use crate::node::{Instance, InstanceState, PLACEHOLDER_ANNOTATION, now_ns};
use crate::policy::{self, Policy};
use crate::restart::driver::{Driver, Tools};
use crate::restart::record::Record;

/// All pods with restart rules.
#[derive(Debug)]
pub struct Roster {
    tools: Arc<Tools>,
    pods: Pods,
    entries: RwLock<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    /// `None`: the pod's rules cannot be used, which has been said once.
    by_sandbox: HashMap<SandboxId, Option<Arc<Driver>>>,
    of_container: HashMap<ContainerId, SandboxId>,
}

impl Roster {
    /// An empty roster.
    #[must_use]
    pub fn new(tools: Arc<Tools>, pods: Pods) -> Self {
        Self {
            tools,
            pods,
            entries: RwLock::default(),
        }
    }

    /// The driver of the pod with this sandbox, made when the pod has rules and is seen for the first time.
    pub fn adopt<'a>(
        &self,
        pod: impl FnOnce() -> PodIdentity,
        sandbox: &SandboxId,
        annotations: impl IntoIterator<Item = (&'a str, &'a str)> + Clone,
    ) -> Option<Arc<Driver>> {
        if !policy::has_rules(annotations.clone()) {
            return None;
        }
        if let Some(known) = self.read(|entries| entries.by_sandbox.get(sandbox).cloned()) {
            return known;
        }
        self.write(|entries| {
            // Somebody else may have been first.
            let entry = entries.by_sandbox.entry(sandbox.clone());
            entry
                .or_insert_with(|| self.take_charge(pod(), annotations))
                .clone()
        })
    }

    /// `None`: the rules cannot be used, which is said here.
    fn take_charge<'a>(
        &self,
        pod: PodIdentity,
        annotations: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Option<Arc<Driver>> {
        match Policy::from_annotations(annotations) {
            Ok(policy) => policy.map(|policy| {
                let spec = self.pods.get(&pod.uid);
                Driver::spawn(Arc::clone(&self.tools), pod, policy, spec)
            }),
            Err(error) => {
                self.tools.reporter.invalid_rules(&pod, &error);
                None
            }
        }
    }

    /// A container of a pod with rules was made.
    pub fn created(&self, driver: &Arc<Driver>, id: ContainerId, instance: Instance) {
        let sandbox = driver.pod().sandbox.clone();
        self.write(|entries| entries.of_container.insert(id.clone(), sandbox));
        driver.created(id, instance);
    }

    /// A container was removed.
    pub fn removed(&self, id: &ContainerId) {
        if let Some(driver) = self.driver_of(id) {
            driver.removed(id);
            self.write(|entries| entries.of_container.remove(id));
        }
    }

    /// A container has ended.
    pub fn ended(&self, id: &ContainerId, code: Option<ExitCode>) {
        if let Some(driver) = self.driver_of(id) {
            driver.ended(id, code);
        }
    }

    /// A hook asks.
    pub fn knock(&self, knock: &Knock) -> Answer {
        match self.driver_of(&knock.container) {
            Some(driver) => driver.knock(&knock.container),
            None => Answer::Go,
        }
    }

    /// Whether any pod's exits are held.
    pub fn holds(&self) -> bool {
        self.read(|entries| {
            let mut drivers = entries.by_sandbox.values().flatten();
            drivers.any(|driver| driver.holds())
        })
    }

    /// A sandbox was stopped or removed: its pod is over.
    pub fn sandbox_stopped(&self, sandbox: &SandboxId) {
        let driver = self.write(|entries| {
            entries.of_container.retain(|_, of| of != sandbox);
            entries.by_sandbox.remove(sandbox).flatten()
        });
        if let Some(driver) = driver {
            driver.close();
        }
    }

    /// The API tells of a pod.
    pub fn pod_changed(&self, change: PodChange) {
        match change {
            PodChange::Applied(spec) => {
                for driver in self.drivers_of(&spec.uid) {
                    driver.spec_changed(Arc::clone(&spec));
                }
            }
            PodChange::Deleted(uid) => {
                for driver in self.drivers_of(&uid) {
                    driver.deleted();
                }
            }
        }
    }

    /// Compares with what the runtime has. `records`: restarts that a predecessor left, at the first time.
    pub async fn relist(&self, mut records: Vec<Record>) -> Result<(), cri::CriError> {
        let asked = now_ns();
        let sandboxes = self.tools.cri.list_sandboxes().await?;
        let containers = self.tools.cri.list_containers(None).await?;
        let ready: Vec<&SandboxSummary> = sandboxes
            .iter()
            .filter(|it| it.state == cri::SandboxState::Ready)
            .collect();
        let gone: Vec<SandboxId> = self.read(|entries| {
            let known = entries.by_sandbox.keys();
            known
                .filter(|id| !ready.iter().any(|it| it.id == **id))
                .cloned()
                .collect()
        });
        for sandbox in gone {
            self.sandbox_stopped(&sandbox);
        }
        for sandbox in ready {
            let annotations = sandbox
                .annotations
                .iter()
                .map(|(key, value)| (key.as_str(), value.as_str()));
            let Some(driver) = self.adopt(|| identity(sandbox), &sandbox.id, annotations) else {
                continue;
            };
            let mut found = Vec::new();
            for container in containers.iter().filter(|it| it.sandbox == sandbox.id) {
                found.push((container.id.clone(), self.instance(container).await?));
            }
            self.write(|entries| {
                for (id, _) in &found {
                    entries.of_container.insert(id.clone(), sandbox.id.clone());
                }
            });
            let begun = records
                .iter()
                .position(|record| record.plan.pod.sandbox == sandbox.id)
                .map(|index| records.swap_remove(index));
            driver.relisted(found, asked, begun);
        }
        for record in records {
            // Its sandbox is gone, and so is everything that the record was for.
            if let Err(error) = self.tools.records.forget(&record.plan.pod.sandbox) {
                tracing::warn!(pod = %record.plan.pod.key, %error, "could not remove the record of a pod that is gone");
            }
        }
        Ok(())
    }

    async fn instance(&self, container: &ContainerSummary) -> Result<Instance, cri::CriError> {
        let state = match container.state {
            cri::ContainerState::Created => InstanceState::Created,
            cri::ContainerState::Running | cri::ContainerState::Unknown => InstanceState::Running,
            cri::ContainerState::Exited => {
                match self.tools.cri.container_status(&container.id).await {
                    Ok(status) => InstanceState::Ended(status.exit_code),
                    Err(cri::CriError::Gone { .. }) => InstanceState::Ended(None),
                    Err(error) => return Err(error),
                }
            }
        };
        Ok(Instance {
            name: container.name.clone(),
            state,
            placeholder: container.annotations.contains_key(PLACEHOLDER_ANNOTATION),
            created_at: container.created_at,
        })
    }

    fn driver_of(&self, id: &ContainerId) -> Option<Arc<Driver>> {
        self.read(|entries| {
            let sandbox = entries.of_container.get(id)?;
            entries.by_sandbox.get(sandbox).cloned().flatten()
        })
    }

    fn drivers_of(&self, uid: &PodUid) -> Vec<Arc<Driver>> {
        self.read(|entries| {
            let drivers = entries.by_sandbox.values().flatten();
            drivers
                .filter(|driver| driver.pod().uid == *uid)
                .cloned()
                .collect()
        })
    }

    fn read<T>(&self, with: impl FnOnce(&Entries) -> T) -> T {
        with(&self.entries.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write<T>(&self, with: impl FnOnce(&mut Entries) -> T) -> T {
        with(&mut self.entries.write().unwrap_or_else(PoisonError::into_inner))
    }
}

fn identity(sandbox: &SandboxSummary) -> PodIdentity {
    PodIdentity {
        sandbox: sandbox.id.clone(),
        uid: sandbox.uid.clone(),
        key: sandbox.pod.clone(),
    }
}
