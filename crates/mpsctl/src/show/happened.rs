//! The last events at a glance: the ones that say the same are one line.

use std::time::SystemTime;

use crate::show::table::{Shown, Table, pairs};
use crate::show::time;
use common::bus::proxy::Listed;
use common::bus::rows::Event;

/// Events with the same words, apart from the processes that they name.
#[derive(Debug)]
struct Happened<'e> {
    words: String,
    /// The last of them.
    last: &'e Event,
    first: SystemTime,
    times: usize,
}

/// The events, the last one last.
pub(super) fn lines(events: &[Listed<Event>]) -> Table {
    let mut lines = pairs();
    for event in folded(events) {
        let often = match event.times {
            1 => String::new(),
            times => format!(" ({times} times since {})", time::local(event.first)),
        };
        let at = time::local(time::from_microseconds(event.last.at));
        lines.add_row([format!("  {at}"), format!("{}{often}", event.last.text.shown())]);
    }
    lines
}

fn folded(events: &[Listed<Event>]) -> Vec<Happened<'_>> {
    let mut all: Vec<Happened> = Vec::new();
    for event in events {
        let words = without_processes(&event.text);
        let known = all.iter().position(|one| one.words == words).map(|index| all.remove(index));
        let (first, times) = known
            .map_or_else(|| (time::from_microseconds(event.at), 1), |known| (known.first, known.times + 1));
        all.push(Happened { words, last: event, first, times });
    }
    all
}

/// The text without the numbers of processes, which differ each time.
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
        let event = |(second, text): (usize, &&str)| {
            let event = json!({"at": 1_795_264_496_000_000_usize + second * 1_000_000, "text": text});
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
        let seen: Vec<(&str, usize, u64)> = folded
            .iter()
            .map(|one| {
                let after = time::from_microseconds(one.last.at).duration_since(one.first).unwrap();
                (one.last.text.as_str(), one.times, after.as_secs())
            })
            .collect();
        assert_eq!(
            seen,
            [
                ("GPU 00:06.0 is lost", 1, 0),
                ("control daemon shared (PID 22) ended", 1, 0),
                ("control daemon shared started as PID 333", 3, 4),
                ("server 6 is ready", 2, 1),
            ]
        );
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
