// SPDX-License-Identifier: Apache-2.0
//! Which Service has which address, or gets it, as far as this process has seen. Rules of the security group come before the frontend, and
//! stay if somebody takes that away: then nothing else says whose they are. No I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use steerage_provider_api::Owner;

/// The Service that requested each address first, or to whose address clients were last admitted.
#[derive(Debug, Default)]
pub(crate) struct AdmittedAddresses(Mutex<BTreeMap<IpAddr, Owner>>);

impl AdmittedAddresses {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<IpAddr, Owner>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The Service requests a public IP of a user. False if another one has requested it before.
    pub(crate) fn claim(&self, owner: &Owner, vip: IpAddr) -> bool {
        let mut all = self.lock();
        if all.get(&vip).is_some_and(|of| of.service != owner.service) {
            return false;
        }
        all.insert(vip, owner.clone());
        true
    }

    /// Clients are about to be admitted to these for the Service.
    pub(crate) fn note(&self, owner: &Owner, vips: &BTreeSet<IpAddr>) {
        self.lock().extend(vips.iter().map(|vip| (*vip, owner.clone())));
    }

    /// Those of the Service that no other one has by now.
    pub(crate) fn of(&self, owner: &Owner) -> BTreeSet<IpAddr> {
        self.lock().iter().filter(|(_, of)| *of == owner).map(|(vip, _)| *vip).collect()
    }

    /// Nobody is admitted to these for the Service any more.
    pub(crate) fn remove(&self, owner: &Owner, gone: &BTreeSet<IpAddr>) {
        self.lock().retain(|vip, of| of != owner || !gone.contains(vip));
    }
}

#[cfg(test)]
mod tests {
    use steerage_model::Key;

    use super::*;

    #[test]
    fn address_is_of_the_service_that_got_it_last() {
        let of = |name: &str| Owner { service: Key::new("shop", name), uid: name.to_owned() };
        let vips = |last: &[u8]| -> BTreeSet<IpAddr> {
            last.iter().map(|last| IpAddr::from([203, 0, 113, *last])).collect()
        };
        let (first, second, admitted) = (of("first"), of("second"), AdmittedAddresses::default());
        admitted.note(&first, &vips(&[1, 2]));
        admitted.note(&second, &vips(&[2]));
        assert_eq!(admitted.of(&first), vips(&[1]));
        admitted.remove(&first, &vips(&[1, 2]));
        assert!(admitted.of(&first).is_empty());
        assert_eq!(admitted.of(&second), vips(&[2]));
        let [contested] = [IpAddr::from([203, 0, 113, 2])];
        assert!(!admitted.claim(&first, contested) && admitted.claim(&second, contested));
        let renewed = Owner { uid: "another".to_owned(), ..second.clone() };
        assert!(admitted.claim(&renewed, contested), "the Service was created again");
        admitted.remove(&second, &vips(&[2]));
        admitted.remove(&renewed, &vips(&[2]));
        assert!(admitted.claim(&first, contested));
    }
}
