//! What a framework runs where this engine runs one kernel: more bytes and more launches.
//!
//! The counts are those of PyTorch's primitives, in bytes for each element of 16-bit tensors: an operation that reads one
//! tensor and writes another moves four. `docs/journal/2026-11-19-cost-model-in-detail.md` has the table.

use kintsugi_spec::{FrameworkSpec, Fusion, KernelsSpec};
use kintsugi_tensor::paper::{Kernel, KernelKind};

/// What runs beside one of our kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Unfused {
    /// Bytes that are moved in addition to ours.
    pub bytes: f64,
    /// Kernels that are launched in addition to ours.
    pub launches: f64,
}

impl Unfused {
    fn new(bytes: f64, launches: f64) -> Self {
        Unfused { bytes, launches }
    }

    fn and(self, other: Unfused) -> Self {
        Unfused::new(self.bytes + other.bytes, self.launches + other.launches)
    }

    fn when(self, condition: bool) -> Self {
        if condition { self } else { Unfused::default() }
    }
}

/// What a framework runs beside a kernel.
pub fn unfused(kernel: &Kernel, framework: &FrameworkSpec) -> Unfused {
    let kernels = &framework.kernels;
    match kernel.kind {
        KernelKind::Memory { .. } => beside_a_pass(kernel, kernels, framework.dropout),
        KernelKind::Product { m, n, k, dtype } => {
            let (sums, width) = ((m * n) as f64, dtype.bytes() as f64);
            let alone = |fusion: Fusion| fusion != Fusion::Fused;
            match kernel.name {
                "linear gelu" => Unfused::new(2.0 * width * sums, 1.0).when(alone(kernels.activation)),
                "linear backward input gelu" => {
                    Unfused::new(3.0 * width * sums, 1.0).when(alone(kernels.activation))
                }
                "linear residual" => {
                    Unfused::new((3.0 * width + framework.dropout) * sums, 1.0).when(alone(kernels.residual))
                }
                "linear backward weight" => {
                    // The product writes the gradient, and a kernel adds it to the sum: in fp32, or by autograd in its own type.
                    let added = match kernels.accumulation {
                        Fusion::Fused => Unfused::default(),
                        Fusion::Kernel => Unfused::new((width + 8.0) * sums, 1.0),
                        Fusion::Eager => Unfused::new(3.0 * width * sums, 1.0),
                    };
                    let has_bias = kernel.flops > 2 * (m * n * k) as u64;
                    let bias = Unfused::new(width * (m * k) as f64, 1.0);
                    added.and(bias.when(has_bias && alone(kernels.activation)))
                }
                _ => Unfused::default(),
            }
        }
        KernelKind::Attention { shape, dtype, .. } => {
            let elements = shape.rows() * (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
            Unfused::new(2.0 * dtype.bytes() as f64 * elements as f64 * kernels.copies, kernels.copies)
        }
    }
}

/// Beside a kernel that only moves bytes: those of the framework over ours, for each element.
fn beside_a_pass(kernel: &Kernel, kernels: &KernelsSpec, dropout: f64) -> Unfused {
    let eager = |fusion: Fusion| fusion == Fusion::Eager;
    let more =
        |bytes: f64, ours: f64, launches: f64| Unfused::new(kernel.bytes as f64 * bytes / ours, launches);
    match kernel.name {
        "norm" => more(32.0, 4.0, 5.0).when(eager(kernels.norm)),
        "norm backward" => {
            let sum = more(4.0, 8.0, 1.0).when(kernels.residual != Fusion::Fused);
            more(68.0, 8.0, 11.0).when(eager(kernels.norm)).and(sum)
        }
        "residual" => more(dropout, 6.0, 1.0).when(dropout > 0.0),
        "swiglu" | "geglu" => more(4.0, 6.0, 1.0).when(eager(kernels.activation)),
        "swiglu backward" | "geglu backward" => more(8.0, 10.0, 2.0).when(eager(kernels.activation)),
        "rotary" => more(16.0, 4.0, 9.0).when(eager(kernels.rotary)),
        "cross entropy" => match kernels.loss {
            Fusion::Fused => Unfused::default(),
            Fusion::Kernel => more(6.0, 4.0, 2.0),
            Fusion::Eager => more(48.0, 4.0, 8.0),
        },
        _ => Unfused::default(),
    }
}

/// What a framework runs beside the softmax of plain attention, for each score: copies to fp32 and back, the mask, and a softmax
/// in fp32.
pub fn unfused_softmax(framework: &FrameworkSpec, backward: bool) -> Unfused {
    let of_primitives = if backward { Unfused::new(26.0, 3.0) } else { Unfused::new(24.0, 3.0) };
    of_primitives.when(framework.kernels.softmax == Fusion::Eager)
}

#[cfg(test)]
mod tests {
    use kintsugi_tensor::DType;

    use super::*;

    fn framework(kernels: KernelsSpec) -> FrameworkSpec {
        FrameworkSpec { kernels, ..FrameworkSpec::default() }
    }

    #[test]
    fn our_own_engine_runs_nothing_beside_its_kernels() {
        for name in ["norm", "norm backward", "swiglu", "rotary", "residual", "cross entropy"] {
            let kernel = Kernel { name, flops: 0, bytes: 1 << 20, kind: KernelKind::Memory { fp32: false } };
            assert_eq!(unfused(&kernel, &FrameworkSpec::default()), Unfused::default(), "{name}");
        }
    }

    #[test]
    fn a_gelu_of_its_own_reads_and_writes_every_element() {
        let (m, n, k) = (128, 256, 64);
        let kind = KernelKind::Product { m, n, k, dtype: DType::BF16 };
        let kernel = Kernel { name: "linear gelu", flops: (2 * m * n * k) as u64, bytes: 0, kind };
        let kernels = KernelsSpec { activation: Fusion::Kernel, ..KernelsSpec::default() };
        assert_eq!(unfused(&kernel, &framework(kernels)), Unfused::new(4.0 * (m * n) as f64, 1.0));
    }

    #[test]
    fn accumulation_in_fp32_reads_a_gradient_and_reads_and_writes_the_sum() {
        let (m, n, k) = (128, 256, 64);
        let kind = KernelKind::Product { m, n, k, dtype: DType::BF16 };
        let flops = (2 * m * n * k) as u64;
        let kernel = Kernel { name: "linear backward weight", flops, bytes: 0, kind };
        let kernels = KernelsSpec { accumulation: Fusion::Kernel, ..KernelsSpec::default() };
        assert_eq!(unfused(&kernel, &framework(kernels)), Unfused::new(10.0 * (m * n) as f64, 1.0));
    }
}
