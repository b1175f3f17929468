//! Answers HTTP: `/metrics`, `/healthz` and `/readyz`. In a pod, anybody in the cluster may ask.
//!
//! So a thread of its own does, which goes after everybody else, a connection lasts for seconds, and of too many the oldest are
//! dropped: whoever is honest has had its answer by then.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use http::header::{ALLOW, CONTENT_TYPE};
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Bytes;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::process::setpriority_process;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

use super::Health;
use crate::clock;

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN: &str = "text/plain; charset=utf-8";

/// The nice value of the thread: whoever answers the runtime goes before it.
const NICE: i32 = 10;
/// Between two tries to listen.
const LISTEN_INTERVAL: Duration = Duration::from_secs(5);
/// After a connection that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// How many connections there are at a time.
const MOST_CONNECTIONS: usize = 32;
/// How long one lasts, whatever is asked.
const CONNECTION_LIMIT: Duration = Duration::from_secs(5);
/// In which time it is asked.
const HEADER_LIMIT: Duration = Duration::from_secs(2);
/// The longest question, in bytes.
const MOST_BYTES: usize = 16 * 1024;
/// For how long a text stands: what is counted cannot be counted while it is written down.
const TEXT_STANDS: Duration = Duration::from_secs(1);

/// Answers in a thread of its own from now on.
pub(crate) fn serve_beside(address: SocketAddr, health: Arc<Health>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let serve = move |runtime: tokio::runtime::Runtime| {
        // It is slower for others without.
        let _ = setpriority_process(None, NICE);
        runtime.block_on(serve(address, health));
    };
    let named = thread::Builder::new().name("listen".to_owned());
    let begun = runtime.and_then(|runtime| named.spawn(move || serve(runtime)));
    if let Err(error) = begun {
        tracing::warn!(%error, "neither metrics nor health can be asked for");
    }
}

/// Answers for ever, as soon as the address can be had: another plugin may have it that is about to end.
async fn serve(address: SocketAddr, health: Arc<Health>) {
    let mut said = false;
    let listener = loop {
        match TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(error) => {
                if !std::mem::replace(&mut said, true) {
                    tracing::warn!(%address, %error, "neither metrics nor health can be asked for, trying until they can: --listen is for another address");
                }
                sleep(LISTEN_INTERVAL).await;
            }
        }
    };
    let address = listener.local_addr().unwrap_or(address);
    tracing::info!(%address, "metrics and health can be asked for");
    accept(&listener, Arc::new(Pages::new(health))).await;
}

async fn accept(listener: &TcpListener, pages: Arc<Pages>) {
    let mut open = VecDeque::new();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                make_room(&mut open);
                let pages = Arc::clone(&pages);
                let task = tokio::spawn(timeout(CONNECTION_LIMIT, converse(stream, pages)));
                open.push_back(task.abort_handle());
            }
            Err(error) => {
                // Out of descriptors, mostly.
                tracing::debug!(%error, "cannot accept a connection");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

fn make_room(open: &mut VecDeque<AbortHandle>) {
    open.retain(|it| !it.is_finished());
    if open.len() >= MOST_CONNECTIONS
        && let Some(oldest) = open.pop_front()
    {
        oldest.abort();
    }
}

/// Answers one question. Whoever asks again connects again.
async fn converse(stream: TcpStream, pages: Arc<Pages>) {
    let answer = service_fn(move |request| {
        let pages = Arc::clone(&pages);
        async move { Ok::<_, Infallible>(pages.answer(&request).await) }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEADER_LIMIT)
        .max_buf_size(MOST_BYTES)
        .keep_alive(false);
    if let Err(error) = http.serve_connection(TokioIo::new(stream), answer).await {
        tracing::debug!(%error, "a connection broke, or nothing was asked in time");
    }
}

/// What there is to see.
#[derive(Debug)]
struct Pages {
    health: Arc<Health>,
    text: Mutex<Option<(Instant, Bytes)>>,
}

impl Pages {
    fn new(health: Arc<Health>) -> Self {
        let text = Mutex::default();
        Self { health, text }
    }

    async fn answer<B>(&self, request: &Request<B>) -> Response<Full<Bytes>> {
        if request.method() != Method::GET && request.method() != Method::HEAD {
            let mut refusal = plain(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD");
            let allowed = http::HeaderValue::from_static("GET, HEAD");
            refusal.headers_mut().insert(ALLOW, allowed);
            return refusal;
        }
        match request.uri().path() {
            "/metrics" => match self.text() {
                Some(text) => page(StatusCode::OK, OPENMETRICS, text),
                None => plain(StatusCode::INTERNAL_SERVER_ERROR, "no text"),
            },
            "/healthz" => match self.health.ails() {
                ails if ails.is_empty() => plain(StatusCode::OK, "ok"),
                ails => plain(StatusCode::SERVICE_UNAVAILABLE, &ails.join("\n")),
            },
            "/readyz" => match self.health.ready().await {
                Ok(word) => plain(StatusCode::OK, word),
                Err(lacks) => plain(StatusCode::SERVICE_UNAVAILABLE, &lacks.join("\n")),
            },
            _ => plain(
                StatusCode::NOT_FOUND,
                "there are /metrics, /healthz and /readyz",
            ),
        }
    }

    fn text(&self) -> Option<Bytes> {
        let mut last = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        let stands = |(at, _): &&(Instant, Bytes)| clock::now() < *at + TEXT_STANDS;
        if let Some((_, text)) = last.as_ref().filter(stands) {
            return Some(text.clone());
        }
        // Never fails: a string has room for everything.
        let text = Bytes::from(self.health.metrics().text().ok()?);
        *last = Some((clock::now(), text.clone()));
        Some(text)
    }
}

fn plain(status: StatusCode, text: &str) -> Response<Full<Bytes>> {
    page(status, PLAIN, Bytes::from(format!("{text}\n")))
}

fn page(status: StatusCode, kind: &'static str, text: Bytes) -> Response<Full<Bytes>> {
    let mut page = Response::new(Full::new(text));
    *page.status_mut() = status;
    let kind = http::HeaderValue::from_static(kind);
    page.headers_mut().insert(CONTENT_TYPE, kind);
    page
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::task::JoinHandle;

    use super::*;

    struct Server {
        address: SocketAddr,
        health: Arc<Health>,
        task: JoinHandle<()>,
    }

    impl Drop for Server {
        fn drop(&mut self) {
            self.task.abort();
        }
    }

    async fn server() -> Server {
        let health = Arc::new(Health::new(Arc::default(), Arc::default()));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let pages = Arc::new(Pages::new(Arc::clone(&health)));
        let task = tokio::spawn(async move { accept(&listener, pages).await });
        Server {
            address,
            health,
            task,
        }
    }

    impl Server {
        async fn connect(&self) -> TcpStream {
            TcpStream::connect(self.address).await.unwrap()
        }

        /// The head of the answer, and the rest.
        async fn ask(&self, method: &str, path: &str) -> (String, String) {
            let mut stream = self.connect().await;
            let question = format!("{method} {path} HTTP/1.1\r\nHost: reprise\r\n\r\n");
            stream.write_all(question.as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            let (head, body) = answer.split_once("\r\n\r\n").unwrap();
            (head.to_owned(), body.to_owned())
        }
    }

    /// Whether the other end has closed it, sooner or later.
    async fn is_closed(stream: &mut TcpStream) -> bool {
        let mut rest = Vec::new();
        timeout(2 * CONNECTION_LIMIT, stream.read_to_end(&mut rest))
            .await
            .is_ok()
    }

    #[tokio::test]
    async fn each_path_has_its_page() {
        let server = server().await;
        let (head, metrics) = server.ask("GET", "/metrics").await;
        assert!(
            head.starts_with("HTTP/1.1 200") && head.contains(OPENMETRICS),
            "{head}"
        );
        super::super::tests::Scrape::read(&metrics);
        let (head, body) = server.ask("GET", "/healthz").await;
        assert!(
            head.starts_with("HTTP/1.1 200") && body == "ok\n",
            "{head} {body}"
        );
        let (head, body) = server.ask("GET", "/readyz").await;
        assert!(head.starts_with("HTTP/1.1 503"), "{head}");
        assert_eq!(body.lines().count(), 4, "{body}");
        let (head, body) = server.ask("HEAD", "/healthz").await;
        assert!(
            head.starts_with("HTTP/1.1 200") && body.is_empty(),
            "{head} {body}"
        );
        let (head, _) = server.ask("GET", "/").await;
        assert!(head.starts_with("HTTP/1.1 404"), "{head}");
        let (head, _) = server.ask("POST", "/metrics").await;
        assert!(
            head.starts_with("HTTP/1.1 405") && head.contains("allow: GET"),
            "{head}"
        );
        server.health.hooks_are_heard(false);
        let (head, body) = server.ask("GET", "/healthz").await;
        assert!(head.starts_with("HTTP/1.1 503"), "{head}");
        assert_eq!(body, "the hooks' socket is gone\n");
    }

    #[tokio::test]
    async fn a_text_stands_for_a_second() {
        let server = server().await;
        let (_, before) = server.ask("GET", "/metrics").await;
        server.health.metrics().exit_unmatched();
        assert_eq!(server.ask("GET", "/metrics").await.1, before);
        sleep(TEXT_STANDS).await;
        let (_, after) = server.ask("GET", "/metrics").await;
        assert!(
            after.contains("reprise_unmatched_exits_total 1\n"),
            "{after}"
        );
    }

    #[tokio::test]
    async fn whoever_is_slow_or_asks_for_too_much_is_dropped() {
        let server = server().await;
        let (mut silent, mut slow, mut long) = (
            server.connect().await,
            server.connect().await,
            server.connect().await,
        );
        slow.write_all(b"GET /metrics HT").await.unwrap();
        let header = vec![b'a'; 4 * MOST_BYTES];
        // It may be dropped before it has said everything.
        let _ = long.write_all(b"GET / HTTP/1.1\r\nx: ").await;
        let _ = long.write_all(&header).await;
        let closed = futures::join!(
            is_closed(&mut silent),
            is_closed(&mut slow),
            is_closed(&mut long)
        );
        assert_eq!(closed, (true, true, true));
    }

    #[tokio::test]
    async fn many_who_say_nothing_keep_nobody_from_an_answer() {
        let server = server().await;
        let mut silent = Vec::new();
        for _ in 0..=MOST_CONNECTIONS {
            silent.push(server.connect().await);
        }
        let asked = timeout(HEADER_LIMIT / 2, server.ask("GET", "/healthz")).await;
        assert!(asked.unwrap().0.starts_with("HTTP/1.1 200"));
        // The oldest had to go for that.
        assert!(
            timeout(HEADER_LIMIT / 2, is_closed(&mut silent[0]))
                .await
                .unwrap()
        );
    }

    #[tokio::test]
    async fn an_address_that_is_taken_is_had_when_it_is_free() {
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = taken.local_addr().unwrap();
        let health = Arc::new(Health::new(Arc::default(), Arc::default()));
        let serving = tokio::spawn(serve(address, health));
        let first = taken.accept();
        let client = TcpStream::connect(address);
        let (accepted, client) = futures::join!(first, client);
        drop((accepted, client, taken));
        let again = async {
            while TcpStream::connect(address).await.is_err() {
                sleep(Duration::from_millis(50)).await;
            }
        };
        timeout(3 * LISTEN_INTERVAL, again).await.unwrap();
        serving.abort();
    }
}
