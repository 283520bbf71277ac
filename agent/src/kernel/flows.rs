// SPDX-License-Identifier: Apache-2.0
//! Deletes conntrack entries of flows that the rules no longer lead where they lead: of UDP, those whose endpoint is gone and those
//! that went untranslated, which would live as long as their client sends; of TCP and SCTP, handshakes that went untranslated, so
//! that their repetition is translated.
//!
//! Established connections of TCP and SCTP stay, except those of clients outside source ranges that a changed table may have admitted.
//! Flows whose original destination is no frontend of this agent stay, too, and so do those in another conntrack zone, which the rules do
//! not see. A thread of its own does the work, so that a full conntrack
//! table delays no rule; [`super::flow_schedule`] says when.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use steerage_model::{Family, Protocol};
use steerage_nft::{Conntrack, ConntrackEntry, Ct, Error};
use steerage_process::duration;

use super::flow_schedule::FlowSchedule;
use crate::plan::Frontend;
use crate::rules::StaleFlows;

/// Passes work to the cleaning thread.
#[derive(Debug, Clone)]
pub struct FlowCleaner {
    work: Sender<StaleFlows>,
}

/// What the cleaning thread did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FlowWalk {
    /// It searched all of conntrack, of those families where something may be stale.
    Done(Vec<FamilyWalk>),
    /// It failed, and will search again.
    Failed,
}

/// A search of the flows of one family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FamilyWalk {
    /// The family.
    pub family: Family,
    /// The time that it took, with the deletions.
    pub took: Duration,
    /// The number of entries deleted.
    pub deleted: usize,
}

impl FlowCleaner {
    /// Starts the thread in the network namespace of the caller. `walked` hears of each search.
    pub fn start(walked: impl Fn(FlowWalk) + Send + 'static) -> Result<Self, Error> {
        let mut conntrack = Conntrack::open()?;
        let (work, queue) = channel();
        let serve = move || {
            let mut schedule = FlowSchedule::default();
            while wait(&queue, &mut schedule) {
                let (begun, stale) = (Instant::now(), schedule.take());
                let result = clean(&mut conntrack, &stale);
                let retry_in = schedule.walked(begun, Instant::now(), result.is_ok());
                match result {
                    Ok(families) => {
                        let count: usize = families.iter().map(|family| family.deleted).sum();
                        if count > 0 {
                            tracing::info!(count, "stale conntrack entries deleted");
                        }
                        walked(FlowWalk::Done(families));
                    }
                    Err(error) => {
                        let retry_in = retry_in.map(|delay| duration::rounded(delay).to_string());
                        tracing::warn!(
                            %error, retry_in, frontends = stale.udp.len(),
                            "stale conntrack entries not deleted; UDP clients of removed endpoints get no answer until then; retrying"
                        );
                        walked(FlowWalk::Failed);
                    }
                }
            }
        };
        std::thread::Builder::new()
            .name("conntrack".to_owned())
            .spawn(serve)
            .map_err(|_| Error::NoReply("start the conntrack thread".to_owned()))?;
        Ok(Self { work })
    }

    /// Deletes what is stale at these frontends.
    pub fn clean(&self, stale: StaleFlows) {
        if !stale.is_empty() {
            // Cannot fail: the thread ends only with the last sender.
            let _ = self.work.send(stale);
        }
    }
}

/// Collects work until some is due. False once all senders are gone.
fn wait(queue: &Receiver<StaleFlows>, schedule: &mut FlowSchedule) -> bool {
    loop {
        let now = Instant::now();
        let received = match schedule.due() {
            Some(due) if due <= now => queue.try_recv().map_err(|_| RecvTimeoutError::Timeout),
            Some(due) => queue.recv_timeout(due - now),
            None => queue.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match received {
            Ok(stale) => schedule.add(stale, Instant::now()),
            Err(RecvTimeoutError::Disconnected) => return false,
            Err(RecvTimeoutError::Timeout) if schedule.due().is_some_and(|due| due <= Instant::now()) => {
                return true;
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

/// Deletes stale flows; returns what it did by family.
fn clean(conntrack: &mut Conntrack, stale: &StaleFlows) -> Result<Vec<FamilyWalk>, Error> {
    let mut walks = Vec::new();
    for (model, family) in super::FAMILIES {
        let frontends = stale.udp.keys().chain(&stale.handshakes).chain(stale.sources.keys());
        if !{ frontends }.any(|frontend| frontend.family() == model) {
            continue;
        }
        let begun = Instant::now();
        let flows = match conntrack.entries(family, |flow| is_stale(flow, stale)) {
            Err(error) if model == Family::V6 && error.is_unsupported() => continue,
            flows => flows?,
        };
        let deleted = conntrack.delete(&flows)?;
        walks.push(FamilyWalk { family: model, took: begun.elapsed(), deleted });
    }
    Ok(walks)
}

fn is_stale(flow: &ConntrackEntry, stale: &StaleFlows) -> bool {
    let destination = flow.original.destination;
    let Some(protocol) = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp]
        .into_iter()
        .find(|protocol| protocol.number() == flow.original.protocol)
    else {
        return false;
    };
    let frontend = Frontend { addr: destination.ip(), protocol, port: destination.port() };
    if !flow.is_in_default_zone() {
        return false;
    }
    let client = flow.original.source.ip();
    if stale.sources.get(&frontend).is_some_and(|allowed| !allowed.iter().any(|net| net.contains(&client))) {
        return true;
    }
    match protocol {
        Protocol::Udp => {
            // There may be thousands, and as many flows.
            stale.udp.get(&frontend).is_some_and(|serving| serving.binary_search(&flow.reply.source).is_err())
        }
        Protocol::Tcp | Protocol::Sctp => {
            let is_translated = flow.status & Ct::DNAT != 0 || flow.reply.source != destination;
            let is_answered = flow.status & Ct::SEEN_REPLY != 0;
            !is_translated && !is_answered && stale.handshakes.contains(&frontend)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::Arc;

    use steerage_nft::Tuple;

    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn connections_from_outside_source_ranges_are_stale_where_these_are_given() {
        let frontend = Frontend { addr: at("192.0.2.1:80").ip(), protocol: Protocol::Tcp, port: 80 };
        let sources = [(frontend, Arc::from(["203.0.113.0/24".parse().expect("a network")]))];
        let stale = StaleFlows { sources: sources.into(), ..StaleFlows::default() };
        for (client, to, expected) in [
            ("203.0.113.9:1000", "192.0.2.1:80", false),
            ("198.51.100.9:1000", "192.0.2.1:80", true),
            ("198.51.100.9:1000", "192.0.2.1:81", false),
        ] {
            let tuple =
                |source, destination| Tuple { source: at(source), destination: at(destination), protocol: 6 };
            let status = Ct::DNAT | Ct::SEEN_REPLY;
            let flow = ConntrackEntry::new(tuple(client, to), tuple("10.0.0.2:53", client), status);
            assert_eq!(is_stale(&flow, &stale), expected, "{flow:?}");
            assert!(!is_stale(&flow, &StaleFlows::default()) && !is_stale(&flow.in_zone(7), &stale));
        }
    }

    #[test]
    fn only_what_the_rules_no_longer_lead_there_is_stale() {
        let frontend = |protocol| Frontend { addr: at("192.0.2.1:80").ip(), protocol, port: 80 };
        let stale = StaleFlows {
            udp: [(frontend(Protocol::Udp), Arc::from([at("10.0.0.1:53")]))].into(),
            handshakes: [frontend(Protocol::Tcp)].into(),
            ..StaleFlows::default()
        };
        let flow = |protocol: Protocol, to: &str, server: &str, status: u32| {
            let tuple = |source, destination| Tuple { source, destination, protocol: protocol.number() };
            let client = at("203.0.113.9:1000");
            ConntrackEntry::new(tuple(client, at(to)), tuple(at(server), client), status)
        };
        let (vip, dnat, answered) = ("192.0.2.1:80", Ct::DNAT, Ct::SEEN_REPLY);
        for (flow, expected) in [
            (flow(Protocol::Udp, vip, "10.0.0.1:53", dnat), false),
            (flow(Protocol::Udp, vip, "10.0.0.2:53", dnat), true),
            (flow(Protocol::Udp, vip, vip, 0), true),
            (flow(Protocol::Udp, "192.0.2.1:81", "10.0.0.2:53", dnat), false),
            (flow(Protocol::Tcp, vip, vip, 0), true),
            (flow(Protocol::Tcp, vip, vip, answered), false),
            (flow(Protocol::Tcp, vip, "10.0.0.2:53", dnat), false),
            (flow(Protocol::Tcp, "192.0.2.1:81", "192.0.2.1:81", 0), false),
            (flow(Protocol::Sctp, vip, vip, 0), false),
        ] {
            assert_eq!(is_stale(&flow, &stale), expected, "{flow:?}");
            assert!(!is_stale(&flow.in_zone(7), &stale), "the rules do not see other zones");
        }
    }
}
