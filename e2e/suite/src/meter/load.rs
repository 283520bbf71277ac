// SPDX-License-Identifier: Apache-2.0
//! Clients at work while something happens: each opens connections, holds others, and sends datagrams, at fixed rates.
//!
//! One thread per client, in the client's namespace. Nothing is tried twice; a held connection that ends is replaced.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Result, anyhow};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::asker::{Asker, Datagram};
use super::client::{Connection, Ending, Observed, Target, connect, hold};
use super::loss::Measurement;
use super::measure;
use crate::cluster::Host;

/// Between two new connections.
const CONNECT_EVERY: Duration = Duration::from_millis(10);
/// Connections that a client holds.
const HELD: u32 = 20;
/// Between two requests on a held connection, and between two datagrams of a socket.
const PAUSE: Duration = Duration::from_millis(100);
/// Between two datagrams that each come from a socket of their own.
const DATAGRAM_EVERY: Duration = Duration::from_millis(20);
/// Sockets that send one datagram after the other.
pub const ASKERS: u32 = 5;
/// Time limit of an answer by datagram; then its socket is closed.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);
/// From the load's start to the event.
pub const BEFORE: Duration = Duration::from_secs(5);
/// From the event's end to the load's.
pub const AFTER: Duration = Duration::from_secs(10);

/// A client, and where it connects to.
#[derive(Clone, Debug)]
pub struct Client {
    /// The machine.
    pub host: Host,
    /// The load balancer and its backends.
    pub to: Target,
    /// What the load balancer is, for messages and tables.
    pub what: String,
}

/// A running load.
pub struct Load {
    stop: Arc<AtomicBool>,
    threads: Vec<(String, JoinHandle<Result<Measurement>>)>,
}

impl Load {
    /// Starts the clients.
    pub fn start(clients: Vec<Client>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let threads = clients.into_iter().map(|client| {
            let stop = Arc::clone(&stop);
            let what = client.what.clone();
            let server = client.to.address;
            let servers = [server.ip(), client.to.datagrams.ip()];
            let from = if server.is_ipv4() { client.host.ipv4.into() } else { client.host.ipv6.into() };
            let work = move || measure(&client.host, &servers, async || drive(from, &client.to, &stop).await);
            (what, thread::spawn(work))
        });
        let threads = threads.collect();
        Self { stop, threads }
    }

    /// Ends the load; what each client lived through.
    pub fn end(self) -> Result<Vec<(String, Measurement)>> {
        self.stop.store(true, Ordering::Relaxed);
        let ended: Vec<_> = self.threads.into_iter().map(|(what, thread)| (what, thread.join())).collect();
        ended
            .into_iter()
            .map(|(what, end)| Ok((what, end.map_err(|_| anyhow!("a client panicked"))??)))
            .collect()
    }
}

enum Done {
    Connection(Connection),
    Connections(Vec<Connection>),
    Datagram(Datagram),
    Datagrams(Vec<Datagram>),
}

impl Observed {
    fn add(&mut self, done: Result<Result<Done>, JoinError>) -> Result<()> {
        match done.map_err(|_| anyhow!("a client's task panicked"))?? {
            Done::Connection(one) => self.connections.push(one),
            Done::Connections(all) => self.connections.extend(all),
            Done::Datagram(one) => self.datagrams.push(one),
            Done::Datagrams(all) => self.datagrams.extend(all),
        }
        Ok(())
    }
}

async fn drive(from: IpAddr, to: &Target, stop: &Arc<AtomicBool>) -> Result<Observed> {
    let mut tasks = JoinSet::new();
    for index in 0..HELD {
        let (to, stop) = (to.clone(), Arc::clone(stop));
        tasks.spawn(async move {
            sleep(PAUSE * index / HELD).await;
            keep(&to, &stop).await.map(Done::Connections)
        });
    }
    let server = to.datagrams;
    for index in 0..ASKERS {
        let stop = Arc::clone(stop);
        tasks.spawn(async move {
            sleep(PAUSE * index / ASKERS).await;
            keep_asking(from, server, &stop).await.map(Done::Datagrams)
        });
    }
    let mut observed = Observed::default();
    let mut connections = interval(CONNECT_EVERY);
    let mut datagrams = interval(DATAGRAM_EVERY);
    for ticks in [&mut connections, &mut datagrams] {
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    }
    while !stop.load(Ordering::Relaxed) {
        tokio::select! {
            _ = connections.tick() => {
                let to = to.clone();
                tasks.spawn(async move { connect(&to).await.map(Done::Connection) })
            }
            _ = datagrams.tick() => tasks.spawn(async move { ask_once(from, server).await.map(Done::Datagram) }),
        };
        while let Some(done) = tasks.try_join_next() {
            observed.add(done)?;
        }
    }
    while let Some(done) = tasks.join_next().await {
        observed.add(done)?;
    }
    Ok(observed)
}

/// One held connection, and after its end the next.
async fn keep(to: &Target, stop: &AtomicBool) -> Result<Vec<Connection>> {
    let mut connections = Vec::new();
    let stopped = || stop.load(Ordering::Relaxed);
    while !stopped() {
        let connection = hold(to, PAUSE, &stopped).await?;
        let failed = matches!(connection.ending, Ending::Unanswered(_));
        connections.push(connection);
        if failed {
            sleep(PAUSE).await;
        }
    }
    Ok(connections)
}

async fn ask_once(from: IpAddr, to: SocketAddr) -> Result<Datagram> {
    Asker::bind(from).await?.ask(to, ANSWER_WITHIN).await
}

/// One datagram after the other from the same socket.
async fn keep_asking(from: IpAddr, to: SocketAddr, stop: &AtomicBool) -> Result<Vec<Datagram>> {
    let asker = Asker::bind(from).await?;
    let mut datagrams = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        datagrams.push(asker.ask(to, ANSWER_WITHIN).await?);
        sleep(PAUSE).await;
    }
    Ok(datagrams)
}
