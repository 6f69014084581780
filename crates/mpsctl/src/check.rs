//! `yunion-mpsctl check`: reports mistakes in the configuration, and the changes that a reload would make.

use std::io::Write;

use common::check::report::CheckReport;
use common::config::Sources;

use crate::show::table::hanging;
use crate::{Result, print_json};

pub(crate) async fn check(sources: Sources, json: bool, out: &mut dyn Write) -> Result<u8> {
    let report = CheckReport::new(sources).await;
    if json {
        print_json(out, &report.document())?;
    } else {
        for line in report.lines() {
            writeln!(out, "{}", hanging(&line))?;
        }
    }
    Ok(report.exit_status())
}
