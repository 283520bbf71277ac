// SPDX-License-Identifier: Apache-2.0
//! The meter's client: numbered requests over HTTP and UDP to an echo server, and what the program saw of each.
//!
//! The server is agnhost's netexec: `GET /echo?msg=TEXT` and the datagram `echo TEXT` are answered with `TEXT`.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use socket2::{Domain, Socket, Type};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::{sleep, timeout};

use super::capture::now;
use super::packet::mark;
use super::tcp::Ends;

/// How long a connection, or an exchange, may take before the client gives up.
pub const TIME_LIMIT: Duration = Duration::from_secs(5);

mod information {
    #![allow(missing_docs, reason = "made by nix's macro")]
    use nix::{getsockopt_impl, sockopt_impl};
    sockopt_impl!(TcpInformation, GetOnly, libc::IPPROTO_TCP, libc::TCP_INFO, libc::tcp_info);
}

/// Everything that a client did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// Its connections.
    pub connections: Vec<Connection>,
    /// Its datagrams.
    pub datagrams: Vec<Datagram>,
}

/// A connection as the client's program saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Its ends.
    pub ends: Ends,
    /// When the client opened it, since the Unix epoch.
    pub opened: Duration,
    /// Requests that were answered.
    pub exchanges: usize,
    /// Bytes that were read.
    pub received: u64,
    /// How it ended.
    pub ending: Ending,
    /// What the kernel says (`TCP_INFO`) of retransmissions, as long as it could be asked.
    pub retransmissions: Option<usize>,
}

/// How a connection ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// By the client, or by the server as the client asked, with all answers complete.
    Complete,
    /// By the server, between two requests.
    ClosedByServer,
    /// With a request that was not answered in full: what the client saw.
    Unanswered(String),
    /// With an answer that was not what had been sent.
    BytesChanged,
}

/// A datagram as the client's program saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// The socket that sent it.
    pub client: SocketAddr,
    /// Whom it was sent to.
    pub server: SocketAddr,
    /// Its number.
    pub number: u64,
    /// How many answers the client read, whoever sent them.
    pub answers: usize,
}

fn next() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A connection that is open, or being opened.
struct Open {
    stream: TcpStream,
    record: Connection,
}

impl Open {
    /// Sends the SYN. The ends are known from then on, whatever comes of it.
    fn new(server: SocketAddr) -> Result<Self> {
        let socket = Socket::new(Domain::for_address(server), Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        match socket.connect(&server.into()) {
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => {
                return Err(error).with_context(|| format!("not measured: connecting to {server}"));
            }
            _ => {}
        }
        let opened = now();
        let client = socket.local_addr()?.as_socket().context("a socket without an address")?;
        let record = Connection {
            ends: Ends { client, server },
            opened,
            exchanges: 0,
            received: 0,
            ending: Ending::Complete,
            retransmissions: None,
        };
        Ok(Self { stream: TcpStream::from_std(socket.into())?, record })
    }

    async fn established(&mut self) -> io::Result<()> {
        self.stream.writable().await?;
        self.stream.take_error()?.map_or(Ok(()), Err)
    }

    /// One request and its answer.
    async fn exchange(&mut self, last: bool) -> io::Result<()> {
        let text = mark(next());
        let connection = if last { "close" } else { "keep-alive" };
        let request =
            format!("GET /echo?msg={text} HTTP/1.1\r\nHost: e2e\r\nConnection: {connection}\r\n\r\n");
        self.stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        while !is_complete(&answer) {
            self.read(&mut answer).await?;
        }
        let right =
            answer.starts_with(b"HTTP/1.1 200") && answer.ends_with(format!("\r\n\r\n{text}").as_bytes());
        if right {
            self.record.exchanges += 1;
        } else {
            self.record.ending = Ending::BytesChanged;
        }
        Ok(())
    }

    async fn read(&mut self, answer: &mut Vec<u8>) -> io::Result<()> {
        match self.stream.read_buf(answer).await? {
            0 => Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("closed after {} bytes", answer.len()),
            )),
            more => {
                self.record.received += more as u64;
                Ok(())
            }
        }
    }

    /// Notes what went wrong, and what the kernel counted.
    fn end(mut self, outcome: Result<io::Result<()>, tokio::time::error::Elapsed>) -> Connection {
        let error = match outcome {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some(format!("no answer within {} s", TIME_LIMIT.as_secs())),
        };
        if let Some(error) = error {
            self.record.ending = Ending::Unanswered(error);
        }
        self.record.retransmissions = retransmissions(&self.stream);
        self.record
    }
}

/// What the kernel says of a connection's retransmissions.
pub fn retransmissions(stream: &TcpStream) -> Option<usize> {
    let information = nix::sys::socket::getsockopt(stream, information::TcpInformation).ok()?;
    usize::try_from(information.tcpi_total_retrans).ok()
}

/// One new connection: opened, asked, answered, closed by the server.
pub async fn connect(server: SocketAddr) -> Result<Connection> {
    let mut open = Open::new(server)?;
    let work = async {
        open.established().await?;
        open.exchange(true).await?;
        match open.stream.read(&mut [0]).await? {
            0 => Ok(()),
            _ => Err(io::Error::other("more than the answer")),
        }
    };
    let outcome = timeout(TIME_LIMIT, work).await;
    Ok(open.end(outcome))
}

/// One connection with a request every `pause`, until its server or `stop` ends it.
pub async fn hold(server: SocketAddr, pause: Duration, stop: &impl Fn() -> bool) -> Result<Connection> {
    let mut open = Open::new(server)?;
    let mut outcome = timeout(TIME_LIMIT, open.established()).await;
    while matches!(outcome, Ok(Ok(()))) && open.record.ending == Ending::Complete && !stop() {
        outcome = timeout(TIME_LIMIT, open.exchange(false)).await;
        if !matches!(outcome, Ok(Ok(()))) {
            break;
        }
        let mut byte = [0];
        tokio::select! {
            () = sleep(pause) => {}
            read = open.stream.read(&mut byte) => match read {
                Ok(0) => open.record.ending = Ending::ClosedByServer,
                Ok(_) => open.record.ending = Ending::BytesChanged,
                Err(error) => outcome = Ok(Err(error)),
            }
        }
    }
    Ok(open.end(outcome))
}

/// Whether a whole answer is there: its head, and as much after it as the head says.
fn is_complete(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
    let length = head
        .lines()
        .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length:")?.trim().parse().ok());
    length.is_none_or(|length: usize| body.len() >= length)
}

/// A socket that asks by datagram.
pub struct Asker {
    socket: UdpSocket,
    client: SocketAddr,
}

impl Asker {
    /// Binds a socket to a port of this address.
    pub async fn bind(address: IpAddr) -> Result<Self> {
        let socket = UdpSocket::bind(SocketAddr::new(address, 0)).await?;
        let client = socket.local_addr()?;
        Ok(Self { socket, client })
    }

    /// One datagram, and its answer within `patience`, whoever sends it.
    pub async fn ask(&self, server: SocketAddr, patience: Duration) -> Result<Datagram> {
        let number = next();
        let request = format!("echo {}", mark(number));
        // An ICMP error for an earlier datagram is reported here; the datagram is sent nevertheless when tried again.
        if self.socket.send_to(request.as_bytes(), server).await.is_err() {
            self.socket
                .send_to(request.as_bytes(), server)
                .await
                .context("not measured: sending a datagram")?;
        }
        let mut datagram = Datagram { client: self.client, server, number, answers: 0 };
        let answered = async {
            let mut buffer = [0; 256];
            loop {
                if let Ok((length, _)) = self.socket.recv_from(&mut buffer).await
                    && super::packet::number(&buffer[..length]) == Some(number)
                {
                    return;
                }
            }
        };
        datagram.answers = usize::from(timeout(patience, answered).await.is_ok());
        Ok(datagram)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_is_complete_with_its_last_byte() {
        assert!(!is_complete(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab"));
        assert!(is_complete(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"));
        assert!(!is_complete(b"HTTP/1.1 200 OK\r\nContent-"));
    }
}
