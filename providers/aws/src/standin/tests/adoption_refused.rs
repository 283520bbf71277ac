// SPDX-License-Identifier: Apache-2.0
//! Load balancers that are not adopted: those of others, and those that would lose something. Nothing of them changes.

use std::sync::Arc;
use std::time::Duration;

use steerage_model::Family;
use steerage_provider_api::{Compare, LoadBalancer, Provider as _};
use steerage_provider_cloud::marks;

use super::driver::{apply, changes, delete, standin, wanted};
use super::peers::{ALBC, CCM, NAME, adopting, planted, service, tags_of};
use crate::annotations::{IP_ADDRESS_TYPE, PRIVATE_ADDRESSES, SECURITY_GROUPS, SOURCE_NAT};
use crate::client::Tags;
use crate::config::{Peer, Scheme};
use crate::desired::tests::config;
use crate::ip_address_type::IpAddressType;
use crate::source_nat::{Prefixes, SourceNat};
use crate::standin::balancers::hostname;
use crate::standin::cloud::NetworkLb;
use crate::standin::snapshot::snapshot;
use crate::standin::{Cloud, StandIn};

/// Why the Service's load balancer is not adopted. Nothing may change, not even after a restart.
async fn refusal(cloud: &Arc<StandIn>, peers: &[Peer], lb: &LoadBalancer) -> String {
    tokio::time::sleep(Duration::from_mins(1)).await;
    let before = snapshot(&cloud.cloud());
    let mut said = String::new();
    for compare in [Compare::Remembered, Compare::InPlace] {
        let aws = adopting(cloud, peers);
        let error = apply(&aws, lb, compare).await.unwrap_err();
        assert_eq!(error.reason(), "AdoptionRefused", "{error}");
        assert_eq!(aws.preview(lb).await.unwrap_err().to_string(), error.to_string());
        let again = apply(&aws, lb, compare).await.unwrap_err();
        assert_eq!(again.to_string(), error.to_string());
        aws.set_targets(&lb.owner, &lb.targets()).await.unwrap();
        said = error.to_string();
    }
    assert_eq!(changes(cloud), [""; 0], "{said}");
    assert_eq!(snapshot(&cloud.cloud()), before, "{said}");
    // The end of such a Service takes nothing with it.
    delete(&adopting(cloud, peers), &lb.owner).await.unwrap();
    assert_eq!(snapshot(&cloud.cloud()), before, "{said}");
    said
}

fn change(cloud: &StandIn, change: impl FnOnce(&mut NetworkLb)) {
    cloud.change(|cloud| change(cloud.balancers.values_mut().next().unwrap()));
}

fn retag(cloud: &mut Cloud, tags: &Tags) {
    cloud.balancers.values_mut().for_each(|found| found.tags.clone_from(tags));
}

type Change = fn(&mut NetworkLb);

#[tokio::test(start_paused = true)]
async fn load_balancer_that_would_lose_something_is_refused() {
    let cases: [(Change, &str); 6] = [
        (|found| found.is_network = false, "no network load balancer"),
        (|found| found.vpc = "vpc-2".to_owned(), "vpc-2"),
        (|found| found.ip_address_type = IpAddressType::DualStack, "IPv6"),
        (|found| found.made.scheme = Scheme::InternetFacing, "Its scheme is internet-facing"),
        (|found| found.security_groups.extend(["sg-x".to_owned()]), "security groups sg-x"),
        (
            |found| drop(found.tags.insert("steerage.dev/cluster-uid".to_owned(), "other".to_owned())),
            "another cluster",
        ),
    ];
    for (spoil, part) in cases {
        let cloud = planted(1, CCM, &[(80, 30080)]).await;
        change(&cloud, spoil);
        let said = refusal(&cloud, &[CCM], &service(&[(80, 30080)])).await;
        assert!(said.contains(part) && said.contains(NAME) && said.contains("Nothing is changed"), "{said}");
    }
}

#[tokio::test(start_paused = true)]
async fn wishes_that_an_existing_load_balancer_cannot_meet_are_refused() {
    let cloud = planted(2, CCM, &[(80, 30080)]).await;
    let web = service(&[(80, 30080)]);
    let restricted = LoadBalancer { source_ranges: vec!["10.0.0.0/8".parse().unwrap()], ..web.clone() };
    assert!(refusal(&cloud, &[CCM], &restricted).await.contains("created without a security group"));
    let annotated = |name: &str, value: &str| {
        let mut lb = web.clone();
        lb.annotations.insert(name.to_owned(), value.to_owned());
        lb
    };
    let named = refusal(&cloud, &[CCM], &annotated(SECURITY_GROUPS, "sg-1")).await;
    assert!(named.contains("created without one"), "{named}");
    let families = vec![Family::V4, Family::V6];
    let with_v6 = refusal(&cloud, &[CCM], &LoadBalancer { families, ..web.clone() }).await;
    assert!(with_v6.contains("clients use IPv4 alone"), "{with_v6}");
    let addressed = refusal(&cloud, &[CCM], &annotated(PRIVATE_ADDRESSES, "10.0.0.7")).await;
    assert!(addressed.contains("addresses"), "{addressed}");
    let dual = LoadBalancer { families: vec![Family::V6], ..annotated(IP_ADDRESS_TYPE, "dualstack") };
    cloud.change(|cloud| {
        cloud.listeners.values_mut().for_each(|found| "TCP_UDP".clone_into(&mut found.protocol));
    });
    let with_udp = refusal(&cloud, &[CCM], &dual).await;
    assert!(with_udp.contains("a listener with UDP") && with_udp.contains("to ipv4"), "{with_udp}");
    cloud
        .change(|cloud| cloud.listeners.values_mut().for_each(|found| "TCP".clone_into(&mut found.protocol)));
    change(&cloud, |found| {
        found.ip_address_type = IpAddressType::DualStack;
        found.source_nat = SourceNat::On(Prefixes::new());
    });
    let source_nat = refusal(&cloud, &[CCM], &dual).await;
    assert!(source_nat.contains("source NAT"), "{source_nat}");
    let mut kept = dual;
    kept.annotations.insert(SOURCE_NAT.to_owned(), "on".to_owned());
    apply(&adopting(&cloud, &[CCM]), &kept, Compare::Remembered).await.unwrap();
    assert!(cloud.cloud().balancers.values().all(|found| found.source_nat.is_on()));
}

#[tokio::test(start_paused = true)]
async fn security_groups_that_rules_of_nodes_may_name_are_not_replaced() {
    let cloud = planted(3, ALBC, &[(80, 30080)]).await;
    change(&cloud, |found| found.security_groups.retain(|id| id != "sg-back"));
    let mut lb = service(&[(80, 30080)]);
    assert!(refusal(&cloud, &[ALBC], &lb).await.contains("its only security group"));
    change(&cloud, |found| found.security_groups.extend(["sg-back".to_owned()]));
    lb.annotations.insert(SECURITY_GROUPS.to_owned(), "sg-front".to_owned());
    assert!(refusal(&cloud, &[ALBC], &lb).await.contains("does not name its security groups sg-back"));
    lb.annotations.insert(SECURITY_GROUPS.to_owned(), "sg-front,sg-back".to_owned());
    apply(&adopting(&cloud, &[ALBC]), &lb, Compare::Remembered).await.unwrap();
    let now = cloud.cloud();
    let balancer = now.balancers.values().next().unwrap();
    assert_eq!(balancer.security_groups, ["sg-back", "sg-front"].map(str::to_owned).into());
    assert!(balancer.tags.contains_key("steerage.dev/uid") && now.security_groups.len() == 2);
}

/// A host name in the status proves nothing. Tags do, and only if they all name this Service of this cluster.
#[tokio::test(start_paused = true)]
async fn load_balancer_of_another_service_or_cluster_is_not_touched() {
    let own = config().cluster.name;
    let mut both = tags_of(CCM, &own, "shop/web");
    both.extend(tags_of(ALBC, &own, "shop/other"));
    let mut clusters = tags_of(CCM, &own, "shop/web");
    clusters.extend(tags_of(CCM, "other", "shop/web"));
    for tags in [
        tags_of(CCM, &own, "shop/other"),
        tags_of(CCM, "other", "shop/web"),
        tags_of(ALBC, &own, "other/web"),
        tags_of(ALBC, "other", "shop/web"),
        both,
        clusters,
        Tags::new(),
    ] {
        let cloud = planted(4, CCM, &[(80, 30080)]).await;
        cloud.change(|cloud| retag(cloud, &tags));
        let said = refusal(&cloud, &[CCM, ALBC], &service(&[(80, 30080)])).await;
        assert!(said.contains("Its tags do not say"), "{tags:?}: {said}");
    }
    let cloud = planted(4, ALBC, &[(80, 30080)]).await;
    let said = refusal(&cloud, &[CCM], &service(&[(80, 30080)])).await;
    assert!(said.contains("add aws-load-balancer-controller to --aws-adopt"), "{said}");
}

#[tokio::test(start_paused = true)]
async fn wanted_port_with_a_listener_of_somebody_else_is_refused() {
    let cloud = planted(5, CCM, &[(80, 30080)]).await;
    cloud.change(|cloud| cloud.listeners.values_mut().for_each(|found| found.tags.clear()));
    let said = refusal(&cloud, &[CCM], &service(&[(80, 30080)])).await;
    assert!(said.contains("listener on port 80"), "{said}");
}

#[tokio::test(start_paused = true)]
async fn classic_load_balancer_is_refused_and_one_that_is_gone_is_replaced() {
    let cloud = standin(6);
    let mut lb = service(&[(80, 30080)]);
    lb.published_hostnames = vec!["internal-a0123-1234567.us-east-1.elb.amazonaws.com".to_owned()];
    assert!(refusal(&cloud, &[CCM], &lb).await.contains("classic"));
    for other in [hostname("gone"), "web.example.com".to_owned(), "localhost".to_owned()] {
        let cloud = standin(6);
        lb.published_hostnames = vec![other];
        let made = apply(&adopting(&cloud, &[CCM]), &lb, Compare::Remembered).await.unwrap();
        assert_ne!(made.ingress[0].hostname, lb.published_hostnames.first().cloned());
    }
}

#[tokio::test(start_paused = true)]
async fn without_the_flag_no_second_load_balancer_is_created_beside_a_published_one() {
    for peer in [CCM, ALBC] {
        let cloud = planted(7, peer, &[(80, 30080)]).await;
        let lb = service(&[(80, 30080)]);
        let said = refusal(&cloud, &[], &lb).await;
        let advice = format!("add {} to --aws-adopt", peer.name());
        assert!(said.contains(&advice) && said.contains("clear status.loadBalancer"), "{said}");
        // The flag is removed before the first listener switched.
        let marks = marks::of_owner(&config().cluster, &lb.owner);
        change(&cloud, |found| found.tags.extend(marks));
        assert!(refusal(&cloud, &[], &lb).await.contains("not complete"));
    }
}

/// A published host name alone, and one of somebody else's load balancer, keep nobody from a new one.
#[tokio::test(start_paused = true)]
async fn without_the_flag_load_balancers_of_others_stay_and_a_new_one_is_created() {
    let made = |tags: Option<Tags>| async move {
        let cloud = planted(7, CCM, &[(80, 30080)]).await;
        let lb = if tags.is_some() { service(&[(80, 30080)]) } else { wanted(&[(80, 30080)], &[0, 1]) };
        cloud.change(|cloud| retag(cloud, &tags.unwrap_or_default()));
        tokio::time::sleep(Duration::from_mins(1)).await;
        let theirs = snapshot(&cloud.cloud());
        let aws = adopting(&cloud, &[]);
        assert!(aws.owned().await.unwrap().is_empty());
        assert_eq!(aws.preview(&lb).await.unwrap(), None);
        cloud.take_calls();
        apply(&aws, &lb, Compare::Remembered).await.unwrap();
        apply(&aws, &lb, Compare::InPlace).await.unwrap();
        let now = snapshot(&cloud.cloud());
        assert!(theirs.iter().all(|(name, content)| now.get(name) == Some(content)));
        assert_eq!(cloud.cloud().balancers.len(), 2);
        cloud.take_calls().len()
    };
    let unpublished = made(None).await;
    for tags in [tags_of(CCM, &config().cluster.name, "shop/other"), tags_of(ALBC, "other", "shop/web")] {
        assert_eq!(made(Some(tags)).await, unpublished + 2, "one look-up and its tags");
    }
}

#[tokio::test(start_paused = true)]
async fn preview_says_what_would_be_adopted() {
    let cloud = planted(8, CCM, &[(80, 30080)]).await;
    let (aws, lb) = (adopting(&cloud, &[CCM]), service(&[(80, 30080)]));
    let said = aws.preview(&lb).await.unwrap();
    assert_eq!(said, Some(vec![format!("adopts the load balancer {NAME} of cloud-provider-aws")]));
    assert_eq!(changes(&cloud), [""; 0]);
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert_eq!(adopting(&cloud, &[CCM]).preview(&lb).await.unwrap(), None);
}

/// AWS keeps capital letters in names, other controllers write the host name in small ones.
#[tokio::test(start_paused = true)]
async fn load_balancer_is_found_by_its_host_name_whatever_the_case() {
    let cloud = planted(9, ALBC, &[(80, 30080)]).await;
    change(&cloud, |found| found.made.name = "Shop-Web".to_owned());
    tokio::time::sleep(Duration::from_mins(1)).await;
    let lb = LoadBalancer { published_hostnames: vec![hostname("shop-web")], ..service(&[(80, 30080)]) };
    let made = apply(&adopting(&cloud, &[ALBC]), &lb, Compare::Remembered).await.unwrap();
    assert_eq!(made.ingress[0].hostname, Some(hostname("Shop-Web")));
    assert_eq!(cloud.cloud().balancers.len(), 1);
}
