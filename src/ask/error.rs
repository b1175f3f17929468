//! What keeps the API server from doing as it is asked.

use std::error::Error;
use std::io;
use std::time::Duration;

use tokio::time::timeout;

use crate::kube::{ApiError, KubeError};
use crate::text;

/// How long the API server may take over one request.
pub(super) const LIMIT: Duration = Duration::from_secs(30);

/// Why nothing was restarted, or shown.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// It is not known where the API server is, or how to log in there.
    #[error(transparent)]
    Kube(#[from] KubeError),
    /// A right is missing.
    #[error("you may not {right}: {message}")]
    Denied {
        /// Which.
        right: Right,
        /// The API server's words.
        message: String,
    },
    /// It does not know who is asking.
    #[error(
        "the API server does not take the kubeconfig's credentials (401): {0}; log in again (tokens of auth-provider oidc are not renewed here, but by kubectl)"
    )]
    Unauthorized(String),
    /// There is no such object.
    #[error("there is no {what} in namespace {namespace}")]
    NoSuch {
        /// Its type and name.
        what: String,
        /// Where it is not.
        namespace: String,
    },
    /// A pod that was named cannot be restarted.
    #[error("pod {pod} cannot be restarted: it {why}")]
    Unfit {
        /// The pod.
        pod: String,
        /// What about it.
        why: String,
    },
    /// There is nothing to do.
    #[error("no pods {} match {what}", place(namespace.as_deref()))]
    NoMatch {
        /// The selector, or what has pods.
        what: String,
        /// Where none are; `None`: anywhere.
        namespace: Option<String>,
    },
    /// There are pods, but none to restart.
    #[error("none of the pods that match {what} can be restarted: {pods}")]
    NoneFit {
        /// The selector, or what has pods.
        what: String,
        /// Each of them, and why.
        pods: String,
    },
    /// The API server refuses what was asked for.
    #[error("the API server refuses to {right}: {message}")]
    Refused {
        /// What it was to do.
        right: Right,
        /// Its words.
        message: String,
    },
    /// It does not answer.
    #[error("the API server does not answer: {0}")]
    Away(String),
    /// Nobody reads what is said.
    #[error("cannot write what there is to say: {0}")]
    Output(#[from] io::Error),
}

impl AskError {
    pub(super) fn not_within(limit: Duration) -> Self {
        Self::Away(format!("not within {} s", limit.as_secs()))
    }
}

/// What somebody must be allowed to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{verb} {resource} {}", place(namespace.as_deref()))]
pub struct Right {
    /// As RBAC calls it.
    pub verb: &'static str,
    /// Likewise, with its group.
    pub resource: &'static str,
    /// `None`: in all of them.
    pub namespace: Option<String>,
}

fn place(namespace: Option<&str>) -> String {
    match namespace {
        Some(namespace) => format!("in namespace {namespace}"),
        None => "in all namespaces".to_owned(),
    }
}

impl Right {
    pub(super) fn pods(verb: &'static str, namespace: &str) -> Self {
        Self {
            verb,
            resource: "pods",
            namespace: Some(namespace.to_owned()),
        }
    }

    /// What a request comes to that takes this right.
    pub(super) async fn used<T>(
        &self,
        request: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, AskError> {
        match timeout(LIMIT, request).await {
            Ok(answer) => answer.map_err(|error| self.fault(&error)),
            Err(_) => Err(AskError::not_within(LIMIT)),
        }
    }

    /// What the answer means to a request that takes this right.
    pub(super) fn fault(&self, error: &ApiError) -> AskError {
        let ApiError::Api(status) = error else {
            return AskError::Away(reason(error));
        };
        let (right, message) = (self.clone(), text::printable(&status.message).into_owned());
        match status.code {
            401 => AskError::Unauthorized(message),
            // What an authorizer says, and no admission (`forbiddenMessage`, apiserver `pkg/endpoints/handlers/responsewriters`).
            403 if message.contains(&format!(" cannot {} resource ", self.verb)) => {
                AskError::Denied { right, message }
            }
            429 | 500.. => AskError::Away(message),
            _ => AskError::Refused { right, message },
        }
    }
}

/// All that an error has to say: the last of what caused it says most.
fn reason(error: &ApiError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fault(code: u16, message: &str) -> String {
        let status = json!({"status": "Failure", "code": code, "message": message});
        let error = ApiError::Api(serde_json::from_value(status).unwrap());
        Right::pods("patch", "n").fault(&error).to_string()
    }

    #[test]
    fn a_missing_right_is_told_from_what_an_admission_says() {
        let denied = fault(
            403,
            "pods \"a\" is forbidden: User \"u\" cannot patch resource \"pods\"",
        );
        assert!(
            denied.starts_with("you may not patch pods in namespace n: pods "),
            "{denied}"
        );
        let refused = fault(403, "pods \"a\" is forbidden: a policy says no");
        assert!(
            refused.starts_with("the API server refuses to patch pods"),
            "{refused}"
        );
        assert!(fault(401, "Unauthorized").contains("log in again"));
        for code in [429, 500, 503] {
            assert_eq!(fault(code, "busy"), "the API server does not answer: busy");
        }
    }

    #[test]
    fn the_deepest_cause_is_told_once() {
        let refused = io::Error::new(io::ErrorKind::ConnectionRefused, "nobody listens");
        let text = reason(&ApiError::Service(Box::new(refused)));
        assert_eq!(text.matches("nobody listens").count(), 1, "{text}");
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_not_waited_for_for_ever() {
        let right = Right::pods("get", "n");
        let never = std::future::pending::<Result<(), ApiError>>();
        let error = right.used(never).await.unwrap_err();
        assert!(matches!(error, AskError::Away(_)), "{error}");
    }
}
