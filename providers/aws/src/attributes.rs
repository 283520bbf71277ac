// SPDX-License-Identifier: Apache-2.0
//! The attributes of load balancers and target groups that annotations may name: names, values and AWS's defaults. Pure. `desired`
//! reads them. An attribute that no annotation names is left as it is, or has the value that `desired` gives every target group.

use std::collections::{BTreeMap, BTreeSet};

use steerage_model::shown;
use steerage_provider_api::Error;
use steerage_provider_cloud::annotation::{self, Pair};

use crate::annotations::{
    ACCESS_LOG_BUCKET, ACCESS_LOG_ENABLED, ACCESS_LOG_PREFIX, ATTRIBUTES, CROSS_ZONE, GROUP_ATTRIBUTES,
    PROXY_PROTOCOL,
};

/// The Service's annotations.
type Annotations = BTreeMap<String, String>;
/// Values by attribute.
pub(crate) type Values = BTreeMap<&'static str, String>;

const LOG_ENABLED: &str = "access_logs.s3.enabled";
const LOG_BUCKET: &str = "access_logs.s3.bucket";
const LOG_PREFIX: &str = "access_logs.s3.prefix";
const CROSS_ZONE_KEY: &str = "load_balancing.cross_zone.enabled";
pub(crate) const PRESERVE: &str = "preserve_client_ip.enabled";
/// How long connections of a target that leaves may last, in seconds.
pub(crate) const DRAIN: &str = "deregistration_delay.timeout_seconds";
pub(crate) const PROXY: &str = "proxy_protocol_v2.enabled";
const RESET: &str = "target_health_state.unhealthy.connection_termination.enabled";
const INTERVAL: &str = "target_health_state.unhealthy.draining_interval_seconds";
const END_CONNECTIONS: &str = "deregistration_delay.connection_termination.enabled";

/// The values that an attribute takes.
#[derive(Clone, Copy, Debug)]
enum Takes {
    OneOf(&'static [&'static str]),
    Number(u32, u32),
    NumberOrOff(u32, u32),
    Text,
}

const BOOL: Takes = Takes::OneOf(&["true", "false"]);

/// An attribute that an annotation may name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attribute {
    pub(crate) key: &'static str,
    takes: Takes,
    /// AWS's value of a new resource; `None` if AWS has none, and takes none back.
    default: Option<&'static str>,
    /// Stands for the key in the tag of a resource, whose length AWS limits.
    pub(crate) mark: &'static str,
}

const fn attribute(
    key: &'static str,
    takes: Takes,
    default: Option<&'static str>,
    mark: &'static str,
) -> Attribute {
    Attribute { key, takes, default, mark }
}

/// Of load balancers.
pub(crate) const OF_BALANCERS: &[Attribute] = &[
    // Without logs, AWS uses no bucket, and takes no empty name of one.
    attribute(LOG_BUCKET, Takes::Text, None, "log-bucket"),
    attribute(LOG_ENABLED, BOOL, Some("false"), "log"),
    attribute(LOG_PREFIX, Takes::Text, Some(""), "log-prefix"),
    attribute("deletion_protection.enabled", BOOL, Some("false"), "deletion-protection"),
    attribute(
        "dns_record.client_routing_policy",
        Takes::OneOf(&[
            "any_availability_zone",
            "availability_zone_affinity",
            "partial_availability_zone_affinity",
        ]),
        Some("any_availability_zone"),
        "client-routing",
    ),
    attribute(CROSS_ZONE_KEY, BOOL, Some("false"), "cross-zone"),
    attribute("zonal_shift.config.enabled", BOOL, Some("false"), "zonal-shift"),
];

/// Of target groups of instances. AWS's default is used only for those without a value of [`group_defaults`].
pub(crate) const OF_GROUPS: &[Attribute] = &[
    attribute(END_CONNECTIONS, BOOL, Some("false"), "end-connections"),
    attribute("deregistration_delay.timeout_seconds", Takes::Number(0, 3600), None, "delay"),
    attribute(
        CROSS_ZONE_KEY,
        Takes::OneOf(&["true", "false", "use_load_balancer_configuration"]),
        Some("use_load_balancer_configuration"),
        "cross-zone",
    ),
    attribute(PRESERVE, BOOL, None, "client-ip"),
    attribute(PROXY, BOOL, None, "proxy-protocol"),
    attribute(
        "target_group_health.dns_failover.minimum_healthy_targets.count",
        Takes::NumberOrOff(1, 1000),
        Some("1"),
        "dns-count",
    ),
    attribute(
        "target_group_health.dns_failover.minimum_healthy_targets.percentage",
        Takes::NumberOrOff(1, 100),
        Some("off"),
        "dns-percentage",
    ),
    attribute(
        "target_group_health.unhealthy_state_routing.minimum_healthy_targets.count",
        Takes::Number(1, 1000),
        Some("1"),
        "routing-count",
    ),
    attribute(
        "target_group_health.unhealthy_state_routing.minimum_healthy_targets.percentage",
        Takes::NumberOrOff(1, 100),
        Some("off"),
        "routing-percentage",
    ),
    attribute(RESET, BOOL, None, "reset"),
    attribute(INTERVAL, Takes::Number(0, 360_000), None, "drain"),
];

/// The attributes that AWS has, but Steerage does not take from annotations, and why.
const REFUSED: &[(&str, &str)] = &[
    (
        "ipv6.deny_all_igw_traffic",
        "an internal load balancer that the internet reaches over IPv6 is not supported",
    ),
    ("secondary_ips.auto_assigned.per_subnet", "AWS cannot lower it again"),
    ("stickiness.enabled", "spec.sessionAffinity decides it"),
    ("stickiness.type", "spec.sessionAffinity decides it"),
];

impl Attribute {
    /// AWS's value of a new resource with this protocol.
    fn default_of(&self, protocol: &str) -> Option<&'static str> {
        let is_datagram = matches!(protocol, "UDP" | "TCP_UDP");
        if self.key == END_CONNECTIONS && is_datagram { Some("true") } else { self.default }
    }

    /// What is wrong with a value, as the values that are right.
    fn check(&self, value: &str) -> Result<(), String> {
        let is_number = |(min, max): (u32, u32)| {
            value.bytes().all(|b| b.is_ascii_digit())
                && value.parse::<u32>().is_ok_and(|n| (min..=max).contains(&n))
        };
        let (is_right, values) = match self.takes {
            Takes::OneOf(all) => (all.contains(&value), all.join(" or ")),
            Takes::Number(min, max) => (is_number((min, max)), format!("a number from {min} to {max}")),
            Takes::NumberOrOff(min, max) => {
                (value == "off" || is_number((min, max)), format!("a number from {min} to {max}, or off"))
            }
            Takes::Text => (
                !value.is_empty() && value.len() <= 1024 && !value.contains(char::is_whitespace),
                "a name without spaces".to_owned(),
            ),
        };
        if is_right { Ok(()) } else { Err(values) }
    }
}

/// The values to which attributes return that an annotation named and none names now.
pub(crate) fn returned(
    table: &[Attribute],
    marked: &BTreeSet<&'static str>,
    wanted: &Values,
    protocol: &str,
) -> Values {
    let left = table.iter().filter(|a| marked.contains(a.key) && !wanted.contains_key(a.key));
    left.filter_map(|a| Some((a.key, a.default_of(protocol)?.to_owned()))).collect()
}

/// Reads the values from an annotation of pairs.
fn read(annotations: &Annotations, name: &str, table: &'static [Attribute]) -> Result<Values, Error> {
    let mut values = Values::new();
    for Pair { key, value } in annotation::pairs(annotations, name)? {
        let Some(known) = table.iter().find(|known| known.key == key) else {
            let why = REFUSED.iter().find(|(refused, _)| *refused == key);
            return Err(match why {
                Some((_, why)) => annotation::invalid(
                    name,
                    &format!("sets the attribute {key}, which no annotation may set: {why}"),
                    "Remove the attribute.",
                ),
                None => annotation::unknown_key(name, &key, table.iter().map(|known| known.key)),
            });
        };
        known.check(&value).map_err(|right| {
            let problem = format!("sets the attribute {key} to the wrong value `{}`", shown(&value));
            annotation::invalid(name, &problem, &format!("Use {right}."))
        })?;
        values.insert(known.key, value);
    }
    Ok(values)
}

/// Adds the value of an annotation for one attribute, which must not contradict the list.
fn add_alias(
    annotations: &Annotations,
    (alias, list): (&'static str, &'static str),
    known: &Attribute,
    values: &mut Values,
) -> Result<(), Error> {
    let Some(value) = annotations.get(alias).map(|value| value.trim()) else { return Ok(()) };
    known.check(value).map_err(|right| {
        let problem = format!("has the wrong value `{}`", shown(value));
        annotation::invalid(alias, &problem, &format!("Use {right}."))
    })?;
    match values.insert(known.key, value.to_owned()) {
        Some(other) if other != value => Err(annotation::conflict(
            &format!(
                "Annotation {alias} sets the attribute {} to `{}`, and {list} to `{}`.",
                known.key,
                shown(value),
                shown(&other)
            ),
            "Keep only one of them.",
        )),
        _ => Ok(()),
    }
}

/// The attributes of the load balancer that the annotations name.
pub(crate) fn of_balancer(annotations: &Annotations) -> Result<Values, Error> {
    let mut values = read(annotations, ATTRIBUTES, OF_BALANCERS)?;
    let aliases = [
        (ACCESS_LOG_ENABLED, LOG_ENABLED),
        (ACCESS_LOG_BUCKET, LOG_BUCKET),
        (ACCESS_LOG_PREFIX, LOG_PREFIX),
        (CROSS_ZONE, CROSS_ZONE_KEY),
    ];
    for (alias, key) in aliases {
        if let Some(known) = OF_BALANCERS.iter().find(|known| known.key == key) {
            add_alias(annotations, (alias, ATTRIBUTES), known, &mut values)?;
        }
    }
    let is_logging = values.get(LOG_ENABLED).is_some_and(|value| value == "true");
    if is_logging && !values.contains_key(LOG_BUCKET) {
        return Err(annotation::conflict(
            &format!("The annotations enable access logs ({LOG_ENABLED}), but name no bucket."),
            &format!("Name one with {LOG_BUCKET} in {ATTRIBUTES}."),
        ));
    }
    Ok(values)
}

/// What the annotations say of all target groups of a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GroupWishes(Values);

impl GroupWishes {
    /// Whether an annotation names the attribute.
    pub(crate) fn names(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    /// Reads the annotations. `protocols` are those of the Service's target groups.
    pub(crate) fn read(annotations: &Annotations, protocols: &BTreeSet<&str>) -> Result<Self, Error> {
        let mut values = read(annotations, GROUP_ATTRIBUTES, OF_GROUPS)?;
        if let Some(ports) = annotations.get(PROXY_PROTOCOL).map(|text| text.trim()) {
            if ports != "*" {
                let problem = format!("has the unsupported value `{}`", shown(ports));
                return Err(annotation::invalid(
                    PROXY_PROTOCOL,
                    &problem,
                    "Use *, which means all ports, or remove it.",
                ));
            }
            if values.insert(PROXY, "true".to_owned()).is_some_and(|other| other != "true") {
                return Err(annotation::conflict(
                    &format!(
                        "Annotation {PROXY_PROTOCOL} enables {PROXY}, and {GROUP_ATTRIBUTES} disables it."
                    ),
                    "Keep only one of them.",
                ));
            }
        }
        let is = |key: &str, value: &str| values.get(key).is_some_and(|is| is == value);
        if is(PRESERVE, "false") && protocols.iter().any(|protocol| protocol.ends_with("UDP")) {
            return Err(annotation::conflict(
                &format!(
                    "Annotation {GROUP_ATTRIBUTES} disables {PRESERVE}, but AWS always preserves the client's address on \
                     ports with UDP."
                ),
                "Remove the attribute, or put the UDP ports into another Service.",
            ));
        }
        let of_unhealthy = [RESET, INTERVAL].into_iter().find(|key| values.contains_key(key));
        if let Some(key) = of_unhealthy
            && protocols.iter().all(|protocol| protocol.ends_with("UDP"))
        {
            return Err(annotation::conflict(
                &format!(
                    "Annotation {GROUP_ATTRIBUTES} sets {key}, which AWS has only for ports with TCP alone. The Service has no such \
                     port."
                ),
                "Remove the attribute.",
            ));
        }
        if is(RESET, "true")
            && let Some(seconds) = values.get(INTERVAL).filter(|seconds| *seconds != "0")
        {
            return Err(annotation::conflict(
                &format!(
                    "Annotation {GROUP_ATTRIBUTES} contradicts itself: {RESET}=true ends connections at once, and \
                     {INTERVAL}={seconds} keeps them for {seconds}s."
                ),
                "Keep only one of the two attributes.",
            ));
        }
        Ok(Self(values))
    }

    /// Whether no annotation names an attribute.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether targets get a PROXY protocol header.
    pub(crate) fn has_proxy_protocol(&self) -> bool {
        self.0.get(PROXY).is_some_and(|value| value == "true")
    }

    /// The values of a target group with this protocol: those of every group, and the annotations' in their place.
    pub(crate) fn of(&self, protocol: &str, sticky: bool) -> Values {
        let mut values = group_defaults(protocol, sticky);
        let has = |key: &str| protocol == "TCP" || protocol == "TLS" || ![RESET, INTERVAL].contains(&key);
        values.extend(self.0.iter().filter(|(key, _)| has(key)).map(|(key, value)| (*key, value.clone())));
        if values.get(RESET).is_some_and(|value| value == "true") {
            values.insert(INTERVAL, "0".to_owned());
        }
        values
    }
}

/// The attributes whose default would break a guarantee:
///
/// - The client's address reaches the pod without PROXY protocol.
/// - When the last pod of a node terminates, `/healthz` fails at once while the pod still serves its connections. So AWS must
///   not reset the connections of an unhealthy target. UDP target groups lack these attributes.
///
/// AWS has no stickiness for TLS target groups, and refuses its attributes there.
fn group_defaults(protocol: &str, sticky: bool) -> Values {
    let mut values = Values::from([
        ("deregistration_delay.timeout_seconds", "300".to_owned()),
        (PRESERVE, "true".to_owned()),
        (PROXY, "false".to_owned()),
    ]);
    if protocol != "TLS" {
        values.insert("stickiness.enabled", sticky.to_string());
        values.insert("stickiness.type", "source_ip".to_owned());
    }
    if matches!(protocol, "TCP" | "TLS") {
        values.insert(RESET, "false".to_owned());
        values.insert(INTERVAL, "300".to_owned());
    }
    values
}

/// Those of the values that a tag must remember: AWS's own default is to return when no annotation names them. Also a bucket, which has
/// no default: the attributes of a load balancer are read only if its tag names some.
pub(crate) fn to_mark(table: &[Attribute], values: &Values) -> BTreeSet<&'static str> {
    let is_marked = |a: &&Attribute| a.default.is_some() || a.key == LOG_BUCKET;
    table.iter().filter(is_marked).filter(|a| values.contains_key(a.key)).map(|a| a.key).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    type Pairs<'a> = &'a [(&'a str, &'a str)];

    fn annotations(pairs: Pairs<'_>) -> Annotations {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn balancer(pairs: &[(&str, &str)]) -> Result<Vec<(&'static str, String)>, (&'static str, String)> {
        let values = of_balancer(&annotations(pairs));
        values.map(|v| v.into_iter().collect()).map_err(|e| (e.reason(), e.to_string()))
    }

    fn group(
        pairs: &[(&str, &str)],
        protocols: &[&'static str],
    ) -> Result<Vec<Values>, (&'static str, String)> {
        let wishes = GroupWishes::read(&annotations(pairs), &protocols.iter().copied().collect());
        let of = |wishes: GroupWishes| protocols.iter().map(|p| wishes.of(p, false)).collect();
        wishes.map(of).map_err(|e| (e.reason(), e.to_string()))
    }

    #[test]
    fn only_named_attributes_have_values() {
        assert_eq!(balancer(&[]), Ok(vec![]));
        let listed = "load_balancing.cross_zone.enabled=true, deletion_protection.enabled = true,";
        let expected = [("deletion_protection.enabled", "true"), (CROSS_ZONE_KEY, "true")];
        assert_eq!(balancer(&[(ATTRIBUTES, listed)]), Ok(expected.map(|(k, v)| (k, v.to_owned())).into()));
        assert_eq!(
            balancer(&[(CROSS_ZONE, "false")]),
            Ok(vec![(CROSS_ZONE_KEY, "false".to_owned())]),
            "named, so repaired"
        );
        let logs = [(ACCESS_LOG_ENABLED, "true"), (ACCESS_LOG_BUCKET, "logs"), (ACCESS_LOG_PREFIX, "a/b=c")];
        let expected = [(LOG_BUCKET, "logs"), (LOG_ENABLED, "true"), (LOG_PREFIX, "a/b=c")];
        assert_eq!(balancer(&logs), Ok(expected.map(|(k, v)| (k, v.to_owned())).into()));
    }

    #[test]
    fn wrong_attributes_of_load_balancers_are_refused() {
        let cases: &[(Pairs<'_>, &str, &str)] = &[
            (&[(ATTRIBUTES, "load_balancing.cross_zone.enable=true")], "InvalidAnnotation", CROSS_ZONE_KEY),
            (&[(ATTRIBUTES, "load_balancing.cross_zone.enabled=yes")], "InvalidAnnotation", "true or false"),
            (&[(ATTRIBUTES, "load_balancing.cross_zone.enabled")], "InvalidAnnotation", "key=value"),
            (&[(ATTRIBUTES, "a=b")], "InvalidAnnotation", "unknown attribute a. No"),
            (
                &[(ATTRIBUTES, "deletion_protection.enabled=true,deletion_protection.enabled=false")],
                "InvalidAnnotation",
                "twice",
            ),
            (&[(ATTRIBUTES, "ipv6.deny_all_igw_traffic=true")], "InvalidAnnotation", "IPv6"),
            (&[(ATTRIBUTES, "secondary_ips.auto_assigned.per_subnet=1")], "InvalidAnnotation", "lower"),
            (&[(ATTRIBUTES, "access_logs.s3.enabled=true")], "ConflictingAnnotations", "bucket"),
            (&[(ACCESS_LOG_BUCKET, "")], "InvalidAnnotation", "wrong value"),
            (
                &[(ATTRIBUTES, "load_balancing.cross_zone.enabled=true"), (CROSS_ZONE, "false")],
                "ConflictingAnnotations",
                "Keep only one",
            ),
        ];
        for (pairs, reason, part) in cases {
            let (found, message) = balancer(pairs).unwrap_err();
            assert_eq!(found, *reason, "{message}");
            assert!(message.contains(part) && message.contains(pairs[0].0), "{message}");
        }
    }

    #[test]
    fn group_attributes_replace_safe_values() {
        let plain = group(&[], &["TCP"]).unwrap();
        assert_eq!(plain, [group_defaults("TCP", false)]);
        let text = "preserve_client_ip.enabled=false,deregistration_delay.timeout_seconds=0";
        let made = group(&[(GROUP_ATTRIBUTES, text)], &["TCP"]).unwrap();
        assert_eq!((made[0][PRESERVE].as_str(), made[0][PROXY].as_str()), ("false", "false"));
        assert_eq!(made[0]["deregistration_delay.timeout_seconds"], "0");
        let made = group(&[(PROXY_PROTOCOL, "*")], &["TCP", "UDP"]).unwrap();
        assert!(made.iter().all(|values| values[PROXY] == "true"));
        let made = group(&[(GROUP_ATTRIBUTES, &format!("{RESET}=true"))], &["TCP", "UDP"]).unwrap();
        assert_eq!((made[0][RESET].as_str(), made[0][INTERVAL].as_str()), ("true", "0"));
        assert!(!made[1].contains_key(RESET), "UDP groups lack it");
    }

    #[test]
    fn wrong_attributes_of_groups_are_refused() {
        let reset = format!("{RESET}=true,{INTERVAL}=60");
        let cases: &[(Pairs<'_>, &[&'static str], &str, &str)] = &[
            (
                &[(GROUP_ATTRIBUTES, "stickiness.enabled=true")],
                &["TCP"],
                "InvalidAnnotation",
                "sessionAffinity",
            ),
            (
                &[(GROUP_ATTRIBUTES, "preserve_client_ip.enable=false")],
                &["TCP"],
                "InvalidAnnotation",
                PRESERVE,
            ),
            (
                &[(GROUP_ATTRIBUTES, "deregistration_delay.timeout_seconds=3601")],
                &["TCP"],
                "InvalidAnnotation",
                "3600",
            ),
            (
                &[(GROUP_ATTRIBUTES, "deregistration_delay.timeout_seconds=+5")],
                &["TCP"],
                "InvalidAnnotation",
                "3600",
            ),
            (
                &[(GROUP_ATTRIBUTES, "preserve_client_ip.enabled=false")],
                &["TCP", "TCP_UDP"],
                "ConflictingAnnotations",
                "UDP",
            ),
            (&[(GROUP_ATTRIBUTES, &reset)], &["TCP"], "ConflictingAnnotations", INTERVAL),
            (&[(GROUP_ATTRIBUTES, &format!("{RESET}=true"))], &["UDP"], "ConflictingAnnotations", RESET),
            (&[(PROXY_PROTOCOL, "80")], &["TCP"], "InvalidAnnotation", "*"),
            (
                &[(PROXY_PROTOCOL, "*"), (GROUP_ATTRIBUTES, "proxy_protocol_v2.enabled=false")],
                &["TCP"],
                "ConflictingAnnotations",
                "Keep only one",
            ),
        ];
        for (pairs, protocols, reason, part) in cases {
            let (found, message) = group(pairs, protocols).unwrap_err();
            assert_eq!(found, *reason, "{message}");
            assert!(message.contains(part) && message.contains(pairs[0].0), "{message}");
        }
    }

    #[test]
    fn left_attributes_return_to_the_default_of_aws() {
        let marked = BTreeSet::from([CROSS_ZONE_KEY, LOG_BUCKET]);
        let back = returned(OF_BALANCERS, &marked, &Values::new(), "");
        assert_eq!(back, Values::from([(CROSS_ZONE_KEY, "false".to_owned())]));
        let named = Values::from([(CROSS_ZONE_KEY, "true".to_owned())]);
        assert_eq!(returned(OF_BALANCERS, &marked, &named, ""), Values::new());
        let marked = BTreeSet::from([END_CONNECTIONS]);
        for (protocol, default) in [("TCP", "false"), ("UDP", "true"), ("TCP_UDP", "true")] {
            let back = returned(OF_GROUPS, &marked, &Values::new(), protocol);
            assert_eq!(back, Values::from([(END_CONNECTIONS, default.to_owned())]));
        }
    }

    /// Otherwise nothing would say that the attribute must return to AWS's default.
    #[test]
    fn every_attribute_without_a_value_of_ours_is_marked() {
        let ours = group_defaults("TCP", false);
        for known in OF_GROUPS {
            assert_eq!(known.default.is_none(), ours.contains_key(known.key), "{}", known.key);
        }
        for known in OF_BALANCERS.iter().filter(|known| known.default.is_none()) {
            assert_eq!(known.key, LOG_BUCKET);
        }
    }
}
