// SPDX-License-Identifier: Apache-2.0
//! A client of the API server that refuses to write, whoever asks it.

use http::Request;
use kube::Client;
use kube::client::Body;

#[derive(Debug, thiserror::Error)]
#[error("a dry run sends no {method} request")]
struct Refused {
    method: http::Method,
}

/// A client that sends only requests that read.
pub(crate) fn read_only(client: Client) -> Client {
    let namespace = client.default_namespace().to_owned();
    let service = tower::service_fn(move |request: Request<Body>| {
        let client = client.clone();
        async move {
            if request.method().is_safe() {
                return client.send(request).await.map_err(tower::BoxError::from);
            }
            Err(Refused { method: request.method().clone() }.into())
        }
    });
    Client::new(service, namespace)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn only_reads_reach_the_api_server() {
        static REACHED: AtomicUsize = AtomicUsize::new(0);
        let server = tower::service_fn(|_: Request<Body>| async {
            REACHED.fetch_add(1, Ordering::AcqRel);
            Ok::<_, std::io::Error>(http::Response::new(Body::from(b"{}".to_vec())))
        });
        let client = read_only(Client::new(server, "default"));
        for method in ["POST", "PUT", "PATCH", "DELETE"] {
            let request = Request::builder().method(method).uri("/api").body(Vec::new()).expect("request");
            let error = client.request_text(request).await.expect_err("refused");
            assert!(steerage_model::chain(&error).contains(method), "{error}");
        }
        assert_eq!(REACHED.load(Ordering::Acquire), 0);
        let request = Request::get("/api").body(Vec::new()).expect("request");
        assert_eq!(client.request_text(request).await.expect("an answer"), "{}");
        assert_eq!(REACHED.load(Ordering::Acquire), 1);
    }
}
