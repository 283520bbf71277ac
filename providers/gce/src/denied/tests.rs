// SPDX-License-Identifier: Apache-2.0

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use http::Response;
use serde_json::{Value, json};
use steerage_model::{Key, Protocol};
use steerage_provider_api::{
    AdmittedSources, Compare, Error, LoadBalancer, Outcome, Owner, Progress, Provider as _, RequestedSources,
};
use tokio::time::{Instant, sleep};

use super::DENIED_WAIT;
use crate::annotations::{ADDRESSES, NETWORK_TIER};
use crate::client::{Call, Calls};
use crate::config::Config;
use crate::config::tests::config;
use crate::desired::tests::{INTERNAL, annotated, listeners, web};
use crate::error::{CallError, Result};
use crate::object::Kind;
use crate::provider::Gce;
use crate::scripted::{PROJECT, REGION, Scripted};
use crate::tree::{Tree, address_of};

/// A cloud whose firewall rules the credentials may change or not.
#[derive(Clone)]
struct Network {
    cloud: Scripted,
    is_denied: Arc<AtomicBool>,
    /// The changes of firewall rules that were requested.
    tried: Arc<Mutex<Vec<&'static str>>>,
}

#[async_trait]
impl Calls for Network {
    async fn send(&self, call: Call) -> Result<Value> {
        if matches!(call.action, "firewalls.insert" | "firewalls.patch" | "firewalls.delete") {
            self.tried.lock().unwrap().push(call.action);
            if self.is_denied.load(Ordering::Relaxed) {
                let answer = Response::builder().status(403).body("").unwrap();
                return Err(CallError::answered(call.action, &answer));
            }
        }
        self.cloud.send(call).await
    }
}

impl Network {
    fn new() -> Self {
        Self { cloud: Scripted::new(), is_denied: Arc::default(), tried: Arc::default() }
    }

    fn provider(&self) -> Gce {
        Gce::over(Config { poll: Duration::from_millis(500), ..config() }, Arc::new(self.clone()))
    }

    fn deny(&self, is_denied: bool) {
        self.is_denied.store(is_denied, Ordering::Relaxed);
        self.tried.lock().unwrap().clear();
    }

    fn tried(&self) -> Vec<&'static str> {
        self.tried.lock().unwrap().clone()
    }

    /// The rules that admit clients.
    fn rules(&self) -> Vec<Value> {
        let all = self.cloud.resources().into_values().filter(|found| found.kind == Kind::Firewall);
        let all = all.map(|found| Value::from(found.data));
        all.filter(|rule| rule.get("destinationRanges").is_some()).collect()
    }

    /// The addresses to which packets come.
    fn serving(&self) -> Vec<IpAddr> {
        let all = self.cloud.resources().into_values();
        let serving = all.filter(|found| found.kind == Kind::ForwardingRule);
        serving.filter_map(|found| address_of(&Value::from(found.data))).collect()
    }

    /// The only one, which admits to what serves.
    fn rule(&self) -> Value {
        let [rule] = &self.rules()[..] else { panic!("{:?}", self.rules()) };
        let serving = self.serving();
        let admitted: Vec<_> = Tree::destinations(rule).collect();
        assert!(serving.iter().all(|address| admitted.contains(address)), "{serving:?}: {rule}");
        rule.clone()
    }
}

fn narrowed(ranges: &[&str]) -> LoadBalancer {
    LoadBalancer { source_ranges: ranges.iter().map(|range| range.parse().unwrap()).collect(), ..web() }
}

/// Applies until it is complete.
pub(crate) async fn settle(gce: &Gce, lb: &LoadBalancer) -> Outcome {
    try_settle(gce, lb).await.unwrap()
}

/// Applies until it is complete, or refused.
pub(crate) async fn try_settle(gce: &Gce, lb: &LoadBalancer) -> std::result::Result<Outcome, Error> {
    for _ in 0..60 {
        let outcome = gce.apply(lb, Compare::Remembered).await?;
        match outcome.progress {
            Progress::Done => return Ok(outcome),
            Progress::Again(after) => sleep(after).await,
        }
    }
    panic!("it is never complete");
}

fn told(outcome: &Outcome) -> &str {
    let (reason, message) = outcome.incomplete.as_ref().expect("it is told");
    assert_eq!(*reason, "FirewallNotPermitted");
    message
}

/// Deletes until it is done, or refused.
async fn delete(gce: &Gce) -> std::result::Result<(), Error> {
    for _ in 0..60 {
        match gce.delete(&web().owner).await? {
            Progress::Done => return Ok(()),
            Progress::Again(after) => sleep(after).await,
        }
    }
    panic!("it is never deleted");
}

/// With a complete load balancer whose firewall rule could not be changed to one range.
async fn refused() -> (Network, Gce) {
    let network = Network::new();
    let gce = network.provider();
    settle(&gce, &web()).await;
    network.deny(true);
    let outcome = settle(&gce, &narrowed(&["10.1.0.0/16"])).await;
    assert!(told(&outcome).contains("--source-ranges=10.1.0.0/16"), "{}", told(&outcome));
    assert_eq!(network.tried(), ["firewalls.patch"]);
    (network, gce)
}

#[tokio::test(start_paused = true)]
async fn same_change_is_requested_again_only_after_the_wait() {
    let (network, gce) = refused().await;
    for _ in 0..3 {
        let outcome = settle(&gce, &narrowed(&["10.1.0.0/16"])).await;
        assert_eq!(outcome.retry_refused, Some(DENIED_WAIT));
        gce.set_targets(&web().owner, &web().targets()).await.unwrap();
        sleep(Duration::from_secs(30)).await;
    }
    assert_eq!(network.tried(), ["firewalls.patch"]);
    sleep(DENIED_WAIT).await;
    settle(&gce, &narrowed(&["10.1.0.0/16"])).await;
    assert_eq!(network.tried(), ["firewalls.patch", "firewalls.patch"]);
    network.deny(false);
    sleep(DENIED_WAIT).await;
    assert_eq!(settle(&gce, &narrowed(&["10.1.0.0/16"])).await.incomplete, None);
    assert_eq!(network.rule()["sourceRanges"][0], "10.1.0.0/16");
}

#[tokio::test(start_paused = true)]
async fn change_of_the_service_is_requested_at_once() {
    let (network, gce) = refused().await;
    network.deny(false);
    let ports = listeners(&[(Protocol::Tcp, 81)]);
    let changed = LoadBalancer { listeners: ports, ..narrowed(&["10.1.0.0/16"]) };
    assert_eq!(settle(&gce, &changed).await.incomplete, None);
    let rule = network.rule();
    assert_eq!(
        (&rule["allowed"][0]["ports"][0], &rule["sourceRanges"][0]),
        (&"81".into(), &"10.1.0.0/16".into())
    );
}

#[tokio::test(start_paused = true)]
async fn new_address_is_admitted_at_once() {
    let (network, gce) = refused().await;
    network.deny(false);
    let internal = annotated(narrowed(&["10.1.0.0/16"]), &[INTERNAL]);
    assert_eq!(settle(&gce, &internal).await.incomplete, None);
    assert_eq!(network.rule()["sourceRanges"][0], "10.1.0.0/16");
}

#[tokio::test(start_paused = true)]
async fn commands_are_of_what_is_wanted_now() {
    let (network, gce) = refused().await;
    let outcome = settle(&gce, &narrowed(&["10.2.0.0/16"])).await;
    let message = told(&outcome);
    assert!(message.contains("10.2.0.0/16") && !message.contains("10.1.0.0/16"), "{message}");
    // As the rule is.
    assert_eq!(settle(&gce, &web()).await.incomplete, None);
    assert_eq!(network.tried().len(), 2);
}

/// Other clients than the requested ones may connect, which is another problem than that nobody can.
#[tokio::test(start_paused = true)]
async fn message_says_who_may_connect() {
    let (network, gce) = refused().await;
    let outside = "clients outside the requested source ranges may still connect";
    let lost = "packets may not arrive";
    let ports = listeners(&[(Protocol::Tcp, 81)]);
    for (lb, has_outside, has_lost) in [
        (narrowed(&["10.1.0.0/16"]), true, false),
        (LoadBalancer { listeners: ports.clone(), ..web() }, false, true),
        (LoadBalancer { listeners: ports, ..narrowed(&["10.1.0.0/16"]) }, true, true),
    ] {
        let outcome = settle(&gce, &lb).await;
        let message = told(&outcome);
        assert_eq!((message.contains(outside), message.contains(lost)), (has_outside, has_lost), "{message}");
    }
    network.deny(false);
    assert_eq!(settle(&gce, &narrowed(&["10.0.0.0/8"])).await.incomplete, None);
    network.deny(true);
    let outcome = settle(&gce, &web()).await;
    assert!(told(&outcome).contains(lost) && !told(&outcome).contains(outside), "{}", told(&outcome));
}

/// Clients would follow to an address at which nobody is admitted, while the old one serves.
#[tokio::test(start_paused = true)]
async fn old_address_stays_published_until_clients_are_admitted_to_the_new_one() {
    let network = Network::new();
    let gce = network.provider();
    let before = settle(&gce, &web()).await.ingress;
    let published: Vec<IpAddr> = before.iter().filter_map(|found| found.ip).collect();
    network.deny(true);
    let moved = |pair| LoadBalancer { published: published.clone(), ..annotated(web(), &[pair]) };
    let stays = async |gce: &Gce, lb: &LoadBalancer| {
        let outcome = settle(gce, lb).await;
        assert_eq!(outcome.ingress, before);
        assert!(told(&outcome).contains("The old address serves"), "{}", told(&outcome));
        assert_eq!(network.serving().len(), 2, "{:?}", network.serving());
    };
    stays(&gce, &moved(INTERNAL)).await;
    let gce = network.provider();
    stays(&gce, &moved(INTERNAL)).await;
    // Nobody knows the address in between.
    let standard = moved((NETWORK_TIER, "Standard"));
    stays(&gce, &standard).await;
    network.deny(false);
    sleep(DENIED_WAIT).await;
    let outcome = settle(&gce, &standard).await;
    assert_eq!(outcome.incomplete, None);
    let published: Vec<IpAddr> = outcome.ingress.iter().filter_map(|found| found.ip).collect();
    assert!(outcome.ingress != before && network.serving() == published, "{:?}", network.serving());
    network.rule();
}

/// The rule is the Service's own, and still admits the clients that it no longer requests.
#[tokio::test(start_paused = true)]
async fn refused_service_with_a_rule_that_may_not_change_says_so() {
    let network = Network::new();
    let gce = network.provider();
    settle(&gce, &web()).await;
    network.deny(true);
    let ranges = narrowed(&["10.1.0.0/16"]).source_ranges;
    let requested = RequestedSources { ranges, ..RequestedSources::default() };
    let mut admitted = gce.restrict_sources(&web().owner, &requested).await;
    while let Err(Error::Busy(_)) = admitted {
        sleep(Duration::from_secs(1)).await;
        admitted = gce.restrict_sources(&web().owner, &requested).await;
    }
    assert_eq!(admitted.unwrap(), Some(AdmittedSources::NotPermitted));
    assert_eq!(network.tried(), ["firewalls.patch"]);
}

/// Somebody may have let the rule admit by tag, besides its ranges or in place of them. GCE admits everybody by a rule without a source.
#[tokio::test(start_paused = true)]
async fn refused_service_admits_nobody_by_tag_or_service_account() {
    let none = json!([]);
    for (field, ranges, left) in [
        ("sourceTags", json!(["0.0.0.0/0"]), Some("10.1.0.0/16")),
        ("sourceTags", json!(["10.1.0.0/16"]), Some("10.1.0.0/16")),
        ("sourceServiceAccounts", json!(["10.1.0.0/16"]), Some("10.1.0.0/16")),
        ("sourceTags", none.clone(), None),
        ("sourceServiceAccounts", Value::Null, None),
        // Nothing says whom it admits: everybody.
        ("priority", none, Some("10.1.0.0/16")),
    ] {
        let network = Network::new();
        let gce = network.provider();
        settle(&gce, &web()).await;
        let name = network.rule()["name"].as_str().unwrap().to_owned();
        let value = if field == "priority" { json!(1000) } else { json!(["others"]) };
        let is_changed = network.cloud.change(&format!("{PROJECT}/global/firewalls/{name}"), |rule| {
            rule.data.insert("sourceRanges".to_owned(), ranges.clone());
            rule.data.insert(field.to_owned(), value.clone());
            Some(())
        });
        assert!(is_changed);
        let wanted = narrowed(&["10.1.0.0/16"]).source_ranges;
        let requested = RequestedSources { ranges: wanted, ..RequestedSources::default() };
        let mut admitted = gce.restrict_sources(&web().owner, &requested).await;
        while let Err(Error::Busy(_)) = admitted {
            sleep(Duration::from_secs(1)).await;
            admitted = gce.restrict_sources(&web().owner, &requested).await;
        }
        let expected = left.map(str::to_owned).into_iter().collect();
        assert_eq!(admitted.unwrap(), Some(AdmittedSources::Only(expected)), "{field} {ranges}");
        match left {
            None => assert_eq!(network.rules(), Vec::<Value>::new(), "{field} {ranges}"),
            Some(left) => {
                let rule = network.rule();
                assert_eq!(rule["sourceRanges"], json!([left]), "{field} {ranges}");
                assert!(field == "priority" || rule.get(field).is_none_or(Value::is_null), "{rule}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn deletion_is_requested_at_once() {
    let (network, gce) = refused().await;
    network.deny(false);
    let began = Instant::now();
    delete(&gce).await.unwrap();
    assert!(began.elapsed() < Duration::from_mins(1) && network.rules().is_empty());
}

/// Each error is a line in the log.
#[tokio::test(start_paused = true)]
async fn refused_deletion_is_told_once_after_each_try() {
    let (network, gce) = refused().await;
    for _ in 0..3 {
        network.deny(true);
        let error = delete(&gce).await.unwrap_err();
        assert!(matches!(error, Error::Denied(_)), "{error}");
        let message = error.to_string();
        assert!(
            message.contains("firewall-rules delete") && !message.contains("firewall-rules update"),
            "{message}"
        );
        let Progress::Again(after) = gce.delete(&web().owner).await.unwrap() else { panic!("it is left") };
        assert!(after > DENIED_WAIT / 2 && after <= DENIED_WAIT, "{after:?}");
        assert!(network.tried().iter().all(|action| *action == "firewalls.delete"), "{:?}", network.tried());
        sleep(after).await;
    }
    network.deny(false);
    delete(&gce).await.unwrap();
    assert!(network.rules().is_empty());
}

#[tokio::test(start_paused = true)]
async fn refusals_end_where_the_service_gets_a_load_balancer_again() {
    for is_other in [false, true] {
        let (network, gce) = refused().await;
        let error = delete(&gce).await.unwrap_err();
        assert!(matches!(error, Error::Denied(_)), "{error}");
        network.deny(false);
        let mut again = web();
        if is_other {
            again.owner.uid = "u2".to_owned();
        }
        let outcome = settle(&gce, &again).await;
        assert_eq!(outcome.incomplete, None, "another Service of the name: {is_other}");
        let admits =
            |rule: &Value| Tree::destinations(rule).any(|address| Some(address) == outcome.ingress[0].ip);
        assert!(network.rules().iter().any(admits), "{:?}", network.rules());
    }
}

/// The rule that is left admits the clients of the earlier Service to whatever has the address.
#[tokio::test(start_paused = true)]
async fn address_to_which_a_rule_that_is_left_admits_goes_to_no_other_service() {
    let network = Network::new();
    let reserved = json!({ "name": "mine", "addressType": "EXTERNAL", "networkTier": "PREMIUM", "address": "198.18.255.2" });
    network.cloud.put(Kind::Address, &format!("{REGION}/addresses/mine"), &reserved);
    let requesting = |lb| annotated(lb, &[(ADDRESSES, "mine")]);
    let gce = network.provider();
    settle(&gce, &requesting(web())).await;
    network.deny(true);
    delete(&gce).await.unwrap_err();
    let [again, other] = [("web", "u2"), ("other", "u3")].map(|(name, uid)| {
        let owner = Owner { service: Key::new("shop", name), uid: uid.to_owned() };
        LoadBalancer { owner, ..web() }
    });
    for gce in [&gce, &network.provider()] {
        settle(gce, &again).await;
        let error = loop {
            match gce.apply(&requesting(other.clone()), Compare::Remembered).await {
                Ok(Outcome { progress: Progress::Again(after), .. }) => sleep(after).await,
                other => break other.unwrap_err(),
            }
        };
        assert_eq!(error.reason(), "AddressNotAvailable");
    }
}

/// Their rules have one name.
#[tokio::test(start_paused = true)]
async fn rule_of_an_earlier_service_is_told_to_be_deleted_before_the_new_one_is_made() {
    let (network, gce) = refused().await;
    delete(&gce).await.unwrap_err();
    network.deny(true);
    let mut again = web();
    again.owner.uid = "u2".to_owned();
    for _ in 0..2 {
        let outcome = settle(&gce, &again).await;
        let message = told(&outcome);
        let at = |what: &str| message.find(what).unwrap_or_else(|| panic!("{what}: {message}"));
        assert!(at("firewall-rules delete") < at("firewall-rules create"), "{message}");
        // The deletion of the earlier one goes on beside it.
        gce.delete(&web().owner).await.ok();
    }
    assert_eq!(network.tried(), ["firewalls.delete", "firewalls.insert"], "each once");
}
