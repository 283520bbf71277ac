// SPDX-License-Identifier: Apache-2.0
//! What the kernel lists about tables and rules. Plain values, decoded by `decode` and returned by `Nft`.

use crate::kernel_expression::kernel_expressions;
use crate::table::ChainType;
use crate::wire::Attrs;

/// A table, as listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableInfo {
    /// Name, without the family.
    pub name: String,
    /// Comment, if the table has one.
    pub comment: Option<String>,
    /// Number of chains and sets in the table.
    pub objects: u32,
    /// No packet sees its base chains.
    pub is_dormant: bool,
    /// Only the connection that made it can change it.
    pub is_owned: bool,
}

/// A chain, as listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainInfo {
    /// Name of its table.
    pub table: String,
    /// Name of the chain.
    pub name: String,
    /// Of a base chain.
    pub base: Option<BaseChainInfo>,
}

/// What only base chains have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BaseChainInfo {
    /// Where it hooks in.
    pub hook: &'static str,
    /// The order of those of one hook.
    pub priority: i32,
    /// `None` for types that Steerage does not use.
    pub kind: Option<ChainType>,
    /// Its policy is to drop.
    pub drops: bool,
}

/// A set or map, as listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetInfo {
    /// Name of the set.
    pub name: String,
    /// Bytes of a key.
    pub key: u32,
    /// Bytes of an element's data; 0 for a set.
    pub data: u32,
    /// The most elements that it may have, if it was created with a limit.
    pub size: Option<u32>,
}

/// A rule, as listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleInfo {
    /// Name of the rule's chain.
    pub chain: String,
    /// Handle: the kernel's number for the rule, unique within the table.
    pub handle: u64,
    /// Comment, if the rule has one.
    pub comment: Option<String>,
    /// The expressions in the kernel's encoding. Except for counters, equal rules have equal bytes on one kernel.
    pub expressions: Vec<u8>,
}

impl RuleInfo {
    /// Whether the rule drops or rejects each packet that comes to it: it has no condition. A rule of iptables may, too.
    pub fn is_unconditional_drop(&self) -> bool {
        drops_everything(Attrs(&self.expressions))
    }

    /// The sets and maps into which the rule looks.
    pub fn looked_up_sets(&self) -> Vec<String> {
        let expressions = kernel_expressions(&self.expressions).into_iter();
        let lookups = expressions.filter(|expression| expression.name == "lookup");
        lookups
            .filter_map(|mut lookup| lookup.attributes.remove(&LOOKUP_SET))
            .map(|name| text(&name))
            .collect()
    }

    /// The counter of the table into which the rule counts.
    pub fn counter(&self) -> Option<String> {
        let expressions = kernel_expressions(&self.expressions).into_iter();
        let name = expressions
            .filter(|expression| expression.name == "objref")
            .find_map(|mut objref| objref.attributes.remove(&2))?;
        Some(text(&name))
    }
}

/// `NFTA_LOOKUP_SET` of `linux/netfilter/nf_tables.h`.
const LOOKUP_SET: u16 = 1;

/// A string of the kernel's, which ends with a zero.
fn text(bytes: &[u8]) -> String {
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

/// Of expressions that do not decide, and then one that drops.
fn drops_everything(expressions: Attrs<'_>) -> bool {
    for (_, bytes) in expressions {
        let expression = Attrs(bytes);
        let data = expression.nested(2);
        match expression.string(1).as_deref() {
            Some("counter" | "log") => {}
            // NF_DROP in the verdict of the data.
            Some("immediate") => return data.nested(2).nested(2).u32(1) == Some(0),
            Some("reject") => return true,
            Some("target") => return data.string(1).as_deref() == Some("REJECT"),
            _ => return false,
        }
    }
    false
}
