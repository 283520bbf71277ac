// SPDX-License-Identifier: Apache-2.0
//! The task that finds out to which cluster this host belongs, for its heartbeats. It waits for the API server as long as it takes,
//! and nothing waits for it: until then, and without a cluster, only the name of the group separates hosts.

use std::time::Duration;

use kube::Client;
use steerage_model::chain;
use steerage_watch::{Backoff, cluster_uid};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::hash;

const RETRY: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(30));

/// Reads the cluster's UID, and passes its hash. Returns then, or at shutdown.
pub(crate) async fn read_id(
    client: Client,
    id: watch::Sender<Option<u64>>,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let mut backoff = RETRY;
    let mut is_logged = false;
    while !shutdown.is_cancelled() {
        match cluster_uid(&client).await {
            Ok(uid) => {
                tracing::info!(cluster = uid, "the cluster of this host is known");
                id.send_replace(Some(hash::bytes(uid.as_bytes())));
                return Ok(());
            }
            Err(error) if !is_logged => {
                is_logged = true;
                tracing::warn!(
                    error = chain(&error),
                    "the cluster's UID is not read; edge hosts of another cluster on the link with the same --group count as hosts \
                     of this one; retrying"
                );
            }
            Err(error) => tracing::debug!(error = chain(&error), "the cluster's UID is not read; retrying"),
        }
        let _ = shutdown.run_until_cancelled(tokio::time::sleep(backoff.next_delay())).await;
    }
    Ok(())
}
