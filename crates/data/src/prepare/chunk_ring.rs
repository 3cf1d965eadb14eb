//! The ring of chunks: a chunk is read, encoded, written in order, and reused.
//!
//! The number of chunks is fixed, so the channels need no bound: if one stage is slow, the others wait for free chunks.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;

use super::encode::{Encode, EncodedChunk};
use kintsugi_spec::Cause;

use crate::DataError;
use crate::corpus::{Input, TextChunks};

/// Reads, encodes and writes chunks on several threads.
pub(super) struct ChunkRing<'a> {
    pub(super) inputs: &'a [Input],
    pub(super) workers: usize,
    /// Bytes read from disk.
    pub(super) read: Arc<AtomicU64>,
}

/// An encoded chunk with its number, or an error.
type Done = (u64, Result<EncodedChunk, DataError>);

/// Chunks per worker: one being encoded, one ready, and two waiting to be written.
const PIECES: usize = 4;

impl ChunkRing<'_> {
    /// Reads and encodes all chunks, and calls `write` with them in order. Stops at the first error in that order.
    pub(super) fn run(
        self,
        encode: &Encode,
        mut write: impl FnMut(&EncodedChunk) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let (free, empty) = channel();
        let (full, waiting) = channel();
        let (done, finished) = channel();
        let waiting = Mutex::new(waiting);
        for _ in 0..PIECES * self.workers {
            free.send(EncodedChunk::default()).expect("the other end is here");
        }
        let no_thread = |error: io::Error| DataError::Thread { cause: Cause::new(error) };
        thread::scope(|scope| {
            for _ in 0..self.workers {
                let (waiting, done, inputs) = (&waiting, done.clone(), self.inputs);
                let encode_all = move || encode_all(*encode, inputs, waiting, &done);
                thread::Builder::new().spawn_scoped(scope, encode_all).map_err(no_thread)?;
            }
            let chunks = TextChunks::new(self.inputs, encode.key, self.read);
            let read_all = move || read_all(chunks, &empty, &full, &done);
            thread::Builder::new().spawn_scoped(scope, read_all).map_err(no_thread)?;
            in_order(&finished, move |encoded| {
                write(&encoded)?;
                // Sending fails when everything has been read and the reader has ended.
                free.send(encoded).ok();
                Ok(())
            })
            // Dropping the writer's channels here ends all threads, one after the other.
        })
    }
}

fn read_all(
    mut chunks: TextChunks,
    empty: &Receiver<EncodedChunk>,
    full: &Sender<EncodedChunk>,
    done: &Sender<Done>,
) {
    let mut number = 0;
    for mut encoded in empty {
        match chunks.next(&mut encoded.chunk) {
            Ok(true) if full.send(encoded).is_ok() => number += 1,
            Ok(_) => return,
            Err(error) => {
                done.send((number, Err(error))).ok();
                return;
            }
        }
    }
}

fn encode_all(
    encode: Encode,
    inputs: &[Input],
    waiting: &Mutex<Receiver<EncodedChunk>>,
    done: &Sender<Done>,
) {
    let mut encoder = encode.tokenizer.encoder();
    let next = || waiting.lock().expect("nobody fails while waiting").recv();
    while let Ok(mut encoded) = next() {
        let number = encoded.chunk.number;
        let result = encode.run(&mut encoder, &inputs[encoded.chunk.file], &mut encoded).map(|()| encoded);
        if done.send((number, result)).is_err() {
            return;
        }
    }
}

fn in_order(
    finished: &Receiver<Done>,
    mut each: impl FnMut(EncodedChunk) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let mut early = BTreeMap::new();
    let mut next = 0;
    for (number, result) in finished {
        early.insert(number, result);
        while let Some(result) = early.remove(&next) {
            each(result?)?;
            next += 1;
        }
    }
    Ok(())
}
