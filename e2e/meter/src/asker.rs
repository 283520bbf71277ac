// SPDX-License-Identifier: Apache-2.0
//! The meter's client over UDP: numbered datagrams to an echo server, and what the program saw of each.
//!
//! The server is agnhost's netexec, or answers as that does: the datagram `echo TEXT` is answered with `TEXT`.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio::net::UdpSocket;
use tokio::time::timeout;

use super::next_number;
use super::packet::{mark, number};

/// A datagram as the client's program saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// The socket that sent it.
    pub client: SocketAddr,
    /// Whom it was sent to.
    pub server: SocketAddr,
    /// Its number.
    pub number: u64,
    /// How long the client waited for the answer.
    pub patience: Duration,
    /// How many answers the client read, whoever sent them.
    pub answers: usize,
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
        let asked = next_number();
        let request = format!("echo {}", mark(asked));
        // An ICMP error for an earlier datagram is reported here; the datagram is sent nevertheless when tried again.
        if self.socket.send_to(request.as_bytes(), server).await.is_err() {
            self.socket
                .send_to(request.as_bytes(), server)
                .await
                .context("not measured: sending a datagram")?;
        }
        let answered = async {
            let mut buffer = [0; 256];
            loop {
                if let Ok((length, _)) = self.socket.recv_from(&mut buffer).await
                    && number(&buffer[..length]) == Some(asked)
                {
                    return;
                }
            }
        };
        let answers = usize::from(timeout(patience, answered).await.is_ok());
        Ok(Datagram { client: self.client, server, number: asked, patience, answers })
    }
}
