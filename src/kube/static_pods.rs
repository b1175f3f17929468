//! Static pods: what the kubelet runs from manifests on the node, with or without an API server.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Deserialize;
use serde_json::Value;

use super::pod_spec::{self, ContainerSpec, PodSpec};
use super::variables::Fields;
use crate::ids::{PodIdentity, PodKey};
use crate::yaml::{self, YamlError};

/// The directory that the kubelet reads them from (`staticPodPath` of its configuration).
#[derive(Debug)]
pub struct StaticPods {
    dir: PathBuf,
    node: String,
    /// What keeps manifests from being read has been said, and they have not been read since.
    said: AtomicBool,
}

/// The manifest of a static pod.
#[derive(Debug)]
pub struct Manifest {
    /// Its file: the UID is a hash of the path as well (`applyDefaults`, `pkg/kubelet/config/common.go`), so that another
    /// file makes another pod.
    pub path: PathBuf,
    /// The pod, as the API server would tell of it.
    pub spec: PodSpec,
}

#[derive(Debug, thiserror::Error)]
enum ReadError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("not a pod: {0}")]
    NoYaml(#[from] YamlError),
    #[error("not a pod: {0}")]
    NoPod(#[from] serde_json::Error),
    #[error("not a pod, but {1} of {0}")]
    OtherKind(String, String),
}

/// What is read of a manifest. The API's own types take 2 KiB for a container of which nothing is written but its name.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Written {
    api_version: String,
    kind: String,
    metadata: WrittenMeta,
    spec: WrittenSpec,
}

#[derive(Deserialize)]
struct WrittenMeta {
    name: String,
    namespace: Option<String>,
    labels: Option<WrittenMap>,
    annotations: Option<WrittenMap>,
}

/// A value that is left out is an empty one to the kubelet.
type WrittenMap = BTreeMap<String, Option<String>>;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WrittenSpec {
    restart_policy: Option<String>,
    termination_grace_period_seconds: Option<i64>,
    init_containers: Option<Vec<ContainerSpec>>,
    containers: Vec<ContainerSpec>,
}

impl StaticPods {
    /// Those in `dir`, on the node of that name.
    #[must_use]
    pub fn new(dir: &Path, node: &str) -> Self {
        Self {
            dir: dir.to_owned(),
            node: node.to_owned(),
            said: AtomicBool::new(false),
        }
    }

    /// The manifest of this pod, which runs. If there is none, that is said: the kubelet has it from somewhere. Blocks.
    #[must_use]
    pub fn find(&self, pod: &PodIdentity) -> Option<Manifest> {
        let found = self.search(pod);
        match &found {
            Ok(Some(_)) => self.said.store(false, Ordering::Relaxed),
            Ok(None) => self.complain(&self.dir, &format!("it has no manifest of {}", pod.key)),
            Err(error) => self.complain(&self.dir, error),
        }
        found.ok().flatten()
    }

    /// Whether the pod of that manifest is over: the file is gone, or is of another pod now, and the kubelet is about to
    /// end the pod, or has begun. What cannot be read proves nothing. Blocks.
    #[must_use]
    pub fn is_withdrawn(&self, path: &Path, pod: &PodIdentity) -> bool {
        match read(path) {
            Ok(manifest) => !self.is_of(&manifest, &pod.key),
            Err(ReadError::Io(error)) if error.kind() == io::ErrorKind::NotFound => true,
            Err(error) => {
                self.complain(path, &error);
                false
            }
        }
    }

    /// As the kubelet does: every file in the directory but those that begin with a dot
    /// (`extractFromDir`, `pkg/kubelet/config/file.go`).
    fn search(&self, pod: &PodIdentity) -> io::Result<Option<Manifest>> {
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            let hidden = path
                .file_name()
                .is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
            if hidden || !path.is_file() {
                continue;
            }
            match read(&path) {
                Ok(manifest) if self.is_of(&manifest, &pod.key) => {
                    let spec = manifest.spec.of(manifest.metadata, pod);
                    return Ok(Some(Manifest { path, spec }));
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::debug!(path = %path.display(), %error, "not a manifest");
                }
            }
        }
        Ok(None)
    }

    /// The kubelet gives a static pod its manifest's name and the node's (`generatePodName`,
    /// `pkg/kubelet/config/common.go`).
    fn is_of(&self, manifest: &Written, key: &PodKey) -> bool {
        let WrittenMeta {
            name, namespace, ..
        } = &manifest.metadata;
        let namespace = namespace.as_deref().unwrap_or("default");
        let name = format!("{name}-{}", self.node.to_lowercase());
        key.name == name && namespace == key.namespace
    }

    fn complain(&self, path: &Path, problem: &dyn std::fmt::Display) {
        if self.said.swap(true, Ordering::Relaxed) {
            tracing::debug!(path = %path.display(), %problem, "cannot read the manifests of static pods");
            return;
        }
        tracing::warn!(
            path = %path.display(), %problem,
            "cannot read the manifests of static pods, so that their removal is not noticed before the kubelet acts on it: is --static-pod-path the kubelet's staticPodPath?"
        );
    }
}

impl WrittenSpec {
    /// The pod's spec, as the API server would tell of it.
    fn of(self, meta: WrittenMeta, pod: &PodIdentity) -> PodSpec {
        let inits = self.init_containers.into_iter().flatten();
        let inits = inits.map(ContainerSpec::before_regular);
        let containers: Vec<_> = inits.chain(self.containers).collect();
        PodSpec {
            uid: pod.uid.clone(),
            // It knows of no mirror.
            api_uid: pod.uid.clone(),
            key: pod.key.clone(),
            restart_policy: pod_spec::pod_policy(self.restart_policy.as_deref()),
            fields: Fields::of(
                containers.iter().map(|it| &it.variables),
                whole(meta.labels).as_ref(),
                whole(meta.annotations).as_ref(),
            ),
            containers,
            ending: false,
            grace: pod_spec::grace(self.termination_grace_period_seconds),
            address: None,
            restarting: BTreeSet::new(),
            recorded: BTreeSet::new(),
            started: BTreeSet::new(),
            generation: 1,
            restarts: 0,
            request: None,
        }
    }
}

fn whole(map: Option<WrittenMap>) -> Option<BTreeMap<String, String>> {
    let values = |(key, value): (String, Option<String>)| (key, value.unwrap_or_default());
    Some(map?.into_iter().map(values).collect())
}

fn read(path: &Path) -> Result<Written, ReadError> {
    let manifest: Value = yaml::document(&fs::read_to_string(path)?)?;
    let manifest: Written = serde_json::from_value(manifest)?;
    match (&*manifest.api_version, &*manifest.kind) {
        ("v1", "Pod") => Ok(manifest),
        _ => Err(ReadError::OtherKind(manifest.api_version, manifest.kind)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANIFEST: &str = "
apiVersion: v1
kind: Pod
metadata: {name: web, labels: {empty: , rank: \"1\"}}
spec:
  restartPolicy: Never
  initContainers: [{name: fetch}]
  containers:
    - name: app
      env: [{name: RANK, valueFrom: {fieldRef: {fieldPath: \"metadata.labels['rank']\"}}}]
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
        let Manifest { path, spec } = pods.find(&pod("web-node-1")).unwrap();
        assert_eq!(path, dir.path().join("web.yaml"));
        assert_eq!(spec.uid, "hash".into());
        let names: Vec<_> = spec.container_names().collect();
        assert_eq!(names, ["fetch", "app"]);
        let rank = &spec.containers[1].variables["RANK"];
        assert_eq!(spec.fields.value(rank), "1");
        assert!(pods.find(&pod("app-node-1")).is_none());
        assert!(pods.find(&pod("web-node-2")).is_none());
    }

    #[test]
    fn a_pod_is_withdrawn_with_its_manifest() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("web.yaml");
        let pods = StaticPods::new(dir.path(), "n");
        let withdrawn = || pods.is_withdrawn(&path, &pod("web-n"));
        fs::write(&path, MANIFEST).unwrap();
        assert!(!withdrawn());
        fs::write(&path, MANIFEST.replace("web", "other")).unwrap();
        assert!(withdrawn());
        fs::rename(&path, dir.path().join(".web.yaml")).unwrap();
        assert!(withdrawn());
    }

    #[test]
    fn a_manifest_that_cannot_be_read_proves_nothing_and_that_is_said_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("web.yaml");
        let pods = StaticPods::new(dir.path(), "n");
        let mut said = Vec::new();
        for _ in 0..2 {
            // Half of it has been written; it is not text; it is not even a file.
            for manifest in [b"apiVersion: v1\nmetadata: {name: ".as_slice(), b"\xff"] {
                fs::write(&path, manifest).unwrap();
                assert!(!pods.is_withdrawn(&path, &pod("web-n")));
            }
            fs::remove_file(&path).unwrap();
            fs::create_dir(&path).unwrap();
            assert!(!pods.is_withdrawn(&path, &pod("web-n")));
            fs::remove_dir(&path).unwrap();
            said.push(pods.said.load(Ordering::Relaxed));
        }
        assert_eq!(said, [true; 2]);
    }

    #[test]
    fn a_running_pod_without_a_manifest_is_said_to_have_none_until_one_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let pods = StaticPods::new(dir.path(), "n");
        let said = || pods.said.load(Ordering::Relaxed);
        assert!(pods.find(&pod("web-n")).is_none() && said());
        fs::write(dir.path().join("web.yaml"), MANIFEST).unwrap();
        assert!(pods.find(&pod("web-n")).is_some() && !said());
        let nowhere = StaticPods::new(Path::new("/nonexistent"), "n");
        assert!(nowhere.find(&pod("web-n")).is_none());
        assert!(nowhere.said.load(Ordering::Relaxed));
    }
}
