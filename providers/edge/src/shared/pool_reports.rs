// SPDX-License-Identifier: Apache-2.0
//! What users are told of pools: their statuses, kept addresses, and pools that are nearly full. A task of the provider runs
//! [`Shared::keep_pool_statuses`]. No load balancer depends on it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;
use std::time::Duration;

use steerage_edge_api::ReleasedAddress;
use steerage_provider_api::{Error, NoticeSubject, ProviderNotice};

use super::{Shared, is_edited};
use crate::entry::Entry;
use crate::kept::{Kept, Tenant};
use crate::objects::{LoadBalancerContent, addresses};
use crate::{ASSIGN_ADDRESS, AddressSet, Pool, kept, pools};

/// Shortest time between two writes of the pools' statuses.
const PACE: Duration = Duration::from_secs(1);

/// Wait before a failed write of a pool's status is tried again.
const RETRY: Duration = Duration::from_secs(10);

/// Event of an AddressPool that has hardly any free address of a family.
pub const ADDRESS_POOL_NEARLY_FULL: &str = "AddressPoolNearlyFull";

impl Shared {
    /// Writes the statuses of pools that differ, at most once in [`PACE`]: thousands of load balancers change one status. Does nothing
    /// before the first provider call. Also ends reuse delays.
    pub(crate) async fn keep_pool_statuses(&self) {
        loop {
            let next_free = self.next_free();
            let wait = async {
                match next_free {
                    Some(left) => tokio::time::sleep(left).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.stale_pools.notified() => {}
                () = wait => {}
            }
            // In each turn: a delay may have ended while this task wrote or slept.
            self.end_delays();
            if self.activated.initialized() {
                let wait = if self.write_pools().await { PACE } else { RETRY };
                tokio::time::sleep(wait).await;
            }
        }
    }

    /// The addresses that load balancers keep although no pool would give them; users are told of new ones.
    fn find_kept(&self) -> BTreeSet<Kept> {
        let pools = self.known_pools();
        let mut known = AddressSet::default();
        for range in pools.iter().flat_map(|pool| &pool.ranges) {
            known.insert_range(range.first(), range.last());
        }
        let is_all_known = self.balancers.cache.index(|index| index.used().is_subset(&known));
        let found = if is_all_known && !pools.iter().any(kept::is_restricted) {
            BTreeSet::new()
        } else {
            self.look_for_kept(&pools)
        };
        let mut known = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let (notices, is_all) = kept::news(&found, &mut known);
        drop(known);
        for notice in notices {
            self.notices.send(&notice);
        }
        if !is_all {
            self.pools_are_stale();
        }
        found
    }

    fn look_for_kept(&self, pools: &[Pool]) -> BTreeSet<Kept> {
        let allocation = self.allocation();
        let kept = |entry: &Entry<LoadBalancerContent>| {
            let holder = match &entry.owner {
                Some(owner) => format!("Service {}", owner.service),
                None => format!("EdgeLoadBalancer {}", entry.name),
            };
            let namespace = entry.owner.as_ref().map(|owner| owner.service.namespace()).unwrap_or_default();
            let namespace_labels = self.namespaces.labels(namespace);
            let labels = allocation.labels(&entry.name);
            let tenant = Tenant { namespace, namespace_labels: namespace_labels.as_ref(), labels };
            let why = |address| Some((address, tenant.why_kept(address, pools)?));
            let kept =
                |(address, why)| Kept { holder: holder.clone(), address, why, owner: entry.owner.clone() };
            addresses(entry).into_iter().filter_map(why).map(kept).collect::<Vec<_>>()
        };
        self.balancers.cache.read(|rows| rows.flat_map(kept).collect())
    }

    /// Tells users of pools that are nearly full since a moment ago.
    fn tell_of_full_pools(&self) {
        let usages = self.pool_usages();
        let full: BTreeMap<(String, String), String> = usages
            .iter()
            .filter(|(_, usage)| usage.is_nearly_full())
            .map(|(pool, usage)| ((pool.clone(), usage.family.to_string()), usage.report()))
            .collect();
        let mut told = self.full_pools.lock().unwrap_or_else(PoisonError::into_inner);
        told.retain(|one| full.contains_key(one));
        for (key, report) in full {
            let pool = self.pools.cache.get(&key.0);
            if let Some(pool) = pool.filter(|_| !told.contains(&key)) {
                let subject = NoticeSubject::Object {
                    api_version: "steerage.dev/v1alpha1",
                    kind: "AddressPool",
                    namespace: self.namespace.clone(),
                    name: pool.name,
                    uid: pool.uid,
                };
                let note = format!("The AddressPool is nearly full: {report}");
                self.notices.send(&ProviderNotice {
                    subject,
                    is_warning: true,
                    action: ASSIGN_ADDRESS,
                    reason: ADDRESS_POOL_NEARLY_FULL,
                    note,
                });
                told.insert(key);
            }
        }
    }

    /// The addresses that each pool keeps for the Services that had them, by the pool's name.
    fn held_addresses(&self) -> BTreeMap<String, Vec<ReleasedAddress>> {
        let pools = self.known_pools();
        let allocation = self.allocation();
        self.balancers.cache.index(|index| {
            pools.iter().map(|pool| (pool.name.clone(), allocation.held_by(pool, index))).collect()
        })
    }

    /// Writes the status of every pool for which it differs. Returns whether all were written; no load balancer depends on it.
    pub(crate) async fn write_pools(&self) -> bool {
        let mut all_written = true;
        let used = self.balancers.cache.index(|index| index.used().clone());
        let kept = self.find_kept();
        self.tell_of_full_pools();
        let mut held = self.held_addresses();
        let is_missing = self.namespaces.is_missing();
        let stale: Vec<_> = self.pools.cache.read(|rows| {
            rows.filter_map(|entry| {
                let content = entry.content.as_ref().ok()?;
                let released = held.remove(&entry.name).unwrap_or_default();
                let mut status = pools::status(&entry.name, &content.spec, &used, &kept, released);
                if content.spec.namespace_selector.is_some() && is_missing {
                    pools::add_problem(&mut status, pools::NAMESPACES_MISSING);
                }
                (content.status.as_ref() != Some(&status)).then(|| (entry.name.clone(), status))
            })
            .collect()
        });
        for (pool, status) in stale {
            match self.pools.patch_status(&pool, &pools::status_patch(&status)).await {
                // The watch will not report an edit that came with the response.
                Ok(changes) => {
                    for change in changes.iter().filter(|change| is_edited(change)) {
                        self.on_pool(change);
                    }
                }
                Err(failure) => {
                    let error = Error::from(failure);
                    tracing::warn!(%pool, %error, "AddressPool status not written; retrying");
                    all_written = false;
                    self.pools_are_stale();
                }
            }
        }
        all_written
    }
}
