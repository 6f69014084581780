//! Tables and texts for people. The texts fit the width in `COLUMNS` or of the terminal. Without a known width, each row is one
//! line of any length, so that programs can search the text.

use std::fmt;
use std::iter;

use comfy_table::{Cell, CellAlignment, Color, ColumnConstraint, ContentArrangement};
use unicode_truncate::UnicodeTruncateStr;

use common::bus::rows::PcieInfo;
use common::bus::word::Word;
use common::text::printable;

/// The borders of the platform's tables, as a preset for `comfy_table`: lines such as `+---+`, and no line between two rows.
const PLATFORM: &str = "||--+-++|    ++++++";

/// The number of blanks between two columns without borders.
const GAP: u16 = 2;

/// The smallest width for the last column, which wraps its long texts. Other columns are omitted so that the last column gets
/// this width.
const PROSE: usize = 24;

/// The smallest width of a column with texts that are cut.
const SHORTEST: usize = 12;

const UNKNOWN: &str = "-";

/// The width for texts on stdout: the value of `COLUMNS`, otherwise the width of the terminal. `COLUMNS` counts even if stdout
/// is a pipe, since `watch` sets this variable for its commands. None if the width is unknown.
pub(crate) fn width() -> Option<usize> {
    let said = std::env::var("COLUMNS").ok().and_then(|columns| columns.trim().parse().ok());
    let own = || Some(usize::from(rustix::termios::tcgetwinsize(rustix::stdio::stdout()).ok()?.ws_col));
    said.filter(|width| *width > 0).or_else(own).filter(|width| *width > 0)
}

/// True if texts on stdout have colours: on a terminal, unless `NO_COLOR` or `TERM` forbids colours.
pub(crate) fn colour() -> bool {
    is_drawn_on() && std::env::var_os("NO_COLOR").is_none_or(|text| text.is_empty())
}

/// True if stdout is a terminal on which a text can replace an earlier text.
pub(crate) fn is_drawn_on() -> bool {
    rustix::termios::isatty(rustix::stdio::stdout())
        && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TableStyle {
    /// A line of headings, and a line for each row. A column without any value is hidden.
    Plain,
    /// The rows without headings, for programs that split each row at two blanks. So every column is shown, and has a text in
    /// every row.
    Rows,
    /// Two columns without headings: names and values.
    Pairs,
    /// A table with borders. Programs read this table, so its columns do not depend on the width of the terminal.
    Platform,
}

/// The heading of a column, and the way in which the texts of the column are shown.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Head {
    pub(crate) name: &'static str,
    /// True for numbers, which are aligned at the right.
    pub(crate) is_number: bool,
    /// True if the end of a text is more important than its beginning, as in a path. A text that is too long is then cut at its
    /// beginning.
    pub(crate) ends: bool,
    /// If not all columns fit, the column with the highest number is omitted first. A column with 0 is never omitted, and the
    /// last column is never omitted either.
    pub(crate) expendable: u8,
}

/// The kind of state that a text describes. The colour of the text follows from the kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    Well,
    Between,
    Bad,
}

#[derive(Debug)]
pub(crate) struct Table {
    heads: Vec<Head>,
    rows: Vec<Vec<(String, Option<Tone>)>>,
    look: TableStyle,
}

pub(crate) fn table(texts: &[&'static str], numbers: &[&'static str]) -> Table {
    let texts = texts.iter().map(|name| Head { name, ..Head::default() });
    let numbers = numbers.iter().map(|name| Head { name, is_number: true, ..Head::default() });
    Table::new(texts.chain(numbers))
}

pub(crate) fn pairs() -> Table {
    Table { look: TableStyle::Pairs, ..Table::new([]) }
}

pub(crate) fn prose(text: &str) -> String {
    prose_in(text, width())
}

/// Wraps an item of a list at the width of stdout. The second line and all further lines are indented.
pub(crate) fn hanging(text: &str) -> String {
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
    pub(crate) fn new(heads: impl IntoIterator<Item = Head>) -> Self {
        Self { heads: heads.into_iter().collect(), rows: Vec::new(), look: TableStyle::Plain }
    }

    pub(crate) fn without_heads(mut self, without: bool) -> Self {
        if without {
            self.look = TableStyle::Rows;
        }
        self
    }

    pub(crate) fn for_the_platform(mut self) -> Self {
        self.look = TableStyle::Platform;
        self
    }

    /// Cuts the texts of the column with `ends` at their beginning, so that no other column has to be omitted. The caller has
    /// to add all rows before this call.
    pub(crate) fn shorten(mut self, width: Option<usize>) -> Self {
        let (Some(width), Some(at)) = (width, self.heads.iter().position(|head| head.ends)) else {
            return self;
        };
        let last = self.heads.len().saturating_sub(1);
        let natural = |(index, head): (usize, &Head)| {
            let texts =
                self.rows.iter().filter_map(|row| row.get(index)).filter(|(text, _)| !is_unknown(text));
            let longest = texts.map(|(text, _)| text.chars().count()).max();
            // An empty column is hidden and needs no width. But the last column always counts, as in `fit`.
            let longest = longest.or((index == last).then_some(0))?;
            Some((*head, longest.max(head.name.chars().count())))
        };
        let others = self.heads.iter().enumerate().filter(|(index, _)| *index != at);
        let others: Vec<(Head, usize)> = others.filter_map(natural).collect();
        let room = width.saturating_sub(needed(&others, PROSE) + usize::from(GAP)).max(SHORTEST);
        for (text, _) in self.rows.iter_mut().filter_map(|row| row.get_mut(at)) {
            let surplus = text.chars().count().saturating_sub(room);
            if surplus > 0 {
                *text = iter::once('…').chain(text.chars().skip(surplus + 1)).collect();
            }
        }
        self
    }

    pub(crate) fn add_row(&mut self, texts: impl IntoIterator<Item = impl Into<String>>) {
        self.add_toned_row(texts.into_iter().map(|text| (text.into(), None)));
    }

    pub(crate) fn add_toned_row(&mut self, cells: impl IntoIterator<Item = (String, Option<Tone>)>) {
        self.rows.push(cells.into_iter().collect());
    }

    fn render(&self, width: Option<usize>, colour: bool) -> String {
        let mut table = comfy_table::Table::new();
        table.load_preset(if self.look == TableStyle::Platform {
            PLATFORM
        } else {
            comfy_table::presets::NOTHING
        });
        if matches!(self.look, TableStyle::Platform | TableStyle::Plain) {
            table.set_header(self.heads.iter().map(|head| head.name));
        }
        if colour {
            table.enforce_styling();
        } else {
            table.force_no_tty();
        }
        for row in &self.rows {
            let cells = row.iter().map(|(text, tone)| {
                let is_missing = self.look == TableStyle::Rows && text.is_empty();
                let cell = Cell::new(if is_missing { UNKNOWN } else { text });
                match tone {
                    Some(tone) => cell.fg(colour_of(*tone)),
                    None => cell,
                }
            });
            table.add_row(cells);
        }
        if self.look == TableStyle::Platform {
            return table.to_string();
        }
        let last = table.column_count().saturating_sub(1);
        for (index, column) in table.column_iter_mut().enumerate() {
            // Padding at the right of the last column would extend beyond the edge of the terminal.
            column.set_padding((0, if index == last { 0 } else { GAP }));
            if self.heads.get(index).is_some_and(|head| head.is_number) {
                column.set_cell_alignment(CellAlignment::Right);
            }
            let mut texts = self.rows.iter().filter_map(|row| row.get(index));
            if self.look == TableStyle::Plain && texts.all(|(text, _)| is_unknown(text)) {
                column.set_constraint(ColumnConstraint::Hidden);
            }
        }
        let left_out = width.map(|width| self.fit(&mut table, width)).unwrap_or_default();
        let text = table.trim_fmt();
        if left_out.is_empty() {
            return text;
        }
        let note = format!("(no room for {left_out}; --json has all)", left_out = left_out.join(", "));
        format!("{text}\n{}", prose_in(&note, width))
    }

    /// Hides columns until the rest fits, and gives the last column the remaining width. Returns the headings of the hidden
    /// columns.
    fn fit(&self, table: &mut comfy_table::Table, width: usize) -> Vec<&'static str> {
        table.set_content_arrangement(ContentArrangement::Dynamic);
        table.set_width(u16::try_from(width).unwrap_or(u16::MAX));
        let is_shown = |column: &comfy_table::Column| column.constraint() != Some(&ColumnConstraint::Hidden);
        let last = table.column_count().saturating_sub(1);
        let heads = self.heads.iter().copied().chain(iter::repeat(Head::default()));
        let columns = table.column_iter().zip(heads.zip(table.column_max_content_widths())).enumerate();
        let columns = columns.filter(|(index, (column, _))| *index == last || is_shown(column));
        let mut columns: Vec<(Head, usize)> =
            columns.map(|(_, (_, (head, width)))| (head, width.into())).collect();
        let left_out = without_room(&mut columns, width, PROSE);
        for (column, head) in table.column_iter_mut().zip(&self.heads) {
            if left_out.contains(&head.name) {
                column.set_constraint(ColumnConstraint::Hidden);
            }
        }
        // The other columns get their full width, unless the last column would then have less than half of `PROSE`.
        if needed(&columns, PROSE / 2) <= width {
            for column in table.column_iter_mut().take(last).filter(|column| is_shown(column)) {
                column.set_constraint(ColumnConstraint::ContentWidth);
            }
        }
        left_out
    }
}

/// Removes the most expendable columns until the rest fits, and returns their headings. The last column is never removed: its
/// texts can be wrapped at the width `prose`.
pub(crate) fn without_room(columns: &mut Vec<(Head, usize)>, room: usize, prose: usize) -> Vec<&'static str> {
    let mut left_out = Vec::new();
    while needed(columns, prose) > room {
        let others = columns.iter().rev().skip(1).map(|(head, _)| *head);
        let worst = others.max_by_key(|head| head.expendable).filter(|head| head.expendable > 0);
        let Some(worst) = worst else { break };
        columns.retain(|(head, _)| head.name != worst.name);
        left_out.push(worst.name);
    }
    left_out
}

/// The smallest width of a table with these columns, if the texts of the last column are wrapped at the width `prose`.
fn needed(columns: &[(Head, usize)], prose: usize) -> usize {
    let Some(((_, last), others)) = columns.split_last() else { return 0 };
    others.iter().map(|(_, width)| width + usize::from(GAP)).sum::<usize>() + (*last).min(prose)
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(width(), colour()))
    }
}

fn is_unknown(text: &str) -> bool {
    text.is_empty() || text == UNKNOWN
}

/// A colour from the terminal's own theme, which the user has chosen.
fn colour_of(tone: Tone) -> Color {
    match tone {
        Tone::Well => Color::DarkGreen,
        Tone::Between => Color::DarkYellow,
        Tone::Bad => Color::DarkRed,
    }
}

pub(crate) trait Shown {
    /// `-` for an unknown value or an empty list.
    fn shown(&self) -> String;
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

shown!(bool, i32, u32, u64, String, PcieInfo);

impl<E: fmt::Display> Shown for Word<E> {
    fn shown(&self) -> String {
        printable(&self.to_string())
    }
}

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

pub(crate) fn cut(text: &str, room: usize) -> String {
    if text.unicode_truncate(room).0.len() == text.len() {
        return text.to_owned();
    }
    format!("{}…", text.unicode_truncate(room.saturating_sub(1)).0)
}

pub(crate) fn with_unit<N: fmt::Display>(number: Option<N>, unit: &str) -> String {
    number.map_or_else(|| UNKNOWN.to_owned(), |number| format!("{number} {unit}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_platforms_look_is_the_same_at_every_width() {
        let mut table = table(&["Addr", "Index", "Health"], &[]).for_the_platform();
        table.heads[1].expendable = 1;
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
        let mut table = table(&["DEVICE", "MODEL", "CLIENTS", "UUID", "HEALTH"], &[]);
        (table.heads[1].expendable, table.heads[2].is_number, table.heads[3].expendable) = (1, true, 2);
        let texts = ["00:06.0-0", "Tesla P40", "1 / 12", "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400"];
        let cells = texts.iter().map(|text| ((*text).to_owned(), None));
        table.add_toned_row(cells.chain([(health.to_owned(), Some(Tone::Well))]));
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
        let long = "not served: control daemon shared is in backoff: it ended with exit status 1 before it was ready";
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
        // The long reason is wrapped to several lines. The UUID can't be wrapped, so its column is omitted.
        let reason = gpus("not served: GPU is lost, which nothing but a reset heals").render(Some(40), false);
        assert!(reason.ends_with("(no room for UUID, MODEL; --json has\nall)"), "{reason}");
    }

    #[test]
    fn a_column_without_a_value_is_for_programs() {
        let mut table = table(&["PID", "CONTAINER", "COMMAND"], &[]);
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
    }

    #[test]
    fn pairs_and_prose_are_broken_below_themselves() {
        let mut pairs = pairs();
        let state = "degraded: 1 of 2 GPUs not served".to_owned();
        pairs.add_toned_row([("State:".to_owned(), None), (state, Some(Tone::Between))]);
        pairs.add_row(["Version:", "1.0.0"]);
        assert_eq!(pairs.render(None, false), "State:    degraded: 1 of 2 GPUs not served\nVersion:  1.0.0");
        assert_eq!(
            pairs.render(Some(24), false),
            "State:    degraded: 1 of\n          2 GPUs not\n          served\nVersion:  1.0.0"
        );
        assert_eq!(pairs.render(None, true).matches('\u{1b}').count(), 2);
        // The escape sequences of colours do not count for the width, and no line has blanks beyond the width.
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
        // U+009B begins a control sequence, and U+202E shows the text after it from right to left.
        assert_eq!(printable("\u{9b}2J\u{202e}4 yes"), "\u{fffd}2J\u{fffd}4 yes");
        assert_eq!(printable("größe 模型"), "größe 模型");
    }

    #[test]
    fn a_long_text_is_cut_before_other_columns_are_left_out() {
        let shown = |width| {
            let mut table = table(&["PID", "USER", "COMMAND", "AGE", "CONTAINER"], &[]);
            (table.heads[1].expendable, table.heads[2].ends, table.heads[3].expendable) = (1, true, 2);
            let command = format!("/opt/{}/python3", "a".repeat(200));
            table.add_row(["4711", "root", &command, "3 min", "-"]);
            table.add_row(["12", "root", "sh", "1 s", "-"]);
            table.shorten(width).render(width, false)
        };
        assert_eq!(
            shown(Some(50)),
            "PID   USER  COMMAND               AGE\n\
             4711  root  …aaaaaaaaaaa/python3  3 min\n\
             12    root  sh                    1 s"
        );
        assert!(shown(None).contains(&"a".repeat(200)), "a pipe gets all");
        assert!(shown(Some(10)).contains("…aa"), "the least room");
    }
}
