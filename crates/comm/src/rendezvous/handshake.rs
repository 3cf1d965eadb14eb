//! How two processes prove to each other that they belong to the same job.
//!
//! Both know the secret of the job. Each sends a random number, and the other answers with a keyed hash of both numbers
//! (HMAC-SHA-256, RFC 2104). The secret itself is never sent, and an answer is of no use in another connection.

use std::io::{self, Read, Write};

use sha2::{Digest, Sha256};

/// Bytes of a random number, and of a hash.
const BYTES: usize = 32;

/// The longest host name that is sent.
const LONGEST_HOST: usize = 255;

/// A process as it introduces itself to rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Introduction {
    pub rank: usize,
    pub size: usize,
    pub host: String,
}

/// Random bytes of the operating system.
pub(super) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Rank 0's side. Fails if the other process does not know the secret.
pub(super) fn admit(stream: &mut (impl Read + Write), secret: &str) -> io::Result<Introduction> {
    let mine: [u8; BYTES] = random()?;
    stream.write_all(&mine)?;
    let (theirs, rank, size) = (read::<BYTES>(stream)?, read_number(stream)?, read_number(stream)?);
    let mut host = vec![0; read_number(stream)?.min(LONGEST_HOST)];
    stream.read_exact(&mut host)?;
    let introduction = Introduction { rank, size, host: String::from_utf8_lossy(&host).into_owned() };
    let expected = proof(secret, "rank", &[&mine, &theirs, &introduction.bytes()]);
    if !equal(&expected, &read::<BYTES>(stream)?) {
        // An answer that proves nothing: the other process sees at once that it is refused.
        stream.write_all(&[0; BYTES])?;
        let reason = "a process that does not know KINTSUGI_SECRET has tried to join";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
    }
    stream.write_all(&proof(secret, "root", &[&theirs, &mine]))?;
    Ok(introduction)
}

/// The side of every other rank. Fails if the other process does not know the secret.
pub(super) fn introduce(
    stream: &mut (impl Read + Write),
    secret: &str,
    introduction: &Introduction,
) -> io::Result<()> {
    let (theirs, mine) = (read::<BYTES>(stream)?, random::<BYTES>()?);
    let host = &introduction.host.as_bytes()[..introduction.host.len().min(LONGEST_HOST)];
    let numbers = [introduction.rank, introduction.size, host.len()].map(|n| (n as u64).to_le_bytes());
    let proof_of_rank = proof(secret, "rank", &[&theirs, &mine, &introduction.bytes()]);
    stream.write_all(&[&mine, numbers.as_flattened(), host, &proof_of_rank].concat())?;
    if !equal(&proof(secret, "root", &[&mine, &theirs]), &read::<BYTES>(stream)?) {
        let reason = "the process at KINTSUGI_RENDEZVOUS has another KINTSUGI_SECRET";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
    }
    Ok(())
}

impl Introduction {
    fn bytes(&self) -> Vec<u8> {
        let numbers = [self.rank, self.size].map(|number| (number as u64).to_le_bytes());
        let host = &self.host.as_bytes()[..self.host.len().min(LONGEST_HOST)];
        [numbers.as_flattened(), host].concat()
    }
}

fn read<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn read_number(stream: &mut impl Read) -> io::Result<usize> {
    Ok(u64::from_le_bytes(read(stream)?) as usize)
}

/// The keyed hash of a role and what was exchanged. All parts but the last have a fixed length.
fn proof(secret: &str, role: &str, parts: &[&[u8]]) -> [u8; BYTES] {
    hmac(secret.as_bytes(), &[&[role.as_bytes()], parts].concat())
}

fn hmac(key: &[u8], parts: &[&[u8]]) -> [u8; BYTES] {
    const BLOCK: usize = 64;
    let mut padded = [0; BLOCK];
    if key.len() > BLOCK {
        padded[..BYTES].copy_from_slice(&Sha256::digest(key));
    } else {
        padded[..key.len()].copy_from_slice(key);
    }
    let keyed = |mask: u8| Sha256::new().chain_update(padded.map(|byte| byte ^ mask));
    let inner = parts.iter().fold(keyed(0x36), Digest::chain_update).finalize();
    keyed(0x5c).chain_update(inner).finalize().into()
}

/// Compares all bytes, so that the time does not tell where the first difference is.
fn equal(a: &[u8; BYTES], b: &[u8; BYTES]) -> bool {
    std::hint::black_box(a.iter().zip(b).fold(0, |different, (a, b)| different | (a ^ b))) == 0
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().concat()
    }

    #[test]
    fn the_hash_is_that_of_the_standard() {
        // Test cases 2 and 6 of RFC 4231.
        assert_eq!(
            hex(&hmac(b"Jefe", &[b"what do ya want ", b"for nothing?"])),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
        );
        assert_eq!(
            hex(&hmac(&[0xaa; 131], &[b"Test Using Larger Than Block-Size Key - Hash Key First"])),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"
        );
    }

    fn shake_hands(secrets: [&str; 2]) -> (io::Result<Introduction>, io::Result<()>) {
        let (mut root, mut other) = UnixStream::pair().expect("a pair of sockets");
        let introduction = Introduction { rank: 3, size: 4, host: "node".into() };
        thread::scope(|scope| {
            let admitted = scope.spawn(move || admit(&mut root, secrets[0]));
            let introduced = introduce(&mut other, secrets[1], &introduction);
            drop(other);
            (admitted.join().expect("no panic"), introduced)
        })
    }

    #[test]
    fn only_processes_with_the_secret_meet() {
        let (admitted, introduced) = shake_hands(["s", "s"]);
        assert_eq!(admitted.expect("it knows"), Introduction { rank: 3, size: 4, host: "node".into() });
        introduced.expect("it knows");
        let (admitted, introduced) = shake_hands(["s", "t"]);
        assert_eq!(admitted.expect_err("it does not").kind(), io::ErrorKind::PermissionDenied);
        let refused = introduced.expect_err("rank 0 has another");
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn an_impostor_of_rank_0_is_recognised() {
        let (mut root, mut other) = UnixStream::pair().expect("a pair of sockets");
        let introduction = Introduction { rank: 1, size: 2, host: "node".into() };
        thread::scope(|scope| {
            // It sends what it was sent.
            scope.spawn(move || {
                root.write_all(&[7; BYTES])?;
                let mine: [u8; BYTES] = read(&mut root)?;
                root.write_all(&mine)
            });
            let error = introduce(&mut other, "s", &introduction).expect_err("it does not know the secret");
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        });
    }
}
