//! All differences between the series of NVIDIA's driver and between generations of GPUs, with the source of each fact. No
//! other module compares a driver's version or a compute capability.
//!
//! | | from driver | on GPUs from | source |
//! |---|---|---|---|
//! | [`LIMITS`] | any | Volta | NVIDIA's MPS documentation |
//! | [`MULTI_USER`] | 555 | Volta | driver: tests (535 and 550 refuse the option); GPU: the documentation |
//! | [`READ_ONLY_PIPE_DIRECTORY`] | 580 | Volta | tested on an H200 with 580.159.04, and with no older driver |
//! | [`LINKED_SOCKET`] | 580 | Volta | tested on an H200 with 580.159.04, and with no older driver |
//! | [`NVML_LISTS_CLIENTS`] | any | Volta | the documentation: before Volta, the server does the work of its clients |
//! | [`most_clients`]: 60 | 590 | Volta | the documentation: from CUDA 13.1 on |
//! | [`most_clients`]: 48 | any | Volta | the documentation, and the log of an H200 with 580.159.04 |
//! | [`most_clients`]: 16 | any | any | the documentation |
//! | [`control_daemon_arguments`] | any | any | tested with 555 and 580; 580 accepts two more spellings |
//! | [`LOG_FIFO`] | any | any | tested with 535, 550 and 555; with 580 only the existence of the FIFO |
//! | [`starts_control_daemon`] | any | any | tested with 535 to 580 |
//! | [`refuses_an_option`] | any | any | tested with 535, 550, 555 and 580; 535 and 550 do not name the option |
//! | [`fabric_is_not_ready`] | any | with `NVSwitch` | public reports, with the text of CUDA's error 802; not tested |
//! | [`is_unknown_command`] | any | any | tested with 535 to 580; 535 does not know `get_server_status` |
//! | [`VERSION_OPTION`] | 580 | any | tested with 580; 535 to 555 do not know this option |
//! | [`PROTOCOL`]: 2 | any | any | the documentation: from 615 on this environment variable takes precedence over options |
//! | [`process_record`]: 32 bytes | 535.43 to 535.86 | any | public reports; 535.98 again has the 24 bytes of `nvml.h` |
//! | the kernel's memory limits for control groups | 615 | unknown | the documentation and `nvml.h` of CUDA 13.4 |
//!
//! The following facts are known only from NVIDIA's documentation. The service was not tested with a driver after
//! [`NEWEST_TRIED`], and uses none of these facts:
//!
//! | | from driver | on GPUs from |
//! |---|---|---|
//! | static partitions of SMs | 590 | Ampere |
//! | faults of SMs usually stay in a static partition | 610 | Ampere |
//! | namespaces with their own limits (protocol 3) | 615 | Volta |

use std::ffi::OsString;

use nvml_calls::processes::{LONG_RECORD, RECORD};

/// A GPU's compute capability, major and minor. None if NVML does not report it: then the GPU counts as older than Volta.
pub type Capability = Option<(u32, u32)>;

/// The series of a driver version, such as 580 for 580.159.04. The series of an unknown version is 0, older than all others.
pub fn series(version: &str) -> u32 {
    version.split('.').next().and_then(|series| series.parse().ok()).unwrap_or(0)
}

#[derive(Debug, Clone, Copy)]
pub struct Since {
    pub series: u32,
    capability: (u32, u32),
}

impl Since {
    pub fn holds(self, series: u32, gpu: Capability) -> bool {
        series >= self.series && self.holds_on(gpu)
    }

    /// True if a GPU with this compute capability has the property with a new enough driver.
    pub fn holds_on(self, gpu: Capability) -> bool {
        gpu.unwrap_or(ANY_GPU) >= self.capability
    }
}

pub const NEWEST_TRIED: u32 = 580;

const ANY_DRIVER: u32 = 0;
const ANY_GPU: (u32, u32) = (0, 0);
const VOLTA: (u32, u32) = (7, 0);

/// The driver enforces the limits on memory and threads that the service sets through a control daemon.
pub const LIMITS: Since = Since { series: ANY_DRIVER, capability: VOLTA };

/// One server serves the clients of every user. The service starts the control daemon with the multi-user option. If the driver
/// refuses the option, the service starts the control daemon again without the option.
pub const MULTI_USER: Since = Since { series: 555, capability: VOLTA };

/// A client can use a control daemon without the right to write to the pipe directory.
pub const READ_ONLY_PIPE_DIRECTORY: Since = Since { series: 580, capability: VOLTA };

/// A client of a multi-user server needs only a hard link to the control daemon's socket, which can be in any directory. With
/// this property, a container does not need the host's /dev/shm.
pub const LINKED_SOCKET: Since = Since { series: 580, capability: VOLTA };

/// NVML lists the MPS clients on a GPU apart from the other processes. Without this property NVML's list of clients is always
/// empty, so an empty list does not mean that there are no clients.
pub const NVML_LISTS_CLIENTS: Since = Since { series: ANY_DRIVER, capability: VOLTA };

const CLIENTS_60: Since = Since { series: 590, capability: VOLTA };
const CLIENTS_48: Since = Since { series: ANY_DRIVER, capability: VOLTA };

pub fn most_clients(series: u32, gpu: Capability) -> u32 {
    if CLIENTS_60.holds(series, gpu) {
        60
    } else if CLIENTS_48.holds(series, gpu) {
        48
    } else {
        16
    }
}

/// The length in bytes of a process's record in the lists that NVML writes.
pub fn process_record(version: &str) -> usize {
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().ok());
    match (numbers.next().flatten(), numbers.next().flatten()) {
        (Some(535), Some(43..=86)) => LONG_RECORD,
        _ => RECORD,
    }
}

/// Every driver series with multi-user mode knows this option.
const MULTI_USER_OPTION: &str = "-multiuser-server";

const FOREGROUND: &str = "-f";
const BACKGROUND: &str = "-d";

pub fn control_daemon_arguments(multi_user: bool) -> Vec<&'static str> {
    [FOREGROUND].into_iter().chain(multi_user.then_some(MULTI_USER_OPTION)).collect()
}

/// The FIFO in the control daemon's pipe directory through which the servers send their log lines to the control daemon. If the
/// control daemon can't make the FIFO, neither the control daemon nor a server writes a log.
pub const LOG_FIFO: &str = "log";

/// True if `nvidia-cuda-mps-control` with these arguments starts a control daemon. With other arguments the program is a front
/// end, which sends a command to a control daemon.
pub fn starts_control_daemon(arguments: &[OsString]) -> bool {
    arguments.iter().any(|argument| argument == FOREGROUND || argument == BACKGROUND)
}

/// True if this output line of a control daemon says that the control daemon has ended because it does not know an option. Some
/// versions act as a front end after an unknown option, and print that they find no control daemon.
pub fn refuses_an_option(line: &str) -> bool {
    finds_no_control_daemon(line) || line.contains("Unrecognized option")
}

/// True if a server writes, with CUDA's error 802, that `NVSwitch` has not connected the GPUs yet.
pub fn fabric_is_not_ready(line: &str) -> bool {
    line.contains("system not yet initialized")
}

pub fn finds_no_control_daemon(said: &str) -> bool {
    said.contains("Cannot find MPS control daemon")
}

pub fn is_unknown_command(answer: &str) -> bool {
    answer.starts_with("Unknown command")
}

/// The environment variable that selects the protocol between a control daemon and a front end, and the value that the service
/// sets. Without the variable, a newer driver may use another protocol.
pub const PROTOCOL: (&str, &str) = ("CUDA_MPS_PROTOCOL_VERSION", "2");

/// With this option `nvidia-cuda-mps-control` prints its CUDA version and ends.
pub const VERSION_OPTION: &str = "-v";

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    #[test]
    fn a_series_is_the_first_number_of_a_version() {
        assert_eq!(series("580.159.04"), 580);
        assert_eq!(series("590.44"), 590);
        for unknown in ["", "unknown", "x.1"] {
            assert_eq!(series(unknown), 0, "{unknown:?}");
        }
    }

    #[test]
    fn some_drivers_of_one_series_write_longer_records() {
        for (version, record) in [
            ("535.43.02", LONG_RECORD),
            ("535.54.03", LONG_RECORD),
            ("535.86.10", LONG_RECORD),
            ("535.98", RECORD),
            ("535.104.05", RECORD),
            ("535.261.03", RECORD),
            ("530.43", RECORD),
            ("580.65.06", RECORD),
            ("535", RECORD),
            ("unknown", RECORD),
        ] {
            assert_eq!(process_record(version), record, "{version}");
        }
    }

    #[test]
    fn drivers_and_gpus_differ_so() {
        let mut listed = "driver GPU limits clients multi-user read-only linked NVML-lists\n".to_owned();
        let yes = |is: bool| if is { "yes" } else { "no" };
        for version in
            ["unknown", "535.261.03", "550.163.01", "555.58.02", "575.57.08", "580.159.04", "590.44.01"]
        {
            for gpu in [None, Some((6, 1)), Some((7, 0)), Some((9, 0))] {
                let driver = series(version);
                let name = gpu.map_or("unknown".to_owned(), |(major, minor)| format!("{major}.{minor}"));
                writeln!(
                    listed,
                    "{} {name} {} {} {} {} {} {}",
                    driver,
                    yes(LIMITS.holds(driver, gpu)),
                    most_clients(driver, gpu),
                    yes(MULTI_USER.holds(driver, gpu)),
                    yes(READ_ONLY_PIPE_DIRECTORY.holds(driver, gpu)),
                    yes(LINKED_SOCKET.holds(driver, gpu)),
                    yes(NVML_LISTS_CLIENTS.holds(driver, gpu)),
                )
                .unwrap();
            }
        }
        let mut golden = "driver GPU limits clients multi-user read-only linked NVML-lists\n".to_owned();
        for (driver, from_volta_on) in [
            (0, "yes 48 no no no yes"),
            (535, "yes 48 no no no yes"),
            (550, "yes 48 no no no yes"),
            (555, "yes 48 yes no no yes"),
            (575, "yes 48 yes no no yes"),
            (580, "yes 48 yes yes yes yes"),
            (590, "yes 60 yes yes yes yes"),
        ] {
            for older in ["unknown", "6.1"] {
                writeln!(golden, "{driver} {older} no 16 no no no no").unwrap();
            }
            for newer in ["7.0", "9.0"] {
                writeln!(golden, "{driver} {newer} {from_volta_on}").unwrap();
            }
        }
        assert_eq!(listed, golden);
    }

    #[test]
    fn options_are_spelt_so() {
        assert_eq!(control_daemon_arguments(false), ["-f"]);
        assert_eq!(control_daemon_arguments(true), ["-f", "-multiuser-server"]);
    }

    #[test]
    fn the_documents_name_the_same_series() {
        for (file, said) in [
            ("README.md", format!("Drivers before {} have no multi-user mode", MULTI_USER.series)),
            ("docs/cdi.md", format!("driver {} or newer", READ_ONLY_PIPE_DIRECTORY.series)),
            (
                "config/io.yunion.Mps1.Manager.xml",
                format!("driver {} or newer", READ_ONLY_PIPE_DIRECTORY.series),
            ),
        ] {
            let path = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(file);
            let text = std::fs::read_to_string(path).unwrap();
            let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(text.contains(&said), "{file} does not say: {said}");
        }
    }
}
