//! The bytes and the memory of each scheme of partitioning by level, derived here and compared with measured steps.

use kintsugi_comm::{Connection, Operation, Traffic};
use kintsugi_engine::{MemoryChoice, device};
use kintsugi_plan::config::ConfigSource;
use kintsugi_plan::{Plan, Unit};
use kintsugi_simulate::{Coverage, PeakMemory, predict};
use kintsugi_spec::Level;

use crate::{MODEL, check, measure};

/// A machine of nodes, packages in a node, and replicas in a package.
#[derive(Clone, Copy)]
struct Machine {
    nodes: u64,
    packages: u64,
    replicas: u64,
}

impl Machine {
    fn ranks(&self) -> u64 {
        self.nodes * self.packages * self.replicas
    }

    /// A plan in bf16 with 16-bit gradients and one micro-batch, whose replicas fill the machine.
    fn plan(&self, sharding: &str) -> Plan {
        self.plan_of(1, sharding)
    }

    /// The same with some micro-batches.
    fn plan_of(&self, micro_batches: u64, sharding: &str) -> Plan {
        let Machine { nodes, packages, replicas } = self;
        let text = format!(
            "{MODEL}family = \"neox\"\ntied = false\n[parallel]\ndp = {}\noverlap = false\n\
             [batch]\nsequence = 8\nmicro = 1\nglobal = {}\n[precision]\ncompute = \"bf16\"\ngradients = \"compute\"\n[run]\neval_every = 0\n\
             [data]\nsource = \"corpus\"\n[cluster]\nper_package = {replicas}\nper_node = {}\n[sharding]\n{sharding}\n",
            nodes * packages * replicas,
            micro_batches * nodes * packages * replicas,
            packages * replicas,
        );
        ConfigSource::text(&text).plan().unwrap_or_else(|error| panic!("{error}\n{text}"))
    }

    /// Bytes of all-gathers, reduce-scatters, all-to-alls and all-reduces by level in a measured step.
    fn measured(plan: &Plan) -> [[u64; 3]; 4] {
        let prediction = predict(plan, device(plan, Connection::Threads), Coverage::WholeStep);
        let measured = measure(plan, MemoryChoice::Heap, |_| {});
        check(&prediction, &measured).unwrap_or_else(|error| panic!("{error}"));
        let mut traffic = Traffic::default();
        for rank in &measured {
            traffic.merge(&rank.traffic);
        }
        let operations =
            [Operation::AllGather, Operation::ReduceScatter, Operation::AllToAll, Operation::AllReduce];
        // These machines have no pods.
        let levels = [Level::Package, Level::Node, Level::Cluster];
        operations.map(|operation| levels.map(|level| traffic.get(level, operation)))
    }

    /// Bytes by level of all rings of a collective that makes pieces of `bytes` whole, or sums and scatters them, over
    /// `ranks` ranks each: every rank sends `bytes` · (ranks − 1) / ranks to the next. `edges` is how many of all ranks have
    /// their next rank in the same package, in the same node, in another node.
    fn rings(bytes: u64, ranks: u64, edges: [u64; 3]) -> [u64; 3] {
        assert!(bytes.is_multiple_of(ranks), "padded to equal shards");
        edges.map(|edges| edges * (bytes / ranks * (ranks - 1)))
    }
}

fn plus(a: [u64; 3], b: [u64; 3]) -> [u64; 3] {
    std::array::from_fn(|level| a[level] + b[level])
}

/// The traffic of each scheme without codes, derived from the ring and from how often a unit is gathered in a step of one micro-batch: in the
/// forward and in the backward, except the head, whose backward follows its forward.
#[test]
fn traffic_is_what_the_schemes_should_move() {
    for machine in [
        Machine { nodes: 2, packages: 2, replicas: 2 },
        Machine { nodes: 4, packages: 4, replicas: 1 },
        Machine { nodes: 2, packages: 1, replicas: 4 },
    ] {
        let Machine { nodes, packages, replicas } = machine;
        let (in_node, n) = (packages * replicas, nodes * packages * replicas);
        // How many ranks have their next one of a ring in the package, in the node and in another node, if the ring is one
        // over all replicas, one in each package, one in each node; across the packages of a node; across nodes.
        let all = [n - nodes * packages, nodes * packages - nodes, nodes];
        let of_package = if replicas > 1 { [n, 0, 0] } else { [0; 3] };
        let of_node = [n - nodes * packages, nodes * packages, 0];
        let of_node = if packages > 1 { of_node } else { [n, 0, 0] };
        let (across_packages, across_nodes) = ([0, n, 0], [0, 0, n]);
        let plan = machine.plan("zero = 3");
        let bytes = |unit: Unit| 2 * plan.layout(unit).len as u64;
        let whole: u64 = plan.units().into_iter().map(bytes).sum();
        let gathered: u64 = 2 * whole - bytes(Unit::Head);
        // Squared norm, loss and the number of ranks that ask to stop, in fp32.
        let sums = 2 * (n - 1) * 3 * 4;
        let check = |sharding: &str, gathers: [u64; 3], scatters: [u64; 3], all_reduced: u64| {
            let plain = format!("{sharding}\nquantize_weights = \"none\"\nquantize_gradients = \"none\"");
            let [gather, scatter, exchange, reduce] = Machine::measured(&machine.plan(&plain));
            assert_eq!(
                (gather, scatter, exchange),
                (gathers, scatters, [0; 3]),
                "{sharding} on {nodes}×{packages}×{replicas}"
            );
            assert_eq!(reduce.iter().sum::<u64>(), all_reduced + sums, "{sharding}");
        };
        let rings = Machine::rings;
        // ZeRO-3 as one ring: 3·M·(n − 1) / n leave a node, less what the head saves.
        let ring = rings(gathered, n, all);
        assert_eq!(ring[2] / nodes, gathered / n * (n - 1));
        check("zero = 3\ncollectives = \"ring\"", ring, rings(whole, n, all), 0);
        // Level by level, M·(nodes − 1) / nodes leave a node for each gather.
        let by_level = |whole: u64| {
            let inside = match (packages, replicas) {
                (_, 1) | (1, _) => rings(whole, in_node, of_node),
                _ => plus(
                    rings(whole, replicas, of_package),
                    rings(whole / replicas, packages, across_packages),
                ),
            };
            plus(inside, rings(whole / in_node, nodes, across_nodes))
        };
        check("zero = 3\ncollectives = \"hierarchical\"", by_level(gathered), by_level(whole), 0);
        // MiCS: nothing but the sum of the gradients leaves a node.
        let mics = |whole| rings(whole, in_node, of_node);
        let summed = 2 * (nodes - 1) * whole;
        check("preset = \"mics\"\ncollectives = \"ring\"", mics(gathered), mics(whole), summed);
        // ZeRO++: of the gathers only the first one of each unit leaves the node.
        let across = rings(whole / in_node, nodes, across_nodes);
        check(
            "preset = \"zero++\"\ncollectives = \"ring\"",
            plus(mics(gathered), across),
            plus(mics(whole), across),
            0,
        );
        // Three levels: forward and backward gather inside the package. The refresh goes back the way of the gradients.
        let between = match (packages, replicas) {
            (1, _) => [0; 3],
            (_, 1) => rings(whole, packages, across_packages),
            _ => rings(whole / replicas, packages, across_packages),
        };
        let package = |whole| if replicas > 1 { rings(whole, replicas, of_package) } else { [0; 3] };
        check(
            "preset = \"three-level\"\ncollectives = \"ring\"",
            plus(package(gathered), plus(between, across)),
            plus(package(whole), plus(between, across)),
            0,
        );
    }
}

/// The machines of the tests with codes.
const MACHINES: [Machine; 3] = [
    Machine { nodes: 2, packages: 2, replicas: 2 },
    Machine { nodes: 4, packages: 4, replicas: 1 },
    Machine { nodes: 2, packages: 1, replicas: 4 },
];

/// Bytes of a slice of codes of whole blocks of 256: the codes, a scale of four bytes for each block, and zeros to a multiple of
/// 16.
fn slice(elements: u64, bits: u64) -> u64 {
    assert!(elements.is_multiple_of(256), "shards are whole blocks");
    (elements * bits / 8 + elements / 256 * 4).next_multiple_of(16)
}

/// The traffic of a step with codes on one machine, as sums over units.
struct Derivation {
    machine: Machine,
    /// The elements of every unit, and how often a step gathers its weights.
    units: Vec<(u64, u64)>,
}

impl Derivation {
    /// Units of a plan without overlap. A micro-batch gathers a layer twice, for its forward and for its backward. The backward of
    /// the head follows its forward, and the forward of the next micro-batch's embedding follows the backward of the table.
    fn new(machine: Machine, plan: &Plan, micro_batches: u64) -> Self {
        let gathers = |unit| match unit {
            Unit::Head => micro_batches,
            Unit::Table => micro_batches + 1,
            Unit::Layer(_) | Unit::Positions => 2 * micro_batches,
        };
        let unit = |unit| (plan.layout(unit).len as u64, gathers(unit));
        Derivation { machine, units: plan.units().into_iter().map(unit).collect() }
    }

    /// The sum over units of what one rank sends, `bytes(elements, gathers)`, for all ranks.
    fn of_all(&self, bytes: impl Fn(u64, u64) -> u64) -> u64 {
        self.machine.ranks()
            * self.units.iter().map(|&(elements, gathers)| bytes(elements, gathers)).sum::<u64>()
    }

    /// A ring of weights in bf16 inside every node, for every gather.
    fn gathers_inside_nodes(&self) -> [u64; 3] {
        let Machine { packages, replicas, .. } = self.machine;
        let in_node = packages * replicas;
        let sent = |elements: u64, gathers: u64| 2 * elements / in_node * (in_node - 1) * gathers;
        let all = self.of_all(sent);
        // One rank of each package has its next rank in another package.
        let outside = if packages > 1 { all / replicas } else { 0 };
        [all - outside, outside, 0]
    }

    /// Two all-to-alls in int4: inside a node each rank sends a slice for every node to every other rank, and across nodes one
    /// slice to every other node.
    fn reductions_over_all_nodes(&self) -> [u64; 3] {
        let Machine { nodes, packages, replicas } = self.machine;
        let n = self.machine.ranks();
        let to = |ranks: u64, slices: u64| self.of_all(|elements, _| ranks * slices * slice(elements / n, 4));
        [to(replicas - 1, nodes), to(packages * replicas - replicas, nodes), to(nodes - 1, 1)]
    }
}

fn times(bytes: [u64; 3], n: u64) -> [u64; 3] {
    bytes.map(|bytes| n * bytes)
}

/// ZeRO++: weights cross nodes once a step, in int8. All gathers inside a node are in bf16, from the secondary shard. Gradients are
/// reduced in int4 for every micro-batch or once a step.
#[test]
fn traffic_of_zero_plus_plus_is_what_its_codes_take() {
    for (machine, micro_batches, reduce) in [
        (MACHINES[0], 1, "micro-batch"),
        (MACHINES[0], 3, "micro-batch"),
        (MACHINES[0], 3, "step"),
        (MACHINES[1], 1, "micro-batch"),
        (MACHINES[1], 2, "step"),
        (MACHINES[2], 2, "micro-batch"),
    ] {
        let sharding = format!("preset = \"zero++\"\ncollectives = \"ring\"\nreduce = \"{reduce}\"");
        let plan = machine.plan_of(micro_batches, &sharding);
        let [gather, scatter, exchange, reduced] = Machine::measured(&plan);
        let (derived, n) = (Derivation::new(machine, &plan, micro_batches), machine.ranks());
        let across = derived.of_all(|elements, _| (machine.nodes - 1) * slice(elements / n, 8));
        assert_eq!(gather, plus(derived.gathers_inside_nodes(), [0, 0, across]), "{reduce}");
        let reductions = if reduce == "step" { 1 } else { micro_batches };
        assert_eq!(exchange, times(derived.reductions_over_all_nodes(), reductions), "{reduce}");
        assert_eq!((scatter, reduced.iter().sum::<u64>()), ([0; 3], 2 * (n - 1) * SUMS));

        // To first order: 0.5·M·(N − 1)/N of weights and 0.25·M·(N − 1)/N of gradients leave a node.
        let whole: u64 = derived.units.iter().map(|(elements, _)| 2 * elements).sum();
        let beyond = |bytes: u64, share: f64| {
            let exact = bytes as f64 / machine.nodes as f64;
            let leading = share * whole as f64 * (machine.nodes - 1) as f64 / machine.nodes as f64;
            exact / leading - 1.0
        };
        // Scales add 4/256 bytes to one byte, or to half a byte; short slices have padding, too.
        assert!((0.0..0.07).contains(&beyond(gather[2], 0.5)), "{}", beyond(gather[2], 0.5));
        let gradients = beyond(exchange[2] / reductions, 0.25);
        assert!((0.0..0.15).contains(&gradients), "{gradients}");
    }
}

/// ZeRO++ as published: every gather for a forward or a recomputation crosses nodes in int8, and only those for a backward start from
/// the secondary shard. A recomputation and its backward use one gather, so full recomputation doubles what layers send across nodes.
#[test]
fn traffic_of_a_secondary_shard_for_the_backward_grows_with_micro_batches() {
    for (machine, micro_batches, recompute) in [
        (MACHINES[0], 1, "none"),
        (MACHINES[0], 3, "none"),
        (MACHINES[0], 2, "full"),
        (MACHINES[1], 3, "full"),
        (MACHINES[2], 2, "none"),
    ] {
        let sharding = format!(
            "preset = \"zero++\"\nsecondary_use = \"backward\"\ncollectives = \"ring\"\n[memory]\nrecompute = \"{recompute}\""
        );
        let plan = machine.plan_of(micro_batches, &sharding);
        let [gather, scatter, exchange, reduced] = Machine::measured(&plan);
        let (derived, n) = (Derivation::new(machine, &plan, micro_batches), machine.ranks());
        // The forward of the next micro-batch's embedding still has the table of the last one's backward.
        let crossings = |unit| match unit {
            Unit::Table => 1,
            Unit::Layer(_) | Unit::Positions if recompute == "full" => 2 * micro_batches,
            Unit::Head | Unit::Layer(_) | Unit::Positions => micro_batches,
        };
        let slices = |unit| crossings(unit) * slice(plan.layout(unit).len as u64 / n, 8);
        let across = n * (machine.nodes - 1) * plan.units().into_iter().map(slices).sum::<u64>();
        assert_eq!(
            gather,
            plus(derived.gathers_inside_nodes(), [0, 0, across]),
            "{micro_batches}, {recompute}"
        );
        assert_eq!(exchange, times(derived.reductions_over_all_nodes(), micro_batches), "{recompute}");
        assert_eq!((scatter, reduced.iter().sum::<u64>()), ([0; 3], 2 * (n - 1) * SUMS));
    }
}

/// Three levels: weights are gathered inside the package in int8, gradients are reduced to the shard of the node in int4 for every
/// micro-batch or once a step, and to the owners of the states once a step. The refresh goes back in bf16, or in int8.
#[test]
fn traffic_of_three_levels_is_what_its_codes_take() {
    for (machine, micro_batches, reduce, refresh_bits) in [
        (MACHINES[0], 1, "micro-batch", 16),
        (MACHINES[0], 3, "micro-batch", 8),
        (MACHINES[0], 3, "step", 16),
        (MACHINES[1], 2, "micro-batch", 16),
        (MACHINES[1], 1, "step", 8),
        (MACHINES[2], 2, "micro-batch", 16),
    ] {
        let explicit = if refresh_bits == 8 { "quantize_weights = \"int8\"" } else { "" };
        let sharding =
            format!("preset = \"three-level\"\ncollectives = \"ring\"\nreduce = \"{reduce}\"\n{explicit}");
        let plan = machine.plan_of(micro_batches, &sharding);
        let [gather, scatter, exchange, reduced] = Machine::measured(&plan);
        let (derived, n) = (Derivation::new(machine, &plan, micro_batches), machine.ranks());
        let Machine { nodes, packages, replicas } = machine;
        let in_node = packages * replicas;

        let in_package = derived.of_all(|elements, gathers| {
            if replicas > 1 { gathers * (replicas - 1) * slice(elements / replicas, 8) } else { 0 }
        });
        // Outermost first: a shard of the states to every other node, then the shards of all nodes to every other package.
        let own = |elements: u64| match refresh_bits {
            8 => slice(elements / n, 8),
            _ => 2 * elements / n,
        };
        let to_nodes = derived.of_all(|elements, _| (nodes - 1) * own(elements));
        let to_packages = derived.of_all(|elements, _| (packages - 1) * nodes * own(elements));
        assert_eq!(gather, [in_package, to_packages, to_nodes], "{reduce}, {refresh_bits}");

        // To every other rank of the package a slice for each package, and to every other package one slice.
        let inner =
            |ranks, slices| derived.of_all(|elements, _| ranks * slices * slice(elements / in_node, 4));
        let reductions = if reduce == "step" { 1 } else { micro_batches };
        let inner = times([inner(replicas - 1, packages), inner(packages - 1, 1), 0], reductions);
        let outer = derived.of_all(|elements, _| (nodes - 1) * slice(elements / n, 4));
        assert_eq!(exchange, plus(inner, [0, 0, outer]), "{reduce}");
        assert_eq!((scatter, reduced.iter().sum::<u64>()), ([0; 3], 2 * (n - 1) * SUMS));
    }
}

/// Squared norm, loss and the number of ranks that ask to stop, in fp32: a sum over n ranks sends 2·(n − 1) times as much.
const SUMS: u64 = 3 * 4;

/// The copies of a tied table on the first and the last stage are summed as numbers: the shards of the gradients, in their type.
#[test]
fn tied_tables_are_summed_without_codes() {
    let text = format!(
        "{MODEL}family = \"gpt\"\n[parallel]\npp = 2\ndp = 4\n[batch]\nsequence = 8\nmicro = 1\nglobal = 8\n\
         [precision]\ncompute = \"bf16\"\ngradients = \"compute\"\n[run]\neval_every = 0\n\
         [data]\nsource = \"corpus\"\n[cluster]\nper_node = 2\n[sharding]\npreset = \"zero++\"\n"
    );
    let plan = ConfigSource::text(&text).plan().unwrap_or_else(|error| panic!("{error}\n{text}"));
    let [_, scatter, exchange, reduced] = Machine::measured(&plan);
    // Each of four pairs sums a shard: both ranks send half of it, and then the other half.
    let tied = 4 * 2 * 2 * (plan.layout(Unit::Table).len as u64 / 4);
    let sums = SUMS * 2 * (2 * 3 + 4);
    assert_eq!(reduced.iter().sum::<u64>(), tied + sums);
    assert!(scatter == [0; 3] && exchange.iter().all(|&bytes| bytes > 0 || exchange[0] == bytes));
}

/// `2ψ/d_w + 2ψ/d_g + 12ψ/d_s` bytes are resident, each buffer rounded up by the arena.
#[test]
fn resident_memory_is_each_share_of_the_parameters() {
    let machine = Machine { nodes: 2, packages: 2, replicas: 2 };
    let whole = machine.plan("zero = 0");
    let cpu = device(&whole, Connection::Threads);
    let resident = |plan: &Plan| PeakMemory::new(cpu).resident(plan);
    let shares = |plan: &Plan, [weights, gradients, states]: [u64; 3]| -> u64 {
        let of_unit = |unit| {
            let len = plan.layout(unit).len as u64;
            let buffer = |bytes: u64| bytes.next_multiple_of(256);
            buffer(2 * len / weights) + buffer(2 * len / gradients) + 3 * buffer(4 * len / states)
        };
        plan.units().into_iter().map(of_unit).sum()
    };
    // What does not depend on the placement: workspace and scalars.
    let rest = resident(&whole) - shares(&whole, [1, 1, 1]);
    for (sharding, over) in [
        ("zero = 1", [1, 1, 8]),
        ("zero = 2", [1, 8, 8]),
        ("zero = 3", [8, 8, 8]),
        ("preset = \"mics\"", [4, 4, 4]),
        ("preset = \"zero++\"", [8, 8, 8]),
        ("preset = \"three-level\"", [2, 4, 8]),
        ("states = \"package\"", [1, 1, 2]),
        ("weights = \"package\"\ngradients = \"package\"\nstates = \"node\"", [2, 2, 4]),
    ] {
        let plan = machine.plan(sharding);
        assert_eq!(resident(&plan), shares(&plan, over) + rest, "{sharding}");
    }
}

/// A secondary shard takes 2ψ / (replicas of a node) from a unit's first gather to its last.
#[test]
fn a_secondary_shard_is_in_the_plan_while_it_lives() {
    let plan =
        Machine { nodes: 2, packages: 2, replicas: 2 }.plan("preset = \"zero++\"\ncollectives = \"ring\"");
    let stages = predict(&plan, device(&plan, Connection::Threads), Coverage::WholeStep).stages;
    let share = |unit: Unit, ranks: u64| (2 * plan.layout(unit).len as u64 / ranks).next_multiple_of(256);
    // The highest total is in the head's backward. The head is gathered and not again, and all other units will be.
    let units = plan.units();
    let shards: u64 = units.iter().map(|&unit| share(unit, 8)).sum();
    let secondary: u64 = units.iter().filter(|&&unit| unit != Unit::Head).map(|&unit| share(unit, 4)).sum();
    assert_eq!(stages[0].weights, shards + secondary + share(Unit::Head, 1));
}
