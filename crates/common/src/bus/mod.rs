//! The service on D-Bus: its names on the bus, the dictionaries of its answers, and the client side of its methods.

pub mod answers;
mod changes;
pub mod error;
pub mod proxy;
pub mod rows;
pub mod word;

pub const NAME: &str = "io.yunion.Mps1";
pub const ROOT: &str = "/io/yunion/Mps1";
pub const MANAGER: &str = "/io/yunion/Mps1/Manager";
