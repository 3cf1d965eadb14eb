//! Compares predicted and measured traffic and memory, by category and rank, to the byte, for random layouts.
//!
//! The measured side is counted independently: bytes where the transport copies them, and memory by the global allocator,
//! which allocates every tensor separately.

use std::fmt::Write as _;
use std::sync::Arc;

use kintsugi_comm::{Connection, Operation, Traffic};
use kintsugi_engine::{Job, MemoryChoice, Worker, device, run_ranks};
use kintsugi_plan::config::ConfigSource;
use kintsugi_plan::{Plan, Unit};
use kintsugi_rank::{Purpose, RankMemory, TokenSource, Tokens};
use kintsugi_simulate::{Coverage, PeakMemory, Prediction, predict};
use kintsugi_spec::Level;
use kintsugi_tensor::cpu::counting::{self, CountingAllocator, HeapUsage};
use kintsugi_testing::cases;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const MODEL: &str = "[model]\npreset = \"demo\"\nlayers = 4\nhidden = 32\nffn = 64\nheads = 4\nvocab = 200\n";

/// A small linear congruential generator: the same layouts on every run.
struct Choices(u64);

impl Choices {
    fn of<'a>(&mut self, options: &[&'a str]) -> &'a str {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        options[(self.0 >> 33) as usize % options.len()]
    }

    /// A random layout, legal or not.
    fn layout(&mut self) -> String {
        let mut text = String::from(MODEL);
        let family = self.of(&[
            "family = \"gpt\"",
            "family = \"neox\"\ntied = false",
            "family = \"llama\"\nkv_heads = 2",
        ]);
        writeln!(text, "{family}").expect("a string");
        let (tp, pp, dp) =
            (self.of(&["1", "2", "4"]), self.of(&["1", "2", "3", "4"]), self.of(&["1", "2", "3", "4", "8"]));
        let schedule = self.of(&["gpipe", "1f1b", "interleaved", "zero-bubble"]);
        let chunks = if schedule == "interleaved" { "2" } else { "1" };
        write!(
            text,
            "[parallel]\ntp = {tp}\npp = {pp}\ndp = {dp}\nschedule = \"{schedule}\"\nvirtual_stages = {chunks}\n\
             sequence_parallel = {}\nprefetch = {}\noverlap = {}\noverlap_tp = {}\n",
            self.of(&["true", "false"]),
            self.of(&["0", "1", "2"]),
            self.of(&["true", "false"]),
            self.of(&["true", "false"]),
        )
        .expect("a string");
        let micro: usize = self.of(&["1", "2", "3"]).parse().expect("a number");
        let accumulation: usize = self.of(&["1", "2", "3", "4", "6"]).parse().expect("a number");
        let global = micro * accumulation * dp.parse::<usize>().expect("a number");
        write!(text, "[batch]\nsequence = 8\nmicro = {micro}\nglobal = {global}\n").expect("a string");
        let placement = self.placement();
        let reduce = self.of(&["", "reduce = \"step\"\n"]);
        let gather = self.of(&["micro-batch", "step"]);
        write!(text, "[sharding]\n{placement}gather = \"{gather}\"\n{reduce}").expect("a string");
        write!(
            text,
            "[memory]\nrecompute = \"{}\"\nattention = \"{}\"\n[precision]\ncompute = \"{}\"\ngradients = \"{}\"\n\
             states = \"{}\"\n[cluster]\n{}\n[run]\neval_every = {}\n\
             [data]\nsource = \"corpus\"\nmask_documents = {}\n",
            self.of(&["none", "selective", "full"]),
            self.of(&["flash", "plain"]),
            self.of(&["fp32", "bf16", "fp16"]),
            self.of(&["fp32", "compute"]),
            self.of(&["fp32", "bf16"]),
            self.of(&[
                "preset = \"local\"",
                "preset = \"frontier\"",
                "per_package = 2\nper_node = 4",
                "per_package = 2\nper_node = 4",
                "per_package = 4\nper_node = 8",
            ]),
            self.of(&["0", "1"]),
            self.of(&["true", "false"]),
        )
        .expect("a string");
        text
    }
}

impl Choices {
    /// What is sharded over dp, by a ZeRO stage, by a preset or by levels.
    fn placement(&mut self) -> String {
        let collectives = self.of(&["", "collectives = \"ring\"\n", "collectives = \"hierarchical\"\n"]);
        let what = match self.of(&["zero", "zero", "preset", "levels", "levels"]) {
            "zero" => format!("zero = {}\n", self.of(&["0", "1", "2", "3"])),
            "preset" => format!("preset = \"{}\"\n", self.of(&["mics", "zero++", "three-level"])),
            _ => {
                let mut level = || self.of(&["none", "package", "node", "cluster"]);
                let (weights, gradients, states) = (level(), level(), level());
                let secondary = if weights == "none" { "none" } else { level() };
                format!(
                    "weights = \"{weights}\"\ngradients = \"{gradients}\"\nstates = \"{states}\"\n\
                     secondary = \"{secondary}\"\n"
                )
            }
        };
        what + collectives
    }
}

/// The memory and traffic of a rank in one step.
struct RankMeasure {
    stage: usize,
    allocator: HeapUsage,
    traffic: Traffic,
}

/// Samples that repeat one token. Every second token of a sample begins a document.
struct Ones {
    ids: Vec<u32>,
    starts: Vec<u32>,
}

impl Ones {
    fn new(plan: &Plan) -> Self {
        let start = |row: usize| (row % plan.batch.sequence / 2 * 2) as u32;
        Ones { ids: vec![1; plan.rows()], starts: (0..plan.rows()).map(start).collect() }
    }
}

impl TokenSource for Ones {
    fn batch(&mut self, _micro: usize) -> Option<Tokens<'_>> {
        Some(Tokens { inputs: &self.ids, targets: &self.ids, starts: &self.starts })
    }
}

/// Runs a few steps and an evaluation, and measures one more of each.
fn measure(plan: &Plan, memory: MemoryChoice, meddle: impl Fn(&Worker) + Sync) -> Vec<RankMeasure> {
    let job = Job::new(Arc::new(plan.clone()), memory);
    run_ranks(Purpose::Training, &job, &job.world(), |worker| {
        worker.rank.initialise(1);
        let (program, evaluation) =
            (worker.program(plan), plan.evaluation(worker.at.pp, plan.micro_batches()));
        let mut ones = Ones::new(plan);
        worker.run(&program, &mut ones, |_, _| {})?;
        let mut traffic = worker.world.traffic(worker.number);
        // After a few steps, all reusable buffers have their final size.
        for _ in 0..3 {
            worker.run(&program, &mut ones, |_, _| {})?;
        }
        if plan.run.eval_every > 0 {
            worker.run(&evaluation, &mut ones, |_, _| {})?;
        }
        counting::reset(worker.number);
        worker.run(&program, &mut ones, |_, _| {})?;
        meddle(worker);
        if plan.run.eval_every > 0 {
            worker.run(&evaluation, &mut ones, |_, _| {})?;
        }
        Ok(RankMeasure {
            stage: worker.at.pp,
            allocator: counting::measured(worker.number),
            traffic: std::mem::take(&mut traffic),
        })
    })
    .expect("no rank fails")
}

/// Compares traffic and memory by category and rank to the byte. Allocations outside the arena may be at most 0.1 %.
fn check(prediction: &Prediction, measured: &[RankMeasure]) -> Result<(), String> {
    let mut traffic = Traffic::default();
    for rank in measured {
        traffic.merge(&rank.traffic);
    }
    if traffic != prediction.traffic {
        return Err(format!("traffic: predicted {:?}, measured {traffic:?}", prediction.traffic));
    }
    for (number, rank) in measured.iter().enumerate() {
        let predicted = prediction.stages[rank.stage];
        let seen = RankMemory::new(rank.allocator.peak, 0);
        for ((name, predicted), (_, seen)) in predicted.categories().into_iter().zip(seen.categories()) {
            if predicted != seen {
                return Err(format!("rank {number}: {name} predicted {predicted}, measured {seen}"));
            }
        }
        let untracked = rank.allocator.untracked_peak;
        if untracked.max(0) as u64 * 1000 > predicted.total {
            return Err(format!("rank {number}: {untracked} bytes behind the arena's back"));
        }
    }
    Ok(())
}

/// How many layouts a test runs.
fn layouts() -> usize {
    cases(80, 240)
}

fn legal_layouts() -> impl Iterator<Item = (String, Plan)> {
    let mut choices = Choices(7);
    std::iter::repeat_with(move || choices.layout())
        .filter_map(|text| ConfigSource::text(&text).plan().ok().map(|plan| (text, plan)))
        .filter(|(_, plan)| plan.mesh.ranks() <= 16)
}

#[test]
fn predicted_memory_and_traffic_equal_measured() {
    for (text, plan) in legal_layouts().take(layouts()) {
        let prediction = predict(&plan, device(&plan, Connection::Threads), Coverage::WholeStep);
        let measured = measure(&plan, MemoryChoice::Heap, |_| {});
        check(&prediction, &measured).unwrap_or_else(|error| panic!("{error}\n{text}"));
    }
}

#[test]
fn the_planned_slab_suffices_and_nothing_else_is_allocated() {
    for (text, plan) in legal_layouts().take(layouts() / 4) {
        let prediction = predict(&plan, device(&plan, Connection::Threads), Coverage::WholeStep);
        let slab = MemoryChoice::Slab(prediction.stages.iter().map(|stage| stage.reserved).collect());
        for rank in measure(&plan, slab, |_| {}) {
            assert_eq!(rank.allocator.reserved, prediction.stages[rank.stage].reserved, "{text}");
            assert_eq!(rank.allocator.peak.total(), 0, "every tensor is in the slab\n{text}");
            // The two lists of parameters of the optimizer.
            assert!(rank.allocator.allocations <= 2, "a steady step allocates no tensors\n{text}");
        }
    }
}

#[test]
fn a_short_step_predicts_a_whole_step() {
    for (text, plan) in legal_layouts().take(layouts()) {
        let plan = plan.with_micro_batches(plan.micro_batches() * 12);
        let [short, full] = [Coverage::ShortStep, Coverage::WholeStep]
            .map(|play| predict(&plan, device(&plan, Connection::Threads), play));
        assert_eq!(short.traffic, full.traffic, "{text}");
        for (short, full) in short.stages.iter().zip(&full.stages) {
            assert_eq!((short.categories(), short.total), (full.categories(), full.total), "{text}");
        }
    }
}

#[test]
fn an_unplanned_allocation_is_noticed() {
    let (_, plan) = legal_layouts().next().expect("there are legal layouts");
    let prediction = predict(&plan, device(&plan, Connection::Threads), Coverage::WholeStep);
    let hidden = std::sync::Mutex::new(Vec::new());
    let measured = measure(&plan, MemoryChoice::Heap, |worker| {
        if worker.number == 0 {
            hidden.lock().expect("one rank").push(vec![1_u8; 1 << 16]);
        }
    });
    let error = check(&prediction, &measured).expect_err("64 KiB nobody planned");
    assert!(error.contains("rank 0") && error.contains("behind the arena's back"), "{error}");
}

/// A machine of nodes, packages in a node, and replicas in a package, and a placement on it.
struct Machine {
    nodes: u64,
    packages: u64,
    replicas: u64,
}

impl Machine {
    /// A plan in bf16 with 16-bit gradients and one micro-batch, whose replicas fill the machine.
    fn plan(&self, sharding: &str) -> Plan {
        let Machine { nodes, packages, replicas } = self;
        let text = format!(
            "{MODEL}family = \"neox\"\ntied = false\n[parallel]\ndp = {}\noverlap = false\n[batch]\nsequence = 8\n\
             [precision]\ncompute = \"bf16\"\ngradients = \"compute\"\n[run]\neval_every = 0\n\
             [data]\nsource = \"corpus\"\n[cluster]\nper_package = {replicas}\nper_node = {}\n[sharding]\n{sharding}\n",
            nodes * packages * replicas,
            packages * replicas,
        );
        ConfigSource::text(&text).plan().unwrap_or_else(|error| panic!("{error}\n{text}"))
    }

    /// Bytes of all-gathers, reduce-scatters and all-reduces by level in a measured step.
    fn measured(plan: &Plan) -> [[u64; 3]; 3] {
        let prediction = predict(plan, device(plan, Connection::Threads), Coverage::WholeStep);
        let measured = measure(plan, MemoryChoice::Heap, |_| {});
        check(&prediction, &measured).unwrap_or_else(|error| panic!("{error}"));
        let mut traffic = Traffic::default();
        for rank in &measured {
            traffic.merge(&rank.traffic);
        }
        let operations = [Operation::AllGather, Operation::ReduceScatter, Operation::AllReduce];
        operations.map(|operation| Level::ALL.map(|level| traffic.get(level, operation)))
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

/// The traffic of each scheme, derived from the ring and from how often a unit is gathered in a step of one micro-batch: in the
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
            let [gather, scatter, reduce] = Machine::measured(&machine.plan(sharding));
            assert_eq!((gather, scatter), (gathers, scatters), "{sharding} on {nodes}×{packages}×{replicas}");
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
