//! Which runtime handlers run OCI hooks on the host, out of containerd's configuration.
//!
//! Hooks are run by runc and what is called in its place (crun, youki: the same shim with another `BinaryName`). A
//! sandbox that is a virtual machine or a kernel of its own (kata, gVisor) has a shim of its own, and hooks run inside
//! it or not at all.

use std::collections::{BTreeMap, HashSet};

use serde::Deserialize;

use super::error::CriError;

/// The shims of runc (`runtime/v2/README.md` in containerd 2.3): `io.containerd.runc.v2`, and v1 before it.
const RUNC: &str = "io.containerd.runc.";

/// What matters of `RuntimeConfig` (`internal/cri/config/config.go` in containerd 2.3, `pkg/cri/config` in 1.7).
#[derive(Deserialize)]
struct Config {
    containerd: Containerd,
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

/// The handlers whose shim is not runc's; the default one also as the empty name, by which sandboxes know it.
pub(super) fn without_hooks(config: &str) -> Result<HashSet<String>, CriError> {
    let config: Config =
        serde_json::from_str(config).map_err(|error| CriError::malformed_info("Status", &error))?;
    let Containerd {
        default_runtime_name: default,
        runtimes,
    } = config.containerd;
    let foreign = |(name, runtime): (String, Runtime)| {
        (!runtime.runtime_type.starts_with(RUNC)).then_some(name)
    };
    let mut names: HashSet<String> = runtimes.into_iter().filter_map(foreign).collect();
    if names.contains(&default) {
        names.insert(String::new());
    }
    Ok(names)
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
        without_hooks(&config).unwrap()
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
    fn what_is_no_configuration_is_an_error() {
        assert!(without_hooks("{}").is_err());
    }
}
