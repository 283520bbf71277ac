// SPDX-License-Identifier: Apache-2.0
//! Notifications of changes to nftables, so that the owner of a table detects changes by others.
//!
//! A notification names the committing socket (`Change::port`, compare with `Nft::port`) and the kind of object. If
//! notifications were lost, [`Monitor::receive`] returns [`Error::Overrun`]: then anything may have changed.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::batch::{SUBSYSTEM, message};
use crate::decode;
use crate::error::Error;
use crate::socket::Socket;
use crate::table::{Family, Table};
use crate::wire::Message;

/// `NFNLGRP_NFTABLES` as a bit.
const GROUP: u32 = 1 << (7 - 1);

/// The kind of a changed object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObjectKind {
    /// A table.
    Table,
    /// A chain.
    Chain,
    /// A rule.
    Rule,
    /// A set or map.
    Set,
    /// Elements of a set or map.
    Elements,
    /// Another kind.
    Other,
}

/// A change of one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Netlink port of the socket that committed it.
    pub port: u32,
    /// Table of the object.
    pub table: Table,
    /// Kind of the object.
    pub object: ObjectKind,
    /// True if the object was deleted, false if it was added or changed.
    pub deleted: bool,
    /// Name of the set or map, of elements.
    pub set: Option<String>,
    /// Keys of the elements, in the layout of registers. Of ranges, the first keys.
    pub keys: Vec<Vec<u8>>,
}

/// A subscription to all changes in the network namespace in which it was opened.
#[derive(Debug)]
pub struct Monitor {
    socket: Socket,
}

impl Monitor {
    /// Subscribes in the network namespace of the calling thread.
    pub fn open() -> Result<Self, Error> {
        Ok(Self { socket: Socket::open(GROUP)? })
    }

    /// The changes of the next waiting datagram, without blocking. Returns `None` if none is waiting.
    pub fn receive(&mut self) -> Result<Option<Vec<Change>>, Error> {
        Ok(self.socket.receive()?.map(|messages| messages.filter_map(|message| change(&message)).collect()))
    }

    /// Waits for a datagram. Returns false on timeout.
    pub fn wait(&self, timeout: Duration) -> Result<bool, Error> {
        let timeout = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(ready) => Ok(ready > 0),
            Err(Errno::EINTR) => Ok(false),
            Err(errno) => Err(Error::Socket { call: "poll", errno }),
        }
    }
}

impl AsFd for Monitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Attribute 1 names the table in all messages except the notification of a new generation.
pub(crate) fn change(message: &Message<'_>) -> Option<Change> {
    let kind = message.kind.checked_sub(SUBSYSTEM).filter(|kind| *kind != message::NEWGEN)?;
    let object = match kind {
        message::NEWTABLE | message::DELTABLE => ObjectKind::Table,
        message::NEWCHAIN | message::DELCHAIN => ObjectKind::Chain,
        message::NEWRULE | message::DELRULE => ObjectKind::Rule,
        message::NEWSET | message::DELSET => ObjectKind::Set,
        message::NEWSETELEM | message::DELSETELEM => ObjectKind::Elements,
        _ => ObjectKind::Other,
    };
    let deleted = matches!(
        kind,
        message::DELTABLE | message::DELCHAIN | message::DELRULE | message::DELSET | message::DELSETELEM
    );
    let family = Family::from_wire(message.family()?)?;
    let of_elements = object == ObjectKind::Elements;
    Some(Change {
        port: message.port,
        table: Table::new(family, message.attrs().string(1)?),
        object,
        deleted,
        set: message.attrs().string(2).filter(|_| of_elements),
        keys: if of_elements { decode::keys(message) } else { Vec::new() },
    })
}
