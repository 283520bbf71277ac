// SPDX-License-Identifier: Apache-2.0
//! Rules read back as the kernel's expressions: what a kernel must know to take a rule, and what a listed rule does. Never fails:
//! what cannot be read is left out.

use std::collections::BTreeMap;

use crate::wire::{Attrs, Writer};

/// An expression as the kernel gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelExpression {
    /// Its name.
    pub name: String,
    /// Its attributes, by number.
    pub attributes: BTreeMap<u16, Vec<u8>>,
}

/// The expressions of an encoded list.
pub(crate) fn kernel_expressions(list: &[u8]) -> Vec<KernelExpression> {
    let mut found = Vec::new();
    collect(Attrs(list), &mut found);
    found
}

/// Collects the expressions of a list.
fn collect(list: Attrs<'_>, found: &mut Vec<KernelExpression>) {
    /// The expression inside a `dynset`.
    const NESTED: (&str, u16) = ("dynset", 7);
    for (_, expression) in list {
        let expression = Attrs(expression);
        let (Some(name), attrs) = (expression.string(1), expression.nested(2)) else { continue };
        if name == NESTED.0
            && let Some(inner) = attrs.find(NESTED.1)
        {
            let mut wrapped = Writer::new();
            wrapped.attr(1, inner);
            collect(Attrs(wrapped.bytes()), found);
        }
        let attributes = attrs.into_iter().map(|(number, value)| (number, value.to_vec())).collect();
        found.push(KernelExpression { name, attributes });
    }
}
