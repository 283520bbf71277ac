// SPDX-License-Identifier: Apache-2.0
//! What is taken out of a load balancer that Azure refuses with it: Services whose public IP is given up, and Services that Azure names.
//! Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::{FrontendAddress, Layout, remove};
use crate::marks::Mark;
use crate::named_in_refusal::{Names, RefusedItems, refused_items};
use crate::types::{Balancer, Frontend, Part};

impl Layout {
    /// Removes the Services' frontends with these public IPs, by path in lower case, and their rules. The last frontends stay: nobody waits
    /// for them. Whether that changed anything.
    pub(crate) fn leave_out(&self, balancer: &mut Balancer, given_up: &BTreeSet<String>) -> bool {
        let out = self.given_up(balancer, given_up);
        let all = &mut balancer.properties;
        if out.is_empty() || out.len() == all.frontends.len() {
            return false;
        }
        all.frontends.retain(|part| !out.contains(&part.name));
        all.rules.retain(|rule| !out.contains(rule.properties.frontend.id.name()));
        true
    }

    /// Whether there is no frontend but those with these public IPs.
    pub(crate) fn is_given_up(&self, balancer: &Balancer, given_up: &BTreeSet<String>) -> bool {
        let out = self.given_up(balancer, given_up);
        !out.is_empty() && out.len() == balancer.properties.frontends.len()
    }

    /// The names of the Services' frontends with these public IPs.
    fn given_up(&self, balancer: &Balancer, given_up: &BTreeSet<String>) -> BTreeSet<String> {
        let is_out = |part: &&Part<Frontend>| {
            let ip = part.properties.public_ip.as_ref().map(|ip| ip.id.0.to_ascii_lowercase());
            self.is_ours(&part.name) && ip.is_some_and(|ip| given_up.contains(&ip))
        };
        balancer.properties.frontends.iter().filter(is_out).map(|part| part.name.clone()).collect()
    }

    /// Takes out the Services that these words of Azure name, and returns them. At first their rules and their pools: they keep their
    /// addresses. Those that a later word names again have nothing left.
    pub(crate) fn leave_out_named(&self, balancer: &mut Balancer, words: &[String]) -> BTreeSet<Mark> {
        let names = self.all_names(balancer);
        let mut left_out = BTreeSet::new();
        for text in words {
            let RefusedItems::Services(named) = refused_items(text, &names, &[]) else { continue };
            for mark in named {
                let all = &mut balancer.properties;
                remove(&mut all.rules, |part| self.is_of(&mark, part));
                if left_out.contains(&mark) {
                    remove(&mut all.frontends, |part| self.is_of(&mark, part));
                }
                self.drop_pools(all, &mark);
                left_out.insert(mark);
            }
        }
        left_out
    }

    /// What names the Services with frontends.
    fn all_names(&self, balancer: &Balancer) -> BTreeMap<Mark, Names> {
        let all = &balancer.properties;
        let of = |mark: Mark| {
            let mut names = Names { mark: Some(mark.part("").to_ascii_lowercase()), ..Names::default() };
            for address in self.frontends(balancer, &mark).into_iter().filter_map(FrontendAddress::of) {
                names.add_address(&address);
            }
            let rules = all.rules.iter().filter(|rule| self.is_of(&mark, &rule.name));
            for probe in rules.filter_map(|rule| rule.properties.probe.as_ref()) {
                let probes = all.probes.iter().filter(|part| part.name == probe.id.name());
                probes
                    .filter_map(|part| part.properties.request_path.as_ref())
                    .for_each(|path| names.chosen.add(path));
            }
            (mark, names)
        };
        self.marks(balancer).into_iter().map(of).collect()
    }
}
