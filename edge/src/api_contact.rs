// SPDX-License-Identifier: Apache-2.0
//! Whether the API server answers this host. A host that it does not answer has old load balancers and targets, and yields to one that
//! has new ones: `membership` reads the result. Watches do not tell, because one on which nothing arrives may be a quiet one.
//!
//! It asks for the version, which every account may read and which costs the API server nothing. It changes nothing else.

use std::time::{Duration, Instant};

use kube::Client;
use steerage_model::chain;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::channel::send_if_changed;

/// How often the API server is asked, and for how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ContactTiming {
    interval: Duration,
    /// After a request that failed.
    retry: Duration,
    deadline: Duration,
    /// The contact is lost so long after the last answer.
    lost_after: Duration,
}

impl Default for ContactTiming {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(5),
            retry: Duration::from_secs(1),
            deadline: Duration::from_secs(3),
            lost_after: Duration::from_secs(10),
        }
    }
}

/// Asks until shutdown, and sends whether the contact is lost.
pub(crate) async fn watch(
    client: Client,
    timing: ContactTiming,
    lost: watch::Sender<bool>,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let mut last = Instant::now();
    loop {
        let problem = ask(&client, timing.deadline).await.err();
        if problem.is_none() {
            last = Instant::now();
        }
        let is_lost = last.elapsed() >= timing.lost_after;
        match (*lost.borrow(), is_lost) {
            (false, true) => tracing::warn!(
                error = problem,
                "no usable answer from the API server; load balancers may be outdated; other edge hosts with an answer take over the VIPs"
            ),
            (true, false) => tracing::info!("the API server answers again"),
            _ => {}
        }
        send_if_changed(&lost, is_lost);
        let wait = if problem.is_none() { timing.interval } else { timing.retry };
        if shutdown.run_until_cancelled(tokio::time::sleep(wait)).await.is_none() {
            return Ok(());
        }
    }
}

/// A refusal is an answer too, but one of the credentials: without them this host hears of no change.
async fn ask(client: &Client, deadline: Duration) -> Result<(), String> {
    let request = http::Request::get("/version").body(Vec::new()).map_err(|error| error.to_string())?;
    match tokio::time::timeout(deadline, client.request_text(request)).await {
        Err(_) => Err("no answer in time".to_owned()),
        Ok(Err(kube::Error::Api(status))) if (400..500).contains(&status.code) && status.code != 401 => {
            Ok(())
        }
        Ok(Err(error)) => Err(chain(&error)),
        Ok(Ok(_)) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU16, Ordering};

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    /// Answers each request with this status, and with 0 not at all.
    async fn serve(listener: TcpListener, status: Arc<AtomicU16>) {
        while let Ok((mut stream, _)) = listener.accept().await {
            let status = Arc::clone(&status);
            tokio::spawn(async move {
                let mut request = [0; 4096];
                while stream.read(&mut request).await.is_ok_and(|length| length > 0) {
                    let status = status.load(Ordering::Relaxed);
                    if status == 0 {
                        continue;
                    }
                    let body = format!(r#"{{"kind":"Status","status":"Failure","code":{status}}}"#);
                    let answer =
                        format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\n\r\n{body}", body.len());
                    if stream.write_all(answer.as_bytes()).await.is_err() {
                        return;
                    }
                }
            });
        }
    }

    #[tokio::test]
    async fn contact_is_lost_without_answers_and_without_credentials() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let url = format!("http://{}", listener.local_addr().expect("address")).parse().expect("a URL");
        let status = Arc::new(AtomicU16::new(200));
        tokio::spawn(serve(listener, Arc::clone(&status)));
        let client = Client::try_from(kube::Config::new(url)).expect("a client");
        let short = Duration::from_millis(20);
        let timing =
            ContactTiming { interval: short, retry: short, deadline: short * 10, lost_after: short * 5 };
        let (lost, mut lost_rx) = watch::channel(false);
        let shutdown = CancellationToken::new();
        let asking = tokio::spawn(super::watch(client, timing, lost, shutdown.clone()));
        for (next, is_lost) in [(0, true), (200, false), (401, true), (403, false), (500, true), (404, false)]
        {
            status.store(next, Ordering::Relaxed);
            let changed = lost_rx.wait_for(|lost| *lost == is_lost);
            let changed = tokio::time::timeout(Duration::from_secs(30), changed).await;
            changed.unwrap_or_else(|_| panic!("{next}")).expect("it asks");
        }
        shutdown.cancel();
        asking.await.expect("it ends").expect("no error");
    }
}
