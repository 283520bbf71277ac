// SPDX-License-Identifier: Apache-2.0
//! Keeps what [`crate::edge_tunnel`] says: first the tables, then the devices, so that nothing comes by the tunnel that no rule has
//! judged. The agent's composition root asks [`EdgeTunnelKeeper::keep`] again each second. At the end of the process all stays.

use std::time::{Duration, Instant};

use steerage_model::{TunnelReceiver, chain};
use steerage_nft::{Batch, Error, Family, Nft, RuleInfo, Table};
use steerage_process::prometheus_client::metrics::gauge::Gauge;
use steerage_tunnel::{
    Device, Ensured, RECEIVERS, SENDER, TunnelError, ensure, ensure_anew, is_up, receivers, remove,
};

use super::FAMILIES;
use super::addresses::has_ipv6;
use crate::edge_tunnel::{EdgeTunnelSettings, TABLE};

/// How often all is looked at.
const INTERVAL: Duration = Duration::from_secs(1);
/// How often a port that is in use is tried again, unless the edge host's device goes.
const RETRY_PORT: Duration = Duration::from_secs(30);

/// A device that is not tried for a while.
#[derive(Clone, Debug)]
struct PortRetry {
    until: Instant,
    /// Why it cannot receive; `None` on an edge host.
    error: Option<String>,
}

impl PortRetry {
    fn new(error: Option<String>) -> Self {
        Self { until: Instant::now() + RETRY_PORT, error }
    }
}

/// Keeps the tunnel's tables and devices.
#[derive(Debug)]
pub struct EdgeTunnelKeeper {
    settings: EdgeTunnelSettings,
    nft: Nft,
    /// The families that the kernel has.
    families: Vec<Family>,
    devices: Vec<Device>,
    /// What the tables hold since the last write.
    written: Vec<RuleInfo>,
    /// The generation at which they were seen to hold it.
    seen: Option<u32>,
    /// Whether they hold it, as far as is known: what cannot be read now may be as before.
    hold: bool,
    has_begun: bool,
    /// Of each device whose port is in use: each try makes the device and removes it again, which other programs see.
    waiting: [Option<PortRetry>; 2],
    /// The device of an edge host on this node uses the port.
    is_edge_host: bool,
    /// What each device receives, as far as is known: first that of IPv4, then that of IPv6.
    receivers: [Option<TunnelReceiver>; 2],
    /// Why something is not as it should be.
    error: Option<String>,
}

impl EdgeTunnelKeeper {
    /// Opens a socket, and changes nothing.
    pub fn open(settings: EdgeTunnelSettings) -> Result<Self, Error> {
        let mut nft = Nft::open()?;
        let mut families = Vec::new();
        for (_, family) in FAMILIES {
            match nft.tables(family) {
                Ok(_) => families.push(family),
                Err(error) if error.is_unsupported() => {}
                Err(error) => return Err(error),
            }
        }
        let [v4, v6] = receivers(settings.vni, settings.port);
        let devices = if has_ipv6() { vec![v4, v6] } else { vec![v4] };
        Ok(Self {
            settings,
            nft,
            families,
            devices,
            written: Vec::new(),
            seen: None,
            hold: false,
            has_begun: false,
            waiting: [None, None],
            is_edge_host: false,
            receivers: [None; 2],
            error: None,
        })
    }

    /// Keeps all until the process ends. `ready` shows whether the tunnel receives, `failed` whether it should and does not. `state` gets
    /// what is known of each family.
    pub async fn run(
        mut self,
        ready: Gauge,
        failed: Gauge,
        state: impl Fn(steerage_model::Family, TunnelReceiver) + Send,
    ) {
        let mut ticks = tokio::time::interval(INTERVAL);
        loop {
            ticks.tick().await;
            ready.set(self.keep().into());
            failed.set(self.error.is_some().into());
            for ((family, _), receiver) in FAMILIES.into_iter().zip(self.receivers) {
                if let Some(receiver) = receiver {
                    state(family, receiver);
                }
            }
        }
    }

    /// Repairs what is not as it should be. Whether the tunnel receives.
    pub fn keep(&mut self) -> bool {
        let result = self.keep_tables().map_err(|error| {
            // Nothing may come that no table judges. Tables that merely cannot be read are no reason to stop.
            if !self.hold {
                remove_devices();
                self.receivers = [Some(TunnelReceiver::Failed); 2];
            }
            chain(&error)
        });
        let result = result.and_then(|()| self.keep_devices());
        let is_ready = result == Ok(true);
        let error = result.err();
        if let Some(error) = error.as_ref().filter(|error| self.error.as_ref() != Some(error)) {
            tracing::error!(
                error,
                "edge tunnel not set up; packets of edge hosts off the link are lost for one IP family or both; retrying"
            );
        }
        self.error = error;
        is_ready
    }

    fn keep_tables(&mut self) -> Result<(), Error> {
        let generation = self.nft.generation()?;
        if self.seen == Some(generation) {
            return Ok(());
        }
        // Empty only before the first write.
        self.hold = !self.written.is_empty() && self.listed()? == self.written;
        if !self.hold {
            if self.has_begun {
                tracing::warn!(
                    table = TABLE,
                    "another program has changed the tables of the edge tunnel; writing them again"
                );
            }
            let mut batch = Batch::new();
            for family in &self.families {
                self.settings.write_table(*family, &mut batch);
            }
            self.nft.commit(batch)?;
            self.hold = true;
            let listed = self.listed()?;
            let counts = self.families.iter().map(|family| self.settings.rule_count(*family));
            if listed.len() != counts.sum::<usize>() {
                // Another program was quicker. The next look writes them again.
                return Ok(());
            }
            self.written = listed;
        }
        // What another program commits meanwhile is seen the next time.
        self.seen = Some(generation);
        Ok(())
    }

    fn listed(&mut self) -> Result<Vec<RuleInfo>, Error> {
        let mut found = Vec::new();
        for family in &self.families {
            let table = Table::new(*family, TABLE);
            match self.nft.table(&table)? {
                Some(info) if !info.is_dormant => found.extend(self.nft.rules(&table)?),
                _ => {}
            }
        }
        Ok(found)
    }

    fn keep_devices(&mut self) -> Result<bool, String> {
        if has_ipv6() && !self.families.contains(&Family::Ip6) {
            remove_devices();
            self.receivers = [Some(TunnelReceiver::Failed); 2];
            return Err(
                "the kernel has IPv6 and no nftables for it, so nothing would judge IPv6 packets".to_owned()
            );
        }
        if !is_up(SENDER).is_ok_and(|is_edge_host| is_edge_host == self.is_edge_host) {
            (self.waiting, self.is_edge_host) = ([None, None], false);
        }
        let ensure = if self.has_begun { ensure } else { ensure_anew };
        let (mut failed, mut waits) = (None, false);
        for ((device, receiver), waiting) in
            self.devices.iter().zip(&mut self.receivers).zip(&mut self.waiting)
        {
            if let Some(PortRetry { error, .. }) =
                waiting.as_ref().filter(|waiting| Instant::now() < waiting.until)
            {
                waits = true;
                failed = failed.or_else(|| error.clone());
                continue;
            }
            *waiting = None;
            match ensure(device) {
                Ok(Ensured { is_new, .. }) => {
                    if is_new {
                        tracing::info!(
                            device = device.name(),
                            "edge tunnel set up; this node receives through it"
                        );
                    }
                    let EdgeTunnelSettings { vni, port, .. } = self.settings;
                    *receiver = Some(TunnelReceiver::Receives { vni, port });
                }
                Err(TunnelError::PortInUse { .. }) if is_up(SENDER).unwrap_or(false) => {
                    // Other edge hosts are on one link with it, and so is this node.
                    if !self.has_begun {
                        tracing::info!(
                            "an edge host on this node uses the edge tunnel's port; not receiving through the tunnel"
                        );
                    }
                    (self.has_begun, self.is_edge_host) = (true, true);
                    self.waiting = [(); 2].map(|()| Some(PortRetry::new(None)));
                    // It sends to both families, so neither of them can receive.
                    self.receivers = [Some(TunnelReceiver::EdgeHost); 2];
                    return Ok(false);
                }
                Err(error) => {
                    if !error.is_unknown() {
                        *receiver = Some(TunnelReceiver::Failed);
                    }
                    let reason = chain(&error);
                    if matches!(error, TunnelError::PortInUse { .. }) {
                        *waiting = Some(PortRetry::new(Some(reason.clone())));
                    }
                    // The other family may receive.
                    failed.get_or_insert(reason);
                }
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        self.has_begun = true;
        Ok(!waits)
    }
}

/// Removes the devices, and then the tables; none of either is success.
pub fn remove_edge_tunnel(nft: &mut Nft) {
    remove_devices();
    for (_, family) in FAMILIES {
        let table = Table::new(family, TABLE);
        let result = match nft.table(&table) {
            Ok(Some(_)) => {
                let mut batch = Batch::new();
                batch.delete_table(&table);
                nft.commit(batch)
            }
            Err(error) if !error.is_unsupported() => Err(error),
            _ => continue,
        };
        match result {
            Ok(()) => tracing::info!(%table, "table deleted"),
            Err(error) => tracing::warn!(%table, error = chain(&error), "table not deleted"),
        }
    }
}

fn remove_devices() {
    for name in RECEIVERS {
        match remove(name) {
            Ok(true) => tracing::info!(device = name, "device of the edge tunnel removed"),
            Ok(false) => {}
            Err(error) => tracing::warn!(error = chain(&error), "device of the edge tunnel not removed"),
        }
    }
}
