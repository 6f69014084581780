//! The driver in force: the opened driver that answers all of the service's questions about GPUs.

/// The consequence of one reading of the host's GPUs for the driver in force. `D` is an opened driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriverNews<D> {
    /// The reading has succeeded with this driver. The driver was already in force, or was opened for the reading since no
    /// driver was in force.
    Listed(D),
    /// The reading has failed, or its answer is late. The driver in force may still work, so it stays in force.
    Failed,
    /// The driver in force has reported that it no longer works.
    Unusable,
}

impl<D> DriverNews<D> {
    /// Replaces `in_force`, the driver in force, after a reading of the host's GPUs. `in_force` is None while no driver is in
    /// force. Returns true if `in_force` has changed.
    pub fn take_effect(self, in_force: &mut Option<D>) -> bool {
        match self {
            DriverNews::Listed(driver) if in_force.is_none() => *in_force = Some(driver),
            DriverNews::Listed(_) | DriverNews::Failed => return false,
            // NVML counts its users, and opens a new driver only after the last user has closed the old driver. An unusable
            // driver is therefore dropped here, which ends its use of NVML.
            DriverNews::Unusable => return in_force.take().is_some(),
        }
        true
    }
}
