//! The links to a control daemon: they are made when it has been told its limits, and the health check puts back what
//! somebody has changed. Nobody can change them where directories have the immutable flag.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::Worker;
use super::admission::LinkNews;

/// The most things in the way that one message names.
const MOVED_TOLD: usize = 4;

impl Worker {
    /// Says what others have changed. `other` is the process that has listened in the pipe directory.
    pub(super) fn report_links(&mut self, pipe_directory: &Path, other: Option<u32>) {
        let LinkNews { renewed, moved, stuck } = self.admission.take_news();
        if let Some(again) = led_again(&renewed, pipe_directory, other) {
            self.reporter.warning(again);
        }
        if !moved.is_empty() {
            self.reporter.warning(in_the_way(&moved));
        }
        if stuck != self.links_stuck {
            for link in &stuck {
                self.reporter.warning(link.clone());
            }
            self.links_stuck = stuck;
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
