// SPDX-License-Identifier: Apache-2.0
//! The steps from the observed to the wanted resources. Pure. After every prefix of the steps, clients are still served.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use steerage_model::Family;

use crate::attributes::{self, OF_BALANCERS, OF_GROUPS, Values};
use crate::client::Tags;
use crate::desired::{Desired, DesiredGroup, MAX_LISTENERS};
use crate::health_check::HealthCheckSettings;
use crate::labels::{self, Relabel};
use crate::tls::{Recertify, Tls};

/// An existing target group of this cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ObservedGroup {
    pub(crate) arn: String,
    /// Whether its targets are pods, by address; otherwise they are instances.
    pub(crate) has_pods: bool,
    /// Whether they are reached over IPv6.
    pub(crate) is_ipv6: bool,
    pub(crate) health: HealthCheckSettings,
    /// Whether an HTTP check accepts only status 200. True for a TCP check.
    pub(crate) only_200: bool,
    pub(crate) attributes: BTreeMap<String, String>,
    /// As last read or written. A read of target groups alone shows none.
    pub(crate) tags: Tags,
}

impl ObservedGroup {
    /// Over which IP family its targets are reached.
    pub(crate) fn family(&self) -> Family {
        if self.is_ipv6 { Family::V6 } else { Family::V4 }
    }

    /// How long the connections of targets that leave may last; AWS's default if the attributes were not read.
    pub(crate) fn drain(&self) -> Duration {
        let seconds = self.attributes.get(attributes::DRAIN).and_then(|seconds| seconds.parse().ok());
        Duration::from_secs(seconds.unwrap_or(300))
    }
}

/// An existing listener of this cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ObservedListener {
    pub(crate) arn: String,
    pub(crate) port: u16,
    pub(crate) protocol: String,
    /// The target group, if the listener forwards to exactly one.
    pub(crate) group_arn: Option<String>,
    /// Of a TLS listener. A read of listeners alone shows no certificates beside the default one.
    pub(crate) tls: Option<Tls>,
    /// As last read or written. A read of listeners alone shows none.
    pub(crate) tags: Tags,
}

/// What has tags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Tagged {
    Balancer,
    /// By name.
    Group(String),
    /// By ARN.
    Listener(String),
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    CreateGroup(DesiredGroup),
    ModifyHealth {
        arn: String,
        health: HealthCheckSettings,
    },
    /// Names the group instead of its ARN, because an earlier step may create it.
    SetAttributes {
        group: String,
        attributes: Values,
    },
    SetBalancerAttributes(Values),
    AddTags {
        of: Tagged,
        tags: Tags,
    },
    RemoveTags {
        of: Tagged,
        keys: Vec<String>,
    },
    CreateListener {
        port: u16,
        protocol: &'static str,
        group: String,
        tls: Option<Tls>,
    },
    /// Forwards to another group, or changes protocol, default certificate or policies.
    SwitchListener {
        arn: String,
        protocol: Option<&'static str>,
        group: String,
        tls: Option<Tls>,
    },
    AddCertificates {
        arn: String,
        certificates: BTreeSet<String>,
    },
    RemoveCertificates {
        arn: String,
        certificates: BTreeSet<String>,
    },
    DeleteListener {
        arn: String,
    },
    /// Deletes a group that no listener uses any more.
    DeleteGroup {
        name: String,
        arn: String,
    },
}

impl Step {
    /// Whether the step prepares a target group. These come first: then targets are registered, and then listeners change.
    pub(crate) fn is_of_group(&self) -> bool {
        match self {
            Self::CreateGroup(_) | Self::ModifyHealth { .. } | Self::SetAttributes { .. } => true,
            Self::AddTags { of, .. } | Self::RemoveTags { of, .. } => matches!(of, Tagged::Group(_)),
            _ => false,
        }
    }
}

impl fmt::Display for Tagged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Balancer => f.write_str("the load balancer"),
            Self::Group(name) => write!(f, "target group {name}"),
            Self::Listener(arn) => write!(f, "listener {arn}"),
        }
    }
}

/// For log lines: what is done to which resource.
impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |keys: Vec<&str>| keys.join(", ");
        let keys = |values: &Values| list(values.keys().copied().collect());
        match self {
            Self::CreateGroup(group) => write!(f, "create target group {}", group.name),
            Self::ModifyHealth { arn, .. } => write!(f, "change the health check of target group {arn}"),
            Self::SetAttributes { group, attributes } => {
                write!(f, "set attributes of target group {group}: {}", keys(attributes))
            }
            Self::SetBalancerAttributes(attributes) => {
                write!(f, "set attributes of the load balancer: {}", keys(attributes))
            }
            Self::AddTags { of, tags } => {
                write!(f, "add tags to {of}: {}", list(tags.keys().map(String::as_str).collect()))
            }
            Self::RemoveTags { of, keys } => {
                write!(f, "remove tags from {of}: {}", list(keys.iter().map(String::as_str).collect()))
            }
            Self::CreateListener { port, protocol, group, .. } => {
                write!(f, "create listener {protocol} {port} to target group {group}")
            }
            Self::SwitchListener { arn, group, .. } => {
                write!(f, "change listener {arn} to target group {group}")
            }
            Self::AddCertificates { arn, certificates } => {
                write!(
                    f,
                    "add certificates to listener {arn}: {}",
                    list(certificates.iter().map(String::as_str).collect())
                )
            }
            Self::RemoveCertificates { arn, certificates } => {
                write!(
                    f,
                    "remove certificates from listener {arn}: {}",
                    list(certificates.iter().map(String::as_str).collect())
                )
            }
            Self::DeleteListener { arn } => write!(f, "delete listener {arn}"),
            Self::DeleteGroup { name, .. } => write!(f, "delete target group {name}"),
        }
    }
}

/// Tags that remember come before what they remember, and shrink after it is taken back.
fn labelled(of: &Tagged, relabel: Relabel, change: Option<Step>) -> Vec<Step> {
    let Relabel { room, first, remove, last } = relabel;
    let add = |tags: Tags| (!tags.is_empty()).then(|| Step::AddTags { of: of.clone(), tags });
    let remove_all =
        |keys: Vec<String>| (!keys.is_empty()).then(|| Step::RemoveTags { of: of.clone(), keys });
    [remove_all(room), add(first), change, remove_all(remove), add(last)].into_iter().flatten().collect()
}

/// The values that differ from those that were read.
fn different(wanted: Values, seen: &BTreeMap<String, String>) -> Values {
    wanted.into_iter().filter(|(key, value)| seen.get(*key) != Some(value)).collect()
}

/// The steps to the attributes and tags of the load balancer. They come last: AWS may refuse an attribute, such as a bucket, and
/// clients are served all the same.
pub(crate) fn balancer_steps(desired: &Desired, seen: &BTreeMap<String, String>, tags: &Tags) -> Vec<Step> {
    let remembered = labels::remembered(tags);
    let mut attributes = attributes::returned(OF_BALANCERS, &remembered, &desired.attributes, "");
    attributes.extend(different(desired.attributes.clone(), seen));
    let change = (!attributes.is_empty()).then_some(Step::SetBalancerAttributes(attributes));
    labelled(&Tagged::Balancer, desired.labels.relabel(tags), change)
}

/// The steps from `groups` (by name) and `listeners` to `desired`. The load balancer has so many listeners of others.
pub(crate) fn steps(
    desired: &Desired,
    groups: &BTreeMap<String, ObservedGroup>,
    listeners: &[ObservedListener],
    others: usize,
) -> Vec<Step> {
    let mut steps = Vec::new();
    for group in &desired.groups {
        let seen = groups.get(&group.name);
        if seen.is_none() {
            steps.push(Step::CreateGroup(group.clone()));
        }
        let nothing = BTreeMap::new();
        let mut attributes =
            different(group.attributes.clone(), seen.map_or(&nothing, |seen| &seen.attributes));
        if let Some(seen) = seen {
            let remembered = labels::remembered(&seen.tags);
            attributes.extend(attributes::returned(
                OF_GROUPS,
                &remembered,
                &group.attributes,
                group.protocol,
            ));
        }
        let check = seen.filter(|seen| seen.health != group.health || !seen.only_200);
        let check =
            check.map(|seen| Step::ModifyHealth { arn: seen.arn.clone(), health: group.health.clone() });
        // AWS sends the PROXY protocol header to health checks too, and no HTTP check may get it.
        let ends_header = attributes.get(attributes::PROXY).is_some_and(|value| value == "false");
        let change =
            (!attributes.is_empty()).then(|| Step::SetAttributes { group: group.name.clone(), attributes });
        let relabel = seen.map(|seen| group.labels.relabel(&seen.tags)).unwrap_or_default();
        let attributes = labelled(&Tagged::Group(group.name.clone()), relabel, change);
        if ends_header && group.health.path.is_some() {
            steps.extend(attributes.into_iter().chain(check));
        } else {
            steps.extend(check.into_iter().chain(attributes));
        }
    }
    let unwanted = listeners.iter().filter(|s| desired.listeners.iter().all(|f| f.port != s.port));
    let mut unwanted: Vec<&ObservedListener> = unwanted.collect();
    // One that forwards to several groups could not be put back.
    unwanted.sort_by_key(|seen| seen.group_arn.is_none());
    let mut unwanted = unwanted.into_iter().map(|seen| Step::DeleteListener { arn: seen.arn.clone() });
    let mut room = MAX_LISTENERS.saturating_sub(others + listeners.len());
    for listener in &desired.listeners {
        let Some(seen) = listeners.iter().find(|f| f.port == listener.port) else {
            // One at a time: AWS may refuse the new listener.
            match room.checked_sub(1) {
                Some(left) => room = left,
                None => steps.extend(unwanted.next()),
            }
            steps.push(Step::CreateListener {
                port: listener.port,
                protocol: listener.protocol,
                group: listener.group.clone(),
                tls: listener.tls.clone(),
            });
            continue;
        };
        let there = groups.get(&listener.group).is_some_and(|g| seen.group_arn.as_ref() == Some(&g.arn));
        let is_set =
            listener.tls.as_ref().is_none_or(|tls| seen.tls.as_ref().is_some_and(|seen| tls.is_set_as(seen)));
        let arn = seen.arn.clone();
        let change =
            (!there || !is_set || seen.protocol != listener.protocol).then(|| Step::SwitchListener {
                arn: arn.clone(),
                protocol: (seen.protocol != listener.protocol).then_some(listener.protocol),
                group: listener.group.clone(),
                tls: listener.tls.clone(),
            });
        let certificates = listener.tls.as_ref().map(|tls| tls.recertify(seen.tls.as_ref()));
        let Recertify { room, added, left, late } = certificates.unwrap_or_default();
        let remove = |certificates: BTreeSet<String>| {
            (!certificates.is_empty()).then(|| Step::RemoveCertificates { arn: arn.clone(), certificates })
        };
        let add = |certificates: BTreeSet<String>| {
            (!certificates.is_empty()).then(|| Step::AddCertificates { arn: arn.clone(), certificates })
        };
        // Only TLS listeners have certificates.
        let (before, after) = if seen.tls.is_some() { (add(added), None) } else { (None, add(added)) };
        steps.extend([remove(room), before, change, after, remove(left), add(late)].into_iter().flatten());
        let relabel = desired.listener_labels().relabel(&seen.tags);
        steps.extend(labelled(&Tagged::Listener(seen.arn.clone()), relabel, None));
    }
    steps.extend(unwanted);
    for (name, seen) in groups.iter().filter(|(name, _)| desired.groups.iter().all(|g| g.name != **name)) {
        steps.push(Step::DeleteGroup { name: name.clone(), arn: seen.arn.clone() });
    }
    steps
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use steerage_model::Protocol;

    use super::*;
    use crate::desired::desired;
    use crate::desired::tests::{config, planned};

    fn tags_of<'a>(
        of: &Tagged,
        groups: &'a mut BTreeMap<String, ObservedGroup>,
        listeners: &'a mut [ObservedListener],
    ) -> &'a mut Tags {
        match of {
            Tagged::Balancer => panic!("is no step of groups and listeners"),
            Tagged::Group(name) => &mut groups.get_mut(name).unwrap().tags,
            Tagged::Listener(arn) => &mut listeners.iter_mut().find(|f| f.arn == *arn).unwrap().tags,
        }
    }

    /// Applies the steps as if every call succeeded.
    fn apply(
        steps: &[Step],
        groups: &mut BTreeMap<String, ObservedGroup>,
        listeners: &mut Vec<ObservedListener>,
        listener_tags: &Tags,
    ) {
        for step in steps {
            match step.clone() {
                Step::CreateGroup(group) => {
                    let arn = format!("arn:{}", group.name);
                    let seen = ObservedGroup {
                        arn,
                        has_pods: group.has_pods(),
                        is_ipv6: group.family == Family::V6,
                        health: group.health,
                        only_200: true,
                        attributes: BTreeMap::new(),
                        tags: group.labels.all(),
                    };
                    assert!(groups.insert(group.name, seen).is_none());
                }
                Step::ModifyHealth { arn, health } => {
                    let seen = groups.values_mut().find(|g| g.arn == arn).unwrap();
                    (seen.health, seen.only_200) = (health, true);
                }
                Step::SetAttributes { group, attributes } => {
                    let new = attributes.into_iter().map(|(k, v)| (k.to_owned(), v));
                    groups.get_mut(&group).unwrap().attributes.extend(new);
                }
                Step::SetBalancerAttributes(_) => panic!("is no step of groups and listeners"),
                Step::AddTags { of, tags } => tags_of(&of, groups, listeners).extend(tags),
                Step::RemoveTags { of, keys } => {
                    tags_of(&of, groups, listeners).retain(|key, _| !keys.contains(key));
                }
                Step::AddCertificates { arn, certificates } => {
                    let listener = listeners.iter_mut().find(|f| f.arn == arn).unwrap();
                    listener.tls.as_mut().unwrap().others.extend(certificates);
                }
                Step::RemoveCertificates { arn, certificates } => {
                    let listener = listeners.iter_mut().find(|f| f.arn == arn).unwrap();
                    let tls = listener.tls.as_mut().unwrap();
                    assert!(!certificates.contains(&tls.certificate), "AWS refuses it");
                    tls.others.retain(|other| !certificates.contains(other));
                }
                Step::CreateListener { port, protocol, group, tls } => {
                    assert!(listeners.iter().all(|f| f.port != port));
                    let group_arn = Some(groups[&group].arn.clone());
                    listeners.push(ObservedListener {
                        arn: format!("listener:{port}"),
                        port,
                        protocol: protocol.to_owned(),
                        group_arn,
                        tags: listener_tags.clone(),
                        tls,
                    });
                }
                Step::SwitchListener { arn, protocol, group, tls } => {
                    let listener = listeners.iter_mut().find(|f| f.arn == arn).unwrap();
                    let others = listener.tls.take().map(|tls| tls.others).unwrap_or_default();
                    listener.tls = tls.map(|tls| Tls { others, ..tls });
                    listener.protocol = protocol.map_or_else(|| listener.protocol.clone(), str::to_owned);
                    listener.group_arn = Some(groups[&group].arn.clone());
                }
                Step::DeleteListener { arn } => listeners.retain(|f| f.arn != arn),
                Step::DeleteGroup { name, arn } => {
                    assert!(
                        listeners.iter().all(|f| f.group_arn.as_ref() != Some(&arn)),
                        "deleted while in use"
                    );
                    groups.remove(&name).unwrap();
                }
            }
        }
    }

    /// Some of 40 certificates, the first one the default one.
    fn certificates() -> impl Strategy<Value = Vec<usize>> {
        proptest::sample::subsequence((0..40).collect::<Vec<usize>>(), 1..=25).prop_shuffle()
    }

    const CROSS_ZONE: &str = "load_balancing.cross_zone.enabled";

    fn annotated() -> impl Strategy<Value = &'static [(&'static str, &'static str)]> {
        use crate::annotations::{BACKEND_PROTOCOL, GROUP_ATTRIBUTES, SSL_CERT, SSL_POLICY, TAGS};
        let none: &'static [(&'static str, &'static str)] = &[];
        prop_oneof![
            Just(none),
            Just(&[(TAGS, "a=1,b=2")][..]),
            Just(&[(SSL_CERT, "arn:aws:acm:::a"), (SSL_POLICY, "other")][..]),
            Just(
                &[(SSL_CERT, "arn:aws:acm:::b,arn:aws:acm:::a,arn:aws:acm:::c"), (BACKEND_PROTOCOL, "ssl")][..]
            ),
            Just(&[(TAGS, "b=3"), (GROUP_ATTRIBUTES, "load_balancing.cross_zone.enabled=true")][..]),
            Just(
                &[(
                    GROUP_ATTRIBUTES,
                    "load_balancing.cross_zone.enabled=false,deregistration_delay.timeout_seconds=5"
                )][..]
            ),
        ]
    }

    fn ports() -> impl Strategy<Value = Vec<(Protocol, u16, u16)>> {
        let port = (prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp)], 1..6u16, 30000..30004u16);
        proptest::collection::vec(port, 0..5).prop_map(|mut ports| {
            // All protocols of a port have the same node port.
            ports.sort_by_key(|p| (p.1, p.0));
            ports.dedup_by_key(|p| p.1);
            ports
        })
    }

    proptest! {
        #[test]
        fn interrupted_steps_converge_afterwards(
            from in ports(),
            to in ports(),
            of_from in annotated(),
            of_to in annotated(),
            cut in 0..20usize,
        ) {
            let (mut groups, mut listeners) = (BTreeMap::new(), Vec::new());
            let with = |ports: &[(Protocol, u16, u16)], annotations: &[(&str, &str)]| {
                let mut lb = planned(ports);
                let annotations = annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
                lb.annotations = annotations.collect();
                desired(&config(), &lb).unwrap()
            };
            let (from, to) = (with(&from, of_from), with(&to, of_to));
            let first = steps(&from, &groups, &listeners, 0);
            apply(&first, &mut groups, &mut listeners, &from.listener_labels().all());
            prop_assert!(steps(&from, &groups, &listeners, 0).is_empty());
            let change = steps(&to, &groups, &listeners, 0);
            apply(&change[..cut.min(change.len())], &mut groups, &mut listeners, &to.listener_labels().all());
            let rest = steps(&to, &groups, &listeners, 0);
            apply(&rest, &mut groups, &mut listeners, &to.listener_labels().all());
            prop_assert_eq!(steps(&to, &groups, &listeners, 0), vec![]);
            for listener in &to.listeners {
                let seen = listeners.iter().find(|seen| seen.port == listener.port).unwrap();
                let tls = seen.tls.clone().map(Tls::without_default);
                prop_assert_eq!((seen.protocol.as_str(), &tls), (listener.protocol, &listener.tls));
            }
            prop_assert!(listeners.iter().all(|f| f.tags == to.listener_labels().all()));
            for group in &to.groups {
                let seen = &groups[&group.name];
                prop_assert_eq!(&seen.tags, &group.labels.all());
                let crossing = seen.attributes.get(CROSS_ZONE).map(String::as_str);
                let named = group.attributes.get(CROSS_ZONE).map(String::as_str);
                prop_assert!(crossing == named || named.is_none() && crossing == Some("use_load_balancer_configuration"));
            }
            prop_assert_eq!(groups.len(), to.groups.len());
            prop_assert_eq!(listeners.len(), to.listeners.len());
        }
    }

    /// Changes certificates again and again. Whenever the steps end, one that stays is served, and AWS's limit is kept.
    fn change_certificates(changes: &[Vec<usize>]) -> Result<(), TestCaseError> {
        let (mut groups, mut listeners) = (BTreeMap::new(), Vec::<ObservedListener>::new());
        let mut old = BTreeSet::new();
        for indices in changes {
            let arns: Vec<String> = indices.iter().map(|index| format!("arn:aws:acm:::{index:02}")).collect();
            let mut lb = planned(&[(Protocol::Tcp, 443, 30443)]);
            lb.annotations.insert(crate::annotations::SSL_CERT.to_owned(), arns.join(","));
            let (to, new) = (desired(&config(), &lb).unwrap(), arns.into_iter().collect::<BTreeSet<_>>());
            for step in steps(&to, &groups, &listeners, 0) {
                apply(&[step], &mut groups, &mut listeners, &Tags::new());
                let Some(tls) = listeners.first().and_then(|listener| listener.tls.clone()) else { continue };
                prop_assert!(tls.others.len() <= 25, "{}", tls.others.len());
                let served: BTreeSet<String> = tls.others.into_iter().chain([tls.certificate]).collect();
                prop_assert!((&old & &new).is_subset(&served));
            }
            prop_assert_eq!(steps(&to, &groups, &listeners, 0), vec![]);
            prop_assert_eq!(listeners[0].tls.clone().map(Tls::without_default), to.listeners[0].tls.clone());
            old = new;
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn certificates_that_stay_are_served_all_the_time(
            changes in proptest::collection::vec(certificates(), 2..5),
        ) {
            change_certificates(&changes)?;
        }
    }

    /// Two of its certificates are default ones, which AWS does not remove.
    #[test]
    fn full_list_of_certificates_is_replaced() {
        let with = |default: usize, others: std::ops::Range<usize>| {
            [default].into_iter().chain(others.filter(|other| *other != default)).collect::<Vec<usize>>()
        };
        change_certificates(&[with(1, 0..25), with(0, 0..25), with(2, 30..54)]).unwrap();
    }

    #[test]
    fn changed_node_port_creates_new_group_before_deleting_old() {
        let (mut groups, mut listeners) = (BTreeMap::new(), Vec::new());
        let of = |node_port| desired(&config(), &planned(&[(Protocol::Tcp, 80, node_port)])).unwrap();
        apply(&steps(&of(30080), &groups, &listeners, 0), &mut groups, &mut listeners, &Tags::new());
        let kinds: Vec<_> = steps(&of(30081), &groups, &listeners, 0)
            .iter()
            .map(|s| match s {
                Step::CreateGroup(_) => "create",
                Step::SetAttributes { .. } => "attributes",
                Step::SwitchListener { protocol: None, .. } => "switch",
                Step::DeleteGroup { .. } => "delete",
                _ => "other",
            })
            .collect();
        assert_eq!(kinds, ["create", "attributes", "switch", "delete"]);
    }

    #[test]
    fn proxy_protocol_and_http_check_never_meet() {
        let (mut groups, mut listeners) = (BTreeMap::new(), Vec::new());
        for (is_named, expected) in [
            (false, vec![]),
            (true, vec![true, false]),
            (false, vec![false, true]),
            (true, vec![true, false]),
        ] {
            let mut lb = planned(&[(Protocol::Tcp, 80, 30080)]);
            if is_named {
                lb.annotations.insert(crate::annotations::PROXY_PROTOCOL.to_owned(), "*".to_owned());
            }
            let change = steps(&desired(&config(), &lb).unwrap(), &groups, &listeners, 0);
            let checks = change.iter().filter_map(|step| match step {
                Step::ModifyHealth { .. } => Some(true),
                Step::SetAttributes { .. } => Some(false),
                _ => None,
            });
            if !expected.is_empty() {
                assert_eq!(checks.collect::<Vec<_>>(), expected);
            }
            for step in change {
                apply(&[step], &mut groups, &mut listeners, &Tags::new());
                let group = groups.values().next().unwrap();
                let sends = group.attributes.get(attributes::PROXY).is_some_and(|value| value == "true");
                assert!(!sends || group.health.path.is_none(), "{group:?}");
            }
        }
    }

    #[test]
    fn health_check_changes_in_place() {
        let (mut groups, mut listeners) = (BTreeMap::new(), Vec::new());
        let mut lb = planned(&[(Protocol::Tcp, 80, 30080)]);
        apply(
            &steps(&desired(&config(), &lb).unwrap(), &groups, &listeners, 0),
            &mut groups,
            &mut listeners,
            &Tags::new(),
        );
        lb.groups[0].health_check.port = Some(32001);
        let steps = steps(&desired(&config(), &lb).unwrap(), &groups, &listeners, 0);
        assert!(
            matches!(steps.as_slice(), [Step::ModifyHealth { health, .. }] if health.port == Some(32001))
        );
    }
}
