//! `yunion-mpsctl events`.

use std::io::Write;

use rustix::process::Signal;

use super::{ReconnectingProxy, describe, in_time, reader_has_gone};
use crate::screen::say;
use crate::show::table::Shown;
use crate::show::time;
use crate::signals::CaughtSignals;
use crate::{Result, print_json};
use common::bus::proxy::{DaemonProxy, Listed};
use common::bus::rows::Event;
use common::published::events::{EVENTS_KEPT, FAULTS_KEPT};
use common::text::escaped;

pub(crate) async fn events(follows: bool, json: bool, out: &mut dyn Write) -> Result<()> {
    if !follows {
        let events = DaemonProxy::connect().await?.events().await?;
        if json {
            return print_json(out, &events);
        }
        if events.is_empty() {
            writeln!(out, "No events since the service started.")?;
        }
        return print(&events, false, out);
    }
    let mut interrupted = CaughtSignals::catch(&[Signal::INT])?;
    tokio::select! {
        followed = follow(json, out) => followed,
        _ = interrupted.next() => Ok(()),
    }
}

async fn follow(json: bool, out: &mut dyn Write) -> Result<()> {
    let mut watched = ReconnectingProxy::default();
    // The events in the service's last answer, all of which this command has printed.
    let mut printed = Vec::new();
    let mut complaint = String::new();
    while !reader_has_gone() {
        match in_time(async { watched.daemon().await?.events().await }).await {
            Ok(events) => {
                complaint.clear();
                if may_miss_some(&printed, &events) {
                    say(
                        "some events are missing here: more came at once than the service stores; journalctl \
                         -u yunion-mps-daemon has all events",
                    );
                }
                print(&new_ones(&printed, &events), json, out)?;
                printed = events;
                out.flush()?;
            }
            Err(error) => {
                let words = describe(&error);
                if words != complaint {
                    say(&words);
                    complaint = words;
                }
            }
        }
        watched.pause().await;
    }
    Ok(())
}

fn print(events: &[Listed<Event>], json: bool, out: &mut dyn Write) -> Result<()> {
    for event in events {
        if json {
            writeln!(out, "{}", escaped(&serde_json::to_string(event)?))?;
        } else {
            let at = time::local(time::from_microseconds(event.at));
            writeln!(out, "{at}  {}", event.text.shown())?;
        }
    }
    Ok(())
}

/// The events that were not printed yet. A new event can be anywhere in the list, since the service sorts events by their times
/// and may notice an event late.
fn new_ones(printed: &[Listed<Event>], events: &[Listed<Event>]) -> Vec<Listed<Event>> {
    let mut before = printed.to_vec();
    let mut new = events.to_vec();
    new.retain(|event| {
        let place = before.iter().position(|known| **known == **event);
        place.map(|place| before.swap_remove(place)).is_none()
    });
    new
}

/// True if the service may have dropped events between the two answers. An event in both answers proves that no event was
/// missed, unless the event may be a fault: the service stores faults longer than other events.
fn may_miss_some(printed: &[Listed<Event>], events: &[Listed<Event>]) -> bool {
    let is_known = |event: &&Listed<Event>| printed.iter().any(|known| **known == ***event);
    let known = events.iter().filter(is_known).count();
    !printed.is_empty() && events.len() >= EVENTS_KEPT && known <= FAULTS_KEPT
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(at: i64) -> Listed<Event> {
        Listed::read(json!({"at": at, "text": "a\u{1b}"}).as_object().unwrap().clone()).unwrap()
    }

    fn events(at: impl IntoIterator<Item = i64>) -> Vec<Listed<Event>> {
        at.into_iter().map(event).collect()
    }

    #[test]
    fn each_event_is_told_once() {
        let mut printed = Vec::new();
        for (answer, new) in [
            (vec![1, 2], vec![1, 2]),
            (vec![1, 2], vec![]),
            // This answer has a new event in the middle, and two equal new events at the end.
            (vec![1, 5, 2, 3, 3], vec![5, 3, 3]),
            (vec![2, 3, 3, 3], vec![3]),
            // The service has restarted, so its list of events begins again.
            (vec![], vec![]),
            (vec![9], vec![9]),
        ] {
            let answer = events(answer);
            let at: Vec<i64> = new_ones(&printed, &answer).iter().map(|event| event.at).collect();
            assert_eq!(at, new);
            printed = answer;
        }
    }

    #[test]
    fn a_gap_is_noticed() {
        let many = i64::try_from(EVENTS_KEPT).unwrap();
        let printed = events(0..many);
        assert!(!may_miss_some(&[], &printed));
        assert!(!may_miss_some(&printed, &events(1..=many)));
        assert!(!may_miss_some(&printed, &events([many])));
        assert!(may_miss_some(&printed, &events(many..2 * many)));
        // The list begins with faults, which the service stores longer than other events.
        let faults = i64::try_from(FAULTS_KEPT).unwrap();
        assert!(may_miss_some(&printed, &events((0..faults).chain(many..2 * many - faults))));
    }

    #[test]
    fn a_line_has_an_event_and_cannot_command_the_terminal() {
        for (json, expected) in [(false, "a\u{fffd}\n"), (true, "{\"at\":1000000,\"text\":\"a\\u001b\"}\n")] {
            let mut out = Vec::new();
            print(&events([1_000_000]), json, &mut out).unwrap();
            let line = String::from_utf8(out).unwrap();
            assert!(line.ends_with(expected) && line.matches('\n').count() == 1, "{line:?}");
        }
    }
}
