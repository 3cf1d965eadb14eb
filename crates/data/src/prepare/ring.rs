//! The ring that pieces go round in: read, encoded, written in order, and used again.
//!
//! There are only so many pieces, so nothing else needs a bound: a stage that is slow leaves the others without
//! pieces to work on.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;

use super::work::{Encode, Work};
use kintsugi_spec::Cause;

use crate::DataError;
use crate::corpus::{Batches, Input};

/// What goes round.
pub(super) struct Ring<'a> {
    pub(super) inputs: &'a [Input],
    pub(super) workers: usize,
    /// Bytes read from disk.
    pub(super) read: Arc<AtomicU64>,
}

/// A piece by its number, or why there is none.
type Done = (u64, Result<Work, DataError>);

/// Pieces for every worker: one in hand, one ready, and two that wait for their turn to be written.
const PIECES: usize = 4;

impl Ring<'_> {
    /// Reads and encodes everything; `write` gets the pieces in order. The first error, in that order, ends it.
    pub(super) fn run(
        self,
        encode: &Encode,
        mut write: impl FnMut(&Work) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let (free, empty) = channel();
        let (full, waiting) = channel();
        let (done, finished) = channel();
        let waiting = Mutex::new(waiting);
        for _ in 0..PIECES * self.workers {
            free.send(Work::default()).expect("the other end is here");
        }
        let no_thread = |error: io::Error| DataError::Thread { cause: Cause::new(error) };
        thread::scope(|scope| {
            for _ in 0..self.workers {
                let (waiting, done, inputs) = (&waiting, done.clone(), self.inputs);
                let encode_all = move || encode_all(*encode, inputs, waiting, &done);
                thread::Builder::new().spawn_scoped(scope, encode_all).map_err(no_thread)?;
            }
            let batches = Batches::new(self.inputs, encode.key, self.read);
            let read_all = move || read_all(batches, &empty, &full, &done);
            thread::Builder::new().spawn_scoped(scope, read_all).map_err(no_thread)?;
            in_order(&finished, move |work| {
                write(&work)?;
                // Nobody takes it any more once everything is read.
                free.send(work).ok();
                Ok(())
            })
            // Here the writer's ends of the ring go, and with them, one after the other, all threads.
        })
    }
}

fn read_all(mut batches: Batches, empty: &Receiver<Work>, full: &Sender<Work>, done: &Sender<Done>) {
    let mut number = 0;
    for mut work in empty {
        match batches.next(&mut work.batch) {
            Ok(true) if full.send(work).is_ok() => number += 1,
            Ok(_) => return,
            Err(error) => {
                done.send((number, Err(error))).ok();
                return;
            }
        }
    }
}

fn encode_all(encode: Encode, inputs: &[Input], waiting: &Mutex<Receiver<Work>>, done: &Sender<Done>) {
    let mut encoder = encode.tokenizer.encoder();
    let next = || waiting.lock().expect("nobody fails while waiting").recv();
    while let Ok(mut work) = next() {
        let number = work.batch.number;
        let result = encode.run(&mut encoder, &inputs[work.batch.file], &mut work).map(|()| work);
        if done.send((number, result)).is_err() {
            return;
        }
    }
}

fn in_order(
    finished: &Receiver<Done>,
    mut each: impl FnMut(Work) -> Result<(), DataError>,
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
