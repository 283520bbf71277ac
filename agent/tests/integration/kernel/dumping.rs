// SPDX-License-Identifier: Apache-2.0
//! `steerage-agent dump` marks every kind of difference between agent and kernel, and nothing else.

use steerage_agent::dump::compare;
use steerage_model::TrafficPolicy;
use steerage_requirements::{in_new_netns, requires};

use crate::kernel::cluster::{Proxy, Spec, World, plans, pod_networks};
use crate::kernel::ruleset::nft;

#[test]
fn dump_marks_every_difference() {
    requires!(NetworkNamespace, Program("nft"));
    in_new_netns(|| {
        let sources = vec!["192.0.2.0/24".parse().unwrap()];
        let spec = Spec {
            here: 1,
            elsewhere: 1,
            external: TrafficPolicy::Local,
            affinity: Some(30),
            sources,
            ..Spec::default()
        };
        let world: World = [(1, spec)].into();
        let mut proxy = Proxy::open();
        proxy.write(plans(&world, []), &pod_networks()).unwrap();
        let whole = compare(&proxy.ruleset, true).unwrap();
        assert_eq!(whole.differences, 0, "{}", whole.text);
        let (_, number) = whole.text.split_once("=   sources-24: list ").expect("a list");
        let number = number.split(' ').next().expect("its number");
        for line in [
            "=   frontends: 10.97.0.1 80/SCTP",
            "=   cluster-addresses: 10.96.0.1",
            "=   hairpins: fd00:f4::",
            &format!("=   sources-24: list {number} 192.0.2.0"),
            &format!("=   restricted: 10.97.0.1 80/TCP -> list {number}"),
            "=   slots-1: 10.97.0.1 80/TCP local slot 0 -> 10.244.0.0 8080",
            "=   slots-2: fd00:60::1 80/UDP slot 1 -> fd00:f4::1 8080",
            "= affine, ",
        ] {
            assert!(whole.text.contains(line), "no {line} in\n{}", whole.text);
        }
        for (harm, line) in [
            (
                "delete element ip steerage frontends { 10.97.0.1 . tcp . 80 }",
                "-   frontends: 10.97.0.1 80/TCP",
            ),
            ("add element ip steerage frontends { 10.9.9.9 . tcp . 80 }", "+   frontends: 10.9.9.9 80/TCP"),
            ("add chain ip6 steerage other", "+ chain other, 0 rule(s)"),
            ("add rule ip6 steerage services drop", "! chain services, 5 rule(s), the kernel: 6, or others"),
            ("add set ip6 steerage more { type ipv4_addr ; }", "+ set more"),
        ] {
            nft(&[harm]);
            let text = compare(&proxy.ruleset, false).unwrap().text;
            assert!(text.contains(line), "{harm}: no {line} in\n{text}");
        }
        assert_eq!(compare(&proxy.ruleset, false).unwrap().differences, 5);
        nft(&["delete table ip steerage"]);
        let text = compare(&proxy.ruleset, false).unwrap().text;
        assert!(text.contains("\n- table ip steerage, "), "{text}");
    });
}
