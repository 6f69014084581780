//! Tables for a terminal, in the look of the platform's own command line.

use comfy_table::Table;
use serde_json::Value;

use crate::dbus::proxy::Object;

/// Borders of `+---+`, nothing between the rows.
const LOOK: &str = "||--+-++|    ++++++";

/// A table with these column heads.
pub(super) fn table(heads: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(LOOK).set_header(heads);
    table
}

/// The text of one value of a dictionary; `-` where it is not known, JSON where it is a dictionary itself.
pub(super) fn cell(object: &Object, key: &str) -> String {
    match object.get(key) {
        None => "-".to_owned(),
        Some(Value::String(text)) => printable(text),
        Some(Value::Array(items)) if items.is_empty() => "-".to_owned(),
        Some(Value::Array(items)) => {
            let texts: Vec<String> = items.iter().map(|item| printable(&plain(item))).collect();
            texts.join(" ")
        }
        Some(other) => printable(&other.to_string()),
    }
}

/// The same with a unit behind it, where it is known.
pub(super) fn cell_with_unit(object: &Object, key: &str, unit: &str) -> String {
    if object.contains_key(key) { format!("{} {unit}", cell(object, key)) } else { "-".to_owned() }
}

/// Whether it works, and what there is to know.
pub(super) fn health(object: &Object) -> String {
    let word = if object.get("healthy") == Some(&Value::Bool(true)) { "healthy" } else { "not healthy" };
    match object.get("reason").and_then(Value::as_str) {
        None | Some("") => word.to_owned(),
        Some(reason) => format!("{word}: {}", printable(reason)),
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Text without control characters: some of it comes from other processes, and none of it may command the terminal.
pub(super) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_look_is_the_platforms() {
        let mut table = table(&["Addr", "Index"]);
        table.add_row(["00:06.0-0", "-1"]);
        table.add_row(["00:06.0-1", "-1"]);
        assert_eq!(
            table.to_string(),
            "+-----------+-------+\n\
             | Addr      | Index |\n\
             +-----------+-------+\n\
             | 00:06.0-0 | -1    |\n\
             | 00:06.0-1 | -1    |\n\
             +-----------+-------+"
        );
    }

    #[test]
    fn a_dictionary_is_shown_as_json_with_sorted_keys() {
        let object = serde_json::json!({"pcie_info": {"version": "3.0", "lane_width": 16}});
        assert_eq!(cell(object.as_object().unwrap(), "pcie_info"), r#"{"lane_width":16,"version":"3.0"}"#);
    }

    #[test]
    fn text_cannot_command_the_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\n"), "a\u{fffd}[2Jb\u{fffd}");
    }
}
