//! `yunion-mpsctl list`.

use std::io::{self, Write};

use clap::{Args, ValueEnum};

use crate::ctl::show::clients::state_in_words;
use crate::ctl::show::health::{Health, for_the_platform};
use crate::ctl::show::table::{Column, Shown, Table, pairs, printable, prose, table, table_of, with_unit};
use crate::ctl::{Error, print_json};
use crate::dbus::proxy::{BusError, DaemonProxy, Listed};
use crate::dbus::rows::{Device, Gpu, Service};

/// The answers to the questions of a person.
const DEVICES: [Column<Device>; 5] = [
    ("DEVICE", |device| device.addr.shown()),
    ("GPU", |device| device.model.shown()),
    ("MEMORY", |device| of_limit(device.memory_used, device.mps_memory_limit, " MiB")),
    ("SHARE", |device| with_unit(Some(device.mps_thread_percentage), "%")),
    ("CLIENTS", |device| of_limit(device.clients, device.max_clients, "")),
];

/// Behind all others, as the last column is never left out.
const DEVICE_HEALTH: Column<Device> = ("HEALTH", |device| Health::of_slice(device).word().to_owned());

/// More about the GPU of each slice.
const WIDE_DEVICES: [Column<Device>; 6] = [
    ("INDEX", |device| device.nvidia_index.shown()),
    ("NUMA", |device| device.numa_node.shown()),
    ("COMPUTE MODE", |device| device.compute_mode.shown()),
    ("UUID", |device| device.device_path.shown()),
    ("RENDER NODE", |device| device.render_node.shown()),
    ("PIPE DIRECTORY", |device| device.pipe_directory.shown()),
];

/// The heads are the platform's.
const PLATFORM_DEVICES: [Column<Device>; 10] = [
    ("Addr", |device| device.addr.shown()),
    ("Dev_type", |device| device.dev_type.shown()),
    ("Model", |device| device.model.shown()),
    ("Vendor_device_id", |device| device.vendor_device_id.shown()),
    ("numa_node", |device| device.numa_node.shown()),
    ("Device_path", |device| device.device_path.shown()),
    ("PCIE_Info", |device| device.pcie_info.shown()),
    ("Index", |device| device.index.shown()),
    ("Device_minor", |device| device.device_minor.shown()),
    ("Health", |device| for_the_platform(device.healthy, &device.reason)),
];

const PLATFORM_GPUS: [Column<Gpu>; 10] = [
    ("Addr", |gpu| gpu.addr.shown()),
    ("Dev_type", |gpu| gpu.dev_type.shown()),
    ("Sharing_mode", |gpu| gpu.sharing_mode.shown()),
    ("Virtual_num", |gpu| gpu.virtual_num.shown()),
    ("Model", |gpu| gpu.model.shown()),
    ("Vendor_device_id", |gpu| gpu.vendor_device_id.shown()),
    ("numa_node", |gpu| gpu.numa_node.shown()),
    ("Device_path", |gpu| gpu.device_path.shown()),
    ("PCIE_Info", |gpu| gpu.pcie_info.shown()),
    ("Health", |gpu| for_the_platform(gpu.healthy, &gpu.reason)),
];

#[derive(Debug, Args)]
pub(in crate::ctl) struct Arguments {
    /// List the GPUs instead of the virtual devices
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
    #[arg(short, long, value_name = "FORMAT", hide_possible_values = true)]
    output: Option<Output>,
    /// Print the table of the platform's command line, with its columns and borders
    #[arg(long)]
    platform: bool,
    /// Print the names alone, one a line
    #[arg(long)]
    names: bool,
    /// Print everything that the service publishes as a JSON array
    #[arg(long)]
    json: bool,
}

/// A form of a table that is not the usual one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Output {
    Wide,
}

pub(in crate::ctl) async fn list(
    daemon: &DaemonProxy,
    arguments: &Arguments,
    out: &mut dyn Write,
) -> Result<(), Error> {
    let service = daemon.service().await?;
    let gpus = known_now(daemon.gpus().await, &service)?;
    let devices = known_now(daemon.devices().await, &service)?;
    let Arguments { gpus: of_gpus, form, no_headings } = arguments;
    let empty = if *of_gpus { gpus.is_empty() } else { devices.is_empty() };
    if form.json {
        return if *of_gpus { print_json(out, &gpus) } else { print_json(out, &devices) };
    }
    if form.names {
        let names: Vec<String> =
            if *of_gpus { names(&gpus, |gpu| &gpu.addr) } else { names(&devices, |one| &one.addr) };
        for name in names {
            writeln!(out, "{name}")?;
        }
        return Ok(());
    }
    if empty {
        if !no_headings {
            let what = if *of_gpus { "GPUs" } else { "devices" };
            writeln!(out, "{}", prose(&format!("No {what}: {}", state_in_words(&service))))?;
        }
        return Ok(());
    }
    if form.platform {
        let table =
            if *of_gpus { table_of(&PLATFORM_GPUS, &gpus) } else { table_of(&PLATFORM_DEVICES, &devices) };
        writeln!(out, "{}", table.for_the_platform())?;
        return Ok(());
    }
    let wide = form.output == Some(Output::Wide);
    let table = if *of_gpus { gpu_table(&gpus, &devices, wide) } else { device_table(&devices, wide) };
    writeln!(out, "{}", table.without_heads(*no_headings))?;
    if !no_headings {
        print_notes(out, &gpus, &service)?;
    }
    Ok(())
}

/// The rows of an answer. Before the service knows its GPUs, its state says why.
fn known_now<R>(
    answer: Result<Vec<Listed<R>>, BusError>,
    service: &Service,
) -> Result<Vec<Listed<R>>, Error> {
    match answer {
        Err(error) if error.is("NotReady") => Err(Error::Failed(state_in_words(service))),
        answer => Ok(answer?),
    }
}

fn names<R>(rows: &[Listed<R>], name: fn(&R) -> &String) -> Vec<String> {
    rows.iter().map(|row| printable(name(row))).collect()
}

fn device_table(devices: &[Listed<Device>], wide: bool) -> Table {
    let wide = WIDE_DEVICES.into_iter().filter(|_| wide);
    let columns: Vec<Column<Device>> = DEVICES.into_iter().chain(wide).chain([DEVICE_HEALTH]).collect();
    let expendable =
        ["PIPE DIRECTORY", "RENDER NODE", "COMPUTE MODE", "NUMA", "INDEX", "UUID", "GPU", "SHARE"];
    table_of(&columns, devices).numbers(&["MEMORY", "SHARE", "CLIENTS"]).leave_out(&expendable)
}

/// The GPUs with the limits of their slices, and with all that the clients of their slices use.
pub(super) fn gpu_table(gpus: &[Listed<Gpu>], devices: &[Listed<Device>], wide: bool) -> Table {
    let mut heads = vec!["GPU", "MODEL", "SLICES", "IN USE", "CLIENTS"];
    if wide {
        heads.extend(["INDEX", "NUMA", "COMPUTE MODE", "CONFIRMED", "UUID", "RENDER NODE"]);
    }
    heads.push("HEALTH");
    let expendable = ["RENDER NODE", "UUID", "NUMA", "INDEX", "CONFIRMED", "COMPUTE MODE", "MODEL", "IN USE"];
    let mut table = table(&heads).numbers(&["IN USE", "CLIENTS"]).leave_out(&expendable);
    for gpu in gpus {
        let slices = || devices.iter().filter(|device| device.pci_bdf == gpu.pci_bdf);
        // Of slices that are not known the sum would be too small.
        let memory: Option<i64> = slices().map(|slice| slice.memory_used.map(i64::from)).sum();
        let clients: Option<u32> = slices().map(|slice| slice.clients).sum();
        let mut row =
            vec![gpu.addr.shown(), gpu.model.shown(), each(gpu), with_unit(memory, "MiB"), clients.shown()];
        if wide {
            row.extend([
                gpu.nvidia_index.shown(),
                gpu.numa_node.shown(),
                gpu.compute_mode.shown(),
                confirmed(gpu),
                gpu.device_path.shown(),
                gpu.render_node.shown(),
            ]);
        }
        row.push(Health::of_gpu(gpu).word().to_owned());
        table.add_row(row);
    }
    table
}

/// The number of slices, and the limits of each.
fn each(gpu: &Gpu) -> String {
    let memory = gpu.mps_memory_limit.map(|mib| format!("{mib} MiB, ")).unwrap_or_default();
    format!("{} of {memory}{} %", gpu.virtual_num, gpu.mps_thread_percentage)
}

/// The limits that the control daemon and its server have confirmed.
fn confirmed(gpu: &Gpu) -> String {
    let memory = gpu.confirmed_memory_limit.map(|mib| format!("{mib} MiB"));
    let threads = gpu.confirmed_thread_percentage.map(|percentage| format!("{percentage} %"));
    let known: Vec<String> = memory.into_iter().chain(threads).collect();
    if known.is_empty() { "-".to_owned() } else { known.join(", ") }
}

/// A number beside its limit: `580 / 35942 MiB`.
fn of_limit<N: ToString>(number: Option<N>, limit: Option<N>, unit: &str) -> String {
    let text = |number: Option<N>| number.map_or_else(|| "-".to_owned(), |number| number.to_string());
    match (number, limit) {
        (None, None) => "-".to_owned(),
        (number, limit) => format!("{} / {}{unit}", text(number), text(limit)),
    }
}

/// The reason of each GPU, once for all its slices. A service that is not well for another reason says so.
pub(super) fn print_notes(out: &mut dyn Write, gpus: &[Listed<Gpu>], service: &Service) -> io::Result<()> {
    let mut notes = pairs();
    let with_reason = gpus.iter().filter(|gpu| !gpu.reason.is_empty());
    for gpu in with_reason.clone() {
        notes.add_row([gpu.addr.shown(), gpu.reason.shown()]);
    }
    if with_reason.count() > 0 {
        writeln!(out, "\n{notes}")?;
    }
    let is_explained = service.state == "ready" || gpus.iter().any(|gpu| !gpu.healthy);
    if !is_explained {
        writeln!(out, "\n{}", prose(&format!("Note that {}", state_in_words(service))))?;
    }
    Ok(())
}
