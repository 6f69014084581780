//! The last events in a few lines. Events with the same text share a line.

use crate::show::table::{Shown, Tone, cut, pairs};
use crate::show::time;
use common::bus::proxy::Listed;
use common::bus::rows::Event;

/// The most lines of events below the table.
const LINES: usize = 5;

/// The width of the time of an event, with the blanks around it.
const TIME: usize = "  2026-11-21 12:34:56  ".len();

/// Events whose texts differ only in the processes that they name.
#[derive(Debug)]
struct Happened<'e> {
    words: String,
    /// The latest of the events that have this text.
    last: &'e Event,
    times: usize,
}

/// Makes a heading and the lines of the last events, in the order of time. If the last fault is older than the shown events, the
/// first line is the fault: users look at the events for the reason of an error, and many events follow a fault. None if there
/// are no events.
pub(super) fn last_events(events: &[Listed<Event>], width: Option<usize>) -> Option<String> {
    let mut shown = folded(events);
    let surplus = shown.len().saturating_sub(LINES);
    match shown.iter().rposition(|one| one.last.fault).filter(|fault| *fault < surplus) {
        Some(fault) => {
            shown.drain(fault + 1..=surplus);
            shown.drain(..fault);
        }
        None => drop(shown.drain(..surplus)),
    }
    let mut is_all = shown.len() == events.len();
    let mut lines = pairs();
    for event in &shown {
        let often = if event.times > 1 { format!("{} times: ", event.times) } else { String::new() };
        let text = often + &event.last.text.shown();
        let line = width.map_or_else(|| text.clone(), |width| cut(&text, width.saturating_sub(TIME)));
        is_all &= line == text;
        let at = format!("  {}", time::local(time::from_microseconds(event.last.at)));
        lines.add_toned_row([(at, None), (line, event.last.fault.then_some(Tone::Bad))]);
    }
    let hint = if is_all { "" } else { "; yunion-mpsctl events prints all events in full" };
    (!shown.is_empty()).then(|| format!("Last events{hint}:\n{lines}"))
}

fn folded(events: &[Listed<Event>]) -> Vec<Happened<'_>> {
    let mut all: Vec<Happened> = Vec::new();
    for event in events {
        let words = without_processes(&event.text);
        let known = all.iter().position(|one| one.words == words).map(|index| all.remove(index));
        let times = known.map_or(1, |known| known.times + 1);
        all.push(Happened { words, last: event, times });
    }
    all
}

/// The text of an event without the numbers of processes, which differ each time.
fn without_processes(text: &str) -> String {
    let mut words: Vec<&str> = Vec::new();
    for word in text.split(' ') {
        let number = word.trim_start_matches('(').trim_end_matches([')', ',', ';', ':']);
        let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
        let names_a_process = words
            .last()
            .is_some_and(|last| ["PID", "server", "process"].contains(&last.trim_start_matches('(')));
        words.push(if is_number && names_a_process { "N" } else { word });
    }
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn events(texts: &[&str]) -> Vec<Listed<Event>> {
        events_with(texts, |_| false)
    }

    fn events_with(texts: &[&str], is_fault: fn(&str) -> bool) -> Vec<Listed<Event>> {
        let event = |(second, text): (usize, &&str)| {
            let at = 1_795_264_496_000_000_usize + second * 1_000_000;
            let event = json!({"at": at, "fault": is_fault(text), "text": text});
            Listed::read(event.as_object().unwrap().clone()).unwrap()
        };
        texts.iter().enumerate().map(event).collect()
    }

    #[test]
    fn repeated_events_are_one_line_at_their_last_time() {
        let events = events(&[
            "control daemon shared started as PID 1",
            "GPU 00:06.0 is lost",
            "control daemon shared started as PID 22",
            "control daemon shared (PID 22) ended",
            "control daemon shared started as PID 333",
            "server 5 is ready",
            "server 6 is ready",
        ]);
        let folded = folded(&events);
        let seen: Vec<(&str, usize)> = folded.iter().map(|one| (one.last.text.as_str(), one.times)).collect();
        assert_eq!(
            seen,
            [
                ("GPU 00:06.0 is lost", 1),
                ("control daemon shared (PID 22) ended", 1),
                ("control daemon shared started as PID 333", 3),
                ("server 6 is ready", 2),
            ]
        );
        let said = last_events(&events, None).unwrap();
        assert!(said.contains("  3 times: control daemon shared started as PID 333\n"), "{said}");
        assert!(said.starts_with("Last events; yunion-mpsctl events prints all events in full:\n"), "{said}");
    }

    #[test]
    fn the_last_fault_is_shown_and_no_line_is_broken() {
        let letters = ["a", "fault", "b", "fault too", "c", "d", "e", "f", "g"];
        let shown = |count: usize, width| {
            let events = events_with(&letters[..count], |text| text.starts_with("fault"));
            let said = last_events(&events, width)?;
            let lines = said.lines().skip(1).map(|line| line[TIME..].to_owned());
            Some((said.lines().next()?.to_owned(), lines.collect::<Vec<_>>()))
        };
        assert_eq!(shown(0, None), None);
        let hint = "Last events; yunion-mpsctl events prints all events in full:";
        for (count, heading, expected) in [
            (3, "Last events:", vec!["a", "fault", "b"]),
            (5, "Last events:", vec!["a", "fault", "b", "fault too", "c"]),
            (6, hint, vec!["fault", "b", "fault too", "c", "d"]),
            (9, hint, vec!["fault too", "d", "e", "f", "g"]),
        ] {
            let expected = expected.into_iter().map(str::to_owned).collect();
            assert_eq!(shown(count, None), Some((heading.to_owned(), expected)), "{count}");
        }
        let (heading, lines) = shown(2, Some(TIME + 4)).unwrap();
        assert_eq!((heading.as_str(), &lines[..]), (hint, &["a".to_owned(), "fau…".to_owned()][..]));
    }

    #[test]
    fn slices_and_gpus_are_not_processes() {
        let events = events(&[
            "00:06.0-1 is over its budget",
            "00:06.0-2 is over its budget",
            "12 GPUs lost",
            "13 GPUs lost",
        ]);
        assert_eq!(folded(&events).len(), 4);
        assert_eq!(without_processes("ended (PID 7), server 8; PID 9:"), "ended (PID N server N PID N");
    }
}
