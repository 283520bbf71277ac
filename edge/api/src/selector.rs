// SPDX-License-Identifier: Apache-2.0
//! Selectors of labels, as Kubernetes has them. Pure.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Labels of an object.
pub type Labels = BTreeMap<String, String>;

/// Selects objects by their labels, as `metav1.LabelSelector`: all of it must match. An empty selector selects all objects.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LabelSelector {
    /// Labels that an object must have with these values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub match_labels: Labels,
    /// Requirements that an object must meet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub match_expressions: Vec<LabelRequirement>,
}

/// A requirement of a label.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LabelRequirement {
    /// Key of the label.
    pub key: String,
    /// What the label must be: `In` or `NotIn` the values; or `Exists` or `DoesNotExist`, without values. An object without the label
    /// meets `NotIn`.
    pub operator: LabelOperator,
    /// Values for `In` and `NotIn`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub values: Vec<String>,
}

/// How a label is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum LabelOperator {
    /// The label has one of the values.
    In,
    /// The label has none of the values, or is missing.
    NotIn,
    /// The label exists.
    Exists,
    /// The label is missing.
    DoesNotExist,
}

impl LabelSelector {
    /// Whether an object with these labels is selected. An invalid selector selects none.
    pub fn matches(&self, labels: &Labels) -> bool {
        self.problem().is_none()
            && self.match_labels.iter().all(|(key, value)| labels.get(key) == Some(value))
            && self.match_expressions.iter().all(|requirement| requirement.matches(labels))
    }

    /// What is invalid in it.
    pub fn problem(&self) -> Option<String> {
        self.match_expressions.iter().find_map(LabelRequirement::problem)
    }
}

impl LabelRequirement {
    fn matches(&self, labels: &Labels) -> bool {
        let value = labels.get(&self.key);
        let is_listed = || value.is_some_and(|value| self.values.contains(value));
        match self.operator {
            LabelOperator::In => is_listed(),
            LabelOperator::NotIn => !is_listed(),
            LabelOperator::Exists => value.is_some(),
            LabelOperator::DoesNotExist => value.is_none(),
        }
    }

    fn problem(&self) -> Option<String> {
        let has_list = matches!(self.operator, LabelOperator::In | LabelOperator::NotIn);
        (has_list == self.values.is_empty()).then(|| {
            let needs = if has_list { "needs values" } else { "has values, and must have none" };
            format!("the operator {:?} for `{}` {needs}", self.operator, self.key)
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn selects(selector: Value, labels: &[(&str, &str)]) -> bool {
        let selector: LabelSelector = serde_json::from_value(selector).expect("a selector");
        selector
            .matches(&labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn selectors_match_as_kubernetes_selectors_do() {
        let web = &[("app", "web"), ("tier", "front")];
        let expression = |key: &str, operator: &str, values: &[&str]| json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
        for (selector, expected) in [
            (json!({}), true),
            (json!({"matchLabels": {"app": "web"}}), true),
            (json!({"matchLabels": {"app": "web", "tier": "back"}}), false),
            (json!({"matchLabels": {"zone": ""}}), false),
            (expression("app", "In", &["db", "web"]), true),
            (expression("app", "In", &["db"]), false),
            (expression("zone", "In", &["a"]), false),
            (expression("app", "NotIn", &["web"]), false),
            (expression("app", "NotIn", &["db"]), true),
            (expression("zone", "NotIn", &["a"]), true),
            (expression("app", "Exists", &[]), true),
            (expression("zone", "Exists", &[]), false),
            (expression("app", "DoesNotExist", &[]), false),
            (expression("zone", "DoesNotExist", &[]), true),
            // Invalid ones select nothing.
            (expression("app", "NotIn", &[]), false),
            (expression("app", "Exists", &["web"]), false),
        ] {
            assert_eq!(selects(selector.clone(), web), expected, "{selector}");
        }
        let both = json!({"matchLabels": {"app": "web"}, "matchExpressions": [{"key": "tier", "operator": "Exists"}]});
        assert!(selects(both.clone(), web) && !selects(both, &[("app", "web")]));
    }
}
