//! Runs a target again and again on changed files, in a process of its own with little memory.
//!
//! The child ends at the first input that panics, takes too long or takes too much memory; the files of that input are
//! then in its folder, and the parent says where.

use std::collections::BTreeMap;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::mutate::{Random, mutate};

/// Files by name: what a reader is given.
pub type Files = BTreeMap<String, Vec<u8>>;

/// A reader, with valid files to start from.
pub struct Target {
    /// Sets of valid files.
    pub seeds: Vec<Files>,
    /// Which files are changed, by the ends of their names; all without any.
    pub changed: &'static [&'static str],
    /// Makes changed files consistent again, so that changes reach behind a checksum.
    pub repair: fn(&mut Files),
    /// Reads the files of a folder; says whether they could be read.
    pub read: fn(&Path) -> bool,
}

const SECONDS: u64 = 2;
/// KiB of address space: allocations of gigabytes fail.
const ADDRESS_SPACE: usize = 3 << 20;
/// An input that takes so long is a failure; a busy machine takes a tenth of it.
const LONGEST: Duration = Duration::from_secs(20);
const CHILD: &str = "KINTSUGI_FUZZ_CHILD";

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// A folder of this target, on a disk in memory where there is one.
pub fn folder(name: &str) -> PathBuf {
    let memory = Path::new("/dev/shm");
    let parent = if memory.is_dir() { memory } else { Path::new(env!("CARGO_TARGET_TMPDIR")) };
    parent.join(format!("kintsugi-fuzz-{}-{name}", number(CHILD, u64::from(std::process::id()))))
}

/// Fuzzes a target; `target` makes its valid files in a folder.
pub fn fuzz(name: &str, target: fn(&Path) -> Target) {
    if std::env::var_os(CHILD).is_some() {
        return child(name, target);
    }
    let script = format!("ulimit -v {ADDRESS_SPACE} && ulimit -c 0 && exec \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &script, "sh"]).arg(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]).env(CHILD, std::process::id().to_string());
    // Every thread has memory of its own to allocate from.
    command.env("MALLOC_ARENA_MAX", "2").env("RAYON_NUM_THREADS", "2");
    let output = command.output().unwrap();
    let (input, kept) = (folder(name), Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fuzz-{name}")));
    let said = String::from_utf8_lossy(&output.stdout);
    if output.status.success() {
        print!("{}", said.lines().filter(|line| line.starts_with("fuzz ")).collect::<String>() + "\n");
        fs::remove_dir_all(&input).ok();
        return;
    }
    fs::remove_dir_all(&kept).ok();
    copy(&input, &kept);
    fs::remove_dir_all(&input).ok();
    let errors = String::from_utf8_lossy(&output.stderr);
    panic!("{name}: {}\n{said}\n{errors}\nthe input is in {}", output.status, kept.display());
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().flatten() {
        if entry.path().is_dir() {
            copy(&entry.path(), &to.join(entry.file_name()));
        } else {
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

fn child(name: &str, target: fn(&Path) -> Target) {
    let input = folder(name);
    fs::remove_dir_all(&input).ok();
    let (origin, place) = (input.join("seeds"), input.join("input"));
    fs::create_dir_all(&origin).unwrap();
    fs::create_dir_all(&place).unwrap();
    let target = target(&origin);
    let panic = record_panics();
    let executions = Arc::new(AtomicU64::new(0));
    watch(Arc::clone(&executions));
    let seed = number("KINTSUGI_FUZZ_SEED", 1);
    let mut random =
        Random::new(name.bytes().fold(seed, |sum, byte| sum.wrapping_mul(257) + u64::from(byte)));
    let (begun, seconds) = (Instant::now(), Duration::from_secs(number("KINTSUGI_FUZZ_SECONDS", SECONDS)));
    let (mut before, mut readable) = (None, 0);
    // The seeds themselves come first: they must be readable.
    let mut unchanged = 0..target.seeds.len();
    while begun.elapsed() < seconds {
        let first = unchanged.next();
        let number = first.unwrap_or_else(|| random.below(target.seeds.len()));
        let mut files = target.seeds[number].clone();
        if first.is_none() {
            change(&mut random, &mut files, target.changed);
        }
        (target.repair)(&mut files);
        write(&place, before.as_ref(), &files);
        before = Some(files);
        let read = catch_unwind(AssertUnwindSafe(|| (target.read)(&place)));
        let Ok(read) = read else {
            println!("a panic of seed {seed}: {}", panic.lock().unwrap());
            std::process::exit(101);
        };
        if !read && first.is_some() {
            println!("the valid files {number} cannot be read");
            std::process::exit(103);
        }
        readable += u64::from(read);
        executions.fetch_add(1, Ordering::Relaxed);
    }
    println!(
        "fuzz {name}: {} executions in {:.0} s, {readable} readable",
        executions.load(Ordering::Relaxed),
        begun.elapsed().as_secs_f64()
    );
}

fn change(random: &mut Random, files: &mut Files, changed: &[&str]) {
    let names: Vec<String> = files.keys().cloned().collect();
    let open = |name: &&String| changed.is_empty() || changed.iter().any(|end| name.ends_with(end));
    let names: Vec<&String> = names.iter().filter(open).collect();
    let name = names[random.below(names.len())];
    let bytes = files.get_mut(name).expect("it is one of them");
    let text = [".json", ".toml", ".csv", ".txt", ".jsonl"].iter().any(|end| name.ends_with(end));
    mutate(random, bytes, text);
}

/// Writes the files that are not as they were.
fn write(folder: &Path, before: Option<&Files>, files: &Files) {
    let none = Files::new();
    let before = before.unwrap_or(&none);
    for name in before.keys().filter(|name| !files.contains_key(*name)) {
        fs::remove_file(folder.join(name)).unwrap();
    }
    for (name, bytes) in files.iter().filter(|(name, bytes)| before.get(*name) != Some(bytes)) {
        fs::write(folder.join(name), bytes).unwrap();
    }
}

/// Keeps what the last panic said, in place of printing it: a library's panic may be caught and told as an error.
fn record_panics() -> Arc<Mutex<String>> {
    let last = Arc::new(Mutex::new(String::new()));
    let to = Arc::clone(&last);
    set_hook(Box::new(move |panic| *to.lock().unwrap() = panic.to_string()));
    last
}

/// Ends the process when one execution takes too long.
fn watch(executions: Arc<AtomicU64>) {
    thread::spawn(move || {
        let (mut last, mut since) = (u64::MAX, Instant::now());
        loop {
            thread::sleep(Duration::from_millis(200));
            let now = executions.load(Ordering::Relaxed);
            if now != last {
                (last, since) = (now, Instant::now());
            } else if since.elapsed() > LONGEST {
                println!("one input took over {} s", LONGEST.as_secs());
                std::process::exit(102);
            }
        }
    });
}

/// The files of a folder that end with one of `ends`.
pub fn files_of(folder: &Path, keep: impl Fn(&str) -> bool) -> Files {
    let mut files = Files::new();
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.path().is_file() && keep(&name) {
            files.insert(name, fs::read(entry.path()).unwrap());
        }
    }
    assert!(!files.is_empty(), "{} has no such files", folder.display());
    files
}

/// Runs the binary to its end, to make valid files.
pub fn kintsugi(folder: &Path, arguments: &[&str]) {
    let output =
        Command::new(env!("CARGO_BIN_EXE_kintsugi")).args(arguments).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Nothing is repaired.
pub fn as_it_is(_: &mut Files) {}
