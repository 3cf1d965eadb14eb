//! The passes behind products move 16 bytes at once: what they load and store, counted by the interpreter.

use kintsugi_gfx90a::{Argument, Grid, Machine, Profile};
use kintsugi_tensor::DType;

use crate::support::{COMPUTE, NULL, PACK, WAVE, kernels, size, suffix};

const ROWS: usize = 3;
const THREADS: usize = 256;
/// Whole packs of every thread, several times.
const WIDTH: usize = 2 * THREADS * PACK;
const ALL: usize = ROWS * WIDTH;

/// A kernel, the elements of its tensors (0 for null), and how many it loads and stores.
struct Pass {
    file: &'static str,
    kernel: &'static str,
    tensors: &'static [usize],
    sizes: &'static [usize],
    loaded: usize,
    stored: usize,
}

const PASSES: [Pass; 6] = [
    Pass {
        file: "epilogue",
        kernel: "bias_gelu",
        tensors: &[ALL, WIDTH, ALL],
        sizes: &[ALL, WIDTH],
        loaded: 2 * ALL,
        stored: 2 * ALL,
    },
    Pass {
        file: "epilogue",
        kernel: "bias_gelu",
        tensors: &[ALL, WIDTH, 0],
        sizes: &[ALL, WIDTH],
        loaded: 2 * ALL,
        stored: ALL,
    },
    Pass {
        file: "epilogue",
        kernel: "gelu_derivative",
        tensors: &[ALL, ALL],
        sizes: &[ALL],
        loaded: 2 * ALL,
        stored: ALL,
    },
    Pass {
        file: "elementwise",
        kernel: "residual",
        tensors: &[ALL, ALL, 0, 0, 0, WIDTH, 0, 0, 0, ALL],
        sizes: &[ALL, WIDTH],
        loaded: 3 * ALL,
        stored: ALL,
    },
    Pass {
        file: "activation",
        kernel: "swiglu",
        tensors: &[2 * ALL, ALL],
        sizes: &[WIDTH],
        loaded: 2 * ALL,
        stored: ALL,
    },
    Pass {
        file: "activation",
        kernel: "swiglu_backward",
        tensors: &[ALL, 2 * ALL, 2 * ALL],
        sizes: &[WIDTH],
        loaded: 3 * ALL,
        stored: 2 * ALL,
    },
];

/// Accesses to global memory by waves, but for the two bytes with the number of threads that each wave begins with.
fn accesses(profile: &Profile, direction: &str) -> Vec<(String, u64)> {
    let is_one = |name: &str| {
        ["global_", "flat_", "buffer_", "scratch_"].iter().any(|kind| name.starts_with(kind))
            && name.contains(direction)
            && name != "global_load_ushort"
    };
    let all = profile.executed.iter().filter(|(name, _)| is_one(name));
    all.map(|(name, &count)| (name.clone(), count)).collect()
}

/// Two bytes at a time would be sixteen or eight instructions for one, in every format.
#[test]
fn epilogues_move_16_bytes_at_once() {
    for pass in &PASSES {
        let Some(code) = kernels(pass.file) else { return };
        for dtype in COMPUTE {
            let mut machine = Machine::with_profile(1);
            let mut arguments: Vec<Argument> = Vec::new();
            for &elements in pass.tensors {
                let bytes = vec![0; elements * dtype.bytes()];
                let address = if elements == 0 { NULL } else { machine.buffer("a tensor", bytes) };
                arguments.push(address.into());
            }
            arguments.extend(pass.sizes.iter().map(|&length| size(length)));
            arguments.push(true.into());
            let name = format!("{}_{}", pass.kernel, suffix(dtype));
            machine
                .launch(&code, &name, Grid::new(ROWS, THREADS), &arguments)
                .unwrap_or_else(|error| panic!("{error}"));
            let profile = machine.take_profile();
            for (direction, elements) in [("load", pass.loaded), ("store", pass.stored)] {
                let pieces = (elements * dtype.bytes() / 16 / WAVE) as u64;
                let expected = vec![(format!("global_{direction}_dwordx4"), pieces)];
                assert_eq!(accesses(&profile, direction), expected, "{name} of {:?}", pass.tensors);
            }
        }
    }
}

/// Tensors that begin elsewhere are moved element by element, so the count above can fail.
#[test]
fn narrow_passes_move_single_elements() {
    let Some(code) = kernels("epilogue") else { return };
    let mut machine = Machine::with_profile(1);
    let [dx, kept] = ["dx", "kept"].map(|name| machine.buffer(name, vec![0; WAVE * DType::BF16.bytes()]));
    let arguments = [dx.into(), kept.into(), size(WAVE), false.into()];
    machine.launch(&code, "gelu_derivative_bf16", Grid::new(1, WAVE), &arguments).expect("the kernel runs");
    assert_eq!(accesses(&machine.take_profile(), "store"), [("global_store_short".to_owned(), 1)]);
}
