// SPDX-License-Identifier: Apache-2.0
//! All events, and what each may lose. `run` makes them happen; they act on [`World`] alone and measure nothing.

use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;
use nix::sys::signal::Signal::{SIGCONT, SIGKILL, SIGSTOP, SIGTERM};
use steerage_meter::loss::{LossKind, Measurement};

use super::service::{Service, Steering};
use super::world::{NODES, World};
use crate::edge_bed::{Host, node_netns};

/// Time for which a host's process is away.
const AWAY: Duration = Duration::from_secs(2);
/// From the last heartbeat of a host until others answer for its VIPs, with the default interval of heartbeats, and what a takeover
/// may take.
const HOST_DETECTION: Duration = Duration::from_millis(600 + 50 + 200);
/// From the last answer of a node until it is unhealthy: after an interval two probes fail, each for lack of an answer within its
/// timeout, and the table is written.
const NODE_DETECTION: Duration = Duration::from_millis(500 + 2 * 1000 + 100);

/// From the first transmission of a packet to its loss.
const ON_ITS_WAY: Duration = Duration::from_millis(50);
/// The least time until a packet is retransmitted.
const RETRANSMISSION: Duration = Duration::from_millis(200);

/// What an event may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Promise {
    /// Not one packet. What is only slow may have waited for a core.
    NothingLost,
    /// What is sent within this time, and no connection. Of data that was retransmitted the first time is not known, so it may come at
    /// any time.
    OnlyWithin(Duration),
    /// New connections and datagrams that are sent within this time, and connections to what is gone.
    NewOnlyWithin(Duration),
}

impl Promise {
    /// Whether it was kept, for an event at this time.
    pub(super) fn is_kept(self, measured: &Measurement, event: Duration) -> bool {
        use LossKind::{
            AnswerRetransmitted, BytesMissing, DataRetransmitted, DatagramUnanswered, SynRetransmitted,
            SynUnanswered, UnexpectedReset,
        };
        // What was on its way when it happened was sent a moment before.
        let begins = |at: Duration, limit| at + ON_ITS_WAY >= event && at <= event + limit;
        // Of data the time is that of the last retransmission, whose pauses double.
        let again = |at: Duration, limit: Duration| begins(at, limit * 3 + RETRANSMISSION);
        let is_allowed = |kind, at| match (self, kind) {
            (Self::OnlyWithin(limit) | Self::NewOnlyWithin(limit), SynRetransmitted | DatagramUnanswered) => {
                begins(at, limit)
            }
            (Self::OnlyWithin(limit), DataRetransmitted | AnswerRetransmitted) => again(at, limit),
            (Self::NewOnlyWithin(limit), SynUnanswered) => begins(at, limit),
            // Of connections to the node, while it is away and after it has come back.
            (
                Self::NewOnlyWithin(_),
                DataRetransmitted | AnswerRetransmitted | BytesMissing | UnexpectedReset,
            ) => at + ON_ITS_WAY >= event,
            _ => false,
        };
        let loses_connections = matches!(self, Self::NewOnlyWithin(_));
        (loses_connections || measured.failed.is_empty())
            && measured.losses.iter().all(|loss| loss.kind.is_slow() || is_allowed(loss.kind, loss.at))
    }

    /// Below the table.
    pub(super) fn text(self) -> String {
        match self {
            Self::NothingLost => "nothing".to_owned(),
            Self::OnlyWithin(limit) => format!("what is sent within {} ms", limit.as_millis()),
            Self::NewOnlyWithin(limit) => {
                format!("new flows within {} ms, connections to the node", limit.as_millis())
            }
        }
    }
}

/// Something that happens.
pub(super) struct Event {
    pub(super) name: &'static str,
    pub(super) promise: Promise,
    /// Nodes with an endpoint at the beginning.
    pub(super) nodes: u8,
    /// Edge hosts at the beginning.
    pub(super) hosts: u8,
    /// Whether it can happen again and again.
    pub(super) repeats: bool,
    pub(super) happen: fn(&mut World) -> Result<()>,
}

impl Event {
    const fn new(name: &'static str, happen: fn(&mut World) -> Result<()>) -> Self {
        Self { name, promise: Promise::NothingLost, nodes: 3, hosts: 2, repeats: true, happen }
    }
}

/// All events. Those that change the Service change it back.
pub(super) const EVENTS: [Event; 19] = [
    Event::new("target added and removed", |world| {
        world.change(|service| service.add(NODES))?;
        world.change(Service::remove)
    }),
    Event {
        nodes: 8,
        ..Event::new("from 8 to 9 targets and back", |world| {
            world.change(|service| service.add(NODES))?;
            world.change(Service::remove)
        })
    },
    Event::new("weight of a target tripled and back", |world| {
        world.change(|service| service.nodes[0].1 = 3)?;
        world.change(|service| service.nodes[0].1 = 1)
    }),
    Event::new("policy Cluster and back", |world| {
        world.change(|service| service.steering = Steering::AllNodes)?;
        world.change(|service| service.steering = Steering::List)
    }),
    Event::new("steering health-check and back", |world| {
        world.change(|service| service.steering = Steering::OwnCheck)?;
        world.change(|service| service.steering = Steering::List)
    }),
    Event::new("interval of checks halved and back", |world| {
        world.change(|service| service.interval_milliseconds = 250)?;
        world.change(|service| service.interval_milliseconds = 500)
    }),
    Event::new("rolling update, api", |world| {
        for _ in 0..world.service.nodes.len() {
            world.change(|service| service.add(NODES))?;
            world.change(Service::remove)?;
        }
        Ok(())
    }),
    Event::new("rolling update, health-check", |world| {
        world.change(|service| service.steering = Steering::OwnCheck)?;
        for _ in 0..world.service.nodes.len() {
            world.change(|service| service.add(NODES))?;
            world.change(Service::remove)?;
        }
        world.change(|service| service.steering = Steering::List)
    }),
    Event::new("scaled to one node and back", |world| {
        world.change(|service| service.nodes.truncate(1))?;
        world.change(|service| {
            service.add(NODES);
            service.add(NODES);
        })
    }),
    Event::new("node drains, and drains no longer", |world| {
        world.change(|service| service.draining = service.endpoints().first().copied())?;
        world.change(|service| service.draining = None)
    }),
    Event::new("edge ends (SIGTERM) and starts, each host in turn", |world| {
        each_of_two(world, |world, host| {
            world.hosts.end(host, SIGTERM)?;
            sleep(AWAY);
            world.start(host)
        })
    }),
    Event::new("edge killed (-9) and started, each host in turn", |world| {
        each_of_two(world, |world, host| {
            world.hosts.end(host, SIGKILL)?;
            sleep(AWAY);
            world.start(host)
        })
    }),
    Event::new("edge stopped (SIGSTOP) and continued, each host in turn", |world| {
        each_of_two(world, |world, host| {
            world.hosts.signal(host, SIGSTOP)?;
            sleep(AWAY);
            world.hosts.signal(host, SIGCONT)?;
            sleep(AWAY);
            Ok(())
        })
    }),
    Event::new("edge replaced by another program and back, each host in turn", |world| {
        for program in [world.programs.next.clone(), world.programs.edge.clone()] {
            each_of_two(world, |world, host| {
                world.hosts.end(host, SIGTERM)?;
                world.hosts.start(host, &program)
            })?;
        }
        Ok(())
    }),
    Event { repeats: false, ..Event::new("third host joins", |world| world.start(Host(3))) },
    Event {
        hosts: 3,
        repeats: false,
        ..Event::new("third host leaves (SIGTERM)", |world| world.hosts.end(Host(3), SIGTERM))
    },
    Event {
        hosts: 3,
        repeats: false,
        ..Event::new("third host killed (-9) for good", |world| {
            world.hosts.end(Host(3), SIGKILL)?;
            sleep(AWAY);
            Ok(())
        })
    },
    Event {
        promise: Promise::OnlyWithin(HOST_DETECTION),
        repeats: false,
        ..Event::new("host's power fails", |world| {
            let host = world.serving_host()?;
            world.bed.set_connected(&host.netns(), false)?;
            world.hosts.end(host, SIGKILL)?;
            sleep(AWAY);
            world.hosts.clean_up(host, &world.programs.edge)?;
            world.bed.set_connected(&host.netns(), true)?;
            world.start(host)
        })
    },
    Event {
        promise: Promise::NewOnlyWithin(NODE_DETECTION),
        nodes: 4,
        repeats: false,
        ..Event::new("node's power fails", |world| {
            let node = node_netns(0);
            world.bed.set_connected(&node, false)?;
            sleep(AWAY * 2);
            // The controller takes it out.
            world.change(Service::remove)?;
            world.bed.set_connected(&node, true)
        })
    },
];

fn each_of_two(world: &mut World, happen: impl Fn(&mut World, Host) -> Result<()>) -> Result<()> {
    for host in [Host(1), Host(2)] {
        happen(world, host)?;
        sleep(AWAY);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use steerage_meter::loss::Loss;

    use super::*;

    #[test]
    fn events_have_names_of_their_own() {
        let names: BTreeSet<_> = EVENTS.iter().map(|event| event.name).collect();
        assert_eq!(names.len(), EVENTS.len());
    }

    #[test]
    fn promises_are_about_kinds_and_times() {
        let second = Duration::from_secs;
        let measured = |kind, at| Measurement {
            losses: vec![Loss { kind, at, client: ([10, 0, 0, 1], 1).into() }],
            ..Measurement::default()
        };
        let syn = |at| measured(LossKind::SynRetransmitted, at);
        assert!(Promise::NothingLost.is_kept(&Measurement::default(), second(10)));
        assert!(Promise::NothingLost.is_kept(&measured(LossKind::SlowAnswer, second(10)), second(10)));
        assert!(!Promise::NothingLost.is_kept(&syn(second(10)), second(10)));
        for promise in [Promise::OnlyWithin(second(1)), Promise::NewOnlyWithin(second(1))] {
            assert!(promise.is_kept(&syn(second(11)), second(10)));
            assert!(!promise.is_kept(&syn(second(12)), second(10)));
            assert!(!promise.is_kept(&syn(second(9)), second(10)), "that was before");
            assert!(promise.is_kept(&measured(LossKind::DataRetransmitted, second(12)), second(10)));
            assert!(!promise.is_kept(&measured(LossKind::WrongSource, second(10)), second(10)));
        }
        let resent = |at| measured(LossKind::DataRetransmitted, at);
        assert!(!Promise::OnlyWithin(second(1)).is_kept(&resent(second(14)), second(10)));
        assert!(Promise::NewOnlyWithin(second(1)).is_kept(&resent(second(14)), second(10)));
        let reset = measured(LossKind::UnexpectedReset, second(10));
        assert!(!Promise::OnlyWithin(second(1)).is_kept(&reset, second(10)));
    }
}
