//! Valid configurations: what they resolve to, and that a written plan resolves to itself.

use kintsugi_plan::config::ConfigSource;
use kintsugi_plan::parameters::{InitialValues, Parameter, parameters};
use kintsugi_plan::{
    Axis, Codes, Data, DataSource, DeviceKind, Mesh, Plan, Quantized, ScheduleKind, TokenData, Unit, When,
};
use kintsugi_spec::{ModelSpec, presets};

fn plan(text: &str, sets: &[&str]) -> Plan {
    ConfigSource::text(text).sets(sets).plan().unwrap_or_else(|error| panic!("{error}"))
}

fn preset(name: &str, sets: &[&str]) -> Plan {
    plan(&format!("model.preset = \"{name}\""), sets)
}

/// Elements on one tp rank of a stage, with vocabulary padding but without shard padding.
fn stage_elements(plan: &Plan, stage: usize) -> usize {
    plan.stage_units(stage).into_iter().map(|unit| unit_elements(plan, unit)).sum()
}

fn unit_elements(plan: &Plan, unit: Unit) -> usize {
    plan.layout(unit).placed.last().unwrap().range.end
}

#[test]
fn without_a_file_there_is_the_demo() {
    let demo = ConfigSource::demo().plan().unwrap();
    assert_eq!(demo.model.name, "demo");
    assert_eq!(demo.mesh.sizes(), [2, 2, 1, 2]);
    assert_eq!(demo.pipeline.schedule, ScheduleKind::OneForwardOneBackward);
    assert_eq!(demo.pipeline.layers, [2, 2]);
    assert_eq!((demo.sharding.weights, demo.sharding.gradients, demo.sharding.states), (1, 1, 2));
    assert_eq!(demo.micro_batches(), 4);
    assert_eq!(demo.run.steps, 500);
    assert_eq!(demo.cluster.device.name, "cpu");
}

#[test]
fn nothing_of_the_demo_is_left_once_a_model_or_a_cluster_is_named() {
    let plan = |sets: &[&str]| ConfigSource::demo().sets(sets).plan().unwrap();
    let as_file = |sets: &[&str]| ConfigSource::text("").sets(sets).plan().unwrap();
    for model in presets::MODELS.iter().filter(|model| model.name != "demo") {
        let sets = [&*format!("model.preset={}", model.name), "cluster.preset=h100"];
        assert_eq!(plan(&sets), as_file(&sets), "{}", model.name);
        assert_eq!(plan(&sets[..1]), as_file(&sets[..1]), "{}", model.name);
    }
    let large = plan(&["model.preset=llama3-70b", "cluster.preset=h100"]);
    assert_eq!((large.batch.sequence, large.batch.global, large.mesh.ranks()), (8192, 1, 1));
    assert_eq!(plan(&["model.preset=llama3-70b", "cluster.preset=h100", "cluster.nodes=2"]).mesh.dp(), 16);
    // A cluster alone leaves the demo's model, because a plan needs one, and says so.
    let source = ConfigSource::demo().set("cluster.preset=h100");
    let frontier = source.plan().unwrap();
    assert_eq!(frontier, as_file(&["model.preset=demo", "cluster.preset=h100"]));
    let notes = source.notes(&frontier).unwrap().join("\n");
    assert!(
        notes.starts_with("no model is named, so this is the demo's; ")
            && notes.contains("this plan has one rank, ")
    );
    assert_eq!(source.has_demo_model(), Ok(true));
    assert_eq!(ConfigSource::demo().set("model.preset=llama3-8b").has_demo_model(), Ok(false));
    // The demo's own names and single keys of its model change nothing else of it.
    for sets in [["model.preset=demo", "cluster.preset=local"], ["model.layers=8", "cluster.per_node=4"]] {
        let source = ConfigSource::demo().sets(sets);
        assert_eq!(source.plan().unwrap().mesh.ranks(), 8, "{sets:?}");
    }
}

#[test]
fn a_device_that_is_not_given_is_that_of_the_cluster() {
    let run = |sets: &[&str]| {
        let source = ConfigSource::text("model.preset = \"demo\"").sets(sets);
        let run = source.plan().unwrap().run;
        (source.is_device_auto().unwrap(), run.device, run.deterministic)
    };
    assert_eq!(run(&[]), (true, DeviceKind::Cpu, true));
    assert_eq!(run(&["run.device=auto", "cluster.preset=h100"]), (true, DeviceKind::Cuda, false));
    assert_eq!(run(&["cluster.device.kind=gpu"]), (true, DeviceKind::Cuda, false));
    assert_eq!(run(&["run.device=cpu", "cluster.preset=h100"]), (false, DeviceKind::Cpu, true));
    assert_eq!(run(&["run.device=cuda"]), (false, DeviceKind::Cuda, false));
    // Only GPUs communicate by NCCL.
    assert_eq!(run(&["run.transport=nccl"]), (false, DeviceKind::Cuda, false));
}

#[test]
fn initial_weights_have_the_deviation_that_is_given() {
    let deviations = |setting: &str| {
        let plan = ConfigSource::demo().set(setting).plan().unwrap();
        let parameters: Vec<_> =
            plan.units().into_iter().flat_map(|unit| parameters(&plan.model, unit, 1)).collect();
        let initial = |parameter: &Parameter| match parameter.initial {
            InitialValues::Normal(deviation) => Some(deviation),
            _ => None,
        };
        parameters.iter().filter_map(initial).collect::<Vec<f64>>()
    };
    let usual = deviations("run.seed=1");
    assert_eq!(usual, deviations("model.init_std=0.02"));
    let residual = 0.02 / 8f64.sqrt();
    assert!(usual.iter().all(|deviation| [0.02, residual].contains(deviation)), "{usual:?}");
    assert!(usual.contains(&0.02) && usual.contains(&residual));
    let halves: Vec<f64> = usual.iter().map(|deviation| deviation / 2.0).collect();
    assert_eq!(deviations("model.init_std=0.01"), halves);
}

#[test]
fn later_layers_win() {
    let text = "[model]\npreset = \"gpt2-124m\"\nlayers = 6\nhidden = 384\n[batch]\nsequence = 512";
    let plan = plan(text, &["model.hidden=192", "model.heads=6"]);
    assert_eq!((plan.model.layers, plan.model.hidden, plan.model.vocab), (6, 192, 50257));
    assert_eq!((plan.batch.sequence, plan.model.positions), (512, 512));
    let other = preset("gpt2-124m", &["model.preset=llama2-7b"]);
    assert_eq!(other.model.layers, 32);
}

#[test]
fn a_table_that_is_dropped_leaves_nothing_behind() {
    let text = "[model]\npreset = \"demo\"\nlayers = 6\n[batch]\nglobal = 8\n\
                [parallel]\npp = 2\nlayers_per_stage = [1, 5]\n\
                [sharding]\nweights = \"cluster\"\ngradients = \"cluster\"\nstates = \"cluster\"\nreduce = \"micro-batch\"\n";
    let source = ConfigSource::text(text)
        .sets(["parallel.prefetch=3", "model.layers=7", "parallel.layers_per_stage=[1, 6]"])
        .without(&["parallel", "sharding"])
        .sets(["parallel.pp=3", "parallel.dp=2", "sharding.zero=1"]);
    let plan = source.plan().unwrap();
    assert_eq!(
        (plan.mesh, &plan.pipeline.layers[..]),
        (Mesh::ONE.with(Axis::Pipeline, 3).with(Axis::Data, 2), &[3, 2, 2][..])
    );
    assert_eq!((plan.sharding.weights, plan.sharding.gradients, plan.sharding.states), (1, 1, 2));
    assert_eq!((plan.pipeline.prefetch, plan.sharding.reduce, plan.batch.global), (1, When::Step, 8));
    // A dropped table is still checked: an unknown key remains an error.
    assert!(ConfigSource::text(text).set("parallel.tpp=2").without(&["parallel"]).plan().is_err());
}

#[test]
fn presets_have_their_published_numbers_of_parameters() {
    let published = [
        ("gpt2-124m", 124_439_808),
        ("gpt2-1558m", 1_557_611_200),
        ("neox-20b", 20_554_567_680),
        ("llama2-7b", 6_738_415_616),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3.1-405b", 405_853_388_800),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
        ("mistral-7b", 7_248_023_552),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("smollm3-3b", 3_075_098_624),
        ("phi-4", 14_659_507_200),
        ("starcoder2-3b", 3_030_371_328),
        ("gemma-2b", 2_506_172_416),
        ("gemma-7b", 8_537_680_896),
        ("gemma2-2b", 2_614_341_888),
        ("gemma2-9b", 9_241_705_984),
        ("gemma2-27b", 27_227_128_320),
        ("olmo2-1b", 1_484_916_736),
        ("olmo2-7b", 7_298_617_344),
        ("olmo2-13b", 13_716_198_400),
        ("olmo2-32b", 32_234_279_936),
    ];
    for (name, count) in published {
        assert_eq!(preset(name, &[]).parameter_count(), count, "{name}");
    }
    // arXiv 2402.16819 and 2406.11704 give the embeddings and the rest in billions; the presets have biases besides.
    for (name, billions) in [("nemotron4-15b", 3.2 + 12.5), ("nemotron4-340b", 9.4 + 331.6)] {
        let count = preset(name, &[]).parameter_count() as f64;
        assert!((count / 1e9 - billions).abs() < 0.1, "{name}: {count}");
    }
}

#[test]
fn a_model_has_a_name_of_its_own() {
    let named = preset("llama3-8b", &["model.name=ours", "model.layers=30"]);
    assert_eq!((named.model.name.as_str(), named.model.layers), ("ours", 30));
    assert_eq!(ConfigSource::text(named.to_toml()).plan(), Ok(named));
    assert_eq!(preset("llama3-8b", &["model.name=llama3-8b"]).model.name, "llama3-8b");
    let refused = |name: &str| {
        let source = ConfigSource::text("model.preset = \"demo\"").set(format!("model.name={name}"));
        source.plan().unwrap_err().to_string()
    };
    assert_eq!(
        refused("llama3-8b"),
        "model.name = \"llama3-8b\" is the name of a preset; choose another, or give model.preset"
    );
    assert_eq!(refused("''"), "model.name = \"\" must not be empty");
}

#[test]
fn a_cluster_has_the_keys_of_the_one_that_it_is_based_on() {
    let cluster = |name: &str| preset("demo", &[&format!("cluster.preset={name}")]).cluster;
    let (alps, h100) = (cluster("alps"), cluster("h100"));
    assert_eq!((alps.name.as_str(), alps.nodes, alps.topology.per_node), ("alps", Some(2688), Some(4)));
    assert_eq!(
        (alps.device.peak_16bit, alps.device.attention),
        (h100.device.peak_16bit, h100.device.attention)
    );
    assert_eq!(alps.links[0].latency, h100.links[0].latency);
    let lumi = cluster("lumi");
    assert_eq!((lumi.graph, lumi.nodes), (cluster("frontier").graph, Some(2978)));
    let source = ConfigSource::text("model.preset = \"demo\"");
    let error = source.sets(["cluster.preset=perlmutter", "cluster.nodes=1537"]).plan().unwrap_err();
    assert_eq!(error.to_string(), "cluster.nodes = 1537 is more than the 1536 nodes of perlmutter");
}

/// The log that the authors of arXiv 2312.12705 published has these numbers of parameters per tp rank.
#[test]
fn the_stages_of_175b_are_those_of_the_frontier_runs() {
    let plan = preset("gpt-175b", &["parallel.tp=4", "parallel.pp=16", "parallel.dp=2", "batch.global=640"]);
    assert_eq!(stage_elements(&plan, 0), 2_899_359_744);
    assert_eq!(stage_elements(&plan, 7), 2_718_480_384);
    // Megatron-DeepSpeed ties the embedding as a whole, so its last stage holds the positions as well.
    assert_eq!(stage_elements(&plan, 15) + unit_elements(&plan, Unit::Positions), 2_899_384_320);
}

#[test]
fn a_plan_written_out_resolves_to_itself() {
    let mut plans: Vec<Plan> = presets::MODELS.iter().map(|model| preset(model.name, &[])).collect();
    plans.extend(presets::CLUSTERS.iter().map(|cluster| {
        preset("demo", &[&format!("cluster.preset={}", cluster.name), "parallel.dp=3", "sharding.zero=3"])
    }));
    plans.push(ConfigSource::demo().plan().unwrap());
    plans.push(preset("demo", &["precision.loss_scale=1024", "cluster.nodes=3", "cluster.per_node=2"]));
    plans.push(preset(
        "demo",
        &["parallel.schedule=interleaved", "parallel.pp=2", "batch.global=4", "parallel.overlap=false"],
    ));
    plans.push(preset("demo", &["data.source=corpus/a", "data.split=0"]));
    let blend = "data.source=[{ path = \"a b\", weight = 0.1 }, { path = \"c\", weight = 3 }]";
    plans.push(preset("demo", &[blend, "data.tokenizer=bytes", "model.vocab=64"]));
    for plan in plans {
        let text = plan.to_toml();
        assert_eq!(ConfigSource::text(&text).plan(), Ok(plan), "{text}");
    }
}

#[test]
fn auto_replicas_fill_the_nodes_that_were_asked_for() {
    let dp = |sets: &[&str]| preset("gpt-175b", sets).mesh.dp();
    assert_eq!(dp(&["cluster.preset=frontier", "cluster.nodes=16", "parallel.tp=4", "parallel.pp=16"]), 2);
    assert_eq!(dp(&["cluster.preset=frontier", "parallel.tp=4", "parallel.pp=16"]), 1);
    assert_eq!(dp(&["parallel.tp=4", "parallel.dp=auto"]), 1);
    assert_eq!(dp(&["cluster.nodes=2", "cluster.per_node=4", "parallel.tp=2"]), 4);
}

#[test]
fn layers_that_are_left_over_go_to_the_first_chunks() {
    assert_eq!(preset("demo", &["parallel.pp=3"]).pipeline.layers, [2, 1, 1]);
    let plan = preset(
        "demo",
        &["model.layers=6", "parallel.pp=2", "parallel.schedule=interleaved", "batch.global=2"],
    );
    assert_eq!((plan.pipeline.virtual_stages, plan.pipeline.layers), (2, vec![2, 2, 1, 1]));
    assert_eq!(preset("demo", &["parallel.pp=2", "parallel.layers_per_stage=[1,3]"]).pipeline.layers, [1, 3]);
}

#[test]
fn a_level_shards_over_the_replicas_that_it_joins() {
    let frontier = |sets: &[&str]| {
        let mut all = vec!["cluster.preset=frontier", "sharding.zero=1"];
        all.extend(sets);
        preset("demo", &all).sharding
    };
    assert_eq!(frontier(&["parallel.dp=8", "sharding.gradients=node"]).gradients, 8);
    assert_eq!(frontier(&["parallel.dp=16", "sharding.gradients=cluster"]).gradients, 16);
    assert_eq!(frontier(&["parallel.dp=2", "sharding.gradients=package"]).gradients, 2);
    // A level may hold a part of the replicas.
    let parts = frontier(&["parallel.dp=16", "sharding.preset=three-level", "sharding.collectives=ring"]);
    assert_eq!((parts.weights, parts.gradients, parts.states), (2, 8, 16));
    assert_eq!(parts.parts().map(|part| part.ranks).collect::<Vec<_>>(), [2, 4, 2]);
    let mics = frontier(&["parallel.dp=32", "sharding.preset=mics", "sharding.collectives=ring"]);
    assert_eq!((mics.weights, mics.gradients, mics.states, mics.secondary), (8, 8, 8, 1));
    let plus = frontier(&["parallel.dp=32", "sharding.preset=zero++", "sharding.collectives=ring"]);
    assert_eq!((plus.weights, plus.states, plus.secondary), (32, 32, 8));
    assert_eq!(plus.parts().map(|part| part.ranks).collect::<Vec<_>>(), [8, 4]);
    // tp fills the package: no two replicas share one.
    assert_eq!(frontier(&["parallel.tp=2", "parallel.dp=4", "sharding.gradients=package"]).gradients, 1);
    let alone = frontier(&["sharding.zero=3", "parallel.dp=1", "sharding.reduce=micro-batch"]);
    assert_eq!((alone.weights, alone.states, alone.reduce), (1, 1, When::Step));
}

#[test]
fn presets_quantise_and_keys_override_them() {
    let frontier = |sets: &[&str]| {
        let all =
            [&["cluster.preset=frontier", "parallel.dp=16", "sharding.collectives=ring"], sets].concat();
        let sharding = preset("demo", &all).sharding;
        let Quantized { weights, refresh, gradients } = sharding.quantized;
        let word =
            |codes: Option<Codes>| codes.map_or("–".to_owned(), |c| format!("{} {}", c.integer, c.block));
        ([weights, refresh, gradients].map(word).join(", "), sharding)
    };
    let words = |sets: &[&str]| frontier(sets).0;
    assert_eq!(words(&["sharding.preset=zero++"]), "int8 256, –, int4 256");
    assert_eq!(words(&["sharding.preset=three-level"]), "int8 256, –, int4 256");
    assert_eq!(words(&["sharding.preset=mics"]), "–, –, –");
    let three = |key: &str| words(&["sharding.preset=three-level", key]);
    assert_eq!(three("sharding.quantize_weights=int8"), "int8 256, int8 256, int4 256");
    assert_eq!(three("sharding.quantize_weights=none"), "–, –, int4 256");
    assert_eq!(three("sharding.quantize_gradients=none"), "int8 256, –, –");
    assert_eq!(three("sharding.quantize_refresh=int8"), "int8 256, int8 256, int4 256");
    assert_eq!(three("sharding.quantize_block=64"), "int8 64, –, int4 64");
    // Only what is transferred is quantised.
    let zero =
        |zero: &str| words(&[zero, "sharding.quantize_weights=int8", "sharding.quantize_gradients=int8"]);
    assert_eq!(zero("sharding.zero=1"), "–, int8 256, int8 256");
    assert_eq!(zero("sharding.zero=3"), "int8 256, –, int8 256");

    // Shards are whole blocks, and codes of gradients cross nodes in a part of their own.
    let (_, plain) =
        frontier(&["sharding.zero=3", "sharding.quantize_weights=int8", "sharding.quantize_block=1024"]);
    assert_eq!((plain.multiple, plain.parts().count()), (1024, 1));
    let (_, divided) =
        frontier(&["sharding.zero=3", "sharding.quantize_gradients=int8", "sharding.quantize_block=32"]);
    assert_eq!((divided.multiple, divided.parts().count()), (64, 2));
}

#[test]
fn codes_that_nothing_carries_are_noted() {
    let notes = |sets: &[&str]| {
        let source = ConfigSource::text("model.preset = \"demo\"").sets(sets);
        source.notes(&source.plan().expect("a legal plan")).expect("notes").join("\n")
    };
    let alone = notes(&["sharding.zero=3", "sharding.quantize_gradients=int4"]);
    let note =
        "sharding.quantize_gradients = \"int4\" is the same as \"none\": no gradients are reduced to shards";
    assert!(alone.contains(note), "{alone}");
    let used = notes(&["parallel.dp=2", "sharding.zero=3", "sharding.quantize_gradients=int4"]);
    assert_eq!(used, "");
}

#[test]
fn gradients_are_reduced_as_zero_asks_unless_told_otherwise() {
    let reduce = |sets: &[&str]| preset("demo", &[&["parallel.dp=2"], sets].concat()).sharding.reduce;
    assert_eq!(reduce(&["sharding.zero=1"]), When::Step);
    assert_eq!(reduce(&["sharding.zero=2"]), When::MicroBatch);
    assert_eq!(reduce(&["sharding.zero=3", "sharding.reduce=step"]), When::Step);
}

#[test]
fn sequence_parallelism_of_one_rank_is_none() {
    assert!(!preset("demo", &["parallel.sequence_parallel=true"]).sequence_parallel);
    assert!(preset("demo", &["parallel.sequence_parallel=true", "parallel.tp=2"]).sequence_parallel);
}

#[test]
fn a_family_fills_in_its_own_shape() {
    let text = "model = { family = \"llama\", layers = 2, hidden = 4096, heads = 32, vocab = 32000 }";
    let llama = plan(text, &["batch.sequence=128"]).model;
    assert_eq!((llama.name.as_str(), llama.ffn, llama.kv_heads, llama.tied), ("custom", 11008, 32, false));
    let neox = plan(text, &["batch.sequence=128", "model.family=neox"]).model;
    assert_eq!((neox.ffn, neox.rotary_dims()), (16384, 32));
    let free = plan(text, &["batch.sequence=128", "model.hidden=100", "model.head_dim=64"]).model;
    assert_eq!((free.hidden, free.head_dim), (100, 64));
}

#[test]
fn a_folder_of_weights_brings_its_model() {
    let file = "model = { init = 'weights', vocab_multiple = 64 }\nbatch = { sequence = 32 }";
    assert_eq!(ConfigSource::text(file).init_folder(), Ok(Some("weights".into())));
    assert_eq!(ConfigSource::demo().init_folder(), Ok(None));

    let held = plan("model = { preset = 'llama2-7b', layers = 3 }", &[]).model;
    let with = |source: ConfigSource, more: &[&str]| source.sets(more).with_init_model(&held)?.plan();
    let plan = with(ConfigSource::text(file), &["model.layers=3"]).unwrap();
    assert_eq!(plan.model, ModelSpec { name: "custom".into(), vocab_multiple: 64, ..held.clone() });
    assert_eq!((plan.batch.sequence, plan.init), (32, Some("weights".into())));

    // Without a file, nothing of the demo is left, and the sequence is the model's longest.
    let plan = with(ConfigSource::demo(), &["model.init=weights"]).unwrap();
    assert_eq!((plan.model.layers, plan.batch.sequence, plan.mesh.ranks()), (3, held.positions, 1));
    let plan = with(ConfigSource::demo(), &["model.init=weights", "model.positions=100"]).unwrap();
    assert_eq!((plan.model.positions, plan.batch.sequence), (100, 100));

    let refused = |more: &[&str]| with(ConfigSource::text(file), more).unwrap_err().to_string();
    assert_eq!(
        refused(&["model.hidden=64"]),
        "model.hidden = 64 is not what model.init holds, which is 4096; leave it out"
    );
    assert_eq!(
        refused(&["model.preset=gpt2-124m"]),
        "model.family = \"gpt\" is not what model.init holds, which is \"llama\"; leave it out"
    );
}

#[test]
fn data_comes_from_files_with_weights() {
    let tokens = |set: &str| match preset("demo", &[set]).data {
        Data::Tokens(tokens) => tokens,
        Data::Demo => panic!("{set} is the demo"),
    };
    let source = |path: &str, weight| DataSource { path: path.into(), weight };
    let sources = vec![source("corpus/a", 1.0)];
    let one = TokenData {
        sources,
        tokenizer: None,
        allow_other_tokenizer: false,
        end_of_document: None,
        validation: Vec::new(),
        split: None,
        mask_documents: false,
    };
    assert_eq!(tokens("data.source=corpus/a"), one);
    let masked = preset("demo", &["data.source=corpus/a", "data.mask_documents=true"]);
    assert_eq!(masked.data, Data::Tokens(TokenData { mask_documents: true, ..one }));
    assert!(masked.masks_documents() && !preset("demo", &[]).masks_documents());
    let two = tokens("data.source=[\"a\", { path = \"b\", weight = 2 }]");
    assert_eq!(two.sources, [source("a", 1.0), source("b", 2.0)]);
    assert_eq!(preset("demo", &["data.source=demo"]).data, Data::Demo);
    let own = match preset("demo", &["data.source=a", "data.validation=b"]).data {
        Data::Tokens(tokens) => (tokens.validation, tokens.split),
        Data::Demo => panic!("the demo"),
    };
    assert_eq!(own, (vec![source("b", 1.0)], Some(0.0)), "nothing is kept back of what is trained on");
    assert_eq!(tokens("data.source=a").validation, []);
}

#[test]
fn the_vocabulary_of_the_data_is_the_models_unless_it_is_given() {
    let text =
        "data.source = [\"a\", \"b\"]\n[model]\nlayers = 1\nhidden = 8\nheads = 2\n[batch]\nsequence = 4\n";
    let source = ConfigSource::text(text);
    let wanted = source.vocab_source().unwrap().unwrap();
    assert_eq!((wanted.prefixes, wanted.tokenizer), (vec!["a".into(), "b".into()], None));
    assert!(source.plan().unwrap_err().to_string().contains("model.vocab"));
    let vocab = |source: ConfigSource| source.with_data_vocab(300).plan().unwrap().model.vocab;
    assert_eq!(vocab(source.clone()), 300);
    assert_eq!(vocab(source.clone().set("model.vocab=400")), 400);
    let origin = source.clone().with_data_vocab(300).resolved().unwrap();
    let origin = origin.iter().find(|value| value.key == "model.vocab").unwrap();
    assert_eq!(origin.origin, "data.source");
    for given in ["model.vocab=400", "model.preset=gpt2-124m", "data.source=demo"] {
        assert_eq!(source.clone().set(given).vocab_source().unwrap(), None, "{given}");
    }
}
