// SPDX-License-Identifier: Apache-2.0
//! Connections in conntrack that may have to end, because the rules no longer lead where they lead. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use steerage_model::Protocol;

use super::{Changes, SetId};
use crate::plan::Frontend;

/// Frontends whose connections may be stale.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StaleFlows {
    /// UDP, each with the endpoints whose flows may stay, in order.
    pub udp: BTreeMap<Frontend, Arc<[SocketAddr]>>,
    /// TCP and SCTP: a handshake that went on untranslated, while the rules or the frontend were missing, has to begin anew.
    pub handshakes: BTreeSet<Frontend>,
    /// The networks of which clients may stay connected: of others, also established connections end. After damage that may have admitted
    /// them; searched for once, because the ranges may change.
    pub sources: BTreeMap<Frontend, Arc<[IpNet]>>,
}

impl StaleFlows {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.udp.is_empty() && self.handshakes.is_empty() && self.sources.is_empty()
    }

    /// Adds others, which are newer.
    pub fn extend(&mut self, other: Self) {
        self.udp.extend(other.udp);
        self.handshakes.extend(other.handshakes);
        self.sources.extend(other.sources);
    }

    /// Takes over what is newer about the same frontends.
    pub fn replace(&mut self, newer: &Self) {
        for (frontend, serving) in &mut self.udp {
            if let Some(newer) = newer.udp.get(frontend) {
                *serving = Arc::clone(newer);
            }
        }
    }
}

/// The UDP frontends of which these changes delete elements: some may be in no plan, because their Service was deleted while no agent
/// ran.
pub fn deleted_udp_frontends(changes: &Changes) -> BTreeSet<Frontend> {
    let mut frontends = BTreeSet::new();
    for (id, rows) in &changes.delete {
        let beyond = match id {
            SetId::ExternalFrontends | SetId::Rejected | SetId::DroppedClusterFrontends | SetId::Lists(_) => {
                0
            }
            SetId::Slots(_) => size_of::<u32>(),
            _ => continue,
        };
        let key = |key: &[u8]| frontend(key.get(..key.len().checked_sub(beyond)?)?);
        frontends.extend(rows.iter().filter_map(|row| key(row.key)));
    }
    frontends.retain(|frontend| frontend.protocol == Protocol::Udp);
    frontends
}

/// Address, protocol and port, of which the last two take a word each.
fn frontend(key: &[u8]) -> Option<Frontend> {
    let (addr, rest) = key.split_at_checked(key.len().checked_sub(8)?)?;
    let v4 = <[u8; 4]>::try_from(addr).map(IpAddr::from);
    let addr = v4.or_else(|_| <[u8; 16]>::try_from(addr).map(IpAddr::from)).ok()?;
    let &[protocol, _, _, _, high, low, _, _] = rest else { return None };
    let known = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp];
    let protocol = known.into_iter().find(|known| known.number() == protocol)?;
    Some(Frontend { addr, protocol, port: u16::from_be_bytes([high, low]) })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use steerage_model::{Family, Key};

    use super::*;
    use crate::plan::{Action, Endpoints, Masquerade, Role, Selection, ServicePlan};
    use crate::rules::{Elements, KernelState, Ruleset, difference};

    fn plan(frontends: &[Frontend], endpoints: u8) -> ServicePlan {
        let v6 = frontends.iter().any(|frontend| frontend.addr.is_ipv6());
        let endpoint = |n: u8| -> SocketAddr {
            let v6 = v6.then(|| IpAddr::from([0xfd44, 0, 0, 0, 0, 0, 0, u16::from(n)]));
            SocketAddr::new(v6.unwrap_or(IpAddr::from([10, 244, 0, n])), 53)
        };
        let list: Arc<[SocketAddr]> = (0..endpoints).map(endpoint).collect();
        let action = Action {
            role: Role::ClusterIp,
            created: 0,
            port: 53,
            targets: Endpoints { selection: Selection::Cluster, list: Arc::clone(&list) },
            local: None,
            reject: endpoints == 0,
            peers: None,
            masquerade: Masquerade::AllButLocalPods,
            sources: None,
            affinity: None,
            serving: list,
        };
        let frontends = frontends.iter().map(|frontend| (*frontend, action.clone())).collect();
        ServicePlan { frontends, ..ServicePlan::default() }
    }

    /// A client may try an address before it is served: conntrack would keep its connection untranslated, and its port with it.
    #[test]
    fn handshakes_with_a_new_frontend_begin_anew() {
        let [tcp, udp] = [Protocol::Tcp, Protocol::Udp].map(|protocol| Frontend {
            addr: "198.51.100.1".parse().unwrap(),
            protocol,
            port: 53,
        });
        let mut ruleset = Ruleset::default();
        let mut seen = |frontends: &[Frontend], endpoints| {
            let plans = BTreeMap::from([(Key::new("n", "s"), plan(frontends, endpoints))]);
            let _ = ruleset.update(plans, KernelState::InSync);
            let StaleFlows { udp, handshakes, .. } = ruleset.take_stale_flows();
            (handshakes.into_iter().collect::<Vec<_>>(), udp.len())
        };
        assert_eq!(seen(&[tcp, udp], 2), (vec![tcp], 1));
        assert_eq!(seen(&[tcp, udp], 3), (vec![], 1), "its clients are translated");
        assert_eq!(seen(&[], 3), (vec![], 1));
        assert_eq!(seen(&[tcp], 0), (vec![], 0), "what is rejected begins anew in any case");
        assert_eq!(seen(&[], 0), (vec![], 0));
        assert_eq!(seen(&[tcp], 1), (vec![tcp], 0));
    }

    /// Beside kube-proxy, each start of the agent would end the flows of all Services of kube-proxy.
    #[test]
    fn flows_of_another_service_proxy_stay_at_a_start() {
        let udp = |port| Frontend { addr: "198.51.100.1".parse().unwrap(), protocol: Protocol::Udp, port };
        let reserved = ServicePlan { reserved: vec![udp(1)], ..ServicePlan::default() };
        let served = plan(&[udp(2)], 1);
        let plans = [(Key::new("n", "reserved"), reserved), (Key::new("n", "served"), served)];
        let mut ruleset = Ruleset::default();
        ruleset.stage(plans.into());
        assert_eq!(ruleset.take_stale_flows().udp.into_keys().collect::<Vec<_>>(), [udp(2)]);
        // A predecessor has served it: its elements are deleted.
        ruleset.note_deleted([udp(1)].into());
        assert_eq!(ruleset.take_stale_flows().udp, BTreeMap::from([(udp(1), Arc::default())]));
    }

    #[test]
    fn frontends_are_found_in_every_kind_of_list() {
        let at = |addr: &str, protocol| Frontend { addr: addr.parse().unwrap(), protocol, port: 53 };
        for (family, addr) in [(Family::V4, "10.96.0.10"), (Family::V6, "fd96::10")] {
            let udp = at(addr, Protocol::Udp);
            for endpoints in [0, 1, 3, 200] {
                let mut ruleset = Ruleset::default();
                let plan = plan(&[udp, at(addr, Protocol::Tcp)], endpoints);
                ruleset.stage(BTreeMap::from([(Key::new("n", "s"), plan)]));
                let changes = difference(&ruleset.all_elements(family), &Elements::new(family));
                assert_eq!(deleted_udp_frontends(&changes), [udp].into(), "{endpoints} endpoints");
            }
        }
    }
}
