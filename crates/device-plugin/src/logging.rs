//! One line for each thing that this program does: to the journal where standard error is the journal, otherwise to standard
//! error, as in a pod.

use std::io::IsTerminal;
use std::os::fd::AsFd;

use tracing_subscriber::Registry;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

/// Sets it up, once.
pub(crate) fn init() {
    let registry = Registry::default().with(LevelFilter::INFO);
    let journal = if stderr_is_journal() { tracing_journald::layer().ok() } else { None };
    match journal {
        Some(journal) => registry.with(journal.with_field_prefix(None)).init(),
        None => {
            let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            let plain = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(colours);
            registry.with(plain.with_target(false).boxed()).init();
        }
    }
}

/// systemd says in `JOURNAL_STREAM` which device and inode its socket has.
fn stderr_is_journal() -> bool {
    let said = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    let Some((device, inode)) = said.split_once(':') else { return false };
    let Ok(stat) = rustix::fs::fstat(std::io::stderr().as_fd()) else { return false };
    device.parse() == Ok(stat.st_dev) && inode.parse() == Ok(stat.st_ino)
}
