//! The configurations in `examples`.

use std::fs;
use std::path::Path;

use crate::support::{folder, kintsugi};

#[test]
fn every_example_fits_and_is_described() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let page = fs::read_to_string(examples.join("README.md")).unwrap();
    let folder = folder("examples");
    let mut count = 0;
    for entry in fs::read_dir(&examples).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "toml") {
            continue;
        }
        count += 1;
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        assert!(page.contains(&format!("[{name}]({name})")), "examples/README.md does not describe {name}");
        let output = kintsugi(&folder, &["plan", path.to_str().unwrap(), "--check"]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{name}: {errors}");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("\nfits     yes\n"), "{name}: {text}");
    }
    assert!(count >= 7, "{count} examples");
}
