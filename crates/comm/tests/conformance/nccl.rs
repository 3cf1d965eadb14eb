//! The suite on NCCL: every rank is a process with a GPU, which the ranks may share.

use std::env;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::sync::Arc;

use kintsugi_comm::nccl::{self, NcclSettings, SHARED_GPU_VERSION};
use kintsugi_comm::rendezvous::{Rendezvous, arrange_locally};
use kintsugi_comm::{Collective, Connection, World, WorldOptions};
use kintsugi_gpu::CUDA;
use kintsugi_spec::Group;
use kintsugi_tensor::{Backend, Category, DType};
use kintsugi_testing::{Need, skip};

use crate::suite::Suite;
use crate::{PATIENCE, PROCESS, TOPOLOGY};

/// Device memory of a rank.
const BYTES: u64 = 256 << 20;

/// The rank that ends itself while the others wait for it.
const VICTIM: usize = 2;

/// Few channels, since ranks may share a GPU. Their kernels take turns, and a transfer needs a turn for every part of a buffer: it
/// takes fewer if the buffers are large.
const SETTINGS: NcclSettings = NcclSettings { channels: 1, buffer: 4 << 20 };

/// Whether `ranks` ranks can run on this machine. If not, the test is skipped.
fn can_run(ranks: usize) -> bool {
    let gpus = match CUDA.devices() {
        Ok(0) => return skipped(Need::Gpu, "the driver shows no device"),
        Err(error) => return skipped(Need::Gpu, &error.to_string()),
        Ok(gpus) => gpus,
    };
    match nccl::find() {
        Err(error) => skipped(Need::Nccl, &error.to_string()),
        Ok((version, _)) if gpus < ranks && version < SHARED_GPU_VERSION => {
            skipped(Need::Nccl, &format!("NCCL {version} does not let {ranks} ranks share {gpus} GPUs"))
        }
        Ok(_) => true,
    }
}

fn skipped(need: Need, reason: &str) -> bool {
    skip(need, reason);
    false
}

/// Runs a part of the suite as processes. Returns the output of each, and whether it succeeded.
fn run(part: &str, ranks: usize) -> Vec<(bool, String)> {
    let program = env::current_exe().expect("this program has a path");
    let meeting = arrange_locally().expect("a free port");
    let start = |rank: usize| -> Child {
        let mut command = Command::new(&program);
        command.args(["--exact", "nccl::a_process_on_nccl", "--nocapture"]).env(PROCESS, part);
        command.env("KINTSUGI_RANK", rank.to_string()).env("KINTSUGI_RANKS", ranks.to_string());
        command.envs(meeting.clone()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("a process")
    };
    let processes: Vec<Child> = (0..ranks).map(start).collect();
    let finish = |process: Child| {
        let output = process.wait_with_output().expect("it is a child");
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        (output.status.success(), text.join("\n"))
    };
    processes.into_iter().map(finish).collect()
}

#[test]
fn nccl() {
    for ranks in crate::sizes() {
        if !can_run(ranks) {
            return;
        }
        for (rank, (succeeded, text)) in run("suite", ranks).into_iter().enumerate() {
            assert!(succeeded && text.contains("the suite has passed"), "rank {rank} of {ranks}:\n{text}");
        }
    }
}

#[test]
fn a_rank_that_dies_ends_the_others_and_is_named() {
    if !can_run(3) {
        return;
    }
    let ended = run("death", 3);
    // A rank learns of it by a value, or the thread of its heartbeats ends the process, if the abort does not free the host from its
    // wait. Rank 0 prints the failure for all.
    for (rank, (succeeded, text)) in ended.iter().enumerate().filter(|(rank, _)| *rank != VICTIM) {
        let noticed = *succeeded && text.contains("the death was noticed");
        let named = rank > 0 || text.contains(&format!("error: rank {VICTIM} "));
        // A rank that learns of another failure than this one panics.
        let ended = !*succeeded && named && !text.contains("panicked");
        assert!(noticed || ended, "rank {rank}:\n{text}");
    }
}

#[test]
fn slabs_and_transport_are_what_the_driver_counts() {
    if !can_run(2) {
        return;
    }
    for (rank, (succeeded, text)) in run("memory", 2).into_iter().enumerate() {
        assert!(succeeded && text.contains("the memory is right"), "rank {rank}:\n{text}");
        let lines =
            text.lines().filter(|line| line.contains("the driver counts") || line.contains("NCCL holds"));
        lines.for_each(|line| println!("{line}"));
    }
}

/// One process on NCCL. By itself it does nothing.
#[test]
fn a_process_on_nccl() {
    let Some(part) = env::var_os(PROCESS).filter(|_| env::var_os("KINTSUGI_RANK").is_some()) else { return };
    SETTINGS.set_environment();
    let met = Rendezvous::connect(PATIENCE).unwrap_or_else(|error| panic!("{error}"));
    let connection = Connection::nccl(met, &CUDA).unwrap_or_else(|error| panic!("{error}"));
    let options = WorldOptions::for_exchange(met.size);
    let options =
        WorldOptions { places: TOPOLOGY.into(), timeout: PATIENCE, nccl: SETTINGS, wraps: true, ..options };
    let world: Arc<dyn World> = connection.world(options.clone());
    if part == "memory" {
        check_memory(&*world, connection.gpu(), met.rank);
        println!("rank {}: the memory is right", met.rank);
        drop(world);
        let backend = backend(connection.gpu(), BYTES);
        for channels in [1, 2, 4, 8] {
            let nccl = NcclSettings { channels, ..SETTINGS };
            show_memory(
                &*connection.world(WorldOptions { nccl, ..options.clone() }),
                channels,
                &backend,
                met.rank,
            );
        }
        Rendezvous::finish(false);
        return Rendezvous::close();
    }
    let backend = backend(connection.gpu(), BYTES);
    if part == "suite" {
        Suite::on(backend, &*world, TOPOLOGY, met.rank).run_without_tags();
        println!("rank {}: the suite has passed", met.rank);
    } else {
        notice_a_death(&*world, &backend, met.rank);
        println!("rank {}: the death was noticed", met.rank);
    }
    drop(world);
    Rendezvous::finish(false);
    Rendezvous::close();
}

fn backend(gpu: usize, bytes: u64) -> Rc<dyn Backend> {
    let made = CUDA.backend(gpu, bytes, true);
    Rc::new(made.unwrap_or_else(|error| panic!("{error}")))
}

/// The driver's free memory must fall by the slabs of all ranks and what the transport says that it holds, within 1 %. The drivers'
/// contexts of the processes are there before.
fn check_memory(world: &dyn World, gpu: usize, me: usize) {
    const SLAB: u64 = 4 << 30;
    let device = CUDA.gpu(gpu).unwrap_or_else(|error| panic!("{error}"));
    let free = || {
        world.barrier().expect("all are alive");
        let (free, _) = device.memory().unwrap_or_else(|error| panic!("{error}"));
        world.barrier().expect("all are alive");
        free
    };
    let before = free();
    let backend = backend(gpu, SLAB);
    let all: Vec<usize> = (0..world.ranks()).collect();
    let groups = [Group::DATA, Group::PIPELINE].map(|group| world.group(group, &all, me, &backend));
    let transport = world.transport_bytes().expect("all are alive");
    let taken = before - free();
    // One GPU for all, so each sees all.
    let ranks = if CUDA.devices().unwrap_or(0) >= world.ranks() { 1 } else { world.ranks() as u64 };
    let expected = ranks * (SLAB + transport);
    println!(
        "rank {me}: the driver counts {taken} bytes; slabs and transport ({transport} a rank) are {expected}"
    );
    let difference = taken.abs_diff(expected) as f64 / expected as f64;
    assert!(difference < 0.01, "they differ by {:.2} %", 100.0 * difference);
    drop(groups);
}

/// Shows what a communicator takes, and what the links between stages take, from which the prediction is fitted.
fn show_memory(world: &dyn World, channels: u32, backend: &Rc<dyn Backend>, me: usize) {
    let all: Vec<usize> = (0..world.ranks()).collect();
    let mut groups = Vec::new();
    let mut bytes = |group: Group| {
        groups.push(world.group(group, &all, me, backend));
        world.transport_bytes().expect("all are alive")
    };
    let [data, pipeline] = [Group::DATA, Group::PIPELINE].map(&mut bytes);
    let buffer = SETTINGS.buffer;
    println!(
        "rank {me}: with {channels} channels and buffers of {buffer} bytes NCCL holds {data} bytes for all ranks and dp, \
         {pipeline} with pp and its links"
    );
}

/// One rank dies while the GPUs of the others wait for it.
fn notice_a_death(world: &dyn World, backend: &Rc<dyn Backend>, me: usize) {
    let all: Vec<usize> = (0..world.ranks()).collect();
    let group = world.group(Group::DATA, &all, me, backend);
    world.barrier().expect("all are alive");
    if me == VICTIM {
        // As the kernel does when memory runs out: without a core dump, during which its connections would stay open.
        let _ = Command::new("kill").args(["-9", &std::process::id().to_string()]).status();
    }
    let buffer = backend.allocate(1000, DType::F32, Category::Communication);
    backend.fill(1.0, buffer.view());
    drop(group.run(Collective::AllReduce, buffer));
    // The GPU waits for the rank that has died, until the watchdog aborts the communicator.
    backend.synchronize();
    let failure = world.failure().expect("a rank has died");
    assert_eq!(failure.rank, VICTIM, "{failure}");
}
