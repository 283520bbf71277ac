// SPDX-License-Identifier: Apache-2.0
//! What the program in the kernel should decide, over plain values and without its caches, written
//! a second time. Tests compare both.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use crate::ethernet::{ARP, IPV4, IPV6, LENGTH, ethernet};
use crate::maps::{AFFINITY, Event, FlowKey, ListenerKey};
use crate::neighbour::{ADVERTISEMENT_FRAME, advertisement, arp_reply, arp_request, solicitation};
use crate::{
    Address, Datagram, Fragment, Icmp, IcmpKind, TcpFlags, Transport, V4, V6, checksum, hash, icmp, protocol,
    quoted_flow, transport,
};

/// What becomes of a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The kernel continues with it.
    Pass,
    /// The same: the VIP's lease has ended.
    LeaseEnded,
    /// Nothing.
    Drop(Event),
    /// It goes to this target.
    Forward(u32),
    /// This host is the target.
    Local(u32),
    /// This frame goes back.
    Answer(Event, Vec<u8>),
}

/// A Service's listener.
#[derive(Clone, Debug, Default)]
pub struct Service {
    /// The slots: numbers of targets, zero for none.
    pub slots: Vec<u32>,
    /// Whether only the client's address selects the slot.
    pub affinity: bool,
    /// The source ranges, if there are any.
    pub ranges: Option<Vec<(IpAddr, u8)>>,
}

/// A world without timeouts. The frames are for this host, if they are not broadcast.
#[derive(Clone, Debug, Default)]
pub struct Model {
    /// The link's own address.
    pub mac: [u8; 6],
    /// The VIPs, and whether this host answers for each.
    pub vips: BTreeMap<IpAddr, bool>,
    /// The listeners.
    pub services: BTreeMap<ListenerKey, Service>,
    /// The targets, and whether each is this host.
    pub targets: BTreeMap<u32, bool>,
    /// The addresses that frames of nodes and edge hosts may come from.
    pub senders: BTreeMap<[u8; 6], Vec<(IpAddr, u8)>>,
    /// Edge hosts that forward to this one, which is a node.
    pub forwarders: BTreeSet<[u8; 6]>,
    /// The time in which the program forwards has ended.
    pub is_over: bool,
    flows: HashMap<FlowKey<V6>, u32>,
    fragments: HashMap<(V6, V6, u32, u8), u32>,
}

impl Model {
    /// Decides about a frame, and remembers its flow.
    pub fn decide(&mut self, frame: &[u8]) -> Verdict {
        if self.is_over {
            return Verdict::Pass;
        }
        let Some(link) = ethernet(frame) else { return Verdict::Pass };
        match link.kind {
            ARP => {
                let Some(request) = arp_request(frame, LENGTH) else { return Verdict::Pass };
                // The padding of short frames stays.
                let reply = || {
                    let mut reply = frame.to_vec();
                    if let Some(head) = reply.first_chunk_mut() {
                        arp_reply(head, &request, self.mac);
                    }
                    reply
                };
                self.answer_neighbour(request.target.mapped(), Event::Arp, reply)
            }
            IPV4 => self.decide_ip::<V4>(frame, LENGTH, link.source),
            IPV6 => {
                let asked = solicitation(frame, LENGTH, link.source);
                if let Some(asked) = asked.filter(|asked| self.is_vip(asked.target)) {
                    let reply = || {
                        let mut reply = [0; ADVERTISEMENT_FRAME];
                        advertisement(&mut reply, &asked, self.mac);
                        reply.to_vec()
                    };
                    return self.answer_neighbour(asked.target, Event::Neighbour, reply);
                }
                self.decide_ip::<V6>(frame, LENGTH, link.source)
            }
            _ => Verdict::Pass,
        }
    }

    fn is_vip(&self, address: V6) -> bool {
        self.vips.contains_key(&address.into())
    }

    fn answer_neighbour(&self, vip: V6, event: Event, reply: impl FnOnce() -> Vec<u8>) -> Verdict {
        match self.vips.get(&vip.into()) {
            None => Verdict::Pass,
            Some(false) => Verdict::LeaseEnded,
            Some(true) => Verdict::Answer(event, reply()),
        }
    }

    fn decide_ip<A: Address>(&mut self, frame: &[u8], at: usize, mac: [u8; 6]) -> Verdict {
        let vip = A::destination(frame, at).map(Address::mapped);
        if !vip.is_some_and(|vip| self.is_vip(vip)) {
            return Verdict::Pass;
        }
        let verdict = match A::datagram(frame, at) {
            Some(datagram) => self.decide_datagram(frame, at, &datagram, mac),
            None => Err(Event::Malformed),
        };
        verdict.unwrap_or_else(Verdict::Drop)
    }

    fn decide_datagram<A: Address>(
        &mut self,
        frame: &[u8],
        at: usize,
        datagram: &Datagram<A>,
        mac: [u8; 6],
    ) -> Result<Verdict, Event> {
        let (source, vip) = (datagram.source.mapped(), datagram.destination.mapped());
        let protocol = if A::ICMP == protocol::ICMP { datagram.protocol } else { 0 };
        if let Fragment::Later(id) = datagram.fragment {
            return match self.fragments.get(&(source, vip, id, protocol)) {
                Some(target) => self.forward(*target, datagram.hop_limit),
                None if self.forwarders.contains(&mac) => Ok(Verdict::Pass),
                None => Err(Event::UnknownFragment),
            };
        }
        let (ports, flags) = match transport(frame, datagram).ok_or(Event::Malformed)? {
            Transport::Tcp(ports, flags) => (ports, Some(flags)),
            Transport::Udp(ports) => (ports, None),
            Transport::Icmp if datagram.fragment == Fragment::Whole => {
                let message = icmp(frame, datagram).ok_or(Event::Malformed)?;
                return self.decide_icmp(frame, at, datagram, message, mac);
            }
            Transport::Icmp => return Err(Event::UnknownIcmp),
            Transport::Other => return Err(Event::NoListener),
        };
        if self.forwarders.contains(&mac) {
            return Ok(Verdict::Pass);
        }
        let key = FlowKey { client: source, vip, ports, protocol: u32::from(datagram.protocol) };
        let target = self.target(key, datagram.client_hash(ports), source, mac, flags, true)?;
        if let Fragment::First(id) = datagram.fragment {
            self.fragments.insert((source, vip, id, protocol), target);
        }
        self.forward(target, datagram.hop_limit)
    }

    fn decide_icmp<A: Address>(
        &mut self,
        frame: &[u8],
        at: usize,
        datagram: &Datagram<A>,
        message: Icmp,
        mac: [u8; 6],
    ) -> Result<Verdict, Event> {
        match message.kind {
            IcmpKind::Neighbour => Ok(Verdict::Pass),
            IcmpKind::Echo if datagram.payload == at + A::HEADER => {
                Ok(Verdict::Answer(Event::Echo, echo_reply(frame, at, A::HEADER)))
            }
            IcmpKind::Error => {
                let flow = quoted_flow(frame, message, datagram.destination).ok_or(Event::UnknownIcmp)?;
                if self.forwarders.contains(&mac) {
                    return Ok(Verdict::Pass);
                }
                let hashes = [flow.hash(0), flow.hash(AFFINITY)];
                let FlowKey { client, vip, ports, protocol } = flow;
                let key = FlowKey { client: client.mapped(), vip: vip.mapped(), ports, protocol };
                if !self.services.contains_key(&key.listener()) {
                    return Err(Event::UnknownIcmp);
                }
                let target =
                    self.target(key, hashes, datagram.source.mapped(), mac, Some(TcpFlags(0)), false)?;
                self.forward(target, datagram.hop_limit)
            }
            _ => Err(Event::UnknownIcmp),
        }
    }

    /// The target of a flow. `hashes` without and with affinity; `sender` is who sent the packet.
    fn target(
        &mut self,
        key: FlowKey<V6>,
        hashes: [u32; 2],
        sender: V6,
        mac: [u8; 6],
        flags: Option<TcpFlags>,
        remember: bool,
    ) -> Result<u32, Event> {
        let service = self.services.get(&key.listener()).ok_or(Event::NoListener)?;
        if let Some(nets) = self.senders.get(&mac)
            && !is_in(nets, sender)
        {
            return Err(Event::ForeignSource);
        }
        if service.ranges.as_ref().is_some_and(|nets| !is_in(nets, key.client)) {
            return Err(Event::OutsideSourceRanges);
        }
        let usable: BTreeSet<u32> = service.slots.iter().copied().collect();
        let kept = self.flows.get(&key).copied().filter(|target| {
            let opens = flags.is_some_and(TcpFlags::opens);
            let is_datagram = key.protocol == u32::from(protocol::UDP);
            !opens && self.targets.contains_key(target) && (!is_datagram || usable.contains(target))
        });
        let by_slot = || {
            let size = u32::try_from(service.slots.len()).ok()?;
            let slot = hash::slot(hashes[usize::from(service.affinity)], size);
            service.slots.get(usize::try_from(slot).ok()?).copied()
        };
        let target = kept.or_else(by_slot).filter(|target| self.targets.contains_key(target));
        let target = target.ok_or(Event::NoTarget)?;
        let is_lone_reset = kept.is_none() && flags.is_some_and(TcpFlags::resets);
        if remember && !is_lone_reset {
            self.flows.insert(key, target);
        }
        Ok(target)
    }

    fn forward(&self, target: u32, hop_limit: u8) -> Result<Verdict, Event> {
        match self.targets.get(&target) {
            None => Err(Event::NoTarget),
            Some(true) => Ok(Verdict::Local(target)),
            Some(false) if hop_limit <= 1 => Err(Event::HopLimit),
            Some(false) => Ok(Verdict::Forward(target)),
        }
    }

    /// Forgets a target, as the program does when its number is deleted.
    pub fn remove_target(&mut self, target: u32) {
        self.targets.remove(&target);
    }
}

impl<A: Address> Datagram<A> {
    /// The hash of the source without and with affinity.
    fn client_hash(&self, ports: u32) -> [u32; 2] {
        [self.source.flow_hash(transport::source_port(ports)), self.source.flow_hash(0)]
    }
}

fn is_in(nets: &[(IpAddr, u8)], address: V6) -> bool {
    let bits = |address: IpAddr| match address {
        IpAddr::V4(address) => (u128::from(u32::from(address)) << 96, 32),
        IpAddr::V6(address) => (u128::from(address), 128),
    };
    let (value, size) = bits(address.into());
    nets.iter().any(|(net, length)| {
        let (net, net_size) = bits(*net);
        let mask = if *length == 0 { 0 } else { u128::MAX << (128 - u32::from(*length)) };
        size == net_size && net & mask == value & mask
    })
}

/// The request with addresses exchanged, as a reply, with a new hop limit.
fn echo_reply(frame: &[u8], at: usize, header: usize) -> Vec<u8> {
    let mut reply = frame.to_vec();
    reply[..12].rotate_left(6);
    let is_v4 = header == 20;
    if is_v4 {
        reply[at + 12..at + 20].rotate_left(4);
        let word = |frame: &[u8], at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
        let old = word(&reply, at + 8);
        reply[at + 8] = ECHO_HOP_LIMIT;
        let sum = checksum::changed(word(&reply, at + 10), old, word(&reply, at + 8));
        reply[at + 10..at + 12].copy_from_slice(&sum.to_be_bytes());
    } else {
        reply[at + 8..at + 40].rotate_left(16);
        reply[at + 7] = ECHO_HOP_LIMIT;
    }
    let message = at + header;
    let old = u16::from_be_bytes([reply[message], reply[message + 1]]);
    reply[message] = if is_v4 { 0 } else { 129 };
    let new = u16::from_be_bytes([reply[message], reply[message + 1]]);
    let sum = u16::from_be_bytes([reply[message + 2], reply[message + 3]]);
    reply[message + 2..message + 4].copy_from_slice(&checksum::changed(sum, old, new).to_be_bytes());
    reply
}

/// The hop limit of echo replies.
pub const ECHO_HOP_LIMIT: u8 = 64;
