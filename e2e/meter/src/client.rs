// SPDX-License-Identifier: Apache-2.0
//! The meter's client: requests over HTTP to an echo server, and what the program saw of each.
//!
//! The server is agnhost's netexec, or answers as that does: `GET /hostname` is answered with the name of its pod, `GET /echo?msg=TEXT` with `TEXT`. A
//! connection asks for the name first, since every backend echoes alike.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::time::Duration;

use anyhow::{Context as _, Result};
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::IpBindAddressNoPort;
use socket2::{Domain, Socket, Type};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::asker::Datagram;
use super::capture::now;
use super::next_number;
use super::packet::mark;
use super::tcp::Ends;

/// How long a connection, or an exchange, may take before the client gives up.
pub const TIME_LIMIT: Duration = Duration::from_secs(5);

mod information {
    #![allow(missing_docs, reason = "made by nix's macro")]
    use nix::{getsockopt_impl, sockopt_impl};
    sockopt_impl!(TcpInformation, GetOnly, libc::IPPROTO_TCP, libc::TCP_INFO, libc::tcp_info);
}

/// Whom a client asks, and who should answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Where it connects to.
    pub address: SocketAddr,
    /// Where it sends datagrams.
    pub datagrams: SocketAddr,
    /// How the names of all backends begin that may answer, and of no others.
    pub backends: String,
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
    /// Requests that were answered in full, in order.
    pub exchanges: Vec<Exchange>,
    /// Bytes that were read.
    pub received: u64,
    /// How it ended.
    pub ending: Ending,
    /// What the kernel says (`TCP_INFO`) of retransmissions, as long as it could be asked.
    pub retransmissions: Option<usize>,
}

/// A request and its answer as positions in the connection's two streams of bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// The request's bytes.
    pub request: Range<u64>,
    /// The answer's bytes.
    pub answer: Range<u64>,
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
    /// With an answer of a backend that should not have been asked: its name.
    WrongBackend(String),
}

/// A connection that is open, or being opened.
struct Open {
    stream: TcpStream,
    record: Connection,
    sent: u64,
}

impl Open {
    /// Sends the SYN. The ends are known from then on, whatever comes of it.
    fn new(from: Option<IpAddr>, server: SocketAddr) -> Result<Self> {
        let socket = Socket::new(Domain::for_address(server), Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        if let Some(from) = from {
            // The port is chosen with the connection: as many as there are for each server.
            setsockopt(&socket, IpBindAddressNoPort, &true)?;
            socket.bind(&SocketAddr::new(from, 0).into())?;
        }
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
            exchanges: Vec::new(),
            received: 0,
            ending: Ending::Complete,
            retransmissions: None,
        };
        Ok(Self { stream: TcpStream::from_std(socket.into())?, record, sent: 0 })
    }

    async fn established(&mut self) -> io::Result<()> {
        self.stream.writable().await?;
        self.stream.take_error()?.map_or(Ok(()), Err)
    }

    /// Asks who serves the connection.
    async fn identify(&mut self, backends: &str) -> io::Result<()> {
        match self.exchange("/hostname", false).await? {
            Some(name) if name.starts_with(backends) => {}
            Some(name) => self.record.ending = Ending::WrongBackend(name),
            None => self.record.ending = Ending::BytesChanged,
        }
        Ok(())
    }

    /// One numbered request and its answer.
    async fn echo(&mut self, last: bool) -> io::Result<()> {
        let text = mark(next_number());
        if self.exchange(&format!("/echo?msg={text}"), last).await? != Some(text) {
            self.record.ending = Ending::BytesChanged;
        }
        Ok(())
    }

    /// One request; the body of its answer, unless that is an error.
    async fn exchange(&mut self, path: &str, last: bool) -> io::Result<Option<String>> {
        let connection = if last { "close" } else { "keep-alive" };
        let request = format!("GET {path} HTTP/1.1\r\nHost: e2e\r\nConnection: {connection}\r\n\r\n");
        let (asked, answered) = (self.sent, self.record.received);
        self.stream.write_all(request.as_bytes()).await?;
        self.sent += request.len() as u64;
        let mut answer = Vec::new();
        while !is_complete(&answer) {
            self.read(&mut answer).await?;
        }
        let exchange = Exchange { request: asked..self.sent, answer: answered..self.record.received };
        self.record.exchanges.push(exchange);
        let text = String::from_utf8_lossy(&answer);
        let body = text.split_once("\r\n\r\n").filter(|(head, _)| head.starts_with("HTTP/1.1 200"));
        Ok(body.map(|(_, body)| body.to_owned()))
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

/// One new connection: opened from this address or any, asked for its backend, asked for an echo, closed by the server.
pub async fn connect(from: Option<IpAddr>, to: &Target) -> Result<Connection> {
    let mut open = Open::new(from, to.address)?;
    let work = async {
        open.established().await?;
        open.identify(&to.backends).await?;
        if open.record.ending != Ending::Complete {
            return Ok(());
        }
        open.echo(true).await?;
        match open.stream.read(&mut [0]).await? {
            0 => Ok(()),
            _ => Err(io::Error::other("more than the answer")),
        }
    };
    let outcome = timeout(TIME_LIMIT, work).await;
    Ok(open.end(outcome))
}

/// When a held connection has requests, beside the first ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// With this pause between two.
    Every(Duration),
    /// Once, this long after the client was told to stop.
    OnceAfterStop(Duration),
}

impl Pace {
    /// Waits until the next request is due; whether there is one.
    async fn next(self, stop: &mut watch::Receiver<bool>) -> bool {
        match self {
            Self::Every(pause) => {
                sleep(pause).await;
                !*stop.borrow()
            }
            Self::OnceAfterStop(_) if *stop.borrow() => false,
            Self::OnceAfterStop(pause) => {
                let _ = stop.wait_for(|stop| *stop).await;
                sleep(pause).await;
                true
            }
        }
    }
}

/// One connection, opened from this address or any, until its server or `stop` ends it.
pub async fn hold(
    from: Option<IpAddr>,
    to: &Target,
    pace: Pace,
    stop: &mut watch::Receiver<bool>,
) -> Result<Connection> {
    let mut open = Open::new(from, to.address)?;
    let opening = async {
        open.established().await?;
        open.identify(&to.backends).await
    };
    let mut outcome = timeout(TIME_LIMIT, opening).await;
    let mut goes_on = !*stop.borrow();
    while matches!(outcome, Ok(Ok(()))) && open.record.ending == Ending::Complete && goes_on {
        outcome = timeout(TIME_LIMIT, open.echo(false)).await;
        if !matches!(outcome, Ok(Ok(()))) {
            break;
        }
        let mut byte = [0];
        tokio::select! {
            // What came during the pause counts, also if the pause is over when it is seen.
            biased;
            read = open.stream.read(&mut byte) => match read {
                Ok(0) => open.record.ending = Ending::ClosedByServer,
                Ok(_) => open.record.ending = Ending::BytesChanged,
                Err(error) => outcome = Ok(Err(error)),
            },
            next = pace.next(stop) => goes_on = next,
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
