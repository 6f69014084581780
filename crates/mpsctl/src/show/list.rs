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
    /// Print the table of isolated devices that the platform's command line prints, without the columns `ID` and `Host_id`,
    /// and with the column `Health` added
    #[arg(long)]
    platform: bool,
    /// Print the names alone, one a line
    #[arg(long)]
    names: bool,
    /// Print everything that the service publishes as a JSON array; the numbers of clients are the last that the service
    /// has counted
    #[arg(long)]
    json: bool,
}

pub(crate) async fn list(daemon: &DaemonProxy, arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let service = daemon.service().await?;
    let form = &arguments.form;
    // The service counts the clients again only for output that a person reads. Programs call this command more often, and can
    // ask for a count themselves.
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

/// Prints the rows in the form that the options name. Returns true if notes should follow the rows.
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
        // Both tables, of slices and of GPUs, have the names in the first column.
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

/// The address of the GPU with this UUID. The result is the UUID itself if the host does not have the GPU now.
pub(super) fn gpu_name(uuid: &String, gpus: &[Listed<Gpu>]) -> String {
    let gpu = gpus.iter().find(|gpu| gpu.device_path.as_ref() == Some(uuid));
    gpu.map_or(uuid, |gpu| &gpu.addr).shown()
}

/// If the service does not know its GPUs yet, the error describes the state of the service.
fn known_now<R>(answer: Result<Vec<Listed<R>>, BusError>, service: &Service) -> Result<Vec<Listed<R>>> {
    match answer {
        Err(BusError::Refused(RequestError::NotReady(_))) => Err(Error::Failed(describe_state(service))),
        answer => Ok(answer?),
    }
}

/// Prints for each GPU the number of clients without a known slice. If the service does not know the clients of each slice,
/// prints the number of all clients of the GPU. The GPU is named only on a host with several GPUs.
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

/// The number of a GPU's clients without a known slice, and their memory in MiB. None if the service does not know the clients
/// of each slice, as on GPUs before Volta.
fn sliceless(gpu: &Gpu, devices: &[Listed<Device>]) -> Option<(u32, Option<i64>)> {
    let slices = || devices.iter().filter(|device| device.pci_bdf == gpu.pci_bdf);
    let of_slices: u32 = slices().map(|slice| slice.clients).sum::<Option<u32>>()?;
    let in_slices: Option<i64> = slices().map(|slice| slice.memory_used.map(i64::from)).sum();
    let memory = gpu.memory_used.zip(in_slices).map(|(all, in_slices)| (i64::from(all) - in_slices).max(0));
    Some((gpu.clients?.saturating_sub(of_slices), memory))
}

/// Prints the reason of each GPU that is not served, once for all slices of the GPU. If all GPUs are served but the service is
/// not ready, prints the reason of the service's state.
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
