// SPDX-License-Identifier: Apache-2.0
//! Continuous client traffic: new TCP connections, new UDP flows, and one long TCP connection.

use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use steerage_model::Protocol;

use crate::world::{At, World, ask_on, ask_udp, udp_socket};

/// Counters of the traffic.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    stop: AtomicBool,
    pub(crate) asked: AtomicU32,
    pub(crate) lost: AtomicU32,
}

/// Runs `work` while external clients send requests to `to`. Prints the number of requests. Fails if one got no response.
pub(crate) fn unharmed<T>(world: &World, to: SocketAddr, work: impl FnOnce(&Traffic) -> T) -> T {
    let traffic = Traffic::default();
    let done = with(world, to, &traffic, || work(&traffic));
    let (asked, lost) = (traffic.asked.into_inner(), traffic.lost.into_inner());
    println!("{asked} connections and flows, {lost} lost");
    assert!(asked > 100, "hardly any traffic: {asked}");
    assert_eq!(lost, 0);
    done
}

/// Runs `work` while external clients send requests to `to`. Ignores lost requests.
pub(crate) fn harmed<T>(world: &World, to: SocketAddr, work: impl FnOnce() -> T) -> T {
    with(world, to, &Traffic::default(), work)
}

fn with<T>(world: &World, to: SocketAddr, traffic: &Traffic, work: impl FnOnce() -> T) -> T {
    let one = |answered: bool| {
        traffic.asked.fetch_add(1, Ordering::Relaxed);
        traffic.lost.fetch_add(u32::from(!answered), Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(2));
    };
    let on = || !traffic.stop.load(Ordering::Relaxed);
    std::thread::scope(|scope| {
        let one = &one;
        scope.spawn(move || {
            while on() {
                one(world.ask(At::Client, to, Protocol::Tcp).is_ok());
            }
        });
        scope.spawn(move || {
            world.run(At::Client, || {
                while on() {
                    one(ask_udp(&udp_socket(to), to).is_ok());
                }
            });
        });
        scope.spawn(move || {
            world.run(At::Client, || {
                let mut stream = TcpStream::connect(to).expect("connect");
                while on() {
                    one(ask_on(&mut stream).is_ok_and(|answer| !answer.is_empty()));
                }
            });
        });
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        traffic.stop.store(true, Ordering::Relaxed);
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
