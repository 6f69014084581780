//! The driver in force: all questions about GPUs go through this driver.

/// The news about the driver that a reading of the host's GPUs brings. `D` is an open driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriverNews<D> {
    /// The reading has listed the GPUs with this driver. The driver is the driver in force, or a driver that was opened for this
    /// reading, since no driver was in force.
    Listed(D),
    /// The reading has no list of GPUs, because one call has failed or the answer is late. The driver in force may still work.
    Failed,
    /// The driver in force has said that it does not work any more.
    Unusable,
}

impl<D> DriverNews<D> {
    /// Changes the driver in force after a reading of the host's GPUs; None stands for no driver in force. Returns true if another
    /// driver is in force now, or if no driver is in force any more.
    pub fn take_effect(self, in_force: &mut Option<D>) -> bool {
        match self {
            DriverNews::Listed(driver) if in_force.is_none() => *in_force = Some(driver),
            DriverNews::Listed(_) | DriverNews::Failed => return false,
            // NVML counts its users, and opens a new driver only after the last user has closed the old one. An unusable driver
            // is therefore dropped, so that its use of NVML ends.
            DriverNews::Unusable => return in_force.take().is_some(),
        }
        true
    }
}
