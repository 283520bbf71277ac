// SPDX-License-Identifier: Apache-2.0
//! What the annotations of a Service request. Pure.

use std::collections::BTreeMap;

use steerage_model::shown;
use steerage_provider_api::Error;
use steerage_provider_cloud::annotation::{boolean, invalid};

use crate::annotations;
use crate::config::{Config, Driver};
use crate::reasons;
use crate::types::Limits;

/// The version of PROXY protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProxyProtocol {
    V1,
    V2,
}

impl ProxyProtocol {
    /// The protocol of the pool.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::V1 => "PROXY",
            Self::V2 => "PROXYV2",
        }
    }
}

/// The requests, with the defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    /// `None` if the flag decides.
    pub(crate) internal: Option<bool>,
    pub(crate) floating_network: Option<String>,
    pub(crate) floating_subnet: Option<String>,
    /// The subnets that annotations name, for the Service's first family.
    pub(crate) subnet: Option<String>,
    pub(crate) member_subnet: Option<String>,
    pub(crate) network: Option<String>,
    pub(crate) flavor: Option<String>,
    pub(crate) availability_zone: Option<String>,
    /// A load balancer of another controller.
    pub(crate) load_balancer: Option<String>,
    pub(crate) proxy_protocol: Option<ProxyProtocol>,
    pub(crate) algorithm: &'static str,
    /// Octavia's defaults where nothing is requested; `None` if the driver has none of them.
    pub(crate) limits: Option<Limits>,
}

const ALGORITHMS: [&str; 4] = ["ROUND_ROBIN", "LEAST_CONNECTIONS", "SOURCE_IP", BY_PORT];
/// The only one of OVN, and of no other driver.
const BY_PORT: &str = "SOURCE_IP_PORT";
/// A day in milliseconds, which is Octavia's longest timeout; also the most connections that Steerage takes.
const LARGEST_LIMIT: i64 = 86_400_000;

type Annotations = BTreeMap<String, String>;

impl Options {
    pub(crate) fn read(annotations: &Annotations, config: &Config) -> Result<Self, Error> {
        let id = |name: &str| identifier(annotations, name);
        let driver = config.driver();
        let proxy_protocol = match annotations.get(annotations::PROXY_PROTOCOL).map(|value| value.trim()) {
            None | Some("false") => None,
            Some("true" | "v1") => Some(ProxyProtocol::V1),
            Some("v2") => Some(ProxyProtocol::V2),
            Some(other) => {
                let problem = format!("has the unknown value `{}`", shown(other));
                return Err(invalid(annotations::PROXY_PROTOCOL, &problem, "Use true, false, v1 or v2."));
            }
        };
        if proxy_protocol.is_some() && driver == Driver::Ovn {
            return Err(lacks("PROXY protocol", annotations::PROXY_PROTOCOL));
        }
        for (name, option) in
            [(annotations::FLAVOR, "flavor"), (annotations::AVAILABILITY_ZONE, "availability zone")]
        {
            if driver == Driver::Ovn && annotations.contains_key(name) {
                return Err(lacks(option, name));
            }
        }
        Ok(Self {
            internal: boolean(annotations, annotations::INTERNAL)?,
            floating_network: id(annotations::FLOATING_NETWORK)?,
            floating_subnet: id(annotations::FLOATING_SUBNET)?,
            subnet: id(annotations::SUBNET)?,
            member_subnet: id(annotations::MEMBER_SUBNET)?,
            network: id(annotations::NETWORK)?,
            flavor: id(annotations::FLAVOR)?,
            availability_zone: availability_zone(annotations)?,
            load_balancer: id(annotations::LOAD_BALANCER_ID)?,
            proxy_protocol,
            algorithm: algorithm(annotations, driver)?,
            limits: limits(annotations, driver)?,
        })
    }
}

/// What OVN does not have.
pub(crate) fn lacks(option: &str, requested_by: &str) -> Error {
    let message = format!(
        "The Octavia provider ovn has no {option}, which {requested_by} requests. No load balancer is created or changed. Remove it, or \
         use the Octavia provider amphora."
    );
    Error::invalid(reasons::DRIVER_LACKS_OPTION, message)
}

/// An ID is part of a path and a query.
fn identifier(annotations: &Annotations, name: &str) -> Result<Option<String>, Error> {
    let Some(value) = annotations.get(name).map(|value| value.trim()) else { return Ok(None) };
    let is_id =
        (1..=64).contains(&value.len()) && value.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    if is_id {
        return Ok(Some(value.to_owned()));
    }
    Err(invalid(name, &format!("has the value `{}`, which is no ID", shown(value)), "Use a UUID."))
}

fn availability_zone(annotations: &Annotations) -> Result<Option<String>, Error> {
    let name = annotations::AVAILABILITY_ZONE;
    let Some(value) = annotations.get(name).map(|value| value.trim()) else { return Ok(None) };
    if (1..=255).contains(&value.chars().count()) {
        return Ok(Some(value.to_owned()));
    }
    Err(invalid(
        name,
        "has no name, or one of more than 255 characters",
        "Use the name of an availability zone of Octavia.",
    ))
}

fn algorithm(annotations: &Annotations, driver: Driver) -> Result<&'static str, Error> {
    let name = annotations::LB_METHOD;
    let requested = annotations.get(name).map(|value| value.trim());
    let known = requested.map(|value| ALGORITHMS.into_iter().find(|known| *known == value));
    match (driver, known) {
        (Driver::Amphora, None) => Ok("ROUND_ROBIN"),
        (Driver::Ovn, None | Some(Some(BY_PORT))) => Ok(BY_PORT),
        (Driver::Ovn, Some(Some(other))) => Err(lacks(&format!("algorithm {other}"), name)),
        (Driver::Amphora, Some(Some(BY_PORT))) => {
            Err(invalid(name, "has the value SOURCE_IP_PORT, which only ovn has", "Use SOURCE_IP."))
        }
        (Driver::Amphora, Some(Some(known))) => Ok(known),
        (_, Some(None)) => {
            let problem = format!("has the unknown value `{}`", shown(requested.unwrap_or_default()));
            let advice = match driver {
                Driver::Amphora => "Use ROUND_ROBIN, LEAST_CONNECTIONS or SOURCE_IP.",
                Driver::Ovn => "Use SOURCE_IP_PORT.",
            };
            Err(invalid(name, &problem, advice))
        }
    }
}

fn limits(annotations: &Annotations, driver: Driver) -> Result<Option<Limits>, Error> {
    let get = |name: &'static str, default: i64, least: i64| {
        let Some(text) = annotations.get(name).map(|value| value.trim()) else { return Ok(Some(default)) };
        if driver == Driver::Ovn {
            let option =
                if name == annotations::CONNECTION_LIMIT { "limit of connections" } else { "timeout" };
            return Err(lacks(option, name));
        }
        match text.parse() {
            Ok(value) if (least..=LARGEST_LIMIT).contains(&value) => Ok(Some(value)),
            _ => {
                let problem = format!("has the value `{}`", shown(text));
                Err(invalid(name, &problem, &format!("Use a number from {least} to {LARGEST_LIMIT}.")))
            }
        }
    };
    let limits = Limits {
        connection_limit: get(annotations::CONNECTION_LIMIT, -1, -1)?,
        timeout_client_data: get(annotations::TIMEOUT_CLIENT_DATA, 50_000, 0)?,
        timeout_member_connect: get(annotations::TIMEOUT_MEMBER_CONNECT, 5_000, 0)?,
        timeout_member_data: get(annotations::TIMEOUT_MEMBER_DATA, 50_000, 0)?,
        timeout_tcp_inspect: get(annotations::TIMEOUT_TCP_INSPECT, 0, 0)?,
    };
    Ok((driver == Driver::Amphora).then_some(limits))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use steerage_provider_cloud::ClusterId;

    use super::*;

    pub(crate) fn config(provider: &str) -> Config {
        Config {
            cluster: ClusterId { name: "prod".to_owned(), uid: "c1".to_owned() },
            subnet: "subnet".to_owned(),
            member_subnet: "members".to_owned(),
            ipv6_subnet: None,
            ipv6_member_subnet: None,
            security_group: None,
            node_ports: 30_000..=32_767,
            adopt: None,
            shared_load_balancers: BTreeMap::new(),
            floating_network: None,
            provider: provider.to_owned(),
            poll: Duration::ZERO,
        }
    }

    fn read(provider: &str, pairs: &[(&str, &str)]) -> Result<Options, (&'static str, String)> {
        let annotations = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Options::read(&annotations.collect(), &config(provider))
            .map_err(|error| (error.reason(), error.to_string()))
    }

    #[test]
    fn defaults_are_the_drivers() {
        let amphora = read("amphora", &[]).unwrap();
        assert_eq!((amphora.algorithm, amphora.proxy_protocol), ("ROUND_ROBIN", None));
        assert_eq!((amphora.subnet, amphora.member_subnet), (None, None));
        assert_eq!(amphora.limits.unwrap().timeout_client_data, Some(50_000));
        let ovn = read("ovn", &[]).unwrap();
        assert_eq!((ovn.algorithm, ovn.limits), ("SOURCE_IP_PORT", None));
    }

    #[test]
    fn values_are_read() {
        let all = [
            (annotations::INTERNAL, "true"),
            (annotations::PROXY_PROTOCOL, "v2"),
            (annotations::LB_METHOD, "LEAST_CONNECTIONS"),
            (annotations::CONNECTION_LIMIT, " 100 "),
            (annotations::MEMBER_SUBNET, "65cc378b-a47a-4e88-a0cd-248c7c4974fa"),
        ];
        let options = read("amphora", &all).unwrap();
        assert_eq!((options.internal, options.proxy_protocol), (Some(true), Some(ProxyProtocol::V2)));
        assert_eq!(options.algorithm, "LEAST_CONNECTIONS");
        assert_eq!(options.limits.unwrap().connection_limit, Some(100));
        assert_eq!(options.member_subnet.as_deref(), Some("65cc378b-a47a-4e88-a0cd-248c7c4974fa"));
    }

    /// A value that a message names is accepted.
    #[test]
    fn refused_algorithm_names_those_of_the_driver() {
        for driver in ["amphora", "ovn"] {
            let (_, message) = read(driver, &[(annotations::LB_METHOD, "RANDOM")]).unwrap_err();
            for algorithm in ALGORITHMS {
                let is_named = message.split([' ', ',', '.']).any(|word| word == algorithm);
                let is_accepted = read(driver, &[(annotations::LB_METHOD, algorithm)]).is_ok();
                assert_eq!(is_named, is_accepted, "{driver} {algorithm}: {message}");
            }
        }
    }

    #[test]
    fn ovn_names_what_an_annotation_requests() {
        for (name, part) in [
            (annotations::CONNECTION_LIMIT, "ovn has no limit of connections"),
            (annotations::TIMEOUT_CLIENT_DATA, "ovn has no timeout"),
        ] {
            let (_, message) = read("ovn", &[(name, "100")]).unwrap_err();
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn wrong_values_and_what_the_driver_lacks_are_refused() {
        for (provider, name, value, reason) in [
            ("amphora", annotations::INTERNAL, "yes", "InvalidAnnotation"),
            ("amphora", annotations::PROXY_PROTOCOL, "v3", "InvalidAnnotation"),
            ("amphora", annotations::LB_METHOD, "RANDOM", "InvalidAnnotation"),
            ("amphora", annotations::LB_METHOD, "SOURCE_IP_PORT", "InvalidAnnotation"),
            ("amphora", annotations::TIMEOUT_CLIENT_DATA, "-1", "InvalidAnnotation"),
            ("amphora", annotations::CONNECTION_LIMIT, "many", "InvalidAnnotation"),
            ("amphora", annotations::SUBNET, "a/../b?x=y", "InvalidAnnotation"),
            ("amphora", annotations::FLOATING_NETWORK, "", "InvalidAnnotation"),
            ("amphora", annotations::FLAVOR, "a b", "InvalidAnnotation"),
            ("amphora", annotations::AVAILABILITY_ZONE, " ", "InvalidAnnotation"),
            ("ovn", annotations::FLAVOR, "f", "DriverLacksOption"),
            ("ovn", annotations::AVAILABILITY_ZONE, "z", "DriverLacksOption"),
            ("ovn", annotations::PROXY_PROTOCOL, "v2", "DriverLacksOption"),
            ("ovn", annotations::LB_METHOD, "ROUND_ROBIN", "DriverLacksOption"),
            ("ovn", annotations::CONNECTION_LIMIT, "100", "DriverLacksOption"),
        ] {
            let (got, message) = read(provider, &[(name, value)]).unwrap_err();
            assert!(got == reason && message.contains(name), "{provider} {name}: {got} {message}");
        }
    }
}
