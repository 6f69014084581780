//! The address of a device on the PCI bus.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;
use core::ops::RangeInclusive;
use core::str::FromStr;

/// A PCI address. It consists of numbers, so `1A` equals `1a`, and `0000:00:06.0` equals `00:06.0`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PciAddress {
    /// The domain is above 0xffff behind some host bridges.
    pub domain: u32,
    pub bus: u8,
    /// From 0 to 31.
    pub device: u8,
    /// From 0 to 7.
    pub function: u8,
}

impl PciAddress {
    /// The short form: lower case, and without the domain if the domain is 0000. The service uses the short form as the name of
    /// a GPU, like the platform (Cloudpods). The short form never contains `-`, which separates the ordinal in a slice's name.
    pub fn short(self) -> String {
        if self.domain == 0 {
            format!("{:02x}:{:02x}.{:x}", self.bus, self.device, self.function)
        } else {
            self.to_string()
        }
    }

    /// Resolves an address that a user has written without a domain. The result is the address in `all` with domain 0000, or
    /// else the only address in `all` that differs just in the domain. If `all` has neither, the result is this address itself.
    ///
    /// # Errors
    /// Several addresses in `all` differ just in the domain.
    pub fn in_any_domain(self, all: impl Iterator<Item = Self>) -> Result<Self, Vec<Self>> {
        let same: Vec<Self> = all.filter(|one| Self { domain: self.domain, ..*one } == self).collect();
        match same.as_slice() {
            [] => Ok(self),
            [one] => Ok(*one),
            several if several.contains(&self) => Ok(self),
            _ => Err(same),
        }
    }

    /// Returns whether the text is an address without a domain, such as `00:06.0`.
    pub fn is_short(text: &str) -> bool {
        text.matches(':').count() == 1
    }
}

impl fmt::Display for PciAddress {
    /// The full form, `0000:00:06.0`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl FromStr for PciAddress {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let hex = |part: &str, widths: RangeInclusive<usize>| {
            let plain = widths.contains(&part.len()) && part.bytes().all(|b| b.is_ascii_hexdigit());
            u32::from_str_radix(part, 16).ok().filter(|_| plain).ok_or(())
        };
        let byte = |part: &str, width| u8::try_from(hex(part, width..=width)?).map_err(|_| ());
        let (slot, function) = text.rsplit_once('.').ok_or(())?;
        let (bus, device) = slot.rsplit_once(':').ok_or(())?;
        let (domain, bus) = match bus.rsplit_once(':') {
            Some((domain, bus)) => (hex(domain, 4..=8)?, bus),
            None => (0, bus),
        };
        let (bus, device, function) = (byte(bus, 2)?, byte(device, 2)?, byte(function, 1)?);
        let address = Self { domain, bus, device, function };
        if address.device > 0x1f || address.function > 7 { Err(()) } else { Ok(address) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_numbers() {
        let golden = [
            ("0000:00:06.0", "00:06.0", "0000:00:06.0"),
            ("00:06.0", "00:06.0", "0000:00:06.0"),
            ("00000000:1A:00.0", "1a:00.0", "0000:1a:00.0"),
            ("0001:1A:00.0", "0001:1a:00.0", "0001:1a:00.0"),
            ("10000:e1:00.0", "10000:e1:00.0", "10000:e1:00.0"),
        ];
        for (text, short, full) in golden {
            assert_eq!(text.parse::<PciAddress>().unwrap().short(), short);
            assert_eq!(text.parse::<PciAddress>().unwrap().to_string(), full);
        }
        for text in
            ["", ".", ":.", "06.0", "0:06.0", "00:06", "00:20.0", "00:06.8", "+0:06.0", "00:06.0 ", "x"]
        {
            assert_eq!(text.parse::<PciAddress>(), Err(()), "{text:?}");
        }
    }
}
