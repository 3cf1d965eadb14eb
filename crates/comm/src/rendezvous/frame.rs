//! Frames on a connection between two processes: a kind, a length, bytes, and a code that authenticates them.
//!
//! The code is an HMAC over the number of the frame in its direction and all its bytes, with a key that the handshake made for
//! this connection and this direction. So nobody without the secret can send, change, repeat, reorder or drop a frame unnoticed.

use std::io::{self, ErrorKind, Read, Write};
use std::time::{Duration, Instant};

use super::handshake::{BYTES, Key, authenticate, is_authentic};
use crate::patience::SLICE;

/// The kinds of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Bytes of a gather or a broadcast.
    Data = 0,
    /// The process is alive. The bytes are its status.
    Heartbeat = 1,
    /// The job has failed. The bytes say why.
    Abort = 2,
    /// The process ends, and all is well.
    Goodbye = 3,
    /// Bytes for rank 0 that belong to no gather.
    Post = 4,
}

/// Why no frame came.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FrameError {
    /// The other process closed the connection.
    Closed,
    /// Nothing came for too long.
    Silent,
    /// What came is not a frame of the other process.
    Invalid,
}

/// The longest frame: enough for the results of a rank, traces included.
const MAX_BYTES: u64 = 1 << 30;

/// Bytes for which memory is allocated before they have come.
const PART: usize = 1 << 20;

const HEADER: usize = 9;

/// The sending end of a connection.
pub(super) struct FrameWriter {
    key: Key,
    count: u64,
}

/// The receiving end of a connection.
pub(super) struct FrameReader {
    key: Key,
    count: u64,
}

impl FrameWriter {
    pub fn new(key: Key) -> Self {
        FrameWriter { key, count: 0 }
    }

    pub fn write(&mut self, stream: &mut impl Write, kind: Kind, bytes: &[u8]) -> io::Result<()> {
        let len = bytes.len() as u64;
        if len > MAX_BYTES {
            let reason = format!("{len} bytes are too many for one exchange between processes");
            return Err(io::Error::new(ErrorKind::InvalidInput, reason));
        }
        let header = [&[kind as u8][..], &len.to_le_bytes()].concat();
        let code = authenticate(&self.key, &[&self.count.to_le_bytes(), &header, bytes]);
        self.count += 1;
        stream.write_all(&[&header, bytes, &code].concat())
    }
}

impl FrameReader {
    pub fn new(key: Key) -> Self {
        FrameReader { key, count: 0 }
    }

    /// Reads a frame from a stream whose reads end after [`SLICE`]. `silence` is told how long nothing has come, and says whether
    /// to go on.
    pub fn read(
        &mut self,
        stream: &mut impl Read,
        mut silence: impl FnMut(Duration) -> bool,
    ) -> Result<(Kind, Vec<u8>), FrameError> {
        let mut header = [0; HEADER];
        fill(stream, &mut header, &mut silence)?;
        let kind = match header[0] {
            0 => Kind::Data,
            1 => Kind::Heartbeat,
            2 => Kind::Abort,
            3 => Kind::Goodbye,
            4 => Kind::Post,
            _ => return Err(FrameError::Invalid),
        };
        let len = u64::from_le_bytes(header[1..].try_into().expect("eight bytes"));
        if len > MAX_BYTES {
            return Err(FrameError::Invalid);
        }
        let mut bytes = Vec::new();
        while bytes.len() < len as usize {
            let filled = bytes.len();
            bytes.resize((filled + PART).min(len as usize), 0);
            fill(stream, &mut bytes[filled..], &mut silence)?;
        }
        let mut code = [0; BYTES];
        fill(stream, &mut code, &mut silence)?;
        if !is_authentic(&self.key, &[&self.count.to_le_bytes(), &header, &bytes], &code) {
            return Err(FrameError::Invalid);
        }
        self.count += 1;
        Ok((kind, bytes))
    }
}

fn fill(
    stream: &mut impl Read,
    bytes: &mut [u8],
    silence: &mut impl FnMut(Duration) -> bool,
) -> Result<(), FrameError> {
    let (mut filled, mut silent) = (0, Duration::ZERO);
    while filled < bytes.len() {
        let begun = Instant::now();
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => return Err(FrameError::Closed),
            Ok(read) => {
                filled += read;
                silent = Duration::ZERO;
                silence(silent);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                silent += begun.elapsed().min(SLICE);
                if !silence(silent) {
                    return Err(FrameError::Silent);
                }
            }
            Err(_) => return Err(FrameError::Closed),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    const KEY: Key = [7; BYTES];

    fn patient(silent: Duration) -> bool {
        silent < Duration::from_millis(20)
    }

    /// The bytes of frames as they are sent.
    fn sent(frames: &[(Kind, &[u8])]) -> Vec<Vec<u8>> {
        let mut writer = FrameWriter::new(KEY);
        let write = |(kind, bytes): &(Kind, &[u8])| {
            let mut stream = Vec::new();
            writer.write(&mut stream, *kind, bytes).expect("a vector takes all");
            stream
        };
        frames.iter().map(write).collect()
    }

    #[test]
    fn frames_arrive_whole_and_an_end_or_a_silence_is_noticed() {
        let (mut one, mut other) = UnixStream::pair().expect("a pair of sockets");
        other.set_read_timeout(Some(Duration::from_millis(5))).expect("a timeout");
        let (mut writer, mut reader) = (FrameWriter::new(KEY), FrameReader::new(KEY));
        let large = vec![3; 3 << 20];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                writer.write(&mut one, Kind::Data, b"words").expect("it is open");
                writer.write(&mut one, Kind::Post, &large).expect("it is open");
                writer.write(&mut one, Kind::Goodbye, b"").expect("it is open");
            });
            assert_eq!(reader.read(&mut other, patient), Ok((Kind::Data, b"words".to_vec())));
            assert_eq!(reader.read(&mut other, patient), Ok((Kind::Post, large.clone())));
            assert_eq!(reader.read(&mut other, patient), Ok((Kind::Goodbye, Vec::new())));
        });
        assert_eq!(reader.read(&mut other, patient), Err(FrameError::Silent));
        drop(one);
        assert_eq!(reader.read(&mut other, patient), Err(FrameError::Closed));
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_before_memory_is_allocated() {
        let header = [&[0][..], &(1_u64 << 36).to_le_bytes()].concat();
        assert_eq!(FrameReader::new(KEY).read(&mut &header[..], patient), Err(FrameError::Invalid));
    }

    #[test]
    fn a_changed_repeated_or_missing_frame_is_noticed() {
        let frames = sent(&[(Kind::Data, b"one"), (Kind::Data, b"two")]);
        let mut changed = frames[0].clone();
        changed[HEADER] ^= 1;
        assert_eq!(FrameReader::new(KEY).read(&mut &changed[..], patient), Err(FrameError::Invalid));
        assert_eq!(
            FrameReader::new(KEY).read(&mut &frames[1][..], patient),
            Err(FrameError::Invalid),
            "one is missing"
        );
        let repeated = [&frames[0][..], &frames[0]].concat();
        let (mut reader, mut stream) = (FrameReader::new(KEY), &repeated[..]);
        assert_eq!(reader.read(&mut stream, patient), Ok((Kind::Data, b"one".to_vec())));
        assert_eq!(
            reader.read(&mut stream, patient),
            Err(FrameError::Invalid),
            "the second is the first again"
        );
        assert_eq!(FrameReader::new([8; BYTES]).read(&mut &frames[0][..], patient), Err(FrameError::Invalid));
    }
}
