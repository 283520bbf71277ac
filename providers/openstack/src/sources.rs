// SPDX-License-Identifier: Apache-2.0
//! The source ranges of a Service, and what Octavia has for them. Pure.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use steerage_model::Family;
use steerage_provider_api::Error;
use steerage_provider_cloud::annotation;

/// The ranges that may connect; empty if everybody may.
pub(crate) fn requested_sources(
    field: &[IpNet],
    of_service: &BTreeMap<String, String>,
) -> Result<Vec<IpNet>, Error> {
    if field.is_empty() { annotation::source_ranges(of_service) } else { Ok(field.to_vec()) }
}

/// What admits nobody: an empty list admits everybody.
pub(crate) fn nobody(family: Family) -> &'static str {
    match family {
        Family::V4 => "0.0.0.0/32",
        Family::V6 => "::/128",
    }
}

/// Source ranges of the VIPs' families, which are all that Octavia takes. If none is left, nobody is admitted. A family without a range is
/// closed where the other one has some.
pub(crate) fn allowed<'a>(ranges: impl IntoIterator<Item = &'a IpNet>, families: &[Family]) -> Vec<String> {
    let mut is_restricted = false;
    let mut allowed = BTreeSet::new();
    for range in ranges {
        is_restricted = true;
        if families.contains(&Family::of(range.addr())) {
            allowed.insert(range.trunc().to_string());
        }
    }
    if is_restricted && allowed.is_empty() {
        allowed.insert(nobody(families.first().copied().unwrap_or(Family::V4)).to_owned());
    }
    allowed.into_iter().collect()
}

/// Whether a listener's range admits nobody.
pub(crate) fn is_nobody(range: &str) -> bool {
    [Family::V4, Family::V6].into_iter().any(|family| nobody(family) == range)
}
