// SPDX-License-Identifier: Apache-2.0
//! A real HTTP proxy on loopback between a provider and its backend: it counts what passes and makes faults.
//!
//! Request bodies are read whole, so that a call can be classified by its body; answers are streamed, so that a watch works
//! through it. Every call gets a connection of its own to the backend.

mod script;
mod upstream;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::task::{JoinHandle, JoinSet};

use script::Script;
pub use script::{Answer, Fault, Span, When};
pub use upstream::{Connect, Io, Upstream};

/// A request with its body read.
pub type Request = hyper::Request<Bytes>;

type Classify = dyn Fn(&Request) -> CallKind + Send + Sync;
type Body = BoxBody<Bytes, hyper::Error>;

/// What a call is to the suite. The names are the backend's, for example `RegisterTargets` or `PATCH edgeloadbalancers`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallKind {
    /// Changes nothing.
    Read(String),
    /// Changes the backend, or would.
    Write(String),
    /// Neither counted nor cut by number: watches, discovery, the leader's Lease.
    Background,
}

/// One counted call.
#[derive(Clone, Debug)]
pub struct Call {
    /// The name that the classifier gave.
    pub name: String,
    /// Whether it is a write.
    pub write: bool,
    /// Path and query.
    pub target: String,
    /// The request's body.
    pub body: Bytes,
}

#[derive(Default)]
struct State {
    calls: Vec<Call>,
    script: Script,
}

struct Shared {
    upstream: Upstream,
    classify: Box<Classify>,
    state: Mutex<State>,
}

/// The proxy; it ends, with all its connections, when this is dropped.
pub struct Proxy {
    addr: SocketAddr,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Proxy {
    /// Listens on a free port of 127.0.0.1.
    pub async fn start(
        upstream: Upstream,
        classify: impl Fn(&Request) -> CallKind + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let addr = listener.local_addr()?;
        let shared =
            Arc::new(Shared { upstream, classify: Box::new(classify), state: Mutex::new(State::default()) });
        let task = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Ok(Self { addr, shared, task })
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Its base URL, without a slash at the end.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// The calls since the last [`Proxy::reset`], in the order in which they came, also those that a fault kept from the backend.
    pub fn calls(&self) -> Vec<Call> {
        self.shared.state().calls.clone()
    }

    /// The writes among [`Proxy::calls`].
    pub fn writes(&self) -> Vec<Call> {
        self.calls().into_iter().filter(|c| c.write).collect()
    }

    /// Forgets the calls and all faults.
    pub fn reset(&self) {
        *self.shared.state() = State::default();
    }

    /// Makes `fault` happen to the `at`-th call from now (the first is 1), or to all from it on.
    pub fn inject(&self, at: usize, span: Span, fault: Fault) {
        self.inject_where(|_| true, at, span, fault);
    }

    /// As [`Proxy::inject`], counting only the calls that match.
    pub fn inject_where(
        &self,
        matches: impl Fn(&Call) -> bool + Send + Sync + 'static,
        at: usize,
        span: Span,
        fault: Fault,
    ) {
        self.shared.state().script.add(Box::new(matches), at, span, fault);
    }

    /// What the backend sees of a provider that is killed at its `at`-th call: that call is cut, before or after it reached the
    /// backend, and none follows.
    pub fn crash_at(&self, at: usize, when: When) {
        self.inject(at, Span::Once, Fault::Cut(when));
        self.inject(at + 1, Span::Onward, Fault::Cut(When::Before));
    }

    /// Whether any fault has happened since the last reset.
    pub fn struck(&self) -> bool {
        self.shared.state().script.struck()
    }
}

impl Shared {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the call down and says what shall happen to it.
    fn admit(&self, request: &Request) -> Option<Fault> {
        let (name, write) = match (self.classify)(request) {
            CallKind::Read(name) => (name, false),
            CallKind::Write(name) => (name, true),
            CallKind::Background => return None,
        };
        let target = request.uri().path_and_query().map_or_else(String::new, ToString::to_string);
        let call = Call { name, write, target, body: request.body().clone() };
        let mut state = self.state();
        let fault = state.script.strike(&call);
        state.calls.push(call);
        fault
    }

    async fn serve(&self, request: hyper::Request<Incoming>) -> anyhow::Result<Response<Body>> {
        let (parts, body) = request.into_parts();
        let request = Request::from_parts(parts, body.collect().await?.to_bytes());
        match self.admit(&request) {
            None => self.forward(request).await,
            Some(Fault::Delay(time)) => {
                tokio::time::sleep(time).await;
                self.forward(request).await
            }
            Some(Fault::Answer(answer)) => Ok(Response::builder()
                .status(StatusCode::from_u16(answer.status)?)
                .header(header::CONTENT_TYPE, answer.content_type)
                .body(full(answer.body))?),
            Some(Fault::Cut(When::Before)) => anyhow::bail!("cut before the backend"),
            Some(Fault::Cut(When::After)) => {
                self.forward(request).await?;
                anyhow::bail!("cut after the backend")
            }
        }
    }

    async fn forward(&self, request: Request) -> anyhow::Result<Response<Body>> {
        match self.upstream.send(request).await {
            Ok(response) => Ok(response.map(BodyExt::boxed)),
            Err(error) => Ok(Response::builder()
                .status(StatusCode::BAD_GATEWAY)
                .body(full(format!("the proxy can't reach the backend: {error:#}").into()))?),
        }
    }
}

fn full(body: Bytes) -> Body {
    Full::new(body).map_err(|never| match never {}).boxed()
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let shared = Arc::clone(&shared);
        connections.spawn(async move {
            let service = service_fn(|request| shared.serve(request));
            // An error from the service closes the connection without an answer: that is the cut.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
        while connections.try_join_next().is_some() {}
    }
}
