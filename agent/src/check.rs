// SPDX-License-Identifier: Apache-2.0
//! What a host needs, and what on it gets in the way: `steerage-agent check` prints it. Pure; [`crate::kernel::host_facts`] reads the
//! facts.

use std::fmt;

use steerage_model::Family;

use crate::foreign::{ForeignChain, Interference, interferences};
use crate::rules::{Feature, Features, Without};

/// The oldest kernel that the rules are written for.
const OLDEST: (u32, u32) = (5, 15);
/// The share of conntrack's table, in percent, from which new connections are in danger.
const NEARLY_FULL: u64 = 80;

/// What is known of a host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostFacts {
    /// As `uname -r` prints it.
    pub kernel: String,
    /// Whether the kernel takes the agent's rules, or why not.
    pub rules: Vec<(Family, Result<(), String>)>,
    /// What the kernel has of what the rules use.
    pub features: Features,
    /// Kernel settings by name, of those that exist.
    pub settings: Vec<(&'static str, u64)>,
    /// The interfaces, without the loopback interface.
    pub interfaces: Vec<Interface>,
    /// Whether one of them is a bridge.
    pub has_bridge: bool,
    /// Chains of other programs.
    pub chains: Vec<ForeignChain>,
    /// iptables of the old kind has tables, which nftables does not show.
    pub has_legacy_iptables: bool,
    /// The agent's own tables by name, each with what is wrong with it as far as that shows without the agent.
    pub own_tables: Vec<(String, Vec<String>)>,
    /// The running agent.
    pub agent: AgentState,
}

/// What the agent of a host says of its tables.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum AgentState {
    /// None runs.
    #[default]
    NotRunning,
    /// It cannot be asked, or does not know yet, and why.
    Unknown(String),
    /// It has compared them: the lines that differ.
    Compared(Vec<String>),
}

impl AgentState {
    /// Reads what `steerage-agent dump` prints.
    pub fn of_dump(text: &str) -> Self {
        let is_mark = |line: &&str| line.starts_with(['-', '+', '!']);
        let last = text.lines().next_back().unwrap_or_default();
        if !last.ends_with(" difference(s)") {
            return Self::Unknown(last.to_owned());
        }
        Self::Compared(text.lines().filter(is_mark).map(|line| line.trim().to_owned()).collect())
    }
}

/// What is known of a network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// The largest packet that it sends, in bytes; `None`: without IPv6 the kernel does not tell.
    pub mtu: Option<u32>,
    /// Its own `rp_filter`. The larger one of this and `net.ipv4.conf.all.rp_filter` decides.
    pub rp_filter: u64,
    /// It has a default route.
    pub is_uplink: bool,
}

/// Kernel settings that [`HostFacts::settings`] may have.
pub const SETTINGS: [&str; 6] = [
    "net.ipv4.ip_forward",
    "net.ipv6.conf.all.forwarding",
    "net.ipv4.conf.all.rp_filter",
    "net.bridge.bridge-nf-call-iptables",
    "net.netfilter.nf_conntrack_count",
    "net.netfilter.nf_conntrack_max",
];

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// As it should be.
    Good,
    /// It may do harm.
    Warning,
    /// Services do not work.
    Error,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Good => "ok",
            Self::Warning => "warning",
            Self::Error => "error",
        })
    }
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub level: Level,
    /// What it is, and what to do.
    pub text: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<8}{}", self.level, self.text)
    }
}

impl HostFacts {
    fn setting(&self, name: &str) -> Option<u64> {
        self.settings.iter().find(|(of, _)| *of == name).map(|(_, value)| *value)
    }

    /// What there is to say of the host, in a fixed order.
    pub fn findings(&self) -> Vec<Finding> {
        let mut found = vec![self.kernel()];
        found.extend(self.rules.iter().map(|(family, result)| rules(*family, result)));
        found.extend(self.features.missing().map(missing));
        found.extend(self.forwarding());
        found.extend(self.mtu());
        found.extend(self.conntrack());
        found.extend(self.own());
        found.extend(self.others());
        found
    }

    /// The agent's own tables. Nothing where there are none, and no agent.
    fn own(&self) -> Vec<Finding> {
        let finding = |level, text| Finding { level, text };
        let damaged = |(table, damage): &(String, Vec<String>)| {
            let text = damage.join(", ");
            let advice = "a running agent repairs it at once, a new one when it starts";
            (!damage.is_empty()).then(|| finding(Level::Error, format!("table {table}: {text}; {advice}")))
        };
        let mut found: Vec<_> = self.own_tables.iter().filter_map(damaged).collect();
        let tables: Vec<_> = self.own_tables.iter().map(|(table, _)| table.as_str()).collect();
        found.extend(match &self.agent {
            AgentState::NotRunning if tables.is_empty() => None,
            AgentState::NotRunning => Some(finding(
                Level::Warning,
                format!(
                    "no agent runs here, and the tables {} serve Services as they last were. Start it, or delete them with \
                     `steerage-agent cleanup`",
                    tables.join(", ")
                ),
            )),
            AgentState::Unknown(why) => Some(finding(Level::Warning, format!("the agent cannot tell: {why}"))),
            AgentState::Compared(lines) => Some(match lines.as_slice() {
                [] => finding(Level::Good, "the agent answers, and its tables hold what they should".to_owned()),
                [first, ..] => finding(
                    Level::Warning,
                    format!(
                        "the agent's tables differ from what it wants in {} place(s), such as `{first}`: look with `steerage-agent dump`",
                        lines.len()
                    ),
                ),
            }),
        });
        found
    }

    fn kernel(&self) -> Finding {
        let mut numbers = self.kernel.split(|c: char| !c.is_ascii_digit()).map(str::parse);
        let version = (numbers.next(), numbers.next());
        let (level, note) = match version {
            (Some(Ok(major)), Some(Ok(minor))) if (major, minor) < OLDEST => (
                Level::Warning,
                format!("; the rules are written for Linux {}.{} and later", OLDEST.0, OLDEST.1),
            ),
            _ => (Level::Good, String::new()),
        };
        Finding { level, text: format!("kernel {}{note}", self.kernel) }
    }

    fn forwarding(&self) -> Vec<Finding> {
        let mut found = Vec::new();
        for (name, level, what) in [
            ("net.ipv4.ip_forward", Level::Error, "IPv4 packets to pods"),
            ("net.ipv6.conf.all.forwarding", Level::Warning, "IPv6 packets to pods"),
        ] {
            match self.setting(name) {
                Some(0) => found.push(Finding {
                    level,
                    text: format!("{name} is 0: the host drops {what}. Set it to 1 with sysctl"),
                }),
                Some(value) => found.push(Finding { level: Level::Good, text: format!("{name} is {value}") }),
                None => {}
            }
        }
        found.extend(self.strict_reverse_path());
        found.extend(self.edge_tunnel());
        if self.has_bridge && self.setting("net.bridge.bridge-nf-call-iptables") == Some(0) {
            found.push(Finding {
                level: Level::Warning,
                text: "net.bridge.bridge-nf-call-iptables is 0: if pods are on a bridge, they do not reach pods of the same node \
                       through a Service. Set it to 1"
                    .to_owned(),
            });
        }
        found
    }

    fn strict_reverse_path(&self) -> Option<Finding> {
        let of_all = self.setting("net.ipv4.conf.all.rp_filter").unwrap_or(0);
        let is_strict =
            |interface: &&Interface| interface.rp_filter.max(of_all) == 1 && !is_of_edge(interface);
        let strict: Vec<_> = self.interfaces.iter().filter(is_strict).collect();
        let (found, at, set) = match strict.as_slice() {
            _ if of_all == 1 => {
                let name = "net.ipv4.conf.all.rp_filter";
                (format!("{name} is 1 (strict)"), "an interface", name.to_owned())
            }
            [] => return None,
            [only] => {
                let name = format!("net.ipv4.conf.{}.rp_filter", only.name);
                (format!("{name} is 1 (strict)"), "this interface", name)
            }
            several => {
                let names = named(several.iter().copied());
                let found = format!("rp_filter is 1 (strict) for the interfaces {names}");
                (found, "one of them", "net.ipv4.conf.NAME.rp_filter".to_owned())
            }
        };
        let text = format!(
            "{found}: the node drops IPv4 packets that arrive at {at} while the route back to their sender leads through another one, \
             as happens with tunnels and with several uplinks. With sysctl, set {set} to 2 if the node has several interfaces"
        );
        Some(Finding { level: Level::Warning, text })
    }

    /// The agent sets it to 2, which holds whatever that of all interfaces is: the larger one decides.
    fn edge_tunnel(&self) -> Option<Finding> {
        let is_wrong = |interface: &&Interface| {
            interface.name == steerage_tunnel::RECEIVERS[0] && interface.rp_filter != 2
        };
        let name = &self.interfaces.iter().find(is_wrong)?.name;
        let text = format!(
            "net.ipv4.conf.{name}.rp_filter is not 2 (loose): the node may drop what edge hosts send through the tunnel, since replies \
             leave by another interface. Set it to 2 with sysctl"
        );
        Some(Finding { level: Level::Error, text })
    }

    /// Pods believe the MTU of their own interface, which is that of the network's device on the host.
    fn mtu(&self) -> Option<Finding> {
        let uplinks = self.interfaces.iter().filter(|interface| interface.is_uplink);
        let (most, uplink) = uplinks.filter_map(|uplink| Some((uplink.mtu?, &uplink.name))).min()?;
        let is_larger = |interface: &&Interface| {
            !interface.is_uplink && interface.mtu.is_some_and(|mtu| mtu > most) && !is_of_edge(interface)
        };
        let larger: Vec<_> = self.interfaces.iter().filter(is_larger).collect();
        let largest = larger.iter().filter_map(|interface| interface.mtu).max();
        Some(if larger.is_empty() {
            Finding {
                level: Level::Good,
                text: format!("no interface has a larger MTU than {uplink} ({most})"),
            }
        } else {
            let (up_to, size) = (if larger.len() > 1 { "up to " } else { "" }, largest.unwrap_or(most));
            let text = format!(
                "the MTU of {} is {up_to}{size} bytes, larger than the {most} of {uplink}, which has the default route: if pods use it, \
                 their large packets do not fit on the way to clients, and are lost where ICMP is filtered. Set the MTU of the pods' \
                 network to {most} bytes at most, and to less with a tunnel",
                named(larger.iter().copied())
            );
            Finding { level: Level::Warning, text }
        })
    }

    fn conntrack(&self) -> Option<Finding> {
        let count = self.setting("net.netfilter.nf_conntrack_count")?;
        let max = self.setting("net.netfilter.nf_conntrack_max").filter(|max| *max > 0)?;
        let text = format!("conntrack has {count} of {max} entries");
        Some(if count.saturating_mul(100) >= max.saturating_mul(NEARLY_FULL) {
            let text =
                format!("{text}: soon new connections are dropped. Raise net.netfilter.nf_conntrack_max");
            Finding { level: Level::Warning, text }
        } else {
            Finding { level: Level::Good, text }
        })
    }

    fn others(&self) -> Vec<Finding> {
        // Whether kube-proxy is replaced is not known here: its tables are reported, with what they mean.
        let report = |interference: &Interference| {
            let level = if interference.is_harmful() { Level::Warning } else { Level::Good };
            Finding { level, text: interference.to_string() }
        };
        let mut found: Vec<_> = interferences(&self.chains, true).iter().map(report).collect();
        if self.has_legacy_iptables {
            found.push(Finding {
                level: Level::Warning,
                text: "iptables-legacy has tables, which nftables does not show: look with `iptables-legacy-save`".to_owned(),
            });
        }
        if found.iter().all(|finding| finding.level == Level::Good) {
            let text = "no other program drops by default, and no rules of kube-proxy".to_owned();
            found.push(Finding { level: Level::Good, text });
        }
        found
    }
}

/// No pod uses it, and the agent sets it up.
fn is_of_edge(interface: &Interface) -> bool {
    steerage_tunnel::RECEIVERS.contains(&interface.name.as_str()) || interface.name == steerage_tunnel::SENDER
}

/// The names of the first three interfaces, and how many more there are.
fn named<'a>(interfaces: impl Iterator<Item = &'a Interface>) -> String {
    let names: Vec<_> = interfaces.map(|interface| interface.name.as_str()).collect();
    let first = names.iter().take(3).copied().collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(3) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

fn missing(feature: Feature) -> Finding {
    let (major, minor) = feature.since();
    let without = feature.without();
    let level = if matches!(without, Without::Fails(_)) { Level::Error } else { Level::Warning };
    let text = format!("the kernel lacks {}, which Linux {major}.{minor} has: {without}", feature.name());
    Finding { level, text }
}

fn rules(family: Family, result: &Result<(), String>) -> Finding {
    match result {
        Ok(()) => Finding { level: Level::Good, text: format!("the kernel takes the rules for {family}") },
        Err(error) => Finding {
            level: Level::Error,
            text: format!(
                "the kernel does not take the rules for {family}: {error}. It needs nf_tables with NAT, sets and hashes"
            ),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> HostFacts {
        HostFacts {
            kernel: "6.1.0-28-amd64".to_owned(),
            rules: vec![(Family::V4, Ok(())), (Family::V6, Ok(()))],
            settings: SETTINGS.into_iter().zip([1, 1, 0, 1, 100, 1000]).collect(),
            interfaces: vec![interface("eth0", 1500, 0), interface("cni0", 1500, 2)],
            has_bridge: true,
            ..HostFacts::default()
        }
    }

    fn interface(name: &str, mtu: u32, rp_filter: u64) -> Interface {
        Interface { name: name.to_owned(), mtu: Some(mtu), rp_filter, is_uplink: name == "eth0" }
    }

    fn with(interfaces: &[Interface]) -> HostFacts {
        let mut facts = good();
        facts.interfaces.extend_from_slice(interfaces);
        facts
    }

    fn set(name: &str, value: u64) -> HostFacts {
        let mut facts = good();
        facts.settings.iter_mut().find(|(of, _)| *of == name).expect("a setting").1 = value;
        facts
    }

    #[test]
    fn each_fault_is_found_and_a_good_host_has_none() {
        assert!(
            good().findings().iter().all(|finding| finding.level == Level::Good),
            "{:?}",
            good().findings()
        );
        let chain = |table: &str, drops| ForeignChain {
            table: table.to_owned(),
            chain: "FORWARD".to_owned(),
            hook: Some("forward"),
            drops,
        };
        for (facts, level, part) in [
            (HostFacts { kernel: "5.10.0".to_owned(), ..good() }, Level::Warning, "kernel 5.10.0; the rules"),
            (HostFacts { kernel: "4.18.0".to_owned(), ..good() }, Level::Warning, "Linux 5.15"),
            (
                HostFacts { rules: vec![(Family::V4, Err("no nat".to_owned()))], ..good() },
                Level::Error,
                "IPv4: no nat",
            ),
            (set("net.ipv4.ip_forward", 0), Level::Error, "net.ipv4.ip_forward is 0"),
            (set("net.ipv6.conf.all.forwarding", 0), Level::Warning, "IPv6 packets"),
            (
                set("net.ipv4.conf.all.rp_filter", 1),
                Level::Warning,
                "set net.ipv4.conf.all.rp_filter to 2 if the node has several interfaces",
            ),
            (
                with(&[interface("vxlan0", 1450, 1)]),
                Level::Warning,
                "net.ipv4.conf.vxlan0.rp_filter is 1 (strict): the node drops IPv4 packets that arrive at this interface",
            ),
            (
                with(&[interface("steerage-vx4", 1500, 1)]),
                Level::Error,
                "net.ipv4.conf.steerage-vx4.rp_filter is not 2 (loose)",
            ),
            (
                with(&["a", "b", "c", "d", "e"].map(|name| interface(name, 1500, 1))),
                Level::Warning,
                "rp_filter is 1 (strict) for the interfaces a, b, c and 2 more: the node drops IPv4 packets that arrive at one of them",
            ),
            (
                with(&[interface("cni1", 9000, 0)]),
                Level::Warning,
                "the MTU of cni1 is 9000 bytes, larger than the 1500 of eth0, which has the default route: if pods use it, ",
            ),
            (set("net.bridge.bridge-nf-call-iptables", 0), Level::Warning, "bridge-nf-call-iptables is 0"),
            (set("net.netfilter.nf_conntrack_count", 800), Level::Warning, "800 of 1000"),
            (
                HostFacts { chains: vec![chain("inet filter", true)], ..good() },
                Level::Warning,
                "FORWARD of table inet filter",
            ),
            (
                HostFacts { chains: vec![chain("ip kube-proxy", false)], ..good() },
                Level::Warning,
                "--cleanup",
            ),
            (
                HostFacts { features: Features::default().without(Feature::Deletion), ..good() },
                Level::Warning,
                "lacks deletion, which Linux 6.5 has: after an endpoint is removed",
            ),
            (
                HostFacts { features: Features::default().without(Feature::Nat), ..good() },
                Level::Error,
                "lacks nat, which Linux 4.18 has: no Service",
            ),
            (HostFacts { has_legacy_iptables: true, ..good() }, Level::Warning, "iptables-legacy-save"),
        ] {
            let found = facts.findings();
            let bad: Vec<_> = found.iter().filter(|finding| finding.level > Level::Good).collect();
            assert!(bad.len() == 1 && bad[0].level == level && bad[0].text.contains(part), "{part}: {bad:?}");
        }
        let mut loose = with(&[interface("vxlan0", 1450, 1)]);
        loose
            .settings
            .iter_mut()
            .find(|(of, _)| *of == "net.ipv4.conf.all.rp_filter")
            .expect("a setting")
            .1 = 2;
        let unknown = with(&[Interface { mtu: None, ..interface("cni1", 0, 0) }]);
        let without_bridge = HostFacts { has_bridge: false, ..set("net.bridge.bridge-nf-call-iptables", 0) };
        // On a host of jumbo frames that is an edge host: strict, because it receives nothing.
        let tunnel = with(&[interface("steerage-vx4", 9000, 2), interface("steerage-vx", 1279, 1)]);
        for facts in [loose, unknown, without_bridge, tunnel] {
            assert!(facts.findings().iter().all(|finding| finding.level == Level::Good), "{facts:?}");
        }
        assert!(
            HostFacts { chains: vec![chain("inet nat", false)], ..good() }.findings() == good().findings()
        );
        let iptables = HostFacts { chains: vec![chain("ip nat", false)], ..good() }.findings();
        assert!(
            iptables.iter().all(|finding| finding.level == Level::Good)
                && iptables.iter().any(|finding| finding.text.starts_with("table ip nat is of iptables"))
        );
    }

    #[test]
    fn own_tables_are_judged_with_and_without_an_agent() {
        let whole = vec![("ip steerage".to_owned(), Vec::new())];
        let dump = |text: &str| AgentState::of_dump(text);
        let (fine, odd) =
            ("= table ip steerage: x\n0 difference(s)\n", "= a\n!   slots-1: b\n1 difference(s)\n");
        for (own_tables, agent, level, part) in [
            (whole.clone(), dump(fine), Level::Good, "the agent answers"),
            (whole.clone(), dump(odd), Level::Warning, "in 1 place(s), such as `!   slots-1: b`"),
            (
                whole.clone(),
                dump("the agent has not listed\n"),
                Level::Warning,
                "cannot tell: the agent has not",
            ),
            (
                whole.clone(),
                AgentState::NotRunning,
                Level::Warning,
                "no agent runs here, and the tables ip steerage",
            ),
            (
                vec![("ip steerage".to_owned(), vec!["it is dormant".to_owned()])],
                dump(fine),
                Level::Error,
                "table ip steerage: it is dormant; a running",
            ),
        ] {
            let found = HostFacts { own_tables, agent, ..good() }.findings();
            let worst = found.iter().max_by_key(|finding| finding.level).map(|finding| finding.level);
            let is_found = found.iter().any(|of| of.level == level && of.text.contains(part));
            assert!(is_found && worst == Some(level), "{part}: {found:?}");
        }
    }
}
