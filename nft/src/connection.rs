// SPDX-License-Identifier: Apache-2.0
//! The connection to nftables: commits batches and runs transactions. `listing` reads objects back over it.
//!
//! All calls are synchronous and wait only for the kernel's work. Do not commit large batches on the threads of an
//! asynchronous runtime.

use nix::errno::Errno;

use crate::batch::{Batch, SUBSYSTEM, message};
use crate::commit_log::{CommitLog, next_generation};
use crate::error::{Error, KernelError};
use crate::socket::{Reply, Socket, classify};
use crate::wire::{Header, Message, Writer, flag};

/// `NFNL_MSG_BATCH_BEGIN`, `NFNL_MSG_BATCH_END`
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
/// `NFNL_BATCH_GENID`
const BATCH_GENERATION: u16 = 1;
/// The kernel's reply to an outdated generation. It is internal to the kernel, so libc has no name for it.
const ERESTART: i32 = 85;
/// Attempts at a dump that others interrupt, or at a transaction while others commit.
pub(crate) const ATTEMPTS: usize = 16;

/// A connection to nftables, in the network namespace in which it was opened.
#[derive(Debug)]
pub struct Nft {
    socket: Socket,
    log: Option<CommitLog>,
}

impl Nft {
    /// Opens a connection in the network namespace of the calling thread. Needs `CAP_NET_ADMIN` there.
    pub fn open() -> Result<Self, Error> {
        Ok(Self { socket: Socket::open(0)?, log: None })
    }

    /// Notes all further commits of this connection in `log`. Each then asks for the generation before and after.
    pub fn log_commits(&mut self, log: CommitLog) {
        self.log = Some(log);
    }

    /// The netlink port of this connection, which a `Monitor` reports with its changes.
    pub fn port(&self) -> Result<u32, Error> {
        self.socket.port()
    }

    /// The generation of the ruleset of this network namespace. Every commit by anyone increments it.
    pub fn generation(&mut self) -> Result<u32, Error> {
        let mut generation = None;
        let operation = "read the generation";
        self.request(message::GETGEN, 0, 0, operation, |_| {}, |m| generation = m.attrs().u32(1))?;
        generation.ok_or_else(|| Error::NoReply(operation.to_owned()))
    }

    /// Applies the whole batch, or nothing of it.
    pub fn commit(&mut self, batch: Batch) -> Result<(), Error> {
        self.send_batch(batch, None)
    }

    /// Applies the whole batch if the ruleset still has this generation. Returns [`Error::StaleGeneration`] otherwise.
    pub fn commit_at(&mut self, batch: Batch, generation: u32) -> Result<(), Error> {
        self.send_batch(batch, Some(generation))
    }

    /// Commits the batch that `plan` returns, if no program has committed since `plan` began to read. Otherwise calls `plan`
    /// again, a bounded number of times. Returns the generations before and after the commit, see [`Nft::generation`].
    pub fn transact<E: From<Error>>(
        &mut self,
        mut plan: impl FnMut(&mut Self) -> Result<Batch, E>,
    ) -> Result<(u32, u32), E> {
        let mut last = Error::StaleGeneration;
        for _ in 0..ATTEMPTS {
            let generation = self.generation()?;
            let batch = plan(self)?;
            if batch.is_empty() {
                return Ok((generation, generation));
            }
            match self.commit_at(batch, generation) {
                Ok(()) => return Ok((generation, next_generation(generation))),
                Err(Error::StaleGeneration) => last = Error::StaleGeneration,
                Err(error) => return Err(error.into()),
            }
        }
        Err(last.into())
    }

    /// Sends a request and passes each reply to `visit`. Returns false if the dump was interrupted.
    pub(crate) fn request(
        &mut self,
        kind: u16,
        flags: u16,
        family: u8,
        operation: &str,
        body: impl FnOnce(&mut Writer),
        visit: impl FnMut(&Message<'_>),
    ) -> Result<bool, Error> {
        let sequence = self.socket.reserve_sequences(1);
        // The end of a dump has a message of its own. Other requests need an acknowledgement.
        let end = if flags & flag::DUMP == 0 { flag::ACK } else { 0 };
        let header = Header {
            kind: SUBSYSTEM | kind,
            flags: flag::REQUEST | flags | end,
            sequence,
            family,
            resource: 0,
        };
        let mut request = Writer::new();
        request.message(header, body);
        self.socket.exchange(&request, sequence, operation, visit)
    }

    fn send_batch(&mut self, batch: Batch, generation: Option<u32>) -> Result<(), Error> {
        if batch.is_empty() {
            return Ok(());
        }
        let Some(log) = self.log.clone() else { return self.send_operations(batch, generation) };
        let running = log.begin();
        let before = match generation {
            Some(generation) => generation,
            None => self.generation()?,
        };
        self.send_operations(batch, generation)?;
        let after = next_generation(before);
        // If others committed meanwhile, it is not known which generation is whose. A batch that changes nothing leads to none.
        if self.generation().is_ok_and(|now| now == after) {
            running.led_to(after);
        }
        Ok(())
    }

    fn send_operations(&mut self, batch: Batch, generation: Option<u32>) -> Result<(), Error> {
        if batch.overflowed() {
            return Err(Error::TooLong);
        }
        self.socket.discard_pending()?;
        let first = self.socket.reserve_sequences(batch.count().saturating_add(2));
        let (messages, operations) = batch.seal(first + 1);
        let mut begin = Writer::new();
        begin.message(boundary(BATCH_BEGIN, first), |m| {
            if let Some(generation) = generation {
                m.attr_u32(BATCH_GENERATION, generation);
            }
        });
        let mut end = Writer::new();
        let last = first + u32::try_from(operations.len()).unwrap_or(u32::MAX) + 1;
        end.message(boundary(BATCH_END, last), |_| {});
        self.socket.send(&[begin.bytes(), messages.bytes(), end.bytes()])?;
        self.read_batch_replies(first, &operations)
    }

    /// Reads all replies to a batch that begins with the sequence number `first`.
    fn read_batch_replies(&mut self, first: u32, operations: &[String]) -> Result<(), Error> {
        let mut acknowledged = false;
        let mut failed: Option<KernelError> = None;
        while let Some(messages) = self.socket.receive()? {
            for message in messages {
                let Some(index) = message.sequence.checked_sub(first) else { continue };
                let index = usize::try_from(index).unwrap_or(usize::MAX);
                if index > operations.len() + 1 {
                    continue;
                }
                let operation = match index {
                    0 => "commit the batch",
                    at => operations.get(at - 1).map_or("end the batch", String::as_str),
                };
                match (classify(&message, operation), &mut failed) {
                    (Reply::Error(error), _) if error.errno == Errno::from_raw(ERESTART) => {
                        self.socket.discard_pending()?;
                        return Err(Error::StaleGeneration);
                    }
                    (Reply::Error(error), None) => failed = Some(error),
                    (Reply::Error(_), Some(first)) => first.others += 1,
                    (Reply::Done, _) => acknowledged = true,
                    (Reply::Data, _) => {}
                }
            }
        }
        match failed {
            Some(error) => Err(error.into()),
            None if acknowledged => Ok(()),
            None => Err(Error::NoReply("commit the batch".to_owned())),
        }
    }
}

/// The header of the message that begins or ends a batch.
fn boundary(kind: u16, sequence: u32) -> Header {
    Header { kind, flags: flag::REQUEST, sequence, family: 0, resource: SUBSYSTEM >> 8 }
}
