// SPDX-License-Identifier: Apache-2.0
//! Single requests over HTTP and UDP, from a chosen source port if the case needs one.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream, UdpSocket};
use tokio::time::timeout;

/// Time limit of an answer, for a caller that asks again.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit of an answer, for a caller that asks once: hosts may have no core for some seconds.
pub const ONLY_ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// An answer over HTTP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// The header lines.
    pub head: String,
    /// The body.
    pub body: String,
}

impl Answer {
    /// A header's value.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }
}

/// Any address of the family, with a port.
pub fn any(of: SocketAddr, port: u16) -> SocketAddr {
    let address =
        if of.is_ipv4() { IpAddr::from(Ipv4Addr::UNSPECIFIED) } else { Ipv6Addr::UNSPECIFIED.into() };
    SocketAddr::new(address, port)
}

/// GET over a connection of its own, from a source port if it is not 0. For a caller that asks once.
pub async fn get_from(port: u16, to: SocketAddr, path: &str) -> Result<Answer> {
    get_within(ONLY_ANSWER_TIMEOUT, port, to, path).await
}

/// GET over a connection of its own within this time, from a source port if it is not 0.
pub async fn get_within(limit: Duration, port: u16, to: SocketAddr, path: &str) -> Result<Answer> {
    let work = async {
        let socket = if to.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        if port != 0 {
            socket.set_reuseaddr(true)?;
            socket.bind(any(to, port))?;
        }
        exchange(socket.connect(to).await?, to, path).await
    };
    timeout(limit, work).await.with_context(|| format!("no answer from {to} within {} s", limit.as_secs()))?
}

/// GET over a connection of its own.
pub async fn get(to: SocketAddr, path: &str) -> Result<Answer> {
    get_within(ANSWER_TIMEOUT, 0, to, path).await
}

/// GET of a page that must answer 200.
pub async fn page(to: SocketAddr, path: &str) -> Result<String> {
    body(get(to, path).await?, to, path)
}

/// The same, for a caller that asks once.
pub async fn only_page(to: SocketAddr, path: &str) -> Result<String> {
    body(get_from(0, to, path).await?, to, path)
}

fn body(answer: Answer, to: SocketAddr, path: &str) -> Result<String> {
    if answer.status != 200 {
        bail!("{path} of {to} answers {}: {}", answer.status, answer.body);
    }
    Ok(answer.body)
}

async fn exchange(mut stream: TcpStream, to: SocketAddr, path: &str) -> Result<Answer> {
    let request = format!("GET {path} HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await?;
    let text = String::from_utf8_lossy(&bytes);
    let (head, body) = text.split_once("\r\n\r\n").with_context(|| format!("{to} sent no HTTP: {text:?}"))?;
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).context("no status")?;
    Ok(Answer { status, head: head.to_owned(), body: body.to_owned() })
}

/// One datagram and its answer.
pub async fn ask(to: SocketAddr, text: &str) -> Result<String> {
    ask_within(ANSWER_TIMEOUT, 0, to, text).await
}

/// One datagram and its answer, from a source port if it is not 0. For a caller that asks once.
pub async fn ask_from(port: u16, to: SocketAddr, text: &str) -> Result<String> {
    ask_within(ONLY_ANSWER_TIMEOUT, port, to, text).await
}

async fn ask_within(limit: Duration, port: u16, to: SocketAddr, text: &str) -> Result<String> {
    let socket = UdpSocket::bind(any(to, port)).await?;
    socket.connect(to).await?;
    socket.send(text.as_bytes()).await?;
    let mut buffer = [0; 2048];
    let length = timeout(limit, socket.recv(&mut buffer))
        .await
        .with_context(|| format!("no datagram from {to} within {} s", limit.as_secs()))??;
    Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
}

/// Encodes a value of a query.
pub fn encode(text: &str) -> String {
    text.bytes().fold(String::new(), |mut encoded, byte| {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(byte.into());
        } else {
            use std::fmt::Write as _;
            let _ = write!(encoded, "%{byte:02X}");
        }
        encoded
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_encoded() {
        assert_eq!(encode("http://[fd77::1]:80/a b"), "http%3A%2F%2F%5Bfd77%3A%3A1%5D%3A80%2Fa%20b");
    }

    #[test]
    fn headers_are_found_whatever_their_case() {
        let answer =
            Answer { status: 200, head: "HTTP/1.1 200 OK\r\nX-Weight: 2".into(), body: String::new() };
        assert_eq!(answer.header("x-weight"), Some("2"));
        assert_eq!(answer.header("x-other"), None);
    }
}
