// SPDX-License-Identifier: Apache-2.0
//! The one notation of durations in flags, annotations and logs: `250ms`, `10s`, `1h30m`.

use std::fmt;
use std::time::Duration;

use jiff::fmt::friendly::{Spacing, SpanParser, SpanPrinter};

/// Longer durations are typing errors, and would overflow when added to a point in time.
const MAX: Duration = Duration::from_hours(24 * 366);

/// Reads a duration of at most a year, for flags (`value_parser = duration::parse`) and annotations.
///
/// The error is a sentence without the value: clap and conditions print the value themselves.
pub fn parse(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    if text.parse::<f64>().is_ok_and(f64::is_finite) {
        return Err("write the unit, for example 10s".to_owned());
    }
    // The parser also reads `01:30:00`, which is another notation.
    if text.contains(':') {
        return Err(UNREADABLE.to_owned());
    }
    let duration = SpanParser::new().parse_duration(text).map_err(|_| UNREADABLE.to_owned())?;
    let duration = Duration::try_from(duration).map_err(|_| "must not be negative".to_owned())?;
    if duration > MAX {
        return Err(format!("must not be longer than {}", display(MAX)));
    }
    Ok(duration)
}

const UNREADABLE: &str = "not a duration; write it like 250ms, 10s or 1h30m";

/// Prints a duration as [`parse`] reads it.
pub fn display(duration: Duration) -> impl fmt::Display {
    SpanPrinter::new().spacing(Spacing::None).unsigned_duration_to_string(&duration)
}

/// Prints a measured or computed duration for a log line: as [`display`], in whole milliseconds.
pub fn rounded(duration: Duration) -> impl fmt::Display {
    display(Duration::from_millis(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_and_printed() {
        let ms = Duration::from_millis;
        for (text, duration, printed) in [
            ("0s", ms(0), "0s"),
            ("250ms", ms(250), "250ms"),
            ("0.5s", ms(500), "500ms"),
            ("1.5s", ms(1500), "1s500ms"),
            ("10s", ms(10_000), "10s"),
            ("90s", ms(90_000), "1m30s"),
            (" 5m ", ms(300_000), "5m"),
            ("1h30m", ms(5_400_000), "1h30m"),
            ("1h 30m", ms(5_400_000), "1h30m"),
            ("24h", ms(86_400_000), "24h"),
        ] {
            assert_eq!(parse(text), Ok(duration), "{text}");
            assert_eq!(display(duration).to_string(), printed);
            assert_eq!(parse(printed), Ok(duration), "{printed}");
        }
    }

    #[test]
    fn durations_in_logs_have_milliseconds() {
        assert_eq!(rounded(Duration::from_nanos(1_203_456_789)).to_string(), "1s203ms");
    }

    #[test]
    fn anything_else_is_refused_with_the_reason() {
        for (text, reason) in [
            ("10", "write the unit"),
            ("0", "write the unit"),
            ("-5", "write the unit"),
            ("1.5", "write the unit"),
            ("-1s", "negative"),
            ("5s ago", "negative"),
            ("9000h", "longer than 8784h"),
            ("1d", "not a duration"),
            ("00:10:00", "not a duration"),
            ("PT10S", "not a duration"),
            ("soon", "not a duration"),
            ("NaN", "not a duration"),
            ("s", "not a duration"),
            ("", "not a duration"),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
