//! Decides if a new configuration is accepted, from the plan of this configuration. The decision is a pure function.

use super::findings::{join, why};
use common::bus::error::RequestError;
use common::config::Settings;
use common::plan::{Missing, Plan, PlanError};
use common::problem::LocatedProblem;

/// Returns the plan of a configuration that is accepted, or the reason why there is no plan yet. The outer error refuses the
/// configuration: the configuration is wrong, or probably has a typing error, or would replace the plan in force by no plan.
pub(super) fn grant(
    planned: Result<Plan, PlanError>,
    in_force: &Settings,
    has_plan: bool,
) -> Result<Result<Plan, String>, RequestError> {
    if let Ok(Plan { missing, .. }) | Err(PlanError::Missing(missing)) = &planned {
        let slips = slips(missing, in_force);
        if !slips.is_empty() {
            return Err(RequestError::InvalidConfig(join(&slips)));
        }
    }
    match planned {
        Err(PlanError::Problems(problems)) => Err(RequestError::InvalidConfig(join(&problems))),
        Err(error) if has_plan && in_force.enabled => Err(RequestError::NotReady(why(error))),
        planned => Ok(planned.map_err(why)),
    }
}

/// The entries for GPUs that the host does not have, if the entries are new in this configuration: they are probably typing
/// errors. An older entry may name a GPU that has failed meanwhile, which is no reason to refuse another change.
fn slips(missing: &[Missing], in_force: &Settings) -> Vec<LocatedProblem> {
    let ours = || in_force.devices.iter().filter(|entry| entry.mps.is_some());
    let known = |path| ours().any(|entry| entry.path.as_ref() == Some(path));
    let new = missing.iter().filter(|missing| missing.certain && !known(&missing.path));
    new.map(|missing| missing.problem.clone()).collect()
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use common::config::{DeviceEntry, DevicePath, MpsEntry};
    use common::problem::{Origin, Problem};

    use super::*;

    fn enabled() -> Settings {
        Settings { enabled: true, ..Settings::default() }
    }

    fn origin() -> Origin {
        Origin { file: "/etc/yunion/devices.yml".into(), line: Some(3) }
    }

    fn missing(uuid: &str, certain: bool) -> Missing {
        let problem = Problem::new(format!("there is no {uuid}"), "").at(origin(), "devices[0].path");
        Missing { problem, path: DevicePath::Uuid(uuid.to_owned()), certain }
    }

    fn with_entry(uuid: &str, is_ours: bool) -> Settings {
        let mps = is_ours.then_some(MpsEntry::with_slices(NonZeroU32::MIN));
        let path = Some(DevicePath::Uuid(uuid.to_owned()));
        let entry = DeviceEntry {
            name: "devices[0]".to_owned(),
            origin: origin(),
            device_type: "NVIDIA_MPS".to_owned(),
            path,
            mps,
        };
        Settings { devices: vec![entry], ..enabled() }
    }

    #[test]
    fn an_entry_without_a_gpu_is_a_slip_only_if_it_is_new_and_certain() {
        let table = [
            ("new", missing("GPU-1", true), enabled(), false),
            ("not certain", missing("GPU-1", false), enabled(), true),
            ("it was there", missing("GPU-1", true), with_entry("GPU-1", true), true),
            ("another was there", missing("GPU-1", true), with_entry("GPU-2", true), false),
            ("it was an entry for others", missing("GPU-1", true), with_entry("GPU-1", false), false),
        ];
        for (name, missing, in_force, is_granted) in table {
            let plan = Plan { missing: vec![missing.clone()], ..Plan::default() };
            let with_others = grant(Ok(plan.clone()), &in_force, true);
            if is_granted {
                assert_eq!(with_others.unwrap(), Ok(plan), "{name}");
            } else {
                let refused = with_others.unwrap_err();
                assert!(
                    matches!(&refused, RequestError::InvalidConfig(text) if text.contains("GPU-1")),
                    "{name}"
                );
            }
            let alone = grant(Err(PlanError::Missing(vec![missing])), &in_force, false);
            assert_eq!(alone.is_ok(), is_granted, "{name}, and no other GPU");
        }
    }

    #[test]
    fn a_plan_in_force_is_given_up_for_no_plan_only_if_nothing_is_served() {
        let not_yet = || Err(PlanError::NotYet(Problem::new("there is no driver", "")));
        let disabled = Settings { enabled: false, ..enabled() };
        assert!(matches!(grant(not_yet(), &enabled(), true), Err(RequestError::NotReady(_))));
        for (in_force, has_plan) in [(enabled(), false), (disabled.clone(), true), (disabled, false)] {
            let granted = grant(not_yet(), &in_force, has_plan).unwrap();
            assert_eq!(granted.unwrap_err(), "there is no driver");
        }
    }

    #[test]
    fn a_wrong_configuration_is_refused_whatever_is_in_force() {
        let wrong = || Err(PlanError::Problems(vec![missing("GPU-1", true).problem]));
        for has_plan in [true, false] {
            assert!(matches!(grant(wrong(), &enabled(), has_plan), Err(RequestError::InvalidConfig(_))));
        }
    }
}
