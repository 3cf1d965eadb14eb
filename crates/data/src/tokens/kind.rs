//! The integer types of stored tokens, with Megatron's codes.

use std::fmt;

/// The integer type of stored tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenType {
    /// 8 bits.
    U8,
    /// 8 bits, signed.
    I8,
    /// 16 bits, signed.
    I16,
    /// 32 bits, signed.
    I32,
    /// 64 bits, signed.
    I64,
    /// 16 bits.
    U16,
}

/// The types and their codes in an index.
const CODES: [(u8, TokenType); 6] = [
    (1, TokenType::U8),
    (2, TokenType::I8),
    (3, TokenType::I16),
    (4, TokenType::I32),
    (5, TokenType::I64),
    (8, TokenType::U16),
];

impl TokenType {
    /// The type that is written for a vocabulary: 16 bits if possible, else 32.
    pub fn for_vocab(vocab: usize) -> TokenType {
        if vocab <= 1 << 16 { TokenType::U16 } else { TokenType::I32 }
    }

    /// The type of a code. `None` for floating-point types and unknown codes.
    pub fn from_code(code: u8) -> Option<TokenType> {
        CODES.iter().find(|(known, _)| *known == code).map(|&(_, kind)| kind)
    }

    /// The code.
    pub fn code(self) -> u8 {
        CODES.iter().find(|(_, kind)| *kind == self).expect("every type has a code").0
    }

    /// Bytes of a token.
    pub fn bytes(self) -> usize {
        match self {
            TokenType::U8 | TokenType::I8 => 1,
            TokenType::I16 | TokenType::U16 => 2,
            TokenType::I32 => 4,
            TokenType::I64 => 8,
        }
    }

    /// The number in the bytes of one token.
    pub fn read(self, bytes: &[u8]) -> i64 {
        fn sized<const N: usize>(bytes: &[u8]) -> [u8; N] {
            bytes.try_into().expect("the bytes of one token")
        }
        match self {
            TokenType::U8 => i64::from(bytes[0]),
            TokenType::I8 => i64::from(i8::from_le_bytes(sized(bytes))),
            TokenType::I16 => i64::from(i16::from_le_bytes(sized(bytes))),
            TokenType::I32 => i64::from(i32::from_le_bytes(sized(bytes))),
            TokenType::I64 => i64::from_le_bytes(sized(bytes)),
            TokenType::U16 => i64::from(u16::from_le_bytes(sized(bytes))),
        }
    }

    /// Appends tokens as bytes. They must be in the range of the type.
    pub fn write(self, tokens: &[u32], out: &mut Vec<u8>) {
        match self {
            TokenType::U16 => out.extend(tokens.iter().flat_map(|&token| (token as u16).to_le_bytes())),
            TokenType::I32 => out.extend(tokens.iter().flat_map(|&token| (token as i32).to_le_bytes())),
            _ => unreachable!("only u16 and i32 are written"),
        }
    }
}

impl fmt::Display for TokenType {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            TokenType::U8 => "u8",
            TokenType::I8 => "i8",
            TokenType::I16 => "i16",
            TokenType::I32 => "i32",
            TokenType::I64 => "i64",
            TokenType::U16 => "u16",
        })
    }
}
