//! Any configuration either resolves to a sound plan or is refused with a message. None causes a panic.

use kintsugi_plan::config::ConfigSource;
use kintsugi_plan::{Block, Plan};
use proptest::prelude::*;

const KEYS: &[(&str, &[&str])] = &[
    ("model.preset", &["demo", "gpt2-124m", "gpt-1t", "neox-20b", "llama3-8b"]),
    ("model.family", &["gpt", "neox", "llama"]),
    ("model.layers", &NUMBERS),
    ("model.hidden", &NUMBERS),
    ("model.heads", &NUMBERS),
    ("model.kv_heads", &NUMBERS),
    ("model.head_dim", &NUMBERS),
    ("model.ffn", &NUMBERS),
    ("model.vocab", &NUMBERS),
    ("model.vocab_multiple", &NUMBERS),
    ("model.positions", &NUMBERS),
    ("model.parallel_residual", &["true", "false"]),
    ("model.activation", &["gelu", "gelu-exact", "swiglu", "geglu"]),
    ("model.init", &["weights/gpt2"]),
    ("batch.sequence", &NUMBERS),
    ("batch.micro", &NUMBERS),
    ("batch.global", &NUMBERS),
    ("parallel.tp", &NUMBERS),
    ("parallel.pp", &NUMBERS),
    ("parallel.dp", &NUMBERS),
    ("parallel.dp", &["auto"]),
    ("parallel.schedule", &["gpipe", "1f1b", "interleaved", "zero-bubble"]),
    ("parallel.virtual_stages", &NUMBERS),
    ("parallel.layers_per_stage", &["[1, 3]", "[9223372036854775807, 9223372036854775807]", "[]"]),
    ("parallel.sequence_parallel", &["true", "false"]),
    ("parallel.prefetch", &NUMBERS),
    ("parallel.overlap_tp", &["true", "false"]),
    ("sharding.zero", &["0", "1", "2", "3"]),
    ("sharding.weights", &LEVELS),
    ("sharding.gradients", &LEVELS),
    ("sharding.states", &LEVELS),
    ("sharding.secondary", &LEVELS),
    ("sharding.secondary_use", &["all", "backward"]),
    ("sharding.preset", &["mics", "zero++", "three-level"]),
    ("sharding.collectives", &["auto", "ring", "hierarchical"]),
    ("sharding.reduce", &["micro-batch", "step"]),
    ("sharding.quantize_weights", &["none", "int8", "int4"]),
    ("sharding.quantize_refresh", &["none", "int8", "int4"]),
    ("sharding.quantize_gradients", &["none", "int8", "int4"]),
    ("sharding.quantize_block", &NUMBERS),
    ("memory.recompute", &["none", "selective", "full"]),
    ("memory.head_rows", &["all", "auto", "none", "1", "0", "-1", "1000000000"]),
    ("precision.products", &["compute", "fp8"]),
    ("precision.loss_scale", &["dynamic", "1024", "inf", "-1"]),
    ("optimizer.lr", &["1", "0", "inf", "nan", "1e-30"]),
    ("optimizer.eps", &["1", "1e-30", "1e-40"]),
    ("data.source", &["demo", "corpus/a", "[{ path = \"a\", weight = 0.7 }, \"b\"]", "[]", "7"]),
    ("data.tokenizer", &["bytes", "folder/tokenizer.json", "7"]),
    ("data.allow_other_tokenizer", &["true", "false", "7"]),
    ("data.end_of_document", &NUMBERS),
    ("data.validation", &["corpus/a", "corpus/b", "[]", "[\"a\", { path = \"v\", weight = 2 }]", "7"]),
    ("data.split", &["0", "0.1", "1", "nan"]),
    ("data.mask_documents", &["true", "false"]),
    ("cluster.preset", &["local", "frontier", "h200"]),
    ("cluster.nodes", &NUMBERS),
    ("cluster.per_node", &NUMBERS),
    ("cluster.per_package", &NUMBERS),
    ("cluster.nodes_per_pod", &NUMBERS),
    ("run.steps", &NUMBERS),
    ("run.eval_tokens", &NUMBERS),
    ("run.max_skipped", &NUMBERS),
    ("run.on_spike", &["continue", "rollback"]),
    ("run.spike_window", &NUMBERS),
    ("run.communication_timeout", &NUMBERS),
    ("run.graph", &["true", "false", "7"]),
    ("run.nccl_channels", &NUMBERS),
    ("run.nccl_buffer", &["65536", "1048576", "1", "9223372036854775807"]),
];

const NUMBERS: [&str; 13] =
    ["1", "2", "3", "4", "8", "12", "16", "64", "128", "0", "-1", "4294967296", "9223372036854775807"];
const LEVELS: [&str; 4] = ["none", "package", "node", "cluster"];

fn setting() -> impl Strategy<Value = String> {
    prop::sample::select(KEYS).prop_flat_map(|(key, values)| {
        prop::sample::select(values).prop_map(move |value| format!("{key}={value}"))
    })
}

fn check(plan: &Plan) {
    let blocks: Vec<Block> = (0..plan.chunks()).flat_map(|chunk| plan.chunk_blocks(chunk)).collect();
    let layers = (0..plan.model.layers).map(Block::Layer);
    assert_eq!(blocks, [Block::Embedding].into_iter().chain(layers).chain([Block::Head]).collect::<Vec<_>>());
    assert_eq!(plan.micro_batches() * plan.batch.micro * plan.mesh.dp(), plan.batch.global);
    assert!(
        plan.model.kv_heads.is_multiple_of(plan.mesh.tp()) && plan.model.ffn.is_multiple_of(plan.mesh.tp())
    );
    let sharding = plan.sharding;
    let nested = [sharding.secondary, sharding.weights, sharding.gradients, sharding.states, plan.mesh.dp()];
    assert!(nested.windows(2).all(|pair| pair[1].is_multiple_of(pair[0])), "{sharding:?}");
    assert_eq!(sharding.parts().map(|part| part.ranks).product::<usize>(), plan.mesh.dp());
    assert!(plan.flops().model > 0.0 && plan.parameter_count() > 0);
    assert_eq!(ConfigSource::text(plan.to_toml()).plan().as_ref(), Ok(plan));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_configuration_is_sound_or_refused(sets in prop::collection::vec(setting(), 0..6)) {
        match ConfigSource::demo().sets(sets).plan() {
            Ok(plan) => check(&plan),
            Err(error) => prop_assert!(!error.to_string().contains('\n')),
        }
    }

    #[test]
    fn any_text_is_refused_on_one_line(text in "\\PC{0,40}", set in "\\PC{0,20}") {
        for result in [ConfigSource::text(text).plan(), ConfigSource::demo().set(set).plan()] {
            if let Err(error) = result {
                prop_assert!(!error.to_string().contains('\n'));
            }
        }
    }
}
