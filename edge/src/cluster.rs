// SPDX-License-Identifier: Apache-2.0
//! To which cluster this host belongs, for its heartbeats: hosts of other clusters on the link are no peers. Nothing waits for it.

use std::time::Duration;

use kube::Client;
use steerage_model::chain;
use steerage_watch::{Backoff, ClusterUidError, cluster_uid};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::hash;

const RETRY: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(30));

/// What this host knows of its cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cluster {
    /// There is none.
    None,
    /// The API server has not answered yet.
    Unread,
    /// The API server does not tell this host: only the name of the group separates hosts.
    Unreadable,
    /// The hash of its UID.
    Known(u64),
}

impl Cluster {
    pub(crate) fn hash(self) -> Option<u64> {
        match self {
            Self::Known(hash) => Some(hash),
            _ => None,
        }
    }

    fn after(error: &ClusterUidError) -> Self {
        match error {
            ClusterUidError::Request(error) => match &**error {
                kube::Error::Api(status) if matches!(status.code, 403 | 404) => Self::Unreadable,
                _ => Self::Unread,
            },
            ClusterUidError::NoAnswer => Self::Unread,
            ClusterUidError::Missing => Self::Unreadable,
        }
    }
}

/// Reads the cluster's UID, and sends what becomes known. Returns once it is read, or at shutdown.
pub(crate) async fn read(
    client: Client,
    cluster: watch::Sender<Cluster>,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let mut backoff = RETRY;
    let mut logged = String::new();
    while !shutdown.is_cancelled() {
        let error = match cluster_uid(&client).await {
            Ok(uid) => {
                tracing::info!(uid, "read the UID of the cluster");
                cluster.send_replace(Cluster::Known(hash::bytes(uid.as_bytes())));
                return Ok(());
            }
            Err(error) => error,
        };
        cluster.send_replace(Cluster::after(&error));
        let text = chain(&error);
        if text != logged {
            tracing::warn!(
                error = text,
                "the UID of the cluster is not read; until then edge hosts of other clusters on the link with the same --group count as \
                 hosts of this one; retrying"
            );
            logged = text;
        }
        let _ = shutdown.run_until_cancelled(tokio::time::sleep(backoff.next_delay())).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn only_an_answer_of_the_api_server_says_that_the_uid_is_unreadable() {
        let api = |code| {
            let status = Status { code, ..Status::default() };
            ClusterUidError::Request(Box::new(kube::Error::Api(Box::new(status))))
        };
        for (error, cluster) in [
            (ClusterUidError::NoAnswer, Cluster::Unread),
            (ClusterUidError::Missing, Cluster::Unreadable),
            (api(401), Cluster::Unread),
            (api(403), Cluster::Unreadable),
            (api(503), Cluster::Unread),
        ] {
            assert_eq!(Cluster::after(&error), cluster, "{error}");
        }
    }
}
