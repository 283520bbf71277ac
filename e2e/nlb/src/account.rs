// SPDX-License-Identifier: Apache-2.0
//! The account that a lab's cluster finds: a VPC, subnets for nodes, with one instance for each, for pods, and for load balancers.

use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;

use anyhow::{Context as _, Result};
use ipnet::Ipv4Net;
use serde_json::{Value, json};
use steerage_testmoto::Moto;

/// The only availability zone. With one alone, no target is in a zone that the load balancer does not have.
pub const ZONE: &str = "us-east-1a";
/// By this tag the controller finds the subnet of internal load balancers.
const ROLE: &str = "kubernetes.io/role/internal-elb";

/// The address ranges.
#[derive(Clone, Copy, Debug)]
pub struct Ranges {
    /// Of the VPC.
    pub vpc: Ipv4Net,
    /// Of the pods, beside the VPC's first one.
    pub pods: Ipv4Net,
    /// Of the nodes' subnet.
    pub nodes: Ipv4Net,
    /// Of the load balancers' subnet.
    pub balancers: Ipv4Net,
}

/// Creates it. Returns what the lab has to know: the ids of the VPC and of each node's instance.
pub fn create(moto: &Moto, ranges: Ranges, nodes: &[(String, Ipv4Addr)]) -> Result<Value> {
    let vpc = moto.vpc(&ranges.vpc.to_string())?;
    let for_nodes = moto.subnet(&vpc, &ranges.nodes.to_string(), ZONE)?;
    moto.add_range(&vpc, &ranges.pods.to_string())?;
    moto.subnet(&vpc, &ranges.pods.to_string(), ZONE)?;
    let for_balancers = moto.subnet(&vpc, &ranges.balancers.to_string(), ZONE)?;
    moto.tag(&for_balancers, ROLE, "1")?;
    let mut instances = serde_json::Map::new();
    for (name, address) in nodes {
        instances.insert(name.clone(), moto.instance(&for_nodes, *address)?.into());
    }
    Ok(json!({ "region": crate::read::REGION, "zone": ZONE, "vpc": vpc, "instances": instances }))
}

/// Writes a file that others wait for: it appears with all its content.
pub fn publish(file: &Path, text: &str) -> Result<()> {
    let half = file.with_extension("half");
    let write = || fs::write(&half, text).and_then(|()| fs::rename(&half, file));
    write().with_context(|| format!("writing {}", file.display()))
}
