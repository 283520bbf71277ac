// SPDX-License-Identifier: Apache-2.0
//! Which Service has which address, or gets it, as far as this process has seen. Clouds admit clients to an address by rules that are there
//! before a load balancer has it: of two Services that request it at the same time, one must not get the rules of the other. No I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use steerage_provider_api::{Error, Owner};

/// The Service that has an address, or requests it.
#[derive(Debug)]
struct Holder {
    owner: Owner,
    /// Its clients were admitted to the address, or are about to be. If not, the Service only requests it.
    is_admitted: bool,
}

/// The Service that requested each address first, or for which clients were last admitted to it.
#[derive(Debug, Default)]
pub struct AddressOwners(Mutex<BTreeMap<IpAddr, Holder>>);

impl AddressOwners {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<IpAddr, Holder>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The Service requests an address of the user. The caller has seen that nothing in the cloud has the address: this process may have been
    /// restarted, and know no other Service yet.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] with this reason if another Service has requested it before.
    pub fn claim(&self, owner: &Owner, vip: IpAddr, reason: &'static str) -> Result<(), Error> {
        let mut all = self.lock();
        let before = all.get(&vip);
        if before.is_some_and(|of| of.owner.service != owner.service) {
            let message = format!(
                "Another Service has the address {vip}, or requested it first. No load balancer is created or changed. \
                 Steerage tries again at the next resync. Request another address, or ask the operator of Steerage which Service has it."
            );
            return Err(Error::invalid(reason, message));
        }
        let is_admitted = before.is_some_and(|of| of.is_admitted);
        all.insert(vip, Holder { owner: owner.clone(), is_admitted });
        Ok(())
    }

    /// Forgets the other addresses that the Service requested and to which none of its clients were admitted.
    pub fn keep_claims(&self, owner: &Owner, vips: &BTreeSet<IpAddr>) {
        self.lock().retain(|vip, of| of.owner != *owner || of.is_admitted || vips.contains(vip));
    }

    /// Clients are about to be admitted to these for the Service.
    pub fn note(&self, owner: &Owner, vips: &BTreeSet<IpAddr>) {
        let holder = || Holder { owner: owner.clone(), is_admitted: true };
        self.lock().extend(vips.iter().map(|vip| (*vip, holder())));
    }

    /// Those to which clients of the Service were admitted, and to which those of no other one were admitted later.
    pub fn of(&self, owner: &Owner) -> BTreeSet<IpAddr> {
        let all = self.lock();
        all.iter().filter(|(_, of)| of.is_admitted && of.owner == *owner).map(|(vip, _)| *vip).collect()
    }

    /// Removes from the set the addresses to which clients of another Service were admitted later: their rules are that Service's.
    pub fn leave_out_of_others(&self, owner: &Owner, vips: &mut BTreeSet<IpAddr>) {
        let all = self.lock();
        let is_of_other = |of: &Holder| of.is_admitted && of.owner.service != owner.service;
        vips.retain(|vip| !all.get(vip).is_some_and(is_of_other));
    }

    /// Nobody is admitted to these for the Service any more.
    pub fn remove(&self, owner: &Owner, gone: &BTreeSet<IpAddr>) {
        self.lock().retain(|vip, of| of.owner != *owner || !gone.contains(vip));
    }

    /// Nothing is left of the Service.
    pub fn forget(&self, owner: &Owner) {
        self.lock().retain(|_, of| of.owner != *owner);
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
        let (first, second, owners) = (of("first"), of("second"), AddressOwners::default());
        owners.note(&first, &vips(&[1, 2]));
        owners.note(&second, &vips(&[2]));
        assert_eq!(owners.of(&first), vips(&[1]));
        owners.remove(&first, &vips(&[1, 2]));
        assert!(owners.of(&first).is_empty());
        assert_eq!(owners.of(&second), vips(&[2]));
        let contested = IpAddr::from([203, 0, 113, 2]);
        let claims = |owner: &Owner| owners.claim(owner, contested, "AddressNotAvailable").is_ok();
        assert!(!claims(&first) && claims(&second));
        let renewed = Owner { uid: "another".to_owned(), ..second.clone() };
        assert!(claims(&renewed), "the Service was created again");
        owners.forget(&second);
        assert!(!claims(&first));
        owners.forget(&renewed);
        assert!(claims(&first));
    }

    /// A Service that is refused must neither keep addresses from others nor be taken for the one that has them.
    #[test]
    fn request_is_no_admission() {
        let of = |name: &str| Owner { service: Key::new("shop", name), uid: name.to_owned() };
        let (first, second, owners) = (of("first"), of("second"), AddressOwners::default());
        let all = [1, 2].map(|last| IpAddr::from([203, 0, 113, last]));
        for vip in all {
            owners.claim(&first, vip, "AddressNotAvailable").unwrap();
        }
        assert!(owners.of(&first).is_empty());
        owners.note(&first, &[all[1]].into());
        owners.claim(&first, all[1], "AddressNotAvailable").unwrap();
        let left = |owner: &Owner| {
            let mut vips = BTreeSet::from(all);
            owners.leave_out_of_others(owner, &mut vips);
            vips
        };
        assert_eq!(left(&first), all.into());
        assert_eq!(left(&second), [all[0]].into());
        owners.keep_claims(&first, &BTreeSet::new());
        owners.claim(&second, all[0], "AddressNotAvailable").unwrap();
        assert!(owners.claim(&second, all[1], "AddressNotAvailable").is_err(), "its clients are admitted");
    }
}
