// SPDX-License-Identifier: Apache-2.0
//! Clients under way while something happens: each opens a new connection every 10 ms and holds 20 long ones.
//!
//! One thread per client, in the client's namespace. No connection is tried twice; a failed long one is counted, then replaced.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use crate::cluster::Host;

/// Between two new connections.
const EVERY: Duration = Duration::from_millis(10);
/// Long connections per client.
const LONG: usize = 20;
/// Between two exchanges on a long connection.
const PAUSE: Duration = Duration::from_millis(100);
/// How long a connection, or an exchange, may take.
const LIMIT: Duration = Duration::from_secs(5);
/// From the load's start to the event.
pub const BEFORE: Duration = Duration::from_secs(5);
/// From the event's end to the load's.
pub const AFTER: Duration = Duration::from_secs(10);

/// A client, and where it connects to.
#[derive(Clone)]
pub struct Client {
    /// The machine.
    pub host: Host,
    /// The load balancer.
    pub to: SocketAddr,
    /// What the load balancer is, for messages and tables.
    pub what: String,
}

/// Something that went wrong.
#[derive(Debug)]
pub struct Failure {
    /// When the attempt began.
    pub at: Instant,
    /// What the client saw.
    pub what: String,
}

/// What a client lived through.
#[derive(Debug, Default)]
pub struct Tally {
    /// What the load balancer is.
    pub what: String,
    /// New connections that were answered.
    pub opened: usize,
    /// New connections that were not.
    pub failed: Vec<Failure>,
    /// Exchanges on long connections.
    pub exchanges: usize,
    /// Long connections that broke.
    pub broken: Vec<Failure>,
}

/// A running load.
pub struct Load {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<Tally>>>,
}

impl Load {
    /// Starts the clients.
    pub fn start(clients: Vec<Client>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let threads = clients.into_iter().map(|client| {
            let stop = Arc::clone(&stop);
            thread::spawn(move || -> Result<Tally> {
                steerage_lab::in_netns(&client.host.netns, || -> Result<Tally> {
                    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                    Ok(runtime.block_on(drive(client.to, client.what, stop)))
                })?
            })
        });
        let threads = threads.collect();
        Self { stop, threads }
    }

    /// Ends the load; what each client lived through.
    pub fn end(self) -> Result<Vec<Tally>> {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.threads.into_iter().map(JoinHandle::join);
        ended.map(|tally| tally.map_err(|_| anyhow!("a client panicked"))?).collect()
    }
}

async fn drive(to: SocketAddr, what: String, stop: Arc<AtomicBool>) -> Tally {
    let mut tally = Tally { what, ..Tally::default() };
    let mut held = JoinSet::new();
    for index in 0..LONG {
        let stop = Arc::clone(&stop);
        held.spawn(async move {
            // Not all in the same millisecond.
            sleep(PAUSE * u32::try_from(index).unwrap_or(0) / 20).await;
            hold(to, &stop).await
        });
    }
    let mut ticks = interval(EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut under_way = JoinSet::new();
    while !stop.load(Ordering::Relaxed) {
        ticks.tick().await;
        under_way.spawn(once(to));
        while let Some(Ok(outcome)) = under_way.try_join_next() {
            tally.add(outcome);
        }
    }
    while let Some(Ok(outcome)) = under_way.join_next().await {
        tally.add(outcome);
    }
    while let Some(Ok((exchanges, broken))) = held.join_next().await {
        tally.exchanges += exchanges;
        tally.broken.extend(broken);
    }
    tally.failed.sort_by_key(|failure| failure.at);
    tally.broken.sort_by_key(|failure| failure.at);
    tally
}

impl Tally {
    fn add(&mut self, outcome: Result<(), Failure>) {
        match outcome {
            Ok(()) => self.opened += 1,
            Err(failure) => self.failed.push(failure),
        }
    }
}

/// One new connection: opened, asked, answered, closed.
async fn once(to: SocketAddr) -> Result<(), Failure> {
    let at = Instant::now();
    let work = async {
        let mut stream = TcpStream::connect(to).await?;
        exchange(&mut stream, "close").await
    };
    match timeout(LIMIT, work).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(Failure { at, what: format!("{error:#}") }),
        Err(_) => Err(Failure { at, what: "no answer within 5 s".to_owned() }),
    }
}

/// One long connection, and after its end the next.
async fn hold(to: SocketAddr, stop: &AtomicBool) -> (usize, Vec<Failure>) {
    let (mut exchanges, mut broken) = (0, Vec::new());
    while !stop.load(Ordering::Relaxed) {
        let mut at = Instant::now();
        let work = async {
            let mut stream = timeout(LIMIT, TcpStream::connect(to)).await??;
            while !stop.load(Ordering::Relaxed) {
                at = Instant::now();
                timeout(LIMIT, exchange(&mut stream, "keep-alive")).await??;
                exchanges += 1;
                sleep(PAUSE).await;
            }
            anyhow::Ok(())
        };
        if let Err(error) = work.await {
            broken.push(Failure { at, what: format!("{error:#}") });
            sleep(PAUSE).await;
        }
    }
    (exchanges, broken)
}

async fn exchange(stream: &mut TcpStream, connection: &str) -> Result<()> {
    let request = format!("GET /hostname HTTP/1.1\r\nHost: e2e\r\nConnection: {connection}\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let (mut buffer, mut length) = ([0; 1024], 0);
    while !complete(&buffer[..length]) {
        match stream.read(&mut buffer[length..]).await? {
            0 => bail!("closed after {length} bytes of an answer"),
            more => length += more,
        }
    }
    if buffer.starts_with(b"HTTP/1.1 200") { Ok(()) } else { bail!("an answer other than 200") }
}

/// Whether a whole answer is there: its head, and as much after it as the head says.
fn complete(bytes: &[u8]) -> bool {
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
    fn an_answer_is_complete_with_its_last_byte() {
        assert!(!complete(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab"));
        assert!(complete(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"));
        assert!(!complete(b"HTTP/1.1 200 OK\r\nContent-"));
    }
}
