//! Draws the screen, from top to bottom: the service, the slices, the clients, the last events, and a line for questions.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::SystemTime;

use ratatui_core::layout::{Alignment, Constraint, Layout, Rect};
use ratatui_core::style::{Color, Style, Stylize};
use ratatui_core::terminal::Frame;
use ratatui_core::text::{Line, Span, Text};
use ratatui_widgets::table::{Cell, HighlightSpacing, Row, Table, TableState};
use unicode_truncate::UnicodeTruncateStr;

use super::model::Model;
use super::state::{Focus, Sort, TopState};
use crate::show::columns::{Column, TOP_CLIENTS, TOP_SLICES};
use crate::show::health::{Health, tone_of_service};
use crate::show::table::{Head, Shown, Tone, cut, without_room};
use crate::show::time;
use common::bus::proxy::Listed;
use common::bus::rows::Service;
use common::counted::counted;

/// The smallest width of the last column of a table.
const PROSE: usize = 14;

/// The width of the clock and of the two blanks in front of the clock.
const CLOCK: usize = 10;

/// The events get at least this number of rows.
const EVENTS: usize = 3;

const KEYS: &str = "q quit  h keys  Tab table  s sort  r reverse  t terminate";

const HELP: [&str; 11] = [
    "Keys",
    "",
    "  q Esc Ctrl-C  quit",
    "  Tab           go to the clients, or back to the slices",
    "  arrows j k    select a row; a slice shows its clients",
    "  PgUp PgDn     ten rows; Home End: first and last row",
    "  s > <         sort by the next or the previous column",
    "  r             reverse the order",
    "  t K           as root: end a client's GPU work",
    "  Ctrl-Z        stop this program until fg",
    "  any key       leave this page",
];

/// The smallest terminal on which `top` draws its tables, in columns and rows. A smaller terminal shows only a message.
const LEAST: (u16, u16) = (50, 12);

pub(super) fn draw(frame: &mut Frame, model: &Model, state: &TopState, colour: bool) {
    let (area, width) = (frame.area(), usize::from(frame.area().width));
    if area.width < LEAST.0 || area.height < LEAST.1 {
        let words = format!("top needs {columns} columns and {rows} rows", columns = LEAST.0, rows = LEAST.1);
        return frame.render_widget(cut(&words, width), area);
    }
    let header = header(width, model, state);
    let [top, middle, end] =
        Layout::vertical([length(header.len()), Constraint::Fill(1), length(1)]).areas(area);
    frame.render_widget(Text::from(header), top);
    frame.render_widget(Line::from(time_of_day(SystemTime::now())).right_aligned(), top);
    if state.help {
        frame.render_widget(Text::from_iter(HELP.map(|line| cut(line, width))), middle);
    } else {
        body(frame, middle, model, state);
    }
    frame.render_widget(bottom(width, state), end);
    if !colour {
        frame.buffer_mut().content.iter_mut().for_each(|cell| cell.fg = Color::Reset);
    }
}

fn style(tone: Tone) -> Style {
    match tone {
        Tone::Well => Style::new().green(),
        Tone::Between => Style::new().yellow(),
        Tone::Bad => Style::new().red(),
    }
}

fn length(cells: usize) -> Constraint {
    Constraint::Length(u16::try_from(cells).unwrap_or(u16::MAX))
}

/// The first lines of the screen: the state of the service, and the reason why the selected slice or the service is in its
/// state.
fn header(width: usize, model: &Model, state: &TopState) -> Vec<Line<'static>> {
    let mut lines = facts(width, service_facts(model));
    let selected = model.devices.iter().find(|slice| state.slice.as_ref() == Some(&slice.addr));
    let of_slice = selected.filter(|slice| !slice.reason.is_empty()).map(|slice| {
        (format!("{}: {}", slice.addr.shown(), slice.reason.shown()), Health::of_slice(slice).tone())
    });
    let of_service = model.service.as_ref().filter(|service| !service.state_reason.is_empty());
    let of_service = of_service.map(|service| (service.state_reason.shown(), tone(service)));
    if let Some(silent) = &model.silent {
        lines.push(Line::styled(cut(silent, width), style(Tone::Between)));
    } else if let Some((reason, tone)) = of_slice.or(of_service) {
        lines.push(Line::styled(cut(&reason, width), style(tone)));
    }
    if let (None, Some(why)) = (&model.silent, &model.unlisted) {
        lines.push(Line::styled(cut(&format!("clients: {why}"), width), style(Tone::Between)));
    }
    lines
}

fn service_facts(model: &Model) -> Vec<Span<'static>> {
    let mut facts = vec!["yunion-mps-daemon".bold()];
    if let Some(service) = &model.service {
        facts.push(Span::raw(service.version.shown()));
        if model.silent.is_none() {
            facts.push(Span::styled(service.state.shown(), style(tone(service))));
        }
        let driver = Some(&service.driver_version).filter(|driver| !driver.is_empty());
        facts.push(Span::raw(format!("driver {}", driver.map_or_else(|| "none".to_owned(), Shown::shown))));
    }
    if model.has_clients() {
        let pids: BTreeSet<u32> = model.clients.iter().map(|client| client.pid).collect();
        facts.push(Span::raw(counted(pids.len(), "client")));
        let sliceless =
            model.clients.iter().filter(|one| one.device.is_none() && !one.bypass && !one.waiting);
        let sliceless: BTreeSet<u32> = sliceless.map(|client| client.pid).collect();
        if !sliceless.is_empty() {
            facts.push(Span::raw(format!("{} with no slice", sliceless.len())));
        }
    }
    facts
}

/// Puts the facts about the service on as many lines as needed. The end of the first line is free for the clock.
fn facts(width: usize, facts: Vec<Span<'static>>) -> Vec<Line<'static>> {
    let mut lines = vec![Line::default()];
    for fact in facts {
        let room = if lines.len() == 1 { width.saturating_sub(CLOCK) } else { width };
        match lines.last_mut() {
            Some(line) if line.width() == 0 => line.push_span(fact),
            Some(line) if line.width() + 2 + fact.width() <= room => line.extend(["  ".into(), fact]),
            _ => lines.push(Line::from(vec!["  ".into(), fact])),
        }
    }
    lines
}

fn time_of_day(at: SystemTime) -> String {
    let local = time::local(at);
    local.split_once(' ').map_or(local.clone(), |(_, time)| time.to_owned())
}

/// The state `disabled` has the colour between good and bad, as does a state of a newer service that this version of the
/// program does not know.
fn tone(service: &Service) -> Tone {
    tone_of_service(&service.state).unwrap_or(Tone::Between)
}

fn bottom(width: usize, state: &TopState) -> Line<'static> {
    if let Some((_, question)) = &state.question {
        // The text after the last question mark names the keys for the answer, so this text is never cut.
        let (question, keys) = question.rsplit_once('?').unwrap_or((question, ""));
        let end = format!("?{keys}");
        let text = format!("{}{end}", cut(question, width.saturating_sub(end.len())));
        return Line::styled(text, style(Tone::Between).bold());
    }
    if let Some(message) = &state.message {
        return Line::from(cut(message, width)).bold();
    }
    match state.ending {
        Some(pid) => Line::raw(cut(&format!("Ending the GPU work of process {pid} ..."), width)),
        None => Line::raw(cut(KEYS, width)),
    }
}

fn body(frame: &mut Frame, area: Rect, model: &Model, state: &TopState) {
    let (slices, clients) = (state.slices(model), state.clients(model));
    let room = usize::from(area.height).saturating_sub(5);
    let (slice_rows, client_rows, event_rows) =
        shares(room, slices.len() + 1, clients.len(), model.events.len());
    let heights = [slice_rows + 2, client_rows + 2, event_rows + 1].map(length);
    let [for_slices, for_clients, for_events] = Layout::vertical(heights).areas(area);
    let table = TopTable {
        name: "Slices".to_owned(),
        columns: TOP_SLICES,
        rows: &slices,
        front: Some("all"),
        sort: state.sort_slices,
        is_focused: state.focus == Focus::Slices,
        selected: Some(state.slice_place(&slices)),
        of: model.slices_are_of(),
    };
    table.draw(frame, for_slices);
    // If the clients are not known, the first lines of the screen say why.
    let none = if model.has_clients() && model.unlisted.is_none() { "none" } else { "not known" };
    let of = state.slice.as_ref().map(|slice| format!(" of {}", slice.shown()));
    let table = TopTable {
        name: format!("Clients{}", of.unwrap_or_default()),
        columns: TOP_CLIENTS,
        rows: &clients,
        front: clients.is_empty().then_some(none),
        sort: state.sort_clients,
        is_focused: state.focus == Focus::Clients,
        selected: state.client_place(&clients),
        of: model.clients_are_of(),
    };
    table.draw(frame, for_clients);
    frame.render_widget(events(area.width.into(), event_rows, model), for_events);
}

fn events(width: usize, rows: usize, model: &Model) -> Text<'static> {
    let shown = rows.min(model.events.len());
    let title = match model.events.len() {
        all if shown == all => "Last events".to_owned(),
        all => format!("Last events: {shown} of {all}; yunion-mpsctl events prints all"),
    };
    let mut text = Text::from(Line::from(cut(&title, width)).bold());
    for event in model.events.iter().skip(model.events.len() - shown) {
        let at = at_or_date(time::from_microseconds(event.at));
        text.push_line(cut(&format!("  {at} {}", event.text.shown()), width));
    }
    text
}

fn at_or_date(at: SystemTime) -> String {
    let is_old = at.elapsed().is_ok_and(|age| age.as_secs() >= 86400);
    if is_old { time::local(at) } else { time_of_day(at) }
}

/// Divides `room` rows between the tables of slices, clients and events. The events get at least [`EVENTS`] rows, if there are
/// so many events. Slices and clients share the other rows, and no table gets more rows than it needs.
fn shares(room: usize, slices: usize, clients: usize, events: usize) -> (usize, usize, usize) {
    let left = room.saturating_sub(events.min(EVENTS));
    let clients = clients.max(1);
    let slices = slices.min((left / 2).max(left.saturating_sub(clients)));
    let clients = clients.min(left - slices);
    (slices, clients, room - slices - clients)
}

struct TopTable<'t, R> {
    name: String,
    columns: &'t [Column<R>],
    rows: &'t [&'t Listed<R>],
    /// The text of an extra row above all other rows, such as `all` above the slices. None if the table has no extra row.
    front: Option<&'static str>,
    sort: Sort,
    is_focused: bool,
    /// The index of the selected row, counted from the extra row if there is an extra row.
    selected: Option<usize>,
    /// The time at which the service gave the values in the rows. None if the values are current.
    of: Option<SystemTime>,
}

impl<R> TopTable<'_, R> {
    /// Draws as many rows as fit. The selected row is always among these rows.
    fn draw(&self, frame: &mut Frame, area: Rect) {
        let [title, table] = Layout::vertical([length(1), Constraint::Fill(1)]).areas(area);
        let room = usize::from(table.height.saturating_sub(1));
        let in_front = usize::from(self.front.is_some());
        let all = in_front + self.rows.len();
        let first = self.selected.unwrap_or_default().saturating_sub(room / 2).min(all.saturating_sub(room));
        let shown = first.saturating_sub(in_front)..(first + room).min(all).saturating_sub(in_front);
        let (columns, left_out) = self.fit(area.width.into());
        let text = cut(&self.title(shown, &left_out), area.width.into()).bold();
        frame.render_widget(if self.is_focused { text.underlined() } else { text }, title);
        let front = self.front.map(|text| Row::new([Cell::new(text).column_span(u16::MAX)]));
        let rows = self
            .rows
            .iter()
            .map(|row| Row::new(columns.iter().map(|(column, width)| cell(column, *width, row))));
        let heads = columns.iter().map(|(column, width)| self.head(&column.head, *width));
        let selected = if self.is_focused { Style::new().reversed() } else { Style::new() };
        let widget =
            Table::new(front.into_iter().chain(rows), columns.iter().map(|(_, width)| length(*width)))
                .header(Row::new(heads))
                .column_spacing(2)
                .highlight_symbol("> ")
                .highlight_spacing(HighlightSpacing::Always)
                .row_highlight_style(selected);
        let mut place = TableState::new().with_offset(first).with_selected(self.selected);
        frame.render_stateful_widget(widget, table, &mut place);
    }

    /// The columns that fit, each with its width, and the headings of the columns that do not fit.
    fn fit(&self, room: usize) -> (Vec<(&Column<R>, usize)>, Vec<&'static str>) {
        let natural = |column: &Column<R>| {
            let texts = self.rows.iter().map(|row| width(&(column.text)(row)));
            texts.max().unwrap_or_default().max(column.head.name.len())
        };
        let mut columns: Vec<_> = self.columns.iter().map(|column| (column, natural(column))).collect();
        let mut heads = columns.iter().map(|(column, width)| (column.head, *width)).collect();
        // The mark of the selected row takes two columns of the terminal.
        let left_out = without_room(&mut heads, room.saturating_sub(2), PROSE);
        columns.retain(|(column, _)| !left_out.contains(&column.head.name));
        if let Some(((_, prose), others)) = columns.split_last_mut() {
            *prose = room.saturating_sub(2 + others.iter().map(|(_, width)| width + 2).sum::<usize>());
        }
        (columns, left_out)
    }

    /// The title of the table: `Slices 1-8 of 768 by MEMORY; no room for GPU`.
    fn title(&self, shown: Range<usize>, left_out: &[&str]) -> String {
        let (name, all) = (&self.name, self.rows.len());
        let mut title = if shown.is_empty() || shown.len() == all {
            format!("{name} ({all})")
        } else {
            format!("{name} {}-{} of {all}", shown.start + 1, shown.end)
        };
        if let Some(column) = self.columns.get(self.sort.column) {
            let reversed = if self.sort.reversed { ", reversed" } else { "" };
            title += &format!(" by {}{reversed}", column.head.name);
        }
        if let Some(of) = self.of {
            title += &format!("; as of {}", time_of_day(of));
        }
        if !left_out.is_empty() {
            title += &format!("; no room for {left_out}", left_out = left_out.join(", "));
        }
        title
    }

    fn head(&self, head: &Head, width: usize) -> Line<'static> {
        let is_sorted_by = self.columns.get(self.sort.column).is_some_and(|by| by.head.name == head.name);
        let text = cut(head.name, width).bold();
        Line::from(if is_sorted_by { text.underlined() } else { text }).alignment(side(head))
    }
}

fn cell<R>(column: &Column<R>, width: usize, row: &R) -> Line<'static> {
    let text = (column.text)(row);
    let text = if column.head.ends { cut_in_front(&text, width) } else { cut(&text, width) };
    let style = (column.tone)(row).map(style).unwrap_or_default();
    Line::styled(text, style).alignment(side(&column.head))
}

fn side(head: &Head) -> Alignment {
    if head.is_number { Alignment::Right } else { Alignment::Left }
}

fn width(text: &str) -> usize {
    Span::raw(text).width()
}

fn cut_in_front(text: &str, room: usize) -> String {
    if width(text) <= room {
        return text.to_owned();
    }
    format!("…{}", text.unicode_truncate_start(room.saturating_sub(1)).0)
}

#[cfg(test)]
mod tests {
    use ratatui_core::backend::TestBackend;
    use ratatui_core::buffer::{Buffer, Cell as BufferCell};
    use ratatui_core::terminal::Terminal;

    use super::*;
    use crate::watch::top::tests::{model, press, with_slices};
    use common::bus::proxy::BusError;

    fn shown(width: u16, height: u16, model: &Model, keys: &str) -> Vec<String> {
        let mut state = TopState::default();
        press(&mut state, model, keys);
        let screen = drawn(width, height, model, &state, true);
        let row = |cells: &[BufferCell]| {
            let (mut text, mut cells) = (String::new(), cells.iter());
            while let Some(cell) = cells.next() {
                text += cell.symbol();
                // A wide character occupies two cells, so the second cell is skipped.
                for _ in 1..super::width(cell.symbol()) {
                    cells.next();
                }
            }
            text
        };
        screen.content().chunks(width.into()).map(row).collect()
    }

    fn drawn(width: u16, height: u16, model: &Model, state: &TopState, colour: bool) -> Buffer {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, model, state, colour)).unwrap().buffer.clone()
    }

    #[test]
    fn every_size_has_all_parts_and_names_what_it_leaves_out() {
        for (width, height, left_out, events) in [
            (60, 20, "no room for GPU, IN USE", "Last events: 3 of 20; yunion-mpsctl events prints all"),
            (80, 24, "no room for GPU", "Last events: 8 of 20; yunion-mpsctl events prints all"),
            (120, 40, "", "Last events"),
        ] {
            let screen = shown(width, height, &model(), "");
            let text = screen.join("\n");
            assert_eq!(screen.len(), usize::from(height));
            assert!(screen.iter().all(|line| super::width(line) == usize::from(width)), "{text}");
            for part in
                ["degraded", "driver 580.159.04", "3 clients", "1 of 4 slices\u{fffd} not served", events]
            {
                assert!(text.contains(part), "{part}:\n{text}");
            }
            assert!(
                text.contains(&format!(
                    "Slices (4) by SLICE{}",
                    if left_out.is_empty() { "  " } else { "; " }
                ))
            );
            assert!(text.contains(left_out), "{text}");
            for row in ["> all", "served", "not enforced", "drained", "not served", "大模型训练", "BYPASS"]
            {
                assert!(text.contains(row), "{row}:\n{text}");
            }
            assert!(text.contains("train\u{fffd}") && !text.contains('\u{1b}'), "{text}");
            assert_eq!(text.contains("0 NVIDIA H200"), width == 120, "{text}");
            assert!(screen.last().unwrap().starts_with(KEYS), "{text}");
        }
        // While a slice is selected, its reason is shown above the tables, cut to the width of the screen.
        let selected = shown(60, 20, &model(), "jjjj");
        let reason = |line: &String| {
            line.starts_with("00:06.0-3: GPU is lost; nothing but") && line.trim_end().ends_with('…')
        };
        assert!(selected.iter().any(reason), "{selected:#?}");
    }

    #[test]
    fn many_slices_scroll_with_the_selection() {
        let model = with_slices(768);
        let title = |keys: &str| shown(80, 24, &model, keys)[2].clone();
        assert!(title("").starts_with("Slices 1-9 of 768 by SLICE"), "{}", title(""));
        let down = "j".repeat(300);
        let screen = shown(80, 24, &model, &down);
        assert!(screen[2].starts_with("Slices 294-305 of 768"), "{}", screen[2]);
        assert!(screen.iter().any(|line| line.starts_with("> 00:06.0-299")), "{screen:#?}");
        assert!(screen.iter().any(|line| line.starts_with("Clients of 00:06.0-299 (0)")), "{screen:#?}");
        let all = "j".repeat(800);
        assert!(title(&all).starts_with("Slices 757-768 of 768"), "{}", title(&all));
        assert!(title("sssr").starts_with("Slices 1-9 of 768 by MEMORY, reversed"), "{}", title("sssr"));
    }

    #[test]
    fn questions_and_keys_have_room_on_a_narrow_terminal() {
        let asked = shown(60, 20, &model(), "\tjt");
        let end = asked.last().unwrap();
        assert!(
            end.starts_with("End the GPU work of process 102") && end.trim_end().ends_with("? y/N"),
            "{end}"
        );
        let help = shown(60, 20, &model(), "h").join("\n");
        assert!(
            help.contains("reverse the order") && !help.contains('…') && !help.contains("Slices"),
            "{help}"
        );
        let tiny = shown(40, 8, &model(), "");
        assert!(tiny[0].starts_with("top needs 50 columns and 12 rows"), "{tiny:#?}");
        shown(1, 1, &model(), "");
    }

    #[test]
    fn old_rows_say_since_when() {
        let mut model = model();
        assert!(!shown(80, 24, &model, "").join("\n").contains("as of"));
        model.publish(Err(BusError::NotRunning));
        model.list(Err(BusError::NotRunning));
        let text = shown(80, 24, &model, "").join("\n");
        assert!(text.contains("yunion-mps-daemon is not running; waiting for it"), "{text}");
        assert_eq!(text.matches("; as of ").count(), 2, "{text}");
        assert!(!text.contains("degraded") && text.contains("00:06.0-1"), "{text}");
    }

    #[test]
    fn colours_are_the_themes_and_only_where_they_are_wanted() {
        let (model, state) = (model(), TopState::default());
        for colour in [true, false] {
            let screen = drawn(120, 40, &model, &state, colour);
            let colours: Vec<Color> =
                screen.content().iter().map(|cell| cell.fg).filter(|fg| *fg != Color::Reset).collect();
            let themes = [Color::Red, Color::Green, Color::Yellow];
            assert_eq!(themes.iter().all(|one| colours.contains(one)), colour);
            assert!(colours.iter().all(|one| colour && themes.contains(one)), "{colours:?}");
        }
    }

    #[test]
    fn a_cut_text_fits_and_says_so() {
        assert_eq!([cut("abcdef", 6), cut("abcdef", 5), cut("abc", 1)], ["abcdef", "abcd…", "…"]);
        assert_eq!(
            [cut_in_front("/usr/bin/job", 12), cut_in_front("/usr/bin/job", 6)],
            ["/usr/bin/job", "…n/job"]
        );
        // Each of these characters is two columns wide.
        assert_eq!([cut("大模型", 6), cut("大模型", 5), cut("大模型", 4)], ["大模型", "大模…", "大…"]);
    }

    #[test]
    fn no_part_takes_more_rows_than_it_has() {
        for room in 0..60 {
            for (slices, clients, events) in [(5, 0, 0), (769, 1, 20), (5, 300, 32), (769, 300, 32)] {
                let (s, c, e) = shares(room, slices, clients, events);
                assert!(s <= slices && c <= clients.max(1) && s + c + e == room, "{room}: {s} {c} {e}");
            }
        }
    }
}
