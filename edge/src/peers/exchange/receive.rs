// SPDX-License-Identifier: Apache-2.0
//! Applies what other hosts tell of their flows.

use std::time::Instant;

use steerage_edge_dataplane::packet::V6;
use steerage_edge_dataplane::packet::maps::{CLOSING, FlowKey};
use steerage_edge_dataplane::{Error, Exception};

use super::{Exchange, answers, flow_time};
use crate::metrics::{FULL, reason};
use crate::peers::confirmed::{LocalUse, Now, SessionId};
use crate::peers::message::Message;

impl Exchange {
    /// Applies a message of another host.
    pub(crate) fn receive(&mut self, session: SessionId, message: Message) {
        self.look_at_changes();
        let result = match message {
            Message::Begin => {
                self.confirmed.begin(session);
                Ok(())
            }
            Message::Routes => {
                self.confirmed.set_routes(session);
                Ok(())
            }
            Message::Vips(vips) => {
                // Others would only take memory.
                let (known, unknown): (Vec<_>, Vec<_>) =
                    vips.into_iter().partition(|vip| self.vips.contains_key(vip));
                for vip in unknown {
                    self.missed.note_vip(session, vip);
                }
                self.confirmed.add_vips(session, known);
                Ok(())
            }
            Message::Exceptions(exceptions) if self.is_routed(session) => {
                self.insert_routed(session, exceptions)
            }
            Message::Exceptions(exceptions) => self.insert(session, exceptions),
            Message::Offers(mut offers) => {
                offers.retain(|offer| answers(&self.vips, &self.lasting, offer.key.vip));
                self.insert(session, offers).map(|()| {
                    // Those that were unknown are exceptions of this host now.
                    self.pace.on_change(Instant::now());
                })
            }
            Message::Gone(keys) => self.end_confirmed(keys),
            Message::End => {
                let (vips, lasting) = (&self.vips, &self.lasting);
                let now = Now { seen: flow_time(), instant: Instant::now() };
                let (unconfirmed, has_new) =
                    self.confirmed.end(session, now, |vip| answers(vips, lasting, vip));
                if has_new {
                    self.pace.on_change(Instant::now());
                }
                self.heard.on_list(session, !self.missed.has_any(session));
                self.end_confirmed(unconfirmed)
            }
            Message::Ping => Ok(()),
        };
        if let Err(error) = result {
            self.on_error(&error);
        }
    }

    /// Another host does not confirm these flows any more. Deletes those of which this host has seen no packet since.
    fn end_confirmed(&mut self, mut keys: Vec<FlowKey<V6>>) -> Result<(), Error> {
        let now = Instant::now();
        let (flows, confirmed) = (&self.flows, &mut self.confirmed);
        keys.retain(|key| confirmed.contains(key));
        let mut unseen = Vec::new();
        for key in keys {
            let known = flows.known(&key)?;
            if known.is_some_and(|known| confirmed.local_use(&key, known.seen, now) == LocalUse::Unseen) {
                unseen.push(key);
            }
            confirmed.remove(&key);
        }
        flows.delete(&unseen)
    }

    fn insert(&mut self, session: SessionId, mut exceptions: Vec<Exception>) -> Result<(), Error> {
        let (vips, lasting) = (&self.vips, &self.lasting);
        let is_own = |vip| answers(vips, lasting, vip);
        exceptions.retain(|exception| {
            let is_full = self.routed.len() + self.confirmed.len() >= self.limit;
            let has_room = is_own(exception.key.vip) || !is_full || self.confirmed.contains(&exception.key);
            if !has_room {
                self.metrics.count_refused(FULL);
            }
            has_room
        });
        let (now, instant) = (flow_time(), Instant::now());
        let confirmed = &self.confirmed;
        let is_used = |key: &FlowKey<V6>, seen| confirmed.local_use(key, seen, instant) == LocalUse::Seen;
        let results = self.flows.insert(&exceptions, now, |key| is_own(key.vip), is_used)?;
        for (exception, result) in exceptions.iter().zip(results) {
            match result {
                Ok(()) => {
                    self.metrics.count_received();
                    if !is_own(exception.key.vip) {
                        let seen = now.wrapping_sub(exception.idle) & !CLOSING;
                        self.confirmed.confirm(session, exception.key, seen);
                    }
                }
                Err(refusal) => {
                    self.metrics.count_refused(reason(refusal));
                    self.missed.note_refusal(session, exception, refusal);
                }
            }
        }
        Ok(())
    }
}
