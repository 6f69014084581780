//! The links to a control daemon: they are made when it has been told its limits, and the health check puts back what
//! somebody has changed. Nobody can change them where directories have the immutable flag.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use common::host::socket::listener;

use super::admission::LinkEvents;
use super::blocker::Blocker;
use super::{Failure, Serving};

/// The most things in the way that one message names.
const MOVED_TOLD: usize = 4;

impl Serving<'_> {
    /// Makes the directories lead to the control daemon, which has been told the limits of the order. A failure has a pause
    /// before the next start: a blocker would end an idle control daemon at once, again and again.
    pub(super) fn lead_here(&mut self) -> Result<(), Failure> {
        let admission = &self.worker.admission;
        let led = admission.lead(&self.run.running, &self.worker.order.plan);
        self.run.running.slice_directories = admission.slice_directories();
        self.report_links(None);
        led.map_err(|bad| Failure::Waiting(bad.to_string()))
    }

    /// Renews the links that somebody has taken away or replaced.
    pub(super) fn keep_links(&mut self) {
        let running = &self.run.running;
        let other = listener(&running.pipe_directory).filter(|pid| *pid != running.process.pid);
        if let Err(bad) = self.worker.admission.apply() {
            self.run.blockers.put(Blocker::BadDirectory(bad.to_string()));
        }
        self.report_links(other);
    }

    /// Says what others have changed. `other` is the process that has listened in the pipe directory.
    fn report_links(&mut self, other: Option<u32>) {
        let LinkEvents { renewed, moved, stuck } = self.worker.admission.take_events();
        let reporter = &self.worker.reporter;
        if let Some(again) = led_again(&renewed, &self.run.running.pipe_directory, other) {
            reporter.warning(again);
        }
        if !moved.is_empty() {
            reporter.warning(in_the_way(&moved));
        }
        if stuck != self.worker.links_stuck {
            for link in &stuck {
                reporter.warning(link.clone());
            }
            self.worker.links_stuck = stuck;
        }
    }
}

fn led_again(changed: &BTreeSet<PathBuf>, pipe_directory: &Path, other: Option<u32>) -> Option<String> {
    let first = changed.first()?.display();
    let by = other.filter(|_| changed.contains(pipe_directory));
    let by = by.map(|pid| format!(": process {pid} listened there")).unwrap_or_default();
    let (others, again) = match changed.len() {
        1 => (String::new(), "does"),
        2 => (" and another directory".to_owned(), "do"),
        all => (format!(" and {} other directories", all.saturating_sub(1)), "do"),
    };
    Some(format!("{first}{others} did not lead to the control daemon{by}, and {again} again"))
}

fn in_the_way(moved: &[String]) -> String {
    let named = moved.iter().take(MOVED_TOLD).cloned().collect::<Vec<_>>().join("; ");
    match moved.len().saturating_sub(MOVED_TOLD) {
        0 => named,
        more => format!("{named}; {more} more were in the way, and are renamed"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_change_is_named_and_the_others_are_counted() {
        let pipe = Path::new("/mps/pipe");
        let again =
            |changed: &[&str], other| led_again(&changed.iter().map(PathBuf::from).collect(), pipe, other);
        assert_eq!(again(&[], None), None);
        assert_eq!(
            again(&["/mps/slices/a"], Some(7)).unwrap(),
            "/mps/slices/a did not lead to the control daemon, and does again"
        );
        assert_eq!(
            again(&["/mps/slices/a", "/mps/pipe"], Some(7)).unwrap(),
            "/mps/pipe and another directory did not lead to the control daemon: process 7 listened there, and do again"
        );
        let moved: Vec<String> = (0..6).map(|number| format!("{number} was a FIFO")).collect();
        assert_eq!(in_the_way(&moved[..1]), "0 was a FIFO");
        assert!(in_the_way(&moved).ends_with("3 was a FIFO; 2 more were in the way, and are renamed"));
    }
}
