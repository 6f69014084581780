//! Updates the CDI spec when the Snapshot changes. The CDI spec is the only file that the service writes for container engines.

use std::path::{Path, PathBuf};

use super::Ending;
use crate::supervisor::state_file::{SharedStateFile, StateFile};
use common::problem::Problem;
use common::published::cdi;
use common::published::snapshot::Snapshot;

#[derive(Debug)]
pub(super) struct CdiSpec {
    state_file: SharedStateFile,
    hooks: Result<PathBuf, Problem>,
    pub(super) problem: String,
}

impl CdiSpec {
    pub(super) fn new(state_file: SharedStateFile) -> Self {
        Self { state_file, hooks: beside_this_program(), problem: String::new() }
    }

    /// Writes the spec with the planned slices. Returns a message when a problem with the spec begins, changes or ends.
    pub(super) fn keep(
        &mut self,
        snapshot: &Snapshot,
        directory: Option<&Path>,
        ending: Option<Ending>,
    ) -> Option<Result<String, String>> {
        let problem = match self.write(snapshot, directory, ending) {
            Ok(()) => String::new(),
            Err(error) => format!("the CDI spec can't be updated: {error}"),
        };
        if problem == self.problem {
            return None;
        }
        self.problem.clone_from(&problem);
        Some(if problem.is_empty() { Ok("the CDI spec is correct again".to_owned()) } else { Err(problem) })
    }

    fn write(
        &self,
        snapshot: &Snapshot,
        directory: Option<&Path>,
        ending: Option<Ending>,
    ) -> Result<(), Problem> {
        // The spec stays while the service stops or has no plan yet. A container engine that starts a container before the next
        // service is ready finds the slice in the spec. The hook of the spec makes the container wait for the service.
        if ending.is_some() || (snapshot.enabled && snapshot.gpus.is_none()) {
            return Ok(());
        }
        let file = directory.map(|directory| directory.join(cdi::FILE));
        let mut state_file = self.state_file.lock();
        let known = state_file.cdi_spec().map(Path::to_owned);
        if let Some(old) = known.as_ref().filter(|known| file.as_ref() != Some(known)) {
            cdi::remove(old).map_err(|error| error.to_string())?;
            remember(&mut state_file, None);
        }
        let (Some(directory), Some(file)) = (directory, file) else { return Ok(()) };
        let hooks = self.hooks.as_ref().map_err(Clone::clone)?;
        match cdi::spec(snapshot, hooks) {
            Some(spec) => {
                remember(&mut state_file, Some(file));
                cdi::write(directory, &spec).map_err(|error| error.to_string().into())
            }
            None => {
                cdi::remove(&file).map_err(|error| error.to_string())?;
                remember(&mut state_file, None);
                Ok(())
            }
        }
    }
}

/// The path of yunion-mpsctl. The package installs yunion-mpsctl and this program in the same directory.
fn beside_this_program() -> Result<PathBuf, Problem> {
    let own = std::env::current_exe()
        .map_err(|error| format!("the path of yunion-mps-daemon can't be read: {error}"))?;
    let program = own.with_file_name("yunion-mpsctl");
    if program.is_file() {
        Ok(program)
    } else {
        let found = format!(
            "{program} does not exist, and CDI devices need this program as a hook",
            program = program.display()
        );
        Err(Problem::new(found, "install the package again"))
    }
}

/// Records the path of the CDI spec in the state file. Without this record, the next service can't remove the spec from a
/// directory that is not configured any more.
fn remember(state_file: &mut StateFile, file: Option<PathBuf>) {
    if let Err(error) = state_file.remember_cdi_spec(file) {
        tracing::debug!("the path of the CDI spec can't be saved in the state file: {error}");
    }
}
