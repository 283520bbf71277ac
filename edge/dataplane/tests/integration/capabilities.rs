// SPDX-License-Identifier: Apache-2.0
//! The capabilities that the data plane needs.

use std::process::Command;
use std::time::Duration;

use steerage_edge_dataplane::{Dataplane, Hook, Options};
use steerage_requirements::requires;

use crate::bed::{self, FRESH};
use crate::links::{Link, has_tcx, hooks, start, state};

/// Runs the test below. Without PERFMON the verifier refuses offsets in packets that are no constants.
#[test]
fn four_capabilities_suffice() {
    requires!(NetworkNamespace, Program("ip"), Program("setpriv"));
    let link = Link::new();
    let program = std::env::current_exe().expect("program");
    let output = Command::new("ip")
        .args(["netns", "exec", &link.netns("edge"), "setpriv", "--bounding-set"])
        .args(["-all,+net_admin,+net_raw,+perfmon,+bpf"])
        .arg(program)
        .args(["--ignored", "--exact", "capabilities::load_with_few_capabilities"])
        .env("STEERAGE_TEST_PINS", link.pins.0.join("eth0"))
        .output()
        .expect("setpriv");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
#[ignore = "run by four_capabilities_suffice"]
fn load_with_few_capabilities() {
    let Some(pins) = std::env::var_os("STEERAGE_TEST_PINS") else { return };
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    // NET_ADMIN, NET_RAW, PERFMON and BPF.
    assert!(status.contains("CapEff:\t000000c000003000"), "{status}");
    for &hook in hooks() {
        let options = Options {
            interface: "eth0".to_owned(),
            pins: Some(pins.clone().into()),
            hook: Some(hook),
            ..bed::options()
        };
        drop(start(options.clone(), &state(&[1, 2])));
        let mut dataplane = Dataplane::load(options.clone()).expect("adopt");
        assert!(dataplane.is_adopted());
        // The pinned link is still there when the filter comes.
        assert_eq!(dataplane.is_in_use(), has_tcx(), "of a filter it is not found out");
        // The folder of an earlier name of the interface.
        let pins = options.pins.expect("pins");
        let earlier = pins.with_file_name("earlier");
        if hook == Hook::Tcx {
            std::fs::create_dir_all(earlier.join("maps-1")).expect("folder");
            std::fs::rename(pins.join("link"), earlier.join("link")).expect("rename");
        }
        dataplane.attach().expect("attach");
        assert!(dataplane.is_attached().expect("attached"));
        assert!(!earlier.exists(), "the program is removed");
        // Leases of another layout.
        let maps = pins.join("maps-1");
        std::fs::rename(&maps, pins.join("maps-7")).expect("rename");
        let dataplane = Dataplane::load(Options { pins: Some(pins), ..bed::options() }).expect("load");
        assert!(!dataplane.is_adopted());
        assert_eq!(dataplane.leases().get(FRESH), Duration::MAX);
    }
}
