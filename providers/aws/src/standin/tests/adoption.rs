// SPDX-License-Identifier: Apache-2.0
//! Load balancers that other controllers made: Steerage adopts those of its own Services, and loses none of their connections.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use steerage_model::Protocol;
use steerage_provider_api::{Compare, LoadBalancer, Progress, Provider as _};
use steerage_provider_cloud::marks;
use tokio::time::Instant;

use super::driver::{apply, changes, delete};
use super::peers::{ALBC, ARN, CCM, NAME, adopting, planted, service};
use super::pods::with_pods;
use crate::annotations::{GROUP_ATTRIBUTES, SSL_CERT};
use crate::client::Tags;
use crate::desired::tests::{config, planned_with_pods};
use crate::security_group::SecurityGroup;
use crate::standin::StandIn;
use crate::standin::balancers::hostname;
use crate::standin::cloud::Registration;
use crate::standin::faults::{Fault, Faults};
use crate::standin::harness::pod_address;
use crate::standin::snapshot::snapshot;
use crate::tls::Tls;

/// Counts it as a violation if the load balancer vanishes, a listener that it had on port 80 vanishes or comes to a group without targets,
/// or nobody may connect to it.
fn watch(cloud: &StandIn) {
    cloud.set_invariant(Box::new(|_, after| {
        let Some(balancer) = after.balancers.get(ARN) else {
            return Some("the load balancer is gone".to_owned());
        };
        if after.balancers.len() > 1 {
            return Some("there is another load balancer".to_owned());
        }
        let web = after.listeners.values().find(|found| found.port == 80);
        let Some(group) = web.and_then(|web| after.groups.get(&web.group)) else {
            return Some("port 80 is not served".to_owned());
        };
        if group.registered().next().is_none() {
            return Some("port 80 has no target".to_owned());
        }
        let ids = &balancer.security_groups;
        let mut groups = ids.iter().filter_map(|id| after.security_groups.get(id));
        let is_open = ids.is_empty()
            || groups.any(|group| group.own.iter().chain(&group.others).any(|rule| rule.port == 80));
        let has_back = ids.is_empty() || ids.contains("sg-back");
        (!is_open || !has_back).then(|| format!("the security groups are {ids:?}"))
    }));
}

/// The load balancer as Steerage wants it, with nothing of the other controller but its tags and its security groups.
fn assert_adopted(cloud: &StandIn, lb: &LoadBalancer, what: &str) {
    let now = cloud.cloud();
    let balancer = &now.balancers[ARN];
    let marks = marks::of_owner(&config().cluster, &lb.owner);
    let is_ours = |tags: &Tags| marks.iter().all(|(key, value)| tags.get(key) == Some(value));
    assert_eq!(now.balancers.len(), 1, "{what}");
    assert!(is_ours(&balancer.tags), "{what}: {:?}", balancer.tags);
    let ports: BTreeSet<u16> = now.listeners.values().map(|found| found.port).collect();
    assert_eq!(ports, lb.listeners.iter().map(|wanted| wanted.port).collect(), "{what}");
    for (arn, listener) in &now.listeners {
        assert!(is_ours(&listener.tags), "{what}: {arn}");
        let group = &now.groups[&listener.group];
        assert!(group.name.starts_with("st-") && is_ours(&group.tags), "{what}: {arn}");
        assert_eq!(group.registered().collect::<Vec<_>>(), ["i-0", "i-1"], "{what}: {arn}");
    }
    assert!(now.groups.values().all(|group| group.name.starts_with("st-")), "{what}: {:?}", snapshot(&now));
    let own: Vec<&SecurityGroup> =
        now.security_groups.values().filter(|group| group.tags.contains_key(marks::UID)).collect();
    let attached: Vec<&str> = balancer.security_groups.iter().map(String::as_str).collect();
    match &own[..] {
        [] => assert!(attached.is_empty(), "{what}: {attached:?}"),
        [own] => assert_eq!(
            attached,
            ["sg-back", &own.id].into_iter().collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>(),
            "{what}"
        ),
        _ => panic!("{what}: {own:?}"),
    }
    assert_eq!(cloud.violations(), [""; 0], "{what}");
}

#[tokio::test(start_paused = true)]
async fn load_balancer_of_each_controller_is_adopted_with_its_name_and_listeners() {
    for peer in [CCM, ALBC] {
        let cloud = planted(1, peer, &[(80, 30080), (443, 30443), (99, 30099)]).await;
        watch(&cloud);
        let before = cloud.cloud();
        let (aws, lb) = (adopting(&cloud, &[peer]), service(&[(80, 30080), (443, 30443), (8080, 30888)]));
        let (mut switched, mut left) = (None, BTreeMap::new());
        loop {
            let outcome = aws.apply(&lb, Compare::Remembered).await.unwrap();
            let published = outcome.ingress.iter().all(|found| found.hostname == Some(hostname(NAME)));
            assert!(published, "{:?}", outcome.ingress);
            let now = cloud.cloud();
            let of_web = &now.listeners.values().find(|found| found.port == 80).unwrap().group;
            if !of_web.contains("theirs") {
                switched.get_or_insert_with(Instant::now);
            }
            for arn in before.groups.keys().filter(|arn| !now.groups.contains_key(*arn)) {
                left.entry(arn.clone()).or_insert_with(Instant::now);
            }
            let Progress::Again(after) = outcome.progress else { break };
            tokio::time::sleep(after).await;
        }
        let last = aws.apply(&lb, Compare::Remembered).await.unwrap();
        assert_eq!(last.ingress[0].hostname, Some(hostname(NAME)));
        assert_adopted(&cloud, &lb, peer.name().as_str());
        // Their connections had the 600 s of the groups' own delay.
        let early = |left: &Instant| left.duration_since(switched.unwrap()) < Duration::from_secs(595);
        assert!(left.len() == 3 && !left.values().any(early), "{left:?}");
        let kept = cloud.cloud().listeners.keys().filter(|arn| before.listeners.contains_key(*arn)).count();
        assert_eq!(kept, 2, "80 and 443 keep their listeners, 99 is not wanted, 8080 is new");
        apply(&aws, &lb, Compare::InPlace).await.unwrap();
        changes(&cloud);
        tokio::time::sleep(Duration::from_mins(1)).await;
        apply(&aws, &lb, Compare::InPlace).await.unwrap();
        assert_eq!(changes(&cloud), [""; 0]);
    }
}

/// After the adoption, Steerage needs neither the flag nor the status to find the load balancer.
#[tokio::test(start_paused = true)]
async fn adopted_load_balancer_is_found_after_a_restart_and_deleted_with_its_service() {
    for peer in [CCM, ALBC] {
        let cloud = planted(2, peer, &[(80, 30080)]).await;
        watch(&cloud);
        let lb = service(&[(80, 30080)]);
        apply(&adopting(&cloud, &[peer]), &lb, Compare::Remembered).await.unwrap();
        tokio::time::sleep(Duration::from_mins(1)).await;
        changes(&cloud);
        let unpublished = LoadBalancer { published_hostnames: Vec::new(), ..lb.clone() };
        let aws = adopting(&cloud, &[]);
        assert_eq!(aws.owned().await.unwrap(), std::slice::from_ref(&lb.owner));
        for compare in [Compare::Remembered, Compare::InPlace] {
            let outcome = apply(&aws, &unpublished, compare).await.unwrap();
            assert_eq!(outcome.ingress[0].hostname.as_deref(), Some(hostname(NAME).as_str()));
            tokio::time::sleep(Duration::from_mins(1)).await;
            aws.apply(&unpublished, compare).await.unwrap();
        }
        assert_eq!(changes(&cloud), [""; 0]);
        let more = LoadBalancer { published_hostnames: Vec::new(), ..service(&[(80, 30081), (443, 30443)]) };
        apply(&aws, &more, Compare::Remembered).await.unwrap();
        assert_adopted(&cloud, &more, "changed");
        for aws in [aws, adopting(&cloud, &[])] {
            cloud.set_invariant(Box::new(|_, _| None));
            delete(&aws, &lb.owner).await.unwrap();
            let left = cloud.cloud();
            assert!(left.balancers.is_empty() && left.groups.is_empty() && left.listeners.is_empty());
            let groups: Vec<&str> = left.security_groups.keys().map(String::as_str).collect();
            assert_eq!(groups, if peer == ALBC { vec!["sg-back", "sg-front"] } else { vec![] });
        }
    }
}

/// The process ends at each call in turn, before or after AWS handled it, or gets an error.
#[tokio::test(start_paused = true)]
async fn end_of_the_process_at_every_call_of_an_adoption_converges() {
    for (peer, fault) in [
        (CCM, Fault::Before),
        (CCM, Fault::After),
        (CCM, Fault::Code("Throttling")),
        (CCM, Fault::Code("AccessDenied")),
        (ALBC, Fault::Before),
        (ALBC, Fault::After),
    ] {
        // A comparison after all is visible reads less than the first.
        for then in ["restart", "at once", "comparison"] {
            for number in 0.. {
                let what = format!("{} {fault:?} at {number}, then {then}", peer.name());
                let cloud = planted(number, peer, &[(80, 30080), (99, 30099)]).await;
                watch(&cloud);
                let lb = service(&[(80, 30080)]);
                let mut aws = adopting(&cloud, &[peer]);
                cloud.set_faults(Faults::Nth(usize::try_from(number).unwrap(), fault));
                while cloud.has_faults() {
                    match aws.apply(&lb, Compare::Remembered).await {
                        Ok(outcome) => match outcome.progress {
                            Progress::Done => break,
                            Progress::Again(after) if cloud.has_faults() => tokio::time::sleep(after).await,
                            Progress::Again(_) => {}
                        },
                        Err(_) => tokio::time::sleep(Duration::from_secs(1)).await,
                    }
                }
                let is_over = cloud.has_faults();
                cloud.set_faults(Faults::None);
                if then == "restart" {
                    tokio::time::sleep(Duration::from_secs(5)).await;
                    aws = adopting(&cloud, &[peer]);
                }
                if then == "comparison" {
                    tokio::time::sleep(Duration::from_secs(11)).await;
                    apply(&aws, &lb, Compare::InPlace)
                        .await
                        .unwrap_or_else(|error| panic!("{what}: {error}"));
                }
                for compare in [Compare::Remembered, Compare::InPlace] {
                    apply(&aws, &lb, compare).await.unwrap_or_else(|error| panic!("{what}: {error}"));
                }
                assert_adopted(&cloud, &lb, &what);
                if is_over {
                    assert!(number > 20, "{what}");
                    break;
                }
            }
        }
    }
}

/// A Service that is deleted halfway takes with it what Steerage marked, and nothing else.
#[tokio::test(start_paused = true)]
async fn service_deleted_while_it_is_adopted_leaves_nothing_that_was_marked() {
    for number in 0.. {
        let cloud = planted(number, CCM, &[(80, 30080), (99, 30099)]).await;
        let (aws, lb) = (adopting(&cloud, &[CCM]), service(&[(80, 30080)]));
        cloud.set_faults(Faults::Nth(usize::try_from(number).unwrap(), Fault::After));
        while cloud.has_faults() {
            match aws.apply(&lb, Compare::Remembered).await {
                Ok(outcome) if outcome.progress == Progress::Done => break,
                _ => tokio::time::sleep(Duration::from_secs(1)).await,
            }
        }
        let is_over = cloud.has_faults();
        cloud.set_faults(Faults::None);
        let is_marked = |tags: &Tags| tags.contains_key(marks::UID);
        let before = cloud.cloud();
        let began = before.balancers.values().any(|found| is_marked(&found.tags));
        tokio::time::sleep(Duration::from_secs(5)).await;
        delete(&adopting(&cloud, &[CCM]), &lb.owner).await.unwrap();
        let left = cloud.cloud();
        assert_eq!(left.balancers.is_empty(), began, "{number}");
        assert!(left.groups.values().all(|group| !is_marked(&group.tags)), "{number}: {:?}", snapshot(&left));
        assert!(left.security_groups.is_empty(), "{number}");
        if is_over {
            break;
        }
    }
}

/// Somebody else's listener stays, and so does the group that it shares with one of the other controller.
#[tokio::test(start_paused = true)]
async fn listener_of_somebody_else_stays_with_its_group() {
    let cloud = planted(3, CCM, &[(80, 30080)]).await;
    cloud.change(|cloud| {
        let mut foreign = cloud.listeners.values().next().unwrap().clone();
        (foreign.port, foreign.tags) = (81, Tags::new());
        cloud.listeners.insert("arn:of-somebody:listener/1".to_owned(), foreign);
    });
    watch(&cloud);
    tokio::time::sleep(Duration::from_mins(1)).await;
    let (aws, lb) = (adopting(&cloud, &[CCM]), service(&[(80, 30080)]));
    let before = cloud.cloud();
    for compare in [Compare::Remembered, Compare::InPlace] {
        apply(&aws, &lb, compare).await.unwrap();
        let now = cloud.cloud();
        let foreign = &now.listeners["arn:of-somebody:listener/1"];
        assert!(
            foreign.tags.is_empty() && now.groups[&foreign.group].tags == before.groups[&foreign.group].tags
        );
        assert_eq!(now.groups.len(), 2);
    }
    assert_eq!(cloud.violations(), [""; 0]);
}

/// The AWS Load Balancer Controller registers pods, ends TLS, and lets clients choose certificates by name.
#[tokio::test(start_paused = true)]
async fn tls_listener_to_pods_is_adopted_with_its_certificates() {
    let cloud = planted(4, ALBC, &[(80, 8080)]).await;
    let arn = |name: &str| format!("arn:aws:acm:us-east-1:1:certificate/{name}");
    cloud.change(|cloud| {
        let listener = cloud.listeners.values_mut().next().unwrap();
        listener.protocol = "TLS".to_owned();
        listener.tls = Some(Tls {
            certificate: arn("first"),
            others: [arn("second"), arn("old")].into(),
            policy: "ELBSecurityPolicy-TLS13-1-2-2021-06".to_owned(),
            alpn: "None".to_owned(),
        });
        let group = cloud.groups.values_mut().next().unwrap();
        let registration = Registration { since: Instant::now(), draining: None };
        group.has_pods = true;
        group.targets =
            [0, 1, 5].map(|pod| ((pod_address(pod).to_string(), 8080), registration.clone())).into();
    });
    watch(&cloud);
    tokio::time::sleep(Duration::from_mins(1)).await;
    let mut lb = with_pods(&planned_with_pods(&[(Protocol::Tcp, 80, 8080)]), &[0, 1]);
    lb.published_hostnames = vec![hostname(NAME)];
    lb.annotations.insert(SSL_CERT.to_owned(), format!("{},{}", arn("first"), arn("second")));
    // Whether pods see clients may change by it, and no check would tell.
    let silent = adopting(&cloud, &[ALBC]).apply(&lb, Compare::Remembered).await.unwrap_err().to_string();
    assert!(silent.contains("preserve_client_ip.enabled=false"), "{silent}");
    lb.annotations.insert(GROUP_ATTRIBUTES.to_owned(), "preserve_client_ip.enabled=true".to_owned());
    let aws = adopting(&cloud, &[ALBC]);
    // AWS does not show the tags of the new group at once.
    while cloud.cloud().listeners.values().any(|found| found.group.contains("theirs")) {
        let Progress::Again(after) = aws.apply(&lb, Compare::Remembered).await.unwrap().progress else {
            break;
        };
        tokio::time::sleep(after).await;
    }
    let theirs = cloud.cloud().groups.into_values().find(|group| group.name.starts_with("k8s-")).unwrap();
    assert_eq!(theirs.registered().count(), 2, "the pod that ended leaves their group too");
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    let now = cloud.cloud();
    let listener = now.listeners.values().next().unwrap();
    let tls = listener.tls.clone().unwrap();
    assert_eq!((tls.certificate, tls.others), (arn("first"), [arn("second")].into()));
    let group = &now.groups[&listener.group];
    assert!(group.name.starts_with("st-") && group.has_pods && group.registered().count() == 2);
    assert_eq!((now.groups.len(), cloud.violations()), (1, Vec::new()));
}

/// `docs/providers/aws-adoption.md` has these numbers.
#[tokio::test(start_paused = true)]
async fn adoption_costs_calls_for_each_port() {
    let mut counts = Vec::new();
    for (peer, ports) in
        [(CCM, &[(80, 30080)][..]), (CCM, &[(80, 30080), (443, 30443)]), (ALBC, &[(80, 30080)])]
    {
        let cloud = planted(5, peer, ports).await;
        let (aws, lb) = (adopting(&cloud, &[peer]), service(ports));
        aws.owned().await.unwrap();
        cloud.take_calls();
        apply(&aws, &lb, Compare::Remembered).await.unwrap();
        let calls = cloud.take_calls();
        // Looks at health while the old groups wait depend on time.
        counts.push(calls.iter().filter(|call| call.name != "DescribeTargetHealth").count());
    }
    // AWS shows the tags of new groups to the first call, or to one after it.
    let usual: [usize; 3] = [6 + 11, 6 + 2 * 11, 6 + 11 + 8];
    assert!(counts.iter().zip(usual).all(|(count, usual)| count.abs_diff(usual) <= 1), "{counts:?}");
}
