// SPDX-License-Identifier: Apache-2.0
//! Encodes expressions: which registers they fill, and the kernel's attributes for each.

use crate::expression::Expression;
use crate::field::concat;
use crate::keys::Meta;
use crate::registers::{Register, load_constant, set_mark, write_expression};
use crate::wire::Writer;

impl Expression {
    /// Number of words that the expression fills.
    pub(crate) fn words(&self) -> u32 {
        self.length().div_ceil(4)
    }

    /// Writes the kernel expressions that load this one into registers from `at` on. Inputs of hashes and lookups use the
    /// same registers; the result overwrites them.
    pub(crate) fn load(&self, at: Register, out: &mut Writer) {
        match self {
            Self::Payload { base, offset, length } => write_expression(out, "payload", |e| {
                e.attr_u32(1, at.wire());
                e.attr_u32(2, *base as u32);
                e.attr_u32(3, *offset);
                e.attr_u32(4, *length);
            }),
            Self::Meta(key) => write_expression(out, "meta", |e| {
                e.attr_u32(1, at.wire());
                e.attr_u32(2, *key as u32);
            }),
            Self::Ct(key) => {
                let (number, direction, _) = key.wire();
                write_expression(out, "ct", |e| {
                    e.attr_u32(1, at.wire());
                    e.attr_u32(2, number);
                    if let Some(direction) = direction {
                        e.attr_u8(3, direction as u8);
                    }
                });
            }
            Self::FibType(address) => write_expression(out, "fib", |e| {
                e.attr_u32(1, at.wire());
                e.attr_u32(2, 3);
                e.attr_u32(3, *address as u32);
            }),
            // NFT_FIB_RESULT_OIF of NFTA_FIB_F_SADDR and NFTA_FIB_F_IIF.
            Self::ReversePath => write_expression(out, "fib", |e| {
                e.attr_u32(1, at.wire());
                e.attr_u32(2, 1);
                e.attr_u32(3, 1 | 8);
            }),
            Self::Random { modulus, offset } => numgen(out, at, *modulus, 1, *offset),
            Self::Increment { modulus, offset } => numgen(out, at, *modulus, 0, *offset),
            Self::Jhash { of, modulus, seed, offset } => {
                let words = load_all(of, at, out);
                write_expression(out, "hash", |e| {
                    e.attr_u32(1, at.wire());
                    e.attr_u32(2, at.wire());
                    e.attr_u32(3, words * 4);
                    e.attr_u32(4, *modulus);
                    e.attr_u32(5, *seed);
                    if *offset > 0 {
                        e.attr_u32(6, *offset);
                    }
                    e.attr_u32(7, 0);
                });
            }
            Self::Symhash { modulus } => write_expression(out, "hash", |e| {
                e.attr_u32(2, at.wire());
                e.attr_u32(4, *modulus);
                e.attr_u32(7, 1);
            }),
            Self::Value(field) => load_constant(out, at, &concat(&[*field])),
            Self::Bitwise { of, mask, xor } => {
                of.load(at, out);
                write_expression(out, "bitwise", |e| {
                    e.attr_u32(1, at.wire());
                    e.attr_u32(2, at.wire());
                    e.attr_u32(3, of.length());
                    e.nest(4, |value| value.attr(1, mask));
                    e.nest(5, |value| value.attr(1, xor));
                });
            }
            Self::ToHost(of) => {
                of.load(at, out);
                write_expression(out, "byteorder", |e| {
                    e.attr_u32(1, at.wire());
                    e.attr_u32(2, at.wire());
                    e.attr_u32(3, 0);
                    e.attr_u32(4, of.length());
                    e.attr_u32(5, of.length());
                });
            }
            Self::Map { map, key, .. } => lookup(out, at, map, key),
            Self::MapWord { map, key } => {
                let mark = Self::Meta(Meta::Mark);
                mark.load(Register::LAST, out);
                lookup(out, at, map, key);
                set_mark(out, at);
                mark.load(at, out);
                set_mark(out, Register::LAST);
            }
        }
    }
}

/// Loads a concatenation into registers from `at` on. Returns the number of words.
pub(crate) fn load_all(expressions: &[Expression], at: Register, out: &mut Writer) -> u32 {
    let mut words = 0;
    for expression in expressions {
        expression.load(at.plus(words), out);
        words += expression.words();
    }
    words
}

fn lookup(out: &mut Writer, at: Register, map: &str, key: &[Expression]) {
    load_all(key, at, out);
    write_expression(out, "lookup", |e| {
        e.attr_str(1, map);
        e.attr_u32(2, at.wire());
        e.attr_u32(3, at.wire());
    });
}

fn numgen(out: &mut Writer, at: Register, modulus: u32, mode: u32, offset: u32) {
    write_expression(out, "numgen", |e| {
        e.attr_u32(1, at.wire());
        e.attr_u32(2, modulus);
        e.attr_u32(3, mode);
        e.attr_u32(4, offset);
    });
}
