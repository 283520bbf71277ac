// SPDX-License-Identifier: Apache-2.0
//! Reads what [`crate::check`] judges. Changes nothing: the rules are tried in a transaction that also takes them back.

use std::fs;
use std::path::Path;

use steerage_nft::{Batch, Error, Nft, Table};

use super::foreign_chains::foreign_chains;
use super::load::add_chains;
use super::{FAMILIES, KernelFeatures, kernel_features};
use crate::check::{HostFacts, SETTINGS};
use crate::rules::{BaseRuleset, Features, RulesetConfig};

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
        chains: foreign_chains(&mut nft)?,
        has_legacy_iptables: legacy.iter().any(|path| read(path).is_some_and(|names| !names.is_empty())),
    })
}

pub(super) fn read(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn setting(name: &str) -> Option<u64> {
    read(Path::new("/proc/sys").join(name.replace('.', "/")))?.parse().ok()
}

/// Has the kernel check all sets, chains and rules as the agent writes them for these features, and keep none of them.
fn try_rules(family: steerage_nft::Family, features: &Features) -> Result<(), Error> {
    let config = RulesetConfig {
        affinity: true,
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
    fn facts_are_read_and_nothing_is_left() {
        requires!(NetworkNamespace, Program("nft"));
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
