//! Reports the changes of links to a control daemon, and the programs that waited for a control daemon in vain.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::Worker;

/// The most renamed files that one message names.
const MOVED_TOLD: usize = 4;

/// The most waiting programs that one message names.
const WAITED_TOLD: usize = 8;

impl Worker {
    /// Stops the wait of programs for a control daemon, and reports their PIDs. Each of these programs then starts without MPS,
    /// or the driver refuses it.
    pub(super) fn let_go(&mut self) {
        let waited = self.admission.let_go();
        let Some(words) = have_waited(&waited) else { return };
        self.reporter.warning(words);
    }

    /// Reports links that other programs have changed, files that the service has renamed since they were in the way of links,
    /// and links that can't be removed. `other` is the PID of a foreign process that has listened in the pipe directory.
    pub(super) fn report_links(&mut self, pipe_directory: &Path, other: Option<u32>) {
        let (renewed, moved, stuck) = self.admission.take_news();
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
    let at = pipe_directory.display();
    let by = by.map(|pid| format!(": process {pid} listened in {at}")).unwrap_or_default();
    let others = match changed.len() {
        1 => String::new(),
        2 => " and another directory".to_owned(),
        all => format!(" and {} other directories", all.saturating_sub(1)),
    };
    Some(format!(
        "{first}{others} had no link to the control daemon's socket{by}; the service has made the links again"
    ))
}

fn have_waited(pids: &[u32]) -> Option<String> {
    let named: Vec<String> = pids.iter().take(WAITED_TOLD).map(u32::to_string).collect();
    let more = match pids.len().saturating_sub(WAITED_TOLD) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let who = match pids {
        [] => return None,
        [pid] => format!("a program (PID {pid}) waited"),
        _ => format!(
            "{count} programs (PIDs {named}{more}) waited",
            count = pids.len(),
            named = named.join(", ")
        ),
    };
    Some(format!(
        "{who} for a control daemon, but no control daemon took clients; such a program has failed with CUDA \
         error 46 in compute mode EXCLUSIVE_PROCESS, and runs without MPS in any other mode: start each \
         such program again"
    ))
}

fn in_the_way(moved: &[String]) -> String {
    let named = moved.iter().take(MOVED_TOLD).cloned().collect::<Vec<_>>().join("; ");
    match moved.len().saturating_sub(MOVED_TOLD) {
        0 => named,
        more => {
            format!("{named}; {more} more files or directories were in the way of links and were renamed")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_that_have_waited_are_named_as_far_as_a_line_holds_them() {
        assert_eq!(have_waited(&[]), None);
        assert!(have_waited(&[7]).unwrap().starts_with("a program (PID 7) waited for a control daemon, but"));
        let many = have_waited(&(1..=10).collect::<Vec<u32>>()).unwrap();
        assert!(
            many.starts_with(
                "10 programs (PIDs 1, 2, 3, 4, 5, 6, 7, 8 and 2 more) waited for a control daemon"
            ),
            "{many}"
        );
    }

    #[test]
    fn the_first_change_is_named_and_the_others_are_counted() {
        let pipe = Path::new("/mps/pipe");
        let again =
            |changed: &[&str], other| led_again(&changed.iter().map(PathBuf::from).collect(), pipe, other);
        assert_eq!(again(&[], None), None);
        assert_eq!(
            again(&["/mps/slices/a"], Some(7)).unwrap(),
            "/mps/slices/a had no link to the control daemon's socket; the service has made the links again"
        );
        assert_eq!(
            again(&["/mps/slices/a", "/mps/pipe"], Some(7)).unwrap(),
            "/mps/pipe and another directory had no link to the control daemon's socket: process 7 listened \
             in /mps/pipe; the service has made the links again"
        );
        let moved: Vec<String> = (0..6).map(|number| format!("{number} was a FIFO")).collect();
        assert_eq!(in_the_way(&moved[..1]), "0 was a FIFO");
        assert!(in_the_way(&moved).ends_with(
            "3 was a FIFO; 2 more files or directories were in the way of links and were renamed"
        ));
    }
}
