//! Gets back the configuration that a container or sandbox was made from, out of the JSON in containerd's verbose status.
//!
//! containerd prints `info["info"]` with Go's `encoding/json` (`internal/cri/server/container_status.go` and
//! `podsandbox/sandbox_status.go` in 2.x): proto field names, enums and 64-bit integers as numbers, zero values left out.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::api::runtime::v1::ContainerConfig;
use super::error::CriError;

/// A configuration that was got back, and what of it could not be.
#[derive(Debug, Clone, PartialEq)]
pub struct Recovered<T> {
    /// The configuration.
    pub config: T,
    /// Paths of what is in the JSON and not in `config`, such as `linux.security_context.new_field`: fields of a newer
    /// CRI, Windows fields, environment values that are not UTF-8. A container made from `config` would lack them.
    pub lost: Vec<String>,
}

impl<T> Recovered<T> {
    /// Whether nothing was lost.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.lost.is_empty()
    }
}

/// The one part of containerd's info that matters here; the OCI spec beside it is large.
#[derive(Deserialize)]
struct Info<T> {
    config: Option<T>,
}

/// Reads `config` out of a verbose info text. `None` if there is none in it, as with CRI-O.
pub(super) fn recover<T>(call: &'static str, info: &str) -> Result<Option<Recovered<T>>, CriError>
where
    T: DeserializeOwned + Serialize,
{
    let malformed = |error: serde_json::Error| CriError::malformed_info(call, &error);
    let Info { config } = serde_json::from_str::<Info<Value>>(info).map_err(malformed)?;
    let Some(original) = config else {
        return Ok(None);
    };
    let config = T::deserialize(&original).map_err(|error| {
        // Only the text itself has places.
        let located = serde_json::from_str::<Info<T>>(info).err();
        malformed(located.unwrap_or(error))
    })?;
    let kept = serde_json::to_value(&config).map_err(malformed)?;
    let mut lost = Vec::new();
    find_lost(&original, &kept, "", &mut lost);
    Ok(Some(Recovered { config, lost }))
}

/// As the kubelet has asked for it: containerd writes into it where on the host it has mounted an image, and refuses what
/// has both (`mutateImageMount`, `internal/cri/server/container_image_mount.go`, 2.1).
pub(super) fn as_asked_for(
    mut recovered: Recovered<ContainerConfig>,
) -> Recovered<ContainerConfig> {
    for mount in &mut recovered.config.mounts {
        if mount.image.as_ref().is_some_and(|it| !it.image.is_empty()) {
            mount.host_path.clear();
        }
    }
    recovered
}

/// Collects the paths of everything in `original` that `kept` does not have just so.
fn find_lost(original: &Value, kept: &Value, path: &str, lost: &mut Vec<String>) {
    match (original, kept) {
        (Value::Object(original), Value::Object(kept)) => {
            for (name, value) in original {
                let path = if path.is_empty() {
                    name.clone()
                } else {
                    format!("{path}.{name}")
                };
                match kept.get(name) {
                    Some(kept) => find_lost(value, kept, &path, lost),
                    None => lost.push(path),
                }
            }
        }
        (Value::Array(original), Value::Array(kept)) if original.len() == kept.len() => {
            for (index, (original, kept)) in original.iter().zip(kept).enumerate() {
                find_lost(original, kept, &format!("{path}[{index}]"), lost);
            }
        }
        // Go puts U+FFFD where text is not UTF-8: the bytes themselves are not to be had.
        (Value::String(text), _) if text.contains(char::REPLACEMENT_CHARACTER) => {
            lost.push(path.to_owned());
        }
        _ if original == kept => {}
        _ => lost.push(path.to_owned()),
    }
}

/// Bytes that Go prints as text: `KeyValue.value`, which was a string before Kubernetes 1.36 and keeps its old JSON
/// (`api_json.go` in k8s.io/cri-api v0.36).
pub(crate) mod text {
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&String::from_utf8_lossy(bytes))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        String::deserialize(from).map(String::into_bytes)
    }
}

#[cfg(test)]
mod tests;
