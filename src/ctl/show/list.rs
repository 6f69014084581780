//! `yunion-mpsctl list`.

use std::io::Write;

use clap::Args;

use crate::ctl::show::clients::state_in_words;
use crate::ctl::show::table::{Column, Shown, health, table_of};
use crate::ctl::{Error, print_json};
use crate::dbus::proxy::{DaemonProxy, Listed};
use crate::dbus::rows::{Device, Gpu};

/// The heads are the platform's.
const DEVICES: [Column<Device>; 10] = [
    ("Addr", |device| device.addr.shown()),
    ("Dev_type", |device| device.dev_type.shown()),
    ("Model", |device| device.model.shown()),
    ("Vendor_device_id", |device| device.vendor_device_id.shown()),
    ("numa_node", |device| device.numa_node.shown()),
    ("Device_path", |device| device.device_path.shown()),
    ("PCIE_Info", |device| device.pcie_info.shown()),
    ("Index", |device| device.index.shown()),
    ("Device_minor", |device| device.device_minor.shown()),
    ("Health", |device| health(device.healthy, &device.reason)),
];

const GPUS: [Column<Gpu>; 10] = [
    ("Addr", |gpu| gpu.addr.shown()),
    ("Dev_type", |gpu| gpu.dev_type.shown()),
    ("Sharing_mode", |gpu| gpu.sharing_mode.shown()),
    ("Virtual_num", |gpu| gpu.virtual_num.shown()),
    ("Model", |gpu| gpu.model.shown()),
    ("Vendor_device_id", |gpu| gpu.vendor_device_id.shown()),
    ("numa_node", |gpu| gpu.numa_node.shown()),
    ("Device_path", |gpu| gpu.device_path.shown()),
    ("PCIE_Info", |gpu| gpu.pcie_info.shown()),
    ("Health", |gpu| health(gpu.healthy, &gpu.reason)),
];

/// Columns that a narrow terminal does without: the ones with the same text in every row first.
const EXPENDABLE: [&str; 9] = [
    "PCIE_Info",
    "Index",
    "Device_minor",
    "Dev_type",
    "Sharing_mode",
    "numa_node",
    "Vendor_device_id",
    "Device_path",
    "Model",
];

#[derive(Debug, Args)]
pub(in crate::ctl) struct Arguments {
    /// List the GPUs instead of the virtual devices
    #[arg(long)]
    gpus: bool,
    /// Print everything that the daemon publishes as a JSON array
    #[arg(long)]
    json: bool,
}

pub(in crate::ctl) async fn list(
    daemon: &DaemonProxy,
    arguments: &Arguments,
    out: &mut dyn Write,
) -> Result<(), Error> {
    let empty = if arguments.gpus {
        show(&daemon.gpus().await?, &GPUS, arguments.json, out)?.then_some("GPUs")
    } else {
        show(&daemon.devices().await?, &DEVICES, arguments.json, out)?.then_some("devices")
    };
    if let Some(empty) = empty {
        writeln!(out, "No {empty}: {}", state_in_words(&*daemon.service().await?))?;
    }
    Ok(())
}

/// Shows the rows. True: there are none, and nothing was written.
fn show<R>(
    rows: &[Listed<R>],
    columns: &[Column<R>],
    json: bool,
    out: &mut dyn Write,
) -> Result<bool, Error> {
    if json {
        print_json(out, &rows)?;
    } else if !rows.is_empty() {
        writeln!(out, "{}", table_of(columns, rows).leave_out(&EXPENDABLE))?;
    }
    Ok(rows.is_empty() && !json)
}
