//! The arguments of `Bind`, `Unbind`, `TakeDevices` and `ReleaseGroup`. Any input of a caller becomes a valid request of
//! limited size, or an error that says what is wrong.

use std::collections::HashMap;

use zbus::OwnedVariant;

use super::request::{Result, bounded_names};
use common::bus::error::RequestError;
use common::bus::proxy::{ContainerStop, GroupOf, SliceWish};

/// The most bytes of a label. The names of a container, its Kubernetes pod and its namespace have 381 bytes together at most.
const LABEL: usize = 384;

/// The kernel's limit for the length of a path, in bytes.
const PATH: usize = 4096;

/// The most bytes of a container's id: the kernel's limit for the name of a file.
const CONTAINER: usize = 255;

const SIGNALS: u32 = 64;

const KILL: u32 = 9;

pub(super) type CallOptions = HashMap<String, OwnedVariant>;

pub(super) fn wanted(
    names: Vec<String>,
    pid: u32,
    mut options: CallOptions,
) -> Result<(SliceWish, GroupOf, String)> {
    let label: String = take(&mut options, "label")?.unwrap_or_default();
    let wish = take_wish(names, &mut options)?;
    let group = group(pid, options)?;
    if label.len() > LABEL || label.chars().any(char::is_control) {
        return Err(failed(format!("label has to have at most {LABEL} bytes, and no control characters")));
    }
    Ok((wish, group, label))
}

pub(super) fn wish(names: Vec<String>, mut options: CallOptions) -> Result<SliceWish> {
    let wish = take_wish(names, &mut options)?;
    nothing_else(&options)?;
    Ok(wish)
}

/// Checks the arguments of `ReleaseGroup`. A container runtime calls this method before it sends the signal in `options` to a
/// container.
pub(super) fn stop(pid: u32, mut options: CallOptions) -> Result<ContainerStop> {
    let container: String = take(&mut options, "container")?.unwrap_or_default();
    let signal: u32 = take(&mut options, "signal")?.unwrap_or(KILL);
    let to_all: bool = take(&mut options, "all")?.unwrap_or_default();
    nothing_else(&options)?;
    if pid == 0 || container.len() > CONTAINER || !(1..=SIGNALS).contains(&signal) {
        return Err(failed(format!(
            "wrong argument: give a PID, a container id of at most {CONTAINER} bytes, and a signal from 1 to \
             {SIGNALS}"
        )));
    }
    Ok(ContainerStop { pid, container, signal, to_all })
}

fn take_wish(names: Vec<String>, options: &mut CallOptions) -> Result<SliceWish> {
    bounded_names(&names)?;
    let free: bool = take(options, "free")?.unwrap_or_default();
    let share: bool = take(options, "share")?.unwrap_or_default();
    Ok(SliceWish { names, free, share })
}

fn nothing_else(options: &CallOptions) -> Result<()> {
    let Some(unknown) = options.keys().min() else { return Ok(()) };
    let name: String = unknown.chars().take(LABEL).collect();
    Err(failed(format!("there is no option {name:?}")))
}

/// The control group that a caller names: by the PID of a process in it, or, with the PID 0, by its path.
pub(super) fn group(pid: u32, mut options: CallOptions) -> Result<GroupOf> {
    let path: Option<String> = take(&mut options, "control_group")?;
    nothing_else(&options)?;
    match (pid, path) {
        (0, None) => Err(failed("a process or the option control_group has to be given".to_owned())),
        (pid, None) => Ok(GroupOf::Process(pid)),
        (0, Some(path)) => Ok(GroupOf::Path(plain(path)?)),
        (_, Some(_)) => {
            Err(failed("a process and the option control_group are given; give only one of them".to_owned()))
        }
    }
}

/// Accepts the path of a control group only in the form that the kernel uses.
fn plain(path: String) -> Result<String> {
    let names = path.strip_prefix('/').map(|names| names.split('/'));
    let is_plain = |name: &str| !matches!(name, "" | "." | "..") && !name.chars().any(char::is_control);
    if path == "/" || (path.len() < PATH && names.is_some_and(|mut names| names.all(is_plain))) {
        Ok(path)
    } else {
        Err(failed(
            "control_group has to be a path as the kernel writes it: /system.slice/x.service".to_owned(),
        ))
    }
}

fn take<T: TryFrom<OwnedVariant>>(options: &mut CallOptions, name: &str) -> Result<Option<T>> {
    let value = options.remove(name).map(T::try_from).transpose();
    value.map_err(|_| failed(format!("option {name} has the wrong type")))
}

fn failed(text: String) -> RequestError {
    RequestError::Failed(text)
}

#[cfg(test)]
mod tests {
    use zbus::Variant;

    use super::*;

    fn options<const N: usize>(given: [(&str, Variant<'_>); N]) -> CallOptions {
        given.into_iter().map(|(name, value)| (name.to_owned(), value.try_to_owned().unwrap())).collect()
    }

    #[test]
    fn a_process_or_a_control_group_is_meant() {
        assert_eq!(group(7, CallOptions::new()).unwrap(), GroupOf::Process(7));
        for good in ["/", "/a", "/system.slice/x y.service"] {
            let named = options([("control_group", good.into())]);
            assert_eq!(group(0, named).unwrap(), GroupOf::Path(good.to_owned()));
        }
        let long = format!("/{}", "x".repeat(PATH));
        for bad in ["", "a", "/a/", "//", "/a/../b", "/./a", "/a\n", &long] {
            group(0, options([("control_group", bad.into())])).unwrap_err();
        }
        group(0, CallOptions::new()).unwrap_err();
        group(7, options([("control_group", "/a".into())])).unwrap_err();
        group(0, options([("control_group", 7_u32.into())])).unwrap_err();
        group(7, options([("colour", "red".into())])).unwrap_err();
    }

    #[test]
    fn a_stop_names_a_process_and_a_signal() {
        let given = options([("signal", 15_u32.into()), ("container", "j1".into()), ("all", true.into())]);
        let wanted = ContainerStop { pid: 7, container: "j1".to_owned(), signal: 15, to_all: true };
        assert_eq!(stop(7, given).unwrap(), wanted);
        assert_eq!(stop(7, CallOptions::new()).unwrap().signal, KILL);
        let long = "x".repeat(CONTAINER + 1);
        stop(0, CallOptions::new()).unwrap_err();
        stop(7, options([("container", long.as_str().into())])).unwrap_err();
        for bad in [0_u32, 65] {
            stop(7, options([("signal", bad.into())])).unwrap_err();
        }
        stop(7, options([("signal", "TERM".into())])).unwrap_err();
        stop(7, options([("colour", "red".into())])).unwrap_err();
    }

    #[test]
    fn options_are_checked() {
        let slices = || vec!["00:06.0-1".to_owned()];
        let label = "guest train-1, container main";
        let given = options([("label", label.into()), ("share", true.into())]);
        let (its, _, name) = wanted(slices(), 7, given).unwrap();
        assert_eq!((name.as_str(), its.share, its.free), (label, true, false));
        let (its, _, name) = wanted(slices(), 7, CallOptions::new()).unwrap();
        assert_eq!((name.as_str(), its.share), ("", false));
        assert!(wish(slices(), options([("free", true.into())])).unwrap().free);
        assert!(wish(slices(), options([("label", label.into())])).is_err());
        let long = "x".repeat(LABEL + 1);
        for bad in [options([("label", long.as_str().into())]), options([("label", "a\nb".into())])] {
            assert!(wanted(slices(), 7, bad).is_err());
        }
        assert!(wanted(vec!["x".repeat(65)], 7, CallOptions::new()).is_err());
    }
}
