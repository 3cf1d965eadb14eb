//! Compares predicted and measured traffic and memory, by category and rank, to the byte, for random layouts.
//!
//! The measured side is counted independently: bytes where the transport copies them, and memory by the global allocator,
//! which allocates every tensor separately.

mod context;
mod copies;
mod schemes;

use std::fmt::Write as _;
use std::sync::Arc;

use kintsugi_comm::{Connection, Traffic};
use kintsugi_engine::{Job, MemoryChoice, Worker, device, run_ranks};
use kintsugi_plan::config::ConfigSource;
use kintsugi_plan::{Plan, Products};
use kintsugi_rank::{Purpose, RankMemory, TokenSource, Tokens};
use kintsugi_simulate::{Coverage, Prediction, predict};
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
            "family = \"qwen2\"\nkv_heads = 2",
            "family = \"qwen3\"\nkv_heads = 2",
            "family = \"smollm3\"\nkv_heads = 2\nno_rotary_every = 2",
            "family = \"olmo2\"\nkv_heads = 2",
            "family = \"gemma2\"\nkv_heads = 2\nsliding_window = 3",
            "family = \"mistral\"\nkv_heads = 2\nsliding_window = 3\nfull_attention_every = 2",
        ]);
        writeln!(text, "{family}").expect("a string");
        let (tp, pp, dp) =
            (self.of(&["1", "2", "4"]), self.of(&["1", "2", "3", "4"]), self.of(&["1", "2", "3", "4", "8"]));
        let schedule = self.of(&["gpipe", "1f1b", "interleaved", "zero-bubble"]);
        let chunks = if schedule == "interleaved" { "2" } else { "1" };
        write!(
            text,
            "[parallel]\ntp = {tp}\ncp = {}\ncp_attention = \"{}\"\npp = {pp}\ndp = {dp}\nschedule = \"{schedule}\"\nvirtual_stages = {chunks}\n\
             sequence_parallel = {}\nprefetch = {}\noverlap = {}\noverlap_tp = {}\n",
            self.of(&["1", "1", "2", "4"]),
            self.of(&["gather", "ring", "all-to-all"]),
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
            "[memory]\nrecompute = \"{}\"\nattention = \"{}\"\nhead_rows = {}\n[precision]\ncompute = \"{}\"\ngradients = \"{}\"\n\
             states = \"{}\"\n[cluster]\n{}\n[optimizer]\n{}\n[run]\ndevice = \"cpu\"\neval_every = {}\n\
             [data]\nsource = \"corpus\"\nmask_documents = {}\n",
            self.of(&["none", "selective", "full"]),
            self.of(&["flash", "plain"]),
            self.of(&["\"all\"", "\"all\"", "\"auto\"", "1", "5", "1000"]),
            self.of(&["fp32", "bf16", "fp16"]),
            self.of(&["fp32", "compute"]),
            self.of(&["fp32", "bf16"]),
            self.of(&[
                "preset = \"local\"",
                "preset = \"frontier\"",
                "per_package = 2\nper_node = 4",
                "per_package = 2\nper_node = 4",
                "per_package = 4\nper_node = 8",
                "per_package = 2\nper_node = 4\nnodes_per_pod = 2",
                "per_node = 2\nnodes_per_pod = 4",
            ]),
            self.of(&[
                "",
                "name = \"lion\"",
                "name = \"muon\"",
                "name = \"muon\"\nema = 0.99",
                "ema = 0.99",
                "name = \"sgd\"",
                "name = \"sgd\"\nmomentum = 0.0",
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
            "preset" => format!(
                "preset = \"{}\"\n",
                self.of(&["mics", "zero++", "zero++\"\nsecondary_use = \"backward", "three-level"])
            ),
            _ => {
                let mut level = || self.of(&["none", "package", "node", "pod", "cluster"]);
                let (weights, gradients, states) = (level(), level(), level());
                let secondary = if weights == "none" { "none" } else { level() };
                let secondary_use = self.of(&["all", "backward"]);
                format!(
                    "weights = \"{weights}\"\ngradients = \"{gradients}\"\nstates = \"{states}\"\n\
                     secondary = \"{secondary}\"\nsecondary_use = \"{secondary_use}\"\n"
                )
            }
        };
        what + collectives + self.of(&CODES)
    }
}

/// What is quantised beside what a preset quantises.
const CODES: [&str; 8] = [
    "",
    "",
    "",
    "quantize_weights = \"int8\"\n",
    "quantize_gradients = \"int4\"\n",
    "quantize_gradients = \"int8\"\nquantize_block = 32\n",
    "quantize_weights = \"int8\"\nquantize_gradients = \"int4\"\nquantize_block = 64\n",
    "quantize_weights = \"none\"\nquantize_refresh = \"int8\"\nquantize_gradients = \"none\"\n",
];

/// The memory and traffic of a rank in one step.
struct RankMeasure {
    stage: usize,
    allocator: HeapUsage,
    traffic: Traffic,
    /// That of copying the states once.
    copies: Traffic,
}

/// Samples that repeat one token. Every second token of a sample begins a document.
struct Ones {
    ids: Vec<u32>,
    starts: Vec<u32>,
}

impl Ones {
    fn new(plan: &Plan) -> Self {
        let tokens = if plan.loads_whole_starts() { plan.batch.sequence } else { plan.own_sequence() };
        let start = |row: usize| (row % tokens / 2 * 2) as u32;
        Ones { ids: vec![1; plan.rows()], starts: (0..plan.starts_len()).map(start).collect() }
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
            (worker.program(plan), plan.evaluation(worker.at.pp(), plan.micro_batches()));
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
        let (replication, before) = (plan.replication(worker.at.pp()), worker.world.traffic(worker.number));
        if plan.copies_states() {
            worker.rank.keep_copies(copies::keeper());
            worker.run(&replication, &mut ones, |_, _| {})?;
        }
        let copied = worker.world.traffic(worker.number).since(&before);
        counting::reset(worker.number);
        worker.run(&program, &mut ones, |_, _| {})?;
        meddle(worker);
        if plan.run.eval_every > 0 {
            worker.run(&evaluation, &mut ones, |_, _| {})?;
        }
        if plan.copies_states() {
            worker.run(&replication, &mut ones, |_, _| {})?;
        }
        Ok(RankMeasure {
            stage: worker.at.pp(),
            allocator: counting::measured(worker.number),
            traffic: std::mem::take(&mut traffic),
            copies: copied,
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
    copies::check(prediction, measured)?;
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

/// Random layouts with frozen weights, the same on every run.
fn layouts_with_frozen_weights() -> impl Iterator<Item = (String, Plan)> {
    let mut choices = Choices(13);
    let frozen = move || {
        let text = choices.layout();
        let patterns = choices.of(&[
            "table.*",
            "table.* positions.* layer.0.*",
            "table.* layer.0.* layer.1.*",
            "layer.1.*",
            "table.* layer.0.* layer.2.*",
            "head.*",
            "positions.* layer.*",
            "table.* positions.* layer.*",
        ]);
        let group = |pattern: &str| format!("{{ parameters = \"{pattern}\", frozen = true }}");
        let groups: Vec<String> = patterns
            .split(' ')
            .filter(|pattern| *pattern != "positions.*" || text.contains("family = \"gpt\""))
            .map(group)
            .collect();
        text.replace("[optimizer]\n", &format!("[optimizer]\ngroups = [{}]\n", groups.join(", ")))
    };
    std::iter::repeat_with(frozen)
        .filter_map(|text| ConfigSource::text(&text).plan().ok().map(|plan| (text, plan)))
        .filter(|(_, plan)| plan.mesh.ranks() <= 16)
}

#[test]
fn predicted_memory_and_traffic_with_frozen_weights_equal_measured() {
    for (text, plan) in layouts_with_frozen_weights().take(layouts() / 2) {
        let prediction = predict(&plan, device(&plan, Connection::Threads), Coverage::WholeStep);
        let measured = measure(&plan, MemoryChoice::Heap, |_| {});
        check(&prediction, &measured).unwrap_or_else(|error| panic!("{error}\n{text}"));
        assert!(plan.trained_parameter_count() < plan.parameter_count(), "{text}");
    }
}

/// Random layouts of a model whose sizes products in 8 bits can have.
fn layouts_in_8_bits() -> impl Iterator<Item = (String, Plan)> {
    let mut choices = Choices(11);
    let wider = move || {
        let text = choices.layout();
        let (_, rest) = text.split_at(MODEL.len());
        let of_16_bits = ["compute = \"fp32\"", "compute = \"fp16\""];
        let rest = of_16_bits.iter().fold(rest.to_owned(), |text, other| {
            text.replace(&format!("[precision]\n{other}"), "[precision]\ncompute = \"bf16\"")
        });
        let rest = rest.replace("[precision]", "[precision]\nproducts = \"fp8\"");
        let rest = rest.replace("sequence = 8", "sequence = 64");
        format!("{}{rest}", MODEL.replace("hidden = 32", "hidden = 64\nhead_dim = 16"))
    };
    std::iter::repeat_with(wider)
        .filter_map(|text| ConfigSource::text(&text).plan().ok().map(|plan| (text, plan)))
        .filter(|(_, plan)| plan.mesh.ranks() <= 16)
}

#[test]
fn predicted_memory_and_traffic_of_products_in_8_bits_equal_measured() {
    for (text, plan) in layouts_in_8_bits().take(layouts() / 4) {
        assert_eq!(plan.precision.products, Products::Fp8, "{text}");
        let prediction = predict(&plan, device(&plan, Connection::Threads), Coverage::WholeStep);
        let measured = measure(&plan, MemoryChoice::Heap, |_| {});
        check(&prediction, &measured).unwrap_or_else(|error| panic!("{error}\n{text}"));
    }
}

#[test]
fn the_planned_slab_suffices_and_nothing_else_is_allocated() {
    for (text, plan) in legal_layouts()
        .take(layouts() / 4)
        .chain(layouts_in_8_bits().take(4))
        .chain(layouts_with_frozen_weights().take(8))
    {
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
    for (text, plan) in
        legal_layouts().take(layouts()).chain(layouts_with_frozen_weights().take(layouts() / 4))
    {
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
