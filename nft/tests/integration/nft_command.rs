// SPDX-License-Identifier: Apache-2.0
//! `nft list ruleset`, as text and JSON, must work on everything that this crate can load: operators debug with it, and
//! other programs on the host list the whole ruleset. Needs root and the `nft` command.

use std::net::UdpSocket;
use std::process::Command;
use std::time::Duration;

use steerage_nft::*;
use steerage_requirements::{in_new_netns, requires};

fn nft(arguments: &[&str]) -> String {
    let output = Command::new("nft").args(arguments).output().expect("the nft command is installed");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "nft {arguments:?}: {} {error}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// Loads a table with nearly every kind of object and expression.
fn load(family: Family, address: Field, here: DataType) {
    let table = Table::new(family, "test");
    let ends = [here, DataType::InetService];
    let front = [here, DataType::InetProto, DataType::InetService];
    let slot = [here, DataType::InetProto, DataType::InetService, DataType::Mark];
    let key = || vec![Expression::daddr(family), Expression::l4proto(), Expression::dport()];
    let with = |last: Expression| key().into_iter().chain([last]).collect::<Vec<_>>();
    let hash = Expression::Jhash {
        of: vec![Expression::saddr(family), Expression::sport()],
        modulus: 64,
        seed: 7,
        offset: 0,
    };
    let original = |family| {
        vec![
            Expression::Ct(Ct::Destination(family, Direction::Original)),
            Expression::l4proto(),
            Expression::Ct(Ct::DestinationPort(Direction::Original)),
        ]
    };
    let mut batch = Batch::new();
    batch
        .add_table(&table, Some("everything"))
        .add_set(&table, &Set::new("vips", &front))
        .add_set(&table, &Set::new("ep3", &slot).maps_to(&ends))
        .add_set(&table, &Set::new("ep64", &slot).maps_to(&ends))
        .add_set(
            &table,
            &Set::new("ranges", &[here, DataType::InetProto, DataType::InetService, here]).interval(),
        )
        .add_set(&table, &Set::new("affinity", &slot[..3]).maps_to(&ends).expiring(None).dynamic().size(1000))
        .add_chain(&table, &Chain::regular("services"))
        .add_chain(&table, &Chain::base("prerouting", ChainType::Nat, Hook::Prerouting, -101))
        .add_chain(&table, &Chain::base("output", ChainType::Nat, Hook::Output, -101))
        .add_chain(&table, &Chain::base("postrouting", ChainType::Nat, Hook::Postrouting, 99))
        .add_chain(
            &table,
            &Chain::base("forward", ChainType::Filter, Hook::Forward, 0).policy(ChainPolicy::Drop),
        );
    let rules = [
        ("prerouting", Rule::new().in_set("vips", &key()).goto("services").comment("gate")),
        (
            "prerouting",
            Rule::new().equals(&Expression::FibType(FibAddress::Destination), Expression::LOCAL).counter(),
        ),
        ("prerouting", Rule::new().equals(&Expression::ReversePath, Field::Number(0)).drop()),
        (
            "postrouting",
            Rule::new().not_equals(&Expression::Meta(Meta::SkUid), Field::Number(4711)).counter(),
        ),
        (
            "services",
            Rule::new().map("ep3", &with(Expression::Random { modulus: 3, offset: 0 })).dnat(family),
        ),
        (
            "services",
            Rule::new().map("ep3", &with(Expression::Increment { modulus: 3, offset: 0 })).dnat(family),
        ),
        ("services", Rule::new().map("ep64", &with(hash)).dnat(family)),
        ("services", Rule::new().not_in_set("ranges", &with(Expression::saddr(family))).drop()),
        ("services", Rule::new().reject(Reject::PortUnreachable(family))),
        (
            "postrouting",
            Rule::new()
                .has_any(Expression::Ct(Ct::Status), Ct::DNAT)
                .in_set("vips", &original(family))
                .masquerade_random(),
        ),
        (
            "postrouting",
            Rule::new().dynamic(
                DynamicOp::Update,
                "affinity",
                &original(family),
                &[Expression::daddr(family), Expression::dport()],
                Some(Duration::from_mins(1)),
            ),
        ),
        ("forward", Rule::new().has_any(Expression::Ct(Ct::State), Ct::ESTABLISHED | Ct::RELATED).accept()),
        (
            "forward",
            Rule::new()
                .equals(&Expression::l4proto(), Field::Proto(6))
                .equals_bytes(&Expression::tcp_flags().masked(vec![0x12]), &[0x02])
                .limit_per_second(10, 5)
                .reject(Reject::TcpReset),
        ),
        ("forward", Rule::new().set_mark(&Expression::Value(Field::Number(0x4000))).return_()),
        ("forward", Rule::new().equals_bytes(&Expression::Meta(Meta::PktType), &[0]).drop()),
    ];
    for (chain, rule) in &rules {
        batch.add_rule(&table, chain, rule);
    }
    let key = [address, Field::Proto(6), Field::Port(80)];
    let slot = |n| concat(&[key[0], key[1], key[2], Field::Number(n)]);
    let range = |last| concat(&[key[0], key[1], key[2], last]);
    batch.add_elements(&table, "vips", &[Element::key(concat(&key))]);
    batch.add_elements(&table, "ep3", &[Element::entry(slot(2), concat(&[address, Field::Port(8080)]))]);
    batch.add_elements(&table, "ep64", &[Element::entry(slot(63), concat(&[address, Field::Port(8080)]))]);
    batch.add_elements(&table, "ranges", &[Element::range(range(address), range(address))]);
    Nft::open().unwrap().commit(batch).unwrap();
}

#[test]
fn nft_command_lists_loaded_tables() {
    requires!(NetworkNamespace, Program("nft"));
    in_new_netns(|| {
        load(Family::Ip, Field::V4([10, 0, 0, 1].into()), DataType::Ipv4Addr);
        load(Family::Ip6, Field::V6("fd00::1".parse().unwrap()), DataType::Ipv6Addr);
        let text = nft(&["list", "ruleset"]);
        for wanted in [
            "comment \"everything\"",
            "10.0.0.1 . tcp . 80",
            "fd00::1 . tcp . 80",
            "numgen random mod 3",
            "jhash",
            "masquerade fully-random",
            "fib daddr type local",
            "fib saddr . iif oif",
            "meta skuid != 4711",
            "comment \"gate\"",
        ] {
            assert!(text.contains(wanted), "no {wanted} in\n{text}");
        }
        assert!(nft(&["-j", "list", "ruleset"]).starts_with('{'));
    });
}

/// One map's data are part of another map's key.
#[test]
fn nft_command_lists_nested_lookup() {
    requires!(NetworkNamespace, Program("nft"));
    in_new_netns(|| {
        for (family, here) in [(Family::Ip, DataType::Ipv4Addr), (Family::Ip6, DataType::Ipv6Addr)] {
            let table = Table::new(family, "test");
            let front = [here, DataType::InetProto, DataType::InetService];
            let client_types = [front[0], front[1], front[2], here];
            let sticky_types = [DataType::Mark, front[0], front[1], front[2]];
            let key = || vec![Expression::daddr(family), Expression::l4proto(), Expression::dport()];
            let mut client = key();
            client.push(Expression::saddr(family));
            let mut sticky = key();
            sticky.insert(0, Expression::MapWord { map: "affinity".to_owned(), key: client.clone() });
            let hash = Expression::Jhash {
                of: vec![Expression::daddr(family)],
                modulus: u32::MAX,
                seed: 9,
                offset: 0,
            };
            let affinity = Set::new("affinity", &client_types).maps_to(&[DataType::Mark]);
            let mut batch = Batch::new();
            batch
                .add_table(&table, None)
                .add_set(&table, &affinity.expiring(None).dynamic().size(1000))
                .add_set(&table, &Set::new("sticky", &sticky_types).maps_to(&[here, DataType::InetService]))
                .add_chain(&table, &Chain::base("prerouting", ChainType::Nat, Hook::Prerouting, -101))
                .add_rule(&table, "prerouting", &Rule::new().map("sticky", &sticky).dnat(family))
                .add_rule(
                    &table,
                    "prerouting",
                    &Rule::new().dynamic(
                        DynamicOp::Delete,
                        "affinity",
                        &client,
                        &[Expression::Meta(Meta::Mark)],
                        None,
                    ),
                )
                .add_rule(
                    &table,
                    "prerouting",
                    &Rule::new().dynamic(DynamicOp::Update, "affinity", &client, &[hash], None),
                );
            Nft::open().unwrap().commit(batch).unwrap();
        }
        let text = nft(&["list", "ruleset"]);
        assert!(
            text.contains("map @affinity")
                && text.contains("map @sticky")
                && text.contains("delete @affinity"),
            "{text}"
        );
        nft(&["-j", "list", "ruleset"]);
    });
}

/// Every key has a limit of its own, which begins with the whole burst.
#[test]
fn dynamic_limit_counts_each_key() {
    requires!(NetworkNamespace, Program("nft"));
    in_new_netns(|| {
        nft(&["list", "ruleset"]);
        assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
        let table = Table::new(Family::Ip, "test");
        let limit = Limit { packets: 3, unit: 86_400, burst: 3, over: true };
        let key = [Expression::dport()];
        let met = Set::new("met", &[DataType::InetService]).expiring(None).dynamic().size(100);
        let rule = Rule::new()
            .equals(&Expression::l4proto(), Field::Proto(17))
            .dynamic_limit("met", &key, Duration::from_hours(24), limit)
            .drop();
        let mut batch = Batch::new();
        batch
            .add_table(&table, None)
            .add_set(&table, &met)
            .add_chain(&table, &Chain::base("out", ChainType::Filter, Hook::Output, 0))
            .add_rule(&table, "out", &rule);
        Nft::open().unwrap().commit(batch).unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let sent = |port: u16| (0..10).filter(|_| socket.send_to(b"?", ("127.0.0.1", port)).is_ok()).count();
        assert_eq!([sent(1001), sent(1002), sent(1001)], [3, 3, 0]);
        let text = nft(&["list", "ruleset"]);
        assert!(text.contains("limit rate over 3/day burst 3 packets"), "{text}");
        nft(&["-j", "list", "ruleset"]);
    });
}

#[test]
fn nft_command_lists_ingress_forwarding() {
    requires!(NetworkNamespace, Program("nft"));
    in_new_netns(|| {
        let table = Table::new(Family::Netdev, "test");
        let mut batch = Batch::new();
        batch
            .add_table(&table, None)
            .add_set(
                &table,
                &Set::new("slots", &[DataType::Ipv4Addr, DataType::Mark]).maps_to(&[DataType::Ipv4Addr]),
            )
            .add_chain(
                &table,
                &Chain::base("in", ChainType::Filter, Hook::Ingress(vec!["lo".to_owned()]), 0),
            );
        let hash = Expression::Jhash {
            of: vec![Expression::saddr(Family::Ip), Expression::sport()],
            modulus: 64,
            seed: 0x5eed,
            offset: 0,
        };
        let rule = Rule::new()
            .equals_bytes(&Expression::Meta(Meta::Protocol), &0x0800_u16.to_be_bytes())
            .equals(&Expression::l4proto(), Field::Proto(6))
            .map("slots", &[Expression::daddr(Family::Ip), hash])
            .forward(Family::Ip, 1);
        batch.add_rule(&table, "in", &rule);
        Nft::open().unwrap().commit(batch).unwrap();
        let text = nft(&["list", "ruleset"]);
        assert!(text.contains("type filter hook ingress") && text.contains("seed 0x5eed"), "{text}");
        nft(&["-j", "list", "ruleset"]);
    });
}
