//! The text that `llvm-objdump` prints for machine code, as lines of mnemonic, operands and modifiers.

use std::fmt;
use std::io;
use std::path::Path;
use std::process::Command;

/// The disassembler of Debian's `llvm-19`.
pub(crate) const OBJDUMP: &str = "llvm-objdump-19";

/// One instruction as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    /// Offset in the code object's address space.
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) mnemonic: String,
    pub(crate) operands: Vec<String>,
    /// `offset:16`, `quad_perm:[0,1,2,3]`, `clamp`: a name, and what follows the colon.
    pub(crate) modifiers: Vec<(String, String)>,
}

impl Line {
    /// The value of a modifier.
    pub(crate) fn modifier(&self, name: &str) -> Option<&str> {
        self.modifiers.iter().find(|(of, _)| of == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.modifier(name).is_some()
    }

    /// The value of a modifier as a number, decimal or hexadecimal.
    pub(crate) fn number(&self, name: &str) -> Option<i64> {
        self.modifier(name).and_then(number)
    }

    /// The bits of a modifier such as `op_sel:[0,1]`, the first as the lowest. `None` if it is not there.
    pub(crate) fn bits(&self, name: &str) -> Option<u32> {
        let list = self.modifier(name)?.trim_start_matches('[').trim_end_matches(']');
        Some(list.split(',').enumerate().map(|(i, bit)| u32::from(bit.trim() == "1") << i).sum())
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} {}", self.mnemonic, self.operands.join(", "))?;
        for (name, value) in &self.modifiers {
            write!(f, " {name}")?;
            if !value.is_empty() {
                write!(f, ":{value}")?;
            }
        }
        Ok(())
    }
}

/// Runs the disassembler over the text sections of an ELF file for an architecture such as `gfx90a`.
pub(crate) fn disassemble(file: &Path, architecture: &str) -> io::Result<Vec<Line>> {
    let architecture = format!("--mcpu={architecture}");
    let output = Command::new(OBJDUMP).args(["--disassemble", &architecture]).arg(file).output()?;
    if !output.status.success() {
        return Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).lines().filter_map(parse).collect())
}

/// Parses a line of the disassembler. `None` if it is not an instruction.
pub(crate) fn parse(line: &str) -> Option<Line> {
    // Example: "\ts_cbranch_execz 45    // 000000001944: BF88002D <kernel+0xf8>"
    let (text, comment) = line.strip_prefix('\t')?.split_once("// ")?;
    let (address, words) = comment.split_once(": ")?;
    let words = words.split(' ').filter(|word| word.len() == 8 && !word.starts_with('<')).count();
    let text = text.trim();
    let (mnemonic, rest) = text.split_once(' ').unwrap_or((text, ""));
    let mut operands = Vec::new();
    let mut modifiers = Vec::new();
    for chunk in split_outside_brackets(rest, ',') {
        // After the last operand, words are modifiers.
        for (i, word) in split_outside_brackets(&chunk, ' ').into_iter().enumerate() {
            if i == 0 && !is_modifier(&word) {
                operands.push(word);
            } else {
                let (name, value) = word.split_once(':').unwrap_or((&word, ""));
                modifiers.push((name.to_owned(), value.to_owned()));
            }
        }
    }
    Some(Line {
        address: u64::from_str_radix(address.trim(), 16).ok()?,
        bytes: 4 * words as u64,
        mnemonic: mnemonic.to_owned(),
        operands,
        modifiers,
    })
}

/// Whether a word that stands where an operand could is a modifier: of an instruction without operands.
fn is_modifier(word: &str) -> bool {
    let is_register_range = word.contains('[') && !word.contains(":[");
    word.contains(':') && !is_register_range
}

/// Splits at a separator that is in no brackets. Leaves out empty parts.
fn split_outside_brackets(text: &str, separator: char) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut depth = 0;
    for character in text.chars() {
        match character {
            '[' | '(' => depth += 1,
            ']' | ')' => depth -= 1,
            _ => {}
        }
        if character == separator && depth == 0 {
            parts.push(String::new());
        } else if let Some(last) = parts.last_mut() {
            last.push(character);
        }
    }
    parts.iter().map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect()
}

/// A decimal or hexadecimal number, as the disassembler writes it.
pub(crate) fn number(text: &str) -> Option<i64> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text),
    };
    let value = match digits.strip_prefix("0x") {
        Some(digits) => i64::from_str_radix(digits, 16).ok()?,
        None => digits.parse().ok()?,
    };
    Some(if negative { -value } else { value })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Line {
        parse(&format!("\t{text}    // 000000001944: BF88002D 00000001 <kernel+0xf8>")).expect("a line")
    }

    #[test]
    fn operands_and_modifiers() {
        let line = parsed("global_load_dwordx4 v[0:3], v[4:5], off offset:-16 glc");
        assert_eq!((line.address, line.bytes), (0x1944, 8));
        assert_eq!(line.operands, ["v[0:3]", "v[4:5]", "off"]);
        assert_eq!((line.number("offset"), line.has("glc"), line.has("slc")), (Some(-16), true, false));
        let line = parsed("v_pk_fma_f32 v[0:1], s[2:3], v[4:5], -|v6| op_sel_hi:[0,1,1]");
        assert_eq!((line.operands.len(), line.bits("op_sel_hi"), line.bits("op_sel")), (4, Some(6), None));
    }

    #[test]
    fn brackets_hold_commas_and_spaces_together() {
        let line = parsed("s_getreg_b32 s0, hwreg(HW_REG_MODE, 0, 4)");
        assert_eq!(line.operands, ["s0", "hwreg(HW_REG_MODE, 0, 4)"]);
        let line = parsed("v_mov_b32_dpp v0, v1 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf");
        assert_eq!(line.modifier("quad_perm"), Some("[1,0,3,2]"));
        assert_eq!(line.number("row_mask"), Some(15));
    }

    #[test]
    fn what_is_no_instruction_is_left_out() {
        for text in ["", "0000000000001900 <kernel>:", "Disassembly of section .text:"] {
            assert_eq!(parse(text), None);
        }
    }
}
