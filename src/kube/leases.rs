//! One Lease that a whole cluster shares, and what time it is to the API server.

use std::fmt;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::jiff::Timestamp;
use k8s_openapi::jiff::fmt::rfc2822::DateTimeParser;
use kube::api::{GetParams, PostParams};
use kube::client::Body;
use kube::core::Request;
use kube::{Api, Client, Error, Resource};
use tokio::time::{Duration, timeout};

/// How long the API server may take over one request.
const LIMIT: Duration = Duration::from_secs(2);

/// Why a Lease cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// Somebody else has written it in the meantime.
    #[error("somebody else has written it")]
    Conflict,
    /// It is not there.
    #[error("there is no Lease {0}: apply deploy/kustomize/components/hard-reset/rbac.yaml")]
    Missing(String),
    /// The API server refuses.
    #[error(
        "Lease {0} may not be read and written: apply deploy/kustomize/components/hard-reset/rbac.yaml"
    )]
    Denied(String),
    /// The API server does not answer, or not as it should.
    #[error("the API server does not tell of Lease {0}: {1}")]
    Away(String, String),
}

/// Reads and writes it.
#[derive(Clone)]
pub(crate) struct SharedLease {
    client: Client,
    namespace: &'static str,
    name: &'static str,
}

impl SharedLease {
    pub(crate) fn new(client: Client, namespace: &'static str, name: &'static str) -> Self {
        Self {
            client,
            namespace,
            name,
        }
    }

    /// The Lease, and when the API server told of it by its own clock: the header `Date` of its answer, which Go's
    /// `net/http` writes. Nodes do not agree on the time as well as they do with it.
    pub(crate) async fn read(&self) -> Result<(Lease, Timestamp), LeaseError> {
        match timeout(LIMIT, self.get()).await {
            Ok(result) => result,
            Err(_) => Err(self.away("no answer in time")),
        }
    }

    async fn get(&self) -> Result<(Lease, Timestamp), LeaseError> {
        let request = Request::new(Lease::url_path(&(), Some(self.namespace)));
        let request = request
            .get(self.name, &GetParams::default())
            .map_err(|error| self.away(error))?;
        let sent = self.client.send(request.map(Body::from)).await;
        let answer = sent.map_err(|error| self.away(error))?;
        match answer.status().as_u16() {
            200 => {}
            404 => return Err(LeaseError::Missing(self.to_string())),
            401 | 403 => return Err(LeaseError::Denied(self.to_string())),
            code => return Err(self.away(code)),
        }
        let date = answer.headers().get("date");
        let date = date.and_then(|date| date.to_str().ok());
        let date = date.and_then(|date| DateTimeParser::new().parse_timestamp(date).ok());
        let date = date.ok_or_else(|| self.away("its answer has no date"))?;
        let body = answer.into_body().collect_bytes().await;
        let body = body.map_err(|error| self.away(error))?;
        let lease = serde_json::from_slice(&body).map_err(|error| self.away(error))?;
        Ok((lease, date))
    }

    /// Writes what was read and changed since.
    pub(crate) async fn replace(&self, lease: &Lease) -> Result<(), LeaseError> {
        let api = Api::<Lease>::namespaced(self.client.clone(), self.namespace);
        let params = PostParams::default();
        match timeout(LIMIT, api.replace(self.name, &params, lease)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(Error::Api(status))) => Err(match status.code {
                409 => LeaseError::Conflict,
                404 => LeaseError::Missing(self.to_string()),
                401 | 403 => LeaseError::Denied(self.to_string()),
                _ => self.away(&status.message),
            }),
            Ok(Err(error)) => Err(self.away(error)),
            Err(_) => Err(self.away("no answer in time")),
        }
    }

    fn away(&self, why: impl fmt::Display) -> LeaseError {
        LeaseError::Away(self.to_string(), why.to_string())
    }
}

impl fmt::Display for SharedLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl fmt::Debug for SharedLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedLease({self})")
    }
}

#[cfg(test)]
mod tests {
    use http::{Request, Response};
    use serde_json::json;
    use tower_test::mock::pair;

    use super::*;

    async fn read(answer: Response<Body>) -> Result<(Lease, Timestamp), LeaseError> {
        let (service, mut server) = pair::<Request<Body>, Response<Body>>();
        let lease = SharedLease::new(Client::new(service, "default"), "ns", "l");
        let read = tokio::spawn(async move { lease.read().await });
        let (request, send) = server.next_request().await.unwrap();
        let path = "/apis/coordination.k8s.io/v1/namespaces/ns/leases/l";
        assert_eq!(request.uri().path(), path);
        send.send_response(answer);
        read.await.unwrap()
    }

    fn answer(code: u16) -> http::response::Builder {
        Response::builder().status(code)
    }

    fn body() -> Body {
        Body::from(json!({"metadata": {"name": "l"}}).to_string().into_bytes())
    }

    #[tokio::test]
    async fn the_time_is_the_api_servers() {
        let dated = answer(200).header("Date", "Thu, 26 Nov 2026 10:53:26 GMT");
        let (lease, date) = read(dated.body(body()).unwrap()).await.unwrap();
        assert_eq!(lease.metadata.name.as_deref(), Some("l"));
        assert_eq!(date, "2026-11-26T10:53:26Z".parse().unwrap());
        let undated = read(answer(200).body(body()).unwrap()).await.unwrap_err();
        assert!(matches!(undated, LeaseError::Away(..)), "{undated}");
    }

    #[tokio::test]
    async fn what_is_missing_or_denied_names_the_file_to_apply() {
        for code in [404, 403] {
            let error = read(answer(code).body(body()).unwrap()).await.unwrap_err();
            let text = error.to_string();
            assert!(
                text.contains("ns/l")
                    && text.contains("deploy/kustomize/components/hard-reset/rbac.yaml"),
                "{text}"
            );
        }
        let error = read(answer(500).body(body()).unwrap()).await.unwrap_err();
        assert!(matches!(error, LeaseError::Away(..)), "{error}");
    }
}
