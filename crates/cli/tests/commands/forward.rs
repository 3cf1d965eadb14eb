//! `kintsugi watch --forward`: what is written to the program that calls a service. A shell script takes the place of Python;
//! scripts/check-python tests the services' own libraries.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::support::{folder, json_lines, keys, kintsugi, stdout, tiny};

/// A program that takes the place of Python.
fn program(folder: &Path, text: &str) {
    let path = folder.join("python");
    fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn a_run_is_sent_with_its_configuration_every_step_and_its_summary() {
    let folder = folder("forward");
    stdout(&tiny(&folder, &["train"], &[]));
    program(&folder, "cat > sent; echo \"$3\" > service");
    let sent = ["watch", "out", "--forward", "mlflow", "--python", "./python"];
    assert_eq!(stdout(&kintsugi(&folder, &sent)), "sent     out to mlflow\n");
    assert_eq!(fs::read_to_string(folder.join("service")).unwrap(), "mlflow\n");
    let lines = json_lines(&folder.join("sent"));
    let [first, steps @ .., last] = &lines[..] else { panic!("{lines:?}") };
    assert_eq!(keys(first), ["id", "name", "folder", "config"]);
    assert_eq!((&first["name"], &first["config"]["model"]["hidden"]), (&"out".into(), &32.into()));
    assert_eq!(steps, json_lines(&folder.join("out/metrics.jsonl")));
    assert_eq!(steps.len(), 4);
    assert_eq!(last["summary"], json(&folder.join("out/summary.json")));
}

fn json(path: &Path) -> serde_json::Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn a_program_that_fails_decides_the_exit_code() {
    let folder = folder("forward-fails");
    stdout(&tiny(&folder, &["train"], &[]));
    for (text, code) in [("echo 'error: no library' >&2; exit 2", 2), ("exit 1", 1), ("kill -9 $$", 1)] {
        program(&folder, text);
        let sent = kintsugi(&folder, &["watch", "out", "--forward", "wandb", "--python", "./python"]);
        let errors = String::from_utf8_lossy(&sent.stderr).into_owned();
        assert_eq!(sent.status.code(), Some(code), "{errors}");
        assert_eq!(errors.matches("error: ").count(), 1, "{errors}");
    }
}
