//! Reports changes of files, which are the logs of control daemons.
//!
//! All watches share one inotify instance, since by default the kernel allows only 128 instances for all processes of a user.
//! Without an inotify instance, a task that waits for a change has to check the file periodically.
//!
//! A watch reports one change of a file, and then has to be added again. A control daemon logs every question of the service.
//! With a permanent watch, each such line would wake the service while it waits for the answer.

use common::host::inotify::{is_shortage, new_instance, no_files, shortage};
use common::host::readable::Readable;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::inotify::{self, ReadFlags, WatchFlags};
use rustix::io::Errno;
use tokio::sync::Notify;

use common::host::proc;

pub(crate) const LOOK_PERIOD: Duration = Duration::from_secs(1);

/// All clones share the service's only inotify instance.
#[derive(Debug, Clone, Default)]
pub(crate) struct FileChanges(Arc<Mutex<Shared>>);

#[derive(Debug, Default)]
struct Shared {
    queue: Option<Arc<Readable>>,
    /// The tasks that the next change wakes, by the inotify number of the watch.
    watches: BTreeMap<i32, Vec<Arc<Notify>>>,
    told: Option<Errno>,
}

impl FileChanges {
    pub(crate) fn watch(&self) -> FileWatch {
        FileWatch { changes: self.clone(), changed: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn queue(&self, shared: &mut Shared) -> io::Result<Arc<Readable>> {
        if let Some(queue) = &shared.queue {
            return Ok(Arc::clone(queue));
        }
        let queue = Arc::new(Readable::new(new_instance()?)?);
        shared.queue = Some(Arc::clone(&queue));
        tokio::spawn(pass_on(self.clone(), Arc::clone(&queue)));
        if shared.told.take().is_some() {
            tracing::info!("the service watches the logs of control daemons by inotify again");
        }
        Ok(queue)
    }

    fn warn_of_shortage(shared: &mut Shared, error: &io::Error) {
        let Some(errno) = Errno::from_io_error(error).filter(|errno| is_shortage(*errno)) else {
            tracing::debug!("the log of a control daemon can't be watched by inotify: {error}");
            return;
        };
        if shared.told.replace(errno) != Some(errno) {
            tracing::warn!(
                "{shortage}; until then, the service reads the logs of control daemons once a second",
                shortage = shortage(errno, no_files())
            );
        }
    }
}

/// The files that a task watches. Dropping this value ends the watch.
#[derive(Debug)]
pub(crate) struct FileWatch {
    changes: FileChanges,
    changed: Arc<Notify>,
}

impl FileWatch {
    /// Adds a file to this watch, for one change. The descriptor names the file, since another file may be at its path. A
    /// change before this call is not reported. Returns false if the file can't be watched.
    pub(crate) fn add_file(&self, file: &File) -> bool {
        let path = proc::open_file(proc::OWN, file.as_raw_fd());
        let mut shared = self.changes.lock();
        let queue = self.changes.queue(&mut shared);
        let watch = queue.and_then(|queue| {
            Ok(inotify::add_watch(&*queue, path, WatchFlags::MODIFY | WatchFlags::ONESHOT)?)
        });
        match watch {
            Ok(watch) => {
                let wakes = shared.watches.entry(watch).or_default();
                if !wakes.iter().any(|known| Arc::ptr_eq(known, &self.changed)) {
                    wakes.push(Arc::clone(&self.changed));
                }
                true
            }
            Err(error) => {
                FileChanges::warn_of_shortage(&mut shared, &error);
                false
            }
        }
    }

    /// Returns when a file has changed since it was added. A file that has changed has to be added again.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }
}

impl Drop for FileWatch {
    fn drop(&mut self) {
        let mut shared = self.changes.lock();
        let Shared { queue, watches, .. } = &mut *shared;
        watches.retain(|watch, wakes| {
            wakes.retain(|known| !Arc::ptr_eq(known, &self.changed));
            if wakes.is_empty()
                && let Some(queue) = queue
            {
                // Removing a watch fails if the file was removed: the kernel has then removed the watch itself.
                let _ = inotify::remove_watch(&**queue, *watch);
            }
            !wakes.is_empty()
        });
    }
}

async fn pass_on(changes: FileChanges, queue: Arc<Readable>) {
    loop {
        match queue.until(read).await {
            Ok(changed) => wake(&mut changes.lock(), changed.as_ref()),
            Err(error) => {
                // The wait fails only while the runtime shuts down, so the task can end.
                tracing::debug!("the changes that inotify reports can't be read: {error}");
                return;
            }
        }
    }
}

/// The watches of files that have changed. None if any file may have changed: the kernel's queue was full, and the kernel has
/// dropped changes.
fn read(queue: BorrowedFd<'_>) -> io::Result<Option<BTreeSet<i32>>> {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(queue, &mut buffer);
    let mut changed = Some(BTreeSet::new());
    loop {
        match reader.next() {
            Ok(event) => {
                if event.events().contains(ReadFlags::QUEUE_OVERFLOW) {
                    changed = None;
                } else if let Some(changed) = &mut changed {
                    changed.insert(event.wd());
                }
                // Further changes stay in the kernel's queue until the next call.
                if reader.is_buffer_empty() {
                    return Ok(changed);
                }
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Wakes the tasks of the watches in `changed`, or all tasks if `changed` is None. Removes these watches from `shared`, since
/// the kernel has removed them after their one change.
fn wake(shared: &mut Shared, changed: Option<&BTreeSet<i32>>) {
    shared.watches.retain(|watch, wakes| {
        let touched = changed.is_none_or(|changed| changed.contains(watch));
        wakes.iter().filter(|_| touched).for_each(|wake| wake.notify_one());
        !touched
    });
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;
    use std::os::fd::AsFd;

    use super::*;

    async fn resolves(watch: &FileWatch) -> bool {
        tokio::time::timeout(Duration::from_secs(30), watch.changed()).await.is_ok()
    }

    fn watches(changes: &FileChanges) -> usize {
        changes.lock().watches.len()
    }

    #[tokio::test]
    async fn each_holder_hears_of_its_own_files() {
        let directory = tempfile::tempdir().unwrap();
        let [log, other_log] = ["log", "other"].map(|name| directory.path().join(name));
        let changes = FileChanges::default();
        let [one, another, other] = [changes.watch(), changes.watch(), changes.watch()];
        for (watch, path) in [(&one, &log), (&another, &log), (&another, &log), (&other, &other_log)] {
            assert!(watch.add_file(&File::options().append(true).create(true).open(path).unwrap()));
        }
        assert_eq!(watches(&changes), 2);
        fs::write(&log, "line\n").unwrap();
        assert!(resolves(&one).await && resolves(&another).await);
        let nothing = tokio::time::timeout(Duration::ZERO, other.changed()).await;
        assert!(nothing.is_err(), "the other log has not changed");
        drop(one);
        assert!(another.add_file(&File::open(&log).unwrap()));
        fs::write(&log, "another line\n").unwrap();
        assert!(resolves(&another).await);
        fs::remove_file(&other_log).unwrap();
        drop((another, other));
        assert_eq!(watches(&changes), 0);
    }

    #[tokio::test]
    async fn lines_that_nobody_waits_for_are_told_once() {
        let directory = tempfile::tempdir().unwrap();
        let paths = ["log", "other"].map(|name| directory.path().join(name));
        let changes = FileChanges::default();
        let watch = changes.watch();
        let mut logs = paths.map(|path| File::create(path).unwrap());
        assert!(logs.iter().all(|log| watch.add_file(log)));
        let queue = changes.lock().queue.clone().unwrap();
        let mut told = Vec::new();
        for line in ["line\n", "another\n"] {
            for log in &mut logs {
                log.write_all(line.as_bytes()).unwrap();
            }
            while let Ok(changes) = read(queue.as_fd()) {
                told.extend(changes.unwrap());
            }
        }
        assert_eq!(told.len(), 2, "{told:?}");
    }

    #[tokio::test]
    async fn lost_changes_wake_everybody() {
        let directory = tempfile::tempdir().unwrap();
        let changes = FileChanges::default();
        let watch = changes.watch();
        let file = File::create(directory.path().join("log")).unwrap();
        assert!(watch.add_file(&file));
        wake(&mut changes.lock(), None);
        assert!(resolves(&watch).await);
    }

    #[test]
    fn each_shortage_names_what_to_raise() {
        for (errno, no_files, raise) in [
            (Errno::MFILE, false, "fs.inotify.max_user_instances=8192"),
            (Errno::MFILE, true, "LimitNOFILE="),
            (Errno::NOSPC, false, "fs.inotify.max_user_watches=1048576"),
            (Errno::NFILE, false, "fs.file-max"),
        ] {
            let reason = shortage(errno, no_files);
            assert!(is_shortage(errno) && reason.remedy.contains(raise), "{reason}");
        }
        assert!(!is_shortage(Errno::NOENT));
    }
}
