//! How two processes prove to each other that they belong to the same job.
//!
//! Both know the secret of the job. Each sends a random number, and the other answers with a keyed hash of both numbers
//! (HMAC-SHA-256). The secret itself is never sent, and an answer is of no use in another connection. The keys that authenticate
//! the frames of the connection are hashes of the same numbers.

use std::io::{self, Read, Write};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Bytes of a random number, a key, and a hash.
pub(super) const BYTES: usize = 32;

/// The key of one direction of a connection.
pub(super) type Key = [u8; BYTES];

/// The longest host name that is sent.
const MAX_HOST: usize = 255;

/// A process as it introduces itself to rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Introduction {
    pub rank: usize,
    pub size: usize,
    pub host: String,
}

/// The keys of a connection, as one end uses them.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Keys {
    pub sending: Key,
    pub receiving: Key,
}

/// Random bytes of the operating system.
pub(super) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Rank 0's side. Fails if the other process does not know the secret.
pub(super) fn admit(stream: &mut (impl Read + Write), secret: &str) -> io::Result<(Introduction, Keys)> {
    let mine: [u8; BYTES] = random()?;
    stream.write_all(&mine)?;
    let (theirs, rank, size) = (read::<BYTES>(stream)?, read_number(stream)?, read_number(stream)?);
    let mut host = vec![0; read_number(stream)?.min(MAX_HOST)];
    stream.read_exact(&mut host)?;
    let introduction = Introduction { rank, size, host: String::from_utf8_lossy(&host).into_owned() };
    let proof = read::<BYTES>(stream)?;
    if !is_authentic(secret.as_bytes(), &[b"rank", &mine, &theirs, &introduction.bytes()], &proof) {
        // An answer that proves nothing: the other process sees at once that it is refused.
        stream.write_all(&[0; BYTES])?;
        let reason = format!("it says that it is rank {rank}, but does not know the secret of the job");
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
    }
    stream.write_all(&authenticate(secret.as_bytes(), &[b"root", &theirs, &mine]))?;
    let [to_rank, to_root] = keys(secret, &mine, &theirs);
    Ok((introduction, Keys { sending: to_rank, receiving: to_root }))
}

/// The side of every other rank. Fails if the other process does not know the secret.
pub(super) fn introduce(
    stream: &mut (impl Read + Write),
    secret: &str,
    introduction: &Introduction,
) -> io::Result<Keys> {
    let (theirs, mine) = (read::<BYTES>(stream)?, random::<BYTES>()?);
    let host = introduction.sent_host();
    let numbers = [introduction.rank, introduction.size, host.len()].map(|n| (n as u64).to_le_bytes());
    let proof = authenticate(secret.as_bytes(), &[b"rank", &theirs, &mine, &introduction.bytes()]);
    stream.write_all(&[&mine, numbers.as_flattened(), host, &proof].concat())?;
    let answer = read::<BYTES>(stream)?;
    if !is_authentic(secret.as_bytes(), &[b"root", &mine, &theirs], &answer) {
        let reason = "rank 0 has another secret of the job";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
    }
    let [to_rank, to_root] = keys(secret, &theirs, &mine);
    Ok(Keys { sending: to_root, receiving: to_rank })
}

impl Introduction {
    fn sent_host(&self) -> &[u8] {
        &self.host.as_bytes()[..self.host.len().min(MAX_HOST)]
    }

    fn bytes(&self) -> Vec<u8> {
        let numbers = [self.rank, self.size].map(|number| (number as u64).to_le_bytes());
        [numbers.as_flattened(), self.sent_host()].concat()
    }
}

/// The keys of frames to the rank and to rank 0, from the random numbers of rank 0 and of the rank.
fn keys(secret: &str, root: &[u8; BYTES], rank: &[u8; BYTES]) -> [Key; 2] {
    [&b"frames to rank"[..], b"frames to root"]
        .map(|role| authenticate(secret.as_bytes(), &[role, root, rank]))
}

fn read<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn read_number(stream: &mut impl Read) -> io::Result<usize> {
    Ok(u64::from_le_bytes(read(stream)?) as usize)
}

/// The keyed hash of parts. All of them but the last have a fixed length.
pub(super) fn authenticate(key: &[u8], parts: &[&[u8]]) -> [u8; BYTES] {
    hash(key, parts).finalize().into_bytes().into()
}

/// Whether a code is the keyed hash of parts. The time that this takes does not tell where the first difference is.
pub(super) fn is_authentic(key: &[u8], parts: &[&[u8]], code: &[u8; BYTES]) -> bool {
    hash(key, parts).verify_slice(code).is_ok()
}

fn hash(key: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    let keyed = Hmac::new_from_slice(key).expect("keys of any length are allowed");
    parts.iter().fold(keyed, Mac::chain_update)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;

    fn shake_hands(secrets: [&str; 2]) -> (io::Result<(Introduction, Keys)>, io::Result<Keys>) {
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
        let (introduction, root) = admitted.expect("it knows");
        assert_eq!(introduction, Introduction { rank: 3, size: 4, host: "node".into() });
        let rank = introduced.expect("it knows");
        assert_eq!((root.sending, root.receiving), (rank.receiving, rank.sending));
        assert_ne!(root.sending, root.receiving, "a frame cannot be sent back");
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
