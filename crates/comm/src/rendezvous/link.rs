//! Whether the host at the other end of a connection still gets what is sent to it.
//!
//! If a process is stopped, the system of its host acknowledges what it does not read. If the host is cut off, nobody does. So the bytes
//! that the system keeps to send them again tell a stopped process from a lost link. Linux shows their number in `/proc/net/tcp`.

use std::fs;
use std::net::{SocketAddr, TcpStream};

/// Whether something that was sent on this connection was not acknowledged yet.
pub(super) fn is_unacknowledged(stream: &TcpStream) -> bool {
    let (Ok(here), Ok(there)) = (stream.local_addr(), stream.peer_addr()) else { return false };
    let table = if here.is_ipv4() { "/proc/self/net/tcp" } else { "/proc/self/net/tcp6" };
    unacknowledged(&fs::read_to_string(table).unwrap_or_default(), here, there).is_some_and(|bytes| bytes > 0)
}

/// The bytes of a connection that were not acknowledged, according to the system's table of connections.
fn unacknowledged(table: &str, here: SocketAddr, there: SocketAddr) -> Option<u64> {
    let (here, there) = (in_table(here), in_table(there));
    table.lines().find_map(|line| {
        // A number, both addresses, the state, and the lengths of both queues: `0: 0100007F:1F90 0100007F:C350 01 0000001A:00000000 …`.
        let fields: Vec<&str> = line.split_whitespace().take(5).collect();
        let &[_, local, remote, _, queues] = &fields[..] else { return None };
        let (sent, _) = queues.split_once(':').filter(|_| local == here && remote == there)?;
        u64::from_str_radix(sent, 16).ok()
    })
}

/// An address as the table has it: words in the order of this machine, in hexadecimal.
fn in_table(address: SocketAddr) -> String {
    let word = |bytes: &[u8]| format!("{:08X}", u32::from_ne_bytes(bytes.try_into().expect("four bytes")));
    let words: String = match address {
        SocketAddr::V4(address) => word(&address.ip().octets()),
        SocketAddr::V6(address) => address.ip().octets().chunks(4).map(word).collect(),
    };
    format!("{words}:{:04X}", address.port())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn what_nobody_reads_is_acknowledged() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut stream =
            TcpStream::connect(listener.local_addr().expect("it has one")).expect("a connection");
        stream.write_all(b"a heartbeat").expect("it is sent");
        let table = fs::read_to_string("/proc/self/net/tcp").expect("Linux");
        let [here, there] =
            [stream.local_addr(), stream.peer_addr()].map(|address| address.expect("connected"));
        assert_eq!(unacknowledged(&table, here, there), Some(0), "{table}");
        assert!(!is_unacknowledged(&stream));
    }

    #[test]
    fn the_queue_is_that_of_the_connection() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
                     0: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 1 1\n   \
                     1: 01004E0A:1F90 03004E0A:C350 01 0000001A:00000000 01:00000000 00000000     0        0 1 1\n";
        let of = |here: &str, there: &str| {
            unacknowledged(table, here.parse().expect("one"), there.parse().expect("one"))
        };
        if cfg!(target_endian = "little") {
            assert_eq!(of("127.0.0.1:8080", "127.0.0.1:50000"), Some(0));
            assert_eq!(of("10.78.0.1:8080", "10.78.0.3:50000"), Some(26));
            assert_eq!(of("10.78.0.1:8080", "10.78.0.2:50000"), None);
        }
    }
}
