// SPDX-License-Identifier: Apache-2.0
//! HTTP/1 for the API server in memory: requests in, whole or streamed answers out. Knows nothing of Kubernetes.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use http::header::CONTENT_TYPE;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;

use super::status_body;

/// A request.
pub(super) struct Call {
    pub(super) method: Method,
    pub(super) path: String,
    pub(super) query: BTreeMap<String, String>,
    pub(super) body: Bytes,
}

/// What is answered.
pub(super) enum Answer {
    Whole(StatusCode, Bytes),
    /// The lines of a watch.
    Stream(BoxStream<'static, Bytes>),
}

impl Answer {
    pub(super) fn status(code: StatusCode, reason: &str) -> Self {
        Self::Whole(code, status_body(code, reason))
    }

    /// An object, or the reason why there is none.
    pub(super) fn of(result: Result<Bytes, (StatusCode, &str)>, code: StatusCode) -> Self {
        match result {
            Ok(object) => Self::Whole(code, object),
            Err((code, reason)) => Self::status(code, reason),
        }
    }
}

type AnswerBody = StreamBody<BoxStream<'static, Result<Frame<Bytes>, Infallible>>>;

/// Serves at a free port of this address until the runtime ends. Returns both.
pub(super) async fn serve<F>(
    address: Ipv4Addr,
    answer: impl Fn(Call) -> F + Send + Sync + 'static,
) -> Result<SocketAddr>
where
    F: Future<Output = Answer> + Send + 'static,
{
    let listener =
        TcpListener::bind((address, 0)).await.with_context(|| format!("cannot listen on {address}"))?;
    let address = listener.local_addr()?;
    let answer = Arc::new(answer);
    tokio::spawn(async move {
        loop {
            let Ok((stream, _)) = listener.accept().await else { continue };
            let _ = stream.set_nodelay(true);
            let answer = Arc::clone(&answer);
            let service = service_fn(move |request: Request<Incoming>| {
                let answer = Arc::clone(&answer);
                async move { Ok::<_, hyper::Error>(response(answer(call(request).await?).await)) }
            });
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
    Ok(address)
}

async fn call(request: Request<Incoming>) -> Result<Call, hyper::Error> {
    let (parts, body) = request.into_parts();
    let pairs = parts.uri.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
    Ok(Call {
        method: parts.method,
        path: parts.uri.path().to_owned(),
        query: pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
        body: body.collect().await?.to_bytes(),
    })
}

fn response(answer: Answer) -> Response<AnswerBody> {
    let (code, body) = match answer {
        Answer::Whole(code, bytes) => (code, futures::stream::iter([bytes]).boxed()),
        Answer::Stream(lines) => (StatusCode::OK, lines),
    };
    let mut response = Response::new(StreamBody::new(body.map(|bytes| Ok(Frame::data(bytes))).boxed()));
    *response.status_mut() = code;
    response.headers_mut().insert(CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    response
}
