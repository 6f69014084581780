//! The columns of the two tables: heads, texts and orders.

use std::cmp::Ordering;

use ratatui::style::Color;

use crate::ctl::show::health::Health;
use crate::ctl::show::table::Shown;
use crate::ctl::show::time;
use crate::dbus::rows::{Client, Device};
use crate::tenants::in_words::SHORT_ID;

/// The places between the brackets of a bar.
const BAR: i32 = 10;

/// A column of rows.
pub(super) struct Column<R> {
    pub(super) head: &'static str,
    pub(super) text: fn(&R) -> String,
    pub(super) colour: fn(&R) -> Option<Color>,
    /// The order of the rows by this column.
    pub(super) order: fn(&R, &R) -> Ordering,
    /// A number.
    pub(super) right: bool,
    /// A text that says more by its end than by its beginning, such as a path.
    pub(super) ends: bool,
    /// Where there is no room for all columns, the one with the highest number goes first. 0: it stays.
    pub(super) expendable: u8,
}

impl<R> Column<R> {
    const fn new(head: &'static str, text: fn(&R) -> String, order: fn(&R, &R) -> Ordering) -> Self {
        Self { head, text, order, colour: |_| None, right: false, ends: false, expendable: 0 }
    }

    const fn right(self) -> Self {
        Self { right: true, ..self }
    }

    const fn ends(self) -> Self {
        Self { ends: true, ..self }
    }

    const fn expendable(self, expendable: u8) -> Self {
        Self { expendable, ..self }
    }

    const fn coloured(self, colour: fn(&R) -> Option<Color>) -> Self {
        Self { colour, ..self }
    }
}

/// The last column holds prose, and takes the room that is left.
pub(super) const SLICES: [Column<Device>; 7] = [
    // The order of the configuration, in which the service lists them.
    Column::<Device>::new("SLICE", |slice| slice.addr.shown(), |_, _| Ordering::Equal),
    Column::<Device>::new("GPU", gpu, |a, b| a.nvidia_index.cmp(&b.nvidia_index)).expendable(3),
    Column::<Device>::new("CLIENTS", clients, |a, b| b.clients.cmp(&a.clients)).right(),
    Column::<Device>::new("MEMORY", memory, |a, b| b.memory_used.cmp(&a.memory_used)).right(),
    Column::<Device>::new("IN USE", bar, |a, b| in_use(b).total_cmp(&in_use(a)))
        .coloured(of_bar)
        .expendable(2),
    Column::<Device>::new(
        "SHARE",
        |slice| format!("{} %", slice.mps_thread_percentage),
        |a, b| b.mps_thread_percentage.cmp(&a.mps_thread_percentage),
    )
    .right()
    .expendable(1),
    Column::<Device>::new("STATE", state, |a, b| rank(a).cmp(&rank(b)))
        .coloured(|slice| Some(of_state(slice))),
];

pub(super) const CLIENTS: [Column<Client>; 7] = [
    Column::<Client>::new("PID", |client| client.pid.shown(), |a, b| a.pid.cmp(&b.pid)).right(),
    Column::<Client>::new("USER", |client| client.user.shown(), |a, b| a.user.cmp(&b.user)).expendable(1),
    Column::<Client>::new("SLICE", slice, |a, b| slice(a).cmp(&slice(b))).coloured(of_slice),
    Column::<Client>::new("MEMORY", memory_of_client, |a, b| b.memory_mib.cmp(&a.memory_mib)).right(),
    Column::<Client>::new("AGE", age, |a, b| oldest(a).cmp(&oldest(b))).right().expendable(2),
    Column::<Client>::new("CONTAINER", container, |a, b| a.container_id.cmp(&b.container_id)).expendable(3),
    Column::<Client>::new("COMMAND", |client| client.command.shown(), |a, b| a.command.cmp(&b.command))
        .ends(),
];

/// The word alone: the reason is that of the whole GPU, and stands above once a slice is selected.
fn state(slice: &Device) -> String {
    Health::of_slice(slice).word().to_owned()
}

/// The worst first.
fn rank(slice: &Device) -> u8 {
    match Health::of_slice(slice) {
        Health::NotServed => 0,
        Health::Drained => 1,
        Health::NotEnforced => 2,
        Health::Served => 3,
    }
}

pub(super) fn of_state(slice: &Device) -> Color {
    match Health::of_slice(slice) {
        Health::NotServed => Color::Red,
        Health::Drained | Health::NotEnforced => Color::Yellow,
        Health::Served => Color::Green,
    }
}

/// `0 Tesla P40`
fn gpu(slice: &Device) -> String {
    [slice.nvidia_index.map(|index| index.shown()), slice.model.as_ref().map(Shown::shown)]
        .into_iter()
        .flatten()
        .collect::<Vec<_>>()
        .join(" ")
}

/// `2/12`
fn clients(slice: &Device) -> String {
    match slice.max_clients {
        Some(most) => format!("{}/{most}", slice.clients.shown()),
        None => slice.clients.shown(),
    }
}

/// `1024/5760 MiB`
fn memory(slice: &Device) -> String {
    format!("{}/{} MiB", slice.memory_used.shown(), slice.mps_memory_limit.shown())
}

/// The part of the memory limit that is in use; less than nothing if it is not known.
fn in_use(slice: &Device) -> f64 {
    match (slice.memory_used, slice.mps_memory_limit) {
        (Some(used), Some(limit)) if limit > 0 => f64::from(used) / f64::from(limit),
        _ => -1.0,
    }
}

fn bar(slice: &Device) -> String {
    let (Some(used), Some(limit)) = (slice.memory_used, slice.mps_memory_limit.filter(|limit| *limit > 0))
    else {
        return "-".to_owned();
    };
    let places = i64::from(used.max(0)) * i64::from(BAR);
    // The least use is seen.
    let full = places.checked_add(i64::from(limit) - 1).map_or(0, |sum| sum / i64::from(limit));
    let full = usize::try_from(full.min(i64::from(BAR))).unwrap_or_default();
    format!(
        "[{}{}]",
        "|".repeat(full),
        " ".repeat(usize::try_from(BAR).unwrap_or_default().saturating_sub(full))
    )
}

/// A slice over its budget is red.
fn of_bar(slice: &Device) -> Option<Color> {
    let is_over = slice.overuse.as_ref().is_some_and(|overuse| !overuse.is_empty());
    is_over.then_some(Color::Red)
}

/// Its slice, as far as it has one.
fn slice(client: &Client) -> String {
    match client {
        Client { bypass: true, .. } => "BYPASS".to_owned(),
        Client { waiting: true, device, .. } => format!("WAITS {}", device.shown()),
        Client { device, .. } => device.shown(),
    }
}

fn of_slice(client: &Client) -> Option<Color> {
    match client {
        Client { bypass: true, .. } => Some(Color::Red),
        Client { waiting: true, .. } => Some(Color::Yellow),
        _ => None,
    }
}

fn memory_of_client(client: &Client) -> String {
    client.memory_mib.map_or_else(|| "-".to_owned(), |mib| format!("{mib} MiB"))
}

fn age(client: &Client) -> String {
    client.since.map(|since| time::age(time::from_seconds(since))).shown()
}

/// The oldest first, and those of an unknown age last.
fn oldest(client: &Client) -> i64 {
    client.since.unwrap_or(i64::MAX)
}

fn container(client: &Client) -> String {
    client.container_id.shown().chars().take(SHORT_ID).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_shows_the_least_use_and_no_more_than_all() {
        let slice = |used| Device { memory_used: used, mps_memory_limit: Some(1000), ..Device::default() };
        for (used, expected) in [
            (None, "-"),
            (Some(0), "[          ]"),
            (Some(1), "[|         ]"),
            (Some(500), "[|||||     ]"),
            (Some(1000), "[||||||||||]"),
            (Some(i32::MAX), "[||||||||||]"),
            (Some(-5), "[          ]"),
        ] {
            assert_eq!(bar(&slice(used)), expected, "{used:?}");
        }
    }

    #[test]
    fn a_state_has_a_colour_and_the_worst_comes_first() {
        let slice = |healthy, drained, limits_enforced| Device {
            drained,
            healthy,
            limits_enforced,
            ..Device::default()
        };
        let states = [
            slice(false, false, true),
            slice(false, true, true),
            slice(true, false, false),
            slice(true, false, true),
        ];
        assert_eq!(states.each_ref().map(of_state), [Color::Red, Color::Yellow, Color::Yellow, Color::Green]);
        assert!(states.is_sorted_by_key(rank));
    }
}
