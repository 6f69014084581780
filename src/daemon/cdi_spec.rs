//! Keeps the CDI spec beside the Snapshot: the one file that the service writes for container engines.

use std::path::{Path, PathBuf};

use super::Ending;
use crate::supervisor::state_file::{SharedStateFile, StateFile};
use common::published::cdi::{self, CdiError};
use common::published::snapshot::{Snapshot, State};

/// The spec, and the last trouble with it.
#[derive(Debug)]
pub(super) struct CdiSpec {
    state_file: SharedStateFile,
    /// The program of the hooks.
    hooks: Option<PathBuf>,
    /// Why the spec is not as it should be; empty if it is.
    pub(super) problem: String,
}

impl CdiSpec {
    pub(super) fn new(state_file: SharedStateFile) -> Self {
        Self { state_file, hooks: beside_this_program(), problem: String::new() }
    }

    /// Makes the spec say what the Snapshot says, or once the service ends, as much of that as stays. Gives the news to
    /// tell, if there are any.
    pub(super) fn keep(
        &mut self,
        snapshot: &Snapshot,
        directory: Option<&Path>,
        ending: Option<Ending>,
    ) -> Option<Result<String, String>> {
        let problem = match self.write(snapshot, directory, ending) {
            Ok(()) => String::new(),
            Err(error) => format!("CDI spec: {error}"),
        };
        if problem == self.problem {
            return None;
        }
        self.problem.clone_from(&problem);
        Some(if problem.is_empty() {
            Ok("CDI spec: is as it should be again".to_owned())
        } else {
            Err(problem)
        })
    }

    fn write(
        &self,
        snapshot: &Snapshot,
        directory: Option<&Path>,
        ending: Option<Ending>,
    ) -> Result<(), CdiError> {
        let file = directory.map(|directory| directory.join(cdi::FILE));
        let mut state_file = self.state_file.lock();
        let known = state_file.cdi_spec().map(Path::to_owned);
        if let Some(old) = known.as_ref().filter(|known| file.as_ref() != Some(known)) {
            cdi::remove(old)?;
            remember(&mut state_file, None);
        }
        let (Some(directory), Some(file)) = (directory, file) else { return Ok(()) };
        let is_former = known.as_ref() == Some(&file);
        let hooks = self.hooks.as_deref();
        let spec = match ending {
            // It holds after this service as long as the slices do.
            Some(Ending::ForRestart | Ending::Interrupted) if is_former => return Ok(()),
            Some(_) => None,
            None if snapshot.state == State::Starting && is_former => {
                let former: Vec<_> = state_file.control_daemons().values().collect();
                if snapshot.gpus.is_none()
                    && !former.is_empty()
                    && former.iter().all(|one| one.process.runs())
                {
                    return Ok(());
                }
                let alive: Vec<_> = former.into_iter().filter(|one| one.process.runs()).collect();
                let served = |uuid: &str| alive.iter().any(|one| one.gpus.iter().any(|gpu| gpu == uuid));
                cdi::spec_while_starting(snapshot, hooks, directory, served)
            }
            None => cdi::spec(snapshot, hooks),
        };
        let mut remember = |file: Option<PathBuf>| remember(&mut state_file, file);
        match spec {
            Some(spec) => {
                remember(Some(file));
                cdi::write(directory, &spec)
            }
            None => {
                cdi::remove(&file)?;
                remember(None);
                Ok(())
            }
        }
    }
}

/// Where yunion-mpsctl is. Both programs are in one package.
fn beside_this_program() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?.with_file_name("yunion-mpsctl");
    program.is_file().then_some(program)
}

/// If it can't be written down, the next service does not find a spec in a directory that it does not know.
fn remember(state_file: &mut StateFile, file: Option<PathBuf>) {
    if let Err(error) = state_file.remember_cdi_spec(file) {
        tracing::debug!("where the CDI spec is can't be written down: {error}");
    }
}
