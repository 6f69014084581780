//! The order in which the kernel's OOM killer ends processes: this service first, a tenant's job last.

/// The `oom_score_adj` of a control daemon and its servers, since every job on their GPUs would end with them. The unit sets it
/// with `OOMScoreAdjust=` for the service, so the control daemons can get this value again without `CAP_SYS_RESOURCE`.
pub const OF_CONTROL_DAEMONS: i16 = -900;

/// The `oom_score_adj` of this service. It can be killed and started again without harm.
pub const OWN: i16 = 0;

pub use super::proc::set_oom_score_adj as adjust;
