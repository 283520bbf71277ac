// SPDX-License-Identifier: Apache-2.0
//! The provider on moto's server: the conformance suite, and properties of ELBv2.

#![allow(clippy::unwrap_used)] // test code; the lint's own exception does not see helpers outside of test functions

mod adoption;
mod dual_stack;
mod economy;
mod moto;
mod shared;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use aws_sdk_elasticloadbalancingv2::types::{LoadBalancerSchemeEnum, ProtocolEnum, TargetTypeEnum};
use moto::Moto;
use steerage_model::{Affinity, Protocol};
use steerage_provider_api::{
    Compare, Error, GroupKey, GroupTargets, HealthProtocol, HealthState, Listener, LoadBalancer, Owner,
    PodPort, PodTarget, Progress, Provider as _, TargetSet,
};
use steerage_provider_aws::{Aws, Config, Scheme};
use steerage_provider_conformance::{Harness as _, converge, fixture, in_two_tasks, run_shared};
use steerage_requirements::requires;

/// moto uses one core and needs milliseconds for each of some ten thousand calls: two of them share the checks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn provider_conforms() {
    requires!(Moto);
    let run = |taken: Arc<AtomicUsize>| async move {
        let moto = Moto::start(6).await?;
        run_shared(&moto, &taken).await
    };
    in_two_tasks(run).await.unwrap();
}

fn listener(protocol: Protocol, port: u16, node_port: u16) -> Listener {
    Listener { name: String::new(), protocol, port, group: GroupKey::NodePort(node_port) }
}

/// Starts moto, and lets a provider create a load balancer with these listeners and the targets 0 and 1.
async fn made(instances: usize, listeners: Vec<Listener>) -> (Moto, Aws, LoadBalancer) {
    let moto = Moto::start(instances).await.unwrap();
    let provider = moto.fresh().await.unwrap();
    let lb = fixture::with_listeners(fixture::first(&moto, &fixture::owner("web", 1)), listeners);
    let lb = fixture::with_targets(&moto, &lb, &[0, 1]);
    converge(&provider, &lb).await.unwrap();
    moto.proxy().reset();
    (moto, provider, lb)
}

fn calls(moto: &Moto) -> Vec<String> {
    moto.proxy().calls().into_iter().map(|c| c.name).collect()
}

/// Another program's listener on port 81, for the target group of the only one.
async fn add_foreign_listener(moto: &Moto) {
    let ours = only_listener(moto).await;
    let foreign = moto
        .elb
        .create_listener()
        .load_balancer_arn(ours.load_balancer_arn().unwrap())
        .port(81)
        .protocol("TCP".into())
        .set_default_actions(ours.default_actions.clone());
    foreign.send().await.unwrap();
}

async fn only_listener(moto: &Moto) -> aws_sdk_elasticloadbalancingv2::types::Listener {
    let balancer = moto.balancers().await.unwrap().remove(0);
    let mut listeners = moto.listeners(balancer.load_balancer_arn().unwrap()).await.unwrap();
    assert_eq!(listeners.len(), 1);
    listeners.remove(0)
}

#[tokio::test]
async fn listener_protocol_changes_in_place_and_group_is_never_empty() {
    requires!(Moto);
    let (moto, provider, mut lb) = made(4, vec![listener(Protocol::Tcp, 53, 30053)]).await;
    let before = only_listener(&moto).await;
    let listeners = [lb.listeners.clone(), vec![listener(Protocol::Udp, 53, 30053)]].concat();
    lb = fixture::with_listeners(lb, listeners);
    provider.apply(&lb, Compare::Remembered).await.unwrap();
    let after = only_listener(&moto).await;
    assert_eq!(after.listener_arn, before.listener_arn);
    assert_eq!(after.protocol().unwrap().as_str(), "TCP_UDP");
    let writes: Vec<_> = moto.proxy().writes().into_iter().map(|c| c.name).collect();
    let expected = [
        "CreateTargetGroup",
        "ModifyTargetGroupAttributes",
        "RegisterTargets",
        "ModifyListener",
        "DeleteTargetGroup",
        "AuthorizeSecurityGroupIngress",
    ];
    assert_eq!(writes, expected);
    let groups = moto.groups().await.unwrap();
    assert_eq!(groups.len(), 1);
    assert_eq!(moto.ids(groups[0].target_group_arn().unwrap()).await.unwrap().len(), 2);
}

#[tokio::test]
async fn health_check_and_affinity_change_in_place() {
    requires!(Moto);
    let (moto, provider, mut lb) = made(4, vec![listener(Protocol::Tcp, 80, 30080)]).await;
    let before = moto.groups().await.unwrap().remove(0);
    lb.groups[0].health_check.port = Some(32001);
    lb.groups[0].health_check.unhealthy_threshold = 3;
    lb.groups[0].affinity = Some(Affinity { timeout: std::time::Duration::from_mins(1) });
    provider.apply(&lb, Compare::Remembered).await.unwrap();
    let after = moto.groups().await.unwrap().remove(0);
    assert_eq!(after.target_group_arn, before.target_group_arn);
    assert_eq!(after.health_check_port(), Some("32001"));
    assert_eq!(after.unhealthy_threshold_count(), Some(3));
    let writes: Vec<_> = moto.proxy().writes().into_iter().map(|c| c.name).collect();
    assert_eq!(writes, ["ModifyTargetGroup", "ModifyTargetGroupAttributes"]);
}

#[tokio::test]
async fn targets_are_batched_and_replaced_node_costs_two_calls() {
    requires!(Moto);
    let (moto, provider, lb) = made(252, vec![listener(Protocol::Tcp, 80, 30080)]).await;
    let set = async |range: std::ops::Range<usize>| {
        let targets = range.map(|i| moto::target(format!("node-{i}"), &moto.instances[i]));
        let lb = lb.clone().with_nodes(TargetSet::own(targets.collect::<Vec<_>>()));
        provider.apply(&lb, Compare::Remembered).await.unwrap();
    };
    // As the controller does once a minute. Without it, the provider looks for a healthy target before others leave.
    let read_health = async || {
        provider.target_health(&lb.owner).await.unwrap();
        moto.proxy().reset();
    };
    set(0..250).await;
    assert_eq!(calls(&moto), ["RegisterTargets"; 3]);
    read_health().await;
    set(1..251).await;
    assert_eq!(calls(&moto), ["RegisterTargets", "DeregisterTargets"]);
    moto.proxy().reset();
    set(1..251).await;
    assert_eq!(calls(&moto), [""; 0]);
    set(1..2).await;
    assert_eq!(calls(&moto), ["DeregisterTargets"; 3]);
}

#[tokio::test]
async fn deleted_resources_are_restored() {
    requires!(Moto);
    let (moto, provider, lb) = made(4, vec![listener(Protocol::Tcp, 80, 30080)]).await;
    let whole = moto.snapshot().await.unwrap();

    let arn = only_listener(&moto).await.listener_arn.unwrap();
    moto.elb.delete_listener().listener_arn(arn).send().await.unwrap();
    converge(&provider, &lb).await.unwrap();
    assert_eq!(moto.snapshot().await.unwrap(), whole, "a listener");

    let group = moto.groups().await.unwrap().remove(0).target_group_arn.unwrap();
    let gone =
        aws_sdk_elasticloadbalancingv2::types::TargetDescription::builder().id(&moto.instances[0]).build();
    moto.elb.deregister_targets().target_group_arn(group).targets(gone).send().await.unwrap();
    let health = provider.target_health(&lb.owner).await.unwrap().targets;
    assert_eq!(health.iter().map(|h| h.target.as_str()).collect::<Vec<_>>(), ["node-1"]);
    converge(&provider, &lb).await.unwrap();
    assert_eq!(moto.snapshot().await.unwrap(), whole, "a target");

    let arn = moto.balancers().await.unwrap().remove(0).load_balancer_arn.unwrap();
    moto.elb.delete_load_balancer().load_balancer_arn(arn).send().await.unwrap();
    converge(&provider, &lb).await.unwrap();
    assert_eq!(moto.snapshot().await.unwrap(), whole, "the load balancer");
}

#[tokio::test]
async fn foreign_listener_is_kept_and_conflict_is_reported() {
    requires!(Moto);
    let (moto, provider, mut lb) = made(4, vec![listener(Protocol::Tcp, 80, 30080)]).await;
    add_foreign_listener(&moto).await;
    let before = moto.snapshot().await.unwrap();
    for instance in [&provider, &moto.fresh().await.unwrap()] {
        converge(instance, &lb).await.unwrap();
        assert_eq!(moto.snapshot().await.unwrap(), before);
    }
    let listeners = [lb.listeners.clone(), vec![listener(Protocol::Tcp, 81, 30081)]].concat();
    lb = fixture::with_listeners(lb, listeners);
    let error = provider.apply(&lb, Compare::Remembered).await.unwrap_err();
    assert_eq!(error.reason(), "ObjectNotOwned");
}

/// A copy of a cluster starts with the flags and the Services of the original.
#[tokio::test]
async fn cluster_of_the_same_name_is_not_touched() {
    requires!(Moto);
    let (moto, original, lb) = made(4, vec![listener(Protocol::Tcp, 80, 30080)]).await;
    let before = moto.snapshot().await.unwrap();
    let copy = moto.provider(copy_config(&moto));
    assert_eq!(copy.owned().await.unwrap(), []);
    assert_eq!(original.owned().await.unwrap(), std::slice::from_ref(&lb.owner));

    let restored = Owner { uid: "another".to_owned(), ..lb.owner.clone() };
    for owner in [lb.owner.clone(), restored] {
        assert_eq!(copy.delete(&owner).await.unwrap(), Progress::Done);
        assert!(copy.target_health(&owner).await.unwrap().targets.is_empty());
        let error = copy.apply(&LoadBalancer { owner, ..lb.clone() }, Compare::Remembered).await.unwrap_err();
        assert_eq!(error.reason(), "ObjectNotOwned");
        for word in
            ["--aws-cluster-name `conformance`", "steerage.dev/cluster-uid", "`cluster-1`", "`cluster-2`"]
        {
            assert!(error.to_string().contains(word), "{error}");
        }
    }
    assert!(moto.proxy().writes().is_empty());
    assert_eq!(moto.snapshot().await.unwrap(), before);

    // An operator hands the resources over.
    moto.hand_over("cluster-2").await.unwrap();
    assert_eq!(copy.owned().await.unwrap(), std::slice::from_ref(&lb.owner));
    assert_eq!(original.owned().await.unwrap(), []);
    converge(&moto.provider(copy_config(&moto)), &lb).await.unwrap();
    assert!(moto.proxy().writes().is_empty());
}

fn copy_config(moto: &Moto) -> Config {
    let mut config = moto.config.clone();
    "cluster-2".clone_into(&mut config.cluster.uid);
    config
}

/// The listener of another program keeps an old target group in use. Targets follow in both groups.
#[tokio::test]
async fn targets_follow_while_an_old_group_stays_in_use() {
    requires!(Moto);
    let (moto, provider, mut lb) = made(4, vec![listener(Protocol::Tcp, 80, 30080)]).await;
    add_foreign_listener(&moto).await;
    lb = fixture::with_listeners(lb, vec![listener(Protocol::Tcp, 80, 30081)]);
    let outcome = provider.apply(&lb, Compare::InPlace).await.unwrap();
    assert!(matches!(outcome.progress, Progress::Again(_)), "{outcome:?}");
    for indices in [&[1, 2][..], &[0]] {
        let lb = fixture::with_targets(&moto, &lb, indices);
        let outcome = provider.apply(&lb, Compare::Remembered).await.unwrap();
        assert!(matches!(outcome.progress, Progress::Again(_)), "{outcome:?}");
        let groups = moto.groups().await.unwrap();
        assert_eq!(groups.len(), 2);
        for group in groups {
            assert_eq!(moto.ids(group.target_group_arn().unwrap()).await.unwrap().len(), indices.len());
        }
    }
}

#[tokio::test]
async fn scheme_change_is_rejected_without_writes() {
    requires!(Moto);
    let (moto, provider, mut lb) = made(4, vec![listener(Protocol::Tcp, 80, 30080)]).await;
    let key = "service.beta.kubernetes.io/aws-load-balancer-scheme".to_owned();
    lb.annotations = BTreeMap::from([(key, Scheme::InternetFacing.as_str().to_owned())]);
    let error = provider.apply(&lb, Compare::Remembered).await.unwrap_err();
    assert_eq!(error.reason(), "SchemeImmutable");
    assert!(moto.proxy().writes().is_empty());

    lb.owner = fixture::owner("other", 1);
    converge(&provider, &lb).await.unwrap();
    let schemes: Vec<_> = moto.balancers().await.unwrap().into_iter().filter_map(|b| b.scheme).collect();
    assert_eq!(
        schemes.iter().map(LoadBalancerSchemeEnum::as_str).collect::<Vec<_>>(),
        ["internal", "internet-facing"]
    );
}

#[tokio::test]
async fn target_health_names_nodes_and_reasons() {
    requires!(Moto);
    let (moto, provider, lb) =
        made(4, vec![listener(Protocol::Tcp, 80, 30080), listener(Protocol::Udp, 53, 30053)]).await;
    moto.stop(0).unwrap();
    let health = provider.target_health(&lb.owner).await.unwrap().targets;
    let states: Vec<_> = health.iter().map(|h| (h.target.as_str(), h.state)).collect();
    assert_eq!(states, [("node-0", HealthState::Unused), ("node-1", HealthState::Healthy)]);
    assert!(health[0].reason.contains("Target.InvalidState"), "{:?}", health[0]);
    let nobody: Owner = fixture::owner("nobody", 1);
    assert!(provider.target_health(&nobody).await.unwrap().targets.is_empty());
}

/// The wire format of pods: their group has another type, each has a port, and one outside the VPC is refused.
#[tokio::test]
async fn pods_are_registered_by_address_and_port() {
    requires!(Moto);
    let moto = Moto::start(4).await.unwrap();
    let provider = moto.fresh().await.unwrap();
    let port = PodPort::Number(8080);
    let listener = Listener { group: GroupKey::Pods(port.clone()), ..listener(Protocol::Tcp, 80, 0) };
    let mut lb = fixture::with_listeners(fixture::first(&moto, &fixture::owner("web", 1)), vec![listener]);
    lb.groups[0].health_check.port = None;
    lb.groups[0].health_check.protocol = HealthProtocol::Tcp;
    let with = |pods: &[[u8; 4]]| {
        let pods = pods.iter().map(|pod| PodTarget { address: (*pod, 8080).into(), zone: None }).collect();
        lb.clone().with_targets(&GroupTargets { nodes: None, pods: [(port.clone(), pods)].into() })
    };
    for (pods, shown) in [
        (&[[10, 0, 0, 7], [10, 0, 0, 8]][..], &["10.0.0.7", "10.0.0.8"][..]),
        (&[[10, 0, 0, 8], [10, 0, 0, 9], [192, 168, 0, 1]], &["10.0.0.8", "10.0.0.9"]),
    ] {
        let outcome = converge(&provider, &with(pods)).await.unwrap();
        let group = moto.groups().await.unwrap().remove(0);
        assert_eq!(group.target_type().map(TargetTypeEnum::as_str), Some("ip"));
        assert_eq!((group.port(), group.health_check_port()), (Some(8080), Some("traffic-port")));
        let ids = moto.ids(group.target_group_arn().unwrap()).await.unwrap();
        assert_eq!(ids.into_iter().collect::<Vec<_>>(), shown);
        let refused: Vec<_> = outcome.refused.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(refused, if pods.len() > 2 { vec!["192.168.0.1:8080"] } else { Vec::new() });
    }
    let health = provider.target_health(&lb.owner).await.unwrap().targets;
    let names: Vec<_> = health.iter().map(|found| found.target.as_str()).collect();
    assert_eq!(names, ["10.0.0.8:8080", "10.0.0.9:8080"]);
    moto.proxy().reset();
    let restarted = moto.fresh().await.unwrap();
    converge(&restarted, &with(&[[10, 0, 0, 8], [10, 0, 0, 9]])).await.unwrap();
    assert!(moto.proxy().writes().is_empty(), "{:?}", calls(&moto));
}

/// The wire format of attributes and tags. moto knows the keys of both.
#[tokio::test]
async fn annotated_attributes_and_tags_are_set_and_taken_back() {
    requires!(Moto);
    let (moto, provider, mut lb) = made(4, vec![listener(Protocol::Tcp, 80, 30080)]).await;
    let name = |suffix: &str| format!("service.beta.kubernetes.io/aws-load-balancer-{suffix}");
    lb.annotations = BTreeMap::from([
        (name("attributes"), "deletion_protection.enabled=true".to_owned()),
        (name("cross-zone-load-balancing-enabled"), "true".to_owned()),
        (name("target-group-attributes"), "deregistration_delay.timeout_seconds=60".to_owned()),
        (name("additional-resource-tags"), "team=shop,cost center=a+b".to_owned()),
    ]);
    let mut restarted = provider;
    for (is_named, crossing, delay) in [(true, "true", "60"), (false, "false", "300")] {
        if !is_named {
            restarted = moto.fresh().await.unwrap();
            lb.annotations.clear();
        }
        converge(&restarted, &lb).await.unwrap();
        let balancer = moto.balancers().await.unwrap()[0].load_balancer_arn.clone().unwrap();
        let group = moto.groups().await.unwrap()[0].target_group_arn.clone().unwrap();
        let listener = only_listener(&moto).await.listener_arn.unwrap();
        let set =
            moto.elb.describe_load_balancer_attributes().load_balancer_arn(&balancer).send().await.unwrap();
        let set = |key: &str| set.attributes().iter().find(|a| a.key() == Some(key)).and_then(|a| a.value());
        assert_eq!(set("load_balancing.cross_zone.enabled"), Some(crossing));
        assert_eq!(set("deletion_protection.enabled"), Some(crossing));
        let set = moto.elb.describe_target_group_attributes().target_group_arn(&group).send().await.unwrap();
        let set = |key: &str| set.attributes().iter().find(|a| a.key() == Some(key)).and_then(|a| a.value());
        assert_eq!(set("deregistration_delay.timeout_seconds"), Some(delay));
        for arn in [&balancer, &group, &listener] {
            let tags = moto.tags(arn).await.unwrap();
            assert_eq!(tags.get("team").is_some_and(|team| team == "shop"), is_named, "{tags:?}");
            assert_eq!(tags.get("cost center").is_some_and(|center| center == "a+b"), is_named, "{tags:?}");
            assert!(is_named || tags.len() == 4, "{tags:?}");
        }
    }
}

/// The wire format of changes of subnets. moto takes addresses, but does not show them again: only subnets are compared here.
#[tokio::test]
async fn named_subnets_are_used_and_change() {
    requires!(Moto);
    let moto = Moto::start(1).await.unwrap();
    let mut lb = fixture::first(&moto, &fixture::owner("web", 1));
    let name = "service.beta.kubernetes.io/aws-load-balancer-subnets";
    let [first, second] = moto.config.subnets.as_slice() else { panic!("two subnets") };
    for named in [vec![second, first], vec![first], vec![second, first], vec![second]] {
        let all = named.iter().map(|id| id.as_str()).collect::<Vec<_>>().join(",");
        lb.annotations.insert(name.to_owned(), all);
        // No zone leaves soon after another one came. A new process does not know when that was.
        converge(&moto.fresh().await.unwrap(), &lb).await.unwrap();
        assert_eq!(used_subnets(&moto).await, named.into_iter().cloned().collect());
    }
    lb.annotations.insert(name.to_owned(), format!("{second},subnet-00000000"));
    let outcome = moto.fresh().await.unwrap().apply(&lb, Compare::InPlace).await.unwrap();
    let (reason, message) = outcome.incomplete.unwrap();
    assert!(reason == "RejectedByProvider" && message.contains("SetSubnets"), "{reason}: {message}");
    assert_eq!(used_subnets(&moto).await, [second.clone()].into());
}

/// The IDs of the only load balancer's subnets.
async fn used_subnets(moto: &Moto) -> BTreeSet<String> {
    let balancer = moto.balancers().await.unwrap().remove(0);
    balancer.availability_zones().iter().filter_map(|zone| zone.subnet_id.clone()).collect()
}

/// The wire format of subnets: their tags, zones and free addresses.
#[tokio::test]
async fn subnets_are_found_by_tags_and_names() {
    requires!(Moto);
    let moto = Moto::start(1).await.unwrap();
    let provider = moto.provider(Config { subnets: Vec::new(), ..moto.config.clone() });
    let [first, second] = moto.config.subnets.as_slice() else { panic!("two subnets") };
    let by_tags = fixture::first(&moto, &fixture::owner("by-tags", 1));
    let error = provider.apply(&by_tags, Compare::Remembered).await.unwrap_err();
    assert_eq!(error.reason(), "SubnetsNotFound");
    moto.tag(first, "kubernetes.io/role/internal-elb", "1").await.unwrap();
    moto.tag(second, "Name", "private b").await.unwrap();
    // What was read before serves for a minute.
    let provider = moto.provider(Config { subnets: Vec::new(), ..moto.config.clone() });
    converge(&provider, &by_tags).await.unwrap();
    assert_eq!(used_subnets(&moto).await, [first.clone()].into());
    steerage_provider_conformance::converge_deleted(&provider, &by_tags.owner).await.unwrap();
    let mut by_name = fixture::first(&moto, &fixture::owner("by-name", 1));
    let name = "service.beta.kubernetes.io/aws-load-balancer-subnets".to_owned();
    by_name.annotations.insert(name, "private b".to_owned());
    converge(&provider, &by_name).await.unwrap();
    assert_eq!(used_subnets(&moto).await, [second.clone()].into());
}

/// The wire format of the rules of security groups.
#[tokio::test]
async fn rules_are_read_as_they_were_sent() {
    requires!(Moto);
    let listeners = vec![listener(Protocol::Tcp, 53, 30053), listener(Protocol::Udp, 53, 30053)];
    let (moto, provider, mut lb) = made(4, listeners).await;
    let icmp = "service.beta.kubernetes.io/aws-load-balancer-enable-icmp-for-path-mtu-discovery";
    lb.annotations.insert(icmp.to_owned(), "on".to_owned());
    lb.source_ranges = ["192.0.2.0/24", "198.51.100.7/32"].map(|range| range.parse().unwrap()).to_vec();
    converge(&provider, &lb).await.unwrap();
    let group = moto.security_groups().await.unwrap().remove(0);
    let mut rules: Vec<_> = group
        .ip_permissions
        .iter()
        .map(|rule| (rule.ip_protocol.as_str(), rule.from_port, rule.to_port, rule.ip_ranges.len()))
        .collect();
    rules.sort_unstable();
    let port = Some(53);
    assert_eq!(rules, [("icmp", Some(3), Some(4), 2), ("tcp", port, port, 2), ("udp", port, port, 2)]);
    moto.proxy().reset();
    let restarted = moto.fresh().await.unwrap();
    converge(&restarted, &lb).await.unwrap();
    converge(&provider, &lb).await.unwrap();
    provider.apply(&lb, Compare::InPlace).await.unwrap();
    assert!(moto.proxy().writes().is_empty(), "{:?}", moto.proxy().writes());
}

/// The wire format of named groups: their names, and the call that replaces the groups.
#[tokio::test]
async fn named_security_groups_replace_the_own_one_and_back() {
    requires!(Moto);
    let (moto, provider, mut lb) = made(4, vec![listener(Protocol::Tcp, 80, 30080)]).await;
    let front = moto.security_group("front end").await.unwrap();
    let attached = async || moto.balancers().await.unwrap().remove(0).security_groups.unwrap_or_default();
    let own = async || {
        let groups = moto.security_groups().await.unwrap().into_iter();
        groups.map(|group| group.group_id).collect::<Vec<_>>()
    };
    assert_eq!(attached().await, own().await);
    let name = "service.beta.kubernetes.io/aws-load-balancer-security-groups".to_owned();
    for named in ["front end", front.as_str()] {
        lb.annotations.insert(name.clone(), named.to_owned());
        converge(&provider, &lb).await.unwrap();
        assert_eq!((attached().await, own().await), (vec![front.clone()], vec![]));
    }
    moto.proxy().reset();
    converge(&moto.fresh().await.unwrap(), &lb).await.unwrap();
    provider.apply(&lb, Compare::InPlace).await.unwrap();
    assert!(moto.proxy().writes().is_empty(), "{:?}", moto.proxy().writes());
    lb.annotations.insert(name.clone(), "rear end".to_owned());
    let outcome = provider.apply(&lb, Compare::InPlace).await.unwrap();
    assert_eq!(outcome.incomplete.unwrap().0, "SecurityGroupsNotFound");
    lb.annotations.clear();
    converge(&provider, &lb).await.unwrap();
    assert_eq!((attached().await, own().await.len()), (own().await, 1));
}

/// The wire format of TLS listeners.
#[tokio::test]
async fn certificates_and_policies_change_in_place() {
    requires!(Moto);
    let (moto, provider, mut lb) = made(4, vec![listener(Protocol::Tcp, 443, 30443)]).await;
    let [a, b, c] = ["a.example", "b.example", "c.example"].map(|name| moto.certificate(name).unwrap());
    let before = only_listener(&moto).await;
    let name = |suffix: &str| format!("service.beta.kubernetes.io/aws-load-balancer-{suffix}");
    for (certificates, policy) in [
        (vec![a.as_str(), &b, &c], "ELBSecurityPolicy-2016-08"),
        (vec![&b, &a], "ELBSecurityPolicy-TLS13-1-2-2021-06"),
        (vec![&c, &a, &b], "ELBSecurityPolicy-2016-08"),
        (vec![&a], "ELBSecurityPolicy-2016-08"),
    ] {
        lb.annotations = BTreeMap::from([
            (name("ssl-cert"), certificates.join(",")),
            (name("ssl-negotiation-policy"), policy.to_owned()),
        ]);
        converge(&provider, &lb).await.unwrap();
        let seen = only_listener(&moto).await;
        assert_eq!((&seen.listener_arn, seen.ssl_policy()), (&before.listener_arn, Some(policy)));
        assert_eq!(seen.protocol().map(ProtocolEnum::as_str), Some("TLS"));
        let arn = seen.listener_arn().unwrap();
        let found = moto.elb.describe_listener_certificates().listener_arn(arn).send().await.unwrap();
        let of = |is_default: bool| {
            let some = found.certificates().iter().filter(move |c| c.is_default() == Some(is_default));
            some.filter_map(|c| c.certificate_arn()).collect::<Vec<_>>()
        };
        // The others may contain the default one too.
        let others: BTreeSet<&str> = of(false).into_iter().filter(|arn| *arn != certificates[0]).collect();
        assert_eq!((of(true), others), (vec![certificates[0]], certificates[1..].iter().copied().collect()));
    }
    moto.proxy().reset();
    provider.apply(&lb, Compare::InPlace).await.unwrap();
    assert!(moto.proxy().writes().is_empty(), "nothing differs");
    lb.annotations = BTreeMap::from([
        (name("ssl-cert"), format!("{a}-missing")),
        (name("ssl-negotiation-policy"), "ELBSecurityPolicy-TLS13-1-2-2021-06".to_owned()),
    ]);
    let before = only_listener(&moto).await;
    let outcome = provider.apply(&lb, Compare::InPlace).await.unwrap();
    assert_eq!(outcome.incomplete.unwrap().0, "RejectedByProvider");
    assert_eq!(only_listener(&moto).await, before, "AWS changes nothing, or all");
    lb.annotations.clear();
    converge(&provider, &lb).await.unwrap();
    let seen = only_listener(&moto).await;
    assert_eq!(seen.protocol().map(ProtocolEnum::as_str), Some("TCP"));
}

/// AWS has no stickiness for target groups with TLS, and refuses its attributes.
#[tokio::test]
async fn targets_are_reached_by_tls() {
    requires!(Moto);
    let (moto, provider, mut lb) = made(4, vec![listener(Protocol::Tcp, 443, 30443)]).await;
    let name = |suffix: &str| format!("service.beta.kubernetes.io/aws-load-balancer-{suffix}");
    lb.annotations = BTreeMap::from([
        (name("ssl-cert"), moto.certificate("a.example").unwrap()),
        (name("backend-protocol"), "ssl".to_owned()),
    ]);
    converge(&provider, &lb).await.unwrap();
    let found = only_listener(&moto).await;
    assert_eq!(found.protocol().map(ProtocolEnum::as_str), Some("TLS"));
    let groups = moto.groups().await.unwrap();
    let protocols: Vec<_> = groups.iter().filter_map(|group| group.protocol()).collect();
    assert_eq!(protocols.into_iter().map(ProtocolEnum::as_str).collect::<Vec<_>>(), ["TLS"]);
    moto.proxy().reset();
    lb.groups[0].affinity = Some(Affinity { timeout: std::time::Duration::from_mins(1) });
    let error = provider.apply(&lb, Compare::Remembered).await.unwrap_err();
    assert_eq!(error.reason(), "ConflictingAnnotations");
    assert!(calls(&moto).is_empty());
}

#[tokio::test]
async fn unknown_subnet_is_invalid() {
    requires!(Moto);
    let moto = Moto::start(1).await.unwrap();
    let mut config = moto.config.clone();
    config.subnets = vec!["subnet-00000000".to_owned()];
    let provider = moto.provider(config);
    let lb = fixture::first(&moto, &fixture::owner("web", 1));
    let error = provider.apply(&lb, Compare::Remembered).await.unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }), "{error:?}");
    assert!(error.to_string().contains("CreateLoadBalancer"), "{error}");
}
