// SPDX-License-Identifier: Apache-2.0
//! One check of a target: an HTTP request that must be answered by 200, or a TCP connection.

use std::io;
use std::net::SocketAddrV4;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::cloud::Check;

/// Whether the target passes.
pub async fn passes(check: &Check, address: SocketAddrV4) -> bool {
    let ask = ask(check.path.as_deref(), address);
    timeout(check.timeout, ask).await.is_ok_and(|answer| answer.unwrap_or(false))
}

async fn ask(path: Option<&str>, address: SocketAddrV4) -> io::Result<bool> {
    let mut stream = TcpStream::connect(address).await?;
    let Some(path) = path else { return Ok(true) };
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {address}\r\nUser-Agent: ELB-HealthChecker/2.0\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await?;
    let mut start = [0; 13];
    stream.read_exact(&mut start).await?;
    Ok(start.starts_with(b"HTTP/1.") && start.ends_with(b" 200 "))
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

    /// A server of one connection that answers this, and then stays silent.
    async fn server(answer: &'static str) -> SocketAddrV4 {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let std::net::SocketAddr::V4(address) = listener.local_addr().unwrap() else { unreachable!() };
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 256];
            let read = stream.read(&mut request).await.unwrap();
            assert!(read == 0 || request.starts_with(b"GET /healthz HTTP/1.1\r\n"));
            stream.write_all(answer.as_bytes()).await.unwrap();
            tokio::time::sleep(Duration::from_secs(5)).await;
        });
        address
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
            assert_eq!(passes(&check(Some("/healthz")), server(answer).await).await, passed, "{answer:?}");
        }
    }

    #[tokio::test]
    async fn tcp_check_needs_a_connection_only() {
        assert!(passes(&check(None), server("").await).await);
        let closed = {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            listener.local_addr().unwrap().port()
        };
        assert!(!passes(&check(None), SocketAddrV4::new([127, 0, 0, 1].into(), closed)).await);
    }
}
