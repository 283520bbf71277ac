// SPDX-License-Identifier: Apache-2.0
//! Waits for the UID of the cluster, which marks its cloud resources. Called by `args` at the start.

use std::time::Duration;

use anyhow::Context as _;
use kube::Client;
use steerage_process::duration;
use steerage_watch::{Backoff, cluster_uid};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// For all tries. A new API server or a new role may need some seconds.
pub(crate) const UID_READ_TIMEOUT: Duration = Duration::from_mins(1);

/// The UID; `None` if the process stops first. Fails after `patience`.
pub(crate) async fn read(
    client: &Client,
    stop: &CancellationToken,
    patience: Duration,
) -> anyhow::Result<Option<String>> {
    let give_up = Instant::now() + patience;
    let mut backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(5));
    loop {
        let error = match cluster_uid(client).await {
            Ok(uid) => return Ok(Some(uid)),
            Err(error) => error,
        };
        let wait = backoff.next_delay();
        if Instant::now() + wait > give_up {
            return Err(error).context(
                "cannot read the namespace kube-system, whose UID marks the cloud resources of this cluster; \
                 check the connection to the API server and the right to get this namespace",
            );
        }
        tracing::warn!(
            error = steerage_model::chain(&error), retry_in = %duration::rounded(wait),
            "namespace kube-system not read; retrying"
        );
        tokio::select! {
            () = stop.cancelled() => return Ok(None),
            () = tokio::time::sleep(wait) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use serde_json::{Value, json};

    use super::*;

    /// An API server that gives these answers, the last one again and again, and counts the requests.
    fn answering(answers: Vec<(u16, Value)>) -> (Client, Arc<AtomicUsize>) {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            assert_eq!(request.uri().path(), "/api/v1/namespaces/kube-system");
            let (status, body) = &answers[count.fetch_add(1, Ordering::Relaxed).min(answers.len() - 1)];
            let response = http::Response::builder().status(*status);
            let response = response.body(kube::client::Body::from(body.to_string().into_bytes())).unwrap();
            async { Ok::<_, std::io::Error>(response) }
        });
        (Client::new(service, "default"), asked)
    }

    fn namespace(uid: &str) -> (u16, Value) {
        let metadata = json!({"name": "kube-system", "uid": uid});
        let kind = "PartialObjectMetadata";
        (200, json!({"apiVersion": "meta.k8s.io/v1", "kind": kind, "metadata": metadata}))
    }

    fn status(code: u16) -> (u16, Value) {
        let message = "namespaces \"kube-system\" is forbidden";
        (
            code,
            json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}),
        )
    }

    #[tokio::test]
    async fn failed_read_is_repeated() {
        let (client, asked) = answering(vec![status(503), namespace("u-1")]);
        let uid = read(&client, &CancellationToken::new(), UID_READ_TIMEOUT).await.unwrap();
        assert_eq!((uid.as_deref(), asked.load(Ordering::Relaxed)), (Some("u-1"), 2));
    }

    #[tokio::test]
    async fn error_names_namespace_and_cause() {
        for answer in [status(403), namespace("")] {
            let (client, _) = answering(vec![answer]);
            let error = read(&client, &CancellationToken::new(), Duration::ZERO).await.unwrap_err();
            let text = steerage_model::chain(error.as_ref());
            assert!(text.contains("the right to get this namespace"), "{text}");
            assert!(text.contains("forbidden") || text.contains("has no UID"), "{text}");
        }
    }

    #[tokio::test]
    async fn shutdown_ends_the_retries() {
        let (client, _) = answering(vec![status(503)]);
        let stop = CancellationToken::new();
        stop.cancel();
        assert_eq!(read(&client, &stop, UID_READ_TIMEOUT).await.unwrap(), None);
    }
}
