//! Static pods: what the kubelet runs from manifests on the node, with or without an API server.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::Pod;

use super::pod_spec::PodSpec;
use crate::ids::{PodIdentity, PodKey};
use crate::yaml;

/// The directory that the kubelet reads them from (`staticPodPath` of its configuration).
#[derive(Debug, Clone)]
pub struct StaticPods {
    dir: PathBuf,
    /// The kubelet gives a static pod its manifest's name and the node's (`generatePodName`,
    /// `pkg/kubelet/config/common.go`).
    suffix: String,
}

impl StaticPods {
    /// Those in `dir`, on the node of that name.
    #[must_use]
    pub fn new(dir: &Path, node: &str) -> Self {
        Self {
            dir: dir.to_owned(),
            suffix: format!("-{}", node.to_lowercase()),
        }
    }

    /// The spec of this pod, from its manifest. Blocks.
    #[must_use]
    pub fn find(&self, pod: &PodIdentity) -> Option<PodSpec> {
        match self.read(&pod.key) {
            Ok(manifest) => {
                let mut manifest = manifest?;
                let meta = &mut manifest.metadata;
                meta.name = Some(pod.key.name.clone());
                meta.namespace = Some(pod.key.namespace.clone());
                // The hash of the manifest, which the kubelet has computed.
                meta.uid = Some(pod.uid.to_string());
                PodSpec::from_pod(&manifest)
            }
            Err(error) => {
                tracing::debug!(dir = %self.dir.display(), %error, "cannot read the manifests of static pods");
                None
            }
        }
    }

    /// Whether the manifest of this pod is no longer there: the kubelet is about to end it, or has begun. Blocks.
    #[must_use]
    pub fn is_withdrawn(&self, pod: &PodIdentity) -> bool {
        matches!(self.read(&pod.key), Ok(None))
    }

    /// As the kubelet does: every file in the directory but those that begin with a dot
    /// (`extractFromDir`, `pkg/kubelet/config/file.go`).
    fn read(&self, key: &PodKey) -> io::Result<Option<Pod>> {
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            let hidden = path
                .file_name()
                .is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
            if hidden || !path.is_file() {
                continue;
            }
            let manifest = fs::read_to_string(&path)?;
            match yaml::document::<Pod>(&manifest) {
                Ok(pod) if self.is_of(&pod, key) => return Ok(Some(pod)),
                Ok(_) => {}
                Err(error) => {
                    tracing::debug!(path = %path.display(), %error, "not a manifest");
                }
            }
        }
        Ok(None)
    }

    fn is_of(&self, pod: &Pod, key: &PodKey) -> bool {
        let meta = &pod.metadata;
        let name = meta.name.as_deref().unwrap_or_default();
        let namespace = meta.namespace.as_deref().unwrap_or("default");
        key.name.strip_suffix(&self.suffix) == Some(name) && namespace == key.namespace
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANIFEST: &str = "
apiVersion: v1
kind: Pod
metadata: {name: web}
spec:
  restartPolicy: Never
  initContainers: [{name: fetch}]
  containers: [{name: app}]
";

    fn pod(name: &str) -> PodIdentity {
        PodIdentity {
            sandbox: "s1".into(),
            uid: "hash".into(),
            key: PodKey {
                namespace: "default".into(),
                name: name.into(),
            },
        }
    }

    #[test]
    fn a_static_pod_is_found_by_its_name_and_the_nodes() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("broken.yaml"), "{").unwrap();
        fs::write(dir.path().join("web.yaml"), MANIFEST).unwrap();
        let pods = StaticPods::new(dir.path(), "Node-1");
        let spec = pods.find(&pod("web-node-1")).unwrap();
        assert_eq!(spec.uid, "hash".into());
        let names: Vec<_> = spec.container_names().collect();
        assert_eq!(names, ["fetch", "app"]);
        assert!(pods.find(&pod("app-node-1")).is_none());
        assert!(pods.find(&pod("web-node-2")).is_none());
    }

    #[test]
    fn a_pod_without_its_manifest_is_withdrawn_but_not_one_whose_directory_cannot_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let pods = StaticPods::new(dir.path(), "n");
        assert!(pods.is_withdrawn(&pod("web-n")));
        fs::write(dir.path().join("web.yaml"), MANIFEST).unwrap();
        assert!(!pods.is_withdrawn(&pod("web-n")));
        fs::rename(dir.path().join("web.yaml"), dir.path().join(".web.yaml")).unwrap();
        assert!(pods.is_withdrawn(&pod("web-n")));
        let nowhere = StaticPods::new(Path::new("/nonexistent"), "n");
        assert!(!nowhere.is_withdrawn(&pod("web-n")));
    }
}
