//! The last events in a few lines. Similar events share a line.

use crate::show::table::{Shown, Tone, cut, pairs};
use crate::show::time;
use common::bus::proxy::Listed;
use common::bus::rows::Event;

/// The most lines of events that are shown.
const LINES: usize = 5;

/// The width of an event's time and of the blanks around the time.
const TIME: usize = "  2026-11-21 12:34:56  ".len();

/// A heading and the lines of the last events, oldest first. If the last fault is older than these events, the first line shows
/// the fault. Many events can follow a fault, but the fault is often the reason of an error that users see. None if there are
/// no events.
pub(super) fn last_events(events: &[Listed<Event>], width: Option<usize>) -> Option<String> {
    let mut shown = folded(events);
    let surplus = shown.len().saturating_sub(LINES);
    match shown.iter().rposition(|(one, _)| one.fault).filter(|fault| *fault < surplus) {
        Some(fault) => {
            shown.drain(fault + 1..=surplus);
            shown.drain(..fault);
        }
        None => drop(shown.drain(..surplus)),
    }
    let mut is_all = shown.len() == events.len();
    let mut lines = pairs();
    for (event, times) in shown.iter().copied() {
        let often = if times > 1 { format!("{times} times: ") } else { String::new() };
        let text = often + &event.text.shown();
        let line = width.map_or_else(|| text.clone(), |width| cut(&text, width.saturating_sub(TIME)));
        is_all &= line == text;
        let at = format!("  {}", time::local(time::from_microseconds(event.at)));
        lines.add_toned_row([(at, None), (line, event.fault.then_some(Tone::Bad))]);
    }
    let hint = if is_all { "" } else { "; yunion-mpsctl events prints all events in full" };
    (!shown.is_empty()).then(|| format!("Last events{hint}:\n{lines}"))
}

/// Joins similar events: returns the last event of each kind, and the number of events of this kind.
fn folded(events: &[Listed<Event>]) -> Vec<(&Event, usize)> {
    let mut all: Vec<(&Event, usize)> = Vec::new();
    for event in events {
        let known = all.iter().position(|(one, _)| are_alike(one, event)).map(|index| all.remove(index));
        all.push((event, known.map_or(1, |(_, times)| times + 1)));
    }
    all
}

/// True if the events have the same text, or report requests with the same PID, container or slices. The texts about two such
/// requests differ if the requests have ended the GPU work of different clients.
fn are_alike(one: &Event, other: &Event) -> bool {
    one.text == other.text || one.ended_for.is_some() && one.ended_for == other.ended_for
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
            "configuration reloaded",
            "GPU 00:06.0 is lost",
            "configuration reloaded",
            "control daemon shared started as PID 22",
            "configuration reloaded",
            "control daemon shared started as PID 333",
        ]);
        let folded = folded(&events);
        let seen: Vec<(&str, usize)> =
            folded.iter().map(|(one, times)| (one.text.as_str(), *times)).collect();
        assert_eq!(
            seen,
            [
                ("GPU 00:06.0 is lost", 1),
                ("control daemon shared started as PID 22", 1),
                ("configuration reloaded", 3),
                ("control daemon shared started as PID 333", 1),
            ]
        );
        let said = last_events(&events, None).unwrap();
        assert!(said.contains("  3 times: configuration reloaded\n"), "{said}");
        assert!(said.starts_with("Last events; yunion-mpsctl events prints all events in full:\n"), "{said}");
    }

    #[test]
    fn requests_for_the_same_work_are_alike_and_requests_for_other_work_are_not() {
        let event = |text: &str, ended_for: &[&str]| Event {
            text: text.to_owned(),
            ended_for: Some(ended_for.iter().map(|name| (*name).to_owned()).collect()),
            ..Event::default()
        };
        let first = event("ended PID 7", &["00:06.0-1"]);
        assert!(are_alike(&first, &event("ended PID 8", &["00:06.0-1"])));
        assert!(!are_alike(&first, &event("ended PID 8", &["00:06.0-2"])));
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
}
