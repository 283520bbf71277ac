// SPDX-License-Identifier: Apache-2.0
//! Errors on one line.

use std::error::Error;

/// The error and its causes on one line, for the field `error` of a log line. A cause that the text already contains is left
/// out.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let cause = error.to_string();
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Layer {
        text: &'static str,
        source: Option<Box<Layer>>,
    }

    #[test]
    fn causes_follow_once_each() {
        let layer = |text, source: Option<Layer>| Layer { text, source: source.map(Box::new) };
        let error = layer("cannot list", Some(layer("connect", Some(layer("connect", None)))));
        assert_eq!(chain(&error), "cannot list: connect");
    }
}
