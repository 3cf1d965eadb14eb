//! The tutorial for a CPU: its commands run one after the other, as a reader types them.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use crate::support::folder;

/// The blocks of a page with their languages.
fn blocks(page: &str) -> impl Iterator<Item = (&str, &str)> {
    page.split("\n```").skip(1).step_by(2).map(|block| block.split_once('\n').expect("a block has lines"))
}

#[test]
fn every_command_of_the_tutorial_runs() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let folder = folder("tutorial");
    symlink(root.join("docs"), folder.join("docs")).unwrap();
    let bin = Path::new(env!("CARGO_BIN_EXE_kintsugi")).parent().unwrap().display();
    let path = format!("{bin}:{}", env::var("PATH").unwrap());
    let page = fs::read_to_string(root.join("docs/start.md")).unwrap();
    let mut commands = 0;
    for (language, text) in blocks(&page) {
        match language {
            "toml" => {
                let name = text.lines().next().unwrap().strip_prefix("# ").expect("a name");
                fs::write(folder.join(name), text).unwrap();
            }
            "sh" => {
                for line in text.lines() {
                    let output = Command::new("sh")
                        .args(["-c", line])
                        .env("PATH", &path)
                        .current_dir(&folder)
                        .output()
                        .unwrap();
                    let errors = String::from_utf8_lossy(&output.stderr);
                    assert!(output.status.success(), "{line}: {errors}");
                    commands += 1;
                }
            }
            other => panic!("a block of the tutorial is {other:?}, which is not run"),
        }
    }
    assert!(commands >= 12, "{commands} commands");
    for file in ["best.toml", "run.html", "exported/model.safetensors", "continued/summary.json"] {
        assert!(folder.join(file).is_file(), "{file}");
    }
}
