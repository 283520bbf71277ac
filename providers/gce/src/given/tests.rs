// SPDX-License-Identifier: Apache-2.0

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use http::Response;
use serde_json::{Value, json};
use steerage_model::{Key, Protocol};
use steerage_provider_api::{Compare, GroupTargets, LoadBalancer, Owner, Progress, Provider as _};
use tokio::time::sleep;

use crate::annotations;
use crate::client::{Call, Calls};
use crate::config::Config;
use crate::config::tests::config;
use crate::denied::tests::try_settle;
use crate::desired::tests::{annotated, listeners, web};
use crate::error::{CallError, Result};
use crate::object::Kind;
use crate::provider::Gce;
use crate::scripted::{REGION, Scripted};

/// A cloud with the reserved address `mine`, whose quota is used up for the groups of the Service `first`.
struct UsedUp(Scripted);

#[async_trait]
impl Calls for UsedUp {
    async fn send(&self, call: Call) -> Result<Value> {
        let body = call.body.as_ref().map(Value::to_string).unwrap_or_default();
        if call.action == "networkEndpointGroups.insert" && body.contains("first") {
            let errors = json!([{ "reason": "quotaExceeded", "message": "Quota 'NETWORK_ENDPOINT_GROUPS' exceeded." }]);
            let body = json!({ "error": { "errors": errors } }).to_string();
            let answer = Response::builder().status(403).body(body).unwrap();
            return Err(CallError::answered(call.action, &answer));
        }
        self.0.send(call).await
    }
}

/// With the address `mine`.
fn requesting(name: &str) -> LoadBalancer {
    let owner = Owner { service: Key::new("shop", name), uid: name.to_owned() };
    annotated(LoadBalancer { owner, ..web() }, &[(annotations::ADDRESSES, "mine")])
}

/// What was known of it is forgotten with the refusal, and read again for its targets.
#[tokio::test(start_paused = true)]
async fn service_whose_first_change_is_refused_keeps_the_address_from_nobody() {
    let cloud = Scripted::new();
    let address = "198.18.255.2";
    let reserved =
        json!({ "name": "mine", "addressType": "EXTERNAL", "networkTier": "PREMIUM", "address": address });
    cloud.put(Kind::Address, &format!("{REGION}/addresses/mine"), &reserved);
    let settings = Config { poll: Duration::from_millis(500), ..config() };
    let gce = Gce::over(settings, Arc::new(UsedUp(cloud)));
    let [first, second] = ["first", "second"].map(requesting);
    let refused = try_settle(&gce, &first).await.unwrap_err();
    assert_eq!(refused.reason(), "QuotaExceeded");
    let targets = GroupTargets::of_nodes(first.nodes());
    while gce.set_targets(&first.owner, &targets).await.unwrap().progress != Progress::Done {
        sleep(Duration::from_secs(1)).await;
    }
    let served = try_settle(&gce, &second).await.unwrap();
    assert_eq!(served.ingress[0].ip, Some(address.parse().unwrap()));
    let late = try_settle(&gce, &first).await.unwrap_err();
    assert_eq!(late.reason(), "AddressNotAvailable", "it is used now");
    // Another tenant may have the other Service.
    let told = late.to_string();
    assert!(told.contains("something else than this Service") && !told.contains("second"), "{told}");
}

/// What a restart reads of the address names the forwarding rule that is deleted then.
#[tokio::test(start_paused = true)]
async fn forwarding_rule_is_made_again_at_a_users_address_after_a_restart() {
    for compare in [Compare::Remembered, Compare::InPlace] {
        let cloud = Scripted::new();
        let address = "198.18.255.2";
        let reserved = json!({ "name": "mine", "addressType": "EXTERNAL", "networkTier": "PREMIUM", "address": address });
        cloud.put(Kind::Address, &format!("{REGION}/addresses/mine"), &reserved);
        let provider =
            || Gce::over(Config { poll: Duration::from_millis(500), ..config() }, Arc::new(cloud.clone()));
        try_settle(&provider(), &requesting("web")).await.unwrap();
        for ports in
            [&[(Protocol::Tcp, 81)][..], &[(Protocol::Udp, 81)], &[(Protocol::Tcp, 81), (Protocol::Udp, 82)]]
        {
            let gce = provider();
            let changed = LoadBalancer { listeners: listeners(ports), ..requesting("web") };
            let _ = gce.apply(&changed, compare).await.unwrap();
            let outcome = try_settle(&gce, &changed).await.unwrap();
            assert_eq!(outcome.ingress[0].ip, Some(address.parse().unwrap()));
            let all = cloud.resources();
            let rules = all.values().filter(|found| found.kind == Kind::ForwardingRule).count();
            assert_eq!(rules, ports.len(), "{ports:?}");
        }
    }
}
