//! `yunion-mpsctl`: asks the service over D-Bus. If this program is called as `yunion-mps-NAME`, it acts as an OCI runtime.

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    if let Some((own_name, rest)) = arguments.split_first()
        && let Some(runtime) = mpsctl::runtime::stands_before(own_name)
    {
        return mpsctl::runtime::execute(runtime, rest).unwrap_or_else(|error| {
            // Standard error may be a closed pipe, so an error of this write is ignored.
            let _ = writeln!(
                std::io::stderr(),
                "{own_name}: {runtime} can't be executed: {error}",
                own_name = own_name.display(),
                runtime = runtime.display()
            );
            ExitCode::FAILURE
        });
    }
    let (mut out, mut err) = (std::io::stdout().lock(), std::io::stderr());
    ExitCode::from(mpsctl::main(arguments, &mut out, &mut err))
}
