// SPDX-License-Identifier: Apache-2.0
//! Verdicts: what a rule or an element of a verdict map decides about a packet. Shared by `Rule` and `Element`.

use crate::wire::Writer;

/// The decision about a packet.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Verdict {
    /// Drops the packet.
    Drop,
    /// Ends the base chain; chains at later hooks still see the packet.
    Accept,
    /// Continues with the next rule.
    Continue,
    /// Runs this chain, then the next rule.
    Jump(String),
    /// Runs this chain and does not return to the current one.
    Goto(String),
    /// Returns to the calling chain.
    Return,
}

impl Verdict {
    pub(crate) fn write(&self, out: &mut Writer) {
        let (code, chain): (i32, _) = match self {
            Self::Drop => (0, None),
            Self::Accept => (1, None),
            Self::Continue => (-1, None),
            Self::Jump(chain) => (-3, Some(chain)),
            Self::Goto(chain) => (-4, Some(chain)),
            Self::Return => (-5, None),
        };
        out.nest(2, |verdict| {
            verdict.attr_u32(1, code.cast_unsigned());
            if let Some(chain) = chain {
                verdict.attr_str(2, chain);
            }
        });
    }

    pub(crate) fn from_wire(code: u32, chain: Option<String>) -> Option<Self> {
        Some(match (code.cast_signed(), chain) {
            (0, _) => Self::Drop,
            (1, _) => Self::Accept,
            (-1, _) => Self::Continue,
            (-3, Some(chain)) => Self::Jump(chain),
            (-4, Some(chain)) => Self::Goto(chain),
            (-5, _) => Self::Return,
            _ => return None,
        })
    }
}
