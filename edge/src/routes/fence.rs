// SPDX-License-Identifier: Apache-2.0
//! A second process of `steerage-edge` that removes the routes of VIPs when the first one does not renew them in time: after `kill -9`,
//! a crash or SIGSTOP nobody else would. `routes` starts it as the hidden command `route-fence`, and renews the lifetime through its
//! standard input.
//!
//! It is the lock of the table, too: a process that starts takes it over from the fence of a dead one, with the rest of the lifetime,
//! and leaves the table to another process that lives. It never adds a route.

use std::fs::File;
use std::io::{self, ErrorKind, Read as _, Write as _, stdin, stdout};
use std::os::fd::AsFd as _;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use nix::unistd::geteuid;
use steerage_process::{EXIT_FAILED, LogArgs};

use crate::link::route::Rtnetlink;
use crate::vips::boot_time;

/// The exit code where a process that lives has the table.
pub(crate) const TAKEN: u8 = 4;
/// How long a fence waits for the answer of its predecessor, and between two attempts.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);
const ATTEMPTS: u32 = 50;
const PAUSE: Duration = Duration::from_millis(20);
const RETRY: Duration = Duration::from_secs(1);

/// The end of the routes' lifetime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Expiry {
    /// Time since the kernel's start. `Duration::MAX`: never.
    pub(super) until: Duration,
    /// Whether another host can serve, so that the routes may go earlier.
    pub(super) may_withdraw: bool,
}

impl Expiry {
    /// Nothing is known.
    const NONE: [u8; Self::LENGTH] = [0; Self::LENGTH];
    pub(super) const LENGTH: usize = 9;

    pub(super) fn to_bytes(self) -> [u8; Self::LENGTH] {
        let mut bytes = Self::NONE;
        bytes[..8].copy_from_slice(&u64::try_from(self.until.as_nanos()).unwrap_or(u64::MAX).to_ne_bytes());
        bytes[8] = self.may_withdraw.into();
        bytes
    }

    pub(super) fn from_bytes(bytes: [u8; Self::LENGTH]) -> Option<Self> {
        let [until @ .., may_withdraw] = bytes;
        let until = match u64::from_ne_bytes(until) {
            u64::MAX => Duration::MAX,
            until => Duration::from_nanos(until),
        };
        (bytes != Self::NONE).then_some(Self { until, may_withdraw: may_withdraw != 0 })
    }
}

/// What the fence does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// `None`: without end.
    Wait(Option<Duration>),
    Withdraw,
    End,
}

/// `is_alive`: whether the first process exists; `is_terminated`: whether this one got SIGTERM. A supervisor sends it to all that is
/// left of a service, and waits for the end before it restarts the service.
fn next_step(expiry: Expiry, now: Duration, is_alive: bool, is_terminated: bool) -> Step {
    let left = expiry.until.checked_sub(now).filter(|left| !left.is_zero());
    let is_endless = expiry.until == Duration::MAX;
    match (left, is_alive) {
        (None, _) => Step::Withdraw,
        (Some(left), true) => Step::Wait((!is_endless).then_some(left)),
        (Some(_), false) if is_endless => Step::End,
        (Some(_), false) if is_terminated && expiry.may_withdraw => Step::Withdraw,
        (Some(_), false) if is_terminated => Step::End,
        (Some(left), false) => Step::Wait(Some(left)),
    }
}

/// Runs the fence of a table.
pub(crate) fn run(table: u32, log: &LogArgs) -> ExitCode {
    let logging = steerage_process::init_logging(log).map_err(Into::into);
    logging.and_then(|()| guard(table)).map_or_else(
        |error| {
            tracing::error!(
                table,
                error = format!("{error:#}"),
                "routes of VIPs not guarded; the first process tries again"
            );
            ExitCode::from(EXIT_FAILED)
        },
        ExitCode::from,
    )
}

/// Returns the exit code of the process.
fn guard(table: u32) -> anyhow::Result<u8> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    signals.thread_block().context("cannot block signals")?;
    let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC).context("cannot receive signals")?;
    let mut netlink = Rtnetlink::open()?;
    let (lock, inherited) = match take_over(table)? {
        Lock::Taken => return Ok(TAKEN),
        Lock::Own { listener, inherited } => (listener, inherited),
    };
    // Unbuffered: `poll` does not see what a buffer holds.
    let mut input =
        File::from(stdin().as_fd().try_clone_to_owned().context("cannot read the standard input")?);
    let mut out = stdout();
    out.write_all(&inherited.map_or(Expiry::NONE, Expiry::to_bytes)).and_then(|()| out.flush())?;

    // Before the first renewal there is nothing to guard but what a predecessor has guarded.
    let mut expiry = inherited.unwrap_or(Expiry { until: Duration::MAX, may_withdraw: false });
    let (mut is_alive, mut is_terminated) = (true, false);
    loop {
        let timeout = match next_step(expiry, boot_time(), is_alive, is_terminated) {
            Step::End => return Ok(0),
            Step::Withdraw => {
                match withdraw(&mut netlink, table) {
                    Ok(routes) => {
                        tracing::warn!(
                            table,
                            routes,
                            "routes of VIPs removed: steerage-edge has not renewed them"
                        );
                    }
                    Err(error) => {
                        let error = format!("{error:#}");
                        tracing::error!(table, error, "routes of VIPs not removed; retrying");
                        std::thread::sleep(RETRY);
                        continue;
                    }
                }
                if !is_alive {
                    return Ok(0);
                }
                expiry.until = Duration::MAX;
                continue;
            }
            // One millisecond more: the kernel rounds down.
            Step::Wait(left) => left.map_or(PollTimeout::NONE, |left| {
                PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
            }),
        };
        let mut polled = vec![PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
        polled.extend(lock.as_ref().map(|lock| PollFd::new(lock.as_fd(), PollFlags::POLLIN)));
        if is_alive {
            polled.push(PollFd::new(input.as_fd(), PollFlags::POLLIN));
        }
        match poll(&mut polled, timeout) {
            Err(Errno::EINTR) => continue,
            result => result.context("cannot wait")?,
        };
        let is_ready = |fd: &PollFd<'_>| fd.revents().is_some_and(|events| !events.is_empty());
        let has_signal = is_ready(&polled[0]);
        let has_input = is_alive && polled.last().is_some_and(is_ready);
        let has_successor = lock.is_some() && is_ready(&polled[1]);
        if has_signal {
            is_terminated |= signals.read_signal().context("cannot read a signal")?.is_some();
        }
        if has_input {
            match read_expiry(&mut input) {
                Some(renewed) => expiry = renewed,
                None => is_alive = false,
            }
        } else if has_successor && lock.as_ref().is_some_and(|lock| answer(lock, is_alive, expiry)) {
            // Only without input: a process that has just died is known to be dead.
            return Ok(0);
        }
    }
}

/// `None`: the first process is gone.
fn read_expiry(input: &mut File) -> Option<Expiry> {
    let mut bytes = Expiry::NONE;
    input.read_exact(&mut bytes).ok()?;
    Expiry::from_bytes(bytes)
}

/// Removes the edge's routes from the table; returns their number.
pub(super) fn withdraw(netlink: &mut Rtnetlink, table: u32) -> anyhow::Result<usize> {
    let mut count = 0;
    for (of, vip) in netlink.exported()? {
        if of == table {
            netlink.withdraw(table, vip)?;
            count += 1;
        }
    }
    Ok(count)
}

enum Lock {
    /// This fence has the table; without a listener where a foreign program has the name.
    Own { listener: Option<UnixListener>, inherited: Option<Expiry> },
    /// That of another process has.
    Taken,
}

/// Takes the table over from a fence whose process is dead.
fn take_over(table: u32) -> anyhow::Result<Lock> {
    // Abstract names belong to the network namespace, as routes do.
    let name = SocketAddr::from_abstract_name(format!("steerage-edge/route-fence/{table}"))?;
    let mut inherited = None;
    for _ in 0..ATTEMPTS {
        match UnixListener::bind_addr(&name) {
            Ok(listener) => return Ok(Lock::Own { listener: Some(listener), inherited }),
            Err(error) if error.kind() == ErrorKind::AddrInUse => {}
            Err(error) => return Err(error).context("cannot open the socket of the fence"),
        }
        if let Ok(mut other) = UnixStream::connect_addr(&name) {
            if !is_own(&other) {
                return Ok(Lock::Own { listener: None, inherited });
            }
            let mut bytes = Expiry::NONE;
            other.set_read_timeout(Some(ANSWER_LIMIT))?;
            if other.read_exact(&mut bytes).is_err() {
                return Ok(Lock::Taken);
            }
            inherited = Expiry::from_bytes(bytes);
        }
        std::thread::sleep(PAUSE);
    }
    Ok(Lock::Taken)
}

/// Answers a successor; whether it has the table now.
fn answer(lock: &UnixListener, is_alive: bool, expiry: Expiry) -> bool {
    let hand_over = || -> io::Result<bool> {
        let (mut successor, _) = lock.accept()?;
        if is_alive || !is_own(&successor) {
            return Ok(false);
        }
        successor.write_all(&expiry.to_bytes())?;
        Ok(true)
    };
    hand_over().unwrap_or(false)
}

/// Whether the other side is a process of this user.
fn is_own(stream: &UnixStream) -> bool {
    getsockopt(stream, PeerCredentials).is_ok_and(|peer| peer.uid() == geteuid().as_raw())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expiry_is_read_as_written() {
        for until in [Duration::from_nanos(1), Duration::from_secs(1 << 30), Duration::MAX] {
            for may_withdraw in [false, true] {
                let expiry = Expiry { until, may_withdraw };
                assert_eq!(Expiry::from_bytes(expiry.to_bytes()), Some(expiry));
            }
        }
        assert_eq!(Expiry::from_bytes(Expiry::NONE), None);
    }

    #[test]
    fn routes_go_when_their_lifetime_ends() {
        let second = Duration::from_secs;
        let at = |until, may_withdraw| Expiry { until, may_withdraw };
        let (limited, long, endless) =
            (at(second(106), true), at(second(160), false), at(Duration::MAX, true));
        for (expiry, is_alive, is_terminated, step) in [
            (limited, true, false, Step::Wait(Some(second(6)))),
            (endless, true, false, Step::Wait(None)),
            // The first process decides at its own SIGTERM.
            (limited, true, true, Step::Wait(Some(second(6)))),
            (limited, false, false, Step::Wait(Some(second(6)))),
            (long, false, false, Step::Wait(Some(second(60)))),
            (endless, false, false, Step::End),
            (limited, false, true, Step::Withdraw),
            (long, false, true, Step::End),
            (endless, false, true, Step::End),
            // A process that is stopped, and one that is dead.
            (at(second(100), true), true, false, Step::Withdraw),
            (at(second(99), false), false, false, Step::Withdraw),
        ] {
            let found = next_step(expiry, second(100), is_alive, is_terminated);
            assert_eq!(found, step, "{expiry:?}, {is_alive}, {is_terminated}");
        }
    }
}
