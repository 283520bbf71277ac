// SPDX-License-Identifier: Apache-2.0
//! Connections from the proxy to the backend.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use bytes::Bytes;
use futures::future::BoxFuture;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{HeaderName, HeaderValue};
use hyper::{Response, Version};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::Request;

/// A connection to the backend.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// Opens connections to the backend.
pub trait Connect: Send + Sync {
    /// Opens a connection for HTTP/1.1.
    fn connect(&self) -> BoxFuture<'_, io::Result<Box<dyn Io>>>;
}

struct Plain(SocketAddr);

impl Connect for Plain {
    fn connect(&self) -> BoxFuture<'_, io::Result<Box<dyn Io>>> {
        Box::pin(async { Ok(Box::new(TcpStream::connect(self.0).await?) as Box<dyn Io>) })
    }
}

struct Tls {
    addr: SocketAddr,
    name: ServerName<'static>,
    connector: TlsConnector,
}

impl Connect for Tls {
    fn connect(&self) -> BoxFuture<'_, io::Result<Box<dyn Io>>> {
        Box::pin(async {
            let stream = TcpStream::connect(self.addr).await?;
            Ok(Box::new(self.connector.connect(self.name.clone(), stream).await?) as Box<dyn Io>)
        })
    }
}

/// The backend, and the headers that the proxy adds to requests.
pub struct Upstream {
    connect: Box<dyn Connect>,
    headers: Vec<(HeaderName, HeaderValue)>,
}

impl Upstream {
    /// A backend behind a connector of the caller.
    pub fn new(connect: impl Connect + 'static) -> Self {
        Self { connect: Box::new(connect), headers: Vec::new() }
    }

    /// A backend with plain HTTP.
    pub fn http(addr: SocketAddr) -> Self {
        Self::new(Plain(addr))
    }

    /// A backend with HTTP over TLS. `config` holds the trusted certificates and, if the backend needs one, the client
    /// certificate (for an API server: `kube::Config::rustls_client_config`). `name` is the name in the server's certificate.
    pub fn tls(addr: SocketAddr, name: &str, config: Arc<rustls::ClientConfig>) -> anyhow::Result<Self> {
        let mut config = Arc::unwrap_or_clone(config);
        // The proxy supports HTTP/1.1 only. Without a protocol list no server chooses HTTP/2.
        config.alpn_protocols.clear();
        let name = ServerName::try_from(name.to_owned()).context("parse the TLS server name")?;
        Ok(Self::new(Tls { addr, name, connector: TlsConnector::from(Arc::new(config)) }))
    }

    /// Adds a header to every request, for example a bearer token.
    #[must_use]
    pub fn with_header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.push((name, value));
        self
    }

    /// Sends a request over a new connection.
    pub(super) async fn send(&self, mut request: Request) -> anyhow::Result<Response<Incoming>> {
        for (name, value) in &self.headers {
            request.headers_mut().insert(name.clone(), value.clone());
        }
        *request.version_mut() = Version::HTTP_11;
        let io = self.connect.connect().await.context("connect")?;
        let (mut sender, connection) = http1::handshake::<_, Full<Bytes>>(TokioIo::new(io)).await?;
        tokio::spawn(connection);
        Ok(sender.send_request(request.map(Full::new)).await?)
    }
}
