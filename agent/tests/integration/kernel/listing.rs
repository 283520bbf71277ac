// SPDX-License-Identifier: Apache-2.0
//! `nft list ruleset`, text and JSON, reads everything that the agent loads: operators debug with it, and other programs on the
//! host list the whole ruleset. Some layouts crash nft 1.0.6.

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::process::Command;

use steerage_agent::rules::TABLE;
use steerage_model::{Family, ServiceKind, TrafficPolicy};
use steerage_nft::{Nft, Table};
use steerage_requirements::{in_new_netns, requires};

use crate::kernel::cluster::{Proxy, Spec, World, addr, cluster_ip, plans, pod_networks};
use crate::kernel::ruleset::{Counts, counts_in_json, counts_in_text, nft};

/// A Service of each kind of element: all classes, both lists, affinity, source ranges, node ports, hairpins, rejects.
fn everything() -> World {
    let plain = |elsewhere| Spec { kind: ServiceKind::ClusterIp, elsewhere, ..Spec::default() };
    let mut world: World = (0..=8).map(|n| (n, plain(n.into()))).collect();
    world.extend([(10, plain(9)), (11, plain(17)), (12, plain(129))]);
    let rich = Spec { here: 2, elsewhere: 10, first: 1000, shared: 20, ..Spec::default() };
    let local =
        Spec { external: TrafficPolicy::Local, internal: TrafficPolicy::Local, shared: 21, ..rich.clone() };
    // Longer than all listings take.
    let sticky = Spec { affinity: Some(7200), shared: 22, ..local.clone() };
    let longer = Spec { affinity: Some(10_800), shared: 23, ..rich.clone() };
    let sources =
        ["192.0.2.0/24", "198.51.100.7/32", "2001:db8::/32"].map(|net| net.parse().unwrap()).to_vec();
    let ranged = Spec { sources, shared: 24, ..rich.clone() };
    let nowhere = Spec { here: 0, elsewhere: 0, shared: 25, ..rich.clone() };
    let barred = Spec { internal: TrafficPolicy::Local, ..plain(1) };
    let long = Spec { here: 10, first: 2000, shared: 26, ..local.clone() };
    world.extend([
        (27, long),
        (20, rich),
        (21, local),
        (22, sticky),
        (23, longer),
        (24, ranged),
        (25, nowhere),
        (26, barred),
    ]);
    world
}

/// The namespace has a way to everywhere, at whose end nobody is.
fn everywhere() {
    let here = |family| addr(family, 1, 1);
    for line in [
        "link set lo up".to_owned(),
        "link add v0 type veth peer name v1".to_owned(),
        "link set v0 up".to_owned(),
        "link set v1 up".to_owned(),
        format!("addr add {}/32 dev v0", here(Family::V4)),
        format!("-6 addr add {}/128 dev v0 nodad", here(Family::V6)),
        "route add default dev v0".to_owned(),
        "-6 route add default dev v0".to_owned(),
    ] {
        assert!(Command::new("ip").args(line.split(' ')).status().unwrap().success(), "ip {line}");
    }
}

/// Clients fill the maps that the kernel itself fills. None of them gets an answer, so nobody is remembered.
fn ask() {
    for (family, any) in [(Family::V4, "0.0.0.0:0"), (Family::V6, "[::]:0")] {
        for number in [22, 23] {
            let socket = UdpSocket::bind(any).unwrap();
            socket.send_to(b"?", SocketAddr::new(cluster_ip(family, number), 80)).unwrap();
        }
    }
}

/// What the kernel holds, by its own listing: this is what `nft` has to show.
fn counts_in_kernel() -> Counts {
    let mut counts = Counts::new();
    let mut kernel = Nft::open().unwrap();
    for family in [steerage_nft::Family::Ip, steerage_nft::Family::Ip6] {
        let table = Table::new(family, TABLE);
        for set in kernel.sets(&table).unwrap() {
            let count = kernel.elements(&table, &set).unwrap().len();
            counts.insert((family.name().to_owned(), set), count);
        }
    }
    counts
}

#[test]
fn nft_command_lists_every_kind_of_element() {
    requires!(NetworkNamespace, Program("nft"));
    in_new_netns(|| {
        everywhere();
        let mut proxy = Proxy::open();
        proxy.write(plans(&everything(), []), &pod_networks()).unwrap();
        for (table, client) in
            [("ip", "10.97.0.9 . tcp . 80 . 10.1.0.9"), ("ip6", "fd97::9 . tcp . 80 . fd01::9")]
        {
            nft(&[&format!("add element {table} steerage affinity {{ {client} timeout 3h : 0x1 }}")]);
        }

        // The kernel holds what is wanted.
        proxy.dataplane.mark_out_of_sync();
        assert_eq!(proxy.write(BTreeMap::new(), &pod_networks()).unwrap().elements, 0);
        // A slow machine needs more time for its lists than clients are candidates.
        let listed = || {
            ask();
            (counts_in_kernel(), counts_in_json(), counts_in_text())
        };
        let is_stable = |(before, json, text): &(Counts, Counts, Counts)| {
            before == json && before == text && *before == counts_in_kernel()
        };
        let (wanted, json, text) = (0..10).map(|_| listed()).find(is_stable).unwrap_or_else(listed);
        let slots = (1..=8).map(|count| format!("slots-{count}"));
        let long = [16, 64, 256].map(|class| format!("long-{class}"));
        let slots: Vec<_> = slots.chain(long).collect();
        let named = [
            "affine",
            "affine-7200",
            "dropped",
            "hairpins",
            "masqueraded",
            "rejected",
            "restricted",
            "sources-32",
            "split",
        ];
        let more = [
            "sticky",
            "sticky-local",
            "namespaces",
            "affinity",
            "candidates",
            "lists",
            "lists-local",
            "long-local-16",
            "endpoints",
        ];
        for set in slots.iter().map(String::as_str).chain(named).chain(more) {
            assert!(wanted[&("ip6".to_owned(), set.to_owned())] > 0, "nothing in {set}: {wanted:?}");
        }
        // One list for all frontends.
        let sources = |family: &str, length| wanted[&(family.to_owned(), format!("sources-{length}"))];
        assert_eq!([sources("ip", 24), sources("ip", 32), sources("ip6", 32)], [1, 1, 1]);
        assert_eq!(json, wanted);
        assert_eq!(text, wanted);
        let text = nft(&["list", "ruleset"]);
        for part in ["tcp", "udp", "sctp", "dnat ip to", "dnat ip6 to", "masquerade fully-random", "expires"]
        {
            assert!(text.contains(part), "no {part}");
        }
    });
}
