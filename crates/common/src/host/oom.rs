//! The order in which the kernel's OOM killer ends processes: this service before its control daemons.

/// The `oom_score_adj` of control daemons and their servers. The value is low, since the end of a control daemon or server ends
/// every job on its GPUs. The unit starts the service with this value (`OOMScoreAdjust=`). So the service can give control
/// daemons the value without `CAP_SYS_RESOURCE`.
pub const OF_CONTROL_DAEMONS: i16 = -900;

/// The `oom_score_adj` of this service. The end of the service does not harm clients, and systemd starts the service again.
pub const OWN: i16 = 0;

pub use super::proc::set_oom_score_adj as adjust;
