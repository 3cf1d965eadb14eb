//! The cost of transfers between ranks that are threads: copies through shared memory, and the wake-up of a thread.
//!
//! The measurement has more ranks than cores, as when a layout is tried on a laptop. It counts the busy time of the
//! cores, not the time that a rank sleeps, because the core runs another rank meanwhile.

use std::io;
use std::rc::Rc;
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use kintsugi_comm::threads::ThreadsWorld;
use kintsugi_comm::{Collective, Communicator};
use kintsugi_spec::{Group, Level, LinkSpec, Topology};
use kintsugi_tensor::cpu::CpuBackend;
use kintsugi_tensor::cpu::memory::Heap;
use kintsugi_tensor::{Backend, Category, DType};

/// The links between ranks that are threads and share `cores` cores. Fails if a thread cannot be started.
pub fn thread_links(cores: usize) -> io::Result<LinkSpec> {
    let ranks = (2 * cores).clamp(8, 64);
    let work = |members: usize, elements: usize, times: usize| {
        let mut best = f64::INFINITY;
        for _ in 0..RUNS {
            best = best.min(all_reduces(ranks, members, elements, times)?);
        }
        io::Result::Ok(best * (cores as f64 / ranks as f64).min(1.0))
    };
    let pairs = work(2, SMALL, 400)?;
    let all = work(ranks, SMALL, 100)?;
    let large = work(ranks, LARGE, 10)?;
    // An all-reduce over n ranks takes a start, 2(n − 1) hops, and its bytes 2(n − 1)/n times.
    let hops = |members: usize| 2.0 * (members - 1) as f64;
    let latency = ((all - pairs) / (hops(ranks) - hops(2))).max(0.0);
    let start = (pairs - hops(2) * latency).max(0.0);
    let bytes = (LARGE * DType::F32.bytes()) as f64 * hops(ranks) / ranks as f64;
    Ok(LinkSpec {
        level: Level::Node,
        bandwidth: Some(bytes / (large - all).max(f64::MIN_POSITIVE)),
        latency: Some(latency),
        efficiency: Some(1.0),
        start: Some(start),
    })
}

/// Repetitions of each measurement; the best counts.
const RUNS: usize = 5;
/// How long a rank waits for another.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Numbers of a long transfer.
const LARGE: usize = 1 << 18;
/// One number for each rank.
const SMALL: usize = 64;

/// Seconds of one all-reduce in groups of `members`, all groups at once.
fn all_reduces(ranks: usize, members: usize, elements: usize, times: usize) -> io::Result<f64> {
    let world = ThreadsWorld::new(Topology::ONE_NODE, ranks, TIMEOUT);
    let barrier = Arc::new(Barrier::new(ranks));
    let run = |rank: usize| {
        let first = rank / members * members;
        let group: Vec<usize> = (first..(first + members).min(ranks)).collect();
        let group = world.host_group(Group::TENSOR, &group, rank);
        let backend = CpuBackend::new(Rc::new(Heap::default()), 1);
        let mut buffer = backend.allocate(elements, DType::F32, Category::Communication);
        backend.fill(0.0, buffer.view());
        let mut reduce = |times| {
            for _ in 0..times {
                let taken =
                    std::mem::replace(&mut buffer, backend.allocate(0, DType::F32, Category::Communication));
                buffer = group.run(Collective::AllReduce, taken);
            }
        };
        reduce(times.div_ceil(10));
        barrier.wait();
        let begun = Instant::now();
        reduce(times);
        barrier.wait();
        begun.elapsed().as_secs_f64() / times as f64
    };
    let run = &run;
    thread::scope(|scope| {
        // Ranks wait for each other, so none begins before all threads are there. If one cannot be started, the senders
        // are dropped, and the threads that were started end.
        let mut ranks_to_begin = Vec::with_capacity(ranks);
        let mut threads = Vec::with_capacity(ranks);
        for rank in 0..ranks {
            let (begin, begun) = channel();
            let wait_and_run = move || begun.recv().is_ok().then(|| run(rank));
            threads.push(thread::Builder::new().spawn_scoped(scope, wait_and_run)?);
            ranks_to_begin.push(begin);
        }
        for begin in ranks_to_begin {
            begin.send(()).expect("the thread waits for it");
        }
        let seconds = threads.into_iter().map(|thread| thread.join().expect("no rank failed"));
        Ok(seconds.flatten().fold(0.0, f64::max))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_between_threads_has_a_bandwidth() {
        let seconds = all_reduces(4, 2, 64, 3).expect("four threads");
        assert!(seconds > 0.0 && seconds.is_finite(), "{seconds}");
    }
}
