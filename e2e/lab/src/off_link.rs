// SPDX-License-Identifier: Apache-2.0
//! A node off the link of the edge hosts: it keeps its addresses, and only gateways reach them.
//!
//! The node's port goes to a bridge of its own, `far`, to which two gateways are connected beside the link of the nodes. All hosts but the
//! edge hosts have static routes by the first gateway. The edge hosts learn theirs by BGP ([`routing`]), from both gateways.
//!
//! Changes are rendered as batches for `ip` (pure, tested).

pub mod routing;

use std::net::{Ipv4Addr, Ipv6Addr};
use std::process::Command;

use crate::addresses::{Host, Plan, Role, mac, pod_cidrs};
use crate::command::run;
use crate::error::{Error, Result};
use crate::netns;
use crate::state::Lab;
use crate::topology::{batch, finish, pod_routes};

/// The bridge of the node off the link, in the router's namespace. The router has no address there.
const FAR: &str = "far";

/// A router between the link of the nodes (`eth0`) and the node off the link (`eth1`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gateway {
    /// `gateway1`, `gateway2`.
    pub name: String,
    /// The name of its network namespace.
    pub netns: String,
    /// Its address on the link of the nodes.
    pub ipv4: Ipv4Addr,
    /// Its address on the link of the nodes.
    pub ipv6: Ipv6Addr,
    far_ipv4: Ipv4Addr,
    far_ipv6: Ipv6Addr,
}

/// Both gateways, the preferred one first.
pub fn gateways(plan: &Plan) -> [Gateway; 2] {
    [1, 2].map(|number: u8| {
        let name = format!("gateway{number}");
        Gateway {
            netns: format!("{}-{name}", plan.name),
            name,
            ipv4: Ipv4Addr::new(10, 77, 4, number),
            ipv6: Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 4, number.into()),
            far_ipv4: Ipv4Addr::new(10, 80, 0, number),
            far_ipv6: Ipv6Addr::new(0xfd80, 0, 0, 0, 0, 0, 0, number.into()),
        }
    })
}

/// Moves a node off the link, and returns when the edge hosts have learned the routes to it. Packets on their way meanwhile are lost.
pub fn take_off(lab: &Lab, node: &Host) -> Result<()> {
    routing::check_program()?;
    let plan = &lab.plan;
    let gateways = gateways(plan);
    if gateways.iter().any(|gateway| netns::exists(&gateway.netns)) {
        return Err(Error::Refused(format!(
            "a node of lab {0} is off the link already: `hack/lab on-link NODE --name {0}` puts it back",
            plan.name
        )));
    }
    let router = plan.router();
    batch(&router, &far_batch())?;
    for gateway in &gateways {
        netns::create(&gateway.netns, true)?;
        batch(&router, &port_batch(gateway))?;
        batch(&gateway.netns, &gateway_batch(gateway, node))?;
    }
    port(plan, node, FAR)?;
    batch(&node.netns, &off_batch(plan, node, &gateways[0]))?;
    for (netns, lines) in neighbours(plan, node, |host| detour_batch(host, node, &gateways[0])) {
        batch(&netns, &lines)?;
    }
    routing::start_all(lab, node)
}

/// Undoes [`take_off`], also where it has ended half-way.
pub fn put_back(lab: &Lab, node: &Host) -> Result<()> {
    routing::stop_all(lab)?;
    let plan = &lab.plan;
    let [first, second] = gateways(plan);
    if netns::exists(&node.netns) {
        port(plan, node, node.bridge())?;
        forced_batch(&node.netns, &on_batch(plan, node));
    }
    for (netns, lines) in neighbours(plan, node, |host| direct_batch(host, node, &first)) {
        forced_batch(&netns, &lines);
    }
    let router = plan.router();
    for gateway in [first, second] {
        forced_batch(&router, &unplug_batch(&gateway));
        netns::delete(&gateway.netns)?;
    }
    forced_batch(&router, &finish(vec![format!("link del {FAR}")]));
    Ok(())
}

/// Runs all lines, also after one that fails: what it removes may be gone.
fn forced_batch(netns: &str, lines: &str) {
    let mut ip = Command::new("ip");
    ip.args(["-n", netns, "-force", "-batch", "-"]);
    let _ = crate::command::run_with(&mut ip, lines);
}

fn port(plan: &Plan, node: &Host, bridge: &str) -> Result<()> {
    let set = ["link", "set", "dev", &node.name, "master", bridge];
    run(Command::new("ip").args(["-n", &plan.router()]).args(set)).map(drop)
}

/// The hosts beside the node that need static routes, and the router, each with the lines for it. The router is no host of the plan.
fn neighbours(
    plan: &Plan,
    node: &Host,
    lines: impl Fn(Option<&Host>) -> String,
) -> impl Iterator<Item = (String, String)> {
    let has_routes = |host: &Host| matches!(host.role, Role::Node(_) | Role::ControlPlane) && host != node;
    let mut found: Vec<_> = plan
        .hosts()
        .iter()
        .filter(|host| has_routes(host) && netns::exists(&host.netns))
        .map(|host| (host.netns.clone(), lines(Some(host))))
        .collect();
    found.push((plan.router(), lines(None)));
    found.into_iter()
}

fn far_batch() -> String {
    finish(vec![
        format!("link add {FAR} type bridge forward_delay 0 mcast_snooping 0"),
        format!("link set {FAR} up"),
    ])
}

fn port_batch(gateway: &Gateway) -> String {
    let Gateway { name, netns, .. } = gateway;
    // Neighbours may use an earlier gateway's addresses as long as they send.
    let [eth0, eth1] = [gateway.ipv4, gateway.far_ipv4].map(mac);
    finish(vec![
        format!("link add {name} type veth peer name eth0 address {eth0} netns {netns}"),
        format!("link set {name} master nodes up"),
        format!("link add {name}-far type veth peer name eth1 address {eth1} netns {netns}"),
        format!("link set {name}-far master {FAR} up"),
    ])
}

fn unplug_batch(gateway: &Gateway) -> String {
    finish(vec![format!("link del {}", gateway.name), format!("link del {}-far", gateway.name)])
}

fn gateway_batch(gateway: &Gateway, node: &Host) -> String {
    let (router4, router6) = node.gateways();
    let mut lines = vec![
        "link set lo up".to_owned(),
        "link set eth0 up".to_owned(),
        "link set eth1 up".to_owned(),
        format!("addr add {}/16 dev eth0", gateway.ipv4),
        format!("addr add {}/64 dev eth0 nodad", gateway.ipv6),
        format!("addr add {}/24 dev eth1", gateway.far_ipv4),
        format!("addr add {}/64 dev eth1 nodad", gateway.far_ipv6),
        format!("route add default via {router4}"),
        format!("route add ::/0 via {router6}"),
        format!("route add {}/32 dev eth1", node.ipv4),
        format!("route add {}/128 dev eth1", node.ipv6),
    ];
    lines.extend(own_pods(node).map(|(ipv4, ipv6)| {
        format!("route add {ipv4} via {}\nroute add {ipv6} via {}", node.ipv4, node.ipv6)
    }));
    finish(lines)
}

/// The node's own batch: its addresses are on no link, and all it sends goes to the gateway.
fn off_batch(plan: &Plan, node: &Host, gateway: &Gateway) -> String {
    let mut lines: Vec<_> =
        pod_routes(plan, Some(node)).into_iter().map(|line| line.replacen("add", "del", 1)).collect();
    lines.extend([
        format!("addr add {}/32 dev eth0", node.ipv4),
        format!("addr del {}/16 dev eth0", node.ipv4),
        format!("route replace default via {} dev eth0 onlink", gateway.far_ipv4),
        format!("addr del {}/64 dev eth0", node.ipv6),
        format!("addr add {}/128 dev eth0 nodad", node.ipv6),
        format!("route replace ::/0 via {} dev eth0 onlink", gateway.far_ipv6),
    ]);
    finish(lines)
}

fn on_batch(plan: &Plan, node: &Host) -> String {
    let (router4, router6) = node.gateways();
    let mut lines = vec![
        format!("addr add {}/16 dev eth0", node.ipv4),
        format!("addr del {}/32 dev eth0", node.ipv4),
        format!("route replace default via {router4}"),
        format!("addr del {}/128 dev eth0", node.ipv6),
        format!("addr add {}/64 dev eth0 nodad", node.ipv6),
        format!("route replace ::/0 via {router6}"),
    ];
    lines.extend(pod_routes(plan, Some(node)));
    finish(lines)
}

/// Adds or deletes, as `action` says, a host's routes by a gateway to the node, and lets those to the node's pods go by `pods`.
fn routes_batch(
    host: Option<&Host>,
    node: &Host,
    (action, gateway): (&str, &Gateway),
    pods: (Ipv4Addr, Ipv6Addr),
) -> String {
    let mut lines = vec![
        format!("route {action} {}/32 via {}", node.ipv4, gateway.ipv4),
        format!("route {action} {}/128 via {}", node.ipv6, gateway.ipv6),
    ];
    lines.extend(pod_routes_by(host, node, pods));
    finish(lines)
}

/// Routes of a host on the link to the node, and to its pods where the host has such: nodes and the router.
fn detour_batch(host: Option<&Host>, node: &Host, gateway: &Gateway) -> String {
    routes_batch(host, node, ("add", gateway), (gateway.ipv4, gateway.ipv6))
}

/// Undoes [`detour_batch`].
fn direct_batch(host: Option<&Host>, node: &Host, gateway: &Gateway) -> String {
    routes_batch(host, node, ("del", gateway), (node.ipv4, node.ipv6))
}

fn pod_routes_by(host: Option<&Host>, node: &Host, (ipv4, ipv6): (Ipv4Addr, Ipv6Addr)) -> Vec<String> {
    let has_pods = host.is_none_or(|host| matches!(host.role, Role::Node(_)));
    let Some((pods4, pods6)) = own_pods(node).filter(|_| has_pods) else { return Vec::new() };
    vec![format!("route replace {pods4} via {ipv4}"), format!("route replace {pods6} via {ipv6}")]
}

fn own_pods(node: &Host) -> Option<(String, String)> {
    match node.role {
        Role::Node(number) => Some(pod_cidrs(number)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_keeps_its_addresses_and_is_on_no_link() {
        let plan = Plan::example();
        let node = plan.find("node2").unwrap();
        let lines = off_batch(&plan, &node, &gateways(&plan)[0]);
        assert!(
            lines.contains("addr add 10.77.1.2/32 dev eth0\naddr del 10.77.1.2/16 dev eth0\n"),
            "{lines}"
        );
        assert!(lines.contains("route replace default via 10.80.0.1 dev eth0 onlink\n"), "{lines}");
        assert!(lines.contains("route del 10.244.1.0/24 via 10.77.1.1\n"), "{lines}");
        let back = on_batch(&plan, &node);
        assert!(back.contains("addr add 10.77.1.2/16 dev eth0\n"), "{back}");
        assert!(back.contains("route add 10.244.1.0/24 via 10.77.1.1\n"), "{back}");
    }

    #[test]
    fn hosts_on_the_link_go_by_the_first_gateway_and_only_nodes_to_pods() {
        let plan = Plan::example();
        let node = plan.find("node2").unwrap();
        let [first, _] = gateways(&plan);
        let of = |name: &str| detour_batch(Some(&plan.find(name).unwrap()), &node, &first);
        assert_eq!(of("cp"), "route add 10.77.1.2/32 via 10.77.4.1\nroute add fd77::1:2/128 via fd77::4:1\n");
        assert!(of("node1").contains("route replace 10.244.2.0/24 via 10.77.4.1\n"));
        assert!(detour_batch(None, &node, &first).contains("route replace fd44:2::/64 via fd77::4:1\n"));
        let direct = direct_batch(None, &node, &first);
        assert!(direct.contains("route replace 10.244.2.0/24 via 10.77.1.2\n"), "{direct}");
    }
}
