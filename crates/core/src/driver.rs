//! The driver in force: all questions about GPUs go through this driver.

/// The finding about the driver in a reading of the host. `D` is an open driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriverNews<D> {
    /// The driver that has listed its GPUs: the driver in force, or a driver that was opened for this reading, since there was
    /// none.
    Listed(D),
    /// There is no list. That says nothing of the driver in force: one call has failed, or the answer is late.
    Failed,
    /// The driver in force is of no use any more, by its own word.
    Unusable,
}

/// The driver in force. Looks at the host come and go; only a look that knows better replaces it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverInForce<D>(Option<D>);

impl<D> Default for DriverInForce<D> {
    fn default() -> Self {
        Self(None)
    }
}

impl<D> DriverInForce<D> {
    /// The driver, if there is one. Without a driver, the host should be read again.
    pub fn get(&self) -> Option<&D> {
        self.0.as_ref()
    }

    /// Records a reading. Returns true if another driver is in force now, or none any more.
    pub fn take(&mut self, news: DriverNews<D>) -> bool {
        match news {
            DriverNews::Listed(driver) if self.0.is_none() => self.0 = Some(driver),
            DriverNews::Listed(_) | DriverNews::Failed => return false,
            // NVML counts who has it open: only after the last one has closed it does the next open a new one.
            DriverNews::Unusable => return self.0.take().is_some(),
        }
        true
    }
}
