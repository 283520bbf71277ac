// SPDX-License-Identifier: Apache-2.0
//! cloud-provider-azure and Steerage: "Migration from cloud-provider-azure" in docs/providers/azure.md.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use steerage_bench::clouds::handover::{Handover, until};
use steerage_requirements::requires;

use super::{LATER, PATIENCE, controller, gap, leaves_alone, published};

const CLASS: &str = "steerage.dev/azure";
const NAME: &str = "service.beta.kubernetes.io/azure-pip-name";
/// For so long cloud-provider-azure may use an old list of public IPs: its `publicIPCacheTTLInSeconds` is 120s by default.
const CACHED: Duration = Duration::from_secs(130);
/// A public IP of the user, and a rule in the security group.
const USERS: &str = "publicIPAddresses/other";

/// The name of the public IP with this address.
fn public_ip(bed: &Handover, address: &str) -> Result<String> {
    for path in bed.stand_in().snapshot()?.keys().filter(|path| path.starts_with("publicIPAddresses/")) {
        if bed.stand_in().network("GET", path, None)?["properties"]["ipAddress"] == address {
            return Ok(path.trim_start_matches("publicIPAddresses/").to_owned());
        }
    }
    anyhow::bail!("no public IP has {address}")
}

fn is_used(bed: &Handover, name: &str) -> Result<bool> {
    let ip = bed.stand_in().network("GET", &format!("publicIPAddresses/{name}"), None)?;
    Ok(ip["properties"].get("ipConfiguration").is_some())
}

/// `az network public-ip update --remove tags.k8s-azure-service --remove tags.k8s-azure-cluster-name`.
fn remove_tags(bed: &Handover, name: &str) -> Result<()> {
    let path = format!("publicIPAddresses/{name}");
    let mut ip = bed.stand_in().network("GET", &path, None)?;
    let tags = ip["tags"].as_object_mut().context("no tags")?;
    for tag in ["k8s-azure-service", "k8s-azure-cluster-name"] {
        ensure!(tags.remove(tag).is_some(), "no tag {tag}");
    }
    bed.stand_in().network("PUT", &path, Some(&ip)).map(drop)
}

/// The resource lock of the guide: Azure refuses the deletion.
fn lock(bed: &Handover, name: &str) -> Result<()> {
    let message =
        format!("The scope '{name}' cannot perform delete operation because following scope(s) are locked.");
    bed.stand_in().inject(&json!({
        "call": "publicIPAddresses.delete", "path": name, "times": 0, "status": 409, "reason": "ScopeLocked",
        "message": message,
    }))
}

fn parts<'a>(resource: &'a Value, kind: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    resource["properties"][kind].as_array().into_iter().flatten()
}

/// Waits for a load balancer that serves the public IP on port 80 by a pool with the machine of the endpoints. Its name.
fn balancer(bed: &Handover, name: &str) -> Result<String> {
    let mut last = None;
    let found = until("a complete load balancer", PATIENCE, || {
        let found = serving(bed, name);
        last = found.as_ref().err().map(|error| format!("{error:#}"));
        Ok(found.ok())
    });
    found.with_context(|| last.unwrap_or_default())
}

fn serving(bed: &Handover, name: &str) -> Result<String> {
    let ip = bed.stand_in().network("GET", &format!("publicIPAddresses/{name}"), None)?;
    let user = ip["properties"]["ipConfiguration"]["id"].as_str().context("nothing has the public IP")?;
    let (balancer, frontend) = user.split_once("/frontendIPConfigurations/").context("no frontend")?;
    let balancer = balancer.rsplit('/').next().context("no name")?;
    let found = bed.stand_in().network("GET", &format!("loadBalancers/{balancer}"), None)?;
    let is_of = |value: &Value, name: &str| value["id"].as_str().is_some_and(|id| id.ends_with(name));
    let rule = parts(&found, "loadBalancingRules")
        .find(|rule| is_of(&rule["properties"]["frontendIPConfiguration"], &format!("/{frontend}")))
        .with_context(|| format!("no rule of {frontend}: {found:#}"))?;
    ensure!(rule["properties"]["frontendPort"] == 80, "{rule:#}");
    let pool = rule["properties"]["backendAddressPool"]["id"].as_str().context("no pool")?;
    let pool = parts(&found, "backendAddressPools").find(|of| of["id"] == pool).context("no such pool")?;
    let mut addresses = parts(pool, "loadBalancerBackendAddresses");
    ensure!(addresses.any(|of| of["properties"]["ipAddress"] == bed.machine()), "{pool:#}");
    Ok(balancer.to_owned())
}

/// Names of the security group's rules that admit to an address.
fn admitting(bed: &Handover, address: &str) -> Result<Vec<String>> {
    let group = bed.stand_in().network("GET", "networkSecurityGroups/nodes", None)?;
    let names = parts(&group, "securityRules").filter(|rule| rule.to_string().contains(address));
    Ok(names.filter_map(|rule| rule["name"].as_str()).map(str::to_owned).collect())
}

/// Whether the load balancer of the public IP is complete, its change is, and the security group admits by another rule than these.
fn serves(bed: &Handover, name: &str, address: &str, not_by: &[String]) -> Result<bool> {
    Ok(serving(bed, name).is_ok() && admitting(bed, address)?.iter().any(|rule| !not_by.contains(rule)))
}

/// What a user has beside Services, which stays.
fn plant(bed: &Handover) -> Result<Value> {
    let location = bed.stand_in().setting("location");
    let ip = json!({
        "location": location, "sku": {"name": "Standard"}, "tags": {"of": "somebody else"},
        "properties": {"publicIPAllocationMethod": "Static"},
    });
    bed.stand_in().network("PUT", USERS, Some(&ip))?;
    let rule = json!({"properties": {
        "priority": 200, "direction": "Inbound", "access": "Allow", "protocol": "Tcp",
        "sourcePortRange": "*", "sourceAddressPrefix": "192.0.2.0/24", "destinationAddressPrefix": "*",
        "destinationPortRange": "22",
    }, "name": "ssh"});
    let path = "networkSecurityGroups/nodes";
    let mut group = bed.stand_in().network("GET", path, None)?;
    group["properties"]["securityRules"].as_array_mut().context("no rules")?.push(rule);
    bed.stand_in().network("PUT", path, Some(&group))?;
    users(bed)
}

/// What a user has, without versions.
fn users(bed: &Handover) -> Result<Value> {
    let all = bed.stand_in().snapshot()?;
    let group = bed.stand_in().network("GET", "networkSecurityGroups/nodes", None)?;
    let rule = parts(&group, "securityRules").find(|rule| rule["name"] == "ssh").cloned();
    let rule = rule.map(|rule| rule["properties"].clone()).context("the user's rule is gone")?;
    Ok(json!([
        all.get(USERS).context("the user's public IP is gone")?,
        rule["priority"],
        rule["destinationPortRange"]
    ]))
}

/// The Service of the vendor's controller, its address, and the public IP's name, without the tags that say whose it is.
fn detached(bed: &Handover) -> Result<(String, String, String)> {
    let old = bed.create(1, &bed.annotations(), &Value::Null)?;
    let address = bed.address(&old, PATIENCE)?;
    let name = public_ip(bed, &address)?;
    remove_tags(bed, &name)?;
    Ok((old, address, name))
}

/// From the second Service on: with a lock, and after the wait without one.
fn move_and_return(bed: &mut Handover, old: &str, address: &str, name: &str) -> Result<()> {
    let before = users(bed)?;
    let theirs = balancer(bed, name)?;
    let their_rules = admitting(bed, address)?;
    assert!(!their_rules.is_empty());
    // A second Service with an address of its own.
    let new = bed.create(2, &json!({}), &json!({"loadBalancerClass": CLASS}))?;
    let own = bed.address(&new, PATIENCE)?;
    assert_ne!(own, address);
    let own_name = public_ip(bed, &own)?;
    let ours = balancer(bed, &own_name)?;
    assert_ne!(ours, theirs);

    // cloud-provider-azure removes its frontend, and the new Service gets the public IP as soon as it is free.
    bed.patch(old, &json!({"spec": {"type": "ClusterIP"}}))?;
    let annotation = format!("{NAME}={name}");
    gap(
        bed,
        || is_used(bed, name),
        || serves(bed, name, address, &their_rules),
        || bed.kubectl(&["annotate", "service", &new, &annotation]).map(drop),
    )?;
    published(bed, &new, address)?;
    assert_eq!(balancer(bed, name)?, ours);
    until("the end of the first public IP", PATIENCE, || {
        let all = bed.stand_in().snapshot()?;
        Ok((!all.contains_key(&format!("publicIPAddresses/{own_name}"))).then_some(()))
    })?;
    bed.let_go(old, LATER)?;
    bed.stand_in().clear_faults()?;

    // Nothing of cloud-provider-azure's is left, and nothing of the user's is lost.
    let all = bed.stand_in().snapshot()?;
    assert!(!all.contains_key(&format!("loadBalancers/{theirs}")), "{:?}", all.keys());
    let rules = admitting(bed, address)?;
    assert!(!rules.is_empty() && rules.iter().all(|rule| !their_rules.contains(rule)), "{rules:?}");
    assert_eq!(users(bed)?, before);
    leaves_alone(bed, |bed| {
        let ip = bed.stand_in().network("GET", &format!("publicIPAddresses/{name}"), None)?;
        let is_ours = serving(bed, name)? == ours;
        Ok(json!([ip["tags"], ip["properties"]["ipAddress"], is_ours, bed.address(&new, PATIENCE)?]))
    })?;

    // The way back.
    bed.kubectl(&["delete", "service", &new, "--wait=false"])?;
    let back = json!({
        "metadata": {"annotations": {NAME: name}},
        "spec": {"type": "LoadBalancer", "externalTrafficPolicy": "Local"},
    });
    gap(bed, || is_used(bed, name), || serves(bed, name, address, &rules), || bed.patch(old, &back))?;
    assert_eq!(bed.address(old, PATIENCE)?, address);
    bed.kubectl(&["wait", "--for=delete", &format!("service/{new}"), "--timeout=3m"])?;
    assert_eq!(balancer(bed, name)?, theirs);
    let all = bed.stand_in().snapshot()?;
    assert!(!all.contains_key(&format!("loadBalancers/{ours}")), "{:?}", all.keys());
    assert_eq!(users(bed)?, before);
    Ok(())
}

#[test]
fn address_moves_from_cloud_peer_and_back_with_a_lock() -> Result<()> {
    requires!(Ok(()); KubeApiserver, Clouds, Program("setpriv"), Program("haproxy"), Program("kubectl"),
        Program("azure-cloud-controller-manager"));
    let mut bed = Handover::azure(&controller())?;
    plant(&bed)?;
    let (old, address, name) = detached(&bed)?;
    lock(&bed, &name)?;
    move_and_return(&mut bed, &old, &address, &name)?;
    bed.end()
}

#[test]
fn address_moves_from_cloud_peer_and_back_after_the_wait() -> Result<()> {
    requires!(Ok(()); KubeApiserver, Clouds, Program("setpriv"), Program("haproxy"), Program("kubectl"),
        Program("azure-cloud-controller-manager"));
    let mut bed = Handover::azure(&controller())?;
    plant(&bed)?;
    let (old, address, name) = detached(&bed)?;
    sleep(CACHED);
    // What makes cloud-provider-azure look at the Service does not bring the tags back.
    bed.exclude_node(true)?;
    bed.exclude_node(false)?;
    bed.kubectl(&["annotate", "service", &old, "looked-at=1"])?;
    sleep(Duration::from_secs(10));
    let tags = bed.stand_in().network("GET", &format!("publicIPAddresses/{name}"), None)?["tags"].clone();
    assert!(tags.get("k8s-azure-service").is_none(), "{tags}");
    move_and_return(&mut bed, &old, &address, &name)?;
    bed.end()
}

/// Why the guide says to wait or to lock.
#[test]
fn address_is_lost_if_cloud_peer_has_an_old_list() -> Result<()> {
    requires!(Ok(()); KubeApiserver, Clouds, Program("setpriv"), Program("haproxy"), Program("kubectl"),
        Program("azure-cloud-controller-manager"));
    let bed = Handover::azure(&controller())?;
    let (old, _, name) = detached(&bed)?;
    bed.kubectl(&["delete", "service", &old, "--timeout=3m"])?;
    let all = bed.stand_in().snapshot()?;
    assert!(!all.contains_key(&format!("publicIPAddresses/{name}")), "{:?}", all.keys());
    bed.end()
}
