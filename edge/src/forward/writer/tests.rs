// SPDX-License-Identifier: Apache-2.0
//! The table in a real kernel: listed by `nft`, adopted, repaired.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::process::Command;

use ipnet::IpNet;
use steerage_requirements::{in_new_netns, requires};

use super::*;
use crate::forward::{LOCAL_TARGET, TARGET, slot_table_id};

fn run(command: &str) -> String {
    let output = Command::new("sh").args(["-c", command]).output().expect("sh");
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn device() -> Device {
    Device { name: "lo".to_owned(), index: 1 }
}

fn state() -> ForwardingState {
    let net = |text: &str| text.parse::<IpNet>().expect("net");
    let ip = |text: &str| text.parse().expect("address");
    let (four, six) = (slot_table_id(1, 0, false), slot_table_id(2, 1, true));
    let slots = SlotTable { slots: [TARGET + 1, TARGET + 2].repeat(64), usable: [TARGET + 1].into() };
    let more = SlotTable {
        slots: [TARGET + 3, LOCAL_TARGET].repeat(1024),
        usable: [TARGET + 3, LOCAL_TARGET].into(),
    };
    ForwardingState {
        vips: [ip("10.0.0.100"), ip("fd00::100")].into(),
        listeners: [((ip("10.0.0.100"), 6, 80), four), ((ip("fd00::100"), 17, 53), six)].into(),
        fragments: [(ip("fd00::100"), six)].into(),
        slot_tables: [(four, Arc::new(slots)), (six, Arc::new(more))].into(),
        targets: [(TARGET + 1, ip("10.0.0.1")), (TARGET + 2, ip("10.0.0.2")), (TARGET + 3, ip("fd00::3"))]
            .into(),
        local: [ip("fd00::100")].into(),
        ranges: [
            (ip("10.0.0.100"), [net("10.1.0.0/16"), net("10.3.0.7/32")].into()),
            (ip("fd00::100"), [net("fd01::/64"), net("::/0")].into_iter().take(1).collect()),
        ]
        .into(),
        peers: [[2, 0, 0, 0, 0, 9]].into(),
        nodes: [[2, 0, 0, 0, 0, 1]].into(),
        sources: [(
            [2, 0, 0, 0, 0, 1],
            [net("10.0.0.1/32"), net("10.244.1.0/24"), net("fd00::1/128")].into(),
        )]
        .into(),
    }
}

#[test]
fn nft_lists_the_ruleset_as_text_and_json() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        run("ip link set lo up");
        let mut kernel = NftWriter::open(device()).expect("open");
        assert!(!kernel.is_built() && !kernel.has_table());
        kernel.apply(&state()).expect("apply");
        let text = run("nft list ruleset");
        for part in [
            "chain ingress",
            "fwd ip to meta mark map @targets4 device \"lo\"",
            "10.244.1.0/24",
            "@slots65536",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        run("nft -j list ruleset");
    });
}

#[test]
fn second_process_adopts_the_ruleset() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        run("ip link set lo up");
        NftWriter::open(device()).expect("open").apply(&state()).expect("apply");
        let mut second = NftWriter::open(device()).expect("open");
        assert!(second.is_built());
        assert_eq!(second.written(), &state());
        assert_eq!(second.apply(&state()).expect("apply"), 0, "nothing to write");
        let other = Device { name: "lo".to_owned(), index: 7 };
        let other = NftWriter::open(other).expect("open");
        assert!(!other.is_built() && other.has_table(), "rules name the device's index");
    });
}

#[test]
fn applied_difference_reaches_the_wanted_state() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        run("ip link set lo up");
        let mut kernel = NftWriter::open(device()).expect("open");
        let mut changed = state();
        let (moved, id) = (slot_table_id(1, 2, false), slot_table_id(1, 0, false));
        let slots = SlotTable { slots: vec![TARGET + 2; 16_384], usable: [TARGET + 2].into() };
        changed.slot_tables.remove(&id);
        changed.slot_tables.insert(moved, Arc::new(slots));
        changed.listeners.values_mut().filter(|table| **table == id).for_each(|table| *table = moved);
        changed.targets.remove(&(TARGET + 1));
        changed.ranges.clear();
        changed.sources.clear();
        for state in [&ForwardingState::default(), &state(), &changed, &state(), &ForwardingState::default()]
        {
            kernel.apply(state).expect("apply");
            assert_eq!(NftWriter::open(device()).expect("open").written(), state);
        }
    });
}

#[test]
fn foreign_changes_are_detected_and_repaired() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        run("ip link set lo up");
        let mut kernel = NftWriter::open(device()).expect("open");
        kernel.apply(&state()).expect("apply");
        run("nft add table ip other");
        assert!(!kernel.is_out_of_sync(true).expect("look"), "another program's table");
        for damage in ["nft flush ruleset", "nft delete element netdev steerage-edge vips4 '{ 10.0.0.100 }'"]
        {
            run(damage);
            let whole = damage.contains("flush");
            assert_eq!(
                kernel.is_out_of_sync(false).expect("look"),
                whole,
                "without comparing elements: {damage}"
            );
            if whole {
                kernel.apply(&state()).expect("apply");
                run(damage);
            }
            assert!(kernel.is_out_of_sync(true).expect("look"), "{damage}");
            kernel.apply(&state()).expect("apply");
            assert_eq!(NftWriter::open(device()).expect("open").written(), &state());
        }
        // A change that is not detected before the next write.
        run("nft flush ruleset");
        let mut next = state();
        next.peers.clear();
        kernel.apply(&next).expect("apply");
        assert_eq!(NftWriter::open(device()).expect("open").written(), &next);
    });
}

/// In one transaction, 1,000 deletions of 5,000 ranges kept a processor in the kernel for 20 s.
#[test]
fn set_that_loses_many_ranges_is_replaced() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        run("ip link set lo up");
        let mut before = state();
        let vip = |number: u8| IpAddr::from([10, 0, 1, number]);
        for number in 0..5 {
            let net = |range: u32| IpNet::from(IpAddr::from((0x0a01_0000 + 2 * range).to_be_bytes()));
            before.vips.insert(vip(number));
            before.ranges.insert(vip(number), (0..100).map(net).collect());
        }
        let mut after = before.clone();
        for number in [1, 3] {
            after.vips.remove(&vip(number));
            after.ranges.remove(&vip(number));
        }
        let mut emptied = after.clone();
        emptied.ranges.retain(|vip, _| vip.is_ipv6());
        let mut reworked = emptied.clone();
        reworked.ranges.insert(vip(0), (0..9).map(|n| IpNet::from(vip(n))).collect());
        reworked.sources.clear();
        let mut kernel = NftWriter::open(device()).expect("open");
        for (state, set) in [
            (&before, "ranges4"),
            (&after, "other_ranges4"),
            (&emptied, "ranges4"),
            (&before, "ranges4"),
            (&after, "other_ranges4"),
            (&reworked, "ranges4"),
        ] {
            kernel.apply(state).expect("apply");
            let mut next = NftWriter::open(device()).expect("open");
            assert!(next.is_built(), "it is adopted, and keeps its flows");
            assert_eq!(next.written(), state);
            assert_eq!(next.apply(state).expect("apply"), 0);
            let rules = run("nft list chain netdev steerage-edge check_ranges4");
            assert!(rules.contains(&format!("@{set} ")), "{set}: {rules}");
            assert_eq!(run("nft list sets netdev | grep -cE '(ranges|sources)[46] '"), "4\n", "none is left");
        }
    });
}

/// The process ended between the two transactions.
#[test]
fn set_whose_replacement_ended_in_the_middle_is_read_and_deleted() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        run("ip link set lo up");
        NftWriter::open(device()).expect("open").apply(&state()).expect("apply");
        run(
            "nft add set netdev steerage-edge other_ranges4 '{ type ipv4_addr . ipv4_addr; flags interval; }'
             nft add element netdev steerage-edge other_ranges4 '{ 10.0.0.100 . 0.0.0.0/0 }'",
        );
        let mut next = NftWriter::open(device()).expect("open");
        assert_eq!(next.written(), &state(), "the set into which the rules look");
        let mut fewer = state();
        let many: BTreeSet<IpNet> = (0..9).map(|n| IpNet::from(IpAddr::from([10, 9, 9, n * 2]))).collect();
        for ranges in [many, ["10.3.0.7/32".parse().expect("net")].into()] {
            fewer.ranges.insert(IpAddr::from([10, 0, 0, 100]), ranges);
            next.apply(&fewer).expect("apply");
            assert_eq!(NftWriter::open(device()).expect("open").written(), &fewer);
        }
        assert!(!run("nft list table netdev steerage-edge").contains("0.0.0.0/0"));
    });
}

/// Packets are looked up in the new set as soon as the rules look into it.
#[test]
fn replacement_of_a_set_drops_no_admitted_packet() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        run("ip link set lo up; ip address add 127.0.9.9/32 dev lo");
        let vip = IpAddr::from([127, 0, 9, 9]);
        let net = |range: u32| IpNet::from(IpAddr::from((0x0a01_0000 + 2 * range).to_be_bytes()));
        let with = |count: u32| {
            let table = slot_table_id(1, 0, false);
            let slots = SlotTable { slots: vec![LOCAL_TARGET; 128], usable: [LOCAL_TARGET].into() };
            let ranges = (0..count).map(net).chain(["127.0.0.0/8".parse().expect("net")]).collect();
            ForwardingState {
                vips: [vip].into(),
                listeners: [((vip, 17, 53), table)].into(),
                slot_tables: [(table, Arc::new(slots))].into(),
                local: [vip].into(),
                ranges: [(vip, ranges)].into(),
                ..ForwardingState::default()
            }
        };
        let mut kernel = NftWriter::open(device()).expect("open");
        let (many, fewer) = (with(20_000), with(19_000));
        kernel.apply(&many).expect("apply");
        let server = std::net::UdpSocket::bind("127.0.9.9:53").expect("bind");
        nix::sys::socket::setsockopt(&server, nix::sys::socket::sockopt::RcvBufForce, &(256 << 20))
            .expect("buffer");
        server.set_read_timeout(Some(std::time::Duration::from_millis(500))).expect("timeout");
        let is_over = std::sync::atomic::AtomicBool::new(false);
        let (sent, received) = std::thread::scope(|scope| {
            let sender = scope.spawn(|| {
                let client = std::net::UdpSocket::bind("127.0.0.1:0").expect("bind");
                let mut sent = 0;
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    client.send_to(b"x", "127.0.9.9:53").expect("send");
                    sent += 1;
                    std::thread::sleep(std::time::Duration::from_micros(20));
                }
                sent
            });
            let receiver = scope.spawn(|| {
                let mut received = 0;
                // The kernel can keep a processor for longer than the timeout: a silence ends the test only after the last packet.
                loop {
                    let was_over = is_over.load(std::sync::atomic::Ordering::Relaxed);
                    match server.recv(&mut [0; 8]) {
                        Ok(_) => received += 1,
                        Err(_) if was_over => break received,
                        Err(_) => {}
                    }
                }
            });
            for state in [&fewer, &many, &fewer, &many, &fewer] {
                kernel.apply(state).expect("apply");
            }
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
            (sender.join().expect("sender"), receiver.join().expect("receiver"))
        });
        assert!(sent > 100, "{sent}");
        assert_eq!(received, sent);
    });
}

#[test]
fn remove_is_complete_and_idempotent() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        run("ip link set lo up");
        NftWriter::open(device()).expect("open").apply(&state()).expect("apply");
        remove().expect("remove");
        remove().expect("again");
        assert_eq!(run("nft list ruleset"), "");
    });
}

#[test]
fn nft_lists_every_rule_on_its_own() {
    requires!(NetworkNamespace);
    let mut crashed = Vec::new();
    for (chain, rule) in rules::rules(1) {
        in_new_netns(|| {
            run("ip link set lo up");
            let table = rules::table();
            let mut batch = Batch::new();
            rules::build(&mut batch, "lo", 1);
            for chain in [
                "ingress",
                "vip4",
                "fragment4",
                "error4",
                "icmp4",
                "open4",
                "tcp4",
                "udp4",
                "out4",
                "check_ranges4",
                "check_sources4",
            ] {
                batch.flush_chain(&table, chain).flush_chain(&table, &chain.replace('4', "6"));
            }
            batch.add_rule(&table, &chain, &rule);
            Nft::open().expect("open").commit(batch).expect("commit");
            let output = Command::new("nft").args(["list", "ruleset"]).output().expect("nft");
            if !output.status.success() {
                crashed.push(chain.clone());
            }
        });
    }
    assert!(crashed.is_empty(), "{crashed:?}");
}
