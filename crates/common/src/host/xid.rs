//! Critical errors of GPUs (Xid): their meanings, and their consequences for the slices of a GPU, from NVIDIA's catalogue of Xid
//! errors (its immediate actions for A100 and newer GPUs).

use std::fmt;

/// The consequence of a critical error for the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FollowUp {
    /// A program has caused the error. The GPU works.
    Application,
    /// An administrator should check the GPU. The service still serves the GPU.
    Look,
    /// The GPU needs a reset, or the host a reboot, before the GPU takes another client.
    Reset,
}

/// The recovery action that the driver asks for at the moment (`NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecoveryAction {
    /// The driver asks for nothing.
    Nothing,
    /// The GPU needs a reset, now or once the programs on the GPU have ended.
    Reset,
    /// The host needs a reboot.
    Reboot,
    /// The programs that use several GPUs together have to end.
    EndPeers,
}

/// A critical error that a GPU has met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CriticalError {
    /// The error's number in NVIDIA's catalogue.
    pub xid: u64,
    /// The recovery action that the driver asks for after the error. None with older drivers, and for a GPU that does not
    /// answer.
    pub action: Option<RecoveryAction>,
}

/// The Xid with which the driver reports that it asks for another recovery action.
const ACTION_CHANGED: u64 = 154;

use FollowUp::{Application, Look, Reset};

/// The critical errors that the service knows: the number, the meaning in words, and the consequence.
const CATALOGUE: [(u64, &str, FollowUp); 35] = [
    (8, "the GPU stopped processing", Application),
    (11, "an invalid or corrupted push buffer", Application),
    (13, "an exception of the graphics engine", Application),
    (25, "an invalid or corrupted push buffer", Application),
    (31, "a page fault in a program", Application),
    (32, "an invalid or corrupted push buffer", Application),
    (43, "the GPU stopped a program", Application),
    (45, "the work of a program was cleaned up after an earlier error", Application),
    (46, "the GPU stopped processing", Reset),
    (48, "a double-bit ECC error", Reset),
    (62, "the internal controller halted", Reset),
    (63, "a page or row of memory is replaced at the next reset", Look),
    (64, "a page or row of memory can't be replaced", Reset),
    (68, "an exception of the video decoder", Application),
    (69, "a class error of the graphics engine", Application),
    (74, "an error of NVLink", Look),
    (79, "the GPU has fallen off the bus", Reset),
    (92, "a high rate of single-bit ECC errors", Look),
    (94, "a contained ECC error, which hit one program", Application),
    (95, "an uncontained ECC error, which may have hit every program", Reset),
    (109, "a switch between programs took too long", Reset),
    (110, "a security fault", Reset),
    (119, "the GPU's system processor (GSP) does not answer", Reset),
    (120, "an error of the GPU's system processor (GSP)", Reset),
    (121, "an error of the link to the CPU (C2C)", Look),
    (136, "the training of an NVLink has failed", Reset),
    (137, "a forbidden access through NVLink", Application),
    (140, "an unrecovered ECC error", Reset),
    (143, "the GPU could not be initialised", Reset),
    (151, "an encryption key could not be replaced", Reset),
    (ACTION_CHANGED, "the driver asks for another recovery action", Reset),
    (155, "a software-defined NVLink error", Reset),
    (156, "a defective part of the GPU is retired at the next reset", Reset),
    (157, "a defective part of the GPU can't be retired", Look),
    (158, "a fatal timeout of the GPU", Reset),
];

impl CriticalError {
    fn known(self) -> Option<(&'static str, FollowUp)> {
        let mut all = CATALOGUE.into_iter();
        all.find(|(number, ..)| *number == self.xid).map(|(_, meaning, follow_up)| (meaning, follow_up))
    }

    /// The consequence of the error for the GPU. If the driver asks for an action, the action counts instead of the catalogue.
    pub fn follow_up(self) -> FollowUp {
        match (self.action, self.known()) {
            (Some(RecoveryAction::Reset | RecoveryAction::Reboot), _) => Reset,
            (Some(RecoveryAction::Nothing | RecoveryAction::EndPeers), Some((_, Reset)))
                if self.xid == ACTION_CHANGED =>
            {
                Look
            }
            (_, Some((_, follow_up))) => follow_up,
            (_, None) => Look,
        }
    }
}

/// Writes the error with its meaning, such as `Xid 48 (an ECC error of two bits)`.
impl fmt::Display for CriticalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Xid {}", self.xid)?;
        match self.known() {
            Some((meaning, _)) => write!(f, " ({meaning})"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn follows(xid: u64, action: Option<RecoveryAction>) -> FollowUp {
        CriticalError { xid, action }.follow_up()
    }

    #[test]
    fn errors_of_programs_keep_no_client_off_and_those_that_ask_for_a_reset_do() {
        for xid in [13, 31, 43, 45, 68, 94, 137] {
            assert_eq!(follows(xid, None), Application, "{xid}");
        }
        for xid in [48, 79, 95, 109, 119, 120, 140, 154, 158] {
            assert_eq!(follows(xid, None), Reset, "{xid}");
        }
        for xid in [63, 74, 157, 999] {
            assert_eq!(follows(xid, None), Look, "{xid}");
        }
        assert!(CATALOGUE.is_sorted_by_key(|(number, ..)| *number));
    }

    #[test]
    fn the_word_of_the_driver_is_stronger() {
        assert_eq!(follows(13, Some(RecoveryAction::Reset)), Reset);
        assert_eq!(follows(999, Some(RecoveryAction::Reboot)), Reset);
        assert_eq!(follows(154, Some(RecoveryAction::Nothing)), Look);
        assert_eq!(follows(154, Some(RecoveryAction::EndPeers)), Look);
        assert_eq!(follows(48, Some(RecoveryAction::Nothing)), Reset, "it may not say so yet");
    }

    #[test]
    fn an_error_has_its_number_and_its_meaning() {
        let text = |xid| CriticalError { xid, action: None }.to_string();
        assert_eq!(text(48), "Xid 48 (a double-bit ECC error)");
        assert_eq!(text(999), "Xid 999");
    }
}
