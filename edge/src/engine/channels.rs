// SPDX-License-Identifier: Apache-2.0
//! What the engine hears, and whom it tells. `compose` connects them; nothing is decided here.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use steerage_process::Pending;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::index::IndexEvent;
use crate::link::ability::AbilityReport;
use crate::link::conflicts::AddressConflicts;
use crate::link::mac::Mac;
use crate::link::membership::Membership;
use crate::prober::{HealthChange, StatementReport};
use crate::status::HostStatus;

#[derive(Debug)]
pub(crate) struct Inputs {
    pub(crate) events: mpsc::Receiver<IndexEvent>,
    pub(crate) health: mpsc::UnboundedReceiver<HealthChange>,
    /// Ended requests to nodes for statements. The prober records them, and sends the changes of health that follow to `health`.
    pub(crate) statements: mpsc::Receiver<StatementReport>,
    pub(crate) membership: watch::Receiver<Membership>,
    pub(crate) conflicts: watch::Receiver<AddressConflicts>,
    /// Claims by other hosts to VIPs that were free before.
    pub(crate) claims: mpsc::UnboundedReceiver<(IpAddr, Mac)>,
    pub(crate) shutdown: CancellationToken,
    /// How long a leaving host waits for others to answer for its VIPs.
    pub(crate) hand_over_wait: Duration,
    /// Ends what the engine needs, with the engine.
    #[expect(dead_code, reason = "dropped")]
    pub(crate) engine_ends: DropGuard,
}

#[derive(Debug)]
pub(crate) struct Outputs {
    /// The interface's Ethernet address.
    pub(crate) mac: watch::Sender<Mac>,
    /// The host's own addresses.
    pub(crate) addresses: watch::Sender<Vec<IpAddr>>,
    /// The VIPs that the conflict detection checks.
    pub(crate) monitored_vips: watch::Sender<BTreeSet<IpAddr>>,
    pub(crate) status: watch::Sender<HostStatus>,
    /// True once this host is leaving.
    pub(crate) leaving: watch::Sender<bool>,
    /// How well this host can serve, again in each turn of the loop.
    pub(crate) abilities: watch::Sender<AbilityReport>,
}

/// What `/readyz` waits for; each is done once.
#[derive(Debug)]
pub(crate) struct ReadinessGates {
    pub(crate) synced: Option<Pending>,
    /// The kernel holds the first plan.
    pub(crate) programmed: Option<Pending>,
    /// The other edge hosts are known.
    pub(crate) settled: Option<Pending>,
}
