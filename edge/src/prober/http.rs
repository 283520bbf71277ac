// SPDX-License-Identifier: Apache-2.0
//! A GET request on a connection of its own, as far as probes and statements need it. Bounded in what it reads, not in time: its
//! callers, `probe_task` and `statement_task`, limit that.

use std::io;
use std::net::{IpAddr, SocketAddr};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};

/// Bytes of a response's head.
const MAX_HEAD: usize = 8192;
const END_OF_HEAD: &[u8] = b"\r\n\r\n";

/// Each request opens a connection: the question is whether the node accepts new ones. A process that no longer listens still
/// answers on an open one.
pub(super) async fn connect(to: SocketAddr, source: Option<IpAddr>) -> io::Result<TcpStream> {
    let socket = if to.is_ipv6() { TcpSocket::new_v6()? } else { TcpSocket::new_v4()? };
    if let Some(source) = source {
        socket.bind(SocketAddr::new(source, 0))?;
    }
    socket.connect(to).await
}

/// The head of a response, and what of its body came with it.
#[derive(Debug)]
pub(super) struct Response {
    head: String,
    body: Vec<u8>,
}

/// Sends the request and reads the head. `path` must hold no space and no control character: it must not inject headers.
pub(super) async fn get(stream: &mut TcpStream, to: SocketAddr, path: &str) -> io::Result<Response> {
    let version = env!("CARGO_PKG_VERSION");
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {to}\r\nUser-Agent: steerage-edge/{version}\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await?;
    let mut received = Vec::with_capacity(512);
    let end_of_head =
        |received: &[u8]| received.windows(END_OF_HEAD.len()).position(|window| window == END_OF_HEAD);
    while end_of_head(&received).is_none() && received.len() < MAX_HEAD {
        if stream.read_buf(&mut received).await? == 0 {
            break;
        }
    }
    let length = end_of_head(&received).map_or(received.len(), |at| at + END_OF_HEAD.len());
    let body = received.split_off(length);
    Ok(Response { head: String::from_utf8_lossy(&received).into_owned(), body })
}

impl Response {
    #[cfg(test)]
    pub(super) fn of_head(head: &str) -> Self {
        Self { head: head.to_owned(), body: Vec::new() }
    }

    /// Why it is not what was asked for.
    pub(super) fn why_not(&self) -> String {
        match self.status() {
            Some(code) => format!("status {code}"),
            None if self.head.is_empty() => "connection closed without a response".to_owned(),
            None => "not an HTTP response".to_owned(),
        }
    }

    /// Whether the connection was closed without a byte.
    pub(super) fn is_empty(&self) -> bool {
        self.head.is_empty()
    }

    /// Its status code, if this is HTTP.
    pub(super) fn status(&self) -> Option<&str> {
        let line = self.head.split("\r\n").next()?;
        line.strip_prefix("HTTP/1.").and_then(|rest| rest.split(' ').nth(1))
    }

    pub(super) fn header(&self, wanted: &str) -> Option<&str> {
        let lines = self.head.split("\r\n").skip(1).take_while(|line| !line.is_empty());
        let mut headers = lines.filter_map(|line| line.split_once(':'));
        headers.find(|(name, _)| name.eq_ignore_ascii_case(wanted)).map(|(_, value)| value.trim())
    }

    /// Reads the body up to its length, or to the end of the connection if it states none.
    pub(super) async fn body(mut self, stream: &mut TcpStream, most: usize) -> io::Result<Vec<u8>> {
        let invalid = |message: String| io::Error::new(io::ErrorKind::InvalidData, message);
        if let Some(coding) = self.header("transfer-encoding") {
            return Err(invalid(format!("a body of transfer coding {coding}")));
        }
        let length = match self.header("content-length") {
            Some(text) => Some(text.parse().map_err(|_| invalid(format!("a body of `{text}` bytes")))?),
            None => None,
        };
        while length.is_none_or(|length| self.body.len() < length) {
            if self.body.len().max(length.unwrap_or(0)) > most {
                return Err(invalid(format!("a body of more than {most} bytes")));
            }
            if stream.read_buf(&mut self.body).await? == 0 {
                if length.is_some() {
                    return Err(invalid("the body is cut".to_owned()));
                }
                break;
            }
        }
        self.body.truncate(length.unwrap_or(usize::MAX));
        Ok(self.body)
    }
}
