// SPDX-License-Identifier: Apache-2.0
//! Probes the health of a lab's process over HTTP, from inside its network namespace.

use std::io::{Read, Result, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Whether `GET path` on this port of 127.0.0.1 is answered with 200, in the namespace of the calling thread.
pub fn is_well(port: u16, path: &str) -> bool {
    ask(port, path).is_ok_and(|status| status == *b"200")
}

fn ask(port: u16, path: &str) -> Result<[u8; 3]> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: lab\r\n\r\n").as_bytes())?;
    // "HTTP/1.x 200"
    let mut line = [0; 12];
    stream.read_exact(&mut line)?;
    let [.., a, b, c] = line;
    Ok([a, b, c])
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    #[test]
    fn only_200_is_well() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = thread::spawn(move || {
            for status in ["200 OK", "503 Service Unavailable"] {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = [0; 256];
                let read = stream.read(&mut request).unwrap();
                assert!(request[..read].starts_with(b"GET /healthz HTTP/1.0\r\n"));
                // In one piece: the client closes once it has read the status.
                stream.write_all(format!("HTTP/1.1 {status}\r\n\r\n").as_bytes()).unwrap();
            }
        });
        assert!(is_well(port, "/healthz"));
        assert!(!is_well(port, "/healthz"));
        server.join().unwrap();
        assert!(!is_well(port, "/healthz"), "nobody listens");
    }
}
