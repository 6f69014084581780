//! `yunion-mpsctl setup`: writes a configuration with which the service serves the GPUs of a host.
//!
//! The shares that setup shows come from the plan that the service itself would make. Setup checks the written files in the
//! same way as `yunion-mps-daemon --check`. Setup changes no file that exists already.

mod ask;
mod files;
mod gpus;
mod place;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use clap::builder::RangedU64ValueParser;
use tokio::time::timeout;

use self::ask::{MOST, Questions};
use self::files::{Answers, File};
use self::gpus::HostGpus;
use crate::show::table::{hanging, prose};
use crate::toolkit::{self, WHERE_CUDA_LOOKS};
use crate::{Error, FAILED, Result};
use common::bus::proxy::DaemonProxy;
use common::check::{self, Checked};
use common::config::{self, Loaded, Sources};
use common::host::inventory::Inventory;
use common::text::printable;

/// The exit status if setup writes nothing, since existing files would have to change.
const THERE_ALREADY: u8 = 4;

/// A service that does not answer within this time counts as not running.
const SIGN_OF_LIFE: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Take every default, and ask nothing
    #[arg(long)]
    yes: bool,
    /// The number of slices of each GPU [default: about 8 GiB for a slice, from 2 to 10 slices]
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<u32>::new().range(1..=MOST.into()))]
    slices: Option<u32>,
    /// Give each slice a server of its own: a fatal GPU error ends only clients of its slice, and the slices take turns on
    /// the GPU
    #[arg(long)]
    isolate_slices: bool,
    /// Print the files, and write nothing
    #[arg(long)]
    dry_run: bool,
    /// Read and write the host's files below this directory
    #[arg(long, value_name = "DIR", default_value = "/")]
    sysroot: PathBuf,
}

pub(super) async fn setup(arguments: &Arguments, out: &mut dyn Write) -> Result<u8> {
    let root = Path::new("/");
    if arguments.sysroot == root && !arguments.dry_run && !rustix::process::geteuid().is_root() {
        return Err(failed(
            "only root can write the configuration: run setup with sudo; --dry-run shows the files to every \
             user",
        ));
    }
    let mut questions = Questions::new(arguments.yes)?;
    let sources = Sources { config: None, sysroot: arguments.sysroot.clone() };
    let loaded = match config::load(&sources) {
        Ok(loaded) => loaded,
        Err(refused) => {
            say(&Checked::Refused(refused), out)?;
            return Err(failed(
                "the existing configuration has mistakes: correct these first, since setup changes no \
                 existing file",
            ));
        }
    };
    if loaded.settings.enabled {
        writeln!(out, "MPS is enabled already, so nothing was written.\n")?;
        return finish(&sources, loaded.platform, out).await;
    }
    let found = find_gpus(&sources.sysroot, out)?;
    let answers = ask(arguments, &loaded, &found, &mut questions, out)?;
    let files = files::compose(&answers, &loaded);
    let in_the_way = files.iter().any(|file| place::is_taken(&sources.sysroot, &file.path));
    if in_the_way || !loaded.settings.sources.is_empty() {
        return print_files(&files, &sources, out);
    }
    if arguments.dry_run {
        for file in &files {
            writeln!(out, "\n{}:\n", file.path.display())?;
            out.write_all(indented(&file.text).as_bytes())?;
        }
        writeln!(out, "\nNothing was written, because of --dry-run.")?;
        return Ok(0);
    }
    let names: Vec<String> = files.iter().map(|file| file.path.display().to_string()).collect();
    if !questions.yes_or_no(&format!("Write {}?", names.join(" and ")), out)? {
        writeln!(out, "Nothing was written.")?;
        return Ok(FAILED);
    }
    place::all(&sources.sysroot, &files).map_err(Error::Failed)?;
    writeln!(out, "Written: {}\n", names.join(", "))?;
    finish(&sources, answers.platform, out).await
}

fn failed(words: &str) -> Error {
    Error::Failed(words.to_owned())
}

fn find_gpus(sysroot: &Path, out: &mut dyn Write) -> Result<HostGpus> {
    let root = sysroot.to_owned();
    let inventory = check::ask_driver(sysroot, move |nvml| Inventory::read(&root, nvml))
        .unwrap_or_else(|reason| Inventory::read(sysroot, Err(&reason)));
    let found = HostGpus::new(inventory);
    for line in found.describe() {
        writeln!(out, "{}", hanging(&line))?;
    }
    writeln!(out)?;
    if found.groups.is_empty() {
        return Err(failed("no GPU of this host can be served, so nothing was written"));
    }
    Ok(found)
}

fn ask(
    arguments: &Arguments,
    loaded: &Loaded,
    found: &HostGpus,
    questions: &mut Questions,
    out: &mut dyn Write,
) -> Result<Answers> {
    let mut slices = Vec::new();
    for group in &found.groups {
        slices.push(match arguments.slices {
            Some(slices) => slices,
            None => {
                let proposed = group.proposed();
                writeln!(out, "{}", prose(&found.describe_share(group, proposed)))?;
                let question = format!(
                    "How many slices shall {gpus} have? With 0 slices a GPU is not served.",
                    gpus = group.describe()
                );
                questions.number(&printable(&question), proposed, out)?
            }
        });
    }
    if slices.iter().all(|slices| *slices == 0) {
        return Err(failed("every GPU got 0 slices, so nothing was written"));
    }
    let platform = loaded.platform || {
        let question =
            "Does this host belong to a Cloudpods platform? Nothing on this host points to such a platform.";
        questions.no_or_yes(question, out)?
    };
    let asks = !platform && found.can_isolate_slices();
    let isolates = arguments.isolate_slices || asks && ask_isolation(questions, out)?;
    // A program without a slice finds a control daemon only in the pipe directory itself. If each slice has its own control
    // daemon, the control daemons listen in subdirectories of the pipe directory. Then setup does not ask if programs should
    // use a slice automatically.
    let by_itself = !platform && !isolates && ask_by_itself(&arguments.sysroot, questions, out)?;
    if by_itself {
        let each = found.groups.iter().zip(&slices);
        for said in each.filter_map(|(group, slices)| found.describe_program(group, *slices)) {
            writeln!(out, "{}", prose(&said))?;
        }
    }
    Ok(Answers::new(found, &slices, platform, by_itself).isolating_slices(isolates))
}

fn ask_isolation(questions: &mut Questions, out: &mut dyn Write) -> Result<bool> {
    let said = "A program that fails on the GPU ends the programs of all slices of that GPU. With a control \
                daemon for each slice, such a program ends only the programs of its own slice. But then the \
                slices take turns: 8 processes of ResNet-50 on 4 slices do 1.6 times the work of 8 \
                processes without MPS, instead of 4 times. Programs without MPS can then use the GPU too, \
                and the service reports them.";
    writeln!(out, "{}", prose(said))?;
    questions.no_or_yes("Should a fault stay in its slice?", out)
}

/// Asks if every CUDA program of the host should find the control daemon by itself. With NVIDIA's container toolkit, programs
/// in containers without a slice would find the control daemon too, and `doctor` would warn about this problem. So the default
/// answer is no if the toolkit is installed.
fn ask_by_itself(sysroot: &Path, questions: &mut Questions, out: &mut dyn Write) -> Result<bool> {
    let question = "Should every CUDA program of this host use a slice automatically? Otherwise only \
                    programs that are started with a slice use one.";
    let Some(tool) = toolkit::installed(sysroot) else { return questions.yes_or_no(question, out) };
    let said = format!(
        "{tool} is installed and mounts {WHERE_CUDA_LOOKS} into every container with a GPU. If you answer \
         yes, containers that were given no slice use slices too."
    );
    writeln!(out, "{}", prose(&said))?;
    questions.no_or_yes(question, out)
}

/// Some files exist already, so setup prints the lines of all files instead of writing files.
fn print_files(files: &[File], sources: &Sources, out: &mut dyn Write) -> Result<u8> {
    writeln!(
        out,
        "Nothing was written: this host has configuration files already, and setup changes no existing file."
    )?;
    for file in files {
        let path = file.path.display();
        let verb = if place::is_taken(&sources.sysroot, &file.path) { file.change } else { "Write" };
        writeln!(out, "\n{verb} {path}:\n")?;
        out.write_all(indented(&file.lines).as_bytes())?;
    }
    writeln!(out, "\nThen:\n\n    yunion-mps-daemon --check && systemctl enable --now yunion-mps-daemon")?;
    Ok(THERE_ALREADY)
}

fn indented(text: &str) -> String {
    let line = |line: &str| if line.is_empty() { "\n".to_owned() } else { format!("    {line}\n") };
    text.lines().map(line).collect()
}

async fn finish(sources: &Sources, platform: bool, out: &mut dyn Write) -> Result<u8> {
    let checked = check::check(sources);
    say(&checked, out)?;
    if !checked.problems().is_empty() {
        return Ok(FAILED);
    }
    let next = if is_running().await { "systemctl reload" } else { "systemctl enable --now" };
    writeln!(out, "\nNext:\n\n    {next} yunion-mps-daemon")?;
    if platform {
        writeln!(
            out,
            "    kubectl rollout restart ds -n onecloud default-host    # so that the platform reads the \
             GPUs again"
        )?;
    } else {
        writeln!(out, "    yunion-mpsctl run --free -- ./a-cuda-program")?;
    }
    Ok(0)
}

fn say(checked: &Checked, out: &mut dyn Write) -> io::Result<()> {
    check::words(checked).iter().try_for_each(|line| writeln!(out, "{}", hanging(line)))
}

async fn is_running() -> bool {
    let asked = async { DaemonProxy::connect().await?.service().await };
    timeout(SIGN_OF_LIFE, asked).await.is_ok_and(|answer| answer.is_ok())
}
