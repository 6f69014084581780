//! The service on D-Bus: its names, the dictionaries of its answers, and the questions to it.

pub mod answers;
mod changes;
pub mod error;
pub mod proxy;
pub mod rows;
pub mod word;

pub const NAME: &str = "io.yunion.Mps1";
pub const ROOT: &str = "/io/yunion/Mps1";
pub const MANAGER: &str = "/io/yunion/Mps1/Manager";
