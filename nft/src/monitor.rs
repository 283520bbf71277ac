// SPDX-License-Identifier: Apache-2.0
//! Notifications of changes to nftables, so that an owner of a table notices when others lay hands on it.
//!
//! A notification says who committed (`Change::port`, compare with `Nft::port`) and what kind of object changed. When
//! notifications were lost, [`Monitor::receive`] says so with [`Error::Overrun`]: then anything may have changed.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::batch::{SUBSYSTEM, message};
use crate::error::Error;
use crate::socket::Socket;
use crate::table::{Family, Table};
use crate::wire::Message;

/// `NFNLGRP_NFTABLES` as a bit.
const GROUP: u32 = 1 << (7 - 1);

/// What kind of object changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Object {
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

/// One change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The netlink port of who made it.
    pub port: u32,
    /// The table it was made in.
    pub table: Table,
    /// What changed.
    pub object: Object,
    /// Whether it was taken away, not added or changed.
    pub deleted: bool,
}

/// A subscription to all changes in the network namespace in which it was opened.
#[derive(Debug)]
pub struct Monitor {
    socket: Socket,
}

impl Monitor {
    /// Subscribes.
    pub fn open() -> Result<Self, Error> {
        Ok(Self { socket: Socket::open(GROUP)? })
    }

    /// The changes that wait, without blocking; `None` when there are none.
    pub fn receive(&mut self) -> Result<Option<Vec<Change>>, Error> {
        Ok(self.socket.receive()?.map(|messages| messages.filter_map(|message| change(&message)).collect()))
    }

    /// Waits until there is something to receive, or the time is over (`false`).
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

/// All messages of interest name their table in attribute 1; the notice of a new generation does not.
pub(crate) fn change(message: &Message<'_>) -> Option<Change> {
    let kind = message.kind.checked_sub(SUBSYSTEM).filter(|kind| *kind != message::NEWGEN)?;
    let object = match kind {
        message::NEWTABLE | message::DELTABLE => Object::Table,
        message::NEWCHAIN | message::DELCHAIN => Object::Chain,
        message::NEWRULE | message::DELRULE => Object::Rule,
        message::NEWSET | message::DELSET => Object::Set,
        message::NEWSETELEM | message::DELSETELEM => Object::Elements,
        _ => Object::Other,
    };
    let deleted = matches!(
        kind,
        message::DELTABLE | message::DELCHAIN | message::DELRULE | message::DELSET | message::DELSETELEM
    );
    let family = Family::from_wire(message.family()?)?;
    Some(Change {
        port: message.port,
        table: Table::new(family, message.attrs().string(1)?),
        object,
        deleted,
    })
}
