// SPDX-License-Identifier: Apache-2.0
//! Load balancers of cloud-provider-openstack.

use super::*;

/// What cloud-provider-openstack makes for a Service of the cluster `prod`: a load balancer and a floating IP. Returns its ID and the address.
fn made_by_peer(cloud: &Cloud, lb: &LoadBalancer, ports: &[u16]) -> (String, IpAddr) {
    let service = &lb.owner.service;
    let name = format!("kube_service_prod_{}_{}", service.namespace(), service.name());
    let listener = |(index, port): (usize, &u16)| {
        json!({
            "name": format!("listener_{index}_{name}"), "protocol": "TCP", "protocol_port": port, "tags": [name],
            "default_pool": {
                "name": format!("pool_{index}_{name}"), "protocol": "TCP", "lb_algorithm": "ROUND_ROBIN",
                "members": [{ "address": "10.0.1.1", "protocol_port": 31000 }],
                "healthmonitor": { "name": format!("monitor_{index}_{name}"), "type": "TCP", "delay": 5, "timeout": 3, "max_retries": 1 },
            },
        })
    };
    let listeners: Vec<_> = ports.iter().enumerate().map(listener).collect();
    let body = json!({ "loadbalancer": {
        "name": name, "provider": "amphora-test", "vip_subnet_id": cloud.config.subnet, "tags": [name, "team=a"], "listeners": listeners,
    }});
    let made = cloud.server.call("POST", "/load-balancer/v2.0/lbaas/loadbalancers", Some(&body)).unwrap();
    let made = &made["loadbalancer"];
    cloud.server.settled(id(made)).unwrap();
    let ip = json!({ "floatingip": {
        "floating_network_id": cloud.config.floating_network, "port_id": made["vip_port_id"],
        "description": format!("Floating IP for Kubernetes external service {service} from cluster prod"),
    }});
    let ip = cloud.server.call("POST", "/network/v2.0/floatingips", Some(&ip)).unwrap();
    let address = ip["floatingip"]["floating_ip_address"].as_str().unwrap().parse().unwrap();
    (id(made).to_owned(), address)
}

#[tokio::test]
async fn load_balancer_of_the_peer_is_adopted_with_its_address() {
    requires!(OpenStack);
    let cloud = Cloud::shared("adopt").await.unwrap();
    let adopting =
        steerage_provider_openstack::Config { adopt: Some("prod".to_owned()), ..cloud.config.clone() };
    let mut lb = web(&cloud, "adopt");
    // Port 81 left the Service while no controller ran.
    let (balancer, address) = made_by_peer(&cloud, &lb, &[80, 81]);
    let kept = id(&cloud.listener(&balancer, 80).unwrap()).to_owned();
    lb.published = vec![address];
    lb = annotated(lb, "loadbalancer.openstack.org/load-balancer-address", &address.to_string());
    cloud.proxy().reset();
    let typo = steerage_provider_openstack::Config { adopt: Some("test".to_owned()), ..cloud.config.clone() };
    for (config, part) in
        [(cloud.config.clone(), "--openstack-adopt is not set"), (typo, "Correct --openstack-adopt")]
    {
        let (reason, message) = refused(&cloud.provider(config).unwrap(), &lb).await;
        assert!(reason == "AdoptionRefused" && message.contains(part), "{message}");
    }
    let preview = cloud.provider(adopting.clone()).unwrap().preview(&lb).await.unwrap().unwrap();
    assert!(
        matches!(preview.as_slice(), [line] if line.contains("adopts the load balancer kube_service_prod")),
        "{preview:?}"
    );
    assert!(writes(&cloud).is_empty());
    // The process ends after each call. The flag is needed for the first one only.
    let mut config = adopting;
    let outcome = loop {
        let outcome = cloud.provider(config.clone()).unwrap().apply(&lb, Compare::InPlace).await.unwrap();
        cloud.server.settled(&balancer).unwrap();
        if outcome.progress == Progress::Done {
            break outcome;
        }
        config = cloud.config.clone();
    };
    let made = writes(&cloud);
    assert_eq!(made[0], "PUT loadbalancers", "{made:?}");
    assert_eq!(self::address(&outcome), address);
    let now = cloud.balancer(&lb.owner).unwrap();
    assert_eq!(id(&now), balancer);
    assert!(now["tags"].as_array().unwrap().contains(&json!("team=a")), "{now}");
    let listener = cloud.listener(&balancer, 80).unwrap();
    assert_eq!(id(&listener), kept);
    assert!(cloud.listener(&balancer, 81).is_err());
    let pools = cloud.octavia(&format!("pools?loadbalancer_id={balancer}")).unwrap();
    let pools = pools["pools"].as_array().unwrap();
    assert_eq!(pools.len(), 1, "{pools:?}");
    assert_eq!(pools[0]["id"], listener["default_pool_id"]);
    assert_eq!(pools[0]["members"].as_array().unwrap().len(), 2);
    let restarted = cloud.fresh().await.unwrap();
    converge(&restarted, &lb).await.unwrap();
    assert!(writes(&cloud).is_empty());
    converge_deleted(&restarted, &lb.owner).await.unwrap();
    assert!(cloud.floating_ips(&format!("floating_ip_address={address}")).unwrap().is_empty());
    assert!(cloud.balancer(&lb.owner).is_err());
}

/// The annotation that the peer wrote names it, although the status says nothing.
#[tokio::test]
async fn load_balancer_that_the_annotation_names_is_adopted_and_deleted_half_way() {
    requires!(OpenStack);
    let cloud = Cloud::shared("adopt-id").await.unwrap();
    let adopting =
        steerage_provider_openstack::Config { adopt: Some("prod".to_owned()), ..cloud.config.clone() };
    let provider = cloud.provider(adopting).unwrap();
    let lb = web(&cloud, "adopt-id");
    let (balancer, address) = made_by_peer(&cloud, &lb, &[80]);
    let (reason, message) = refused(&provider, &lb).await;
    assert!(
        reason == "AdoptionRefused" && message.contains("another cluster may have the same name"),
        "{message}"
    );
    let lb = annotated(lb, "loadbalancer.openstack.org/load-balancer-id", &balancer);
    let outcome = provider.apply(&lb, Compare::InPlace).await.unwrap();
    assert!(matches!(outcome.progress, Progress::Again(_)));
    let restarted = cloud.fresh().await.unwrap();
    assert_eq!(restarted.owned().await.unwrap(), std::slice::from_ref(&lb.owner));
    converge_deleted(&restarted, &lb.owner).await.unwrap();
    assert!(cloud.floating_ips(&format!("floating_ip_address={address}")).unwrap().is_empty());
    assert_eq!(restarted.owned().await.unwrap(), []);
    // The annotation stays, and names nothing any more: a new load balancer would have another address.
    let (reason, message) = refused(&restarted, &lb).await;
    assert!(reason == "AdoptionRefused" && message.contains("does not exist"), "{message}");
    converge_remembered(&restarted, &web(&cloud, "adopt-id")).await.unwrap();
}
