//! What things are called: one type a name, so that no two can be mistaken for each other.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(String);

        impl $name {
            /// The name as the outside writes it.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.to_owned())
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self(text)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

text_id! {
    /// A container's id in the runtime: one per attempt.
    ContainerId
}
text_id! {
    /// A pod sandbox's id in the runtime.
    SandboxId
}
text_id! {
    /// A pod's UID as the kubelet knows it. For a static pod that is the hash of its manifest.
    PodUid
}
text_id! {
    /// A container's name in its pod: the same for all its attempts.
    ContainerName
}

/// A pod's place in the API.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PodKey {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
}

impl fmt::Display for PodKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// One life of a pod on this node.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PodIdentity {
    /// The sandbox that all its containers share.
    pub sandbox: SandboxId,
    /// Its UID.
    pub uid: PodUid,
    /// Its place in the API.
    pub key: PodKey,
}

/// What a container's first process exited with: 0-255, 128 + the signal's number when it was killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ExitCode(pub i32);

impl ExitCode {
    /// The code of success.
    pub const SUCCESS: Self = Self(0);
    /// Of what was ended with SIGKILL.
    pub const KILLED: Self = Self(137);
    /// What a runtime says of a container that could not be started (containerd `errorStartExitCode`, `internal/cri/server`).
    pub const START_ERROR: Self = Self(128);
    /// Of an exit whose code nobody kept: no code that a process can exit with.
    pub const UNKNOWN: Self = Self(-1);
}

impl fmt::Display for ExitCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How a container has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// What its first process exited with.
    pub code: ExitCode,
    /// Whether the kernel has killed a process of it, whichever, because it was out of memory.
    pub oom_killed: bool,
}

impl From<i32> for Exit {
    /// Of a container that was not out of memory.
    fn from(code: i32) -> Self {
        Self {
            code: ExitCode(code),
            oom_killed: false,
        }
    }
}

/// How often a container was started before: the kubelet counts from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Attempt(pub u32);

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
