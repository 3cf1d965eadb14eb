//! One suite for all transports: every collective in every type, odd and empty sizes, sub-groups, messages, and many transfers
//! at once, against the plain definitions. Bytes are compared with what the planner charges.
//!
//! On MPI the test starts this same program under `mpirun`, where every process runs [`a_process_of_the_suite`]. On NCCL it starts
//! the processes itself (`nccl`).
#![allow(clippy::float_cmp, reason = "the numbers are small integers")]

mod buffers;
mod nccl;
mod suite;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{env, fs, thread};

use kintsugi_comm::World;
use kintsugi_comm::mpi::{Mpi, MpiWorld, VARIABLE};
use kintsugi_comm::rendezvous::Rendezvous;
use kintsugi_comm::threads::ThreadsWorld;
use kintsugi_spec::{EmulatedLink, EmulatedLinks, Level, Topology};
use kintsugi_testing::{Need, skip};

use suite::Suite;

const PATIENCE: Duration = Duration::from_secs(60);

/// Set in the processes that a test starts.
const PROCESS: &str = "KINTSUGI_CONFORMANCE_PROCESS";

/// Packages, nodes and pods of two, so that messages cross every level.
const TOPOLOGY: Topology = Topology { per_package: 1, per_node: Some(2), nodes_per_pod: Some(2) };

/// Links that delay every transfer a little.
const LINKS: EmulatedLinks = [None, Some(LINK), Some(LINK), Some(LINK)];
const LINK: EmulatedLink = EmulatedLink { bandwidth: 1e9, latency: 2e-5 };

/// No link is emulated.
const NONE: EmulatedLinks = [None; Level::ALL.len()];

/// The numbers of ranks: a few, or all if the whole suite was asked for.
fn sizes() -> Vec<usize> {
    if env::var_os("KINTSUGI_FULL").is_some() { (2..=8).collect() } else { vec![2, 3] }
}

#[test]
fn threads() {
    for (ranks, links) in sizes().into_iter().flat_map(|ranks| [(ranks, NONE), (ranks, LINKS)]) {
        let world = ThreadsWorld::with_links(TOPOLOGY, ranks, PATIENCE, links);
        let told = AtomicBool::new(false);
        thread::scope(|scope| {
            for rank in 0..ranks {
                let (world, told) = (&world, &told);
                scope.spawn(move || {
                    let suite = Suite::new(world, TOPOLOGY, rank);
                    suite.run();
                    let tell = || told.store(true, Ordering::Relaxed);
                    suite.run_beside_computing(tell, || told.load(Ordering::Relaxed));
                });
            }
        });
    }
}

#[test]
fn open_mpi() {
    processes(Need::OpenMpi, "mpirun.openmpi", "libmpi.so.40", &["--oversubscribe", "--allow-run-as-root"]);
}

#[test]
fn mpich() {
    processes(Need::Mpich, "mpirun.mpich", "libmpich.so.12", &[]);
}

/// Runs the suite as processes of a named MPI.
fn processes(need: Need, mpirun: &str, library: &str, flags: &[&str]) {
    if Command::new(mpirun).arg("--version").output().is_err() {
        return skip(need, format!("there is no {mpirun}"));
    }
    let program = env::current_exe().expect("this program has a path");
    // A file by which one process tells another something without MPI.
    let told = env::temp_dir().join(format!("kintsugi-conformance-{}-{mpirun}", std::process::id()));
    for ranks in sizes() {
        let output = Command::new(mpirun)
            .args(["-n", &ranks.to_string()])
            .args(flags)
            .arg(&program)
            .args(["--exact", "a_process_of_the_suite", "--nocapture"])
            .env(PROCESS, &told)
            .env(VARIABLE, library)
            .output()
            .expect("mpirun is there");
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{ranks} processes of {mpirun}:\n{text}\n{errors}");
        let passed = text.matches("the suite has passed").count();
        assert_eq!(passed, ranks, "every process runs the suite:\n{text}\n{errors}");
    }
}

/// One process of the suite on MPI. By itself it does nothing.
#[test]
fn a_process_of_the_suite() {
    let Some(told) = env::var_os(PROCESS).map(PathBuf::from) else { return };
    let mpi = Mpi::connect(PATIENCE).unwrap_or_else(|error| panic!("{error}"));
    let world = MpiWorld::new(mpi, TOPOLOGY, mpi.size, PATIENCE, false);
    let suite = Suite::new(&world, TOPOLOGY, mpi.rank);
    suite.run();
    beside_computing(&suite, &world, &told);
    let library_sums = MpiWorld::new(mpi, TOPOLOGY, mpi.size, PATIENCE, true);
    Suite::new(&library_sums, TOPOLOGY, mpi.rank).run_sums();
    let emulated = MpiWorld::new(mpi, TOPOLOGY, mpi.size, PATIENCE, false).with_links(LINKS);
    let suite = Suite::new(&emulated, TOPOLOGY, mpi.rank);
    suite.run();
    beside_computing(&suite, &emulated, &told);
    println!("rank {}: the suite has passed", mpi.rank);
    Rendezvous::finish(false);
    Mpi::finish(0, false);
    Rendezvous::close();
}

/// A collective beside a rank that computes. Rank 1 tells by a file that it has its result.
fn beside_computing(suite: &Suite, world: &MpiWorld, told: &Path) {
    suite.run_beside_computing(|| fs::write(told, []).expect("a file for tests"), || told.exists());
    world.barrier().expect("all are alive");
    if world.local_ranks().start == 0 {
        fs::remove_file(told).expect("it is there");
    }
    world.barrier().expect("all are alive");
}
