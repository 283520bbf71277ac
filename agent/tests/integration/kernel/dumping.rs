// SPDX-License-Identifier: Apache-2.0
//! `steerage-agent dump` marks every kind of difference between agent and kernel, and nothing else.

use steerage_agent::dump::{compare, kernel_elements, kernel_tables};
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
        let whole = compare(&proxy.ruleset, &proxy.dataplane.written_rules(), true).unwrap();
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
            ("add chain ip6 steerage input { policy drop ; }", "! chain input, the kernel's has another"),
            ("add table ip6 steerage { flags dormant ; }", "! table ip6 steerage is dormant"),
        ] {
            nft(&[harm]);
            let text = compare(&proxy.ruleset, &proxy.dataplane.written_rules(), false).unwrap().text;
            assert!(text.contains(line), "{harm}: no {line} in\n{text}");
        }
        assert_eq!(compare(&proxy.ruleset, &proxy.dataplane.written_rules(), false).unwrap().differences, 7);
        let rules = nft(&["-a", "list", "chain", "ip", "steerage", "to-cluster"]);
        let last = rules.lines().filter_map(|line| line.split("# handle ").nth(1)).next_back().unwrap();
        nft(&[&format!("replace rule ip steerage to-cluster handle {} accept", last.trim())]);
        let text = compare(&proxy.ruleset, &proxy.dataplane.written_rules(), false).unwrap().text;
        assert!(text.contains("! chain to-cluster, a rule of the kernel is another one"), "{text}");
        let tables = kernel_tables(true).unwrap();
        for line in ["table ip6 steerage: ", ", dormant: no", "  slots-2, ", "    10.9.9.9 80/TCP"] {
            assert!(tables.contains(line), "no {line} in\n{tables}");
        }
        let elements = kernel_elements(&"10.97.0.1:80/TCP".parse().unwrap()).unwrap();
        assert!(elements.contains("slots-2: 10.97.0.1 80/TCP slot 1 -> 10.244.0.1 8080"), "{elements}");
        let none = kernel_elements(&"10.97.0.1:81/TCP".parse().unwrap()).unwrap();
        assert!(none.contains("no element"), "{none}");
        nft(&["delete table ip steerage"]);
        let text = compare(&proxy.ruleset, &proxy.dataplane.written_rules(), false).unwrap().text;
        assert!(text.contains("\n- table ip steerage, "), "{text}");
    });
}
