//! Makes text safe for a terminal. Characters from other processes are escaped or replaced, so that they can't control the
//! terminal.

use serde::Serialize;

/// A value as a JSON document with line breaks. Characters that could control a terminal are escaped.
pub fn json(value: &impl Serialize) -> serde_json::Result<String> {
    serde_json::to_string_pretty(value).map(|text| escaped(&text))
}

/// Escapes the characters of a JSON document that could control a terminal. Only JSON strings can contain these characters.
pub fn escaped(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        if c == '\n' || !is_unprintable(c) {
            text.push(c);
        } else {
            text.extend(c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")));
        }
    }
    text
}

/// Replaces characters that could control a terminal or hide text, since a part of the text may come from other processes.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if is_unprintable(c) { '\u{fffd}' } else { c }).collect()
}

/// True if a character controls a terminal, or is invisible and reverses, breaks or hides other characters.
pub fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
        || matches!(c, '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Replaces control characters in a text for D-Bus. The name of a process may contain control characters, and a caller may
/// print the name on a terminal. A NUL character in a message would also make the bus close the connection.
pub fn clean(text: &str) -> String {
    text.replace(char::is_control, "\u{fffd}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_cannot_command_the_terminal() {
        let value = serde_json::json!({"command": "a\u{9b}2J\u{7f}\u{202e}b\u{e0041}\n", "n": [1, 2]});
        let text = json(&value).unwrap();
        assert!(text.contains(r#""a\u009b2J\u007f\u202eb\udb40\udc41\n""#), "{text}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }
}
