// SPDX-License-Identifier: Apache-2.0
//! The flags of `steerage-edge`.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as Flags, Parser, Subcommand};
use steerage_process::{ProcessArgs, duration};
use steerage_watch::ClientArgs;

use crate::engine::LONGEST_HAND_OVER;

/// Default address of the administration server.
pub(crate) const ADMIN: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 10359);

/// Software load balancer for Kubernetes: forwards packets to the nodes that can serve them
#[derive(Parser, Debug)]
#[command(version, name = "steerage-edge")]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) edge: EdgeArgs,
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    #[command(flatten)]
    pub(crate) process: ProcessArgs,
}

#[derive(Subcommand, Clone, Copy, Debug)]
pub(crate) enum Command {
    /// Remove the eBPF programs, their maps, multicast groups, routes of VIPs and the tunnel's device from this host, so that it has no VIPs, and exit; stop steerage-edge
    /// first, and give the same --bpf-dir before the subcommand
    Cleanup,
    /// Remove the routes of VIPs when steerage-edge no longer renews them; steerage-edge starts this itself
    #[command(hide = true)]
    RouteFence,
}

#[derive(Flags, Clone, Debug)]
#[command(next_help_heading = "Edge")]
pub(crate) struct EdgeArgs {
    /// Serve on this interface, on the link that clients' routers and nodes share [default: that of the default route]
    #[arg(long, env = "STEERAGE_INTERFACE", value_name = "NAME")]
    pub(crate) interface: Option<String>,
    /// Keep the eBPF program and its maps in this directory of a BPF file system, from which the next process takes them
    #[arg(
        long,
        env = "STEERAGE_BPF_DIR",
        value_name = "DIRECTORY",
        default_value = "/sys/fs/bpf/steerage-edge"
    )]
    pub(crate) bpf_dir: PathBuf,
    /// Use this name among the edge hosts [default: the host name]
    #[arg(long, env = "STEERAGE_HOST_NAME", value_name = "NAME", value_parser = host_name)]
    pub(crate) host_name: Option<String>,
    /// Watch and write the edge's objects in this namespace
    #[arg(long, env = "STEERAGE_NAMESPACE", value_name = "NAMESPACE", default_value = "steerage-system")]
    pub(crate) namespace: String,
    /// Form a group with the edge hosts on the link that have this group name and the same cluster. Where hosts have no cluster, give
    /// each set of hosts on a link its own name
    #[arg(long, env = "STEERAGE_GROUP", value_name = "NAME", default_value = "default")]
    pub(crate) group: String,
    /// Send heartbeats to the other edge hosts at this interval, from 20ms to 10s
    #[arg(long, env = "STEERAGE_HEARTBEAT_INTERVAL", value_name = "DURATION", default_value = "200ms",
          value_parser = heartbeat_interval)]
    pub(crate) heartbeat_interval: Duration,
    /// Treat an edge host as failed after this many missed heartbeats, from 2 to 100
    #[arg(long, env = "STEERAGE_HEARTBEAT_MISSES", value_name = "COUNT", default_value_t = 3,
          value_parser = clap::value_parser!(u8).range(2..=100))]
    pub(crate) heartbeat_misses: u8,
    /// Ask the nodes' agents for statements (how many local endpoints each Service has) on this port, their `--healthz-port`; 0 disables,
    /// and all health checks are probed
    #[arg(long, env = "STEERAGE_STATEMENTS_PORT", value_name = "PORT", default_value_t = 10356)]
    pub(crate) statements_port: u16,
    /// Exchange flow exceptions (connections that stay on a node although their slot has moved) with the other edge hosts on this TCP
    /// port of their addresses on the link; 0 disables, and such connections break at a takeover
    #[arg(long, env = "STEERAGE_PEERS_PORT", value_name = "PORT", default_value_t = 10360)]
    pub(crate) peers_port: u16,
    /// Read the key with which edge hosts of a group recognise each other from the entry `key` of this Secret, in --namespace; without a
    /// key flow exceptions are not exchanged
    #[arg(
        long,
        env = "STEERAGE_PEERS_KEY_SECRET",
        value_name = "NAME",
        default_value = "steerage-edge-peers"
    )]
    pub(crate) peers_key_secret: String,
    /// Read the key of the edge hosts' group from this file instead of --peers-key-secret, 32 to 4096 bytes
    #[arg(long, env = "STEERAGE_PEERS_KEY_FILE", value_name = "FILE")]
    pub(crate) peers_key_file: Option<PathBuf>,
    /// Serve on for up to this long at shutdown, until other edge hosts can serve and answer for all VIPs; at most 10m. Set
    /// --shutdown-grace-period to more than this wait plus 4.5s, with --route-table plus --route-withdraw-wait; a warning at start says if it
    /// is too short. If no other host can serve, the kernel serves on without the process
    #[arg(long, env = "STEERAGE_HAND_OVER_WAIT", value_name = "DURATION", default_value = "0s",
          value_parser = hand_over_wait)]
    pub(crate) hand_over_wait: Duration,
    #[command(flatten)]
    pub(crate) routes: RouteArgs,
    #[command(flatten)]
    pub(crate) tunnel: TunnelArgs,
    /// Run without a cluster: read EdgeLoadBalancer and EdgeNodeSet objects from the JSON files of this directory
    #[arg(long, env = "STEERAGE_OBJECTS_DIR", value_name = "DIRECTORY", requires = "status_dir")]
    pub(crate) objects_dir: Option<PathBuf>,
    /// Run without a cluster: write EdgeHost and EdgeTargetHealth objects to this directory
    #[arg(long, env = "STEERAGE_STATUS_DIR", value_name = "DIRECTORY", requires = "objects_dir")]
    pub(crate) status_dir: Option<PathBuf>,
}

/// The flags of routed networks.
#[derive(Flags, Clone, Copy, Debug)]
pub(crate) struct RouteArgs {
    /// Keep a route for each VIP that this host serves in this routing table, from which a routing daemon exports them; 0 keeps none
    #[arg(long, env = "STEERAGE_ROUTE_TABLE", value_name = "NUMBER", default_value_t = 0, value_parser = route_table)]
    pub(crate) route_table: u32,
    /// Wait this long at shutdown after the routes of VIPs were removed, so that routers use other edge hosts before the process ends;
    /// at most 1m. It counts in --shutdown-grace-period, see --hand-over-wait
    #[arg(long, env = "STEERAGE_ROUTE_WITHDRAW_WAIT", value_name = "DURATION", default_value = "2s",
          value_parser = route_withdraw_wait)]
    pub(crate) route_withdraw_wait: Duration,
}

impl EdgeArgs {
    /// Why the process may be ended by this grace period of its shutdown before it has handed over.
    pub(crate) fn shutdown_problem(&self, grace: Duration) -> Option<String> {
        let withdraw_wait = self.routes.withdraw_wait().unwrap_or_default();
        let longest = self.hand_over_wait + LONGEST_HAND_OVER + withdraw_wait;
        (longest >= grace).then(|| {
            format!(
                "the hand-over may take {}, and --shutdown-grace-period is {}",
                duration::display(longest),
                duration::display(grace)
            )
        })
    }
}

impl RouteArgs {
    /// How long routers get to leave this host when the process ends, if it keeps routes.
    pub(crate) fn withdraw_wait(self) -> Option<Duration> {
        (self.route_table != 0).then_some(self.route_withdraw_wait)
    }
}

/// The flags of the tunnel.
#[derive(Flags, Clone, Copy, Debug)]
pub(crate) struct TunnelArgs {
    /// Reach nodes that are not on the link of --interface through VXLAN, with this number of the virtual network (VNI), up to 16777215; 0
    /// disables, and such nodes get no packets. The agents need the same number in --edge-tunnel-vni
    #[arg(id = "tunnel_vni", long = "tunnel-vni", env = "STEERAGE_TUNNEL_VNI", value_name = "NUMBER", default_value_t = 0,
          value_parser = clap::value_parser!(u32).range(..=i64::from(steerage_tunnel::MAX_VNI)))]
    pub(crate) vni: u32,
    /// Send the tunnel's packets to this UDP port of nodes, the agents' --edge-tunnel-port. No other VXLAN device of this host may use it
    #[arg(id = "tunnel_port", long = "tunnel-port", env = "STEERAGE_TUNNEL_PORT", value_name = "PORT", default_value_t = steerage_tunnel::DEFAULT_PORT,
          value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: u16,
    /// Let packets in the tunnel have this length at most, from 1280; longer ones are answered by ICMP. 0: what the interface that leads
    /// to the node has room for, less 50 bytes for IPv4 and 70 for IPv6. Set it where the network to the nodes has a smaller MTU
    #[arg(id = "tunnel_mtu", long = "tunnel-mtu", env = "STEERAGE_TUNNEL_MTU", value_name = "BYTES", default_value_t = 0, value_parser = tunnel_mtu)]
    pub(crate) mtu: u16,
}

/// A name that can be part of an object's name.
pub(crate) fn host_name(text: &str) -> Result<String, String> {
    let is_label = |label: &str| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
    };
    if text.len() <= 63 && text.split('.').all(is_label) {
        Ok(text.to_owned())
    } else {
        Err("must be at most 63 lower-case letters, digits, `-` and `.`, with a letter or digit at both ends \
             of each part"
            .to_owned())
    }
}

fn heartbeat_interval(text: &str) -> Result<Duration, String> {
    let interval = duration::parse(text)?;
    if (Duration::from_millis(20)..=Duration::from_secs(10)).contains(&interval) {
        Ok(interval)
    } else {
        Err("must be from 20ms to 10s".to_owned())
    }
}

fn route_table(text: &str) -> Result<u32, String> {
    /// The kernel's own table of local addresses.
    const LOCAL: u32 = 255;
    match text.parse() {
        Ok(LOCAL) => Err("must not be 255, the kernel's own table of local addresses".to_owned()),
        Ok(table) => Ok(table),
        Err(_) => Err("must be the number of a routing table".to_owned()),
    }
}

fn route_withdraw_wait(text: &str) -> Result<Duration, String> {
    wait_of_at_most(Duration::from_mins(1), text)
}

fn hand_over_wait(text: &str) -> Result<Duration, String> {
    wait_of_at_most(Duration::from_mins(10), text)
}

fn wait_of_at_most(most: Duration, text: &str) -> Result<Duration, String> {
    let wait = duration::parse(text)?;
    if wait <= most { Ok(wait) } else { Err(format!("must be at most {}", duration::display(most))) }
}

fn tunnel_mtu(text: &str) -> Result<u16, String> {
    match text.parse() {
        Ok(mtu) if mtu == 0 || mtu >= 1280 => Ok(mtu),
        _ => Err("must be 0, or from 1280 to 65535".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn flags_are_well_formed_and_optional() {
        Args::command().debug_assert();
        let EdgeArgs { namespace, heartbeat_interval, .. } =
            Args::try_parse_from(["steerage-edge"]).expect("no flag is needed").edge;
        assert_eq!((namespace.as_str(), heartbeat_interval), ("steerage-system", Duration::from_millis(200)));
    }

    #[test]
    fn heartbeat_interval_is_a_duration_within_bounds() {
        let parse = |text| Args::try_parse_from(["steerage-edge", "--heartbeat-interval", text]);
        let interval = parse("1s500ms").expect("a duration").edge.heartbeat_interval;
        assert_eq!(interval, Duration::from_millis(1500));
        for text in ["200", "19ms", "11s", "soon"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn routes_are_off_by_default_and_the_local_table_is_refused() {
        let parse = |arguments: &[&str]| Args::try_parse_from([&["steerage-edge"], arguments].concat());
        assert_eq!(parse(&[]).expect("no flag is needed").edge.routes.route_table, 0);
        assert_eq!(parse(&["--route-table", "70000"]).expect("a table").edge.routes.route_table, 70_000);
        for table in ["255", "-1", "main", "4294967296"] {
            assert!(parse(&["--route-table", table]).is_err(), "{table}");
        }
        assert!(parse(&["--route-withdraw-wait", "0s"]).is_ok());
        assert!(parse(&["--route-withdraw-wait", "61s"]).is_err());
        assert!(parse(&["--hand-over-wait", "10m"]).is_ok());
        assert!(parse(&["--hand-over-wait", "11m"]).is_err());
    }

    #[test]
    fn grace_period_has_room_for_the_hand_over() {
        for (line, is_room) in [
            ("", true),
            ("--hand-over-wait=15s499ms", true),
            ("--hand-over-wait=15s500ms", false),
            ("--hand-over-wait=14s --route-table=83", false),
            ("--hand-over-wait=13s --route-table=83", true),
            ("--hand-over-wait=13s --route-table=83 --route-withdraw-wait=1m", false),
            ("--hand-over-wait=13s --route-withdraw-wait=1m", true),
            // As in the chart.
            ("--hand-over-wait=30s --shutdown-grace-period=40s --route-table=83", true),
            ("--shutdown-grace-period=4s", false),
        ] {
            let arguments = format!("steerage-edge {line}");
            let Args { edge, process, .. } =
                Args::try_parse_from(arguments.split_whitespace()).expect("flags");
            let problem = edge.shutdown_problem(process.admin.shutdown_grace_period);
            assert_eq!(problem.is_none(), is_room, "{line}: {problem:?}");
        }
        let Args { edge, .. } =
            Args::try_parse_from(["steerage-edge", "--hand-over-wait=30s"]).expect("flags");
        assert_eq!(
            edge.shutdown_problem(Duration::from_secs(20)).as_deref(),
            Some("the hand-over may take 34s500ms, and --shutdown-grace-period is 20s")
        );
    }

    #[test]
    fn tunnel_is_off_by_default_and_takes_numbers_of_virtual_networks() {
        let parse = |arguments: &[&str]| Args::try_parse_from([&["steerage-edge"], arguments].concat());
        let TunnelArgs { vni, port, mtu } = parse(&[]).expect("no flag").edge.tunnel;
        assert_eq!((vni, port, mtu), (0, 10_361, 0));
        for (flag, good, bad) in [
            ("--tunnel-vni", "16777215", "16777216"),
            ("--tunnel-port", "4789", "0"),
            ("--tunnel-mtu", "1280", "1279"),
        ] {
            assert!(parse(&[flag, good]).is_ok() && parse(&[flag, bad]).is_err(), "{flag}");
        }
    }

    #[test]
    fn host_names_must_fit_into_object_names() {
        for name in ["edge-1", "a.example", "7"] {
            assert!(host_name(name).is_ok(), "{name}");
        }
        for name in ["", "Edge", "a_b", "-a", "a-", "a..b", &"a".repeat(64)] {
            assert!(host_name(name).is_err(), "{name}");
        }
    }

    #[test]
    fn objects_dir_and_status_dir_require_each_other() {
        let parse = |arguments: &[&str]| Args::try_parse_from([&["steerage-edge"], arguments].concat());
        assert!(parse(&["--objects-dir", "/x"]).is_err());
        assert!(parse(&["--objects-dir", "/x", "--status-dir", "/y"]).is_ok());
        assert!(parse(&["--heartbeat-misses", "1"]).is_err());
    }
}
