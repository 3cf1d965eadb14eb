//! Machine code of kernel files, kept on disk.
//!
//! The key is a hash of source, options and compiler version, so an outdated file is never loaded. Each file ends with its
//! own hash, because drivers do not check the machine code that they are given.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use kintsugi_spec::output;

use crate::cache;
use crate::error::GpuError;

/// The image of this name whose key has these parts, from the disk cache, else what `compile` makes.
pub(crate) fn cached(
    name: &str,
    ending: &str,
    key: &[String],
    compile: impl FnOnce() -> Result<Vec<u8>, GpuError>,
) -> Result<Vec<u8>, GpuError> {
    let parts: Vec<&[u8]> = key.iter().map(String::as_bytes).collect();
    let key = fingerprint(&parts);
    let kept = cache::folder("kernels").map(|folder| folder.join(format!("{name}-{key:032x}.{ending}")));
    if let Some(image) = kept.as_deref().and_then(find) {
        return Ok(image);
    }
    let image = compile()?;
    if let Some(path) = kept {
        keep(&path, &image);
    }
    Ok(image)
}

/// Reads a cached image. `None` if the file is missing or damaged, for example by a crash or a full disk.
fn find(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = fs::read(path).ok()?;
    let (image, hash) = bytes.split_last_chunk()?;
    (fingerprint(&[image]) == u128::from_le_bytes(*hash)).then(|| {
        bytes.truncate(bytes.len() - size_of::<u128>());
        bytes
    })
}

/// Writes to a temporary name first, so that ranks that compile the same file at once never read a partial file. A
/// failed write is ignored.
fn keep(path: &Path, image: &[u8]) {
    static WRITTEN: AtomicU64 = AtomicU64::new(0);
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    let unfinished = path.with_extension(format!("{}-{number}.part", std::process::id()));
    let bytes = [image, &fingerprint(&[image]).to_le_bytes()].concat();
    let folder = path.parent().map_or(Ok(()), fs::create_dir_all);
    folder.and_then(|()| output::write_whole(path, unfinished, &bytes)).ok();
}

/// FNV-1a with 128 bits, over the parts and their lengths.
fn fingerprint(parts: &[&[u8]]) -> u128 {
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    for part in parts {
        for byte in part.len().to_le_bytes().iter().chain(*part) {
            hash = (hash ^ u128::from(*byte)).wrapping_mul(PRIME);
        }
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cached_image_is_read_whole_or_not_at_all() {
        let folder = std::env::temp_dir().join(format!("kintsugi-cubin-{}", std::process::id()));
        let path = folder.join("kernel.cubin");
        assert_eq!(find(&path), None);
        let image: Vec<u8> = (0..1000_u32).map(|i| (i * i % 251) as u8).collect();
        keep(&path, &image);
        assert_eq!(find(&path).as_ref(), Some(&image));
        let whole = fs::read(&path).expect("a file");
        let mut changed = whole.clone();
        changed[500] ^= 1;
        for broken in [&whole[..999], &whole[..15], &[], &image[..], &changed[..]] {
            fs::write(&path, broken).expect("it is changed");
            assert_eq!(find(&path), None, "{} bytes", broken.len());
        }
        keep(&path, &image);
        assert_eq!(find(&path), Some(image), "what is compiled again takes its place");
        assert_eq!(fs::read_dir(&folder).expect("a folder").count(), 1, "nothing unfinished is left");
        fs::remove_dir_all(&folder).expect("it can be removed");
    }

    #[test]
    fn fingerprints_differ_by_content_and_by_where_parts_end() {
        assert_ne!(fingerprint(&[b"ab", b"c"]), fingerprint(&[b"a", b"bc"]));
        assert_ne!(fingerprint(&[b"ab"]), fingerprint(&[b"ac"]));
        assert_eq!(fingerprint(&[b"ab", b"c"]), fingerprint(&[b"ab", b"c"]));
    }
}
