//! The subcommands of `yunion-mpsctl`. Most subcommands show the values that the service publishes on D-Bus. `check` and
//! `doctor` compare the published values with the host, and `probe` tests them with its own CUDA clients.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;

use clap::{CommandFactory, FromArgMatches, Parser, ValueHint};

use chosen::Devices;
use common::bus::proxy::{BusError, DaemonProxy};
use common::config::Sources;
use common::problem::Problem;
use show::env::EnvFormat;
use show::exposition::ExpositionFormat;

mod act;
mod check;
mod chosen;
mod complete;
mod doctor;
mod probe;
pub mod runtime;
mod screen;
mod setup;
mod show;
mod signals;
mod slurm;
mod toolkit;
mod watch;

const FAILED: u8 = 1;
/// The exit status for a wrong command line.
const USAGE: u8 = 2;
/// The exit status if the service does not run.
const NOT_RUNNING: u8 = 3;

/// The subcommands, in the groups in which the help and the manual page list them.
pub const GROUPS: [(&str, &[&str]); 4] = [
    ("Look", &["list", "status", "clients", "top", "events", "is-ready", "metrics"]),
    ("Use slices", &["env", "run", "bind", "unbind"]),
    ("Operate the service", &["terminate", "drain", "undrain", "reload", "apply"]),
    ("Set up and check", &["setup", "check", "doctor", "probe", "slurm"]),
];

/// Shows and uses the GPU slices of yunion-mps-daemon.
#[derive(Debug, Parser)]
#[command(name = "yunion-mpsctl", version, arg_required_else_help = true)]
#[command(
    after_help = "Exit status: 0, 1 (it failed), 2 (wrong usage), 3 (yunion-mps-daemon is not running); check, doctor, is-ready and setup have more.\n\n\
    Examples:\n  \
    yunion-mpsctl setup\n  \
    yunion-mpsctl list\n  \
    yunion-mpsctl run --free -- python3 train.py\n  \
    yunion-mpsctl top"
)]
enum Command {
    /// Lists the slices, or their GPUs
    #[command(after_help = "Examples:\n  \
        yunion-mpsctl list\n  \
        yunion-mpsctl list --gpus -o wide\n  \
        yunion-mpsctl list --names | xargs -n 1 yunion-mpsctl probe\n  \
        yunion-mpsctl list --json | jq -r '.[] | select(.healthy) | .addr'")]
    List(show::list::Arguments),
    /// Shows the service, the last events, the control daemons, and the GPUs with their limits
    #[command(
        after_help = "Five events are shown, one on each line, and the last fault is one of them. On a terminal with too few rows, the end of the output is left out; -o wide prints everything.\n\n\
        Examples:\n  \
        yunion-mpsctl status\n  \
        yunion-mpsctl status --watch\n  \
        yunion-mpsctl status --json | jq .service.state"
    )]
    Status(show::status::Arguments),
    /// Lists the processes that use the GPUs, and marks those that bypass MPS
    #[command(after_help = "A container's id is shown with its first 12 digits; JSON has all of it.\n\n\
        Examples:\n  \
        yunion-mpsctl clients\n  \
        yunion-mpsctl clients --json | jq -r '.[] | select(.bypass) | .pid'\n  \
        yunion-mpsctl clients --json | jq 'group_by(.device) | map(length)'")]
    Clients {
        /// `wide` adds columns: the GPU, how the service knows the slice, if the client may command the control daemon, when
        /// the client began
        #[arg(short, long, value_name = "FORMAT", hide_possible_values = true, value_parser = ["wide"])]
        output: Option<String>,
        /// Print everything that the service publishes as a JSON array
        #[arg(long, conflicts_with = "output")]
        json: bool,
    },
    /// Shows slices, clients and events on the whole terminal, as they change
    #[command(
        after_help = "Keys: q or Esc quits, Tab goes from the slices to the clients and back, arrows select, s < > sort, \
        r reverses the order, t ends the GPU work of the selected client after a question (for root), h shows all keys. \
        While a slice is selected, only its clients are shown. A title names the columns for which there is no room. top goes on when the service restarts.\n\n\
        Exit status: 0, or 128 plus the number of the signal that ended it; 2 without a terminal.\n\n\
        Examples:\n  \
        yunion-mpsctl top\n  \
        NO_COLOR=1 yunion-mpsctl top"
    )]
    Top,
    /// Prints the last events, oldest first, and with --follow the new ones as they come
    #[command(
        after_help = "The service keeps the last 32 events, among them the last 8 faults; the journal has all of them. Each line is printed at once. \
        Ctrl-C, or a reader that closes the pipe, ends --follow with exit status 0.\n\n\
        Examples:\n  \
        yunion-mpsctl events\n  \
        yunion-mpsctl events --follow\n  \
        yunion-mpsctl events --follow --json | jq --unbuffered -r .text"
    )]
    Events {
        /// Print each new event as it comes, until Ctrl-C; the events go on after a restart of the service
        #[arg(long, short)]
        follow: bool,
        /// Print a JSON array; with --follow one JSON object a line
        #[arg(long)]
        json: bool,
    },
    /// Says by the exit status whether the service is ready, for scripts
    #[command(
        after_help = "Ready means that every configured GPU is served. If the service is not ready, is-ready \
        prints one line with the state and the reason: degraded (only some GPUs are served, or something \
        needs an administrator), starting, failed, disabled, stopping. yunion-mpsctl status says more.\n\n\
        Exit status: 0 ready, 1 not ready, 3 yunion-mps-daemon is not running. With --wait, the exit status \
        is for the state at the end of the wait.\n\n\
        Examples:\n  \
        yunion-mpsctl is-ready --quiet && ./start-jobs\n  \
        systemctl start yunion-mps-daemon && yunion-mpsctl is-ready --wait 60"
    )]
    IsReady {
        /// Wait at most this time until the service is ready; the service may also be started during the wait
        #[arg(long, value_name = "SECONDS")]
        wait: Option<u32>,
        /// Print no state, and report the result by the exit status
        #[arg(long, short)]
        quiet: bool,
    },
    /// Prints metrics of the service, its slices and their clients, for Prometheus and other collectors
    #[command(
        after_help = "If yunion-mps-daemon is not running, the only metric is yunion_mps_up 0 and the exit status is \
        0, so that a collector gets this metric. The exit status is 1 if the system bus can't be reached; the FILE of --to then stays as it is.\n\n\
        --clients adds a series for each client on each GPU: at most 1024 series, for the clients with the most memory.\n\n\
        Examples:\n  \
        yunion-mpsctl metrics\n  \
        yunion-mpsctl metrics --clients | grep '^yunion_mps_client_memory'\n  \
        yunion-mpsctl metrics --format prometheus --to yunion-mps.prom"
    )]
    Metrics {
        /// Add the memory of each client, with its slice, user and container
        #[arg(long)]
        clients: bool,
        /// Format of the text
        #[arg(long, value_enum, default_value = "openmetrics")]
        format: ExpositionFormat,
        /// Write the text to this file, which is replaced as a whole, instead of to stdout
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        to: Option<PathBuf>,
    },
    /// Prints the settings with which a container, or a process on this host, uses slices
    #[command(
        after_help = "A program can't join slices of one GPU: with several slices of one GPU the program has \
        the memory and the threads of one slice, and a warning on standard error says so. run warns in the \
        same way. --free and --slurm mean the same as with run.\n\n\
        The formats podman and cdi name the GPU by its UUID in NVIDIA's CDI spec, which nvidia-ctk writes. \
        The format cdi also names the slice in the service's own CDI spec. The service writes its spec only \
        if host.conf has cuda_mps_cdi_directory. A container engine refuses a name that is in no CDI \
        spec.\n\n\
        If env fails, a program must not start without a slice. So \
        env then prints an option or a name that \
        every container engine refuses, or `false` for a shell. A message on standard error gives the \
        reason, and the exit status is not 0.\n\n\
        Examples:\n  \
        eval \"$(yunion-mpsctl env 00:06.0-1)\" && ./a-cuda-program\n  \
        eval \"$(yunion-mpsctl env --free)\" && ./a-cuda-program\n  \
        options=$(yunion-mpsctl env 00:06.0-1 --format docker) &&\n      \
        docker run --rm $options IMAGE\n  \
        options=$(yunion-mpsctl env 00:06.0-1 --format podman) &&\n      \
        podman run --rm $options IMAGE\n  \
        yunion-mpsctl env 00:06.0-1 --format compose >mps-slice.yaml\n  \
        yunion-mpsctl env 00:06.0-1 00:07.0-0 --format json"
    )]
    Env {
        #[command(flatten)]
        devices: Devices,
        /// Format of the answer
        #[arg(long, value_enum, default_value = "shell")]
        format: EnvFormat,
    },
    /// Runs a command on this host as a client of slices, and stops it without hurting its neighbours
    #[command(
        after_help = "Ctrl-C, SIGTERM, SIGHUP and SIGQUIT first end the GPU work of the command and of every \
        process that the command has started (CUDA error 810). Then the command gets the signal. A second \
        signal ends this wait: the command gets both signals at once. With --slurm a second signal does not \
        end the wait, since Slurm sends SIGTERM twice. If the command handles or ignores SIGUSR1 or SIGUSR2, \
        this signal goes to the command at once, and the GPU work goes on. Otherwise the signal would end \
        the command, so the GPU work ends first.\n\n\
        A signal that ends the command in the middle of a kernel is a fault for every client on that GPU. So \
        send signals to yunion-mpsctl, and not to the command itself. Only root can end GPU work, unless \
        host.conf has cuda_mps_may_terminate: owner. For other users a signal is passed on at once, with a \
        warning. The command runs in its own session: the command can use the terminal, but not \
        /dev/tty.\n\n\
        The exit status is the command's, or 128 plus the number of the signal that ended the command; 126 \
        and 127 mean that the command could not be started.\n\n\
        --free takes the slice with the fewest clients. The slice must be served, must not be drained or \
        full, and must have no other owner. If several slices have equally few clients, --free prefers the \
        GPU with the fewest clients, and then the order of the configuration. run names the slice on \
        standard error. A command is a client only once the command has started CUDA. So each slice that the \
        service has chosen in the last minute counts as if the slice had one client more. The service can't \
        count a command that needs more than a minute to start CUDA, or a user who has named a slice and \
        does not use the slice yet.\n\n\
        --slurm takes the slices that Slurm has given to this step (SLURM_STEP_GPUS) or job \
        (SLURM_JOB_GPUS). Their names stand in /etc/yunion/gres.conf, which root writes with `yunion-mpsctl \
        slurm`.\n\n\
        A command that root starts is bound to its slices, as by `yunion-mpsctl bind`: no other container or \
        command gets these slices while the command runs, unless --share is given. In a login session the \
        command moves to a systemd scope, yunion-mps-run-PID.scope. In a unit without other processes the \
        command stays in the unit. The command is not bound if its unit has other processes, or if the host \
        has no systemd.\n\n\
        Examples:\n  \
        yunion-mpsctl run 00:06.0-1 -- python3 train.py\n  \
        yunion-mpsctl run --free -- python3 train.py\n  \
        yunion-mpsctl run --free h200 -- python3 train.py\n  \
        srun --gres=gpu:1 yunion-mpsctl run --slurm -- python3 train.py\n  \
        yunion-mpsctl run 00:06.0-1 00:07.0-1 -- ./two-gpus --verbose"
    )]
    Run {
        #[command(flatten)]
        devices: Devices,
        /// The command, and its arguments
        #[arg(last = true, required = true, value_name = "CMD")]
        command: Vec<OsString>,
    },
    /// Gives slices to a control group: every process in it has them, whatever its environment says; only root may do this
    #[command(
        after_help = "A slice belongs to one control group at a time, unless --share is given. The names of the slices are \
        printed. A binding ends with its control group; list -o wide shows the bindings. With CDI, container runtimes bind slices by themselves.\n\n\
        Examples:\n  \
        yunion-mpsctl bind 00:06.0-1 --pid 4711 --label train-1\n  \
        yunion-mpsctl bind 00:06.0 --control-group /system.slice/job-17.scope"
    )]
    Bind(act::bind::Arguments),
    /// Ends the binding of a control group; its processes go on; only root may do this
    #[command(after_help = "Examples:\n  \
        yunion-mpsctl unbind --pid 4711\n  \
        yunion-mpsctl unbind --control-group /system.slice/job-17.scope")]
    Unbind {
        /// The control group of this process
        #[arg(long, required_unless_present = "control_group")]
        pid: Option<u32>,
        /// The control group of this path, as in /proc/PID/cgroup
        #[arg(long, value_name = "PATH", conflicts_with = "pid")]
        control_group: Option<String>,
    },
    /// Ends the GPU work of processes without hurting their neighbours
    #[command(after_help = "The processes get CUDA error 810, and no signal. The command returns when \
        none of these processes is a \
        client any more, and then names the processes by PID, user and container. If a process is \
        still a client after 30 seconds, the command fails.\n\n\
        Examples:\n  \
        yunion-mpsctl terminate 1153 && kill 1153\n  \
        yunion-mpsctl terminate --device 00:06.0-1\n  \
        yunion-mpsctl terminate --container 4f1c2d3e5a6b && docker stop 4f1c2d3e5a6b")]
    Terminate {
        #[command(flatten)]
        whom: act::terminate::Whom,
        /// Print what was ended (the PID, the container or the slices) as a JSON object
        #[arg(long)]
        json: bool,
    },
    /// Takes slices, GPUs or the whole host out of use for new clients, while the present clients finish
    #[command(after_help = "env and run refuse a drained slice, and no container starts with the \
        slice's device in the service's \
        CDI spec. The drain lasts until undrain or the next boot: not even systemctl stop ends it.\n\n\
        An agent, such as the host agent of Cloudpods, may mount the whole pipe directory into a container \
        without a request to the service. This container can start new clients until every slice of its \
        control daemon is drained. With drivers before 580 the container can start new clients even \
        then.\n\n\
        --wait waits for every client of a drained slice. A client without a known slice may use the drained \
        slice too. So --wait also waits for such a client on the same GPU, or on no GPU yet. Ctrl-C ends the \
        wait, but the slices stay drained.\n\n\
        Exit status: 0 with --wait only if no client is left.\n\n\
        Examples:\n  \
        yunion-mpsctl drain 00:06.0-1\n  \
        yunion-mpsctl drain 00:06.0 --wait\n  \
        yunion-mpsctl drain --all --wait && systemctl stop yunion-mps-daemon")]
    Drain {
        #[command(flatten)]
        what: act::drain::What,
        /// Wait for the end of the last client, and show the clients
        #[arg(long)]
        wait: bool,
    },
    /// Lets new clients have drained slices again
    #[command(
        after_help = "undrain can end the drain of a single slice of a drained GPU, or of a single GPU of a \
        drained host. Then the other slices stay drained.\n\n\
        Examples:\n  \
        yunion-mpsctl undrain 00:06.0-1\n  \
        yunion-mpsctl undrain --all"
    )]
    Undrain(act::drain::What),
    /// Makes the service read its configuration again, as systemctl reload does
    #[command(after_help = "The service refuses a wrong configuration, and keeps the old one.\n\n\
        Examples:\n  \
        yunion-mps-daemon --check && yunion-mpsctl reload")]
    Reload {
        /// Print the published generation and state as a JSON object
        #[arg(long)]
        json: bool,
    },
    /// Applies the changes of the configuration that wait for clients to leave
    #[command(after_help = "With --force the journal names the clients before they end.\n\n\
        Examples:\n  \
        yunion-mpsctl apply\n  \
        yunion-mpsctl apply --force")]
    Apply {
        /// Don't wait for clients: they lose their GPU (CUDA error 806)
        #[arg(long)]
        force: bool,
        /// Print the result as a JSON object
        #[arg(long)]
        json: bool,
    },
    /// Writes the configuration of a host that has none, after a look at its GPUs and a few questions
    #[command(
        after_help = "setup changes no existing file: if the host has a configuration that does not enable \
        MPS, setup prints the lines that belong in each file. On a host of Cloudpods setup writes host.conf \
        and host_container_device.yml with one entry for each GPU, since Cloudpods reads its GPUs from \
        this file. \
        On any other host, if all GPUs get the same number of slices, setup usually writes only host.conf. \
        A \
        GPU that is added later then gets this number of slices too.\n\n\
        On a host of Cloudpods, and by default where NVIDIA's container toolkit is installed, a program that \
        was not started with a slice gets CUDA error 46. On any other host, and without --isolate-slices, \
        setup lets every CUDA program use a slice automatically: the program is a client with the memory and \
        the threads of one slice.\n\n\
        At the end setup checks the configuration, as yunion-mps-daemon --check does.\n\n\
        Exit status: 0 the configuration enables MPS, and is right; 1 it is wrong, or could not be written; \
        4 nothing was written, since existing files have to change.\n\n\
        Examples:\n  \
        yunion-mpsctl setup\n  \
        yunion-mpsctl setup --dry-run --yes\n  \
        yunion-mpsctl setup --yes --slices 4 && systemctl enable --now yunion-mps-daemon"
    )]
    Setup(setup::Arguments),
    /// Checks the configuration, and shows its plan and the changes that a reload would make
    #[command(
        after_help = "check works without root, without a GPU and without the service, and leaves out the parts that need one of these. The service does not publish its timeouts and the size of logs, so check does not compare these values.\n\n\
        yunion-mps-daemon --check does the same.\n\n\
        Exit status: 0 right, whether or not something would change; 78 wrong.\n\n\
        Examples:\n  \
        yunion-mpsctl check && yunion-mpsctl reload\n  \
        yunion-mpsctl check --config /root/host.conf.new\n  \
        yunion-mpsctl check --json | jq '.differences[] | select(.effect.when != \"live\")'"
    )]
    Check {
        /// The main configuration file [default: the file that the service reads]
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Read the host's files (configuration, /sys, pci.ids) below this directory
        #[arg(long, value_name = "DIR", default_value = "/")]
        sysroot: PathBuf,
        /// Print everything as one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Looks for problems on this host, and names a remedy for each
    #[command(
        after_help = "doctor works without the service too. Some checks need root; for other users, doctor counts the checks that it has left out, and -v names these checks.\n\n\
        Exit status: 0 neither errors nor warnings, 4 warnings, 5 errors.\n\n\
        Examples:\n  \
        yunion-mpsctl doctor\n  \
        yunion-mpsctl doctor --json | jq -r '.findings[] | select(.severity == \"error\") | .remedy'"
    )]
    Doctor(doctor::Arguments),
    /// Opens a CUDA context on a slice, and compares its SMs and its memory with the published limits
    #[command(
        after_help = "The first process has the environment of the slice. The second process has the same \
        environment without the limits, and so gets the limits that the control daemon itself enforces, even if \
        another program has changed them. SMs may differ by one pair, since GPUs hand out pairs. Memory may differ by \
        the part that a context takes: at most 128 MiB plus 6 MiB for each SM. GPUs before Volta enforce \
        no limits, \
        so nothing is compared there.\n\n\
        For a moment each process allocates as much memory as the slice promises. If other programs hold more than \
        their share, an allocation of a neighbour can fail in that moment. So nothing is allocated on a GPU that has \
        clients, unless --beside-clients is given.\n\n\
        Exit status: 1 if anything differs, or could not be found out.\n\n\
        Examples:\n  \
        yunion-mpsctl probe\n  \
        yunion-mpsctl probe 00:06.0-1\n  \
        yunion-mpsctl probe --json | jq '.[] | select(.matches | not)'"
    )]
    Probe {
        /// A name as `list` shows it: 00:06.0-1; a GPU's address or UUID stands for one slice of it. Default: one
        /// slice of each size on each GPU, since slices of one size have the same limits
        #[arg(value_name = "SLICE", add = complete::devices())]
        device: Option<String>,
        /// Allocate memory even if the GPU has other clients; their own allocations may fail in that moment
        #[arg(long)]
        beside_clients: bool,
        /// Print everything as a JSON array
        #[arg(long)]
        json: bool,
    },
    /// Prints lines for Slurm's gres.conf, so that Slurm hands out the slices of this host as GPUs
    #[command(
        after_help = "A job that asks Slurm for a GPU then gets a slice, and finds the slice with run --slurm or env --slurm. \
        Slurm tells a job only the number of its slice. These commands find the slice's name in the line with this number in \
        /etc/yunion/gres.conf, so Slurm's gres.conf must have the same lines in the same order. After a change of the slices, write the file again and restart slurmctld and slurmd.\n\n\
        Examples:\n  \
        yunion-mpsctl slurm >/etc/yunion/gres.conf\n  \
        srun --gres=gpu:1 yunion-mpsctl run --slurm -- python3 train.py"
    )]
    Slurm,
}

impl Command {
    /// True if the exit status answers a question and does not only report success or failure. A script may use the exit status
    /// without reading the output, so the subcommand ignores a closed pipe.
    fn answers_by_exit_status(&self) -> bool {
        matches!(
            self,
            Self::Check { .. } | Self::Doctor(_) | Self::IsReady { .. } | Self::Probe { .. } | Self::Setup(_)
        )
    }
}

type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Bus(#[from] BusError),
    /// The text is the reason that systemd reports.
    #[error("yunion-mps-daemon is not running: {0}")]
    NotRunning(String),
    #[error("can't write the output: {0}")]
    Output(#[from] io::Error),
    #[error("can't write JSON: {0}")]
    Json(#[from] serde_json::Error),
    #[error("can't {0}: {1}")]
    System(&'static str, #[source] io::Error),
    #[error("{0}")]
    Failed(String),
    #[error("{0}")]
    Usage(String),
}

impl From<Problem> for Error {
    fn from(problem: Problem) -> Self {
        Self::Failed(problem.into())
    }
}

impl Error {
    fn exit_status(&self) -> u8 {
        match self {
            Self::Bus(BusError::NotRunning) | Self::NotRunning(_) => NOT_RUNNING,
            Self::Usage(_) => USAGE,
            _ => FAILED,
        }
    }

    /// A reader such as `head` closes the pipe when it has read enough, which is no failure of the subcommand.
    fn is_closed_pipe(&self) -> bool {
        match self {
            Self::Output(e) => e.kind() == io::ErrorKind::BrokenPipe,
            Self::Json(e) => e.io_error_kind() == Some(io::ErrorKind::BrokenPipe),
            _ => false,
        }
    }
}

/// The output of a subcommand that answers with its exit status. Writing to a closed pipe succeeds, so that the subcommand runs
/// to its end.
struct MayLoseReader<'o>(&'o mut dyn Write);

impl Write for MayLoseReader<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).or_else(|error| without_closed_pipe(error).map(|()| bytes.len()))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().or_else(without_closed_pipe)
    }
}

fn without_closed_pipe(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::BrokenPipe { Ok(()) } else { Err(error) }
}

/// The command line as data. The manual page and the completions are made from this data.
pub fn command() -> clap::Command {
    let command = Command::command();
    let mut template = "{about}\n\n{usage-heading} {usage}\n\n".to_owned();
    for (heading, names) in GROUPS {
        let commands = names.iter().filter_map(|name| command.find_subcommand(name)).cloned();
        // clap can't group subcommands in its help. So the help of each group comes from a separate clap command that has only
        // the subcommands of this group.
        let group = clap::Command::new(heading).subcommands(commands).disable_help_subcommand(true);
        let listed = group.help_template("{subcommands}").render_help();
        template += &format!("{heading}:\n{}\n\n", listed.to_string().trim_end());
    }
    command.help_template(template + "Options:\n{options}{after-help}")
}

fn parse(arguments: &[OsString]) -> clap::error::Result<Command> {
    Command::from_arg_matches(&command().try_get_matches_from(arguments)?)
}

/// Executes the subcommand, and returns the exit status. The first argument is the program's name.
pub fn main(arguments: impl IntoIterator<Item = OsString>, out: &mut dyn Write, err: &mut dyn Write) -> u8 {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    if let Some(status) = act::run::become_command(&arguments, err) {
        return status;
    }
    if let Some(status) = probe::client::become_cuda_client(&arguments, out) {
        return status;
    }
    if let Some(status) = complete::complete_words(&arguments, out) {
        return status;
    }
    let (done, refused_line) = match parse(&arguments) {
        Ok(command) => {
            let refused_line = match &command {
                Command::Env { format, .. } => format.refused_line(),
                _ => None,
            };
            (run_command(command, out), refused_line)
        }
        Err(e) if e.use_stderr() => {
            let _ = match act::run::without_dashes(&arguments) {
                Some(remedy) => writeln!(err, "error: {remedy}"),
                None => write!(err, "{}", e.render()),
            };
            (Ok(USAGE), show::env::refused_line_of_wrong_usage(&arguments))
        }
        Err(help) => {
            let written = write!(out, "{}", help.render()).and_then(|()| out.flush());
            (written.map(|()| 0).map_err(Error::Output), None)
        }
    };
    if let Some(line) = refused_line.filter(|_| !matches!(done, Ok(0))) {
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    }
    match done {
        Ok(status) => status,
        Err(e) if e.is_closed_pipe() => 0,
        Err(e) => {
            // If this message can't be written, the exit status still reports the failure.
            let _ = writeln!(err, "{}", show::table::hanging(&format!("yunion-mpsctl: {e}")));
            e.exit_status()
        }
    }
}

fn run_command(command: Command, out: &mut dyn Write) -> Result<u8> {
    let mut may_lose_reader = MayLoseReader(&mut *out);
    let out: &mut dyn Write =
        if command.answers_by_exit_status() { &mut may_lose_reader } else { may_lose_reader.0 };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| Error::System("start", error))?.block_on(async {
        match execute(command, out).await {
            // The message of this error advises the user to start the service. A unit that has failed because of a wrong
            // configuration would fail again. So the new error has the reason that systemd knows, and a remedy.
            Err(Error::Bus(BusError::NotRunning)) => Err(match doctor::why_not_running().await {
                Some(reason) => Error::NotRunning(reason),
                None => BusError::NotRunning.into(),
            }),
            done => done,
        }
    })
}

async fn execute(command: Command, out: &mut dyn Write) -> Result<u8> {
    // Each subcommand connects to the bus by itself, since `check`, `setup` and `doctor` also work without the service.
    let daemon = DaemonProxy::connect;
    let mut status = 0;
    match command {
        Command::List(arguments) => show::list::list(&daemon().await?, &arguments, out).await?,
        Command::Status(arguments) if arguments.watch => watch::status::watch(&arguments, out).await?,
        Command::Status(arguments) => show::status::print(&daemon().await?, &arguments, out).await?,
        Command::Clients { output, json } => {
            show::clients::clients(&daemon().await?, output.is_some(), json, out).await?;
        }
        Command::Top => status = watch::top::top(out).await?,
        Command::Events { follow, json } => watch::events::events(follow, json, out).await?,
        Command::IsReady { wait, quiet } => status = watch::is_ready::is_ready(wait, quiet, out).await?,
        Command::Metrics { clients, format, to } => {
            show::metrics::metrics(&daemon().await?, clients, format, to.as_deref(), out).await?;
        }
        Command::Check { config, sysroot, json } => {
            status = check::check(Sources { config, sysroot }, json, out).await?;
        }
        Command::Setup(arguments) => status = setup::setup(&arguments, out).await?,
        Command::Doctor(arguments) => status = doctor::doctor(&arguments, out).await?,
        Command::Env { devices, format } => show::env::env(&daemon().await?, &devices, format, out).await?,
        Command::Run { devices, command } => {
            status = act::run::run(daemon().await?, &devices, &command).await?;
        }
        Command::Slurm => slurm::slurm(&daemon().await?, out).await?,
        Command::Terminate { whom, json } => {
            act::terminate::terminate(&daemon().await?, &whom, json, out).await?;
        }
        Command::Drain { what, wait } => {
            status = act::drain::drain(&daemon().await?, &what.names, wait, out).await?;
        }
        Command::Bind(arguments) => act::bind::bind(&arguments, out).await?,
        Command::Unbind { pid, control_group } => {
            act::bind::unbind(&daemon().await?, pid, control_group.as_deref(), out).await?;
        }
        Command::Undrain(what) => act::drain::undrain(&daemon().await?, &what.names, out).await?,
        Command::Reload { json } => act::apply::reload(&daemon().await?, json, out).await?,
        Command::Apply { force, json } => act::apply::apply(&daemon().await?, force, json, out).await?,
        Command::Probe { device, beside_clients, json } => {
            status = probe::probe(&daemon().await?, device.as_deref(), beside_clients, json, out).await?;
        }
    }
    out.flush()?;
    Ok(status)
}

fn print_json(out: &mut dyn Write, value: &impl serde::Serialize) -> Result<()> {
    writeln!(out, "{}", common::text::json(value)?)?;
    Ok(())
}
