// SPDX-License-Identifier: Apache-2.0
//! Clients at work while something happens: each opens connections, holds others, and sends datagrams, at fixed rates.
//!
//! The suite and `steerage-bench edge-loss` start and end it. One thread per client, in the client's namespace. Nothing is tried twice; a held connection that ends is replaced.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Result, anyhow};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::asker::{Asker, Datagram};
use super::client::{Connection, Ending, Observed, Pace, Target, connect, hold};
use super::loss::Measurement;
use super::{Source, measure};

/// From the load's start to the event.
pub const BEFORE: Duration = Duration::from_secs(5);
/// From the event's end to the load's.
pub const AFTER: Duration = Duration::from_secs(10);
/// Time limit of an answer by datagram; then its socket is closed.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);
/// Pause of a client whose held connection has failed.
const AFTER_FAILURE: Duration = Duration::from_millis(100);
/// Idle connections are opened one after the other, as many in a second; at the end each is asked once more at the same pace.
const IDLE_PER_SECOND: u32 = 2000;

/// What one client does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Between two new connections.
    pub connect_every: Duration,
    /// Connections that it holds, and asks.
    pub active: u32,
    /// Connections that it holds, and asks once more at the end.
    pub idle: u32,
    /// Between two requests on an active connection, and between two datagrams of a socket.
    pub pause: Duration,
    /// Sockets that send one datagram after the other.
    pub askers: u32,
    /// Between two datagrams that each come from a socket of their own.
    pub datagram_every: Duration,
}

impl Default for Shape {
    /// What a machine with two cores has room for beside a cluster.
    fn default() -> Self {
        Self {
            connect_every: Duration::from_millis(10),
            active: 20,
            idle: 0,
            pause: Duration::from_millis(100),
            askers: 5,
            datagram_every: Duration::from_millis(20),
        }
    }
}

impl Shape {
    /// Time until its idle connections are open.
    pub fn opening_time(&self) -> Duration {
        idle_turn(self.idle)
    }
}

/// When it is the turn of the idle connection with this number.
fn idle_turn(number: u32) -> Duration {
    Duration::from_secs(1) * number / IDLE_PER_SECOND
}

/// A client, and where it connects to.
#[derive(Clone, Debug)]
pub struct Client {
    /// The machine.
    pub from: Source,
    /// The load balancer and its backends.
    pub to: Target,
    /// What the load balancer is, for messages and tables.
    pub what: String,
}

/// A running load.
pub struct Load {
    stop: watch::Sender<bool>,
    threads: Vec<(String, JoinHandle<Result<Measurement>>)>,
}

impl Load {
    /// Starts the clients.
    pub fn start(clients: Vec<Client>, shape: Shape) -> Self {
        let stop = watch::Sender::new(false);
        let threads = clients.into_iter().map(|client| {
            let stop = stop.subscribe();
            let what = client.what.clone();
            let servers = [client.to.address.ip(), client.to.datagrams.ip()];
            let work = move || {
                let from = Turns::new(client.from.of_family(servers[0]));
                measure(&client.from, &servers, async || drive(from, &client.to, shape, stop).await)
            };
            (what, thread::spawn(work))
        });
        let threads = threads.collect();
        Self { stop, threads }
    }

    /// Ends the load; what each client lived through.
    pub fn end(self) -> Result<Vec<(String, Measurement)>> {
        self.stop.send_replace(true);
        let ended: Vec<_> = self.threads.into_iter().map(|(what, thread)| (what, thread.join())).collect();
        ended
            .into_iter()
            .map(|(what, end)| Ok((what, end.map_err(|_| anyhow!("a client panicked"))??)))
            .collect()
    }
}

/// The addresses of a client, each in its turn.
struct Turns {
    addresses: Vec<IpAddr>,
    next: usize,
}

impl Turns {
    fn new(addresses: Vec<IpAddr>) -> Self {
        Self { addresses, next: 0 }
    }

    /// `None` if there is none.
    fn take(&mut self) -> Option<IpAddr> {
        let address = self.addresses.get(self.next % self.addresses.len().max(1)).copied();
        self.next += 1;
        address
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

async fn drive(mut from: Turns, to: &Target, shape: Shape, stop: watch::Receiver<bool>) -> Result<Observed> {
    let mut tasks = JoinSet::new();
    for index in 0..shape.active {
        let (from, to, stop) = (from.take(), to.clone(), stop.clone());
        tasks.spawn(async move {
            sleep(shape.pause * index / shape.active).await;
            keep(from, &to, Pace::Every(shape.pause), stop).await.map(Done::Connections)
        });
    }
    for index in 0..shape.idle {
        let (from, to, stop) = (from.take(), to.clone(), stop.clone());
        let turn = idle_turn(index);
        tasks.spawn(async move {
            sleep(turn).await;
            keep(from, &to, Pace::OnceAfterStop(turn), stop).await.map(Done::Connections)
        });
    }
    let server = to.datagrams;
    for index in 0..shape.askers {
        let (from, stop) = (from.take(), stop.clone());
        tasks.spawn(async move {
            sleep(shape.pause * index / shape.askers).await;
            keep_asking(from, server, shape.pause, stop).await.map(Done::Datagrams)
        });
    }
    let mut observed = Observed::default();
    let mut connections = interval(shape.connect_every);
    let mut datagrams = interval(shape.datagram_every);
    for ticks in [&mut connections, &mut datagrams] {
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    }
    while !*stop.borrow() {
        tokio::select! {
            _ = connections.tick() => {
                let (from, to) = (from.take(), to.clone());
                tasks.spawn(async move { connect(from, &to).await.map(Done::Connection) })
            }
            _ = datagrams.tick() => {
                let from = from.take();
                tasks.spawn(async move { ask_once(from, server).await.map(Done::Datagram) })
            }
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
async fn keep(
    from: Option<IpAddr>,
    to: &Target,
    pace: Pace,
    mut stop: watch::Receiver<bool>,
) -> Result<Vec<Connection>> {
    let mut connections = Vec::new();
    while !*stop.borrow() {
        let connection = hold(from, to, pace, &mut stop).await?;
        let failed = matches!(connection.ending, Ending::Unanswered(_));
        connections.push(connection);
        if failed {
            sleep(AFTER_FAILURE).await;
        }
    }
    Ok(connections)
}

/// An address of the server's family.
fn any(server: SocketAddr) -> IpAddr {
    if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
}

async fn ask_once(from: Option<IpAddr>, to: SocketAddr) -> Result<Datagram> {
    Asker::bind(from.unwrap_or(any(to))).await?.ask(to, ANSWER_WITHIN).await
}

/// One datagram after the other from the same socket.
async fn keep_asking(
    from: Option<IpAddr>,
    to: SocketAddr,
    pause: Duration,
    stop: watch::Receiver<bool>,
) -> Result<Vec<Datagram>> {
    let asker = Asker::bind(from.unwrap_or(any(to))).await?;
    let mut datagrams = Vec::new();
    while !*stop.borrow() {
        datagrams.push(asker.ask(to, ANSWER_WITHIN).await?);
        sleep(pause).await;
    }
    Ok(datagrams)
}
