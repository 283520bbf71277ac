// SPDX-License-Identifier: Apache-2.0
//! The rules that forward packets to peers: external policy Local, no endpoint on this node, and the load balancer still sends here.
//!
//! Before translation, and for every packet of a flow: a packet leaves unchanged to a node that has an endpoint, and none leaves a
//! conntrack entry here. A packet is forwarded once at most, even if nodes disagree about endpoints: it leaves with fewer hops to go
//! than any packet may have that a node forwards.

use steerage_nft::{Chain, ChainType, Ct, Expression, Field, Hook, Rule};

use super::chains::RuleBuilder;
use super::drops::DropReason;
use super::layout::SetId;
use super::ruleset_chain::{RulesetChain, with_digest};
use crate::plan::PEER_SLOTS;

/// The counter of packets that were forwarded to peers.
pub const TO_PEERS: &str = "forwarded";
/// The base chain.
const RECEIVED: &str = "received";
/// After conntrack, so that connections of this node are known, and before translation.
const BEFORE_NAT: i32 = -150;
/// The TTL or hop limit of a forwarded packet, before the kernel takes one off. Enough for the way to a pod of the next node. Packets of
/// clients have more: systems start with 64 or more, and few ways are longer than 40 hops.
const HOPS_LEFT: u8 = 8;

impl RuleBuilder<'_> {
    /// The chains, of which the last one is a base chain.
    pub(super) fn chains_to_peers(&self) -> Vec<RulesetChain> {
        let received = Chain::base(RECEIVED, ChainType::Filter, Hook::Prerouting, BEFORE_NAT);
        let without_local = Rule::new().in_set(&SetId::WithoutLocal.name(), &self.frontend());
        vec![
            with_digest("to-peer", Chain::regular("to-peer"), self.to_peer()),
            with_digest(RECEIVED, received, vec![without_local.goto("to-peer")]),
        ]
    }

    fn to_peer(&self) -> Vec<Rule> {
        // Connections to endpoints that this node had. A packet without any entry does not match.
        let mut rules = vec![Rule::new().has_any(Expression::Ct(Ct::Status), Ct::DNAT).return_()];
        rules.extend(self.sent_by_pods().into_iter().map(Rule::return_));
        rules.push(Self::sent_by_host().return_());
        let peer = self.frontend_and(self.flow_hash(PEER_SLOTS, 0, 0));
        let again = Rule::new().at_most(&Expression::hop_limit(self.family), Field::Proto(HOPS_LEFT));
        let forwarded = Rule::new().set_hop_limit(self.family, HOPS_LEFT);
        let forwarded = forwarded.map(&SetId::Peers.name(), &peer).duplicate();
        rules.extend([
            self.count(again, DropReason::AlreadyForwarded.name()).drop(),
            self.count(forwarded, TO_PEERS).drop(),
        ]);
        rules
    }
}
