// SPDX-License-Identifier: Apache-2.0
//! Removes the addresses that a Service had before. They go when the new ones serve and were handed over: ports of limited Services first,
//! then what admits clients, the frontends, and the public IPs.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use steerage_provider_api::{Error, Owner};

use crate::admission::Admission;
use crate::desired::Desired;
use crate::merge::{Fragment, Intent, Others};
use crate::provider::{Azure, KNOWN};
use crate::service_state::ServiceState;
use crate::shared::Written;
use crate::types::{Frontend, Part};

/// A Service whose new addresses serve.
pub(crate) struct Place<'a> {
    pub(crate) wanted: &'a Desired,
    pub(crate) fragment: &'a Fragment,
    pub(crate) vips: &'a BTreeSet<IpAddr>,
    /// Paths of the public IPs that it uses, in lower case.
    pub(crate) used: &'a BTreeSet<String>,
    /// Its frontends with other addresses in its load balancer.
    pub(crate) others: Vec<&'a Part<Frontend>>,
}

/// How far that is.
pub(crate) enum Retired {
    Again(Duration),
    /// The new addresses have to be handed over first.
    Announce,
    /// What it had in the other load balancer is not known.
    Unknown(Error),
    Done,
}

impl Azure {
    /// Admits clients to the new addresses, and removes what the Service had before.
    pub(crate) async fn retire(
        &self,
        owner: &Owner,
        place: &Place<'_>,
        is_known: bool,
        entry: &mut ServiceState,
        (age, listed): (Duration, Duration),
    ) -> Result<Retired, Error> {
        let Place { wanted, fragment, vips, used, others } = place;
        let (calls, [balancer, other]) = (&*self.calls, self.of_scheme(wanted.is_internal));
        // What it had in the other load balancer: nobody but this process changes that.
        let before = self.withdraw_and_read(other, &owner.service, Duration::MAX).await;
        let (before, trouble) = match before {
            Ok(Ok(before)) => (before, None),
            Ok(Err(wait)) => return Ok(Retired::Again(wait)),
            // Another one has its name: nothing in it is Steerage's.
            Err(Error::Invalid { .. }) if !self.has_parts(other, |of| *of == wanted.mark).await? => {
                (None, None)
            }
            Err(error) => (None, (entry.alone != Some(wanted.is_internal)).then_some(error)),
        };
        let moved = other.document.layout.frontends_of(before.as_ref(), &wanted.mark);
        let has_old = !moved.is_empty() || !others.is_empty();
        if has_old && !is_known {
            if let Some(wait) = self.admit(owner, place, &BTreeSet::new(), age).await? {
                return Ok(Retired::Again(wait));
            }
            return Ok(Retired::Announce);
        }
        let ours = self.public_ips.of_service(calls, owner, listed).await?;
        let is_used =
            |name: &str| used.contains(&self.config.public_ip_path(None, name).to_ascii_lowercase());
        let gone: Vec<_> = ours.iter().filter(|(_, ip)| !is_used(&ip.name)).collect();
        entry.vips.extend(*vips);
        entry.vips.extend(self.address_owners.of(owner));
        entry.vips.extend(gone.iter().filter_map(|(_, ip)| ip.properties.ip_address));
        entry.vips.extend(self.addresses_of(others.iter().chain(&moved).copied(), KNOWN).await?);
        self.address_owners.leave_out_of_others(owner, &mut entry.vips);
        let old = &entry.vips - *vips;
        if has_old && self.denies(&old, age).await? {
            // Nobody may connect to the old addresses whom the rules deny, also not for a moment.
            let silent = Fragment { others: Others::Silent, ..(*fragment).clone() };
            let silent = self.write(balancer, &owner.service, Intent::Present(silent), Duration::MAX).await?;
            let withdrawn = match silent {
                Written::Done(_) if !moved.is_empty() => {
                    let withdrawn = Intent::Withdrawn(wanted.mark.clone());
                    self.write(other, &owner.service, withdrawn, Duration::MAX).await?
                }
                silent => silent,
            };
            if let Written::Again(wait) = withdrawn {
                return Ok(Retired::Again(wait));
            }
        }
        entry.silent.clone_from(&old);
        if let Some(wait) = self.admit(owner, place, &old, age).await? {
            return Ok(Retired::Again(wait));
        }
        self.address_owners.remove(owner, &old);
        if !others.is_empty() {
            let alone = Fragment { others: Others::Gone, ..(*fragment).clone() };
            let alone = self.write(balancer, &owner.service, Intent::Present(alone), Duration::MAX).await?;
            if let Written::Again(wait) = alone {
                return Ok(Retired::Again(wait));
            }
        }
        if let Some(error) = trouble {
            return Ok(Retired::Unknown(error));
        }
        if !moved.is_empty() {
            let absent = Intent::Absent(wanted.mark.clone(), owner.service.clone());
            if let Written::Again(wait) = self.write(other, &owner.service, absent, age).await? {
                return Ok(Retired::Again(wait));
            }
        }
        entry.alone = Some(wanted.is_internal);
        let gone: BTreeSet<String> = gone.into_iter().map(|(_, ip)| ip.name.clone()).collect();
        Ok(match self.public_ips.delete(calls, &gone, &mut entry.operations).await? {
            Some(wait) => Retired::Again(wait),
            None => Retired::Done,
        })
    }

    /// Admits the clients of the new addresses, and nobody to those that are gone. When to call again; `None` if that is done.
    async fn admit(
        &self,
        owner: &Owner,
        Place { wanted, vips, .. }: &Place<'_>,
        gone: &BTreeSet<IpAddr>,
        age: Duration,
    ) -> Result<Option<Duration>, Error> {
        let Some(security_group) = &self.security_group else { return Ok(None) };
        self.address_owners.note(owner, vips);
        let admission =
            Admission::new((*vips).clone(), gone, &wanted.rules, &wanted.sources, wanted.is_internal)
                .of(wanted.service.namespace());
        Ok(match security_group.write(&*self.calls, &owner.service, admission, age).await? {
            Written::Again(wait) => Some(wait),
            Written::Done(_) => None,
        })
    }

    /// Whether rules deny clients of these addresses.
    async fn denies(&self, vips: &BTreeSet<IpAddr>, age: Duration) -> Result<bool, Error> {
        let Some(security_group) = &self.security_group else { return Ok(false) };
        Ok(match security_group.look_past(&*self.calls, age).await? {
            Written::Done(Some(group)) => security_group.document.present(&group, vips).denies,
            _ => true,
        })
    }

    /// The addresses of frontends, as they are, or were at most so long ago: a public IP of a user may be another one of the same name.
    pub(crate) async fn addresses_of(
        &self,
        parts: impl Iterator<Item = &Part<Frontend>>,
        age: Duration,
    ) -> Result<BTreeSet<IpAddr>, Error> {
        let parts: Vec<_> = parts.collect();
        let mut vips: BTreeSet<_> = parts.iter().filter_map(|part| part.properties.private_ip).collect();
        for public in parts.iter().filter_map(|part| part.properties.public_ip.as_ref()) {
            vips.extend(self.public_ips.known_address(&*self.calls, public, age).await?);
        }
        Ok(vips)
    }
}
