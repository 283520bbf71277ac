// SPDX-License-Identifier: Apache-2.0
//! UDP flows that lead to an endpoint that is gone, or past the rules: they would live as long as the client keeps sending.
//!
//! TCP is never touched, nor any flow whose original destination is not a frontend of ours. The work is done on a thread of its
//! own, so that a full connection table delays no rule.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use steerage_model::{Family, Protocol};
use steerage_nft::{Conntrack, Error, Flow};
use tokio::sync::mpsc;

use crate::plan::Frontend;

/// UDP frontends, each with the endpoints whose flows may stay.
pub type StaleFlows = BTreeMap<Frontend, Arc<[SocketAddr]>>;

/// Hands work to the cleaning thread.
#[derive(Debug, Clone)]
pub struct Cleaner {
    work: mpsc::UnboundedSender<StaleFlows>,
}

impl Cleaner {
    /// Starts the thread in the network namespace of the calling one. `deleted` is told how many flows went.
    pub fn start(deleted: impl Fn(usize) + Send + 'static) -> Result<Self, Error> {
        let mut conntrack = Conntrack::open()?;
        let (work, mut queue) = mpsc::unbounded_channel::<StaleFlows>();
        let serve = move || {
            while let Some(mut stale) = queue.blocking_recv() {
                // What came later says more.
                while let Ok(more) = queue.try_recv() {
                    stale.extend(more);
                }
                match clean(&mut conntrack, &stale) {
                    Ok(0) => {}
                    Ok(count) => {
                        tracing::info!(count, "UDP flows to endpoints that are gone were ended");
                        deleted(count);
                    }
                    Err(error) => tracing::warn!(%error, "UDP flows cannot be cleaned up"),
                }
            }
        };
        std::thread::Builder::new()
            .name("conntrack".to_owned())
            .spawn(serve)
            .map_err(|_| Error::NoAnswer("start the conntrack thread".to_owned()))?;
        Ok(Self { work })
    }

    /// Deletes the flows of these frontends that lead elsewhere than given.
    pub fn clean(&self, stale: StaleFlows) {
        if !stale.is_empty() {
            // The thread ends only with the last sender.
            let _ = self.work.send(stale);
        }
    }
}

/// Deletes them now; returns how many there were.
pub(crate) fn clean(conntrack: &mut Conntrack, stale: &StaleFlows) -> Result<usize, Error> {
    let mut deleted = 0;
    for (model, family) in super::FAMILIES {
        if !stale.keys().any(|frontend| frontend.family() == model) {
            continue;
        }
        let flows = match conntrack.flows(family, |flow| is_stale(flow, stale)) {
            Err(error) if model == Family::V6 && error.is_unsupported() => continue,
            flows => flows?,
        };
        deleted += conntrack.delete(&flows)?;
    }
    Ok(deleted)
}

fn is_stale(flow: &Flow, stale: &StaleFlows) -> bool {
    let destination = flow.original.destination;
    let frontend = Frontend { addr: destination.ip(), protocol: Protocol::Udp, port: destination.port() };
    flow.original.protocol == Protocol::Udp.number()
        && stale.get(&frontend).is_some_and(|serving| !serving.contains(&flow.reply.source))
}
