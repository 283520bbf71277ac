// SPDX-License-Identifier: Apache-2.0
//! The conformance suite on the stand-in, with times so short that its loops outlast them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use clap::ValueEnum as _;
use steerage_provider_api::{LoadBalancer, Owner, Target};
use steerage_provider_cloud::marks;
use steerage_provider_conformance::{Call, CannedResponse, Harness, Proxy, Snapshot};
use tokio::time::Instant;

use super::cloud::Instance;
use super::faults::Faults;
use super::snapshot::snapshot;
use super::{Delays, StandIn};
use crate::Aws;
use crate::client::{BalancerCalls as _, GroupCalls as _, NewBalancer, Tags};
use crate::config::Peer;
use crate::desired::desired;
use crate::desired::tests::config;
use crate::ip_address_type::IpAddressType;
use crate::source_nat::SourceNat;

const FOREIGN: &str = "somebody";
const BAD: &str = "node-0-stopped";

struct OnStandIn {
    cloud: Arc<StandIn>,
    proxy: Arc<Proxy>,
    /// Whose load balancers are adopted. The suite has none.
    adopt: BTreeSet<Peer>,
}

pub(super) fn node(id: &str) -> String {
    if id == "i-stopped" { BAD.to_owned() } else { id.replacen("i-", "node-", 1) }
}

pub(super) fn target(index: usize) -> Target {
    made_target(format!("node-{index}"), &format!("i-{index}"))
}

fn made_target(node: String, id: &str) -> Target {
    let provider_id = Some(format!("aws:///us-east-1a/{id}"));
    Target { node, addresses: Vec::new(), provider_id, zone: None, pod_cidrs: Vec::new(), weight: 1 }
}

/// The address of a pod on the instance of this number.
pub(super) fn pod_address(index: usize) -> IpAddr {
    Ipv4Addr::new(10, 2, 0, u8::try_from(index).unwrap()).into()
}

/// Starts instances with a pod on each. Their health checks pass.
pub(super) fn start_instances(cloud: &StandIn, count: usize) {
    cloud.change(|cloud| {
        let instance = Instance { running: true, passes: (true, Instant::now()) };
        let names = (0..count).flat_map(|i| [format!("i-{i}"), pod_address(i).to_string()]);
        cloud.instances = names.map(|name| (name, instance.clone())).collect();
    });
}

impl OnStandIn {
    fn new(adopt: &[Peer]) -> Self {
        let short = Duration::from_millis;
        let delays = Delays {
            call: Duration::ZERO,
            lag: Duration::ZERO,
            provisioning: short(30),
            registration: Duration::ZERO,
            release: short(50),
            check: Duration::ZERO,
        };
        let (cloud, proxy) = (Arc::new(StandIn::new(delays, 1)), Arc::new(Proxy::in_process()));
        cloud.set_unlimited();
        cloud.set_faults(Faults::Suite(Arc::clone(&proxy)));
        start_instances(&cloud, 6);
        Self { cloud, proxy, adopt: adopt.iter().copied().collect() }
    }
}

#[async_trait]
impl Harness for OnStandIn {
    type Provider = Aws;

    async fn fresh(&self) -> anyhow::Result<Aws> {
        let config = crate::Config {
            settle: Duration::ZERO,
            activation_poll: Duration::from_millis(10),
            target_group_release: self.cloud.delays.release,
            adopt: self.adopt.clone(),
            ..config()
        };
        Ok(Aws::over(config, Arc::clone(&self.cloud) as _))
    }

    fn proxy(&self) -> &Proxy {
        &self.proxy
    }

    async fn snapshot(&self) -> anyhow::Result<Snapshot> {
        Ok(snapshot(&self.cloud.cloud()))
    }

    async fn targets(&self, owner: &Owner) -> anyhow::Result<BTreeMap<String, BTreeSet<String>>> {
        let cloud = self.cloud.cloud();
        let of = cloud.groups.values().filter(|group| group.tags.get(marks::UID) == Some(&owner.uid));
        Ok(of.map(|group| (group.name.clone(), group.registered().map(|id| node(id)).collect())).collect())
    }

    fn target(&self, index: usize) -> Target {
        target(index)
    }

    fn bad_target(&self) -> Target {
        made_target(BAD.to_owned(), "i-stopped")
    }

    fn throttle(&self) -> CannedResponse {
        CannedResponse { status: 400, content_type: "text/xml", body: Bytes::new() }
    }

    /// With the settings that the provider requests, so that creating them again finds them.
    async fn plant_foreign(&self, lb: &LoadBalancer) -> anyhow::Result<()> {
        let (config, wanted) = (config(), desired(&config(), lb)?);
        let tags = Tags::from([(FOREIGN.to_owned(), "else".to_owned())]);
        let direct = StandIn::new(Delays { call: Duration::ZERO, ..self.cloud.delays.clone() }, 1);
        direct.change(|cloud| *cloud = self.cloud.cloud());
        for name in [wanted.name.clone(), format!("{}-kin", &wanted.name[..20].trim_end_matches('-'))] {
            let (subnets, security_groups) = (wanted.placement.mappings()?, BTreeSet::new());
            let made = NewBalancer {
                name,
                ip_address_type: IpAddressType::Ipv4,
                source_nat: SourceNat::Off,
                scheme: wanted.scheme,
                subnets,
                security_groups,
            };
            direct.create_balancer(&made, &tags).await.map_err(said)?;
        }
        for group in &wanted.groups {
            direct.create_group(group, &config.vpc, &tags).await.map_err(said)?;
        }
        self.cloud.change(|cloud| *cloud = direct.cloud());
        Ok(())
    }

    async fn remove_foreign(&self) -> anyhow::Result<()> {
        self.cloud.change(|cloud| {
            let is_foreign = |tags: &Tags| tags.contains_key(FOREIGN) && !tags.contains_key(marks::UID);
            cloud.balancers.retain(|_, found| !is_foreign(&found.tags));
            cloud.groups.retain(|_, found| !is_foreign(&found.tags));
        });
        Ok(())
    }

    async fn mark(&self, owner: &Owner) -> anyhow::Result<()> {
        self.cloud.change(|cloud| {
            let balancers = cloud.balancers.values_mut().map(|found| &mut found.tags);
            let stay = cloud.listeners.values_mut().filter(|found| found.port == 80);
            for tags in balancers.chain(stay.map(|found| &mut found.tags)) {
                if tags.get(marks::UID) == Some(&owner.uid) {
                    tags.insert(FOREIGN.to_owned(), "else".to_owned());
                }
            }
        });
        Ok(())
    }

    async fn marked(&self, owner: &Owner) -> anyhow::Result<bool> {
        let cloud = self.cloud.cloud();
        let balancers = cloud.balancers.values().map(|found| &found.tags);
        let listeners = cloud.listeners.values().filter(|found| found.port == 80).map(|found| &found.tags);
        let mut own = balancers.chain(listeners).filter(|tags| tags.get(marks::UID) == Some(&owner.uid));
        Ok(own.all(|tags| tags.contains_key(FOREIGN)))
    }

    fn nodes_in(&self, call: &Call) -> Option<BTreeSet<String>> {
        let moves = matches!(call.name.as_str(), "RegisterTargets" | "DeregisterTargets");
        let body = String::from_utf8_lossy(&call.body).into_owned();
        moves.then(|| body.split(',').map(node).collect())
    }

    /// One more than others need: security groups belong to another API.
    fn steady_reads(&self) -> usize {
        3
    }
}

fn said(failure: crate::client::CallError) -> anyhow::Error {
    steerage_provider_api::Error::from(failure).into()
}

#[tokio::test(start_paused = true)]
async fn provider_conforms_on_the_stand_in() {
    for adopt in [&[], Peer::value_variants()] {
        steerage_provider_conformance::run(&OnStandIn::new(adopt)).await.unwrap();
    }
}
