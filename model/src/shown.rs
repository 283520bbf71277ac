// SPDX-License-Identifier: Apache-2.0
//! Shortens text of users for messages: an annotation may have 256 KiB, and people read conditions and logs.

use std::borrow::Cow;

/// Characters of a quoted value in a message.
const SHOWN: usize = 100;

/// A value that a user wrote, for a message: its first 100 characters, and `…` in place of the others.
pub fn shown(text: &str) -> Cow<'_, str> {
    shortened(text, SHOWN)
}

/// The first characters of a text, and `…` in place of the others.
pub fn shortened(text: &str, longest: usize) -> Cow<'_, str> {
    match text.char_indices().nth(longest) {
        Some((end, _)) => format!("{}…", &text[..end]).into(),
        None => text.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_is_cut_between_characters() {
        assert_eq!(shown(&"é".repeat(100)), "é".repeat(100));
        assert_eq!(shown(&"é".repeat(101)), format!("{}…", "é".repeat(100)));
        assert_eq!((shortened("", 3), shortened("abcd", 3)), ("".into(), "abc…".into()));
    }
}
