//! The results of `yunion-mpsctl bench` as a table, as bars and as JSON.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};

use serde::Serialize;
use serde_json::{Value, json};

use crate::cuda::THREADS;
use crate::measure::cuda_client::Work;
use crate::show::table::{Shown, Table, prose, table, width};
use common::bus::rows::Device;

/// The width of the longest line where the terminal doesn't tell its own.
const COLUMNS: usize = 80;

pub(crate) struct Results {
    /// The multiprocessors of the GPU.
    pub(crate) all_sms: u32,
    /// The results of each kernel, by its name.
    pub(crate) kernels: BTreeMap<&'static str, Measured>,
}

/// The results of one kernel.
#[derive(Serialize)]
pub(crate) struct Measured {
    #[serde(flatten)]
    work: Work,
    /// Of a block.
    threads: u32,
    rows: Vec<Round>,
}

/// So many processes, all at once.
#[derive(Serialize)]
struct Round {
    processes: usize,
    with_mps: Side,
    /// None if processes without MPS can't run.
    without_mps: Option<Side>,
}

#[derive(Serialize)]
struct Side {
    /// The time of each process.
    seconds: Vec<f64>,
    /// The kernels of all processes in a second.
    kernels_per_second: f64,
    /// The rate beside that of one process, which is without MPS where that was measured.
    speedup: f64,
}

impl Measured {
    /// `rounds` has the seconds of each process, with MPS and without. The first one is that of one process.
    pub(crate) fn new(work: Work, rounds: &[(Vec<f64>, Option<Vec<f64>>)]) -> Self {
        let first = rounds.first().map(|(with, without)| without.as_ref().unwrap_or(with));
        let rate_of_one = first.map_or(f64::NAN, |seconds| rate(work, seconds));
        let side = |seconds: &Vec<f64>| Side {
            seconds: seconds.iter().copied().map(rounded).collect(),
            kernels_per_second: rounded(rate(work, seconds)),
            speedup: rounded(rate(work, seconds) / rate_of_one),
        };
        let round = |(with, without): &(Vec<f64>, Option<Vec<f64>>)| Round {
            processes: with.len(),
            with_mps: side(with),
            without_mps: without.as_ref().map(side),
        };
        Self { work, threads: THREADS, rows: rounds.iter().map(round).collect() }
    }
}

/// The kernels of all processes in a second.
fn rate(work: Work, seconds: &[f64]) -> f64 {
    f64::from(work.launches) * seconds.len() as f64 / slowest(seconds)
}

pub(crate) fn slowest(seconds: &[f64]) -> f64 {
    seconds.iter().copied().fold(f64::MIN_POSITIVE, f64::max)
}

pub(crate) fn document(slices: &[&Device], why_not: Option<&str>, result: &Results) -> Value {
    let first = slices.first();
    json!({
        "devices": slices.iter().map(|slice| &slice.addr).collect::<Vec<_>>(),
        "device_path": first.map(|first| &first.device_path),
        "model": first.map(|first| &first.model),
        "sms": result.all_sms,
        "compute_mode": first.map(|first| &first.compute_mode),
        "why_not_without_mps": why_not,
        "kernels": result.kernels,
    })
}

pub(crate) fn print(
    out: &mut dyn Write,
    slices: &[&Device],
    why_not: Option<&str>,
    result: &Results,
) -> io::Result<()> {
    let (count, all) = (slices.len(), result.all_sms);
    if let Some(first) = slices.first() {
        let (model, uuid) = (first.model.shown(), first.device_path.shown());
        writeln!(out, "{model} {uuid}, {all} SMs, slices used: {count}")?;
    }
    for (kernel, measured) in &result.kernels {
        let Work { blocks, launches, .. } = measured.work;
        let head = format!(
            "A {kernel} kernel ({blocks} blocks of {THREADS} threads), {launches} of them in each process:"
        );
        writeln!(out, "\n{}", prose(&head))?;
        writeln!(out, "{}", table_of(measured))?;
        if io::stdout().is_terminal() {
            for line in bars(measured, width().unwrap_or(COLUMNS)) {
                writeln!(out, "{line}")?;
            }
        }
        writeln!(out, "{}", prose(describe(kernel)))?;
    }
    if let Some(why_not) = why_not {
        writeln!(out, "\n{}", prose(why_not))?;
    }
    Ok(())
}

fn describe(kernel: &str) -> &'static str {
    if kernel == "narrow" {
        "It leaves most of the GPU idle. With MPS processes of this kind run side by side; without it they take turns."
    } else {
        "It fills the GPU by itself, and MPS adds little: the total stays near what one process has alone without MPS. With \
         MPS a single process is held to its slice's share of it."
    }
}

fn table_of(measured: &Measured) -> Table {
    let compares = measured.rows.iter().any(|row| row.without_mps.is_some());
    let mut heads = vec!["PROCESSES", "WITH MPS", "KERNELS/S", "SPEED-UP"];
    if compares {
        heads.extend(["WITHOUT MPS", "KERNELS/S", "SPEED-UP"]);
    }
    let mut table = table(&[], &heads);
    for row in &measured.rows {
        let cells = |side: &Side| {
            [span(&side.seconds), format!("{:.1}", side.kernels_per_second), format!("{:.2}", side.speedup)]
        };
        let without = row.without_mps.iter().flat_map(cells);
        table.add_row([row.processes.to_string()].into_iter().chain(cells(&row.with_mps)).chain(without));
    }
    table
}

/// The shortest and the longest time, in milliseconds.
fn span(seconds: &[f64]) -> String {
    let shortest = seconds.iter().copied().fold(f64::INFINITY, f64::min) * 1000.0;
    let longest = slowest(seconds) * 1000.0;
    if format!("{shortest:.0}") == format!("{longest:.0}") {
        format!("{longest:.0} ms")
    } else {
        format!("{shortest:.0}-{longest:.0} ms")
    }
}

/// The speed-ups as bars, as wide as the terminal.
fn bars(measured: &Measured, columns: usize) -> Vec<String> {
    let sides = measured.rows.iter().flat_map(|row| {
        let with = ("with", row.processes, row.with_mps.speedup);
        [with].into_iter().chain(row.without_mps.iter().map(|side| ("without", row.processes, side.speedup)))
    });
    let sides: Vec<(&str, usize, f64)> = sides.collect();
    let most = sides.iter().map(|(_, _, speedup)| *speedup).fold(f64::MIN_POSITIVE, f64::max);
    // "  8 without MPS " in front, " 7.99" behind.
    let room = columns.saturating_sub(24).max(8);
    let line = |(with, processes, speedup): &(&str, usize, f64)| {
        let length =
            (0..room).take_while(|cells| (*cells as f64 + 0.5) / room as f64 <= speedup / most).count();
        format!("{processes:>3} {with:>7} MPS {} {speedup:.2}", "\u{2588}".repeat(length))
    };
    sides.iter().map(line).collect()
}

/// To the microsecond: further digits of a clock are noise.
fn rounded(number: f64) -> f64 {
    (number * 1e6).round() / 1e6
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // The figures are exact in binary.
mod tests {
    use super::*;

    fn measured() -> Measured {
        let work = Work { blocks: 4, rounds: 1, launches: 50 };
        Measured::new(work, &[(vec![1.0], Some(vec![1.0])), (vec![1.0; 8], Some(vec![8.0; 8]))])
    }

    #[test]
    fn the_rate_is_that_of_all_until_the_last_has_ended() {
        let measured = measured();
        assert_eq!(rate(measured.work, &[1.0, 2.0]), 50.0);
        let [_, eight] = measured.rows.as_slice() else { panic!("{}", measured.rows.len()) };
        assert_eq!(eight.with_mps.speedup, 8.0);
        assert_eq!(eight.without_mps.as_ref().unwrap().speedup, 1.0);
    }

    #[test]
    fn bars_fit_the_terminal() {
        let bars = bars(&measured(), 40);
        assert_eq!(bars[0], format!("  1    with MPS {} 1.00", "\u{2588}".repeat(2)));
        assert_eq!(bars[2], format!("  8    with MPS {} 8.00", "\u{2588}".repeat(16)));
        assert_eq!(bars[3], format!("  8 without MPS {} 1.00", "\u{2588}".repeat(2)));
        assert!(bars.iter().all(|bar| bar.chars().count() <= 40));
    }

    #[test]
    fn times_are_spans() {
        assert_eq!(span(&[1.0, 1.0004]), "1000 ms");
        assert_eq!(span(&[1.0, 1.2]), "1000-1200 ms");
    }
}
