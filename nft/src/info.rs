// SPDX-License-Identifier: Apache-2.0
//! What the kernel lists about tables and rules. Plain values, decoded by `decode` and returned by `Nft`.

use crate::kernel_expression::kernel_expressions;

/// A table, as listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableInfo {
    /// Name, without the family.
    pub name: String,
    /// Comment, if the table has one.
    pub comment: Option<String>,
    /// Number of chains and sets in the table.
    pub objects: u32,
}

/// A base chain, as listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BaseChainInfo {
    /// Name of its table.
    pub table: String,
    /// Name of the chain.
    pub name: String,
    /// Where it hooks in.
    pub hook: &'static str,
    /// Its policy is to drop.
    pub drops: bool,
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
    /// The counter of the table into which the rule counts.
    pub fn counter(&self) -> Option<String> {
        let expressions = kernel_expressions(&self.expressions).into_iter();
        let name = expressions
            .filter(|expression| expression.name == "objref")
            .find_map(|mut objref| objref.attributes.remove(&2))?;
        let text = name.split(|byte| *byte == 0).next().unwrap_or_default();
        Some(String::from_utf8_lossy(text).into_owned())
    }
}
