// SPDX-License-Identifier: Apache-2.0
//! HTTP/1 servers for health checks, bounded because any client that reaches the node can connect.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderName, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use http::{Request, Response, StatusCode, Uri};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::{Domain, Protocol, Socket, Type};
use steerage_process::connection_limiter::ConnectionLimiter;
use tokio::net::{TcpListener, TcpStream};

/// Time for a request to arrive, and between two requests on one connection.
pub(super) const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes of the longest request head: the least that hyper accepts.
const MAX_HEAD: usize = 8192;
/// Wait after a failed accept, which most likely lacked file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Listens on exactly this address: an IPv6 socket does not accept IPv4.
pub(super) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    bind(socket(address)?, address)
}

/// The same, also where the machine does not have the address, or not yet.
pub(super) fn listen_at_vip(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = socket(address)?;
    if address.is_ipv6() {
        socket.set_freebind_v6(true)?;
    } else {
        socket.set_freebind_v4(true)?;
    }
    bind(socket, address)
}

fn socket(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

fn bind(socket: Socket, address: SocketAddr) -> io::Result<TcpListener> {
    socket.bind(&address.into())?;
    socket.listen(256)?;
    TcpListener::from_std(socket.into())
}

/// Responds to every request with `answer` of its path and query, until dropped; connections end with it. An answer that takes time
/// is given up when the client closes its connection, or its writing half.
pub(super) fn serve<A, F>(
    listener: TcpListener,
    connections: &ConnectionLimiter,
    answer: A,
) -> impl Future<Output = Infallible> + Send + use<A, F>
where
    A: Fn(Uri) -> F + Send + Sync + 'static,
    F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
{
    let answer = Arc::new(answer);
    let server = connections.server();
    async move {
        loop {
            match listener.accept().await {
                Ok((stream, client)) => server.admit(client.ip(), |slot| {
                    let connection = attend(stream, Arc::clone(&answer));
                    let task = async move {
                        connection.await;
                        drop(slot);
                    };
                    tokio::spawn(task).abort_handle()
                }),
                Err(error) => {
                    tracing::warn!(%error, "health-check server cannot accept; retrying");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

/// Serves one connection to its end.
async fn attend<A, F>(stream: TcpStream, answer: Arc<A>)
where
    A: Fn(Uri) -> F + Send + Sync + 'static,
    F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
{
    let service = service_fn(move |request: Request<Incoming>| {
        let response = answer(request.uri().clone());
        async move { Ok::<_, Infallible>(response.await) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = served.await {
        tracing::debug!(%error, "health-check connection failed");
    }
}

/// A JSON response: 200 or 503.
pub(super) fn json(good: bool, body: Vec<u8>) -> Response<Full<Bytes>> {
    let status = if good { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    response(status, "application/json", body.into())
}

/// A response of plain text.
pub(super) fn text(status: StatusCode, body: &str) -> Response<Full<Bytes>> {
    response(status, "text/plain; charset=utf-8", Bytes::copy_from_slice(body.as_bytes()))
}

fn response(status: StatusCode, content_type: &'static str, body: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// The header with the number of local endpoints (kubernetes#118999).
pub(super) const WEIGHT: HeaderName = HeaderName::from_static("x-load-balancing-endpoint-weight");
