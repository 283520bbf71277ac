// SPDX-License-Identifier: Apache-2.0
//! The administration server: `/metrics`, `/livez`, `/readyz`, and pages of a program's own. [`crate::run`] starts it before the
//! body of the process.
//!
//! It is read-only, without authentication, and serves no secrets.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};

use crate::connection_limiter::ConnectionLimiter;
use crate::{Metrics, Readiness};

/// Why the administration server could not start.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// The address is invalid or in use.
    #[error(
        "cannot listen on {address} for /metrics, /livez and /readyz (choose another with --admin-address)"
    )]
    Bind {
        /// The requested address.
        address: SocketAddr,
        /// The kernel's error.
        source: io::Error,
    },
}

/// Maximum time for a client to send a request, and between two requests on one connection.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time of a connection: a client may read slowly.
const CONNECTION_TIMEOUT: Duration = Duration::from_mins(1);
/// Delay after a failed accept: most likely no file descriptor is free.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Wait before an address that is in use is tried again.
const BIND_RETRY: Duration = Duration::from_secs(5);

/// What the administration server answers. Clones share it.
#[derive(Clone, Debug)]
pub struct AdminPages {
    /// For `/metrics`.
    pub metrics: Metrics,
    /// For `/readyz`.
    pub readiness: Readiness,
    /// Constant texts by path.
    texts: Arc<Mutex<BTreeMap<&'static str, &'static str>>>,
}

impl AdminPages {
    /// The pages of every process.
    pub fn new(metrics: Metrics, readiness: Readiness) -> Self {
        Self { metrics, readiness, texts: Arc::default() }
    }

    /// Serves a constant text at this path, from now on.
    pub fn add(&self, path: &'static str, text: &'static str) {
        self.texts.lock().unwrap_or_else(PoisonError::into_inner).insert(path, text);
    }

    fn text(&self, path: &str) -> Option<&'static str> {
        self.texts.lock().unwrap_or_else(PoisonError::into_inner).get(path).copied()
    }

    /// Serves them at one more address. Retries while the address is in use.
    pub async fn serve_at(self, address: SocketAddr) -> Infallible {
        let mut warned = false;
        loop {
            match Admin::bind(address).await {
                Ok(admin) => return admin.serve(self).await,
                Err(AdminError::Bind { source: error, .. }) => {
                    if !std::mem::replace(&mut warned, true) {
                        tracing::warn!(%address, %error, "metrics not served at this address; retrying");
                    }
                    tokio::time::sleep(BIND_RETRY).await;
                }
            }
        }
    }
}

/// A bound administration server.
#[derive(Debug)]
pub struct Admin {
    listener: TcpListener,
    address: SocketAddr,
}

impl Admin {
    /// Binds `address`; port 0 selects a free one. On a host without IPv6, `[::]` means all IPv4 addresses.
    pub async fn bind(address: SocketAddr) -> Result<Self, AdminError> {
        let failed = |source| AdminError::Bind { address, source };
        let listener = listen(address, async |at| TcpListener::bind(at).await).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Self { listener, address })
    }

    /// The bound address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until dropped.
    pub async fn serve(self, pages: AdminPages) -> Infallible {
        let connections = ConnectionLimiter::default().server();
        loop {
            match self.listener.accept().await {
                Ok((stream, client)) => connections.admit(client.ip(), |slot| {
                    let connection = serve_connection(stream, pages.clone());
                    let task = async move {
                        if tokio::time::timeout(CONNECTION_TIMEOUT, connection).await.is_err() {
                            tracing::debug!("connection to the administration server took too long");
                        }
                        drop(slot);
                    };
                    tokio::spawn(task).abort_handle()
                }),
                Err(error) => {
                    tracing::warn!(%error, "administration server cannot accept a connection; retrying");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

async fn listen(
    address: SocketAddr,
    bind: impl AsyncFn(SocketAddr) -> io::Result<TcpListener>,
) -> io::Result<TcpListener> {
    match bind(address).await {
        // A kernel without IPv6 refuses the socket.
        Err(error)
            if address.ip() == Ipv6Addr::UNSPECIFIED && error.raw_os_error() == Some(libc::EAFNOSUPPORT) =>
        {
            bind((Ipv4Addr::UNSPECIFIED, address.port()).into()).await
        }
        bound => bound,
    }
}

async fn serve_connection(stream: TcpStream, pages: AdminPages) {
    let service = service_fn(|request: Request<hyper::body::Incoming>| {
        let response = respond(request.method(), request.uri().path(), &pages);
        async move { Ok::<_, Infallible>(response) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "connection to the administration server ended");
    }
}

fn respond(method: &Method, path: &str, pages: &AdminPages) -> Response<Full<Bytes>> {
    const TEXT: &str = "text/plain; charset=utf-8";
    const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

    if method != Method::GET && method != Method::HEAD {
        return response(StatusCode::METHOD_NOT_ALLOWED, TEXT, "only GET and HEAD\n".to_owned());
    }
    match path {
        "/livez" => response(StatusCode::OK, TEXT, "ok\n".to_owned()),
        "/readyz" => {
            let pending = pages.readiness.pending();
            if pending.is_empty() {
                response(StatusCode::OK, TEXT, "ok\n".to_owned())
            } else {
                let text = format!("pending: {}\n", pending.join(", "));
                response(StatusCode::SERVICE_UNAVAILABLE, TEXT, text)
            }
        }
        "/metrics" => match pages.metrics.text() {
            Ok(text) => response(StatusCode::OK, OPEN_METRICS, text),
            Err(error) => response(StatusCode::INTERNAL_SERVER_ERROR, TEXT, format!("{error}\n")),
        },
        path => match pages.text(path) {
            Some(text) => response(StatusCode::OK, TEXT, text.to_owned()),
            None => response(StatusCode::NOT_FOUND, TEXT, "/metrics, /livez, /readyz\n".to_owned()),
        },
    }
}

fn response(status: StatusCode, content_type: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    async fn start() -> (SocketAddr, Readiness) {
        let readiness = Readiness::default();
        let admin = Admin::bind("127.0.0.1:0".parse().expect("address")).await.expect("bind");
        let address = admin.address();
        tokio::spawn(admin.serve(AdminPages::new(Metrics::new("test", "0"), readiness.clone())));
        (address, readiness)
    }

    async fn ask(address: SocketAddr, line: &str) -> String {
        let mut stream = TcpStream::connect(address).await.expect("connect");
        let request = format!("{line} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.expect("write");
        let mut text = String::new();
        stream.read_to_string(&mut text).await.expect("read");
        text
    }

    #[tokio::test]
    async fn readyz_lists_pending_tasks() {
        let (address, readiness) = start().await;
        let text = ask(address, "GET /readyz").await;
        assert!(text.starts_with("HTTP/1.1 503 ") && text.ends_with("pending: start\n"), "{text}");
        let (services, nodes) = (readiness.task("services"), readiness.task("nodes"));
        assert!(ask(address, "GET /readyz").await.ends_with("pending: services, nodes\n"));
        services.done();
        nodes.done();
        assert!(ask(address, "GET /readyz").await.starts_with("HTTP/1.1 200 "));
    }

    #[tokio::test]
    async fn pages_are_also_served_at_an_address_that_is_free_later() {
        let pages = AdminPages::new(Metrics::new("test", "0"), Readiness::default());
        pages.add("/mode", "fast");
        let taken = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let address = taken.local_addr().expect("address");
        let server = tokio::spawn(pages.clone().serve_at(address));
        // Its first try finds the address in use.
        tokio::time::sleep(Duration::from_millis(50)).await;
        drop(taken);
        while TcpStream::connect(address).await.is_err() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let text = ask(address, "GET /mode").await;
        assert!(text.starts_with("HTTP/1.1 200 ") && text.ends_with("\r\n\r\nfast"), "{text}");
        assert!(ask(address, "GET /nothing").await.starts_with("HTTP/1.1 404 "));
        assert!(ask(address, "GET /metrics").await.contains("steerage_build_info"));
        server.abort();
    }

    #[tokio::test]
    async fn unspecified_address_falls_back_to_ipv4() {
        let no_ipv6 = async |at: SocketAddr| match at {
            SocketAddr::V6(_) => Err(io::Error::from_raw_os_error(libc::EAFNOSUPPORT)),
            SocketAddr::V4(_) => TcpListener::bind(at).await,
        };
        let listener = listen("[::]:0".parse().expect("address"), no_ipv6).await.expect("bind");
        assert_eq!(listener.local_addr().expect("bound").ip(), Ipv4Addr::UNSPECIFIED);
        let error = listen("[::1]:0".parse().expect("address"), no_ipv6).await.expect_err("one address only");
        assert_eq!(error.raw_os_error(), Some(libc::EAFNOSUPPORT));
    }

    #[tokio::test]
    async fn metrics_have_the_openmetrics_format() {
        let (address, _readiness) = start().await;
        let text = ask(address, "GET /metrics").await;
        assert!(text.contains("content-type: application/openmetrics-text; version=1.0.0"), "{text}");
        assert!(text.ends_with("# EOF\n"), "{text}");
    }

    #[tokio::test]
    async fn other_methods_and_paths_are_refused() {
        let (address, _readiness) = start().await;
        for (line, status) in
            [("GET /livez", 200), ("HEAD /livez", 200), ("POST /livez", 405), ("GET /", 404)]
        {
            let text = ask(address, line).await;
            assert!(text.starts_with(&format!("HTTP/1.1 {status} ")), "{line}: {text}");
        }
    }

    #[tokio::test]
    async fn bind_error_names_the_address() {
        let (address, _readiness) = start().await;
        let error = Admin::bind(address).await.expect_err("busy");
        let text = steerage_model::chain(&error);
        assert!(text.contains(&address.to_string()) && text.contains("in use"), "{text}");
    }

    /// A pod that holds connections open must not make kubelet restart the process.
    #[tokio::test]
    async fn idle_connections_keep_no_probe_from_an_answer() {
        let (address, _readiness) = start().await;
        let mut idle = Vec::new();
        for _ in 0..200 {
            idle.push(TcpStream::connect(address).await.expect("connect"));
        }
        // It also holds of a client from the same address, whose connection is the newest.
        assert!(ask(address, "GET /livez").await.starts_with("HTTP/1.1 200 "));
    }

    #[tokio::test(start_paused = true)]
    async fn idle_client_is_disconnected() {
        let (address, _readiness) = start().await;
        let mut stream = TcpStream::connect(address).await.expect("connect");
        stream.write_all(b"GET /livez HTTP/1.1\r\n").await.expect("write");
        let mut rest = Vec::new();
        // Time is paused: it jumps to the server's time-out once all tasks wait. So it does before the kernel has brought the request,
        // if it is busy: then this waits again.
        let begun = std::time::Instant::now();
        let read = loop {
            let read = tokio::time::timeout(HEADER_TIMEOUT * 3, stream.read_to_end(&mut rest)).await;
            match read {
                Ok(read) => break read,
                Err(_) => assert!(begun.elapsed() < Duration::from_mins(1), "not closed"),
            }
        };
        read.expect("read");
    }
}
