//! What the binary says about itself.

use crate::support::{folder, kintsugi, stdout};

#[test]
fn alone_it_prints_help() {
    let folder = folder("help-alone");
    let alone = stdout(&kintsugi(&folder, &[]));
    assert_eq!(alone, stdout(&kintsugi(&folder, &["-h"])));
    insta::assert_snapshot!(alone, @"");
}

#[test]
fn every_command_teaches_with_examples() {
    let folder = folder("help-commands");
    for command in ["train", "plan", "verify"] {
        let help = stdout(&kintsugi(&folder, &[command, "--help"]));
        assert!(help.contains(&format!("Examples:\n  kintsugi {command}")), "{help}");
        assert!(help.contains("--set <TABLE.KEY=VALUE>"), "{help}");
    }
}
