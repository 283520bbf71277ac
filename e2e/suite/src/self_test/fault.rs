// SPDX-License-Identifier: Apache-2.0
//! Faults that the meter must report: rules on the interfaces of hosts, before their own rules at ingress and after them at egress.

use anyhow::Result;

use crate::cluster::Host;
use crate::test_context::TestContext;

/// The table of a fault, in the hosts' namespaces.
const TABLE: &str = "steerage_e2e";

/// Where rules see the packets of an interface.
#[derive(Clone, Copy)]
pub(super) enum Hook {
    Ingress,
    Egress,
}

/// The rules of a fault. They go when this is dropped.
pub(super) struct Fault<'a> {
    test: &'a TestContext,
    hosts: Vec<Host>,
}

impl<'a> Fault<'a> {
    /// Puts the same rules on some hosts.
    pub(super) fn inject(
        test: &'a TestContext,
        hosts: Vec<Host>,
        chains: &[(Hook, &[String])],
    ) -> Result<Self> {
        let fault = Self { test, hosts };
        let chain = |(hook, rules): &(Hook, &[String])| {
            let (hook, priority) = match hook {
                Hook::Ingress => ("ingress", -500),
                Hook::Egress => ("egress", 500),
            };
            format!(
                "chain {hook} {{ type filter hook {hook} device \"eth0\" priority {priority}; policy accept; {}; }};",
                rules.join("; ")
            )
        };
        let chains: String = chains.iter().map(chain).collect();
        fault.nft(&[&format!(
            "add table netdev {TABLE}; delete table netdev {TABLE}; table netdev {TABLE} {{ {chains} }}"
        )])?;
        Ok(fault)
    }

    /// Takes the rules away; how many packets they counted.
    pub(super) fn end(self) -> Result<usize> {
        let listed = self.nft(&["list", "table", "netdev", TABLE])?;
        let words: Vec<_> = listed.split_whitespace().collect();
        let counts = words.windows(3).filter(|words| words[..2] == ["counter", "packets"]);
        counts.map(|words| Ok(words[2].parse::<usize>()?)).sum()
    }

    /// Runs nft on every host; all its output.
    fn nft(&self, arguments: &[&str]) -> Result<String> {
        let command = [&["nft"], arguments].concat();
        let run = |host: &Host| self.test.suite.cluster(|cluster| cluster.exec(&host.name, &command));
        self.hosts.iter().map(run).collect()
    }
}

impl Drop for Fault<'_> {
    fn drop(&mut self) {
        let command = ["nft", "delete", "table", "netdev", TABLE];
        for host in &self.hosts {
            let _ = self.test.suite.cluster(|cluster| cluster.exec(&host.name, &command));
        }
    }
}
