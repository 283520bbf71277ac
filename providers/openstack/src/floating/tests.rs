// SPDX-License-Identifier: Apache-2.0

use steerage_model::Protocol;
use steerage_provider_api::{Compare, Provider as _};

use super::*;
use crate::desired::tests::planned;
use crate::scripted::{Scripted, deleted, settle};

const WEB: (Protocol, u16, u16) = (Protocol::Tcp, 80, 30080);

fn web() -> LoadBalancer {
    planned(&[WEB], &[1])
}

fn requesting(address: IpAddr) -> LoadBalancer {
    LoadBalancer { requested_addresses: vec![address], published: vec![address], ..web() }
}

async fn served(provider: &OpenStack, lb: &LoadBalancer) -> IpAddr {
    settle(provider, lb).await.unwrap().ingress[0].ip.unwrap()
}

#[tokio::test(start_paused = true)]
async fn own_address_that_its_service_requests_becomes_the_users() {
    let cloud = Scripted::new();
    let provider = cloud.provider();
    let address = served(&provider, &web()).await;
    let pinned = requesting(address);
    assert_eq!(provider.preview(&pinned).await.unwrap(), Some(Vec::new()));
    assert_eq!(served(&provider, &pinned).await, address);
    assert_eq!(cloud.writes().last().unwrap(), "PUT floatingips");
    assert_eq!(served(&cloud.provider(), &pinned).await, address);
    assert!(cloud.writes().is_empty());
    deleted(&provider, &pinned.owner).await;
    let kept = cloud.all("floatingips");
    assert_eq!((kept.len(), &kept[0]["floating_ip_address"]), (1, &json!(address)));
    assert!(cloud.all("loadbalancers").is_empty());
}

#[tokio::test(start_paused = true)]
async fn address_is_steerages_again_when_its_service_requests_it_no_more() {
    let cloud = Scripted::new();
    let provider = cloud.provider();
    let address = served(&provider, &web()).await;
    for is_restarted in [false, true, false] {
        let provider = if is_restarted { &cloud.provider() } else { &provider };
        served(provider, &requesting(address)).await;
        let published = LoadBalancer { published: vec![address], ..web() };
        assert_eq!(served(provider, &published).await, address);
        assert_eq!(cloud.all("floatingips").len(), 1, "one more each time");
    }
    deleted(&provider, &web().owner).await;
    assert!(cloud.all("floatingips").is_empty());
}

fn other(namespace: &str, name: &str) -> LoadBalancer {
    let owner = Owner { service: Key::new(namespace, name), uid: format!("uid-of-{name}") };
    LoadBalancer { owner, ..web() }
}

fn users(cloud: &Scripted, description: &str) -> IpAddr {
    cloud.add("floatingips", &json!({ "floating_network_id": "net", "description": description }));
    let all = cloud.all("floatingips");
    all[all.len() - 1]["floating_ip_address"].as_str().unwrap().parse().unwrap()
}

#[tokio::test(start_paused = true)]
async fn floating_ip_that_is_reserved_for_a_namespace_goes_to_no_other_one() {
    for description in
        ["Requested by the Kubernetes Service shop/old", "Reserved for the Kubernetes namespace shop (db)"]
    {
        let cloud = Scripted::new();
        let provider = cloud.provider();
        let address = users(&cloud, description);
        let thief = LoadBalancer { requested_addresses: vec![address], ..other("evil", "thief") };
        let error = settle(&provider, &thief).await.unwrap_err();
        assert_eq!(error.reason(), "AddressNotAvailable");
        assert!(!error.to_string().contains("shop"), "{error}");
        assert!(cloud.all("loadbalancers").is_empty(), "for nothing");
        assert_eq!(served(&provider, &requesting(address)).await, address);
    }
}

/// Without the address, the command would create another one; without a network, none.
#[tokio::test(start_paused = true)]
async fn refusal_of_an_unknown_address_has_the_whole_command() {
    let cloud = Scripted::new();
    let error = settle(&cloud.provider(), &requesting("203.0.113.9".parse().unwrap())).await.unwrap_err();
    assert_eq!(error.reason(), "AddressNotAvailable");
    let command = "`openstack floating ip create --floating-ip-address 203.0.113.9 NETWORK`";
    assert!(error.to_string().contains(command), "{error}");
    assert!(cloud.all("loadbalancers").is_empty(), "for nothing");
}

#[tokio::test(start_paused = true)]
async fn refusal_names_who_has_the_address() {
    let cloud = Scripted::new();
    let provider = cloud.provider();
    let address = users(&cloud, "mine");
    let holder = LoadBalancer { requested_addresses: vec![address], ..other("blog", "x") };
    served(&provider, &holder).await;
    let id = crate::scripted::ids(&cloud).remove(0);
    let told = async |lb: LoadBalancer| {
        let lb = LoadBalancer { requested_addresses: vec![address], ..lb };
        let error = settle(&provider, &lb).await.unwrap_err();
        assert!(error.reason() == "AddressNotAvailable" && error.to_string().contains(&id), "{error}");
        assert!(error.to_string().contains("remove the request from that Service"), "{error}");
        error.to_string().contains("blog/x")
    };
    assert!(told(other("blog", "y")).await);
    // A tenant learns nothing of others, unless they have what is the tenant's.
    assert!(!told(other("shop", "z")).await);
    assert!(told(requesting(address)).await, "it published that");
    let reserved = json!({ "description": "Reserved for the Kubernetes namespace shop" });
    cloud.set("floatingips", ("floating_ip_address", &address.to_string()), &reserved);
    assert!(told(other("shop", "z")).await);
    assert_eq!(crate::scripted::ids(&cloud), [id.as_str()], "one more for nothing");
    // It goes on where it is.
    assert_eq!(served(&provider, &holder).await, address);
    assert_eq!(served(&cloud.provider(), &holder).await, address);
}

#[tokio::test(start_paused = true)]
async fn of_two_services_that_request_an_address_the_first_one_has_it() {
    let cloud = Scripted::new();
    let provider = cloud.provider();
    let both = [other("blog", "x"), other("shop", "y")];
    for lb in &both {
        served(&provider, lb).await;
    }
    let address = users(&cloud, "");
    let [one, two] = both.map(|lb| LoadBalancer { requested_addresses: vec![address], ..lb });
    let apply = async |lb: &LoadBalancer| settle(&provider, lb).await.map_err(|error| error.reason());
    let results = tokio::join!(apply(&one), apply(&two));
    let results = [results.0.map(drop), results.1.map(drop)];
    assert!(results.contains(&Ok(())) && results.contains(&Err("ProviderConflict")), "{results:?}");
    let all = cloud.all("floatingips");
    let port = all.iter().find(|ip| ip["floating_ip_address"] == json!(address)).unwrap()["port_id"].clone();
    let loser = if results[0].is_err() { &one } else { &two };
    assert_eq!(settle(&provider, loser).await.unwrap_err().reason(), "AddressNotAvailable");
    let all = cloud.all("floatingips");
    assert_eq!(all.iter().find(|ip| ip["port_id"] == port).unwrap()["floating_ip_address"], json!(address));
}

/// The old address serves until the new one does.
#[tokio::test(start_paused = true)]
async fn failed_replacement_leaves_the_old_address() {
    let cloud = Scripted::new();
    let provider = cloud.provider();
    let address = served(&provider, &web()).await;
    let mut moved = LoadBalancer { published: vec![address], ..web() };
    moved.annotations.insert(crate::annotations::FLOATING_NETWORK.to_owned(), "another".to_owned());
    cloud.writes();
    cloud.fail("POST floatingips", 409, "no address is left");
    settle(&provider, &moved).await.unwrap_err();
    let port = || {
        let all = cloud.all("floatingips");
        all.into_iter().find(|ip| ip["floating_ip_address"] == json!(address)).unwrap()["port_id"].clone()
    };
    assert!(port().is_string(), "it was detached before there was another one");
    // The first write of the next try succeeds: the old one is detached. The second one fails.
    cloud.writes();
    let made = cloud.add(
        "floatingips",
        &json!({
            "floating_network_id": "another",
            "description": marks::floating(&provider.config.cluster, &moved.owner),
        }),
    );
    cloud.break_connecting(&made);
    settle(&provider, &moved).await.unwrap_err();
    assert!(port().is_string(), "it is back");
    assert_eq!(cloud.writes(), ["PUT floatingips"; 3]);
    cloud.mend();
    assert_ne!(served(&provider, &moved).await, address);
    assert_eq!(cloud.writes(), ["PUT floatingips", "PUT floatingips", "DELETE floatingips"]);
}

/// Somebody attached it, and the Service publishes it: as after an adoption.
#[tokio::test(start_paused = true)]
async fn users_floating_ip_that_the_service_publishes_stays_the_users() {
    let cloud = Scripted::new();
    let provider = cloud.provider();
    let mut internal = web();
    internal.annotations.insert(crate::annotations::INTERNAL.to_owned(), "true".to_owned());
    settle(&provider, &internal).await.unwrap();
    let port = cloud.all("loadbalancers")[0]["vip_port_id"].clone();
    cloud
        .add("floatingips", &json!({ "floating_network_id": "net", "port_id": port, "description": "mine" }));
    let address: IpAddr =
        cloud.all("floatingips")[0]["floating_ip_address"].as_str().unwrap().parse().unwrap();
    let external = LoadBalancer { published: vec![address], ..web() };
    for _ in 0..3 {
        provider.apply(&external, Compare::InPlace).await.unwrap();
        assert_eq!(served(&provider, &external).await, address);
        assert_eq!(cloud.all("floatingips")[0]["description"], "mine");
    }
    deleted(&provider, &external.owner).await;
    assert_eq!(cloud.all("floatingips").len(), 1);
}

/// As after an adoption that did not come to its end.
#[tokio::test(start_paused = true)]
async fn published_floating_ip_moves_to_the_load_balancer_that_replaces_another() {
    let peers = "Floating IP for Kubernetes external service shop/web from cluster prod";
    for (description, kept, state) in
        [("mine", "mine", "ERROR"), (peers, "", "ERROR"), ("mine", "mine", "gone")]
    {
        let cloud = Scripted::new();
        let provider = cloud.provider();
        let address = served(&provider, &web()).await;
        let lb = LoadBalancer { published: vec![address], ..web() };
        let text = address.to_string();
        let described = json!({ "description": description });
        cloud.set("floatingips", ("floating_ip_address", &text), &described);
        // Seen by this process as the user's.
        let provider = cloud.provider();
        provider.apply(&lb, Compare::InPlace).await.unwrap();
        assert_eq!(served(&provider, &lb).await, address);
        let old = crate::scripted::ids(&cloud).remove(0);
        if state == "gone" {
            cloud.remove("loadbalancers", &old);
        } else {
            let broken = json!({ "provisioning_status": state, "operating_status": "OFFLINE" });
            cloud.set("loadbalancers", ("id", &old), &broken);
        }
        provider.apply(&lb, Compare::InPlace).await.unwrap();
        assert_eq!(served(&provider, &lb).await, address);
        let all = cloud.all("floatingips");
        assert_eq!(all.len(), 1, "{all:?}");
        let mark = marks::floating(&provider.config.cluster, &lb.owner);
        assert_eq!(all[0]["description"], json!(if kept.is_empty() { &*mark } else { kept }));
        assert!(crate::scripted::ids(&cloud).len() == 1 && crate::scripted::ids(&cloud)[0] != old);
    }
}

/// Its load balancer was deleted by somebody, and the Service had the address before it was reserved for another namespace.
#[tokio::test(start_paused = true)]
async fn published_floating_ip_stays_its_services_whatever_is_reserved() {
    let cloud = Scripted::new();
    let address = users(&cloud, "Reserved for the Kubernetes namespace other");
    assert_eq!(served(&cloud.provider(), &requesting(address)).await, address);
    let new = LoadBalancer {
        published: Vec::new(),
        ..requesting(users(&cloud, "Reserved for the Kubernetes namespace other"))
    };
    assert_eq!(settle(&cloud.provider(), &new).await.unwrap_err().reason(), "AddressNotAvailable");
}

/// The user kept it when the peer was removed. That somebody asked for it decides, not what its description says.
#[tokio::test(start_paused = true)]
async fn requested_floating_ip_with_the_peers_description_stays_the_users() {
    let cloud = Scripted::new();
    let provider = cloud.provider();
    let peers = "Floating IP for Kubernetes external service shop/web from cluster prod";
    let address = users(&cloud, peers);
    assert_eq!(served(&provider, &requesting(address)).await, address);
    assert_eq!(cloud.all("floatingips")[0]["description"], peers);
    deleted(&provider, &requesting(address).owner).await;
    assert_eq!(cloud.all("floatingips").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn lost_flag_keeps_the_address_and_says_so() {
    let cloud = Scripted::new();
    let address = served(&cloud.provider(), &web()).await;
    cloud.writes();
    let provider = cloud.provider_with(|config| config.floating_network = None);
    for compare in [Compare::InPlace, Compare::Remembered] {
        let outcome = provider.apply(&web(), compare).await.unwrap();
        assert_eq!(outcome.ingress[0].ip, Some(address));
        let (reason, message) = outcome.incomplete.unwrap();
        assert!(reason == "NoFloatingNetwork" && message.contains(&address.to_string()), "{message}");
    }
    assert!(cloud.writes().is_empty());
}

#[tokio::test(start_paused = true)]
async fn others_floating_ips_are_neither_taken_nor_detached() {
    let cloud = Scripted::new();
    let provider = cloud.provider();
    let other = Owner { uid: "u2".to_owned(), ..web().owner };
    let elsewhere = steerage_provider_cloud::ClusterId { name: "x".to_owned(), uid: "c2".to_owned() };
    let cluster = &provider.config.cluster;
    for (description, port) in [
        (marks::floating(cluster, &other), None),
        (marks::floating(&elsewhere, &web().owner), None),
        (marks::shared_floating(cluster, "web"), None),
        (marks::shared_floating(cluster, "web"), Some("port-of-the-shared-one")),
    ] {
        let made = json!({ "floating_network_id": "net", "description": description, "port_id": port });
        let id = cloud.add("floatingips", &made);
        let made = cloud.all("floatingips").into_iter().find(|ip| ip["id"] == json!(id)).unwrap();
        let address = made["floating_ip_address"].as_str().unwrap().parse().unwrap();
        let lb = LoadBalancer { published: Vec::new(), ..requesting(address) };
        let error = settle(&provider, &lb).await.unwrap_err();
        assert_eq!(error.reason(), "AddressNotAvailable");
        // A tenant learns nothing of others.
        let told = error.to_string();
        assert!(told.contains("for another Service.") && !told.contains("shop/"), "{told}");
    }
    assert!(cloud.all("loadbalancers").is_empty(), "for nothing");
    // Somebody else's is on the port of the VIP.
    let mut internal = web();
    internal.annotations.insert(crate::annotations::INTERNAL.to_owned(), "true".to_owned());
    settle(&provider, &internal).await.unwrap();
    let port = cloud.all("loadbalancers")[0]["vip_port_id"].clone();
    cloud.add(
        "floatingips",
        &json!({ "floating_network_id": "net", "description": "theirs", "port_id": port }),
    );
    let error = settle(&provider, &web()).await.unwrap_err();
    assert_eq!(error.reason(), "AddressNotAvailable");
    assert_eq!(cloud.all("floatingips").last().unwrap()["port_id"], port);
}

#[tokio::test(start_paused = true)]
async fn address_without_its_description_stays() {
    for is_remembered in [true, false] {
        let cloud = Scripted::new();
        let provider = cloud.provider();
        let address = served(&provider, &web()).await;
        cloud.set(
            "floatingips",
            ("floating_ip_address", &address.to_string()),
            &json!({ "description": "" }),
        );
        cloud.writes();
        let provider = if is_remembered { provider } else { cloud.provider() };
        let lb = LoadBalancer { published: vec![address], ..web() };
        let outcome = provider.apply(&lb, Compare::InPlace).await.unwrap();
        assert_eq!(outcome.ingress[0].ip, Some(address));
        assert_eq!(cloud.all("floatingips").len(), 1);
        // After a restart nobody knows whether it was the user's, whose is never deleted.
        deleted(&provider, &lb.owner).await;
        assert_eq!(cloud.all("floatingips").len(), usize::from(!is_remembered));
    }
}

#[tokio::test(start_paused = true)]
async fn cloud_without_floating_ips_has_internal_load_balancers() {
    let cloud = Scripted::new();
    let provider = cloud.provider_with(|config| config.floating_network = None);
    cloud.fail("GET floatingips", 404, "The resource could not be found.");
    settle(&provider, &web()).await.unwrap();
    // With a network of floating IPs, something is wrong.
    cloud.fail("GET floatingips", 404, "The resource could not be found.");
    let error = settle(&cloud.provider(), &web()).await.unwrap_err();
    assert_eq!(error.reason(), "ProviderUnavailable");
}
