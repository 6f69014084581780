//! The results of `yunion-mpsctl bench` as a table, as bars and as JSON.

use std::io::{self, IsTerminal, Write};

use serde_json::{Map, Value, json};

use crate::cuda::THREADS;
use crate::measure::cuda_client::Work;
use crate::show::table::{Shown, Table, prose, table, width};
use common::bus::rows::Device;

/// The width of the longest line where the terminal doesn't tell its own.
const COLUMNS: usize = 80;

pub(crate) struct Results {
    /// The multiprocessors of the GPU.
    pub(crate) all_sms: u32,
    pub(crate) kernels: Vec<Measured>,
}

/// The results of one kernel.
pub(crate) struct Measured {
    pub(crate) kernel: &'static str,
    pub(crate) work: Work,
    pub(crate) rows: Vec<Round>,
}

/// The seconds that each of so many processes took, all at once.
pub(crate) struct Round {
    pub(crate) processes: u32,
    pub(crate) with_mps: Vec<f64>,
    /// None if processes without MPS can't run.
    pub(crate) without_mps: Option<Vec<f64>>,
}

impl Measured {
    /// The kernels of all processes in a second.
    fn rate(&self, seconds: &[f64]) -> f64 {
        let kernels = f64::from(self.work.launches) * seconds.iter().map(|_| 1.0).sum::<f64>();
        kernels / slowest(seconds)
    }

    /// The rate of one process, without MPS where that was measured.
    fn rate_of_one(&self) -> f64 {
        let first = self.rows.first().map(|row| row.without_mps.as_ref().unwrap_or(&row.with_mps));
        first.map_or(f64::NAN, |seconds| self.rate(seconds))
    }

    fn speedup(&self, seconds: &[f64]) -> f64 {
        self.rate(seconds) / self.rate_of_one()
    }

    fn document(&self, seconds: &[f64]) -> Value {
        json!({
            "seconds": seconds.iter().map(|seconds| rounded(*seconds)).collect::<Vec<f64>>(),
            "kernels_per_second": rounded(self.rate(seconds)),
            "speedup": rounded(self.speedup(seconds)),
        })
    }
}

pub(crate) fn slowest(seconds: &[f64]) -> f64 {
    seconds.iter().copied().fold(f64::MIN_POSITIVE, f64::max)
}

pub(crate) fn document(slices: &[&Device], why_not: Option<&str>, result: &Results) -> Value {
    let names: Vec<&String> = slices.iter().map(|slice| &slice.addr).collect();
    let first = slices.first();
    let mut kernels = Map::new();
    for measured in &result.kernels {
        let row = |row: &Round| {
            json!({
                "processes": row.processes,
                "with_mps": measured.document(&row.with_mps),
                "without_mps": row.without_mps.as_ref().map(|seconds| measured.document(seconds)),
            })
        };
        let Work { blocks, rounds, launches } = measured.work;
        let kernel = json!({
            "blocks": blocks,
            "threads": THREADS,
            "rounds": rounds,
            "launches": launches,
            "rows": measured.rows.iter().map(row).collect::<Vec<_>>(),
        });
        kernels.insert(measured.kernel.to_owned(), kernel);
    }
    json!({
        "devices": names,
        "device_path": first.map(|first| &first.device_path),
        "model": first.map(|first| &first.model),
        "sms": result.all_sms,
        "compute_mode": first.map(|first| &first.compute_mode),
        "why_not_without_mps": why_not,
        "kernels": kernels,
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
    for measured in &result.kernels {
        let Work { blocks, launches, .. } = measured.work;
        let kernel = measured.kernel;
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
        writeln!(out, "{}", prose(describe(measured.kernel)))?;
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
        let cells = |seconds: &Vec<f64>| {
            let (rate, speedup) = (measured.rate(seconds), measured.speedup(seconds));
            [span(seconds), format!("{rate:.1}"), format!("{speedup:.2}")]
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
        let with = Some(("with", row.processes, measured.speedup(&row.with_mps)));
        let without = row.without_mps.as_ref();
        let without = without.map(|seconds| ("without", row.processes, measured.speedup(seconds)));
        with.into_iter().chain(without)
    });
    let sides: Vec<(&str, u32, f64)> = sides.collect();
    let most = sides.iter().map(|(_, _, speedup)| *speedup).fold(f64::MIN_POSITIVE, f64::max);
    // "  8 without MPS " in front, " 7.99" behind.
    let room = columns.saturating_sub(24).max(8);
    let line = |(with, processes, speedup): &(&str, u32, f64)| {
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
        let row = |processes, with: f64, without: f64| {
            let count = usize::try_from(processes).unwrap();
            Round { processes, with_mps: vec![with; count], without_mps: Some(vec![without; count]) }
        };
        Measured {
            kernel: "narrow",
            work: Work { blocks: 4, rounds: 1, launches: 50 },
            rows: vec![row(1, 1.0, 1.0), row(8, 1.0, 8.0)],
        }
    }

    #[test]
    fn the_rate_is_that_of_all_until_the_last_has_ended() {
        let measured = measured();
        assert_eq!(measured.rate(&[1.0, 2.0]), 50.0);
        assert_eq!(measured.speedup(&[1.0; 8]), 8.0);
        assert_eq!(measured.speedup(&[8.0; 8]), 1.0);
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
