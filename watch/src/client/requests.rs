// SPDX-License-Identifier: Apache-2.0
//! Metrics of the requests to the API server, with client-go's names, labels and buckets, so that dashboards of Kubernetes components
//! show them. A layer of the client counts every attempt, also one that its caller gives up.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use http::{Method, Request, Response};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use tower::{Layer, Service};

/// client-go's code of a request without a response.
const NO_RESPONSE: &str = "<error>";
/// client-go's buckets, in seconds.
const BUCKETS: [f64; 12] = [0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0];

/// The labels `code`, `method` and `host`.
type ResultLabels = [(&'static str, String); 3];
/// The labels `verb` and `host`.
type DurationLabels = [(&'static str, String); 2];

/// The metrics. Clones share them.
#[derive(Clone, Debug)]
pub struct RequestMetrics {
    requests: Family<ResultLabels, Counter>,
    durations: Family<DurationLabels, Histogram, fn() -> Histogram>,
}

impl RequestMetrics {
    /// Registers them; the registry gives the prefix `rest_client_`.
    pub fn new(registry: &mut Registry) -> Self {
        let metrics = Self {
            requests: Family::default(),
            durations: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
        };
        let Self { requests, durations } = metrics.clone();
        registry.register("requests", "Requests to the API server", requests);
        registry.register_with_unit(
            "request_duration",
            "Time from a request to the head of its response; of a watch, until it is open",
            Unit::Seconds,
            durations,
        );
        metrics
    }

    /// Shows all labels without a request: the reference page does.
    pub fn show_sample(&self) {
        let host = || "10.96.0.1:443".to_owned();
        let labels = [("code", "200".to_owned()), ("method", "GET".to_owned()), ("host", host())];
        drop(self.requests.get_or_create(&labels));
        drop(self.durations.get_or_create(&[("verb", "GET".to_owned()), ("host", host())]));
    }

    /// The layer of a client of this API server. Durations of usual requests are shown from the start, so that the first request is
    /// an increase.
    pub(super) fn layer(&self, host: &str) -> RequestLayer {
        for verb in ["GET", "POST", "PATCH"] {
            drop(self.durations.get_or_create(&[("verb", verb.to_owned()), ("host", host.to_owned())]));
        }
        RequestLayer { metrics: self.clone(), host: host.to_owned() }
    }
}

/// Adds [`CountedRequests`] to a client.
#[derive(Clone, Debug)]
pub(super) struct RequestLayer {
    metrics: RequestMetrics,
    host: String,
}

impl<S> Layer<S> for RequestLayer {
    type Service = CountedRequests<S>;

    fn layer(&self, inner: S) -> Self::Service {
        CountedRequests { inner, layer: self.clone() }
    }
}

/// Counts the requests of a client.
#[derive(Clone, Debug)]
pub(super) struct CountedRequests<S> {
    inner: S,
    layer: RequestLayer,
}

impl<S, B, R> Service<Request<B>> for CountedRequests<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let running = RunningRequest {
            layer: self.layer.clone(),
            method: request.method().clone(),
            started: Instant::now(),
            code: None,
        };
        let response = self.inner.call(request);
        Box::pin(async move {
            let mut running = running;
            let response = response.await;
            running.code = response.as_ref().ok().map(|response| response.status().as_u16());
            response
        })
    }
}

/// A request that is counted when it ends, however that is: callers drop requests that take too long.
struct RunningRequest {
    layer: RequestLayer,
    method: Method,
    started: Instant,
    /// The status of the response.
    code: Option<u16>,
}

impl Drop for RunningRequest {
    fn drop(&mut self) {
        let RequestLayer { metrics, host } = &self.layer;
        let code = self.code.map_or_else(|| NO_RESPONSE.to_owned(), |code| code.to_string());
        let method = || self.method.as_str().to_owned();
        let labels = [("code", code), ("method", method()), ("host", host.clone())];
        metrics.requests.get_or_create(&labels).inc();
        let labels = [("verb", method()), ("host", host.clone())];
        metrics.durations.get_or_create(&labels).observe(self.started.elapsed().as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::time::Duration;

    use prometheus_client::encoding::text::encode;
    use tower::service_fn;

    use super::*;

    fn text(registry: &Registry) -> String {
        let mut text = String::new();
        encode(&mut text, registry).expect("text");
        text
    }

    #[tokio::test]
    async fn requests_are_counted_however_they_end() {
        let mut registry = Registry::with_prefix("rest_client");
        let metrics = RequestMetrics::new(&mut registry);
        let mut service = metrics.layer("plane:6443").layer(service_fn(async |request: Request<u16>| {
            let mut response = Response::new(());
            match *request.body() {
                0 => std::future::pending().await,
                1 => return Err("connection refused"),
                code => *response.status_mut() = http::StatusCode::from_u16(code).expect("code"),
            }
            Ok(response)
        }));
        let shown = text(&registry);
        assert!(
            shown.contains(r#"request_duration_seconds_count{verb="PATCH",host="plane:6443"} 0"#),
            "{shown}"
        );
        let mut call = |method: Method, body: u16| {
            let mut request = Request::new(body);
            *request.method_mut() = method;
            service.call(request)
        };
        for code in [200, 200, 410] {
            assert_eq!(call(Method::GET, code).await.expect("response").status().as_u16(), code);
        }
        assert!(call(Method::POST, 1).await.is_err());
        let given_up = tokio::time::timeout(Duration::from_millis(1), call(Method::POST, 0)).await;
        assert!(given_up.is_err());
        let text = text(&registry);
        for line in [
            r#"requests_total{code="200",method="GET",host="plane:6443"} 2"#,
            r#"requests_total{code="410",method="GET",host="plane:6443"} 1"#,
            r#"requests_total{code="<error>",method="POST",host="plane:6443"} 2"#,
            r#"request_duration_seconds_count{verb="GET",host="plane:6443"} 3"#,
            r#"request_duration_seconds_bucket{le="60.0",verb="POST",host="plane:6443"} 2"#,
        ] {
            assert!(text.contains(&format!("\nrest_client_{line}\n")), "no {line} in {text}");
        }
    }

    #[tokio::test]
    async fn layer_changes_no_response() {
        let metrics = RequestMetrics::new(&mut Registry::default());
        let echo = service_fn(async |request: Request<&'static str>| {
            Ok::<_, Infallible>(Response::new(request.into_body()))
        });
        let reply = metrics.layer("a").layer(echo).call(Request::new("text")).await;
        assert_eq!(reply.map(Response::into_body), Ok("text"));
    }
}
