//! Configurations that are wrong, and the sentence that each gets.

use std::fmt::Write as _;

use kintsugi_plan::config::ConfigSource;

/// Arguments of `--set` over the demo, one case per line.
const SETS: &[&[&str]] = &[
    // The shape of the configuration.
    &["parallel.tpp=2"],
    &["paralel.tp=2"],
    &["parallel.colour=2"],
    &["parallel.cp=2"],
    &["parallel.ep=2"],
    &["cluster.links.rack.bandwidth=1e9"],
    &["parallel"],
    &["tp=2"],
    &["parallel.tp="],
    &["parallel.tp=two"],
    &["parallel.tp=-1"],
    &["parallel.tp=2.5"],
    &["parallel.tp=0"],
    &["parallel=2"],
    &["parallel.overlap=1"],
    &["parallel.dp=most"],
    &["parallel.layers_per_stage=4"],
    &["optimizer.lr=fast"],
    &["optimizer.betas=[0.9, true]"],
    &["run.out=[3]"],
    &["batch.micro={ size = 2 }"],
    // Words.
    &["model.preset=gpt-176b"],
    &["cluster.preset=summit"],
    &["cluster.preset=custom"],
    &["model.family=gptj"],
    &["parallel.schedule=1fb1"],
    &["parallel.schedule=3"],
    &["sharding.weights=rack"],
    &["sharding.reduce=never"],
    &["precision.compute=fp8"],
    &["precision.states=fp16"],
    &["memory.recompute=some"],
    &["memory.attention=sparse"],
    &["optimizer.name=sgd"],
    // Model.
    &["model.layers=0"],
    &["model.hidden=130"],
    &["model.kv_heads=3"],
    &["model.vocab=1"],
    &["model.vocab=100"],
    &["model.family=llama", "model.head_dim=31"],
    &["model.rotary_fraction=0.5"],
    &["model.positions=63"],
    &["model.parallel_residual=true"],
    &["model.family=neox", "model.rotary_fraction=1.5"],
    &["model.activation=swiglu"],
    &["model.norm_eps=0"],
    &["model.norm_eps=1e-40"],
    &["model.family=llama", "model.rotary_base=0.5"],
    &["model.layers=100000"],
    &["model.hidden=2000000"],
    &["model.ffn=20000000"],
    &["model.vocab=20000000"],
    // Mesh, batch and pipeline.
    &["parallel.tp=3"],
    &["model.kv_heads=2", "parallel.tp=4"],
    &["model.ffn=510", "parallel.tp=4"],
    &["batch.sequence=0"],
    &["batch.micro=0"],
    &["batch.global=30"],
    &["batch.global=3"],
    &["batch.sequence=2000000"],
    &["batch.sequence=1000000", "batch.micro=100"],
    &["batch.micro=1", "batch.global=4000000"],
    &["batch.global=5000000000"],
    &["parallel.pp=5"],
    &["parallel.virtual_stages=2"],
    &["parallel.schedule=interleaved", "parallel.pp=1"],
    &["parallel.schedule=interleaved", "parallel.virtual_stages=1"],
    &["parallel.schedule=interleaved", "batch.global=24"],
    &["parallel.schedule=interleaved", "parallel.virtual_stages=3"],
    &["parallel.layers_per_stage=[1, 2, 1]"],
    &["parallel.layers_per_stage=[4, 0]"],
    &["parallel.layers_per_stage=[1, 2]"],
    &["parallel.sequence_parallel=true", "batch.sequence=7", "batch.micro=1"],
    &["cluster.preset=frontier", "cluster.nodes=1", "parallel.pp=4"],
    &["cluster.preset=frontier", "cluster.nodes=3", "parallel.dp=auto", "parallel.tp=4", "parallel.pp=4"],
    &["cluster.preset=frontier", "cluster.nodes=10000"],
    &["cluster.nodes=2"],
    &["cluster.preset=frontier", "cluster.per_package=3"],
    &["cluster.device.memory=0"],
    &["cluster.links.node.bandwidth=0"],
    &["cluster.links.node.bandwidth=450"],
    &["cluster.links.cluster.latency=100"],
    &["cluster.graph=[{ a = 0, b = 1, bandwidth = 50e9 }]"],
    &["cluster.per_node=64", "cluster.graph=[{ a = 0, b = 1, bandwidth = 50e9 }]"],
    &["cluster.per_node=8", "cluster.graph=[{ a = 0, b = 8, bandwidth = 50e9 }]"],
    &["framework.message=1e6"],
    &["parallel.dp=2000000"],
    &["parallel.dp=1000000"],
    // Sharding.
    &["sharding.zero=4"],
    &["sharding.weights=cluster"],
    &["sharding.gradients=cluster", "sharding.states=none"],
    &["sharding.reduce=micro-batch"],
    &["cluster.preset=frontier", "sharding.states=node", "parallel.dp=16", "batch.global=64"],
    // Precision, optimizer and run.
    &["precision.loss_scale=0"],
    &["precision.loss_scale=1e39"],
    &["precision.loss_scale=big"],
    &["optimizer.lr=0"],
    &["optimizer.lr=nan"],
    &["optimizer.lr=1e7"],
    &["optimizer.lr=1e-40"],
    &["optimizer.eps=1e-40"],
    &["optimizer.eps=inf"],
    &["parallel.layers_per_stage=[5, -1]"],
    &["optimizer.min_lr=0.1"],
    &["optimizer.betas=[0.9]"],
    &["optimizer.betas=[0.9, 1.0]"],
    &["optimizer.betas=[0.9, 0.999999999]"],
    &["optimizer.clip=-1"],
    &["optimizer.clip=1e-40"],
    &["optimizer.weight_decay=-0.1"],
    &["optimizer.weight_decay=1e7"],
    &["optimizer.warmup=-5"],
    &["optimizer.warmup=20000000"],
    &["run.steps=-1"],
    &["run.steps=20000000"],
    &["run.log_every=0"],
    &["run.eval_tokens=0"],
    &["run.max_skipped=0"],
    &["run.max_skipped=20000000"],
    &["run.communication_timeout=0"],
    // Data.
    &["data.source=[5]"],
    &["data.source=[]"],
    &["data.source=\"\""],
    &["data.source=[{ weight = 1 }]"],
    &["data.source=[{ path = \"a\", weight = \"heavy\" }]"],
    &["data.source=[{ path = \"a\", wieght = 1 }]"],
    &["data.source=[{ path = \"a\", weight = 0 }]"],
    &["data.source=[\"a\", { path = \"a\", weight = 2 }]"],
    &["data.source=a", "data.split=0.6"],
    &["data.source=a", "data.split=-0.1"],
    &["data.source=a", "data.tokenizer=\"\""],
    &["data.tokenizer=gpt2"],
    &["data.split=0.1"],
    &["data.mask_documents=true"],
    &["data.end_of_document=0"],
    &["data.source=a", "data.end_of_document=50000"],
    &["data.validation=a"],
    &["data.source=a", "data.validation=a"],
    &["data.source=a", "data.validation=\"\""],
    &["data.source=a", "data.validation=b", "data.split=0.1"],
    // Not there yet.
    &["sharding.quantize_weights=int8"],
    &["sharding.quantize_gradients=int4"],
    &["sharding.secondary=node"],
    &["cluster.price=-2.5"],
    &["run.transport=mpi"],
    &["run.transport=nccl"],
];

/// Files.
const FILES: &[&str] = &[
    "[parallel]\ntp = 2\npp = = 2\n",
    "[parallel]\ntp = 2\n\n[parallel]\npp = 2\n",
    "[model]\npreset = \"demo\"\n[paralell]\ntp = 2\n",
    "[model]\npreset = \"demo\"\nlayer = 2\n",
    "[model]\nlayers = 2\nhidden = 64\nheads = 2\n[batch]\nsequence = 8\n",
    "[model]\nlayers = 2\nhidden = 64\nheads = 2\nvocab = 128\n",
    "",
    "run.out = 3\n",
    "[data]\nsource = 5\n",
];

fn sentence(file: Option<&str>, sets: &[&str]) -> String {
    let source = file.map_or_else(ConfigSource::demo, |text| ConfigSource::text(text).named("run.toml"));
    match source.sets(sets).plan() {
        Err(error) => error.to_string(),
        Ok(_) => panic!("{file:?} {sets:?} is not refused"),
    }
}

#[test]
fn every_mistake_gets_one_sentence() {
    let mut all = String::new();
    for sets in SETS {
        writeln!(all, "--set {}\n    {}", sets.join(" --set "), sentence(None, sets)).unwrap();
    }
    for file in FILES {
        writeln!(all, "{file:?}\n    {}", sentence(Some(file), &[])).unwrap();
    }
    insta::assert_snapshot!(all);
}
