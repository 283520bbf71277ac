// SPDX-License-Identifier: Apache-2.0
//! Waits for a time that there may not be, in a `select!`.

use tokio::time::Instant;

/// Never ends without a time.
pub(crate) async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
