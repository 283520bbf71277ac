// SPDX-License-Identifier: Apache-2.0
//! Fields of a JSON schema: of the chart's values, or of a custom resource.

use serde_json::Value;

/// One field that is no object with fields of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// Its path, with `[]` after a list: `addressPools[].name`.
    pub path: String,
    /// Its type, or its values where these are few.
    pub kind: String,
    /// Its default as JSON; empty without one.
    pub default: String,
    /// Whether the object that holds it must have it.
    pub required: bool,
    /// What it means.
    pub description: String,
}

/// All fields of `schema` in its own order. An object that has a description and fields is a field of its own, before them.
pub fn schema(schema: &Value) -> Vec<Field> {
    let mut fields = Vec::new();
    properties("", schema, &mut fields);
    fields
}

fn properties(prefix: &str, schema: &Value, fields: &mut Vec<Field>) {
    let required = schema["required"].as_array();
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        let required = required.is_some_and(|all| all.iter().any(|other| other == name));
        let items = &property["items"];
        let (inner, inner_path) =
            if items.is_object() { (items, format!("{path}[]")) } else { (property, path.clone()) };
        let has_fields = inner["properties"].is_object();
        let description = description(property);
        if !has_fields || !description.is_empty() {
            fields.push(Field {
                path,
                kind: kind(property),
                default: property.get("default").map(ToString::to_string).unwrap_or_default(),
                required,
                description,
            });
        }
        if has_fields {
            properties(&inner_path, inner, fields);
        }
    }
}

fn description(schema: &Value) -> String {
    schema["description"].as_str().unwrap_or_default().trim_end_matches('.').to_owned()
}

fn kind(schema: &Value) -> String {
    if let Some(values) = schema["enum"].as_array() {
        let values: Vec<_> =
            values.iter().filter_map(Value::as_str).map(|value| format!("`{value}`")).collect();
        return values.join(", ");
    }
    if let Some(choices) = schema["anyOf"].as_array() {
        let choices: Vec<_> = choices.iter().map(kind).collect();
        return choices.join(" or ");
    }
    if let Some(value) = schema.get("const") {
        return format!("`{value}`");
    }
    match schema["type"].as_str().unwrap_or("any") {
        "array" => match &schema["items"] {
            items if items.is_object() => format!("list of {}", kind(items)),
            _ => "list".to_owned(),
        },
        "integer" => match (schema["minimum"].as_f64(), schema["maximum"].as_f64()) {
            (Some(least), Some(most)) => format!("integer, {least} to {most}"),
            (Some(least), None) if least > 0.0 => format!("integer, at least {least}"),
            _ => "integer".to_owned(),
        },
        other => other.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_carry_path_type_and_default() {
        let fields = schema(&json!({"type": "object", "required": ["port"], "properties": {
            "port": {"type": "integer", "minimum": 1, "maximum": 9, "default": 7, "description": "Listens here."},
            "mtu": {"anyOf": [{"const": 0}, {"type": "integer", "minimum": 5, "maximum": 9}]},
            "pools": {"type": "array", "items": {"type": "object", "properties": {"mode": {"enum": ["a", "b"]}}}}
        }}));
        let find = |path: &str| fields.iter().find(|field| field.path == path).expect("a field");
        assert_eq!((find("port").kind.as_str(), find("port").default.as_str()), ("integer, 1 to 9", "7"));
        assert_eq!((find("port").required, find("port").description.as_str()), (true, "Listens here"));
        assert_eq!(find("mtu").kind, "`0` or integer, 5 to 9");
        assert_eq!((find("pools[].mode").kind.as_str(), fields.len()), ("`a`, `b`", 3));
    }
}
