//! Converts a D-Bus value of any type to JSON.

use serde_json::Value;
use zbus::Variant;

/// A file descriptor has no JSON form and becomes null. Neither this service nor systemd sends file descriptors.
pub fn json(value: &Variant<'_>) -> Value {
    match value {
        Variant::U8(n) => Value::from(*n),
        Variant::Bool(b) => Value::from(*b),
        Variant::I16(n) => Value::from(*n),
        Variant::U16(n) => Value::from(*n),
        Variant::I32(n) => Value::from(*n),
        Variant::U32(n) => Value::from(*n),
        Variant::I64(n) => Value::from(*n),
        Variant::U64(n) => Value::from(*n),
        Variant::F64(n) => Value::from(*n),
        Variant::Str(text) => Value::from(text.as_str()),
        Variant::Signature(signature) => Value::from(signature.to_string()),
        Variant::ObjectPath(path) => Value::from(path.as_str()),
        Variant::Variant(inner) => json(inner),
        Variant::Array(items) => items.inner().iter().map(json).collect(),
        Variant::Structure(fields) => fields.fields().iter().map(json).collect(),
        Variant::Dict(dict) => {
            let name = |key: &Variant<'_>| match json(key) {
                Value::String(text) => text,
                other => other.to_string(),
            };
            Value::Object(dict.iter().map(|(key, value)| (name(key), json(value))).collect())
        }
        Variant::Fd(_) => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn variants_become_plain_values() {
        let nested = HashMap::from([("lane_width", Variant::from(16i32))]);
        assert_eq!(json(&Variant::from(nested)), serde_json::json!({"lane_width": 16}));
        assert_eq!(json(&Variant::from(vec![7u32, 8])), serde_json::json!([7, 8]));
        assert_eq!(json(&Variant::from((true, "x"))), serde_json::json!([true, "x"]));
        assert_eq!(json(&Variant::from(i64::MIN)), serde_json::json!(i64::MIN));
    }
}
