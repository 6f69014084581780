//! The screen, from top to bottom: the service, the slices, the clients, the last events, and a line for questions.

use std::collections::BTreeSet;
use std::time::{Instant, SystemTime};

use ratatui_core::style::{Color, Modifier, Style};
use ratatui_core::text::{Line, Span};

use super::model::Model;
use super::state::{Focus, Sort, TopState};
use crate::show::columns::{Column, TOP_CLIENTS, TOP_SLICES};
use crate::show::health::Health;
use crate::show::table::{Shown, Tone, tone_of};
use crate::show::time;
use common::bus::proxy::Listed;
use common::counted::counted;
use common::text::printable;

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
pub(super) struct DrawOptions {
    pub(super) colour: bool,
    pub(super) clock: SystemTime,
    pub(super) now: Instant,
}

impl DrawOptions {
    fn style(self, tone: Option<Tone>) -> Style {
        match tone.filter(|_| self.colour) {
            None => Style::new(),
            Some(Tone::Well) => Style::new().green(),
            Some(Tone::Between) => Style::new().yellow(),
            Some(Tone::Bad) => Style::new().red(),
        }
    }
}

/// The text of each row of a screen with so many columns and rows.
pub(super) fn lines(size: (usize, usize), model: &Model, state: &TopState, look: DrawOptions) -> Vec<String> {
    rows(size, model, state, look).iter().map(written).collect()
}

/// A line with the escape sequences of its looks: `ESC [ 0 ; 1 ; 31 m`. The colours are those of the theme.
fn written(line: &Line<'_>) -> String {
    let mut text = String::new();
    for span in &line.spans {
        let style = line.style.patch(span.style);
        text.push_str("\u{1b}[0");
        for (one, code) in [(Modifier::BOLD, ";1"), (Modifier::UNDERLINED, ";4"), (Modifier::REVERSED, ";7")]
        {
            text.push_str(if style.add_modifier.contains(one) { code } else { "" });
        }
        text.push_str(match style.fg {
            Some(Color::Red) => ";31",
            Some(Color::Green) => ";32",
            Some(Color::Yellow) => ";33",
            _ => "",
        });
        text.push('m');
        text.push_str(&printable(&span.content));
    }
    text + "\u{1b}[0m"
}

/// A line for each row of the screen.
fn rows(
    (width, height): (usize, usize),
    model: &Model,
    state: &TopState,
    look: DrawOptions,
) -> Vec<Line<'static>> {
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
fn header(width: usize, model: &Model, state: &TopState, look: DrawOptions) -> Vec<Line<'static>> {
    let clock = time_of_day(look.clock);
    let mut lines = facts(width, &clock, service_facts(model, look));
    let style = |tone| look.style(Some(tone));
    let selected = model.devices.iter().find(|slice| state.slice.as_ref() == Some(&slice.addr));
    let of_slice = selected.filter(|slice| !slice.reason.is_empty()).map(|slice| {
        (format!("{}: {}", slice.addr.shown(), slice.reason.shown()), Health::of_slice(slice).word())
    });
    let of_service = model.service.as_ref().filter(|service| !service.state_reason.is_empty());
    let of_service = of_service.map(|service| (service.state_reason.shown(), service.state.as_str()));
    if let Some(silent) = &model.silent {
        lines.push(Line::styled(cut(silent, width), style(Tone::Between)));
    } else if let Some((reason, state)) = of_slice.or(of_service) {
        lines.push(Line::styled(cut(&reason, width), style(tone(state))));
    }
    if let (None, Some(why)) = (&model.silent, &model.unlisted) {
        lines.push(Line::styled(cut(&format!("clients: {why}"), width), style(Tone::Between)));
    }
    lines
}

fn service_facts(model: &Model, look: DrawOptions) -> Vec<Span<'static>> {
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let mut facts = vec![Span::styled("yunion-mps-daemon", bold)];
    if let Some(service) = &model.service {
        facts.push(Span::raw(service.version.shown()));
        if model.silent.is_none() {
            facts.push(Span::styled(service.state.shown(), look.style(Some(tone(&service.state)))));
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

/// A state that is not known is neither good nor bad.
fn tone(state: &str) -> Tone {
    tone_of(state).unwrap_or(Tone::Between)
}

fn bottom(width: usize, state: &TopState, look: DrawOptions) -> Line<'static> {
    if let Some((_, question)) = &state.question {
        // Its end is the part to answer.
        let (question, keys) = question.rsplit_once('?').unwrap_or((question, ""));
        let end = format!("?{keys}");
        let text = format!("{}{end}", cut(question, width.saturating_sub(end.len())));
        return Line::styled(text, look.style(Some(Tone::Between)).add_modifier(Modifier::BOLD));
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
fn body(width: usize, room: usize, model: &Model, state: &TopState, look: DrawOptions) -> Vec<Line<'static>> {
    let slices = state.slices(model);
    let clients = state.clients(model);
    let (slice_rows, client_rows, event_rows) =
        shares(room.saturating_sub(5), slices.len() + 1, clients.len(), model.events.len());

    let table = TableLayout {
        columns: TOP_SLICES,
        sort: state.sort_slices,
        focused: state.focus == Focus::Slices,
        width,
        look,
    };
    let (selected, of) = (Some(state.slice_place(&slices)), model.slices_are_of(look.now));
    let mut lines = table.part("Slices", Some("all"), &slices, selected, slice_rows, of);

    let table = TableLayout {
        columns: TOP_CLIENTS,
        sort: state.sort_clients,
        focused: state.focus == Focus::Clients,
        width,
        look,
    };
    let name =
        state.slice.as_ref().map_or("Clients".to_owned(), |slice| format!("Clients of {}", slice.shown()));
    let (selected, of) = (state.client_place(&clients), model.clients_are_of(look.now));
    lines.extend(table.part(&name, None, &clients, selected, client_rows, of));
    if clients.is_empty() {
        // The reason stands above.
        let is_known = model.has_clients() && model.unlisted.is_none();
        let words = if is_known { "  none" } else { "  not known" };
        lines.push(Line::raw(words));
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
struct TableLayout<'t, R> {
    columns: &'t [Column<R>],
    sort: Sort,
    focused: bool,
    width: usize,
    look: DrawOptions,
}

/// The columns that have room, with their widths, and the heads of the others.
struct Fit {
    columns: Vec<(usize, usize)>,
    left_out: Vec<&'static str>,
}

impl<R> TableLayout<'_, R> {
    fn fit(&self, rows: &[&Listed<R>]) -> Fit {
        let natural = |column: &Column<R>| {
            let widest = rows.iter().map(|row| width(&(column.text)(row))).max().unwrap_or_default();
            widest.max(column.head.name.len())
        };
        let mut columns: Vec<(usize, usize)> = self.columns.iter().map(natural).enumerate().collect();
        let rank = |place: usize| self.columns.get(place).map_or(0, |column| column.head.expendable);
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
            left_out.extend(self.columns.get(worst).map(|column| column.head.name));
        }
        let used = 2 + columns.iter().rev().skip(1).map(|(_, width)| width + 2).sum::<usize>();
        if let Some((_, prose)) = columns.last_mut() {
            *prose = self.width.saturating_sub(used);
        }
        Fit { columns, left_out }
    }

    /// A title, the heads, and as many rows as have room, the selected one among them. The row in front of all others
    /// counts as one.
    fn part(
        &self,
        name: &str,
        front: Option<&str>,
        rows: &[&Listed<R>],
        selected: Option<usize>,
        room: usize,
        of: Option<SystemTime>,
    ) -> Vec<Line<'static>> {
        let in_front = usize::from(front.is_some());
        let first = first_row(selected.unwrap_or_default(), rows.len() + in_front, room);
        let begin = first.saturating_sub(in_front);
        let front = front.filter(|_| first == 0 && room > 0);
        let shown = rows.iter().enumerate().skip(begin).take(room - usize::from(front.is_some()));
        let fit = self.fit(rows);
        let title = self.title(name, begin, shown.len(), rows.len(), &fit, of);
        let mut lines = vec![title, self.heading(&fit)];
        if let Some(front) = front {
            let is_selected = selected == Some(0);
            let text = padded(&format!("{}{front}", mark(is_selected)), self.width, false);
            lines.push(self.line(vec![Span::raw(text)], is_selected));
        }
        lines.extend(shown.map(|(place, row)| self.row(&fit, row, selected == Some(place + in_front))));
        lines
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
            title = format!(
                "{title} by {}{}",
                column.head.name,
                if self.sort.reversed { ", reversed" } else { "" }
            );
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
            let text = cut(column.head.name, *width);
            let gap = " ".repeat(width.saturating_sub(text.len()));
            let head = Span::styled(text, style);
            spans.extend(if column.head.is_number { [Span::raw(gap), head] } else { [head, Span::raw(gap)] });
            spans.push(Span::raw("  "));
        }
        spans.pop();
        Line::from(spans)
    }

    fn row(&self, fit: &Fit, row: &Listed<R>, is_selected: bool) -> Line<'static> {
        let mut spans = vec![Span::raw(mark(is_selected))];
        for (place, width) in &fit.columns {
            let Some(column) = self.columns.get(*place) else { continue };
            let text = (column.text)(row);
            let text = if column.head.ends { cut_in_front(&text, *width) } else { cut(&text, *width) };
            let style = self.look.style((column.tone)(row, &text));
            spans.push(Span::styled(padded(&text, *width, column.head.is_number), style));
            spans.push(Span::raw("  "));
        }
        spans.pop();
        self.line(spans, is_selected)
    }

    /// A row of the table that the keys go to is reversed if it is the selected one.
    fn line(&self, spans: Vec<Span<'static>>, is_selected: bool) -> Line<'static> {
        let line = Line::from(spans);
        if is_selected && self.focused { line.style(Modifier::REVERSED) } else { line }
    }
}

fn mark(is_selected: bool) -> &'static str {
    if is_selected { "> " } else { "  " }
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
    use super::*;
    use crate::watch::top::tests::{model, press, with_slices};
    use common::bus::proxy::BusError;

    /// The screen at this size, after these keys.
    fn shown(width: u16, height: u16, model: &Model, keys: &str) -> Vec<String> {
        let mut state = TopState::default();
        press(&mut state, model, keys);
        let look = DrawOptions { colour: true, clock: SystemTime::now(), now: Instant::now() };
        let rows = rows((width.into(), height.into()), model, &state, look);
        rows.iter().map(|line| padded(&line.to_string(), width.into(), false)).collect()
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
        assert!(crate::watch::top::tests::model().clients_are_of(now).is_some());
    }

    #[test]
    fn colours_are_the_themes_and_only_where_they_are_wanted() {
        let (model, state) = (model(), TopState::default());
        for colour in [true, false] {
            let look = DrawOptions { colour, clock: SystemTime::now(), now: Instant::now() };
            let lines = rows((120, 40), &model, &state, look);
            let styles =
                lines.iter().flat_map(|line| line.spans.iter().map(|span| span.style).chain([line.style]));
            let colours: Vec<Color> = styles.filter_map(|style| style.fg).collect();
            let themes = [Color::Red, Color::Green, Color::Yellow];
            assert_eq!(themes.iter().all(|one| colours.contains(one)), colour);
            assert!(colours.iter().all(|one| colour && themes.contains(one)), "{colours:?}");
        }
    }

    #[test]
    fn a_line_has_the_colours_of_the_theme_and_no_other_sequences() {
        let line = Line::from(vec![Span::raw("a\u{1b}"), Span::styled("模", Style::new().red().bold())]);
        assert_eq!(written(&line), "\u{1b}[0ma\u{fffd}\u{1b}[0;1;31m模\u{1b}[0m");
        assert!(written(&line.style(Modifier::REVERSED)).starts_with("\u{1b}[0;7ma"));
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
