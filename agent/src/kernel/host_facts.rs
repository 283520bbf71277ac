// SPDX-License-Identifier: Apache-2.0
//! Reads what [`crate::check`] judges. Changes nothing: the rules are tried in a transaction that also takes them back.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use steerage_nft::{Batch, ChainInfo, Error, Nft, RuleInfo, Table};

use super::bridges::has_bridge;
use super::foreign_chains::foreign_chains;
use super::load::add_chains;
use super::{FAMILIES, KernelFeatures, kernel_features};
use crate::check::{AgentState, HostFacts, Interface, SETTINGS};
use crate::rules::{BaseRuleset, Features, RulesetConfig, TABLE, UsedSets};

/// The table in which the rules are tried.
const TRIAL: &str = "steerage-check";

/// The facts of the network namespace of the calling thread.
pub fn host_facts() -> Result<HostFacts, Error> {
    let mut nft = Nft::open()?;
    let KernelFeatures { release, features } = kernel_features()?;
    let tried = |(model, family)| (model, try_rules(family, &features).map_err(|error| error.to_string()));
    let legacy = ["/proc/net/ip_tables_names", "/proc/net/ip6_tables_names"];
    Ok(HostFacts {
        kernel: release,
        rules: FAMILIES.map(tried).into(),
        features: features.clone(),
        settings: SETTINGS.into_iter().filter_map(|name| Some((name, setting(name)?))).collect(),
        interfaces: interfaces(),
        // If that is not known, the host is warned for nothing rather than not at all.
        has_bridge: has_bridge().unwrap_or(true),
        chains: foreign_chains(&mut nft)?,
        own_tables: own_tables(&mut nft)?,
        agent: AgentState::NotRunning,
        has_legacy_iptables: legacy.iter().any(|path| read(path).is_some_and(|names| !names.is_empty())),
    })
}

/// The agent's tables, and what is wrong with them whatever the agent's configuration is.
fn own_tables(nft: &mut Nft) -> Result<Vec<(String, Vec<String>)>, Error> {
    let mut found = Vec::new();
    for (_, family) in FAMILIES {
        let table = Table::new(family, TABLE);
        let info = match nft.table(&table) {
            Err(error) if error.is_unsupported() => continue,
            info => info?,
        };
        let Some(info) = info else { continue };
        let chains = nft.chain_infos(&table)?;
        let mut damage: Vec<_> = info
            .is_dormant
            .then(|| "it is dormant, so that no packet sees it".to_owned())
            .into_iter()
            .collect();
        let base_ruleset = BaseRuleset::new(family, &RulesetConfig::default());
        for chain in base_ruleset.chains.iter().filter(|chain| chain.chain.is_base()) {
            let is_right = |info: &ChainInfo| chain.chain.runs_as(info) && chain.chain.has_policy_of(info);
            match chains.iter().find(|info| info.name == chain.name) {
                None => damage.push(format!("chain {} is missing", chain.name)),
                Some(info) if is_right(info) => {}
                Some(_) => damage.push(format!("chain {} has another hook, priority or policy", chain.name)),
            }
        }
        let rules = by_chain_with_comments(nft.rules(&table)?);
        let has_digest = |chain: &&ChainInfo| {
            let comment = rules.get(&chain.name).and_then(Option::as_ref);
            comment.is_some_and(|comment| comment.starts_with(&format!("{} ", chain.name)))
        };
        let others = chains.iter().filter(|chain| !has_digest(chain));
        damage
            .extend(others.map(|chain| format!("chain {} does not begin with the agent's rule", chain.name)));
        found.push((table.to_string(), damage));
    }
    Ok(found)
}

/// The comment of the first rule of each chain.
fn by_chain_with_comments(rules: Vec<RuleInfo>) -> BTreeMap<String, Option<String>> {
    let mut first = BTreeMap::new();
    for rule in rules {
        first.entry(rule.chain).or_insert(rule.comment);
    }
    first
}

pub(super) fn read(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn setting(name: &str) -> Option<u64> {
    read(Path::new("/proc/sys").join(name.replace('.', "/")))?.parse().ok()
}

/// The interfaces by name. `/proc/sys/net` and `/proc/thread-self` are those of the thread's network namespace, which `/sys` may not be.
fn interfaces() -> Vec<Interface> {
    let uplinks = uplinks();
    let names = fs::read_dir("/proc/sys/net/ipv4/conf").into_iter().flatten().flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    let mut interfaces: Vec<_> = names
        .filter(|name| !["all", "default", "lo"].contains(&name.as_str()))
        .map(|name| Interface {
            mtu: read(format!("/proc/sys/net/ipv6/conf/{name}/mtu")).and_then(|mtu| mtu.parse().ok()),
            rp_filter: read(format!("/proc/sys/net/ipv4/conf/{name}/rp_filter"))
                .and_then(|value| value.parse().ok())
                .unwrap_or(0),
            is_uplink: uplinks.contains(&name),
            name,
        })
        .collect();
    interfaces.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    interfaces
}

/// The interfaces with a default route: in these files the first columns are the interface, the destination and, of IPv6, its length
/// and at the end the interface.
fn uplinks() -> Vec<String> {
    let (v4, v6) = (read("/proc/thread-self/net/route"), read("/proc/thread-self/net/ipv6_route"));
    let v4 = v4.iter().flat_map(|routes| routes.lines()).filter_map(|line| {
        let columns: Vec<_> = line.split_whitespace().collect();
        (columns.get(1) == Some(&"00000000") && columns.get(7) == Some(&"00000000"))
            .then(|| columns[0].to_owned())
    });
    let v6 = v6.iter().flat_map(|routes| routes.lines()).filter_map(|line| {
        let mut columns = line.split_whitespace();
        let is_default = columns.next()?.bytes().all(|byte| byte == b'0') && columns.next()? == "00";
        columns.last().filter(|_| is_default).map(str::to_owned)
    });
    v4.chain(v6).collect()
}

/// Has the kernel check all sets, chains and rules as the agent writes them for these features, and keep none of them.
fn try_rules(family: steerage_nft::Family, features: &Features) -> Result<(), Error> {
    let config = RulesetConfig {
        used: UsedSets::all(),
        drop_invalid: true,
        features: features.clone(),
        ..RulesetConfig::default()
    };
    let base_ruleset = BaseRuleset::new(family, &config);
    let table = Table::new(family, TRIAL);
    let mut batch = Batch::new();
    // Its base chains see no packets.
    batch.add_dormant_table(&table);
    for (_, set) in &base_ruleset.sets {
        batch.add_set(&table, set);
    }
    for counter in &base_ruleset.counters {
        batch.add_counter(&table, counter);
    }
    add_chains(&mut batch, &table, &base_ruleset.chains);
    batch.delete_table(&table);
    Nft::open()?.commit(batch)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use steerage_requirements::{in_new_netns, requires};

    use super::*;

    fn nft(line: &str) {
        assert!(Command::new("nft").arg(line).status().is_ok_and(|status| status.success()), "nft {line}");
    }

    #[test]
    fn damage_of_own_tables_is_found() {
        requires!(NetworkNamespace, Program("nft"));
        in_new_netns(|| {
            let own = || own_tables(&mut Nft::open().unwrap()).unwrap();
            assert_eq!(own(), []);
            let mut dataplane = crate::kernel::Dataplane::open().unwrap();
            dataplane.write(&mut crate::rules::Ruleset::default(), BTreeMap::new()).unwrap();
            let whole = ["ip steerage", "ip6 steerage"].map(|table| (table.to_owned(), Vec::new()));
            assert_eq!(own(), whole);
            for (harm, part) in [
                (
                    "add chain ip steerage output { policy drop ; }",
                    "output has another hook, priority or policy",
                ),
                ("flush chain ip steerage services", "chain services does not begin"),
                ("add chain ip steerage other", "chain other does not begin"),
                ("add table ip steerage { flags dormant ; }", "it is dormant"),
                ("flush chain ip steerage input; delete chain ip steerage input", "chain input is missing"),
            ] {
                nft(harm);
                let [(_, damage), (_, none)] = &own()[..] else { panic!("two tables") };
                assert!(
                    damage.iter().any(|found| found.contains(part)) && none.is_empty(),
                    "{part}: {damage:?}"
                );
            }
        });
    }

    #[test]
    fn facts_are_read_and_nothing_is_left() {
        requires!(NetworkNamespace, Program("nft"), Program("ip"));
        in_new_netns(|| {
            nft("add table inet firewall");
            nft("add chain inet firewall pass { type filter hook forward priority 0 ; policy drop ; }");
            nft("add chain inet firewall plain");
            nft("add chain inet firewall last { type filter hook input priority 0 ; }");
            nft("add rule inet firewall last tcp dport 22 accept");
            nft("add rule inet firewall last reject");
            nft(
                "add table ip kube-proxy; add chain ip kube-proxy nat { type nat hook output priority -100 ; }",
            );
            for line in [
                "link set lo up",
                "link add out0 mtu 1400 type veth peer name pods0 mtu 9000",
                "link set out0 up",
                "link set pods0 up",
                "address add 192.0.2.2/24 dev out0",
                "address add 2001:db8::2/64 dev pods0 nodad",
                "route add default via 192.0.2.1",
            ] {
                let words = line.split(' ');
                assert!(
                    Command::new("ip").args(words).status().is_ok_and(|status| status.success()),
                    "ip {line}"
                );
            }
            fs::write("/proc/sys/net/ipv4/conf/pods0/rp_filter", "1").unwrap();
            let interface = |name: &str, mtu, rp_filter, is_uplink| Interface {
                name: name.to_owned(),
                mtu: Some(mtu),
                rp_filter,
                is_uplink,
            };
            let rp_filter = setting("net.ipv4.conf.out0.rp_filter").unwrap();
            assert_eq!(
                interfaces(),
                [interface("out0", 1400, rp_filter, true), interface("pods0", 9000, 1, false)]
            );
            let route = ["-6", "route", "add", "default", "via", "2001:db8::1"];
            assert!(Command::new("ip").args(route).status().is_ok_and(|status| status.success()));
            assert!(interfaces().iter().all(|interface| interface.is_uplink));
            let facts = host_facts().unwrap();
            assert!(facts.rules.iter().all(|(_, result)| result.is_ok()), "{:?}", facts.rules);
            assert!(!facts.kernel.is_empty() && facts.settings.iter().any(|(name, _)| *name == SETTINGS[0]));
            let chains: Vec<_> = facts
                .chains
                .iter()
                .map(|chain| (chain.table.as_str(), chain.chain.as_str(), chain.hook, chain.drops))
                .collect();
            let expected = [
                ("ip kube-proxy", "nat", Some("output"), false),
                ("inet firewall", "pass", Some("forward"), true),
                ("inet firewall", "last", Some("input"), true),
            ];
            assert_eq!(chains, expected);
            let left = Nft::open().unwrap().tables(steerage_nft::Family::Ip).unwrap();
            assert_eq!(left.iter().map(|table| table.name.as_str()).collect::<Vec<_>>(), ["kube-proxy"]);
        });
    }
}
