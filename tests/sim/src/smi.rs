//! The simulated nvidia-smi. Its only options are `--query-gpu=FIELDS --format=csv[,noheader][,nounits]` and `-i GPU -c MODE`.

use std::io::Write;

use crate::state::{COMPUTE_MODES, Gpu, Host, Pci, code};

/// Sets the compute mode of a GPU.
///
/// # Errors
/// The error is NVML's return code.
pub fn set_compute_mode(gpu: &Gpu, mode: &str) -> Result<(), u32> {
    if gpu.text("no-permission").is_some() {
        return Err(code::NO_PERMISSION);
    }
    gpu.write("compute_mode", mode).map_err(|_| code::NO_PERMISSION)
}

/// Runs nvidia-smi with these arguments, and returns the exit status.
///
/// # Errors
/// The output can't be written.
pub fn run(arguments: &[String], out: &mut dyn Write) -> std::io::Result<u8> {
    let Ok(host) = Host::from_env() else {
        writeln!(out, "{} is not set; yunion-mps-sim create prints it", crate::state::ENV)?;
        return Ok(1);
    };
    if host.driver().is_none() {
        let text = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that \
                    the latest NVIDIA driver is installed and running.";
        writeln!(out, "{text}\n")?;
        return Ok(9);
    }
    let mut fields = None;
    let mut format = String::new();
    let mut wanted = None;
    let mut mode = None;
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let (name, value) = match argument.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (argument.as_str(), None),
        };
        let mut value = || value.clone().or_else(|| rest.next().cloned());
        match name {
            "--query-gpu" => fields = value(),
            "--format" => format = value().unwrap_or_default(),
            "-i" | "--id" => wanted = value(),
            "-c" | "--compute-mode" => mode = value(),
            _ => {
                writeln!(
                    out,
                    "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n"
                )?;
                return Ok(2);
            }
        }
    }
    let gpus: Vec<Gpu> = host.gpus().into_iter().filter(|gpu| is_wanted(gpu, wanted.as_deref())).collect();
    if gpus.is_empty() {
        writeln!(out, "No devices were found")?;
        return Ok(6);
    }
    match (mode, fields) {
        (Some(mode), None) => set_modes(&gpus, &mode, out),
        (None, Some(fields)) => query(&host, &gpus, &fields, &format, out),
        _ => {
            writeln!(out, "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n")?;
            Ok(2)
        }
    }
}

fn is_wanted(gpu: &Gpu, wanted: Option<&str>) -> bool {
    wanted.is_none_or(|wanted| {
        wanted.split(',').any(|one| {
            one == gpu.index.to_string() || one == gpu.uuid() || Pci::parse(one) == Some(gpu.pci())
        })
    })
}

fn set_modes(gpus: &[Gpu], mode: &str, out: &mut dyn Write) -> std::io::Result<u8> {
    let named = COMPUTE_MODES
        .iter()
        .enumerate()
        .find(|(number, name)| mode == number.to_string() || mode.to_uppercase() == name.to_uppercase());
    let Some((_, mode)) = named else {
        writeln!(out, "Invalid compute mode: {mode}")?;
        return Ok(2);
    };
    for gpu in gpus {
        let was = gpu.compute_mode();
        let address = gpu.pci().nvml();
        if gpu.lost() {
            writeln!(out, "Unable to set the compute mode for GPU {address}: GPU is lost")?;
            return Ok(15);
        }
        if let Err(code) = set_compute_mode(gpu, mode) {
            writeln!(out, "Unable to set the compute mode for GPU {address}: Insufficient Permissions")?;
            return Ok(u8::try_from(code).unwrap_or(1));
        }
        if was == *mode {
            writeln!(out, "Compute mode is already set to {} for GPU {address}.", mode.to_uppercase())?;
        } else {
            writeln!(out, "Set compute mode to {} for GPU {address}.", mode.to_uppercase())?;
        }
    }
    writeln!(out, "All done.")?;
    Ok(0)
}

fn query(host: &Host, gpus: &[Gpu], fields: &str, format: &str, out: &mut dyn Write) -> std::io::Result<u8> {
    let has = |option: &str| format.split(',').any(|one| one == option);
    let units = !has("nounits");
    let mut heads = Vec::new();
    for field in fields.split(',').map(str::trim) {
        let Some(head) = head(field) else {
            writeln!(out, "Field \"{field}\" is not a valid field to query.\n")?;
            return Ok(2);
        };
        heads.push(head);
    }
    if !has("noheader") {
        let names = heads.iter().map(|name| match *name {
            memory if units && memory.starts_with("memory.") => format!("{memory} [MiB]"),
            name => name.to_owned(),
        });
        writeln!(out, "{}", names.collect::<Vec<_>>().join(", "))?;
    }
    for gpu in gpus {
        let values: Vec<String> = heads.iter().map(|name| value(host, gpu, name, units)).collect();
        writeln!(out, "{}", values.join(", "))?;
    }
    Ok(0)
}

/// Returns the name by which the first line of nvidia-smi's output shows a field. `field` may be an alias of this name.
fn head(field: &str) -> Option<&'static str> {
    Some(match field {
        "index" => "index",
        "uuid" | "gpu_uuid" => "uuid",
        "name" | "gpu_name" => "name",
        "pci.bus_id" | "gpu_bus_id" => "pci.bus_id",
        "memory.total" => "memory.total",
        "memory.used" => "memory.used",
        "compute_mode" => "compute_mode",
        "compute_cap" => "compute_cap",
        "pcie.link.gen.max" => "pcie.link.gen.max",
        "pcie.link.width.max" => "pcie.link.width.max",
        "pcie.link.gen.current" => "pcie.link.gen.current",
        "pcie.link.width.current" => "pcie.link.width.current",
        "persistence_mode" => "persistence_mode",
        "mig.mode.current" => "mig.mode.current",
        "driver_version" => "driver_version",
        _ => return None,
    })
}

fn value(host: &Host, gpu: &Gpu, field: &str, units: bool) -> String {
    let or_na = |text: Option<String>| text.unwrap_or_else(|| "[N/A]".to_owned());
    let mib =
        |mib: Option<u64>| or_na(mib.map(|mib| if units { format!("{mib} MiB") } else { mib.to_string() }));
    if gpu.lost() && !matches!(field, "index" | "driver_version") {
        return "[GPU is lost]".to_owned();
    }
    match field {
        "index" => gpu.index.to_string(),
        "uuid" => gpu.uuid(),
        "name" => gpu.name(),
        "pci.bus_id" => gpu.pci().nvml(),
        "memory.total" => mib(gpu.number("memory_total_mib")),
        "memory.used" => mib(Some(gpu.processes().values().map(|(_, mib)| mib).sum())),
        "compute_mode" => gpu.compute_mode(),
        "compute_cap" => or_na(gpu.text("compute_capability")),
        "pcie.link.gen.max" | "pcie.link.gen.current" => or_na(gpu.text("link_gen")),
        "pcie.link.width.max" | "pcie.link.width.current" => or_na(gpu.text("link_width")),
        "persistence_mode" => or_na(gpu.text("persistence_mode")),
        "mig.mode.current" => or_na(gpu.text("mig")),
        _ => host.driver().unwrap_or_default(),
    }
}
