//! Parses YAML with three facts that `serde_yaml::Value` lacks: the line of every key, duplicate keys in their order, and the
//! quotation marks of each text. The quotation marks matter, since YAML 1.1 reads a plain `yes` as true and a quoted `yes` as
//! text.
//!
//! `serde_yaml` borrows texts from its input instead of copying them. So the address of a text gives its line, and the byte
//! after the text shows if a quotation mark ends the text.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

use serde::de::{self, DeserializeSeed, EnumAccess, MapAccess, SeqAccess, VariantAccess};

use crate::problem::{LocatedProblem, Origin, Problem};
use crate::text::clean;

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Node<'t> {
    /// Counted from 1. The line of a list or mapping is the first known line of its elements. None for a number, a boolean or
    /// null: messages then name the line of the key.
    pub(super) line: Option<usize>,
    pub(super) value: Value<'t>,
}

impl<'t> Node<'t> {
    fn without_line(value: Value<'t>) -> Self {
        Self { line: None, value }
    }
}

/// A value of a YAML file. `serde_yaml` finds the type by the rules of YAML 1.2. `as_bool` and similar methods convert the
/// value by the rules of Cloudpods's host agent.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value<'t> {
    Null,
    Bool(bool),
    Integer(i128),
    Float(f64),
    Text { text: Cow<'t, str>, quoted: bool },
    List(Vec<Node<'t>>),
    Map(Vec<Pair<'t>>),
}

pub(super) type Pair<'t> = (Node<'t>, Node<'t>);

const SHOWN_CHARS: usize = 80;

const ERROR_CHARS: usize = 300;

impl Value<'_> {
    /// Converts a boolean by the host agent's rules: a plain word of YAML 1.1, or any text that Go's `ParseBool` accepts.
    pub(super) fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(value) => Some(*value),
            Self::Integer(0) => Some(false),
            Self::Integer(1) => Some(true),
            Self::Text { text, quoted } => match (text.as_ref(), quoted) {
                ("1" | "t" | "T" | "true" | "True" | "TRUE", _)
                | ("y" | "Y" | "yes" | "Yes" | "YES" | "on" | "On" | "ON", false) => Some(true),
                ("0" | "f" | "F" | "false" | "False" | "FALSE", _)
                | ("n" | "N" | "no" | "No" | "NO" | "off" | "Off" | "OFF", false) => Some(false),
                _ => None,
            },
            _ => None,
        }
    }

    /// Converts a whole number such as `4`, `"4"` or `4.0`. None for a plain number with a leading zero: YAML 1.1 reads this
    /// number as octal, and hardly any user wants an octal number.
    pub(super) fn as_integer(&self) -> Option<i128> {
        match self {
            Self::Integer(value) => Some(*value),
            // The decimal digits of a float without a fraction are exact.
            Self::Float(value) if value.fract() == 0.0 => format!("{value:.0}").parse().ok(),
            Self::Text { text, quoted } => {
                let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
                let octal = !quoted && digits.len() > 1 && digits.starts_with('0');
                if octal { None } else { text.parse().ok() }
            }
            _ => None,
        }
    }

    pub(super) fn as_text(&self) -> Option<Cow<'_, str>> {
        match self {
            Self::Bool(value) => Some(value.to_string().into()),
            Self::Integer(value) => Some(value.to_string().into()),
            Self::Float(value) => Some(format!("{value:?}").into()),
            Self::Text { text, .. } => Some(text.as_ref().into()),
            Self::Null | Self::List(_) | Self::Map(_) => None,
        }
    }

    /// Empty if the value is null, a list or a mapping.
    pub(super) fn text(&self) -> Cow<'_, str> {
        self.as_text().unwrap_or_default()
    }

    pub(super) fn wrong(&self, remedy: impl Into<String>) -> Problem {
        Problem::new(self.found(), remedy)
    }

    pub(super) fn found(&self) -> String {
        match self {
            Self::Null => "found nothing".to_owned(),
            Self::List(_) => "found a list".to_owned(),
            Self::Map(_) => "found a mapping".to_owned(),
            Self::Text { text, .. } => format!("found {:?}", cut(text, SHOWN_CHARS)),
            Self::Bool(_) | Self::Integer(_) | Self::Float(_) => format!("found {}", self.text()),
        }
    }
}

pub(super) fn printable(key: &str) -> String {
    clean(&cut(key, SHOWN_CHARS))
}

fn cut(text: &str, chars: usize) -> Cow<'_, str> {
    match text.char_indices().nth(chars) {
        Some((end, _)) => format!("{}...", text.get(..end).unwrap_or_default()).into(),
        None => text.into(),
    }
}

/// Reads the first YAML document of a file. The value is `Null` if the file has no document.
pub(super) fn parse<'t>(file: &Path, text: &'t str) -> Result<Node<'t>, LocatedProblem> {
    let brackets = text.bytes().filter(|byte| matches!(byte, b'[' | b'{')).count();
    if brackets > MAX_BRACKETS {
        let found = format!("found {brackets} brackets, at most {MAX_BRACKETS} are allowed");
        let remedy = "write lists and mappings with one item on each line";
        return Err(LocatedProblem::new(Origin::whole(file), "", found, remedy));
    }
    if let Some((at, line)) = text.lines().enumerate().find(|(_, line)| line.len() > MAX_LINE_BYTES) {
        let found = format!(
            "found a line of {bytes} bytes, at most {MAX_LINE_BYTES} are allowed",
            bytes = line.len()
        );
        let remedy = "correct the line or split it: no setting needs so many bytes";
        let origin = Origin { file: file.to_owned(), line: Some(at + 1) };
        return Err(LocatedProblem::new(origin, "", found, remedy));
    }
    let Some(document) = serde_yaml::Deserializer::from_str(text).next() else {
        return Ok(Node::without_line(Value::Null));
    };
    let newlines: Vec<usize> =
        text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at).collect();
    let budget = Cell::new(text.len().saturating_mul(2).saturating_add(ALIAS_ALLOWANCE));
    let whole = NodeSeed { text, newlines: &newlines, budget: &budget, depth: 0 };
    whole.deserialize(document).map_err(|error| problem(file, text, &error))
}

fn problem(file: &Path, text: &str, error: &serde_yaml::Error) -> LocatedProblem {
    let line = error.location().map(|location| location.line());
    let tabbed = line.and_then(|line| {
        let near = text.lines().enumerate().skip(line.saturating_sub(2)).take(2);
        near.filter(|(_, text)| text.trim_start_matches(' ').starts_with('\t')).map(|(at, _)| at + 1).last()
    });
    let (found, remedy) = match tabbed {
        Some(_) => ("a tab in the indentation", "YAML indents with spaces only: replace the tabs"),
        None => ("not valid YAML", "correct this line or the line before"),
    };
    // The parser's message may quote keys of the file, so control characters are replaced and a long message is shortened.
    let found = format!("{found} ({})", clean(&cut(&error.to_string(), ERROR_CHARS)));
    LocatedProblem::new(Origin { file: file.to_owned(), line: tabbed.or(line) }, "", found, remedy)
}

/// The most values that aliases may add to the values that the file itself contains.
const ALIAS_ALLOWANCE: usize = 65_536;

/// The most open brackets in a file. The parser's time grows with the square of their number, so a file full of brackets would
/// take hours.
const MAX_BRACKETS: usize = 1024;

/// The most bytes of a line. The parser's time grows with the square of the length of a text with blanks. A line of 1 MiB would
/// take a minute.
const MAX_LINE_BYTES: usize = 16 << 10;

/// The greatest depth of nested lists and mappings. An alias that contains itself would nest without end.
const MAX_DEPTH: u8 = 32;

/// Builds a [`Node`] from one value of the input. Every nested value gets its own copy of this struct, since each copy has the
/// depth of its value.
#[derive(Clone, Copy)]
struct NodeSeed<'s, 't> {
    text: &'t str,
    newlines: &'s [usize],
    /// The number of values and copied bytes that may still be built. Each alias repeats its value, so a small file with
    /// aliases could ask for any number of values. The limit is two for each byte of the file, and an allowance for aliases. A
    /// file without aliases never reaches the limit, since one byte gives at most two values or copied bytes.
    budget: &'s Cell<usize>,
    depth: u8,
}

impl<'t> NodeSeed<'_, 't> {
    fn inner(self) -> Self {
        Self { depth: self.depth.saturating_add(1), ..self }
    }

    fn spend<E: de::Error>(self, amount: usize) -> Result<(), E> {
        let left = self
            .budget
            .get()
            .checked_sub(amount)
            .ok_or_else(|| E::custom("the aliases expand to too many values"))?;
        self.budget.set(left);
        Ok(())
    }

    fn lent(self, text: &'t str) -> Node<'t> {
        let start = text.as_ptr().addr().checked_sub(self.text.as_ptr().addr());
        let start = start.filter(|start| *start <= self.text.len());
        let end = start.map(|start| start.saturating_add(text.len()));
        let quoted =
            end.and_then(|end| self.text.as_bytes().get(end)).is_some_and(|b| matches!(b, b'"' | b'\''));
        let line = start.map(|start| self.newlines.partition_point(|newline| *newline < start) + 1);
        Node { line, value: Value::Text { text: text.into(), quoted } }
    }
}

impl<'t> DeserializeSeed<'t> for NodeSeed<'_, 't> {
    type Value = Node<'t>;

    fn deserialize<D: de::Deserializer<'t>>(self, deserializer: D) -> Result<Node<'t>, D::Error> {
        if self.depth > MAX_DEPTH {
            return Err(de::Error::custom("the values are nested too deeply, or an alias contains itself"));
        }
        self.spend(1)?;
        deserializer.deserialize_any(self)
    }
}

impl<'t> de::Visitor<'t> for NodeSeed<'_, 't> {
    type Value = Node<'t>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_none<E: de::Error>(self) -> Result<Node<'t>, E> {
        Ok(Node::without_line(Value::Null))
    }

    fn visit_unit<E: de::Error>(self) -> Result<Node<'t>, E> {
        Ok(Node::without_line(Value::Null))
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Node<'t>, E> {
        Ok(Node::without_line(Value::Bool(value)))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Node<'t>, E> {
        Ok(Node::without_line(Value::Integer(value.into())))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Node<'t>, E> {
        Ok(Node::without_line(Value::Integer(value.into())))
    }

    fn visit_i128<E: de::Error>(self, value: i128) -> Result<Node<'t>, E> {
        Ok(Node::without_line(Value::Integer(value)))
    }

    fn visit_u128<E: de::Error>(self, value: u128) -> Result<Node<'t>, E> {
        // No setting takes a number that is too large for `i128`. The number becomes a text, which a message can show
        // unchanged.
        let text = || Value::Text { text: value.to_string().into(), quoted: false };
        Ok(Node::without_line(i128::try_from(value).map_or_else(|_| text(), Value::Integer)))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Node<'t>, E> {
        Ok(Node::without_line(Value::Float(value)))
    }

    fn visit_borrowed_str<E: de::Error>(self, text: &'t str) -> Result<Node<'t>, E> {
        Ok(self.lent(text))
    }

    /// `serde_yaml` passes a copied text if the text's form in the input differs from its value: with escapes, folded, or on
    /// several lines. Every copied text counts as quoted. `quoted` does not matter for a plain text on several lines, which is
    /// neither a boolean nor a number.
    fn visit_str<E: de::Error>(self, text: &str) -> Result<Node<'t>, E> {
        self.spend(text.len())?;
        Ok(Node::without_line(Value::Text { text: text.to_owned().into(), quoted: true }))
    }

    fn visit_seq<A: SeqAccess<'t>>(self, mut access: A) -> Result<Node<'t>, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element_seed(self.inner())? {
            items.push(item);
        }
        let line = items.iter().find_map(|item: &Node<'_>| item.line);
        Ok(Node { line, value: Value::List(items) })
    }

    fn visit_map<A: MapAccess<'t>>(self, mut access: A) -> Result<Node<'t>, A::Error> {
        let mut pairs = Vec::new();
        let mut line = None;
        while let Some((key, value)) = access.next_entry_seed(self.inner(), self.inner())? {
            line = line.or(key.line);
            if matches!(&key.value, Value::Text { text, quoted: false } if text == "<<") {
                merge(&mut pairs, value.value).map_err(de::Error::custom)?;
            } else {
                pairs.push(((key, value), false));
            }
        }
        Ok(Node { line, value: Value::Map(without_overridden(pairs)) })
    }

    /// A value with a YAML tag. The tag is ignored.
    fn visit_enum<A: EnumAccess<'t>>(self, access: A) -> Result<Node<'t>, A::Error> {
        let (_tag, content) = access.variant::<String>()?;
        content.newtype_variant_seed(self)
    }
}

/// Adds the pairs of a merge key `<<`. The value of this key has one or several mappings. As in the host agent's parser, the
/// merged pairs count at the place of the merge key. So a later key overrides a merged pair, and a merged pair overrides an
/// earlier key.
fn merge<'t>(pairs: &mut Vec<(Pair<'t>, bool)>, value: Value<'t>) -> Result<(), &'static str> {
    match value {
        Value::Map(merged) => pairs.extend(merged.into_iter().map(|pair| (pair, true))),
        // The mappings are merged in reverse order, since the first mapping counts if several mappings have a key.
        Value::List(items) => {
            for item in items.into_iter().rev() {
                let Value::Map(_) = item.value else { return Err(BAD_MERGE) };
                merge(pairs, item.value)?;
            }
        }
        _ => return Err(BAD_MERGE),
    }
    Ok(())
}

/// The pairs of a mapping, without merged pairs that a later key overrides. Merged pairs are made to be overridden, so they
/// must not be reported as duplicates.
fn without_overridden(pairs: Vec<(Pair<'_>, bool)>) -> Vec<Pair<'_>> {
    let mut later = BTreeSet::new();
    let counts = |(pair, merged): &(Pair<'_>, bool)| {
        let (key, _) = pair;
        later.insert(key.value.text().into_owned()) || !merged
    };
    let mut kept: Vec<_> = pairs.into_iter().rev().filter(counts).map(|(pair, _)| pair).collect();
    kept.reverse();
    kept
}

const BAD_MERGE: &str = "a merge key (<<) takes a mapping or a list of mappings";

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Node<'_>, LocatedProblem> {
        parse(Path::new("/etc/x.yml"), text)
    }

    fn pairs(text: &str) -> Vec<(String, Option<usize>, Value<'_>)> {
        let Value::Map(pairs) = read(text).unwrap().value else { panic!("not a mapping: {text}") };
        let name = |node: &Node<'_>| node.value.as_text().unwrap_or_default().into_owned();
        pairs.into_iter().map(|(key, value)| (name(&key), key.line, value.value)).collect()
    }

    fn text(text: &str, quoted: bool) -> Value<'_> {
        Value::Text { text: text.into(), quoted }
    }

    #[test]
    fn keeps_duplicates_in_order_with_their_lines() {
        let found = pairs("# first\na: 1\n\nb: x\r\n\"a\": 2\na:\n");
        let expected = [
            ("a", 2, Value::Integer(1)),
            ("b", 4, text("x", false)),
            ("a", 5, Value::Integer(2)),
            ("a", 6, Value::Null),
        ];
        assert_eq!(found, expected.map(|(key, line, value)| (key.to_owned(), Some(line), value)));
    }

    #[test]
    fn tells_quoted_texts_from_plain_ones() {
        let found = pairs(concat!(
            "a: yes\nb: \"yes\"\nc: 'yes'\nd: yes # not \"quoted\"\ne: {f: yes, g: 'yes'}\n",
            "h: say \"yes\"\ni: \"\\x79es\"\nj: \"\\\n  yes\"\nk: |-\n  yes\nl: !mine yes\nm: !!str yes\nn: y"
        ));
        let values: Vec<_> = found.into_iter().map(|(_, _, value)| value).collect();
        let inner = |value: &Value<'static>, name: &'static str| {
            (Node { line: Some(5), value: text(name, false) }, Node { line: Some(5), value: value.clone() })
        };
        assert_eq!(
            values,
            [
                text("yes", false),
                text("yes", true),
                text("yes", true),
                text("yes", false),
                Value::Map(vec![inner(&text("yes", false), "f"), inner(&text("yes", true), "g")]),
                text("say \"yes\"", false),
                text("yes", true),
                text("yes", true),
                text("yes", true),
                text("yes", false),
                text("yes", false),
                text("y", false),
            ]
        );
    }

    #[test]
    fn a_text_that_looks_like_a_key_is_no_key() {
        let found =
            pairs("a: |\n  enable: no\nb: \"x\n\n  enable: no\"\nc: {\nenable: no\n}\nd: [\n'x: y']\n");
        let keys: Vec<_> = found.iter().map(|(key, line, _)| (key.as_str(), *line)).collect();
        assert_eq!(keys, [("a", Some(1)), ("b", Some(3)), ("c", Some(6)), ("d", Some(9))]);
    }

    #[test]
    fn booleans_follow_the_platforms_rules() {
        for word in [
            "y", "Y", "yes", "Yes", "YES", "on", "On", "ON", "true", "True", "TRUE", "1", "t", "\"true\"",
            "'1'",
        ] {
            assert_eq!(read(word).unwrap().value.as_bool(), Some(true), "{word}");
        }
        for word in [
            "n", "N", "no", "No", "NO", "off", "Off", "OFF", "false", "False", "FALSE", "0", "f", "\"F\"",
            "'0'",
        ] {
            assert_eq!(read(word).unwrap().value.as_bool(), Some(false), "{word}");
        }
        for word in ["\"yes\"", "'on'", "\"no\"", "yEs", "2", "1.0", "null", "", "[]", "tru", "\"\""] {
            assert_eq!(read(word).unwrap().value.as_bool(), None, "{word}");
        }
    }

    #[test]
    fn whole_numbers_are_loose_in_form_and_strict_in_value() {
        for (form, number) in [
            ("4", 4),
            ("\"4\"", 4),
            ("4.0", 4),
            ("0x10", 16),
            ("'010'", 10),
            ("+4", 4),
            ("-1", -1),
            ("-0.0", 0),
        ] {
            assert_eq!(read(form).unwrap().value.as_integer(), Some(number), "{form}");
        }
        for form in [
            "4.7",
            "010",
            "true",
            "null",
            "four",
            "4 GPUs",
            "\"1,000\"",
            ".inf",
            ".nan",
            "1e400",
            "",
            "[4]",
            "''",
        ] {
            assert_eq!(read(form).unwrap().value.as_integer(), None, "{form}");
        }
        let huge = read("1234567890123456789012345678901234567890123").unwrap().value;
        assert!(huge.as_integer().is_none_or(|number| number > i128::from(u64::MAX)));
    }

    #[test]
    fn only_the_first_document_counts() {
        assert_eq!(pairs("---\na: 1\n---\nb: [\n"), [("a".to_owned(), Some(2), Value::Integer(1))]);
        for empty in ["", "\n\n", "# nothing\n", "---\n", "~"] {
            assert_eq!(read(empty).unwrap().value, Value::Null, "{empty:?}");
        }
    }

    #[test]
    fn a_tab_in_the_indentation_is_reported_as_such() {
        for (text, line) in [("a:\n\tb: 1\n", 2), ("a:\n  - b: c\n\td: e\n", 3), ("\ta: 1\n", 1)] {
            let problem = read(text).unwrap_err();
            assert_eq!(problem.origin.line, Some(line), "{text:?}");
            assert!(problem.problem.found.contains("a tab"), "{problem}");
            assert!(problem.problem.remedy.contains("spaces"), "{problem}");
        }
        let problem = read("a: 1\nb: [\n").unwrap_err();
        assert!(problem.problem.found.starts_with("not valid YAML"), "{problem}");
        assert!(problem.origin.line.is_some(), "{problem}");
    }

    #[test]
    fn aliases_may_repeat_only_within_bounds() {
        assert_eq!(pairs("a: &x 5\nb: *x\n")[1].2, Value::Integer(5));
        let cyclic = read("a: &x\n  b: *x\n").unwrap_err();
        assert!(cyclic.problem.found.contains("an alias contains itself"), "{cyclic}");
        let mut laughs = "a: &a [x, x, x, x, x, x, x, x, x]\n".to_owned();
        for (name, below) in ('b'..='z').zip('a'..) {
            let repeated = vec![format!("*{below}"); 9].join(", ");
            laughs.push_str(&format!("{name}: &{name} [{repeated}]\n"));
        }
        let problem = read(&laughs).unwrap_err();
        assert!(problem.problem.found.contains("the aliases expand to too many values"), "{problem}");
        // `ALIAS_ALLOWANCE` limits the aliases of a large list. It also limits the aliases of a long text, since each alias
        // copies the text.
        let wide = format!("a: &a\n{}b:\n{}", "- x\n".repeat(2_000), "- *a\n".repeat(2_000));
        assert!(read(&wide).unwrap_err().problem.found.contains("the aliases expand to too many values"));
        let long = format!("a: &a \"\\x41{}\"\nb:\n{}", "y".repeat(10_000), "- *a\n".repeat(2_000));
        assert!(read(&long).unwrap_err().problem.found.contains("the aliases expand to too many values"));
    }

    #[test]
    fn merge_keys_count_at_their_place() {
        let all = |text: &str| -> Vec<(String, String)> {
            let pairs = pairs(text).into_iter().filter(|(key, ..)| !key.starts_with('_'));
            pairs.map(|(key, _, value)| (key, value.as_text().unwrap_or_default().into_owned())).collect()
        };
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        let anchors = "_a: &a {x: 1, y: 2}\n_b: &b {y: 3, z: 4}\n_c: &c {<<: *a, w: 5}\n";
        let read_all = |text: &str| all(&format!("{anchors}{text}"));
        assert_eq!(read_all("<<: *a\n"), [pair("x", "1"), pair("y", "2")]);
        assert_eq!(read_all("<<: *a\ny: 9\n"), [pair("x", "1"), pair("y", "9")]);
        assert_eq!(read_all("y: 9\n<<: *a\n"), [pair("y", "9"), pair("x", "1"), pair("y", "2")]);
        assert_eq!(read_all("<<: [*a, *b]\n"), [pair("z", "4"), pair("x", "1"), pair("y", "2")]);
        assert_eq!(read_all("<<: *c\n"), [pair("x", "1"), pair("y", "2"), pair("w", "5")]);
        assert_eq!(read_all("<<: {q: 7}\n"), [pair("q", "7")]);
        assert_eq!(read_all("\"<<\": 7\n"), [pair("<<", "7")]);
        let text = format!("{anchors}<<: *b\n");
        let at = pairs(&text);
        assert_eq!(at.last().map(|(key, line, _)| (key.as_str(), *line)), Some(("z", Some(2))));
        for wrong in ["<<: 7\n", "<<:\n", "_a: &a {x: 1}\n<<: [*a, 7]\n", "<<: [[]]\n"] {
            let problem = read(wrong).unwrap_err();
            assert!(problem.problem.found.contains("a merge key (<<) takes a mapping"), "{problem}");
            assert!(problem.origin.line.is_some(), "{problem}");
        }
    }

    #[test]
    fn a_large_file_without_aliases_is_within_the_budget() {
        let list = format!("a:\n{}", "- x\n".repeat(100_000));
        assert!(matches!(&pairs(&list)[0].2, Value::List(items) if items.len() == 100_000));
        let escapes = format!("a:\n{}", format!("- \"{}\"\n", "\\L".repeat(8_000)).repeat(25));
        assert_eq!(pairs(&escapes).len(), 1);
    }

    #[test]
    fn nesting_has_a_limit() {
        let deep = |depth| format!("{}x{}", "[".repeat(depth), "]".repeat(depth));
        assert!(read(&deep(32)).is_ok());
        assert!(read(&deep(33)).unwrap_err().problem.found.contains("nested too deeply"));
        assert!(read(&"- ".repeat(5_000)).is_err());
        assert!(read(&"[{".repeat(500_000)).unwrap_err().problem.found.contains("1000000 brackets"));
    }

    #[test]
    fn a_line_that_the_parser_is_slow_at_is_refused() {
        let text = |bytes: usize| format!("a: 1\nb: \"{}\"\nc: 1\n", "x ".repeat((bytes - 5) / 2));
        assert_eq!(pairs(&text(MAX_LINE_BYTES)).len(), 3);
        for quoted in ["\"", "'", ""] {
            let problem = read(&text(8 << 20).replace('"', quoted)).unwrap_err();
            assert_eq!(problem.origin.line, Some(2), "{problem}");
            assert!(problem.problem.found.contains("at most 16384"), "{problem}");
        }
    }

    #[test]
    fn findings_are_short_and_printable() {
        let long = "x".repeat(1000);
        assert_eq!(text(&long, true).found().chars().count(), "found ".len() + SHOWN_CHARS + 5);
        assert_eq!(text("a\u{1b}[31m\n\"", true).found(), r#"found "a\u{1b}[31m\n\"""#);
        assert_eq!(printable("a\u{1b}[31m'b'\u{85}"), "a\u{fffd}[31m'b'\u{fffd}");
        let key = "\u{e9}".repeat(1000);
        assert_eq!(printable(&key).chars().count(), SHOWN_CHARS + 3);
        let problem = read("\"\\e[31m\": &a [*a]\n").unwrap_err();
        assert!(problem.problem.found.contains("\u{fffd}[31m"), "{problem}");
        assert!(!problem.to_string().contains(char::is_control), "{problem}");
        assert_eq!(Value::Float(4.7).found(), "found 4.7");
        assert_eq!(Value::Null.found(), "found nothing");
    }
}
