// SPDX-License-Identifier: Apache-2.0
//! ARP requests and neighbour solicitations, with a lease that lasts and one that has ended.

use std::net::IpAddr;
use std::time::Duration;

use steerage_edge_dataplane::packet::ethernet::LENGTH;
use steerage_edge_dataplane::packet::frames::{arp_request, solicitation, transport_checksum};
use steerage_edge_dataplane::packet::maps::Event;
use steerage_edge_dataplane::packet::model::Verdict;
use steerage_requirements::requires;

use crate::bed::{Bed, FRESH, MAC, families, is_testable};

/// Asks for an address.
fn request(target: IpAddr) -> Vec<u8> {
    match target {
        IpAddr::V4(target) => arp_request("10.0.0.9".parse().expect("address"), target),
        IpAddr::V6(target) => solicitation("fd00::9".parse().expect("address"), target).bytes(),
    }
}

#[test]
fn vip_is_answered_for_while_its_lease_lasts() {
    requires!(Root);
    let bed = Bed::new();
    for family in families() {
        let event = if family.vip.is_ipv4() { Event::Arp } else { Event::Neighbour };
        let verdict = bed.verdict(&request(family.vip));
        let Verdict::Answer(answered, reply) = verdict else { panic!("{verdict:?}") };
        assert_eq!(answered, event);
        assert_eq!(reply[6..12], MAC);
        if family.vip.is_ipv6() {
            let address = |at: usize| IpAddr::from(<[u8; 16]>::try_from(&reply[at..at + 16]).expect("16"));
            let sum = transport_checksum(address(22), address(38), 58, &reply[LENGTH + 40..]);
            assert_eq!((address(22), sum), (family.vip, 0), "the checksum is correct");
        }
        assert_eq!(bed.verdict(&request(family.stale)), Verdict::LeaseEnded);
        assert_eq!(bed.verdict(&request(family.node)), Verdict::Pass);
        for (until, answers) in [(Duration::ZERO, false), (Duration::MAX, true)] {
            bed.dataplane.leases().set(FRESH, until);
            let verdict = bed.verdict(&request(family.vip));
            assert_eq!(matches!(verdict, Verdict::Answer(..)), answers, "{verdict:?}");
        }
    }
}

/// A daemon renews the lease by one write, and the program sees its end without the daemon.
#[test]
fn lease_ends_by_itself() {
    requires!(Root);
    let bed = Bed::new();
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME).expect("clock");
    let until = Duration::from(now) + Duration::from_millis(500);
    bed.dataplane.leases().set(FRESH, until);
    let answers = || matches!(bed.verdict(&request(families()[0].vip)), Verdict::Answer(..));
    let boot =
        || Duration::from(nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME).expect("clock"));
    let answered = answers();
    // A test on a busy machine may come too late.
    assert!(answered || boot() > until);
    while boot() <= until {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(!answers());
}

#[test]
fn solicitation_of_any_length_gets_a_whole_advertisement() {
    requires!(Root);
    let bed = Bed::new();
    let [_, family] = families();
    let IpAddr::V6(vip) = family.vip else { panic!("IPv6") };
    for (sender, options) in
        [("::", vec![]), ("fd00::9", vec![]), ("fd00::9", vec![14, 2].into_iter().chain([0; 14]).collect())]
    {
        let mut frame = solicitation(sender.parse().expect("address"), vip);
        frame.payload.extend(options);
        let Verdict::Answer(Event::Neighbour, reply) = bed.verdict(&frame.bytes()) else {
            panic!("no answer")
        };
        assert_eq!(reply.len(), LENGTH + 40 + 32);
    }
}

#[test]
fn other_neighbour_messages_are_left_to_the_kernel() {
    requires!(Root);
    let bed = Bed::new();
    let [family4, family6] = families();
    let (IpAddr::V4(vip4), IpAddr::V6(vip6)) = (family4.vip, family6.vip) else { panic!("families") };
    assert_eq!(bed.verdict(&arp_request(vip4, vip4)), Verdict::Pass, "an announcement");
    let mut reply = request(family4.vip);
    reply[21] = 2;
    assert_eq!(bed.verdict(&reply), Verdict::Pass, "a reply");
    let mut forwarded = solicitation("fd00::9".parse().expect("address"), vip6);
    forwarded.hop_limit = 254;
    assert_eq!(bed.verdict(&forwarded.bytes()), Verdict::Pass, "from beyond the link");
    for frame in [request(family4.vip), request(family6.vip)] {
        // Without its option a solicitation is whole, too.
        let needed = if frame[12] == 8 { 42 } else { 78 };
        for length in (15..needed).filter(|length| is_testable(&frame[..*length])) {
            assert_eq!(bed.verdict(&frame[..length]), Verdict::Pass, "{length} bytes");
        }
    }
}
