// SPDX-License-Identifier: Apache-2.0
//! The kernel's registers, and the encoding of the expressions that fill them. Used by `Expression` and `Rule`.

use crate::keys::Meta;
use crate::wire::Writer;

/// One of the sixteen registers of 4 bytes (`NFT_REG32_00` and following).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Register(u32);

impl Register {
    pub(crate) const FIRST: Self = Self(0);
    pub(crate) const LAST: Self = Self(15);

    /// The register `words` after this one. If there is none, the kernel rejects the rule (ERANGE).
    pub(crate) fn plus(self, words: u32) -> Self {
        Self(self.0 + words)
    }

    pub(crate) fn wire(self) -> u32 {
        8 + self.0
    }
}

/// Writes one expression of the kernel: its name, and the attributes that `body` writes.
pub(crate) fn write_expression(out: &mut Writer, name: &str, body: impl FnOnce(&mut Writer)) {
    out.nest(1, |e| {
        e.attr_str(1, name);
        e.nest(2, body);
    });
}

/// Loads a constant.
pub(crate) fn load_constant(out: &mut Writer, at: Register, bytes: &[u8]) {
    write_expression(out, "immediate", |e| {
        e.attr_u32(1, at.wire());
        e.nest(2, |data| data.attr(1, bytes));
    });
}

/// Sets the packet mark from a register.
pub(crate) fn set_mark(out: &mut Writer, from: Register) {
    write_expression(out, "meta", |e| {
        e.attr_u32(2, Meta::Mark as u32);
        e.attr_u32(3, from.wire());
    });
}
