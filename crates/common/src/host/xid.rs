//! Critical errors of GPUs (Xid): their meanings, and which of them need a reset. The source is NVIDIA's catalogue of Xid
//! errors, with its immediate actions for A100 and newer GPUs.

use std::fmt;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CriticalError {
    pub xid: u64,
    /// True if the driver asks for a reset of the GPU or a reboot of the host (`NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`). False if
    /// the driver asks for nothing, or only for the end of the programs that use several GPUs together. None with older
    /// drivers, and for a GPU that does not answer.
    pub asks_reset: Option<bool>,
}

/// The driver reports this Xid when the recovery action for which it asks has changed.
const ACTION_CHANGED: u64 = 154;

/// The errors after which the GPU needs a reset, or the host a reboot, before the GPU takes another client. Each has its number
/// and its meaning.
const RESETS: [(u64, &str); 18] = [
    (46, "the GPU stopped processing"),
    (48, "a double-bit ECC error"),
    (62, "the internal controller halted"),
    (64, "a defective page or row of GPU memory can't be replaced"),
    (79, "the GPU has fallen off the bus"),
    (95, "an uncontained ECC error, which may have hit every program"),
    (109, "a switch between programs took too long"),
    (110, "a security fault"),
    (119, "the GPU's system processor (GSP) does not answer"),
    (120, "an error of the GPU's system processor (GSP)"),
    (136, "the training of an NVLink has failed"),
    (140, "an unrecovered ECC error"),
    (143, "the GPU could not be initialised"),
    (151, "an encryption key could not be replaced"),
    (ACTION_CHANGED, "the recovery action that the driver asks for has changed"),
    (155, "a software-defined NVLink error"),
    (156, "a defective part of the GPU is retired at the next reset"),
    (158, "a fatal timeout of the GPU"),
];

/// The other errors that the service knows. A program has caused the error, or an administrator should check the GPU. The
/// service still serves the GPU.
const OTHERS: [(u64, &str); 17] = [
    (8, "the GPU stopped processing"),
    (11, "an invalid or corrupted push buffer"),
    (13, "an exception of the graphics engine"),
    (25, "an invalid or corrupted push buffer"),
    (31, "a page fault in a program"),
    (32, "an invalid or corrupted push buffer"),
    (43, "the GPU stopped a program"),
    (45, "the work of a program was cleaned up after an earlier error"),
    (63, "a defective page or row of GPU memory is replaced at the next reset"),
    (68, "an exception of the video decoder"),
    (69, "a class error of the graphics engine"),
    (74, "an error of NVLink"),
    (92, "a high rate of single-bit ECC errors"),
    (94, "a contained ECC error, which hit one program"),
    (121, "an error of the link to the CPU (C2C)"),
    (137, "a forbidden access through NVLink"),
    (157, "a defective part of the GPU can't be retired"),
];

impl CriticalError {
    fn is_in(self, list: &[(u64, &'static str)]) -> Option<&'static str> {
        list.iter().find(|(number, _)| *number == self.xid).map(|(_, meaning)| *meaning)
    }

    /// True if the GPU needs a reset, or the host a reboot, before the GPU takes another client. If the driver asks for a
    /// reset, the answer is true. If the driver does not ask, the list `RESETS` decides, since the driver may ask later. But if
    /// the driver reports `ACTION_CHANGED` and asks for no reset, the answer is false.
    pub fn needs_reset(self) -> bool {
        match self.asks_reset {
            Some(true) => true,
            Some(false) if self.xid == ACTION_CHANGED => false,
            _ => self.is_in(&RESETS).is_some(),
        }
    }
}

impl fmt::Display for CriticalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Xid {}", self.xid)?;
        match self.is_in(&RESETS).or_else(|| self.is_in(&OTHERS)) {
            Some(meaning) => write!(f, " ({meaning})"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needs_reset(xid: u64, asks_reset: Option<bool>) -> bool {
        CriticalError { xid, asks_reset }.needs_reset()
    }

    #[test]
    fn errors_of_programs_keep_no_client_off_and_those_that_ask_for_a_reset_do() {
        for xid in [13, 31, 43, 45, 63, 68, 74, 94, 137, 157, 999] {
            assert!(!needs_reset(xid, None), "{xid}");
        }
        for xid in [48, 79, 95, 109, 119, 120, 140, 154, 158] {
            assert!(needs_reset(xid, None), "{xid}");
        }
        assert!(RESETS.is_sorted() && OTHERS.is_sorted());
    }

    #[test]
    fn the_word_of_the_driver_is_stronger() {
        assert!(needs_reset(13, Some(true)));
        assert!(needs_reset(999, Some(true)));
        assert!(!needs_reset(154, Some(false)));
        assert!(needs_reset(48, Some(false)), "the driver may not ask yet");
    }

    #[test]
    fn an_error_has_its_number_and_its_meaning() {
        let text = |xid| CriticalError { xid, asks_reset: None }.to_string();
        assert_eq!(text(48), "Xid 48 (a double-bit ECC error)");
        assert_eq!(text(999), "Xid 999");
    }
}
