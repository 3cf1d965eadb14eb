//! Frames on a connection between two processes: a kind, a length, and bytes.

use std::io::{self, ErrorKind, Read, Write};
use std::time::{Duration, Instant};

/// The kinds of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Bytes of a gather or a broadcast.
    Data = 0,
    /// The process is alive.
    Heartbeat = 1,
    /// The job has failed. The bytes say why.
    Abort = 2,
    /// The process ends, and all is well.
    Goodbye = 3,
}

/// Why no frame came.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Lost {
    /// The other process closed the connection.
    Closed,
    /// Nothing came for too long.
    Silent,
}

/// Time that counts as silence between two looks: no longer, since this process may have been stopped meanwhile.
pub(super) const SLICE: Duration = Duration::from_millis(200);

/// The longest frame.
const LONGEST: u64 = 1 << 36;

pub(super) fn write(stream: &mut impl Write, kind: Kind, bytes: &[u8]) -> io::Result<()> {
    let header = [&[kind as u8][..], &(bytes.len() as u64).to_le_bytes()].concat();
    stream.write_all(&header)?;
    stream.write_all(bytes)
}

/// Reads a frame from a stream whose reads end after [`SLICE`]. Gives up after `patience` without a byte.
pub(super) fn read(stream: &mut impl Read, patience: Duration) -> Result<(Kind, Vec<u8>), Lost> {
    let mut header = [0; 9];
    fill(stream, &mut header, patience)?;
    let kind = match header[0] {
        0 => Kind::Data,
        1 => Kind::Heartbeat,
        2 => Kind::Abort,
        3 => Kind::Goodbye,
        _ => return Err(Lost::Closed),
    };
    let len = u64::from_le_bytes(header[1..].try_into().expect("eight bytes"));
    if len > LONGEST {
        return Err(Lost::Closed);
    }
    let mut bytes = vec![0; len as usize];
    fill(stream, &mut bytes, patience)?;
    Ok((kind, bytes))
}

fn fill(stream: &mut impl Read, bytes: &mut [u8], patience: Duration) -> Result<(), Lost> {
    let (mut filled, mut silence) = (0, Duration::ZERO);
    while filled < bytes.len() {
        let begun = Instant::now();
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => return Err(Lost::Closed),
            Ok(read) => (filled, silence) = (filled + read, Duration::ZERO),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                silence += begun.elapsed().min(SLICE);
                if silence >= patience {
                    return Err(Lost::Silent);
                }
            }
            Err(_) => return Err(Lost::Closed),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn frames_arrive_whole_and_an_end_or_a_silence_is_noticed() {
        let (mut one, mut other) = UnixStream::pair().expect("a pair of sockets");
        other.set_read_timeout(Some(Duration::from_millis(5))).expect("a timeout");
        write(&mut one, Kind::Data, b"words").expect("it is open");
        write(&mut one, Kind::Goodbye, b"").expect("it is open");
        let patience = Duration::from_millis(20);
        assert_eq!(read(&mut other, patience), Ok((Kind::Data, b"words".to_vec())));
        assert_eq!(read(&mut other, patience), Ok((Kind::Goodbye, Vec::new())));
        assert_eq!(read(&mut other, patience), Err(Lost::Silent));
        drop(one);
        assert_eq!(read(&mut other, patience), Err(Lost::Closed));
    }
}
