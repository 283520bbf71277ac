// SPDX-License-Identifier: Apache-2.0
//! Continuous client traffic: new TCP connections, new UDP flows, and one long TCP connection.

use std::net::{SocketAddr, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use steerage_model::Protocol;

use crate::world::{Answer, At, World, ask_on, ask_udp, udp_socket};

/// The traffic so far.
#[derive(Debug)]
pub(crate) struct Traffic {
    stop: AtomicBool,
    pub(crate) asked: AtomicU32,
    lost: Mutex<Vec<Loss>>,
    begun: Instant,
}

/// A request that got no response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Loss {
    /// When it was sent, since the traffic began.
    pub(crate) at: Duration,
    /// What it was, and how it was lost.
    how: String,
}

impl Traffic {
    fn new() -> Self {
        Self {
            stop: AtomicBool::default(),
            asked: AtomicU32::default(),
            lost: Mutex::default(),
            begun: Instant::now(),
        }
    }

    /// The time since the traffic began.
    pub(crate) fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Sends a request every 2 ms.
    fn repeat(&self, what: &str, mut ask: impl FnMut() -> Result<(), String>) {
        while !self.stop.load(Ordering::Relaxed) {
            let sent = Instant::now();
            self.asked.fetch_add(1, Ordering::Relaxed);
            if let Err(how) = ask() {
                let how = format!("{what}: {how} after {:.3?}", sent.elapsed());
                self.lost.lock().expect("lock").push(Loss { at: sent - self.begun, how });
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Runs `work` while external clients send requests to `to`. Prints the number of requests. Fails if one got no response.
pub(crate) fn unharmed<T>(world: &World, to: SocketAddr, work: impl FnOnce(&Traffic) -> T) -> T {
    let (done, lost) = losses(world, to, work);
    assert_eq!(lost, []);
    done
}

/// The same, but returns what got no response.
pub(crate) fn losses<T>(world: &World, to: SocketAddr, work: impl FnOnce(&Traffic) -> T) -> (T, Vec<Loss>) {
    let traffic = Traffic::new();
    let done = with(world, to, &traffic, || work(&traffic));
    let (asked, lost) = (traffic.asked.into_inner(), traffic.lost.into_inner().expect("lock"));
    println!("{asked} connections and flows, {} lost", lost.len());
    assert!(asked > 100, "hardly any traffic: {asked}");
    (done, lost)
}

/// Runs `work` while external clients send requests to `to`. Ignores lost requests.
pub(crate) fn harmed<T>(world: &World, to: SocketAddr, work: impl FnOnce() -> T) -> T {
    with(world, to, &Traffic::new(), work)
}

fn with<T>(world: &World, to: SocketAddr, traffic: &Traffic, work: impl FnOnce() -> T) -> T {
    let how = |answer: Answer| answer.map(drop).map_err(|lost| format!("{lost:?}"));
    std::thread::scope(|scope| {
        scope.spawn(move || traffic.repeat("connection", || how(world.ask(At::Client, to, Protocol::Tcp))));
        scope.spawn(move || {
            world.run(At::Client, || traffic.repeat("UDP flow", || how(ask_udp(&udp_socket(to), to))));
        });
        scope.spawn(move || {
            world.run(At::Client, || {
                let mut stream = TcpStream::connect(to).expect("connect");
                traffic.repeat("request on a connection", || match ask_on(&mut stream) {
                    Ok(answer) if answer.is_empty() => Err("closed".to_owned()),
                    Ok(_) => Ok(()),
                    Err(error) => Err(error.to_string()),
                });
            });
        });
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        traffic.stop.store(true, Ordering::Relaxed);
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
