// SPDX-License-Identifier: Apache-2.0
//! Renders `docs/reference/crds.md`.

use std::fmt::Write as _;

use serde_json::Value;
use steerage_reference::{Field, schema, table, wrap};

#[test]
fn reference_page_of_the_resources_is_current() -> anyhow::Result<()> {
    let mut sections = Vec::new();
    for definition in crate::crds() {
        sections.push(section(&serde_json::to_value(definition)?));
    }
    steerage_reference::check(
        "crds.md",
        "Custom resources",
        "The group is `steerage.dev/v1alpha1`; all kinds are namespaced and live in Steerage's namespace. Operators write \
         `AddressPool`. The controller writes `EdgeLoadBalancer` and `EdgeNodeSet`, and each edge host its own `EdgeHost` and \
         `EdgeTargetHealth`.",
        &sections,
    )
}

fn section(definition: &Value) -> String {
    let names = &definition["spec"]["names"];
    let root = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut section = format!(
        "## {}\n\n{}\n\n",
        text(&names["kind"]),
        wrap(&text(&root["properties"]["spec"]["description"]))
    );
    let short: Vec<_> = names["shortNames"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|name| format!(", `{}`", text(name)))
        .collect();
    let _ = write!(section, "`kubectl get {}`{}\n\n", text(&names["plural"]), short.concat());
    let columns = definition["spec"]["versions"][0]["additionalPrinterColumns"].as_array();
    let columns: Vec<_> = columns
        .into_iter()
        .flatten()
        .map(|column| format!("{} (`{}`)", text(&column["name"]), text(&column["jsonPath"])))
        .collect();
    if !columns.is_empty() {
        let _ = write!(section, "{}\n\n", wrap(&format!("Columns: {}.", columns.join(", "))));
    }
    let rows = schema(root).into_iter().filter(|field| field.path != "spec").map(row);
    section.push_str(&table(["field", "type", "default", "meaning"], rows));
    section
}

fn row(field: Field) -> [String; 4] {
    let default = match (field.default.as_str(), field.required) {
        ("", true) => "required".to_owned(),
        ("", false) => String::new(),
        (default, _) => format!("`{default}`"),
    };
    [format!("`{}`", field.path), field.kind, default, field.description]
}
