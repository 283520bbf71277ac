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
        let change = |port: u32, deleted| Change {
            port,
            table: table.clone(),
            object: ObjectKind::Table,
            deleted,
            set: None,
            keys: Vec::new(),
        };
        assert_eq!(changes, [change(ours.port().unwrap(), false), change(theirs.port().unwrap(), true)]);
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

#[test]
fn monitor_names_set_and_keys_of_changed_elements() {
    requires!(NetworkNamespace);
    in_new_netns(|| {
        let table = Table::new(Family::Ip, "ours");
        let mut batch = with_table(&table);
        batch.add_set(&table, &Set::new("s", &[DataType::Mark]));
        let mut nft = Nft::open().unwrap();
        nft.commit(batch).unwrap();
        let mut monitor = Monitor::open().unwrap();
        let key = |number| concat(&[Field::Number(number)]);
        let mut batch = Batch::new();
        batch.add_elements(&table, "s", &[Element::key(key(1)), Element::key(key(2))]);
        batch.delete_elements(&table, "s", &[Element::key(key(1))]);
        nft.commit(batch).unwrap();
        let mut changed = Vec::new();
        while monitor.wait(Duration::ZERO).unwrap() {
            for change in monitor.receive().unwrap().unwrap_or_default() {
                assert_eq!((change.object, change.set.as_deref()), (ObjectKind::Elements, Some("s")));
                changed.extend(change.keys.into_iter().map(|key| (key, change.deleted)));
            }
        }
        assert_eq!(changed, [(key(1), false), (key(2), false), (key(1), true)]);
    });
}
