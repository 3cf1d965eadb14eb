//! A time that no placement is shorter than.
//!
//! If the nodes do not fit into one pod, either the replicas of some stage are in several pods, or a message between two stages
//! crosses pods. The first is fastest if the replicas are divided equally over two pods and all pipelines are whole. The second,
//! with every stage in one pod, is fastest if only one boundary between two stages crosses, or two if then the first and the last
//! stage, which sum the gradients of a tied table, are in the same pod. Both at once is slower than either.

use crate::layout::Layout;
use crate::timer::Timer;

/// Stages of a tied model for which boundaries are tried in pairs.
const MAX_ROWS: usize = 16;

/// The bound; `None` if the speed of the device is unknown.
pub fn bound(timer: &Timer, layout: Layout, largest: usize) -> Option<f64> {
    let nodes = layout.nodes();
    let together = timer.seconds(&vec![0; nodes])?;
    // So many pairs of boundaries would take long.
    let is_deep = layout.rows > MAX_ROWS && timer.is_tied();
    if nodes <= largest || !layout.is_exact || is_deep {
        return Some(together);
    }
    let mut least = f64::INFINITY;
    if layout.width > 1 {
        let pods = (0..nodes).map(|node| usize::from(node % layout.width >= layout.width.div_ceil(2)));
        least = least.min(timer.seconds(&pods.collect::<Vec<_>>())?);
    }
    for boundary in 1..layout.rows {
        let pods = (0..nodes).map(|node| usize::from(node / layout.width >= boundary));
        least = least.min(timer.seconds(&pods.collect::<Vec<_>>())?);
    }
    // The stages between two boundaries are in another pod.
    if timer.is_tied() {
        for (first, last) in
            (1..layout.rows).flat_map(|first| (first + 1..layout.rows).map(move |last| (first, last)))
        {
            let pods = (0..nodes).map(|node| usize::from((first..last).contains(&(node / layout.width))));
            least = least.min(timer.seconds(&pods.collect::<Vec<_>>())?);
        }
    }
    Some(least.max(together))
}
