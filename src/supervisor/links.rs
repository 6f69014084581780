//! The directories that lead clients to a control daemon: its pipe directory, if its sockets are in a private one, and the
//! directories of its slices.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use tokio::time::Instant;

use crate::mps::control::listener;
use crate::mps::directories::{self, BadDirectory};
use crate::mps::link_watch::LinkWatch;
use crate::mps::links::Socket;
use crate::plan::ControlDaemonPlan;

use super::Serving;
use super::hindrance::Hindrance;

/// The shortest time between two looks at directories that somebody changes. A container that has one can change it all
/// the time.
const LOOK_PAUSE: Duration = Duration::from_millis(100);

/// So many looks in a row have to fail before the control daemon counts as hindered: somebody may have changed a directory
/// just while it was made.
const FAILURES: u32 = 3;

/// The shortest time between two messages about them.
const NEWS_PAUSE: Duration = Duration::from_secs(60);

/// Gives the private directory up where no link can lead to it from the pipe directory. Returns that private directory.
pub(crate) fn give_up_private_directory(plan: &mut ControlDaemonPlan) -> Option<PathBuf> {
    let beside = |private: &PathBuf| directories::on_one_mount(private, &plan.pipe_directory);
    if plan.private_directory.as_ref().is_none_or(beside) { None } else { plan.private_directory.take() }
}

/// The state of these directories. It outlives a control daemon, as the directories do.
#[derive(Debug, Default)]
pub(super) struct Links {
    /// None before there is a directory to watch, and where the kernel has no queue left. The regular check looks too.
    watch: Option<LinkWatch>,
    /// The directories that lead to the control daemon, unless somebody else has changed them.
    lead: BTreeSet<PathBuf>,
    /// The time to look at them, since somebody has changed one.
    pub(super) look_at: Option<Instant>,
    /// The time of the last look.
    looked: Option<Instant>,
    /// The looks in a row that have failed.
    failures: u32,
    news: News,
}

impl Links {
    /// Resolves when somebody has changed one of the directories and nobody was told yet.
    pub(super) async fn touched(&self) {
        match &self.watch {
            Some(watch) if self.look_at.is_none() => {
                if let Err(error) = watch.touched().await {
                    tracing::debug!("the directories of links can't be watched: {error}");
                    std::future::pending::<()>().await;
                }
            }
            _ => std::future::pending::<()>().await,
        }
    }

    pub(super) fn look_soon(&mut self) {
        let now = Instant::now();
        self.look_at = Some(self.looked.map_or(now, |looked| now.max(looked + LOOK_PAUSE)));
    }

    /// Forgets what led to a control daemon that has ended: the next one makes another socket.
    pub(super) fn lead_nowhere(&mut self) {
        self.lead.clear();
    }

    /// Takes in the directories that lead to the control daemon, and watches them and the parent of the slices' directories.
    fn lead(&mut self, lead: BTreeSet<PathBuf>, parent: Option<&PathBuf>) {
        if self.watch.is_none() && !lead.is_empty() {
            self.watch = LinkWatch::new()
                .inspect_err(|error| tracing::debug!("the directories of links can't be watched: {error}"))
                .ok();
        }
        for directory in lead.iter().chain(parent) {
            if let Some(Err(error)) = self.watch.as_ref().map(|watch| watch.add(directory)) {
                tracing::debug!("{} can't be watched: {error}", directory.display());
            }
        }
        self.lead = lead;
    }
}

/// The messages about directories that somebody else has changed. There may be one each time a container takes its link
/// away, so most of them are only counted.
#[derive(Debug, Default)]
struct News {
    quiet_until: Option<Instant>,
    untold: usize,
}

impl News {
    /// The message about changes, if it is time for one.
    fn tell(&mut self, changed: &[PathBuf], by: Option<u32>, now: Instant) -> Option<String> {
        let first = changed.first()?;
        if self.quiet_until.is_some_and(|until| now < until) {
            self.untold += changed.len();
            return None;
        }
        self.quiet_until = Some(now + NEWS_PAUSE);
        let before = match std::mem::take(&mut self.untold) {
            0 => String::new(),
            untold => format!("; links were renewed {untold} times more since the last such message"),
        };
        let by = by.map(|pid| format!(": process {pid} listened there")).unwrap_or_default();
        let (others, again) = match changed.len() {
            1 => (String::new(), "does"),
            2 => (" and another directory".to_owned(), "do"),
            all => (format!(" and {} other directories", all.saturating_sub(1)), "do"),
        };
        let first = first.display();
        Some(format!("{first}{others} did not lead to the control daemon{by}, and {again} again{before}"))
    }
}

impl Serving<'_> {
    /// Makes the pipe directory and the directory of each slice lead to the control daemon, unless they are drained.
    /// Returns the directories that did before, and have been changed by somebody else.
    pub(super) fn link(&mut self) -> Result<Vec<PathBuf>, BadDirectory> {
        let (plan, running) = (&self.worker.order.plan, &self.run.running);
        self.worker.links.look_at = None;
        self.worker.links.looked = Some(Instant::now());
        if running.private_directory.is_none() && plan.slice_directories.is_none() {
            return Ok(Vec::new());
        }
        let socket = Socket::of(running.control_directory(), running.private_directory.is_some())?;
        let Some(socket) = socket else { return Ok(Vec::new()) };
        let drained = self.worker.tools.state_file.lock().drained().clone();
        let (mut lead, mut renewed) = (BTreeSet::new(), Vec::new());
        if running.private_directory.is_some() {
            let open = plan.slices().any(|(gpu, slice, _)| !drained.has(&gpu, &slice));
            if socket.lead_from(&running.pipe_directory, open)? && open {
                renewed.push(running.pipe_directory.clone());
            }
            lead.extend(open.then(|| running.pipe_directory.clone()));
        }
        if let Some(parent) = &plan.slice_directories {
            let open = plan.slices().filter(|(gpu, slice, _)| !drained.has(gpu, slice));
            let names: BTreeSet<String> = open.map(|(_, _, name)| name).collect();
            renewed.extend(socket.lead_from_each(parent, &names)?);
            lead.extend(names.iter().map(|name| parent.join(name)));
        }
        let links = &mut self.worker.links;
        renewed.retain(|directory| links.lead.contains(directory));
        links.lead(lead, plan.slice_directories.as_ref());
        Ok(renewed)
    }

    /// Renews the links that somebody has taken away or replaced.
    pub(super) fn keep_links(&mut self) {
        let running = &self.run.running;
        let other = listener(&running.pipe_directory).filter(|pid| *pid != running.process.pid);
        match self.link() {
            Ok(changed) => {
                self.worker.links.failures = 0;
                let by = other.filter(|_| changed.contains(&self.run.running.pipe_directory));
                if let Some(news) = self.worker.links.news.tell(&changed, by, Instant::now()) {
                    self.worker.reporter.warning(news);
                }
            }
            Err(bad) => {
                let links = &mut self.worker.links;
                links.failures = links.failures.saturating_add(1);
                if links.failures < FAILURES {
                    tracing::debug!("{bad}; tried again");
                    links.look_soon();
                } else {
                    self.run.hindrances.take_in(Some(Hindrance::BadDirectory(bad.to_string())));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_without_end_are_counted() {
        let mut news = News::default();
        let now = Instant::now();
        let one = [PathBuf::from("/mps/slices/a")];
        let two = [PathBuf::from("/mps/pipe"), PathBuf::from("/mps/slices/a")];
        assert_eq!(news.tell(&[], None, now), None);
        assert_eq!(
            news.tell(&one, None, now).unwrap(),
            "/mps/slices/a did not lead to the control daemon, and does again"
        );
        for _ in 0..3 {
            assert_eq!(news.tell(&two, Some(7), now + NEWS_PAUSE / 2), None);
        }
        assert_eq!(
            news.tell(&two, Some(7), now + NEWS_PAUSE).unwrap(),
            "/mps/pipe and another directory did not lead to the control daemon: process 7 listened there, and do \
             again; links were renewed 6 times more since the last such message"
        );
        assert_eq!(
            news.tell(&one, None, now + 3 * NEWS_PAUSE).unwrap(),
            "/mps/slices/a did not lead to the control daemon, and does again"
        );
    }
}
