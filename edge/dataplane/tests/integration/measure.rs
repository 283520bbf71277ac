// SPDX-License-Identifier: Apache-2.0
//! Measurements, which only run by name:
//! `cargo test --release -p steerage-edge-dataplane --test integration -- --ignored --nocapture measure`
#![allow(clippy::cast_precision_loss, reason = "numbers for people")]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aya::{TestRun as _, TestRunOptions};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use steerage_edge_dataplane::packet::frames::Frame;
use steerage_edge_dataplane::packet::maps::ListenerKey;
use steerage_edge_dataplane::{
    Dataplane, Exception, Listener, Options, Path, Sizes, State, StateChange, TargetState, remove,
};
use steerage_requirements::requires;

use crate::bed::{self, ACK, SYN, families, table};

/// Packets of one run. The hop limit of the frame, which stays the same one, has to suffice.
const REPEAT: u32 = 200;

fn vip(number: u32, v6: bool) -> IpAddr {
    if v6 {
        IpAddr::V6(Ipv6Addr::from(0xfd00_u128 << 112 | u128::from(number)))
    } else {
        IpAddr::V4(Ipv4Addr::from(0x0a10_0000 | number))
    }
}

/// Services of both families with three targets each of a hundred nodes.
fn world(services: u32) -> State {
    let mut state = State::default();
    for number in 1..=100_u32 {
        let address = IpAddr::V4(Ipv4Addr::from(0x0a00_0000 | number));
        state.targets.insert(number, TargetState { address, path: Path::Neighbour });
    }
    for service in 0..services {
        let members = [0, 33, 66].map(|more| 1 + (service + more) % 100);
        for v6 in [false, true] {
            let number = service * 2 + u32::from(v6) + 1;
            state.tables.insert(number, table(251, &members));
            state.vips.insert(vip(service, v6), bed::FRESH);
            for port in [80, 443] {
                let listener = Listener { table: number, has_affinity: false, ranges: None };
                state.listeners.insert(ListenerKey::new(vip(service, v6), 6, port), listener);
            }
        }
    }
    state
}

fn options(sizes: Sizes) -> Options {
    Options { sizes, ..bed::options() }
}

fn median(mut values: Vec<f64>) -> String {
    values.sort_by(f64::total_cmp);
    format!("{:.1} ({:.1}..{:.1})", values[values.len() / 2], values[0], values[values.len() - 1])
}

/// Nanoseconds for a packet, each time over all frames.
fn time(dataplane: &Dataplane, frames: &[Vec<u8>], repeat: u32, expected: i32) -> f64 {
    let mut total = Duration::ZERO;
    for frame in frames {
        let mut options = TestRunOptions::new();
        (options.data_in, options.repeat) = (Some(frame.as_slice()), repeat);
        let result = dataplane.program().expect("program").test_run(options).expect("test run");
        assert_eq!(result.return_value.cast_signed(), expected);
        total += result.duration;
    }
    total.as_secs_f64() * 1e9 / frames.len() as f64
}

/// The same for one packet each, after the caches of the core were filled with other memory.
fn time_with_cold_caches(dataplane: &Dataplane, frames: &[Vec<u8>], expected: i32) -> f64 {
    const LINE: usize = 64;
    let mut other = vec![1_u8; 32 << 20];
    let evict = |frame: &Vec<u8>| {
        other.iter_mut().step_by(LINE).for_each(|byte| *byte = byte.wrapping_add(1));
        time(dataplane, std::slice::from_ref(frame), 1, expected)
    };
    let times: Vec<_> = frames.iter().map(evict).collect();
    times.iter().sum::<f64>() / times.len() as f64
}

fn frames(services: u32, v6: bool, flags: u8) -> Vec<Vec<u8>> {
    let client = families()[usize::from(v6)].client;
    let frame = |number: u32| {
        let vip = vip(number * 7919 % services, v6);
        let port = u16::try_from(1024 + number % 50_000).expect("port");
        let mut frame = Frame::tcp((client, port), (vip, 443), flags);
        frame.hop_limit = 255;
        frame.bytes()
    };
    (0..2000).map(frame).collect()
}

#[test]
#[ignore = "a measurement"]
fn measure_packets() {
    requires!(Root);
    println!("nanoseconds for a packet: median of 11 rounds over 2,000 flows, (least..most)");
    for services in [10, 1000, 10_000] {
        let mut dataplane = Dataplane::load(options(Sizes::default())).expect("load");
        dataplane.write(world(services)).expect("write");
        for v6 in [false, true] {
            let (syn, ack) = (frames(services, v6, SYN), frames(services, v6, ACK));
            for all in [&syn, &ack, &ack] {
                time(&dataplane, all, 1, 7);
            }
            let other: Vec<_> = (0..50)
                .map(|number| {
                    let (client, other) = (families()[usize::from(v6)].client, ["10.99.0.1", "fd99::1"]);
                    let to = (bed::address(other[usize::from(v6)]), 443);
                    Frame::tcp((client, 1000 + number), to, ACK).bytes()
                })
                .collect();
            let rounds = |all: &[Vec<u8>], action| {
                median((0..11).map(|_| time(&dataplane, all, REPEAT, action)).collect())
            };
            // One packet of each flow in turn: nothing of it is in the caches. The clock's part is in both.
            let cold =
                |all: &[Vec<u8>], action| median((0..11).map(|_| time(&dataplane, all, 1, action)).collect());
            let evicted = |all: &[Vec<u8>], action| {
                median((0..5).map(|_| time_with_cold_caches(&dataplane, &all[..20], action)).collect())
            };
            println!(
                "{services:6} Services, IPv{}: established {}, new {}, for no VIP {}; one by one: {} and {}; \
                 each after other memory has filled the caches: {} and {}",
                if v6 { 6 } else { 4 },
                rounds(&ack, 7),
                rounds(&syn, 7),
                rounds(&other, -1),
                cold(&ack, 7),
                cold(&other, -1),
                evicted(&ack, 7),
                evicted(&other, -1),
            );
        }
    }
}

/// Memory of maps by type, in MB, as the kernel accounts it. Arrays are in this process's memory only:
/// their size is their definition's.
fn memory() -> String {
    let mut types = std::collections::BTreeMap::<u32, u64>::new();
    for entry in std::fs::read_dir("/proc/self/fdinfo").expect("fdinfo").flatten() {
        let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().parse::<u64>().ok()
        };
        if let (Some(kind), Some(bytes)) = (field("map_type:"), field("memlock:")) {
            *types.entry(u32::try_from(kind).expect("type")).or_default() += bytes;
        }
    }
    let of = |kind: u32| types.get(&kind).copied().unwrap_or(0) as f64 / 1e6;
    format!("hash tables {:.1}, prefixes {:.1}, flows {:.1}, counters {:.1}", of(1), of(11), of(9), of(6))
}

/// Written, changed and adopted.
#[test]
#[ignore = "a measurement"]
fn measure_writes() {
    requires!(Root);
    let folder = std::env::temp_dir().join(format!("sd{}", std::process::id()));
    std::fs::create_dir(&folder).expect("folder");
    mount(Some("bpf"), &folder, Some("bpf"), MsFlags::empty(), None::<&str>).expect("mount");
    for services in [1000, 10_000] {
        let state = world(services);
        let options = Options { pins: Some(folder.join("link")), ..options(Sizes::default()) };
        let [mut load, mut write, mut change, mut compare, mut read, mut adopt] = [const { Vec::new() }; 6];
        let mut used = (0, 0);
        let milliseconds = |start: Instant| start.elapsed().as_secs_f64() * 1e3;
        for _ in 0..7 {
            let start = Instant::now();
            let mut dataplane = Dataplane::load(options.clone()).expect("load");
            load.push(milliseconds(start));
            let start = Instant::now();
            dataplane.write(state.clone()).expect("write");
            write.push(milliseconds(start));
            used = (dataplane.used_slots(), dataplane.sizes().expect("sizes").slots);
            let mut changed = state.clone();
            for number in 1..=20 {
                let table = table(251, &[number, 2 + number % 50 + 1]);
                changed.tables.insert(number, Arc::clone(&table));
                let start = Instant::now();
                let tables = [(number, Some(table))].into();
                dataplane.write_change(StateChange { tables, ..StateChange::default() }).expect("write");
                change.push(milliseconds(start));
            }
            let next = changed.clone();
            let start = Instant::now();
            dataplane.write(next).expect("write");
            compare.push(milliseconds(start));
            let start = Instant::now();
            assert!(dataplane.check().expect("check"));
            read.push(milliseconds(start));
            drop(dataplane);
            let start = Instant::now();
            let dataplane = Dataplane::load(options.clone()).expect("load");
            adopt.push(milliseconds(start));
            assert_eq!(dataplane.written(), Some(&changed));
            drop(dataplane);
            remove("lo", &folder.join("link")).expect("remove");
        }
        println!(
            "{services} Services, two families, two ports, three targets; {} of {} slots used; milliseconds: \
             load {}, write all {}, change one table {}, compare all {}, read all {}, load and adopt {}",
            used.0,
            used.1,
            median(load),
            median(write),
            median(change),
            median(compare),
            median(read),
            median(adopt)
        );
        let mut dataplane = Dataplane::load(Options { pins: None, ..options }).expect("load");
        let empty = memory();
        dataplane.write(state.clone()).expect("write");
        println!("memory in MB, empty: {empty}");
        println!("memory in MB, written: {}", memory());
    }
    umount2(&folder, MntFlags::MNT_DETACH).expect("unmount");
    std::fs::remove_dir(&folder).expect("remove");
}

/// Flows of one family, read in batches.
#[test]
#[ignore = "a measurement"]
fn measure_flows() {
    requires!(Root);
    let mut dataplane = Dataplane::load(options(Sizes::default())).expect("load");
    dataplane.write(world(1000)).expect("write");
    for number in 0..200_000_u32 {
        let [_, a, b, c] = number.to_be_bytes();
        let client = IpAddr::from([100, a, b, c]);
        let frame = Frame::tcp((client, 1000), (vip(number % 1000, false), 443), ACK).bytes();
        time(&dataplane, &[frame], 2, 7);
    }
    let mut rounds = Vec::new();
    let mut count = 0;
    for _ in 0..7 {
        let start = Instant::now();
        count = dataplane.flows().expect("flows").len();
        rounds.push(start.elapsed().as_secs_f64() * 1e3);
    }
    println!("{count} flows read in milliseconds: {}", median(rounds));
}

const FLOWS: u32 = 100_000;

/// Flows of which a part are exceptions: found here, and inserted on another host.
#[test]
#[ignore = "a measurement"]
fn measure_exceptions() {
    requires!(Root);
    let load = || {
        let mut dataplane = Dataplane::load(options(Sizes::default())).expect("load");
        dataplane.write(world(1000)).expect("write");
        dataplane
    };
    let (mut first, second) = (load(), load());
    for number in 0..FLOWS {
        let [_, a, b, c] = number.to_be_bytes();
        let frame = Frame::tcp((IpAddr::from([100, a, b, c]), 1000), (vip(number % 1000, false), 443), ACK);
        time(&first, &[frame.bytes()], 2, 7);
    }
    let milliseconds = |start: Instant| start.elapsed().as_secs_f64() * 1e3;
    let now = || {
        let time: Duration =
            nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).expect("time").into();
        steerage_edge_dataplane::packet::maps::seconds(u64::try_from(time.as_nanos()).expect("time"))
    };
    let flows = first.flow_table();
    for share in [0, 10, 100] {
        let mut state = world(1000);
        for service in 0..share * 10 {
            // Of IPv4, with other nodes than before.
            let members = [1, 2, 3].map(|more| 1 + (service + more * 10) % 100);
            state.tables.insert(service * 2 + 1, table(251, &members));
        }
        first.write(state).expect("write");
        let [mut scan, mut look, mut insert, mut delete] = [const { Vec::new() }; 4];
        let mut found = Vec::new();
        for _ in 0..7 {
            found.clear();
            let start = Instant::now();
            let scanned = flows.scan(now(), |key, pinned| found.push((key, pinned))).expect("scan");
            scan.push(milliseconds(start));
            assert_eq!(scanned.flows, FLOWS as usize);
            let start = Instant::now();
            for (key, _) in &found {
                assert!(flows.get(key, now()).expect("get").is_some());
            }
            look.push(milliseconds(start));
            let told: Vec<_> = found
                .iter()
                .map(|(key, pinned)| Exception {
                    key: *key,
                    target: flows.target(pinned.target).expect("a target"),
                    idle: pinned.idle(now()),
                    is_closing: false,
                })
                .collect();
            let keys: Vec<_> = told.iter().map(|told| told.key).collect();
            let start = Instant::now();
            let results = second.flow_table().insert(&told, now(), |_| false, |_, _| false).expect("insert");
            insert.push(milliseconds(start));
            assert!(results.iter().all(Result::is_ok));
            let start = Instant::now();
            second.flow_table().delete(&keys).expect("delete");
            delete.push(milliseconds(start));
        }
        println!(
            "{FLOWS} flows, {} exceptions; milliseconds: scan {}, look at each exception {}, insert them on another host {}, delete {}",
            found.len(),
            median(scan),
            median(look),
            median(insert),
            median(delete)
        );
    }
}
