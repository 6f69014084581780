//! The counters of this program, as text for the textfile collector of `node_exporter`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};

use crate::offers::Offers;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Counts {
    registrations: u64,
    allocations: u64,
    refused_allocations: u64,
}

/// Reads one counter of a resource.
type Count = fn(&Counts) -> u64;

/// The counters of each resource, by the name of the resource. All clones of this value share the counters.
#[derive(Debug, Clone, Default)]
pub(crate) struct Counters(Arc<Mutex<BTreeMap<String, Counts>>>);

impl Counters {
    pub(crate) fn registered(&self, resource: &str) {
        self.count(resource, |counts| counts.registrations += 1);
    }

    /// Counts a container that has got its devices.
    pub(crate) fn allocated(&self, resource: &str) {
        self.count(resource, |counts| counts.allocations += 1);
    }

    pub(crate) fn refused(&self, resource: &str) {
        self.count(resource, |counts| counts.refused_allocations += 1);
    }

    fn count(&self, resource: &str, add: impl FnOnce(&mut Counts)) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        add(all.entry(resource.to_owned()).or_default());
    }

    /// The metrics of the resources in `offers`: their counters, and the numbers of their devices. The counters of a resource
    /// that does not exist any more are dropped: otherwise each reload could add counters.
    pub(crate) fn text(&self, offers: &Offers) -> String {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|resource, _| offers.contains_key(resource));
        let mut text = String::new();
        let counters: [(&str, &str, Count); 3] = [
            ("registrations", "registrations with the kubelet", |counts| counts.registrations),
            ("allocations", "containers that were given devices", |counts| counts.allocations),
            ("refused_allocations", "containers that were refused devices", |counts| {
                counts.refused_allocations
            }),
        ];
        for (name, help, value) in counters {
            let name = format!("yunion_mps_device_plugin_{name}_total");
            let _ = writeln!(text, "# HELP {name} Number of {help}.\n# TYPE {name} counter");
            for resource in offers.keys() {
                let counts = all.get(resource).copied().unwrap_or_default();
                let _ = writeln!(text, "{name}{{resource=\"{resource}\"}} {}", value(&counts));
            }
        }
        let name = "yunion_mps_device_plugin_devices";
        let _ = writeln!(text, "# HELP {name} Devices by resource and health.\n# TYPE {name} gauge");
        for (resource, devices) in offers {
            let healthy = devices.iter().filter(|device| device.unusable.is_none()).count();
            for (health, number) in [("healthy", healthy), ("unhealthy", devices.len() - healthy)] {
                let _ = writeln!(text, "{name}{{resource=\"{resource}\",health=\"{health}\"}} {number}");
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offers::{Offered, Unusable};

    #[test]
    fn each_resource_has_its_numbers_until_it_is_gone() {
        let counters = Counters::default();
        counters.registered("a/x");
        counters.allocated("a/x");
        counters.refused("a/x");
        counters.refused("a/x");
        let device = |unusable| Offered { name: "06-0".to_owned(), numa_node: None, unusable };
        let offers =
            Offers::from([("a/x".to_owned(), vec![device(None), device(Some(Unusable::Unwatched))])]);
        let text = counters.text(&offers);
        for line in [
            "yunion_mps_device_plugin_registrations_total{resource=\"a/x\"} 1",
            "yunion_mps_device_plugin_allocations_total{resource=\"a/x\"} 1",
            "yunion_mps_device_plugin_refused_allocations_total{resource=\"a/x\"} 2",
            "yunion_mps_device_plugin_devices{resource=\"a/x\",health=\"healthy\"} 1",
            "yunion_mps_device_plugin_devices{resource=\"a/x\",health=\"unhealthy\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in {text}");
        }
        counters.text(&Offers::new());
        assert!(counters.text(&offers).contains("_allocations_total{resource=\"a/x\"} 0"));
    }
}
