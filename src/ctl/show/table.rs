//! Tables and prose for people. They fit the width that COLUMNS or the terminal names, and have colours on a terminal. Where
//! neither names a width, each row is one line, as long as its texts, for programs that search them.

use std::fmt;

use comfy_table::{Cell, CellAlignment, Color, ColumnConstraint, ContentArrangement};

use crate::dbus::proxy::Listed;
use crate::dbus::rows::PcieInfo;

/// The borders of the platform's own tables: `+---+`, nothing between the rows.
const PLATFORM: &str = "||--+-++|    ++++++";

/// The blanks between two columns without borders.
const GAP: u16 = 2;

/// The last column may hold prose, which is broken into lines: where there is less room than this for the prose, other
/// columns are left out first.
const PROSE: usize = 24;

/// Heads of columns that show a state by a word.
const STATES: [&str; 4] = ["STATE", "HEALTH", "MPS", "State:"];

/// The text of a value that is not known.
const UNKNOWN: &str = "-";

/// The width for texts on stdout: the value of COLUMNS, also for a pipe, so that `watch` gets whole lines; otherwise the
/// width of the terminal. None: no terminal, or a terminal that doesn't know.
pub(in crate::ctl) fn width() -> Option<usize> {
    let said = std::env::var("COLUMNS").ok().and_then(|columns| columns.trim().parse().ok());
    let own = || Some(usize::from(rustix::termios::tcgetwinsize(rustix::stdio::stdout()).ok()?.ws_col));
    said.filter(|width| *width > 0).or_else(own).filter(|width| *width > 0)
}

/// Whether stdout takes colours: a terminal does, unless `NO_COLOR` or TERM says otherwise.
pub(in crate::ctl) fn colour() -> bool {
    is_drawn_on() && std::env::var_os("NO_COLOR").is_none_or(|text| text.is_empty())
}

/// Whether a text on stdout can take the place of an earlier one: on a terminal, unless TERM says otherwise.
pub(in crate::ctl) fn is_drawn_on() -> bool {
    rustix::termios::isatty(rustix::stdio::stdout())
        && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Look {
    /// A line of heads and a line for each row. A column without a value in any row is not shown.
    Plain,
    /// The rows alone, for programs that split them at two blanks: every column is there, and has a text.
    Rows,
    /// Names and their values, without heads.
    Pairs,
    /// With borders. It has the same columns at every width, since programs read it.
    Platform,
}

/// Rows of text, shown as a table.
#[derive(Debug)]
pub(in crate::ctl) struct Table {
    heads: Vec<String>,
    rows: Vec<Vec<String>>,
    expendable: Vec<String>,
    numbers: Vec<String>,
    look: Look,
}

/// A table with these column heads.
pub(in crate::ctl) fn table(heads: &[&str]) -> Table {
    let heads = heads.iter().map(|head| (*head).to_owned()).collect();
    Table { heads, rows: Vec::new(), expendable: Vec::new(), numbers: Vec::new(), look: Look::Plain }
}

/// A column of a table of rows: its head, and the text of a row.
pub(in crate::ctl) type Column<R> = (&'static str, fn(&R) -> String);

/// A table of these rows.
pub(in crate::ctl) fn table_of<R>(columns: &[Column<R>], rows: &[Listed<R>]) -> Table {
    let heads: Vec<&str> = columns.iter().map(|(head, _)| *head).collect();
    let mut table = table(&heads);
    for row in rows {
        table.add_row(columns.iter().map(|(_, text)| text(row)));
    }
    table
}

/// Names and their values, two columns.
pub(in crate::ctl) fn pairs() -> Table {
    Table { look: Look::Pairs, ..table(&[]) }
}

/// Prose, broken into lines at the width for stdout.
pub(in crate::ctl) fn prose(text: &str) -> String {
    prose_in(text, width())
}

/// A line of a list: its other lines are two blanks further to the right.
pub(in crate::ctl) fn hanging(text: &str) -> String {
    hanging_in(text, width())
}

fn hanging_in(text: &str, width: Option<usize>) -> String {
    let indent = " ".repeat(text.chars().take_while(|c| *c == ' ').count());
    let room = width.map(|width| width.saturating_sub(indent.len() + 2).max(PROSE));
    let lines = prose_in(text.trim_start(), room);
    format!("{indent}{}", lines.replace('\n', &format!("\n{indent}  ")))
}

fn prose_in(text: &str, width: Option<usize>) -> String {
    let mut lines = pairs();
    lines.add_row([printable(text)]);
    lines.render(width, false)
}

impl Table {
    /// The columns to leave out where the terminal is too narrow for all, the first of them first.
    pub(in crate::ctl) fn leave_out(mut self, heads: &[&str]) -> Self {
        self.expendable = heads.iter().map(|head| (*head).to_owned()).collect();
        self
    }

    /// The columns of numbers, which are aligned at their last digit.
    pub(in crate::ctl) fn numbers(mut self, heads: &[&str]) -> Self {
        self.numbers = heads.iter().map(|head| (*head).to_owned()).collect();
        self
    }

    /// The same table without the line of heads.
    pub(in crate::ctl) fn without_heads(mut self, without: bool) -> Self {
        if without {
            self.look = Look::Rows;
        }
        self
    }

    /// The same table with the borders of the platform's tables.
    pub(in crate::ctl) fn for_the_platform(mut self) -> Self {
        self.look = Look::Platform;
        self
    }

    /// Adds a row, with a text for each head.
    pub(in crate::ctl) fn add_row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    fn render(&self, width: Option<usize>, colour: bool) -> String {
        let mut table = comfy_table::Table::new();
        match self.look {
            Look::Platform => {
                table.load_preset(PLATFORM).set_header(&self.heads);
            }
            Look::Plain => {
                table.load_preset(comfy_table::presets::NOTHING).set_header(&self.heads);
            }
            Look::Rows | Look::Pairs => {
                table.load_preset(comfy_table::presets::NOTHING);
            }
        }
        if colour {
            table.enforce_styling();
        } else {
            table.force_no_tty();
        }
        for row in &self.rows {
            let cells = row.iter().enumerate().map(|(column, text)| {
                let head = self.heads.get(column).or(row.first()).map(String::as_str).unwrap_or_default();
                let state = STATES.contains(&head).then(|| state_colour(text)).flatten();
                let is_missing = self.look == Look::Rows && text.is_empty();
                let cell = Cell::new(if is_missing { UNKNOWN } else { text });
                state.map_or(cell.clone(), |colour| cell.fg(colour))
            });
            table.add_row(cells);
        }
        if self.look == Look::Platform {
            return table.to_string();
        }
        let last = table.column_count().saturating_sub(1);
        for (index, column) in table.column_iter_mut().enumerate() {
            // Blanks behind the last column would be beyond the edge of a terminal.
            column.set_padding((0, if index == last { 0 } else { GAP }));
            let head = self.heads.get(index);
            if head.is_some_and(|head| self.numbers.contains(head)) {
                column.set_cell_alignment(CellAlignment::Right);
            }
            let says_something = |row: &Vec<String>| row.get(index).is_some_and(|text| !is_unknown(text));
            if self.look == Look::Plain && !self.rows.iter().any(says_something) {
                column.set_constraint(ColumnConstraint::Hidden);
            }
        }
        let left_out = width.map(|width| self.fit(&mut table, width)).unwrap_or_default();
        let text = table.trim_fmt();
        if left_out.is_empty() {
            return text;
        }
        let note = format!("(no room for {}; --json has all)", left_out.join(", "));
        format!("{text}\n{}", prose_in(&note, width))
    }

    /// Leaves out columns until the rest has room, and gives the last column the room that is left. Returns the heads of
    /// the columns that are left out.
    fn fit(&self, table: &mut comfy_table::Table, width: usize) -> Vec<&str> {
        let gap = usize::from(GAP);
        table.set_content_arrangement(ContentArrangement::Dynamic);
        table.set_width(u16::try_from(width).unwrap_or(u16::MAX));
        let is_shown = |column: &comfy_table::Column| column.constraint() != Some(&ColumnConstraint::Hidden);
        let shown: Vec<bool> = table.column_iter().map(is_shown).collect();
        let natural: Vec<usize> =
            table.column_max_content_widths().into_iter().map(|width| usize::from(width) + gap).collect();
        let Some((prose, others)) = natural.split_last() else { return Vec::new() };
        let prose = prose - gap;
        let mut needed: usize =
            others.iter().zip(&shown).filter(|(_, shown)| **shown).map(|(width, _)| width).sum();
        let mut left_out: Vec<&str> = Vec::new();
        for head in &self.expendable {
            if needed + prose.min(PROSE) <= width {
                break;
            }
            for (index, gained) in others.iter().enumerate() {
                if self.heads.get(index) == Some(head)
                    && shown.get(index) == Some(&true)
                    && let Some(column) = table.column_mut(index)
                {
                    column.set_constraint(ColumnConstraint::Hidden);
                    needed -= gained;
                    left_out.push(head.as_str());
                }
            }
        }
        // Less than a word's room for the prose: then every column has to give.
        if needed + prose.min(PROSE / 2) <= width {
            for column in table.column_iter_mut().take(others.len()).filter(|column| is_shown(column)) {
                column.set_constraint(ColumnConstraint::ContentWidth);
            }
        }
        left_out
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(width(), colour()))
    }
}

fn is_unknown(text: &str) -> bool {
    text.is_empty() || text == UNKNOWN
}

/// Green is well, red is not served, yellow is between the two. They are the theme's own colours, which its owner can
/// read.
fn state_colour(text: &str) -> Option<Color> {
    match text.split([':', ';']).next().unwrap_or_default() {
        "ready" | "served" => Some(Color::DarkGreen),
        "failed" | "faulted" | "not served" | "BYPASS" => Some(Color::DarkRed),
        "degraded" | "starting" | "stopping" | "backoff" | "waiting" | "not enforced" | "drained"
        | "WAITS" => Some(Color::DarkYellow),
        _ => None,
    }
}

/// A value that a table can show.
pub(in crate::ctl) trait Shown {
    /// Its text; `-` if it is not known, or an empty list.
    fn shown(&self) -> String;
}

impl Shown for String {
    fn shown(&self) -> String {
        printable(self)
    }
}

macro_rules! shown {
    ($($plain:ty),*) => { $(
        impl Shown for $plain {
            fn shown(&self) -> String {
                printable(&self.to_string())
            }
        }
    )* };
}

shown!(bool, i32, u32, u64, PcieInfo);

impl<T: Shown> Shown for Option<T> {
    fn shown(&self) -> String {
        self.as_ref().map_or_else(|| UNKNOWN.to_owned(), Shown::shown)
    }
}

impl<T: Shown> Shown for Vec<T> {
    fn shown(&self) -> String {
        let texts: Vec<String> = self.iter().map(Shown::shown).collect();
        if texts.is_empty() { UNKNOWN.to_owned() } else { texts.join(" ") }
    }
}

/// The text of a number with a unit behind it; `-` if it is not known.
pub(in crate::ctl) fn with_unit<N: fmt::Display>(number: Option<N>, unit: &str) -> String {
    number.map_or_else(|| UNKNOWN.to_owned(), |number| format!("{number} {unit}"))
}

/// Text without control characters: some of it comes from other processes, and none of it may command the terminal.
pub(in crate::ctl) fn printable(text: &str) -> String {
    text.chars().map(|c| if is_unprintable(c) { '\u{fffd}' } else { c }).collect()
}

/// Characters that command a terminal, and characters that show nothing themselves but turn, break or hide their
/// neighbours.
pub(in crate::ctl) fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
        || matches!(c, '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_platforms_look_is_the_same_at_every_width() {
        let mut table = table(&["Addr", "Index", "Health"]).leave_out(&["Index"]).for_the_platform();
        table.add_row(["00:06.0-0", "-1", "healthy"]);
        table.add_row(["00:06.0-1", "-1", ""]);
        for width in [None, Some(20), Some(200)] {
            assert_eq!(
                table.render(width, false),
                "+-----------+-------+---------+\n\
                 | Addr      | Index | Health  |\n\
                 +-----------+-------+---------+\n\
                 | 00:06.0-0 | -1    | healthy |\n\
                 | 00:06.0-1 | -1    |         |\n\
                 +-----------+-------+---------+"
            );
        }
    }

    fn gpus(health: &str) -> Table {
        let mut table = table(&["DEVICE", "MODEL", "CLIENTS", "UUID", "HEALTH"])
            .leave_out(&["UUID", "MODEL"])
            .numbers(&["CLIENTS"]);
        let uuid = "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400";
        table.add_row(["00:06.0-0", "Tesla P40", "1 / 12", uuid, health]);
        table
    }

    #[test]
    fn what_fits_is_not_changed() {
        let table = gpus("served");
        let whole = table.render(None, false);
        assert_eq!(
            whole,
            "DEVICE     MODEL      CLIENTS  UUID                                      HEALTH\n\
             00:06.0-0  Tesla P40   1 / 12  GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400  served"
        );
        assert_eq!(table.render(Some(whole.find('\n').unwrap()), false), whole);
    }

    #[test]
    fn no_line_is_longer_than_the_terminal_is_wide() {
        let long =
            "not served: control daemon shared is backoff: it ended with exit status 1 before it was ready";
        for reason in ["served", long] {
            for width in 24..220 {
                let text = gpus(reason).render(Some(width), false);
                for line in text.lines() {
                    assert!(line.chars().count() <= width, "{width}:\n{text}");
                }
            }
        }
    }

    #[test]
    fn what_there_is_no_room_for_is_named() {
        let narrow = gpus("served").render(Some(60), false);
        assert_eq!(
            narrow,
            "DEVICE     MODEL      CLIENTS  HEALTH\n\
             00:06.0-0  Tesla P40   1 / 12  served\n\
             (no room for UUID; --json has all)"
        );
        // A reason is broken into lines, a UUID isn't.
        let reason = gpus("not served: GPU is lost, which nothing but a reset heals").render(Some(40), false);
        assert!(reason.ends_with("(no room for UUID, MODEL; --json has\nall)"), "{reason}");
    }

    #[test]
    fn a_column_without_a_value_is_for_programs() {
        let mut table = table(&["PID", "CONTAINER", "COMMAND"]);
        table.add_row(["1", "-", "a"]);
        table.add_row(["2", "", "b"]);
        assert_eq!(table.render(Some(80), false), "PID  COMMAND\n1    a\n2    b");
        assert_eq!(table.without_heads(true).render(Some(80), false), "1  -  a\n2  -  b");
    }

    #[test]
    fn colours_are_for_states_and_only_where_they_are_wanted() {
        let table = gpus("served");
        let coloured = table.render(None, true);
        assert_eq!(coloured.matches('\u{1b}').count(), 2, "{coloured:?}");
        assert!(!table.render(None, false).contains('\u{1b}'));
        assert_eq!(state_colour("not served: GPU is lost"), Some(Color::DarkRed));
        assert_eq!(state_colour("not enforced"), Some(Color::DarkYellow));
        assert_eq!(state_colour("degraded: 1 of 2 GPUs"), Some(Color::DarkYellow));
        assert_eq!(state_colour("ready"), Some(Color::DarkGreen));
        assert_eq!(state_colour("disabled"), None);
    }

    #[test]
    fn pairs_and_prose_are_broken_below_themselves() {
        let mut pairs = pairs();
        pairs.add_row(["State:", "degraded: 1 of 2 GPUs not served"]);
        pairs.add_row(["Version:", "1.0.0"]);
        assert_eq!(pairs.render(None, false), "State:    degraded: 1 of 2 GPUs not served\nVersion:  1.0.0");
        assert_eq!(
            pairs.render(Some(24), false),
            "State:    degraded: 1 of\n          2 GPUs not\n          served\nVersion:  1.0.0"
        );
        assert_eq!(pairs.render(None, true).matches('\u{1b}').count(), 2);
        // Colours take no room, and no blanks stand beyond the edge.
        for line in pairs.render(Some(24), true).lines() {
            let shown: usize = line
                .split('\u{1b}')
                .enumerate()
                .map(|(part, text)| match part {
                    0 => text.len(),
                    _ => text.split_once('m').unwrap().1.len(),
                })
                .sum();
            assert!(shown <= 24, "{line:?}");
        }
        assert_eq!(prose_in("one word after the other", Some(12)), "one word\nafter the\nother");
        assert_eq!(prose_in("one word after the other", None), "one word after the other");
    }

    #[test]
    fn a_value_that_is_not_known_is_a_dash() {
        let known = (Some(7), "a\u{1b}".to_owned(), vec![1u32, 2]);
        assert_eq!([known.0.shown(), known.1.shown(), known.2.shown()], ["7", "a\u{fffd}", "1 2"]);
        assert_eq!([None::<u32>.shown(), Vec::<u32>::new().shown(), with_unit(None::<i32>, "%")], ["-"; 3]);
    }

    #[test]
    fn text_cannot_command_the_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\n"), "a\u{fffd}[2Jb\u{fffd}");
        // C1's CSI, and a text that is shown from right to left.
        assert_eq!(printable("\u{9b}2J\u{202e}4 yes"), "\u{fffd}2J\u{fffd}4 yes");
        assert_eq!(printable("größe 模型"), "größe 模型");
    }
}
