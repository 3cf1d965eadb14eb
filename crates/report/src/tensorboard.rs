//! Event files of TensorBoard: records of TensorFlow's `TFRecord` format, each a protobuf message `tensorflow.Event`.
//!
//! A record is its length, a checksum of the length, the message, and a checksum of the message. Only scalars, texts and the
//! mark of a resumed run are written.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

/// An event file, open.
#[derive(Debug)]
pub struct EventFile {
    file: File,
    /// Bytes of the records that were written.
    length: u64,
    /// Records that could not be written yet.
    unwritten: Vec<u8>,
}

impl EventFile {
    /// Creates a file in `folder` at `time` seconds since 1970, for the steps after `steps`. Of older files in the folder,
    /// TensorBoard then ignores later steps: a resumed run does them again.
    pub fn create(folder: &Path, time: f64, steps: u64) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let host = if host.trim().is_empty() { "localhost" } else { host.trim() };
        // Readers take the files of a folder in the order of their names.
        let name = format!("events.out.tfevents.{:010}.{host}.{}", time as u64, std::process::id());
        let file = OpenOptions::new().append(true).create(true).open(folder.join(name))?;
        let length = file.metadata()?.len();
        let mut events = EventFile { file, length, unwritten: Vec::new() };
        events.write(&event(time, 0, |message| message.bytes(FILE_VERSION, b"brain.Event:2")))?;
        if steps > 0 {
            let mut session = Message::default();
            session.integer(1, SESSION_START);
            events.write(&event(time, steps + 1, |message| message.bytes(SESSION_LOG, &session.0)))?;
        }
        Ok(events)
    }

    /// Writes the values of a step.
    pub fn scalars(&mut self, time: f64, step: u64, values: &[(String, f64)]) -> io::Result<()> {
        let mut summary = Message::default();
        for (tag, number) in values {
            let mut value = Message::default();
            value.bytes(1, tag.as_bytes());
            value.float(2, *number as f32);
            summary.bytes(1, &value.0);
        }
        self.write(&event(time, step, |message| message.bytes(SUMMARY, &summary.0)))
    }

    /// Writes a text, which TensorBoard shows as Markdown.
    pub fn text(&mut self, time: f64, step: u64, tag: &str, text: &str) -> io::Result<()> {
        let mut plugin = Message::default();
        plugin.bytes(1, b"text");
        let mut metadata = Message::default();
        metadata.bytes(1, &plugin.0);
        let mut tensor = Message::default();
        tensor.integer(1, STRING_TENSOR);
        // No dimensions: one text.
        tensor.bytes(2, b"");
        tensor.bytes(8, text.as_bytes());
        let mut value = Message::default();
        value.bytes(1, format!("{tag}/text_summary").as_bytes());
        value.bytes(8, &tensor.0);
        value.bytes(9, &metadata.0);
        let mut summary = Message::default();
        summary.bytes(1, &value.0);
        self.write(&event(time, step, |message| message.bytes(SUMMARY, &summary.0)))
    }

    /// Appends a record. If it cannot be written, it is kept in memory and written with the next one.
    fn write(&mut self, message: &Message) -> io::Result<()> {
        self.unwritten.extend(record(&message.0));
        self.flush()
    }

    /// Writes the records that could not be written before. One that is written in part is removed, so that the next
    /// attempt starts after the last whole one.
    pub fn flush(&mut self) -> io::Result<()> {
        if let Err(error) = self.file.write_all(&self.unwritten) {
            self.file.set_len(self.length).ok();
            return Err(error);
        }
        self.length += self.unwritten.len() as u64;
        self.unwritten.clear();
        Ok(())
    }
}

/// Fields of `Event`.
const FILE_VERSION: u64 = 3;
const SUMMARY: u64 = 5;
const SESSION_LOG: u64 = 7;
/// `SessionLog.START`: what other files have for this step and later ones is obsolete.
const SESSION_START: u64 = 1;
/// `DT_STRING`.
const STRING_TENSOR: u64 = 7;

fn event(time: f64, step: u64, what: impl FnOnce(&mut Message)) -> Message {
    let mut message = Message::default();
    message.double(1, time);
    message.integer(2, step);
    what(&mut message);
    message
}

/// A protobuf message as it is encoded.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn integer(&mut self, field: u64, value: u64) {
        self.varint(field << 3);
        self.varint(value);
    }

    fn double(&mut self, field: u64, value: f64) {
        self.varint(field << 3 | 1);
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, value: &[u8]) {
        self.varint(field << 3 | 2);
        self.varint(value.len() as u64);
        self.0.extend(value);
    }

    fn float(&mut self, field: u64, value: f32) {
        self.varint(field << 3 | 5);
        self.0.extend(value.to_le_bytes());
    }

    /// Seven bits in a byte, the lowest first; the highest bit says that more follow.
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

fn record(message: &[u8]) -> Vec<u8> {
    let length = (message.len() as u64).to_le_bytes();
    let parts: [&[u8]; 4] =
        [&length, &checksum(&length).to_le_bytes(), message, &checksum(message).to_le_bytes()];
    parts.concat()
}

/// The masked CRC-32C of a `TFRecord`.
fn checksum(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (RFC 3720, section 12.1), bit by bit: a step has a few hundred bytes.
fn crc32c(bytes: &[u8]) -> u32 {
    let byte = |crc: u32, &byte: &u8| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg()))
    };
    !bytes.iter().fold(!0, byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_the_standard() {
        // RFC 3720, appendix B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn a_scalar_is_encoded_as_protobuf_says() {
        let mut message = Message::default();
        message.integer(2, 300);
        message.bytes(1, b"loss");
        message.float(2, 1.5);
        assert_eq!(message.0, [0x10, 0xac, 0x02, 0x0a, 4, b'l', b'o', b's', b's', 0x15, 0, 0, 0xc0, 0x3f]);
    }

    /// The messages of the only file in a folder, after checking their lengths and checksums.
    fn messages(folder: &Path) -> Vec<Vec<u8>> {
        let path = fs::read_dir(folder).expect("a folder").next().expect("a file").expect("a file").path();
        let mut bytes = &fs::read(path).expect("the events")[..];
        let mut messages = Vec::new();
        while !bytes.is_empty() {
            let size = u64::from_le_bytes(bytes[..8].try_into().expect("a length")) as usize;
            assert_eq!(bytes[..12 + size + 4], record(&bytes[12..12 + size]));
            messages.push(bytes[12..12 + size].to_vec());
            bytes = &bytes[12 + size + 4..];
        }
        messages
    }

    #[test]
    fn steps_that_could_not_be_written_are_written_later() {
        let folder = std::env::temp_dir().join(format!("kintsugi-events-later-{}", std::process::id()));
        let mut events = EventFile::create(&folder, 1.0, 0).expect("a file");
        let full = OpenOptions::new().write(true).open("/dev/full").expect("a device that is always full");
        let file = std::mem::replace(&mut events.file, full);
        for (step, name) in [(1, "one"), (2, "two")] {
            let error = events.scalars(2.0, step, &[(name.to_owned(), 2.5)]).expect_err("it is full");
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        }
        events.file = file;
        events.scalars(3.0, 3, &[("three".to_owned(), 2.5)]).expect("there is room again");
        let messages = messages(&folder);
        fs::remove_dir_all(&folder).ok();
        let has =
            |message: &[u8], name: &str| message.windows(name.len()).any(|part| part == name.as_bytes());
        assert_eq!(messages.len(), 4);
        assert!(["one", "two", "three"].iter().zip(&messages[1..]).all(|(name, message)| has(message, name)));
    }

    #[test]
    fn records_follow_each_other_and_have_their_lengths() {
        let folder = std::env::temp_dir().join(format!("kintsugi-events-{}", std::process::id()));
        let mut events = EventFile::create(&folder, 1.0, 5).expect("a file");
        events.text(2.0, 5, "config", "a = 1").expect("a text");
        events.scalars(3.0, 6, &[("loss".to_owned(), 2.5)]).expect("a step");
        let messages = messages(&folder);
        fs::remove_dir_all(&folder).ok();
        assert_eq!(messages.len(), 4);
        assert!(messages[0].ends_with(b"brain.Event:2"));
        assert!(messages[1].ends_with(&[0x3a, 2, 8, 1]), "the mark of a resumed run");
        assert!(messages[3].windows(4).any(|part| part == b"loss"));
    }
}
