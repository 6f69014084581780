//! The order in which the kernel's OOM killer ends processes: this service first, a tenant's job last.

/// The `oom_score_adj` of control daemons and their servers, since every job on a GPU ends together with its control daemon or
/// server. The service's unit starts the service with this value (`OOMScoreAdjust=`), so control daemons can get the value
/// without `CAP_SYS_RESOURCE`.
pub const OF_CONTROL_DAEMONS: i16 = -900;

/// The `oom_score_adj` of this service. The kernel can kill the service without harm to clients, and systemd starts it again.
pub const OWN: i16 = 0;

pub use super::proc::set_oom_score_adj as adjust;
