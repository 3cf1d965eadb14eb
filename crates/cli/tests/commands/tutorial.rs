//! The tutorials: their commands run one after the other, as a reader types them. That for Slurm runs in its cluster.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::support::folder;

/// The sizes and the device with which a machine without a GPU runs the tutorial for one.
const SMALL: &str = "--set run.device=cpu --set model.layers=2 --set model.hidden=32 --set model.heads=2 --set batch.sequence=16 \
                     --set batch.micro=1 --set run.steps=2 --set run.eval_tokens=256 --set cluster.preset=local";

/// A page of the documentation in a folder of its own, from which its commands are run.
pub struct Tutorial {
    pub folder: PathBuf,
    text: String,
}

impl Tutorial {
    /// A page, in a folder with what the sources have and a reader therefore has too.
    pub fn new(name: &str) -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
        let folder = folder(&format!("tutorial-{name}"));
        for shared in ["docs", "examples"] {
            symlink(root.join(shared), folder.join(shared)).unwrap();
        }
        Tutorial { folder, text: fs::read_to_string(root.join(format!("docs/{name}.md"))).unwrap() }
    }

    /// Writes the files of the page and runs its commands, in order. Gives their number.
    pub fn run(&self, mut run: impl FnMut(&str) -> Output) -> usize {
        let mut commands = 0;
        for block in self.text.split("\n```").skip(1).step_by(2) {
            match block.split_once('\n').expect("a block has lines") {
                ("toml", text) => {
                    let name = text.lines().next().unwrap().strip_prefix("# ").expect("a name");
                    fs::write(self.folder.join(name), text).unwrap();
                }
                ("sh", text) => {
                    for line in text.lines() {
                        let output = run(line);
                        let errors = String::from_utf8_lossy(&output.stderr);
                        assert!(output.status.success(), "{line}: {errors}");
                        commands += 1;
                    }
                }
                // How to set up a machine.
                ("", _) => {}
                (other, _) => panic!("a block of the tutorial is {other:?}, which is not run"),
            }
        }
        commands
    }

    /// A shell that runs a line in the folder.
    pub fn shell(&self, line: &str) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", line]).env("PATH", path()).current_dir(&self.folder);
        shell
    }
}

/// The variable `PATH` with the folder of `kintsugi` before the others.
pub fn path() -> String {
    let bin = Path::new(env!("CARGO_BIN_EXE_kintsugi")).parent().unwrap().display();
    format!("{bin}:{}", env::var("PATH").unwrap())
}

#[test]
fn every_command_of_the_tutorial_runs() {
    let tutorial = Tutorial::new("start");
    let commands = tutorial.run(|line| tutorial.shell(line).output().unwrap());
    assert!(commands >= 12, "{commands} commands");
    for file in ["best.toml", "run.html", "exported/model.safetensors", "continued/summary.json"] {
        assert!(tutorial.folder.join(file).is_file(), "{file}");
    }
}

/// The plans are those of the page. What trains does so on the CPU; ranks with a GPU each are not started, but their command is made.
#[test]
fn every_command_of_the_tutorial_for_a_gpu_runs() {
    let tutorial = Tutorial::new("start-gpu");
    let commands = tutorial.run(|line| {
        let line = match line.split_once(' ').unwrap().1 {
            words if words.starts_with("train ") => format!("{line} {SMALL}"),
            words if words.starts_with("launch ") => line.replacen("launch", "launch --print", 1),
            _ => line.to_owned(),
        };
        tutorial.shell(&line).output().unwrap()
    });
    assert_eq!(commands, 4);
    assert!(tutorial.folder.join("out/summary.json").is_file());
}
