//! VOP1, VOP2 and VOP3: one operation in every lane. DPP and SDWA select other lanes, and parts of registers.

mod convert;
pub(crate) mod dpp;
mod float;
mod integer;
pub(crate) mod mask;
pub(crate) mod operation;
pub(crate) mod readlane;
mod sdwa;
mod trig_preop;
pub(crate) mod vopc;

use crate::assembly::Line;
use crate::operand::{Operand, Source, Type, source};
use crate::wave::{LANES, Lanes, Wave, WideLanes};
use dpp::Dpp;
use operation::{Operation, Run};
use sdwa::Sdwa;

pub(crate) use float::flush;

/// An instruction of the vector unit with one result.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Vector {
    operation: Operation,
    to: u16,
    sources: [Source; 3],
    /// Everything that is unusual. `None` lets operations run on the registers themselves.
    changes: Option<Changes>,
}

/// What happens to sources and results beside the operation.
#[derive(Clone, Copy, Debug)]
struct Changes {
    /// Bits of the sources that are the upper half of their register; bit 3 is the destination's.
    op_sel: u32,
    dpp: Option<Dpp>,
    sdwa: Option<Sdwa>,
    output: Output,
}

/// A factor and a range for a result in floating point.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Output {
    factor: f64,
    clamp: bool,
}

/// The mnemonic without its encoding.
pub(crate) fn base_name(mnemonic: &str) -> &str {
    ["_e32", "_e64", "_dpp", "_sdwa"]
        .iter()
        .find_map(|suffix| mnemonic.strip_suffix(suffix))
        .unwrap_or(mnemonic)
}

/// A vector register.
pub(crate) fn vector_register(text: &str) -> Option<u16> {
    match source(text, Type::B32)?.operand {
        Operand::Vector(register) => Some(register),
        _ => None,
    }
}

/// Decodes a line. `None` if it is not one of these instructions.
pub(crate) fn decode(line: &Line) -> Option<Vector> {
    let name = base_name(&line.mnemonic);
    let operation =
        float::operation(name).or_else(|| integer::operation(name)).or_else(|| convert::operation(name))?;
    let to = vector_register(line.operands.first()?)?;
    if line.operands.len() != 1 + operation.count {
        return None;
    }
    let none = Source { operand: Operand::Constant(0), negate: false, absolute: false, sign_extend: false };
    let mut sources = [none; 3];
    for (i, text) in line.operands[1..].iter().enumerate() {
        sources[i] = source(text, operation.sources[i])?;
    }
    if operation.accumulates {
        sources[operation.count].operand = Operand::Vector(to);
    }
    let output = output(line);
    let is_float = matches!(operation.result, Type::F16 | Type::F32 | Type::F64);
    if output != NO_OUTPUT && !is_float {
        return None;
    }
    let (dpp, sdwa, op_sel) = (dpp::decode(line), sdwa::decode(line), line.bits("op_sel").unwrap_or(0));
    // No instruction on 64 bits has these.
    if (op_sel != 0 || dpp.is_some() || sdwa.is_some()) && operation.is_wide() {
        return None;
    }
    let signs = sources.iter().any(|source| source.negate || source.absolute || source.sign_extend);
    let unusual = signs || dpp.is_some() || sdwa.is_some() || op_sel != 0 || output != NO_OUTPUT;
    if line.mnemonic.ends_with("_dpp") != dpp.is_some() || line.mnemonic.ends_with("_sdwa") != sdwa.is_some()
    {
        return None;
    }
    Some(Vector { operation, to, sources, changes: unusual.then_some(Changes { op_sel, dpp, sdwa, output }) })
}

const NO_OUTPUT: Output = Output { factor: 1.0, clamp: false };

fn output(line: &Line) -> Output {
    let factor = match (line.number("mul"), line.number("div")) {
        (Some(factor), _) => factor as f64,
        (_, Some(divisor)) => 1.0 / divisor as f64,
        _ => 1.0,
    };
    Output { factor, clamp: line.has("clamp") }
}

impl Vector {
    /// Executes the instruction.
    pub(crate) fn run(&self, wave: &mut Wave) {
        match (self.operation.run, &self.changes) {
            (Run::Narrow(run), None) => {
                let mut copies = [[0; LANES]; 3];
                let [a, b, c] = &mut copies;
                let result = run(
                    wave.lanes(self.sources[0].operand, a),
                    wave.lanes(self.sources[1].operand, b),
                    wave.lanes(self.sources[2].operand, c),
                );
                wave.write(self.to, &result);
            }
            (Run::Narrow(run), Some(changes)) => self.run_changed(run, changes, wave),
            (Run::Wide(run), changes) => {
                let [a, b, c] =
                    [0, 1, 2].map(|i| wave.wide_lanes(self.sources[i], self.operation.sources[i]));
                let mut result = run(&a, &b, &c);
                if let Some(changes) = changes {
                    changes.output.apply_wide(self.operation.result, &mut result);
                }
                if self.operation.result.is_wide() {
                    wave.write_wide(self.to, &result);
                } else {
                    wave.write(self.to, &result.map(|value| value as u32));
                }
            }
        }
    }

    fn run_changed(&self, run: fn(&Lanes, &Lanes, &Lanes) -> Lanes, changes: &Changes, wave: &mut Wave) {
        let (exec, mut writing) = (wave.exec(), u64::MAX);
        let mut values = [[0; LANES]; 3];
        for (i, values) in values.iter_mut().enumerate() {
            let source = self.sources[i];
            let mut copy = [0; LANES];
            *values = *wave.lanes(source.operand, &mut copy);
            if i == 0
                && let Some(dpp) = changes.dpp
            {
                (*values, writing) = dpp.apply(values, exec);
            }
            if let Some(sdwa) = changes.sdwa
                && i < 2
            {
                *values = values.map(|value| sdwa.sources[i].of(value, source.sign_extend));
            }
            // A constant has only a lower half.
            if changes.op_sel >> i & 1 == 1 && !matches!(source.operand, Operand::Constant(_)) {
                *values = values.map(|value| value >> 16);
            }
            apply_signs(values, source, self.operation.sources[i]);
        }
        let [a, b, c] = &values;
        let mut result = run(a, b, c);
        changes.output.apply(self.operation.result, &mut result);
        let before = wave.vector[usize::from(self.to)];
        if let Some(sdwa) = changes.sdwa {
            for (result, &before) in result.iter_mut().zip(&before) {
                *result = sdwa.put(*result, before);
            }
        }
        // In the upper half of the destination, next to what was there.
        if changes.op_sel >> self.operation.count & 1 == 1 {
            for (result, &before) in result.iter_mut().zip(&before) {
                *result = *result << 16 | before & 0xffff;
            }
        }
        wave.set_exec(exec & writing);
        wave.write(self.to, &result);
        wave.set_exec(exec);
    }
}

/// `|x|` and `-x` of a source of up to 32 bits.
fn apply_signs(values: &mut Lanes, source: Source, of: Type) {
    let sign = of.sign() as u32;
    if source.absolute {
        *values = values.map(|value| value & !sign);
    }
    if source.negate {
        *values = values.map(|value| value ^ sign);
    }
}

impl Output {
    fn number(self, value: f64) -> f64 {
        let scaled = value * self.factor;
        match self.clamp {
            true if scaled.is_nan() => 0.0,
            true => scaled.clamp(0.0, 1.0),
            false => scaled,
        }
    }

    fn apply(self, of: Type, values: &mut Lanes) {
        if self == NO_OUTPUT {
            return;
        }
        for value in values {
            *value = match of {
                Type::F16 => operation::to_half(self.number(f64::from(operation::half(*value))) as f32),
                _ => (self.number(f64::from(f32::from_bits(*value))) as f32).to_bits(),
            };
        }
    }

    fn apply_wide(self, of: Type, values: &mut WideLanes) {
        if self == NO_OUTPUT {
            return;
        }
        for value in values {
            *value = match of {
                Type::F64 => self.number(f64::from_bits(*value)).to_bits(),
                _ => u64::from((self.number(f64::from(f32::from_bits(*value as u32))) as f32).to_bits()),
            };
        }
    }
}
