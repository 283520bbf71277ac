// SPDX-License-Identifier: Apache-2.0
//! How many elements of the kernel's sets and maps each Service may have: a tenant must not exhaust the memory of every node, nor
//! make the writes of the others slow. Pure.
//!
//! A namespace whose Services need more than its budget is shared out evenly: each has what it needs up to a limit that is the same
//! for all. So small Services stay whole, and large ones are [`Reduced`]. The limit falls at once, and rises only after minutes: else one
//! Service that comes and goes would have all nodes rewrite all large Services of its namespace each time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use steerage_model::Key;

/// Every Service has this many elements, however many share the namespace's budget: the cluster's own limit for Services bounds them.
pub const LEAST_ELEMENTS: usize = 256;

/// A limit rises once the Services of the namespace have needed less for this long.
const RAISE_AFTER: Duration = Duration::from_mins(5);

/// Elements of a frontend besides its endpoints, at most: it is in so many sets.
pub const FRONTEND_ELEMENTS: usize = 8;

/// The elements that a node has room for, by default 100,000 for a Service and 250,000 for a namespace. A million take about 70 MB of
/// the kernel's memory, and twice that in the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ElementLimits {
    /// For a Service.
    pub service: usize,
    /// For a namespace.
    pub namespace: usize,
}

impl Default for ElementLimits {
    fn default() -> Self {
        Self { service: 100_000, namespace: 250_000 }
    }
}

/// How a Service is served that needs more elements than it may have, or, if it does not, more endpoints than a list has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reduced {
    /// The elements that it needs.
    pub needs: usize,
    /// The elements that it may have.
    pub limit: usize,
    /// Each of its ports leads to so many endpoints at most.
    pub endpoints: usize,
    /// Clients in so many of its source ranges are dropped, although they are allowed.
    pub sources: usize,
    /// So many of its addresses with protocol and port are not served at all.
    pub frontends: usize,
}

/// A Service that is reduced.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReducedService {
    /// The Service.
    pub service: Key,
    /// How it is served.
    pub reduced: Reduced,
}

/// What the Services of all namespaces need, and what each may have.
#[derive(Debug, Default)]
pub struct Budgets {
    limits: ElementLimits,
    namespaces: BTreeMap<String, Namespace>,
    /// Namespaces whose needs changed since [`Budgets::settle`].
    changed: BTreeSet<String>,
}

#[derive(Debug)]
struct Namespace {
    /// What each Service needs, up to the limit for a Service.
    needs: BTreeMap<Key, usize>,
    total: usize,
    /// What each Service may have.
    limit: usize,
    /// When the limit may rise.
    raise_at: Option<Instant>,
}

impl Budgets {
    /// With these limits.
    pub fn new(limits: ElementLimits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// Notes how many elements a Service needs; 0 if it is gone.
    pub fn set(&mut self, service: &Key, elements: usize) {
        let needs = elements.min(self.limits.service);
        let name = service.namespace();
        if needs > 0 && !self.namespaces.contains_key(name) {
            let new =
                Namespace { needs: BTreeMap::new(), total: 0, limit: self.limits.service, raise_at: None };
            self.namespaces.insert(name.to_owned(), new);
        }
        let Some(namespace) = self.namespaces.get_mut(name) else { return };
        let old = if needs > 0 {
            namespace.needs.insert(service.clone(), needs)
        } else {
            namespace.needs.remove(service)
        };
        let old = old.unwrap_or_default();
        namespace.total = namespace.total + needs - old;
        if needs != old {
            self.changed.insert(name.to_owned());
        }
    }

    /// How many elements a Service may have.
    pub fn limit(&self, service: &Key) -> usize {
        self.namespaces.get(service.namespace()).map_or(self.limits.service, |namespace| namespace.limit)
    }

    /// When the limit of a namespace may rise.
    pub fn next(&self) -> Option<Instant> {
        self.namespaces.values().filter_map(|namespace| namespace.raise_at).min()
    }

    /// Shares out the budgets anew, after changes. Returns the Services that now get more or less. Leaves the namespaces of which not
    /// all changes are known yet: what they need meanwhile may be too much.
    pub fn settle(&mut self, now: Instant, is_incomplete: impl Fn(&str) -> bool) -> BTreeSet<Key> {
        let is_due = |namespace: &Namespace| namespace.raise_at.is_some_and(|at| at <= now);
        let due =
            self.namespaces.iter().filter(|(name, namespace)| is_due(namespace) && !is_incomplete(name));
        let mut names: BTreeSet<_> = due.map(|(name, _)| name.clone()).collect();
        names.extend(self.changed.extract_if(.., |name| !is_incomplete(name)));
        let mut concerned = BTreeSet::new();
        for name in names {
            let Some(namespace) = self.namespaces.get_mut(&name) else { continue };
            let before = namespace.limit;
            namespace.settle(self.limits, now);
            if namespace.limit != before {
                let unchanged = before.min(namespace.limit);
                let needs = namespace.needs.iter().filter(|(_, needs)| **needs > unchanged);
                concerned.extend(needs.map(|(service, _)| service.clone()));
            }
            if namespace.needs.is_empty() {
                self.namespaces.remove(&name);
            }
        }
        concerned
    }
}

impl Namespace {
    fn settle(&mut self, limits: ElementLimits, now: Instant) {
        let limit = self.shared_out(limits);
        let may_change = limit <= self.limit || *self.raise_at.get_or_insert(now + RAISE_AFTER) <= now;
        if may_change {
            (self.limit, self.raise_at) = (limit, None);
        }
    }

    /// The limit with which all Services together stay within the namespace's budget.
    fn shared_out(&self, limits: ElementLimits) -> usize {
        if self.total <= limits.namespace {
            return limits.service;
        }
        let mut needs: Vec<_> = self.needs.values().copied().collect();
        needs.sort_unstable();
        let mut left = limits.namespace;
        for (at, need) in needs.iter().enumerate() {
            let share = left / (needs.len() - at);
            if *need > share {
                return step(share).max(LEAST_ELEMENTS).min(limits.service);
            }
            left -= need;
        }
        limits.service
    }
}

/// The next lower one of a few steps, two for each power of two: else each change in the namespace would rewrite all its large Services.
fn step(share: usize) -> usize {
    let Some(exponent) = share.checked_ilog2() else { return 0 };
    let power = 1_usize << exponent;
    if share >= power + power / 2 { power + power / 2 } else { power }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: ElementLimits = ElementLimits { service: 10_000, namespace: 30_000 };

    fn key(namespace: &str, number: usize) -> Key {
        Key::new(namespace, number.to_string())
    }

    #[test]
    fn large_services_of_a_namespace_share_its_budget_and_others_do_not_notice() {
        let (mut budgets, now) = (Budgets::new(LIMITS), Instant::now());
        budgets.set(&key("other", 1), 10_000);
        budgets.set(&key("tenant", 1), 50_000);
        assert_eq!(budgets.settle(now, |_| false), BTreeSet::new());
        assert_eq!(budgets.limit(&key("tenant", 1)), 10_000, "the limit for a Service");
        for number in 2..=10 {
            budgets.set(&key("tenant", number), 9_000);
        }
        budgets.set(&key("tenant", 11), 300);
        let large: BTreeSet<_> = (1..=10).map(|number| key("tenant", number)).collect();
        assert_eq!(budgets.settle(now, |_| false), large);
        assert_eq!(budgets.limit(&key("tenant", 1)), 2_048, "a tenth of what is left, in steps");
        assert_eq!(budgets.limit(&key("other", 1)), 10_000);
        budgets.set(&key("tenant", 10), 8_500);
        assert_eq!(budgets.settle(now, |_| false), BTreeSet::new(), "the step is the same");
        for number in 1..=9 {
            budgets.set(&key("tenant", number), 0);
        }
        assert_eq!(budgets.settle(now, |_| false), BTreeSet::new(), "it rises later");
        assert_eq!(budgets.next(), Some(now + RAISE_AFTER));
        assert_eq!(budgets.settle(now + RAISE_AFTER, |_| false), [key("tenant", 10)].into());
        assert_eq!((budgets.limit(&key("tenant", 10)), budgets.next()), (10_000, None));
        budgets.set(&key("tenant", 10), 0);
        budgets.set(&key("tenant", 11), 0);
        budgets.settle(now, |_| false);
        assert_eq!(budgets.namespaces.len(), 1);
    }

    /// A large Service that a tenant creates and deletes again and again.
    #[test]
    fn service_that_comes_and_goes_changes_the_others_once() {
        let (mut budgets, start) = (Budgets::new(LIMITS), Instant::now());
        for number in 1..=3 {
            budgets.set(&key("tenant", number), 10_000);
        }
        budgets.settle(start, |_| false);
        let mut rewritten = 0;
        for second in 0..600 {
            budgets.set(&key("tenant", 4), if second % 2 == 0 { 10_000 } else { 0 });
            let concerned = budgets.settle(start + Duration::from_secs(second), |_| false);
            rewritten += concerned.iter().filter(|service| service.name() != "4").count();
        }
        assert_eq!(rewritten, 3, "each of the others once");
    }

    proptest! {
        #[test]
        fn a_namespace_stays_within_its_budget_and_whom_it_does_not_concern_stays_whole(
            changes in proptest::collection::vec((0_usize..20, 0_usize..15_000), 1..60)
        ) {
            let (mut budgets, mut now) = (Budgets::new(LIMITS), Instant::now());
            let mut needs: BTreeMap<usize, usize> = BTreeMap::new();
            let mut given: BTreeMap<usize, usize> = BTreeMap::new();
            for (number, elements) in changes {
                budgets.set(&key("tenant", number), elements);
                needs.insert(number, elements.min(LIMITS.service));
                let concerned = budgets.settle(now, |_| false);
                let limit = budgets.limit(&key("tenant", 0));
                let has: BTreeMap<_, _> = needs.iter().map(|(at, needs)| (*at, *needs.min(&limit))).collect();
                prop_assert!(has.values().sum::<usize>() <= LIMITS.namespace.max(has.len() * LEAST_ELEMENTS));
                for (other, elements) in &has {
                    let told = *other == number || concerned.contains(&key("tenant", *other));
                    prop_assert!(told || given.get(other) == Some(elements), "{} was not told", other);
                }
                given = has;
                // Some time later, half of what there is at least, as far as it is needed.
                now += RAISE_AFTER;
                let concerned = budgets.settle(now, |_| false);
                let limit = budgets.limit(&key("tenant", 0));
                let has: BTreeMap<_, _> = needs.iter().map(|(at, needs)| (*at, *needs.min(&limit))).collect();
                for (other, elements) in &has {
                    let told = concerned.contains(&key("tenant", *other));
                    prop_assert!(told || given.get(other) == Some(elements), "{} was not told", other);
                }
                let wanted: usize = needs.values().sum();
                prop_assert!(has.values().sum::<usize>() >= wanted.min(LIMITS.namespace) / 2);
                given = has;
            }
        }
    }
}
