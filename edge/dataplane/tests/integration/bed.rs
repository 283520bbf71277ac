// SPDX-License-Identifier: Apache-2.0
//! A loaded program with a few VIPs, and what it decides about frames.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use aya::{TestRun as _, TestRunOptions};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use steerage_edge_dataplane::maglev::Member;
use steerage_edge_dataplane::packet::hash::mix64;
use steerage_edge_dataplane::packet::maps::{Counters, Event, ListenerKey};
use steerage_edge_dataplane::packet::model::{self, Model, Verdict};
use steerage_edge_dataplane::{Dataplane, Listener, Options, Path, Sender, Sizes, State, Table, TargetState};

pub(crate) const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
pub(crate) const NODE_MAC: [u8; 6] = [2, 0, 0, 0, 1, 1];
/// Of an edge host that forwards to this one.
pub(crate) const FORWARDER_MAC: [u8; 6] = [2, 0, 0, 0, 1, 2];
pub(crate) const SYN: u8 = 2;
pub(crate) const ACK: u8 = 16;
pub(crate) const FIN_ACK: u8 = 17;
pub(crate) const RST: u8 = 4;

/// The listeners of each VIP.
pub(crate) const TCP: u16 = 443;
pub(crate) const AFFINE: u16 = 444;
pub(crate) const RANGED: u16 = 445;
pub(crate) const EMPTY: u16 = 446;
pub(crate) const LOCAL: u16 = 447;
pub(crate) const UDP: u16 = 53;

/// The nodes; this host is the last.
pub(crate) const NODES: [u32; 3] = [1, 2, 3];
pub(crate) const SELF: u32 = 4;
/// A lease that lasts, and one that has ended.
pub(crate) const FRESH: u32 = 1;
const ENDED: u32 = 2;

pub(crate) fn address(text: &str) -> IpAddr {
    text.parse().expect("address")
}

/// The addresses of one family.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Family {
    pub(crate) vip: IpAddr,
    /// A VIP whose lease has ended.
    pub(crate) stale: IpAddr,
    pub(crate) client: IpAddr,
    /// Outside the source ranges.
    pub(crate) outsider: IpAddr,
    pub(crate) router: IpAddr,
    /// An address of a node, and no VIP.
    pub(crate) node: IpAddr,
}

pub(crate) fn families() -> [Family; 2] {
    let family = |[vip, stale, client, outsider, router, node]: [&str; 6]| Family {
        vip: address(vip),
        stale: address(stale),
        client: address(client),
        outsider: address(outsider),
        router: address(router),
        node: address(node),
    };
    [
        family(["10.0.0.100", "10.0.0.101", "192.0.2.7", "203.0.113.9", "198.51.100.1", "10.0.0.21"]),
        family(["fd00::100", "fd00::101", "2001:db8::7", "2001:db9::9", "2001:db8::1", "fd00::21"]),
    ]
}

/// A table of the nodes.
pub(crate) fn table(size: u32, targets: &[u32]) -> Arc<Table> {
    let member = |target: &u32| Member { target: *target, seed: mix64(u64::from(*target)), weight: 1 };
    Arc::new(Table::new(size, &targets.iter().map(member).collect::<Vec<_>>()))
}

/// Each VIP has all listeners.
pub(crate) fn state() -> State {
    let mut state = State::default();
    for family in families() {
        for (vip, lease) in [(family.vip, FRESH), (family.stale, ENDED)] {
            state.vips.insert(vip, lease);
            let ranges = [format!("{}/24", "192.0.2.0"), "2001:db8::/32".to_owned()];
            let ranges = Arc::new(ranges.iter().map(|net| net.parse().expect("range")).collect());
            for (protocol, port, table, has_affinity, ranges) in [
                (6, TCP, 1, false, None),
                (6, AFFINE, 1, true, None),
                (6, RANGED, 1, false, Some(ranges)),
                (6, EMPTY, 2, false, None),
                (6, LOCAL, 3, false, None),
                (17, UDP, 1, false, None),
            ] {
                let listener = Listener { table, has_affinity, ranges };
                state.listeners.insert(ListenerKey::new(vip, protocol, port), listener);
            }
        }
    }
    state.tables = [(1, table(251, &NODES)), (2, Arc::default()), (3, table(251, &[SELF]))].into();
    for number in NODES {
        let address = address(&format!("10.0.0.2{number}"));
        state.targets.insert(number, TargetState { address, path: Path::Neighbour });
    }
    state.targets.insert(SELF, TargetState { address: address("10.0.0.1"), path: Path::Local });
    let own = ["10.0.0.21/32", "fd00::21/128", "10.244.1.0/24"];
    let own = own.iter().map(|net| net.parse().expect("net")).collect();
    state.senders.insert(NODE_MAC, Sender::Own(Arc::new(own)));
    state.senders.insert(FORWARDER_MAC, Sender::Forwarder);
    state
}

pub(crate) fn options() -> Options {
    let sizes = Sizes {
        services: 1024,
        slots: 1 << 16,
        members: 1024,
        prefixes: 1 << 16,
        targets: 64,
        flows: 4096,
        recent_flows: 4096,
    };
    Options { interface: "lo".to_owned(), mac: MAC, tunnel: None, pins: None, sizes, hook: None }
}

/// A BPF file system, which ends with this value.
pub(crate) struct Pins(pub(crate) PathBuf);

impl Pins {
    pub(crate) fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("steerage-pins-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).expect("folder");
        mount(Some("bpf"), &path, Some("bpf"), MsFlags::empty(), None::<&str>).expect("mount");
        Self(path)
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
        let _ = std::fs::remove_dir(&self.0);
    }
}

pub(crate) struct Bed {
    pub(crate) dataplane: Dataplane,
    pub(crate) state: State,
}

impl Bed {
    pub(crate) fn new() -> Self {
        Self::with(options(), state())
    }

    pub(crate) fn with(options: Options, state: State) -> Self {
        let mut dataplane = Dataplane::load(options).expect("load");
        dataplane.write(state.clone()).expect("write");
        assert!(dataplane.leases().set(FRESH, Duration::MAX));
        assert!(dataplane.leases().set(ENDED, Duration::from_nanos(1)));
        Self { dataplane, state }
    }

    /// Writes a changed state.
    pub(crate) fn change(&mut self, change: impl FnOnce(&mut State)) {
        change(&mut self.state);
        self.dataplane.write(self.state.clone()).expect("write");
    }

    /// The kernel's code for what becomes of the frame, and the frame then.
    pub(crate) fn run(&self, frame: &[u8]) -> (i32, Vec<u8>) {
        let mut out = vec![0; frame.len() + 256];
        let mut options = TestRunOptions::new();
        options.data_in = Some(frame);
        options.data_out = Some(&mut out);
        let result = self.dataplane.program().expect("program").test_run(options).expect("test run");
        out.truncate(usize::try_from(result.data_size_out).expect("length"));
        (result.return_value.cast_signed(), out)
    }

    /// The same in the words of the model.
    pub(crate) fn verdict(&self, frame: &[u8]) -> Verdict {
        self.verdict_and_frame(frame).0
    }

    pub(crate) fn verdict_and_frame(&self, frame: &[u8]) -> (Verdict, Vec<u8>) {
        let (events, targets) = (self.events(), self.targets());
        let (action, out) = self.run(frame);
        let event = difference(&events, &self.events());
        let target = difference(&targets, &self.targets());
        let verdict = match (action, event, target) {
            (-1, None, None) => Verdict::Pass,
            (-1, Some(Event::LeaseEnded), None) => Verdict::LeaseEnded,
            (-1, None, Some(target)) => Verdict::Local(target),
            (2, Some(event), None) if event.is_drop() => Verdict::Drop(event),
            (7, None, Some(target)) => Verdict::Forward(target),
            (7, Some(event), None) => Verdict::Answer(event, out.clone()),
            other => panic!("action, event and target make no sense: {other:?}"),
        };
        (verdict, out)
    }

    /// What was counted of a listener.
    pub(crate) fn counted(&self, listener: ListenerKey) -> Counters {
        self.dataplane.counts().listeners().expect("counters")[&listener]
    }

    /// The time in which the program forwards ends now, or has no end.
    pub(crate) fn end_forwarding(&self, is_over: bool) {
        let until = if is_over { Duration::from_nanos(1) } else { Duration::MAX };
        self.dataplane.leases().set_forwarding(until);
    }

    fn events(&self) -> BTreeMap<Event, u64> {
        self.dataplane.counts().events().expect("events")
    }

    fn targets(&self) -> BTreeMap<u32, u64> {
        let packets = |target| self.dataplane.counts().target(target).expect("counters").packets;
        (0..8).map(|target| (target, packets(target))).collect()
    }
}

/// Whether the kernel tests a program with this frame: it must have a payload, and whole IP headers.
pub(crate) fn is_testable(frame: &[u8]) -> bool {
    frame.len()
        >= match frame.get(12..14) {
            Some([0x08, 0x00]) => 34,
            Some([0x86, 0xdd]) => 54,
            _ => 15,
        }
}

/// The key whose number has risen by one.
fn difference<K: Ord + Copy + std::fmt::Debug>(
    before: &BTreeMap<K, u64>,
    after: &BTreeMap<K, u64>,
) -> Option<K> {
    let risen: Vec<_> = after.iter().filter(|(key, count)| before.get(*key) != Some(count)).collect();
    assert!(risen.len() <= 1, "several have risen: {risen:?}");
    risen.first().map(|(key, count)| {
        assert_eq!(before.get(*key).copied().unwrap_or(0) + 1, **count);
        **key
    })
}

/// A model of the same state.
pub(crate) fn model(state: &State) -> Model {
    let pairs = |nets: &std::collections::BTreeSet<_>| {
        nets.iter().map(|net: &ipnet::IpNet| (net.network(), net.prefix_len())).collect()
    };
    let service = |listener: &Listener| model::Service {
        slots: state.tables.get(&listener.table).map(|table| table.slots.clone()).unwrap_or_default(),
        affinity: listener.has_affinity,
        ranges: listener.ranges.as_ref().map(|nets| pairs(nets)),
    };
    let mut model = Model::default();
    model.mac = MAC;
    model.vips = state.vips.iter().map(|(vip, lease)| (*vip, *lease == FRESH)).collect();
    model.services = state.listeners.iter().map(|(key, listener)| (*key, service(listener))).collect();
    model.targets =
        state.targets.iter().map(|(number, target)| (*number, target.path == Path::Local)).collect();
    for (mac, sender) in &state.senders {
        match sender {
            Sender::Own(nets) => drop(model.senders.insert(*mac, pairs(nets))),
            Sender::Forwarder => drop(model.forwarders.insert(*mac)),
        }
    }
    model
}
