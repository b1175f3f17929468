//! Which hooks run when a container has ended, out of containerd's verbose info.

use serde::Deserialize;

use super::error::CriError;

/// What is read of it. The rest may be megabytes that the pod's author wrote (environment, arguments): nothing is made
/// of them.
#[derive(Deserialize)]
struct Info {
    #[serde(rename = "runtimeSpec")]
    runtime_spec: Option<RuntimeSpec>,
}

#[derive(Deserialize)]
struct RuntimeSpec {
    hooks: Option<Hooks>,
}

#[derive(Default, Deserialize)]
struct Hooks {
    poststop: Option<Vec<Hook>>,
}

#[derive(Deserialize)]
struct Hook {
    args: Option<Vec<String>>,
}

/// The arguments of each hook, the executable's name first. `None` where the specification is missing.
pub(super) fn hooks(info: &str) -> Result<Option<Vec<Vec<String>>>, CriError> {
    let info: Info = serde_json::from_str(info)
        .map_err(|error| CriError::malformed_info("ContainerStatus", &error))?;
    Ok(info.runtime_spec.map(|spec| {
        let hooks = spec.hooks.unwrap_or_default().poststop;
        let args = |hook: Hook| hook.args.unwrap_or_default();
        hooks.unwrap_or_default().into_iter().map(args).collect()
    }))
}
