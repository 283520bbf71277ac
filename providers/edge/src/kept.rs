// SPDX-License-Identifier: Apache-2.0
//! Addresses that load balancers keep although no pool would give them any more, after a pool was changed or deleted. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use steerage_edge_api::{LabelSelector, Labels};
use steerage_provider_api::{NoticeSubject, Owner, ProviderNotice};
use tokio::time::Instant;

use crate::{ASSIGN_ADDRESS, Pool};

/// So long a state lasts before it is told: the chart deletes a pool to change it, and creates it again.
pub(crate) const NOTICE_DELAY: Duration = Duration::from_secs(5);

/// Kept addresses that users are told of at once: other events wait in the same queue.
const MOST_TOLD: usize = 50;

/// Event of a Service whose address no pool would give it any more.
pub const ADDRESS_KEPT: &str = "AddressKept";

/// Why no pool would give the address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum KeptReason {
    /// No pool has it.
    Outside,
    /// The pools that have it are not for the Service.
    NotAdmitted,
}

/// An address, and the load balancer that keeps it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Kept {
    /// The kind and name of the Service, or of the object if it names no Service.
    pub(crate) holder: String,
    pub(crate) address: IpAddr,
    pub(crate) why: KeptReason,
    pub(crate) owner: Option<Owner>,
}

/// What is known of a Service that has an address. What is not known keeps no pool from being for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tenant<'a> {
    pub(crate) namespace: &'a str,
    pub(crate) namespace_labels: Option<&'a Labels>,
    pub(crate) labels: Option<&'a Labels>,
}

impl Tenant<'_> {
    fn is_refused_by(self, pool: &Pool) -> bool {
        let refuses = |selector: Option<&LabelSelector>, labels: Option<&Labels>| {
            selector.zip(labels).is_some_and(|(selector, labels)| !selector.matches(labels))
        };
        let is_listed =
            pool.namespaces.is_empty() || pool.namespaces.iter().any(|name| name == self.namespace);
        !is_listed
            || refuses(pool.namespace_selector.as_ref(), self.namespace_labels)
            || refuses(pool.service_selector.as_ref(), self.labels)
    }

    /// Why no pool would give the Service this address.
    pub(crate) fn why_kept(self, address: IpAddr, pools: &[Pool]) -> Option<KeptReason> {
        let mut of_address = pools.iter().filter(|pool| pool.contains(address)).peekable();
        if of_address.peek().is_none() {
            return Some(KeptReason::Outside);
        }
        of_address.all(|pool| self.is_refused_by(pool)).then_some(KeptReason::NotAdmitted)
    }
}

/// Whether a pool is not for all Services.
pub(crate) fn is_restricted(pool: &Pool) -> bool {
    !pool.namespaces.is_empty() || pool.namespace_selector.is_some() || pool.service_selector.is_some()
}

/// Since when each is so, and whether users were told.
pub(crate) type KnownKept = BTreeMap<Kept, (Instant, bool)>;

/// The events of those that are so for a while and were not told yet, at most [`MOST_TOLD`]. Whether no other has to be told.
pub(crate) fn news(kept: &BTreeSet<Kept>, known: &mut KnownKept) -> (Vec<ProviderNotice>, bool) {
    known.retain(|one, _| kept.contains(one));
    for one in kept {
        if !known.contains_key(one) {
            known.insert(one.clone(), (Instant::now(), false));
        }
    }
    let mut untold: Vec<_> = known.iter_mut().filter(|(_, (_, is_told))| !is_told).collect();
    let count = untold.len();
    untold.retain(|(_, (since, _))| since.elapsed() >= NOTICE_DELAY);
    untold.truncate(MOST_TOLD);
    let is_all = untold.len() == count;
    let mut notices = Vec::new();
    for (one, (_, is_told)) in untold {
        let reason = match one.why {
            KeptReason::Outside => "no pool has it",
            KeptReason::NotAdmitted => "the pools that have it are not for the Service",
        };
        tracing::warn!(holder = one.holder, address = %one.address, reason, "no AddressPool would assign this address; keeping it");
        notices.extend(one.owner.clone().map(|owner| ProviderNotice {
            subject: NoticeSubject::Service(owner),
            is_warning: true,
            action: ASSIGN_ADDRESS,
            reason: ADDRESS_KEPT,
            note: one.note(),
        }));
        *is_told = true;
    }
    (notices, is_all)
}

impl Kept {
    fn note(&self) -> String {
        let address = self.address;
        match self.why {
            KeptReason::Outside => format!(
                "Address {address} is in no AddressPool any more. The load balancer keeps it. Add it to a pool, or request another \
                 address."
            ),
            KeptReason::NotAdmitted => format!(
                "Address {address} is in an AddressPool that is not for this Service any more (namespaces, namespaceSelector or \
                 serviceSelector). The load balancer keeps it. Correct the pool or the labels, or request another address."
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use steerage_edge_api::AddressPoolSpec;

    use super::*;
    use crate::allocation::tests::{ip, owner};

    fn pool(change: impl FnOnce(&mut AddressPoolSpec)) -> Pool {
        let addresses = vec!["10.9.0.0/24".to_owned()];
        let mut spec = AddressPoolSpec { addresses, ..AddressPoolSpec::default() };
        change(&mut spec);
        Pool::new("p", &spec)
    }

    fn selector(value: &str) -> LabelSelector {
        let match_labels = [("team".to_owned(), value.to_owned())].into();
        LabelSelector { match_labels, ..LabelSelector::default() }
    }

    #[test]
    fn an_address_is_kept_after_each_change_of_its_pool() {
        let labels = Labels::from([("team".to_owned(), "a".to_owned())]);
        let tenant = Tenant { namespace: "shop", namespace_labels: Some(&labels), labels: Some(&labels) };
        let why = |pools: &[Pool]| tenant.why_kept(ip("10.9.0.1"), pools);
        let is_for_others = [
            pool(|spec| spec.namespaces = vec!["bank".to_owned()]),
            pool(|spec| spec.namespace_selector = Some(selector("b"))),
            pool(|spec| spec.service_selector = Some(selector("b"))),
        ];
        for pool in &is_for_others {
            assert_eq!(why(std::slice::from_ref(pool)), Some(KeptReason::NotAdmitted), "{pool:?}");
            assert!(is_restricted(pool));
        }
        let open = pool(|_| {});
        assert_eq!((why(std::slice::from_ref(&open)), is_restricted(&open)), (None, false));
        let mut both = is_for_others.to_vec();
        both.push(open);
        assert_eq!(why(&both), None, "another pool has it, too");
        assert_eq!(
            why(&[pool(|spec| spec.excluded = vec!["10.9.0.1".to_owned()])]),
            Some(KeptReason::Outside)
        );
        assert_eq!(why(&[]), Some(KeptReason::Outside), "the pool is deleted");
        // What is not known, as after a start, is no reason for an alarm.
        let unknown = Tenant { namespace_labels: None, labels: None, ..tenant };
        assert_eq!(unknown.why_kept(ip("10.9.0.1"), &is_for_others[1..]), None);
        assert_eq!(unknown.why_kept(ip("10.9.0.1"), &is_for_others), None, "a pool may be for it");
    }

    #[tokio::test(start_paused = true)]
    async fn each_is_told_once_until_it_is_well_again() {
        let kept = |n: u8| Kept {
            holder: format!("Service shop/{n}"),
            address: [10, 9, 0, n].into(),
            why: KeptReason::Outside,
            owner: Some(owner(&n.to_string())),
        };
        let all: BTreeSet<_> = (0..60).map(kept).collect();
        let (mut known, none) = (KnownKept::new(), BTreeSet::new());
        let tell = |kept: &BTreeSet<Kept>, known: &mut KnownKept| {
            let (notices, is_all) = news(kept, known);
            (notices.len(), is_all)
        };
        assert_eq!(tell(&all, &mut known), (0, false), "the pool may come again");
        assert_eq!(tell(&none, &mut known), (0, true));
        assert_eq!(tell(&all, &mut known), (0, false));
        tokio::time::advance(NOTICE_DELAY).await;
        assert_eq!(tell(&all, &mut known), (50, false));
        assert_eq!(tell(&all, &mut known), (10, true));
        assert_eq!(tell(&all, &mut known), (0, true));
        assert_eq!(tell(&none, &mut known), (0, true));
        let one = [kept(1)].into();
        assert_eq!(tell(&one, &mut known), (0, false), "it happened again");
        tokio::time::advance(NOTICE_DELAY).await;
        let (notices, _) = news(&one, &mut known);
        assert_eq!(notices[0].reason, ADDRESS_KEPT);
        assert!(
            notices[0].note.starts_with("Address 10.9.0.1 is in no AddressPool any more."),
            "{notices:?}"
        );
    }
}
