//! Finds the order of a sheet: every stage goes on until it must wait for another, as it does in a play.

use std::ops::Range;

use super::code::{Code, Joint, KINDS, Name};
use super::loops::Codes;
use super::sheet::{JOINTS, Part, Repeats, Sheet, Step};

impl Sheet {
    /// The codes in order; `None` if the stages cannot repeat together what each of them repeats.
    pub(super) fn of(codes: Codes) -> Option<Sheet> {
        let mut order = Order::new(&codes);
        let mut parts = Vec::new();
        for spans in &codes.loops {
            order.until(|stage| spans[stage].start)?;
            parts.push(order.part(None));
            parts.push(order.repeated(spans)?);
        }
        order.until(|stage| codes.stages[stage].len())?;
        parts.push(order.part(None));
        let (stages, moments) = (order.stages, order.moments as usize);
        Some(Sheet { parts, stages, moments, rows: codes.rows })
    }
}

struct Order<'a> {
    codes: &'a Codes,
    stages: usize,
    /// The next code of each stage.
    next: Vec<usize>,
    /// Stages that may get further.
    ready: Vec<usize>,
    /// All messages, a row for each kind and chunk.
    messages: Vec<Message>,
    /// Places of what nobody will ask for again.
    vacant: Vec<u32>,
    moments: u32,
    /// The places of the stages' own transfers that are under way.
    under_way: Vec<Option<u32>>,
    joined: [usize; 2],
    steps: Vec<Step>,
    turns: Vec<(u16, u32)>,
    whole: Vec<(u16, u8)>,
    /// How often each row is run in them.
    runs: Vec<usize>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Message {
    place: u32,
    sent: bool,
    expected: bool,
    /// Whether sender and receiver have waited for it.
    arrived: [bool; 2],
    waiting: Option<u16>,
}

impl Message {
    fn begun(self) -> bool {
        self.sent || self.expected
    }

    fn on_its_way(self) -> bool {
        self.sent && self.expected
    }

    fn done(self) -> bool {
        self.arrived == [true; 2]
    }
}

impl<'a> Order<'a> {
    fn new(codes: &'a Codes) -> Self {
        let stages = codes.stages.len();
        Order {
            codes,
            stages,
            next: vec![0; stages],
            ready: Vec::new(),
            messages: vec![Message::default(); 2 * codes.chunks * codes.micro_batches],
            vacant: Vec::new(),
            moments: JOINTS as u32,
            under_way: vec![None; stages * codes.transfers],
            joined: [0; 2],
            steps: Vec::new(),
            turns: Vec::new(),
            whole: Vec::new(),
            runs: vec![0; codes.rows.len()],
        }
    }

    /// The steps since the last part.
    fn part(&mut self, repeats: Option<Repeats>) -> Part {
        let steps = std::mem::take(&mut self.steps);
        let mut runs = [0; KINDS];
        for (row, times) in self.codes.rows.iter().zip(&mut self.runs) {
            for &kind in row {
                runs[usize::from(kind)] += *times;
            }
            *times = 0;
        }
        let (whole, turns) = (std::mem::take(&mut self.whole), std::mem::take(&mut self.turns));
        Part { steps, turns, runs, whole, repeats }
    }

    /// A part that every stage repeats. It leaves under way what it found under way, one period later, and in the
    /// same places.
    fn repeated(&mut self, spans: &[Range<usize>]) -> Option<Part> {
        let (before, transfers) = (self.messages_named(spans), self.under_way.clone());
        self.until(|stage| spans[stage].end)?;
        let after = self.messages_named(spans);
        let later = |(name, message): &(Name, Message)| (name.later(self.codes.period), state(message));
        let same = before.iter().map(later).eq(after.iter().map(|(name, message)| (*name, state(message))));
        let started = |transfers: &[Option<u32>]| transfers.iter().map(Option::is_some).collect::<Vec<_>>();
        if !same || started(&transfers) != started(&self.under_way) {
            return None;
        }
        let messages = after.iter().zip(&before).map(|((_, from), (_, to))| (from.place, to.place));
        let own = self.under_way.iter().flatten().copied().zip(transfers.iter().flatten().copied());
        let moves = messages.chain(own).filter(|(from, to)| from != to).collect();
        for ((name, _), (_, message)) in after.iter().zip(&before) {
            let at = self.at(*name);
            self.messages[at].place = message.place;
        }
        self.under_way = transfers;
        self.find_vacant();
        let repeats = Repeats { moves, live: self.live(), cycle: self.codes.cycle };
        Some(self.part(Some(repeats)))
    }

    /// The messages under way of those kinds that stages repeat.
    fn messages_named(&self, spans: &[Range<usize>]) -> Vec<(Name, Message)> {
        let mut named = vec![false; 2 * self.codes.chunks];
        let repeated = self.codes.stages.iter().zip(spans).flat_map(|(codes, span)| &codes[span.clone()]);
        repeated.filter_map(|code| code.message()).for_each(|name| named[usize::from(name.row)] = true);
        self.messages_under_way().filter(|(name, _)| named[usize::from(name.row)]).collect()
    }

    fn messages_under_way(&self) -> impl Iterator<Item = (Name, Message)> {
        let micro_batches = self.codes.micro_batches;
        let name =
            move |at: usize| Name { row: (at / micro_batches) as u16, micro: (at % micro_batches) as u32 };
        let begun =
            self.messages.iter().enumerate().filter(|(_, message)| message.begun() && !message.done());
        begun.map(move |(at, message)| (name(at), *message))
    }

    /// Finds the places that nothing under way has.
    fn find_vacant(&mut self) {
        let mut taken = vec![false; self.moments as usize];
        let messages = self.messages_under_way().map(|(_, message)| message.place);
        let all = messages.chain(self.under_way.iter().flatten().copied()).chain(0..JOINTS as u32);
        all.for_each(|place| taken[place as usize] = true);
        self.vacant = (0..self.moments).filter(|&place| !taken[place as usize]).collect();
    }

    /// The moments that matter now.
    fn live(&self) -> Vec<(u32, Option<u16>)> {
        let own = self.under_way.chunks(self.codes.transfers).enumerate().flat_map(|(stage, places)| {
            places.iter().flatten().map(move |&place| (place, Some(stage as u16)))
        });
        let messages = self.messages_under_way().map(|(name, message)| {
            // Where only one side will still ask, what is past for it does not matter.
            let asks = match message.arrived {
                [false, true] => Some(self.sender(name)),
                [true, false] => Some(self.receiver(name)),
                _ => None,
            };
            (message.place, asks)
        });
        own.chain(messages).collect()
    }

    /// Takes every stage up to its limit; `None` if they wait for what comes after it.
    fn until(&mut self, limit: impl Fn(usize) -> usize) -> Option<()> {
        let stages = self.codes.stages.len();
        self.ready.extend((0..stages).rev());
        while let Some(stage) = self.ready.pop() {
            self.advance(stage, limit(stage));
        }
        (0..stages).all(|stage| self.next[stage] == limit(stage)).then_some(())
    }

    /// Takes a stage on until it must wait for another.
    fn advance(&mut self, number: usize, limit: usize) {
        let (codes, stages) = (self.codes, self.codes.stages.len());
        let (stage, before) = (number as u16, self.steps.len());
        for &code in &codes.stages[number][self.next[number]..limit] {
            match code {
                Code::Run(row) => {
                    self.runs[usize::from(row)] += 1;
                    self.steps.push(Step::Run(row));
                }
                Code::Whole(kind) => {
                    self.whole.push((stage, kind));
                    self.steps.push(Step::Whole(kind));
                }
                Code::Start(transfer, own) => {
                    let own = number * codes.transfers + own as usize;
                    let place = self.under_way[own].unwrap_or_else(|| self.place());
                    self.under_way[own] = Some(place);
                    self.steps.push(Step::Start(transfer, place));
                }
                Code::Wait(transfer, own) => {
                    let own = number * codes.transfers + own as usize;
                    if let Some(place) = self.under_way[own].take() {
                        self.vacant.push(place);
                        self.steps.push(Step::Wait(transfer, place));
                    }
                }
                Code::Send(name) => {
                    let (at, link) = (self.begin(name), self.link(name));
                    let message = &mut self.messages[at];
                    message.sent = true;
                    let moment = message.place;
                    self.steps.push(if message.expected {
                        Step::Send(link, moment)
                    } else {
                        Step::SendFirst(link, moment)
                    });
                    self.ready.extend(message.waiting.take().map(usize::from));
                }
                Code::Expect(name) => {
                    let (at, link) = (self.begin(name), self.link(name));
                    let message = &mut self.messages[at];
                    message.expected = true;
                    let moment = message.place;
                    self.steps.push(if message.sent {
                        Step::Expect(link, moment)
                    } else {
                        Step::ExpectFirst(moment)
                    });
                    self.ready.extend(message.waiting.take().map(usize::from));
                }
                Code::Arrive(name) => {
                    let (at, side) = (self.at(name), usize::from(self.sender(name) != stage));
                    let message = &mut self.messages[at];
                    if !message.on_its_way() {
                        message.waiting = Some(stage);
                        break;
                    }
                    message.arrived[side] = true;
                    if message.done() {
                        self.vacant.push(message.place);
                    }
                    self.steps.push(Step::Arrive(message.place));
                }
                Code::Join(joint) => {
                    self.joined[joint as usize] += 1;
                    if self.joined[joint as usize] == all(joint, stages) {
                        self.ready.extend(0..stages);
                    }
                    self.steps.push(Step::Join(joint));
                }
                Code::Meet(joint) => {
                    if self.joined[joint as usize] < all(joint, stages) {
                        break;
                    }
                    self.steps.push(Step::Meet(joint));
                }
            }
            self.next[number] += 1;
        }
        self.turns.push((stage, (self.steps.len() - before) as u32));
    }

    /// A message, with a place from when its first side begins.
    fn begin(&mut self, name: Name) -> usize {
        let at = self.at(name);
        if !self.messages[at].begun() {
            self.messages[at].place = self.place();
        }
        at
    }

    /// A place that nothing has.
    fn place(&mut self) -> u32 {
        self.vacant.pop().unwrap_or_else(|| {
            self.moments += 1;
            self.moments - 1
        })
    }

    fn at(&self, Name { row, micro }: Name) -> usize {
        usize::from(row) * self.codes.micro_batches + micro as usize
    }

    /// The stage that a message is for: messages are named after the chunk that receives them.
    fn receiver(&self, name: Name) -> u16 {
        (usize::from(name.row) % self.codes.chunks % self.stages) as u16
    }

    /// The stage that sends a message: gradients come from the chunk after, activations from the one before.
    fn sender(&self, name: Name) -> u16 {
        let stages = self.stages as u16;
        let step = if self.back(name) { 1 } else { stages - 1 };
        (self.receiver(name) + step) % stages
    }

    fn back(&self, name: Name) -> bool {
        usize::from(name.row) >= self.codes.chunks
    }

    fn link(&self, name: Name) -> u16 {
        2 * self.sender(name) + u16::from(self.back(name))
    }
}

/// What a message has behind it.
fn state(message: &Message) -> (bool, bool, [bool; 2]) {
    (message.sent, message.expected, message.arrived)
}

/// How many stages do something together.
fn all(joint: Joint, stages: usize) -> usize {
    match joint {
        Joint::Tied => 2,
        Joint::Sum => stages,
    }
}
