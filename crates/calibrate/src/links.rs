//! The cost of transfers between ranks that are threads: copies through shared memory, and the wake-up of a thread.
//!
//! The measurement has more ranks than cores, as when a layout is tried on a laptop. It counts the busy time of the
//! cores, not the time that a rank sleeps, because the core runs another rank meanwhile.

use std::io;

use kintsugi_comm::nccl::NcclSettings;
use kintsugi_comm::{Collective, Connection};
use kintsugi_plan::{Axis, Group, Mesh};
use kintsugi_spec::{EmulatedLinks, Level, LinkSpec, Topology};

use crate::collectives::{Arrangement, TransferKind, time_transfers};

/// The links between ranks that are threads and share `cores` cores. Fails if a thread cannot be started.
pub fn thread_links(cores: usize) -> io::Result<LinkSpec> {
    let ranks = (2 * cores).clamp(8, 64);
    let share = (cores as f64 / ranks as f64).min(1.0);
    let [pairs, _] = all_reduces(Mesh::ONE.with(Axis::Data, ranks / 2).with(Axis::Tensor, 2))?
        .map(|seconds| seconds * share);
    let [all, large] = all_reduces(Mesh::ONE.with(Axis::Tensor, ranks))?.map(|seconds| seconds * share);
    // An all-reduce over n ranks takes a start, 2(n − 1) hops, and its bytes 2(n − 1)/n times.
    let hops = |members: usize| 2.0 * (members - 1) as f64;
    let latency = ((all - pairs) / (hops(ranks) - hops(2))).max(0.0);
    let start = (pairs - hops(2) * latency).max(0.0);
    let bytes = LARGE as f64 * hops(ranks) / ranks as f64;
    Ok(LinkSpec {
        level: Level::Node,
        bandwidth: Some(bytes / (large - all).max(f64::MIN_POSITIVE)),
        latency: Some(latency),
        efficiency: Some(1.0),
        start: Some(start),
        short: None,
        rings: None,
        inner_latency: None,
    })
}

/// Bytes of a long transfer.
const LARGE: usize = 1 << 20;
/// Bytes of a short transfer, whose time is mostly latency.
const SMALL: usize = 256;

/// Seconds of a short and of a long all-reduce over tp.
fn all_reduces(mesh: Mesh) -> io::Result<[f64; 2]> {
    let (topology, links, nccl) = (Topology::ONE_NODE, EmulatedLinks::default(), NcclSettings::default());
    let arrangement = Arrangement { mesh, topology, connection: Connection::Threads, links, nccl };
    let mut seconds = [f64::INFINITY; 2];
    let kind = TransferKind::Collective(Collective::AllReduce);
    time_transfers(arrangement, &[SMALL, LARGE], |time| {
        if time.group == Group::TENSOR && time.kind == kind {
            seconds[usize::from(time.bytes == LARGE)] = time.seconds;
        }
    })?;
    Ok(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_between_threads_has_a_bandwidth() {
        let seconds = all_reduces(Mesh::ONE.with(Axis::Data, 2).with(Axis::Tensor, 2)).expect("four threads");
        assert!(seconds.iter().all(|&seconds| seconds > 0.0 && seconds.is_finite()), "{seconds:?}");
    }
}
