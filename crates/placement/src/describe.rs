//! A placement in words: which pod has which ranks.

use kintsugi_spec::Placement;

use crate::hosts::compressed;

/// Pods that are told one by one.
const TOLD: usize = 8;

/// One sentence for each pod: its nodes and their ranks. Of many pods the first are told.
pub fn describe(placement: &Placement, ranks: usize, per_node: usize) -> Vec<String> {
    let mut pods: Vec<&String> = Vec::new();
    for pod in &placement.pods {
        if !pods.contains(&pod) {
            pods.push(pod);
        }
    }
    let of_pod = |pod: &&String| {
        let nodes: Vec<usize> =
            (0..placement.nodes.len()).filter(|&node| placement.pods[node] == **pod).collect();
        let names: Vec<String> = nodes.iter().map(|&node| placement.nodes[node].clone()).collect();
        let runs = nodes.chunk_by(|a, b| a + 1 == *b);
        let range = |run: &[usize]| {
            let (first, last) = (run[0] * per_node, ((run[run.len() - 1] + 1) * per_node).min(ranks) - 1);
            if first == last { first.to_string() } else { format!("{first}–{last}") }
        };
        let mut told: Vec<String> = runs.map(range).collect();
        if told.len() > TOLD {
            let more = told.split_off(TOLD).len();
            told.push(format!("{more} more"));
        }
        format!("pod {pod}: {} with ranks {}", compressed(&names), told.join(", "))
    };
    let mut lines: Vec<String> = pods.iter().take(TOLD).map(of_pod).collect();
    if pods.len() > TOLD {
        lines.push(format!("and {} more pods", pods.len() - TOLD));
    }
    lines
}

/// The lines of a host file: the name of a node for each of its ranks, in the order of ranks, as `SLURM_HOSTFILE` takes them.
pub fn host_file(placement: &Placement, ranks: usize, per_node: usize) -> String {
    let lines: Vec<&str> = (0..ranks).map(|rank| placement.nodes[rank / per_node].as_str()).collect();
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pod_is_told_with_its_ranks() {
        let words = |list: &str| list.split(' ').map(str::to_owned).collect();
        let placement = Placement { nodes: words("n1 n2 n5 n3"), pods: words("a a b a") };
        assert_eq!(
            describe(&placement, 7, 2),
            ["pod a: n[1-3] with ranks 0–3, 6", "pod b: n5 with ranks 4–5"]
        );
        assert_eq!(host_file(&placement, 7, 2), "n1\nn1\nn2\nn2\nn5\nn5\nn3\n");
    }
}
