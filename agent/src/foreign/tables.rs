// SPDX-License-Identifier: Apache-2.0
//! Tables of other programs that harm Services, or may. Pure. `steerage-agent check` and the running agent judge by the same function.

use std::collections::BTreeSet;
use std::fmt;

/// The tables of kube-proxy in nftables mode.
const KUBE_PROXY: &str = "kube-proxy";
/// A chain that kube-proxy has in its other modes, in tables of iptables.
pub const KUBE_SERVICES: &str = "KUBE-SERVICES";
/// The tables of iptables.
const IPTABLES: [&str; 5] = ["filter", "mangle", "nat", "raw", "security"];

/// A chain of another program: a base chain, or [`KUBE_SERVICES`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForeignChain {
    /// Such as `ip filter`.
    pub table: String,
    /// The name of the chain.
    pub chain: String,
    /// Where it hooks in, such as `forward`. `None` if another chain has to jump to it.
    pub hook: Option<&'static str>,
    /// It drops what no rule before accepts: by its policy, or by a rule without a condition.
    pub drops: bool,
}

/// Why a table is reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// It drops what its rules do not accept.
    DropsByDefault,
    /// kube-proxy wrote it, which the agent replaces.
    KubeProxy,
    /// It is of iptables.
    Iptables,
}

impl Reason {
    /// All, in order.
    pub const ALL: [Self; 3] = [Self::DropsByDefault, Self::KubeProxy, Self::Iptables];

    /// The metric's label.
    pub fn name(self) -> &'static str {
        match self {
            Self::DropsByDefault => "drops_by_default",
            Self::KubeProxy => "kube_proxy",
            Self::Iptables => "iptables",
        }
    }
}

/// A table of another program that harms Services, or may.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Interference {
    /// Why.
    pub reason: Reason,
    /// Such as `inet firewalld`.
    pub table: String,
    /// The chain that drops, and its hook.
    pub chain: Option<(String, &'static str)>,
}

impl Interference {
    /// Whether it does harm as it is. Tables of iptables are nearly everywhere.
    pub fn is_harmful(&self) -> bool {
        self.reason != Reason::Iptables
    }
}

/// What it is, and what to do.
impl fmt::Display for Interference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = &self.table;
        match (self.reason, &self.chain) {
            (Reason::KubeProxy, _) => write!(
                f,
                "table {table} of kube-proxy: with --kube-proxy-replacement, end kube-proxy and run `kube-proxy --cleanup`, or it goes on \
                 dropping by old rules. Without the flag it belongs there"
            ),
            (Reason::DropsByDefault, Some((chain, hook))) => write!(
                f,
                "chain {chain} of table {table} drops by default at {hook}: its rules have to accept traffic to pods and node ports"
            ),
            (Reason::DropsByDefault, None) => write!(f, "table {table} drops by default"),
            (Reason::Iptables, _) => {
                write!(f, "table {table} is of iptables: its rules see the packets of Services, too")
            }
        }
    }
}

/// What there is to report of the tables of other programs. `kube_proxy_replacement` says whether kube-proxy's tables belong there.
pub fn interferences(chains: &[ForeignChain], kube_proxy_replacement: bool) -> BTreeSet<Interference> {
    let judge = |found: &ForeignChain| -> Vec<Interference> {
        let ForeignChain { table, chain, hook, drops } = found;
        let report = |reason, chain| Interference { reason, table: table.clone(), chain };
        let name = table.rsplit(' ').next().unwrap_or_default();
        let is_iptables = IPTABLES.contains(&name) && !table.starts_with("inet ");
        let is_kube_proxys = name == KUBE_PROXY || (is_iptables && chain == KUBE_SERVICES);
        let dropping = hook.filter(|_| *drops).map(|hook| (chain.clone(), hook));
        let kube_proxy = (is_kube_proxys && kube_proxy_replacement).then(|| report(Reason::KubeProxy, None));
        let drop = dropping.map(|chain| report(Reason::DropsByDefault, Some(chain)));
        let iptables = is_iptables.then(|| report(Reason::Iptables, None));
        [kube_proxy, drop, iptables].into_iter().flatten().collect()
    };
    chains.iter().flat_map(judge).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(table: &str, chain: &str, hook: Option<&'static str>, drops: bool) -> ForeignChain {
        ForeignChain { table: table.to_owned(), chain: chain.to_owned(), hook, drops }
    }

    #[test]
    fn tables_are_judged_by_what_they_do() {
        let (forward, nat) = (Some("forward"), Some("prerouting"));
        for (found, replaces, expected) in [
            (chain("inet firewalld", "filter_FORWARD", forward, true), true, vec![Reason::DropsByDefault]),
            (chain("inet firewalld", "filter_FORWARD", forward, false), true, vec![]),
            (chain("ip kube-proxy", "nat-prerouting", nat, false), true, vec![Reason::KubeProxy]),
            (chain("ip kube-proxy", "nat-prerouting", nat, false), false, vec![]),
            (chain("ip nat", KUBE_SERVICES, None, false), true, vec![Reason::KubeProxy, Reason::Iptables]),
            (chain("ip nat", KUBE_SERVICES, None, false), false, vec![Reason::Iptables]),
            (chain("inet nat", KUBE_SERVICES, None, false), true, vec![]),
            (
                chain("ip6 filter", "FORWARD", forward, true),
                true,
                vec![Reason::DropsByDefault, Reason::Iptables],
            ),
            (chain("inet mine", "not-hooked", None, true), true, vec![]),
        ] {
            let reasons: Vec<_> = interferences(std::slice::from_ref(&found), replaces)
                .into_iter()
                .map(|interference| interference.reason)
                .collect();
            assert_eq!(reasons, expected, "{found:?} {replaces}");
        }
    }

    #[test]
    fn many_chains_of_a_table_are_reported_once_unless_they_drop() {
        let forward = Some("forward");
        let found = [
            chain("ip kube-proxy", "a", forward, false),
            chain("ip kube-proxy", "b", forward, false),
            chain("inet x", "a", forward, true),
            chain("inet x", "b", Some("input"), true),
        ];
        let reports: Vec<_> = interferences(&found, true).iter().map(ToString::to_string).collect();
        assert_eq!(reports.len(), 3, "{reports:?}");
        assert!(
            reports[0].starts_with("chain a of table inet x drops by default at forward: "),
            "{reports:?}"
        );
        assert!(reports[2].contains("ip kube-proxy") && reports[2].contains("--cleanup"), "{reports:?}");
    }
}
