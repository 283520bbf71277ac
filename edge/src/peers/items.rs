// SPDX-License-Identifier: Apache-2.0
//! What goes to the thread of `exchange`, and what it lets `client` tell the other hosts.

use std::sync::Arc;

use steerage_edge_dataplane::Exception;
use steerage_edge_dataplane::packet::V6;
use steerage_edge_dataplane::packet::maps::FlowKey;
use tokio::sync::mpsc::Sender;
use tokio::sync::oneshot;

use super::confirmed::SessionId;
use super::message::{MOST_ELEMENTS, Message};
use crate::link::mac::Mac;

/// What the thread is told.
#[derive(Debug)]
pub(crate) enum Command {
    /// Slots, targets, listeners or VIPs were written.
    TablesChanged,
    /// A host takes this host's exceptions.
    Connected(SessionId, Sender<Item>),
    Disconnected(SessionId),
    /// A host that was told asks for a complete list.
    WantsList(SessionId),
    /// A host that sends has connected.
    Began(SessionId, Mac),
    /// A host has sent a message; told when it is applied, and whether this host wants a complete list.
    Received(SessionId, Message, oneshot::Sender<bool>),
    /// The session of a host that sends has ended.
    Ended(SessionId),
    /// Scans now; each host that has all of it answers.
    Flush(Sender<()>),
}

/// What another host is told.
#[derive(Clone, Debug)]
pub(crate) enum Item {
    List(Arc<CompleteList>),
    Changes(Arc<Changes>),
    /// Answered once the other host has applied everything before.
    Barrier(Sender<()>),
}

/// All exceptions of the VIPs for which this host answers, and with routes of all others of which it sees packets.
#[derive(Debug, Default)]
pub(crate) struct CompleteList {
    /// Whether routers send this host packets.
    pub(crate) has_routes: bool,
    pub(crate) vips: Vec<V6>,
    pub(crate) exceptions: Vec<Exception>,
}

/// What differs from what was told before, and offers.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub(crate) gone: Vec<FlowKey<V6>>,
    pub(crate) exceptions: Vec<Exception>,
    pub(crate) offers: Vec<Exception>,
}

impl Changes {
    pub(crate) fn is_empty(&self) -> bool {
        self.gone.is_empty() && self.exceptions.is_empty() && self.offers.is_empty()
    }
}

impl Item {
    /// One after the other, because all of them take as much memory as the item.
    pub(crate) fn messages(&self) -> Box<dyn Iterator<Item = Message> + Send + '_> {
        match self {
            Self::List(list) => {
                let vips = list.vips.chunks(MOST_ELEMENTS).map(|vips| Message::Vips(vips.to_vec()));
                let exceptions = list.exceptions.chunks(MOST_ELEMENTS);
                let exceptions = exceptions.map(|exceptions| Message::Exceptions(exceptions.to_vec()));
                let begin = [Message::Begin].into_iter().chain(list.has_routes.then_some(Message::Routes));
                Box::new(begin.chain(vips).chain(exceptions).chain([Message::End]))
            }
            Self::Changes(changes) => {
                let gone = changes.gone.chunks(MOST_ELEMENTS).map(|keys| Message::Gone(keys.to_vec()));
                let exceptions = changes.exceptions.chunks(MOST_ELEMENTS);
                let exceptions = exceptions.map(|exceptions| Message::Exceptions(exceptions.to_vec()));
                let offers = changes.offers.chunks(MOST_ELEMENTS);
                let offers = offers.map(|offers| Message::Offers(offers.to_vec()));
                Box::new(gone.chain(exceptions).chain(offers))
            }
            Self::Barrier(_) => Box::new(std::iter::empty()),
        }
    }
}
