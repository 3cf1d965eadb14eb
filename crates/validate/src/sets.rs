//! The published tables, and how their rows are read.

use kintsugi_simulate::{Coverage, memory_of, predict};
use rayon::prelude::*;

use super::score::{Figure, MeasuredRun, Report, errors};
use super::table::Row;
use super::{Case, device, gpt, plan, predicted};

/// A table and its aims.
pub struct Set {
    /// Its name.
    name: &'static str,
    /// Its file.
    pub file: &'static str,
    /// A description of the rows that the constants were fitted on first. The errors of all rows were known at that time.
    fitted_on: &'static str,
    /// Aims in percent: mean time, worst time, mean memory.
    aims: [Option<f64>; 3],
    /// Converts a row to a configuration with its measurement, if it belongs to this set.
    read: fn(&Row) -> Option<Read>,
}

/// The contents of a row.
struct Read {
    name: String,
    sets: Vec<String>,
    measured: Measured,
    memory: Option<f64>,
}

/// The unit of a run's measured speed.
enum Measured {
    Seconds(f64),
    /// Tokens per second and rank, over the whole step.
    TokensPerGpu(f64),
    /// Hardware FLOP/s per rank.
    HardwareFlops(f64),
    /// Model FLOPs utilisation (MFU).
    ModelShare(f64),
}

/// Every table except nanotron's, which is judged by other figures.
pub const SETS: &[Set] = &[
    Set {
        name: "korthikanti",
        file: "korthikanti_table5.csv",
        fitted_on: "22B and 1T",
        aims: [Some(4.0), Some(8.0), None],
        read: korthikanti,
    },
    Set {
        name: "sc21 table 1",
        file: "megatron_sc21_table1.csv",
        fitted_on: "3.6B, 145B and 1T",
        aims: [Some(6.0), None, None],
        read: sc21,
    },
    Set {
        name: "sc21 table 2, PTD-P",
        file: "megatron_sc21_table2_zero3.csv",
        fitted_on: "none",
        aims: [Some(12.0), None, None],
        read: sc21_pipeline,
    },
    Set {
        name: "sc21 table 2, ZeRO-3",
        file: "megatron_sc21_table2_zero3.csv",
        fitted_on: "175B on 384",
        aims: [Some(12.0), None, None],
        read: sc21_zero3,
    },
    Set {
        name: "megascale's megatron",
        file: "megascale_megatron_rows.csv",
        fitted_on: "none",
        aims: [Some(7.0), None, None],
        read: megascale,
    },
    Set {
        name: "vtrain",
        file: "vtrain_a100_multi.csv",
        fitted_on: "3.6B with tp 1",
        aims: [Some(12.0), None, None],
        read: vtrain,
    },
    Set {
        name: "llm-foundry A100",
        file: "llm_foundry_fsdp.csv",
        fitted_on: "1b and 13b with 2048 tokens on 8",
        aims: [Some(12.0), None, None],
        read: foundry_a100,
    },
    Set {
        name: "llm-foundry H100",
        file: "llm_foundry_fsdp.csv",
        fitted_on: "1b and 13b with 2048 tokens on 8",
        aims: [Some(12.0), None, None],
        read: foundry_h100,
    },
    Set {
        name: "simumax B200",
        file: "simumax_b200_megatron.csv",
        fitted_on: "70b with tp 1 and tp 4, 8 micro-batches",
        aims: [Some(6.0), None, Some(3.0)],
        read: simumax,
    },
    Set {
        name: "torchtitan H100",
        file: "torchtitan_h100.csv",
        fitted_on: "8B FSDP with compile on 8",
        aims: [Some(12.0), None, Some(8.0)],
        read: torchtitan,
    },
];

impl Set {
    /// Predicts every row of the table that belongs to the set.
    pub fn report(&self, rows: &[Row], over: &[String]) -> Report {
        let read: Vec<Read> = rows.iter().filter_map(self.read).collect();
        let cases: Vec<Case> = read.iter().filter_map(|read| case(read, over)).collect();
        let run = |case: &Case| MeasuredRun {
            name: case.name.clone(),
            ranks: case.plan.mesh.ranks(),
            predicted_s: predicted(&case.plan),
            measured_s: case.measured,
        };
        let runs: Vec<MeasuredRun> = cases.par_iter().map(run).collect();
        let times: Vec<(f64, f64)> = runs.iter().map(|run| (run.predicted_s, run.measured_s)).collect();
        let (mean, worst) = errors(&times);
        let [mean_aim, worst_aim, memory_aim] = self.aims;
        let mut figures = vec![
            Figure::at_most("time, mean error %", mean, mean_aim),
            Figure::at_most("time, worst error %", worst, worst_aim),
        ];
        let memories: Vec<(f64, f64)> = cases
            .iter()
            .filter_map(|case| {
                let measured = case.memory?;
                let prediction = predict(&case.plan, device(&case.plan), Coverage::ShortStep);
                Some((memory_of(&case.plan, &prediction), measured))
            })
            .collect();
        if !memories.is_empty() {
            figures.push(Figure::at_most("memory, mean error %", errors(&memories).0, memory_aim));
        }
        Report {
            set: self.name.to_owned(),
            rows: runs.len(),
            left_out: read.len() - runs.len(),
            fitted_on: self.fitted_on.to_owned(),
            figures,
            runs,
        }
    }
}

fn case(read: &Read, over: &[String]) -> Option<Case> {
    let plan = plan(&read.sets, over)?;
    let ranks = plan.mesh.ranks() as f64;
    let measured = match read.measured {
        Measured::Seconds(seconds) => seconds,
        Measured::TokensPerGpu(rate) => plan.tokens_per_step() as f64 / (rate * ranks),
        Measured::HardwareFlops(rate) => plan.flops().hardware / (rate * ranks),
        Measured::ModelShare(share) => plan.flops().model / (share * plan.cluster.device.peak_16bit? * ranks),
    };
    Some(Case { name: read.name.clone(), plan, measured, memory: read.memory })
}

fn layout(row: &Row) -> Vec<String> {
    let mut sets = vec![
        format!("parallel.tp={}", row.count("tp")),
        format!("parallel.pp={}", row.count("pp")),
        format!("parallel.dp={}", row.count("dp")),
        format!("batch.micro={}", row.count("micro_batch")),
        format!("batch.global={}", row.count("global_batch")),
    ];
    sets.extend(interleaving(row.count("vpp_chunks")));
    sets
}

fn interleaving(chunks: usize) -> Vec<String> {
    if chunks < 2 {
        return Vec::new();
    }
    vec!["parallel.schedule=interleaved".to_owned(), format!("parallel.virtual_stages={chunks}")]
}

fn on(cluster: &str, framework: &str) -> Vec<String> {
    vec![format!("cluster.preset={cluster}"), format!("framework.preset={framework}")]
}

fn name(row: &Row, columns: &[&str]) -> String {
    columns.iter().map(|column| row.text(column)).collect::<Vec<_>>().join(" ")
}

fn korthikanti(row: &Row) -> Option<Read> {
    let mut sets = [gpt(row, row.count("vocab")), layout(row), on("a100", "megatron-2022")].concat();
    if row.text("mode").starts_with("full") {
        sets.extend(
            ["memory.recompute=full", "framework.attention_again=0", "parallel.sequence_parallel=false"]
                .map(str::to_owned),
        );
    }
    let seconds = row.number("iter_time_s").map(Measured::Seconds);
    let measured = seconds.or(row.number("mfu_pct").map(|share| Measured::ModelShare(share / 100.0)))?;
    Some(Read { name: name(row, &["model", "num_gpus", "mode"]), sets, measured, memory: None })
}

fn sc21(row: &Row) -> Option<Read> {
    let sets = [gpt(row, row.count("vocab")), layout(row), on("a100", "megatron-2021")].concat();
    let measured = Measured::HardwareFlops(row.number("tflops_per_gpu_hw")? * 1e12);
    Some(Read { name: name(row, &["model", "num_gpus"]), sets, measured, memory: None })
}

fn sc21_pipeline(row: &Row) -> Option<Read> {
    if row.text("scheme") != "PTD-P" {
        return None;
    }
    table2(row, "megatron-2021", row.count("num_gpus") / row.count("model_parallel_size"))
}

fn sc21_zero3(row: &Row) -> Option<Read> {
    if row.text("scheme") != "ZeRO-3" {
        return None;
    }
    table2(row, "deepspeed-zero3", row.count("num_gpus"))
}

fn table2(row: &Row, framework: &str, dp: usize) -> Option<Read> {
    let mut sets = [gpt(row, row.count("vocab")), layout(row), on("a100", framework)].concat();
    sets.push(format!("parallel.dp={dp}"));
    let measured = Measured::HardwareFlops(row.number("tflops_per_gpu_hw")? * 1e12);
    Some(Read { name: name(row, &["scheme", "params_b", "num_gpus"]), sets, measured, memory: None })
}

fn megascale(row: &Row) -> Option<Read> {
    let seconds = row.number("iter_time_s")?;
    let mut sets = [gpt(row, row.count("vocab")), layout(row), on("a100", "megatron-2022")].concat();
    // The table's note assumes six chunks per stage. ZeRO-1 is Megatron's distributed optimizer.
    sets.extend(interleaving(6));
    sets.push("sharding.zero=1".to_owned());
    let measured = Measured::Seconds(seconds);
    Some(Read { name: name(row, &["model", "num_gpus"]), sets, measured, memory: None })
}

fn vtrain(row: &Row) -> Option<Read> {
    let mut sets = [gpt(row, row.count("vocab")), layout(row), on("a100", "megatron-deepspeed")].concat();
    // 800 Gbit/s for the eight ranks of a node.
    sets.push("cluster.links.cluster.bandwidth=12.5e9".to_owned());
    let measured = Measured::Seconds(row.number("iter_time_ms")? / 1e3);
    let columns = ["params_b", "num_gpus", "tp", "dp", "pp", "micro_batch"];
    Some(Read { name: name(row, &columns), sets, measured, memory: None })
}

fn foundry_a100(row: &Row) -> Option<Read> {
    row.text("gpu").starts_with("a100").then(|| foundry(row, "a100"))?
}

fn foundry_h100(row: &Row) -> Option<Read> {
    row.text("gpu").starts_with("h100").then(|| foundry(row, "h100"))?
}

fn foundry(row: &Row, cluster: &str) -> Option<Read> {
    // The engine has no 8-bit products.
    if row.text("precision") == "amp_fp8" {
        return None;
    }
    let mut sets = [gpt(row, 50368), layout(row), on(cluster, "llm-foundry")].concat();
    sets.push(format!("parallel.dp={}", row.count("num_gpus")));
    sets.push(format!("memory.recompute={}", if row.text("act_ckpt") == "True" { "full" } else { "none" }));
    sets.push("model.vocab_multiple=1".to_owned());
    if row.text("sharding") == "SHARD_GRAD_OP" {
        sets.push("sharding.gather=step".to_owned());
    }
    if row.text("gpu") == "a100_40gb" {
        // NVIDIA's data sheet of the 40 GB model.
        sets.extend(
            ["cluster.device.memory=42949672960", "cluster.device.memory_bandwidth=1.555e12"]
                .map(str::to_owned),
        );
    }
    let measured = Measured::TokensPerGpu(row.number("tokens_per_s_per_gpu")?);
    let columns = ["model", "seq_len", "num_gpus", "gpu", "micro_batch", "act_ckpt"];
    Some(Read { name: name(row, &columns), sets, measured, memory: None })
}

fn simumax(row: &Row) -> Option<Read> {
    let model = row.text("model");
    if !model.starts_with("llama3") || row.count("cp") > 1 {
        return None;
    }
    let shape = match model {
        "llama3-70b" => ["hidden=8192", "heads=64", "kv_heads=8", "ffn=28672", "vocab=128256"],
        _ => ["hidden=16384", "heads=128", "kv_heads=8", "ffn=53248", "vocab=128256"],
    };
    let mut sets = vec!["model.family=llama".to_owned(), "model.tied=false".to_owned()];
    sets.extend(shape.map(|key| format!("model.{key}")));
    sets.push(format!("model.layers={}", row.count("layers")));
    sets.push(format!("batch.sequence={}", row.count("seq_len")));
    sets.extend([layout(row), on("b200", "megatron-core")].concat());
    let global = row.count("micro_batch") * row.count("num_microbatches") * row.count("dp");
    sets.push(format!("batch.global={global}"));
    let measured = Measured::Seconds(row.number("real_iter_ms")? / 1e3);
    let memory = row.number("real_alloc_gib").map(|gib| gib * GIB);
    Some(Read { name: row.text("case").to_owned(), sets, measured, memory })
}

fn torchtitan(row: &Row) -> Option<Read> {
    let techniques = row.text("techniques");
    let skip = ["fp8", "CP", "Async"].iter().any(|word| techniques.contains(word));
    if skip || row.count("cp") > 1 || !row.text("gpu").starts_with("H100") {
        return None;
    }
    let preset = if row.text("model").ends_with("70B") { "llama3-70b" } else { "llama3-8b" };
    let mut sets = vec![format!("model.preset={preset}"), format!("batch.sequence={}", row.count("seq_len"))];
    sets.extend([layout(row), on("h100", "torchtitan")].concat());
    sets.push(format!("parallel.dp={}", row.count("fsdp")));
    sets.push(format!("batch.micro={}", row.count("local_batch")));
    let recompute = if row.text("act_ckpt") == "full" { "full" } else { "selective" };
    sets.push(format!("memory.recompute={recompute}"));
    // The model that the table's column names: HBM2e, 500 W.
    sets.extend(
        [
            "cluster.device.memory=103079215104",
            "cluster.device.memory_bandwidth=2.4e12",
            // The share of the clock at 500 instead of 700 W, fitted on the first row with compile.
            "cluster.device.matmul=0.5",
        ]
        .map(str::to_owned),
    );
    if !techniques.contains("compile") {
        sets.push("framework.elementwise=4.5".to_owned());
    }
    let measured = Measured::TokensPerGpu(row.number("tokens_per_s_per_gpu")?);
    let memory = row.number("peak_mem_gib").map(|gib| gib * GIB);
    let columns = ["model", "num_gpus", "fsdp", "tp", "local_batch", "techniques"];
    Some(Read { name: name(row, &columns), sets, measured, memory })
}

const GIB: f64 = 1_073_741_824.0;
