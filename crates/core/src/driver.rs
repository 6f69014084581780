//! The driver in force: all questions about GPUs go through this driver.

/// The result of reading the host, as far as the driver is concerned. `D` is an open driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriverNews<D> {
    /// This driver has listed its GPUs. It is the driver in force, or, if there was none, a driver that was opened for this
    /// reading.
    Listed(D),
    /// There is no list, because one call has failed or the answer is late. The driver in force may still work.
    Failed,
    /// The driver in force has said that it does not work any more.
    Unusable,
}

/// The driver in force. It is replaced only by a reading of the host that knows better.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverInForce<D>(Option<D>);

impl<D> Default for DriverInForce<D> {
    fn default() -> Self {
        Self(None)
    }
}

impl<D> DriverInForce<D> {
    /// The driver, if there is one. If there is none, the host should be read again.
    pub fn get(&self) -> Option<&D> {
        self.0.as_ref()
    }

    /// Records a reading. Returns true if another driver is in force now, or none any more.
    pub fn take(&mut self, news: DriverNews<D>) -> bool {
        match news {
            DriverNews::Listed(driver) if self.0.is_none() => self.0 = Some(driver),
            DriverNews::Listed(_) | DriverNews::Failed => return false,
            // NVML counts its users: a new driver is opened only after the last user has closed the old one.
            DriverNews::Unusable => return self.0.take().is_some(),
        }
        true
    }
}
