// SPDX-License-Identifier: Apache-2.0
//! Sessions between two hosts: who has the key, and that a message is of this session, whole and in its order. `client` and `server`
//! each run their side. Messages are not encrypted: who can read the link sees the packets of these flows as well.
//!
//! Both sides send a nonce. The keys of the two directions follow from the shared key, both nonces and both addresses. Each message has
//! a tag, the HMAC-SHA256 over its number and its bytes. So nothing of another session, another pair of hosts or the other direction
//! is accepted, and nothing twice.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use aws_lc_rs::{hmac, rand};
use steerage_edge_dataplane::packet::V6;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::message::LONGEST;

/// Begins each side's first bytes: the protocol, and its version at the end. Hosts of two versions do not exchange.
const MAGIC: [u8; 8] = *b"STEERFX\x01";
const NONCE: usize = 32;
const TAG: usize = 32;
/// The number of a message, before its length.
const NUMBER: usize = 8;
const LENGTH: usize = 2;
/// The shortest key: as long as the hash.
const SHORTEST_KEY: usize = 32;
const LONGEST_KEY: u64 = 4096;
/// The other side says nothing or takes nothing for so long: the session ends.
const PATIENCE: Duration = Duration::from_secs(15);
const TO_SERVER: &[u8] = b"steerage flow exceptions, to the server";
const TO_CLIENT: &[u8] = b"steerage flow exceptions, to the client";

/// The key that all hosts of a group share.
#[derive(Clone)]
pub(crate) struct SharedKey(hmac::Key);

impl std::fmt::Debug for SharedKey {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("SharedKey")
    }
}

impl SharedKey {
    /// Reads the key: text or bytes without white space at its ends.
    pub(crate) fn read(path: &Path) -> io::Result<Self> {
        if std::fs::metadata(path)?.len() > LONGEST_KEY {
            return Err(invalid("the key is longer than 4096 bytes"));
        }
        Self::new(&std::fs::read(path)?).ok_or_else(|| invalid("the key is shorter than 32 bytes"))
    }

    pub(crate) fn new(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.trim_ascii();
        (bytes.len() >= SHORTEST_KEY).then(|| Self(hmac::Key::new(hmac::HMAC_SHA256, bytes)))
    }
}

fn invalid(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// What both sides say at the beginning, and where they are.
#[derive(Clone, Copy, Debug)]
struct Beginning {
    client: IpAddr,
    server: IpAddr,
    client_nonce: [u8; NONCE],
    server_nonce: [u8; NONCE],
}

/// Makes or checks the tags of one direction.
#[derive(Debug)]
struct Seal {
    key: hmac::Key,
    next: u64,
}

impl Seal {
    fn new(shared: &SharedKey, direction: &[u8], beginning: &Beginning) -> Self {
        let mut context = hmac::Context::with_key(&shared.0);
        context.update(direction);
        for address in [beginning.client, beginning.server] {
            // Without the scope of a link-local address, which differs between hosts.
            let address: std::net::Ipv6Addr = V6::from(address.to_canonical()).into();
            context.update(&address.octets());
        }
        context.update(&beginning.client_nonce);
        context.update(&beginning.server_nonce);
        Self { key: hmac::Key::new(hmac::HMAC_SHA256, context.sign().as_ref()), next: 0 }
    }

    /// The number of the next message, before its other bytes.
    fn number(&mut self) -> [u8; NUMBER] {
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        number.to_be_bytes()
    }

    /// Appends a message with its length and its tag.
    fn seal(&mut self, payload: &[u8], wire: &mut Vec<u8>) -> io::Result<()> {
        let length = u16::try_from(payload.len()).map_err(|_| invalid("the message is too long"))?;
        let mut context = hmac::Context::with_key(&self.key);
        context.update(&self.number());
        context.update(&length.to_be_bytes());
        context.update(payload);
        wire.extend(length.to_be_bytes());
        wire.extend(payload);
        wire.extend(context.sign().as_ref());
        Ok(())
    }

    /// `sealed`: room for the number, then the length and the payload.
    fn check(&mut self, sealed: &mut [u8], tag: &[u8]) -> io::Result<()> {
        let number = self.number();
        sealed.get_mut(..NUMBER).ok_or(io::ErrorKind::InvalidData)?.copy_from_slice(&number);
        hmac::verify(&self.key, sealed, tag)
            .map_err(|_| invalid("the other host has another key, or a message was changed"))
    }
}

/// One side of a session.
#[derive(Debug)]
pub(crate) struct Session {
    stream: TcpStream,
    outgoing: Seal,
    incoming: Seal,
    buffer: Vec<u8>,
}

impl Session {
    /// The side that has connected. It proves its key with its first message.
    pub(crate) async fn connect(stream: TcpStream, key: &SharedKey) -> io::Result<Self> {
        Self::begin(stream, key, true).await
    }

    /// The side that was connected to.
    pub(crate) async fn accept(stream: TcpStream, key: &SharedKey) -> io::Result<Self> {
        Self::begin(stream, key, false).await
    }

    async fn begin(mut stream: TcpStream, key: &SharedKey, is_client: bool) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        let mut own = [0; NONCE];
        rand::fill(&mut own).map_err(|_| io::Error::other("no random bytes"))?;
        let mut hello = [0; MAGIC.len() + NONCE];
        in_time(stream.write_all(&[&MAGIC[..], &own].concat())).await?;
        in_time(stream.read_exact(&mut hello)).await?;
        let (magic, nonce) = hello.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(invalid("the other host has another version of the protocol"));
        }
        let other = *nonce.first_chunk().ok_or(io::ErrorKind::InvalidData)?;
        let (here, there) = (stream.local_addr()?, stream.peer_addr()?);
        let address = |address: SocketAddr| address.ip();
        let beginning = if is_client {
            Beginning {
                client: address(here),
                server: address(there),
                client_nonce: own,
                server_nonce: other,
            }
        } else {
            Beginning {
                client: address(there),
                server: address(here),
                client_nonce: other,
                server_nonce: own,
            }
        };
        let to_server = Seal::new(key, TO_SERVER, &beginning);
        let to_client = Seal::new(key, TO_CLIENT, &beginning);
        let (outgoing, incoming) = if is_client { (to_server, to_client) } else { (to_client, to_server) };
        Ok(Self { stream, outgoing, incoming, buffer: Vec::new() })
    }

    pub(crate) async fn send(&mut self, payload: &[u8]) -> io::Result<()> {
        self.buffer.clear();
        self.outgoing.seal(payload, &mut self.buffer)?;
        in_time(self.stream.write_all(&self.buffer)).await
    }

    /// Waits for the next message, which is authentic.
    pub(crate) async fn receive(&mut self) -> io::Result<Vec<u8>> {
        let mut length = [0; LENGTH];
        in_time(self.stream.read_exact(&mut length)).await?;
        let size = usize::from(u16::from_be_bytes(length));
        debug_assert!(size <= LONGEST);
        self.buffer.clear();
        self.buffer.resize(NUMBER + LENGTH + size + TAG, 0);
        let (sealed, tag) = self.buffer.split_at_mut(NUMBER + LENGTH + size);
        if let Some(place) = sealed.get_mut(NUMBER..NUMBER + LENGTH) {
            place.copy_from_slice(&length);
        }
        let rest = sealed.get_mut(NUMBER + LENGTH..).unwrap_or_default();
        in_time(self.stream.read_exact(rest)).await?;
        in_time(self.stream.read_exact(tag)).await?;
        self.incoming.check(sealed, tag)?;
        Ok(sealed.get(NUMBER + LENGTH..).unwrap_or_default().to_vec())
    }
}

async fn in_time<T>(operation: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(PATIENCE, operation).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tokio::net::TcpListener;

    const KEY: &[u8] = b"0123456789abcdef0123456789abcdef";

    fn beginning() -> Beginning {
        Beginning {
            client: [10, 0, 0, 1].into(),
            server: [10, 0, 0, 2].into(),
            client_nonce: [1; NONCE],
            server_nonce: [2; NONCE],
        }
    }

    fn seal(change: impl FnOnce(&mut Beginning)) -> Seal {
        let mut beginning = beginning();
        change(&mut beginning);
        Seal::new(&SharedKey::new(KEY).expect("a key"), TO_SERVER, &beginning)
    }

    /// Whether a message as on the wire is accepted.
    fn accepts(seal: &mut Seal, wire: &[u8]) -> bool {
        let Some(at) = wire.len().checked_sub(TAG) else { return false };
        let (sealed, tag) = wire.split_at(at);
        seal.check(&mut [&[0; NUMBER], sealed].concat(), tag).is_ok()
    }

    fn wire(seal: &mut Seal, payload: &[u8]) -> Vec<u8> {
        let mut wire = Vec::new();
        seal.seal(payload, &mut wire).expect("fits");
        wire
    }

    #[test]
    fn messages_are_accepted_once_and_in_order() {
        let (mut from, mut to) = (seal(|_| {}), seal(|_| {}));
        let [first, second, third] = [1, 2, 3].map(|byte| wire(&mut from, &[byte]));
        assert!(accepts(&mut to, &first));
        assert!(!accepts(&mut seal(|_| {}), &second), "not as the first");
        assert!(!accepts(&mut to, &first), "not again");
        // The session ends with the first message that is refused.
        assert!(accepts(&mut to, &third));
    }

    #[test]
    fn messages_of_other_sessions_are_refused() {
        let message = wire(&mut seal(|_| {}), b"data");
        assert!(accepts(&mut seal(|_| {}), &message));
        assert!(!accepts(&mut seal(|beginning| beginning.client_nonce[0] ^= 1), &message));
        assert!(!accepts(&mut seal(|beginning| beginning.server_nonce[31] ^= 1), &message));
        assert!(!accepts(&mut seal(|beginning| beginning.server = [10, 0, 0, 3].into()), &message));
        assert!(!accepts(&mut seal(|beginning| beginning.client = [10, 0, 0, 3].into()), &message));
        let shared = SharedKey::new(KEY).expect("a key");
        assert!(!accepts(&mut Seal::new(&shared, TO_CLIENT, &beginning()), &message));
        let other = SharedKey::new(&[KEY, b"x"].concat()).expect("a key");
        assert!(!accepts(&mut Seal::new(&other, TO_SERVER, &beginning()), &message));
    }

    proptest! {
        #[test]
        fn changed_messages_are_refused(
            payload in prop::collection::vec(any::<u8>(), 0..200),
            at in any::<prop::sample::Index>(),
            change in 1..=255_u8,
            cut in any::<prop::sample::Index>(),
        ) {
            let wire = wire(&mut seal(|_| {}), &payload);
            let mut changed = wire.clone();
            changed[at.index(wire.len())] ^= change;
            let accepted = |wire: &[u8]| accepts(&mut seal(|_| {}), wire);
            prop_assert_eq!(
                [accepted(&changed), accepted(&wire[..cut.index(wire.len())]), accepted(&wire)],
                [false, false, true]
            );
        }
    }

    #[test]
    fn short_keys_are_refused() {
        assert!(SharedKey::new(&KEY[1..]).is_none());
        assert!(SharedKey::new(&[b"\n  ", &KEY[1..], b"\n"].concat()).is_none());
        let path = std::env::temp_dir().join(format!("steerage-key-{}", std::process::id()));
        std::fs::write(&path, [KEY, b"\n"].concat()).expect("write");
        assert!(SharedKey::read(&path).is_ok());
        std::fs::write(&path, vec![b'x'; 5000]).expect("write");
        assert!(SharedKey::read(&path).is_err());
        std::fs::remove_file(&path).expect("remove");
        assert!(SharedKey::read(&path).is_err());
    }

    async fn pair(keys: [&[u8]; 2]) -> (io::Result<Session>, io::Result<Session>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let to = listener.local_addr().expect("address");
        let [client, server] = keys.map(|key| SharedKey::new(key).expect("a key"));
        tokio::join!(async { Session::connect(TcpStream::connect(to).await?, &client).await }, async {
            Session::accept(listener.accept().await?.0, &server).await
        },)
    }

    #[tokio::test]
    async fn both_sides_hear_each_other() {
        let (client, server) = pair([KEY, KEY]).await;
        let (mut client, mut server) = (client.expect("client"), server.expect("server"));
        for payload in [&b""[..], b"one", &vec![7; LONGEST]] {
            client.send(payload).await.expect("send");
            assert_eq!(server.receive().await.expect("receive"), payload);
            server.send(payload).await.expect("send");
            assert_eq!(client.receive().await.expect("receive"), payload);
        }
        assert!(client.send(&vec![7; LONGEST + 1]).await.is_err());
    }

    #[tokio::test]
    async fn host_with_another_key_is_told_nothing_and_believed_nothing() {
        let (client, server) = pair([KEY, &[KEY, b"x"].concat()]).await;
        let (mut client, mut server) = (client.expect("client"), server.expect("server"));
        client.send(b"ping").await.expect("send");
        assert!(server.receive().await.is_err());
        server.send(b"").await.expect("send");
        assert!(client.receive().await.is_err());
    }

    #[tokio::test]
    async fn other_protocols_are_refused() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let to = listener.local_addr().expect("address");
        let shared = SharedKey::new(KEY).expect("a key");
        let client = async {
            let mut stream = TcpStream::connect(to).await.expect("connect");
            stream.write_all(&[b'x'; 200]).await.expect("write");
            stream
        };
        let server = async { Session::accept(listener.accept().await.expect("accept").0, &shared).await };
        let (_, server) = tokio::join!(client, server);
        assert!(server.is_err());
    }
}
