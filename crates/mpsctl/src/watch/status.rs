//! `yunion-mpsctl status --watch`.

use std::io::Write;
use std::time::SystemTime;

use rustix::process::Signal;
use serde_json::Value;

use super::{ReconnectingProxy, describe, in_time, reader_has_gone};
use crate::screen::{Screen, fitted, say, size};
use crate::show::status::{Arguments, status};
use crate::show::table::is_drawn_on;
use crate::show::time;
use crate::signals::CaughtSignals;
use crate::{Error, Result};
use common::text::escaped;

pub(crate) async fn watch(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    if !arguments.json && !is_drawn_on() {
        return Err(Error::Usage(
            "status --watch draws on a terminal; elsewhere use status --watch --json, or events --follow"
                .to_owned(),
        ));
    }
    let mut interrupted = CaughtSignals::catch(&[Signal::INT])?;
    tokio::select! {
        followed = follow(arguments, out) => followed,
        _ = interrupted.next() => {
            if !arguments.json {
                // The terminal may show "^C" on the last line, so the shell's prompt begins on a new line.
                writeln!(out)?;
            }
            Ok(())
        }
    }
}

async fn follow(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let mut watched = ReconnectingProxy::default();
    let mut last = String::new();
    let mut screen = Screen::default();
    while !reader_has_gone() {
        let mut text = Vec::new();
        let answer = async { status(&watched.daemon().await?, arguments, &mut text).await };
        let answer = match in_time(answer).await {
            Ok(()) => Ok(String::from_utf8_lossy(&text).into_owned()),
            Err(Error::Bus(error)) => Err(describe(&error)),
            Err(error) => return Err(error),
        };
        if arguments.json {
            print_change(&answer, &mut last, out)?;
        } else {
            let text = answer.unwrap_or_else(|words| words);
            screen.draw(lines(&text, size().1.into()), out)?;
        }
        watched.pause().await;
    }
    Ok(())
}

fn print_change(answer: &Result<String, String>, last: &mut String, out: &mut dyn Write) -> Result<()> {
    let text = match answer {
        Ok(text) => escaped(&serde_json::from_str::<Value>(text)?.to_string()),
        Err(words) => words.clone(),
    };
    if *last != text {
        match answer {
            Ok(_) => writeln!(out, "{text}").and_then(|()| out.flush())?,
            Err(_) => say(&text),
        }
        *last = text;
    }
    Ok(())
}

fn lines(text: &str, rows: usize) -> Vec<String> {
    let now = time::local(SystemTime::now());
    let mut lines = vec![format!("yunion-mpsctl status at {now}; Ctrl-C ends"), String::new()];
    lines.extend(text.lines().map(str::to_owned));
    fitted(lines, rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_screen_is_no_higher_than_the_terminal_and_says_so() {
        let text = "one\ntwo\nthree\n";
        let whole = lines(text, 5);
        assert!(whole[0].starts_with("yunion-mpsctl status at ") && whole[1].is_empty(), "{whole:?}");
        assert_eq!(whole[2..], ["one", "two", "three"]);
        let cut = lines(text, 4);
        assert!(cut.len() == 4 && cut[2] == "one" && cut[3].starts_with("(2 lines more;"), "{cut:?}");
    }

    #[test]
    fn json_is_printed_when_it_changes() {
        let mut out = Vec::new();
        let mut last = String::new();
        for answer in ["{\n  \"a\": 1\n}", "{\"a\":1}", "{\"a\":\"\u{9b}\"}"] {
            print_change(&Ok(answer.to_owned()), &mut last, &mut out).unwrap();
        }
        assert_eq!(String::from_utf8(out).unwrap(), "{\"a\":1}\n{\"a\":\"\\u009b\"}\n");
    }
}
