//! Times for people: a moment in local time, and the time since a moment.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jiff::Timestamp;
use jiff::tz::TimeZone;

/// Most moments on the bus are numbers of seconds after 1970.
pub(crate) fn from_seconds(seconds: i64) -> SystemTime {
    from_microseconds(seconds.saturating_mul(1_000_000))
}

/// The times of events on the bus are numbers of microseconds after 1970.
pub(crate) fn from_microseconds(microseconds: i64) -> SystemTime {
    let microseconds = u64::try_from(microseconds).unwrap_or_default();
    UNIX_EPOCH.checked_add(Duration::from_micros(microseconds)).unwrap_or(UNIX_EPOCH)
}

/// A moment in the time zone of `TZ` or `/etc/localtime`: `2026-11-21 12:34:56`.
pub(crate) fn local(at: SystemTime) -> String {
    local_in(at, TimeZone::system())
}

/// The time since a moment: `3 min`. The clock may have been set back, so a moment in the future counts as now.
pub(crate) fn age(at: SystemTime) -> String {
    span(at.elapsed().unwrap_or_default())
}

fn local_in(at: SystemTime, zone: TimeZone) -> String {
    match Timestamp::try_from(at) {
        Ok(at) => at.to_zoned(zone).strftime("%Y-%m-%d %H:%M:%S").to_string(),
        // The library has no date for a moment after the year 9999.
        Err(_) => "-".to_owned(),
    }
}

fn span(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds @ 60..3600 => format!("{} min", seconds / 60),
        seconds @ 3600..86400 => format!("{} h", seconds / 3600),
        86400..172_800 => "1 day".to_owned(),
        seconds => format!("{} days", seconds / 86400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_change_their_unit() {
        let texts = [0, 59, 60, 3599, 3600, 86399, 86400, 864_000].map(|s| span(Duration::from_secs(s)));
        assert_eq!(texts, ["0 s", "59 s", "1 min", "59 min", "1 h", "23 h", "1 day", "10 days"]);
    }

    #[test]
    fn the_time_of_day_is_the_zones() {
        let at = from_seconds(1_795_264_496);
        assert_eq!(local_in(at, TimeZone::UTC), "2026-11-21 12:34:56");
        let east = TimeZone::posix("CET-1").unwrap();
        assert_eq!(local_in(at, east), "2026-11-21 13:34:56");
        assert_eq!(from_microseconds(1_795_264_496_000_000), at);
    }

    #[test]
    fn a_moment_that_lies_ahead_is_now() {
        let now = SystemTime::now();
        assert_eq!(age(now + Duration::from_secs(1_000)), "0 s");
        assert_eq!(age(now - Duration::from_secs(1_000)), "16 min");
    }

    #[test]
    fn no_number_is_too_large() {
        assert_eq!(local(from_seconds(i64::MAX)), "-");
        assert_eq!(local(from_microseconds(i64::MAX)), "-");
        assert_eq!((from_seconds(-1), from_microseconds(i64::MIN)), (UNIX_EPOCH, UNIX_EPOCH));
    }
}
