// SPDX-License-Identifier: Apache-2.0
//! When the host's addresses are listed: after a change, and again after a listing that failed, which changes nothing. Called by the loop.

use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Wait after a listing that failed.
const RETRY: Duration = Duration::from_secs(1);

/// When the next listing is due, if one is.
#[derive(Debug, Default)]
pub(super) struct AddressListing(Option<Instant>);

impl AddressListing {
    /// Notes that addresses may have changed.
    pub(super) fn request(&mut self, now: Instant) {
        self.0 = Some(now);
    }

    /// When the next listing is due.
    pub(super) fn due(&self) -> Option<Instant> {
        self.0
    }

    /// Lists the addresses if that is due. Node ports stay at the known ones while they cannot be listed.
    pub(super) fn update(
        &mut self,
        addresses: &mut Vec<IpAddr>,
        now: Instant,
        list: impl FnOnce() -> io::Result<Vec<IpAddr>>,
    ) {
        if self.0.is_none_or(|due| due > now) {
            return;
        }
        self.0 = None;
        match list() {
            Ok(listed) => *addresses = listed,
            Err(error) => {
                tracing::warn!(%error, "host addresses not listed; node ports stay at the known ones; retrying");
                self.0 = Some(now + RETRY);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_listing_keeps_the_addresses_and_is_repeated() {
        let [old, new]: [Vec<IpAddr>; 2] = [1, 2].map(|n| vec![[192, 0, 2, n].into()]);
        let (mut addresses, mut listing, now) = (old.clone(), AddressListing::default(), Instant::now());
        listing.update(&mut addresses, now, || Ok(new.clone()));
        assert_eq!(addresses, old, "nothing is due");
        listing.request(now);
        listing.update(&mut addresses, now, || Err(io::ErrorKind::Interrupted.into()));
        assert_eq!((&addresses, listing.due()), (&old, Some(now + RETRY)));
        listing.update(&mut addresses, now, || Ok(new.clone()));
        assert_eq!(addresses, old, "not before the pause is over");
        listing.update(&mut addresses, now + RETRY, || Ok(new.clone()));
        assert_eq!((&addresses, listing.due()), (&new, None));
    }
}
