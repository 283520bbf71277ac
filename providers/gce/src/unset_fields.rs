// SPDX-License-Identifier: Apache-2.0
//! The fields of a firewall rule that decide what is admitted and that Steerage leaves unset: what somebody else writes into them is taken
//! back. The plan of a rule, the command for an administrator and the text about a refused change read this table. Pure.

use serde_json::Value;

/// What a rule does while somebody set the field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    AdmitsTooFew,
    AdmitsTooMany,
}

#[derive(Debug)]
pub(crate) struct UnsetField {
    pub(crate) name: &'static str,
    /// The value of an unset field.
    pub(crate) value: Value,
    /// The option of `gcloud` that unsets it.
    pub(crate) option: &'static str,
    pub(crate) effect: Effect,
}

const fn unset(name: &'static str, value: Value, option: &'static str, effect: Effect) -> UnsetField {
    UnsetField { name, value, option, effect }
}

pub(crate) const UNSET: [UnsetField; 5] = [
    unset("disabled", Value::Bool(false), "--no-disabled", Effect::AdmitsTooFew),
    unset("sourceTags", Value::Null, "--source-tags=", Effect::AdmitsTooMany),
    unset("sourceServiceAccounts", Value::Null, "--source-service-accounts=", Effect::AdmitsTooMany),
    // A Service's rule has some; that of health checks has none.
    unset("destinationRanges", Value::Null, "--destination-ranges=", Effect::AdmitsTooFew),
    unset("targetServiceAccounts", Value::Null, "--target-service-accounts=", Effect::AdmitsTooFew),
];

/// The fields that a change unsets.
pub(crate) fn unset_by(changes: &Value) -> impl Iterator<Item = &'static UnsetField> + '_ {
    const { &UNSET }.iter().filter(|field| changes.get(field.name) == Some(&field.value))
}
