//! `yunion-mpsctl list`.

use std::io::Write;

use clap::Args;
use serde_json::Value;

use crate::ctl::show::table::{cell, health, printable, table};
use crate::ctl::{Error, print_json};
use crate::dbus::proxy::{Client, Object};

/// Column heads as the platform has them, and the keys that they show.
const DEVICES: [(&str, &str); 9] = [
    ("Addr", "addr"),
    ("Dev_type", "dev_type"),
    ("Model", "model"),
    ("Vendor_device_id", "vendor_device_id"),
    ("numa_node", "numa_node"),
    ("Device_path", "device_path"),
    ("PCIE_Info", "pcie_info"),
    ("Index", "index"),
    ("Device_minor", "device_minor"),
];

const GPUS: [(&str, &str); 9] = [
    ("Addr", "addr"),
    ("Dev_type", "dev_type"),
    ("Sharing_mode", "sharing_mode"),
    ("Virtual_num", "virtual_num"),
    ("Model", "model"),
    ("Vendor_device_id", "vendor_device_id"),
    ("numa_node", "numa_node"),
    ("Device_path", "device_path"),
    ("PCIE_Info", "pcie_info"),
];

/// What a narrow terminal does without: what is the same everywhere first.
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
    /// One line for each GPU instead of each virtual device
    #[arg(long)]
    gpus: bool,
    /// Everything the daemon publishes, as a JSON array
    #[arg(long)]
    json: bool,
}

pub(in crate::ctl) async fn list(
    client: &Client,
    arguments: &Arguments,
    out: &mut dyn Write,
) -> Result<(), Error> {
    let (objects, columns) =
        if arguments.gpus { (client.gpus().await?, &GPUS) } else { (client.devices().await?, &DEVICES) };
    if arguments.json {
        return print_json(out, &objects);
    }
    if objects.is_empty() {
        let what = if arguments.gpus { "GPUs" } else { "devices" };
        writeln!(out, "No {what}: {}", why_none(&client.service().await?))?;
        return Ok(());
    }
    let heads: Vec<&str> = columns.iter().map(|(head, _)| *head).chain(["Health"]).collect();
    let mut table = table(&heads).leave_out(&EXPENDABLE);
    for object in &objects {
        table.add_row(columns.iter().map(|(_, key)| cell(object, key)).chain([health(object)]));
    }
    writeln!(out, "{table}")?;
    Ok(())
}

/// An empty list in words.
fn why_none(service: &Object) -> String {
    let text = |key| service.get(key).and_then(Value::as_str).map(printable).unwrap_or_default();
    match (text("state"), text("state_reason")) {
        (state, reason) if reason.is_empty() => format!("the service is {state}."),
        (state, reason) => format!("the service is {state}: {reason}"),
    }
}
