// SPDX-License-Identifier: Apache-2.0
//! The addresses of a Service in a load balancer. Pure.

use steerage_model::Family;
use steerage_provider_api::Error;

use super::{Fragment, FrontendAddress, FrontendPart, Layout, assign};
use crate::marks::{self, Mark};
use crate::reasons;
use crate::types::{Balancer, BalancerProperties, Frontend, Part, Ref};

impl FrontendAddress {
    /// The address that a frontend has.
    pub(crate) fn of(part: &Part<Frontend>) -> Option<Self> {
        let of = &part.properties;
        let private = |subnet: &Ref| Self::Private { subnet: subnet.id.0.clone(), address: of.private_ip };
        let public = of.public_ip.as_ref().map(|ip| Self::Public(ip.id.0.clone()));
        public.or_else(|| of.subnet.as_ref().map(private))
    }
}

impl Layout {
    /// The names of the Service's frontends: that which has the address already, or a free one, because the old address goes on meanwhile.
    pub(super) fn names(&self, all: &BalancerProperties, fragment: &Fragment) -> Vec<String> {
        let Fragment { mark, frontends, .. } = fragment;
        let name = |front: &FrontendPart| {
            let found = all.frontends.iter().find(|part| self.is_front(mark, front, part));
            let suffix = marks::suffix(front.family);
            let mut names =
                ["", "b", "c", "d", "e", "f"].into_iter().map(|slot| mark.part(&format!("{suffix}{slot}")));
            let is_free = |name: &String| all.frontends.iter().all(|part| part.name != *name);
            found
                .map(|part| part.name.clone())
                .or_else(|| names.find(is_free))
                .unwrap_or_else(|| mark.part(suffix))
        };
        frontends.iter().map(name).collect()
    }

    /// Whether a part is the Service's frontend with this address.
    fn is_front(&self, mark: &Mark, front: &FrontendPart, part: &Part<Frontend>) -> bool {
        let of = &part.properties;
        self.is_of(mark, &part.name)
            && mark.is_frontend(front.family, &part.name)
            && match &front.address {
                FrontendAddress::Public(id) => of.public_ip == Some(Ref::to(id)),
                FrontendAddress::Private { subnet, address } => {
                    of.subnet == Some(Ref::to(subnet)) && (address.is_none() || of.private_ip == *address)
                }
            }
    }

    /// The Service's frontends with the addresses that it should have, and its others.
    pub(crate) fn split<'a>(
        &self,
        body: Option<&'a Balancer>,
        fragment: &Fragment,
    ) -> (Vec<&'a Part<Frontend>>, Vec<&'a Part<Frontend>>) {
        let Some(body) = body else { return (Vec::new(), Vec::new()) };
        let names = self.names(&body.properties, fragment);
        self.frontends(body, &fragment.mark).into_iter().partition(|part| names.contains(&part.name))
    }

    /// Refuses an address that something else in the load balancer, if there is one, has.
    pub(crate) fn check_address(
        &self,
        body: Option<&Balancer>,
        mark: &Mark,
        address: &FrontendAddress,
    ) -> Result<(), Error> {
        body.map_or(Ok(()), |body| self.check_free(&body.properties, mark, address))
    }

    /// Refuses an address that something else in the load balancer has.
    pub(super) fn check_free(
        &self,
        all: &BalancerProperties,
        mark: &Mark,
        address: &FrontendAddress,
    ) -> Result<(), Error> {
        let has_it = |part: &&Part<Frontend>| match address {
            FrontendAddress::Public(id) => part.properties.public_ip.as_ref() == Some(&Ref::to(id)),
            FrontendAddress::Private { address, .. } => {
                address.is_some() && part.properties.private_ip == *address
            }
        };
        let mut others = all
            .frontends
            .iter()
            .filter(|part| !self.is_of(mark, &part.name) && !self.is_earlier(mark, &part.name));
        let Some(other) = others.find(has_it) else { return Ok(()) };
        let what = match address {
            FrontendAddress::Public(id) => format!("The public IP {}", id.rsplit('/').next().unwrap_or(id)),
            FrontendAddress::Private { address, .. } => {
                format!("The address {}", address.map_or(String::new(), |address| address.to_string()))
            }
        };
        // A part's name has that of its Service, which is no matter of other tenants.
        let user =
            if self.is_ours(&other.name) { "another Service" } else { "a frontend that is not Steerage's" };
        let message = format!(
            "{what} is used by {user}. No load balancer is created or changed. Request another one, or ask the operator of Steerage which \
             Service has it."
        );
        Err(Error::invalid(reasons::ADDRESS_NOT_AVAILABLE, message))
    }

    pub(super) fn set_address(
        &self,
        part: &mut Part<Frontend>,
        address: &FrontendAddress,
        family: Family,
    ) -> bool {
        let present = &part.properties;
        let version = Some(format!("{family}"));
        let rest = present.rest.clone();
        let wanted = match address {
            FrontendAddress::Public(id) => Frontend {
                public_ip: Some(Ref::to(id)),
                version: present.version.clone(),
                rest,
                ..Frontend::default()
            },
            FrontendAddress::Private { subnet, address } => {
                let subnet = Some(Ref::to(subnet));
                let keeps = present.subnet == subnet && address.is_none();
                let (allocation, private_ip) = match address {
                    Some(address) => (Some("Static".to_owned()), Some(*address)),
                    None if keeps => (present.allocation.clone(), present.private_ip),
                    None => (Some("Dynamic".to_owned()), None),
                };
                if present.subnet.is_none() && !self.config.zones.is_empty() {
                    part.rest.insert("zones".to_owned(), self.config.zones.clone().into());
                }
                Frontend { subnet, private_ip, allocation, version, rest, ..Frontend::default() }
            }
        };
        if let (Some(_), FrontendAddress::Public(_)) = (&part.properties.public_ip, address) {
            // What Azure adds to a public frontend does not matter.
            let is_same = part.properties.public_ip == wanted.public_ip && part.properties.subnet.is_none();
            if is_same {
                return false;
            }
        }
        assign(&mut part.properties, wanted)
    }

    /// The names of the frontends of a Service.
    pub(crate) fn frontends<'a>(&self, balancer: &'a Balancer, mark: &Mark) -> Vec<&'a Part<Frontend>> {
        balancer.properties.frontends.iter().filter(|part| self.is_of(mark, &part.name)).collect()
    }
}
