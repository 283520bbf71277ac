// SPDX-License-Identifier: Apache-2.0
//! Pools of nodes in a load balancer: those of single Services, and those that many share. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use steerage_model::Family;
use steerage_provider_api::SharedSet;
use steerage_provider_cloud::names;

use super::{Layout, Sets, assign, part, remove};
use crate::desired::{Nodes, WantedPool};
use crate::marks::{self, LONGEST_NAME, Mark};
use crate::types::{Balancer, BalancerProperties, Part, Pool, PoolAddress, Ref, Rule};

impl Layout {
    fn shared_pool(&self, set: SharedSet, family: Family) -> String {
        let prefix = names::prefix(&self.config.cluster);
        format!("{prefix}nodes-{}-{}", set.as_str(), marks::suffix(family))
    }

    pub(super) fn pool_name(&self, mark: &Mark, family: Family, pool: &WantedPool) -> String {
        match pool {
            WantedPool::Shared(set) => self.shared_pool(*set, family),
            WantedPool::Own(_) => mark.part(&format!("pool-{}", marks::suffix(family))),
        }
    }

    pub(super) fn set_pool(
        &self,
        all: &mut BalancerProperties,
        mark: &Mark,
        family: Family,
        pool: &WantedPool,
        is_refused: &dyn Fn(&IpAddr) -> bool,
    ) -> bool {
        let mut changed = false;
        let present = part(&mut all.pools, &self.pool_name(mark, family, pool), &mut changed);
        if let WantedPool::Own(nodes) = pool {
            changed |= self.set_nodes(&mut present.properties, nodes, is_refused);
        }
        changed
    }

    /// Sets the addresses of a pool. What others added to one that stays remains.
    fn set_nodes(&self, pool: &mut Pool, nodes: &Nodes, is_refused: &dyn Fn(&IpAddr) -> bool) -> bool {
        let is_wanted = |address: &IpAddr| nodes.contains_key(address) && !is_refused(address);
        let mut seen = BTreeSet::new();
        let before = pool.addresses.len();
        pool.addresses
            .retain(|part| part.properties.ip_address.is_some_and(|ip| is_wanted(&ip) && seen.insert(ip)));
        let mut changed = pool.addresses.len() != before;
        for part in &mut pool.addresses {
            let kept = part.properties.ip_address.and_then(|ip| Some((ip, nodes.get(&ip)?)));
            // A node may have the name that this one had, and names are unique.
            if let Some((address, node)) = kept {
                changed |= assign(&mut part.name, address_name(node, address));
            }
        }
        for (address, node) in nodes.iter().filter(|(address, _)| is_wanted(address)) {
            if seen.insert(*address) {
                let properties = PoolAddress {
                    ip_address: Some(*address),
                    virtual_network: Some(Ref::to(&self.config.network)),
                    ..PoolAddress::default()
                };
                pool.addresses.push(Part::new(address_name(node, *address), properties));
                changed = true;
            }
        }
        changed
    }

    /// Pools of a Service, of whatever incarnation, that no rule uses.
    pub(super) fn drop_pools(&self, all: &mut BalancerProperties, mark: &Mark) -> bool {
        let used = used(&all.rules, |rule| rule.pool.as_ref());
        remove(&mut all.pools, |part| {
            (self.is_of(mark, part) || self.is_earlier(mark, part))
                && !used.contains(&part.to_ascii_lowercase())
        })
    }

    /// Points the rules in place at pools with these nodes.
    pub(super) fn retarget(
        &self,
        balancer: &mut Balancer,
        mark: &Mark,
        pools: &BTreeMap<Family, WantedPool>,
        is_refused: &dyn Fn(&IpAddr) -> bool,
    ) -> bool {
        let mut changed = false;
        for (family, pool) in pools {
            let fronts: Vec<Ref> = self
                .frontends(balancer, mark)
                .into_iter()
                .filter(|part| mark.is_frontend(*family, &part.name))
                .map(|part| self.child("frontendIPConfigurations", &part.name))
                .collect();
            let is_used = |rule: &Part<Rule>| {
                self.is_of(mark, &rule.name) && fronts.contains(&rule.properties.frontend)
            };
            // A pool that no rule uses would be removed again, and each time a write would go out for nothing.
            if !balancer.properties.rules.iter().any(is_used) {
                continue;
            }
            changed |= self.set_pool(&mut balancer.properties, mark, *family, pool, is_refused);
            let pool = Some(self.child("backendAddressPools", &self.pool_name(mark, *family, pool)));
            for rule in balancer.properties.rules.iter_mut().filter(|rule| self.is_of(mark, &rule.name)) {
                if fronts.contains(&rule.properties.frontend) && rule.properties.pool != pool {
                    rule.properties.pool.clone_from(&pool);
                    rule.properties.rest.remove("backendAddressPools");
                    changed = true;
                }
            }
        }
        changed | self.drop_pools(&mut balancer.properties, mark)
    }

    /// Fills shared pools, and removes pools and probes of the cluster that no rule uses.
    pub(crate) fn tidy(
        &self,
        balancer: &mut Balancer,
        sets: &Sets,
        is_refused: &dyn Fn(&IpAddr) -> bool,
    ) -> bool {
        let others =
            serde_json::Value::from(balancer.properties.rest.clone()).to_string().to_ascii_lowercase();
        let all = &mut balancer.properties;
        let probes = used(&all.rules, |rule| rule.probe.as_ref());
        let mut changed = remove(&mut all.probes, |name| {
            self.is_ours(name) && !probes.contains(&name.to_ascii_lowercase())
        });
        let pools = used(&all.rules, |rule| rule.pool.as_ref());
        for (set, family, nodes) in sets
            .iter()
            .flat_map(|(set, families)| families.iter().map(move |(family, nodes)| (*set, *family, nodes)))
        {
            let name = self.shared_pool(set, family);
            if let Some(found) = all.pools.iter_mut().find(|part| part.name == name) {
                changed |= self.set_nodes(&mut found.properties, nodes, is_refused);
            }
        }
        let of_sets: Vec<String> = SharedSet::ALL
            .into_iter()
            .flat_map(|set| [Family::V4, Family::V6].map(|family| self.shared_pool(set, family)))
            .collect();
        changed |= remove(&mut all.pools, |name| {
            let lower = name.to_ascii_lowercase();
            of_sets.contains(name) && !pools.contains(&lower) && !others.contains(&format!("/{lower}\""))
        });
        changed
    }
}

/// Names in a pool are unique: two nodes may differ only after what Azure shows.
fn address_name(node: &str, address: IpAddr) -> String {
    if node.len() <= LONGEST_NAME {
        return node.to_owned();
    }
    let digest = names::digest(&[node, &address.to_string()]);
    let shown: String = node.chars().take(LONGEST_NAME - 17).collect();
    format!("{shown}-{digest}")
}

/// Names, in lower case, to which rules refer.
pub(super) fn used(rules: &[Part<Rule>], of: impl Fn(&Rule) -> Option<&Ref>) -> BTreeSet<String> {
    rules.iter().filter_map(|rule| of(&rule.properties)).map(|to| to.id.name().to_ascii_lowercase()).collect()
}
