// SPDX-License-Identifier: Apache-2.0
//! The state of the stand-in, and what follows from it and the clock.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv6Addr;
use std::time::Duration;

use ipnet::Ipv6Net;
use steerage_provider_api::HealthState;
use tokio::time::Instant;

use crate::client::{NewBalancer, Tags};
use crate::health_check::HealthCheckSettings;
use crate::ip_address_type::IpAddressType;
use crate::placement::Placed;
use crate::security_group::SecurityGroup;
use crate::source_nat::SourceNat;
use crate::subnets::Subnet;
use crate::tls::Tls;

/// How long things take.
#[derive(Clone, Debug)]
pub(crate) struct Delays {
    pub(crate) call: Duration,
    /// The oldest state that a read may see.
    pub(crate) lag: Duration,
    pub(crate) provisioning: Duration,
    /// From the registration, or from the first listener, to the first health check.
    pub(crate) registration: Duration,
    /// How long a target group or security group is in use after its load balancer was deleted.
    pub(crate) release: Duration,
    /// Until a change of an instance's health is noticed.
    pub(crate) check: Duration,
}

impl Delays {
    /// As users of AWS report them.
    pub(crate) fn real() -> Self {
        let seconds = Duration::from_secs;
        Self {
            call: Duration::from_millis(80),
            lag: seconds(4),
            provisioning: seconds(150),
            registration: seconds(120),
            release: seconds(12),
            check: seconds(10),
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Quotas {
    pub(crate) listeners: usize,
    pub(crate) targets: usize,
    pub(crate) groups: usize,
    pub(crate) security_groups: usize,
    /// Inbound rules of a security group.
    pub(crate) rules: usize,
}

impl Default for Quotas {
    fn default() -> Self {
        Self { listeners: 50, targets: 500, groups: 3000, security_groups: 2500, rules: 60 }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct NetworkLb {
    pub(crate) made: NewBalancer,
    pub(crate) tags: Tags,
    pub(crate) created: Instant,
    pub(crate) attributes: BTreeMap<String, String>,
    /// IDs.
    pub(crate) security_groups: BTreeSet<String>,
    pub(crate) placed: Placed,
    pub(crate) vpc: String,
    pub(crate) is_network: bool,
    pub(crate) ip_address_type: IpAddressType,
    /// With a prefix for each subnet, given or AWS's choice.
    pub(crate) source_nat: SourceNat,
}

impl NetworkLb {
    /// A new load balancer, with AWS's attributes, and without prefixes of AWS's choice.
    pub(crate) fn new(made: NewBalancer, tags: Tags, created: Instant) -> Self {
        let attributes = [
            ("access_logs.s3.bucket", ""),
            ("access_logs.s3.enabled", "false"),
            ("access_logs.s3.prefix", ""),
            ("deletion_protection.enabled", "false"),
            ("dns_record.client_routing_policy", "any_availability_zone"),
            ("load_balancing.cross_zone.enabled", "false"),
            ("zonal_shift.config.enabled", "false"),
        ];
        let attributes = attributes.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let (security_groups, placed) =
            (made.security_groups.clone(), made.subnets.iter().cloned().collect());
        // As the subnets, which the stand-in does not place.
        let (vpc, is_network, ip_address_type) = ("vpc-1".to_owned(), true, made.ip_address_type);
        let source_nat = made.source_nat.clone();
        Self {
            made,
            tags,
            created,
            attributes,
            security_groups,
            placed,
            vpc,
            is_network,
            ip_address_type,
            source_nat,
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Forward {
    pub(crate) balancer: String,
    pub(crate) port: u16,
    pub(crate) protocol: String,
    pub(crate) group: String,
    pub(crate) tags: Tags,
    pub(crate) tls: Option<Tls>,
}

#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(crate) name: String,
    pub(crate) protocol: String,
    pub(crate) port: u16,
    /// Whether targets are addresses.
    pub(crate) has_pods: bool,
    /// Whether they are reached over IPv6.
    pub(crate) is_ipv6: bool,
    pub(crate) vpc: String,
    pub(crate) health: HealthCheckSettings,
    pub(crate) attributes: BTreeMap<String, String>,
    pub(crate) tags: Tags,
    /// By instance, or address of a pod, and port.
    pub(crate) targets: BTreeMap<(String, u16), Registration>,
    /// Since when a listener forwards to it.
    pub(crate) used: Option<Instant>,
    pub(crate) held_until: Option<Instant>,
    /// The load balancer and port that last forwarded to it.
    pub(crate) served: Option<(String, u16)>,
}

#[derive(Clone, Debug)]
pub(crate) struct Registration {
    pub(crate) since: Instant,
    pub(crate) draining: Option<Instant>,
}

#[derive(Clone, Debug)]
pub(crate) struct Instance {
    pub(crate) running: bool,
    /// Whether health checks pass, and since when. Before, it was the opposite.
    pub(crate) passes: (bool, Instant),
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Cloud {
    /// Whether AWS refuses to change the IP address type of a load balancer, as where a subnet lacks IPv6.
    pub(crate) keeps_ip_address_types: bool,
    /// Ports of target groups whose targets AWS does not change, with the code of its answer.
    pub(crate) failing_groups: BTreeMap<u16, &'static str>,
    /// Ports of target groups for whose targets a call gets no answer for 30 seconds, and changes nothing.
    pub(crate) hanging_groups: BTreeSet<u16>,
    /// All by ARN.
    pub(crate) balancers: BTreeMap<String, NetworkLb>,
    pub(crate) listeners: BTreeMap<String, Forward>,
    pub(crate) groups: BTreeMap<String, Group>,
    /// What can be a target: instances by ID, and pods by address.
    pub(crate) instances: BTreeMap<String, Instance>,
    pub(crate) subnets: Vec<Subnet>,
    /// By ID.
    pub(crate) security_groups: BTreeMap<String, SecurityGroup>,
    /// IDs of security groups that a rule of another security group names.
    pub(crate) security_group_references: BTreeSet<String>,
    /// When calls by the ID of a new security group find it.
    pub(crate) security_group_known_from: BTreeMap<String, Instant>,
    /// How long a deleted load balancer still uses its security groups.
    pub(crate) security_group_held_until: BTreeMap<String, Instant>,
    made: u64,
}

impl Group {
    /// The time for which a deregistered target drains.
    fn drain(&self) -> Duration {
        let text = self.attributes.get("deregistration_delay.timeout_seconds");
        Duration::from_secs(text.and_then(|seconds| seconds.parse().ok()).unwrap_or(300))
    }

    /// The targets that are registered or still drain.
    pub(crate) fn listed(&self, now: Instant) -> impl Iterator<Item = (&(String, u16), &Registration)> {
        let is_there = move |r: &Registration| r.draining.is_none_or(|since| now < since + self.drain());
        self.targets.iter().filter(move |(_, registration)| is_there(registration))
    }

    /// The instances that are registered, on whichever port.
    pub(crate) fn registered(&self) -> impl Iterator<Item = &String> {
        self.targets.iter().filter(|(_, r)| r.draining.is_none()).map(|((id, _), _)| id)
    }
}

impl Cloud {
    /// The tags of a resource of any kind.
    pub(crate) fn tags_mut(&mut self, arn: &str) -> Option<&mut Tags> {
        let Self { balancers, groups, listeners, .. } = self;
        let balancer = balancers.get_mut(arn).map(|found| &mut found.tags);
        let group = groups.get_mut(arn).map(|found| &mut found.tags);
        balancer.or(group).or_else(|| listeners.get_mut(arn).map(|found| &mut found.tags))
    }

    /// A new ARN of this kind.
    pub(crate) fn arn(&mut self, kind: &str, name: &str) -> String {
        self.made += 1;
        format!("arn:aws:elasticloadbalancing:us-east-1:1:{kind}/{name}/{:016x}", self.made)
    }

    /// What AWS makes of the source NAT that a call requests: where no prefix is given it chooses one, never the same again.
    pub(crate) fn assigned(&mut self, requested: &SourceNat, subnets: &Placed) -> SourceNat {
        let SourceNat::On(given) = requested else { return SourceNat::Off };
        let assign = |id: &String| {
            let prefix = given.get(id).copied().unwrap_or_else(|| {
                self.made += 1;
                let address = Ipv6Addr::from(0x2001_0db8_00aa_0000_0000 << 48 | u128::from(self.made) << 48);
                Ipv6Net::new_assert(address, 80)
            });
            (id.clone(), prefix)
        };
        SourceNat::On(subnets.keys().map(assign).collect())
    }

    /// Why AWS gives a load balancer in these subnets no IPv6. Of those that no test made, nothing is known.
    pub(crate) fn lacks_ipv6<'a>(&self, ids: impl Iterator<Item = &'a String>) -> Option<&'static str> {
        let mut known = ids.filter_map(|id| self.subnets.iter().find(|subnet| subnet.id == *id));
        known.any(|subnet| !subnet.has_ipv6).then_some("a subnet has no IPv6 range")
    }

    /// Whether a listener of the load balancer has UDP.
    pub(crate) fn has_udp(&self, balancer: &str) -> bool {
        let mut used = self.listeners.values().filter(|listener| listener.balancer == balancer);
        used.any(|listener| listener.protocol.ends_with("UDP"))
    }

    /// A new ID of a security group.
    pub(crate) fn security_group_id(&mut self) -> String {
        self.made += 1;
        format!("sg-{:016x}", self.made)
    }

    /// Whether calls by the ID find the security group, which takes seconds after its creation.
    pub(crate) fn knows_security_group(&self, id: &str, now: Instant) -> bool {
        self.security_groups.contains_key(id)
            && self.security_group_known_from.get(id).is_none_or(|from| *from <= now)
    }

    /// Whether EC2 refuses to delete the security group.
    pub(crate) fn uses_security_group(&self, id: &str, now: Instant) -> bool {
        self.balancers.values().any(|found| found.security_groups.contains(id))
            || self.security_group_held_until.get(id).is_some_and(|until| now < *until)
            || self.security_group_references.contains(id)
    }

    /// The state of a target, with AWS's reason.
    pub(crate) fn health(
        &self,
        delays: &Delays,
        group: &Group,
        id: &str,
        registration: &Registration,
        now: Instant,
    ) -> (HealthState, &'static str) {
        if registration.draining.is_some() {
            return (HealthState::Draining, "Target.DeregistrationInProgress");
        }
        let Some(used) = group.used else { return (HealthState::Unused, "Target.NotInUse") };
        let Some(instance) = self.instances.get(id).filter(|instance| instance.running) else {
            return (HealthState::Unused, "Target.InvalidState");
        };
        if now < registration.since.max(used) + delays.registration {
            return (HealthState::Initial, "Elb.RegistrationInProgress");
        }
        let (passes, since) = instance.passes;
        if passes == (now >= since + delays.check) {
            (HealthState::Healthy, "")
        } else {
            (HealthState::Unhealthy, "Target.FailedHealthChecks")
        }
    }

    /// The instances that clients of a listener reach: the healthy ones, or all if none is healthy.
    pub(crate) fn serving(&self, delays: &Delays, group: &Group, now: Instant) -> (bool, Vec<String>) {
        let is_healthy =
            |id: &str, r: &Registration| self.health(delays, group, id, r, now).0 == HealthState::Healthy;
        let registered: Vec<_> = group.targets.iter().filter(|(_, r)| r.draining.is_none()).collect();
        let healthy: Vec<String> = registered
            .iter()
            .filter(|((id, _), r)| is_healthy(id, r))
            .map(|((id, _), _)| id.clone())
            .collect();
        if healthy.is_empty() {
            return (false, registered.iter().map(|((id, _), _)| id.clone()).collect());
        }
        (true, healthy)
    }

    /// Notes for each target group since when listeners use it, after these changed.
    pub(crate) fn note_use(&mut self, now: Instant) {
        for (arn, group) in &mut self.groups {
            let by = self.listeners.values().find(|forward| forward.group == *arn);
            group.used = by.map(|_| group.used.unwrap_or(now));
            group.served = by.map(|by| (by.balancer.clone(), by.port)).or(group.served.take());
        }
    }
}
