// SPDX-License-Identifier: Apache-2.0

use std::collections::BTreeMap;

use serde_json::json;
use steerage_model::Protocol;
use steerage_provider_api::{LoadBalancer, Owner};

use super::*;
use crate::config::tests::config;
use crate::desired::desired;
use crate::desired::tests::{INTERNAL, annotated, listeners, local, web};
use crate::instances::{Placed, with_groups};
use crate::marks;

fn endpoints(names: &[&str]) -> BTreeSet<Endpoint> {
    let endpoint = |name: &&str| Endpoint { instance: (*name).to_owned(), address: String::new() };
    names.iter().map(endpoint).collect()
}

/// What is wanted, with these VMs in the first zone.
fn wanted(lb: &LoadBalancer, names: &[&str]) -> Desired {
    let place = ("r-a".to_owned(), config().subnetwork);
    let placed = Placed { endpoints: BTreeMap::from([(place, endpoints(names))]), ..Placed::default() };
    let zones = ["r-a".to_owned(), "r-b".to_owned()];
    with_groups(desired(lb, &config()).unwrap(), &placed, &zones, &config())
}

/// GCE, whose operations end at once.
#[derive(Default)]
struct Cloud {
    tree: Tree,
    addresses: u8,
    /// All that was done, in order.
    log: Vec<String>,
}

impl Cloud {
    fn steps(&self, wanted: Option<&Desired>) -> Vec<Step> {
        let config = config();
        let diff = Diff { config: &config, tree: &self.tree, denied: &Denied::default(), published: &[] };
        wanted.map_or_else(|| diff.away(), |wanted| diff.towards(wanted).unwrap())
    }

    fn make(&mut self, step: &Step) {
        self.log.push(step.to_string());
        let is_shared = match step {
            Step::Insert { body, .. } => marks::is_shared(&config().cluster, body),
            other => self.tree.shared.contains_key(other.id()),
        };
        self.check(step);
        if self.tree.note(step, is_shared) {
            return;
        }
        let id = step.id().clone();
        let mut found = match step {
            Step::Insert { body, .. } => body.clone(),
            _ => self.tree.own[&id].clone(),
        };
        if let Step::Patch { changes, .. } = step {
            found.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        }
        if id.kind == Kind::Address && found.get("address").is_none() {
            self.addresses += 1;
            found["address"] = format!("203.0.113.{}", self.addresses).into();
        }
        self.tree.own.insert(id, found);
    }

    /// GCE refuses what refers to nothing, and to delete what is in use.
    fn check(&self, step: &Step) {
        let config = config();
        let exists = |path: &str| {
            self.tree.own.keys().chain(self.tree.shared.keys()).any(|id| id.path(&config) == path)
        };
        match step {
            Step::Insert { id, body } => {
                assert!(self.tree.get(id).is_none(), "{step}: it exists");
                for path in Tree::backends(body).iter().chain(&Tree::checks(body)) {
                    assert!(exists(path), "{step}: {path} does not exist");
                }
            }
            Step::Delete { id } => {
                assert!(!self.tree.is_used(id, &config), "{step}: it is used");
                let mut rules = self.tree.of_kind(Kind::ForwardingRule).map(|(_, rule)| rule);
                assert!(rules.all(|rule| rule["backendService"] != id.url(&config)), "{step}: it is used");
            }
            _ => {}
        }
    }

    /// Makes all changes until there are none.
    fn settle(&mut self, wanted: Option<&Desired>) -> Vec<String> {
        self.log.clear();
        for _ in 0..20 {
            let steps = self.steps(wanted);
            if steps.is_empty() {
                return std::mem::take(&mut self.log);
            }
            for step in &steps {
                self.make(step);
            }
        }
        panic!("it does not end: {:?}", self.log);
    }

    fn with(lb: &LoadBalancer, names: &[&str]) -> Self {
        let mut cloud = Self::default();
        cloud.settle(Some(&wanted(lb, names)));
        cloud
    }

    fn rules(&self) -> Vec<&Value> {
        self.tree.of_kind(Kind::ForwardingRule).map(|(_, rule)| rule).collect()
    }
}

/// What kinds a log names, without names of resources.
fn kinds(log: &[String]) -> Vec<String> {
    let words = |line: &String| {
        let words = line.split(' ').filter(|word| !word.starts_with("st-"));
        words.collect::<Vec<_>>().join(" ")
    };
    log.iter().map(words).collect()
}

#[test]
fn creation_serves_clients_only_when_targets_are_in_place() {
    let mut cloud = Cloud::default();
    let log = cloud.settle(Some(&wanted(&web(), &["a"])));
    let at = |part: &str| {
        log.iter().position(|line| line.starts_with(part)).unwrap_or_else(|| panic!("{part}: {log:?}"))
    };
    assert!(at("address") < at("health check"), "the Service's own is first: {log:?}");
    assert!(at("network endpoint group") < at("backend service"));
    assert!(log.iter().position(|line| line.contains("a attached")).unwrap() < at("forwarding rule"));
    assert!(log.iter().rposition(|line| line.starts_with("firewall rule")).unwrap() < at("forwarding rule"));
    assert!(cloud.settle(None).first().unwrap().starts_with("forwarding rule"));
    assert!(cloud.tree.own.is_empty());
}

/// A rule that somebody disabled admits nobody, and one that somebody widened admits others.
#[test]
fn firewall_rule_is_repaired_in_all_that_decides_what_it_admits() {
    for (field, value) in [
        ("disabled", json!(true)),
        ("sourceTags", json!(["theirs"])),
        ("sourceServiceAccounts", json!(["a@p"])),
        ("sourceRanges", json!(["0.0.0.0/0", "10.0.0.0/8"])),
        ("destinationRanges", json!(["198.51.100.0/24"])),
        ("targetTags", json!(["theirs"])),
        ("targetServiceAccounts", json!(["a@p"])),
        ("priority", json!(2000)),
        ("allowed", json!([{ "IPProtocol": "all" }])),
    ] {
        let mut cloud = Cloud::with(&web(), &["a"]);
        let all = cloud.tree.own.iter_mut().chain(&mut cloud.tree.shared);
        for (_, rule) in all.filter(|(id, _)| id.kind == Kind::Firewall) {
            rule[field] = value.clone();
        }
        let steps = cloud.steps(Some(&wanted(&web(), &["a"])));
        let patched =
            steps.iter().filter(|step| step.to_string().ends_with(&format!("{field} changes"))).count();
        assert_eq!((patched, steps.len()), (2, 2), "{field}: {steps:?}");
        cloud.settle(Some(&wanted(&web(), &["a"])));
        assert!(cloud.steps(Some(&wanted(&web(), &["a"]))).is_empty(), "{field}");
    }
}

#[test]
fn moved_endpoint_is_one_attachment_and_one_detachment() {
    let mut cloud = Cloud::with(&web(), &["a", "b"]);
    let log = cloud.settle(Some(&wanted(&web(), &["b", "c"])));
    assert_eq!(
        kinds(&log),
        ["network endpoint group in r-a: c attached", "network endpoint group in r-a: a detached"]
    );
    // Also where only nodes leave (ingress-gce 2650), and the last one.
    assert_eq!(
        kinds(&cloud.settle(Some(&wanted(&web(), &["c"])))),
        ["network endpoint group in r-a: b detached"]
    );
    assert_eq!(
        kinds(&cloud.settle(Some(&wanted(&web(), &[])))),
        ["network endpoint group in r-a: c detached"]
    );
}

#[test]
fn vm_made_anew_with_another_address_is_attached_before_the_old_one_is_detached() {
    let id = Id::zonal(Kind::Group, "r-a", "g");
    let endpoint = |address: &str| Endpoint { instance: "a".to_owned(), address: address.to_owned() };
    let (old, new) = (BTreeSet::from([endpoint("10.0.0.1")]), BTreeSet::from([endpoint("10.0.0.2")]));
    let mut tree = Tree::default();
    tree.members.insert(id.clone(), old.clone());
    let attach = attached([(&id, &new)].into_iter(), &tree);
    assert_eq!(attach, [Step::Attach { id: id.clone(), endpoints: new.clone() }]);
    assert!(tree.note(&attach[0], false));
    let detach = detached([(&id, &new)].into_iter(), &tree);
    assert_eq!(detach, [Step::Detach { id: id.clone(), endpoints: old }]);
    assert!(tree.note(&detach[0], false) && tree.members[&id] == new);
}

/// Kubernetes issues 49425 and 53657: the legacy controller deletes the load balancer.
#[test]
fn policy_changes_swap_the_health_check_and_nothing_else() {
    let mut cloud = Cloud::with(&web(), &["a"]);
    let log = cloud.settle(Some(&wanted(&local(web()), &["a"])));
    assert_eq!(
        kinds(&log),
        ["health check created", "firewall rule created", "backend service healthChecks changes"]
    );
}

#[test]
fn ports_change_with_the_address_held() {
    let mut cloud = Cloud::with(&web(), &["a"]);
    let before = cloud.rules()[0]["IPAddress"].clone();
    let lb = LoadBalancer { listeners: listeners(&[(Protocol::Tcp, 80), (Protocol::Tcp, 443)]), ..web() };
    let log = cloud.settle(Some(&wanted(&lb, &["a"])));
    assert_eq!(
        kinds(&log),
        ["firewall rule allowed changes", "forwarding rule deleted", "forwarding rule created"]
    );
    assert_eq!(cloud.rules()[0]["IPAddress"], before);
}

#[test]
fn another_protocol_leaves_the_first_one_alone() {
    let mut cloud = Cloud::with(&web(), &["a"]);
    let both = LoadBalancer { listeners: listeners(&[(Protocol::Tcp, 80), (Protocol::Udp, 53)]), ..web() };
    let log = cloud.settle(Some(&wanted(&both, &["a"])));
    assert!(log.iter().all(|line| !line.contains("deleted")), "{log:?}");
    let addresses: BTreeSet<String> =
        cloud.rules().iter().map(|rule| rule["IPAddress"].to_string()).collect();
    assert_eq!((cloud.rules().len(), addresses.len()), (2, 1));
    let log = cloud.settle(Some(&wanted(&web(), &["a"])));
    assert_eq!(log.iter().filter(|line| line.contains("deleted")).count(), 1, "{log:?}");
}

#[test]
fn another_address_serves_before_the_old_one_goes() {
    let mut cloud = Cloud::with(&web(), &["a"]);
    let internal = wanted(&annotated(web(), &[INTERNAL]), &["a"]);
    let (mut had_both, mut log) = (false, Vec::new());
    while let steps @ [_, ..] = cloud.steps(Some(&internal)).as_slice() {
        for step in steps {
            cloud.make(step);
            assert!(!cloud.rules().is_empty(), "{step}: nothing serves");
            had_both |= cloud.rules().len() == 2;
        }
        log.append(&mut cloud.log);
        assert!(log.len() < 40, "{log:?}");
    }
    assert!(had_both && cloud.rules().len() == 1, "{log:?}");
    let kept: Vec<&str> = cloud.tree.own.values().filter_map(|found| found["addressType"].as_str()).collect();
    assert_eq!(kept, ["INTERNAL"], "the old address is released");
}

/// The changes that are made. Those of firewall rules are refused or not.
fn tried(steps: Vec<Step>, is_denied: bool, denied: &mut Denied) -> Vec<Step> {
    let (steps, _) = denied.split(steps);
    let (refused, made) = steps.into_iter().partition(|step| is_denied && step.id().kind == Kind::Firewall);
    let refused: Vec<Step> = refused;
    for step in &refused {
        denied.note(step, String::new());
    }
    made
}

/// Nobody admits clients to the new address yet: the old one serves on.
#[test]
fn old_address_stays_while_the_firewall_is_denied() {
    let config = config();
    let mut cloud = Cloud::with(&web(), &["a"]);
    let internal = wanted(&annotated(web(), &[INTERNAL]), &["a"]);
    let mut next = |is_denied: bool| {
        let (mut taken, mut denied) = (false, Denied::default());
        for _ in 0..20 {
            let diff = Diff { config: &config, tree: &cloud.tree, denied: &denied, published: &[] };
            let steps = tried(diff.towards(&internal).unwrap(), is_denied, &mut denied);
            taken |= takes_address_away(&steps, &cloud.tree, &internal);
            for step in &steps {
                cloud.make(step);
            }
        }
        (cloud.rules().len(), taken)
    };
    assert_eq!(next(true), (2, false));
    assert_eq!(next(false), (1, true));
}

#[test]
fn global_access_changes_in_place() {
    let internal = annotated(web(), &[INTERNAL]);
    let mut cloud = Cloud::with(&internal, &["a"]);
    let lb = annotated(internal, &[(crate::annotations::GLOBAL_ACCESS, "true")]);
    assert_eq!(
        kinds(&cloud.settle(Some(&wanted(&lb, &["a"])))),
        ["forwarding rule allowGlobalAccess changes"]
    );
}

#[test]
fn drift_is_repaired_and_what_others_added_stays() {
    let mut cloud = Cloud::with(&web(), &["a"]);
    let wanted = wanted(&web(), &["a"]);
    let (id, service) = cloud.tree.own.iter_mut().find(|(id, _)| id.kind == Kind::BackendService).unwrap();
    let id = id.clone();
    service["sessionAffinity"] = "CLIENT_IP".into();
    service["fingerprint"] = "f1".into();
    let theirs = json!({ "group": "https://www.googleapis.com/compute/v1/projects/p/zones/r-a/networkEndpointGroups/theirs" });
    service["backends"].as_array_mut().unwrap().remove(0);
    service["backends"].as_array_mut().unwrap().push(theirs.clone());
    let [Step::Patch { changes, .. }] = &cloud.steps(Some(&wanted))[..] else { panic!("one change") };
    // GCE refuses it if somebody changed the service since.
    assert_eq!((&changes["fingerprint"], &changes["sessionAffinity"]), (&json!("f1"), &json!("NONE")));
    assert_eq!(changes["backends"].as_array().unwrap().len(), 3);
    assert!(changes["backends"].as_array().unwrap().contains(&theirs));
    cloud.settle(Some(&wanted));
    assert!(cloud.tree.own[&id]["backends"].as_array().unwrap().contains(&theirs));
    for kind in Kind::ALL {
        let mut cloud = Cloud::with(&local(web()), &["a"]);
        let all = cloud.tree.clone();
        cloud.tree.own.retain(|id, _| id.kind != kind);
        cloud.tree.members.retain(|id, _| cloud.tree.own.contains_key(id));
        // Others can delete only what nothing uses.
        if matches!(kind, Kind::ForwardingRule | Kind::Firewall) {
            let wanted = super::tests::wanted(&local(web()), &["a"]);
            cloud.settle(Some(&wanted));
            assert_eq!(
                cloud.tree.own.keys().collect::<Vec<_>>(),
                all.own.keys().collect::<Vec<_>>(),
                "{kind:?}"
            );
        }
    }
}

/// Whatever is wanted next, and wherever it is cut off: it is reached, and nothing is left of what was wanted before.
#[test]
fn random_changes_are_completed() {
    let both = LoadBalancer { listeners: listeners(&[(Protocol::Tcp, 80), (Protocol::Udp, 53)]), ..web() };
    let six: Vec<(Protocol, u16)> = (0..6).map(|i| (Protocol::Tcp, 8000 + 2 * i)).collect();
    let sources = LoadBalancer { source_ranges: vec!["10.0.0.0/8".parse().unwrap()], ..web() };
    let goals = [
        wanted(&web(), &["a"]),
        wanted(&both, &["a", "b"]),
        wanted(&local(web()), &["b"]),
        wanted(&annotated(web(), &[INTERNAL]), &["c"]),
        wanted(&annotated(both, &[INTERNAL]), &[]),
        wanted(&LoadBalancer { listeners: listeners(&six), ..web() }, &["a"]),
        wanted(&sources, &["d"]),
    ];
    let mut random = 1_u32;
    let mut next = |below: usize| {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        usize::try_from(random >> 8).unwrap() % below
    };
    for _ in 0..100 {
        let mut cloud = Cloud::default();
        for _ in 0..5 {
            let goal = &goals[next(goals.len())];
            let goal = (next(6) > 0).then_some(goal);
            for _ in 0..next(8) {
                let steps = cloud.steps(goal);
                // Only some are made.
                let count = next(steps.len() + 1);
                steps.iter().take(count).for_each(|step| cloud.make(step));
            }
        }
        let goal = &goals[next(goals.len())];
        cloud.settle(Some(goal));
        let ids: BTreeSet<Id> = cloud.tree.own.keys().cloned().collect();
        assert_eq!(ids, goal.ids());
        cloud.settle(None);
        assert!(cloud.tree.own.is_empty(), "{:?}", cloud.tree.own);
    }
}

fn reserved(kind: &str, address: &str, users: &[&str]) -> Value {
    json!({ "name": "mine", "addressType": kind, "address": address, "users": users, "networkTier": "PREMIUM" })
}

#[test]
fn users_addresses_are_used_and_never_released() {
    let lb = annotated(web(), &[(crate::annotations::ADDRESSES, "mine")]);
    let goal = wanted(&lb, &["a"]);
    let mut cloud = Cloud::default();
    cloud.tree.given.insert("mine".to_owned(), Some(reserved("EXTERNAL", "203.0.113.200", &[])));
    cloud.settle(Some(&goal));
    assert_eq!(cloud.rules()[0]["IPAddress"], "203.0.113.200");
    let log = cloud.settle(None);
    assert!(log.iter().all(|line| !line.starts_with("address")), "{log:?}");
}

#[test]
fn addresses_that_cannot_be_used_are_refused() {
    let external = annotated(web(), &[(crate::annotations::ADDRESSES, "mine")]);
    let internal = annotated(external.clone(), &[INTERNAL]);
    let literal = LoadBalancer { requested_addresses: vec![[203, 0, 113, 9].into()], ..web() };
    let user = "https://x/compute/v1/projects/p/regions/r/forwardingRules/other";
    for (lb, key, found, part) in [
        (&external, "mine", None, "create mine --project=p --region=r`"),
        (
            &internal,
            "mine",
            None,
            "--region=r --subnet=projects/p/regions/r/subnetworks/s --purpose=SHARED_LOADBALANCER_VIP`",
        ),
        (&external, "mine", Some(reserved("INTERNAL", "10.0.0.9", &[])), "is INTERNAL"),
        (&internal, "mine", Some(reserved("EXTERNAL", "203.0.113.9", &[])), "is EXTERNAL"),
        (&external, "mine", Some(reserved("EXTERNAL", "2001:db8::", &[])), "is IPv6"),
        (
            &external,
            "mine",
            Some(reserved("EXTERNAL", "203.0.113.9", &[user])),
            "something else than this Service",
        ),
        (&literal, "203.0.113.9", None, "create NAME --addresses=203.0.113.9 "),
    ] {
        let mut tree = Tree::default();
        tree.given.insert(key.to_owned(), found);
        let config = config();
        let diff = Diff { config: &config, tree: &tree, denied: &Denied::default(), published: &[] };
        let error = diff.towards(&wanted(lb, &["a"])).unwrap_err();
        assert_eq!(error.reason(), "AddressNotAvailable");
        assert!(error.to_string().contains(part), "{error}");
    }
    let standard = annotated(external, &[(crate::annotations::NETWORK_TIER, "Standard")]);
    let mut tree = Tree::default();
    tree.given.insert("mine".to_owned(), Some(reserved("EXTERNAL", "203.0.113.9", &[])));
    let config = config();
    let diff = Diff { config: &config, tree: &tree, denied: &Denied::default(), published: &[] };
    let error = diff.towards(&wanted(&standard, &["a"])).unwrap_err();
    assert!(error.to_string().contains("tier PREMIUM"), "{error}");
}

/// An address that Steerage reserved for another Service is not the user's, also while no forwarding rule has it; and an internal one that
/// something else uses is not shared.
#[test]
fn addresses_of_other_services_are_refused() {
    let named = annotated(web(), &[(crate::annotations::ADDRESSES, "mine")]);
    let literal = LoadBalancer { requested_addresses: vec![[10, 0, 0, 9].into()], ..web() };
    let (own, here) = (web().owner, config().cluster);
    let elsewhere = steerage_provider_cloud::ClusterId { uid: "other".to_owned(), ..here.clone() };
    let other = Owner { uid: "u2".to_owned(), ..own.clone() };
    let path = format!("projects/{}/regions/{}/forwardingRules", config().project, config().region);
    for (lb, key) in [(named, "mine"), (literal, "10.0.0.9")] {
        for (lb, kind) in [(lb.clone(), "EXTERNAL"), (annotated(lb, &[INTERNAL]), "INTERNAL")] {
            let goal = wanted(&lb, &["a"]);
            let rule = goal.frontends[0].rules.keys().next().unwrap().clone();
            let users = |user: &str| json!([format!("https://www.googleapis.com/compute/v1/{user}")]);
            for (description, users, part) in [
                (marks::of_owner(&here, &other), json!([]), Some("for another Service")),
                (marks::of_owner(&elsewhere, &own), json!([]), Some("for another Service")),
                (marks::of_owner(&here, &own), json!([]), None),
                (String::new(), users(&format!("{path}/other")), Some("something else than this Service")),
                // A rule of the name elsewhere.
                (
                    String::new(),
                    users(&format!("projects/q/regions/r/forwardingRules/{}", rule.name)),
                    Some("something else than this Service"),
                ),
                (String::new(), users(&rule.path(&config())), None),
            ] {
                let mut found = reserved(kind, "10.0.0.9", &[]);
                found["purpose"] = "SHARED_LOADBALANCER_VIP".into();
                (found["description"], found["users"]) = (description.clone().into(), users.clone());
                let mut tree = Tree::default();
                tree.own.insert(rule.clone(), json!({ "IPAddress": "10.0.0.9" }));
                tree.given.insert(key.to_owned(), Some(found));
                let config = config();
                let diff = Diff { config: &config, tree: &tree, denied: &Denied::default(), published: &[] };
                let got = diff.towards(&goal).map_err(|error| error.to_string());
                match part {
                    None => assert!(got.is_ok(), "{kind} {key} {description} {users}: {got:?}"),
                    Some(part) => {
                        assert!(got.unwrap_err().contains(part), "{kind} {key} {description} {users}");
                    }
                }
            }
        }
    }
}

/// A free address of the subnet that nobody reserved is reserved by Steerage.
#[test]
fn requested_internal_address_is_reserved() {
    let lb =
        LoadBalancer { requested_addresses: vec![[10, 0, 0, 50].into()], ..annotated(web(), &[INTERNAL]) };
    let mut cloud = Cloud::default();
    cloud.tree.given.insert("10.0.0.50".to_owned(), None);
    cloud.settle(Some(&wanted(&lb, &["a"])));
    assert_eq!(cloud.rules()[0]["IPAddress"], "10.0.0.50");
    assert!(cloud.settle(None).iter().any(|line| line.starts_with("address")));
}

/// In a Shared VPC somebody else may change firewall rules.
#[test]
fn all_else_is_in_place_where_firewall_rules_are_others() {
    let config = config();
    let mut cloud = Cloud::default();
    let goal = wanted(&local(web()), &["a"]);
    let mut denied = Denied::default();
    for _ in 0..10 {
        let diff = Diff { config: &config, tree: &cloud.tree, denied: &denied, published: &[] };
        for step in &tried(diff.towards(&goal).unwrap(), true, &mut denied) {
            cloud.make(step);
        }
    }
    assert_eq!(cloud.rules().len(), 1);
    let owner = Owner { uid: "u1".to_owned(), ..goal.owner.clone() };
    assert_eq!(owner, goal.owner);
}
