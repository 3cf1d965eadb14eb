//! Detects the contents of a file from its first and last bytes. The name is not enough: a Parquet file named `.txt` is not
//! text.

use super::inputs::Compression;

/// Bytes of a file that are examined.
pub(super) const HEAD: usize = 8 << 10;

/// The contents of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Probably text.
    Text,
    /// Compressed data.
    Compressed(Compression),
    /// A Parquet table.
    Parquet,
    /// Text in an unsupported encoding.
    Encoded(&'static str),
    /// Anything else, by name.
    Other(&'static str),
}

/// Formats with a magic number. If text could begin with the same bytes, more of them are compared.
const MAGIC: [(&[u8], Content); 34] = [
    (b"\x1f\x8b", Content::Compressed(Compression::Gzip)),
    (b"\x28\xb5\x2f\xfd", Content::Compressed(Compression::Zstd)),
    (b"\xfd7zXZ\0", Content::Compressed(Compression::Xz)),
    (b"\xff\xfe\0\0", Content::Encoded("UTF-32")),
    (b"\0\0\xfe\xff", Content::Encoded("UTF-32")),
    (b"\xff\xfe", Content::Encoded("UTF-16")),
    (b"\xfe\xff", Content::Encoded("UTF-16")),
    (b"\x1f\x9d", Content::Other("a file of the compress program")),
    (b"\x04\x22\x4d\x18", Content::Other("an LZ4 file")),
    (b"\x5d\0\0", Content::Other("an LZMA file")),
    (b"LZIP\x01", Content::Other("an lzip file")),
    (b"PK\x03\x04", Content::Other("a zip archive, as PyTorch, NumPy and Office files are")),
    (b"PK\x05\x06", Content::Other("an empty zip archive")),
    (b"7z\xbc\xaf\x27\x1c", Content::Other("a 7z archive")),
    (b"Rar!\x1a\x07", Content::Other("a RAR archive")),
    (b"%PDF-", Content::Other("a PDF document")),
    (b"ARROW1\0\0", Content::Other("an Arrow or Feather file")),
    (b"FEA1", Content::Other("a Feather file")),
    (b"\xff\xff\xff\xff", Content::Other("an Arrow stream")),
    (b"SQLite format 3\0", Content::Other("an SQLite database")),
    (b"\x93NUMPY", Content::Other("a NumPy array")),
    (b"\x80\x02", Content::Other("a Python pickle")),
    (b"\x80\x03", Content::Other("a Python pickle")),
    (b"\x80\x04", Content::Other("a Python pickle")),
    (b"\x80\x05", Content::Other("a Python pickle")),
    (b"\x89HDF\r\n\x1a\n", Content::Other("an HDF5 file")),
    (b"MMIDIDX\0\0", Content::Other("the index of token files")),
    (b"GGUF\x03\0", Content::Other("a GGUF model")),
    (b"Obj\x01", Content::Other("an Avro file")),
    (b"\x7fELF", Content::Other("a program")),
    (b"\x89PNG\r\n", Content::Other("a PNG image")),
    (b"\xff\xd8\xff", Content::Other("a JPEG image")),
    (b"GIF89a", Content::Other("a GIF image")),
    (b"\xd0\xcf\x11\xe0", Content::Other("an Office document")),
];

/// The contents of a file that begins with `head`, and ends with `tail` if its end is known.
pub(super) fn content(head: &[u8], tail: Option<&[u8]>) -> Content {
    if let Some(&(_, content)) = MAGIC.iter().find(|(magic, _)| head.starts_with(magic)) {
        return content;
    }
    match head {
        // Text may begin with these letters, but a Parquet file also ends with them.
        [b'P', b'A', b'R', b'1', ..] if tail == Some(b"PAR1") => Content::Parquet,
        [b'P', b'A', b'R', b'E', ..] if tail == Some(b"PARE") => Content::Other("an encrypted Parquet file"),
        [b'P', b'A', b'R', b'1' | b'E', ..] if by_zeros(head) != Content::Text => match tail {
            Some(_) => Content::Other("a Parquet file that is cut short"),
            None => Content::Parquet,
        },
        // The magic number of a block, or of the end, follows the block size.
        [b'B', b'Z', b'h', b'1'..=b'9', 0x31 | 0x17, 0x41 | 0x72, ..] => {
            Content::Compressed(Compression::Bzip2)
        }
        // A zstd frame to skip; another frame follows.
        [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Content::Compressed(Compression::Zstd),
        // The length of the header, below 2^32, and then the header.
        [_, _, _, _, 0, 0, 0, 0, b'{', ..] => Content::Other("a safetensors file"),
        _ if head.get(257..262) == Some(b"ustar") => Content::Other("a tar archive"),
        _ => by_zeros(head),
    }
}

/// Text has hardly any zero bytes. In UTF-16 every second byte of most alphabets is one.
fn by_zeros(head: &[u8]) -> Content {
    let zeros = |from: usize| head.iter().skip(from).step_by(2).filter(|&&byte| byte == 0).count();
    let (even, odd) = (zeros(0), zeros(1));
    let (less, more) = (even.min(odd), even.max(odd));
    if more * 4 > head.len() && less * 20 < more {
        return Content::Encoded("UTF-16");
    }
    let text = std::str::from_utf8(head).map_or_else(|error| error.error_len().is_none(), |_| true);
    if (less + more) * 100 > head.len() || (more > 0 && !text) {
        Content::Other("a binary file")
    } else {
        Content::Text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a whole file is.
    fn content(bytes: &[u8]) -> Content {
        super::content(bytes, Some(&bytes[bytes.len().saturating_sub(4)..]))
    }

    #[test]
    fn text_is_text() {
        let cut = &"ä".repeat(HEAD).into_bytes()[..HEAD - 1];
        for text in [
            &b""[..],
            b"BZh, they said",
            b"%PD",
            b"one \0 in very many bytes of text that is fine, as far as\
            anybody can tell who has not seen what follows it",
            "日本語\n".as_bytes(),
            b"latin \xe9",
            cut,
            b"{\"text\": 1}",
            b"PARENTS and children",
            b"PAR1 receptor",
        ] {
            assert_eq!(content(text), Content::Text, "{:?}", text.escape_ascii().to_string());
        }
    }

    #[test]
    fn other_files_are_known() {
        let utf16 = |text: &str| text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<u8>>();
        assert_eq!(content(&utf16("\u{feff}words")), Content::Encoded("UTF-16"));
        assert_eq!(content(&utf16("words and words")), Content::Encoded("UTF-16"));
        assert_eq!(content(b"BZh91AY&SY"), Content::Compressed(Compression::Bzip2));
        assert_eq!(content(b"\x08\0\0\0\0\0\0\0{\"a\":{}}"), Content::Other("a safetensors file"));
        let mut tar = vec![b'a'; 512];
        tar[257..262].copy_from_slice(b"ustar");
        assert_eq!(content(&tar), Content::Other("a tar archive"));
        assert_eq!(content(b"PAR1\x15\0\x15\0PAR1"), Content::Parquet);
        assert_eq!(content(b"PARE\x15\0\x15\0PARE"), Content::Other("an encrypted Parquet file"));
        assert_eq!(content(b"PAR1\x15\0\x15\0"), Content::Other("a Parquet file that is cut short"));
        assert_eq!(super::content(b"PAR1\x15\0\x15\0", None), Content::Parquet);
        assert_eq!(super::content(b"PAR1 receptor", None), Content::Text);
        assert_eq!(content(&[1, 2, 0, 4, 5, 6, 0, 8]), Content::Other("a binary file"));
        assert_eq!(content(&[b"\xe9\0", &[b'x'; 500][..]].concat()), Content::Other("a binary file"));
    }
}
