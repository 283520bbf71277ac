// SPDX-License-Identifier: Apache-2.0
//! The IP families of a load balancer: of its clients, and of its targets. Pure.

use steerage_model::{Family, Protocol, shown};
use steerage_provider_api::{Error, LoadBalancer};
use steerage_provider_cloud::annotation;

use crate::annotations::IP_ADDRESS_TYPE;

/// Over which families clients reach a load balancer, as AWS calls it. There is none for IPv6 alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IpAddressType {
    Ipv4,
    DualStack,
}

impl IpAddressType {
    /// AWS's name.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Ipv4 => "ipv4",
            Self::DualStack => "dualstack",
        }
    }

    fn parse(text: &str) -> Option<Self> {
        [Self::Ipv4, Self::DualStack].into_iter().find(|known| known.as_str() == text)
    }
}

/// The IP families of a load balancer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IpFamilies {
    pub(crate) of_clients: IpAddressType,
    /// The Service's first family: AWS reaches all targets of a group over one. It translates packets of clients over the other.
    pub(crate) of_targets: Family,
}

pub(crate) fn has_udp(lb: &LoadBalancer) -> bool {
    lb.listeners.iter().any(|listener| listener.protocol == Protocol::Udp)
}

/// By the Service's families, or else by annotation.
pub(crate) fn ip_families(lb: &LoadBalancer) -> Result<IpFamilies, Error> {
    let of_targets = lb.families.first().copied().unwrap_or(Family::V4);
    let text = lb.annotations.get(IP_ADDRESS_TYPE).map(|text| text.trim());
    let annotated = text.map(|text| {
        let problem = || format!("has the wrong value `{}`", shown(text));
        IpAddressType::parse(text)
            .ok_or_else(|| annotation::invalid(IP_ADDRESS_TYPE, &problem(), "Use ipv4 or dualstack."))
    });
    let has_v6 = lb.families.contains(&Family::V6);
    let by_families = if has_v6 { IpAddressType::DualStack } else { IpAddressType::Ipv4 };
    let of_clients = annotated.transpose()?.unwrap_or(by_families);
    if of_clients == IpAddressType::Ipv4 && of_targets == Family::V6 {
        return Err(annotation::conflict(
            &format!("Annotation {IP_ADDRESS_TYPE} is ipv4, but IPv6 is first in spec.ipFamilies."),
            "Set the annotation to dualstack, or create the Service again with IPv4 first.",
        ));
    }
    if of_clients == IpAddressType::DualStack && of_targets == Family::V4 && has_udp(lb) {
        let why = if text.is_some() {
            format!("Annotation {IP_ADDRESS_TYPE} is dualstack")
        } else {
            "spec.ipFamilies has IPv6".to_owned()
        };
        return Err(annotation::conflict(
            &format!(
                "{why}, but a port has UDP and IPv4 is first in spec.ipFamilies: AWS takes UDP on a dualstack load balancer only for targets \
                 with IPv6."
            ),
            &format!(
                "Set {IP_ADDRESS_TYPE} to ipv4, move the UDP port to another Service, or create the Service again with IPv6 first."
            ),
        ));
    }
    Ok(IpFamilies { of_clients, of_targets })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desired::tests::planned;

    fn read(
        families: &[Family],
        annotation: Option<&str>,
        protocol: Protocol,
    ) -> Result<IpFamilies, (&'static str, String)> {
        let mut lb = planned(&[(protocol, 80, 30080)]);
        lb.families = families.to_vec();
        lb.annotations.extend(annotation.map(|value| (IP_ADDRESS_TYPE.to_owned(), value.to_owned())));
        ip_families(&lb).map_err(|error| (error.reason(), error.to_string()))
    }

    #[test]
    fn families_and_annotation_decide() {
        use Family::{V4, V6};
        use IpAddressType::{DualStack, Ipv4};
        for (families, annotation, of_clients, of_targets) in [
            (&[V4][..], None, Ipv4, V4),
            (&[V4], Some("ipv4"), Ipv4, V4),
            (&[V4], Some(" dualstack "), DualStack, V4),
            (&[V4, V6], None, DualStack, V4),
            (&[V4, V6], Some("ipv4"), Ipv4, V4),
            (&[V6, V4], None, DualStack, V6),
            (&[V6], None, DualStack, V6),
            (&[V6], Some("dualstack"), DualStack, V6),
        ] {
            let wanted = IpFamilies { of_clients, of_targets };
            assert_eq!(read(families, annotation, Protocol::Tcp), Ok(wanted), "{families:?} {annotation:?}");
            let with_udp = read(families, annotation, Protocol::Udp);
            assert_eq!(
                with_udp.is_ok(),
                of_clients == Ipv4 || of_targets == V6,
                "{families:?} {annotation:?}"
            );
        }
    }

    #[test]
    fn what_aws_has_not_is_refused() {
        use Family::{V4, V6};
        let tcp = Protocol::Tcp;
        for (families, annotation, protocol, reason, part) in [
            (&[V4][..], Some("ipv6"), tcp, "InvalidAnnotation", "`ipv6`"),
            (&[V6], Some("ipv4"), tcp, "ConflictingAnnotations", "is first"),
            (&[V6, V4], Some("ipv4"), tcp, "ConflictingAnnotations", "is first"),
            (&[V4, V6], None, Protocol::Udp, "ConflictingAnnotations", "spec.ipFamilies has IPv6"),
            (&[V4], Some("dualstack"), Protocol::Udp, "ConflictingAnnotations", "is dualstack"),
        ] {
            let (found, message) = read(families, annotation, protocol).unwrap_err();
            assert_eq!(found, reason);
            assert!(message.contains(part), "{message}");
        }
    }
}
