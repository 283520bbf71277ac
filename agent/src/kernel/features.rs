// SPDX-License-Identifier: Apache-2.0
//! Finds out what the kernel has of what the rules use: each [`Feature`] is tried in a transaction that also takes it back. No table
//! of anybody is read or changed, and no packet sees a trial, since its table is dormant.

use std::time::Duration;

use steerage_nft::{
    Batch, Chain, ChainType, Ct, DataType, Direction, DynamicOp, Errno, Error, Expression, Family,
    FibAddress, Field, Hook, Limit, Nft, Reject, Rule, Set, Table,
};

use super::{FAMILIES, has_ipv6, host_facts};
use crate::kernel_release::KernelVersion;
use crate::rules::{Feature, Features};

/// The names of a trial's chain and map.
const CHAIN: &str = "rules";
const MAP: &str = "map";
const TIMEOUT: Duration = Duration::from_secs(1);

/// A kernel and what it has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelFeatures {
    /// As `uname -r` prints it.
    pub release: String,
    /// What it has.
    pub features: Features,
}

/// Tries every feature in the network namespace of the calling thread. A feature that one family lacks counts as missing, unless the
/// kernel lacks the family, or the host has disabled it.
pub fn kernel_features() -> Result<KernelFeatures, Error> {
    let release = host_facts::read("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut nft = Nft::open()?;
    let mut features = Features::default();
    for (model, family) in FAMILIES {
        if model == steerage_model::Family::V6 && !has_ipv6() {
            continue;
        }
        match nft.tables(family) {
            Err(error) if error.is_unsupported() => continue,
            tables => tables?,
        };
        // Mostly there is nothing to look for, and each transaction that deletes something takes the kernel some milliseconds.
        if has(&mut nft, family, &Feature::ALL)? {
            continue;
        }
        for feature in Feature::ALL {
            if !has(&mut nft, family, &[feature])? {
                features = features.without(feature);
            }
        }
    }
    if !frees_deleted_elements(&release) {
        features = features.without(Feature::Deletion);
    }
    Ok(KernelFeatures { release, features })
}

/// No request tells this one.
fn frees_deleted_elements(release: &str) -> bool {
    let texts =
        ["/proc/version", "/proc/version_signature"].map(|path| host_facts::read(path).unwrap_or_default());
    KernelVersion::new(release, texts.iter().map(String::as_str))
        .is_some_and(KernelVersion::frees_deleted_elements)
}

/// Whether the kernel has all of these.
fn has(nft: &mut Nft, family: Family, features: &[Feature]) -> Result<bool, Error> {
    let mut batch = Batch::new();
    for feature in features {
        let table = trial(family, *feature);
        if *feature == Feature::OwnedTables {
            batch.add_owned_table(&table);
        } else {
            batch.add_dormant_table(&table);
            try_rules(&mut batch, &table, family, *feature);
        }
        batch.delete_table(&table);
    }
    match nft.commit(batch) {
        Ok(()) => Ok(true),
        // Without CAP_NET_ADMIN everything is refused, and so it is if another program has a table of this name.
        Err(Error::Kernel(error)) if !matches!(error.errno, Errno::EPERM | Errno::EEXIST) => {
            tracing::debug!(%error, "kernel lacks a feature");
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// The table in which a feature is tried.
fn trial(family: Family, feature: Feature) -> Table {
    Table::new(family, format!("steerage-trial-{}", feature.name()))
}

fn try_rules(batch: &mut Batch, table: &Table, family: Family, feature: Feature) {
    let filter = |hook| Chain::base(CHAIN, ChainType::Filter, hook, 0);
    let nat = |name: &str, hook| Chain::base(name, ChainType::Nat, hook, 0);
    let jhash =
        |modulus, offset| Expression::Jhash { of: vec![Expression::saddr(family)], modulus, seed: 1, offset };
    let address = if family == Family::Ip6 { DataType::Ipv6Addr } else { DataType::Ipv4Addr };
    let map = Set::new(MAP, &[address]).maps_to(&[DataType::Mark]).expiring(None).dynamic().size(1);
    let clients = [Expression::saddr(family)];
    let value = [Expression::Meta(steerage_nft::Meta::Mark)];
    let rule = match feature {
        Feature::Nat => {
            let map = Set::new(MAP, &[DataType::Mark]).maps_to(&[address, DataType::InetService]);
            batch
                .add_set(table, &map)
                .add_chain(table, &nat("to", Hook::Prerouting))
                .add_chain(table, &nat("from", Hook::Postrouting));
            batch.add_rule(table, "to", &Rule::new().map(MAP, &[jhash(1, 0)]).dnat(family));
            batch.add_rule(table, "from", &Rule::new().masquerade_random());
            return;
        }
        Feature::Reject => {
            batch.add_chain(table, &nat(CHAIN, Hook::Prerouting));
            Rule::new().reject(Reject::PortUnreachable(family))
        }
        Feature::Hashes => {
            batch.add_chain(table, &filter(Hook::Prerouting));
            Rule::new().equals(&jhash(u32::MAX, 0), Field::Number(0)).equals(&jhash(1, 1), Field::Number(1))
        }
        Feature::AddressTypes => {
            batch.add_chain(table, &nat(CHAIN, Hook::Postrouting));
            let local = |rule: Rule, address| rule.equals(&Expression::FibType(address), Expression::LOCAL);
            local(local(Rule::new(), FibAddress::Source), FibAddress::Destination)
        }
        Feature::ConnectionTuples => {
            batch.add_chain(table, &filter(Hook::Prerouting));
            let reply = Expression::Ct(Ct::SourcePort(Direction::Reply));
            let client = Expression::Ct(Ct::Source(family, Direction::Original));
            let any = vec![0; if family == Family::Ip6 { 16 } else { 4 }];
            Rule::new().equals(&reply, Field::Port(1)).equals_bytes(&client, &any)
        }
        Feature::DynamicMaps => {
            batch.add_set(table, &map).add_chain(table, &filter(Hook::Prerouting));
            Rule::new().dynamic(DynamicOp::Update, MAP, &clients, &value, Some(TIMEOUT))
        }
        Feature::Counters => {
            batch.add_counter(table, "counter").add_chain(table, &filter(Hook::Forward));
            Rule::new().count("counter")
        }
        Feature::Duplicates => {
            let map = Set::new(MAP, &[address]).maps_to(&[address]);
            batch.add_set(table, &map).add_chain(table, &filter(Hook::Prerouting));
            Rule::new().map(MAP, &clients).duplicate()
        }
        Feature::Limits => {
            let set = Set::new(MAP, &[address]).expiring(None).dynamic().size(1);
            batch.add_set(table, &set).add_chain(table, &filter(Hook::Prerouting));
            let limit = Limit { packets: 1, unit: 1, burst: 1, over: true };
            Rule::new().dynamic_limit(MAP, &clients, TIMEOUT, limit)
        }
        Feature::Deletion => {
            batch.add_set(table, &map).add_chain(table, &filter(Hook::Prerouting));
            Rule::new().dynamic(DynamicOp::Delete, MAP, &clients, &value, None)
        }
        // No rule.
        Feature::OwnedTables => return,
    };
    batch.add_rule(table, CHAIN, &rule);
}

#[cfg(test)]
mod tests {
    use steerage_requirements::{in_new_netns, requires};

    use super::*;

    #[test]
    fn features_are_tried_and_nothing_is_left() {
        requires!(NetworkNamespace);
        in_new_netns(|| {
            let KernelFeatures { release, features } = kernel_features().unwrap();
            // Whatever kernel the tests run on: it has all but perhaps the one that is known by the version.
            let missing: Vec<_> =
                features.missing().filter(|feature| *feature != Feature::Deletion).collect();
            assert!(!release.is_empty() && missing.is_empty(), "{release}: {features}");
            let mut nft = Nft::open().unwrap();
            for (_, family) in FAMILIES {
                assert!(nft.tables(family).unwrap().is_empty());
                for feature in Feature::ALL {
                    assert!(has(&mut nft, family, &[feature]).unwrap(), "{family:?} {feature:?}");
                }
            }
        });
    }

    #[test]
    fn refused_trial_is_a_missing_feature_and_a_foreign_table_is_an_error() {
        requires!(NetworkNamespace);
        in_new_netns(|| {
            let mut nft = Nft::open().unwrap();
            // The kernel translates no addresses in this family.
            assert!(!has(&mut nft, Family::Netdev, &[Feature::Nat]).unwrap());
            let mut batch = Batch::new();
            batch.add_table(&trial(Family::Ip, Feature::Counters), None);
            nft.commit(batch).unwrap();
            assert!(has(&mut nft, Family::Ip, &[Feature::Counters]).is_err());
            assert_eq!(nft.tables(Family::Ip).unwrap().len(), 1, "it is left alone");
        });
    }
}
