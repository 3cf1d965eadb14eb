//! Pipes and devices instead of files: they are refused by name, at once and without being read.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::resume::stderr;
use crate::support::{TINY, command, folder, kintsugi, stdout, tiny};

/// Runs the binary for at most a minute in four GiB, so that endless waiting or reading fails.
fn bounded(folder: &Path, arguments: &[&str]) -> Output {
    let binary = command(folder, arguments);
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -v 4194304 && exec timeout 60 \"$@\"", "sh"]);
    shell.arg(binary.get_program()).args(binary.get_args()).current_dir(folder).output().unwrap()
}

/// Replaces `path` by another kind of file.
fn replace(path: &Path, what: &str) {
    fs::remove_file(path).ok();
    match what {
        "a pipe" => assert!(Command::new("mkfifo").arg(path).status().unwrap().success()),
        _ => symlink("/dev/zero", path).unwrap(),
    }
}

const KINDS: [&str; 2] = ["a pipe", "a device"];

#[test]
fn a_pipe_or_a_device_is_no_configuration_and_no_profile() {
    let folder = folder("foreign-config");
    for what in KINDS {
        replace(&folder.join("a.toml"), what);
        for arguments in [&["plan", "a.toml"][..], &["plan", "--profile", "a.toml"], &["train", "a.toml"]] {
            let output = bounded(&folder, arguments);
            assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
            assert_eq!(
                stderr(&output),
                format!("error: cannot read a.toml: it is {what}, not a regular file\n")
            );
        }
    }
}

#[test]
fn a_configuration_may_come_through_stdin_up_to_a_limit() {
    let folder = folder("foreign-stdin");
    fs::write(folder.join("a.toml"), "model.preset = \"demo\"\nbatch.global = 8\n").unwrap();
    let shell = |script: &str| {
        let binary = command(&folder, &[]);
        let mut shell = Command::new("bash");
        shell.args(["-c", script, "bash"]).arg(binary.get_program()).current_dir(&folder).output().unwrap()
    };
    for script in ["cat a.toml | $1 plan /dev/stdin", "$1 plan <(cat a.toml)", "$1 plan /dev/stdin < a.toml"]
    {
        assert!(stdout(&shell(script)).contains("model    demo"), "{script}");
    }
    let endless = command(&folder, &["plan", "/dev/stdin"])
        .stdin(Stdio::from(fs::File::open("/dev/zero").unwrap()))
        .output()
        .unwrap();
    assert_eq!(endless.status.code(), Some(2), "{endless:?}");
    assert!(stderr(&endless).contains("it has more than the 67108864 bytes that are read"), "{endless:?}");
}

#[test]
fn a_checkpoint_of_pipes_or_devices_is_broken_and_the_one_before_is_used() {
    let folder = folder("foreign-checkpoint");
    stdout(&tiny(&folder, &["train"], &["run.checkpoint_every=2"]));
    let settings: Vec<&str> =
        TINY.iter().chain(&["run.out=other", "run.keep=0"]).flat_map(|set| ["--set", set]).collect();
    for name in ["rank-00003.safetensors", "manifest.json"] {
        for what in KINDS {
            let path = Path::new("out/checkpoints/step-00000004").join(name);
            replace(&folder.join(&path), what);
            let output = bounded(&folder, &[&["train", "--resume=out"], &settings[..]].concat());
            assert!(stdout(&output).contains("resumes after step 2 "), "{output:?}");
            let warning = format!("warning: {}: it is {what}, not a regular file", path.display());
            assert!(stderr(&output).starts_with(&warning), "{output:?}");
        }
    }
}

#[test]
fn weights_and_token_files_of_others_are_regular_files() {
    let folder = folder("foreign-files");
    stdout(&tiny(&folder, &["train"], &[]));
    stdout(&kintsugi(&folder, &["convert", "out", "hf"]));
    fs::write(folder.join("a.txt"), "one two three four five six seven eight nine ten\n".repeat(200))
        .unwrap();
    stdout(&kintsugi(&folder, &["prepare", "a.txt", "--tokenizer", "bytes", "--out", "corpus"]));
    let generate = ["generate", "hf", "--prompt-tokens", "1 2 3", "--tokens", "2"];
    let train = ["train", "--set", "data.source=corpus", "--set", "model.vocab=300", "--set", "run.steps=1"];
    let validate = ["plan", "--validate", "."];
    let cases: [(&str, &[&str]); 4] = [
        ("hf/model.safetensors", &generate),
        ("corpus.bin", &train),
        ("corpus.idx", &train),
        ("korthikanti_table5.csv", &validate),
    ];
    for (name, arguments) in cases {
        let path = folder.join(name);
        let before = fs::read(&path).ok();
        for what in KINDS {
            replace(&path, what);
            let output = bounded(&folder, arguments);
            assert_eq!(output.status.code(), Some(2), "{name}, {what}: {output:?}");
            assert!(
                stderr(&output).contains(&format!("it is {what}, not a regular file")),
                "{name}: {output:?}"
            );
        }
        fs::remove_file(&path).unwrap();
        if let Some(bytes) = before {
            fs::write(&path, bytes).unwrap();
        }
    }
}
