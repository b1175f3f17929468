//! Manifests: those of static pods, which the plugin reads, and those that `reprise check` is given.

use std::fs;
use std::path::PathBuf;

use reprise::check::{self, CheckArgs, Output};
use reprise::ids::{PodIdentity, PodKey};
use reprise::kube::StaticPods;

use super::dir;

pub(super) fn find(input: &[u8]) {
    let manifests = dir().join("manifests");
    fs::create_dir_all(&manifests).expect("a directory");
    fs::write(manifests.join("web.yaml"), input).expect("a file");
    let pod = PodIdentity {
        sandbox: "s1".into(),
        uid: "hash".into(),
        key: PodKey {
            namespace: "default".into(),
            name: "web-node".into(),
        },
    };
    let pods = StaticPods::new(&manifests, "node");
    let _ = pods.find(&pod);
}

pub(super) fn check(input: &[u8]) {
    let mut said = Vec::new();
    let args = CheckArgs {
        files: vec![PathBuf::from("-")],
        kubelet: None,
        output: Output::Text,
    };
    let _ = check::run(&args, input, &mut said);
}
