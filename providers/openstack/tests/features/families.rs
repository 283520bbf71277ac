// SPDX-License-Identifier: Apache-2.0
//! IP families, and choices of a new load balancer.

use super::*;

#[tokio::test]
async fn service_of_both_families_has_both_addresses() {
    requires!(OpenStack);
    let cloud = Cloud::shared("dual").await.unwrap();
    let ipv6 = Some(cloud.server.access().ipv6_subnet_id.clone());
    let config = steerage_provider_openstack::Config {
        ipv6_subnet: ipv6.clone(),
        ipv6_member_subnet: ipv6.clone(),
        ..cloud.config.clone()
    };
    let both = |index: u8| {
        let mut node = target(&format!("node-{index}"), &format!("10.0.1.{index}"));
        node.addresses.push(format!("2001:db8:1::{index}").parse().unwrap());
        node
    };
    let ranges: Vec<ipnet::IpNet> =
        ["192.0.2.0/24", "2001:db8:2::/48"].map(|range| range.parse().unwrap()).into();
    for (provider_name, families) in [
        ("amphora-test", [Family::V4, Family::V6]),
        ("amphora-test", [Family::V6, Family::V4]),
        ("ovn", [Family::V4, Family::V6]),
    ] {
        let config =
            steerage_provider_openstack::Config { provider: provider_name.to_owned(), ..config.clone() };
        let provider = cloud.provider(config.clone()).unwrap();
        let mut lb = LoadBalancer {
            families: families.to_vec(),
            ..web(&cloud, &format!("{provider_name}-{}", families[0]).to_lowercase())
        };
        lb = lb.with_nodes(TargetSet::own([both(11), both(12)]));
        let is_proxy = provider_name != "ovn";
        if is_proxy {
            lb.source_ranges.clone_from(&ranges);
        }
        let outcome = converge_remembered(&provider, &lb).await.unwrap();
        assert_eq!(outcome.incomplete, None);
        let published: Vec<IpAddr> = outcome.ingress.iter().map(|ingress| ingress.ip.unwrap()).collect();
        let of: Vec<Family> = published.iter().map(|ip| Family::of(*ip)).collect();
        assert_eq!(of, families);
        let balancer = cloud.balancer(&lb.owner).unwrap();
        let vips = [&balancer["vip_address"], &balancer["additional_vips"][0]["ip_address"]];
        let six = published.iter().find(|ip| ip.is_ipv6()).unwrap();
        assert!(vips.contains(&&json!(six)), "{balancer}");
        let four = published.iter().find(|ip| ip.is_ipv4()).unwrap();
        assert_eq!(cloud.floating_ips(&format!("floating_ip_address={four}")).unwrap().len(), 1);
        let listener = cloud.listener(id(&balancer), 80).unwrap();
        let path = format!("pools/{}/members", listener["default_pool_id"].as_str().unwrap());
        let members = cloud.octavia(&path).unwrap();
        let count = members["members"].as_array().unwrap().len();
        assert_eq!(count, if is_proxy { 2 } else { 4 });
        if is_proxy {
            assert_eq!(listener["allowed_cidrs"], json!(["192.0.2.0/24", "2001:db8:2::/48"]));
        }
        cloud.proxy().reset();
        converge(&cloud.provider(config.clone()).unwrap(), &lb).await.unwrap();
        assert!(writes(&cloud).is_empty());
        // Targets follow in both families.
        let nodes = TargetSet::own([both(12), both(13)]);
        for _ in 0..200 {
            let outcome = provider
                .set_targets(&lb.owner, &steerage_provider_api::GroupTargets::of_nodes(nodes.clone()))
                .await
                .unwrap();
            if outcome.progress == Progress::Done {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let members = cloud.octavia(&path).unwrap();
        let names: Vec<_> =
            members["members"].as_array().unwrap().iter().map(|member| member["name"].clone()).collect();
        assert_eq!(names.len(), count);
        assert!(names.iter().all(|name| name != "node-11"), "{names:?}");
        if is_proxy && families[0] == Family::V4 {
            cloud.server.settled(id(&balancer)).unwrap();
            // Deleted by somebody: the address of IPv6 comes back.
            let path = format!("loadbalancers/{}?cascade=true", id(&balancer));
            cloud.change(id(&balancer), "DELETE", &path, None).unwrap();
            lb.published = published.clone();
            let again = converge(&cloud.provider(config.clone()).unwrap(), &lb).await.unwrap();
            assert_eq!(again.ingress, outcome.ingress);
        }
    }
}

/// Octavia adds no VIP later, and Steerage does not know each subnet.
#[tokio::test]
async fn family_without_a_vip_is_told_and_the_other_is_served() {
    requires!(OpenStack);
    let cloud = Cloud::shared("one-of-two").await.unwrap();
    let lb = annotated(web(&cloud, "one-of-two"), INTERNAL, "true");
    let single = converge_remembered(&cloud.fresh().await.unwrap(), &lb).await.unwrap();
    let dual = LoadBalancer {
        families: vec![Family::V4, Family::V6],
        source_ranges: vec!["192.0.2.0/24".parse().unwrap(), "2001:db8:2::/48".parse().unwrap()],
        ..lb
    };
    let ipv6_subnet = Some(cloud.server.access().ipv6_subnet_id.clone());
    let known = steerage_provider_openstack::Config { ipv6_subnet, ..cloud.config.clone() };
    for (config, part) in [(cloud.config.clone(), "--openstack-ipv6-subnet-id"), (known, "adds no VIP")] {
        let provider = cloud.provider(config).unwrap();
        for _ in 0..2 {
            let outcome = converge_remembered(&provider, &dual).await.unwrap();
            assert_eq!(outcome.ingress, single.ingress);
            let (reason, message) = outcome.incomplete.unwrap();
            assert!(reason == "DualStackNotSupported" && message.contains(part), "{message}");
        }
        let balancer = cloud.balancer(&dual.owner).unwrap();
        assert_eq!(cloud.listener(id(&balancer), 80).unwrap()["allowed_cidrs"], json!(["192.0.2.0/24"]));
    }
}

#[tokio::test]
async fn choices_at_creation_are_made_and_kept() {
    requires!(OpenStack);
    let cloud = Cloud::shared("choices").await.unwrap();
    let provider = cloud.fresh().await.unwrap();
    let access = cloud.server.access();
    let prefix = "loadbalancer.openstack.org";
    let mut lb = annotated(web(&cloud, "choices"), INTERNAL, "true");
    lb = annotated(lb, &format!("{prefix}/flavor-id"), &access.flavor_id);
    lb = annotated(lb, &format!("{prefix}/availability-zone"), &access.availability_zone);
    lb = annotated(lb, &format!("{prefix}/network-id"), &access.network_id);
    lb.families = vec![Family::V4, Family::V6];
    let outcome = converge_remembered(&provider, &lb).await.unwrap();
    // The network has a subnet of each family, although no flag names one of IPv6.
    assert_eq!((outcome.ingress.len(), outcome.incomplete), (2, None));
    let balancer = cloud.balancer(&lb.owner).unwrap();
    assert_eq!(balancer["flavor_id"], json!(access.flavor_id));
    assert_eq!(balancer["availability_zone"], json!(access.availability_zone));
    assert_eq!(balancer["vip_subnet_id"], json!(access.subnet_id));
    cloud.proxy().reset();
    converge(&cloud.fresh().await.unwrap(), &lb).await.unwrap();
    assert!(writes(&cloud).is_empty());
    let other = annotated(lb.clone(), &format!("{prefix}/availability-zone"), "zone-2");
    let (reason, message) = refused(&provider, &other).await;
    assert!(
        reason == "AddressImmutable"
            && message.contains("zone-2")
            && message.contains(&access.availability_zone),
        "{message}"
    );
    let nowhere = "00000000-0000-4000-8000-000000000000";
    for (name, part) in [("flavor-id", "Invalid flavor_id"), ("network-id", "network-id")] {
        let wrong = annotated(
            annotated(web(&cloud, "wrong"), INTERNAL, "true"),
            &format!("{prefix}/{name}"),
            nowhere,
        );
        let (reason, message) = refused(&provider, &wrong).await;
        assert!(reason == "RejectedByProvider" && message.contains(part), "{message}");
    }
}
