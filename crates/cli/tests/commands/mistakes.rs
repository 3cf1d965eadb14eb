//! A mistake of the user gives one sentence and exit code 2.

use std::fs;

use kintsugi_gpu::CUDA;

use crate::support::{command, folder, kintsugi, limited, tiny};

/// The message of a mistake.
fn refused(name: &str, arguments: &[&str]) -> String {
    let folder = folder(name);
    fs::write(folder.join("wrong.toml"), "[model]\npreset = \"demo\"\n[parallel]\ntpp = 2\n").unwrap();
    let output = kintsugi(&folder, arguments);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    assert!(!folder.join("out").exists());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_key_that_does_not_exist() {
    for command in ["train", "plan", "verify"] {
        let said = refused(&format!("unknown-key-{command}"), &[command, "wrong.toml"]);
        assert_eq!(said, "error: unknown key parallel.tpp in wrong.toml; did you mean tp?\n");
    }
}

#[test]
fn a_kind_of_parallelism_that_is_not_available() {
    let said = refused("no-expert-parallelism", &["train", "--set", "parallel.ep=8"]);
    assert!(
        said.starts_with("error: parallel.ep is not available: Kintsugi has no expert parallelism, "),
        "{said}"
    );
}

#[test]
fn what_other_trainers_have_is_answered() {
    for (set, words) in [
        (
            "precision.compute=fp8",
            "precision.compute = \"fp8\" is not available: Kintsugi has no such type of weights and \
             activations; ",
        ),
        ("model.experts=8", "model.experts is not available: Kintsugi has no mixture-of-experts models; "),
        ("model.dropout=0.1", "model.dropout is not available: Kintsugi has no dropout, "),
        ("lora.rank=8", "lora is not available: Kintsugi has no low-rank adapters "),
    ] {
        let said = refused("not-available", &["train", "--set", set]);
        assert!(said.starts_with(&format!("error: {words}")), "{said}");
    }
}

#[test]
fn a_model_that_is_not_downloaded() {
    let said = refused("no-weights", &["plan", "--set", "model.init=openai-community/gpt2"]);
    assert!(said.starts_with("error: model.init = \"openai-community/gpt2\" is not a folder; "), "{said}");
    assert!(said.ends_with("as with: hf download openai-community/gpt2 --local-dir gpt2\n"), "{said}");
    // A configuration with all sizes needs the folder only when it trains.
    let folder = folder("no-weights-train");
    let output = tiny(&folder, &["train"], &["model.preset=demo", "model.init=gpt2"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("hf download gpt2 --local-dir gpt2"), "{said}");
}

#[test]
fn tasks_of_slurm_that_cannot_find_each_other() {
    let folder = folder("slurm-alone");
    for (rank, words) in [("0", "use srun --mpi=pmix"), ("1", "")] {
        let mut train = command(&folder, &["train"]);
        for (name, _) in std::env::vars_os() {
            let begins = |begin: &str| name.to_string_lossy().starts_with(begin);
            if ["PMI", "OMPI_", "PALS_", "SLURM_"].into_iter().any(begins) {
                train.env_remove(&name);
            }
        }
        let output = train.env("SLURM_PROCID", rank).env("SLURM_STEP_NUM_TASKS", "2").output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains(words) && said.is_empty() == words.is_empty(), "{said}");
        assert!(!folder.join("out").exists());
    }
}

#[test]
fn a_file_that_is_not_there() {
    let said = refused("missing-file", &["plan", "absent.toml"]);
    assert_eq!(said, "error: cannot read absent.toml: No such file or directory (os error 2)\n");
}

#[test]
fn a_value_that_is_not_allowed() {
    let said = refused("wrong-value", &["train", "--set", "parallel.tp=3"]);
    insta::assert_snapshot!(said, @"error: parallel.tp = 3 does not divide model.heads = 4; use 1, 2 or 4");
}

#[test]
fn a_model_that_is_too_small_for_its_data() {
    let said = refused("vocabulary", &["train", "--set", "model.vocab=64"]);
    insta::assert_snapshot!(
        said,
        @r#"error: model.vocab = 64 is less than the 128 tokens of data.source = "demo"; use 128 or more"#
    );
}

#[test]
fn a_plan_that_does_not_fit_is_refused_before_it_runs() {
    let said = refused("misfit", &["train", "--set", "cluster.device.memory=1000000"]);
    assert!(said.starts_with("error: rank 0 needs "), "{said}");
    assert!(said.ends_with(" but has 976.56 KiB (cpu)\n"), "{said}");
    assert_eq!(said.lines().count(), 1);
}

#[test]
fn a_trace_that_cannot_be_written_is_refused_before_the_run() {
    let folder = folder("trace-nowhere");
    let output = tiny(&folder, &["train", "--trace", "absent/trace.json"], &[]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(!folder.join("out/metrics.jsonl").exists());
}

#[test]
fn a_trace_that_is_a_folder_is_refused_before_the_run() {
    for command in ["train", "plan"] {
        let folder = folder(&format!("trace-folder-{command}"));
        fs::create_dir(folder.join("traces")).unwrap();
        let output = tiny(&folder, &[command, "--trace", "traces"], &[]);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "error: cannot write traces: it is a folder\n");
        assert!(output.stdout.is_empty(), "{output:?}");
        assert!(!folder.join("out/metrics.jsonl").exists());
    }
}

#[test]
fn a_run_that_cannot_begin_leaves_the_one_before_it_as_it_was() {
    let folder = folder("mistakes-keep");
    assert!(tiny(&folder, &["train"], &[]).status.success());
    let before = fs::read(folder.join("out/metrics.jsonl")).unwrap();
    let output = tiny(&folder, &["train", "--write-batches", "absent/batches.npy"], &[]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    if CUDA.devices().is_err() {
        let one = ["parallel.tp=1", "parallel.pp=1", "parallel.dp=1", "run.device=cuda"];
        assert_eq!(tiny(&folder, &["train"], &one).status.code(), Some(1));
    }
    assert_eq!(fs::read(folder.join("out/metrics.jsonl")).unwrap(), before);
    assert!(folder.join("out/summary.json").exists() && folder.join("out/checkpoints").exists());
}

#[test]
#[cfg(unix)]
fn links_are_followed_and_pipes_written_to() {
    let folder = folder("mistakes-links");
    fs::write(folder.join("target.json"), "old").unwrap();
    std::os::unix::fs::symlink("target.json", folder.join("link.json")).unwrap();
    assert!(tiny(&folder, &["plan", "--trace", "link.json"], &[]).status.success());
    assert!(folder.join("link.json").is_symlink());
    assert!(fs::read_to_string(folder.join("target.json")).unwrap().starts_with('{'));
    let piped = tiny(&folder, &["plan", "--trace", "/dev/stdout"], &[]);
    assert!(String::from_utf8_lossy(&piped.stdout).contains("traceEvents"), "{piped:?}");
}

#[test]
fn a_folder_that_cannot_be_used_is_refused_before_anything_is_said() {
    let folder = folder("out-is-a-file");
    fs::write(folder.join("out"), "").unwrap();
    let output = tiny(&folder, &["train"], &[]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("error: cannot create out: "), "{said}");
}

#[test]
fn a_run_that_does_not_fit_into_the_limits_of_its_process_is_refused() {
    let folder = folder("limited");
    let output = limited(&folder, &["train", "--set", "model.hidden=2048", "--set", "model.layers=8"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains(" and all 8 ranks together must fit into "), "{said}");
    assert!(said.ends_with("(left of this process's address space, ulimit -v)\n"), "{said}");
}

#[test]
fn arguments_that_do_not_exist() {
    assert!(refused("no-command", &["trian"]).starts_with("error: "));
    assert!(refused("no-fault", &["verify", "--inject", "gremlin"]).contains("missing-average"));
    let steps = refused("too-many-steps", &["verify", "--steps", "99999999"]);
    assert_eq!(steps, "error: run.steps = 99999999 must be at most 16777216\n");
}
