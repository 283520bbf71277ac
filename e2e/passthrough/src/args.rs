// SPDX-License-Identifier: Apache-2.0
//! The flags, and the composition: the stand-in, its machines, the forwarder.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;

use anyhow::Result;
use clap::Parser;
use ipnet::IpNet;
use serde_json::Value;
use steerage_testclouds::Server;

use crate::run::{self, Kind, Place};
use crate::{azure, gce};

/// Simulate GCE or Azure for a lab: its API, and load balancers that forward in this network namespace.
#[derive(Debug, Parser)]
#[command(disable_version_flag = true)]
pub struct Args {
    /// Simulate this cloud.
    #[arg(long, value_enum)]
    cloud: Kind,
    /// Serve the API at this address.
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: SocketAddr,
    /// Replace these settings of the stand-in, as JSON.
    #[arg(long, value_name = "JSON", default_value = "{}", value_parser = settings)]
    settings: Value,
    /// Take load balancers' addresses from this range; once for each IP family.
    #[arg(long = "vips", value_name = "RANGE")]
    vips: Vec<IpNet>,
    /// Reach the nodes by this interface.
    #[arg(long, value_name = "INTERFACE", default_value = "nodes")]
    inside: String,
    /// Make a virtual machine for this node; repeatable.
    #[arg(long = "node", value_name = "NAME=IPV4,IPV6,ZONE,NETNS", value_parser = node)]
    nodes: Vec<Node>,
    /// Write view.json (what is forwarded, and the targets' health) into this folder.
    #[arg(long)]
    folder: PathBuf,
}

/// A node of the lab.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its name, which is its machine's.
    pub name: String,
    /// Its address.
    pub ipv4: Ipv4Addr,
    /// Its address.
    pub ipv6: Ipv6Addr,
    /// The zone of its machine.
    pub zone: String,
    /// The name of its network namespace.
    pub netns: String,
}

fn settings(text: &str) -> Result<Value, serde_json::Error> {
    serde_json::from_str(text)
}

fn node(text: &str) -> Result<Node, String> {
    let (name, rest) = text.split_once('=').ok_or("use NAME=IPV4,IPV6,ZONE,NETNS")?;
    let [ipv4, ipv6, zone, netns] = rest.split(',').collect::<Vec<_>>()[..] else {
        return Err("use NAME=IPV4,IPV6,ZONE,NETNS".to_owned());
    };
    Ok(Node {
        name: name.to_owned(),
        ipv4: ipv4.parse().map_err(|error| format!("{ipv4}: {error}"))?,
        ipv6: ipv6.parse().map_err(|error| format!("{ipv6}: {error}"))?,
        zone: zone.to_owned(),
        netns: netns.to_owned(),
    })
}

impl Args {
    /// Runs until it is killed.
    pub fn run(self) -> Result<()> {
        let Self { cloud, listen, settings, vips, inside, nodes, folder } = self;
        // On this thread, since the stand-in ends with the one that started it.
        let which = match cloud {
            Kind::Gce => steerage_testclouds::Cloud::Gce,
            Kind::Azure => steerage_testclouds::Cloud::Azure,
        };
        let server = Server::start_at(which, listen, &settings)?;
        match cloud {
            Kind::Gce => gce::seed(&server, &nodes, &vips)?,
            Kind::Azure => azure::seed(&server, &nodes)?,
        }
        // Google's agent gives nodes the VIPs. In Azure nothing does.
        let guests = match cloud {
            Kind::Gce => nodes.into_iter().map(|node| node.netns).collect(),
            Kind::Azure => Vec::new(),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(run::forward(&server, Place { kind: cloud, vips, inside, guests, folder }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_has_all_parts() {
        let node = node("node1=10.77.1.1,fd77::1:1,us-central1-a,lab-node1").unwrap();
        assert_eq!((node.name.as_str(), node.netns.as_str()), ("node1", "lab-node1"));
        assert_eq!(node.ipv6.to_string(), "fd77::1:1");
        assert!(super::node("node1=10.77.1.1").is_err());
        assert!(super::node("node1=10.77.1,fd77::1:1,a,b").is_err());
    }
}
