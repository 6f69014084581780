//! The state file: facts that must survive a restart or a crash of the service, such as its control daemons, the former compute
//! modes and the bindings.
//!
//! The file is in the runtime directory, which exists until the next boot. The control daemons and the changed compute modes do
//! not survive a boot either.

use common::state_file::{Contents, FILE, MAX_BYTES, Running, read};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use mps_core::bindings::Bindings;
use mps_core::terms::{DaemonId, GpuId};

use crate::supervisor::runtime_directory::RuntimeDirectory;
use common::bindings::WrittenBindings;
use common::drained::{ClosedDevices, Drained};
use common::host::compute_mode::ComputeMode;
use common::whole_file;

#[derive(Debug, Clone)]
pub(crate) struct SharedStateFile(Arc<Mutex<StateFile>>);

impl SharedStateFile {
    pub(crate) fn new(state_file: StateFile) -> Self {
        Self(Arc::new(Mutex::new(state_file)))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, StateFile> {
        // Every method leaves the state file complete, even after a panic in another thread. So a poisoned lock can be used.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
pub(crate) struct StateFile {
    directory: RuntimeDirectory,
    contents: Contents,
    written: WrittenBindings,
    /// The [`stamp`] of the file after the service last read or wrote it. None if there was no file.
    whole: Option<(u64, u64, SystemTime)>,
}

/// The inode, the length and the modification time of a file. If they differ from before, another program has changed or
/// replaced the file.
fn stamp(file: &Path) -> Option<(u64, u64, SystemTime)> {
    let found = fs::symlink_metadata(file).ok()?;
    Some((found.ino(), found.len(), found.modified().ok()?))
}

impl StateFile {
    /// Opens the state file in `directory`. A damaged file counts as empty and causes a warning, and the next change overwrites
    /// it.
    pub(crate) fn open(directory: RuntimeDirectory) -> Self {
        let file = directory.path().join(FILE);
        let whole = stamp(&file);
        let contents = read(&file).unwrap_or_else(|what| {
            tracing::warn!(
                "{file}: {what}, so the service treats its running control daemons as foreign, restores no \
                 compute mode, and treats no slice as drained; drain slices again with yunion-mpsctl drain",
                file = file.display()
            );
            None
        });
        let written = WrittenBindings::default();
        Self { directory, contents: contents.unwrap_or_default(), written, whole }
    }

    /// Records the compute mode of a GPU before the service changes it, and the new mode. If a former mode is already recorded,
    /// that record stays, since it is the mode to restore.
    pub(crate) fn remember_compute_mode(
        &mut self,
        uuid: &str,
        mode: ComputeMode,
        ours: ComputeMode,
    ) -> io::Result<()> {
        self.change(|contents| {
            contents.previous_compute_modes.entry(uuid.to_owned()).or_insert_with(|| mode.to_string());
            contents.compute_modes_set.insert(uuid.to_owned(), ours.to_string());
        })
    }

    /// The compute mode to restore. None if the service has not changed the mode.
    pub(crate) fn previous_compute_mode(&self, uuid: &str) -> Option<ComputeMode> {
        let word = self.contents.previous_compute_modes.get(uuid)?;
        Some(word.parse().unwrap_or(ComputeMode::Default))
    }

    pub(crate) fn compute_mode_set(&self, uuid: &str) -> ComputeMode {
        let word = self.contents.compute_modes_set.get(uuid);
        // A state file of an earlier version of the service does not say which mode was set. That version set only
        // `EXCLUSIVE_PROCESS`.
        word.and_then(|word| word.parse().ok()).unwrap_or(ComputeMode::ExclusiveProcess)
    }

    pub(crate) fn changed_gpus(&self) -> BTreeSet<String> {
        self.contents.previous_compute_modes.keys().cloned().collect()
    }

    pub(crate) fn forget_compute_mode(&mut self, uuid: &str) -> io::Result<()> {
        self.change(|contents| {
            contents.previous_compute_modes.remove(uuid);
            contents.compute_modes_set.remove(uuid);
        })
    }

    /// Records a control daemon. A new control daemon is recorded before its program runs, so that the next service knows it
    /// even after a crash.
    pub(crate) fn remember_control_daemon(&mut self, id: DaemonId, running: Running) -> io::Result<()> {
        self.change(|contents| _ = contents.control_daemons.insert(id, running))
    }

    /// The control daemon that was started with this id. It may have ended.
    pub(crate) fn control_daemon(&self, id: &DaemonId) -> Option<&Running> {
        self.contents.control_daemons.get(id)
    }

    pub(crate) fn control_daemons(&self) -> &BTreeMap<DaemonId, Running> {
        &self.contents.control_daemons
    }

    pub(crate) fn pids_of_others(&self, id: &DaemonId) -> BTreeSet<u32> {
        let others = self.contents.control_daemons.iter().filter(|(other, _)| *other != id);
        others.map(|(_, running)| running.process.pid).collect()
    }

    pub(crate) fn forget_control_daemon(&mut self, id: &DaemonId) -> io::Result<()> {
        self.change(|contents| _ = contents.control_daemons.remove(id))
    }

    /// Records the path of the CDI spec before the service writes the spec. `file` is None after the service has removed the
    /// spec.
    pub(crate) fn remember_cdi_spec(&mut self, file: Option<PathBuf>) -> io::Result<()> {
        self.change(|contents| contents.cdi_spec = file)
    }

    pub(crate) fn cdi_spec(&self) -> Option<&Path> {
        self.contents.cdi_spec.as_deref()
    }

    pub(crate) fn set_drained(&mut self, drained: Drained) -> io::Result<()> {
        self.change(|contents| contents.drained = drained)
    }

    pub(crate) fn drained(&self) -> &Drained {
        &self.contents.drained
    }

    pub(crate) fn remember_reset(&mut self, gpu: GpuId, error: &str) -> io::Result<()> {
        self.change(|contents| _ = contents.to_reset.insert(gpu.to_string(), error.to_owned()))
    }

    pub(crate) fn forget_resets(&mut self) -> io::Result<()> {
        self.change(|contents| contents.to_reset.clear())
    }

    /// The GPUs that need a reset, by name. Each value describes the critical error that is the reason.
    pub(crate) fn to_reset(&self) -> &BTreeMap<String, String> {
        &self.contents.to_reset
    }

    /// The slices that take no new client: drained slices, and slices of GPUs that need a reset.
    pub(crate) fn closed(&self) -> ClosedDevices {
        ClosedDevices { drained: self.contents.drained.clone(), to_reset: self.contents.to_reset.clone() }
    }

    pub(crate) fn set_bindings(&mut self, bindings: Bindings) -> io::Result<()> {
        self.change(|contents| contents.bindings = Arc::new(bindings))
    }

    pub(crate) fn bindings(&self) -> &Arc<Bindings> {
        &self.contents.bindings
    }

    /// Writes the state file again if another program has changed or removed it. Returns true if the file was written.
    pub(crate) fn repair(&mut self) -> io::Result<bool> {
        let found = stamp(&self.directory.path().join(FILE));
        if found == self.whole || (found.is_none() && self.contents == Contents::default()) {
            return Ok(false);
        }
        self.directory.keep().map_err(io::Error::other)?;
        self.write()?;
        Ok(true)
    }

    /// Makes a change in memory and in the state file. If the file can't be written, neither of them changes.
    fn change(&mut self, change: impl FnOnce(&mut Contents)) -> io::Result<()> {
        let before = self.contents.clone();
        change(&mut self.contents);
        if self.contents == before {
            return Ok(());
        }
        self.write().inspect_err(|_| self.contents = before)
    }

    fn write(&mut self) -> io::Result<()> {
        let file = self.directory.path().join(FILE);
        let (head, end) = self.contents.around_bindings()?;
        let parts = [&head, self.written.entries(&self.contents.bindings)?, end].map(str::as_bytes);
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        if bytes > MAX_BYTES {
            let too_large = format!(
                "{file} would have {bytes} bytes, but the service reads at most {MAX_BYTES} bytes of \
                 this file",
                file = file.display()
            );
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, too_large));
        }
        // The new file gets its name by a rename, which can't replace a directory. So a directory at this path is renamed
        // first.
        if fs::symlink_metadata(&file).is_ok_and(|there| there.is_dir()) {
            let aside = format!("{FILE}.{}", jiff::Timestamp::now().as_nanosecond());
            fs::rename(&file, self.directory.path().join(&aside))?;
            tracing::warn!("{file} was a directory; renamed to {aside}", file = file.display());
        }
        whole_file::write_parts(&file, &parts)?;
        self.whole = stamp(&file);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use common::bindings::bytes_of;
    use mps_core::bindings::{Binding, BoundBy, ControlGroup, GroupUse};
    use mps_core::terms::ProcessId;
    use mps_core::terms::SliceId;

    use super::*;

    const UUID: &str = "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400";

    fn open(directory: &tempfile::TempDir) -> StateFile {
        StateFile::open(RuntimeDirectory::take(directory.path()).unwrap())
    }

    #[test]
    fn the_first_mode_survives_until_forgotten() {
        let directory = tempfile::tempdir().unwrap();
        let mut state_file = open(&directory);
        let [thread, process] = [ComputeMode::ExclusiveThread, ComputeMode::ExclusiveProcess];
        state_file.remember_compute_mode(UUID, thread, process).unwrap();
        state_file.remember_compute_mode(UUID, process, ComputeMode::Default).unwrap();
        let mut again = open(&directory);
        assert_eq!(again.previous_compute_mode(UUID), Some(thread));
        assert_eq!(again.compute_mode_set(UUID), ComputeMode::Default);
        again.forget_compute_mode(UUID).unwrap();
        assert_eq!(open(&directory).previous_compute_mode(UUID), None);
    }

    #[test]
    fn a_drain_survives_and_is_not_in_the_file_of_an_earlier_version() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join(FILE), r#"{"version": 1, "previous_compute_modes": {}}"#).unwrap();
        let mut state_file = open(&directory);
        assert_eq!(state_file.drained(), &Drained::default());
        let mut drained = Drained::default();
        drained.drain(&["00:06.0-1".parse().unwrap()]);
        state_file.set_drained(drained.clone()).unwrap();
        assert_eq!(open(&directory).drained(), &drained);
    }

    fn running(pipe_directory: &str) -> Running {
        Running {
            process: ProcessId { pid: 7, start_time: 8 },
            pipe_directory: pipe_directory.into(),
            private_directory: None,
            slice_directories: None,
            log_directory: "/log".into(),
            gpus: vec![UUID.to_owned()],
            gpu_names: BTreeMap::from([(UUID.to_owned(), "0000:ff:1f.7".to_owned())]),
            multiuser: true,
            near_cpus: false,
            log_offset: 0,
        }
    }

    /// The state file of the largest supported host is small enough to be read again: 4096 bindings with the longest paths and
    /// labels, and 1024 control daemons.
    #[test]
    fn the_largest_host_is_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let mut state_file = open(&directory);
        let gpu = "00ff:ff:1f.7".parse().unwrap();
        let binding = |number: u64| {
            let slice = SliceId { gpu, ordinal: 59 };
            let path = format!("/{number:04094}");
            let group = ControlGroup { path, inode: u64::MAX };
            let (slices, label) = ([slice].into(), "x".repeat(384));
            Binding { group, slices, by: BoundBy::Root, label, since: u64::MAX, was_used: false }
        };
        let mut bindings: Bindings = (0..4095).map(binding).collect();
        bindings.bind(binding(4095), true, bytes_of).unwrap();
        state_file.set_bindings(bindings.clone()).unwrap();
        let long = format!("/{}", "d".repeat(4094));
        state_file
            .change(|contents| {
                let running = Running { log_directory: long.into(), ..running(&"p".repeat(107)) };
                let daemons =
                    (0..1024).map(|number| (DaemonId::Gpu(format!("{number:0100}")), running.clone()));
                contents.control_daemons.extend(daemons);
            })
            .unwrap();
        let again = open(&directory);
        assert!(**again.bindings() == bindings && again.control_daemons().len() == 1024);
    }

    /// Each write of the state file reuses the serialized bindings of the last write. A change of the bindings must reach the
    /// file nevertheless.
    #[test]
    fn each_change_of_bindings_is_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let mut state_file = open(&directory);
        let gpu = "00:06.0".parse().unwrap();
        let bind = |bindings: &mut Bindings, path: &str, ordinal| {
            let group = ControlGroup { path: path.to_owned(), inode: 1 };
            let (slices, label) = ([SliceId { gpu, ordinal }].into(), "\"}".to_owned());
            let binding = Binding { group, slices, by: BoundBy::Root, label, since: 0, was_used: false };
            bindings.bind(binding, true, bytes_of).unwrap();
        };
        let changes: [&dyn Fn(&mut Bindings); 7] = [
            &|all| bind(all, "/a", 0),
            &|all| bind(all, "/b", 1),
            &|all| bind(all, "/a", 1),
            &|all| bind(all, "/c", 0),
            &|all| _ = all.unbind("/b"),
            &|all| _ = all.end(0, |_| GroupUse::Used),
            &|all| *all = Bindings::default(),
        ];
        let mut bindings = Bindings::default();
        for change in changes {
            change(&mut bindings);
            state_file.set_bindings(bindings.clone()).unwrap();
            assert_eq!(**open(&directory).bindings(), bindings);
            state_file.remember_control_daemon(DaemonId::Shared, running("/mps")).unwrap();
            state_file.forget_control_daemon(&DaemonId::Shared).unwrap();
            assert_eq!(**open(&directory).bindings(), bindings);
        }
    }

    #[test]
    fn what_would_not_be_read_is_not_written() {
        let directory = tempfile::tempdir().unwrap();
        let mut state_file = open(&directory);
        state_file.remember_control_daemon(DaemonId::Shared, running("/mps")).unwrap();
        let too_long = PathBuf::from("x".repeat(MAX_BYTES));
        let refused = state_file.remember_cdi_spec(Some(too_long)).unwrap_err().to_string();
        assert!(
            refused.contains("state.json would have") && refused.ends_with("bytes of this file"),
            "{refused}"
        );
        assert_eq!(state_file.cdi_spec(), None);
        assert_eq!(open(&directory).control_daemons().len(), 1);
    }

    #[test]
    fn only_a_file_that_others_have_changed_is_repaired() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join(FILE);
        let mut state_file = open(&directory);
        assert!(!state_file.repair().unwrap(), "there is nothing to write");
        state_file.remember_control_daemon(DaemonId::Shared, running("/mps")).unwrap();
        assert!(!state_file.repair().unwrap() && !open(&directory).repair().unwrap());
        let damage: [fn(&Path); 3] = [
            |file| fs::remove_file(file).unwrap(),
            |file| fs::write(file, "{}").unwrap(),
            |file| {
                let whole = fs::read(file).unwrap();
                fs::remove_file(file).unwrap();
                fs::write(file, whole).unwrap();
            },
        ];
        for damage in damage {
            damage(&file);
            assert!(state_file.repair().unwrap() && !state_file.repair().unwrap());
            assert_eq!(open(&directory).control_daemons().len(), 1);
        }
    }

    /// The state file of another version of the service may have ids of control daemons that this version does not know. The
    /// record of such a control daemon must stay under its id. Otherwise the service could not end the control daemon.
    #[test]
    fn a_control_daemon_with_an_unknown_id_is_not_lost() {
        let directory = tempfile::tempdir().unwrap();
        let mut state_file = open(&directory);
        for id in ["shared", UUID, "00:06.0-1", "00:06.0", "of another version", ""] {
            state_file.remember_control_daemon(id.into(), running("/mps")).unwrap();
            let file = fs::read_to_string(directory.path().join(FILE)).unwrap();
            assert!(file.contains(&format!(r#""{id}":{{"process":"#)), "{file}");
            assert_eq!(open(&directory).control_daemon(&id.into()), Some(&running("/mps")), "{id}");
        }
        state_file.forget_control_daemon(&"of another version".into()).unwrap();
        assert_eq!(open(&directory).control_daemons().len(), 5);
    }

    #[test]
    fn slices_are_in_the_configured_pipe_directory() {
        let own = format!("/mps/{UUID}");
        for (id, pipe_directory, expected) in
            [("shared", "/mps", vec!["/mps"]), (UUID, own.as_str(), vec!["/mps", own.as_str()])]
        {
            let running = running(pipe_directory);
            let directories: Vec<&Path> = running.directories_of_clients(&id.into()).collect();
            assert_eq!(directories, expected.iter().map(Path::new).collect::<Vec<_>>(), "{id}");
        }
    }

    #[test]
    fn damage_is_survived() {
        let directory = tempfile::tempdir().unwrap();
        let mut state_file = open(&directory);
        state_file.remember_compute_mode(UUID, ComputeMode::Default, ComputeMode::ExclusiveProcess).unwrap();
        let file = directory.path().join(FILE);
        let whole = fs::read(&file).unwrap();
        for length in 0..whole.len() {
            fs::write(&file, &whole[..length]).unwrap();
            assert_eq!(open(&directory).previous_compute_mode(UUID), None, "{length}");
        }
        fs::write(&file, r#"{"version": 2, "previous_compute_modes": {}}"#).unwrap();
        open(&directory);
    }

    #[test]
    fn a_mode_that_cannot_be_written_down_is_not_remembered() {
        let directory = tempfile::tempdir().unwrap();
        let mut state_file = open(&directory);
        fs::remove_dir_all(directory.path()).unwrap();
        state_file
            .remember_compute_mode(UUID, ComputeMode::Default, ComputeMode::ExclusiveProcess)
            .unwrap_err();
        assert_eq!(state_file.previous_compute_mode(UUID), None);
    }
}
