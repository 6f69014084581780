//! Where messages go: to the journal with their fields where standard error is the journal, as plain lines otherwise.

use std::io::{IsTerminal, Write};
use std::os::fd::AsFd;

use tracing::level_filters::LevelFilter;
use tracing_subscriber::Registry;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::reload;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::LogLevel;

/// Changes the level while the program runs.
#[derive(Debug, Clone)]
pub struct Level(reload::Handle<LevelFilter, Registry>);

impl Level {
    /// From now on, messages below this level are dropped.
    pub fn set(&self, level: LogLevel) {
        // It fails only once the subscriber is gone, with the program.
        let _ = self.0.reload(filter(level));
    }
}

fn filter(level: LogLevel) -> LevelFilter {
    match level {
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Error => LevelFilter::ERROR,
    }
}

/// Sets logging up, once, at the default level.
pub fn init() -> Level {
    let (level, handle) = reload::Layer::new(filter(LogLevel::default()));
    let registry = Registry::default().with(level);
    let journal = if stderr_is_journal() { tracing_journald::layer().ok() } else { None };
    match journal {
        Some(journal) => registry.with(journal.with_field_prefix(None)).init(),
        None => {
            let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            let plain = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(colours);
            registry.with(plain.with_target(false).boxed()).init();
        }
    }
    Level(handle)
}

/// Says why the program ends, right before it does. To the journal this goes by way of standard error, which knows its
/// unit: of a message with fields the journal looks that up by the process, which is gone by then.
pub fn last_words(reason: &str) {
    if stderr_is_journal() {
        for line in reason.lines() {
            let _ = writeln!(std::io::stderr(), "<3>{line}");
        }
    } else {
        tracing::error!("{reason}");
    }
}

/// systemd says in `JOURNAL_STREAM` which device and inode its socket has; a redirected standard error has others.
fn stderr_is_journal() -> bool {
    let said = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    let Some((device, inode)) = said.split_once(':') else { return false };
    let Ok(stat) = rustix::fs::fstat(std::io::stderr().as_fd()) else { return false };
    device.parse() == Ok(stat.st_dev) && inode.parse() == Ok(stat.st_ino)
}
