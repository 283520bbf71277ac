// SPDX-License-Identifier: Apache-2.0
//! The messages in which one host tells another its flow exceptions: their bytes, and what is accepted of them. Pure; `client` encodes
//! and `server` decodes. Whether a message is authentic is for `session`.
//!
//! A message is a byte for its kind and elements of one size. What a later version adds is a new kind, which this one skips.

use std::net::IpAddr;

use steerage_edge_dataplane::Exception;
use steerage_edge_dataplane::packet::maps::FlowKey;
use steerage_edge_dataplane::packet::{V6, protocol};

/// Elements of one message, so that none is longer than [`LONGEST`].
pub(crate) const MOST_ELEMENTS: usize = 1000;
/// Bytes of a message.
pub(crate) const LONGEST: usize = u16::MAX as usize;

/// The answer to a ping of a host that lacked something for what it was told, and has it now. Otherwise the answer has no bytes.
pub(crate) const WANTS_LIST: &[u8] = &[1];

const KEY: usize = 16 + 16 + 4 + 1;
const EXCEPTION: usize = KEY + 16 + 2 + 1;
const VIP: usize = 16;
const CLOSING: u8 = 1;

const _: () = assert!(MOST_ELEMENTS * EXCEPTION < LONGEST);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// A complete list begins, of the VIPs for which the sender answers.
    Begin,
    /// VIPs of the list.
    Vips(Vec<V6>),
    /// Flows that stay on another target than their slot's, or that the sender has used since it told them last.
    Exceptions(Vec<Exception>),
    /// Told flows that are no exceptions any more.
    Gone(Vec<FlowKey<V6>>),
    /// Exceptions of VIPs for which the sender does not answer: the receiver may not have seen a packet of them yet.
    Offers(Vec<Exception>),
    /// The list is complete.
    End,
    /// Asks whether all messages before it have been applied.
    Ping,
    /// In a list, after [`Begin`](Self::Begin): routers send the sender packets of all VIPs, so that it also tells exceptions of VIPs for
    /// which it does not answer.
    Routes,
}

/// A message that no host of this protocol sends.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed message")]
pub(crate) struct Malformed;

impl Message {
    fn kind(&self) -> u8 {
        match self {
            Self::Begin => 1,
            Self::Vips(_) => 2,
            Self::Exceptions(_) => 3,
            Self::Gone(_) => 4,
            Self::Offers(_) => 5,
            Self::End => 6,
            Self::Ping => 7,
            Self::Routes => 8,
        }
    }

    /// Elements beyond [`MOST_ELEMENTS`] are left out.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![self.kind()];
        match self {
            Self::Begin | Self::End | Self::Ping | Self::Routes => {}
            Self::Vips(vips) => vips.iter().take(MOST_ELEMENTS).for_each(|vip| put_address(&mut bytes, *vip)),
            Self::Gone(keys) => keys.iter().take(MOST_ELEMENTS).for_each(|key| put_key(&mut bytes, key)),
            Self::Exceptions(exceptions) | Self::Offers(exceptions) => {
                for Exception { key, target, idle, is_closing } in exceptions.iter().take(MOST_ELEMENTS) {
                    put_key(&mut bytes, key);
                    put_address(&mut bytes, (*target).into());
                    bytes.extend(u16::try_from(*idle).unwrap_or(u16::MAX).to_be_bytes());
                    bytes.push(if *is_closing { CLOSING } else { 0 });
                }
            }
        }
        bytes
    }

    /// `None` for a kind of a later version.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Option<Self>, Malformed> {
        let (kind, rest) = bytes.split_first().ok_or(Malformed)?;
        let message = match kind {
            1 => Self::Begin,
            2 => Self::Vips(elements(rest, VIP, |bytes| Some(address(bytes)))?),
            3 => Self::Exceptions(elements(rest, EXCEPTION, exception)?),
            4 => Self::Gone(elements(rest, KEY, key)?),
            5 => Self::Offers(elements(rest, EXCEPTION, exception)?),
            6 => Self::End,
            7 => Self::Ping,
            8 => Self::Routes,
            _ => return Ok(None),
        };
        let is_bare = matches!(message, Self::Begin | Self::End | Self::Ping | Self::Routes);
        let has_rest = is_bare && !rest.is_empty();
        if has_rest { Err(Malformed) } else { Ok(Some(message)) }
    }
}

fn put_address(bytes: &mut Vec<u8>, V6(words): V6) {
    bytes.extend(words.iter().flat_map(|word| word.to_ne_bytes()));
}

fn put_key(bytes: &mut Vec<u8>, key: &FlowKey<V6>) {
    put_address(bytes, key.client);
    put_address(bytes, key.vip);
    // As in the packet.
    bytes.extend(key.ports.to_ne_bytes());
    bytes.push(u8::try_from(key.protocol).unwrap_or(0));
}

fn elements<T>(bytes: &[u8], size: usize, element: impl Fn(&[u8]) -> Option<T>) -> Result<Vec<T>, Malformed> {
    let chunks = bytes.chunks_exact(size);
    if !chunks.remainder().is_empty() || chunks.len() > MOST_ELEMENTS {
        return Err(Malformed);
    }
    chunks.map(|chunk| element(chunk).ok_or(Malformed)).collect()
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let word = bytes.get(at..).and_then(|rest| rest.first_chunk());
    u32::from_ne_bytes(word.copied().unwrap_or_default())
}

fn address(bytes: &[u8]) -> V6 {
    V6([0, 4, 8, 12].map(|at| word(bytes, at)))
}

/// `None` if no packet has such a flow.
fn key(bytes: &[u8]) -> Option<FlowKey<V6>> {
    let (client, vip) = (address(bytes), address(bytes.get(16..)?));
    let protocol = *bytes.get(36)?;
    let is_v4 = |address: V6| IpAddr::from(address).is_ipv4();
    let is_flow = matches!(protocol, protocol::TCP | protocol::UDP) && is_v4(client) == is_v4(vip);
    is_flow.then_some(FlowKey { client, vip, ports: word(bytes, 32), protocol: protocol.into() })
}

fn exception(bytes: &[u8]) -> Option<Exception> {
    let [a, b, flags] = *bytes.get(KEY + 16..)?.first_chunk()?;
    Some(Exception {
        key: key(bytes)?,
        target: address(bytes.get(KEY..)?).into(),
        idle: u16::from_be_bytes([a, b]).into(),
        is_closing: flags & CLOSING != 0,
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;
    use steerage_edge_dataplane::packet::transport;

    fn address() -> impl Strategy<Value = IpAddr> {
        prop_oneof![any::<[u8; 4]>().prop_map(IpAddr::from), any::<[u8; 16]>().prop_map(IpAddr::from)]
    }

    fn any_key() -> impl Strategy<Value = FlowKey<V6>> {
        let v4 = (any::<[u8; 4]>(), any::<[u8; 4]>()).prop_map(|(a, b)| (IpAddr::from(a), IpAddr::from(b)));
        // Not mapped.
        let v6 = (any::<[u8; 15]>(), any::<[u8; 15]>()).prop_map(|(a, b)| {
            let v6 = |rest: [u8; 15]| {
                let mut bytes = [0x20; 16];
                bytes[1..].copy_from_slice(&rest);
                IpAddr::from(bytes)
            };
            (v6(a), v6(b))
        });
        let protocol = prop_oneof![Just(6_u32), Just(17_u32)];
        (prop_oneof![v4, v6], any::<(u16, u16)>(), protocol).prop_map(
            |((client, vip), (from, to), protocol)| FlowKey {
                client: client.into(),
                vip: vip.into(),
                ports: transport::ports(from, to),
                protocol,
            },
        )
    }

    fn any_exception() -> impl Strategy<Value = Exception> {
        (any_key(), address(), any::<u16>(), any::<bool>()).prop_map(|(key, target, idle, is_closing)| {
            Exception { key, target: target.to_canonical(), idle: idle.into(), is_closing }
        })
    }

    pub(crate) fn any_message() -> impl Strategy<Value = Message> {
        let list = 0..20_usize;
        prop_oneof![
            Just(Message::Begin),
            Just(Message::End),
            Just(Message::Ping),
            Just(Message::Routes),
            prop::collection::vec(address().prop_map(V6::from), list.clone()).prop_map(Message::Vips),
            prop::collection::vec(any_exception(), list.clone()).prop_map(Message::Exceptions),
            prop::collection::vec(any_exception(), list.clone()).prop_map(Message::Offers),
            prop::collection::vec(any_key(), list).prop_map(Message::Gone),
        ]
    }

    proptest! {
        #[test]
        fn messages_are_read_as_they_were_written(message in any_message()) {
            prop_assert_eq!(Message::decode(&message.encode()), Ok(Some(message)));
        }

        #[test]
        fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), kind in 0..10_u8) {
            let _ = Message::decode(&bytes);
            let _ = Message::decode(&[&[kind], &bytes[..]].concat());
        }

        /// Of any bytes only flows of TCP and UDP of one family are accepted, and no more than a message may have.
        #[test]
        fn changed_bytes_never_panic_and_give_only_flows(
            message in any_message(),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut bytes = message.encode();
            for (at, value) in changes {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            for bytes in [&bytes[..], &bytes[..cut.index(bytes.len())]] {
                let Ok(Some(Message::Exceptions(found) | Message::Offers(found))) = Message::decode(bytes) else { continue };
                for Exception { key, .. } in found {
                    prop_assert!(key.protocol == 6 || key.protocol == 17);
                    prop_assert_eq!(IpAddr::from(key.client).is_ipv4(), IpAddr::from(key.vip).is_ipv4());
                }
            }
        }
    }

    #[test]
    fn long_lists_are_refused() {
        let bytes = |count: usize| [&[2][..], &vec![0; VIP * count]].concat();
        assert!(Message::decode(&bytes(MOST_ELEMENTS)).is_ok());
        assert_eq!(Message::decode(&bytes(MOST_ELEMENTS + 1)), Err(Malformed));
        assert_eq!(Message::decode(&bytes(1)[..16]), Err(Malformed));
        assert_eq!(Message::decode(&[]), Err(Malformed));
        assert_eq!(Message::decode(&[7, 0]), Err(Malformed));
        assert_eq!(Message::decode(&[99, 1, 2, 3]), Ok(None), "of a later version");
        let too_many = Message::Vips(vec![V6::default(); MOST_ELEMENTS + 5]).encode();
        assert!(too_many.len() < LONGEST && Message::decode(&too_many).is_ok());
    }
}
