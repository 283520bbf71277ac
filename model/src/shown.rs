// SPDX-License-Identifier: Apache-2.0
//! Shortens text of users for messages: an annotation may have 256 KiB, and people read conditions and logs. And replaces what a terminal
//! would obey.

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

/// A text without what a terminal obeys or hides: control characters, and those that change the direction of what follows or have no width,
/// become escapes such as `\u{1b}`; line breaks and tabs become spaces.
///
/// Annotations, answers of clouds and names of other objects get into messages by many ways. So this is called where a message becomes a
/// condition or an event, which people read by `kubectl`, and for events in the log. Other lines of the log escape only the control
/// characters of ASCII.
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_unprintable) {
        return text.into();
    }
    let mut all = String::with_capacity(text.len());
    for found in text.chars() {
        match found {
            '\n' | '\r' | '\t' => all.push(' '),
            found if is_unprintable(found) => all.extend(found.escape_unicode()),
            found => all.push(found),
        }
    }
    all.into()
}

fn is_unprintable(found: char) -> bool {
    found.is_control()
        || matches!(found, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
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

    #[test]
    fn control_characters_are_escaped() {
        for (text, expected) in [
            ("é … `web`", "é … `web`"),
            ("\u{1b}[31mapi", "\\u{1b}[31mapi"),
            ("a\r\nb\tc", "a  b c"),
            ("\u{9b}2J\u{7f}\0", "\\u{9b}2J\\u{7f}\\u{0}"),
            ("gpj.\u{202e}exe\u{200b}", "gpj.\\u{202e}exe\\u{200b}"),
        ] {
            assert_eq!(printable(text), expected);
        }
    }
}
