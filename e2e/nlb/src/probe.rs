// SPDX-License-Identifier: Apache-2.0
//! One check of a target: an HTTP request that must be answered by 200, or a TCP connection.

use std::io;
use std::net::SocketAddr;

use nix::sys::socket::{setsockopt, sockopt};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, BufStream};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

use crate::cloud::Check;

/// An answer whose head is longer has failed.
const MAX_HEAD: usize = 4096;

/// How a prober of a cloud asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prober {
    /// The header `User-Agent`.
    pub agent: &'static str,
    /// The address from which it asks, with port 0; `None`: as the kernel chooses.
    pub source: Option<SocketAddr>,
    /// The mark of its packets, by which a rule may route them; 0 means none.
    pub mark: u32,
}

impl Prober {
    /// Those of AWS's load balancers.
    pub const ELB: Self = Self { agent: "ELB-HealthChecker/2.0", source: None, mark: 0 };
}

/// A target that passed its check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passed {
    /// The header `X-Load-Balancing-Endpoint-Weight`.
    pub weight: Option<u32>,
}

/// Checks the target; `None` if it does not pass.
pub async fn ask(check: &Check, address: SocketAddr, prober: &Prober) -> Option<Passed> {
    let answer = answer(check.path.as_deref(), address, prober);
    timeout(check.timeout, answer).await.ok()?.ok()?
}

async fn answer(path: Option<&str>, address: SocketAddr, prober: &Prober) -> io::Result<Option<Passed>> {
    let mut stream = BufStream::new(connect(address, prober).await?);
    let Some(path) = path else { return Ok(Some(Passed { weight: None })) };
    let agent = prober.agent;
    let request =
        format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nUser-Agent: {agent}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    stream.flush().await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() == MAX_HEAD {
            return Ok(None);
        }
        head.push(stream.read_u8().await?);
    }
    Ok(read(&String::from_utf8_lossy(&head)))
}

async fn connect(address: SocketAddr, prober: &Prober) -> io::Result<TcpStream> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    if prober.mark != 0 {
        setsockopt(&socket, sockopt::Mark, &prober.mark)?;
    }
    if let Some(source) = prober.source {
        socket.bind(source)?;
    }
    socket.connect(address).await
}

fn read(head: &str) -> Option<Passed> {
    let (status, headers) = head.split_once("\r\n")?;
    let mut words = status.split(' ');
    let is_ok = words.next()?.starts_with("HTTP/1.") && words.next()? == "200";
    let mut fields = headers.lines().filter_map(|line| line.split_once(':'));
    let weight = fields.find(|(name, _)| name.eq_ignore_ascii_case("X-Load-Balancing-Endpoint-Weight"));
    let weight = weight.and_then(|(_, value)| value.trim().parse().ok());
    is_ok.then_some(Passed { weight })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::net::TcpListener;

    use super::*;

    fn check(path: Option<&str>) -> Check {
        Check {
            path: path.map(str::to_owned),
            port: None,
            interval: Duration::from_secs(5),
            timeout: Duration::from_millis(500),
            healthy_threshold: 2,
            unhealthy_threshold: 2,
        }
    }

    /// A check that has to pass: no answer is waited for so long, but a busy machine may delay one.
    fn patient(path: Option<&str>) -> Check {
        Check { timeout: Duration::from_secs(30), ..check(path) }
    }

    /// A server of one connection that answers this, and then stays silent.
    async fn server(answer: &'static str) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 256];
            let read = stream.read(&mut request).await.unwrap();
            assert!(read == 0 || request.starts_with(b"GET /healthz HTTP/1.1\r\n"));
            stream.write_all(answer.as_bytes()).await.unwrap();
            tokio::time::sleep(Duration::from_mins(1)).await;
        });
        address
    }

    async fn passes(check: &Check, address: SocketAddr) -> bool {
        ask(check, address, &Prober::ELB).await.is_some()
    }

    #[tokio::test]
    async fn answer_has_the_weight_of_the_target() {
        for (answer, weight) in [
            ("HTTP/1.1 200 OK\r\nX-Load-Balancing-Endpoint-Weight: 3\r\nContent-Length: 0\r\n\r\n", Some(3)),
            ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\nx-load-balancing-endpoint-weight: 0\r\n\r\n", Some(0)),
            ("HTTP/1.1 200 OK\r\nX-Load-Balancing-Endpoint-Weight: many\r\n\r\n", None),
            ("HTTP/1.1 200 OK\r\n\r\nX-Load-Balancing-Endpoint-Weight: 3\r\n", None),
        ] {
            let passed = ask(&patient(Some("/healthz")), server(answer).await, &Prober::ELB).await;
            assert_eq!(passed, Some(Passed { weight }), "{answer:?}");
        }
    }

    #[tokio::test]
    async fn prober_asks_from_its_own_address() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let prober = Prober { source: Some(([127, 0, 0, 7], 0).into()), ..Prober::ELB };
        let check = patient(None);
        let (passed, accepted) = tokio::join!(ask(&check, address, &prober), listener.accept());
        assert!(passed.is_some());
        assert_eq!(accepted.unwrap().1.ip(), std::net::IpAddr::from([127, 0, 0, 7]));
    }

    #[tokio::test]
    async fn only_200_in_time_passes() {
        for (answer, passed) in [
            ("HTTP/1.1 200 OK\r\n\r\n", true),
            ("HTTP/1.0 200 OK\r\n\r\n", true),
            ("HTTP/1.1 503 Service Unavailable\r\n\r\n", false),
            ("SSH-2.0-server 200 \r\n", false),
            ("", false),
        ] {
            // A head that does not end is waited for.
            let check = if answer.starts_with("HTTP/") { patient } else { check };
            assert_eq!(passes(&check(Some("/healthz")), server(answer).await).await, passed, "{answer:?}");
        }
    }

    #[tokio::test]
    async fn tcp_check_needs_a_connection_only() {
        assert!(passes(&patient(None), server("").await).await);
        // Nobody else can take a port that is bound, and nobody listens there.
        let bound = tokio::net::TcpSocket::new_v4().unwrap();
        bound.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        assert!(!passes(&patient(None), bound.local_addr().unwrap()).await);
    }
}
