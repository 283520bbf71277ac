// SPDX-License-Identifier: Apache-2.0
//! The flags, and the composition: moto, the account, the forwarder.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use anyhow::Result;
use clap::Parser;
use ipnet::Ipv4Net;
use steerage_testmoto::{Release, Server};

use crate::account::{self, Ranges, publish};
use crate::addresses::Addresses;
use crate::run;

/// Simulate AWS for a lab: its API, and network load balancers that forward in this network namespace.
#[derive(Debug, Parser)]
#[command(disable_version_flag = true)]
pub struct Args {
    /// Serve the API at this address.
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: SocketAddr,
    /// Give the VPC this range.
    #[arg(long, value_name = "RANGE")]
    vpc: Ipv4Net,
    /// Give the nodes' subnet this range.
    #[arg(long, value_name = "RANGE")]
    node_subnet: Ipv4Net,
    /// Give the VPC this range too, with a subnet for pods.
    #[arg(long, value_name = "RANGE")]
    pod_subnet: Ipv4Net,
    /// Take the load balancers' addresses from a subnet of this range.
    #[arg(long, value_name = "RANGE")]
    balancer_subnet: Ipv4Net,
    /// Start an instance for this node; repeatable.
    #[arg(long = "node", value_name = "NAME=ADDRESS", value_parser = node)]
    nodes: Vec<(String, Ipv4Addr)>,
    /// Write account.json (ids of the VPC and the instances) and hosts (load balancers, as in hosts(5)) into this folder.
    #[arg(long)]
    folder: PathBuf,
}

fn node(text: &str) -> Result<(String, Ipv4Addr), String> {
    let (name, address) = text.split_once('=').ok_or("use NAME=ADDRESS")?;
    Ok((name.to_owned(), address.parse().map_err(|error| format!("{address}: {error}"))?))
}

impl Args {
    /// Runs until it is killed.
    pub fn run(self) -> Result<()> {
        let Self { listen, vpc, node_subnet, pod_subnet, balancer_subnet, nodes, folder } = self;
        // On this thread, since moto ends with the one that started it.
        let moto = Server::start_at(listen, Release::USUAL)?;
        let ranges = Ranges { vpc, pods: pod_subnet, nodes: node_subnet, balancers: balancer_subnet };
        let account = account::create(&moto, ranges, &nodes)?;
        let hosts = folder.join("hosts");
        publish(&hosts, "")?;
        publish(&folder.join("account.json"), &format!("{account:#}\n"))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(run::forward(&moto, Addresses::new(balancer_subnet), &hosts))
    }
}
