// SPDX-License-Identifier: Apache-2.0
//! What a Service has in the load balancer that it shares with all others: puts it into the document that is in place, and takes it out.
//! Everything that is not the Service's stays. Pure.

mod frontends;
mod left_out;
mod pools;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use steerage_model::{Family, Key};
use steerage_provider_api::{Error, SharedSet};
use steerage_provider_cloud::names;

use crate::config::Config;
use crate::desired::{Nodes, WantedPool, WantedProbe, WantedRule};
use crate::marks::{self, Mark};
use crate::reasons;
use crate::types::{Balancer, BalancerProperties, Frontend, Part, Probe, Ref, Rule};
use pools::used;

/// Azure's limits for a Standard load balancer.
pub(crate) const MOST_FRONTENDS: usize = 600;
pub(crate) const MOST_RULES: usize = 1500;

/// What a Service has in the load balancer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Intent {
    /// All of this.
    Present(Fragment),
    /// The structure that is there, with these nodes.
    Targets(Mark, BTreeMap<Family, WantedPool>),
    /// Its addresses without ports: no packet comes.
    Withdrawn(Mark),
    /// Nothing.
    Absent(Mark, Key),
}

/// The parts of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fragment {
    pub(crate) service: Key,
    pub(crate) mark: Mark,
    /// Whether no public IP says whose the parts are.
    pub(crate) is_listed: bool,
    pub(crate) frontends: Vec<FrontendPart>,
    pub(crate) rules: Vec<WantedRule>,
    pub(crate) probe: WantedProbe,
    pub(crate) others: Others,
}

/// What becomes of the frontends of a Service that have another address than it should have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Others {
    /// They serve as they did: clients know these addresses.
    Serve,
    /// They stay without ports, as long as the security group has rules for them.
    Silent,
    Gone,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FrontendPart {
    pub(crate) family: Family,
    pub(crate) address: FrontendAddress,
    pub(crate) pool: WantedPool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FrontendAddress {
    /// The path of a public IP.
    Public(String),
    Private {
        subnet: String,
        address: Option<IpAddr>,
    },
}

/// The nodes of shared sets, by set.
pub(crate) type Sets = BTreeMap<SharedSet, BTreeMap<Family, Nodes>>;

/// One load balancer.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) config: Config,
    pub(crate) is_internal: bool,
}

impl Layout {
    pub(crate) fn name(&self) -> String {
        let scheme = if self.is_internal { "internal" } else { "external" };
        format!("{}{scheme}", names::prefix(&self.config.cluster))
    }

    pub(crate) fn path(&self) -> String {
        self.config.balancer_path(&self.name())
    }

    /// A load balancer without anything in it.
    pub(crate) fn empty(&self) -> Balancer {
        Balancer {
            name: self.name(),
            location: Some(self.config.location.clone()),
            sku: Some(serde_json::json!({ "name": "Standard" })),
            tags: marks::of_balancer(&self.config.cluster),
            ..Balancer::default()
        }
    }

    /// Refuses a load balancer that has the name and not the tags.
    pub(crate) fn check(&self, balancer: &Balancer) -> Result<(), Error> {
        if marks::is_balancer(&self.config.cluster, &balancer.tags) {
            return Ok(());
        }
        let message = format!(
            "The load balancer {} exists, and its tags are not those of this cluster. Steerage does not change it. If another cluster serves \
             traffic with it, set another --azure-cluster-name here. If this cluster replaces that one, correct these tags: {}. Delete it \
             only if nothing uses it.",
            self.path(),
            marks::shown(&marks::of_balancer(&self.config.cluster))
        );
        Err(Error::invalid(reasons::OBJECT_NOT_OWNED, message))
    }

    fn child(&self, kind: &str, name: &str) -> Ref {
        Ref::to(format!("{}/{kind}/{name}", self.path()))
    }

    fn probe_name(&self, probe: &WantedProbe) -> String {
        let WantedProbe { port, path, interval, threshold } = probe;
        let path = path.as_deref().unwrap_or_default();
        let digest = names::digest(&[path, &interval.to_string(), &threshold.to_string()]);
        format!("{}probe-{port}-{}", names::prefix(&self.config.cluster), &digest[..8])
    }

    fn is_ours(&self, name: &str) -> bool {
        name.starts_with(&names::prefix(&self.config.cluster))
    }

    /// Makes the load balancer have what the Service should have. Whether that changed anything. After an error it is as it was.
    pub(crate) fn apply(
        &self,
        balancer: &mut Balancer,
        intent: &Intent,
        is_refused: &dyn Fn(&IpAddr) -> bool,
    ) -> Result<bool, Error> {
        match intent {
            Intent::Present(fragment) => self.put(balancer, fragment, is_refused),
            Intent::Targets(mark, pools) => Ok(self.retarget(balancer, mark, pools, is_refused)),
            Intent::Withdrawn(mark) => {
                Ok(remove(&mut balancer.properties.rules, |part| self.is_of(mark, part)))
            }
            Intent::Absent(mark, service) => Ok(self.take_out(balancer, mark, service)),
        }
    }

    fn is_of(&self, mark: &Mark, name: &str) -> bool {
        Mark::read(&self.config.cluster, name).as_ref() == Some(mark)
    }

    /// Whether a part is of an earlier Service of the same name.
    fn is_earlier(&self, mark: &Mark, name: &str) -> bool {
        Mark::read(&self.config.cluster, name).is_some_and(|of| of.base == mark.base && of.uid != mark.uid)
    }

    fn put(
        &self,
        balancer: &mut Balancer,
        fragment: &Fragment,
        is_refused: &dyn Fn(&IpAddr) -> bool,
    ) -> Result<bool, Error> {
        let Fragment { service, mark, is_listed, frontends, rules, probe, others } = fragment;
        let names = self.names(&balancer.properties, fragment);
        let is_other = |name: &String| self.is_of(mark, name) && !names.contains(name);
        let is_of_other = |rule: &Part<Rule>| is_other(&rule.properties.frontend.id.name().to_owned());
        let wanted_rules = self.rules(fragment, &names);
        let [all_frontends, all_rules] = self.counts(&balancer.properties, fragment);
        self.check_room(&balancer.properties, mark, all_frontends, all_rules)?;
        for front in frontends {
            self.check_free(&balancer.properties, mark, &front.address)?;
        }
        let mut changed = self.list(balancer, service, *is_listed)?;
        let all = &mut balancer.properties;
        changed |= remove(&mut all.rules, |part| self.is_earlier(mark, part));
        changed |= remove(&mut all.frontends, |part| self.is_earlier(mark, part));
        for (front, name) in frontends.iter().zip(&names) {
            let part = part(&mut all.frontends, name, &mut changed);
            changed |= self.set_address(part, &front.address, front.family);
            changed |= self.set_pool(all, mark, front.family, &front.pool, is_refused);
        }
        let wanted_probe = Probe {
            protocol: if probe.path.is_some() { "Http" } else { "Tcp" }.to_owned(),
            port: probe.port,
            request_path: probe.path.clone(),
            interval_in_seconds: probe.interval,
            threshold: Some(probe.threshold),
            ..Probe::default()
        };
        if !rules.is_empty() {
            let present = part(&mut all.probes, &self.probe_name(probe), &mut changed);
            let rest = present.properties.rest.clone();
            changed |= assign(&mut present.properties, Probe { rest, ..wanted_probe });
        }
        let before = all.rules.len();
        all.rules.retain(|rule| {
            let stays = *others == Others::Serve && is_of_other(rule);
            !self.is_of(mark, &rule.name) || wanted_rules.contains_key(&rule.name) || stays
        });
        changed |= all.rules.len() != before;
        for (name, wanted) in wanted_rules {
            let present = part(&mut all.rules, &name, &mut changed);
            let mut rest = present.properties.rest.clone();
            if present.properties.pool != wanted.pool {
                // It names the old one too.
                rest.remove("backendAddressPools");
            }
            let snat = present.properties.disable_outbound_snat;
            changed |= assign(&mut present.properties, Rule { rest, disable_outbound_snat: snat, ..wanted });
        }
        if *others == Others::Gone {
            changed |= remove(&mut all.frontends, is_other);
        }
        changed |= self.drop_pools(all, mark);
        Ok(changed)
    }

    /// How many frontends and rules a Service will have, with those of its old addresses.
    pub(crate) fn counts(&self, all: &BalancerProperties, fragment: &Fragment) -> [usize; 2] {
        let Fragment { mark, frontends, rules, others, .. } = fragment;
        let names = self.names(all, fragment);
        let is_other = |name: &str| self.is_of(mark, name) && names.iter().all(|of| of != name);
        let is_of_other = |rule: &Part<Rule>| is_other(rule.properties.frontend.id.name());
        let (mut more_frontends, mut more_rules) = (0, 0);
        if *others != Others::Gone {
            more_frontends = all.frontends.iter().filter(|part| is_other(&part.name)).count();
        }
        if *others == Others::Serve {
            more_rules =
                all.rules.iter().filter(|rule| self.is_of(mark, &rule.name) && is_of_other(rule)).count();
        }
        [frontends.len() + more_frontends, frontends.len() * rules.len() + more_rules]
    }

    fn rules(&self, fragment: &Fragment, names: &[String]) -> BTreeMap<String, Rule> {
        let Fragment { mark, frontends, rules, probe, .. } = fragment;
        let of = |front: &FrontendPart, frontend: &str, rule: &WantedRule| {
            let suffix = frontend.strip_prefix(&mark.part("")).unwrap_or_default();
            let name = mark.part(&format!("{}-{}-{suffix}", rule.protocol.to_ascii_lowercase(), rule.port));
            let pool = self.pool_name(mark, front.family, &front.pool);
            let wanted = Rule {
                frontend: self.child("frontendIPConfigurations", frontend),
                pool: Some(self.child("backendAddressPools", &pool)),
                probe: Some(self.child("probes", &self.probe_name(probe))),
                protocol: rule.protocol.to_owned(),
                frontend_port: rule.port,
                backend_port: Some(rule.port),
                floating_ip: Some(true),
                enable_tcp_reset: Some(rule.has_tcp_reset),
                idle_timeout_in_minutes: Some(rule.idle_minutes),
                load_distribution: Some(rule.distribution.to_owned()),
                ..Rule::default()
            };
            (name, wanted)
        };
        let each = frontends.iter().zip(names);
        each.flat_map(|(front, name)| rules.iter().map(move |rule| of(front, name, rule))).collect()
    }

    fn check_room(
        &self,
        all: &BalancerProperties,
        mark: &Mark,
        frontends: usize,
        rules: usize,
    ) -> Result<(), Error> {
        let others = |name: &String| !self.is_of(mark, name) && !self.is_earlier(mark, name);
        let full = |what: &str, has: usize, most: usize| {
            let message = format!(
                "The load balancer {} has {has} {what} of other Services, and Azure allows {most}. No load balancer is created or changed. \
                 Delete Services or ports, or run some of them in another cluster.",
                self.name()
            );
            Err(Error::invalid(reasons::QUOTA_EXCEEDED, message))
        };
        let other_frontends = all.frontends.iter().filter(|part| others(&part.name)).count();
        if other_frontends + frontends > MOST_FRONTENDS {
            return full("frontends", other_frontends, MOST_FRONTENDS);
        }
        let other_rules = all.rules.iter().filter(|part| others(&part.name)).count();
        if other_rules + rules > MOST_RULES {
            return full("rules", other_rules, MOST_RULES);
        }
        Ok(())
    }

    /// Notes in the tags that the Service has parts.
    fn list(&self, balancer: &mut Balancer, service: &Key, is_listed: bool) -> Result<bool, Error> {
        let mut services = marks::listed(&balancer.tags);
        let changed = if is_listed { services.insert(service.clone()) } else { services.remove(service) };
        if changed && is_listed && !marks::is_fair(&services, service.namespace()) {
            let message = format!(
                "The namespace {} has half of the tags of the load balancer {}, which list Services without a public IP of Steerage's. No \
                 load balancer is created or changed. Use shorter names, another namespace, or a public IP of Steerage's.",
                service.namespace(),
                self.name()
            );
            return Err(Error::invalid(reasons::NAMESPACE_LIMIT_EXCEEDED, message));
        }
        if changed && !marks::list(&mut balancer.tags, &services) {
            let message = format!(
                "The tags of the load balancer {} have no room for the name of another Service without a public IP of Steerage's. No load \
                 balancer is created or changed. Use shorter names, or a public IP of Steerage's.",
                self.name()
            );
            return Err(Error::invalid(reasons::QUOTA_EXCEEDED, message));
        }
        Ok(changed)
    }

    fn take_out(&self, balancer: &mut Balancer, mark: &Mark, service: &Key) -> bool {
        let all = &mut balancer.properties;
        let mut changed = remove(&mut all.rules, |part| self.is_of(mark, part));
        changed |= remove(&mut all.frontends, |part| self.is_of(mark, part));
        changed |= remove(&mut all.pools, |part| self.is_of(mark, part));
        let is_recreated = all.frontends.iter().any(|part| self.is_earlier(mark, &part.name));
        let mut services = marks::listed(&balancer.tags);
        if !is_recreated && services.remove(service) {
            // Fewer names fit where more did.
            changed |= marks::list(&mut balancer.tags, &services);
        }
        changed
    }

    /// Gives a Service the parts that it had before.
    pub(crate) fn take_back(&self, balancer: &mut Balancer, before: Option<&Balancer>, mark: &Mark) {
        let (now, had) = (&mut balancer.properties, before.map(|before| &before.properties));
        let is_its = |name: &String| self.is_of(mark, name);
        restore(&mut now.rules, had.map(|had| &had.rules), is_its);
        restore(&mut now.frontends, had.map(|had| &had.frontends), is_its);
        restore(&mut now.pools, had.map(|had| &had.pools), is_its);
        let is_listed = |service: &Key| mark.owner(&self.config.cluster, service).is_some();
        let had_listed = before.map(|before| marks::listed(&before.tags)).unwrap_or_default();
        let mut listed = marks::listed(&balancer.tags);
        listed.retain(|service| !is_listed(service));
        listed.extend(had_listed.into_iter().filter(is_listed));
        marks::list(&mut balancer.tags, &listed);
        let now = &mut balancer.properties;
        // Its probe and its shared pool may be gone with it.
        let probes = used(&now.rules, |rule| rule.probe.as_ref());
        let pools = used(&now.rules, |rule| rule.pool.as_ref());
        let (lost_probes, lost_pools) = (
            had.into_iter()
                .flat_map(|had| &had.probes)
                .filter(|part| probes.contains(&part.name.to_ascii_lowercase())),
            had.into_iter()
                .flat_map(|had| &had.pools)
                .filter(|part| pools.contains(&part.name.to_ascii_lowercase())),
        );
        for part in lost_probes {
            if now.probes.iter().all(|found| found.name != part.name) {
                now.probes.push(part.clone());
            }
        }
        for part in lost_pools {
            if now.pools.iter().all(|found| found.name != part.name) {
                now.pools.push(part.clone());
            }
        }
    }

    /// Whether nothing is left in the load balancer.
    pub(crate) fn is_empty(balancer: &Balancer) -> bool {
        let all = &balancer.properties;
        let has_others = ["inboundNatRules", "inboundNatPools", "outboundRules"].into_iter().any(|key| {
            all.rest.get(key).and_then(serde_json::Value::as_array).is_some_and(|all| !all.is_empty())
        });
        all.frontends.is_empty()
            && all.pools.is_empty()
            && all.rules.is_empty()
            && all.probes.is_empty()
            && !has_others
    }

    /// The Services with parts, as far as their names are known.
    pub(crate) fn marks(&self, balancer: &Balancer) -> BTreeSet<Mark> {
        let read = |part: &Part<Frontend>| Mark::read(&self.config.cluster, &part.name);
        balancer.properties.frontends.iter().filter_map(read).collect()
    }
}

/// What Azure only reports is not sent back.
pub(crate) fn writable(mut balancer: Balancer) -> Balancer {
    const REFERENCES: [&str; 5] =
        ["loadBalancingRules", "inboundNatRules", "inboundNatPools", "outboundRules", "provisioningState"];
    let all = &mut balancer.properties;
    all.provisioning_state = None;
    let rests = (all.frontends.iter_mut().map(|part| &mut part.properties.rest))
        .chain(all.pools.iter_mut().map(|part| &mut part.properties.rest))
        .chain(all.probes.iter_mut().map(|part| &mut part.properties.rest));
    for rest in rests {
        for key in REFERENCES {
            rest.remove(key);
        }
    }
    balancer
}

/// The part of a name, which is added if there is none.
fn part<'a, P: Default>(parts: &'a mut Vec<Part<P>>, name: &str, changed: &mut bool) -> &'a mut Part<P> {
    let at = parts.iter().position(|part| part.name == name).unwrap_or_else(|| {
        *changed = true;
        parts.push(Part::new(name, P::default()));
        parts.len() - 1
    });
    &mut parts[at]
}

fn assign<T: PartialEq>(present: &mut T, wanted: T) -> bool {
    let changed = *present != wanted;
    *present = wanted;
    changed
}

fn restore<P: Clone>(now: &mut Vec<Part<P>>, had: Option<&Vec<Part<P>>>, is_its: impl Fn(&String) -> bool) {
    now.retain(|part| !is_its(&part.name));
    now.extend(had.into_iter().flatten().filter(|part| is_its(&part.name)).cloned());
}

fn remove<P>(parts: &mut Vec<Part<P>>, is_out: impl Fn(&String) -> bool) -> bool {
    let before = parts.len();
    parts.retain(|part| !is_out(&part.name));
    parts.len() != before
}

#[cfg(test)]
mod tests;
