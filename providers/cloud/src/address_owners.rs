// SPDX-License-Identifier: Apache-2.0
//! Which Service has which address, or gets it, as far as this process has seen. Clouds admit clients to an address by rules that are there
//! before a load balancer has it: of two Services that request it at the same time, one must not get the rules of the other. No I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use steerage_provider_api::{Error, Owner};

/// The Service that requested each address first, or for which clients were last admitted to it.
#[derive(Debug, Default)]
pub struct AddressOwners(Mutex<BTreeMap<IpAddr, Owner>>);

impl AddressOwners {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<IpAddr, Owner>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The Service requests an address of the user.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] with this reason if another Service has requested it before.
    pub fn claim(&self, owner: &Owner, vip: IpAddr, reason: &'static str) -> Result<(), Error> {
        let mut all = self.lock();
        if all.get(&vip).is_some_and(|of| of.service != owner.service) {
            let message = format!(
                "The address {vip} was requested by another Service first. No load balancer is created or changed. Request another one."
            );
            return Err(Error::invalid(reason, message));
        }
        all.insert(vip, owner.clone());
        Ok(())
    }

    /// Clients are about to be admitted to these for the Service.
    pub fn note(&self, owner: &Owner, vips: &BTreeSet<IpAddr>) {
        self.lock().extend(vips.iter().map(|vip| (*vip, owner.clone())));
    }

    /// Those of the Service that no other one has by now.
    pub fn of(&self, owner: &Owner) -> BTreeSet<IpAddr> {
        self.lock().iter().filter(|(_, of)| *of == owner).map(|(vip, _)| *vip).collect()
    }

    /// Nobody is admitted to these for the Service any more.
    pub fn remove(&self, owner: &Owner, gone: &BTreeSet<IpAddr>) {
        self.lock().retain(|vip, of| of != owner || !gone.contains(vip));
    }

    /// Nothing is left of the Service.
    pub fn forget(&self, owner: &Owner) {
        self.lock().retain(|_, of| of != owner);
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
}
