//! The help texts and the version of the binary.

use crate::support::{command, folder, kintsugi, stdout};

#[test]
fn alone_it_prints_help() {
    let folder = folder("help-alone");
    let alone = stdout(&kintsugi(&folder, &[]));
    assert_eq!(alone, stdout(&kintsugi(&folder, &["-h"])));
    insta::assert_snapshot!(alone, @r#"
    Trains large language models on many ranks, and predicts memory, traffic and time before the run

    Usage: kintsugi [COMMAND]

    Commands:
      train        Trains a model, and compares the run with its prediction
      plan         Predicts a training step: memory, traffic, time and energy
      tune         Finds a strategy by a few short runs
      verify       Checks that every layout trains the same model as one rank
      launch       Runs a command as processes, one per rank
      report       Writes an HTML page about runs, a plan, a search or a tuning
      watch        Shows runs in a browser while they go on
      status       Shows runs and their jobs, and why a run has ended
      calibrate    Measures this machine and writes a profile for `plan --profile`
      bench        Measures parts of a run by themselves
      prepare      Turns text into token files for training
      convert      Converts weights between Hugging Face folders and checkpoints of any layout
      generate     Continues text with a model, token by token
      eval         Measures the loss and the perplexity of a model on token files
      config       Explains the keys of the configuration
      doctor       Shows what this machine has, and what is missing
      completions  Prints a completion script for a shell
      man          Prints a manual page
      help         Print this message or the help of the given subcommand(s)

    Options:
      -h, --help     Print help (see more with '--help')
      -V, --version  Print version

    Start with:
      kintsugi train              train the built-in demo on 8 ranks of this machine
      kintsugi plan --draw        predict the demo's memory and traffic, and draw its pipeline schedule
      kintsugi verify             check that every layout trains the same model
    "#);
}

#[test]
fn every_command_teaches_with_examples() {
    let folder = folder("help-commands");
    for command in ["train", "plan", "tune", "verify", "convert", "generate", "eval", "config", "report"] {
        let help = stdout(&kintsugi(&folder, &[command, "--help"]));
        assert!(help.contains(&format!("Examples:\n  kintsugi {command}")), "{help}");
        assert!(help.contains("--set <TABLE.KEY=VALUE>"), "{help}");
    }
    for command in ["prepare", "watch"] {
        let help = stdout(&kintsugi(&folder, &[command, "--help"]));
        assert!(help.contains(&format!("Examples:\n  kintsugi {command}")), "{help}");
    }
}

#[test]
fn help_is_no_wider_than_100_characters_on_a_wide_terminal() {
    let folder = folder("help-width");
    for name in ["train", "plan", "tune", "verify", "launch", "report", "config"] {
        let output = command(&folder, &[name, "--help"]).env("COLUMNS", "220").output().unwrap();
        for line in stdout(&output).lines() {
            assert!(line.chars().count() <= 100, "{name}: {line}");
        }
    }
}

#[test]
fn the_doctor_says_what_is_found_or_what_was_tried() {
    let folder = folder("doctor");
    let findings: serde_json::Value =
        serde_json::from_str(&stdout(&kintsugi(&folder, &["doctor", "--json"]))).expect("JSON");
    let libraries = findings["libraries"].as_array().expect("a list");
    assert!(libraries.iter().any(|library| library["name"] == "cuBLASLt"), "{findings}");
    for library in libraries {
        let tried = library["tried"].as_array().expect("a list");
        assert!(library["version"].is_string() || !tried.is_empty(), "{library}");
    }
    let text = stdout(&kintsugi(&folder, &["doctor"]));
    assert!(text.contains("cores ") && text.contains("cuDNN"), "{text}");
}

#[test]
fn the_version_names_the_commit() {
    let said = stdout(&kintsugi(&folder("version"), &["--version"]));
    let commit = said
        .strip_prefix(concat!("kintsugi ", env!("CARGO_PKG_VERSION"), " ("))
        .and_then(|rest| rest.strip_suffix(")\n"))
        .unwrap_or_else(|| panic!("{said}"));
    let hash = commit.len() >= 9 && commit.chars().all(|digit| digit.is_ascii_hexdigit());
    assert!(hash || commit == "unknown", "{said}");
}

#[test]
fn shells_complete_commands_and_their_options() {
    let folder = folder("completions");
    for shell in ["bash", "zsh", "fish"] {
        let script = stdout(&kintsugi(&folder, &["completions", shell]));
        assert!(
            script.contains("kintsugi") && script.contains("calibrate") && script.contains("sweep"),
            "{script}"
        );
    }
    assert_eq!(kintsugi(&folder, &["completions", "tcsh"]).status.code(), Some(2));
}

#[test]
fn bash_completes_the_keys_of_set() {
    let folder = folder("completions-keys");
    std::fs::write(folder.join("kintsugi.bash"), stdout(&kintsugi(&folder, &["completions", "bash"])))
        .unwrap();
    let completed = |words: &str| {
        // As readline calls the function: the words of the line, and the last one to be completed.
        let script = format!(
            "source kintsugi.bash; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             $(complete -p kintsugi | sed 's/.*-F \\([^ ]*\\).*/\\1/') kintsugi \"${{COMP_WORDS[-1]}}\" \"${{COMP_WORDS[-2]}}\"; \
             printf '%s\\n' \"${{COMPREPLY[@]}}\""
        );
        let output =
            std::process::Command::new("bash").args(["-c", &script]).current_dir(&folder).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect::<Vec<_>>()
    };
    for command in ["train", "plan", "verify", "generate", "bench comm"] {
        assert_eq!(completed(&format!("kintsugi {command} --set parallel.t")), ["parallel.tp="], "{command}");
    }
    assert_eq!(completed("kintsugi plan --sweep batch.mi"), ["batch.micro="]);
    let all = completed("kintsugi train --set ''");
    assert!(all.len() > 100 && all.contains(&"run.device=".to_owned()), "{all:?}");
}

#[test]
fn man_has_a_page_for_every_command() {
    let folder = folder("man");
    let page = stdout(&kintsugi(&folder, &["man"]));
    assert!(page.contains(".TH kintsugi 1") && page.contains("kintsugi\\-train(1)"), "{page}");
    for command in ["train", "plan", "config", "man"] {
        let page = stdout(&kintsugi(&folder, &["man", command]));
        assert!(page.contains(&format!(".TH kintsugi-{command} 1")), "{page}");
    }
    let output = kintsugi(&folder, &["man", "trian"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}
