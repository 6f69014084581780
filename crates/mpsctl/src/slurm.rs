//! The slices in Slurm: `yunion-mpsctl slurm`, and the slices that Slurm has given to a job.
//!
//! Slurm numbers the lines of gres.conf, and tells a job only the numbers of its lines. So each printed line has the name of
//! its slice in a comment, and `run --slurm` looks up the numbers of a job in the file with these lines. A number then means
//! the same slice until Slurm reads new lines, even after a change of the configuration.

use std::collections::BTreeMap;
use std::env;
use std::io::Write;
use std::path::Path;

use crate::Result;
use crate::screen::say;
use crate::show::health::describe_state;
use common::bus::proxy::{DaemonProxy, Listed};
use common::bus::rows::Device;
use common::host::{control_groups, regular_file};
use common::problem::Problem;
use common::published::snapshot::State;
use common::text::printable;

/// The file in which an administrator stores the output of `yunion-mpsctl slurm`.
const FILE: &str = "/etc/yunion/gres.conf";
/// The most bytes of the file that are read. Each line has about 150 bytes, and a host has at most a thousand slices.
const FILE_MAX: u64 = 1 << 20;

/// The environment variables in which Slurm stores the numbers of slices. A step may have fewer slices than its job, so the
/// variable of the step comes first.
const GIVEN: [&str; 2] = ["SLURM_STEP_GPUS", "SLURM_JOB_GPUS"];

const MIB_IN_GIB: i32 = 1024;

pub(super) async fn slurm(daemon: &DaemonProxy, out: &mut dyn Write) -> Result<()> {
    let service = daemon.service().await?;
    let devices = daemon.devices().await?;
    if service.state != State::Ready {
        let state = describe_state(&service);
        say(&format!(
            "warning: the output may lack some GPUs; run yunion-mpsctl slurm again when every GPU is \
             served: {state}"
        ));
    }
    write!(out, "{}", gres_conf(&devices)?)?;
    Ok(())
}

/// The lines for gres.conf. The comments in front of these lines contain the lines for slurm.conf.
fn gres_conf(devices: &[Listed<Device>]) -> Result<String, Problem> {
    // Slurm numbers all slices of a type before the slices of the next type, in the order of the types in slurm.conf. Within a
    // type, Slurm numbers the slices in the order of gres.conf. So the lines are grouped by type, in the order of `Gres=`
    // for slurm.conf. The number of a slice is then the place of its line.
    let mut kinds: BTreeMap<String, Vec<(u32, &Device)>> = BTreeMap::new();
    // A slice that can't be served, for example on a GPU in MIG mode, is omitted: a job with this slice would fail.
    for device in devices.iter().filter(|device| device.servable) {
        let unknown = || {
            format!(
                "the device file (/dev/nvidiaN) of the GPU of slice {addr} is not known",
                addr = printable(&device.addr)
            )
        };
        let minor = device.nvidia_minor.ok_or_else(unknown)?;
        kinds.entry(kind(device)).or_default().push((minor, device));
    }
    if kinds.is_empty() {
        return Err("no slice of this host can be served, so gres.conf gets no lines".into());
    }
    let mut lines = String::new();
    for (kind, slices) in &mut kinds {
        slices.sort_by_key(|(minor, device)| (*minor, device.ordinal));
        for (minor, device) in slices {
            // Slurm accepts the same device file twice only in `MultipleFiles`, which is for parts of a GPU. `MultipleFiles`
            // needs at least two file names.
            let (file, name) = (format!("/dev/nvidia{minor}"), printable(&device.addr));
            lines += &format!("Name=gpu Type={kind} MultipleFiles={file},{file} Flags=no_gpu_env # {name}\n");
        }
    }
    let gres: Vec<String> =
        kinds.iter().map(|(kind, slices)| format!("gpu:{kind}:{}", slices.len())).collect();
    Ok(format!(
        "# The slices of this host as GPUs of Slurm, written by `yunion-mpsctl slurm`.\n\
         # Slurm tells a job only the numbers of its slices. So keep the order of the lines below, and of the \
         types in Gres=.\n\
         # Slurm's gres.conf: include {FILE}\n\
         # slurm.conf: GresTypes=gpu\n\
         # slurm.conf: NodeName=... Gres={}\n{lines}",
        gres.join(",")
    ))
}

/// The type of a slice in Slurm, from the model and the memory: `h200_sxm_141gb.35gb`.
fn kind(device: &Device) -> String {
    let model = device.model.as_deref().or(device.nvidia_name.as_deref()).unwrap_or("gpu");
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' };
    let model: String = model.chars().map(plain).collect();
    match device.mps_memory_limit {
        Some(mib) => format!("{model}.{}gb", mib / MIB_IN_GIB),
        None => model,
    }
}

/// The beginning of the name of a Slurm job's control group. The number of the job follows.
const JOB: &str = "job_";

/// The control group of the Slurm job that contains this process, and a name of the job for people. A Prolog script of Slurm
/// starts this process inside the job. None if Slurm has given the job no slice: most jobs need no GPU, and may run on hosts
/// where no job can be bound to slices.
pub(super) fn job() -> Result<Option<(String, String)>, Problem> {
    if numbers().is_none() {
        return Ok(None);
    }
    let path = control_groups::path_of(std::process::id())
        .map_err(|error| format!("the control group of this process is not known: {error}"))?;
    let (control_group, number) = job_of(&path).ok_or_else(|| {
        format!(
            "this process is in control group {path}, which does not belong to a job: set \
             PrologFlags=RunInJob in slurm.conf (Slurm 24.11 and newer), which runs the Prolog inside the \
             job, and use cgroup v2, which gives the job a control group"
        )
    })?;
    Ok(Some((control_group.to_owned(), format!("job {number}"))))
}

/// The control group and the number of a Slurm job. The control group of this job contains the control group `path`.
fn job_of(path: &str) -> Option<(&str, &str)> {
    let (before, from) = path.split_at(path.find(&format!("/{JOB}"))? + 1);
    let name = from.split('/').next()?;
    let number = name.strip_prefix(JOB).filter(|number| number.bytes().all(|byte| byte.is_ascii_digit()))?;
    Some((path.get(..before.len() + name.len())?, number))
}

/// None if Slurm has given no slice to the step or the job of this process.
fn numbers() -> Option<String> {
    GIVEN.iter().find_map(|name| env::var(name).ok().filter(|numbers| !numbers.is_empty()))
}

/// The names of the slices that Slurm has given to the step or the job of this process.
pub(super) fn given() -> Result<Vec<String>, Problem> {
    let numbers = numbers().ok_or_else(|| {
        let found = format!(
            "Slurm has given no slice to this step: neither {variables} is set",
            variables = GIVEN.join(" nor ")
        );
        Problem::new(found, "ask Slurm for a slice with --gres=gpu:1")
    })?;
    let file = Path::new(FILE);
    let lines = regular_file::read(file, FILE_MAX).map_err(|error| {
        let remedy = format!("write the file as root: yunion-mpsctl slurm >{FILE}");
        Problem::new(format!("{FILE} {error}"), remedy)
    })?;
    named(&numbers, &String::from_utf8_lossy(&lines))
}

/// Finds the names of the slices with these numbers in the comments of gres.conf.
fn named(numbers: &str, lines: &str) -> Result<Vec<String>, Problem> {
    let lines: Vec<&str> =
        lines.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    let name = |number: &str| {
        let line = number.trim().parse().ok().and_then(|place: usize| lines.get(place));
        let line = line.ok_or_else(|| {
            format!(
                "Slurm has given GPU number {number:?}, but {FILE} has only {count} lines; write the file \
                 again as root: yunion-mpsctl slurm >{FILE}",
                count = lines.len()
            )
        })?;
        let name = line.rsplit_once('#').map(|(_, name)| name.trim()).filter(|name| !name.is_empty());
        name.map(str::to_owned).ok_or_else(|| {
            format!(
                "{FILE}: the line {line:?} does not end with # and the name of a slice; write the file again \
                 as root: yunion-mpsctl slurm >{FILE}"
            )
            .into()
        })
    };
    numbers.split(',').map(name).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn device(addr: &str, minor: impl Into<Value>, ordinal: u32, model: &str, mib: i32) -> Listed<Device> {
        let Value::Object(row) = json!({
            "addr": addr, "nvidia_minor": minor.into(), "ordinal": ordinal, "model": model, "mps_memory_limit": mib,
            "servable": !model.ends_with("in MIG mode"),
        }) else {
            panic!()
        };
        Listed::read(row).unwrap()
    }

    #[test]
    fn a_line_for_each_slice_type_by_type_in_the_order_of_the_device_files() {
        let devices = [
            device("07:00.0-1", 10, 1, "H200 SXM 141GB", 35942),
            device("07:00.0-0", 10, 0, "H200 SXM 141GB", 35942),
            device("08:00.0-0", 2, 0, "Tesla P40\n#,:", 24576),
            device("09:00.0-0", 1, 0, "H200 SXM 141GB", 35942),
            device("0a:00.0-0", 3, 0, "H200 in MIG mode", 35942),
        ];
        let text = gres_conf(&devices).unwrap();
        let (comments, lines): (Vec<&str>, Vec<&str>) = text.lines().partition(|line| line.starts_with('#'));
        assert_eq!(
            lines,
            [
                "Name=gpu Type=h200_sxm_141gb.35gb MultipleFiles=/dev/nvidia1,/dev/nvidia1 Flags=no_gpu_env # 09:00.0-0",
                "Name=gpu Type=h200_sxm_141gb.35gb MultipleFiles=/dev/nvidia10,/dev/nvidia10 Flags=no_gpu_env # 07:00.0-0",
                "Name=gpu Type=h200_sxm_141gb.35gb MultipleFiles=/dev/nvidia10,/dev/nvidia10 Flags=no_gpu_env # 07:00.0-1",
                "Name=gpu Type=tesla_p40____.24gb MultipleFiles=/dev/nvidia2,/dev/nvidia2 Flags=no_gpu_env # 08:00.0-0",
            ]
        );
        assert_eq!(
            comments.last(),
            Some(&"# slurm.conf: NodeName=... Gres=gpu:h200_sxm_141gb.35gb:3,gpu:tesla_p40____.24gb:1")
        );
        assert_eq!(named("2,0", &text).unwrap(), ["07:00.0-1", "09:00.0-0"]);
    }

    #[test]
    fn a_job_has_a_control_group() {
        let job = "/system.slice/slurmstepd.scope/job_7";
        for below in ["", "/step_extern", "/step_extern/user/task_special", "/step_0/job_8"] {
            assert_eq!(job_of(&format!("{job}{below}")), Some((job, "7")), "{below}");
        }
        for none in ["/", "/system.slice/slurmd.service", "/job_x/step_0", "/a_job_7"] {
            assert_eq!(job_of(none), None, "{none}");
        }
    }

    #[test]
    fn nothing_is_guessed() {
        assert_eq!(
            gres_conf(&[]).unwrap_err(),
            "no slice of this host can be served, so gres.conf gets no lines".into()
        );
        let unknown = device("07:00.0-0", Value::Null, 0, "H200", 1);
        assert_eq!(
            gres_conf(&[unknown]).unwrap_err(),
            "the device file (/dev/nvidiaN) of the GPU of slice 07:00.0-0 is not known".into()
        );
        let lines = "# a comment\n\n Name=gpu # 00:06.0-0\nName=gpu\nName=gpu #\n";
        assert_eq!(named("0", lines).unwrap(), ["00:06.0-0"]);
        for (number, complaint) in [
            (
                "1",
                "/etc/yunion/gres.conf: the line \"Name=gpu\" does not end with # and the name of a slice; \
                 write the file again as root: yunion-mpsctl slurm >/etc/yunion/gres.conf",
            ),
            (
                "2",
                "/etc/yunion/gres.conf: the line \"Name=gpu #\" does not end with # and the name of a slice; \
                 write the file again as root: yunion-mpsctl slurm >/etc/yunion/gres.conf",
            ),
            (
                "3",
                "Slurm has given GPU number \"3\", but /etc/yunion/gres.conf has only 3 lines; write the \
                 file again as root: yunion-mpsctl slurm >/etc/yunion/gres.conf",
            ),
            (
                "0,-1",
                "Slurm has given GPU number \"-1\", but /etc/yunion/gres.conf has only 3 lines; write the \
                 file again as root: yunion-mpsctl slurm >/etc/yunion/gres.conf",
            ),
            (
                "x",
                "Slurm has given GPU number \"x\", but /etc/yunion/gres.conf has only 3 lines; write the \
                 file again as root: yunion-mpsctl slurm >/etc/yunion/gres.conf",
            ),
        ] {
            assert_eq!(named(number, lines).unwrap_err(), complaint.into());
        }
    }
}
