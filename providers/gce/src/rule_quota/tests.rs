// SPDX-License-Identifier: Apache-2.0

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use http::Response;
use serde_json::json;
use steerage_model::Protocol;
use steerage_provider_api::{
    Compare, GroupTargets, LoadBalancer, Progress, Provider as _, Target, TargetSet,
};
use tokio::time::{advance, sleep};

use super::*;
use crate::client::{Call, Calls};
use crate::config::Config;
use crate::config::tests::config;
use crate::denied::tests::settle;
use crate::desired::desired;
use crate::desired::tests::{listeners, web};
use crate::error::{CallError, Result};
use crate::provider::Gce;
use crate::scripted::{REGION, Scripted};

mod start;

fn key(name: &str) -> Key {
    Key::new(name, "web")
}

fn insert(name: &str) -> Step {
    Step::Insert { id: Id::new(Kind::ForwardingRule, name), body: json!({}) }
}

/// How many of these new rules of `service` are held.
fn held(quota: &mut RuleQuota, service: &str, rules: &[&str]) -> usize {
    let steps = rules.iter().map(|name| insert(name)).collect();
    quota.split(&key(service), steps).1
}

/// A load balancer without its rules.
fn unruled_tree() -> Tree {
    let mut tree = Tree::default();
    tree.own.insert(Id::new(Kind::BackendService, "b"), json!({}));
    tree
}

/// The rule is gone, to be replaced.
fn claim(quota: &mut RuleQuota, service: &str, rule: &str) {
    let claims = quota.claims.entry(key(service)).or_default();
    claims.insert(Id::new(Kind::ForwardingRule, rule), Claim::new(OldRule::Gone));
}

/// `good` replaces the rule `a`.
fn replacing() -> RuleQuota {
    let mut quota = RuleQuota::default();
    claim(&mut quota, "good", "a");
    quota
}

#[tokio::test(start_paused = true)]
async fn freed_place_waits_for_who_freed_it() {
    advance(FULL * 2).await;
    let mut quota = replacing();
    assert_eq!(held(&mut quota, "evil", &["x"]), 1);
    advance(UNSURE).await;
    assert_eq!(held(&mut quota, "evil", &["x"]), 0, "nothing says that the quota is full");
    claim(&mut quota, "good", "a");
    assert_eq!(
        held(&mut quota, "evil", &["x"]),
        0,
        "whoever replaces rules all the time keeps nobody waiting"
    );
    quota.note_refused();
    for (service, rules, expected) in [
        ("evil", &["x"][..], 1),
        ("good", &["a"], 0),
        // Its next rule waits until that is made.
        ("good", &["a", "b"], 1),
    ] {
        assert_eq!(held(&mut quota, service, rules), expected, "{service} {rules:?}");
    }
    // Two that replace at the same time get one each.
    claim(&mut quota, "other", "x");
    assert_eq!((held(&mut quota, "good", &["a", "b"]), held(&mut quota, "other", &["x"])), (1, 0));
    quota.note_inserted(&key("other"), &Id::new(Kind::ForwardingRule, "x"));
    assert_eq!(held(&mut quota, "evil", &["x"]), 1);
    assert_eq!(quota.retry_in(&key("good")), Some(SOON));
    // Nobody waits for one that cannot finish, which asks on.
    advance(CLAIM).await;
    assert_eq!(held(&mut quota, "evil", &["x"]), 0);
    assert_eq!(quota.retry_in(&key("good")), Some(LATER));
    quota.note_inserted(&key("good"), &Id::new(Kind::ForwardingRule, "a"));
    assert_eq!(quota.retry_in(&key("good")), None);
}

#[tokio::test(start_paused = true)]
async fn other_changes_do_not_wait() {
    let mut quota = replacing();
    quota.note_refused();
    let others = vec![
        Step::Insert { id: Id::new(Kind::Address, "x"), body: json!({}) },
        Step::Delete { id: Id::new(Kind::ForwardingRule, "x") },
    ];
    let (sent, held) = quota.split(&key("evil"), others.clone());
    assert_eq!((sent, held), (others, 0));
}

/// A cloud with a quota of one forwarding rule.
#[derive(Clone)]
struct Full {
    cloud: Scripted,
    deleted: Arc<Mutex<usize>>,
}

#[async_trait]
impl Calls for Full {
    async fn send(&self, call: Call) -> Result<Value> {
        if call.action == "forwardingRules.insert" && !self.rules().is_empty() {
            let errors =
                json!([{ "reason": "quotaExceeded", "message": "Quota 'FORWARDING_RULES' exceeded." }]);
            let body =
                json!({ "error": { "message": "Quota 'FORWARDING_RULES' exceeded.", "errors": errors } });
            let answer = Response::builder().status(403).body(body.to_string()).unwrap();
            return Err(CallError::answered(call.action, &answer));
        }
        if call.action == "forwardingRules.delete" {
            *self.deleted.lock().unwrap() += 1;
        }
        self.cloud.send(call).await
    }
}

impl Full {
    fn new() -> Self {
        Self { cloud: Scripted::new(), deleted: Arc::default() }
    }

    fn provider(&self) -> Gce {
        Gce::over(Config { poll: Duration::from_millis(200), ..config() }, Arc::new(self.clone()))
    }

    /// The ports of the rules, by description.
    fn rules(&self) -> Vec<(String, Value)> {
        let all = self.cloud.resources().into_values().filter(|found| found.kind == Kind::ForwardingRule);
        all.map(|rule| (rule.data["description"].to_string(), rule.data["ports"].clone())).collect()
    }

    /// Whether the only rule is this Service's, with these ports.
    fn is_served(&self, namespace: &str, ports: &Value) -> bool {
        matches!(&self.rules()[..], [(description, found)] if description.contains(namespace) && found == ports)
    }
}

fn good(ports: &[(Protocol, u16)]) -> LoadBalancer {
    LoadBalancer { listeners: listeners(ports), ..web() }
}

fn evil() -> LoadBalancer {
    let mut lb = web();
    (lb.owner.service, lb.owner.uid) = (Key::new("evil", "web"), "u2".to_owned());
    lb
}

/// `good` is served and published, and `evil` was refused for the quota.
async fn full(cloud: &Full, gce: &Gce) -> LoadBalancer {
    let outcome = settle(gce, &good(&[(Protocol::Tcp, 80)])).await;
    for _ in 0..60 {
        match gce.apply(&evil(), Compare::Remembered).await {
            Ok(outcome) => assert!(matches!(outcome.progress, Progress::Again(_))),
            Err(error) => {
                assert_eq!(error.reason(), "QuotaExceeded");
                break;
            }
        }
        sleep(Duration::from_millis(200)).await;
    }
    assert!(cloud.is_served("shop", &json!(["80"])));
    let published = outcome.ingress.iter().filter_map(|ingress| ingress.ip).collect();
    LoadBalancer { published, ..good(&[(Protocol::Tcp, 80), (Protocol::Tcp, 81)]) }
}

/// Applies the change until the old rule is being deleted.
async fn until_deleted(cloud: &Full, gce: &Gce, changed: &LoadBalancer) {
    while *cloud.deleted.lock().unwrap() == 0 {
        drop(gce.apply(changed, Compare::Remembered).await.unwrap());
    }
}

#[tokio::test(start_paused = true)]
async fn tenant_takes_no_rule_that_is_being_replaced() {
    // Where the first request to be refused would be the one that takes the rule, nothing says that the quota is full.
    for (is_killed, quiet, deletion) in [
        (false, Duration::ZERO, Duration::ZERO),
        (true, Duration::ZERO, Duration::ZERO),
        (false, Duration::ZERO, CLAIM * 3 / 2),
        (false, FULL, Duration::ZERO),
    ] {
        let cloud = Full::new();
        let mut gce = cloud.provider();
        let changed = full(&cloud, &gce).await;
        sleep(quiet).await;
        cloud.cloud.slow_rules(deletion);
        until_deleted(&cloud, &gce, &changed).await;
        if is_killed || !quiet.is_zero() {
            sleep(Duration::from_secs(5)).await;
            assert!(cloud.rules().is_empty());
        }
        if is_killed {
            gce = cloud.provider();
        }
        let end = Instant::now() + Duration::from_secs(15) + deletion * 2;
        while Instant::now() < end {
            // It asks first, and as often as it can.
            for _ in 0..3 {
                drop(gce.apply(&evil(), Compare::Remembered).await);
                sleep(Duration::from_millis(100)).await;
            }
            drop(gce.apply(&changed, Compare::Remembered).await.unwrap());
        }
        assert!(
            cloud.is_served("shop", &json!(["80", "81"])),
            "{is_killed} {quiet:?} {deletion:?}: {:?}",
            cloud.rules()
        );
        assert!(settle(&gce, &changed).await.incomplete.is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn lost_rule_is_told_and_tried_again_soon() {
    let cloud = Full::new();
    let gce = cloud.provider();
    let changed = full(&cloud, &gce).await;
    until_deleted(&cloud, &gce, &changed).await;
    sleep(Duration::from_secs(5)).await;
    // Somebody else takes the place.
    let path = format!("{REGION}/forwardingRules/theirs");
    cloud.cloud.put(Kind::ForwardingRule, &path, &json!({ "description": "theirs", "ports": ["1"] }));
    for _ in 0..3 {
        let outcome = gce.apply(&changed, Compare::Remembered).await.unwrap();
        let (reason, message) = outcome.incomplete.unwrap();
        assert_eq!((reason, outcome.progress), ("QuotaExceeded", Progress::Again(SOON)));
        assert!(
            message.contains("of the TCP ports 80, 81 is missing") && message.contains("FORWARDING_RULES")
        );
        assert!(!message.contains("stays as it is"), "{message}");
    }
    assert!(cloud.cloud.change(&path, |_| None));
    settle(&gce, &changed).await;
    assert!(cloud.is_served("shop", &json!(["80", "81"])));
}

/// Its own rules: TCP is replaced and UDP is new.
#[tokio::test(start_paused = true)]
async fn new_rules_wait_for_the_replacement_of_another() {
    use OldRule::{Gone, Leaving, Unknown};
    use OtherClaims::{Certain, None, Uncertain};
    const ALONE: OldRule = Unknown { is_address_without_rule: true };
    const BESIDE: OldRule = Unknown { is_address_without_rule: false };
    let (live, over) = (Instant::now() + CLAIM, Instant::now());
    let (now, later) = (true, false);
    for (claims, others, expected) in [
        (&[][..], None, "tcp udp"),
        (&[], Uncertain, ""),
        (&[], Certain, ""),
        // Nothing gets a place before it is free, and then the rule of that name does.
        (&[("tcp", Leaving, now, live)][..], None, ""),
        (&[("tcp", Gone, now, live)], None, "tcp"),
        (&[("tcp", Gone, now, live)], Certain, "tcp"),
        (&[("tcp", Gone, now, live), ("udp", Gone, now, live)], Certain, "tcp udp"),
        (&[("tcp", Gone, now, live), ("udp", ALONE, now, live)], None, "tcp"),
        // It waits for others after its time, and its own rules wait on.
        (&[("tcp", Gone, now, over)], Certain, ""),
        (&[("tcp", Gone, now, over)], None, "tcp"),
        // A deletion that does not end stops nothing else.
        (&[("tcp", Leaving, now, over)], None, "tcp udp"),
        // The place of a rule that is not wanted any more.
        (&[("old", Gone, later, live)], None, "tcp"),
        (&[("old", Gone, later, live), ("udp", Gone, now, live)], Certain, "tcp udp"),
        (&[("old", Gone, now, live)], None, ""),
        // What may have existed gives way to what did.
        (&[("tcp", ALONE, now, live), ("udp", ALONE, now, live)], Uncertain, "tcp udp"),
        (&[("tcp", ALONE, now, live)], Certain, ""),
        (&[("udp", BESIDE, now, live)], Uncertain, ""),
        (&[("udp", BESIDE, now, live)], None, "tcp udp"),
    ] {
        let id = |name: &str| Id::new(Kind::ForwardingRule, name);
        let own =
            claims.iter().map(|&(name, old, is_wanted, until)| (id(name), Claim { old, is_wanted, until }));
        let found = admitted(&[&id("tcp"), &id("udp")], &own.collect(), others);
        let found: Vec<&str> = found.iter().map(|id| id.name.as_str()).collect();
        assert_eq!(found.join(" "), expected, "{claims:?} {others:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn new_rule_ends_no_claim_to_the_place_of_another_that_is_wanted() {
    let service = good(&[]).owner.service;
    let lb = good(&[(Protocol::Tcp, 80), (Protocol::Udp, 53)]);
    let both = desired(&lb, &config()).unwrap();
    let ids: Vec<Id> = both.frontends[0].rules.keys().cloned().collect();
    // It sorts before the others.
    let old = Id::new(Kind::ForwardingRule, "a");
    let all = [&ids[0], &old].map(|id| (id.clone(), json!({})));
    let tree = Tree { own: all.into(), ..Tree::default() };
    let deletions = [&old, &ids[0]].map(|id| Step::Delete { id: id.clone() });
    let mut quota = RuleQuota::default();
    quota.begin(&service, &deletions, &both, &tree);
    assert_eq!(
        quota.claims[&service].len(),
        2,
        "one is replaced, and the other one makes room for a new rule"
    );
    for id in [&old, &ids[0]] {
        quota.note_gone(&service, id);
    }
    for _ in 0..2 {
        quota.note_inserted(&service, &ids[1]);
        assert!(quota.claims[&service].keys().eq([&ids[0]]));
    }
    quota.note_inserted(&service, &ids[0]);
    assert!(quota.claims.is_empty());

    let tcp = desired(&good(&[(Protocol::Tcp, 80)]), &config()).unwrap();
    let wanted = tcp.frontends[0].rules.keys().next().unwrap();
    let tree = Tree { own: [wanted, &old].map(|id| (id.clone(), json!({}))).into(), ..Tree::default() };
    let deletions = [&old, wanted].map(|id| Step::Delete { id: id.clone() });
    quota.begin(&service, &deletions, &tcp, &tree);
    assert!(quota.claims[&service].keys().eq([wanted]), "what is replaced comes first");
    quota.begin(&service, &[], &tcp, &tree);
    assert!(quota.claims.is_empty(), "it lacks nothing");
}

/// Other reasons stop a replacement, too.
#[tokio::test]
async fn lost_rule_is_tried_again_soon_whatever_refuses_it() {
    use steerage_provider_api::Error;
    let lb = good(&[(Protocol::Tcp, 80)]);
    let wanted = desired(&lb, &config()).unwrap();
    let rule = wanted.frontends[0].rules.keys().next().unwrap().clone();
    let tree = Tree { own: BTreeMap::from([(rule.clone(), json!({}))]), ..Tree::default() };
    let step = Step::Delete { id: rule };
    let gce = Full::new().provider();
    gce.rule_quota().begin(&lb.owner.service, std::slice::from_ref(&step), &wanted, &tree);
    let mut leaving = crate::state::ServiceState::default();
    leaving.note_read(&lb.owner, tree, Vec::new());
    leaving.note_pending(crate::state::Pending {
        owner: lb.owner.clone(),
        step,
        is_shared: false,
        operation: String::new(),
        since: Instant::now(),
    });
    for entry in [crate::state::ServiceState::default(), leaving] {
        for error in [Error::invalid("RejectedByProvider", "no"), Error::Denied("no".to_owned())] {
            let reason = error.reason();
            let outcome = gce.told_of_lost_rule(&lb, Err(error), &entry).unwrap();
            assert_eq!((outcome.progress, outcome.incomplete.unwrap().0), (Progress::Again(SOON), reason));
        }
        let busy = || Error::Busy("busy".to_owned());
        assert_eq!(
            gce.told_of_lost_rule(&lb, Err(busy()), &entry).unwrap_err().to_string(),
            busy().to_string()
        );
    }
}

/// Other quotas refuse too, before the old rule is gone or after.
#[tokio::test]
async fn lost_rule_is_told_only_if_it_is_missing() {
    let message = "firewalls.insert: 403 quotaExceeded: Quota 'FIREWALLS' exceeded";
    let refused = || Err(steerage_provider_api::Error::invalid(crate::reasons::QUOTA_EXCEEDED, message));
    let lb = good(&[(Protocol::Tcp, 80)]);
    let wanted = desired(&lb, &config()).unwrap();
    let rule = wanted.frontends[0].rules.keys().next().unwrap().clone();
    let with_rule = Tree { own: BTreeMap::from([(rule.clone(), json!({}))]), ..Tree::default() };
    let deletion = [Step::Delete { id: rule.clone() }];
    for (is_gone, tree, told) in [
        (false, Some(with_rule.clone()), None),
        (true, Some(with_rule.clone()), None),
        (true, Some(unruled_tree()), Some("The forwarding rule of the TCP port 80 is missing")),
        (true, None, Some("The forwarding rule of some ports is missing")),
    ] {
        let gce = Full::new().provider();
        let mut entry = crate::state::ServiceState::default();
        if let Some(tree) = tree {
            entry.note_read(&lb.owner, tree, Vec::new());
        }
        gce.rule_quota().begin(&lb.owner.service, &deletion, &wanted, &with_rule);
        if is_gone {
            gce.rule_quota().note_gone(&lb.owner.service, &rule);
        }
        let result = gce.told_of_lost_rule(&lb, refused(), &entry);
        match told {
            Some(told) => {
                let (_, text) = result.unwrap().incomplete.unwrap();
                assert!(text.starts_with(told) && text.ends_with(message), "{text}");
                assert!(!text.contains("refuses the new one"), "{text}");
            }
            None => assert_eq!(result.unwrap_err().to_string(), message),
        }
    }
}

fn node() -> GroupTargets {
    let node = Target {
        node: "node-0".to_owned(),
        addresses: Vec::new(),
        provider_id: Some("gce://p/r-a/node-0".to_owned()),
        zone: None,
        pod_cidrs: Vec::new(),
        weight: 1,
    };
    GroupTargets { nodes: Some(TargetSet::own([node])), ..GroupTargets::default() }
}

/// The endpoints of the groups.
fn endpoints(cloud: &Full) -> Vec<Value> {
    let all = cloud.cloud.resources().into_values().filter(|found| found.kind == Kind::Group);
    all.map(|found| json!(found.endpoints)).collect()
}

/// Its rule serves when the operation ends, and nothing else would follow the nodes then.
#[tokio::test(start_paused = true)]
async fn refused_service_is_followed_while_its_rule_is_made() {
    let cloud = Full::new();
    let gce = cloud.provider();
    cloud.cloud.set_machine("r-a", "node-0", true);
    cloud.cloud.slow_rules(Duration::from_mins(20));
    let lb = good(&[(Protocol::Tcp, 80)]);
    while cloud.rules().is_empty() {
        drop(gce.apply(&lb, Compare::Remembered).await.unwrap());
        sleep(Duration::from_millis(200)).await;
    }
    let began = Instant::now();
    while gce.set_targets(&lb.owner, &node()).await.unwrap().progress != Progress::Done {
        sleep(Duration::from_secs(5)).await;
        assert!(began.elapsed() < Duration::from_mins(30));
    }
    assert!(endpoints(&cloud).iter().any(|group| group.to_string().contains("node-0")));
}

/// Each try would attach and detach the nodes without an endpoint.
#[tokio::test(start_paused = true)]
async fn refused_service_without_a_rule_is_not_followed() {
    let cloud = Full::new();
    let gce = cloud.provider();
    full(&cloud, &gce).await;
    cloud.cloud.set_machine("r-a", "node-0", true);
    let before = endpoints(&cloud);
    for _ in 0..3 {
        let outcome = gce.set_targets(&evil().owner, &node()).await.unwrap();
        assert_eq!(outcome.progress, Progress::Done);
    }
    sleep(Duration::from_secs(5)).await;
    assert_eq!(endpoints(&cloud), before);
}

/// A new rule of the same Service is refused while the old one goes: it does not get the place that this frees.
#[tokio::test(start_paused = true)]
async fn refused_new_rule_does_not_stop_the_replacement_of_another() {
    for deletion in [Duration::ZERO, Duration::from_secs(5), CLAIM * 3 / 2] {
        let cloud = Full::new();
        let gce = cloud.provider();
        let changed = full(&cloud, &gce).await;
        let ports = [(Protocol::Tcp, 80), (Protocol::Tcp, 81), (Protocol::Udp, 53)];
        let changed = LoadBalancer { listeners: listeners(&ports), ..changed };
        cloud.cloud.slow_rules(deletion);
        for _ in 0..2000 {
            if cloud.is_served("shop", &json!(["80", "81"])) {
                break;
            }
            // After an error it is tried much later.
            let outcome = gce.apply(&changed, Compare::Remembered).await.unwrap();
            assert!(matches!(outcome.progress, Progress::Again(_)));
            drop(gce.apply(&evil(), Compare::Remembered).await);
            sleep(Duration::from_millis(100)).await;
        }
        assert!(cloud.is_served("shop", &json!(["80", "81"])), "{deletion:?}: {:?}", cloud.rules());
        // The first rule of the other protocol is refused as any other.
        let refused = crate::denied::tests::try_settle(&gce, &changed).await.unwrap_err();
        assert_eq!(refused.reason(), "QuotaExceeded");
    }
}

#[tokio::test(start_paused = true)]
async fn deletion_of_an_earlier_service_of_the_name_ends_no_claim() {
    let cloud = Full::new();
    let gce = cloud.provider();
    let changed = full(&cloud, &gce).await;
    until_deleted(&cloud, &gce, &changed).await;
    let earlier = steerage_provider_api::Owner { uid: "u0".to_owned(), ..changed.owner.clone() };
    sleep(Duration::from_secs(5)).await;
    gce.delete(&earlier).await.unwrap();
    assert_eq!(gce.rule_quota().retry_in(&changed.owner.service), Some(SOON));
}
