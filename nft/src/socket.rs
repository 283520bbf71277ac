// SPDX-License-Identifier: Apache-2.0
//! A netlink socket to netfilter: sends requests, matches replies to them and decodes errors.
//!
//! The kernel handles a netfilter request inside `sendmsg`. When that returns, all replies are in the receive buffer, so
//! nothing here blocks. `Nft`, `Monitor` and `Conntrack` have a socket each.

use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, sendmsg, setsockopt,
    socket, sockopt,
};

use crate::error::{Error, KernelError};
use crate::wire::{Attrs, Message, Messages, Writer, flag, ne_u32};

/// Control messages of netlink (linux/netlink.h).
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// Attributes of the extended acknowledgement.
const NLMSGERR_ATTR_MSG: u16 = 1;
const NLMSGERR_ATTR_OFFS: u16 = 2;
/// Length of `struct nlmsgerr` without the request's payload: the error and the request's header.
const NLMSGERR: usize = 20;

/// Initial buffer sizes. The kernel doubles them to account for its overhead.
const SEND_BUFFER: usize = 1 << 20;
const RECEIVE_BUFFER: usize = 8 << 20;
/// Size of the receive buffer in memory. A dump arrives in datagrams of at most 32 KiB, a notification in one page.
const DATAGRAM: usize = 1 << 17;

/// Sets an option of level `SOL_NETLINK`, for which `nix` has no names.
#[allow(unsafe_code, reason = "setsockopt reads the integer behind the pointer and keeps nothing")]
fn set_option(fd: &OwnedFd, option: libc::c_int, value: libc::c_int) -> Result<(), Error> {
    let length = libc::socklen_t::try_from(size_of_val(&value)).unwrap_or_default();
    // SAFETY: the descriptor is open, and `value` outlives the call and is `length` bytes long.
    let done = unsafe {
        libc::setsockopt(fd.as_raw_fd(), libc::SOL_NETLINK, option, std::ptr::from_ref(&value).cast(), length)
    };
    Errno::result(done).map_err(failed("setsockopt")).map(drop)
}

/// A bound netlink socket of protocol `NETLINK_NETFILTER`, in the network namespace of the thread that opened it.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    sequence: u32,
    send_buffer: usize,
    datagram: Vec<u8>,
}

impl Socket {
    /// Opens a socket and joins the multicast groups of the bit mask.
    pub(crate) fn open(groups: u32) -> Result<Self, Error> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkNetFilter)
            .map_err(failed("socket"))?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, groups)).map_err(failed("bind"))?;
        set_option(&fd, libc::NETLINK_CAP_ACK, 1)?;
        set_option(&fd, libc::NETLINK_EXT_ACK, 1)?;
        setsockopt(&fd, sockopt::RcvBufForce, &RECEIVE_BUFFER).map_err(failed("setsockopt"))?;
        setsockopt(&fd, sockopt::SndBufForce, &SEND_BUFFER).map_err(failed("setsockopt"))?;
        Ok(Self { fd, sequence: 0, send_buffer: SEND_BUFFER, datagram: vec![0; DATAGRAM] })
    }

    /// Leaves a multicast group, by its number.
    pub(crate) fn leave(&self, group: u8) -> Result<(), Error> {
        set_option(&self.fd, libc::NETLINK_DROP_MEMBERSHIP, group.into())
    }

    /// The netlink port of this socket, which notifications carry as the author of a change.
    pub(crate) fn port(&self) -> Result<u32, Error> {
        let address: NetlinkAddr =
            nix::sys::socket::getsockname(self.fd.as_raw_fd()).map_err(failed("getsockname"))?;
        Ok(address.pid())
    }

    /// Reserves `count` sequence numbers and returns the first. Never 0, which the kernel uses for notifications.
    pub(crate) fn reserve_sequences(&mut self, count: u32) -> u32 {
        let first = match self.sequence.checked_add(count.max(1)) {
            Some(_) => self.sequence + 1,
            None => 1,
        };
        self.sequence = first + count.max(1) - 1;
        first
    }

    /// Sends the parts as one datagram. Grows the send buffer if they do not fit.
    pub(crate) fn send(&mut self, parts: &[&[u8]]) -> Result<(), Error> {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        if length + 4096 > self.send_buffer {
            setsockopt(&self.fd, sockopt::SndBufForce, &(length + 4096)).map_err(failed("setsockopt"))?;
            self.send_buffer = length + 4096;
        }
        let parts: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let kernel = NetlinkAddr::new(0, 0);
        retry(|| sendmsg(self.fd.as_raw_fd(), &parts, &[], MsgFlags::empty(), Some(&kernel)))
            .map_err(failed("sendmsg"))?;
        Ok(())
    }

    /// Receives one datagram. Returns `None` if none is waiting.
    pub(crate) fn receive(&mut self) -> Result<Option<Messages<'_>>, Error> {
        let flags = MsgFlags::MSG_TRUNC;
        match retry(|| recv(self.fd.as_raw_fd(), &mut self.datagram, flags)) {
            Ok(length) if length > self.datagram.len() => Err(Error::Overrun),
            Ok(length) => Ok(Some(Messages(&self.datagram[..length]))),
            Err(Errno::EAGAIN) => Ok(None),
            Err(Errno::ENOBUFS) => Err(Error::Overrun),
            Err(errno) => Err(Error::Socket { call: "recv", errno }),
        }
    }

    /// Sends a request with this sequence number and passes every reply to `visit`, until the end of the dump or the
    /// acknowledgement. Returns false if the dump was interrupted and may be inconsistent.
    pub(crate) fn exchange(
        &mut self,
        request: &Writer,
        sequence: u32,
        operation: &str,
        mut visit: impl FnMut(&Message<'_>),
    ) -> Result<bool, Error> {
        self.discard_pending()?;
        if request.overflowed() {
            return Err(Error::TooLong);
        }
        self.send(&[request.bytes()])?;
        let mut complete = true;
        loop {
            let Some(messages) = self.receive()? else {
                return Err(Error::NoReply(operation.to_owned()));
            };
            for message in messages.filter(|message| message.sequence == sequence) {
                complete &= message.flags & flag::DUMP_INTERRUPTED == 0;
                match classify(&message, operation) {
                    Reply::Data => visit(&message),
                    Reply::Done => return Ok(complete),
                    Reply::Error(error) if error.errno == Errno::EINTR => return Ok(false),
                    Reply::Error(error) => return Err(error.into()),
                }
            }
        }
    }

    /// Discards replies to an earlier request that failed.
    pub(crate) fn discard_pending(&mut self) -> Result<(), Error> {
        loop {
            match self.receive() {
                Ok(None) => return Ok(()),
                Ok(Some(_)) | Err(Error::Overrun) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The kind of a message from the kernel.
pub(crate) enum Reply {
    /// Requested content.
    Data,
    /// The end of a dump, or an acknowledgement.
    Done,
    Error(KernelError),
}

pub(crate) fn classify(message: &Message<'_>, operation: &str) -> Reply {
    if message.kind != NLMSG_ERROR && message.kind != NLMSG_DONE {
        return Reply::Data;
    }
    let code = ne_u32(message.payload, 0).map_or(0, u32::cast_signed);
    if code >= 0 {
        return Reply::Done;
    }
    let mut attrs = Attrs::default();
    if message.kind == NLMSG_ERROR && message.flags & flag::ACK_TLVS != 0 {
        attrs = Attrs(message.payload.get(NLMSGERR..).unwrap_or_default());
    }
    Reply::Error(KernelError {
        operation: operation.to_owned(),
        errno: Errno::from_raw(code.saturating_neg()),
        message: attrs.string(NLMSGERR_ATTR_MSG),
        // Unlike all other numbers of netfilter, this one has host byte order.
        offset: attrs.find(NLMSGERR_ATTR_OFFS).and_then(|bytes| ne_u32(bytes, 0)),
        others: 0,
    })
}

fn failed(call: &'static str) -> impl Fn(Errno) -> Error {
    move |errno| Error::Socket { call, errno }
}

/// Repeats a call while signals interrupt it.
fn retry<T>(mut call: impl FnMut() -> nix::Result<T>) -> nix::Result<T> {
    loop {
        match call() {
            Err(Errno::EINTR) => {}
            done => return done,
        }
    }
}
