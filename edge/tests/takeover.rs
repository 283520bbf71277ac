// SPDX-License-Identifier: Apache-2.0
//! Two edge hosts on one link: one answers, and no connection is lost when the other has to.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod bed;

use std::time::Duration;

use steerage_requirements::requires;

use bed::net::Load;
use bed::{Bed, eventually, sh};

fn pair() -> Bed {
    let mut bed = Bed::new(2, 3);
    bed.balance(&[0, 1, 2], |_| {});
    bed.start_ready(0);
    bed.start_ready(1);
    bed.settle(&[0, 1, 2]);
    assert!(bed.holds(0) && !bed.holds(1), "the first stays active");
    bed
}

#[test]
fn a_standby_takes_over_from_the_killed_and_nothing_is_lost() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let mut bed = pair();
    let load = Load::start(&bed.client(), 20);
    std::thread::sleep(Duration::from_millis(500));
    bed.kill(0);
    eventually("the standby holds the addresses", || bed.holds(1));
    std::thread::sleep(Duration::from_secs(1));
    assert!(bed.holds(0), "the killed one's kernel answers too, for now");
    bed.start_ready(0);
    eventually("the one that returns gives them up", || !bed.holds(0));
    assert!(bed.holds(1));
    load.stop("kill -9 of the active edge and its return");
}

#[test]
fn a_host_that_vanishes_is_replaced() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let bed = pair();
    let load = Load::start(&bed.client(), 20);
    std::thread::sleep(Duration::from_millis(500));
    let first = bed.netns("edge1");
    sh(&format!("ip -n {first} link set eth0 down"));
    eventually("the standby holds the addresses", || bed.holds(1));
    std::thread::sleep(Duration::from_millis(1500));
    load.stop("the active edge's cable pulled");
}

#[test]
fn a_graceful_end_hands_over() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let mut bed = pair();
    let load = Load::start(&bed.client(), 20);
    std::thread::sleep(Duration::from_millis(500));
    assert!(bed.terminate(0));
    assert!(bed.holds(1) && !bed.holds(0), "handed over before the end");
    std::thread::sleep(Duration::from_secs(1));
    load.stop("a graceful hand-over");
}

#[test]
fn after_a_partition_one_gives_way() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let mut bed = pair();
    let switch = bed.netns("switch");
    sh(&format!("ip -n {switch} link set p11 nomaster"));
    eventually("both are active", || bed.holds(0) && bed.holds(1));
    sh(&format!("ip -n {switch} link set p11 master br0"));
    eventually("the first gives way", || !bed.holds(0));
    assert!(bed.holds(1));
    bed.settle(&[0, 1, 2]);
    // Unused, but it keeps the beds alive to the end.
    bed.kill(0);
}
