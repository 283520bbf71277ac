// SPDX-License-Identifier: Apache-2.0
//! Reads the tags of any number of resources.

use std::collections::BTreeMap;

use super::{Calls, Result, TAGS_BATCH, Tags};

/// The tags of each resource, by ARN. A resource that does not exist, or that AWS does not show yet, is missing from the result.
///
/// AWS refuses a whole call because of one such resource. Usually its message names the resource. Otherwise the call is halved
/// until the resource is alone.
pub(crate) async fn read(client: &dyn Calls, arns: &[String]) -> Result<BTreeMap<String, Tags>> {
    let mut tags = BTreeMap::new();
    let mut batches: Vec<Vec<String>> = arns.chunks(TAGS_BATCH).map(<[String]>::to_vec).collect();
    while let Some(batch) = batches.pop() {
        match client.tags(&batch).await {
            Ok(some) => tags.extend(some),
            Err(failure) if failure.is_not_found() => {
                batches.extend(without_missing(&batch, failure.message()));
            }
            Err(failure) => return Err(failure),
        }
    }
    Ok(tags)
}

/// The batches in which to try the others again.
fn without_missing(batch: &[String], message: &str) -> Vec<Vec<String>> {
    if batch.len() < 2 {
        return Vec::new();
    }
    let rest: Vec<String> = batch.iter().filter(|arn| !message.contains(arn.as_str())).cloned().collect();
    if rest.len() < batch.len() {
        return if rest.is_empty() { Vec::new() } else { vec![rest] };
    }
    let (left, right) = batch.split_at(batch.len() / 2);
    vec![left.to_vec(), right.to_vec()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_resource_is_named_or_found_by_halving() {
        let batch = ["arn:a", "arn:b", "arn:c"].map(str::to_owned);
        assert_eq!(without_missing(&batch, "Target groups 'arn:b' not found"), [["arn:a", "arn:c"]]);
        let halves = [vec!["arn:a".to_owned()], vec!["arn:b".to_owned(), "arn:c".to_owned()]];
        assert_eq!(without_missing(&batch, "One or more resources not found"), halves);
        assert!(without_missing(&batch[..1], "One or more resources not found").is_empty());
        assert!(without_missing(&batch[..2], "'arn:a', 'arn:b' not found").is_empty());
    }
}
