//! Configurations, profiles of clusters, and tables of published runs.

use std::fs;
use std::path::{Path, PathBuf};

use kintsugi_plan::config::ConfigSource;
use kintsugi_simulate::time;
use kintsugi_validate::{Tables, validate};

use crate::harness::{Files, Target, as_it_is};

const CONFIGURATIONS: [&str; 3] = [
    r#"model = { preset = "gpt-175b" }
batch.global = 640
parallel = { tp = 4, pp = 16 }
sharding.zero = 1
precision.compute = "fp16"
memory.recompute = "full"
cluster = { preset = "frontier", nodes = 16 }
"#,
    r#"[model]
family = "llama"
layers = 4
hidden = 128
heads = 4
kv_heads = 2
ffn = 384
vocab = 512
rotary_base = 10000.0

[batch]
sequence = 64
micro = 2
global = 16

[parallel]
tp = 2
pp = 2
dp = 2
schedule = "interleaved"
virtual_stages = 2
sequence_parallel = true

[optimizer]
lr = 3e-4
betas = [0.9, 0.95]

[run]
steps = 60
checkpoint_every = 20
"#,
    r#"model = { preset = "demo", layers = 8 }
batch.global = 8
parallel = { pp = 4, layers_per_stage = [2, 2, 2, 2] }
data.source = [{ path = "one", weight = 1.0 }, { path = "two", weight = 2.5 }]
cluster = { per_node = 4, nodes = 1, links.node = { bandwidth = 1e9, latency = 1e-6 } }
framework.preset = "nanotron"
"#,
];

fn one(name: &str, text: &str) -> Files {
    Files::from([(name.to_owned(), text.as_bytes().to_vec())])
}

/// Configurations of runs.
pub fn configurations(_: &Path) -> Target {
    let seeds = CONFIGURATIONS.iter().map(|text| one("run.toml", text)).collect();
    Target { seeds, changed: &[], repair: as_it_is, read: read_configuration }
}

fn read_configuration(folder: &Path) -> bool {
    let Ok(text) = fs::read_to_string(folder.join("run.toml")) else { return false };
    let Ok(plan) = ConfigSource::text(text).plan() else { return false };
    ConfigSource::text(plan.to_toml()).plan().expect("a plan's own configuration is a right one");
    true
}

/// Profiles of clusters, as `calibrate` writes them.
pub fn profiles(_: &Path) -> Target {
    let profiles = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../profiles");
    let read = |name: &str| fs::read_to_string(profiles.join(name)).unwrap();
    let seeds =
        vec![one("profile.toml", &read("epyc-2-cores.toml")), one("profile.toml", &read("h200.toml"))];
    Target { seeds, changed: &[], repair: as_it_is, read: read_profile }
}

fn read_profile(folder: &Path) -> bool {
    let Ok(text) = fs::read_to_string(folder.join("profile.toml")) else { return false };
    let plan = ConfigSource::demo().profile("profile.toml", text).plan();
    plan.is_ok_and(|plan| time(&plan).is_some())
}

/// Tables of published runs, a few rows each.
const TABLES: [(&str, &str); 4] = [
    (
        "korthikanti_table5.csv",
        "model,layers,hidden,heads,seq_len,vocab,gpu,num_gpus,tp,pp,dp,vpp_chunks,global_batch,micro_batch,precision,mode,iter_time_s\n\
         GPT-22B,8,6144,64,2048,51200,A100,8,8,1,1,1,4,4,fp16,full_recompute_no_SP,1.42\n\
         GPT-22B,8,6144,64,2048,51200,\"A100, 80GB\",8,8,1,1,1,4,4,fp16,SP+selective_recompute,1.1\n",
    ),
    (
        "vtrain_a100_multi.csv",
        "params_b,num_gpus,tp,dp,pp,global_batch,micro_batch,hidden,heads,layers,seq_len,vocab,gpu,iter_time_ms,act_recompute\n\
         3.6,8,1,8,1,64,8,3072,32,4,2048,50257,A100,3566.5,full\n",
    ),
    (
        "torchtitan_h100.csv",
        "table,model,gpu,num_gpus,fsdp,tp,pp,cp,pp_schedule,local_batch,global_batch,seq_len,act_ckpt,techniques,tokens_per_s_per_gpu,peak_mem_gib\n\
         1,llama3.1-8B,H100,8,8,1,1,1,,2,16,8192,selective,FSDP,5762,82.4\n",
    ),
    (
        "nanotron_h100.csv",
        "model,params_b,layers,hidden,heads,kv_heads,ffn,vocab,tied_embeddings,seq_len,gpu,nodes,num_gpus,dp,pp,tp,zero,micro_batch,grad_accum,global_batch,status,mfu_pct_reported,tokens_per_s_per_gpu,tokens_per_s,peak_mem_gb\n\
         llama-1B,1.34,16,2048,32,32,8192,131072,True,4096,H100,1,8,4,2,1,1,4,16,256,ok,44.324,38894.51,311156.08,41.76\n\
         llama-1B,1.34,16,2048,32,32,8192,131072,True,4096,H100,1,8,8,1,1,1,4,8,256,ok,44.1,38000,304000,45.1\n",
    ),
];

/// The tables of `plan --validate`.
pub fn validation_tables(_: &Path) -> Target {
    let seeds = TABLES.iter().map(|(name, text)| one(name, text)).collect();
    Target {
        seeds,
        changed: &[],
        repair: as_it_is,
        read: |folder| Tables::read(folder).map(|tables| validate(&tables, &[])).is_ok(),
    }
}
