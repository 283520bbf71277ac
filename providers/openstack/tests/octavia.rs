// SPDX-License-Identifier: Apache-2.0
//! The provider on the APIs of Keystone, Neutron and Octavia: the conformance suite, and properties of Octavia.

#![allow(clippy::unwrap_used)] // test code; the lint's own exception does not see helpers outside of test functions

mod cloud;

use cloud::Cloud;
use steerage_requirements::requires;

/// Octavia uses one core, and needs tens of milliseconds for each of thousands of calls: two of them share the checks.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn provider_conforms() {
    requires!(OpenStack);
    let parts = [0, 1].map(|part| {
        tokio::spawn(async move {
            let cloud = Cloud::start().await?;
            steerage_provider_conformance::run_part(&cloud, part, 2).await
        })
    });
    for part in parts {
        part.await.unwrap().unwrap();
    }
}
