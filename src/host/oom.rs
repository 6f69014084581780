//! Whom the kernel's OOM killer takes first: this service, and a tenant's job last.

use std::io;

/// The oom_score_adj of a control daemon and its servers: every job on their GPUs ends with them. The unit has it as
/// `OOMScoreAdjust=`, which is why a process without CAP_SYS_RESOURCE may go back to it.
pub const OF_CONTROL_DAEMONS: i16 = -900;

/// That of this service, which is started again without harm.
pub const OWN: i16 = 0;

/// Gives this process, and the children that it will have, this oom_score_adj.
///
/// # Errors
/// The kernel refuses a value below what root has set.
pub fn adjust(score: i16) -> io::Result<()> {
    super::proc::set_oom_score_adj(score)
}
