//! The log of this program. The log goes to the journal if standard error is connected to the journal, otherwise to standard
//! error, as in a pod.

use common::host::standard_error;
use tracing_subscriber::Registry;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

pub(crate) fn init() {
    let registry = Registry::default().with(LevelFilter::INFO);
    let journal = if standard_error::is_journal() { tracing_journald::layer().ok() } else { None };
    match journal {
        Some(journal) => registry.with(journal.with_field_prefix(None)).init(),
        None => {
            let plain = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
            let plain = plain.with_ansi(standard_error::takes_colours());
            registry.with(plain.with_target(false).boxed()).init();
        }
    }
}
