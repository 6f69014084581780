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

/// The driver in force, which answers all questions about GPUs. None if no driver could be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverInForce<D>(Option<D>);

impl<D> Default for DriverInForce<D> {
    fn default() -> Self {
        Self(None)
    }
}

impl<D> DriverInForce<D> {
    /// The driver in force. None if no driver is in force; the GPUs of the host should be read again in this case.
    pub fn get(&self) -> Option<&D> {
        self.0.as_ref()
    }

    /// Records the result of a reading of the host's GPUs. Returns true if another driver is in force now, or if no driver is in
    /// force any more.
    pub fn take(&mut self, news: DriverNews<D>) -> bool {
        match news {
            DriverNews::Listed(driver) if self.0.is_none() => self.0 = Some(driver),
            DriverNews::Listed(_) | DriverNews::Failed => return false,
            // NVML counts its users, and opens a new driver only after the last user has closed the old one. An unusable driver
            // is therefore dropped, so that its use of NVML ends.
            DriverNews::Unusable => return self.0.take().is_some(),
        }
        true
    }
}
