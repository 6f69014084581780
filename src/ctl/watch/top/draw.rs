//! The screen, from top to bottom: the service, the slices, the clients, the last events, and a line for questions.

use std::collections::BTreeSet;
use std::time::{Instant, SystemTime};

use ratatui::Frame;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};

use super::columns::{CLIENTS, Column, SLICES, of_state};
use super::model::Model;
use super::state::{Focus, Sort, State};
use crate::counted::counted;
use crate::ctl::show::table::Shown;
use crate::ctl::show::time;
use crate::dbus::proxy::Listed;

/// The sign of a text that is cut.
const CUT: &str = "…";

/// The least room for the last column.
const PROSE: usize = 14;

/// The least room for events.
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
    "  t K           end a client's GPU work (asks; for root)",
    "  Ctrl-Z        stop this program until fg",
    "  any key       leave this page",
];

/// A smaller terminal shows a sentence alone.
const LEAST: (usize, usize) = (50, 12);

/// The rest that the drawing depends on, beside the model and the state.
#[derive(Debug, Clone, Copy)]
pub(super) struct Look {
    pub(super) colour: bool,
    pub(super) clock: SystemTime,
    pub(super) now: Instant,
}

impl Look {
    fn colour(self, colour: Option<Color>) -> Style {
        colour.filter(|_| self.colour).map_or_else(Style::new, |colour| Style::new().fg(colour))
    }
}

pub(super) fn draw(frame: &mut Frame<'_>, model: &Model, state: &State, look: Look) {
    let area = frame.area();
    let lines = lines(usize::from(area.width), usize::from(area.height), model, state, look);
    for (line, row) in lines.iter().zip(area.rows()) {
        frame.buffer_mut().set_line(row.x, row.y, line, row.width);
    }
}

/// A line for each row of the screen.
fn lines(width: usize, height: usize, model: &Model, state: &State, look: Look) -> Vec<Line<'static>> {
    if width < LEAST.0 || height < LEAST.1 {
        let words = format!("top needs {} columns and {} rows", LEAST.0, LEAST.1);
        return vec![Line::raw(cut(&words, width))];
    }
    let mut lines = header(width, model, state, look);
    let room = height.saturating_sub(lines.len() + 1);
    if state.help {
        lines.extend(HELP.iter().map(|line| Line::raw(cut(line, width))));
    } else {
        lines.extend(body(width, room, model, state, look));
    }
    lines.truncate(height.saturating_sub(1));
    lines.resize(height.saturating_sub(1), Line::default());
    lines.push(bottom(width, state, look));
    lines
}

/// The service, and what is to be said about it, or about the slice that is selected.
fn header(width: usize, model: &Model, state: &State, look: Look) -> Vec<Line<'static>> {
    let clock = time_of_day(look.clock);
    let mut lines = facts(width, &clock, service_facts(model, look));
    let colour = |colour| look.colour(Some(colour));
    let selected = model.devices.iter().find(|slice| state.slice.as_ref() == Some(&slice.addr));
    let of_slice = selected
        .filter(|slice| !slice.reason.is_empty())
        .map(|slice| (format!("{}: {}", slice.addr.shown(), slice.reason.shown()), of_state(slice)));
    let of_service = model.service.as_ref().filter(|service| !service.state_reason.is_empty());
    let of_service = of_service.map(|service| (service.state_reason.shown(), state_colour(&service.state)));
    if let Some(silent) = &model.silent {
        lines.push(Line::styled(cut(silent, width), colour(Color::Yellow)));
    } else if let Some((reason, of)) = of_slice.or(of_service) {
        lines.push(Line::styled(cut(&reason, width), colour(of)));
    }
    if let (None, Some(why)) = (&model.silent, &model.unlisted) {
        lines.push(Line::styled(cut(&format!("clients: {why}"), width), colour(Color::Yellow)));
    }
    lines
}

fn service_facts(model: &Model, look: Look) -> Vec<Span<'static>> {
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let mut facts = vec![Span::styled("yunion-mps-daemon", bold)];
    if let Some(service) = &model.service {
        facts.push(Span::raw(service.version.shown()));
        if model.silent.is_none() {
            facts.push(Span::styled(service.state.shown(), look.colour(Some(state_colour(&service.state)))));
        }
        let driver = Some(&service.driver_version).filter(|driver| !driver.is_empty());
        facts.push(Span::raw(format!("driver {}", driver.map_or_else(|| "none".to_owned(), Shown::shown))));
    }
    if model.has_clients() {
        let pids: BTreeSet<u32> = model.clients.iter().map(|client| client.pid).collect();
        facts.push(Span::raw(counted(pids.len(), "client")));
    }
    facts
}

/// As many lines as the facts need. The clock is at the end of the first.
fn facts(width: usize, clock: &str, facts: Vec<Span<'static>>) -> Vec<Line<'static>> {
    let mut lines = vec![Line::default()];
    for fact in facts {
        let is_first = lines.len() == 1;
        let room = if is_first { width.saturating_sub(clock.len() + 2) } else { width };
        let Some(line) = lines.last_mut() else { break };
        let used = line.width();
        if used == 0 {
            line.push_span(fact);
        } else if used + 2 + fact.width() <= room {
            line.push_span("  ");
            line.push_span(fact);
        } else {
            lines.push(Line::from(vec![Span::raw("  "), fact]));
        }
    }
    if let Some(line) = lines.first_mut() {
        let gap = width.saturating_sub(line.width() + clock.len());
        line.push_span(format!("{}{clock}", " ".repeat(gap)));
    }
    lines
}

/// `12:34:56`
fn time_of_day(at: SystemTime) -> String {
    let local = time::local(at);
    local.split_once(' ').map_or(local.clone(), |(_, time)| time.to_owned())
}

fn state_colour(state: &str) -> Color {
    match state {
        "ready" => Color::Green,
        "failed" => Color::Red,
        _ => Color::Yellow,
    }
}

fn bottom(width: usize, state: &State, look: Look) -> Line<'static> {
    if let Some((_, question)) = &state.question {
        // Its end is the part to answer.
        let (question, keys) = question.rsplit_once('?').unwrap_or((question, ""));
        let end = format!("?{keys}");
        let text = format!("{}{end}", cut(question, width.saturating_sub(end.len())));
        return Line::styled(text, look.colour(Some(Color::Yellow)).add_modifier(Modifier::BOLD));
    }
    if let Some(message) = &state.message {
        return Line::styled(cut(message, width), Style::new().add_modifier(Modifier::BOLD));
    }
    match state.ending {
        Some(pid) => Line::raw(cut(&format!("Ending the GPU work of process {pid} ..."), width)),
        None => Line::raw(cut(KEYS, width)),
    }
}

/// The three parts, with as many rows as have room.
fn body(width: usize, room: usize, model: &Model, state: &State, look: Look) -> Vec<Line<'static>> {
    let slices = state.slices(model);
    let clients = state.clients(model);
    let (slice_rows, client_rows, event_rows) =
        shares(room.saturating_sub(5), slices.len() + 1, clients.len(), model.events.len());

    let table = Table {
        columns: &SLICES,
        sort: state.sort_slices,
        focused: state.focus == Focus::Slices,
        width,
        look,
    };
    let selected = state.slice_place(&slices);
    // The first row is the one for all.
    let first = first_row(selected, slices.len() + 1, slice_rows);
    let shown: Vec<_> = slices
        .iter()
        .skip(first.saturating_sub(1))
        .take(slice_rows - usize::from(first == 0 && slice_rows > 0))
        .copied()
        .collect();
    let fit = table.fit(&slices);
    let begin = first.saturating_sub(1);
    let mut lines =
        vec![table.title("Slices", begin, shown.len(), slices.len(), &fit, model.slices_are_of(look.now))];
    lines.push(table.heading(&fit));
    if first == 0 && slice_rows > 0 {
        let marked = if selected == 0 { "> all" } else { "  all" };
        lines.push(table.line(vec![Span::raw(format!("{marked:width$}"))], selected == 0));
    }
    for slice in &shown {
        lines.push(table.row(&fit, slice, state.slice.as_ref() == Some(&slice.addr)));
    }

    let table = Table {
        columns: &CLIENTS,
        sort: state.sort_clients,
        focused: state.focus == Focus::Clients,
        width,
        look,
    };
    let selected = state.client_place(&clients);
    let first = first_row(selected.unwrap_or_default(), clients.len(), client_rows);
    let shown: Vec<_> = clients.iter().skip(first).take(client_rows).copied().collect();
    let fit = table.fit(&clients);
    let name =
        state.slice.as_ref().map_or("Clients".to_owned(), |slice| format!("Clients of {}", slice.shown()));
    lines.push(table.title(&name, first, shown.len(), clients.len(), &fit, model.clients_are_of(look.now)));
    lines.push(table.heading(&fit));
    if clients.is_empty() {
        // The reason stands above.
        let is_known = model.has_clients() && model.unlisted.is_none();
        let words = if is_known { "  none" } else { "  not known" };
        lines.push(Line::raw(words));
    }
    for (place, client) in shown.iter().enumerate() {
        lines.push(table.row(&fit, client, selected == Some(first + place)));
    }

    let shown = event_rows.min(model.events.len());
    let title = match model.events.len() {
        all if shown == all => "Last events".to_owned(),
        all => format!("Last events: {shown} of {all}; yunion-mpsctl events prints all"),
    };
    lines.push(Line::styled(cut(&title, width), Style::new().add_modifier(Modifier::BOLD)));
    for event in model.events.iter().skip(model.events.len() - shown) {
        let at = time::from_microseconds(event.at);
        lines
            .push(Line::raw(cut(&format!("  {} {}", at_or_date(at, look.clock), event.text.shown()), width)));
    }
    lines
}

/// The time of day; of an older event the day too.
fn at_or_date(at: SystemTime, now: SystemTime) -> String {
    let is_old = now.duration_since(at).is_ok_and(|age| age.as_secs() >= 86400);
    if is_old { time::local(at) } else { time_of_day(at) }
}

/// The rows of slices, clients and events. Clients and slices share what the least events leave, and neither takes more
/// than it has.
fn shares(room: usize, slices: usize, clients: usize, events: usize) -> (usize, usize, usize) {
    let left = room.saturating_sub(events.min(EVENTS));
    let clients = clients.max(1);
    let slices = slices.min((left / 2).max(left.saturating_sub(clients)));
    let clients = clients.min(left - slices);
    (slices, clients, room - slices - clients)
}

/// The first row to show, so that the selected one is seen.
fn first_row(selected: usize, rows: usize, room: usize) -> usize {
    selected.saturating_sub(room / 2).min(rows.saturating_sub(room))
}

/// The looks of a table.
struct Table<'t, R> {
    columns: &'t [Column<R>],
    sort: Sort,
    focused: bool,
    width: usize,
    look: Look,
}

/// The columns that have room, with their widths, and the heads of the others.
struct Fit {
    columns: Vec<(usize, usize)>,
    left_out: Vec<&'static str>,
}

impl<R> Table<'_, R> {
    fn fit(&self, rows: &[&Listed<R>]) -> Fit {
        let natural = |column: &Column<R>| {
            let widest = rows.iter().map(|row| width(&(column.text)(row))).max().unwrap_or_default();
            widest.max(column.head.len())
        };
        let mut columns: Vec<(usize, usize)> = self.columns.iter().map(natural).enumerate().collect();
        let rank = |place: usize| self.columns.get(place).map_or(0, |column| column.expendable);
        let mut left_out = Vec::new();
        while let Some(((_, prose), others)) = columns.split_last() {
            // The mark in front, and two blanks between columns.
            let used = 2 + others.iter().map(|(_, width)| width + 2).sum::<usize>();
            if used + (*prose).min(PROSE) <= self.width {
                break;
            }
            let Some(worst) = columns.iter().map(|(place, _)| *place).max_by_key(|place| rank(*place)) else {
                break;
            };
            if rank(worst) == 0 {
                break;
            }
            columns.retain(|(place, _)| *place != worst);
            left_out.extend(self.columns.get(worst).map(|column| column.head));
        }
        let used = 2 + columns.iter().rev().skip(1).map(|(_, width)| width + 2).sum::<usize>();
        if let Some((_, prose)) = columns.last_mut() {
            *prose = self.width.saturating_sub(used);
        }
        Fit { columns, left_out }
    }

    /// `Slices 1-8 of 768 by MEMORY; no room for GPU`
    fn title(
        &self,
        name: &str,
        begin: usize,
        shown: usize,
        all: usize,
        fit: &Fit,
        of: Option<SystemTime>,
    ) -> Line<'static> {
        let mut title = if shown == all || shown == 0 {
            format!("{name} ({all})")
        } else {
            format!("{name} {}-{} of {all}", begin + 1, begin + shown)
        };
        if let Some(column) = self.columns.get(self.sort.column) {
            title =
                format!("{title} by {}{}", column.head, if self.sort.reversed { ", reversed" } else { "" });
        }
        if let Some(of) = of {
            title = format!("{title}; as of {}", time_of_day(of));
        }
        if !fit.left_out.is_empty() {
            title = format!("{title}; no room for {}", fit.left_out.join(", "));
        }
        let mut style = Style::new().add_modifier(Modifier::BOLD);
        if self.focused {
            style = style.add_modifier(Modifier::UNDERLINED);
        }
        Line::styled(cut(&title, self.width), style)
    }

    fn heading(&self, fit: &Fit) -> Line<'static> {
        let mut spans = vec![Span::raw("  ")];
        for (place, width) in &fit.columns {
            let Some(column) = self.columns.get(*place) else { continue };
            let style = if self.sort.column == *place {
                Modifier::BOLD | Modifier::UNDERLINED
            } else {
                Modifier::BOLD
            };
            let text = cut(column.head, *width);
            let gap = " ".repeat(width.saturating_sub(text.len()));
            let head = Span::styled(text, style);
            spans.extend(if column.right { [Span::raw(gap), head] } else { [head, Span::raw(gap)] });
            spans.push(Span::raw("  "));
        }
        Line::from(spans)
    }

    fn row(&self, fit: &Fit, row: &Listed<R>, is_selected: bool) -> Line<'static> {
        let mut spans = vec![Span::raw(if is_selected { "> " } else { "  " })];
        for (place, width) in &fit.columns {
            let Some(column) = self.columns.get(*place) else { continue };
            let text = (column.text)(row);
            let text = if column.ends { cut_in_front(&text, *width) } else { cut(&text, *width) };
            let padded = padded(&text, *width, column.right);
            spans.push(Span::styled(padded, self.look.colour((column.colour)(row))));
            spans.push(Span::raw("  "));
        }
        self.line(spans, is_selected)
    }

    /// A row of the table that the keys go to is reversed if it is the selected one.
    fn line(&self, spans: Vec<Span<'static>>, is_selected: bool) -> Line<'static> {
        let line = Line::from(spans);
        if is_selected && self.focused { line.style(Modifier::REVERSED) } else { line }
    }
}

/// The columns that a text takes on a terminal.
fn width(text: &str) -> usize {
    Span::raw(text).width()
}

/// The text, or its beginning with a sign that it is cut.
fn cut(text: &str, room: usize) -> String {
    if width(text) <= room {
        return text.to_owned();
    }
    let mut begins = String::new();
    for c in text.chars() {
        let before = begins.len();
        begins.push(c);
        if width(&begins) + width(CUT) > room {
            begins.truncate(before);
            break;
        }
    }
    if room > 0 {
        begins.push_str(CUT);
    }
    begins
}

/// The text, or its end with a sign that it is cut.
fn cut_in_front(text: &str, room: usize) -> String {
    let turned = |text: &str| text.chars().rev().collect::<String>();
    turned(&cut(&turned(text), room))
}

fn padded(text: &str, room: usize, right: bool) -> String {
    let gap = " ".repeat(room.saturating_sub(width(text)));
    if right { gap + text } else { text.to_owned() + &gap }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use crate::ctl::watch::top::tests::{model, press, with_slices};
    use crate::dbus::proxy::BusError;

    /// The screen at this size, after these keys.
    fn shown(width: u16, height: u16, model: &Model, keys: &str) -> Vec<String> {
        let mut state = State::default();
        press(&mut state, model, keys);
        let look = Look { colour: true, clock: SystemTime::now(), now: Instant::now() };
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, model, &state, look)).unwrap();
        let screen = terminal.backend().to_string();
        screen.lines().map(|line| line.trim_matches('"').to_owned()).collect()
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
        // The reason of a slice stands above while it is selected, as much of it as has room.
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
        let now = Instant::now() + std::time::Duration::from_secs(60);
        assert!(crate::ctl::watch::top::tests::model().clients_are_of(now).is_some());
    }

    #[test]
    fn colours_are_the_themes_and_only_where_they_are_wanted() {
        let (model, state) = (model(), State::default());
        for colour in [true, false] {
            let look = Look { colour, clock: SystemTime::now(), now: Instant::now() };
            let lines = lines(120, 40, &model, &state, look);
            let styles =
                lines.iter().flat_map(|line| line.spans.iter().map(|span| span.style).chain([line.style]));
            let colours: Vec<Color> = styles.filter_map(|style| style.fg).collect();
            let themes = [Color::Red, Color::Green, Color::Yellow];
            assert_eq!(themes.iter().all(|one| colours.contains(one)), colour);
            assert!(colours.iter().all(|one| colour && themes.contains(one)), "{colours:?}");
        }
    }

    #[test]
    fn a_cut_text_fits_and_says_so() {
        assert_eq!(
            [cut("abcdef", 6), cut("abcdef", 5), cut("abc", 1), cut("abc", 0)],
            ["abcdef", "abcd…", "…", ""]
        );
        assert_eq!(
            [cut_in_front("/usr/bin/job", 12), cut_in_front("/usr/bin/job", 6)],
            ["/usr/bin/job", "…n/job"]
        );
        // Each takes two columns.
        assert_eq!([cut("大模型", 6), cut("大模型", 5), cut("大模型", 4)], ["大模型", "大模…", "大…"]);
        assert_eq!(padded("模", 4, true), "  模");
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
