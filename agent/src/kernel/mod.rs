// SPDX-License-Identifier: Apache-2.0
//! The writer: makes the kernel hold what the plan says. All netlink I/O of the agent happens below here.

mod addresses;
mod family;
mod flows;
mod inspect;
mod load;
mod monitor;

pub use addresses::AddressWatch;
pub use family::FamilyTable;
pub use flows::{FlowCleaner, StaleFlows};
pub use inspect::{KernelTable, read_table};
pub use monitor::watch_foreign;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use steerage_model::{Family, Key, Protocol};
use steerage_nft::{Batch, Error, Monitor, Nft, Table};

use crate::local_node::LocalPods;
use crate::plan::{Action, Affected, Desired, Frontend, ServicePlan};
use crate::rules::{Elements, RulesetConfig, TABLE, affected_elements, all_elements, difference};

/// The families, and what nftables calls them.
const FAMILIES: [(Family, steerage_nft::Family); 2] =
    [(Family::V4, steerage_nft::Family::Ip), (Family::V6, steerage_nft::Family::Ip6)];

/// What a write did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Applied {
    /// Elements written.
    pub elements: usize,
    /// The whole state was compared with the kernel's.
    pub full: bool,
    /// UDP frontends whose endpoints changed, each with those whose flows may stay.
    pub udp: BTreeMap<Frontend, Arc<[SocketAddr]>>,
}

/// The tables of this node and what they should hold.
#[derive(Debug)]
pub struct Dataplane {
    desired: Desired,
    shape: RulesetConfig,
    tables: Vec<FamilyTable>,
    /// What the kernel holds may differ from what we wrote last.
    out_of_sync: bool,
    /// UDP frontends that changed since the last success.
    udp: BTreeSet<Frontend>,
    /// Who wants to hear of others' changes, until these are watched.
    on_foreign_change: Option<ForeignChangeCallback>,
}

struct ForeignChangeCallback(Box<dyn FnMut(bool) -> bool + Send>);

impl std::fmt::Debug for ForeignChangeCallback {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ForeignChangeCallback")
    }
}

impl Dataplane {
    /// Opens it in the network namespace of the calling thread; nothing is written yet. A family that the kernel does not have
    /// is left out.
    pub fn open() -> Result<Self, Error> {
        let mut tables = Vec::new();
        for (model, family) in FAMILIES {
            let mut nft = Nft::open()?;
            match nft.tables(family) {
                Ok(_) => tables.push(FamilyTable::new(nft, model, family)),
                Err(error) if error.is_unsupported() => {
                    tracing::warn!(family = %model, "the kernel does not have this family: it is not served");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Self {
            desired: Desired::default(),
            shape: RulesetConfig::default(),
            tables,
            out_of_sync: true,
            udp: BTreeSet::new(),
            on_foreign_change: None,
        })
    }

    /// Has others' changes of our tables told, see [`watch_foreign`], from the first successful write on: as long as anybody
    /// listens, the kernel tells each element of a load, which doubles its work.
    pub fn watch_foreign_changes(&mut self, changed: impl FnMut(bool) -> bool + Send + 'static) {
        self.on_foreign_change = Some(ForeignChangeCallback(Box::new(changed)));
    }

    /// What the node should do.
    pub fn desired(&self) -> &Desired {
        &self.desired
    }

    /// Guards networks from the next [`Dataplane::apply`] on: of what is sent there, only what a Service has gets through.
    pub fn drop_unassigned(&mut self, networks: Vec<ipnet::IpNet>) {
        if self.shape.unserved != networks {
            self.shape.unserved = networks;
            self.out_of_sync = true;
        }
    }

    /// What shapes the chains, as last written or tried.
    pub fn shape(&self) -> &RulesetConfig {
        &self.shape
    }

    /// Compares everything with the kernel at the next [`Dataplane::apply`].
    pub fn mark_out_of_sync(&mut self) {
        self.out_of_sync = true;
    }

    /// Whether the kernel's state has to be compared.
    pub fn is_out_of_sync(&self) -> bool {
        self.out_of_sync
    }

    /// Takes in plans that may not be written yet.
    pub fn stage(&mut self, updates: BTreeMap<Key, ServicePlan>) {
        let frontends = updates.values().flat_map(|plan| &plan.frontends).map(|(frontend, _)| *frontend);
        self.udp.extend(frontends.filter(is_udp));
        self.desired.update(updates);
        self.out_of_sync = true;
    }

    /// Takes in new plans and writes them: only the difference, where the kernel is known to hold what was written before. On an
    /// error no rule sees anything of a family that was not whole (a table that was not there may be left without the chains that packets enter by); the plans are
    /// kept, and the next call compares everything.
    pub fn apply(&mut self, updates: BTreeMap<Key, ServicePlan>, pods: &LocalPods) -> Result<Applied, Error> {
        // What is compared as a whole needs no difference of its own.
        let affected = (!self.out_of_sync).then(|| self.desired.affected_by(&updates));
        let old = affected.as_ref().map(|affected| self.elements(affected)).unwrap_or_default();
        let actions = self.udp_actions(affected.as_ref());
        self.desired.update(updates);
        let unserved = self.shape.unserved.clone();
        let shape = RulesetConfig { pods: pods.clone(), timeouts: self.desired.timeouts(), unserved };
        if shape != self.shape {
            self.out_of_sync = true;
            self.shape = shape;
        }
        let now = self.udp_actions(affected.as_ref());
        self.udp.extend(
            actions.keys().chain(now.keys()).filter(|frontend| actions.get(*frontend) != now.get(*frontend)),
        );

        let mut applied = Applied { full: self.out_of_sync, ..Applied::default() };
        if let Some(affected) = affected.filter(|_| !self.out_of_sync) {
            // Until it is known to have worked.
            self.out_of_sync = true;
            let new = self.elements(&affected);
            for (table, (old, new)) in self.tables.iter_mut().zip(old.iter().zip(&new)) {
                let changes = difference(old, new);
                applied.elements += changes.count();
                table.write(&changes)?;
            }
            self.out_of_sync = false;
        } else {
            let mut steps = Vec::new();
            for table in &mut self.tables {
                let wanted = all_elements(&self.desired, table.model());
                let (elements, generations) = table.synchronise(&self.shape, &wanted)?;
                applied.elements += elements;
                steps.push(generations);
            }
            self.out_of_sync = self.on_foreign_change.is_some() && !self.listen(&steps)?;
        }
        applied.udp = std::mem::take(&mut self.udp)
            .into_iter()
            .map(|frontend| {
                let serving = self.desired.action(&frontend).map(|action| Arc::clone(&action.serving));
                (frontend, serving.unwrap_or_default())
            })
            .collect();
        Ok(applied)
    }

    /// Starts to watch others' changes. Whether nobody made any since our own writes began: each led from one generation to
    /// another.
    fn listen(&mut self, steps: &[(u32, u32)]) -> Result<bool, Error> {
        let ports = self.tables.iter().map(FamilyTable::port).collect::<Result<_, _>>()?;
        let monitor = Monitor::open()?;
        let Some(ForeignChangeCallback(changed)) = self.on_foreign_change.take() else { return Ok(true) };
        watch_foreign(monitor, ports, changed)
            .map_err(|_| Error::NoReply("start the thread of the monitor".to_owned()))?;
        let Some(table) = self.tables.last_mut() else { return Ok(true) };
        let now = table.generation()?;
        let unbroken = steps.is_sorted_by(|(_, after), (before, _)| after == before);
        Ok(unbroken && steps.last().is_some_and(|(_, after)| *after == now))
    }

    fn elements(&self, affected: &Affected) -> Vec<Elements> {
        self.tables.iter().map(|table| affected_elements(&self.desired, affected, table.model())).collect()
    }

    /// What UDP frontends do now, those affected or all: a flow may have to go when this changes.
    fn udp_actions(&self, affected: Option<&Affected>) -> BTreeMap<Frontend, Action> {
        let Some(affected) = affected else {
            let all = self.desired.actions().filter(|(frontend, _)| is_udp(frontend));
            return all.map(|(frontend, action)| (*frontend, action.clone())).collect();
        };
        let udp = affected.frontends.iter().filter(|frontend| is_udp(frontend));
        udp.filter_map(|frontend| Some((*frontend, self.desired.action(frontend)?.clone()))).collect()
    }
}

fn is_udp(frontend: &Frontend) -> bool {
    frontend.protocol == Protocol::Udp
}

/// Takes our tables out of the kernel; other tables are not touched.
pub fn clean_up() -> Result<(), Error> {
    for (_, family) in FAMILIES {
        let mut nft = Nft::open()?;
        let table = Table::new(family, TABLE);
        match nft.table(&table) {
            Ok(None) => {}
            Ok(Some(_)) => {
                let mut batch = Batch::new();
                batch.delete_table(&table);
                nft.commit(batch)?;
                tracing::info!(%table, "table deleted");
            }
            Err(error) if error.is_unsupported() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
