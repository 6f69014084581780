//! The content of the state file. Only the service writes the state file.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mps_core::bindings;
use mps_core::bindings::Bindings;
use mps_core::terms::{DaemonId, GpuId, ProcessId};
use serde::{Deserialize, Serialize};

use crate::drained::Drained;
use crate::host::regular_file::{self, Unreadable};
use crate::problem::Problem;

pub const FILE: &str = "state.json";
const VERSION: u32 = 1;

/// The largest state file that the service reads or writes. Besides the bindings, the size allows for 1024 control daemons with
/// the longest possible paths.
pub const MAX_BYTES: usize = bindings::MOST_BYTES + 16 * 1024 * 1024;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Running {
    pub process: ProcessId,
    pub pipe_directory: PathBuf,
    /// The directory in which the control daemon makes its sockets. None if the sockets are in the pipe directory.
    #[serde(default)]
    pub private_directory: Option<PathBuf>,
    /// The directory that contains the slices' directories, with links to the control daemon's socket. None if slices have no
    /// directories.
    #[serde(default)]
    pub slice_directories: Option<PathBuf>,
    pub log_directory: PathBuf,
    /// The UUIDs of the control daemon's GPUs. The position of a UUID in the list is the number that the control daemon's log
    /// and commands give to the GPU.
    pub gpus: Vec<String>,
    /// The names of the control daemon's GPUs, by UUID. The configuration alone does not suffice, since a running control
    /// daemon may have a GPU that the configuration does not name any more.
    #[serde(default)]
    pub gpu_names: BTreeMap<String, String>,
    pub multiuser: bool,
    #[serde(default)]
    pub near_cpus: bool,
    /// The number of bytes of the control daemon's log that the service has read.
    pub log_offset: u64,
}

impl Running {
    pub fn named_gpus(&self) -> impl Iterator<Item = (&str, GpuId)> {
        self.gpu_names.iter().filter_map(|(uuid, name)| Some((uuid.as_str(), name.parse().ok()?)))
    }

    pub fn control_directory(&self) -> &Path {
        self.private_directory.as_ref().unwrap_or(&self.pipe_directory)
    }

    /// The directories of which the control daemon's clients may have a mount: its pipe directory, and the configured pipe
    /// directory, which contains the directories of its slices.
    pub fn directories_of_clients(&self, id: &DaemonId) -> impl Iterator<Item = &Path> {
        let pipe = self.pipe_directory.as_path();
        let configured = id
            .directory_name()
            .filter(|own| pipe.file_name() == Some(own.as_ref()))
            .and_then(|_| pipe.parent());
        configured.into_iter().chain([pipe])
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Contents {
    pub version: u32,
    /// The compute mode that each GPU had before the service changed it, in nvidia-smi's spelling, by the GPU's UUID.
    pub previous_compute_modes: BTreeMap<String, String>,
    /// The compute mode that the service has set, by the GPU's UUID. If only `previous_compute_modes` has a GPU, an earlier
    /// version of the service has set the GPU's mode. That version set only `Exclusive_Process`.
    #[serde(default)]
    pub compute_modes_set: BTreeMap<String, String>,
    #[serde(default)]
    pub control_daemons: BTreeMap<DaemonId, Running>,
    #[serde(default)]
    pub cdi_spec: Option<PathBuf>,
    #[serde(default)]
    pub drained: Drained,
    /// The GPUs that need a reset, by name. The value describes the critical error because of which the GPU needs the reset.
    #[serde(default)]
    pub to_reset: BTreeMap<String, String>,
    /// Serialized separately by [`crate::bindings::WrittenBindings`], since a host may have thousands of bindings.
    #[serde(default, skip_serializing, deserialize_with = "crate::bindings::deserialize")]
    pub bindings: Arc<Bindings>,
}

impl Contents {
    /// The text of the state file before the list of bindings, and the text after the list.
    pub fn around_bindings(&self) -> serde_json::Result<(String, &'static str)> {
        let whole = serde_json::to_string(self)?;
        let others = whole.strip_suffix('}').unwrap_or_default();
        Ok((format!(r#"{others},"bindings":["#), "]}"))
    }
}

impl Default for Contents {
    fn default() -> Self {
        Self {
            version: VERSION,
            previous_compute_modes: BTreeMap::new(),
            compute_modes_set: BTreeMap::new(),
            control_daemons: BTreeMap::new(),
            cdi_spec: None,
            drained: Drained::default(),
            to_reset: BTreeMap::new(),
            bindings: Arc::default(),
        }
    }
}

/// The control daemons in the state file in `directory`, for programs that only read the file. Empty if there is no state file.
pub fn control_daemons(directory: &Path) -> Result<Vec<Running>, Problem> {
    let contents = read(&directory.join(FILE))?;
    Ok(contents.map(|contents| contents.control_daemons.into_values().collect()).unwrap_or_default())
}

pub fn read(file: &Path) -> Result<Option<Contents>, Problem> {
    let bytes = match regular_file::read(file, MAX_BYTES as u64) {
        Ok(bytes) => bytes,
        Err(Unreadable::Failed(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.to_string().into()),
    };
    let contents: Contents =
        serde_json::from_slice(&bytes).map_err(|error| format!("is damaged ({error})"))?;
    match contents.version {
        VERSION => Ok(Some(contents)),
        other => Err(format!("has version {other}, but this program reads only version {VERSION}").into()),
    }
}
