// SPDX-License-Identifier: Apache-2.0
//! Notifications of changes to nftables, so that the owner of a table detects changes by others.
//!
//! A change names the committing socket (`Change::port`, compare with `Nft::port`), and the object. After the changes of a transaction
//! comes its [`Commit`], with the process. If notifications were lost, [`Monitor::receive`] returns [`Error::Overrun`] once, before those
//! that came earlier, and more may get lost until none is waiting. Then anything may have changed, unless a
//! [`CommitLog`](crate::CommitLog) has all commits since.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::batch::{SUBSYSTEM, message};
use crate::decode;
use crate::error::Error;
use crate::info::BaseChainInfo;
use crate::socket::Socket;
use crate::table::{Family, Table};
use crate::wire::Message;

/// `NFNLGRP_NFTABLES`
const GROUP: u8 = 7;

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
    /// Name of the chain, or of the chain of a rule; of the set, or of the set of elements. `None` for a table.
    pub name: Option<String>,
    /// True if the object was deleted, false if it was added or changed.
    pub deleted: bool,
    /// Of a table that is there: whether no packet sees its base chains now.
    pub is_dormant: bool,
    /// Of a base chain that is there: what it is now.
    pub base: Option<BaseChainInfo>,
}

/// A process, as the kernel names it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process {
    /// Its number in the first PID namespace, that of the host. Of a program with threads, the number of the thread.
    pub id: u32,
    /// The first 15 bytes of its name.
    pub name: String,
}

/// The end of a transaction. The kernel does not tell the user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Commit {
    /// Netlink port of the socket that committed it.
    pub port: u32,
    /// The process of that socket.
    pub process: Option<Process>,
    /// The generation of the ruleset that the transaction led to.
    pub generation: Option<u32>,
}

/// What the kernel tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notification {
    /// An object was changed.
    Change(Change),
    /// A transaction has ended, of which all changes were told before.
    Commit(Commit),
}

/// A subscription to all changes in the network namespace in which it was opened.
#[derive(Debug)]
pub struct Monitor {
    socket: Socket,
}

impl Monitor {
    /// Subscribes in the network namespace of the calling thread.
    pub fn open() -> Result<Self, Error> {
        Ok(Self { socket: Socket::open(1 << (GROUP - 1))? })
    }

    /// Ends the subscription, and keeps the socket. To close a socket of netfilter is no way to end it in a hurry: the kernel first
    /// destroys what was deleted before, with all transactions locked out meanwhile.
    pub fn unsubscribe(&self) -> Result<(), Error> {
        self.socket.leave(GROUP)
    }

    /// What the next waiting datagram tells, without blocking. Returns `None` if none is waiting.
    pub fn receive(&mut self) -> Result<Option<Vec<Notification>>, Error> {
        let decode = |message| notification(&message);
        Ok(self.socket.receive()?.map(|messages| messages.filter_map(decode).collect()))
    }

    /// Waits for a datagram. Returns false on timeout.
    pub fn wait(&self, timeout: Duration) -> Result<bool, Error> {
        wait(self.socket.as_fd(), PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX))
    }
}

/// Waits until something can be read. Returns false on timeout.
pub(crate) fn wait(socket: BorrowedFd<'_>, timeout: PollTimeout) -> Result<bool, Error> {
    match poll(&mut [PollFd::new(socket, PollFlags::POLLIN)], timeout) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::EINTR) => Ok(false),
        Err(errno) => Err(Error::Socket { call: "poll", errno }),
    }
}

impl AsFd for Monitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Attribute 1 names the table in all messages except the notification of a new generation.
pub(crate) fn notification(message: &Message<'_>) -> Option<Notification> {
    let kind = message.kind.checked_sub(SUBSYSTEM)?;
    let attrs = message.attrs();
    if kind == message::NEWGEN {
        let process = attrs.u32(2).zip(attrs.string(3)).map(|(id, name)| Process { id, name });
        let commit = Commit { port: message.port, process, generation: attrs.u32(1) };
        return Some(Notification::Commit(commit));
    }
    let (object, name) = match kind {
        message::NEWTABLE | message::DELTABLE => (ObjectKind::Table, None),
        message::NEWCHAIN | message::DELCHAIN => (ObjectKind::Chain, attrs.string(3)),
        message::NEWRULE | message::DELRULE => (ObjectKind::Rule, attrs.string(2)),
        message::NEWSET | message::DELSET => (ObjectKind::Set, attrs.string(2)),
        message::NEWSETELEM | message::DELSETELEM => (ObjectKind::Elements, attrs.string(2)),
        _ => (ObjectKind::Other, attrs.string(2)),
    };
    let deleted = matches!(
        kind,
        message::DELTABLE
            | message::DELCHAIN
            | message::DELRULE
            | message::DELSET
            | message::DELSETELEM
            | message::DELOBJ
    );
    let family = Family::from_wire(message.family()?)?;
    let table = Table::new(family, attrs.string(1)?);
    let is_dormant = kind == message::NEWTABLE && decode::table(message).is_some_and(|info| info.is_dormant);
    let info = (kind == message::NEWCHAIN).then(|| decode::chain(message)).flatten();
    let base = info.and_then(|info| info.base);
    Some(Notification::Change(Change { port: message.port, table, object, name, deleted, is_dormant, base }))
}
