//! The best rings over the wires inside a node, as a library finds them for its collectives.

use kintsugi_spec::{ClusterSpec, Level};

/// Bytes per second, in both directions, around the best rings over the members of a group inside a node. Each member also
/// has the wires of the ranks between itself and the next member. A ring takes one wire of each hop, so wires that are listed
/// one by one serve different rings. `None` if no wires close a ring.
pub fn bandwidth(cluster: &ClusterSpec, members: &[usize], stride: usize, per_node: usize) -> Option<f64> {
    let n = members.len();
    let side =
        |rank: usize| members.iter().position(|&m| (m % per_node..m % per_node + stride).contains(&rank));
    let mut between = vec![vec![0.0; n]; n];
    for wire in &cluster.graph {
        if let (Some(a), Some(b)) = (side(wire.a), side(wire.b)) {
            between[a][b] += wire.bandwidth;
            between[b][a] += wire.bandwidth;
        }
    }
    if n == 2 {
        return Some(between[0][1]).filter(|&bandwidth| bandwidth > 0.0);
    }
    let rings = cluster.link(Level::Node).and_then(|link| link.rings).unwrap_or(1);
    let widest_wire = cluster.graph.iter().map(|wire| wire.bandwidth).fold(0.0, f64::max);
    let most = widest_wire * (stride * stride) as f64;
    let mut total = 0.0;
    for _ in 0..rings {
        let Some((least, ring)) = widest_ring(&between) else { break };
        let least = least.min(most);
        total += 2.0 * least;
        for (&a, &b) in ring.iter().zip(ring.iter().cycle().skip(1)) {
            between[a][b] -= least;
            between[b][a] -= least;
        }
    }
    (total > 0.0).then_some(total)
}

/// The ring over all members whose narrowest hop is widest, with that bandwidth. Of equal rings the one that leaves the most
/// bandwidth to its narrowest neighbours is taken: the one with the widest hops in sum.
fn widest_ring(between: &[Vec<f64>]) -> Option<(f64, Vec<usize>)> {
    let mut bandwidths: Vec<f64> =
        between.iter().flatten().copied().filter(|&bandwidth| bandwidth > 0.0).collect();
    bandwidths.sort_by(|a, b| b.total_cmp(a));
    bandwidths.dedup();
    bandwidths.into_iter().find_map(|least| Some((least, closed_ring(between, least)?)))
}

/// A ring over all members whose hops all have at least this bandwidth, the one with the widest hops in sum. Dynamic
/// programming over the sets of members that a path from the first can visit, with the members at which it can end.
fn closed_ring(between: &[Vec<f64>], least: f64) -> Option<Vec<usize>> {
    let n = between.len();
    let hop = |a: usize, b: usize| Some(between[a][b]).filter(|&bandwidth| bandwidth >= least);
    // The widest sum of a path over a set to its last member, and the member before that.
    let mut paths: Vec<Vec<Option<(f64, usize)>>> = vec![vec![None; n]; 1 << n];
    paths[1][0] = Some((0.0, 0));
    for visited in 1..1 << n {
        for last in 0..n {
            let Some((sum, _)) = paths[visited][last] else { continue };
            for next in (0..n).filter(|next| visited >> next & 1 == 0) {
                let Some(bandwidth) = hop(last, next) else { continue };
                let better = &mut paths[visited | 1 << next][next];
                if better.is_none_or(|(widest, _)| sum + bandwidth > widest) {
                    *better = Some((sum + bandwidth, last));
                }
            }
        }
    }
    let all = (1 << n) - 1;
    let closing = (1..n).filter_map(|last| Some((paths[all][last]?.0 + hop(last, 0)?, last)));
    let (_, mut last) = closing.max_by(|a, b| a.0.total_cmp(&b.0))?;
    let (mut ring, mut visited) = (Vec::with_capacity(n), all);
    while visited != 0 {
        ring.push(last);
        let before = paths[visited][last]?.1;
        visited &= !(1 << last);
        last = before;
    }
    Some(ring)
}
