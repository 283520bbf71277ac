// SPDX-License-Identifier: Apache-2.0
//! An HTTP proxy on loopback between a provider and its backend. It counts calls and injects faults.
//!
//! It reads request bodies completely, to classify a call by its body. It streams responses, so that watches work. Every call
//! uses its own connection to the backend.

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
pub use script::{CannedResponse, CutPoint, Fault, Span};
pub use upstream::{Connect, Io, Upstream};

/// A request with its complete body.
pub type Request = hyper::Request<Bytes>;

type Classify = dyn Fn(&Request) -> CallKind + Send + Sync;
type Body = BoxBody<Bytes, hyper::Error>;

/// The kind of a call. The name is the backend's, for example `RegisterTargets` or `PATCH edgeloadbalancers`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallKind {
    /// Does not change the backend.
    Read(String),
    /// Changes the backend, or tries to.
    Write(String),
    /// Not counted, and without faults: watches, discovery, the Lease.
    Background,
}

/// A counted call.
#[derive(Clone, Debug)]
pub struct Call {
    /// Name from the classifier.
    pub name: String,
    /// Whether it is a write.
    pub write: bool,
    /// Path and query.
    pub target: String,
    /// Body of the request.
    pub body: Bytes,
}

#[derive(Default)]
struct ProxyState {
    calls: Vec<Call>,
    script: Script,
}

struct Shared {
    upstream: Upstream,
    classify: Box<Classify>,
    state: Arc<Mutex<ProxyState>>,
}

/// The proxy. When dropped, it stops and closes all connections.
pub struct Proxy {
    addr: SocketAddr,
    state: Arc<Mutex<ProxyState>>,
    /// `None` for a backend in this process.
    task: Option<JoinHandle<()>>,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
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
        let state = Arc::<Mutex<ProxyState>>::default();
        let shared = Shared { upstream, classify: Box::new(classify), state: Arc::clone(&state) };
        let task = tokio::spawn(accept(listener, Arc::new(shared)));
        Ok(Self { addr, state, task: Some(task) })
    }

    /// For a backend in this process, which passes each call to [`Proxy::record`] and applies its fault. No connections.
    pub fn in_process() -> Self {
        Self { addr: (Ipv4Addr::UNSPECIFIED, 0).into(), state: Arc::default(), task: None }
    }

    /// Records a call and returns its fault.
    pub fn record(&self, call: Call) -> Option<Fault> {
        lock(&self.state).record(call)
    }

    /// Listening address. Nothing listens for a backend in this process.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Base URL, without a slash at the end.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// All calls since the last [`Proxy::reset`], in order, including those that did not reach the backend because of a fault.
    pub fn calls(&self) -> Vec<Call> {
        lock(&self.state).calls.clone()
    }

    /// The writes among [`Proxy::calls`].
    pub fn writes(&self) -> Vec<Call> {
        self.calls().into_iter().filter(|c| c.write).collect()
    }

    /// Forgets all calls and removes all faults.
    pub fn reset(&self) {
        *lock(&self.state) = ProxyState::default();
    }

    /// Injects a fault into the call with number `at`, or into all calls from that one on. The next call has number 1.
    pub fn inject(&self, at: usize, span: Span, fault: Fault) {
        self.inject_where(|_| true, at, span, fault);
    }

    /// Like [`Proxy::inject`], but counts only matching calls.
    pub fn inject_where(
        &self,
        matches: impl Fn(&Call) -> bool + Send + Sync + 'static,
        at: usize,
        span: Span,
        fault: Fault,
    ) {
        lock(&self.state).script.add(Box::new(matches), at, span, fault);
    }

    /// Simulates a provider that crashes at the call with number `at`: cuts that call, and all later calls before they reach the
    /// backend.
    pub fn crash_at(&self, at: usize, point: CutPoint) {
        self.inject(at, Span::Crash, Fault::Cut(point));
    }

    /// The same at the write with number `at`. A provider that crashes at a read leaves what one leaves that crashed after the write
    /// before it, so that no other crashes need to be tried.
    pub fn crash_at_write(&self, at: usize, point: CutPoint) {
        self.inject_where(|call| call.write, at, Span::Crash, Fault::Cut(point));
    }

    /// Like [`Proxy::inject`], but does not count reads that repeat one since the last write: a provider that waits for a change makes more
    /// of them the slower its backend is.
    pub fn inject_distinct(&self, at: usize, span: Span, fault: Fault) {
        lock(&self.state).script.add(script::not_repeated(), at, span, fault);
    }

    /// Whether a fault was injected into a call since the last reset.
    pub fn fault_fired(&self) -> bool {
        self.faulty().is_some()
    }

    /// The name of the first call with a fault since the last reset.
    pub fn faulty(&self) -> Option<String> {
        lock(&self.state).script.faulty().map(str::to_owned)
    }
}

fn lock(state: &Mutex<ProxyState>) -> std::sync::MutexGuard<'_, ProxyState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ProxyState {
    fn record(&mut self, call: Call) -> Option<Fault> {
        let fault = self.script.next_fault(&call);
        self.calls.push(call);
        fault
    }
}

impl Shared {
    /// Records the call and returns its fault.
    fn record(&self, request: &Request) -> Option<Fault> {
        let (name, write) = match (self.classify)(request) {
            CallKind::Read(name) => (name, false),
            CallKind::Write(name) => (name, true),
            CallKind::Background => return None,
        };
        let target = request.uri().path_and_query().map_or_else(String::new, ToString::to_string);
        let call = Call { name, write, target, body: request.body().clone() };
        lock(&self.state).record(call)
    }

    async fn serve(&self, request: hyper::Request<Incoming>) -> anyhow::Result<Response<Body>> {
        let (parts, body) = request.into_parts();
        let request = Request::from_parts(parts, body.collect().await?.to_bytes());
        match self.record(&request) {
            None => self.forward(request).await,
            Some(Fault::Delay(time)) => {
                tokio::time::sleep(time).await;
                self.forward(request).await
            }
            Some(Fault::Respond(answer)) => Ok(Response::builder()
                .status(StatusCode::from_u16(answer.status)?)
                .header(header::CONTENT_TYPE, answer.content_type)
                .body(full(answer.body))?),
            Some(Fault::Cut(CutPoint::Before)) => anyhow::bail!("call cut before the backend"),
            Some(Fault::Cut(CutPoint::After)) => {
                self.forward(request).await?;
                anyhow::bail!("call cut after the backend")
            }
        }
    }

    async fn forward(&self, request: Request) -> anyhow::Result<Response<Body>> {
        match self.upstream.send(request).await {
            Ok(response) => Ok(response.map(BodyExt::boxed)),
            Err(error) => Ok(Response::builder()
                .status(StatusCode::BAD_GATEWAY)
                .body(full(format!("the proxy cannot reach the backend: {error:#}").into()))?),
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
            // An error of the service closes the connection without a response, which is how a call is cut.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
        while connections.try_join_next().is_some() {}
    }
}
