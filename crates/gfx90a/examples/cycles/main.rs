//! Counts what attention on the matrix cores and the epilogues of products execute on gfx90a, and prints what follows for
//! their speed: tables, and a profile of estimates for the planner.
//!
//! The kernels run in the interpreter. Memory, waits and the start of workgroups are not counted.
//!
//! `cargo run --release -p kintsugi-gfx90a --example cycles`

mod attention;
mod epilogues;
mod units;

use std::error::Error;

use kintsugi_gfx90a::Compiler;

fn main() -> Result<(), Box<dyn Error>> {
    let compiler = Compiler::find(&std::env::temp_dir().join("kintsugi-gfx90a"))?;
    let attention = attention::measure(&compiler)?;
    let epilogues = epilogues::measure(&compiler)?;
    println!("{}\n{}", attention::tables(&attention), epilogues::table(&epilogues));
    println!("{}{}", attention::profile(&attention), epilogues::profile(&epilogues));
    Ok(())
}
