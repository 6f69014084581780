//! The columns of all tables of slices, GPUs, control daemons and clients.

use std::cmp::Ordering;

use crate::show::health::{Health, for_the_platform, tone_of_daemon};
use crate::show::table::{Head, Shown, Table, Tone, with_unit};
use crate::show::time;
use common::bus::rows::{Client, ControlDaemon, Device, Gpu};
use common::text::printable;
use mps_core::register::SHORT_ID;

/// The number of hexadecimal digits of a container's id.
const ID: usize = 64;

const BAR: i32 = 10;

pub(crate) struct Column<R> {
    pub(crate) head: Head,
    pub(crate) text: fn(&R) -> String,
    pub(crate) tone: fn(&R) -> Option<Tone>,
    /// The order of the rows when `top` sorts by this column.
    pub(crate) order: fn(&R, &R) -> Ordering,
    /// True if only `-o wide` shows the column.
    is_wide: bool,
}

impl<R> Column<R> {
    const fn new(name: &'static str, text: fn(&R) -> String) -> Self {
        let head = Head { name, is_number: false, ends: false, expendable: 0 };
        Self { head, text, tone: |_| None, order: |_, _| Ordering::Equal, is_wide: false }
    }

    const fn number(self) -> Self {
        Self { head: Head { is_number: true, ..self.head }, ..self }
    }

    const fn ends(self) -> Self {
        Self { head: Head { ends: true, ..self.head }, ..self }
    }

    const fn expendable(self, expendable: u8) -> Self {
        Self { head: Head { expendable, ..self.head }, ..self }
    }

    const fn wide(self) -> Self {
        Self { is_wide: true, ..self }
    }

    const fn order(self, order: fn(&R, &R) -> Ordering) -> Self {
        Self { order, ..self }
    }

    const fn toned(self, tone: fn(&R) -> Option<Tone>) -> Self {
        Self { tone, ..self }
    }
}

pub(crate) fn table_of<'r, R: 'r>(
    columns: &[Column<R>],
    rows: impl IntoIterator<Item = &'r R>,
    wide: bool,
) -> Table {
    let columns: Vec<&Column<R>> = columns.iter().filter(|column| wide || !column.is_wide).collect();
    let mut table = Table::new(columns.iter().map(|column| column.head));
    for row in rows {
        table.add_toned_row(columns.iter().map(|column| ((column.text)(row), (column.tone)(row))));
    }
    table
}

type OfSlice = Column<Device>;
type OfGpu = Column<Gpu>;
type OfDaemon = Column<ControlDaemon>;
type OfClient = Column<Client>;

// Several tables share the following columns. SLICE needs no `order`: sorting by SLICE keeps the order in which the service
// lists the slices, which is the order of the configuration.
const SLICE: Column<Device> = OfSlice::new("SLICE", |one| one.addr.shown());
const SHARE: Column<Device> = OfSlice::new("SHARE", |one| with_unit(Some(one.mps_thread_percentage), "%"))
    .number()
    .expendable(1)
    .order(|a, b| b.mps_thread_percentage.cmp(&a.mps_thread_percentage));
const PID: Column<Client> =
    OfClient::new("PID", |one| one.pid.shown()).number().order(|a, b| a.pid.cmp(&b.pid));
const USER: Column<Client> =
    OfClient::new("USER", |one| one.user.shown()).expendable(1).order(|a, b| a.user.cmp(&b.user));
const COMMAND: Column<Client> =
    OfClient::new("COMMAND", |one| one.command.shown()).ends().order(|a, b| a.command.cmp(&b.command));
const MEMORY: Column<Client> = OfClient::new("MEMORY", |one| with_unit(one.memory_mib, "MiB"))
    .number()
    .order(|a, b| b.memory_mib.cmp(&a.memory_mib));
/// The oldest client comes first, and clients of unknown age come last.
const AGE: Column<Client> =
    OfClient::new("AGE", |one| one.since.map(|since| time::age(time::from_seconds(since))).shown())
        .expendable(2)
        .order(|a, b| a.since.unwrap_or(i64::MAX).cmp(&b.since.unwrap_or(i64::MAX)));
const CONTAINER: Column<Client> = OfClient::new("CONTAINER", |one| short_id(one).shown())
    .expendable(3)
    .order(|a, b| a.container_id.cmp(&b.container_id));
const GUEST: Column<Client> = OfClient::new("GUEST", guest_and_container)
    .expendable(2)
    .order(|a, b| (&a.guest, &a.container).cmp(&(&b.guest, &b.container)));

/// The columns of `list`.
pub(crate) const SLICES: &[Column<Device>] = &[
    SLICE,
    OfSlice::new("GPU", |one| one.model.shown()).expendable(2),
    OfSlice::new("MEMORY", |one| of_limit(one.memory_used, one.mps_memory_limit, " MiB")).number(),
    SHARE,
    OfSlice::new("CLIENTS", |one| of_limit(one.clients, one.max_clients, "")).number(),
    OfSlice::new("BOUND TO", |one| short_ids(&one.bound_to).shown()).expendable(1).wide(),
    OfSlice::new("INDEX", |one| one.nvidia_index.shown()).expendable(4).wide(),
    OfSlice::new("NUMA", |one| one.numa_node.shown()).expendable(5).wide(),
    OfSlice::new("COMPUTE MODE", |one| one.compute_mode.shown()).expendable(6).wide(),
    OfSlice::new("UUID", |one| one.device_path.shown()).expendable(3).wide(),
    OfSlice::new("RENDER NODE", |one| one.render_node.shown()).expendable(7).wide(),
    OfSlice::new("PIPE DIRECTORY", |one| one.pipe_directory.shown()).expendable(8).wide(),
    OfSlice::new("HEALTH", health).toned(|one| Some(Health::of_slice(one).tone())),
];

/// The columns of `list --gpus`, and of the GPUs in `status`.
pub(crate) const GPUS: &[Column<Gpu>] = &[
    OfGpu::new("GPU", |one| one.addr.shown()),
    OfGpu::new("MODEL", |one| one.model.shown()).expendable(2),
    OfGpu::new("SLICES", each),
    OfGpu::new("IN USE", |one| with_unit(one.memory_used, "MiB")).number().expendable(1),
    OfGpu::new("CLIENTS", |one| of_limit(one.clients, one.max_clients, "")).number(),
    OfGpu::new("INDEX", |one| one.nvidia_index.shown()).expendable(5).wide(),
    OfGpu::new("NUMA", |one| one.numa_node.shown()).expendable(6).wide(),
    OfGpu::new("COMPUTE MODE", |one| one.compute_mode.shown()).expendable(3).wide(),
    OfGpu::new("CONFIRMED", confirmed).expendable(4).wide(),
    OfGpu::new("UUID", |one| one.device_path.shown()).expendable(7).wide(),
    OfGpu::new("RENDER NODE", |one| one.render_node.shown()).expendable(8).wide(),
    OfGpu::new("HEALTH", |one| Health::of_gpu(one).word().to_owned())
        .toned(|one| Some(Health::of_gpu(one).tone())),
];

/// The columns of `list --platform`. The headings are those of the platform's command line.
pub(crate) const PLATFORM_SLICES: &[Column<Device>] = &[
    OfSlice::new("Dev_type", |one| one.dev_type.shown()),
    OfSlice::new("Model", |one| one.model.shown()),
    OfSlice::new("Addr", |one| one.addr.shown()),
    OfSlice::new("Vendor_device_id", |one| one.vendor_device_id.shown()),
    OfSlice::new("numa_node", |one| one.numa_node.shown()),
    OfSlice::new("Device_path", |one| one.device_path.shown()),
    OfSlice::new("PCIE_Info", |one| one.pcie_info.shown()),
    OfSlice::new("Index", |one| one.index.shown()),
    OfSlice::new("Device_minor", |one| one.device_minor.shown()),
    OfSlice::new("Health", |one| for_the_platform(one.healthy, &one.reason)),
];

pub(crate) const PLATFORM_GPUS: &[Column<Gpu>] = &[
    OfGpu::new("Dev_type", |one| one.dev_type.shown()),
    OfGpu::new("Sharing_mode", |one| one.sharing_mode.shown()),
    OfGpu::new("Virtual_num", |one| one.virtual_num.shown()),
    OfGpu::new("Model", |one| one.model.shown()),
    OfGpu::new("Addr", |one| one.addr.shown()),
    OfGpu::new("Vendor_device_id", |one| one.vendor_device_id.shown()),
    OfGpu::new("numa_node", |one| one.numa_node.shown()),
    OfGpu::new("Device_path", |one| one.device_path.shown()),
    OfGpu::new("PCIE_Info", |one| one.pcie_info.shown()),
    OfGpu::new("Health", |one| for_the_platform(one.healthy, &one.reason)),
];

/// The columns of the control daemons in `status`. The id of a control daemon can be a GPU's UUID, and `status` first replaces
/// the UUID by the GPU's address.
pub(crate) const CONTROL_DAEMONS: &[Column<ControlDaemon>] = &[
    OfDaemon::new("CONTROL DAEMON", |one| one.id.shown()),
    OfDaemon::new("STATE", |one| one.state.shown()).toned(tone_of_daemon),
    OfDaemon::new("FOR", |one| time::age(time::from_seconds(one.since))).expendable(3),
    OfDaemon::new("SINCE", |one| time::local(time::from_seconds(one.since))).expendable(6).wide(),
    OfDaemon::new("MULTI-USER", |one| one.multiuser.shown()).expendable(5).wide(),
    OfDaemon::new("FOR NVIDIA'S FRONT END", |one| {
        format!("CUDA_MPS_PIPE_DIRECTORY={}", one.control_directory.shown())
    })
    .expendable(1)
    .wide(),
    OfDaemon::new("CPUS", cpus).expendable(2),
    OfDaemon::new("STARTS", |one| one.starts.shown()).number().expendable(4),
    OfDaemon::new("PID", |one| one.pid.shown()).number(),
    OfDaemon::new("SERVER", |one| one.servers.shown()).number(),
];

/// The columns of `clients`, which first replaces the UUID of each GPU by the GPU's address.
pub(crate) const CLIENTS: &[Column<Client>] = &[
    PID,
    USER,
    COMMAND,
    OfClient::new("MPS", |one| by_mps(one).to_owned()).toned(tone_of_client),
    OfClient::new("SLICE", |one| one.device.shown()),
    MEMORY,
    AGE,
    OfClient::new("GPU", |one| one.gpu.shown()).expendable(3).wide(),
    OfClient::new("KNOWN BY", |one| one.known_by.shown()).expendable(4).wide(),
    OfClient::new("MAY COMMAND", |one| one.may_command.shown()).expendable(5).wide(),
    OfClient::new("SINCE", |one| one.since.map(|since| time::local(time::from_seconds(since))).shown())
        .expendable(6)
        .wide(),
    OfClient::new("PROJECT", |one| one.project.shown()).expendable(7).wide(),
    OfClient::new("LABEL", |one| one.label.shown()).expendable(4).wide(),
    GUEST,
    CONTAINER,
];

/// The columns of the clients that `drain --wait` waits for.
pub(crate) const WAITED_FOR: &[Column<Client>] =
    &[PID, USER, OfClient::new("SLICE", slice_or_not_known), GUEST, CONTAINER, COMMAND];

/// The columns of the slices in `top`. The last column gets the remaining width of the screen.
pub(crate) const TOP_SLICES: &[Column<Device>] = &[
    SLICE,
    OfSlice::new("GPU", gpu_of_slice).expendable(3).order(|a, b| a.nvidia_index.cmp(&b.nvidia_index)),
    OfSlice::new("CLIENTS", clients_of_slice).number().order(|a, b| b.clients.cmp(&a.clients)),
    OfSlice::new("MEMORY", |one| format!("{}/{} MiB", one.memory_used.shown(), one.mps_memory_limit.shown()))
        .number()
        .order(|a, b| b.memory_used.cmp(&a.memory_used)),
    OfSlice::new("IN USE", bar)
        .expendable(2)
        // The bar is red if the slice exceeds its budget.
        .toned(|one| one.overuse.as_ref().filter(|overuse| !overuse.is_empty()).map(|_| Tone::Bad))
        .order(|a, b| in_use(b).total_cmp(&in_use(a))),
    SHARE,
    // STATE shows only a word and sorts the worst state first. While a slice is selected, the reason of the state is shown
    // above the tables.
    OfSlice::new("STATE", health)
        .toned(|one| Some(Health::of_slice(one).tone()))
        .order(|a, b| Health::of_slice(b).cmp(&Health::of_slice(a))),
];

pub(crate) const TOP_CLIENTS: &[Column<Client>] = &[
    PID,
    USER,
    OfClient::new("SLICE", slice_as_far_as_it_has_one)
        .toned(tone_of_client)
        .order(|a, b| slice_as_far_as_it_has_one(a).cmp(&slice_as_far_as_it_has_one(b))),
    MEMORY,
    AGE.number(),
    GUEST,
    CONTAINER,
    COMMAND,
];

fn tone_of_client(client: &Client) -> Option<Tone> {
    match client {
        Client { bypass: true, .. } => Some(Tone::Bad),
        Client { waiting: true, .. } => Some(Tone::Between),
        _ => None,
    }
}

fn health(slice: &Device) -> String {
    Health::of_slice(slice).word().to_owned()
}

fn of_limit<N: ToString>(number: Option<N>, limit: Option<N>, unit: &str) -> String {
    let text = |number: Option<N>| number.map_or_else(|| "-".to_owned(), |number| number.to_string());
    match (number, limit) {
        (None, None) => "-".to_owned(),
        (number, limit) => format!("{} / {}{unit}", text(number), text(limit)),
    }
}

fn clients_of_slice(slice: &Device) -> String {
    match slice.max_clients {
        Some(most) => format!("{}/{most}", slice.clients.shown()),
        None => slice.clients.shown(),
    }
}

/// The index and the model of a slice's GPU: `0 Tesla P40`.
fn gpu_of_slice(slice: &Device) -> String {
    let index = slice.nvidia_index.map(|index| index.shown());
    index.into_iter().chain(slice.model.as_ref().map(Shown::shown)).collect::<Vec<_>>().join(" ")
}

/// The fraction of the memory limit that is in use. Negative if the use or the limit is unknown.
fn in_use(slice: &Device) -> f64 {
    match (slice.memory_used, slice.mps_memory_limit) {
        (Some(used), Some(limit)) if limit > 0 => f64::from(used) / f64::from(limit),
        _ => -1.0,
    }
}

fn bar(slice: &Device) -> String {
    let (Some(used), Some(limit)) = (slice.memory_used, slice.mps_memory_limit.filter(|limit| *limit > 0))
    else {
        return "-".to_owned();
    };
    // The division rounds up, so that even the smallest use is visible.
    let places = i64::from(used.max(0)) * i64::from(BAR);
    let full = (places + i64::from(limit) - 1) / i64::from(limit);
    let bar = (0..i64::from(BAR)).map(|place| if place < full { '|' } else { ' ' });
    format!("[{}]", bar.collect::<String>())
}

/// The number of slices of a GPU, and the limits of each slice: `4 of 5760 MiB, 25 %`.
fn each(gpu: &Gpu) -> String {
    let memory = gpu.mps_memory_limit.map(|mib| format!("{mib} MiB, ")).unwrap_or_default();
    let of = if gpu.equal_slices { "of" } else { "of up to" };
    format!("{} {of} {memory}{} %", gpu.virtual_num, gpu.mps_thread_percentage)
}

/// The limits that the control daemon and its server have confirmed: `5760 MiB, 25 %`.
fn confirmed(gpu: &Gpu) -> String {
    let memory = gpu.confirmed_memory_limit.map(|mib| format!("{mib} MiB"));
    let threads = gpu.confirmed_thread_percentage.map(|percentage| format!("{percentage} %"));
    let known: Vec<String> = memory.into_iter().chain(threads).collect();
    if known.is_empty() { "-".to_owned() } else { known.join(", ") }
}

/// The CPUs on which a control daemon may run, and the CPUs to which it should be bound if they differ. Empty if the CPUs are
/// not known, and for a control daemon that may run on all CPUs and should not be bound. A table hides a column without values.
fn cpus(daemon: &ControlDaemon) -> String {
    match (daemon.cpus.as_deref(), daemon.wanted_cpus.as_deref()) {
        (None, _) | (Some("all"), None) => String::new(),
        (Some(cpus), Some(wanted)) if cpus != wanted => printable(&format!("{cpus} (wanted: {wanted})")),
        (Some(cpus), _) => printable(cpus),
    }
}

fn by_mps(client: &Client) -> &'static str {
    match client {
        Client { bypass: true, .. } => "BYPASS",
        Client { waiting: true, .. } => "WAITS",
        _ => "yes",
    }
}

fn slice_as_far_as_it_has_one(client: &Client) -> String {
    match client {
        Client { bypass: true, .. } => "BYPASS".to_owned(),
        Client { waiting: true, device, .. } => format!("WAITS {}", device.shown()),
        Client { device, .. } => device.shown(),
    }
}

pub(crate) fn slice_or_not_known(client: &Client) -> String {
    client.device.as_ref().map_or_else(|| "slice not known".to_owned(), Shown::shown)
}

fn guest_and_container(client: &Client) -> String {
    match (&client.guest, &client.container) {
        (Some(guest), Some(container)) => format!("{}/{}", guest.shown(), container.shown()),
        (guest, _) => guest.shown(),
    }
}

pub(crate) fn short_id(client: &Client) -> Option<String> {
    client.container_id.as_ref().map(|id| id.shown().chars().take(SHORT_ID).collect())
}

/// Shortens the ids of containers in a list of names of bindings.
fn short_ids(names: &str) -> String {
    let is_id = |name: &str| name.len() == ID && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    let short = |word: &str| {
        let (name, end) = word.split_at(word.trim_end_matches(',').len());
        if is_id(name) { format!("{name:.SHORT_ID$}{end}") } else { word.to_owned() }
    };
    names.split(' ').map(short).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_containers_id_is_short_among_the_names_of_bindings() {
        let id = "0123456789abcdef".repeat(4);
        assert_eq!(short_ids(&id), "0123456789ab");
        let several = format!("{id}, job 7, {id} and 3 more");
        assert_eq!(short_ids(&several), "0123456789ab, job 7, 0123456789ab and 3 more");
        for name in ["", "train-1/main", &id[1..], &id.replace('a', "x")] {
            assert_eq!(short_ids(name), name);
        }
    }

    #[test]
    fn a_bar_shows_the_least_use_and_no_more_than_all() {
        let slice = |used| Device { memory_used: used, mps_memory_limit: Some(1000), ..Device::default() };
        for (used, expected) in [
            (None, "-"),
            (Some(0), "[          ]"),
            (Some(1), "[|         ]"),
            (Some(500), "[|||||     ]"),
            (Some(1000), "[||||||||||]"),
            (Some(i32::MAX), "[||||||||||]"),
            (Some(-5), "[          ]"),
        ] {
            assert_eq!(bar(&slice(used)), expected, "{used:?}");
        }
    }

    #[test]
    fn a_state_has_a_tone_and_the_worst_comes_first() {
        let slice = |healthy, drained, limits_enforced| Device {
            drained,
            healthy,
            limits_enforced,
            ..Device::default()
        };
        let states = [
            slice(false, false, true),
            slice(false, true, true),
            slice(true, false, false),
            slice(true, false, true),
        ];
        let column = TOP_SLICES.last().unwrap();
        let tones = states.each_ref().map(column.tone);
        let expected = [Tone::Bad, Tone::Between, Tone::Between, Tone::Well].map(Some);
        assert_eq!(tones, expected);
        assert!(states.is_sorted_by(|a, b| (column.order)(a, b).is_lt()));
    }
}
