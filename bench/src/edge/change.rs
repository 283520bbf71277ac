// SPDX-License-Identifier: Apache-2.0
//! A change of one Service's targets, as each contender takes it soonest, and the time until a new connection goes by it.

use std::fmt::Write as _;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use steerage_lab::command::run_with;
use steerage_lab::netns;
use steerage_model::Family;

use super::configs;
use super::contender::{Contender, Running};
use super::load::{Servers, exchange};
use crate::edge_bed::addresses::{node_address, vip};
use crate::edge_bed::{Bed, PORT};

/// The Service that changes, which has no other traffic meanwhile.
const SERVICE: u32 = 0;
/// A contender that has not followed after this time does not follow.
const LIMIT: Duration = Duration::from_mins(1);

/// What a contender gets.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Change {
    /// This file with this text, renamed into its place, which is watched.
    File(PathBuf, String),
    /// Commands to `HAProxy`'s socket.
    Commands(String),
    /// The input of a program in the host's namespace.
    Input(&'static [&'static str], String),
}

/// The change to these nodes. `others`: those that the Service leaves.
fn change(
    contender: Contender,
    family: Family,
    folder: &Path,
    objects: &Path,
    nodes: &[u8],
    others: &[u8],
) -> Option<Change> {
    let vip = SocketAddr::new(vip(family, SERVICE), PORT);
    let at = |node: &u8| SocketAddr::new(node_address(family, *node), PORT);
    Some(match contender {
        Contender::Direct | Contender::Routed => return None,
        Contender::Edge => {
            let object = configs::edge_load_balancer(family, SERVICE, nodes);
            Change::File(objects.join(format!("lb-{SERVICE}.json")), object.to_string())
        }
        Contender::Envoy => Change::File(
            configs::envoy_endpoints_file(folder),
            configs::envoy_endpoints(family, SERVICE, nodes).to_string(),
        ),
        Contender::Haproxy => {
            // It has a server for each of the nodes at the start; the commands are carried out one after the other.
            let servers = configs::nodes_of(SERVICE);
            let command = |(index, server): (usize, &u8)| match nodes.get(index) {
                Some(node) => format!(
                    "set server s{SERVICE}/n{server} addr {} port {PORT}; set server s{SERVICE}/n{server} state ready",
                    node_address(family, *node)
                ),
                None => format!("set server s{SERVICE}/n{server} state maint"),
            };
            Change::Commands(servers.iter().enumerate().map(command).collect::<Vec<_>>().join("; "))
        }
        Contender::Ipvs => {
            let edit = |option: &str, node: &u8| format!("-{option} -t {vip} -r {}", at(node));
            let added = nodes.iter().map(|node| edit("a", node) + " -g\n");
            let removed = others.iter().map(|node| edit("d", node) + "\n");
            Change::Input(&["ipvsadm", "--restore"], added.chain(removed).collect())
        }
        Contender::Nat => Change::Input(&["nft", "-f", "-"], nat(family, nodes)),
    })
}

/// As kube-proxy does it: chains of the endpoints, and another rule in that of the Service's port, in one transaction.
fn nat(family: Family, nodes: &[u8]) -> String {
    let (table, mut text) = (configs::nat_table(family), String::new());
    for node in nodes {
        let chain = format!("endpoint-tcp-{SERVICE}-{node}");
        let _ = writeln!(text, "add chain {table} {chain}\nflush chain {table} {chain}");
        for rule in configs::nat_endpoint_rules(family, "tcp", *node) {
            let _ = writeln!(text, "add rule {table} {chain} {rule}");
        }
    }
    let (chain, rule) =
        (format!("service-tcp-{SERVICE}"), configs::nat_service_rule(&format!("tcp-{SERVICE}"), nodes));
    let _ = writeln!(text, "flush chain {table} {chain}\nadd rule {table} {chain} {rule}");
    text
}

fn apply(bed: &Bed, running: &Running, change: Change) -> Result<()> {
    match change {
        Change::File(path, text) => {
            let beside = path.with_extension("new");
            fs::write(&beside, text)?;
            Ok(fs::rename(beside, path)?)
        }
        Change::Commands(commands) => {
            let mut socket = UnixStream::connect(configs::haproxy_socket(&bed.folder))?;
            writeln!(socket, "{commands}")?;
            let mut answer = String::new();
            socket.read_to_string(&mut answer)?;
            let is_refused =
                ["No such", "Unknown", "Invalid", "Require"].iter().any(|word| answer.contains(word));
            ensure!(!is_refused, "HAProxy refused a change: {answer}");
            Ok(())
        }
        Change::Input(program, input) => {
            let netns = format!("--net={}", netns::path(&running.host.netns()).display());
            run_with(Command::new("nsenter").arg(netns).args(program), &input)?;
            Ok(())
        }
    }
}

/// Moves the Service from its three nodes to the one that it leaves out, or back. The time from before the change until the end of
/// the first request that goes by it; requests are made one after the other meanwhile.
pub fn measure(bed: &Bed, servers: &Servers, running: &Running, to_one: bool) -> Result<Option<Duration>> {
    let all = configs::nodes_of(SERVICE);
    let one =
        (0..crate::edge_bed::NODES).find(|node| !all.contains(node)).context("a node without the Service")?;
    let alone = [one];
    let (nodes, others) =
        if to_one { (alone.as_slice(), all.as_slice()) } else { (all.as_slice(), alone.as_slice()) };
    let objects = running.objects(bed);
    let Some(change) = change(running.contender, running.family, &bed.folder, &objects, nodes, others) else {
        return Ok(None);
    };
    let vip = SocketAddr::new(vip(running.family, SERVICE), PORT);
    let served_by_one = || servers.served()[usize::from(one)];
    let is_followed = || -> Result<bool> {
        let before = served_by_one();
        exchange(vip, 0)?;
        Ok((served_by_one() > before) == to_one)
    };
    ensure!(!bed.inside("client", is_followed)??, "the Service has the targets of a change before it");
    let begun = Instant::now();
    apply(bed, running, change)?;
    bed.inside("client", || {
        while !is_followed()? {
            ensure!(begun.elapsed() < LIMIT, "a change was not followed");
        }
        Ok(Some(begun.elapsed()))
    })?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(contender: Contender, nodes: &[u8], others: &[u8]) -> Option<String> {
        let (folder, objects) = (Path::new("/f"), Path::new("/o"));
        change(contender, Family::V4, folder, objects, nodes, others).map(|change| format!("{change:?}"))
    }

    #[test]
    fn every_contender_gets_the_nodes_of_the_change() {
        let all = configs::nodes_of(SERVICE);
        for contender in
            [Contender::Edge, Contender::Haproxy, Contender::Envoy, Contender::Ipvs, Contender::Nat]
        {
            for (nodes, others) in [(&[0][..], &all[..]), (&all[..], &[0][..])] {
                let text = text(contender, nodes, others).expect("a change");
                for node in nodes {
                    let address = node_address(Family::V4, *node).to_string();
                    assert!(text.contains(&address), "{contender:?}: {text}");
                }
            }
        }
        assert_eq!(text(Contender::Routed, &[0], &all), None);
    }

    #[test]
    fn servers_without_a_node_are_taken_out() {
        let text = text(Contender::Haproxy, &[0], &[1, 2, 3]).expect("a change");
        assert!(
            text.contains("n1 state ready")
                && text.contains("n2 state maint")
                && text.contains("n3 state maint")
        );
    }
}
