// SPDX-License-Identifier: Apache-2.0
//! The network of a lab: two bridges in the router's namespace, one veth pair per host, static routes.
//!
//! Changes are rendered as batches for `ip` (pure, tested); [`build`] and [`attach`] run them.

use std::process::Command;

use crate::addresses::{Host, Plan, Role, pod_cidrs};
use crate::command::{run, run_with};
use crate::error::{Error, Result};
use crate::netns;

/// Makes the router and connects every host.
pub fn build(plan: &Plan) -> Result<()> {
    netns::create(&plan.router(), true)?;
    batch(&plan.router(), &router_batch(plan))?;
    plan.hosts().iter().try_for_each(|host| attach(plan, host))
}

/// Makes a host's namespace and connects it, as when a machine is switched on.
pub fn attach(plan: &Plan, host: &Host) -> Result<()> {
    // Clients and edges are plain machines: they do not forward. An amphora forwards datagrams.
    let forwarding = matches!(host.role, Role::Node(_) | Role::ControlPlane | Role::Amphora);
    netns::create(&host.netns, forwarding)?;
    batch(&plan.router(), &port_batch(host))?;
    batch(&host.netns, &host_batch(plan, host))
}

/// Removes a host's namespace and its port, as when a machine is switched off. The kernel would remove the port with the
/// namespace, but only some time later.
pub fn detach(plan: &Plan, host: &Host) -> Result<()> {
    let router = plan.router();
    // A missing port is no error.
    let _ = run(Command::new("ip").args(["-n", &router, "link", "del", "dev", &host.name]));
    netns::delete(&host.netns)
}

/// Disconnects a host as a cable pulled at the far end does: its link stays up, and no packet passes.
pub fn cut(plan: &Plan, host: &Host) -> Result<()> {
    port(plan, host, &["nomaster"])
}

/// Undoes [`cut`].
pub fn join(plan: &Plan, host: &Host) -> Result<()> {
    port(plan, host, &["master", host.bridge()])
}

fn port(plan: &Plan, host: &Host, change: &[&str]) -> Result<()> {
    if !netns::exists(&host.netns) {
        return Err(Error::Refused(format!("{0} is off: `hack/lab start-node {0}` starts it", host.name)));
    }
    run(Command::new("ip").args(["-n", &plan.router(), "link", "set", "dev", &host.name]).args(change))
        .map(drop)
}

/// Runs lines of `ip` in a namespace.
pub(crate) fn batch(netns: &str, lines: &str) -> Result<()> {
    run_with(Command::new("ip").args(["-n", netns, "-batch", "-"]), lines).map(drop)
}

fn router_batch(plan: &Plan) -> String {
    let mut lines = vec!["link set lo up".to_owned()];
    // A bridge without a MAC address of its own takes the lowest of its ports. It would change when a node dies, and the other
    // hosts would keep sending to the old one.
    for (bridge, mac, ipv4, ipv6) in [
        ("clients", "02:78:00:00:00:01", "10.78.0.1/16", "fd78::1/64"),
        ("nodes", "02:77:00:00:00:01", "10.77.0.1/16", "fd77::1/64"),
    ] {
        lines.push(format!("link add {bridge} address {mac} type bridge forward_delay 0 mcast_snooping 0"));
        lines.push(format!("addr add {ipv4} dev {bridge}"));
        lines.push(format!("addr add {ipv6} dev {bridge} nodad"));
        lines.push(format!("link set {bridge} up"));
    }
    lines.extend(pod_routes(plan, None));
    finish(lines)
}

fn port_batch(host: &Host) -> String {
    let Host { name, netns, .. } = host;
    finish(vec![
        format!("link add {name} type veth peer name eth0 address {} netns {netns}", host.mac()),
        format!("link set {name} master {} up", host.bridge()),
    ])
}

fn host_batch(plan: &Plan, host: &Host) -> String {
    let (gateway4, gateway6) = host.gateways();
    let mut lines = vec![
        "link set lo up".to_owned(),
        "link set eth0 up".to_owned(),
        format!("addr add {}/16 dev eth0", host.ipv4),
        format!("addr add {}/64 dev eth0 nodad", host.ipv6),
        format!("route add default via {gateway4}"),
        format!("route add ::/0 via {gateway6}"),
    ];
    if matches!(host.role, Role::Node(_)) {
        lines.extend(pod_routes(plan, Some(host)));
    }
    finish(lines)
}

/// Routes to the pods of every node but `own`.
pub(crate) fn pod_routes(plan: &Plan, own: Option<&Host>) -> Vec<String> {
    let others = plan.nodes().into_iter().filter(|node| own != Some(node));
    others
        .flat_map(|node| {
            let Role::Node(number) = node.role else { return Vec::new() };
            let (ipv4, ipv6) = pod_cidrs(number);
            vec![format!("route add {ipv4} via {}", node.ipv4), format!("route add {ipv6} via {}", node.ipv6)]
        })
        .collect()
}

/// A batch of these lines.
pub(crate) fn finish(mut lines: Vec<String>) -> String {
    lines.push(String::new());
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_reaches_the_other_nodes_pods_directly_and_its_own_not_at_all() {
        let plan = Plan::example();
        let lines = host_batch(&plan, &plan.find("node1").unwrap());
        assert!(lines.contains("route add 10.244.2.0/24 via 10.77.1.2\n"));
        assert!(lines.contains("route add fd44:2::/64 via fd77::1:2\n"));
        assert!(!lines.contains("10.244.1.0/24"));
        let edge = host_batch(&plan, &plan.find("edge1").unwrap());
        assert!(!edge.contains("10.244"), "an edge host knows the router only");
    }

    #[test]
    fn clients_hang_on_their_own_segment() {
        let plan = Plan::example();
        assert!(port_batch(&plan.find("client2").unwrap()).contains("link set client2 master clients up"));
        assert!(port_batch(&plan.find("edge1").unwrap()).contains("link set edge1 master nodes up"));
        assert!(router_batch(&plan).contains("route add 10.244.2.0/24 via 10.77.1.2"));
    }
}
