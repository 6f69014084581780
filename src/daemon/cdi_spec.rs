//! Keeps the CDI spec beside the Snapshot: the one file that the service writes for container engines.

use std::path::{Path, PathBuf};

use super::Ending;
use crate::publish::cdi::{self, CdiError};
use crate::publish::snapshot::{Snapshot, State};
use crate::supervisor::state_file::SharedStateFile;

/// The spec, and the last trouble with it.
#[derive(Debug)]
pub(super) struct CdiSpec {
    state_file: SharedStateFile,
    /// Why the spec is not as it should be; empty if it is.
    pub(super) problem: String,
}

impl CdiSpec {
    pub(super) fn new(state_file: SharedStateFile) -> Self {
        Self { state_file, problem: String::new() }
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
        // If it can't be written down, the next service does not find a spec in a directory that it does not know.
        let mut remember = |file: Option<PathBuf>| {
            if let Err(error) = state_file.remember_cdi_spec(file) {
                tracing::debug!("where the CDI spec is can't be written down: {error}");
            }
        };
        if let Some(old) = known.as_ref().filter(|known| file.as_ref() != Some(known)) {
            cdi::remove(old)?;
            remember(None);
        }
        let (Some(directory), Some(file)) = (directory, file) else { return Ok(()) };
        // The spec of an earlier service holds until more is known, and after this one as long as the slices do.
        let holds = match ending {
            None => snapshot.state == State::Starting,
            Some(Ending::ForRestart | Ending::Interrupted) => true,
            Some(Ending::ForGood) => false,
        };
        if holds && known.as_ref() == Some(&file) {
            return Ok(());
        }
        match cdi::spec(snapshot).filter(|_| ending.is_none()) {
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
