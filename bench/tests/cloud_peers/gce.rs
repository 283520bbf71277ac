// SPDX-License-Identifier: Apache-2.0
//! Google's glbc and Steerage: "Migration from Google's controllers" in docs/providers/gce.md.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use steerage_bench::clouds::handover::{Handover, until};
use steerage_requirements::requires;

use super::{LATER, PATIENCE, Resources, controller, gap, leaves_alone, published};

const CLASS: &str = "steerage.dev/gce";
const ADDRESSES: &str = "networking.gke.io/load-balancer-ip-addresses=web";

fn region(bed: &Handover, kind: &str) -> String {
    format!("regions/{}/{kind}", bed.stand_in().setting("region"))
}

/// The reserved address of the guide.
fn reserved(bed: &Handover) -> Result<Value> {
    bed.stand_in().compute("GET", &region(bed, "addresses/web"), None)
}

fn is_used(bed: &Handover) -> Result<bool> {
    Ok(reserved(bed)?["status"] == "IN_USE")
}

/// The forwarding rules with an address, and the backend services that they lead to.
fn rules(bed: &Handover, address: &str) -> Result<Value> {
    let listed = bed.stand_in().compute("GET", &region(bed, "forwardingRules"), None)?;
    let all = listed["items"].as_array().into_iter().flatten();
    Ok(all.filter(|rule| rule["IPAddress"] == address).cloned().collect())
}

/// Waits until the one rule with the address leads to the machine with the endpoints, and a firewall rule admits to it. Its description,
/// which says whose it is.
fn description(bed: &Handover, address: &str) -> Result<String> {
    let mut last = None;
    let found = until("a complete load balancer", PATIENCE, || {
        let found = described(bed, address);
        last = found.as_ref().err().map(|error| format!("{error:#}"));
        Ok(found.ok())
    });
    found.with_context(|| last.unwrap_or_default())
}

fn described(bed: &Handover, address: &str) -> Result<String> {
    let rules = rules(bed, address)?;
    ensure!(rules.as_array().map(Vec::len) == Some(1), "{rules:#}");
    let rule = &rules[0];
    ensure!(rule["ports"] == json!(["80"]) || rule["portRange"] == "80-80", "{rule:#}");
    let last = |value: &Value| value.as_str().and_then(|text| text.rsplit('/').next()).map(str::to_owned);
    let service = last(&rule["backendService"]).context("no backend service")?;
    let service = bed.stand_in().compute("GET", &region(bed, &format!("backendServices/{service}")), None)?;
    let mut machines = Vec::new();
    for backend in service["backends"].as_array().into_iter().flatten() {
        let path = backend["group"].as_str().and_then(|group| group.split_once("/zones/"));
        let path = format!("zones/{}/listNetworkEndpoints", path.context("no group")?.1);
        let listed = bed.stand_in().compute("POST", &path, Some(&json!({})))?;
        let items = listed["items"].as_array().into_iter().flatten();
        machines.extend(items.filter_map(|item| last(&item["networkEndpoint"]["instance"])));
    }
    ensure!(machines == [bed.machine()], "{machines:?}");
    let listed = bed.stand_in().compute("GET", "global/firewalls", None)?;
    let mut firewalls = listed["items"].as_array().into_iter().flatten();
    let admits = |rule: &Value| {
        let to = rule["destinationRanges"].as_array();
        to.is_some_and(|to| to.iter().any(|to| to == address || to == &json!(format!("{address}/32"))))
    };
    ensure!(firewalls.any(admits), "no firewall rule admits to {address}: {listed:#}");
    Ok(rule["description"].to_string())
}

/// What a user has beside Services, which stays.
fn plant(bed: &Handover) -> Result<Resources> {
    let other = json!({"name": "other", "description": "of somebody else"});
    bed.stand_in().compute("POST", &region(bed, "addresses"), Some(&other))?;
    let firewall = json!({
        "name": "ssh", "network": "global/networks/default", "sourceRanges": ["192.0.2.0/24"],
        "allowed": [{"IPProtocol": "tcp", "ports": ["22"]}],
    });
    bed.stand_in().compute("POST", "global/firewalls", Some(&firewall))?;
    bed.stand_in().snapshot()
}

/// Step 1: `gcloud compute addresses create web --region=REGION --addresses=ADDRESS`. While glbc works on the load balancer, it reserves the
/// address itself.
fn reserve(bed: &Handover, address: &str) -> Result<()> {
    let body = json!({"name": "web", "address": address});
    until("the reservation of an address", PATIENCE, || {
        match bed.stand_in().compute("POST", &region(bed, "addresses"), Some(&body)) {
            Err(error) if error.to_string().contains("already reserved") => Ok(None),
            other => other.map(Some),
        }
    })
    .map(drop)
}

/// Waits until nothing is left of these resources.
fn gone(bed: &Handover, resources: &Resources) -> Result<()> {
    let gone = until("the end of all resources of a controller", LATER, || {
        let all = bed.stand_in().snapshot()?;
        Ok((!all.keys().any(|path| resources.contains_key(path))).then_some(()))
    });
    gone.with_context(|| {
        let all = bed.stand_in().snapshot().unwrap_or_default();
        format!("left: {:?}", all.keys().filter(|path| resources.contains_key(*path)).collect::<Vec<_>>())
    })
}

/// That these resources are as they were, whoever uses them.
fn ensure_kept<'a>(bed: &Handover, resources: impl Iterator<Item = (&'a String, &'a Value)>) -> Result<()> {
    let own = |resource: &Value| {
        let mut resource = resource.clone();
        for field in ["status", "users"] {
            resource.as_object_mut().map(|fields| fields.remove(field));
        }
        resource
    };
    let all = bed.stand_in().snapshot()?;
    for (path, resource) in resources {
        assert_eq!(all.get(path).map(own), Some(own(resource)), "{path}");
    }
    Ok(())
}

/// What is in one snapshot and not in another.
fn without(all: Resources, others: &Resources) -> Resources {
    all.into_iter().filter(|(path, _)| !others.contains_key(path)).collect()
}

#[test]
fn address_moves_from_cloud_peer_and_back() -> Result<()> {
    requires!(Ok(()); KubeApiserver, Clouds, Program("setpriv"), Program("kubectl"), Program("glbc"));
    let mut bed = Handover::gce(&controller())?;
    let users = plant(&bed)?;
    let old = bed.create(1, &bed.annotations(), &Value::Null)?;
    let address = bed.address(&old, PATIENCE)?;
    let by_peer = description(&bed, &address)?;
    let theirs = without(bed.stand_in().snapshot()?, &users);

    reserve(&bed, &address)?;
    let mut reservation = bed.stand_in().snapshot()?;
    reservation.retain(|path, _| path.ends_with("/addresses/web"));
    assert_eq!(reservation.len(), 1);

    // Step 2: a second Service with an address of its own.
    let new = bed.create(2, &json!({}), &json!({"loadBalancerClass": CLASS}))?;
    let own = bed.address(&new, PATIENCE)?;
    assert_ne!(own, address);
    description(&bed, &own)?;
    assert_eq!(description(&bed, &address)?, by_peer);

    // Steps 3 and 4: glbc removes its load balancer, and the new one gets the address as soon as it is free.
    bed.patch(&old, &json!({"spec": {"type": "ClusterIP"}}))?;
    let annotate = || bed.kubectl(&["annotate", "service", &new, ADDRESSES]).map(drop);
    gap(&bed, || is_used(&bed), || is_used(&bed), annotate)?;
    published(&bed, &new, &address)?;
    let by_ours = description(&bed, &address)?;
    assert_ne!(by_ours, by_peer);
    until("the release of the first address", PATIENCE, || {
        Ok((rules(&bed, &own)? == json!([])).then_some(()))
    })?;
    bed.let_go(&old, PATIENCE)?;

    // Nothing of glbc's is left, and nothing of the user's is lost.
    gone(&bed, &theirs)?;
    ensure_kept(&bed, users.iter().chain(&reservation))?;
    leaves_alone(&mut bed, |bed| {
        Ok(json!([reserved(bed)?, rules(bed, &address)?, bed.address(&new, PATIENCE)?]))
    })?;

    // The way back.
    let ours = without(without(bed.stand_in().snapshot()?, &users), &reservation);
    bed.kubectl(&["delete", "service", &new, "--wait=false"])?;
    let back = json!({"spec": {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "loadBalancerIP": address}});
    gap(&bed, || is_used(&bed), || is_used(&bed), || bed.patch(&old, &back))?;
    assert_eq!(bed.address(&old, PATIENCE)?, address);
    gone(&bed, &ours)?;
    assert_eq!(description(&bed, &address)?, by_peer);
    ensure_kept(&bed, users.iter().chain(&reservation))?;
    bed.end()
}

/// The Service that requests the address too early is refused, and takes it when it requests it anew.
#[test]
fn address_of_cloud_peer_is_refused_until_it_is_free() -> Result<()> {
    requires!(Ok(()); KubeApiserver, Clouds, Program("setpriv"), Program("kubectl"), Program("glbc"));
    let bed = Handover::gce(&controller())?;
    let old = bed.create(1, &bed.annotations(), &Value::Null)?;
    let address = bed.address(&old, PATIENCE)?;
    reserve(&bed, &address)?;
    let (key, name) = ADDRESSES.split_once('=').context("no value")?;
    let new = bed.create(2, &json!({key: name}), &json!({"loadBalancerClass": CLASS}))?;
    let condition = "jsonpath={.status.conditions[?(@.type==\"steerage.dev/Programmed\")].reason}";
    until("the refusal", PATIENCE, || {
        let reason = bed.kubectl(&["get", "service", &new, "-o", condition])?;
        Ok((reason == "AddressNotAvailable").then_some(()))
    })?;
    bed.patch(&old, &json!({"spec": {"type": "ClusterIP"}}))?;
    let annotate_anew = || {
        bed.kubectl(&["annotate", "service", &new, &format!("{key}-")])?;
        bed.address(&new, PATIENCE)?;
        bed.kubectl(&["annotate", "service", &new, ADDRESSES]).map(drop)
    };
    gap(&bed, || is_used(&bed), || is_used(&bed), annotate_anew)?;
    published(&bed, &new, &address)?;
    description(&bed, &address)?;
    bed.end()
}

/// One and the same Service: its class can be set while its type changes.
#[test]
fn service_of_cloud_peer_keeps_name_and_cluster_ip() -> Result<()> {
    requires!(Ok(()); KubeApiserver, Clouds, Program("setpriv"), Program("kubectl"), Program("glbc"));
    let mut bed = Handover::gce(&controller())?;
    let web = bed.create(1, &bed.annotations(), &Value::Null)?;
    let address = bed.address(&web, PATIENCE)?;
    let by_peer = description(&bed, &address)?;
    let theirs = bed.stand_in().snapshot()?;
    let cluster_ip = bed.kubectl(&["get", "service", &web, "-o", "jsonpath={.spec.clusterIP}"])?;
    reserve(&bed, &address)?;

    bed.patch(&web, &json!({"spec": {"type": "ClusterIP"}}))?;
    let (key, name) = ADDRESSES.split_once('=').context("no value")?;
    let taken = json!({
        "metadata": {"annotations": {key: name}},
        "spec": {"type": "LoadBalancer", "loadBalancerClass": CLASS, "externalTrafficPolicy": "Local"},
    });
    let take = || {
        bed.let_go(&web, PATIENCE)?;
        bed.patch(&web, &taken)
    };
    gap(&bed, || is_used(&bed), || is_used(&bed), take)?;
    assert_eq!(bed.address(&web, PATIENCE)?, address);
    assert_ne!(description(&bed, &address)?, by_peer);
    assert_eq!(bed.kubectl(&["get", "service", &web, "-o", "jsonpath={.spec.clusterIP}"])?, cluster_ip);
    gone(&bed, &theirs)?;
    leaves_alone(&mut bed, |bed| {
        Ok(json!([reserved(bed)?, rules(bed, &address)?, bed.address(&web, PATIENCE)?]))
    })?;
    bed.end()
}
