//! Placeholders: containers that are made and never started, so that the kubelet sees *waiting* where it would
//! see *terminated* (`convertToAPIContainerStatuses` takes the newest of a name).

use std::sync::atomic::{AtomicU32, Ordering};

use tokio::sync::OnceCell;

use crate::cri::{
    self, CONTAINER_NAME, ContainerConfig, ContainerMetadata, CriError, ImageSpec,
    LinuxContainerConfig, LinuxContainerSecurityContext, Map, OF_POD, PodSandboxConfig,
};
use crate::ids::{ContainerId, ContainerName, SandboxId};
use crate::node::PLACEHOLDER_ANNOTATION;
use crate::plan::RestartId;

/// Makes the placeholders of one pod.
#[derive(Debug)]
pub(super) struct Placeholders {
    sandbox: SandboxId,
    config: OnceCell<Sandbox>,
    /// The runtime reserves `name_pod_namespace_uid_attempt`. The kubelet counts attempts from 0 up, we from the
    /// top down.
    next_attempt: AtomicU32,
}

/// What a placeholder's sandbox was made from.
#[derive(Debug)]
enum Sandbox {
    Whole(PodSandboxConfig),
    /// CRI-O does not tell all of it.
    Outline(PodSandboxConfig),
}

impl Sandbox {
    fn config(&self) -> &PodSandboxConfig {
        let (Self::Whole(config) | Self::Outline(config)) = self;
        config
    }
}

impl Placeholders {
    /// For the pod of that sandbox.
    pub(super) fn new(sandbox: SandboxId) -> Self {
        Self {
            sandbox,
            config: OnceCell::new(),
            next_attempt: AtomicU32::new(u32::MAX),
        }
    }

    /// Makes one placeholder for container `name`, shaped like its attempt `like`, while that is `wanted`. What wakes the
    /// kubelet may be like nothing.
    pub(super) async fn make(
        &self,
        cri: &cri::Client,
        name: &ContainerName,
        like: Option<&ContainerId>,
        restart: &RestartId,
        wanted: impl Fn() -> bool,
    ) -> Result<ContainerId, CriError> {
        let sandbox = self.config.get_or_try_init(|| self.sandbox(cri)).await?;
        let shape = match like {
            Some(like) => Shape::of(cri, like, sandbox).await?,
            None => Shape::of_none(cri, sandbox.config()).await?,
        };
        let sandbox = sandbox.config();
        loop {
            let attempt = self.next_attempt.fetch_sub(1, Ordering::Relaxed);
            let config = config(name, attempt, shape.clone(), sandbox, restart);
            let made = cri.create_container(&self.sandbox, &config, sandbox, &wanted);
            match made.await {
                // One that a predecessor left and that is being swept.
                Err(CriError::NameReserved { .. }) => {}
                other => return other,
            }
        }
    }

    /// The real one: a runtime compares the user namespaces of container and sandbox.
    async fn sandbox(&self, cri: &cri::Client) -> Result<Sandbox, CriError> {
        match cri.sandbox_config(&self.sandbox).await? {
            Some(recovered) => Ok(Sandbox::Whole(recovered.config)),
            None => cri
                .sandbox_outline(&self.sandbox)
                .await
                .map(Sandbox::Outline),
        }
    }
}

/// What a placeholder is made from.
#[derive(Debug, Clone)]
struct Shape {
    labels: Map,
    annotations: Map,
    image: ImageSpec,
    command: Vec<String>,
    /// The directory in the pod's, for its log.
    directory: String,
}

impl Shape {
    /// That of this container.
    async fn of(
        cri: &cri::Client,
        like: &ContainerId,
        sandbox: &Sandbox,
    ) -> Result<Self, CriError> {
        let status = cri.container_status(like).await?;
        // CRI-O has runc look for the command when it makes a container.
        let command = match sandbox {
            Sandbox::Whole(_) => Vec::new(),
            Sandbox::Outline(_) => cri.told(like).await?.map(|it| it.args).unwrap_or_default(),
        };
        Ok(Self {
            labels: status.labels,
            annotations: status.annotations,
            image: ImageSpec {
                image: status.image_ref,
                // By which CRI-O finds the policy for its signature.
                user_specified_image: status.image.image,
                ..Default::default()
            },
            command,
            directory: format!("{}/", status.name),
        })
    }

    /// Where nothing is left of the pod but its sandbox: any image will do, of which nothing is started.
    async fn of_none(cri: &cri::Client, sandbox: &PodSandboxConfig) -> Result<Self, CriError> {
        let mut labels = sandbox.labels.clone();
        labels.retain(|key, _| OF_POD.contains(&key.as_str()));
        Ok(Self {
            labels,
            annotations: Map::new(),
            image: cri.smallest_image().await?,
            command: Vec::new(),
            directory: String::new(),
        })
    }
}

fn config(
    name: &ContainerName,
    attempt: u32,
    shape: Shape,
    sandbox: &PodSandboxConfig,
    restart: &RestartId,
) -> ContainerConfig {
    let (mut labels, mut annotations) = (shape.labels, shape.annotations);
    // What wakes the kubelet is like one of the pod's containers, and none of them.
    labels.insert(CONTAINER_NAME.to_owned(), name.to_string());
    annotations.insert(PLACEHOLDER_ANNOTATION.to_owned(), restart.to_string());
    let namespaces = sandbox
        .linux
        .as_ref()
        .and_then(|linux| linux.security_context.as_ref())
        .and_then(|security| security.namespace_options.clone());
    ContainerConfig {
        // Its container's name, for the kubelet's status, is in the labels. Its garbage collection goes by this one, and
        // keeps one dead container of a name (kuberuntime_gc.go `evictableContainers`): neither another placeholder nor
        // the exit behind it may be collected because of this one.
        metadata: Some(ContainerMetadata {
            name: format!("reprise-{attempt}"),
            attempt,
        }),
        image: Some(shape.image),
        command: shape.command,
        labels,
        annotations,
        // The kubelet deletes `<log path>*` with a container: an empty one would be the pod's whole directory,
        // and one that begins with a number would count as an attempt. CRI-O makes it with the container, in a directory that
        // must be there.
        log_path: format!("{}reprise-{attempt}.log", shape.directory),
        linux: Some(LinuxContainerConfig {
            security_context: Some(LinuxContainerSecurityContext {
                namespace_options: namespaces,
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}
