//! Descriptions of models and clusters.
//!
//! Presets are data files under `presets/`; units are parsed and printed in one place. This crate also has what every
//! crate needs for files and errors: [`input`], [`output`] and [`Cause`].
#![forbid(unsafe_code)]

mod cause;
mod cluster;
mod device;
mod family;
mod framework;
mod group;
pub mod input;
mod keeps;
mod kernels;
mod key;
mod level;
mod link;
mod model;
pub mod output;
mod placement;
pub mod presets;
mod rotary;
pub mod splitmix64;
mod spread;
pub mod tokenizer_files;
pub mod units;
pub mod work;

pub use cause::Cause;
pub use cluster::{ClusterSpec, Topology};
pub use device::{AttentionPoint, DeviceSpec, GPU_HEADROOM, Hardware, KernelPoint, ProductPoint};
pub use family::{Biases, Family, Features, NormKind, NormPlacement, Positions, QueryKeyNorm, SoftCaps};
pub use framework::{FrameworkSpec, Support};
pub use group::{Axis, ByAxis, Group, Span};
pub use keeps::KeepsSpec;
pub use kernels::{Fusion, KernelsSpec};
pub use key::{DeclaredKey, default_text};
pub use level::{ByLevel, Level};
pub use link::{EmulatedLink, EmulatedLinks, LinkSpec, ShortSpec, Wire};
pub use model::{Activation, DEFAULT_INIT_STD, ModelSpec};
pub use placement::{Placement, Places};
pub use rotary::{FrequencyScaling, RotaryScaling, RotaryScalingKind, amplitude};
pub use spread::Spread;
