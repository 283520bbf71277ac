// SPDX-License-Identifier: Apache-2.0
//! The data plane of one link: the loaded program and its maps.

use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use aya::programs::SchedClassifier;
use aya::{Ebpf, EbpfLoader};
use steerage_edge_packet::V6;
use steerage_edge_packet::maps::{Config, Flow, FlowKey, LAYOUT, SLOTS_PER_ELEMENT};

use crate::attach::{self, Hook};
use crate::change::StateChange;
use crate::counters::Counts;
use crate::error::Error;
use crate::exceptions::FlowTable;
use crate::leases::{EarlierLeases, Leases};
use crate::maps::{Maps, NAMES};
use crate::object::OBJECT;
use crate::state::{MacAddress, State};
use crate::writer::Writer;
use crate::{adopt, flows, pins};

/// The name of the program in the object file.
const PROGRAM: &str = "edge";

/// How large the maps are. Maps of an earlier process keep their size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Listeners. Powers of two waste nothing.
    pub services: u32,
    /// Slots of all tables: four bytes for each.
    pub slots: u32,
    /// Targets of all tables. Memory is taken as they come.
    pub members: u32,
    /// Source ranges, and addresses of nodes. Memory is taken as they come.
    pub prefixes: u32,
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
            slots: 10 << 20,
            members: 2 << 20,
            prefixes: 2 << 20,
            targets: 32_768,
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
    maps: Arc<Maps>,
    /// `None` after a failed write.
    writer: Option<Writer>,
    is_adopted: bool,
    /// How this process has attached the program.
    attached: Option<Hook>,
    counts: Counts,
    earlier_leases: EarlierLeases,
}

impl Dataplane {
    /// Loads the program, and adopts the maps that an earlier process has pinned, if they are of this
    /// layout. Packets still pass by the earlier program, if any, until [`Dataplane::attach`].
    ///
    /// # Errors
    /// If the kernel refuses the program, or a map.
    pub fn load(options: Options) -> Result<Self, Error> {
        let maps = options.pins.as_deref().map(pins::maps_folder);
        let mut is_adopted = maps.as_deref().is_some_and(pins::is_complete);
        if let Some(pins) = options.pins.as_deref().filter(|_| !is_adopted) {
            // An earlier process ended before it had made all, or was of a version that has others.
            pins::make_room(pins)?;
        }
        let (mut program, mut maps) = open(&options)?;
        if let Some(pins) = options.pins.as_deref()
            && is_adopted
            && maps.config.get(0).is_none_or(|config| config.layout != LAYOUT)
        {
            pins::make_room(pins)?;
            (program, maps) = open(&options)?;
            is_adopted = false;
        }
        let others = options.pins.as_deref().map(pins::other_layouts).unwrap_or_default();
        let earlier_leases = EarlierLeases::open(others);
        if !is_adopted {
            earlier_leases.copy_to(&maps);
        }
        // Both at once: to verify the program takes as long as to read the maps of 10,000 Services.
        let (verified, writer) = thread::scope(|scope| {
            let verified = scope.spawn(|| verify(&mut program));
            let writer = if is_adopted { adopt::adopt(&maps) } else { Ok(Writer::new(&maps)) };
            (verified.join().unwrap_or_else(|panic| resume_unwind(panic)), writer)
        });
        verified?;
        let writer = writer?;
        let config = Config { layout: LAYOUT, mac: options.mac, pad: 0, tunnel: options.tunnel.unwrap_or(0) };
        maps.config.set(0, &config);
        let maps = Arc::new(maps);
        let counts = Counts::new(Arc::clone(&maps));
        let writer = Some(writer);
        Ok(Self { options, program, maps, writer, is_adopted, attached: None, counts, earlier_leases })
    }

    /// Whether the maps were an earlier process's.
    pub fn is_adopted(&self) -> bool {
        self.is_adopted
    }

    /// Whether packets pass by a program that forwards by these maps: this process's, or by tcx an
    /// earlier one's whose maps were adopted. Then the maps hold what that process has served by. If
    /// this is false, packets pass by no program, or by one that has maps of its own until
    /// [`Dataplane::attach`], and what was adopted may be half of a first write. Also false where
    /// that is not found out: of an earlier process's filter.
    pub fn is_in_use(&self) -> bool {
        if self.attached.is_some() {
            return self.is_attached().unwrap_or(false);
        }
        let is_by_link = |pins: &PathBuf| {
            pins::other_layouts(pins).is_empty()
                && attach::is_pinned_link_of(&self.options.interface, pins).unwrap_or(false)
        };
        self.is_adopted && self.options.pins.as_ref().is_some_and(is_by_link)
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

    /// Writes a change, whatever else there is: at a cost that does not grow with the rest.
    ///
    /// # Errors
    /// As [`Dataplane::write`].
    pub fn write_change(&mut self, change: StateChange) -> Result<(), Error> {
        self.change(|writer, maps| writer.write_change(maps, change))
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

    /// Slots in use.
    pub fn used_slots(&self) -> u32 {
        self.writer.as_ref().map_or(0, |writer| writer.regions.used()) * SLOTS_PER_ELEMENT
    }

    /// How large the maps are: those of an earlier process may differ from the options.
    ///
    /// # Errors
    /// If the kernel refuses to describe a map.
    pub fn sizes(&self) -> Result<Sizes, Error> {
        let maps = &self.maps;
        Ok(Sizes {
            services: maps.services.len(),
            slots: maps.slots.len().saturating_mul(SLOTS_PER_ELEMENT),
            members: maps.members.size()?,
            prefixes: maps.prefixes.size()?,
            targets: maps.targets.len(),
            ..self.options.sizes
        })
    }

    /// Lets packets pass by this program, instead of an earlier one, whose maps of another layout are
    /// no longer kept.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn attach(&mut self) -> Result<Hook, Error> {
        let pins = self.options.pins.clone().ok_or(Error::Missing("folder for pins"))?;
        let (interface, hook) = (self.options.interface.clone(), self.options.hook);
        let hook = attach::attach(self.program_mut()?, &interface, &pins, hook)?;
        self.attached = Some(hook);
        self.earlier_leases.close();
        pins::remove_other_layouts(&pins)?;
        Ok(hook)
    }

    /// Whether packets pass by this program. Another program may have taken it off the link; of a filter that is not found out.
    ///
    /// # Errors
    /// If the kernel refuses to list the link's programs.
    pub fn is_attached(&self) -> Result<bool, Error> {
        match self.attached {
            None => Ok(false),
            Some(Hook::Filter) => Ok(true),
            Some(Hook::Tcx) => attach::has_tcx(self.program()?, &self.options.interface),
        }
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
        self.configure();
    }

    /// Tells the program the index of the tunnel's device.
    pub fn set_tunnel(&mut self, tunnel: Option<u32>) {
        self.options.tunnel = tunnel;
        self.configure();
    }

    fn configure(&self) {
        let Options { mac, tunnel, .. } = self.options;
        self.maps.config.set(0, &Config { layout: LAYOUT, mac, pad: 0, tunnel: tunnel.unwrap_or(0) });
    }

    /// The leases of VIPs. Until [`Dataplane::attach`] they are also those of maps of another layout, by
    /// which an earlier process's program may answer.
    pub fn leases(&self) -> Leases {
        Leases::new(Arc::clone(&self.maps), self.earlier_leases.clone())
    }

    /// The flows, for the exchange with other hosts.
    pub fn flow_table(&self) -> FlowTable {
        FlowTable::new(Arc::clone(&self.maps))
    }

    /// Rises with each write after which a flow may have another slot, target or lease than before.
    pub fn changes(&self) -> u64 {
        self.maps.changes()
    }

    /// What the program has counted.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// All established flows, of both families.
    ///
    /// # Errors
    /// If the kernel refuses to list them.
    pub fn flows(&self) -> Result<Vec<(FlowKey<V6>, Flow)>, Error> {
        flows::read(&self.maps)
    }
}

/// Opens the maps, or makes them. The program is loaded into the kernel by [`verify`].
fn open(options: &Options) -> Result<(Ebpf, Maps), Error> {
    let sizes = options.sizes;
    let mut loader = EbpfLoader::new();
    // The program uses no type of the kernel. There are megabytes of them, and the default is to read all.
    loader.btf(None);
    let elements = crate::regions::elements(sizes.slots);
    for (name, size) in [
        ("SERVICES", sizes.services),
        ("SERVICE_COUNTERS", sizes.services),
        ("LISTENERS", sizes.services),
        ("MEMBERS", sizes.members),
        ("PREFIXES", sizes.prefixes),
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
    if let Some(maps) = options.pins.as_deref().map(pins::maps_folder) {
        for name in NAMES {
            loader.map_pin_path(name, maps.join(name));
        }
    }
    let mut program = loader.load(OBJECT)?;
    let maps = Maps::take(&mut program)?;
    Ok((program, maps))
}

/// Lets the kernel verify the program and keep it. It names its maps by their descriptors, which have to be open.
fn verify(program: &mut Ebpf) -> Result<(), Error> {
    let program: &mut SchedClassifier =
        program.program_mut(PROGRAM).ok_or(Error::Missing("program"))?.try_into()?;
    Ok(program.load()?)
}

/// Detaches the program of a link, and removes the pinned link and maps; none is success. Other files
/// stay, and a folder without maps of a data plane is another program's.
///
/// # Errors
/// If the kernel refuses.
pub fn remove(interface: &str, pins: &Path) -> Result<(), Error> {
    if !pins::is_of_a_link(pins) {
        return Ok(());
    }
    attach::detach(interface, pins)?;
    pins::remove(pins)
}
