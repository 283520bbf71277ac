// SPDX-License-Identifier: Apache-2.0
//! What a new process finds of rules that another program changed while no agent ran.

use std::process::Command;

use steerage_agent::kernel::{Noticed, Written};
use steerage_agent::rules::KernelState;
use steerage_nft::Nft;
use steerage_requirements::{in_new_netns, requires};

use crate::kernel::adoption::{COUNT, follow, nothing, shuffled, table, world};
use crate::kernel::cluster::Proxy;
use crate::kernel::ruleset::ruleset;

/// A rule of the chain `services` was replaced, which its digest does not tell: the first one has it, and their number is right.
#[test]
fn rule_that_was_replaced_while_no_agent_ran_is_written_anew() {
    requires!(NetworkNamespace, Program("nft"));
    in_new_netns(|| {
        drop(shuffled());
        let whole = ruleset();
        let services = |nft: &mut Nft| nft.rules_of_chain(&table(), "services").unwrap();
        let mut nft = Nft::open().unwrap();
        let last = services(&mut nft).pop().expect("a rule").handle;
        let line = format!("replace rule ip steerage services handle {last} accept");
        assert!(Command::new("nft").arg(&line).status().unwrap().success(), "nft {line}");
        assert!(ruleset() != whole);
        for harm in ["replaced", "none"] {
            let mut proxy = Proxy::open();
            proxy.dataplane.watch_foreign(|noticed| !matches!(noticed, Noticed::Change(_)));
            let written = follow(&mut proxy, &world(90, COUNT));
            assert_eq!(written, Written { full: true, ..Written::default() }, "no element is wrong");
            assert_eq!(proxy.dataplane.state(), KernelState::InSync, "all commits were this process's");
            assert!(proxy.dataplane.has_unread_lists(), "lists are believed");
            assert!(ruleset() == whole, "{harm}: the rules are not what they were");
            let found = proxy.dataplane.take_found().to_string();
            let expected = if harm == "none" { "" } else { "ip steerage: 1 rule of services" };
            assert_eq!(found, expected);
            // Once for each process.
            let rules = services(&mut nft);
            proxy.dataplane.mark_out_of_sync();
            nothing(&mut proxy);
            assert_eq!(services(&mut nft), rules);
        }
    });
}

/// A change that moves the digest, or takes it away, is no other version's either.
#[test]
fn rules_that_came_or_went_while_no_agent_ran_are_reported() {
    requires!(NetworkNamespace, Program("nft"));
    for (line, expected) in [
        ("insert rule ip steerage services return", true),
        ("flush chain ip steerage services", true),
        ("delete rule ip steerage services handle FIRST", true),
        ("delete rule ip steerage services handle LAST", true),
        (
            "replace rule ip steerage services handle FIRST accept comment \"services 0123456789abcdef\"",
            false,
        ),
    ] {
        in_new_netns(|| {
            drop(shuffled());
            let whole = ruleset();
            let rules = Nft::open().unwrap().rules_of_chain(&table(), "services").unwrap();
            let handle = |rule: Option<&steerage_nft::RuleInfo>| rule.expect("a rule").handle.to_string();
            let line = line.replace("FIRST", &handle(rules.first())).replace("LAST", &handle(rules.last()));
            assert!(Command::new("nft").arg(&line).status().unwrap().success(), "nft {line}");
            let mut proxy = Proxy::open();
            follow(&mut proxy, &world(90, COUNT));
            assert!(ruleset() == whole, "{line}");
            let found = proxy.dataplane.take_found();
            assert_eq!(found.to_string().contains("of services"), expected, "{line}: {found}");
            assert_eq!(found.may_admit(), expected, "{line}: {found}");
        });
    }
}
