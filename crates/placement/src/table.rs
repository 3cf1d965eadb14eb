//! Tables of free nodes and their pods: a plain one, or what `scontrol show topology` and `sinfo` print.
//!
//! A file may have the output of both commands: the first says which nodes share a switch, the second which are idle. With the
//! first alone all nodes are taken as free.

use std::collections::{BTreeMap, BTreeSet};

use crate::hosts::{by_name, expand};

/// A node that a job may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FreeNode {
    /// Its name.
    pub name: String,
    /// The pod that it is in.
    pub pod: String,
}

/// A table of nodes that cannot be used. Every message names the line or the node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// A line is of no known form.
    #[error(
        "line {line} is \"{text}\"; it takes a node and its pod, or lines of scontrol show topology and of sinfo"
    )]
    Line {
        /// Its number, from 1.
        line: usize,
        /// Its text.
        text: String,
    },
    /// A line of a plain table names no pod.
    #[error("line {line} gives node {node} no pod; write the pod after the name")]
    NoPod {
        /// Its number, from 1.
        line: usize,
        /// The node.
        node: String,
    },
    /// A node is there twice.
    #[error("node {node} is in the table twice, in pods {first} and {second}")]
    Twice {
        /// The node.
        node: String,
        /// A pod.
        first: String,
        /// The other, or the same.
        second: String,
    },
    /// A node of `sinfo` is in no pod.
    #[error("the pod of node {node} is unknown: no switch or block of the table has it")]
    UnknownPod {
        /// The node.
        node: String,
    },
    /// `sinfo` was given alone.
    #[error("the table has lines of sinfo and no pods; add those of scontrol show topology")]
    NoTopology,
    /// There is no free node.
    #[error("the table has no free node")]
    Empty,
}

/// Reads a table. The order of the nodes in it means nothing: they come back in the order of their names.
pub fn read_table(text: &str) -> Result<Vec<FreeNode>, TableError> {
    let mut table = Table::default();
    for (line, text) in text.lines().enumerate() {
        let text = text.split('#').next().unwrap_or_default().trim();
        if !text.is_empty() {
            table.line(line + 1, text)?;
        }
    }
    table.free_nodes()
}

/// What a table says so far.
#[derive(Default)]
struct Table {
    /// The pod of every node.
    pods: BTreeMap<String, String>,
    /// The nodes that are free, if the table has lines of `sinfo`.
    idle: Option<BTreeSet<String>>,
    /// The columns of `sinfo`: those of the states and of the lists of nodes.
    columns: Option<[usize; 2]>,
}

impl Table {
    fn line(&mut self, line: usize, text: &str) -> Result<(), TableError> {
        let wrong = || TableError::Line { line, text: text.to_owned() };
        let words: Vec<&str> =
            text.split(|c: char| c.is_whitespace()).filter(|word| !word.is_empty()).collect();
        let value = |key: &str| words.iter().find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
        if let Some(pod) = value("SwitchName").or_else(|| value("BlockName")) {
            // Switches above the leaves name the nodes again.
            if value("Level").is_none_or(|level| level == "0") {
                let nodes = value("Nodes").and_then(expand).ok_or_else(wrong)?;
                nodes.into_iter().try_for_each(|node| self.add(node, pod))?;
            }
            return Ok(());
        }
        let column = |name: &str| words.iter().position(|word| *word == name);
        if let (Some(state), Some(nodes)) = (column("STATE"), column("NODELIST")) {
            self.columns = Some([state, nodes]);
            self.idle.get_or_insert_default();
            return Ok(());
        }
        if let Some(columns) = self.columns {
            let [state, nodes] = columns.map(|column| words.get(column).copied());
            let nodes = nodes.and_then(expand).ok_or_else(wrong)?;
            // `idle~` is switched off until a job needs it, `idle*` does not answer.
            if matches!(state, Some("idle" | "idle~" | "idle#" | "idle%")) {
                self.idle.get_or_insert_default().extend(nodes);
            }
            return Ok(());
        }
        match node_and_pod(text).as_slice() {
            [node] if expand(node).is_some() => Err(TableError::NoPod { line, node: (*node).to_owned() }),
            [nodes, pod] => {
                let nodes = expand(nodes).ok_or_else(wrong)?;
                nodes.into_iter().try_for_each(|node| self.add(node, pod))
            }
            _ => Err(wrong()),
        }
    }

    fn add(&mut self, node: String, pod: &str) -> Result<(), TableError> {
        if let Some(first) = self.pods.get(&node) {
            return Err(TableError::Twice { node, first: first.clone(), second: pod.to_owned() });
        }
        self.pods.insert(node, pod.to_owned());
        Ok(())
    }

    fn free_nodes(self) -> Result<Vec<FreeNode>, TableError> {
        let Table { pods, idle, columns: _ } = self;
        if pods.is_empty() && idle.is_some() {
            return Err(TableError::NoTopology);
        }
        let mut nodes: Vec<FreeNode> = match idle {
            None => pods.into_iter().map(|(name, pod)| FreeNode { name, pod }).collect(),
            Some(idle) => idle
                .into_iter()
                .map(|name| match pods.get(&name) {
                    Some(pod) => Ok(FreeNode { pod: pod.clone(), name }),
                    None => Err(TableError::UnknownPod { node: name }),
                })
                .collect::<Result<_, _>>()?,
        };
        if nodes.is_empty() {
            return Err(TableError::Empty);
        }
        nodes.sort_by(|a, b| by_name(&a.name, &b.name));
        Ok(nodes)
    }
}

/// The words of a plain line. A comma divides them, too, but not inside of brackets.
fn node_and_pod(line: &str) -> Vec<&str> {
    let mut inside = false;
    let divides = |c: char| {
        inside = (inside || c == '[') && c != ']';
        !inside && (c == ',' || c.is_whitespace())
    };
    line.split(divides).filter(|word| !word.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Result<String, String> {
        let text_of = |node: FreeNode| format!("{}:{}", node.name, node.pod);
        let nodes = read_table(text).map_err(|error| error.to_string())?;
        Ok(nodes.into_iter().map(text_of).collect::<Vec<_>>().join(" "))
    }

    const TOPOLOGY: &str = "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-3]\n\
                            SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[4-6]\n\
                            SwitchName=top Level=1 LinkSpeed=1 Nodes=n[1-6] Switches=leaf[1-2]\n";

    #[test]
    fn tables_of_every_kind() {
        let plain = Ok("n2:b n10:a n11:a".to_owned());
        assert_eq!(names("# free\nn[10-11] a\nn2 b # the last\n"), plain);
        assert_eq!(names("n2,b\nn10, a\nn11\ta"), plain);
        assert_eq!(names("n[10,11] a\nn[2],b"), plain);
        assert_eq!(names(TOPOLOGY), Ok("n1:leaf1 n2:leaf1 n3:leaf1 n4:leaf2 n5:leaf2 n6:leaf2".to_owned()));
        let sinfo = "PARTITION AVAIL  TIMELIMIT  NODES  STATE NODELIST\n\
                     main*        up   infinite      1  down* n1\n\
                     main*        up   infinite      3   idle n[2-3,6]\n\
                     long         up   infinite      2   idle n[2-3]\n\
                     main*        up   infinite      2  alloc n[4-5]\n";
        let idle = Ok("n2:leaf1 n3:leaf1 n6:leaf2".to_owned());
        assert_eq!(names(&format!("{TOPOLOGY}{sinfo}")), idle);
        let by_node = "NODELIST   NODES PARTITION STATE\nn2 1 main* idle\nn3 1 main* idle\nn5 1 main* mix\nn6 1 main* idle\n";
        assert_eq!(names(&format!("{TOPOLOGY}{by_node}")), idle);
        let blocks = "BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2\n";
        assert_eq!(names(blocks), Ok("n1:b1 n2:b1".to_owned()));
    }

    #[test]
    fn mistakes_are_a_sentence_each() {
        let wrong = |text: &str| names(text).expect_err("a mistake");
        assert_eq!(wrong("n1 a\nn[1-2] b"), "node n1 is in the table twice, in pods a and b");
        assert_eq!(wrong("n1 a\nn2"), "line 2 gives node n2 no pod; write the pod after the name");
        assert!(wrong("n1 a b").starts_with("line 1 is \"n1 a b\"; it takes a node and its pod"));
        assert!(wrong("n[1- a").starts_with("line 1 is "));
        let sinfo = "NODELIST NODES PARTITION STATE\nn9 1 main* idle\n";
        assert_eq!(
            wrong(&format!("{TOPOLOGY}{sinfo}")),
            "the pod of node n9 is unknown: no switch or block of the table has it"
        );
        assert!(wrong(sinfo).contains("no pods; add those of scontrol show topology"));
        assert_eq!(wrong("# nothing"), "the table has no free node");
        assert_eq!(wrong(&format!("{TOPOLOGY}NODELIST STATE\nn1 alloc\n")), "the table has no free node");
    }
}
