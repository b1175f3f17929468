//! Runs the hooks of a container's life, as the kubelet does (`pkg/kubelet/lifecycle/handlers.go`): commands by the runtime, the
//! rest from this node.

use std::fmt::Write as _;
use std::net::Ipv6Addr;
use std::time::Duration;

use http::header::{
    ACCEPT, AUTHORIZATION, CONTENT_LENGTH, HeaderMap, HeaderName, HeaderValue, InvalidHeaderName,
    InvalidHeaderValue, USER_AGENT,
};
use http::uri::Scheme;
use http::{Request, Uri};
use http_body_util::{BodyExt, Limited};
use kube::client::Body;
use kube::config::Config;
use tokio::time::sleep;

use crate::cri::{self, CriError};
use crate::ids::{ContainerId, ExitCode};
use crate::kube::{HttpGet, LifecycleHook};

/// So much of an answer is waited for (`maxRespBodyLength`).
const MOST_OF_ANSWER: usize = 10 * 1024;

/// Why a hook has failed. Not for events: what a server answers may be a secret.
#[derive(Debug, thiserror::Error)]
pub(super) enum HookError {
    #[error("the command exited with {0}")]
    Exited(ExitCode),
    #[error(transparent)]
    Cri(#[from] CriError),
    #[error("{0}")]
    Port(String),
    #[error("the pod has no address yet")]
    NoAddress,
    #[error("the request cannot be written: {0}")]
    Header(#[from] http::Error),
    #[error("the request failed: {0}")]
    Request(Box<kube::Error>),
    #[error("the kubelet runs no hook of this kind")]
    Invalid,
}

impl From<InvalidHeaderName> for HookError {
    fn from(error: InvalidHeaderName) -> Self {
        Self::Header(error.into())
    }
}

impl From<InvalidHeaderValue> for HookError {
    fn from(error: InvalidHeaderValue) -> Self {
        Self::Header(error.into())
    }
}

impl From<kube::Error> for HookError {
    fn from(error: kube::Error) -> Self {
        Self::Request(Box::new(error))
    }
}

/// Runs a hook of that container, of a pod with that address, for as long as it takes, but a command for no longer than `limit`.
pub(super) async fn run(
    hook: &LifecycleHook,
    cri: &cri::Client,
    id: &ContainerId,
    address: Option<&str>,
    limit: Duration,
) -> Result<(), HookError> {
    match hook {
        LifecycleHook::Exec(command) => match cri.exec(id, command, limit).await? {
            ExitCode::SUCCESS => Ok(()),
            code => Err(HookError::Exited(code)),
        },
        LifecycleHook::HttpGet(get) => request(get, address).await,
        LifecycleHook::Sleep(time) => {
            sleep(*time).await;
            Ok(())
        }
        LifecycleHook::Invalid => Err(HookError::Invalid),
    }
}

async fn request(get: &HttpGet, address: Option<&str>) -> Result<(), HookError> {
    let sent = send(get, address, get.tls).await;
    match sent {
        // Who answers speaks no TLS (`isHTTPResponseError`).
        Err(HookError::Request(error)) if get.tls && is_plain(&error) => {
            let mut plain = get.clone();
            let is_secret = |name: &str| name.eq_ignore_ascii_case(AUTHORIZATION.as_str());
            plain.headers.retain(|(name, _)| !is_secret(name));
            send(&plain, address, false).await
        }
        sent => sent,
    }
}

async fn send(get: &HttpGet, address: Option<&str>, tls: bool) -> Result<(), HookError> {
    let port = get.port.clone().map_err(HookError::Port)?;
    let host = get
        .host
        .as_deref()
        .or(address)
        .ok_or(HookError::NoAddress)?;
    let authority = match host.parse::<Ipv6Addr>() {
        Ok(host) => format!("[{host}]:{port}"),
        Err(_) => format!("{host}:{port}"),
    };
    let scheme = if tls { Scheme::HTTPS } else { Scheme::HTTP };
    let server = Uri::builder()
        .scheme(scheme)
        .authority(authority)
        .path_and_query("/");
    // Whoever answers is the pod's own affair, and the request has nothing of ours.
    let mut config = Config::new(server.build()?);
    config.accept_invalid_certs = true;
    config.default_retry = false;
    let slash = if get.path.starts_with('/') { "" } else { "/" };
    let path = format!("{slash}{}", escaped(&get.path));
    let mut request = Request::get(path).body(Body::empty())?;
    *request.headers_mut() = headers(&get.headers)?;
    let answer = kube::Client::try_from(config)?.send(request).await?;
    let length = answer.headers().get(CONTENT_LENGTH);
    let length = length.and_then(|it| it.to_str().ok()?.parse().ok());
    if length.is_none_or(|length: usize| length <= MOST_OF_ANSWER) {
        // The hook takes as long as its answer does, which means nothing (`discardHTTPRespBody`).
        let body = Limited::new(answer.into_body(), MOST_OF_ANSWER);
        let _ = body.collect().await;
    }
    Ok(())
}

/// Of each name all values, with what the kubelet adds (`newProbeRequest`, `pkg/probe/http/request.go`).
fn headers(wanted: &[(String, String)]) -> Result<HeaderMap, HookError> {
    let mut headers = HeaderMap::new();
    for (name, value) in wanted {
        headers.append(HeaderName::try_from(name)?, HeaderValue::try_from(value)?);
    }
    let agent = HeaderValue::from_static(concat!("reprise-lifecycle/", env!("CARGO_PKG_VERSION")));
    headers.entry(USER_AGENT).or_insert(agent);
    let any = HeaderValue::from_static("*/*");
    if headers.entry(ACCEPT).or_insert(any).is_empty() {
        headers.remove(ACCEPT);
    }
    Ok(headers)
}

/// What no URI may have, as Go's `url.URL` escapes it.
fn escaped(path: &str) -> String {
    let mut escaped = String::new();
    for byte in path.bytes() {
        if byte.is_ascii_graphic() && !b"\"<>\\^`{|}".contains(&byte) {
            escaped.push(char::from(byte));
        } else {
            // A string can always be written to.
            let _ = write!(escaped, "%{byte:02X}");
        }
    }
    escaped
}

fn is_plain(error: &kube::Error) -> bool {
    format!("{error:?}").contains("InvalidContentType")
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    /// What a server is sent that speaks no TLS, in one request that it reads to the end.
    async fn received(tls: bool, path: &str, headers: &[(&str, &str)]) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let headers = headers
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let get = HttpGet {
            tls,
            host: None,
            port: Ok(port),
            path: path.to_owned(),
            headers: headers.collect(),
        };
        let serve = async {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let (mut text, mut chunk) = (Vec::new(), [0; 1024]);
                while !text.ends_with(b"\r\n\r\n") {
                    let length = stream.read(&mut chunk).await.unwrap();
                    text.extend_from_slice(&chunk[..length]);
                    // The first record of TLS: a server of HTTP says what it thinks of it.
                    if length == 0 || text[0] == 0x16 {
                        break;
                    }
                }
                let answer = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n";
                stream.write_all(answer).await.unwrap();
                if text.first() != Some(&0x16) {
                    return String::from_utf8(text).unwrap();
                }
            }
        };
        let (sent, received) = tokio::join!(request(&get, Some("127.0.0.1")), serve);
        // Whatever the answer is, the hook has done its work.
        sent.unwrap();
        received
    }

    #[tokio::test]
    async fn a_request_is_as_the_kubelet_sends_it() {
        let text = received(false, "stop now?why=a b", &[("X-A", "1"), ("Host", "pod")]).await;
        let (first, rest) = text.split_once("\r\n").unwrap();
        assert_eq!(first, "GET /stop%20now?why=a%20b HTTP/1.1");
        let rest = rest.to_ascii_lowercase();
        for header in [
            "x-a: 1",
            "host: pod",
            "accept: */*",
            "user-agent: reprise-lifecycle/",
        ] {
            assert!(rest.contains(header), "{header}: {rest}");
        }
        let text = received(false, "/", &[("Accept", "")]).await;
        assert!(!text.to_ascii_lowercase().contains("accept:"), "{text}");
    }

    #[tokio::test]
    async fn who_speaks_no_tls_is_asked_without_it_and_told_no_secret() {
        let headers = [("Authorization", "Bearer secret"), ("X-A", "1")];
        let text = received(true, "/", &headers).await.to_ascii_lowercase();
        assert!(
            text.contains("x-a: 1") && !text.contains("secret"),
            "{text}"
        );
    }

    #[tokio::test]
    async fn what_cannot_be_sent_fails() {
        let get = HttpGet {
            tls: false,
            host: None,
            port: Err("there is no port \"web\"".to_owned()),
            path: String::new(),
            headers: vec![("a b".to_owned(), String::new())],
        };
        let why = |error: HookError| error.to_string();
        let no_port = request(&get, Some("127.0.0.1")).await.map_err(why);
        assert_eq!(no_port.unwrap_err(), "there is no port \"web\"");
        let get = HttpGet { port: Ok(1), ..get };
        let nowhere = request(&get, None).await.map_err(why);
        assert_eq!(nowhere.unwrap_err(), "the pod has no address yet");
        let header = request(&get, Some("127.0.0.1")).await.map_err(why);
        assert!(
            header
                .unwrap_err()
                .starts_with("the request cannot be written: ")
        );
    }
}
