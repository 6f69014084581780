//! Tables in the look of the platform's own command line. On a terminal they fit its width and have colours; in a pipe
//! they are as wide as their texts, one line for each row.

use std::fmt;

use comfy_table::{Cell, Color, ColumnConstraint, ContentArrangement};

use crate::dbus::proxy::Listed;
use crate::dbus::rows::PcieInfo;

/// Borders of `+---+`, nothing between the rows.
const LOOK: &str = "||--+-++|    ++++++";

/// The last column holds prose, which may be broken into lines: where there is less room than this for it, others are
/// left out first.
const PROSE: usize = 24;

/// Heads of columns that show a state by a word.
const STATES: [&str; 3] = ["State", "Health", "State:"];

/// The width of the terminal that stdout goes to: the value of COLUMNS, or the terminal's own. None: no terminal, or a
/// terminal that doesn't know.
pub(in crate::ctl) fn width() -> Option<usize> {
    if !rustix::termios::isatty(rustix::stdio::stdout()) {
        return None;
    }
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

/// Rows of text, shown as a table.
#[derive(Debug)]
pub(in crate::ctl) struct Table {
    heads: Vec<String>,
    rows: Vec<Vec<String>>,
    expendable: Vec<String>,
    bordered: bool,
}

/// A table with these column heads.
pub(in crate::ctl) fn table(heads: &[&str]) -> Table {
    let heads = heads.iter().map(|head| (*head).to_owned()).collect();
    Table { heads, rows: Vec::new(), expendable: Vec::new(), bordered: true }
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

/// Names and their values, two columns without borders.
pub(in crate::ctl) fn pairs() -> Table {
    Table { bordered: false, ..table(&[]) }
}

impl Table {
    /// The columns to leave out where the terminal is too narrow for all, the first of them first.
    pub(in crate::ctl) fn leave_out(mut self, heads: &[&str]) -> Self {
        self.expendable = heads.iter().map(|head| (*head).to_owned()).collect();
        self
    }

    /// Adds a row, with a text for each head.
    pub(in crate::ctl) fn add_row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    fn render(&self, width: Option<usize>, colour: bool) -> String {
        let mut table = comfy_table::Table::new();
        if self.bordered {
            table.load_preset(LOOK).set_header(&self.heads);
        } else {
            table.load_preset(comfy_table::presets::NOTHING);
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
                let cell = Cell::new(text);
                state.map_or(cell.clone(), |colour| cell.fg(colour))
            });
            table.add_row(cells);
        }
        if !self.bordered {
            for column in table.column_iter_mut() {
                column.set_padding((0, 2));
            }
        }
        let left_out = width.map(|width| self.fit(&mut table, width)).unwrap_or_default();
        let text = if self.bordered { table.to_string() } else { table.trim_fmt() };
        if left_out.is_empty() {
            return text;
        }
        let mut note = pairs();
        note.add_row([format!("(no room for {}; --json has all)", left_out.join(", "))]);
        format!("{text}\n{}", note.render(width, false))
    }

    /// Leaves out columns until the rest has room, and gives the last column the room that is left. Returns the heads of
    /// the columns that are left out.
    fn fit(&self, table: &mut comfy_table::Table, width: usize) -> Vec<&str> {
        table.set_content_arrangement(ContentArrangement::Dynamic);
        table.set_width(u16::try_from(width).unwrap_or(u16::MAX));
        // With the two blanks and the border that a column has.
        let beside = if self.bordered { 3 } else { 2 };
        let natural: Vec<usize> =
            table.column_max_content_widths().into_iter().map(|width| usize::from(width) + beside).collect();
        let Some((prose, others)) = natural.split_last() else { return Vec::new() };
        let mut needed = others.iter().sum::<usize>() + usize::from(self.bordered);
        let mut left_out = Vec::new();
        for head in &self.expendable {
            if needed + (*prose).min(PROSE + beside) <= width {
                break;
            }
            for (index, gained) in others.iter().enumerate() {
                if self.heads.get(index) == Some(head)
                    && let Some(column) = table.column_mut(index)
                {
                    column.set_constraint(ColumnConstraint::Hidden);
                    needed -= gained;
                }
            }
            left_out.push(head.as_str());
        }
        // Less than a word's room for the prose: then every column has to give.
        if needed + (*prose).min(PROSE / 2 + beside) <= width {
            for (index, column) in table.column_iter_mut().take(others.len()).enumerate() {
                let hidden = self.heads.get(index).is_some_and(|head| left_out.contains(&head.as_str()));
                if !hidden {
                    column.set_constraint(ColumnConstraint::ContentWidth);
                }
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

/// Green is well, red is not served, yellow may pass.
fn state_colour(text: &str) -> Option<Color> {
    match text.split([':', ';']).next().unwrap_or_default() {
        "ready" | "healthy" => Some(Color::Green),
        "failed" | "faulted" | "not healthy" => Some(Color::Red),
        "degraded" | "starting" | "stopping" | "backoff" | "waiting" => Some(Color::Yellow),
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
        self.as_ref().map_or_else(|| "-".to_owned(), Shown::shown)
    }
}

impl<T: Shown> Shown for Vec<T> {
    fn shown(&self) -> String {
        let texts: Vec<String> = self.iter().map(Shown::shown).collect();
        if texts.is_empty() { "-".to_owned() } else { texts.join(" ") }
    }
}

/// The text of a number with a unit behind it; `-` if it is not known.
pub(in crate::ctl) fn with_unit<N: fmt::Display>(number: Option<N>, unit: &str) -> String {
    number.map_or_else(|| "-".to_owned(), |number| format!("{number} {unit}"))
}

/// Whether a GPU or a slice works, and the reason or a note.
pub(in crate::ctl) fn health(healthy: bool, reason: &str) -> String {
    let word = if healthy { "healthy" } else { "not healthy" };
    if reason.is_empty() { word.to_owned() } else { format!("{word}: {}", printable(reason)) }
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
    fn the_look_is_the_platforms() {
        let mut table = table(&["Addr", "Index"]);
        table.add_row(["00:06.0-0", "-1"]);
        table.add_row(["00:06.0-1", "-1"]);
        assert_eq!(
            table.render(None, false),
            "+-----------+-------+\n\
             | Addr      | Index |\n\
             +-----------+-------+\n\
             | 00:06.0-0 | -1    |\n\
             | 00:06.0-1 | -1    |\n\
             +-----------+-------+"
        );
    }

    fn gpus(reason: &str) -> Table {
        let mut table = table(&["Addr", "Model", "PCIE_Info", "Device_path", "Health"])
            .leave_out(&["PCIE_Info", "Model"]);
        let uuid = "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400";
        table.add_row(["00:06.0-0", "Tesla P40", r#"{"lane_width":16,"version":"3.0"}"#, uuid, reason]);
        table
    }

    #[test]
    fn what_fits_is_not_changed() {
        let table = gpus("healthy");
        let whole = table.render(None, false);
        assert_eq!(table.render(Some(whole.find('\n').unwrap()), false), whole);
    }

    #[test]
    fn no_line_is_longer_than_the_terminal_is_wide() {
        let long =
            "not healthy: control daemon shared is backoff: it ended with exit status 1 before it was ready";
        for reason in ["healthy", long] {
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
        let narrow = gpus("healthy").render(Some(80), false);
        assert_eq!(
            narrow,
            "+-----------+-----------+------------------------------------------+---------+\n\
             | Addr      | Model     | Device_path                              | Health  |\n\
             +-----------+-----------+------------------------------------------+---------+\n\
             | 00:06.0-0 | Tesla P40 | GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400 | healthy |\n\
             +-----------+-----------+------------------------------------------+---------+\n\
             (no room for PCIE_Info; --json has all)"
        );
        // A reason is broken into lines, a UUID isn't.
        let reason =
            gpus("not healthy: GPU is lost, which nothing but a reset heals").render(Some(80), false);
        assert!(reason.contains("| GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400 |"), "{reason}");
        assert!(reason.ends_with("(no room for PCIE_Info, Model; --json has all)"), "{reason}");
    }

    #[test]
    fn colours_are_for_states_and_only_where_they_are_wanted() {
        let table = gpus("healthy");
        let coloured = table.render(None, true);
        assert_eq!(coloured.matches('\u{1b}').count(), 2, "{coloured:?}");
        assert!(!table.render(None, false).contains('\u{1b}'));
        assert_eq!(state_colour("not healthy: GPU is lost"), Some(Color::Red));
        assert_eq!(state_colour("healthy: limits are not enforced"), Some(Color::Green));
        assert_eq!(state_colour("degraded"), Some(Color::Yellow));
        assert_eq!(state_colour("disabled"), None);
    }

    #[test]
    fn pairs_are_broken_below_themselves() {
        let mut pairs = pairs();
        pairs.add_row(["State:", "degraded"]);
        pairs.add_row(["Reason:", "1 of 2 GPUs not served"]);
        assert_eq!(pairs.render(None, false), "State:   degraded\nReason:  1 of 2 GPUs not served");
        assert_eq!(
            pairs.render(Some(24), false),
            "State:   degraded\nReason:  1 of 2 GPUs\n         not served"
        );
        assert_eq!(pairs.render(None, true).matches('\u{1b}').count(), 2);
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
