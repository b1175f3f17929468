//! What can go wrong between Reprise and the runtime, by what the caller should do about it.

use std::error::Error as _;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::error::Category;
use tonic::{Code, Status};

/// A call to the runtime that failed. `call` is the method's name in the CRI or in containerd's API.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CriError {
    /// The endpoint cannot be one: nothing was tried.
    #[error(
        "runtime endpoint {endpoint:?} {problem}: give it as unix:///run/containerd/containerd.sock"
    )]
    Endpoint {
        /// The endpoint as it was given.
        endpoint: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The container, sandbox or image is not there (any more).
    #[error("{call}: gone: {text}")]
    Gone {
        /// The method.
        call: &'static str,
        /// The runtime's words.
        text: String,
    },
    /// The container cannot be removed yet: its exit, start or removal is still being processed. Try again.
    #[error("{call}: not removable yet: {text}")]
    StillRunning {
        /// The method.
        call: &'static str,
        /// The runtime's words.
        text: String,
    },
    /// A container of this name and attempt exists, or is being made.
    #[error("{call}: name taken: {text}")]
    NameReserved {
        /// The method.
        call: &'static str,
        /// The runtime's words.
        text: String,
    },
    /// The runtime cannot be reached, or went away in the middle: whether the call took effect is unknown.
    #[error("{call}: cannot reach the container runtime at {}: {reason}", socket.display())]
    Away {
        /// The method.
        call: &'static str,
        /// The runtime's socket.
        socket: PathBuf,
        /// Why, and what to look at.
        reason: String,
    },
    /// The container's process cannot be ended, or its end awaited.
    #[error("cannot send {signal} to the container's process: {source}")]
    Signal {
        /// The signal.
        signal: Signal,
        /// What the system said.
        source: io::Error,
    },
    /// No answer in time: whether the call took effect is unknown.
    #[error("{call}: no answer within {limit:?}")]
    Deadline {
        /// The method.
        call: &'static str,
        /// How long was waited.
        limit: Duration,
    },
    /// The runtime is not containerd, so that containerd's own API is not there.
    #[error("runtime {runtime:?} is not containerd: it has no event stream and no tasks to ask")]
    NotContainerd {
        /// The runtime's name for itself.
        runtime: String,
    },
    /// The answer is not what the CRI promises.
    #[error("{call}: unusable answer: {problem}")]
    Malformed {
        /// The method.
        call: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// Anything else that the runtime refused.
    #[error("{call}: {code:?}: {text}")]
    Other {
        /// The method.
        call: &'static str,
        /// The gRPC code.
        code: Code,
        /// The runtime's words.
        text: String,
    },
}

impl CriError {
    /// Verbose information that is not what it should be. Says where, not what: it has the values of environment variables
    /// in it.
    pub(super) fn malformed_info(call: &'static str, error: &serde_json::Error) -> Self {
        let what = match error.classify() {
            Category::Data => "another kind of value than expected",
            Category::Syntax | Category::Eof | Category::Io => "no JSON",
        };
        let (line, column) = (error.line(), error.column());
        Self::Malformed {
            call,
            problem: format!("verbose info: {what} at line {line}, column {column}"),
        }
    }

    /// Sorts a failed call. Runtimes give most failures the code `Unknown`, so their words decide: containerd's
    /// `container_remove.go` and `registrar.go` (alike in 1.7 and 2.x), CRI-O's `server` and `internal/registrar`.
    pub(crate) fn from_status(
        call: &'static str,
        limit: Duration,
        socket: &Path,
        status: &Status,
    ) -> Self {
        let text = status.message().to_owned();
        // tonic reports its own timer as `Cancelled`; a runtime that keeps to our deadline says `DeadlineExceeded`.
        if status.code() == Code::DeadlineExceeded
            || (status.code() == Code::Cancelled && text == "Timeout expired")
        {
            return Self::Deadline { call, limit };
        }
        // Only failures of the transport have a source; what the runtime itself says has none.
        if status.source().is_some() || status.code() == Code::Unavailable {
            return Self::Away {
                call,
                socket: socket.to_owned(),
                reason: away_reason(status),
            };
        }
        if NOT_REMOVABLE_YET.iter().any(|words| text.contains(words)) {
            Self::StillRunning { call, text }
        } else if NAME_TAKEN.iter().any(|words| text.contains(words)) {
            Self::NameReserved { call, text }
        } else if status.code() == Code::NotFound {
            Self::Gone { call, text }
        } else {
            let code = status.code();
            Self::Other { call, code, text }
        }
    }

    /// Whether the same call may succeed later without anybody doing anything about it.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::StillRunning { .. } | Self::Away { .. } | Self::Deadline { .. }
        )
    }
}

/// containerd: "container is still running, to stop first", "container state is unknown, to stop first", "container is
/// in starting state, can't be removed", "container is already in removing state". CRI-O stops the container itself
/// (`server/container_remove.go`) and fails if that takes too long, or with the OCI runtime's "that is not stopped".
const NOT_REMOVABLE_YET: [&str; 5] = [
    "to stop first",
    "in starting state",
    "already in removing state",
    "failed to stop container for removal",
    "that is not stopped",
];

/// containerd: `failed to reserve container name "…": name "…" is reserved for "…"`; CRI-O: "name is reserved", and the
/// storage's "that name is already in use".
const NAME_TAKEN: [&str; 4] = [
    "failed to reserve container name",
    "is reserved for",
    "name is reserved",
    "name is already in use",
];

/// Says why a socket could not be used and what to look at, from the innermost cause.
fn away_reason(status: &Status) -> String {
    let mut cause = status.source();
    let mut innermost = status.message().to_owned();
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            match error.kind() {
                io::ErrorKind::NotFound => {
                    return "there is no such socket; is the runtime running, and is the endpoint right?".into();
                }
                io::ErrorKind::PermissionDenied => {
                    return "permission denied; the socket is root's, Reprise must run as root"
                        .into();
                }
                io::ErrorKind::ConnectionRefused => {
                    return "nobody listens on the socket; the runtime is down or starting".into();
                }
                _ => {}
            }
        }
        innermost = error.to_string();
        cause = error.source();
    }
    innermost
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sort(status: &Status) -> CriError {
        CriError::from_status(
            "Call",
            Duration::from_secs(1),
            Path::new("/run/x.sock"),
            status,
        )
    }

    #[test]
    fn containers_that_cannot_be_removed_yet_are_told_apart() {
        for text in [
            "failed to set removing state for container \"a\": container is still running, to stop first",
            "failed to set removing state for container \"a\": container state is unknown, to stop first",
            "failed to set removing state for container \"a\": container is in starting state, can't be removed",
            "failed to set removing state for container \"a\": container is already in removing state",
            "failed to stop container for removal context deadline exceeded",
            "failed to delete container a in pod sandbox b: cannot delete container 0 that is not stopped: running",
        ] {
            let error = sort(&Status::unknown(text));
            assert!(matches!(error, CriError::StillRunning { .. }), "{error}");
            assert!(error.is_transient());
        }
    }

    #[test]
    fn taken_names_are_told_apart() {
        for text in [
            "failed to reserve container name \"a_b_c_d_0\": name \"a_b_c_d_0\" is reserved for \"0123\"",
            "failed to reserve container name \"a\"; check if another CreateContainer request is in progress: name \"a\" is reserved for \"0\"",
            "Kubelet may be retrying requests that are timing out in CRI-O due to system load: error reserving ctr name k8s_a for id 0: name is reserved",
            "the container name \"k8s_a\" is already in use by 0. You have to remove that container to be able to reuse that name: that name is already in use",
        ] {
            let error = sort(&Status::unknown(text));
            assert!(matches!(error, CriError::NameReserved { .. }), "{error}");
            assert!(!error.is_transient());
        }
    }

    #[test]
    fn gone_and_other_keep_the_words_of_the_runtime() {
        let gone = sort(&Status::not_found("container \"a\": not found"));
        assert!(
            matches!(&gone, CriError::Gone { text, .. } if text == "container \"a\": not found")
        );
        let other = sort(&Status::unknown("failed to pull"));
        assert_eq!(other.to_string(), "Call: Unknown: failed to pull");
    }

    #[test]
    fn a_socket_that_may_not_be_used_asks_for_root() {
        let mut status = Status::unavailable("error trying to connect");
        status.set_source(std::sync::Arc::new(io::Error::from(
            io::ErrorKind::PermissionDenied,
        )));
        let said = sort(&status).to_string();
        assert_eq!(
            said,
            "Call: cannot reach the container runtime at /run/x.sock: permission denied; the socket is root's, Reprise must run as root"
        );
    }

    #[test]
    fn deadlines_are_known_from_either_side() {
        for status in [
            Status::deadline_exceeded("context deadline exceeded"),
            Status::cancelled("Timeout expired"),
        ] {
            assert!(matches!(sort(&status), CriError::Deadline { .. }));
        }
    }
}
