// SPDX-License-Identifier: Apache-2.0
//! Notifications and connection tracking on the real kernel. Needs root.

use std::net::{SocketAddr, UdpSocket};
use std::process::Command;
use std::time::Duration;

use steerage_nft::*;
use steerage_requirements::{in_new_netns, requires};

fn with_table(table: &Table) -> Batch {
    let mut batch = Batch::new();
    batch.add_table(table, None);
    batch
}

#[test]
fn monitor_reports_port_of_each_change() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        let mut monitor = Monitor::open().unwrap();
        assert_eq!(monitor.receive().unwrap(), None);
        assert!(!monitor.wait(Duration::from_millis(1)).unwrap());
        let table = Table::new(Family::Ip, "ours");
        let (mut ours, mut theirs) = (Nft::open().unwrap(), Nft::open().unwrap());
        ours.commit(with_table(&table)).unwrap();
        let mut batch = Batch::new();
        batch.delete_table(&table);
        theirs.commit(batch).unwrap();

        let mut changes = Vec::new();
        while monitor.wait(Duration::ZERO).unwrap() {
            changes.extend(monitor.receive().unwrap().unwrap_or_default());
        }
        let own_name = std::fs::read_to_string("/proc/thread-self/comm").unwrap().trim().to_owned();
        let told = |port: u32, deleted| {
            let change = Change {
                port,
                table: table.clone(),
                object: ObjectKind::Table,
                name: None,
                deleted,
                is_dormant: false,
                base: None,
            };
            [Some(Notification::Change(change)), None]
        };
        let expected = [told(ours.port().unwrap(), false), told(theirs.port().unwrap(), true)].concat();
        assert_eq!(changes.len(), expected.len(), "{changes:?}");
        let mut generations = Vec::new();
        for (found, expected) in changes.iter().zip(expected) {
            match (found, expected) {
                (found, Some(expected)) => assert_eq!(*found, expected),
                (Notification::Commit(Commit { process: Some(process), generation, .. }), None) => {
                    assert!(process.name == own_name && process.id > 0, "{process:?}, not {own_name}");
                    generations.push(generation.expect("a generation"));
                }
                (found, None) => panic!("{found:?}"),
            }
        }
        let last = ours.generation().unwrap();
        assert_eq!((generations.len(), generations[1]), (2, last));
        assert_eq!(next_generation(generations[0]), last);
    });
}

#[test]
fn log_tells_own_commits_from_others() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        let log = CommitLog::default();
        let (mut ours, mut theirs) = (Nft::open().unwrap(), Nft::open().unwrap());
        ours.log_commits(log.clone());
        let table = Table::new(Family::Ip, "ours");
        let start = ours.generation().unwrap();
        ours.commit(with_table(&table)).unwrap();
        // Nothing changes.
        ours.commit(with_table(&table)).unwrap();
        let mut missing = Batch::new();
        missing.delete_set(&table, "missing");
        assert!(ours.commit(missing).is_err());
        ours.transact(|_| Ok::<_, Error>(with_table(&Table::new(Family::Ip6, "ours")))).unwrap();
        let own = ours.generation().unwrap();
        assert_eq!(own, next_generation(next_generation(start)));
        assert_eq!(log.covers(start, own), Some(true));
        theirs.commit(with_table(&Table::new(Family::Ip, "theirs"))).unwrap();
        ours.commit(with_table(&Table::new(Family::Ip6, "more"))).unwrap();
        let now = ours.generation().unwrap();
        assert_eq!(log.covers(start, now), Some(false));
        assert_eq!(log.covers(next_generation(own), now), Some(true));
    });
}

#[test]
fn chains_that_drop_everything_are_told_from_others() {
    requires!(NetworkNamespace, Program("nft"), Program("iptables-nft"));
    in_new_netns(|| {
        let run = |line: &str| {
            let words: Vec<_> = line.split(' ').collect();
            let status = Command::new(words[0]).args(&words[1..]).status().unwrap();
            assert!(status.success(), "{line}");
        };
        run("nft add table inet t");
        let table = Table::new(Family::Inet, "t");
        for (number, (rule, drops)) in [
            ("drop", true),
            ("counter log drop", true),
            ("reject with icmpx type admin-prohibited", true),
            ("accept", false),
            ("tcp dport 80 drop", false),
            ("ct state invalid drop", false),
            ("counter", false),
            ("limit rate 1/second drop", false),
        ]
        .into_iter()
        .enumerate()
        {
            run(&format!("nft add chain inet t c{number}"));
            run(&format!("nft add rule inet t c{number} {rule}"));
            let rules = Nft::open().unwrap().rules_of_chain(&table, &format!("c{number}")).unwrap();
            assert_eq!(rules.len(), 1, "{rule}");
            assert_eq!(rules[0].is_unconditional_drop(), drops, "{rule}");
        }
        run("iptables-nft -A FORWARD -p tcp -j DROP");
        run("iptables-nft -A FORWARD -j DROP");
        run("iptables-nft -A FORWARD -j REJECT");
        run("iptables-nft -A FORWARD -j ACCEPT");
        let rules =
            Nft::open().unwrap().rules_of_chain(&Table::new(Family::Ip, "filter"), "FORWARD").unwrap();
        let drops: Vec<_> = rules.iter().map(RuleInfo::is_unconditional_drop).collect();
        assert_eq!(drops, [false, true, true, false]);
    });
}

/// Translates the destination `from` to `to`, sends one datagram to `from` and returns the client's address.
fn translated_flow(family: Family, from: SocketAddr, to: SocketAddr) -> SocketAddr {
    let table = Table::new(family, "dns");
    let mut batch = with_table(&table);
    let rule = Rule::new()
        .equals(&Expression::daddr(family), from.ip().into())
        .equals(&Expression::l4proto(), Field::Proto(17))
        .load(&[Expression::Value(to.ip().into()), Expression::Value(Field::Port(to.port()))])
        .dnat(family);
    batch.add_chain(&table, &Chain::base("output", ChainType::Nat, Hook::Output, -100));
    batch.add_rule(&table, "output", &rule);
    Nft::open().unwrap().commit(batch).unwrap();
    let server = UdpSocket::bind(to).unwrap();
    let client = UdpSocket::bind(SocketAddr::new(to.ip(), 0)).unwrap();
    client.send_to(b"?", from).unwrap();
    server.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let (_, client_address) = server.recv_from(&mut [0; 8]).unwrap();
    client_address
}

#[test]
fn conntrack_entries_are_listed_and_deleted() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
        for (family, from, to) in
            [(Family::Ip, "127.9.9.9:53", "127.0.0.1:5353"), (Family::Ip6, "[::1]:53", "[::1]:5353")]
        {
            let (from, to): (SocketAddr, SocketAddr) = (from.parse().unwrap(), to.parse().unwrap());
            let client = translated_flow(family, from, to);
            let mut conntrack = Conntrack::open().unwrap();
            let wanted =
                |entry: &ConntrackEntry| entry.original.destination == from && entry.original.protocol == 17;
            let entries = conntrack.entries(family, wanted).unwrap();
            assert_eq!(entries.len(), 1);
            assert_eq!((entries[0].original.source, entries[0].reply.source), (client, to));
            assert_ne!(entries[0].status & Ct::DNAT, 0);
            assert_eq!(conntrack.delete(&entries).unwrap(), 1);
            assert_eq!(conntrack.entries(family, wanted).unwrap(), []);
            assert_eq!(conntrack.delete(&entries).unwrap(), 0);
        }
    });
}

/// Rules that mention no zone see no flow of another one: such an entry differs from it, and is deleted only if its zone is named.
#[test]
fn conntrack_entries_of_other_zones_are_told_apart() {
    requires!(NetworkNamespace, Program("nft"));
    in_new_netns(|| {
        assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
        let zones = "add table ip zones; \
            add chain ip zones out { type filter hook output priority -300 ; }; \
            add rule ip zones out udp dport 5301 ct zone set 7; \
            add rule ip zones out udp dport 5302 ct original zone set 9; \
            add rule ip zones out udp dport 5303 ct state new";
        assert!(Command::new("nft").arg(zones).status().unwrap().success());
        let client = UdpSocket::bind("127.0.0.1:5000").unwrap();
        let to: Vec<SocketAddr> = [5301, 5302, 5303].map(|port| ([127, 0, 0, 1], port).into()).to_vec();
        for to in &to {
            client.send_to(b"?", to).unwrap();
        }
        let mut conntrack = Conntrack::open().unwrap();
        let mut listed = || {
            let ours = |entry: &ConntrackEntry| to.contains(&entry.original.destination);
            let mut entries = conntrack.entries(Family::Ip, ours).unwrap();
            entries.sort_by_key(|entry| entry.original.destination);
            entries
        };
        let entries = listed();
        let is_default: Vec<_> = entries.iter().map(ConntrackEntry::is_in_default_zone).collect();
        assert_eq!(is_default, [false, false, true]);
        assert_eq!(Conntrack::open().unwrap().delete(&entries[..1]).unwrap(), 1, "by its zone");
        assert_eq!(listed(), entries[1..]);
    });
}
