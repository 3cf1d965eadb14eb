//! Checks what is declared here of AMD's libraries against their real headers, by static assertions of a C compiler.

use std::fs;
use std::path::Path;
use std::process::{self, Command};

use kintsugi_testing::{Need, skip};

/// A function and its parameters, as the header declares them.
pub(super) type Prototype = (&'static str, &'static str);

/// The assertions that functions return `status` and take these parameters.
pub(super) fn prototypes(status: &str, functions: &[Prototype]) -> Vec<String> {
    let fact = |(function, parameters): &Prototype| {
        format!("__builtin_types_compatible_p(__typeof__(&{function}), {status} (*)({parameters}))")
    };
    functions.iter().map(fact).collect()
}

/// Compiles the facts as assertions behind a header of `/usr/include`, which the Debian package has.
pub(super) fn assert_facts(header: &str, package: &str, facts: &[String]) {
    if !Path::new("/usr/include").join(header).exists() {
        skip(Need::AmdTools, format!("there is no {header} (Debian: {package})"));
        return;
    }
    let includes = format!(
        "#define __HIP_PLATFORM_AMD__\n#include <stdbool.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <{header}>\n"
    );
    let asserts: Vec<String> = facts.iter().map(|fact| format!("_Static_assert({fact}, \"\");\n")).collect();
    let name = header.replace('/', "-");
    let file = std::env::temp_dir().join(format!("kintsugi-{name}-{}.c", process::id()));
    fs::write(&file, format!("{includes}{}", asserts.concat())).expect("a file");
    let output = Command::new("cc").arg("-fsyntax-only").arg(&file).output().expect("a C compiler");
    fs::remove_file(&file).expect("it can be removed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
