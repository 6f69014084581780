//! Messages go to the journal with their fields if standard error is the journal, and are plain lines otherwise.

use std::fmt;
use std::io::{IsTerminal, Write};
use std::os::fd::AsFd;

use tracing::level_filters::LevelFilter;
use tracing_subscriber::Registry;
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{DefaultFields, Writer};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::reload;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::LogLevel;

/// Changes the level while the program runs.
#[derive(Debug, Clone)]
pub(crate) struct Level(reload::Handle<LevelFilter, Registry>);

impl Level {
    /// From now on, messages below this level are dropped.
    pub(crate) fn set(&self, level: LogLevel) {
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
pub(super) fn init() -> Level {
    let (level, handle) = reload::Layer::new(filter(LogLevel::default()));
    let registry = Registry::default().with(level);
    let journal = if stderr_is_journal() { tracing_journald::layer().ok() } else { None };
    match journal {
        Some(journal) => registry.with(journal.with_field_prefix(None)).init(),
        None => {
            let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            let plain = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(colours);
            let plain = plain.fmt_fields(OneLine(DefaultFields::new()));
            registry.with(plain.with_target(false).boxed()).init();
        }
    }
    Level(handle)
}

/// Says why the program ends, right before the end. This message goes to the journal by way of standard error, which knows
/// its unit. For a message with fields the journal looks up the process, which is gone by then.
pub(super) fn last_words(reason: &str) {
    if stderr_is_journal() {
        for line in reason.lines() {
            let _ = writeln!(std::io::stderr(), "<3>{line}");
        }
    } else {
        reason.lines().for_each(|line| tracing::error!("{line}"));
    }
}

/// Writes a message and its fields without control characters: a line break in the name of a process would look like a
/// message of this service.
struct OneLine(DefaultFields);

impl<'writer> FormatFields<'writer> for OneLine {
    fn format_fields<R: RecordFields>(&self, mut writer: Writer<'writer>, fields: R) -> fmt::Result {
        let mut text = String::new();
        self.0.format_fields(Writer::new(&mut text), fields)?;
        for character in text.chars() {
            if character.is_control() {
                write!(writer, "{}", character.escape_default())?;
            } else {
                writer.write_char(character)?;
            }
        }
        Ok(())
    }
}

/// systemd says in `JOURNAL_STREAM` which device and inode its socket has; a redirected standard error has others.
fn stderr_is_journal() -> bool {
    let said = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    let Some((device, inode)) = said.split_once(':') else { return false };
    let Ok(stat) = rustix::fs::fstat(std::io::stderr().as_fd()) else { return false };
    device.parse() == Ok(stat.st_dev) && inode.parse() == Ok(stat.st_ino)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_message_is_one_line_whoever_chose_its_words() {
        for colours in [false, true] {
            let written = Written::default();
            let writer = written.clone();
            let layer =
                tracing_subscriber::fmt::layer().with_writer(move || writer.clone()).with_ansi(colours);
            let layer = layer.fmt_fields(OneLine(DefaultFields::new()));
            tracing::subscriber::with_default(Registry::default().with(layer), || {
                tracing::warn!(name = "c\rd", "used by a\nERROR forged \u{1b}[2J \u{85}b, caf\u{e9}");
            });
            let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
            assert_eq!(text.lines().count(), 1, "{text:?}");
            assert!(text.contains("used by a\\nERROR forged "), "{text:?}");
            assert!(
                !text.contains("\u{1b}[2J") && !text.contains('\r') && !text.contains('\u{85}'),
                "{text:?}"
            );
            assert!(text.contains("b, caf\u{e9}"), "{text:?}");
        }
    }
}
