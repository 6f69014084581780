//! `yunion-mpsctl list`.

use std::io::{self, Write};
use std::ops::Deref;

use clap::Args;

use crate::show::columns::{Column, GPUS, PLATFORM_GPUS, PLATFORM_SLICES, SLICES, table_of};
use crate::show::health::describe_state;
use crate::show::table::{Shown, pairs, prose};
use crate::{Error, Result, print_json};
use common::bus::error::RequestError;
use common::bus::proxy::{BusError, DaemonProxy, Listed};
use common::bus::rows::{Device, Gpu, Service};
use common::counted::counted;
use common::published::snapshot::State;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// List the GPUs instead of the slices
    #[arg(long)]
    gpus: bool,
    #[command(flatten)]
    form: Form,
    /// Print the rows alone, without headings and notes
    #[arg(long)]
    no_headings: bool,
}

#[derive(Debug, Args)]
#[group(multiple = false)]
struct Form {
    /// `wide` adds columns: index, NUMA node, compute mode, UUID, directories
    #[arg(short, long, value_name = "FORMAT", hide_possible_values = true, value_parser = ["wide"])]
    output: Option<String>,
    /// Print the listing of isolated devices as the platform's command line prints it, without its two columns of ids, and
    /// with a column Health
    #[arg(long)]
    platform: bool,
    /// Print the names alone, one a line
    #[arg(long)]
    names: bool,
    /// Print everything that the service publishes as a JSON array, with the clients as of its last look
    #[arg(long)]
    json: bool,
}

pub(crate) async fn list(daemon: &DaemonProxy, arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let service = daemon.service().await?;
    let form = &arguments.form;
    // The service counts clients only for output that a person reads. Programs call this command more often, and can ask for
    // a count themselves.
    if !(form.json || form.names || form.platform) {
        daemon.look_at_clients().await;
    }
    let gpus = known_now(daemon.gpus().await, &service)?;
    let devices = known_now(daemon.devices().await, &service)?;
    let takes_notes = if arguments.gpus {
        print_rows(&gpus, "GPUs", [GPUS, PLATFORM_GPUS], arguments, &service, out)?
    } else {
        print_rows(&devices, "slices", [SLICES, PLATFORM_SLICES], arguments, &service, out)?
    };
    if takes_notes {
        if !arguments.gpus {
            print_sliceless(out, &gpus, &devices)?;
        }
        print_notes(out, &gpus, &service)?;
    }
    Ok(())
}

/// Prints rows in the chosen form. Returns true if notes should follow.
fn print_rows<R>(
    rows: &[Listed<R>],
    what: &str,
    [columns, of_the_platform]: [&[Column<R>]; 2],
    Arguments { form, no_headings, .. }: &Arguments,
    service: &Service,
    out: &mut dyn Write,
) -> Result<bool> {
    let plain = rows.iter().map(Deref::deref);
    if form.json {
        print_json(out, &rows)?;
    } else if form.names {
        // The first column of the table of slices, and of the table of GPUs, has the names.
        for name in plain.filter_map(|row| columns.first().map(|column| (column.text)(row))) {
            writeln!(out, "{name}")?;
        }
    } else if rows.is_empty() {
        if !no_headings {
            writeln!(out, "{}", prose(&format!("No {what}: {}", describe_state(service))))?;
        }
    } else if form.platform {
        writeln!(out, "{}", table_of(of_the_platform, plain, false).for_the_platform())?;
    } else {
        let table = table_of(columns, plain, form.output.is_some());
        writeln!(out, "{}", table.without_heads(*no_headings))?;
        return Ok(!no_headings);
    }
    Ok(false)
}

/// The address of the GPU with this UUID, which is also in the names of its slices. The UUID itself if the host does
/// not have the GPU now.
pub(super) fn gpu_name(uuid: &String, gpus: &[Listed<Gpu>]) -> String {
    let gpu = gpus.iter().find(|gpu| gpu.device_path.as_ref() == Some(uuid));
    gpu.map_or(uuid, |gpu| &gpu.addr).shown()
}

/// The rows of an answer. If the service does not know its GPUs yet, the error is the reason of the service's state.
fn known_now<R>(answer: Result<Vec<Listed<R>>, BusError>, service: &Service) -> Result<Vec<Listed<R>>> {
    match answer {
        Err(BusError::Refused(RequestError::NotReady(_))) => Err(Error::Failed(describe_state(service))),
        answer => Ok(answer?),
    }
}

/// Prints for each GPU the clients without a known slice, or all clients of the GPU if they can't be assigned to slices. If the
/// host has only one GPU, the GPU is not named.
fn print_sliceless(out: &mut dyn Write, gpus: &[Listed<Gpu>], devices: &[Listed<Device>]) -> io::Result<()> {
    let number = |clients: u32| counted(usize::try_from(clients).unwrap_or(usize::MAX), "client");
    for gpu in gpus {
        let said = match (sliceless(gpu, devices), gpu.clients.unwrap_or_default()) {
            (Some((0, _)), _) | (None, 0) => continue,
            (Some((clients, memory)), _) => {
                let memory = memory.map(|mib| format!("  {mib} MiB")).unwrap_or_default();
                format!("no slice  {}{memory}", number(clients))
            }
            (None, clients) => {
                format!("{clients}; yunion-mpsctl clients shows their slices", clients = number(clients))
            }
        };
        let name = if gpus.len() > 1 { format!("{}: ", gpu.addr.shown()) } else { String::new() };
        writeln!(out, "{name}{said}")?;
    }
    Ok(())
}

/// The number of clients of a GPU without a known slice, and their memory. None if the clients of slices are not known, as on
/// GPUs older than Volta.
fn sliceless(gpu: &Gpu, devices: &[Listed<Device>]) -> Option<(u32, Option<i64>)> {
    let slices = || devices.iter().filter(|device| device.pci_bdf == gpu.pci_bdf);
    let of_slices: u32 = slices().map(|slice| slice.clients).sum::<Option<u32>>()?;
    let in_slices: Option<i64> = slices().map(|slice| slice.memory_used.map(i64::from)).sum();
    let memory = gpu.memory_used.zip(in_slices).map(|(all, in_slices)| (i64::from(all) - in_slices).max(0));
    Some((gpu.clients?.saturating_sub(of_slices), memory))
}

/// Prints the reason of each GPU that is not served, once for all its slices, and the reason of the service's state
/// if the service has a problem of another kind.
pub(super) fn print_notes(out: &mut dyn Write, gpus: &[Listed<Gpu>], service: &Service) -> io::Result<()> {
    let mut notes = pairs();
    let with_reason = gpus.iter().filter(|gpu| !gpu.reason.is_empty());
    for gpu in with_reason.clone() {
        notes.add_row([gpu.addr.shown(), gpu.reason.shown()]);
    }
    if with_reason.count() > 0 {
        writeln!(out, "\n{notes}")?;
    }
    let is_explained = service.state == State::Ready || gpus.iter().any(|gpu| !gpu.healthy);
    if !is_explained {
        writeln!(out, "\n{}", prose(&format!("Note that {}", describe_state(service))))?;
    }
    Ok(())
}
