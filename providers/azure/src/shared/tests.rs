// SPDX-License-Identifier: Apache-2.0
//! What a shared resource remembers.

use std::sync::Arc;

use crate::config::tests::config;
use crate::desired::tests::named;
use crate::document::BalancerDocument;
use crate::limits::tests::intent;
use crate::merge::Layout;
use crate::scripted::Scripted;

use super::*;

/// Refused Services that are deleted would be remembered until the process stops.
#[tokio::test(start_paused = true)]
async fn refusals_that_nobody_meets_are_forgotten() {
    let cloud = Scripted::new();
    cloud.refuse(false, |_| Some(("Wrong", "wrong".to_owned())));
    for name in ["a", "b"] {
        cloud.put(&format!("/ips/{}", named(name, &[80], &[1]).owner.uid), serde_json::json!({}));
    }
    let layout = Layout { config: config(), is_internal: false };
    let shared = Arc::new(Shared::new(BalancerDocument::new(layout), Duration::from_secs(1)));
    for (name, has) in [("a", 1), ("b", 1)] {
        let lb = named(name, &[80], &[1]);
        let wanted = intent(&lb);
        assert!(shared.write(&cloud, &lb.owner.service, wanted, Duration::ZERO).await.is_err());
        assert_eq!(shared.state.lock().await.rejections.len(), has);
        tokio::time::sleep(MOST_WAIT + FIRST_WAIT * 2).await;
    }
}
