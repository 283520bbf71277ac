// SPDX-License-Identifier: Apache-2.0
//! Load balancers that several Services share.

use super::*;

#[tokio::test]
async fn services_share_a_load_balancer_and_its_address() {
    requires!(OpenStack);
    let cloud = Cloud::shared("sharing").await.unwrap();
    let file = r#"{"front": {"namespaces": ["*"]}, "back": {"namespaces": ["*"]}}"#;
    let config = steerage_provider_openstack::Config {
        shared_load_balancers: serde_json::from_str(file).unwrap(),
        ..cloud.config.clone()
    };
    let fresh = || cloud.provider(config.clone()).unwrap();
    let name = steerage_model::annotations::SHARED_LOAD_BALANCER;
    let sharing = |service: &str, port: u16| {
        let lb = annotated(web(&cloud, service), name, "front");
        let lb = fixture::with_listeners(lb, vec![listener(Protocol::Tcp, port, 30000 + port)]);
        fixture::with_targets(&cloud, &lb, &[0, 1])
    };
    let (a, b) = (sharing("sharing-a", 80), sharing("sharing-b", 81));
    let a = LoadBalancer { source_ranges: vec!["192.0.2.0/24".parse().unwrap()], ..a };
    let provider = fresh();
    let (of_a, of_b) = tokio::join!(converge_remembered(&provider, &a), converge_remembered(&provider, &b));
    let (of_a, of_b) = (of_a.unwrap(), of_b.unwrap());
    assert_eq!(of_a.ingress, of_b.ingress);
    let tags = "steerage.dev/shared-load-balancer%3Dfront,steerage.dev/cluster-uid%3Dcluster-sharing";
    let balancers = || cloud.octavia(&format!("loadbalancers?tags={tags}")).unwrap()["loadbalancers"].clone();
    let all = balancers();
    assert_eq!(all.as_array().unwrap().len(), 1, "{all}");
    let balancer = id(&all[0]).to_owned();
    assert_eq!(cloud.listener(&balancer, 80).unwrap()["allowed_cidrs"], json!(["192.0.2.0/24"]));
    assert_eq!(cloud.listener(&balancer, 81).unwrap()["allowed_cidrs"], json!(null));
    // A port is the first Service's.
    let (reason, message) = refused(&provider, &sharing("sharing-c", 80)).await;
    assert!(reason == "PortInUse" && !message.contains("sharing-a"), "{message}");
    cloud.proxy().reset();
    let restarted = fresh();
    for lb in [&a, &b] {
        converge(&restarted, lb).await.unwrap();
    }
    assert!(writes(&cloud).is_empty());
    // Each Service has what it asked for first.
    let mut own = a.clone();
    own.annotations.remove(name);
    for moved in [own, annotated(a.clone(), name, "back")] {
        let (reason, message) = refused(&restarted, &moved).await;
        assert!(reason == "SharedLoadBalancerImmutable" && message.contains("front"), "{message}");
    }
    let alone = web(&cloud, "sharing-alone");
    let alone = annotated(alone, INTERNAL, "true");
    converge_remembered(&restarted, &alone).await.unwrap();
    let mut late = alone.clone();
    late.annotations = [(name.to_owned(), "front".to_owned())].into();
    assert_eq!(refused(&restarted, &late).await.0, "SharedLoadBalancerImmutable");
    converge_deleted(&restarted, &alone.owner).await.unwrap();
    // Targets follow after a start, while the structure is refused.
    let nodes = steerage_provider_api::GroupTargets::of_nodes(TargetSet::own([target("node-9", "10.0.1.9")]));
    let restarted = fresh();
    for _ in 0..200 {
        if restarted.set_targets(&a.owner, &nodes).await.unwrap().progress == Progress::Done {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let path = format!(
        "pools/{}/members",
        cloud.listener(&balancer, 80).unwrap()["default_pool_id"].as_str().unwrap()
    );
    let members = cloud.octavia(&path).unwrap();
    assert!(
        members["members"].as_array().unwrap().iter().any(|member| member["name"] == "node-9"),
        "{members}"
    );
    let health = restarted.target_health(&b.owner).await.unwrap();
    assert!(health.targets.iter().all(|found| found.target != "node-9"), "{health:?}");
    // One Service goes, with the process after each call; the other one stays.
    loop {
        let progress = fresh().delete(&a.owner).await.unwrap();
        cloud.server.settled(&balancer).unwrap();
        if progress == Progress::Done {
            break;
        }
    }
    assert!(cloud.listener(&balancer, 80).is_err());
    assert_eq!(fresh().owned().await.unwrap(), std::slice::from_ref(&b.owner));
    // Created again under its name, the other one takes its port over.
    let again = LoadBalancer { owner: fixture::owner("sharing-b", 2), ..b.clone() };
    let restarted = fresh();
    assert_eq!(converge_remembered(&restarted, &again).await.unwrap().ingress, of_b.ingress);
    assert_eq!(restarted.owned().await.unwrap(), std::slice::from_ref(&again.owner));
    let address = address(&of_b);
    converge_deleted(&restarted, &again.owner).await.unwrap();
    cloud.server.settled(&balancer).unwrap();
    assert_eq!(balancers(), json!([]));
    assert!(cloud.floating_ips(&format!("floating_ip_address={address}")).unwrap().is_empty());
    assert_eq!(restarted.owned().await.unwrap(), []);
}
