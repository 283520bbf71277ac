// SPDX-License-Identifier: Apache-2.0
//! The annotations that say which targets are used, and how soon. Pure, read for each object that is written.

use std::collections::BTreeMap;
use std::time::Duration;

use steerage_model::annotations::{PANIC_THRESHOLD, SLOW_START};
use steerage_model::shown;
use steerage_process::duration;
use steerage_provider_api::Error;
use steerage_provider_cloud::annotation;

/// Tables are written once a second at most, and a target that fills for longer is no longer new.
const SLOW_STARTS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(15));

/// In percent; `None` if it is zero, which is the default.
pub(crate) fn panic_threshold(annotations: &BTreeMap<String, String>) -> Result<Option<u32>, Error> {
    let Some(text) = annotations.get(PANIC_THRESHOLD).map(|text| text.trim()) else { return Ok(None) };
    match text.parse() {
        Ok(0) => Ok(None),
        Ok(percent @ 1..=100) => Ok(Some(percent)),
        _ => Err(invalid(PANIC_THRESHOLD, text, "Use a whole number of percent from 0 to 100.")),
    }
}

/// In milliseconds; `None` without a slow start.
pub(crate) fn slow_start(annotations: &BTreeMap<String, String>) -> Result<Option<u32>, Error> {
    let Some(text) = annotations.get(SLOW_START).map(|text| text.trim()) else { return Ok(None) };
    let (least, most) = SLOW_STARTS;
    match duration::parse(text) {
        Ok(Duration::ZERO) => Ok(None),
        Ok(time) if (least..=most).contains(&time) => Ok(u32::try_from(time.as_millis()).ok()),
        _ => Err(invalid(SLOW_START, text, "Use a time from 1s to 15m, or 0s for none.")),
    }
}

fn invalid(name: &str, text: &str, advice: &str) -> Error {
    annotation::invalid(name, &format!("has the wrong value `{}`", shown(text)), advice)
}

#[cfg(test)]
mod tests {
    use steerage_provider_cloud::reasons::INVALID_ANNOTATION;

    use super::*;

    #[test]
    fn values_are_read_or_refused() {
        let with = |name: &str, text: &str| BTreeMap::from([(name.to_owned(), text.to_owned())]);
        assert_eq!(panic_threshold(&BTreeMap::new()).expect("none"), None);
        assert_eq!(slow_start(&BTreeMap::new()).expect("none"), None);
        for (text, wanted) in [("0", Some(None)), (" 30 ", Some(Some(30))), ("100", Some(Some(100)))]
            .into_iter()
            .chain(["101", "-1", "30%", "", "0.5"].map(|text| (text, None)))
        {
            let read = panic_threshold(&with(PANIC_THRESHOLD, text));
            assert_eq!(read.as_ref().ok().copied(), wanted, "{text}");
            assert!(read.is_ok() || read.is_err_and(|error| error.reason() == INVALID_ANNOTATION));
        }
        for (text, wanted) in [("0s", Some(None)), ("1s", Some(Some(1000))), ("15m", Some(Some(900_000)))]
            .into_iter()
            .chain(["30", "500ms", "16m", "", "soon"].map(|text| (text, None)))
        {
            let read = slow_start(&with(SLOW_START, text));
            assert_eq!(read.as_ref().ok().copied(), wanted, "{text}");
            assert!(read.is_ok() || read.is_err_and(|error| error.reason() == INVALID_ANNOTATION));
        }
    }
}
