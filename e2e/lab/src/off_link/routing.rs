// SPDX-License-Identifier: Apache-2.0
//! BIRD on the gateways and on the edge hosts: the gateways announce the addresses of the node off the link by BGP, and each edge host
//! prefers the first gateway. A session has one IP family and the name of its gateway and family, such as `gateway1_ipv4`.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;

use super::{Gateway, gateways};
use crate::addresses::Host;
use crate::command::run;
use crate::daemon;
use crate::error::{Error, Result};
use crate::progress::wait;
use crate::state::{Lab, write};

/// Sessions begin within a second, and again a second after they have ended.
const LEARNED_WITHIN: Duration = Duration::from_secs(30);

/// Options of each session. With graceful restart a gateway and a restarted daemon keep the routes until they know better.
const SESSION: &str =
    "connect delay time 1; connect retry time 1; error wait time 1, 2; hold time 30; graceful restart on;";

/// Fails if BIRD is not installed.
pub(super) fn check_program() -> Result<()> {
    let missing = |_| Error::Refused("bird is missing; run hack/prepare packages".to_owned());
    run(Command::new("bird").arg("--version")).map(drop).map_err(missing)
}

/// Starts all daemons, and returns when each edge host has routes to the node.
pub(super) fn start_all(lab: &Lab, node: &Host) -> Result<()> {
    let edges = lab.plan.edges();
    for gateway in gateways(&lab.plan) {
        let config = gateway_config(&gateway, node, &edges);
        write(&config_file(lab, &gateway.name), &config)?;
        start(lab, &gateway.name, &gateway.netns, false)?;
    }
    for edge in &edges {
        write(&config_file(lab, &edge.name), &edge_config(edge, &gateways(&lab.plan)))?;
        start(lab, &component(&edge.name), &edge.netns, false)?;
    }
    edges.iter().try_for_each(|edge| wait_learned(lab, edge, node))
}

/// Ends all daemons, and removes their routes, also those of killed ones.
pub(super) fn stop_all(lab: &Lab) -> Result<()> {
    for edge in lab.plan.edges() {
        daemon::stop(lab, &component(&edge.name), Signal::SIGTERM)?;
        for family in ["-4", "-6"] {
            run(Command::new("ip").args(["-n", &edge.netns, family, "route", "flush", "proto", "bird"]))?;
        }
    }
    gateways(&lab.plan).iter().try_for_each(|gateway| daemon::stop(lab, &gateway.name, Signal::SIGKILL))
}

/// Kills the daemon of an edge host. The kernel keeps its routes.
pub fn kill(lab: &Lab, edge: &Host) -> Result<()> {
    daemon::stop(lab, &component(&edge.name), Signal::SIGKILL)
}

/// Starts the daemon of an edge host again, with the routes in the kernel if `keeps_routes`: otherwise it removes them until it has
/// learned them.
pub fn restart(lab: &Lab, edge: &Host, keeps_routes: bool) -> Result<()> {
    start(lab, &component(&edge.name), &edge.netns, keeps_routes)
}

/// Ends or begins both sessions of an edge host with a gateway.
pub fn set_session(lab: &Lab, edge: &Host, gateway: &Gateway, is_up: bool) -> Result<()> {
    let verb = if is_up { "enable" } else { "disable" };
    for family in ["ipv4", "ipv6"] {
        let session = format!("{}_{family}", gateway.name);
        let mut command = Command::new("birdc");
        command.arg("-s").arg(socket(lab, &component(&edge.name))).args([verb, &session]);
        run(&mut command)?;
    }
    Ok(())
}

/// Whether all sessions of an edge host are established.
pub fn has_all_sessions(lab: &Lab, edge: &Host) -> Result<bool> {
    let mut command = Command::new("birdc");
    command.arg("-s").arg(socket(lab, &component(&edge.name))).args(["show", "protocols"]);
    let shown = run(&mut command)?;
    Ok(shown.matches("Established").count() == 2 * gateways(&lab.plan).len())
}

/// The routes of an edge host to the node, of both families.
pub fn learned(edge: &Host, node: &Host) -> Result<[String; 2]> {
    let show = |family: &str, destination: String| {
        let mut ip = Command::new("ip");
        ip.args(["-n", &edge.netns, family, "route", "show", &destination, "proto", "bird"]);
        run(&mut ip)
    };
    Ok([show("-4", format!("{}/32", node.ipv4))?, show("-6", format!("{}/128", node.ipv6))?])
}

fn wait_learned(lab: &Lab, edge: &Host, node: &Host) -> Result<()> {
    let log = lab.log(&component(&edge.name));
    let hint = || format!("see {}", log.display());
    wait(&format!("routes of {} to {}", edge.name, node.name), LEARNED_WITHIN, hint, || {
        Ok(learned(edge, node)?.iter().all(|route| !route.is_empty()))
    })
}

fn start(lab: &Lab, component: &str, netns: &str, keeps_routes: bool) -> Result<()> {
    let name = component.trim_end_matches("-bird");
    let text = |path: &Path| path.display().to_string();
    let mut command = ["bird", "-f", "-c"].map(str::to_owned).to_vec();
    command.extend([text(&config_file(lab, name)), "-s".to_owned(), text(&socket(lab, component))]);
    if keeps_routes {
        command.push("-R".to_owned());
    }
    daemon::spawn(lab, component, netns, &command).map(drop)
}

/// The edge's own process has the name of its host.
fn component(edge: &str) -> String {
    format!("{edge}-bird")
}

fn config_file(lab: &Lab, host: &str) -> PathBuf {
    lab.folder().join(format!("config/{host}-bird.conf"))
}

fn socket(lab: &Lab, component: &str) -> PathBuf {
    lab.folder().join(format!("run/{component}.ctl"))
}

fn gateway_config(gateway: &Gateway, node: &Host, edges: &[Host]) -> String {
    let ipv4 = gateway.ipv4;
    let mut config = format!(
        "log stderr all;\nrouter id {ipv4};\nprotocol device {{}}\n\
         protocol static {{ ipv4; route {}/32 via \"eth1\"; }}\n\
         protocol static {{ ipv6; route {}/128 via \"eth1\"; }}\n",
        node.ipv4, node.ipv6
    );
    for edge in edges {
        for (family, own, other) in families(gateway, edge) {
            let _ = writeln!(
                config,
                "protocol bgp {}_{family} {{ local {own} as 64513; neighbor {other} as 64512; {SESSION} \
                 {family} {{ import none; export all; }}; }}",
                edge.name
            );
        }
    }
    config
}

fn edge_config(edge: &Host, gateways: &[Gateway]) -> String {
    let mut config = format!(
        "log stderr all;\nrouter id {};\nprotocol device {{}}\n\
         protocol kernel {{ graceful restart; ipv4 {{ import none; export all; }}; }}\n\
         protocol kernel {{ graceful restart; ipv6 {{ import none; export all; }}; }}\n",
        edge.ipv4
    );
    for (gateway, preference) in gateways.iter().zip([200, 100]) {
        for (family, other, own) in families(gateway, edge) {
            let _ = writeln!(
                config,
                "protocol bgp {}_{family} {{ local {own} as 64512; neighbor {other} as 64513; {SESSION} \
                 {family} {{ import filter {{ bgp_local_pref = {preference}; accept; }}; export none; }}; }}",
                gateway.name
            );
        }
    }
    config
}

/// Each family with the addresses of a gateway and of an edge host.
fn families(gateway: &Gateway, edge: &Host) -> [(&'static str, String, String); 2] {
    [
        ("ipv4", gateway.ipv4.to_string(), edge.ipv4.to_string()),
        ("ipv6", gateway.ipv6.to_string(), edge.ipv6.to_string()),
    ]
}

#[cfg(test)]
mod tests {
    use steerage_requirements::requires;

    use super::*;
    use crate::addresses::{Plan, ServiceProxy};
    use crate::command::run_with;

    fn configs() -> [String; 2] {
        let plan = Plan {
            name: "lab".into(),
            workers: 3,
            edges: 2,
            service_proxy: ServiceProxy::Agent,
            cloud: None,
            node_monitor_grace_period: "50s".to_owned(),
        };
        let gateways = gateways(&plan);
        let gateway = gateway_config(&gateways[0], &plan.find("node3").unwrap(), &plan.edges());
        [gateway, edge_config(&plan.edges()[1], &gateways)]
    }

    #[test]
    fn both_ends_of_a_session_know_each_other() {
        let [gateway, edge] = configs();
        for (own, other) in [("10.77.4.1", "10.77.2.2"), ("fd77::4:1", "fd77::2:2")] {
            assert!(
                gateway.contains(&format!("local {own} as 64513; neighbor {other} as 64512;")),
                "{gateway}"
            );
            assert!(edge.contains(&format!("local {other} as 64512; neighbor {own} as 64513;")), "{edge}");
        }
        assert!(gateway.contains("route 10.77.1.3/32 via \"eth1\";"), "{gateway}");
        let preferred = edge.lines().filter(|line| line.contains("bgp_local_pref = 200"));
        assert!(
            preferred.clone().count() == 2 && preferred.clone().all(|line| line.contains("gateway1_")),
            "{edge}"
        );
    }

    #[test]
    fn bird_takes_the_configurations() {
        requires!(Program("bird"));
        for config in configs() {
            run_with(Command::new("bird").args(["-p", "-c", "/dev/stdin"]), &config).unwrap();
        }
        run_with(Command::new("bird").args(["-p", "-c", "/dev/stdin"]), "router id none;").unwrap_err();
    }
}
