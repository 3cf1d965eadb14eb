//! Plays a sheet against clocks, for several plans side by side: what `time::play` does with programs, without a name
//! or a map in its way, and without playing what `steady` can tell.

use super::lanes::Lanes;
use super::prices::{LEVELS, Prices};
use super::sheet::{Part, Repeats, Sheet, Step};
use super::stage::Stage;
use super::steady::{History, SPENT};
use super::table::Table;
use crate::time::{Spent, Totals};

/// A plan to be played: what its ops cost, and how often it does what repeats.
pub(super) struct Voice<'a> {
    pub table: &'a Table,
    pub repetitions: usize,
}

/// Plays a sheet for each plan.
pub(super) fn play(sheet: &Sheet, voices: &[Voice]) -> Vec<Totals> {
    match voices {
        [] => Vec::new(),
        [_] => Player::<1>::new(sheet, voices).play(voices),
        _ => Player::<VECTORS>::new(sheet, voices).play(voices),
    }
}

/// As many vectors of plans are played side by side as hide how long a step takes.
const VECTORS: usize = 2;

struct Player<'a, const V: usize> {
    sheet: &'a Sheet,
    prices: Prices<V>,
    now: State<V>,
}

/// How far plans have got.
struct State<const V: usize> {
    /// Waiting for transfers over each level, and what kernels took longer beside transfers.
    spent: [Lanes<V>; SPENT],
    stages: Vec<Stage<V>>,
    /// Where they are is for the sheet to know.
    moments: Vec<Lanes<V>>,
}

const SLOWED: usize = 3;

/// How far one plan has got: the numbers of a state, in order.
type Column = Vec<i64>;

/// A plan among those that are being played.
struct Seat {
    voice: usize,
    /// Repetitions that are left.
    left: usize,
    /// Repetitions that can be compared.
    played: usize,
}

impl<'a, const V: usize> Player<'a, V> {
    fn new(sheet: &'a Sheet, voices: &[Voice]) -> Self {
        let interference = voices[0].table.units.interference as i64;
        let now = State {
            spent: [Lanes::ZERO; SPENT],
            stages: vec![Stage::START; sheet.stages],
            moments: vec![Lanes::ZERO; sheet.moments],
        };
        Player { sheet, prices: Prices::new(sheet, interference), now }
    }

    fn play(mut self, voices: &[Voice]) -> Vec<Totals> {
        let mut columns = vec![vec![0; self.now.numbers().count()]; voices.len()];
        for part in &self.sheet.parts {
            match &part.repeats {
                None => self.once(part, voices, &mut columns),
                Some(repeats) => self.repeat(part, repeats, voices, &mut columns),
            }
        }
        voices.iter().zip(&columns).map(|(voice, column)| self.totals(voice, column)).collect()
    }

    fn once(&mut self, part: &Part, voices: &[Voice], columns: &mut [Column]) {
        for (voices, columns) in voices.chunks(Lanes::<V>::COUNT).zip(columns.chunks_mut(Lanes::<V>::COUNT)) {
            for (lane, (voice, column)) in voices.iter().zip(&*columns).enumerate() {
                self.sit_down(lane, voice, column);
            }
            self.prices.settle();
            self.perform(part);
            for (lane, column) in columns.iter_mut().enumerate() {
                self.get_up(lane, column);
            }
        }
    }

    /// Plays a part over and over and skips what can be told. Whoever is done leaves the seat to the next.
    fn repeat(&mut self, part: &Part, repeats: &Repeats, voices: &[Voice], columns: &mut [Column]) {
        let mut next = (0..voices.len()).filter(|&voice| voices[voice].repetitions > 0);
        let mut seats: Vec<Option<Seat>> = (0..Lanes::<V>::COUNT).map(|_| None).collect();
        let mut history = History::new(repeats.cycle);
        let mut moved = Vec::new();
        loop {
            self.skip(repeats, &history, &mut seats);
            let mut taken = false;
            for (lane, seat) in seats.iter_mut().enumerate() {
                if let Some(done) = seat.take_if(|seat| seat.left == 0) {
                    self.get_up(lane, &mut columns[done.voice]);
                }
                if seat.is_none()
                    && let Some(voice) = next.next()
                {
                    self.sit_down(lane, &voices[voice], &columns[voice]);
                    *seat = Some(Seat { voice, left: voices[voice].repetitions, played: 0 });
                    taken = true;
                }
            }
            if taken {
                self.prices.settle();
            }
            if seats.iter().all(Option::is_none) {
                return;
            }
            history.note(&self.now.spent, self.now.live(repeats));
            self.perform(part);
            moved.clear();
            moved.extend(repeats.moves.iter().map(|&(from, _)| self.now.moments[from as usize]));
            for (&(_, to), &moment) in repeats.moves.iter().zip(&moved) {
                self.now.moments[to as usize] = moment;
            }
            for seat in seats.iter_mut().flatten() {
                seat.left -= 1;
                seat.played += 1;
            }
        }
    }

    /// Takes every plan that is in a cycle to where fewer repetitions than one cycle are left.
    fn skip(&mut self, repeats: &Repeats, history: &History<V>, seats: &mut [Option<Seat>]) {
        let played: Vec<usize> =
            seats.iter().map(|seat| seat.as_ref().map_or(0, |seat| seat.played)).collect();
        let cycles = history.cycles(&played, &self.now.spent, &self.now.live(repeats));
        for (lane, (seat, cycle)) in seats.iter_mut().zip(cycles).enumerate() {
            let (Some(seat), Some(cycle)) = (seat, cycle) else { continue };
            let times = seat.left / cycle.length;
            seat.left -= times * cycle.length;
            // What is left is less than a cycle: nothing to look for.
            seat.played = 0;
            let later = [times as i64 * cycle.later].into_iter().cycle();
            let more = cycle.spent.into_iter().map(|spent| times as i64 * spent).chain(later);
            self.now.numbers_mut().zip(more).for_each(|(number, more)| number[lane] += more);
        }
    }

    fn sit_down(&mut self, lane: usize, voice: &Voice, column: &Column) {
        self.prices.set(lane, self.sheet, voice.table);
        self.now.stages.iter_mut().for_each(Stage::forget);
        self.now.numbers_mut().zip(column).for_each(|(number, &of_plan)| number[lane] = of_plan);
    }

    fn get_up(&self, lane: usize, column: &mut Column) {
        column.iter_mut().zip(self.now.numbers()).for_each(|(of_plan, number)| *of_plan = number[lane]);
    }

    /// Plays a part once.
    fn perform(&mut self, part: &Part) {
        let Player { sheet, prices, now: State { spent, stages, moments } } = self;
        let mut steps = part.steps.as_slice();
        for &(number, count) in &part.turns {
            let mut stage = stages[usize::from(number)];
            let (turn, others) = steps.split_at(count as usize);
            steps = others;
            for &step in turn {
                match step {
                    Step::Run(row) => {
                        let row = usize::from(row);
                        stage.run(row, &sheet.rows[row], prices, &mut spent[SLOWED]);
                    }
                    Step::Whole(kind) => {
                        let cost = &prices.whole[usize::from(number)][usize::from(kind)];
                        stage.run_beside(cost, prices.interference, &mut spent[SLOWED]);
                    }
                    Step::Start(transfer, moment) => {
                        // For plans without this transfer that is now, which nothing has to wait for.
                        let way = &prices.transfers[usize::from(transfer)];
                        moments[moment as usize] = stage.occupy(way) + way.time;
                    }
                    Step::Wait(transfer, moment) => {
                        let way = &prices.transfers[usize::from(transfer)];
                        if !way.exists() {
                            continue;
                        }
                        let then = stage.now.max(moments[moment as usize]);
                        for (level, spent) in spent[..LEVELS].iter_mut().enumerate() {
                            if let Some(plans) = way.over(level) {
                                *spent += (then - stage.now).only(plans);
                            }
                        }
                        stage.now = then;
                    }
                    Step::SendFirst(link, moment) => {
                        moments[moment as usize] = stage.send(&prices.links[usize::from(link)]);
                    }
                    Step::Send(link, moment) => {
                        let way = &prices.links[usize::from(link)];
                        let begin = stage.send(way).max(moments[moment as usize]);
                        moments[moment as usize] = begin + way.time;
                    }
                    Step::ExpectFirst(moment) => moments[moment as usize] = stage.now,
                    Step::Expect(link, moment) => {
                        let begin = stage.now.max(moments[moment as usize]);
                        moments[moment as usize] = begin + prices.links[usize::from(link)].time;
                    }
                    Step::Arrive(moment) => stage.now = stage.now.max(moments[moment as usize]),
                    Step::Join(joint) => {
                        let last = &mut moments[joint as usize];
                        *last = last.max(stage.now);
                    }
                    Step::Meet(joint) => {
                        let end = moments[joint as usize] + prices.joints[joint as usize];
                        stage.now = stage.now.max(end);
                    }
                }
            }
            stages[usize::from(number)] = stage;
        }
    }

    /// What all stages have spent their time on, and when the last is done.
    fn totals(&self, voice: &Voice, column: &Column) -> Totals {
        let (spent, moments) = column.split_at(SPENT);
        let stages = self.sheet.stages;
        let ends = moments[..stages * STAGE].iter().step_by(STAGE);
        let end = ends.copied().max().unwrap_or(0);
        let (mut compute, mut tensor) = (spent[SLOWED], 0);
        let mut add = |times: usize, each: Spent| {
            compute += times as i64 * each.compute as i64;
            tensor += times as i64 * each.links as i64;
        };
        for part in &self.sheet.parts {
            let times = if part.repeats.is_some() { voice.repetitions } else { 1 };
            for (spent, &runs) in voice.table.kinds.iter().zip(&part.runs) {
                add(times * runs, *spent);
            }
            for &(stage, kind) in &part.whole {
                add(times, voice.table.units.whole[usize::from(stage)][usize::from(kind)]);
            }
        }
        let [package, node, cluster] = [spent[0], spent[1], spent[2]];
        let idle = stages as i64 * end - compute - tensor - package - node - cluster;
        Totals([end, compute, tensor, package, node, cluster, idle].map(|time| time as u128))
    }
}

/// Numbers of a stage in a column, its clock first.
const STAGE: usize = 1 + 2 * LEVELS;

impl<const V: usize> State<V> {
    fn numbers(&self) -> impl Iterator<Item = &Lanes<V>> {
        let stages = self
            .stages
            .iter()
            .flat_map(|Stage { now, free, quiet, .. }| [now].into_iter().chain(free).chain(quiet));
        self.spent.iter().chain(stages).chain(&self.moments)
    }

    fn numbers_mut(&mut self) -> impl Iterator<Item = &mut Lanes<V>> {
        let stages = self
            .stages
            .iter_mut()
            .flat_map(|Stage { now, free, quiet, .. }| [now].into_iter().chain(free).chain(quiet));
        self.spent.iter_mut().chain(stages).chain(&mut self.moments)
    }

    /// The moments that matter between repetitions, as far as they do.
    fn live(&self, repeats: &Repeats) -> impl Iterator<Item = Lanes<V>> + Clone {
        let clocks = self.stages.iter().map(|stage| stage.now);
        let levels = self
            .stages
            .iter()
            .flat_map(|stage| stage.free.iter().chain(&stage.quiet).map(|busy| busy.max(stage.now)));
        let others = repeats.live.iter().map(|&(moment, asks)| {
            let moment = self.moments[moment as usize];
            asks.map_or(moment, |stage| moment.max(self.stages[usize::from(stage)].now))
        });
        clocks.chain(levels).chain(others)
    }
}
