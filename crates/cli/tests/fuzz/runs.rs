//! The files of a run, as `report` and `watch` read them.

use std::path::Path;

use kintsugi_report::{Detail, ReportRun, page, runs};

use crate::harness::{Files, Target, as_it_is};

const METRICS: &str = r#"{"schema":1,"time":1794844928.6,"step":1,"loss":4.9,"grad_norm":3.1,"lr":0.0001,"tokens":2048,"tokens_per_s":7081.9,"step_s":0.289,"mfu":null,"loss_scale":1.0,"skipped":false,"samples":32}
{"schema":1,"time":1794844929.1,"step":2,"loss":null,"grad_norm":2.9,"lr":0.0002,"tokens":4096,"tokens_per_s":7446.9,"step_s":0.275,"mfu":0.4,"loss_scale":65536.0,"skipped":true,"energy_j":12.5,"checkpoint_s":0.01,"validation_loss":4.5,"validation_losses":{"a":4.4,"b":null},"samples":64,"epochs":{"a":0.5,"b":1.5}}
"#;

const SUMMARY: &str = r#"{"stopped":false,"failure":null,"loss_floor":1.5,
"predicted":{"peak_bytes":[{"weights":100,"total":300,"reserved":320},{"weights":90,"total":280,"reserved":300}],"comm_bytes":{"node":{"all_reduce":4000,"send":20}},"step_s":0.25,"tokens_per_s":8192.0,"energy_j":null},
"measured":{"peak_bytes":[{"weights":100,"total":300,"reserved":321},{"weights":90,"total":280,"reserved":300}],"comm_bytes":{"node":{"all_reduce":4000,"send":20}},"step_s":0.27,"tokens_per_s":7585.0,"energy_j":11.0}}
"#;

const TRACE: &str = r#"{"displayTimeUnit":"ms","traceEvents":[
{"ph":"M","name":"process_name","pid":0,"tid":0,"args":{"name":"rank 0, stage 0"}},
{"ph":"X","name":"forward layer 0, micro-batch 0","cat":"compute","pid":0,"tid":0,"ts":0.0,"dur":10.5,"args":{"stage":0,"kind":"forward","micro":0,"flops":1000}},
{"ph":"X","name":"backward layer 1, micro-batch 0","cat":"compute","pid":1,"tid":0,"ts":12.0,"dur":20.5,"args":{"stage":1,"kind":"backward","micro":0,"bytes":64}},
{"ph":"s","bp":"e","name":"message","cat":"message","id":0,"pid":0,"tid":0,"ts":10.0,"args":{"span":0}},
{"ph":"f","bp":"e","name":"message","cat":"message","id":0,"pid":1,"tid":0,"ts":12.0,"args":{"span":1}}]}
"#;

/// Folders of runs. Their configurations are read by a target of their own.
pub fn folders(_: &Path) -> Target {
    let file = |name: &str, text: &str| (name.to_owned(), text.as_bytes().to_vec());
    let whole = [file("metrics.jsonl", METRICS), file("summary.json", SUMMARY), file("trace.json", TRACE)];
    Target { seeds: vec![Files::from(whole)], changed: &[], repair: as_it_is, read }
}

fn read(folder: &Path) -> bool {
    let Ok(run) = ReportRun::open(folder, "run".to_owned(), None) else { return false };
    let page = page::file(&runs::report(&[(&run, None)], Detail::File));
    assert_eq!(page.matches("<script").count(), 2, "the data and the script");
    !run.steps.step.is_empty() && run.summary.is_some() && run.trace.is_some()
}
