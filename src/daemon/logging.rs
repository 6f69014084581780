//! The log of the service: messages with fields if standard error is the journal, otherwise plain lines.

use std::fmt;
use std::io::Write;

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::Registry;
use tracing_subscriber::field::{MakeVisitor, RecordFields, VisitOutput};
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{DefaultFields, Writer};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::reload;
use tracing_subscriber::util::SubscriberInitExt;

use common::host::standard_error;

pub(crate) type Level = reload::Handle<LevelFilter, Registry>;

pub(super) fn set(handle: &Level, level: tracing::Level) {
    // Reloading the filter fails only after the subscriber was dropped, at the end of the program.
    let _ = handle.reload(LevelFilter::from_level(level));
}

pub(super) fn init() -> Level {
    let (level, handle) = reload::Layer::new(LevelFilter::INFO);
    let registry = Registry::default().with(level);
    let journal = if standard_error::is_journal() { tracing_journald::layer().ok() } else { None };
    match journal {
        Some(journal) => registry.with(journal.with_field_prefix(None)).init(),
        None => {
            let plain = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
            let plain = plain.with_ansi(standard_error::takes_colours());
            let plain = plain.fmt_fields(OneLine(DefaultFields::new()));
            registry.with(plain.with_target(false).boxed()).init();
        }
    }
    handle
}

/// Writes why the service ends, right before its end. The text goes to the journal through standard error, for which the
/// journal knows the unit. For a message with fields, the journal would search for the unit of a process that has ended by
/// then.
pub(super) fn last_words(reason: &str) {
    if standard_error::is_journal() {
        for line in reason.lines() {
            let _ = writeln!(std::io::stderr(), "<3>{line}");
        }
    } else {
        reason.lines().for_each(|line| tracing::error!("{line}"));
    }
}

/// Escapes the control characters in plain lines. A line break in the name of a process could otherwise forge a message of this
/// service.
struct OneLine(DefaultFields);

impl<'writer> FormatFields<'writer> for OneLine {
    fn format_fields<R: RecordFields>(&self, mut writer: Writer<'writer>, fields: R) -> fmt::Result {
        let mut text = String::new();
        let mut visitor = self.0.make_visitor(Writer::new(&mut text));
        fields.record(&mut SkipId(&mut visitor));
        visitor.finish()?;
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

/// Omits the id of a message, which has no use in plain lines.
struct SkipId<'v>(&'v mut dyn Visit);

impl Visit for SkipId<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.record_debug(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() != "message_id" {
            self.0.record_str(field, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::message::{Message, Subject};

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

    fn written(colours: bool, message: impl FnOnce()) -> String {
        let written = Written::default();
        let writer = written.clone();
        let layer = tracing_subscriber::fmt::layer().with_writer(move || writer.clone()).with_ansi(colours);
        let layer = layer.fmt_fields(OneLine(DefaultFields::new()));
        tracing::subscriber::with_default(Registry::default().with(layer), message);
        let text = written.0.lock().unwrap().clone();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn a_plain_line_has_the_fields_but_not_the_id_of_the_message() {
        let about = Subject { slice: Some("00:06.0-1"), ..Subject::default() };
        let text = written(false, || Message::OverBudget.log(about, "too much"));
        assert!(text.contains("WARN") && text.contains("too much mps_slice=\"00:06.0-1\"\n"), "{text:?}");
        assert!(!text.contains("message_id"), "{text:?}");
    }

    #[test]
    fn a_message_is_one_line_whoever_chose_its_words() {
        for colours in [false, true] {
            let text = written(colours, || {
                tracing::warn!(name = "c\rd", "used by a\nERROR forged \u{1b}[2J \u{85}b, caf\u{e9}");
            });
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
