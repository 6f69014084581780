//! The log of the simulated control daemon and its servers, in the real control daemon's format:
//! `[2026-11-21 02:13:53.814 Control   879] text`.

use std::io::Write;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

pub(super) struct Log {
    out: Mutex<Box<dyn Write + Send>>,
}

impl Log {
    pub(super) fn to(out: impl Write + Send + 'static) -> Self {
        Self { out: Mutex::new(Box::new(out)) }
    }

    /// Writes the line with a single write, since several processes share the file. If the log can't be written, the line is
    /// lost, and the process goes on.
    pub(super) fn line(&self, label: &str, pid: u32, text: &str) {
        let line = format!("[{} {label} {pid:>5}] {text}\n", time(now()));
        if let Ok(mut out) = self.out.lock() {
            _ = out.write_all(line.as_bytes()).and_then(|()| out.flush());
        }
    }
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_millis().try_into().unwrap_or_default()
}

/// Formats milliseconds since 1970 as a time in UTC, for the beginning of a line of the log.
fn time(milliseconds: u64) -> String {
    let seconds = milliseconds / 1000;
    let (mut day, mut year) = (seconds / 86400, 1970);
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    while day >= 365 + u64::from(leap(year)) {
        day -= 365 + u64::from(leap(year));
        year += 1;
    }
    let mut month = 1;
    for length in [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if day < length {
            break;
        }
        day -= length;
        month += 1;
    }
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let thousandths = milliseconds % 1000;
    format!("{year}-{month:02}-{:02} {hour:02}:{minute:02}:{second:02}.{thousandths:03}", day + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_the_calendar_s() {
        assert_eq!(time(0), "1970-01-01 00:00:00.000");
        assert_eq!(time(1_795_227_233_814), "2026-11-21 02:13:53.814");
        assert_eq!(time(951_782_399_999), "2000-02-28 23:59:59.999");
        assert_eq!(time(1_735_689_599_000), "2024-12-31 23:59:59.000");
    }
}
