//! The counters of this program, as text for the textfile collector of Prometheus's `node_exporter`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};

use crate::offers::Offers;

pub(crate) const REGISTRATIONS: &str = "registrations";
pub(crate) const ALLOCATIONS: &str = "allocations";
pub(crate) const REFUSALS: &str = "refused_allocations";

/// The count for each resource and counter. All clones of this value share the counts.
#[derive(Debug, Clone, Default)]
pub(crate) struct Counters(Arc<Mutex<BTreeMap<(String, &'static str), u64>>>);

impl Counters {
    pub(crate) fn count(&self, resource: &str, counter: &'static str) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *all.entry((resource.to_owned(), counter)).or_default() += 1;
    }

    /// The metrics of the resources in `offers`: their counters, and the numbers of their devices. The counters of all other
    /// resources are dropped. Otherwise the number of counters could grow with each reload.
    pub(crate) fn text(&self, offers: &Offers) -> String {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|(resource, _), _| offers.contains_key(resource));
        let mut text = String::new();
        for (counter, help) in [
            (REGISTRATIONS, "registrations with the kubelet"),
            (ALLOCATIONS, "containers that were given devices"),
            (REFUSALS, "containers that were refused devices"),
        ] {
            let name = format!("yunion_mps_device_plugin_{counter}_total");
            let _ = writeln!(text, "# HELP {name} Number of {help}.\n# TYPE {name} counter");
            for resource in offers.keys() {
                let count = all.get(&(resource.clone(), counter)).copied().unwrap_or_default();
                let _ = writeln!(text, "{name}{{resource=\"{resource}\"}} {count}");
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
    use crate::offers::Offered;

    #[test]
    fn each_resource_has_its_numbers_until_it_is_gone() {
        let counters = Counters::default();
        for counter in [REGISTRATIONS, ALLOCATIONS, REFUSALS, REFUSALS] {
            counters.count("a/x", counter);
        }
        let device = |unusable| Offered { name: "06-0".to_owned(), numa_node: None, unusable };
        let offers =
            Offers::from([("a/x".to_owned(), vec![device(None), device(Some("drained".to_owned()))])]);
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
