//! The manual pages: the command line from clap, and after it the text that is written by hand in packaging/man.

use std::path::Path;
use std::{fs, io};

use clap::Command;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

const DAEMON_TAIL: &str = include_str!("../../man/yunion-mps-daemon.8.tail");
const DEVICE_PLUGIN_TAIL: &str = include_str!("../../man/yunion-mps-device-plugin.8.tail");
const CTL_TAIL: &str = include_str!("../../man/yunion-mpsctl.1.tail");

/// Output for the subcommands that print little on a simulated GPU that is served: from a real GPU, from a host without
/// configuration, of a control group, or a screen. The first line names the GPU.
const ELSEWHERE: [(&str, &str); 5] = [
    ("bind", include_str!("../../man/examples/bind.txt")),
    ("unbind", include_str!("../../man/examples/unbind.txt")),
    ("probe", include_str!("../../man/examples/probe.txt")),
    ("setup", include_str!("../../man/examples/setup.txt")),
    ("top", include_str!("../../man/examples/top.txt")),
];

/// The version in recorded output, which is the same for every version of this program.
const RECORDED: &str = "Version:         1.0.0";

/// The beginnings of the examples and of the exit status in a command's help.
const EXAMPLES: &str = "Examples:\n";
const EXIT_STATUS: &str = "Exit status: ";

/// The macros of `clap_mangen` and of this program begin with these two lines, each time. A page needs them once.
const APOSTROPHE: [&str; 2] = [r".ie \n(.g .ds Aq \(aq", r".el .ds Aq '"];

/// yunion-mps-daemon(8).
pub(crate) fn daemon(command: &Command) -> io::Result<String> {
    of_a_service(command, DAEMON_TAIL)
}

/// yunion-mps-device-plugin(8).
pub(crate) fn device_plugin(command: &Command) -> io::Result<String> {
    of_a_service(command, DEVICE_PLUGIN_TAIL)
}

fn of_a_service(command: &Command, tail: &str) -> io::Result<String> {
    let mut page = Page::new(command, "8", "System Administration")?;
    page.control("SH", &["OPTIONS"])?;
    page.options(command)?;
    page.after_help(command, true)?;
    Ok(page.end(tail))
}

/// yunion-mpsctl(1), with a section for each subcommand.
pub(crate) fn ctl(command: &Command, golden: &Path) -> io::Result<String> {
    let mut page = Page::new(command, "1", "User Commands")?;
    page.control("SH", &["OPTIONS"])?;
    page.options(command)?;
    page.control("SH", &["SUBCOMMANDS"])?;
    for (heading, names) in mpsctl::GROUPS {
        page.control("TP", &[])?;
        page.write(|roff| {
            roff.text([bold(heading)]).text([roman(names.join(", "))]);
        })?;
    }
    // It is built first: only then the usage of a subcommand begins with the program's name.
    let mut built = command.clone();
    built.build();
    for subcommand in built.get_subcommands().filter(|subcommand| subcommand.get_name() != "help") {
        page.control("SS", &[subcommand.get_name()])?;
        page.usage(subcommand)?;
        page.control("PP", &[])?;
        page.about(subcommand)?;
        // Each subcommand has --help, which the page mentions only once, at its beginning.
        page.options(&subcommand.clone().mut_arg("help", |help| help.hide(true)))?;
        page.after_help(subcommand, false)?;
        let name = subcommand.get_name();
        match ELSEWHERE.iter().find(|(measured, _)| *measured == name) {
            Some((_, text)) => page.output(text)?,
            // Tables are recorded in other files than other texts.
            None => {
                page.printed(&golden.join(format!("{name}.txt")))?;
                page.printed(&golden.join(format!("screens/{name}.txt")))?;
            }
        }
    }
    page.after_help(command, true)?;
    Ok(page.end(CTL_TAIL))
}

/// A page that is being written.
struct Page(Vec<u8>);

impl Page {
    /// Title, name, synopsis and description. The title has no date: the page must depend only on the source.
    fn new(command: &Command, section: &str, manual: &str) -> io::Result<Self> {
        let mut page = Self(Vec::new());
        let title = command.get_name().to_uppercase();
        let version = concat!("yunion-mps-daemon ", env!("CARGO_PKG_VERSION"));
        page.control("TH", &[&title, section, "\"\"", version, manual])?;
        Man::new(command.clone()).render_name_section(&mut page.0)?;
        page.control("SH", &["SYNOPSIS"])?;
        page.usage(command)?;
        page.control("SH", &["DESCRIPTION"])?;
        page.about(command)?;
        Ok(page)
    }

    /// The complete page, with the text that is written by hand.
    fn end(self, tail: &str) -> String {
        let text = String::from_utf8_lossy(&self.0).into_owned();
        let lines = text.lines().filter(|line| !APOSTROPHE.contains(line));
        APOSTROPHE.into_iter().chain(lines).chain(tail.lines()).flat_map(|line| [line, "\n"]).collect()
    }

    fn write(&mut self, write: impl FnOnce(&mut Roff)) -> io::Result<()> {
        let mut roff = Roff::new();
        write(&mut roff);
        roff.to_writer(&mut self.0)
    }

    fn control(&mut self, name: &str, arguments: &[&str]) -> io::Result<()> {
        self.write(|roff| {
            roff.control(name, arguments.iter().copied());
        })
    }

    /// The usage as `--help` shows it: `clap_mangen`'s synopsis leaves out the values of options.
    fn usage(&mut self, command: &Command) -> io::Result<()> {
        let usage = command.clone().render_usage().to_string();
        self.write(|roff| {
            for (at, line) in usage.trim_start_matches("Usage:").trim().lines().enumerate() {
                if at > 0 {
                    roff.control("br", []);
                }
                roff.text([bold(line.trim())]);
            }
        })
    }

    fn about(&mut self, command: &Command) -> io::Result<()> {
        let Some(about) = command.get_about() else { return Ok(()) };
        self.write(|roff| {
            roff.text([roman(format!("{about}."))]);
        })
    }

    /// The options. The caller has written the heading.
    fn options(&mut self, command: &Command) -> io::Result<()> {
        let mut section = Vec::new();
        Man::new(command.clone()).render_options_section(&mut section)?;
        self.0.extend(String::from_utf8_lossy(&section).replacen(".SH OPTIONS\n", "", 1).into_bytes());
        Ok(())
    }

    /// The text below the options in `--help` of the program or of a subcommand: prose, exit status, examples.
    fn after_help(&mut self, command: &Command, whole: bool) -> io::Result<()> {
        let Some(help) = command.get_after_help().map(ToString::to_string) else { return Ok(()) };
        let (text, examples) = help.split_once(EXAMPLES).unwrap_or((&help, ""));
        for paragraph in text.split("\n\n").map(str::trim).filter(|paragraph| !paragraph.is_empty()) {
            match paragraph.strip_prefix(EXIT_STATUS) {
                Some(status) if whole => {
                    self.control("SH", &["EXIT STATUS"])?;
                    self.write(|roff| {
                        roff.text([roman(status)]);
                    })?;
                }
                _ => self.write(|roff| {
                    roff.control("PP", []).text([roman(paragraph)]);
                })?,
            }
        }
        if examples.is_empty() {
            return Ok(());
        }
        if whole {
            self.control("SH", &["EXAMPLES"])?;
        } else {
            self.write(|roff| {
                roff.control("PP", []).text([roman("Examples:")]);
            })?;
        }
        self.verbatim(examples.lines().map(str::trim))
    }

    /// The recorded output of the subcommand, if there is one.
    fn printed(&mut self, file: &Path) -> io::Result<()> {
        let text = match fs::read_to_string(file) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(io::Error::new(error.kind(), format!("{}: {error}", file.display()))),
        };
        let text = text.replace(RECORDED, concat!("Version:         ", env!("CARGO_PKG_VERSION")));
        self.output(&format!("Output, on a host with one Tesla P40 in 4 slices:\n{text}"))
    }

    /// A line of introduction, and below it the output, without indentation, since it was recorded with 80 columns.
    fn output(&mut self, text: &str) -> io::Result<()> {
        let (introduction, printed) = text.split_once('\n').unwrap_or((text, ""));
        self.write(|roff| {
            roff.control("PP", []).text([roman(introduction)]);
        })?;
        self.control("in", &["0"])?;
        self.as_it_is(printed.lines())?;
        self.control("in", &[])
    }

    /// Lines to type.
    fn verbatim<'l>(&mut self, lines: impl Iterator<Item = &'l str>) -> io::Result<()> {
        self.control("RS", &["4"])?;
        self.as_it_is(lines)?;
        self.control("RE", &[])
    }

    fn as_it_is<'l>(&mut self, lines: impl Iterator<Item = &'l str>) -> io::Result<()> {
        self.write(|roff| {
            roff.control("nf", []);
            for line in lines {
                roff.text([roman(line)]);
            }
            roff.control("fi", []);
        })
    }
}
