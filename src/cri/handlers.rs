//! How the runtime runs containers, out of its configuration: which handlers' exits can be held, and where CRI-O is told of
//! exits.
//!
//! On containerd hooks are run by runc and what is called in its place (crun, youki: the same shim with another `BinaryName`). A
//! sandbox that is a virtual machine or a kernel of its own (kata, gVisor) has a shim of its own, and hooks run inside
//! it or not at all. On CRI-O it is conmon that tells of exits, which only those handlers have that are called `oci`.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;

use serde::Deserialize;

use super::error::CriError;

/// The shims of runc (`runtime/v2/README.md` in containerd 2.3): `io.containerd.runc.v2`, and v1 before it.
const RUNC: &str = "io.containerd.runc.";
/// The type of CRI-O's handlers that have a conmon, and by default (`RuntimeTypePod` and its like, `pkg/config/config.go` 1.36).
const CONMON: [&str; 2] = ["oci", ""];

/// What matters of a runtime's configuration.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Handlers {
    /// Handlers of whose containers no exit can be held; the default one also as the empty name, by which sandboxes know it.
    pub(super) without_hold: HashSet<String>,
    /// CRI-O's directory of exits.
    pub(super) exits: Option<PathBuf>,
}

/// `RuntimeConfig` of containerd (`internal/cri/config/config.go` in 2.3, `pkg/cri/config` in 1.7), or what has that of CRI-O in
/// it (`createRuntimeInfo`, `server/runtime_status.go` 1.36).
#[derive(Deserialize)]
struct Config {
    containerd: Option<Containerd>,
    crio: Option<Crio>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Containerd {
    default_runtime_name: String,
    runtimes: BTreeMap<String, Runtime>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Runtime {
    runtime_type: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Crio {
    default_runtime: String,
    runtimes: BTreeMap<String, CrioRuntime>,
    container_exits_dir: PathBuf,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct CrioRuntime {
    runtime_type: String,
}

pub(super) fn read(config: &str) -> Result<Handlers, CriError> {
    let malformed = |error: serde_json::Error| CriError::malformed_info("Status", &error);
    let config: Config = serde_json::from_str(config).map_err(malformed)?;
    if let Some(of) = config.containerd {
        let types = of.runtimes.into_iter();
        let types = types.map(|(name, it)| (name, it.runtime_type.starts_with(RUNC)));
        Ok(Handlers {
            without_hold: without_hold(&of.default_runtime_name, types),
            exits: None,
        })
    } else if let Some(of) = config.crio {
        let types = of.runtimes.into_iter();
        let types = types.map(|(name, it)| (name, CONMON.contains(&it.runtime_type.as_str())));
        Ok(Handlers {
            without_hold: without_hold(&of.default_runtime, types),
            exits: Some(of.container_exits_dir),
        })
    } else {
        Err(CriError::Malformed {
            call: "Status",
            problem: "verbose info: neither containerd's configuration nor CRI-O's".into(),
        })
    }
}

/// `handlers`, each with whether exits of its containers can be held.
fn without_hold(default: &str, handlers: impl Iterator<Item = (String, bool)>) -> HashSet<String> {
    let foreign = handlers.filter_map(|(name, can)| (!can).then_some(name));
    let mut names: HashSet<String> = foreign.collect();
    if names.contains(default) {
        names.insert(String::new());
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(default: &str) -> HashSet<String> {
        let config = format!(
            r#"{{"containerd": {{"defaultRuntimeName": "{default}", "runtimes": {{
                "runc": {{"runtimeType": "io.containerd.runc.v2"}},
                "kata": {{"runtimeType": "io.containerd.kata.v2"}},
                "gvisor": {{"runtimeType": "io.containerd.runsc.v1"}}
            }}}}, "cni": {{}}}}"#
        );
        read(&config).unwrap().without_hold
    }

    #[test]
    fn handlers_with_a_shim_of_their_own_run_no_hooks() {
        assert_eq!(names("runc"), ["kata", "gvisor"].map(String::from).into());
    }

    #[test]
    fn the_default_handler_has_no_name_in_sandboxes() {
        assert!(names("kata").contains(""));
    }

    #[test]
    fn crio_says_where_it_is_told_of_exits_and_which_handlers_have_a_conmon() {
        let config = r#"{"sandboxImage": "pause", "crio": {"ContainerExitsDir": "/run/crio/exits", "DefaultRuntime": "crun",
            "Runtimes": {"crun": {"RuntimeType": "oci"}, "runc": {"RuntimeType": ""}, "kata": {"RuntimeType": "vm"},
            "rs": {"RuntimeType": "pod"}}}}"#;
        let expected = Handlers {
            without_hold: ["kata", "rs"].map(String::from).into(),
            exits: Some("/run/crio/exits".into()),
        };
        assert_eq!(read(config).unwrap(), expected);
    }

    #[test]
    fn what_is_no_configuration_is_an_error() {
        assert!(read("{}").is_err());
    }
}
