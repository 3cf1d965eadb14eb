//! Orders of nodes that are worth timing, as the pod of each node.
//!
//! Rows are stages and columns are replicas. Some rows next to each other form a band, whose columns stay whole: a band of one
//! row keeps the replicas of a stage together, and one of all rows keeps whole pipelines together. A pod takes as many columns of
//! a band as it has room for.

use crate::layout::Layout;

/// The pod of each node, by its number.
pub type Order = Vec<usize>;

/// How the columns of a band are divided over pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Share {
    /// Into the first pod as many as fit, and so on.
    Full,
    /// Into the fewest pods that have room, as evenly as their room allows: a ring is as fast as its smallest share.
    Even,
}

/// Orders that keep stages or pipelines together. `room` has the free nodes of each pod, the largest first.
pub fn banded(layout: Layout, room: &[usize]) -> Vec<Order> {
    let mut orders: Vec<Order> = Vec::new();
    for height in heights(layout.rows) {
        for share in [Share::Full, Share::Even] {
            let order = in_bands(layout, room, height, share);
            orders.extend(order.filter(|order| !orders.contains(order)));
        }
    }
    orders
}

/// Every possible order if there are at most `most`, leaving out those that differ only in which of two pods of the same size is
/// which.
pub fn all(nodes: usize, room: &[usize], most: usize) -> Option<Vec<Order>> {
    let mut orders: Vec<Order> = vec![Vec::new()];
    for _ in 0..nodes {
        let mut longer = Vec::new();
        for order in &orders {
            for pod in 0..room.len() {
                let used = |pod: usize| order.iter().filter(|&&other| other == pod).count();
                let same_before = pod > 0 && room[pod - 1] == room[pod] && used(pod - 1) == 0;
                if used(pod) < room[pod] && !same_before {
                    longer.push(order.iter().copied().chain([pod]).collect());
                }
            }
        }
        if longer.len() > most {
            return None;
        }
        orders = longer;
    }
    Some(orders)
}

/// The heights of bands: all of up to 16 rows, then those that divide the rows.
fn heights(rows: usize) -> impl Iterator<Item = usize> {
    (1..=rows).filter(move |height| rows <= 16 || rows.is_multiple_of(*height))
}

fn in_bands(layout: Layout, room: &[usize], height: usize, share: Share) -> Option<Order> {
    let mut order = vec![usize::MAX; layout.nodes()];
    let mut left = room.to_vec();
    for first in (0..layout.rows).step_by(height) {
        let rows = height.min(layout.rows - first);
        let columns = divided(layout.width, &left, rows, share)?;
        let pods = columns.iter().enumerate().flat_map(|(pod, &columns)| std::iter::repeat_n(pod, columns));
        for (column, pod) in pods.enumerate() {
            left[pod] -= rows;
            for row in first..first + rows {
                order[row * layout.width + column] = pod;
            }
        }
    }
    Some(order)
}

/// The number of columns in each pod; `None` if there is no room. One pod takes all if one can: the one that is left with the
/// least room.
fn divided(width: usize, left: &[usize], rows: usize, share: Share) -> Option<Vec<usize>> {
    let fits: Vec<usize> = left.iter().map(|nodes| nodes / rows).collect();
    let mut columns = vec![0; left.len()];
    let whole = (0..left.len()).filter(|&pod| fits[pod] >= width).min_by_key(|&pod| (left[pod], pod));
    if let Some(pod) = whole {
        columns[pod] = width;
        return Some(columns);
    }
    let mut largest: Vec<usize> = (0..left.len()).collect();
    largest.sort_by_key(|&pod| (std::cmp::Reverse(fits[pod]), pod));
    let mut together = 0;
    let needed = largest.iter().position(|&pod| {
        together += fits[pod];
        together >= width
    })?;
    let chosen = &largest[..=needed];
    let mut rest = width;
    for (number, &pod) in chosen.iter().enumerate().rev() {
        // The smallest first: what it cannot take is divided among the larger ones.
        columns[pod] = match share {
            Share::Even => fits[pod].min(rest / (number + 1)),
            Share::Full => {
                let larger: usize = chosen[..number].iter().map(|&other| fits[other]).sum();
                rest.saturating_sub(larger)
            }
        };
        rest -= columns[pod];
    }
    // What rounding has left.
    for &pod in chosen {
        let more = rest.min(fits[pod] - columns[pod]);
        columns[pod] += more;
        rest -= more;
    }
    Some(columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRID: Layout = Layout { rows: 4, width: 3, is_exact: true };

    #[test]
    fn bands_keep_stages_or_pipelines_together() {
        // Stages of three nodes in pods of six.
        let stages = in_bands(GRID, &[6, 6], 1, Share::Full).unwrap();
        assert_eq!(stages, [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]);
        // Pipelines of four nodes in pods of eight and four.
        let pipelines = in_bands(GRID, &[8, 4], 4, Share::Full).unwrap();
        assert_eq!(pipelines, [0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1]);
        assert_eq!(in_bands(GRID, &[7, 5], 4, Share::Full), None, "two pipelines fit");
    }

    #[test]
    fn shares_are_even_where_there_is_room() {
        assert_eq!(divided(10, &[8, 6, 2], 1, Share::Even), Some(vec![5, 5, 0]));
        assert_eq!(divided(10, &[8, 6, 2], 1, Share::Full), Some(vec![8, 2, 0]));
        assert_eq!(divided(10, &[8, 3, 2], 1, Share::Even), Some(vec![7, 3, 0]));
        assert_eq!(divided(2, &[8, 3, 2], 1, Share::Even), Some(vec![0, 0, 2]));
        assert_eq!(divided(14, &[8, 3, 2], 1, Share::Even), None);
    }

    #[test]
    fn every_order_of_a_small_cluster() {
        assert_eq!(all(3, &[3, 2, 1], 1000).map(|orders| orders.len()), Some(19));
        assert_eq!(all(2, &[2, 2], 1000), Some(vec![vec![0, 0], vec![0, 1]]));
        assert_eq!(all(8, &[8, 8, 7], 100), None);
    }

    #[test]
    fn every_order_has_room() {
        for (rows, width) in [(1, 7), (7, 1), (3, 4), (5, 5), (32, 2)] {
            let layout = Layout { rows, width, is_exact: true };
            for room in [vec![64], vec![33, 31], vec![20, 17, 13, 11, 5], vec![3; 30]] {
                for order in banded(layout, &room) {
                    let used = |pod| order.iter().filter(|&&other| other == pod).count();
                    assert!((0..room.len()).all(|pod| used(pod) <= room[pod]), "{room:?} {order:?}");
                    assert_eq!((0..room.len()).map(used).sum::<usize>(), layout.nodes());
                }
            }
        }
    }
}
