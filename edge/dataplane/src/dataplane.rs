// SPDX-License-Identifier: Apache-2.0
//! The data plane of one link: the loaded program and its maps.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use aya::programs::SchedClassifier;
use aya::{Ebpf, EbpfLoader};
use steerage_edge_packet::V6;
use steerage_edge_packet::maps::{
    Config, Counters, Event, Flow, FlowKey, LAYOUT, ListenerKey, SLOTS_PER_ELEMENT,
};

use crate::attach::{self, Hook};
use crate::error::Error;
use crate::maps::{Maps, NAMES};
use crate::object::OBJECT;
use crate::state::{MacAddress, State, Table};
use crate::writer::Writer;
use crate::{adopt, counters, flows};

/// The name of the program in the object file.
const PROGRAM: &str = "edge";

/// How large the maps are. Maps of an earlier process keep their size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Listeners. Powers of two waste nothing.
    pub services: u32,
    /// Slots of all tables.
    pub slots: u32,
    /// Targets of all tables.
    pub members: u32,
    /// Targets.
    pub targets: u32,
    /// Established flows of each family: 120 bytes for each.
    pub flows: u32,
    /// Flows of each family of which one packet was seen.
    pub recent_flows: u32,
}

impl Default for Sizes {
    fn default() -> Self {
        Self {
            services: 65_536,
            slots: 8 << 20,
            members: 1 << 19,
            targets: 16_384,
            flows: 1 << 20,
            recent_flows: 65_536,
        }
    }
}

/// What the data plane is for.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of the link.
    pub interface: String,
    /// The link's own address.
    pub mac: MacAddress,
    /// Index of the tunnel's device, if targets are beyond the link.
    pub tunnel: Option<u32>,
    /// A folder on a BPF file system, for this link alone: there maps and program outlive the
    /// process. Without it they end with this value.
    pub pins: Option<PathBuf>,
    /// Sizes of the maps.
    pub sizes: Sizes,
    /// How the program is attached; tcx where the kernel has it if `None`.
    pub hook: Option<Hook>,
}

/// A loaded program with its maps.
#[derive(Debug)]
pub struct Dataplane {
    options: Options,
    program: Ebpf,
    maps: Maps,
    /// `None` after a failed write.
    writer: Option<Writer>,
    is_adopted: bool,
    cpus: usize,
}

impl Dataplane {
    /// Loads the program, and adopts the maps that an earlier process has pinned, if they are of this
    /// layout. Packets still pass by the earlier program, if any, until [`Dataplane::attach`].
    ///
    /// # Errors
    /// If the kernel refuses the program, or a map.
    pub fn load(options: Options) -> Result<Self, Error> {
        let pins = options.pins.as_deref().map(|pins| pins.join(format!("maps-{LAYOUT}")));
        if let Some(pins) = &pins {
            fs::create_dir_all(pins).map_err(Error::io("make", pins.display().to_string()))?;
        }
        let is_complete = |pins: &PathBuf| NAMES.iter().all(|name| pins.join(name).exists());
        let mut is_adopted = pins.as_ref().is_some_and(is_complete);
        if let Some(pins) = pins.as_deref().filter(|_| !is_adopted) {
            // An earlier process ended before it had made all.
            remove_pins(pins)?;
        }
        let (mut program, mut maps) = open(&options, pins.as_deref())?;
        if is_adopted && maps.config.get(0).is_none_or(|config| config.layout != LAYOUT) {
            let pins = pins.as_deref().unwrap_or(Path::new(""));
            remove_pins(pins)?;
            (program, maps) = open(&options, Some(pins))?;
            is_adopted = false;
        }
        let config = Config { layout: LAYOUT, mac: options.mac, pad: 0, tunnel: options.tunnel.unwrap_or(0) };
        maps.config.set(0, &config);
        let cpus = aya::util::nr_cpus().map_err(|(path, error)| Error::io("read", path)(error))?;
        let writer = if is_adopted { adopt::adopt(&maps)? } else { Writer::new(&maps) };
        Ok(Self { options, program, maps, writer: Some(writer), is_adopted, cpus })
    }

    /// Whether the maps were an earlier process's.
    pub fn is_adopted(&self) -> bool {
        self.is_adopted
    }

    /// What the maps hold, as of the last write.
    pub fn written(&self) -> Option<&State> {
        self.writer.as_ref().map(|writer| &writer.written)
    }

    /// Writes the differences to what the maps hold. After an error the maps hold parts of both
    /// states, and the next call reads them first.
    ///
    /// # Errors
    /// If a map is full, or the kernel refuses a write.
    pub fn write(&mut self, state: State) -> Result<(), Error> {
        self.change(|writer, maps| writer.write(maps, state))
    }

    /// Writes one table, whatever else there is: for targets that come and go.
    ///
    /// # Errors
    /// As [`Dataplane::write`].
    pub fn write_table(&mut self, number: u32, table: Arc<Table>) -> Result<(), Error> {
        self.change(|writer, maps| writer.write_table(maps, number, table))
    }

    fn change(&mut self, change: impl FnOnce(&mut Writer, &Maps) -> Result<(), Error>) -> Result<(), Error> {
        let mut writer = match self.writer.take() {
            Some(writer) => writer,
            None => adopt::adopt(&self.maps)?,
        };
        change(&mut writer, &self.maps)?;
        self.writer = Some(writer);
        Ok(())
    }

    /// Reads the maps, and returns whether they hold what was written. If another program has changed
    /// them, the next write repairs them.
    ///
    /// # Errors
    /// If the kernel refuses to read a map.
    pub fn check(&mut self) -> Result<bool, Error> {
        let found = adopt::adopt(&self.maps)?;
        let is_same = self.writer.as_ref().is_some_and(|writer| writer.written == found.written);
        self.writer = Some(found);
        Ok(is_same)
    }

    /// Slots in use, and all.
    pub fn slots(&self) -> (u32, u32) {
        let used = self.writer.as_ref().map_or(0, |writer| writer.regions.used());
        let all = u32::try_from(self.maps.slots.len()).unwrap_or(u32::MAX);
        (used * SLOTS_PER_ELEMENT, all.saturating_mul(SLOTS_PER_ELEMENT))
    }

    /// Lets packets pass by this program, instead of an earlier one.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn attach(&mut self) -> Result<Hook, Error> {
        let pins = self.options.pins.clone().ok_or(Error::Missing("folder for pins"))?;
        let (interface, hook) = (self.options.interface.clone(), self.options.hook);
        attach::attach(self.program_mut()?, &interface, &pins, hook)
    }

    fn program_mut(&mut self) -> Result<&mut SchedClassifier, Error> {
        let program = self.program.program_mut(PROGRAM).ok_or(Error::Missing("program"))?;
        Ok(program.try_into()?)
    }

    /// The loaded program.
    ///
    /// # Errors
    /// If the object file has no such program.
    pub fn program(&self) -> Result<&SchedClassifier, Error> {
        let program = self.program.program(PROGRAM).ok_or(Error::Missing("program"))?;
        Ok(program.try_into()?)
    }

    /// Tells the program the link's own address.
    pub fn set_mac(&mut self, mac: MacAddress) {
        self.options.mac = mac;
        let tunnel = self.options.tunnel.unwrap_or(0);
        self.maps.config.set(0, &Config { layout: LAYOUT, mac, pad: 0, tunnel });
    }

    /// Answers ARP requests and neighbour solicitations for the VIPs of this lease until then: a time
    /// since the start of the kernel, with suspended time. [`Duration::ZERO`] ends the lease,
    /// [`Duration::MAX`] never ends it. Returns whether there is such a lease.
    pub fn set_lease(&self, lease: u32, until: Duration) -> bool {
        self.maps.leases.set(lease, &u64::try_from(until.as_nanos()).unwrap_or(u64::MAX))
    }

    /// All established flows, of both families.
    ///
    /// # Errors
    /// If the kernel refuses to list them.
    pub fn flows(&self) -> Result<Vec<(FlowKey<V6>, Flow)>, Error> {
        flows::read(&self.maps)
    }

    /// What was counted of a listener; zeros if there is none.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn listener_counters(&self, listener: &ListenerKey) -> Result<Counters, Error> {
        let number = self.writer.as_ref().and_then(|writer| writer.services.get(listener));
        number.map_or(Ok(Counters::default()), |number| {
            counters::read(&self.maps.service_counters, number, self.cpus)
        })
    }

    /// What was counted of a target.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn target_counters(&self, target: u32) -> Result<Counters, Error> {
        counters::read(&self.maps.target_counters, target, self.cpus)
    }

    /// What else was counted.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn events(&self) -> Result<BTreeMap<Event, u64>, Error> {
        counters::events(&self.maps, self.cpus)
    }
}

fn open(options: &Options, pins: Option<&Path>) -> Result<(Ebpf, Maps), Error> {
    let sizes = options.sizes;
    let mut loader = EbpfLoader::new();
    let elements = crate::regions::elements(sizes.slots);
    for (name, size) in [
        ("SERVICES", sizes.services),
        ("SERVICE_COUNTERS", sizes.services),
        ("LISTENERS", sizes.services),
        ("MEMBERS", sizes.members),
        ("SLOTS", elements),
        ("TARGETS", sizes.targets),
        ("TARGET_COUNTERS", sizes.targets),
        ("FLOWS4", sizes.flows),
        ("FLOWS6", sizes.flows),
        ("RECENT4", sizes.recent_flows),
        ("RECENT6", sizes.recent_flows),
    ] {
        loader.map_max_entries(name, size);
    }
    if let Some(pins) = pins {
        for name in NAMES {
            loader.map_pin_path(name, pins.join(name));
        }
    }
    let mut program = loader.load(OBJECT)?;
    let loaded: &mut SchedClassifier =
        program.program_mut(PROGRAM).ok_or(Error::Missing("program"))?.try_into()?;
    // Before the maps are taken: the program names them by their descriptors.
    loaded.load()?;
    let maps = Maps::take(&mut program)?;
    Ok((program, maps))
}

fn remove_pins(pins: &Path) -> Result<(), Error> {
    for name in NAMES {
        let pin = pins.join(name);
        if pin.exists() {
            fs::remove_file(&pin).map_err(Error::io("remove", pin.display().to_string()))?;
        }
    }
    Ok(())
}

/// Detaches the program of a link, and removes the pins.
///
/// # Errors
/// If the kernel refuses.
pub fn remove(interface: &str, pins: &Path) -> Result<(), Error> {
    attach::detach(interface, pins)?;
    if pins.exists() {
        fs::remove_dir_all(pins).map_err(Error::io("remove", pins.display().to_string()))?;
    }
    Ok(())
}
